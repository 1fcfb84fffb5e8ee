"""Continuing a run: which checkpoint, and what may have changed since.

Weights after a resume equal those of a run never stopped as long as nothing below has changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint import latest_checkpoint, list_checkpoints, verify_checkpoint
from toolkit.config import DataConfig, ModelConfig, Refusal, RunConfig, settings_of
from toolkit.config.conditions import couples_a_micro_batch, follows_evaluations
from toolkit.config.reading import public_settings, values_of
from toolkit.config.setting import Settings, given_settings
from toolkit.distributed.engines import engine_of
from toolkit.system.devices import has_bf16_units

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.data.loading.loaders import StreamLoader, TrainLoader

_OF_DATA = settings_of(DataConfig).keys() | settings_of(ModelConfig).keys()
# Of those, the ones that change no token of a row: how long a run is, its batches, its dropout.
_OF_NO_ROW = {
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size",
    "group_by_length", "dropout", "attention_dropout", "dtype",
}  # fmt: skip
ALLOWED = "allowed by --allow-change"
# By `on_resume` of a setting: what differs after a change that is let through.
DIFFERS = {
    "batches": "steps hold other examples; none is lost",
    "dropout": "dropout masks differ from here on; the examples of each step do not",
    "rounding": "rounding differs from here on",
}
_OTHER_LOSS = "the loss compares other pairs from here on, allowed by --allow-change"
_OF_THE_MICRO_BATCH = ("per_device_train_batch_size", "micro_batch_size")
_OF_THE_LAYOUT = {
    "micro_batch_size": DIFFERS["dropout"],
    **dict.fromkeys(("engine", "processes", "precision", "bf16_units", "threads", "device", "torch"), DIFFERS["rounding"]),
}

# The default of every optimizer in earlier checkpoints; muon still has it, and where it has no effect it may differ.
FORMER_MOMENTUM = 0.95


def run_layout(accelerator: Accelerator, train: TrainLoader | StreamLoader) -> dict[str, Any]:
    """What the world decided, as far as random numbers and rounding depend on it."""
    # Products in bfloat16 are summed up otherwise where there are no units for them.
    units = {} if accelerator.mixed_precision == "no" else {"bf16_units": has_bf16_units(accelerator.device)}
    return {
        "engine": engine_of(accelerator).label(accelerator), "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision, **units,
        "device": accelerator.device.type, "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size, "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip


def plain_settings(config: Settings) -> dict[str, Any]:
    """A config as JSON has it, for checkpoints; of what may be a key (`public_settings`) a digest, which shows a change too."""
    public = public_settings(config)
    values = {name: value if name in public else _digest(value) for name, value in values_of(config).items()}
    return json.loads(json.dumps(values, default=str))


def _digest(value: Any) -> str:
    return f"sha256:{hashlib.sha256(repr(value).encode()).hexdigest()[:16]}"


def checkpoint_to_resume(config: RunConfig, checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that the settings name; every damaged one that is skipped is named."""
    if config.resume_from:
        return Path(config.resume_from)
    if not config.resume:
        return None
    found = latest_checkpoint(checkpoints, say)
    if found is None:
        say(f"--resume: no checkpoint under {checkpoints}, starting fresh")
    return found


def check_settings_to_resume(config: RunConfig) -> None:
    """Refuse a given setting that no checkpoint of this run can be continued with, before the data are prepared for nothing.

    Settings that were not given are compared when the checkpoint is restored: a recipe may still set them.

    Raises:
        Refusal: as `changes_since` does; or `resume_from` is no checkpoint.
    """
    folder = Path(config.resume_from or "")
    is_another = config.resume_from and not (folder / "MANIFEST.json").exists()
    places = (folder.parent, folder) if is_another else ()
    if found := [path for place in places for path in list_checkpoints(place / "checkpoints")]:
        raise Refusal(f"--resume-from {folder}: is no checkpoint. Did you mean {found[-1]}?")
    if is_another and not (folder / "state.json").exists():  # one of a checkpoint would be a damaged one
        raise Refusal(f"--resume-from {folder}: there is no checkpoint. Give a folder step-N of a run's checkpoints.")
    refused = []
    for record in _records_to_resume(config):
        try:
            _changed_settings(record, config, given_settings(config))
        except Refusal as refusal:
            refused.append(refusal)
        else:
            return
    if refused:
        raise refused[0]


def precision_to_resume(config: RunConfig) -> str | None:
    """What a resumed run that names no precision has computed in: "no", "bf16", "fp16". None: nothing is resumed."""
    return next(map(_precision_of, _records_to_resume(config)), None)


