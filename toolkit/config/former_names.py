"""Keys of former versions of Trainer and TRL and of transformers' example scripts (run_clm, run_glue), as in foreign_names.

A key on which no result depends is passed over whatever its value, so that a file of any year is taken; one that says what has
another name here is that setting; the rest is refused with what to do.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Meaning = Callable[[Any, Mapping[str, Any]], dict[str, Any] | str]

# Keys of secrets, which are never settings; in a file that says nothing with them there is nothing to refuse.
SECRETS = ("hub_token", "push_to_hub_token", "use_auth_token", "token")
NO_SECRET = (None, True, False, "", "<HUB_TOKEN>", "<PUSH_TO_HUB_TOKEN>")

FORMER_SAME: dict[str, tuple[tuple[Any, ...], str]] = {
    "torchdynamo": ((), "take torch_compile."),
    "sharded_ddp": (("", []), "take zero_stage or fsdp."),
    "model_parallel": ((False,), "take zero_stage or fsdp."),
    "push_to_hub_organization": ((), "write hub_model_id: ORGANIZATION/NAME."),
    "mlm": ((False,), "leave it out: language models here predict the next token."),
    "config_overrides": ((), "leave it out: hidden_size, num_hidden_layers and others shape a built-in model."),
    "model_type": ((), "leave it out: the recipe says it. For one from scratch take a built-in shape as model: tiny-llama."),
    "data_dir": ((), "write the folder as dataset."),
    "source_prefix": (("",), "put it into the prompts."),
    "rpo_alpha": ((), "write loss_type: [sigmoid, sft] and loss_weights: [1.0, RPO_ALPHA]."),
    "tools": (([],), "give each row its tools, in a column of that name."),
    "ref_model_init_kwargs": (({},), "leave it out: the reference is the model as it was when training began."),
    "model_adapter_name": (("default",), "leave it out: there is one adapter."),
    "ref_adapter_name": (("reference",), "leave it out: the reference is the model without its adapter."),
}  # fmt: skip

_DEVICE = "the device is found by itself; use_cpu stays on the CPU."
FORMER_PASSED_OVER: dict[str, tuple[tuple[Any, ...], str]] = {
    # Precision, devices and speed, now found by themselves or gone
    "fp16_opt_level": (("O1",), "Apex is not used: fp16 and bf16 are torch's autocast."),
    "fp16_backend": (("auto",), "fp16 is torch's autocast."),
    "use_mps_device": ((False,), _DEVICE),
    "tpu_num_cores": ((), _DEVICE),
    "tpu_metrics_debug": ((False,), _DEVICE),
    "xpu_backend": ((), _DEVICE),
    "use_ipex": ((False,), _DEVICE),
    "n_gpu": ((), "the launcher says how many processes there are."),
    "jit_mode_eval": ((False,), "evaluation runs the model as it is."),
    "mp_parameters": (("",), "SageMaker's model parallelism is not used: see zero_stage and fsdp."),
    "past_index": ((-1,), "no model keeps its past between steps."),
    "fsdp_min_num_params": ((0,), "fsdp shards layer by layer."),
    "fsdp_transformer_layer_cls_to_wrap": ((), "fsdp shards layer by layer."),
    "dispatch_batches": ((False,), "each rank reads its own part of a batch."),
    "split_batches": ((False,), "batches are cut the same way on any number of devices."),
    "ray_scope": (("last",), "there is no search by Ray."),
    "low_cpu_mem_usage": ((True, False), "weights are read one by one."),
    "use_fast_tokenizer": ((True,), "tokenizers are the fast ones."),
    "gradient_checkpointing_use_reentrant": ((False,), "recomputation is torch's with use_reentrant: false."),
    "use_liger": ((False,), "the head works at supervised tokens only; torch_compile fuses layers."),
    "use_logits_to_keep": ((True,), "the head works at supervised tokens only."),
    "use_num_logits_to_keep": ((True,), "the head works at supervised tokens only."),
    # Data
    "cache_dir": ((), "downloads go where HF_HOME says."),
    "overwrite_cache": ((False,), "what is cached is known by its content, and made anew when that changes."),
    "pad_to_max_length": ((False,), "a batch is padded to its longest example."),
    "padding_value": ((), "padding is masked, whatever it is made of."),
    "sortish_sampler": ((False,), "group_by_length puts examples of like length together."),
    "ignore_pad_token_for_loss": ((True,), "padding is never learned."),
    "max_predict_samples": ((), "a recipe trains and evaluates; toolkit evaluate MODEL is for other rows."),
    "test_file": ((), "a recipe trains and evaluates; run toolkit evaluate MODEL --dataset FILE afterwards."),
    "max_test_samples": ((), "a recipe trains and evaluates; toolkit evaluate MODEL is for other rows."),
    "dataset_batch_size": ((1000,), "rows are tokenized in batches of this library's size."),
    "num_of_sequences": ((1024,), "rows are packed over the whole dataset."),
    "chars_per_token": ((3.6,), "rows are packed by their tokens."),
    "sanity_check": ((False,), "max_train_examples takes the first rows alone."),
    "base_model_attribute_name": (("model",), "the model's parts are found by themselves."),
    "predict_with_generate": ((False,), "num_samples says how many texts are written at each evaluation."),
    # Logging
    "logging_dir": ((), "the files of a run, those of TensorBoard too, are in output_dir."),
    "logging_first_step": ((False,), "logging_steps says which steps are logged; 1 logs all."),
    "tracker_project_name": ((), "in every tracker the project is called toolkit; a run has its run_name."),
    "use_legacy_prediction_loop": ((False,), "evaluation keeps sums, and no predictions."),
    "include_inputs_for_metrics": ((False,), "evaluation keeps sums, and no predictions."),
}  # fmt: skip


def former_optimizer(name: str) -> str | None:
    """The setting `optim` that makes the steps of one of Trainer's optimizers that differs in how it is computed; else None."""
    return {
        "adamw_hf": "adamw_torch", "adamw": "adamw_torch", "adamw_torch_xla": "adamw_torch", "paged_adamw": "adamw_torch",
        "paged_adamw_32bit": "adamw_torch", "adamw_torch_npu_fused": "adamw_torch_fused",
        "adamw_apex_fused": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "adamw_bnb_8bit",
        "lion": "lion_32bit", "paged_lion_32bit": "lion_32bit", "paged_lion_8bit": "lion_8bit",
    }.get(name)  # fmt: skip


