"""Where two runs differ, from what they wrote: settings, environment, data, logged metrics and tensors.

Only files are read, and any may be missing or damaged: what can't be compared is a note.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toolkit.config
from toolkit.config import Refusal, read_config_file, settings_of
from toolkit.report.reading import RunRecord, check_runs, read_run
from toolkit.runs.differences import is_repeatable, weights_difference
from toolkit.system.console import as_typed, one_line

STAGES = ("setting", "environment", "model", "data", "step", "loss", "tensor", "result")
ABSENT = "absent"  # in place of a value that one of the two runs does not have
HIDDEN = "not shown"  # a text of a recipe's own setting, which may be a key
# Settings that name places or what the run is called: two runs that are the same differ in them.
_PLACES = frozenset({"output_dir", "overwrite_output_dir", "resume", "run_name", "report_to", "push_to_hub", "allow_change"})
# Panels of config.yaml whose settings only runs of one kind have.
_TASKS = frozenset({
    "Classification", "Preference loss", "Unpaired loss", "Policy ratios", "Embeddings", "Masks", "Question answering",
    "Ranking", "Reward model", "Source and target", "Token classification",
})  # fmt: skip
_FIRST_METRICS = ("learning_rate", "loss", "grad_norm")
_WHEN_LOGGED = {"logging_steps", "logging_strategy", "eval_steps", "eval_strategy", "eval_on_start", "eval_delay"}
_NOT_COMPARED = frozenset({"step", "epoch"})
# By section of run.json, what is compared; None: all of it.
_ENVIRONMENT: Mapping[str, Sequence[str] | None] = {
    "versions": None, "toolkit": ("version", "sha256"), "recipe": ("file", "sha256"),
    "hardware": ("device", "processor", "threads"),
    "layout": ("processes", "engine", "precision", "micro_batch_size"), "optimizer": ("class",),
}  # fmt: skip
_MODEL = ("architecture", "parameters", "trainable", "dtype", "attention", "commit", "tokenizer_commit", "directories")
_DATA = ("fingerprint", "epoch_size", "revision", "commits")


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same: its stage, its name, its two values, and the step where it belongs to one."""

    stage: str
    name: str
    values: tuple[Any, Any]
    step: int | None = None
    has_effect: bool = True  # on the weights; of a setting that no run read, or that only sets what is logged: False
    about: str = ""  # of a tensor: how far apart


@dataclass(frozen=True)
class Comparison:
    """Two runs, what differs in the order of STAGES, and what was compared or could not be.

    `absent`: stages that neither run recorded. `lacking`: those of which one of them has what the other lacks, or has damaged.
    """

    runs: tuple[RunRecord, RunRecord]
    differences: list[Difference] = field(default_factory=list)
    steps: int = 0  # logged in both
    tensors: int = 0  # compared
    absent: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_runs(directories: Sequence[Path]) -> list[Comparison]:
    """The first run with each of the others.

    Raises:
        Refusal: a directory holds no run, or two runs are of different kinds.
    """
    check_runs(directories)
    first, *others = (read_run(directory, keep_events=True) for directory in directories)
    for other in others:
        _check_kinds(first, other)
    return [compare(first, other) for other in others]


def compare(one: RunRecord, other: RunRecord) -> Comparison:
    """All differences of two runs."""
    notes = [f"{run.directory}: {complaint}" for run in (one, other) for complaint in run.complaints]
    settings = list(_settings(one, other, notes))
    for run in (one, other):
        notes += [] if run.card else [f"{run.directory}: no run.json that can be read: environment and data are not compared"]
        notes += [] if run.events else [f"{run.directory}: logged no metrics"]
    recorded = list(_recorded(one, other)) if one.card and other.card else []
    steps, metrics = _metrics(one, other, {each.name for each in settings})
    said = len(notes)
    tensors, weights = _weights(one, other, notes)
    found = [*settings, *recorded, *metrics, *weights, *_results(one, other)]
    found.sort(key=lambda each: STAGES.index(each.stage))
    here = [_recorded_stages(run) for run in (one, other)]
    absent = [stage for stage in STAGES if not here[0][stage] and not here[1][stage]]
    cut = {"tensor"} if len(notes) > said else set()
    lacking = [stage for stage in STAGES if stage not in absent and (here[0][stage] != here[1][stage] or stage in cut)]
    return Comparison((one, other), found, steps, tensors, absent, lacking, list(dict.fromkeys(notes)))


def _recorded_stages(run: RunRecord) -> dict[str, bool]:
    """By stage whether a run has anything of it that can be read."""
    card = {name: bool(_section(run.card, name)) for name in ("model", "data")}
    card["environment"] = bool(run.card) and all(isinstance(run.card.get(name) or {}, dict) for name in _ENVIRONMENT)
    logged = {"step": bool(run.events), "loss": any("loss" in event for event in run.events)}
    weights = any(path.name != "random.safetensors" for path in run.directory.rglob("*.safetensors"))
    return {"setting": bool(_typed_settings(run, [])), **card, **logged, "tensor": weights, "result": bool(run.summary)}


