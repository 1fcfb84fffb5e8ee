"""Which files go to the Hub: those of a model or a checkpoint, by name. Other files next to them stay here."""

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

_OF_A_MODEL = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
)  # fmt: skip
_MEANT = (
    *_OF_A_MODEL, *(f"base/{name}" for name in _OF_A_MODEL),
    "adapter_config.json", "adapter_model.safetensors", "model_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]_*/config.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py",
    "video_processing_*.py", "feature_extraction_*.py",
    "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
# Removed from the repository if a new model doesn't have them: from_pretrained would read the old ones.
_REPLACED = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_config.json",
    "adapter_model.safetensors",
)  # fmt: skip
LAST_CHECKPOINT, WEIGHTS = "last-checkpoint", "model.safetensors"


def model_files(directory: Path) -> dict[str, Path]:
    """The files of a model directory that are meant for the Hub, by their path in the repository. Links aren't followed."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and not path.is_symlink() and any(_matches(name, pattern) for pattern in _MEANT):
            found[name] = path
    return found


def is_model(directory: Path) -> bool:
    """Whether from_pretrained of transformers or peft reads this directory."""
    return bool({"config.json", "adapter_config.json"} & model_files(directory).keys())


def checkpoint_files(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint, as its manifest lists them, by their path in the repository."""
    listed = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    return {f"{LAST_CHECKPOINT}/{name}": checkpoint / name for name in ("MANIFEST.json", *listed)}


def collect(files: Mapping[str, Path], into: Path) -> None:
    """Put files under a folder: tensors as hard links if the file system has them, the rest as copies."""
    for name, source in files.items():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".safetensors":
            with contextlib.suppress(OSError):  # another file system, or one without links
                os.link(source, target)
                continue
        shutil.copyfile(source, target)


def has_same_tensors(one: Path, other: Path) -> bool:
    """Whether two safetensors files exist and have the same header: names, types, shapes and offsets of all tensors."""
    return one.is_file() and other.is_file() and _header(one) == _header(other)


def _header(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def left_behind(in_repository: Collection[str], sent: Collection[str]) -> list[str]:
    """Files of an earlier model or checkpoint in a repository that would be read with those that are sent."""
    found = [name for name in in_repository if name not in sent]
    of_model, of_checkpoint = list[str](), list[str]()
    if not {"config.json", "adapter_config.json"}.isdisjoint(sent):
        of_model = [name for name in found if any(_matches(name, pattern) for pattern in _REPLACED)]
    if f"{LAST_CHECKPOINT}/MANIFEST.json" in sent:
        of_checkpoint = [name for name in found if name.startswith(f"{LAST_CHECKPOINT}/")]
    return of_model + of_checkpoint


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = PurePosixPath(name).parts, PurePosixPath(pattern).parts
    return len(parts) == len(patterns) and all(fnmatchcase(part, each) for part, each in zip(parts, patterns, strict=True))
