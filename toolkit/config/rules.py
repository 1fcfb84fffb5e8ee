"""Which settings do not go together, as two tables: contradictions, and settings that have no effect with the others.

The parameters of a rule's condition are the settings it reads, by name; a rule is asked only where the recipe has them
all. In the texts `{name}` stands for the setting as it would be typed, such as `--lr-scheduler-type cosine`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from toolkit.config.setting import Refusal, Settings, settings_of, show_setting


class Contradiction(NamedTuple):
    """Values that cannot all be meant, whoever set them."""

    broken: Callable[..., Any]
    message: str


class NoEffect(NamedTuple):
    """Settings that change nothing when `idle` holds; refused only when someone gave them, and gave more than "off"."""

    settings: tuple[str, ...]
    idle: Callable[..., Any]
    why: str


def check_together(config: Settings, given: frozenset[str] = frozenset()) -> None:
    """Refuse settings that contradict each other, and given ones that have no effect with the others.

    Args:
        config: all settings of a recipe.
        given: names of those that the user typed or wrote, in contrast to the recipe's defaults.
    """
    messages = list(broken_rules(config, given).values())
    if messages:
        raise Refusal(messages[0] if len(messages) == 1 else "\n  - ".join(["these settings do not go together", *messages]))


def implied_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What given settings say without words; anything that is given itself stays as it is."""
    implied: dict[str, Any] = {}
    for name, (applies, others) in IMPLIED.items():
        if name in given and applies(given[name]):
            implied.update(others)
    return {name: value for name, value in implied.items() if name not in given}


def _always(value: Any) -> bool:
    return True


IMPLIED: dict[str, tuple[Callable[[Any], bool], dict[str, Any]]] = {
    "logging_steps": (_always, {"logging_strategy": "steps"}),
    "eval_steps": (_always, {"eval_strategy": "steps"}),
    "save_steps": (_always, {"save_strategy": "steps"}),
    "num_train_epochs": (_always, {"max_steps": None}),
    "eval_fraction": (lambda share: share == 0, {"eval_strategy": "no", "eval_on_start": False}),
    "eval_strategy": (lambda strategy: strategy == "no", {"eval_on_start": False}),
}


def broken_rules(config: Settings, given: frozenset[str]) -> dict[tuple[str, str], str]:
    """The message of each broken rule, by (setting concerned or "", text of the rule)."""
    settings = settings_of(type(config))
    values = {name: getattr(config, name) for name in settings}
    typed = {name: show_setting(settings[name], value) for name, value in values.items()}
    broken = {}
    for rule in CONTRADICTIONS:
        if _holds(rule.broken, values):
            broken["", rule.message] = rule.message.format_map(typed)
    for none in NO_EFFECT:
        for name in none.settings:
            if name in given and values.get(name) and _holds(none.idle, values):
                broken[name, none.why] = f"{typed[name]} has no effect {none.why.format_map(typed)}"
    return broken


def _holds(condition: Callable[..., Any], values: Mapping[str, Any]) -> bool:
    reads = inspect.signature(condition).parameters
    return all(name in values for name in reads) and bool(condition(**{name: values[name] for name in reads}))


def is_built_in(model: str) -> bool:
    """Whether a model is one of the built-in shapes, made from a configuration here."""
    return model.startswith("tiny-") and "/" not in model and not os.path.isdir(model)


def _is_on_the_hub(model: str) -> bool:
    return not is_built_in(model) and not os.path.isdir(model)


def _lies_in(path: str, directory: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(directory), ""))


def _is_pattern(text: str) -> bool:
    """Whether a text is regex=factor with a factor of at least 0."""
    pattern, equals, factor = text.rpartition("=")
    try:
        re.compile(pattern)
        return bool(pattern and equals) and float(factor) >= 0
    except (re.error, ValueError):
        return False


def is_adapter(model: str) -> bool:
    """Whether a model is a directory that holds an adapter and not the weights it belongs on."""
    directory = os.path.expanduser(model)
    return os.path.exists(os.path.join(directory, "adapter_config.json")) and not os.path.exists(
        os.path.join(directory, "config.json")
    )


def _are_patterns(texts: list[str], whole: bool) -> bool:
    """Whether all texts are regex=number with a number above 0, a whole one where asked."""
    numbers = [float(text.rpartition("=")[2]) for text in texts if _is_pattern(text)]
    return len(numbers) == len(texts) and all(number > 0 and (number == int(number) or not whole) for number in numbers)


