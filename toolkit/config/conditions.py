"""What a rule about settings is, and the conditions that several rules share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from toolkit.config.groups import OptimConfig
from toolkit.config.preferences import PreferenceConfig
from toolkit.config.run_groups import RunConfig
from toolkit.config.setting import Settings, flag_of


class Contradiction(NamedTuple):
    """Values that cannot all be meant, whoever set them."""

    broken: Callable[..., Any]
    message: str


class NoEffect(NamedTuple):
    """Settings that change nothing when `idle` holds; refused only when someone gave them, and gave more than "off"."""

    settings: tuple[str, ...]
    idle: Callable[..., Any]
    why: str
    reads: tuple[str, ...] | None = None  # the settings that `idle` takes; None: those of its parameters' names


def needs(settings: str | tuple[str, ...], other: str, *values: str) -> NoEffect:
    """Settings that need another one: to be one of the values (a list: to hold one of them), without values to be on."""

    def idle(**read: Any) -> bool:
        found = read[other]
        return not (set(values) & set(found if isinstance(found, list) else [found]) if values else found)

    names = (settings,) if isinstance(settings, str) else settings
    if not values:
        flag = flag_of(other)
        return NoEffect(names, idle, f"without {flag}: leave it out, or add {flag}.", (other,))
    last = " or ".join(values[-2:])
    return NoEffect(names, idle, f"with {{{other}}}: leave it out, or take {', '.join([*values[:-2], last])}.", (other,))


SIZES = ("nano-", "tiny-", "small-", "medium-", "large-")  # what the names of built-in shapes begin with


def is_built_in(model: str) -> bool:
    """Whether a model is one of the built-in shapes, made from a configuration here, and not a path or a name on the Hub."""
    return model.startswith(SIZES) and "/" not in model and not os.path.exists(model)


def is_on_the_hub(model: str) -> bool:
    return not is_built_in(model) and not os.path.isdir(model)


def is_on_a_server(teacher: str | None) -> bool:
    """Whether a teacher is named by the address of a server."""
    return teacher is not None and teacher.startswith(("http://", "https://"))


def trains_a_teacher(values: Mapping[str, Any]) -> bool:
    """Whether a recipe with these settings trains a teacher before its own first step, because none is named."""
    return "teacher" in values and values["teacher"] is None and values.get("self_distillation") is None


def lies_in(path: str, directory: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(directory), ""))


def is_pattern(text: str) -> bool:
    """Whether a text is regex=factor with a finite factor of at least 0."""
    pattern, equals, factor = text.rpartition("=")
    try:
        re.compile(pattern)
        return bool(pattern and equals) and 0 <= float(factor) < math.inf
    except (re.error, ValueError):
        return False


def is_adapter(model: str) -> bool:
    """Whether a model is a directory that holds an adapter and not the weights it belongs on."""
    directory = os.path.expanduser(model)
    return os.path.exists(os.path.join(directory, "adapter_config.json")) and not os.path.exists(
        os.path.join(directory, "config.json")
    )


def couples_a_micro_batch(config: Settings) -> bool:
    """Whether a loss of the settings compares the examples of a micro-batch, so that another micro-batch is another loss."""
    return isinstance(config, PreferenceConfig) and not set(COUPLING_PAIRS).isdisjoint(config.loss_type)


def follows_evaluations(config: Settings) -> bool:
    """Whether the learning rate of the settings depends on what evaluations find, so that another evaluation is another run."""
    return isinstance(config, OptimConfig) and config.lr_scheduler_type == "reduce_lr_on_plateau"


def is_decided_by_a_metric(config: RunConfig) -> bool:
    """Whether `metric_for_best_model` changes what a run does."""
    return bool(config.load_best_model_at_end or config.early_stopping_patience or follows_evaluations(config))


def are_patterns(texts: list[str], whole: bool) -> bool:
    """Whether all texts are regex=number with a number above 0, a whole one where requested."""
    numbers = [float(text.rpartition("=")[2]) for text in texts if is_pattern(text)]
    return len(numbers) == len(texts) and all(number > 0 and (number == int(number) or not whole) for number in numbers)


INITIALIZATION = re.compile(r"true|gaussian|orthogonal|olora|pissa(_niter_[1-9]\d*)?")
STARTS_ON_THE_BASE = ("true", "gaussian", "orthogonal")  # initializations that leave the frozen weights as they were
# Others of peft's that are known here and not taken: an adapter that needs a pass over data first.
FROM_DATA = ("eva", "corda", "lora_ga")
REFUSED_INITIALIZATIONS = (*FROM_DATA, "loftq", "mica")

# user/name or name, as the Hub takes them: no sign at the ends, none twice
REPOSITORY = re.compile(r"(?=(?:[^/]+/)?[^/]{1,96}$)(?!.*(?:--|\.\.|\.git$))(?:[a-zA-Z0-9][\w.-]*/)?\w(?:[\w.-]*\w)?")

# Metrics whose metrics have their names; what an `evaluate` module calls its metrics is known only when it has run.
PLAIN_METRIC = re.compile(
    "accuracy|balanced_accuracy|matthews_correlation|r?mse|mae|r2|pearson|"
    "(f1|precision|recall)(_(macro|micro|weighted|binary|per_class))?"
)
_LONG_NAMES = ("accuracy", "balanced_accuracy", "matthews_correlation", "precision", "recall", "pearson")


# What is measured where --metrics names nothing.
USUAL_METRICS = {"single_label": ["accuracy", "f1"], "multi_label": ["accuracy", "f1"], "regression": ["mse", "mae", "r2"]}
USUAL_TAG_METRICS = ["accuracy", "precision", "recall", "f1", "f1_macro"]


def never_measured(metric: str, metrics: list[str]) -> bool:
    """Whether it is a built-in metric that isn't among these, or one mistyped; a copy of the recipe may log one of its own."""
    metric = re.sub(r"_class_.+$", "_per_class", metric.removeprefix("eval_"))
    near = get_close_matches(metric, _LONG_NAMES, cutoff=0.9)
    is_built_in = PLAIN_METRIC.fullmatch(metric) or (near and not metric.startswith(near[0]))
    return bool(metric not in metrics and is_built_in and all(map(PLAIN_METRIC.fullmatch, metrics)))


