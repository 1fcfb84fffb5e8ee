"""Bringing home what a job made: a run's directory as it would be had the run been here."""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.sagemaker_jobs.follow import asked, aws_client, describe
from toolkit.system.console import as_typed
from toolkit.system.files import make_folder, put_in_place, remove, temporary_folder, written_next_to


def fetch(
    name: str, region: str | None, folder: Path, *, checkpoints: bool = False, say: Callable[[str], None] = print
) -> None:
    """Copy a job's metrics and its model into `folder`; with `checkpoints` these too.

    A file that is there with the same size is not copied again.

    Raises:
        Refusal: there is no such job, nothing to fetch yet, `folder` holds a file of that name, the packed model is damaged or
            would be unpacked outside its folder, or a file can't be written here.
    """
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder}: is a file, not a directory.")
    job = describe(name, region)
    s3 = aws_client("s3", region)
    copied = 0
    if uri := job.get("CheckpointConfig", {}).get("S3Uri"):
        copied += asked(lambda: _copy_prefix(s3, uri, folder, checkpoints, say))
    model = job.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    if model and job["TrainingJobStatus"] in ("Completed", "Stopped"):
        copied += asked(lambda: _unpack(s3, model, folder / "model"))
    if not copied:
        raise Refusal(f"{name}: has left nothing in S3 yet; it is {job['TrainingJobStatus']}.")
    say(f"{copied} files in {folder}; look at them with: {as_typed('toolkit', 'report', folder)}")


def _copy_prefix(s3: Any, uri: str, folder: Path, checkpoints: bool, say: Callable[[str], None]) -> int:
    bucket, prefix = _parts(uri)
    prefix = prefix.rstrip("/") + "/"
    copied = 0
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            path = item["Key"].removeprefix(prefix)
            parts = path.split("/")
            if not _is_below(parts):
                say(f"left in S3: {item['Key']!r} is no name of a file below {folder}")
                continue
            is_ours = any(part.startswith(".") for part in parts) or parts[-1] == ""
            if is_ours or (parts[0] == "checkpoints" and not checkpoints):
                continue
            target = folder.joinpath(*parts)
            if not target.resolve().is_relative_to(folder.resolve()):
                raise Refusal(f"{target}: leads out of {folder} by a link. Name another folder, or remove the link.")
            if target.exists() and target.stat().st_size == item["Size"] and parts[0] == "checkpoints":
                continue
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, item["Key"], str(target))
            except OSError as error:
                raise Refusal(f"{target}: can't be written: {error.strerror or error}") from error
            copied += 1
    return copied


def _is_below(parts: list[str]) -> bool:
    """Whether the parts of a key are the way to a file (or a marker of a folder, with an empty name) below a folder.

    A key is any text: with a second slash at its beginning it is absolute, and joined to a folder leads out of it.
    """
    return "" not in parts[:-1] and not {".", ".."}.intersection(parts) and not any("\0" in part for part in parts)


def _unpack(s3: Any, uri: str, folder: Path) -> int:
    bucket, key = _parts(uri)
    with temporary_folder("fetch") as temporary:
        packed = temporary / "model.tar.gz"
        try:
            s3.download_file(bucket, key, str(packed))
        except OSError as error:
            raise Refusal(f"{uri}: can't be copied to {temporary}: {error.strerror or error}") from error
        except s3.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "404":  # a job without a model, or one that was stopped before it had one
                return 0
            raise
        return _extract(packed, folder, uri)


def _extract(packed: Path, folder: Path, uri: str) -> int:
    """Unpack next to the folder and take its place when all of it is there; returns the number of files.

    Raises:
        Refusal: what is packed is damaged, leads out of the folder, or can't be written; what was there stays.
    """
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder}: is a file, not a directory.")
    temporary, aside = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    try:
        make_folder(folder.parent)
        remove(temporary)
        with written_next_to(temporary):
            temporary.mkdir()
            with tarfile.open(packed) as archive:
                archive.extractall(temporary, filter="data")
                _check_to_its_end(archive)
                files = sum(member.isfile() for member in archive.getmembers())
            put_in_place(temporary, folder, aside)
        return files
    except tarfile.FilterError as error:
        raise Refusal(f"{uri}: is not unpacked: {error}. What was in {folder} stays.") from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise Refusal(f"{uri}: is damaged, or no tar.gz: {reason}. What was in {folder} stays; fetch it again.") from error
    except OSError as error:
        raise Refusal(f"{folder}: can't be written: {error.strerror or error}") from error


def _check_to_its_end(archive: tarfile.TarFile) -> None:
    """Refuse an archive without its end, which tarfile takes for whole, and one that gzip's checksum at its end refuses."""
    source = archive.fileobj
    assert source is not None
    source.seek(archive.offset)
    if source.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"it breaks off or is overwritten at byte {archive.offset:,}")
    while source.read(1 << 20):
        pass


def _parts(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
