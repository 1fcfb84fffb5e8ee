"""The ledger: every completion of a run, in its `rollouts/`, so that none is lost with its process or sampled twice.

A step is a file, `step-000012.jsonl`: a first line with which policy drew it and how, then a line for each group, with
its prompt, its completions and their rewards. While a step is sampled, each rank appends a group as soon as it is complete to a
file of its own, `step-000012.rank-0.part`; with the rewards known the step is written as a whole, and the parts are removed. A
run that was killed finds what there is by the same policy, and samples the rest.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.engines.engine import local_part
from toolkit.distributed.ranks import from_all, on_main
from toolkit.generation.distribution import SamplingSettings
from toolkit.rollouts.rollout import Rollout, groups_of
from toolkit.system.console import say
from toolkit.system.files import make_folder, write_atomically
from toolkit.system.json_lines import intact_records, parse_object, plain_json, read_lines, sealed_line

if TYPE_CHECKING:
    from accelerate import Accelerator

FOLDER = "rollouts"
SYNCED_EVERY = 1.0  # seconds: of what is appended, a crash of the machine takes no more
_SAMPLES = 64  # elements of a parameter that a policy is known by
_OF_COMPLETIONS = (
    "index", "completion", "completion_ids", "logps", "truncated", "kept", "written", "messages", "rewards", "reward",
)  # fmt: skip
_OF_A_GROUP = ("prompt", "epoch", "row", "prompt_ids")

Key = tuple[int, int]  # epoch and number of a prompt


@dataclass
class Phase:
    """The sampling of one step.

    `known`: groups that the ledger has of it, by the same policy with the same settings; `source`: the run that all of them are
    taken from, None where they are sampled. `header`: what a file of this step begins with. `sampling`: seconds in
    `sample_rollouts`, and `fresh`, the tokens that it drew in them; `began` and `saved`: when it was opened and saved.
    """

    folder: Path
    step: int
    header: dict[str, Any]
    known: dict[Key, list[Rollout]] = field(default_factory=dict)
    source: Path | None = None
    sampling: float = 0.0
    fresh: int = 0
    began: float = field(default_factory=time.monotonic)
    saved: float = math.nan
    _failed: bool = False
    _part: IO[str] | None = None
    _synced: float = 0.0

    def append(self, group: Sequence[Rollout], rank: int) -> None:
        """Add a complete group to the part of this rank. Where that can't be written, sampling goes on without."""
        if self._failed:
            return
        try:
            if self._part is None:
                make_folder(self.folder)
                self._part = _opened_part(self.folder / f"step-{self.step:06d}.rank-{rank}.part", self.header)
            self._part.write(sealed_line(_record(group)))
            self._part.flush()
            if time.monotonic() - self._synced > SYNCED_EVERY:
                os.fsync(self._part.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            self._failed = True
            say(f"WARNING: the rollouts of step {self.step} are not kept while they are sampled: {error}", error=True)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part = None


def open_phase(
    accelerator: Accelerator, model: nn.Module, output_dir: str | Path, step: int, settings: SamplingSettings, *, seed: int = 0,
    source: str | Path | None = None,
) -> Phase:  # fmt: skip
    """What the ledger of a run has of a step, for `sample_rollouts` and then `save_rollouts`. A collective.

    Args:
        output_dir: of the run.
        step: of it, from 1.
        settings, seed: that completions follow from, next to the weights and the prompt.
        source: another run's output directory. The rollouts of the steps that it has are taken from there.

    Raises:
        Refusal: `source` has no rollouts, or has this step of another policy or with other settings.
    """
    header = {"step": step, "policy": policy_version(accelerator, model), "seed": seed, "settings": asdict(settings)}
    phase = Phase(Path(output_dir) / FOLDER, step, plain_json(header))
    if source is not None:
        phase.known = on_main(accelerator, lambda: _of_source(Path(source), phase.header))
        if phase.known:
            phase.source = Path(source)
            return phase

    def find() -> dict[Key, list[Rollout]]:
        if not accelerator.is_local_main_process:
            return {}
        found: dict[Key, list[Rollout]] = {}
        for path in (_whole(phase.folder, step), *_parts(phase.folder, step)):
            first, groups, _ = read_step(path)
            if first == phase.header:
                found |= {(group[0].epoch, group[0].prompt): group for group in groups}
            elif path.suffix == ".part":
                path.unlink(missing_ok=True)
        return found

    phase.known = {key: group for of_rank in from_all(accelerator, find) for key, group in of_rank.items()}
    return phase


def save_rollouts(accelerator: Accelerator, phase: Phase, rollouts: Sequence[Rollout], limit: int | None = None) -> None:
    """Write the rollouts of a step with their rewards, whole or not at all, and remove its parts. A collective.

    A disk that takes nothing costs a warning and not the run.

    Args:
        limit: of the newest steps that are kept. None: all.
    """
    phase.close()

    def write() -> bool:
        try:
            make_folder(phase.folder)
            records = (_record([rollouts[place] for place in group]) for group in groups_of(rollouts))
            write_atomically(_whole(phase.folder, phase.step), "".join(map(sealed_line, (phase.header, *records))))
            if limit is not None:
                for step in steps_of(phase.folder.parent):
                    if step <= phase.step - limit:
                        _whole(phase.folder, step).unlink(missing_ok=True)
        except OSError as error:
            say(f"WARNING: the rollouts of step {phase.step} are not kept: {error}", error=True)
            return False
        return True

    if on_main(accelerator, write) and accelerator.is_local_main_process:
        for path in _parts(phase.folder, phase.step):
            path.unlink(missing_ok=True)
    phase.saved = time.monotonic()


def policy_version(accelerator: Accelerator, model: nn.Module) -> str:
    """A name of the weights: SHA-256 over 64 elements of each parameter, at even distances, 16 digits of it. A collective.

    Where parameters are sharded, it depends on the number of ranks too.
    """
    samples = []
    for parameter in unwrapped(model).parameters():
        flat = local_part(getattr(parameter, "ds_tensor", parameter).detach()).reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float())
    digest = hashlib.sha256(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()
    if engine_of(accelerator).shards_weights(accelerator):
        digest = hashlib.sha256("".join(from_all(accelerator, lambda: digest)).encode()).hexdigest()
    return digest[:16]


def steps_of(output_dir: str | Path) -> list[int]:
    """The steps whose rollouts a run has as a whole."""
    numbers = (path.stem.removeprefix("step-") for path in (Path(output_dir) / FOLDER).glob("step-*.jsonl"))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())  # not a copy that someone made