WITH_ADAM = ("adamw_torch", "adamw_torch_fused", "nadam", "radam", "adamw_bnb_8bit", "muon")
OF_BITSANDBYTES = ("adamw_bnb_8bit", "lion_32bit", "lion_8bit")
WITH_BETAS = (*WITH_ADAM, "lion_32bit", "lion_8bit")
WITH_MOMENTUM = ("sgd", "rmsprop", "muon")


def packages_of_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """The packages that settings need next to the toolkit's own dependencies, by the setting's name."""
    needed = {
        "optim": ("bitsandbytes", settings.get("optim") in OF_BITSANDBYTES),
        "load_in_4bit": ("bitsandbytes", settings.get("load_in_4bit")),
        "fp8": ("torchao", settings.get("fp8", "none") != "none"),
    }
    return {name: package for name, (package, is_needed) in needed.items() if is_needed}


def momentum_of(config: OptimConfig) -> float:
    """The momentum of an OptimConfig: as set, else the default of its optimizer."""
    if config.momentum is not None:
        return float(config.momentum)
    return 0.95 if config.optim == "muon" else 0.0


WITH_DIVERGENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop")
WITHOUT_DIVERGENCE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired")
COUPLING_PAIRS = ("aot", "aot_unpaired")  # exact for the micro-batch: its pairs are compared with each other
WITH_SMOOTHING = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo")
WITH_LIKELIHOOD = ("sft", "cpo", "orpo")
OF_THE_ADAPTER = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "lora_trainable_tokens",
    "lora_rank_pattern", "lora_alpha_pattern", "lora_layers_to_transform", "use_rslora", "use_dora", "init_lora_weights",
)  # fmt: skip
