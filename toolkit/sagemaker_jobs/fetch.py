"""Bringing home what a job made: a run's directory as it would be had the run been here."""

import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.sagemaker_jobs.follow import asked, aws_client, describe


def fetch(
    name: str, region: str | None, folder: Path, *, checkpoints: bool = False, say: Callable[[str], None] = print
) -> None:
    """Copy a job's figures and its model into `folder`; with `checkpoints` these too.

    A file that is there with the same size is not copied again.

    Raises:
        Refusal: there is no such job, nothing to fetch yet, or `folder` holds a file of that name.
    """
    if folder.exists() and not folder.is_dir():
        raise Refusal(f"{folder}: is a file, not a directory.")
    job = describe(name, region)
    s3 = aws_client("s3", region)
    copied = 0
    if uri := job.get("CheckpointConfig", {}).get("S3Uri"):
        copied += asked(lambda: _copy_prefix(s3, uri, folder, checkpoints))
    model = job.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    if model and job["TrainingJobStatus"] in ("Completed", "Stopped"):
        copied += asked(lambda: _unpack(s3, model, folder / "model"))
    if not copied:
        raise Refusal(f"{name}: has left nothing in S3 yet; it is {job['TrainingJobStatus']}.")
    say(f"{copied} files in {folder}; look at them with: python -m toolkit.report {folder}")


def _copy_prefix(s3: Any, uri: str, folder: Path, checkpoints: bool) -> int:
    bucket, prefix = _parts(uri)
    prefix = prefix.rstrip("/") + "/"
    copied = 0
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            path = item["Key"].removeprefix(prefix)
            parts = Path(path).parts
            if not parts or ".." in parts or any(part.startswith(".") for part in parts):
                continue
            if parts[0] == "checkpoints" and not checkpoints:
                continue
            target = folder / path
            if target.exists() and target.stat().st_size == item["Size"] and parts[0] == "checkpoints":
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(target))
            copied += 1
    return copied


def _unpack(s3: Any, uri: str, folder: Path) -> int:
    bucket, key = _parts(uri)
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "model.tar.gz"
        try:
            s3.download_file(bucket, key, str(packed))
        except s3.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "404":  # a job without a model, or one that was stopped before it had one
                return 0
            raise
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
            return sum(member.isfile() for member in archive.getmembers())


def _parts(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
