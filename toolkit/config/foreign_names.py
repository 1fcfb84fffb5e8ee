"""Keys of transformers' Trainer and TRL that are no settings here: the value that says what happens anyway, or what to do.

Their YAML files hold many keys that only say a default. `SAME` lists the values that mean what every recipe does: such a
key is taken and changes nothing. `PASSED_OVER` are keys on which no result depends: any value is taken, and what happens in
its place is said. `TRANSLATED` turns keys into settings. Any other value is refused with what to do instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.config.former_names import FORMER_PASSED_OVER, FORMER_SAME, FORMER_TRANSLATED

# The name, the values that mean what happens here anyway (a null always does), and what to do about any other value.
SAME: dict[str, tuple[tuple[Any, ...], str]] = {
    # Precision and speed
    "neftune_noise_alpha": ((0,), "leave it out, or add the noise in a copy of the recipe (toolkit copy sft)."),
    "optim_args": (("",), "leave it out: adam_beta1, adam_beta2, adam_epsilon and momentum are settings."),
    "optim_target_modules": ((), "leave it out, or take lr_patterns, factors on the rate by parameter name."),
    "average_tokens_across_devices": ((True,), "leave it out: a mean is always over the tokens of all devices."),
    "router_aux_loss_coef": ((0,), "leave it out: the loss of a router is not added here."),
    # Data
    "dataset_kwargs": (({}, {"skip_prepare_dataset": False}), "leave it out: rows of input_ids are taken as they are."),
    "shuffle_dataset": ((True, False), "leave it out: each epoch has an order of its own, drawn from the seed."),
    "eos_token": ((), "leave it out: a turn ends as the chat template ends it, which generation is told too, and a text "
                      "with its tokenizer's end. For another, tokenizer: a directory whose tokenizer_config.json says it."),
    "dataloader_drop_last": ((False,), "leave it out: every example is trained on, those of a short last batch too."),
    "test_split_size": ((), "take eval_fraction, the share of the training rows that is held out."),
    # Evaluation, devices
    "fsdp_config": (({},), "leave it out, and give toolkit train --accelerate-config FILE (see toolkit copy fsdp2)."),
    "parallelism_config": ((), "leave it out: tensor and context parallelism are not supported."),
    "activation_checkpointing": ((False,), "take gradient_checkpointing."),
    "accelerate_config": ((), "leave it out, and give it to the launcher: toolkit train RECIPE --accelerate-config FILE."),
    "num_processes": ((), "leave it out, and give it to the launcher: toolkit train RECIPE --processes NUMBER."),
    # Model and adapter
    "lora_target_parameters": (([],), "leave it out: modules alone are adapted, see lora_target_modules."),
    "load_in_8bit": ((False,), "take load_in_4bit."),
    # Preferences
    "ignore_bias_buffers": ((False,), "leave it out."),
    "use_weighting": ((False,), "leave it out: WPO is not among the losses."),
    "reference_free": ((False,), "take loss_type simpo, cpo, orpo or sft, which have no reference."),
    "max_prompt_length": ((), "leave it out: a prompt loses its beginning where a pair is longer than max_length."),
    "max_completion_length": ((), "leave it out: both answers are cut at one place where a pair is longer than max_length."),
    "label_pad_token_id": ((-100,), "leave it out."),
    "is_encoder_decoder": ((False,), "leave it out: models that only decode are trained."),
    "force_use_ref_model": ((False,), "take reference: model."),
    "ref_model_name_or_path": ((), "leave it out: the reference is the model as it was when training began."),
    **FORMER_SAME,
}  # fmt: skip

# The name, the values that mean just that, and what happens whatever its value.
PASSED_OVER: dict[str, tuple[tuple[Any, ...], str]] = {
    # Speed and memory
    "use_liger_kernel": ((False,), "the head works at supervised tokens only; torch_compile fuses layers."),
    "liger_kernel_config": ((), "the head works at supervised tokens only; torch_compile fuses layers."),
    "activation_offloading": ((False,), "activations stay on the device; gradient_checkpointing saves more."),
    "bf16_full_eval": ((False,), "evaluation computes as training does."),
    "fp16_full_eval": ((False,), "evaluation computes as training does."),
    "torch_compile_mode": (("default",), "layers are compiled in the default mode."),
    "torch_empty_cache_steps": ((), "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment."),
    "use_cache": ((True, False), "training keeps no cache, generation does."),
    "pad_to_multiple_of": (("auto",), "batches are padded to their longest example; packing has no padding."),
    "pad_token": ((), "padding is masked, whatever it is made of."),
    "half_precision_backend": (("auto",), "fp16 and bf16 are torch's autocast."),
    "bnb_4bit_quant_storage": (("uint8",), "4-bit weights are stored as uint8."),
    # Data
    "remove_unused_columns": ((True,), "the model is given only what it was tokenized for."),
    "length_column_name": (("length",), "lengths are counted."),
    "ignore_data_skip": ((False,), "a resumed run goes on at the very next example."),
    "label_names": ((["labels"],), "the label column is `label`; see rename_columns."),
    # Logging, evaluation and saving
    "generate_during_eval": ((False,), "num_samples says how many texts are written at each evaluation."),
    "do_train": ((True,), "a recipe trains. To evaluate alone: toolkit evaluate MODEL."),  # false is the default there
    "do_predict": ((False,), "run toolkit evaluate MODEL --split test afterwards."),
    "accelerator_config": (({},), "batches are cut the same way on any number of devices."),
    "lora_task_type": (("CAUSAL_LM",), "the recipe says it."),
    "disable_tqdm": ((True, False), "there is no bar: a line at each logging."),
    "log_on_each_node": ((True, False), "the main process alone prints."),
    "logging_nan_inf_filter": ((True, False), "nonfinite says what happens at such a step."),
    "include_num_input_tokens_seen": (("no", False), "supervised tokens are logged always."),
    "include_tokens_per_second": ((True, False), "tokens_per_second is logged always."),
    "project": (("huggingface",), "in every tracker the project is called toolkit; a run has its run_name."),
    "trackio_space_id": ((), "trackio writes on this machine."),
    "trackio_bucket_id": ((), "trackio writes on this machine."),
    "trackio_static_space_id": ((), "trackio writes on this machine."),
    **dict.fromkeys(("prediction_loss_only", "eval_use_gather_object", "batch_eval_metrics"),
                    ((False,), "evaluation keeps sums, and no predictions.")),
    "eval_do_concat_batches": ((True,), "evaluation keeps sums, and no predictions."),
    "include_for_metrics": (([],), "evaluation keeps sums, and no predictions."),
    "debug": (("", []), "nothing is debugged by a setting."),
    "skip_memory_metrics": ((True,), "memory is not measured."),
    "save_only_model": ((False,), "a checkpoint holds all that a resume needs; save_strategy: no writes the model alone."),
    "save_on_each_node": ((False,), "output_dir is one that all nodes see."),
    "save_safetensors": ((True,), "nothing is saved as a pickle."),
    "enable_jit_checkpoint": ((True, False), "a signal is always answered with a checkpoint."),
    "restore_callback_states_from_checkpoint": ((False, True), "there are no callbacks; what run.keep was given is restored."),
    "hub_always_push": ((False,), "what could not be sent waits on disk for toolkit push."),
    "dataloader_persistent_workers": ((True, False), "workers live as long as the run."),
    "dataloader_in_order": ((True,), "the order is exact."),
    "ddp_timeout": ((1800,), "hang_timeout says after how many seconds of silence a rank counts as hanging."),
    "ddp_find_unused_parameters": ((False,), "parameters without a gradient are frozen in a copy of the recipe."),
    "ddp_broadcast_buffers": ((), "buffers are those of each rank."),
    "ddp_static_graph": ((False,), "the graph may change."),
    "log_level": (("passive",), "messages have no levels."),
    "log_level_replica": (("warning",), "the main process alone prints."),
    "dataloader_pin_memory": ((True,), "memory is pinned where the device is a GPU."),
    "dataloader_prefetch_factor": ((2,), "each worker is two batches ahead."),
    "dataloader_multiprocessing_context": ((), "workers start as they do by default on this system."),
    "eval_accumulation_steps": ((), "evaluation keeps sums, and no predictions."),
    "ddp_bucket_cap_mb": ((25,), "gradients go in buckets of torch's own size."),
    "precompute_ref_batch_size": ((), "the reference is computed in micro-batches of the training's size."),
    **FORMER_PASSED_OVER,
}


def translate(key: str, value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    """What a key of theirs means: settings with values as they would be written (perhaps none), or what to do about it.

    Args:
        value: as it was written: text on a command line, or what YAML made of it.
        written: all that was written beside it, by names with underscores.
    """
    value = _read(value)
    if key in PASSED_OVER:
        return {}
    if key in SAME:
        same, advice = SAME[key]
        return {} if value is None or any(type(each) is type(value) and each == value for each in same) else advice
    return {} if value is None else TRANSLATED[key](value, written)


def is_foreign(key: str) -> bool:
    """Whether a name, with underscores, is one of theirs that this file knows."""
    return key in SAME or key in PASSED_OVER or key in TRANSLATED


def passed_over(key: str, value: Any) -> str | None:
    """What happens in place of a value that is taken and has no effect; None where it means that or is no such key."""
    if key not in PASSED_OVER:
        return None
    same, instead = PASSED_OVER[key]
    return None if _read(value) in (None, *same) else instead


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.strip().lower() in words:
        return words[value.strip().lower()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _gradient_checkpointing(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    always = value in ({}, {"use_reentrant": False})
    return {} if always else "leave it out: recomputation is always torch's with use_reentrant: false."


def _model_arguments(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    names = {"dtype": "dtype", "torch_dtype": "torch_dtype", "attn_implementation": "attn_implementation",
             "revision": "model_revision", "trust_remote_code": "trust_remote_code"}  # fmt: skip
    left = [name for name in value if name not in names and name != "use_cache"] if isinstance(value, dict) else ["its text"]
    if left:
        names_left = ", ".join(map(str, left))
        return f"leave {names_left} out of it; its dtype, attn_implementation, revision and trust_remote_code are known."
    return {names[name]: each for name, each in value.items() if name in names}


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


def _padding_free(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    return {} if value is False or _read(written.get("packing")) is True else "take packing, whose rows have no padding."


def _evaluation_packing(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    same = value == (_read(written.get("packing")) or False)
    return {} if same else "leave it out: evaluation packs as training does, and its figures are the same either way."


def _data_seed(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    return {} if value == _read(written.get("seed", 42)) else "leave it out: seed draws the order of the data as well."


def _sampling(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    known: dict[str, dict[str, Any]] = {"random": {}, "group_by_length": {"group_by_length": True}}
    return known.get(str(value), "take random or group_by_length: examples are shuffled in each epoch.")


def _evaluates(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    return {} if value is True or "eval_strategy" in written else {"eval_strategy": "no"}


def _truncation(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if value == "keep_start":
        return {}
    return "take keep_start, or overlong: split, drop or refuse. Of a pair the prompt loses its beginning first, always."


def _no_dropout(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    if value is True and _read(written.get("lora_dropout", 0)):
        return "in TRL it turns lora_dropout off as well: write lora_dropout: 0.0 and dropout: 0.0, or leave it out."
    return {"dropout": 0.0} if value is True else {}


def _sft_loss(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    plain = value in ("nll", "chunked_nll")
    return {} if plain else "leave it out, or write that loss in a copy of the recipe (toolkit copy sft)."


def _of_an_adapter(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    unused = value is False or _read(written.get("use_peft")) is False
    return {} if unused else "it is for an adapter: take recipes/lora.py, this recipe with one (toolkit train lora)."


def _local_rank(value: Any, written: Mapping[str, Any]) -> dict[str, Any] | str:
    """`python -m torch.distributed.launch` says it twice: in the environment, and as a flag of each rank."""
    same = str(value) in ("-1", "0", os.environ.get("LOCAL_RANK"))
    return {} if same else "leave it out: the launcher says it."


def _renamed(name: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any] | str]:
    return lambda value, written: {name: value}


TRANSLATED: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any] | str]] = {
    "gradient_checkpointing_kwargs": _gradient_checkpointing,
    "activation_checkpointing_kwargs": _gradient_checkpointing,
    "model_init_kwargs": _model_arguments,
    "lr_scheduler_kwargs": _schedule_arguments,
    "dataset_text_field": _text_column,
    "dataset_config": _dataset_configuration,
    "dataset_config_name": _dataset_configuration,  # of the example scripts
    "datasets": _mixture,
    "env": _environment,
    "padding_free": _padding_free,
    "eval_packing": _evaluation_packing,
    "data_seed": _data_seed,
    "train_sampling_strategy": _sampling,
    "do_eval": _evaluates,
    "truncation_mode": _truncation,
    "disable_dropout": _no_dropout,
    "local_rank": _local_rank,
    "loss_type": _sft_loss,  # of DPO it is a setting
    "precompute_ref_log_probs": lambda value, written: {"reference": "cache"} if value is True else {},
    "evaluation_strategy": _renamed("eval_strategy"),
    "dataset_streaming": _renamed("streaming"),
    "chat_template_path": _renamed("chat_template"),
    "use_bnb_nested_quant": _renamed("bnb_4bit_use_double_quant"),
    "no_cuda": _renamed("use_cpu"),
    **FORMER_TRANSLATED,
    # Where the recipe has no adapter
    **dict.fromkeys(("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
                     "use_rslora", "use_dora", "load_in_4bit", "bnb_4bit_quant_type"), _of_an_adapter),
}  # fmt: skip
