"""What a key of Trainer, of TRL or of an example script means with its value: settings, nothing, or what to do about it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.foreign_names import PASSED_OVER, SAME

# From the value as it was written, and all that was written with it, to settings as they would be written, or to advice.
Meaning = Callable[[Any, Mapping[str, Any]], dict[str, Any] | str]


def translate(key: str, value: object, written: Mapping[str, Any]) -> dict[str, Any] | str:
    """What a key of theirs means: settings with values as they would be written (perhaps none), or what to do about it.

    Args:
        value: as it was written: text on a command line, or what YAML made of it.
        written: all that was written next to it, by names with underscores.
    """
    value = _read(value)
    if key in PASSED_OVER:
        return {}
    if key in SAME:
        same, advice = SAME[key]
        return {} if value is None or any(type(each) is type(value) and each == value for each in same) else advice
    return {} if value is None else TRANSLATED[key](value, written)


def is_foreign(key: str) -> bool:
    """Whether a name, with underscores, is one of theirs that this file has."""
    return key in SAME or key in PASSED_OVER or key in TRANSLATED


def passed_over(key: str, value: object) -> str | None:
    """What happens in place of a value that is taken and has no effect; None where it means that or is no such key."""
    if key not in PASSED_OVER:
        return None
    same, instead = PASSED_OVER[key]
    return None if _read(value) in (None, *same) else instead


def _read(value: object) -> Any:
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.strip().lower() in words:
        return words[value.strip().lower()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _arguments(names: Mapping[str, str]) -> Meaning:
    """Of from_pretrained, by the settings that mean them."""
    known = [name for name in names if name != "torch_dtype"]

    def meaning(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
        left = [each for each in value if each not in (*names, "use_cache")] if isinstance(value, dict) else ["its text"]
        if left:
            listed = f"{', '.join(known[:-1])} and {known[-1]}"
            return f"leave {', '.join(map(str, left))} out of it; its {listed} are known."
        return {names[name]: each for name, each in value.items() if name in names}

    return meaning


def _schedule_arguments(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    names = {
        "min_lr_rate": "min_lr_ratio", "min_lr_ratio": "min_lr_ratio", "min_lr": "min_lr", "lr_end": "min_lr",
        "num_cycles": "lr_cycles", "power": "lr_power", "warmup_type": "warmup_type", "decay_type": "lr_decay_type",
        "factor": "lr_gamma", "patience": "lr_patience", "threshold": "lr_threshold", "mode": "greater_is_better",
    }  # fmt: skip
    steps = _read(written.get("max_steps"))
    if isinstance(value, dict) and isinstance(value.get("num_decay_steps"), int) and isinstance(steps, int) and steps > 0:
        meant = _schedule_arguments({name: each for name, each in value.items() if name != "num_decay_steps"}, written)
        return meant if isinstance(meant, str) else {**meant, "lr_decay_ratio": value["num_decay_steps"] / steps}
    cosine = str(written.get("lr_scheduler_type", "")) != "cosine_with_restarts"  # there num_cycles is half a wave
    if not isinstance(value, dict) or any(name not in names or (name == "num_cycles" and cosine) for name in value):
        return "take min_lr_ratio, min_lr, lr_cycles, lr_power, lr_gamma, lr_decay_ratio, lr_patience or lr_threshold."
    meant = {names[name]: each for name, each in value.items()}
    return meant | ({"greater_is_better": value["mode"] == "max"} if "mode" in value else {})


def _text_column(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if not isinstance(value, str):
        return "it is the name of a column."
    return {} if value in ("text", "messages", "prompt") else {"rename_columns": [f"{value}=text"]}


def _dataset_configuration(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    name = written.get("dataset_name", written.get("dataset", "NAME"))
    return f"write it behind the dataset's name: dataset_name: {name}:{value}"


def _mixture(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    """TRL's list of sources. Without fractions all their rows are joined, and how many each has is not known here."""
    sources = [source for source in value if isinstance(source, dict) and "path" in source] if isinstance(value, list) else []
    if value == [] or value == "":
        return {}
    names = [":".join(str(source[key]) for key in ("path", "name") if source.get(key)) for source in sources]
    shares = [source.get("fraction") or f"SHARE_{i + 1}" for i, source in enumerate(sources)]
    meant = names[0] if len(names) == 1 else ",".join(f"{name}:{share}" for name, share in zip(names, shares, strict=True))
    example = meant or "a:0.7,b:0.3"
    return (
        f"write dataset: {example} (or --dataset {example}), each source with its share of the rows; another split than train "
        "goes into train_split, other columns into rename_columns."
    )


