"""Checkpoints: functions of (path, state). safetensors and JSON; nothing in one is ever unpickled.

A directory with its final name is complete: it was written beside, synced, and renamed once its manifest, with the size
and SHA-256 of every file, was on disk.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.config import Refusal
from toolkit.output import write_atomically

MANIFEST, SCHEMA = "MANIFEST.json", 1


@dataclass(frozen=True)
class State:
    """Everything needed to continue a run exactly.

    `model`: parameters and buffers by name. `optimizer`: torch's state_dict of it. `parameter_names`: of each parameter
    group, so that another order is refused and not misread. `kept`: tensors of user code. `run`: JSON data (step,
    position, tokens, best figure, memory of user code ...). `scaler`: of fp16, or empty.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    parameter_names: list[list[str]]
    run: dict[str, Any]
    scaler: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)


def capture_state(model: Any, optimizer: Any, run: dict[str, Any], scaler: Any = None, kept: Any = None) -> State:
    """The state of live objects (unwrapped), without copying it."""
    return State(
        model=_untied(model),
        optimizer=optimizer.state_dict(),
        parameter_names=_parameter_names(model, optimizer),
        run=run,
        scaler=scaler.state_dict() if scaler is not None else {},
        kept=dict(kept or {}),
    )


def apply_state(state: State, model: Any, optimizer: Any, scaler: Any = None) -> None:
    """Put a loaded state into live objects; everything is compared first, so that on an error they are as they were."""
    live = _untied(model)
    _compare("model", {name: tuple(t.shape) for name, t in live.items()}, {n: tuple(t.shape) for n, t in state.model.items()})
    if optimizer is not None and state.parameter_names != _parameter_names(model, optimizer):
        raise Refusal("the checkpoint's optimiser holds other parameters, or another order of them, than this model's.")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(state.model[name])
    if optimizer is not None:
        optimizer.load_state_dict(state.optimizer)
    if scaler is not None and state.scaler:
        scaler.load_state_dict(state.scaler)


def save_checkpoint(root: str | Path, step: int, state: State) -> Path:
    """Write `root/step-N` and return it once it is durable. The same step saved twice is written once."""
    root, final = Path(root), Path(root) / f"step-{step}"
    if final.exists() and not verify_checkpoint(final):
        return final
    from safetensors.torch import save_file

    temporary = root / f".tmp-step-{step}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        optimizer_tensors, optimizer_skeleton = flatten(state.optimizer)
        save_file(_savable(state.model), temporary / "model.safetensors")
        save_file(_savable(optimizer_tensors), temporary / "optimizer.safetensors")
        if state.kept:
            save_file(_savable(state.kept), temporary / "kept.safetensors")
        record = {
            "run": state.run, "scaler": state.scaler, "parameter_names": state.parameter_names, "optimizer": optimizer_skeleton,
        }  # fmt: skip
        (temporary / "state.json").write_text(json.dumps(record), encoding="utf-8")
        _commit(temporary, final, step)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _commit(temporary: Path, final: Path, step: int) -> None:
    files = {}
    for path in sorted(temporary.iterdir()):
        _sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": _digest(path)}
    manifest = {"schema": SCHEMA, "step": step, "files": files}
    write_atomically(temporary / MANIFEST, json.dumps({**manifest, "sha256": _digest_of(manifest)}))
    _sync(temporary)
    if final.exists():
        shutil.rmtree(final)  # the only way here with one in place: it failed its verification
    os.rename(temporary, final)
    _sync(final.parent)