_INITIALISATION = re.compile(r"true|gaussian|olora|pissa(_niter_[1-9]\d*)?")

# Metrics whose figures bear their names; what an `evaluate` module calls its figures is known only when it has run.
_PLAIN_METRIC = re.compile(r"accuracy|balanced_accuracy|matthews_correlation|(f1|precision|recall)(_\w+)?")


def _never_measured(metric: str, metrics: list[str]) -> bool:
    if not all(_PLAIN_METRIC.fullmatch(name) for name in metrics):
        return False
    figure = re.sub(r"_class_\d+$", "_per_class", metric.removeprefix("eval_"))
    return figure not in ("loss", *metrics)


_WITH_ADAM = ("adamw_torch", "adamw_torch_fused", "nadam", "radam", "adamw_bnb_8bit", "muon")
_WITH_BETAS = (*_WITH_ADAM, "lion_32bit", "lion_8bit")
_WITH_MOMENTUM = ("sgd", "rmsprop", "muon")
_WITH_DIVERGENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop")
_WITHOUT_DIVERGENCE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired")
_WITH_SMOOTHING = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo")
_WITH_LIKELIHOOD = ("sft", "cpo", "orpo")
_OF_THE_ADAPTER = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "lora_rank_pattern",
    "lora_alpha_pattern", "lora_layers_to_transform", "use_rslora", "use_dora", "init_lora_weights",
)  # fmt: skip