def _check_kinds(one: RunRecord, other: RunRecord) -> None:
    kinds = [(_tasks(run), _head(run)) for run in (one, other)]
    if all(None in pair or pair[0] == pair[1] for pair in zip(*kinds, strict=True)):
        return
    described = []
    for run, (tasks, head) in zip((one, other), kinds, strict=True):
        words = ", ".join([*sorted(tasks or ()), *([head] if head else [])])
        described.append(f"{run.directory} is {_recipe(run)} ({words})")
    raise Refusal(
        f"these runs are of different kinds, whose losses can't be compared: {'; '.join(described)}. "
        f"A page with both: {as_typed('toolkit', 'report', one.directory, other.directory)}"
    )


def _tasks(run: RunRecord) -> frozenset[str] | None:
    panels = {line.panel for line in run.settings}
    return frozenset(panels & _TASKS) if panels - {""} else None


def _head(run: RunRecord) -> str | None:
    """What a model's class is for: SequenceClassification of BertForSequenceClassification."""
    name = _section(run.card, "model").get("architecture")
    return name.rpartition("For")[2] if isinstance(name, str) and "For" in name else None


def _recipe(run: RunRecord) -> str:
    return str(_section(run.card, "recipe").get("file") or "of an unknown recipe")


def _section(card: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = card.get(name)
    return found if isinstance(found, dict) else {}


def _settings(one: RunRecord, other: RunRecord, notes: list[str]) -> Iterator[Difference]:
    values = [_typed_settings(run, notes) for run in (one, other)]
    if not all(values):
        return
    unread = [set(_section(run.card, "not_read")) for run in (one, other)]
    public = [{**_section(run.card, "settings"), **_section(run.card, "not_read")} for run in (one, other)]
    free = _without_effect()
    for name in dict.fromkeys([*values[0], *values[1]]):
        pair = (values[0].get(name, ABSENT), values[1].get(name, ABSENT))
        if name in _PLACES or name.startswith("hub_") or repr(pair[0]) == repr(pair[1]):
            continue
        has_effect = name not in free and not (name in unread[0] and name in unread[1])
        if all(public) and not any(name in each for each in public):
            pair = (HIDDEN, HIDDEN)
        yield Difference("setting", name, pair, has_effect=has_effect)


def _typed_settings(run: RunRecord, notes: list[str]) -> dict[str, Any]:
    path = run.directory / "config.yaml"
    try:
        return read_config_file(path)
    except Refusal:
        of_card = {**_section(run.card, "settings"), **_section(run.card, "not_read")}
        what = "can't be read" if path.exists() else "is missing"
        taken = "the settings are those of run.json" if of_card else "settings are not compared"
        notes.append(f"{run.directory}: config.yaml {what}: {taken}")
        return of_card


def _without_effect() -> frozenset[str]:
    """Settings on which no weight depends: a resume may change them freely."""
    classes = (each for name in dir(toolkit.config) if isinstance(each := getattr(toolkit.config, name), type))
    groups = [each for each in classes if issubclass(each, toolkit.config.Settings)]
    found = (setting for group in groups for setting in settings_of(group).values())
    return frozenset(setting.name for setting in found if setting.on_resume in ("free", "evaluation"))


def _recorded(one: RunRecord, other: RunRecord) -> Iterator[Difference]:
    """What run.json has about the environment, the model and the data."""
    for name, keys in _ENVIRONMENT.items():
        yield from _section_differences("environment", one, other, name, keys)
    changes = [run.card.get("continued") or "no" for run in (one, other)]
    if changes[0] != changes[1]:
        yield Difference("environment", "resumed with changes", (changes[0], changes[1]))
    yield from _section_differences("model", one, other, "model", _MODEL)
    yield from _section_differences("data", one, other, "data", _DATA)
    files = [_section(run.card, "files") for run in (one, other)]
    digests = [list(each.values()) for each in files]
    if digests[0] == digests[1]:  # the same contents, whatever the files are called
        return
    for ours, theirs in itertools.zip_longest(files[0].items(), files[1].items(), fillvalue=(ABSENT, ABSENT)):
        if ours[1] != theirs[1]:
            yield Difference("data", "file" if ours[0] != theirs[0] else f"file {ours[0]}", (ours, theirs))
            yield from _first_row(ours, theirs)


def _section_differences(
    stage: str, one: RunRecord, other: RunRecord, name: str, keys: Sequence[str] | None
) -> Iterator[Difference]:
    ours, theirs = _section(one.card, name), _section(other.card, name)
    if not ours or not theirs:
        return
    for key in dict.fromkeys([*ours, *theirs]) if keys is None else keys:
        pair = (ours.get(key, ABSENT), theirs.get(key, ABSENT))
        if pair[0] != pair[1]:
            shown = key if name in ("versions", "model", "data", "hardware") else f"{name} {key}".replace("_", " ")
            yield Difference(stage, shown, pair)


def _first_row(ours: tuple[str, str], theirs: tuple[str, str]) -> Iterator[Difference]:
    """The first line that differs of two files which still are what the runs read."""
    from toolkit.runs.provenance import digest_of_source  # with numpy

    paths = [Path(os.path.expanduser(name)) for name, _ in (ours, theirs)]
    try:
        if not all(path.is_file() for path in paths):
            return
        if (digest_of_source(ours[0]), digest_of_source(theirs[0])) != (ours[1], theirs[1]):  # one was changed since
            return
        with open(paths[0], "rb") as one, open(paths[1], "rb") as other:
            for number, pair in enumerate(itertools.zip_longest(one, other), 1):
                if pair[0] != pair[1]:
                    texts = tuple(ABSENT if line is None else one_line(line.decode("utf-8", "replace"), 200) for line in pair)
                    yield Difference("data", f"row {number}", (texts[0], texts[1]))
                    return
    except (OSError, Refusal):
        return


def _metrics(one: RunRecord, other: RunRecord, settings: set[str]) -> tuple[int, list[Difference]]:
    """The number of steps logged in both, and the first differences: of any metric, of each main one, of the steps logged."""
    ours, theirs = _by_step(one), _by_step(other)
    if not ours or not theirs:
        return 0, []
    shared = sorted(ours.keys() & theirs.keys())
    ends = (max(ours), max(theirs))
    logs_alike = not settings & _WHEN_LOGGED
    windows = [_windows(each) for each in (ours, theirs)]
    firsts: dict[str, Difference] = {}
    for step in shared:
        same_window = logs_alike or windows[0].get(step) == windows[1].get(step)
        for name in dict.fromkeys([*ours[step], *theirs[step]]):
            pair = (ours[step].get(name, ABSENT), theirs[step].get(name, ABSENT))
            if name in firsts or repr(pair[0]) == repr(pair[1]):
                continue
            if logs_alike or (ABSENT not in pair and (same_window or name == "learning_rate" or name.startswith("eval_"))):
                firsts[name] = Difference("step", name, pair, step)
    ranks = {name: rank for rank, name in enumerate(_FIRST_METRICS)}
    found = sorted(firsts.values(), key=lambda each: (each.step, ranks.get(each.name, len(ranks))))
    alone = [step for step in sorted(ours.keys() ^ theirs.keys()) if step < min(ends)] if logs_alike else []
    if alone:
        found.append(Difference("step", "logged", ("yes", "no") if alone[0] in ours else ("no", "yes"), alone[0]))
    if ends[0] != ends[1]:
        found.append(Difference("step", "last logged step", ends, min(ends)))
    at = min((each.step for each in found if each.step is not None), default=None)
    kept = [each for each in found if each.step == at or each.name in (*_FIRST_METRICS, "logged", "last logged step")]
    losses = [Difference("loss", each.name, each.values, each.step) for each in kept if each.name == "loss"]
    return len(shared), [*kept, *losses]


def _by_step(run: RunRecord) -> dict[int, dict[str, Any]]:
    """By step all metrics that a repeated run has again."""
    found: dict[int, dict[str, Any]] = {}
    for event in run.events:
        metrics = {name: value for name, value in event.items() if name not in _NOT_COMPARED and is_repeatable(name)}
        found.setdefault(int(event["step"]), {}).update(metrics)
    return found


def _windows(events: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """By logged training step the one before it: metrics are means over what lies between."""
    steps = [0, *(step for step in sorted(events) if "loss" in events[step])]
    return dict(zip(steps[1:], steps, strict=False))


def _weights(one: RunRecord, other: RunRecord, notes: list[str]) -> tuple[int, list[Difference]]:
    """The first place whose tensors differ: checkpoints of the same step, oldest first, then the models."""
    compared = 0
    for place in [*_shared_checkpoints(one.directory, other.directory), "model"]:
        pair = (one.directory / place, other.directory / place)
        here = [path.is_dir() and any(path.rglob("*.safetensors")) for path in pair]
        if here == [False, False]:
            continue
        if here[0] != here[1]:
            notes.append(f"{pair[here[0]]}: no weights, as {pair[not here[0]]} has them")
            continue
        try:
            count, difference = weights_difference(*pair)
        except Refusal as refusal:
            notes.append(str(refusal))
            continue
        compared += count
        if difference is not None:
            step = int(place.rpartition("-")[2]) if place != "model" else None
            return compared, [Difference("tensor", difference.name, difference.values, step, about=difference.about)]
    if not compared:
        notes.append("no weights of the same step are in both: tensors are not compared")
    return compared, []


def _shared_checkpoints(one: Path, other: Path) -> list[str]:
    from toolkit.checkpoint import list_checkpoints

    theirs = {path.name for path in list_checkpoints(other / "checkpoints")}
    return [f"checkpoints/{path.name}" for path in list_checkpoints(one / "checkpoints") if path.name in theirs]


def _results(one: RunRecord, other: RunRecord) -> Iterator[Difference]:
    """The final metrics, where both runs have come to an end."""
    for name in dict.fromkeys([*one.summary, *other.summary]) if one.summary and other.summary else ():
        pair = (one.summary.get(name, ABSENT), other.summary.get(name, ABSENT))
        is_metric = name.startswith("eval_") or name in ("status", "steps", "train_loss")
        if is_metric and is_repeatable(name) and pair[0] != pair[1]:
            yield Difference("result", name, pair)