def verify_checkpoint(path: str | Path, *, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint, as sentences; empty when it is whole. `contents=False` compares sizes only."""
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("sha256", None) != _digest_of(manifest):
            return [f"{path / MANIFEST}: contents changed (SHA-256 differs)"]
    except (OSError, ValueError, AttributeError) as error:
        return [f"{path / MANIFEST}: {error.__class__.__name__}, no readable manifest"]
    problems = []
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.exists():
            problems.append(f"{file}: missing")
        elif file.stat().st_size != expected["size"]:
            problems.append(f"{file}: {file.stat().st_size} bytes, should be {expected['size']}")
        elif contents and _digest(file) != expected["sha256"]:
            problems.append(f"{file}: contents changed (SHA-256 differs)")
    return problems


def list_checkpoints(root: str | Path) -> list[Path]:
    """The checkpoints under `root`, oldest first, damaged ones included."""
    named = [p for p in Path(root).glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(named, key=lambda p: int(p.name[5:]))


def latest_checkpoint(root: str | Path, say: Callable[[str], None] = print) -> Path | None:
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
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_dir():
        raise Refusal(f"no checkpoint at {path}")
    problems = verify_checkpoint(path)
    if problems:
        raise Refusal("damaged checkpoint: " + "; ".join(problems))
    if (schema := json.loads((path / MANIFEST).read_text())["schema"]) > SCHEMA:
        raise Refusal(f"{path}: written by a newer version (schema {schema}, known {SCHEMA})")
    record = json.loads((path / "state.json").read_text(encoding="utf-8"))
    kept = path / "kept.safetensors"
    return State(
        model=load_file(path / "model.safetensors"),
        optimizer=unflatten(load_file(path / "optimizer.safetensors"), record["optimizer"]),
        parameter_names=record["parameter_names"],
        run=record["run"],
        scaler=record["scaler"],
        kept=load_file(kept) if kept.exists() else {},
    )


def prune_checkpoints(root: str | Path, keep: int | None, protect: list[Path]) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and those protected; returns the removed ones.

    Nothing is removed unless the newest one is whole. A directory is renamed before it is deleted: half a checkpoint never
    bears a checkpoint's name.
    """
    checkpoints = list_checkpoints(root)
    if keep is None or not checkpoints or verify_checkpoint(checkpoints[-1], contents=False):
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
    except (OSError, ValueError, KeyError):
        return None
    return target if target.is_dir() else None


def clean_leftovers(root: str | Path) -> None:
    """Remove what dead runs left half written or half deleted."""
    for path in [*Path(root).glob(".tmp-*"), *Path(root).glob(".trash-*")]:
        shutil.rmtree(path, ignore_errors=True)


def flatten(tree: Any, path: tuple[str, ...] = ()) -> tuple[dict[str, torch.Tensor], Any]:
    """Any nesting of dicts, lists, numbers and tensors as ({name: tensor}, JSON skeleton)."""
    if isinstance(tree, torch.Tensor):
        return {"/".join(path): tree}, {"$tensor": "/".join(path)}
    if isinstance(tree, dict):
        flat = [(key, *flatten(value, (*path, str(key)))) for key, value in tree.items()]
        # pairs, not an object: JSON would turn the integer keys of an optimiser's state into strings
        return {n: t for _, tensors, _ in flat for n, t in tensors.items()}, {"$dict": [[k, s] for k, _, s in flat]}
    if isinstance(tree, (list, tuple)):
        parts = [flatten(value, (*path, str(i))) for i, value in enumerate(tree)]
        kind = "$list" if isinstance(tree, list) else "$tuple"
        return {n: t for tensors, _ in parts for n, t in tensors.items()}, {kind: [s for _, s in parts]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {}, tree
    raise TypeError(f"cannot store {'/'.join(path)}: {type(tree).__name__}")


def unflatten(tensors: dict[str, torch.Tensor], skeleton: Any) -> Any:
    """The inverse of `flatten`."""
    if not isinstance(skeleton, dict):
        return skeleton
    (kind, value), *_ = skeleton.items()
    build: dict[str, Callable[[Any], Any]] = {
        "$tensor": lambda name: tensors[name],
        "$dict": lambda pairs: {key: unflatten(tensors, part) for key, part in pairs},
        "$list": lambda parts: [unflatten(tensors, part) for part in parts],
        "$tuple": lambda parts: tuple(unflatten(tensors, part) for part in parts),
    }
    return build[kind](value)


def _untied(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each storage under its first name only: tied weights are stored once."""
    seen: set[tuple[int, int]] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        state[name] = tensor
    return state


def _parameter_names(model: Any, optimizer: Any) -> list[list[str]]:
    name = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[name[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _savable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _compare(what: str, live: dict[str, Any], stored: dict[str, Any]) -> None:
    if live == stored:
        return
    wrong = [name for name in sorted(live.keys() | stored.keys()) if live.get(name) != stored.get(name)]
    raise Refusal(f"the checkpoint does not fit this {what}: {wrong[0]} is {stored.get(wrong[0])}, here {live.get(wrong[0])}")


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
