"""Continuing a run: which checkpoint, and what may have changed since.

Weights after a resume equal those of a run never stopped as long as nothing below has changed.
"""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint import latest_checkpoint
from toolkit.config import DataConfig, ModelConfig, Refusal
from toolkit.config.conditions import couples_a_micro_batch
from toolkit.engines import engine_of
from toolkit.tracking import public_settings

# What changes no weight: where and what is written, shown, evaluated, and who reads the data.
FREE = frozenset({
    "output_dir", "overwrite_output_dir", "logging_steps", "eval_steps", "save_steps", "resume", "resume_from", "allow_change",
    "run_name", "report_to", "logging_strategy", "eval_strategy", "eval_on_start", "eval_delay", "save_strategy",
    "save_total_limit", "save_error", "async_save", "stop_deadline", "hang_timeout", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "early_stopping_patience", "num_samples", "sample_max_new_tokens",
    "sample_temperature", "per_device_eval_batch_size", "eval_split", "max_eval_examples", "dataloader_num_workers", "metrics",
    "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision",
    "zero_stage", "fsdp", "offload", "deepspeed",  # said as the engine of the layout
    "trust_remote_code", "auto_find_batch_size", "nonfinite", "max_nonfinite_steps",
})  # fmt: skip

_OF_DATA = {field.name for group in (DataConfig, ModelConfig) for field in fields(group)}
ALLOWED = "allowed by --allow-change"
_OTHER_MASKS = "dropout masks differ from here on; the examples of each step do not"
_OTHER_LOSS = "the loss compares other pairs from here on, allowed by --allow-change"
_OF_THE_MICRO_BATCH = ("per_device_train_batch_size", "micro_batch_size")
_OTHER_ROUNDING = "rounding differs from here on"
# What changes random numbers or rounding, not the mathematics: the run goes on, and says so.
SAID = {
    "per_device_train_batch_size": _OTHER_MASKS, "gradient_accumulation_steps": "steps hold other examples; none is lost",
    "global_batch_size": "steps hold other examples; none is lost", "torch_compile": _OTHER_MASKS,
    "attn_implementation": _OTHER_ROUNDING, "gradient_checkpointing": _OTHER_ROUNDING, "bf16": _OTHER_ROUNDING,
    "fp16": _OTHER_ROUNDING, "tf32": _OTHER_ROUNDING, "use_cpu": _OTHER_ROUNDING, "ddp_backend": _OTHER_ROUNDING,
    # of the layout, not of the settings
    "micro_batch_size": _OTHER_MASKS, "engine": _OTHER_ROUNDING, "processes": _OTHER_ROUNDING, "threads": _OTHER_ROUNDING,
    "device": _OTHER_ROUNDING, "torch": _OTHER_ROUNDING,
}  # fmt: skip


def run_layout(accelerator: Any, train: Any) -> dict[str, Any]:
    """What the world decided, as far as random numbers and rounding depend on it."""
    return {
        "engine": getattr(accelerator, "engine_label", engine_of(accelerator).name), "processes": accelerator.num_processes,
        "device": accelerator.device.type, "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size, "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip


def plain_settings(config: Any) -> dict[str, Any]:
    """A config as JSON has it, for checkpoints; of what may be a key (`public_settings`) a digest, which tells a change too."""
    public = public_settings(config)
    values = {name: value if name in public else _digest(value) for name, value in asdict(config).items()}
    return json.loads(json.dumps(values, default=str))


def _digest(value: Any) -> str:
    return f"sha256:{hashlib.sha256(repr(value).encode()).hexdigest()[:16]}"


def checkpoint_to_resume(run: Any, config: Any) -> Path | None:
    """The checkpoint that the settings ask for; every damaged one that is skipped is named."""
    if config.resume_from:
        return Path(config.resume_from)
    if not config.resume:
        return None
    found = latest_checkpoint(run.checkpoints, run.say)
    if found is None:
        run.say(f"--resume: no checkpoint under {run.checkpoints}, starting fresh")
    return found


def changes_since(record: dict[str, Any], config: Any, accelerator: Any, train: Any) -> list[str]:
    """What to say about changes since the checkpoint whose `run` record this is.

    Raises:
        Refusal: the data, or a setting that the mathematics depends on, is another one, and `allow_change` doesn't name it.
    """
    now, before = plain_settings(config), record.get("settings", {})
    public = public_settings(config)
    before = {  # checkpoints did not always hold a digest of what may be a key
        name: value if name in public or str(value).startswith("sha256:") else _digest(value) for name, value in before.items()
    }
    changed = [name for name in now if name in before and now[name] != before[name] and name not in FREE]
    refused = [name for name in changed if name not in SAID and name not in config.allow_change]
    if refused:
        shown = "; ".join(f"{name} was {before[name]} and is {now[name]}" for name in refused)
        raise Refusal(
            f"--resume: {shown}. That would not be the run that was begun. Take back the change, begin a new run in another "
            f"--output-dir, or allow it by name: --allow-change {','.join(refused)}"
        )
    layout, old_layout = run_layout(accelerator, train), record.get("layout", {})
    was, size = old_layout.get("micro_batch_size", train.micro_batch_size), train.micro_batch_size
    is_another_loss = was != size and couples_a_micro_batch(config)
    if is_another_loss and "per_device_train_batch_size" not in config.allow_change:
        raise Refusal(
            f"--resume: the micro-batch had {was} examples and has {size}, and --loss-type {','.join(config.loss_type)} "
            "compares the pairs of a micro-batch with each other: that would be another loss. Take "
            f"--per-device-train-batch-size {was}, begin a new run in another --output-dir, or allow it by name: "
            "--allow-change per_device_train_batch_size"
        )
    of_data = {"dataset", *_OF_DATA.intersection(changed)}
    if record["fingerprint"] != train.fingerprint and not of_data.intersection(config.allow_change):
        raise Refusal(
            "--resume: the training data are not those the run was begun with: their content changed, or they are cut or "
            "packed otherwise. Bring them back, begin a new run in another --output-dir, or allow it: --allow-change dataset"
        )
    pairs = [(name, before[name], now[name]) for name in changed]
    told_already = {"micro_batch_size"} if "per_device_train_batch_size" in changed else set()
    of_world = [name for name in layout if name in old_layout and name not in told_already]
    pairs += [(name, old_layout[name], layout[name]) for name in of_world if old_layout[name] != layout[name]]
    said = SAID | (dict.fromkeys(_OF_THE_MICRO_BATCH, _OTHER_LOSS) if is_another_loss else {})
    told = {name: f"{name} was {old} and is {new}: {said.get(name, ALLOWED)}" for name, old, new in pairs}
    if old_layout.get("global_batch_size", layout["global_batch_size"]) != layout["global_batch_size"]:
        told["global_batch_size"] += f" (--global-batch-size {old_layout['global_batch_size']} keeps the steps as they were)"
    if record["fingerprint"] != train.fingerprint and not _OF_DATA.intersection(changed):
        told["data"] = f"the training data are others: {ALLOWED}"
    return list(told.values())


def keeps_its_length(config: Any) -> bool:
    """Whether a continued run ends where it was to end: no setting that its length depends on was allowed to change."""
    return not _OF_DATA.intersection(config.allow_change)