CONTRADICTIONS = (
    # Precision
    Contradiction(lambda bf16, fp16: bf16 and fp16, "--bf16 and --fp16 are two precisions for one computation: choose one."),
    Contradiction(
        lambda fp16, dtype: fp16 and dtype == "float16",
        "--fp16 scales the loss for weights in float32, and {dtype} leaves none: take --dtype float32, or --bf16.",
    ),
    # Runs
    Contradiction(
        lambda resume, resume_from: resume and resume_from,
        "--resume takes the newest checkpoint of --output-dir and {resume_from} names another: give one of the two.",
    ),
    Contradiction(
        lambda resume, overwrite_output_dir: resume and overwrite_output_dir,
        "--overwrite-output-dir would throw away the run that --resume continues: give one of the two.",
    ),
    Contradiction(
        lambda resume_from, overwrite_output_dir, output_dir: (
            overwrite_output_dir and resume_from and _lies_in(resume_from, output_dir)
        ),
        "--overwrite-output-dir would throw away {resume_from}: take another --output-dir.",
    ),
    Contradiction(
        lambda report_to: "none" in report_to and len(report_to) > 1,
        "{report_to} asks for trackers and for none: leave none out.",
    ),
    # Data
    Contradiction(
        lambda streaming, max_steps: streaming and max_steps is None,
        "--streaming has no end of its own: say where it stops with --max-steps.",
    ),
    Contradiction(
        lambda rename_columns: any(not all(pair.partition("=")[::2]) for pair in rename_columns),
        "{rename_columns}: must be old=new, as in --rename-columns question=prompt.",
    ),
    # Model
    Contradiction(
        lambda trust_remote_code, model, model_revision: trust_remote_code and _is_on_the_hub(model) and not model_revision,
        "--trust-remote-code runs whatever the repository of {model} holds on the day: pin the code you have read, with "
        "--model-revision and a commit.",
    ),
    Contradiction(
        lambda max_position_embeddings, max_length: max_position_embeddings and max_position_embeddings < max_length,
        "{max_position_embeddings} is shorter than an example may be: {max_length} needs a context as long.",
    ),
    # Adapter
    Contradiction(
        lambda load_in_4bit, use_peft: load_in_4bit and not use_peft,
        "--load-in-4bit freezes the model, and without --use-peft nothing is left to train: add --use-peft.",
    ),
    Contradiction(
        lambda load_in_4bit, model: load_in_4bit and is_built_in(model),
        "--load-in-4bit is for weights that are read from files, and {model} is made here: name another model.",
    ),
    Contradiction(
        lambda load_in_4bit, zero_stage, fsdp, deepspeed: load_in_4bit and (zero_stage == 3 or fsdp or deepspeed),
        "--load-in-4bit needs the whole frozen model on each device, and here it would be sharded: take --zero-stage 2.",
    ),
    Contradiction(
        lambda load_in_4bit, init_lora_weights: load_in_4bit and init_lora_weights not in ("true", "gaussian"),
        "{init_lora_weights} changes the frozen weights, which --load-in-4bit has rounded: take --init-lora-weights gaussian.",
    ),
    Contradiction(
        lambda init_lora_weights: not _INITIALISATION.fullmatch(init_lora_weights),
        "{init_lora_weights}: must be one of true, gaussian, pissa, pissa_niter_16 (or another number), olora.",
    ),
    Contradiction(
        lambda lora_rank_pattern: not _are_patterns(lora_rank_pattern, whole=True),
        "{lora_rank_pattern}: must be regex=rank, as in --lora-rank-pattern 'down_proj=32'.",
    ),
    Contradiction(
        lambda lora_alpha_pattern: not _are_patterns(lora_alpha_pattern, whole=False),
        "{lora_alpha_pattern}: must be regex=alpha, as in --lora-alpha-pattern 'down_proj=64'.",
    ),
    # Reference
    Contradiction(
        lambda sync_ref_model, reference: sync_ref_model and reference not in ("auto", "model"),
        "--sync-ref-model moves a second model, and {reference} has none: take --reference model.",
    ),
    Contradiction(
        lambda sync_ref_model, use_peft: sync_ref_model and use_peft,
        "--sync-ref-model mixes whole models, and --use-peft trains an adapter: leave one of the two out.",
    ),
    Contradiction(
        lambda sync_ref_model, zero_stage, fsdp, deepspeed: sync_ref_model and (zero_stage == 3 or fsdp or deepspeed),
        "--sync-ref-model needs whole models on each device, and here they would be sharded: take --zero-stage 2, or DDP.",
    ),
    Contradiction(
        lambda streaming, reference: streaming and reference == "cache",
        "{reference} finds pairs again by their row, and {streaming} has no rows: take --reference auto.",
    ),
    # Optimiser
    Contradiction(
        lambda warmup_steps: warmup_steps > 1 and warmup_steps != int(warmup_steps),
        "{warmup_steps}: must be a whole number of steps, or a fraction of the run below 1.",
    ),
    Contradiction(
        lambda lr_patterns: not all(_is_pattern(text) for text in lr_patterns),
        "{lr_patterns}: must be regex=factor, as in --lr-patterns 'embed=0.1'. One with a comma in it goes into JSON: "
        """--lr-patterns '["layers.(1,2)=0.5"]'.""",
    ),
    # Preferences
    Contradiction(
        lambda loss_type: not loss_type,
        "--loss-type is empty: name one loss or several, such as sigmoid.",
    ),
    Contradiction(
        lambda loss_type, loss_weights: loss_weights and len(loss_weights) != len(loss_type),
        "{loss_weights} beside {loss_type}: must be one weight for each loss.",
    ),
    Contradiction(
        lambda loss_type, label_smoothing: "exo_pair" in loss_type and label_smoothing == 0,
        "exo_pair divides by {label_smoothing}: must be above 0, as in --label-smoothing 0.001.",
    ),
    Contradiction(
        lambda loss_type, f_divergence_type: f_divergence_type != "reverse_kl" and set(_WITHOUT_DIVERGENCE) & set(loss_type),
        f"{{f_divergence_type}} is defined for differences of rewards, as in {', '.join(_WITH_DIVERGENCE)}; {{loss_type}} "
        "takes rewards one by one.",
    ),
    Contradiction(
        lambda loss_type, ld_alpha: ld_alpha is not None and set(_WITH_LIKELIHOOD) & set(loss_type),
        f"{{ld_alpha}} weighs down the tokens whose whole likelihood {', '.join(_WITH_LIKELIHOOD)} train on: leave it out of "
        "{loss_type}.",
    ),
    # Evaluation
    Contradiction(
        lambda load_best_model_at_end, eval_strategy: load_best_model_at_end and eval_strategy == "no",
        "--load-best-model-at-end has nothing to compare with --eval-strategy no: take epoch or steps.",
    ),
    Contradiction(
        lambda early_stopping_patience, eval_strategy: early_stopping_patience and eval_strategy == "no",
        "{early_stopping_patience} counts evaluations, and with --eval-strategy no there are none: take epoch or steps.",
    ),
    Contradiction(
        lambda metric_for_best_model, metrics: _never_measured(metric_for_best_model, metrics),
        "{metric_for_best_model} is never measured with {metrics}: take eval_loss, or a metric that is in the list.",
    ),
)

