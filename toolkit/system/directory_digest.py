"""Whether the files of a model directory are those of before: a digest that costs milliseconds for weights of any size."""

import hashlib
import json
from pathlib import Path
from typing import Any

_OF_A_MODEL = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".py")
_WHOLE, _PIECES, _PIECE = 16 << 20, 128, 64 << 10  # bytes, pieces of a file, bytes of a piece


def directory_digest(directory: str | Path) -> str:
    """SHA-256 over names, sizes and contents of the configuration, tokenizer, code and weights in a directory.

    Of a file above 16 MB, so of weights, 8 MB are read: 128 pieces of 64 kB at even distances, the header and the end among
    them. Training or another type changes numbers everywhere, which shows; a single bit elsewhere would not.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(directory).expanduser().rglob("*")):
        if path.suffix not in _OF_A_MODEL or not path.is_file():
            continue
        add_file(digest, path.relative_to(Path(directory).expanduser()).as_posix(), path)
    return digest.hexdigest()


def add_file(digest: Any, name: str, path: Path) -> None:
    """Let a digest know of a file: its name, its size, and its content or pieces of it, as `directory_digest` says."""
    size = path.stat().st_size
    digest.update(f"{name}\0{size}\0".encode())
    with open(path, "rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
            return
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))


def digests_of_directories(*names: str | None) -> dict[str, str]:
    """By name, the digests of those that are directories here, and of the bases that adapters among them stand on."""
    found: dict[str, str] = {}
    for name in names:
        if name and name not in found and Path(name).expanduser().is_dir():
            found[name] = directory_digest(name)
            found |= digests_of_directories(_base_of(Path(name).expanduser()))
    return found


def _base_of(directory: Path) -> str | None:
    try:
        base = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(base) if base and Path(base).expanduser().resolve() != directory.resolve() else None
