"""Checkpoint directories: functions of (path, state). safetensors and JSON; nothing in one is ever unpickled.

A directory with its final name is complete: it was written next to it, synced, and renamed once its manifest, with the size
and SHA-256 of every file, was on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.system.console import say
from toolkit.system.digests import changed_files, describe_files
from toolkit.system.files import make_folder, put_in_place, write_atomically, written_next_to
from toolkit.system.sagemaker_container import in_container

if TYPE_CHECKING:
    import torch

    from toolkit.checkpoint.state import State

MANIFEST, SCHEMA = "MANIFEST.json", 1
FILES = frozenset({"state.json", *(f"{name}.safetensors" for name in ("model", "optimizer", "kept", "random"))})


def save_checkpoint(root: str | Path, step: int, state: State) -> Path:
    """Write `root/step-N` and return it once it is durable.

    The same step saved twice is written once; a damaged one of that name is replaced.

    Raises:
        OSError: no space, no permission, a broken disk ... What was there before is as it was.
    """
    from safetensors.torch import save_file

    from toolkit.checkpoint.trees import flatten

    root, final = Path(root), Path(root) / f"step-{step}"
    if final.exists() and not verify_checkpoint(final):
        return final
    temporary = root / f".tmp-step-{step}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    with written_next_to(temporary):
        make_folder(root)
        temporary.mkdir()
        _check_space(root, state.size)
        trees = {"optimizer": state.optimizer, "random": state.random, "kept": state.kept}
        flat = {name: flatten(tree) for name, tree in trees.items()}
        files = {"model": state.model, **{name: tensors for name, (tensors, _) in flat.items()}}
        for name, tensors in files.items():
            # the mark that transformers leaves: a model directory can then have the very same file
            save_file(_savable(tensors), temporary / f"{name}.safetensors", metadata={"format": "pt"})
        record = {
            "run": state.run, "scaler": state.scaler, "parameter_names": state.parameter_names, "base": state.base,
            **{name: skeleton for name, (_, skeleton) in flat.items()},
        }  # fmt: skip
        (temporary / "state.json").write_text(json.dumps(record), encoding="utf-8")
        _commit(temporary, final, step)
    return final


def _commit(temporary: Path, final: Path, step: int) -> None:
    manifest = {"schema": SCHEMA, "step": step, "files": describe_files(temporary, "sha256")}
    write_atomically(temporary / MANIFEST, json.dumps({**manifest, "sha256": _digest_of(manifest)}))
    # the only way here with one of this name in place: it failed its verification
    put_in_place(temporary, final, aside=final.with_name(f".trash-{final.name}-{os.getpid()}"))


def verify_checkpoint(path: str | Path, *, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint, as sentences; empty when it is whole. `contents=False` compares sizes only."""
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("sha256", None) != _digest_of(manifest):
            return [f"{path / MANIFEST}: contents changed (SHA-256 differs)"]
        if wrong := _wrong_fields(manifest, path):
            return [f"{path / MANIFEST}: {wrong}"]
        expected_files = dict(manifest["files"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        return [f"{path / MANIFEST}: {error.__class__.__name__}, no readable manifest"]
    return changed_files(path, expected_files, "sha256" if contents else None)


def _wrong_fields(manifest: dict[str, Any], path: Path) -> str:
    """What keeps a manifest from being one of a checkpoint, whatever its digest is; empty where nothing does."""
    if not isinstance(manifest.get("schema"), int) or not isinstance(manifest.get("files"), dict):
        return "its fields schema and files are not a number and a list of files"
    if manifest["schema"] > SCHEMA:
        return ""  # another version's: what belongs to it is not known here
    if f"step-{manifest.get('step')}" != path.name and path.name.startswith("step-"):
        return f"it is that of step {manifest.get('step')}"
    for name, expected in manifest["files"].items():
        if os.path.basename(name) != name or not isinstance(expected, dict):
            return f"it lists {name!r}, which is no file of a checkpoint"
        if not isinstance(expected.get("size"), int) or not isinstance(expected.get("sha256"), str):
            return f"it gives no size and digest of {name}"
    lacking = FILES - manifest["files"].keys()
    return f"it lists no {', '.join(sorted(lacking))}" if lacking else ""


def list_checkpoints(root: str | Path) -> list[Path]:
    """The checkpoints under `root`, oldest first, damaged ones included."""
    named = [p for p in Path(root).glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(named, key=lambda p: int(p.name[5:]))


def latest_checkpoint(root: str | Path, say: Callable[[str], None] = say) -> Path | None:
    """The newest whole checkpoint under `root`; every one skipped is named with the reason."""
    for path in reversed(list_checkpoints(root)):
        problems = verify_checkpoint(path)
        if not problems:
            return path
        say(f"checkpoint {path} is damaged and skipped: {'; '.join(problems)}")
    return None


def load_checkpoint(path: str | Path) -> State:
    """Read and check a whole checkpoint into memory; touches no live object.

    Raises:
        Refusal: a file is missing or damaged, or the schema is newer than this version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from toolkit.checkpoint.state import State
    from toolkit.checkpoint.trees import unflatten

    path = Path(path)
    if not path.is_dir():
        raise Refusal(f"no checkpoint at {path}")
    problems = verify_checkpoint(path)
    if problems:
        raise Refusal("damaged checkpoint: " + "; ".join(problems))
    if (schema := json.loads((path / MANIFEST).read_text())["schema"]) > SCHEMA:
        raise Refusal(f"{path}: written by a newer version (schema {schema}, known {SCHEMA})")
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
        kept = load_file(path / "kept.safetensors")
        return State(
            model=load_file(path / "model.safetensors"),
            optimizer=unflatten(load_file(path / "optimizer.safetensors"), record["optimizer"]),
            parameter_names=record["parameter_names"],
            run=record["run"],
            scaler=record["scaler"],
            # before run.keep took dictionaries there was no skeleton
            kept=unflatten(kept, record["kept"]) if "kept" in record else kept,
            random=unflatten(load_file(path / "random.safetensors"), record["random"]),
            base=record["base"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError) as error:
        # its digests are those of its manifest: it was written so, or both were changed
        raise Refusal(f"{path}: holds no state of a run ({type(error).__name__}: {error}). Take another checkpoint.") from error


def prune_checkpoints(root: str | Path, keep: int | None, protect: list[Path]) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and those protected; returns the removed ones.

    Nothing is removed unless the newest one is whole, every byte of it. A directory is renamed before it is deleted: half a
    checkpoint never has a checkpoint's name.
    """
    checkpoints = list_checkpoints(root)
    if keep is None or len(checkpoints) <= keep or verify_checkpoint(checkpoints[-1]):
        return []
    protected = {path.resolve() for path in protect}
    removed = [path for path in checkpoints[:-keep] if path.resolve() not in protected]
    for path in removed:
        trash = path.with_name(f".trash-{path.name}")
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)
    return removed


def write_pointer(root: str | Path, name: str, checkpoint: Path) -> None:
    """Let `best` or `last` name a checkpoint: a small JSON file, since not every file system has links."""
    write_atomically(Path(root) / f"{name}.json", json.dumps({"checkpoint": checkpoint.name}))


def read_pointer(root: str | Path, name: str) -> Path | None:
    """The checkpoint that `best` or `last` names, if it is there."""
    try:
        target = Path(root) / json.loads((Path(root) / f"{name}.json").read_text())["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return target if target.is_dir() else None


def set_aside_later(root: str | Path, step: int, best_step: int | None) -> list[Path]:
    """Rename the checkpoints after `step`: a run that resumes from there makes others of the same names. Returns new names.

    The pointers that showed one of them are removed, and `best` too where it isn't that of `best_step`.
    """
    moved = []
    for path in reversed(list_checkpoints(root)):  # the newest first: a kill in between leaves none newer than the chosen one
        if int(path.name[5:]) > step:
            number = next(n for n in range(1, 1_000_000) if not path.with_name(f"superseded-{n}-{path.name}").exists())
            moved.append(path.rename(path.with_name(f"superseded-{number}-{path.name}")))
    for name in ("best", "last"):
        target = read_pointer(root, name)
        if target is None or (name == "best" and target.name != f"step-{best_step}"):
            (Path(root) / f"{name}.json").unlink(missing_ok=True)
    return moved


def clean_leftovers(root: str | Path) -> None:
    """Remove what dead runs left half written or half deleted."""
    for path in [*Path(root).glob(".tmp-*"), *Path(root).glob(".trash-*")]:
        shutil.rmtree(path, ignore_errors=True)
    # S3 holds files, not folders: of a SageMaker machine that was taken away, half a checkpoint may have been copied there.
    for path in list_checkpoints(root) if in_container() else []:
        problems = verify_checkpoint(path, contents=False)
        if problems:
            say(f"checkpoint {path} came back from S3 in part and is removed: {problems[0]}")
            shutil.rmtree(path, ignore_errors=True)


def _check_space(root: Path, size: int) -> None:
    """Half a checkpoint on a full disk helps nobody: it isn't begun. `size` in bytes; a tenth is added for the file system."""
    free, needed = shutil.disk_usage(root).free, int(1.1 * size) + 1_000_000
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free / 1e6:,.0f} MB free where the checkpoint needs {needed / 1e6:,.0f} MB", str(root))


def _savable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU, each in memory of its own: safetensors refuses two names for one storage, as tied weights have in a copy."""
    result: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        saved = tensor.detach().cpu().contiguous()
        address = saved.untyped_storage().data_ptr()
        result[name] = saved.clone() if address in seen else saved
        seen.add(address)
    return result


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
