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