def _environment(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if not value:
        return {}
    lines = " ".join(f"{name}=..." for name in value) if isinstance(value, dict) else "NAME=VALUE"
    return f"leave it out, and set it before the run, in the shell: export {lines}"


def _no_dropout(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if value is True and _read(written.get("lora_dropout", 0)):
        return "in TRL it turns lora_dropout off as well: write lora_dropout: 0.0 and dropout: 0.0, or leave it out."
    return {"dropout": 0.0} if value is True else {}


def _percentage(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if {"validation_file", "eval_split", "dataset_test_split", "eval_fraction"} & set(written):
        return {}
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 100
    return {"eval_fraction": value / 100} if is_share else "take eval_fraction, the share of rows held out."


def _files(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    other = next((str(written[name]) for name in ("validation_file", "eval_data_file") if written.get(name)), None)
    if other is None:
        return {"dataset": value}
    train, folder = Path(str(value)), Path(str(value)).parent
    names = {"train": train.name, "validation": Path(other).name}
    if Path(other).parent == folder and all(name.split(".")[0] == split for split, name in names.items()):
        there = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
        if there == set(names.values()):
            return {"dataset": str(folder)}
    suffixes = (Path(name).suffixes[-2 if name.endswith((".gz", ".zst")) else -1 :] for name in (str(value), other))
    ends = ["".join(each) for each in suffixes]
    return (
        "the files of a dataset are in one folder, named by their splits. In a shell: mkdir both && ln -s "
        f'"$(realpath {shlex.quote(str(value))})" both/train{ends[0]} && ln -s "$(realpath {shlex.quote(other)})" '
        f"both/validation{ends[1]}; then write dataset: both, in place of the two."
    )


def _task(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    """A task of GLUE, as run_glue reads it; of the other scripts it only names what is done."""
    if value in ("ner", "pos", "chunk", "") or {"dataset", "dataset_name", "train_file"} & set(written):
        return {}
    if value not in _GLUE:
        return "write dataset: nyu-mll/glue:TASK, and rename_columns: sentence1=text,sentence2=text_pair."
    renames = [f"{old}={new}" for old, new in zip(_GLUE[value], ("text", "text_pair"), strict=False)]
    evaluation = {"eval_split": "validation_matched"} if value == "mnli" and "eval_split" not in written else {}
    return {"dataset": f"nyu-mll/glue:{value}", **evaluation, "rename_columns": renames}


def _columns(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    """The renames that the keys of texts and of the label mean together; returned once, with the first of them."""
    keys = [key for key in ("text_column_name", "text_column_names", "label_column_name") if written.get(key)]
    if keys and written[keys[0]] != value:
        return {}
    pairs = list[tuple[str, str]]()
    for key in keys:
        names = written[key] if isinstance(written[key], list) else str(written[key]).split(",")
        pairs += zip(names, ["label"] if key.startswith("label") else ["text", "text_pair"], strict=False)
    renames = [f"{old}={new}" for old, new in pairs if old != new]
    return {"rename_columns": renames} if renames else {}


_PAIR = ("sentence1", "sentence2")
_GLUE = {  # the columns of each task's texts, https://huggingface.co/datasets/nyu-mll/glue; stsb has no classes
    "cola": ("sentence",), "sst2": ("sentence",), "mrpc": _PAIR, "rte": _PAIR, "wnli": _PAIR, "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"), "mnli": ("premise", "hypothesis"),
}  # fmt: skip


def _vllm(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if value is not True or written.get("vllm_server_base_url"):
        return {}
    if written.get("vllm_mode") != "server":
        return "write rollout_server: http://HOST:PORT in its place, and start vLLM there: it samples as a server of its own."
    host = written.get("vllm_server_host") or "localhost"
    return {"rollout_server": f"http://{host}:{written.get('vllm_server_port') or 8000}"}


def _only(is_same: Callable[[Any, Mapping[str, Any]], bool], advice: str) -> Meaning:
    """Nothing where the value means what happens anyway, else what to do."""
    return lambda value, written: {} if is_same(value, written) else advice


_RENAMED = {
    "sft_model_path": "model", "evaluation_strategy": "eval_strategy", "dataset_streaming": "streaming",
    "chat_template_path": "chat_template", "use_bnb_nested_quant": "bnb_4bit_use_double_quant", "no_cuda": "use_cpu",
    # Of former versions and of the example scripts
    "per_gpu_train_batch_size": "per_device_train_batch_size", "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id", "log_with": "report_to", "tokenizer_name": "tokenizer", "block_size": "max_length",
    "max_train_samples": "max_train_examples", "max_eval_samples": "max_eval_examples", "max_val_samples": "max_eval_examples",
    "dataset_train_name": "train_split", "dataset_test_name": "eval_split",
}  # fmt: skip
TRANSLATED: dict[str, Meaning] = {
    **{key: lambda value, written, name=name: {name: value} for key, name in _RENAMED.items()},  # type: ignore[misc]
    "use_vllm": _vllm,
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        _only(
            lambda value, _: value in ({}, {"use_reentrant": False}),
            "leave it out: recomputation is always torch's with use_reentrant: false.",
        ),
    ),
    "model_init_kwargs": _arguments({
        "dtype": "dtype", "torch_dtype": "torch_dtype", "attn_implementation": "attn_implementation",
        "revision": "model_revision", "trust_remote_code": "trust_remote_code",
    }),
    "teacher_model_init_kwargs": _arguments({
        "dtype": "teacher_dtype", "torch_dtype": "teacher_dtype", "revision": "teacher_revision",
    }),
    "lr_scheduler_kwargs": _schedule_arguments,
    "dataset_text_field": _text_column,
    **dict.fromkeys(("dataset_config", "dataset_config_name"), _dataset_configuration),
    "datasets": _mixture,
    "env": _environment,
    "padding_free": _only(
        lambda value, written: value is False or _read(written.get("packing")) is True,
        "take packing, whose rows have no padding.",
    ),
    "eval_packing": _only(
        lambda value, written: value == (_read(written.get("packing")) or False),
        "leave it out: evaluation packs as training does, and its metrics are the same either way.",
    ),
    "data_seed": _only(
        lambda value, written: value == _read(written.get("seed", 42)),
        "leave it out: seed draws the order of the data as well.",
    ),
    "reward_model_path": lambda value, written: {"reward_funcs": [value]},
    "train_sampling_strategy": lambda value, written: {"random": {}, "group_by_length": {"group_by_length": True}}.get(
        str(value), "take random or group_by_length: examples are shuffled in each epoch."
    ),
    "resume_from_checkpoint": lambda value, written: (
        {"resume": value} if isinstance(_read(value), bool) else {"resume_from": value}
    ),
    "do_eval": lambda value, written: {} if value is True or "eval_strategy" in written else {"eval_strategy": "no"},
    "truncation_mode": _only(
        lambda value, _: value == "keep_start",
        "take keep_start, or overlong: split, drop or refuse. Of a pair the prompt loses its beginning first, always.",
    ),
    "disable_dropout": _no_dropout,
    # `python -m torch.distributed.launch` passes it twice: in the environment, and as a flag of each rank.
    "local_rank": _only(
        lambda value, _: str(value) in ("-1", "0", os.environ.get("LOCAL_RANK")), "leave it out: the launcher sets it."
    ),
    "loss_type": _only(  # of DPO it is a setting
        lambda value, _: value in ("nll", "chunked_nll"),
        "take ranking_loss, embedding_loss or distillation_loss in a recipe that has one. Else leave it out, or write that "
        "loss in a copy of the recipe (toolkit copy sft).",
    ),
    "precompute_ref_log_probs": lambda value, written: {"reference": "cache"} if value is True else {},
    # Of former versions and of the example scripts
    "evaluate_during_training": lambda value, written: (
        {} if {"eval_strategy", "evaluation_strategy"} & set(written) else {"eval_strategy": "steps" if value is True else "no"}
    ),
    "adafactor": lambda value, written: (
        {} if value is False or written.get("optim") == "adafactor" else {"optim": "adafactor"}
    ),
    "validation_split_percentage": _percentage,
    **dict.fromkeys(("train_file", "train_data_file"), _files),
    **dict.fromkeys(
        ("validation_file", "eval_data_file"),
        _only(  # next to a training file, whose line has what to do with both
            lambda value, written: bool({"train_file", "train_data_file"} & set(written)),
            "put it next to the training rows, as train.* and validation.* of one folder, and write dataset: FOLDER.",
        ),
    ),
    "config_name": _only(
        lambda value, written: value in (written.get("model_name_or_path"), written.get("model")),
        "leave it out: the shape is the model's own. For one from scratch: toolkit copy pretrain.",
    ),
    "task_name": _task,
    **dict.fromkeys(("text_column_name", "text_column_names", "label_column_name"), _columns),
    # Where the recipe has no adapter
    **dict.fromkeys(
        ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
         "use_rslora", "use_dora", "load_in_4bit", "bnb_4bit_quant_type"),
        _only(
            lambda value, written: value is False or _read(written.get("use_peft")) is False,
            "it is for an adapter: take recipes/lora.py, this recipe with one (toolkit train lora).",
        ),
    ),
}  # fmt: skip