NO_EFFECT = (
    # Schedule
    NoEffect(
        ("warmup_steps",), lambda lr_scheduler_type: lr_scheduler_type == "constant",
        "with {lr_scheduler_type}: leave it out, or take constant_with_warmup.",
    ),
    NoEffect(
        ("min_lr_ratio",), lambda lr_scheduler_type: lr_scheduler_type in ("constant", "constant_with_warmup"),
        "with {lr_scheduler_type}, which never falls: leave it out, or take cosine or linear.",
    ),
    NoEffect(
        ("lr_power",), lambda lr_scheduler_type: lr_scheduler_type != "polynomial",
        "with {lr_scheduler_type}: leave it out, or take polynomial.",
    ),
    NoEffect(
        ("lr_cycles",), lambda lr_scheduler_type: lr_scheduler_type not in ("cosine_with_restarts", "step"),
        "with {lr_scheduler_type}: leave it out, or take cosine_with_restarts or step.",
    ),
    NoEffect(
        ("lr_gamma",), lambda lr_scheduler_type: lr_scheduler_type not in ("step", "exponential"),
        "with {lr_scheduler_type}: leave it out, or take step or exponential.",
    ),
    NoEffect(
        ("lr_decay_ratio",), lambda lr_scheduler_type: lr_scheduler_type != "warmup_stable_decay",
        "with {lr_scheduler_type}: leave it out, or take warmup_stable_decay.",
    ),
    # Optimiser
    NoEffect(
        ("adam_beta1", "adam_beta2"), lambda optim: optim not in _WITH_BETAS,
        f"with {{optim}}: leave it out, or take one of {', '.join(_WITH_BETAS)}.",
    ),
    NoEffect(
        ("adam_epsilon",), lambda optim: optim not in _WITH_ADAM,
        f"with {{optim}}: leave it out, or take one of {', '.join(_WITH_ADAM)}.",
    ),
    NoEffect(
        ("momentum",), lambda optim: optim not in _WITH_MOMENTUM,
        f"with {{optim}}: leave it out, or take one of {', '.join(_WITH_MOMENTUM)}.",
    ),
    NoEffect(
        ("max_nonfinite_steps",), lambda nonfinite: nonfinite == "stop",
        "with {nonfinite}, which stops at the first one: leave it out.",
    ),
    NoEffect(
        ("class_weights", "label_smoothing_factor"), lambda problem_type: problem_type == "regression",
        "with {problem_type}, where there are no classes: leave it out.",
    ),
    # Preferences
    NoEffect(
        ("beta",), lambda loss_type: set(loss_type) <= {"sft"},
        "with {loss_type}, which compares with nothing: leave it out, or add sigmoid.",
    ),
    NoEffect(
        ("label_smoothing",), lambda loss_type: not set(loss_type) & set(_WITH_SMOOTHING),
        f"with {{loss_type}}: leave it out, or take one of {', '.join(_WITH_SMOOTHING)}.",
    ),
    NoEffect(
        ("f_divergence_type",),
        lambda loss_type, f_divergence_type: (
            f_divergence_type != "reverse_kl" and not set(loss_type) & set(_WITH_DIVERGENCE + _WITHOUT_DIVERGENCE)
        ),
        "with {loss_type}, which compares with no reference model: leave it out, or add sigmoid.",
    ),
    NoEffect(
        ("f_alpha_divergence_coef",), lambda f_divergence_type: f_divergence_type != "alpha_divergence",
        "with {f_divergence_type}: leave it out, or take alpha_divergence.",
    ),
    NoEffect(
        ("discopop_tau",), lambda loss_type: "discopop" not in loss_type,
        "with {loss_type}: leave it out, or take discopop.",
    ),
    NoEffect(
        ("simpo_gamma",), lambda loss_type: "simpo" not in loss_type,
        "with {loss_type}: leave it out, or take simpo.",
    ),
    NoEffect(("cpo_alpha",), lambda loss_type: "cpo" not in loss_type, "with {loss_type}: leave it out, or take cpo."),
    # Model
    NoEffect(
        ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "max_position_embeddings", "hidden_act"),
        lambda model: not is_built_in(model),
        "with {model}, whose shape is fixed: leave it out, or take a built-in shape such as --model tiny-llama.",
    ),
    NoEffect(
        ("vocab_size",), lambda model, tokenizer: is_built_in(model) and tokenizer is not None,
        "beside {tokenizer}, which has its own vocabulary: leave one of the two out.",
    ),
    NoEffect(
        ("model_revision",), lambda model: not _is_on_the_hub(model),
        "with {model}, which does not come from the Hub: leave it out.",
    ),
    NoEffect(("trust_remote_code",), is_built_in, "with {model}, which is built in: leave it out."),
    # Adapter
    NoEffect(
        (*_OF_THE_ADAPTER, "loraplus_lr_ratio"), lambda use_peft: not use_peft,
        "without --use-peft: leave it out, or add --use-peft.",
    ),
    NoEffect(
        _OF_THE_ADAPTER, is_adapter,
        "with {model}, an adapter that has its shape already: leave it out, or name the model it belongs on.",
    ),
    NoEffect(
        ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"), lambda load_in_4bit: not load_in_4bit,
        "without --load-in-4bit: leave it out, or add it.",
    ),
    # Reference
    NoEffect(
        ("reference", "sync_ref_model"), lambda loss_type: set(loss_type) <= {"simpo", "cpo", "orpo", "sft"},
        "with {loss_type}, which has no reference model: leave it out.",
    ),
    NoEffect(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"), lambda sync_ref_model: not sync_ref_model,
        "without --sync-ref-model: leave it out, or add it.",
    ),
    # Data
    NoEffect(("packing_strategy",), lambda packing: not packing, "without --packing: leave it out, or pack."),
    NoEffect(
        ("group_by_length",), lambda packing: packing,
        "with --packing, whose rows are all of one length: leave it out, or take --no-packing.",
    ),
    NoEffect(
        ("group_by_length", "dataloader_num_workers"), lambda streaming: streaming,
        "with --streaming, which is read in order by one process: leave it out.",
    ),
    NoEffect(
        ("eval_fraction",), lambda eval_split: eval_split is not None,
        "beside {eval_split}: nothing needs to be held out. Leave one of the two out.",
    ),
    NoEffect(
        ("gradient_accumulation_steps",), lambda global_batch_size: global_batch_size is not None,
        "beside {global_batch_size}, which derives it: leave one of the two out (--global-batch-size none undoes a default).",
    ),
    # Evaluation
    NoEffect(
        ("eval_on_start", "eval_delay", "eval_split", "max_eval_examples", "per_device_eval_batch_size", "num_samples",
         "sample_max_new_tokens", "sample_temperature"),
        lambda eval_strategy: eval_strategy == "no",
        "with --eval-strategy no: leave it out, or take epoch or steps.",
    ),
    NoEffect(
        ("sample_max_new_tokens", "sample_temperature"), lambda num_samples: num_samples == 0,
        "with --num-samples 0: leave it out.",
    ),
    NoEffect(
        ("greater_is_better",),
        lambda load_best_model_at_end, early_stopping_patience: not (load_best_model_at_end or early_stopping_patience),
        "when nothing is decided by a metric: leave it out, or add --load-best-model-at-end or --early-stopping-patience 3.",
    ),
    # Runs
    NoEffect(
        ("eval_steps",), lambda eval_strategy: eval_strategy != "steps",
        "with {eval_strategy}: leave it out, or take --eval-strategy steps.",
    ),
    NoEffect(
        ("save_steps",), lambda save_strategy: save_strategy != "steps",
        "with {save_strategy}: leave it out, or take --save-strategy steps.",
    ),
    NoEffect(
        ("logging_steps",), lambda logging_strategy: logging_strategy != "steps",
        "with {logging_strategy}: leave it out, or take --logging-strategy steps.",
    ),
    NoEffect(
        ("save_total_limit",),
        lambda save_strategy, load_best_model_at_end: save_strategy == "no" and not load_best_model_at_end,
        "with {save_strategy}: leave it out, or take --save-strategy epoch or steps.",
    ),
    NoEffect(
        ("run_name",), lambda report_to: not set(report_to) - {"none"},
        "without a tracker that would show it: leave it out, or say which with --report-to.",
    ),
    NoEffect(("tf32",), lambda use_cpu: use_cpu, "with --use-cpu: leave it out."),
)