def rollouts_of(output_dir: str | Path, step: int) -> list[Rollout]:
    """The rollouts of a step, with the rewards they had, in the order of the training; a warning names a damaged line."""
    path = _whole(Path(output_dir) / FOLDER, step)
    header, groups, damaged = read_step(path)
    if header is None:
        say(f"WARNING: {path}: its first line, which has how it was sampled, is missing: nothing of it is taken", error=True)
    elif damaged is not None:
        say(f"WARNING: {path}:{damaged}: is cut or was changed; such lines are left out", error=True)
    return [rollout for group in groups for rollout in group]


def read_step(path: Path) -> tuple[dict[str, Any] | None, list[list[Rollout]], int | None]:
    """The first line of a file of the ledger, its groups, and the number, from 1, of the first line that was cut or changed.

    Such lines are left out.

    Raises:
        Refusal: it is there and can't be read.
    """
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise Refusal(f"{path}: can't be read ({error.strerror}). Move it away, or make it readable.") from error
    found = [next(intact_records(filter(None, [parse_object(line.decode(errors="replace"))])), None) for line in lines]
    intact, damaged = [record for record in found if record is not None], found.index(None) + 1 if None in found else None
    if not intact or "policy" not in intact[0]:
        return None, [], damaged
    return intact[0], [_group(record) for record in intact[1:] if "rollouts" in record], damaged


def _of_source(source: Path, wanted: Mapping[str, Any]) -> dict[Key, list[Rollout]]:
    """The groups of a step of another run; none where the step is behind its last one."""
    steps, step = steps_of(source), wanted["step"]
    if not steps:
        raise Refusal(f"--rollouts-from {source}: no rollouts are there. Give the output directory of a run that sampled some.")
    if step > steps[-1]:
        if step == steps[-1] + 1:
            say(f"the rollouts of {source} end with step {steps[-1]:,}: from here on they are sampled")
        return {}
    path = _whole(source / FOLDER, step)
    header, groups, damaged = read_step(path)
    if header is None:
        what = f"its rollouts of step {step:,} are missing or damaged"
        raise Refusal(f"--rollouts-from {source}: {what}. Sample anew without --rollouts-from.")
    if damaged is not None:
        raise Refusal(f"--rollouts-from {source}: {path}:{damaged} is cut or was changed. Sample anew without --rollouts-from.")
    for name, what in (("policy", "of another policy"), ("seed", "of another seed"), ("settings", "drawn with other settings")):
        if header[name] != wanted[name]:
            difference = _difference(header[name], wanted[name])
            raise Refusal(
                f"--rollouts-from {source}: its step {step:,} is {what} ({difference}). Train with the model, the data and the "
                "settings of that run, or sample anew without --rollouts-from."
            )
    return {(group[0].epoch, group[0].prompt): group for group in groups}


def _difference(there: object, here: object) -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        return ", ".join(f"{name} {there.get(name)}, here {here[name]}" for name in here if there.get(name) != here[name])
    return f"{there}, here {here}"


def _record(group: Sequence[Rollout]) -> dict[str, Any]:
    columns = [{name: getattr(rollout, name) for name in _OF_COMPLETIONS} for rollout in group]
    for completion in columns:
        completion["reward"] = None if math.isnan(completion["reward"]) else completion["reward"]
    return {**{name: getattr(group[0], name) for name in _OF_A_GROUP}, "rollouts": columns}


def _group(record: Mapping[str, Any]) -> list[Rollout]:
    shared = {name: record[name] for name in _OF_A_GROUP}
    group = [Rollout(**shared, **completion) for completion in record["rollouts"]]
    return [replace(each, reward=math.nan) if each.reward is None else each for each in group]


def _opened_part(path: Path, header: Mapping[str, Any]) -> IO[str]:
    """A part to append to: what a kill has cut is taken off its end."""
    intact = [header, *list(intact_records(read_lines(path)))[1:]]
    write_atomically(path, "".join(map(sealed_line, intact)))
    return open(path, "a", encoding="utf-8")


def _whole(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl"


def _parts(folder: Path, step: int) -> list[Path]:
    start, names = f"step-{step:06d}.rank-", sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / name for name in names if name.startswith(start) and name.endswith(".part")]