def former_packing(name: str) -> str | None:
    """The packing strategy that whole documents stand for under their former and other names; else None."""
    whole = ("greedy", "first_fit", "first_fit_decreasing", "ffd", "best_fit", "best_fit_decreasing")
    return "bfd" if name.replace("-", "_") in whole else None


def _renamed(name: str) -> Meaning:
    return lambda value, written: {name: value}


def _adafactor(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    return {} if value is False or written.get("optim") == "adafactor" else {"optim": "adafactor"}


def _evaluates(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    said = {"eval_strategy", "evaluation_strategy"} & set(written)
    return {} if said else {"eval_strategy": "steps" if value is True else "no"}


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


def _evaluation_file(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if {"train_file", "train_data_file"} & set(written):
        return {}  # the training file's line says what to do with both
    return "put it next to the training rows, as train.* and validation.* of one folder, and write dataset: FOLDER."


def _configuration(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    same = value in (written.get("model_name_or_path"), written.get("model"))
    return {} if same else "leave it out: the shape is the model's own. For one from scratch: toolkit copy pretrain."


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
    """The renames that the keys of texts and of the label mean together; said once, with the first of them."""
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

FORMER_TRANSLATED: dict[str, Meaning] = {
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "evaluate_during_training": _evaluates,
    "adafactor": _adafactor,
    "push_to_hub_model_id": _renamed("hub_model_id"),
    "log_with": _renamed("report_to"),
    "tokenizer_name": _renamed("tokenizer"),
    "block_size": _renamed("max_length"),
    "max_train_samples": _renamed("max_train_examples"),
    "max_eval_samples": _renamed("max_eval_examples"),
    "max_val_samples": _renamed("max_eval_examples"),
    "validation_split_percentage": _percentage,
    "train_file": _files,
    "train_data_file": _files,
    "validation_file": _evaluation_file,
    "eval_data_file": _evaluation_file,
    "config_name": _configuration,
    "task_name": _task,
    "text_column_name": _columns,
    "text_column_names": _columns,
    "label_column_name": _columns,
    "dataset_train_name": _renamed("train_split"),
    "dataset_test_name": _renamed("eval_split"),
}
