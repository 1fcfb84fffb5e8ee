"""What a bucket may hold that fetch must not trust: names that lead elsewhere, damaged archives, files in the way."""

import gzip
import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.config import Refusal
from toolkit.sagemaker_jobs import fetch as fetching


class Bucket:
    """The three operations of S3 that fetch asks for, over a dictionary of objects by key."""

    exceptions = SimpleNamespace(ClientError=KeyError)

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def get_paginator(self, name: str) -> Any:
        def paginate(Bucket: str, Prefix: str) -> Any:
            found = [{"Key": key, "Size": len(body)} for key, body in self.objects.items() if key.startswith(Prefix)]
            return [{"Contents": found}]

        return SimpleNamespace(paginate=paginate)

    def download_file(self, bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(self.objects[key])


def fetched(monkeypatch: pytest.MonkeyPatch, folder: Path, objects: dict[str, bytes], **options: Any) -> list[str]:
    """Fetch a job whose checkpoints are below `job/` and whose model is `model.tar.gz`; what was said."""
    described = {"CheckpointConfig": {"S3Uri": "s3://bucket/job"}, "TrainingJobStatus": "Completed"}
    if "model.tar.gz" in objects:
        described["ModelArtifacts"] = {"S3ModelArtifacts": "s3://bucket/model.tar.gz"}  # type: ignore[dict-item]
    monkeypatch.setattr(fetching, "describe", lambda name, region: described)
    monkeypatch.setattr(fetching, "aws_client", lambda service, region: Bucket(objects))
    said: list[str] = []
    fetching.fetch("job", None, folder, say=said.append, **options)
    return said


def packed(files: dict[str, bytes], **links: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return content.getvalue()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["absolute", "parents", "doubled", "a NUL", "a dot"])
def test_a_key_that_leads_out_of_the_folder_is_left_there_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Fails when: the rest of a key is joined to the folder as a path: an absolute one replaces it."""
    outside = tmp_path / "outside.txt"
    key = {"absolute": f"{outside}", "parents": "a/../../outside.txt", "doubled": "a//b.txt", "a NUL": "a\0b", "a dot": "a/./b"}[form]
    said = fetched(monkeypatch, tmp_path / "here", {f"job/{key}": b"x", "job/metrics.jsonl": b"{}", "job/marker/": b""})
    assert files_below(tmp_path) == {"here/metrics.jsonl": b"{}"}
    assert any(repr(f"job/{key}") in line for line in said)


@pytest.mark.parametrize("in_the_way", ["a link out", "a file for a folder", "a folder for a file", "a long name"])
def test_what_cannot_be_written_there_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_way: str) -> None:
    """Fails when: the operating system's error comes out as a traceback, or a link is followed out of the folder."""
    folder, key = tmp_path / "here", "a/b.txt"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    if in_the_way == "a link out":
        (folder / "a").symlink_to(tmp_path / "elsewhere")
    elif in_the_way == "a file for a folder":
        (folder / "a").write_text("mine")
    elif in_the_way == "a folder for a file":
        (folder / "a/b.txt").mkdir(parents=True)
    else:
        key = f"a/{'b' * 300}.txt"
    with pytest.raises(Refusal, match=str(folder / "a")):
        fetched(monkeypatch, folder, {f"job/{key}": b"x"})
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_model_takes_the_place_of_the_one_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: it is unpacked over the old one, whose other pieces stay in between."""
    for files in ({"config.json": b"1", "model-2.safetensors": b"old"}, {"config.json": b"2", "sub/tokenizer.json": b"t"}):
        fetched(monkeypatch, tmp_path / "here", {"model.tar.gz": packed(files)})
        assert files_below(tmp_path / "here/model") == files
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["model"]


def flipped(archive: bytes, chance: random.Random) -> bytes:
    content = bytearray(archive)
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


BROKEN: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda archive, chance: archive[: chance.randrange(len(archive))],
    "a bit flipped": flipped,
    "its tar cut": lambda archive, chance: gzip.compress(gzip.decompress(archive)[: chance.randrange(1, 3000)]),
    "a bit of its tar's head flipped": lambda archive, chance: gzip.compress(flipped(gzip.decompress(archive)[:512], chance)),
    "a bit of a later head flipped": lambda archive, chance: gzip.compress(
        gzip.decompress(archive)[:1024] + flipped(gzip.decompress(archive)[1024:1100], chance) + gzip.decompress(archive)[1100:]
    ),
    "zeros in it": lambda archive, chance: archive[:40] + bytes(100) + archive[140:],
    "empty": lambda archive, chance: b"",
    "no archive": lambda archive, chance: b"<html>expired</html>",
    "a member above": lambda archive, chance: packed({"../outside.txt": b"x"}),
    "an absolute member above": lambda archive, chance: packed({"a/../../../outside.txt": b"x"}),
    "a link out": lambda archive, chance: packed({}, out="../../elsewhere"),
    "a file through a link": lambda archive, chance: packed({}, out="/etc"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_archive_is_refused_and_the_old_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """At seeded places. Fails when: an error of gzip or tarfile comes out as it is, or it is unpacked in place."""
    chance, old = random.Random(what), {"config.json": b"old"}
    body = chance.randbytes(5000)
    good = packed({"config.json": b"{}", "model.safetensors": body})
    refused = 0
    for _ in range(8):
        fetched(monkeypatch, tmp_path / "here", {"model.tar.gz": packed(old)})
        try:
            fetched(monkeypatch, tmp_path / "here", {"model.tar.gz": BROKEN[what](good, chance)})
        except Refusal as refusal:
            assert "s3://bucket/model.tar.gz" in str(refusal)  # noqa: PT017 - a flip in gzip's own fields hurts nobody
            assert files_below(tmp_path) == {"here/model/config.json": b"old"}
            refused += 1
        else:
            assert files_below(tmp_path / "here/model") == {"config.json": b"{}", "model.safetensors": body}
    assert refused >= (5 if "bit" in what else 8)
    assert not (tmp_path / "outside.txt").exists()
