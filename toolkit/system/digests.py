"""Digests of files: whether they still have the content that was written, and whether two model directories are the same.

CRC-32 for what this machine keeps for itself: it finds any flipped bit, cut or overwritten piece (another one in 4 billion
escapes it) at twice the speed of SHA-256 and more. SHA-256 for checkpoints, which travel.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DIGESTS = "digests.json"
_SEAL = b"\ncrc32 %08x\n"
_OF_A_MODEL = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".py")
_WHOLE, _PIECES, _PIECE = 16 << 20, 128, 64 << 10  # bytes, pieces of a file, bytes of a piece


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_digest() -> str:
    """SHA-256 over names and text of all of the toolkit's modules; recipes that a wheel brings along are left out: a run has
    that of its own."""
    import toolkit

    package = Path(toolkit.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] != "_recipes":
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def crc32_of(path: Path) -> str:
    piece, crc = bytearray(_PIECE), 0
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            crc = zlib.crc32(memoryview(piece)[:size], crc)
    return f"{crc:08x}"


ALGORITHMS: dict[str, Callable[[Path], str]] = {"sha256": sha256_of, "crc32": crc32_of}
_SHOWN = {"sha256": "SHA-256", "crc32": "CRC-32"}


def describe_files(folder: Path, algorithm: str) -> dict[str, dict[str, Any]]:
    """Size and digest of every file below a folder, by its path in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, algorithm: ALGORITHMS[algorithm](path)}
        for path in files
    }


def changed_files(folder: Path, expected: Mapping[str, Mapping[str, Any]], algorithm: str | None) -> list[str]:
    """What is wrong with files that `describe_files` has described, as sentences; without an algorithm sizes only."""
    problems = []
    for name, described in expected.items():
        path = folder / name
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for a writer
                problems.append(f"{path}: not a file")
            elif found.st_size != described["size"]:
                problems.append(f"{path}: {found.st_size} bytes, should be {described['size']}")
            elif algorithm and ALGORITHMS[algorithm](path) != described[algorithm]:
                problems.append(f"{path}: contents changed ({_SHOWN[algorithm]} differs)")
        except FileNotFoundError:
            problems.append(f"{path}: missing")
        except OSError as error:  # a disk that can't be read there
            problems.append(f"{path}: {error.strerror or error}")
    return problems


def write_digests(folder: Path) -> None:
    """Describe the files below a folder in a file of their own, for `damage_in`."""
    (folder / DIGESTS).write_bytes(seal(json.dumps(describe_files(folder, "crc32")).encode()))


def damage_in(folder: Path) -> str | None:
    """What is wrong with a folder since `write_digests`, None when it is as it was. Files that came later are left alone."""
    if not folder.is_dir():
        return "not a folder"
    try:
        expected = json.loads(read_sealed(folder / DIGESTS))
    except FileNotFoundError:
        return f"{DIGESTS}: missing"
    except OSError as error:
        return f"{DIGESTS}: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return f"{DIGESTS}: {error}"
    problems = changed_files(folder, expected, "crc32")
    return problems[0].removeprefix(f"{folder}{os.sep}") if problems else None


def seal(content: bytes) -> bytes:
    """The content with its CRC-32 behind it, for `read_sealed`."""
    return content + _SEAL % zlib.crc32(content)


def read_sealed(path: Path) -> bytes:
    """The content that was given to `seal` and written to a file.

    Raises:
        ValueError: it is not as it was.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a file")
    sealed = path.read_bytes()
    size = len(sealed) - len(_SEAL % 0)
    if size < 0 or sealed[size:] != _SEAL % zlib.crc32(sealed[:size]):
        raise ValueError("contents changed (CRC-32 differs)")
    return sealed[:size]


def directory_digest(directory: str | Path) -> str:
    """SHA-256 over names, sizes and contents of the configuration, tokenizer, code and weights in a directory.

    Of a file above 16 MB, so of weights, 8 MB are read: 128 pieces of 64 kB at even distances, the header and the end among
    them. Training or another type changes numbers everywhere, which shows; a single bit elsewhere would not.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(os.path.expanduser(directory)).rglob("*")):
        if path.suffix not in _OF_A_MODEL or not path.is_file():
            continue
        add_file(digest.update, path.relative_to(Path(os.path.expanduser(directory))).as_posix(), path)
    return digest.hexdigest()


def add_file(update: Callable[[bytes], object], name: str, path: Path) -> None:
    """Give a digest, by its `update`, a file: name, size, and its content or pieces of it, as `directory_digest` does."""
    size = path.stat().st_size
    update(f"{name}\0{size}\0".encode())
    with open(path, "rb") as file:
        if size <= _WHOLE:
            update(file.read())
            return
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            update(file.read(_PIECE))


def digests_of_directories(*names: str | None) -> dict[str, str]:
    """By name, the digests of those that are directories here, and of the base models of the adapters among them."""
    found: dict[str, str] = {}
    for name in names:
        if name and name not in found and Path(os.path.expanduser(name)).is_dir():
            found[name] = directory_digest(name)
            found |= digests_of_directories(_base_of(Path(os.path.expanduser(name))))
    return found


def _base_of(directory: Path) -> str | None:
    try:
        base = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(base) if base and Path(os.path.expanduser(base)).resolve() != directory.resolve() else None
