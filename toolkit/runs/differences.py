"""Where two runs that should be one and the same differ: in what they logged, final checkpoints, model directories."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import parse_json, read_text_file
from toolkit.system.console import one_line
from toolkit.system.json_lines import read_lines
from toolkit.system.progress import with_progress

if TYPE_CHECKING:
    import torch

# Logged with each event, and different in two runs that are the same: what a clock or the operating system measured.
_MEASURED = frozenset({"time", "seconds", "mfu", "data_wait", "peak_memory_gb"})
_PLACE = frozenset({"step"})  # of an event, by which its metrics are compared


def logged_losses(output_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of each logging event, in the order in which they were written."""
    return [(event["step"], _number(event["loss"])) for event in read_lines(output_dir / "metrics.jsonl") if "loss" in event]


def logged_metrics(output_dir: Path) -> dict[str, list[tuple[int, Any]]]:
    """By name, (step, value) of everything in metrics.jsonl but what a clock measured, in the order of the file."""
    series: dict[str, list[tuple[int, Any]]] = {}
    for event in read_lines(output_dir / "metrics.jsonl"):
        for name, value in event.items():
            if name not in _PLACE and is_repeatable(name):
                series.setdefault(name, []).append((event["step"], value))
    return series


def metric_differences(one: Path, other: Path) -> dict[str, tuple[int, str, str]]:
    """By name, the first difference of each logged metric of two output directories, to the last bit: (step, value, value)."""
    ours, theirs = logged_metrics(one), logged_metrics(other)
    found = {}
    for name in dict.fromkeys([*ours, *theirs]):
        first, second = ours.get(name, []), theirs.get(name, [])
        at = next((i for i in range(max(len(first), len(second))) if repr(first[i : i + 1]) != repr(second[i : i + 1])), None)
        if at is not None:
            step = min(series[at][0] for series in (first, second) if at < len(series))
            a, b = (dict(series[at : at + 1]).get(step, "not logged") for series in (first, second))
            found[name] = step, "null" if a is None else str(a), "null" if b is None else str(b)
    return found


def summary_differences(one: Path, other: Path) -> list[str]:
    """The values of summary.json that differ, but for what a clock or the operating system measured."""
    ours, theirs = (read_summary(each) for each in (one, other))
    missing = "nothing"
    return [
        f"{name}: {ours.get(name, missing)} and {theirs.get(name, missing)}"
        for name in dict.fromkeys([*ours, *theirs])
        if repr(ours.get(name, missing)) != repr(theirs.get(name, missing))
    ]


def read_summary(output_dir: Path) -> dict[str, Any]:
    """The values of summary.json that a repeated run has again; empty where there is no such file."""
    path = output_dir / "summary.json"
    loaded = parse_json(read_text_file(path, str(path)), str(path), is_file=True) if path.exists() else {}
    if not isinstance(loaded, dict):
        raise Refusal(f"{path}: is not a JSON object, and so not what the run wrote. Bring the file back from a copy.")
    return {name: value for name, value in loaded.items() if is_repeatable(name)}


def is_repeatable(name: str) -> bool:
    """Whether a metric of this name is the same in two runs that are the same: not a time, a rate or the memory in use."""
    return name not in _MEASURED and not name.endswith(("_per_second", "_seconds"))


def losses_of_the_same_steps(one: Path, other: Path) -> list[tuple[int, float, float]]:
    """(step, loss in the one, loss in the other) of each logging event that is the mean over the same steps in both.

    That is: the event before it was of the same step in both as well. Two runs that differ in how often they log, or in
    which a resume changed that, have fewer such events than each has.
    """
    ours, theirs = _losses_by_steps(one), _losses_by_steps(other)
    return [(steps[1], ours[steps], theirs[steps]) for steps in ours if steps in theirs]


def first_checkpoint_difference(one: Path, other: Path) -> str | None:
    """What differs first in the final checkpoints of two output directories: model and what was kept, then optimizer.

    Raises:
        Refusal: a final checkpoint is damaged.
    """
    from toolkit.checkpoint import flatten, list_checkpoints, load_checkpoint

    final = [list_checkpoints(output_dir / "checkpoints") for output_dir in (one, other)]
    names = [found[-1].name if found else "no checkpoint" for found in final]
    if names[0] != names[1] or not final[0]:
        return f"final checkpoints: {names[0]} and {names[1]}"
    skeletons = [flatten(load_checkpoint(found[-1]).optimizer)[1] for found in final]
    _, difference = weights_difference(final[0][-1], final[1][-1])
    if difference is not None:
        return str(difference)
    is_same = skeletons[0] == skeletons[1]
    return None if is_same else "optimizer: its numbers next to the tensors, such as a rate or a step count"