def _records_to_resume(config: RunConfig) -> Iterator[dict[str, Any]]:
    """The `run` records of checkpoints that may be continued, the newest first. Damaged ones are named when one is taken."""
    if not (config.resume or config.resume_from):
        return
    root = Path(config.output_dir) / "checkpoints"
    for path in [Path(config.resume_from)] if config.resume_from else list_checkpoints(root)[::-1]:
        if verify_checkpoint(path, contents=False):
            continue
        try:
            record = json.loads((path / "state.json").read_text(encoding="utf-8"))["run"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(record, dict) and all(isinstance(record.get(name, {}), dict) for name in ("settings", "layout")):
            yield record


def _precision_of(record: Mapping[str, Any]) -> str:
    """Of a checkpoint's `run` record; those of 0.1.0 have the settings alone."""
    settings = record.get("settings", {})
    named = "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else "no"
    return str(record.get("layout", {}).get("precision", named))


# Of 0.1.0, which named the code that read the rows too; `content-` names the tokens alone.
_EARLIER_FINGERPRINT = re.compile(r"(tokenized-[0-9a-f]{24}|[0-9a-f]{16}|)-")


def changes_since(
    record: dict[str, Any], config: RunConfig, accelerator: Accelerator, train: TrainLoader | StreamLoader
) -> list[str]:
    """Lines about changes since the checkpoint whose `run` record this is.

    Raises:
        Refusal: the data, or a setting that the mathematics depends on, is another one, and `allow_change` doesn't name it.
    """
    now, before, changed = _changed_settings(record, config)
    layout, old_layout = run_layout(accelerator, train), {"precision": _precision_of(record), **record.get("layout", {})}
    changed = [name for name in changed if name not in ("bf16", "fp16")]  # the layout has what came of them
    was, size = old_layout.get("micro_batch_size", train.micro_batch_size), train.micro_batch_size
    is_another_loss = was != size and couples_a_micro_batch(config)
    if is_another_loss and "per_device_train_batch_size" not in config.allow_change:
        raise Refusal(
            f"--resume: the micro-batch had {was} examples and has {size}, and --loss-type "
            f"{','.join(values_of(config)['loss_type'])} compares the pairs of a micro-batch with each other: that would be "
            f"another loss. Take --per-device-train-batch-size {was}, begin a new run in another --output-dir, or allow it by "
            "name: --allow-change per_device_train_batch_size"
        )
    of_data = {"dataset", *(_OF_DATA - _OF_NO_ROW).intersection(changed)}
    is_comparable = not _EARLIER_FINGERPRINT.match(record["fingerprint"])
    is_other = is_comparable and record["fingerprint"] != train.fingerprint
    if is_other and not of_data.intersection(config.allow_change):
        raise Refusal(
            "--resume: the training data are not those the run was begun with: their content or order changed, or they are cut "
            "or packed otherwise. Bring them back, begin a new run in another --output-dir, or allow it: --allow-change dataset"
        )
    pairs = [(name, before[name], now[name]) for name in changed]
    reported = {"micro_batch_size"} if "per_device_train_batch_size" in changed else set()
    of_world = [name for name in layout if name in old_layout and name not in reported]
    pairs += [(name, old_layout[name], layout[name]) for name in of_world if old_layout[name] != layout[name]]
    reasons = {name: DIFFERS.get(each.on_resume, ALLOWED) for name, each in settings_of(type(config)).items()} | _OF_THE_LAYOUT
    reasons |= (dict.fromkeys(_OF_THE_MICRO_BATCH, _OTHER_LOSS) if is_another_loss else {})
    changes = {name: f"{name} was {old} and is {new}: {reasons.get(name, ALLOWED)}" for name, old, new in pairs}
    if old_layout.get("global_batch_size", layout["global_batch_size"]) != layout["global_batch_size"]:
        changes["global_batch_size"] += f" (--global-batch-size {old_layout['global_batch_size']} keeps the steps as they were)"
    if is_other and not (_OF_DATA - _OF_NO_ROW).intersection(changed):
        changes["data"] = f"the training data are others: {ALLOWED}"
    elif not is_comparable:
        changes["data"] = "the data can't be compared: the checkpoint has an earlier version's fingerprint of them"
    return list(changes.values())


def _changed_settings(
    record: dict[str, Any], config: RunConfig, given: frozenset[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The settings of now, those of the checkpoint, and the names of those that changed, of `given` ones alone.

    Raises:
        Refusal: one that the mathematics depends on, which `allow_change` doesn't name.
    """
    now, before = plain_settings(config), record.get("settings", {})
    public = public_settings(config)
    before = {  # checkpoints did not always hold a digest of what may be a key
        name: value if name in public or str(value).startswith("sha256:") else _digest(value) for name, value in before.items()
    }
    if before.get("momentum") == FORMER_MOMENTUM and now.get("momentum") is None and now.get("optim") not in ("sgd", "rmsprop"):
        before["momentum"] = None
    policy = {name: each.on_resume for name, each in settings_of(type(config)).items()}
    free = ("free",) if follows_evaluations(config) else ("free", "evaluation")
    changed = [name for name in now if name in before and now[name] != before[name] and policy[name] not in free]
    changed = [name for name in changed if given is None or name in given]
    refused = [name for name in changed if policy[name] not in DIFFERS and name not in config.allow_change]
    if refused:
        shown = "; ".join(f"{name} was {before[name]} and is {now[name]}" for name in refused)
        raise Refusal(
            f"--resume: {shown}. That would not be the run that was begun. Take back the change, begin a new run in another "
            f"--output-dir, or allow it by name: --allow-change {','.join(refused)}"
        )
    return now, before, changed


def keeps_its_length(config: RunConfig) -> bool:
    """Whether a continued run ends where it was to end: no setting that its length depends on was allowed to change."""
    return not _OF_DATA.intersection(config.allow_change)


def other_reference(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, config: RunConfig) -> list[str]:
    """A line where the files that the reference model, the teacher or the rewards are made of have changed.

    Raises:
        Refusal: they have, and `allow_change` doesn't name the setting that names them.
    """
    if not before or before == now:
        return []
    if now is None:
        return [f"the {before.get('who', 'reference')}'s files are not compared: tk.open_run was not given what it is made of"]
    if "reference" in before or "reference" in now:  # next to the rewards
        before, now = dict(before), dict(now)
        notes = other_reference(before.pop("reference", None), now.pop("reference", None), config)
        return notes + other_reference(before, now, config)
    setting, who = now.get("setting", "model"), now.get("who", "reference")
    if setting not in config.allow_change:
        raise Refusal(
            f"--resume: the files of --{setting.replace('_', '-')}, which the {who} is made of, are not those that the run "
            f"began with. Bring them back, begin a new run in another --output-dir, or resume with another {who}: "
            f"--allow-change {setting}"
        )
    return [f"the {who} is made of other files: {ALLOWED}"]