class TensorDifference(NamedTuple):
    """The first tensor that differs: its type and shape in each of the two places where these differ; how far apart it is."""

    name: str
    values: tuple[str | None, str | None]
    about: str

    def __str__(self) -> str:
        kinds = f"{self.values[0]} and {self.values[1]}; " if self.values[0] else ""
        return f"{self.name}: {kinds}{self.about}"


def weights_difference(one: Path, other: Path) -> tuple[int, TensorDifference | None]:
    """How many tensors of two folders were compared bit for bit, and the first that differs, by name; files don't matter.

    One tensor of each is in memory at a time. Of a checkpoint the model comes first, then the optimizer.

    Raises:
        Refusal: a file of weights can't be read.
    """
    ours, theirs = _places_of_tensors(one), _places_of_tensors(other)
    first, count, differing = None, 0, 0
    names = sorted(ours.keys() | theirs.keys(), key=lambda name: (name.startswith("optimizer "), _in_numbers(name)))
    for name in with_progress(names, "Comparing", "tensors", len(names), lambda _: 1):
        a, b = (_read_tensor(*places[name]) if name in places else None for places in (ours, theirs))
        count += 1
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            found = TensorDifference(name, (_kind(a), _kind(b)), "")
        elif said := tensor_difference(a, b):
            found = TensorDifference(name, (None, None), f"{said}; ")
        else:
            continue
        differing += 1
        first = first or found
    if first is None:
        return count, None
    return count, first._replace(about=f"{first.about}{differing} of {len(names)} tensors differ")


def directory_differences(one: Path, other: Path) -> list[str]:
    """What differs in two model directories: the first tensor, and every other file whose content is not the same.

    A model card names the output directory it was written in; with that name as it is in the other one, it is compared too.
    """
    names = [{path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    found = [f"{name}: in one of the two alone" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        if name.endswith(".safetensors"):
            continue
        ours, theirs = (folder.joinpath(name).read_bytes() for folder in (one, other))
        if name.endswith("README.md"):
            theirs = theirs.replace(other.parent.name.encode(), one.parent.name.encode())
        if ours != theirs:
            found.append(f"{name}: the contents differ")
    _, difference = weights_difference(one, other)
    return [*found, *([str(difference)] if difference else [])]


def _losses_by_steps(output_dir: Path) -> dict[tuple[int, int], float]:
    """By the last step before those an event is the mean of, and the last of them."""
    logged = logged_losses(output_dir)
    before = [0, *(step for step, _ in logged)]
    return {(start, step): loss for start, (step, loss) in zip(before, logged, strict=False)}


def tensor_difference(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """In words, None where all bits are the same: so a NaN equals itself, and 0.0 does not equal -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
    differs = (_bytes(one) != _bytes(other)).any(dim=1)
    if not differs.any():
        return None
    distance = (one.reshape(-1)[differs].double() - other.reshape(-1)[differs].double()).abs().max().item()
    return f"largest difference {distance:.3g}, {int(differs.sum())} of {one.numel()} numbers differ"


def _places_of_tensors(folder: Path) -> dict[str, tuple[Path, str]]:
    """By name the file of each tensor and its key there; of an optimizer with that word before it, below the folder with its
    own folder's name. The generators' states are left out."""
    found: dict[str, tuple[Path, str]] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        if path.name != "random.safetensors":
            before = "optimizer " if path.name == "optimizer.safetensors" else ""
            before += "".join(f"{part}/" for part in path.parent.relative_to(folder).parts)
            found |= {before + name: (path, name) for name in _opened(path, lambda file: list(file.keys()))}
    return found


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    return _opened(path, lambda file: file.get_tensor(name))


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def _opened(path: Path, read: Callable[[Any], Any]) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except (SafetensorError, OSError, ValueError) as error:
        why = one_line(str(error), 100)
        raise Refusal(f"{path}: is damaged or can't be read ({why}): its tensors are not compared") from error


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[numbers, bytes of each]"""
    import torch

    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _number(loss: float | None) -> float:
    return math.nan if loss is None else float(loss)  # JSON has no word for a loss that is not finite
