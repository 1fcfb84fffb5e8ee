"""Which figures SageMaker reads off a recipe's log lines, as names and regular expressions."""

import re
from typing import Any

from toolkit.config.conditions import USUAL_METRICS

_NUMBER = r"([-+]?[0-9][0-9.]*(?:e[-+]?[0-9]+)?)"
# Name in SageMaker: name in the line `step 10/200  loss 2.3456  lr 1.00e-03 ...`
_OF_TRAINING = {
    "train:loss": "loss", "train:learning_rate": "lr", "train:grad_norm": "norm",
    "train:tokens_per_second": "supervised_tokens/s",
    "train:examples_per_second": "examples/s", "train:mfu": "mfu",
}  # fmt: skip
_OF_PAIRS = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
# What the recipes' evaluations are called beside eval_loss, by a setting that only their settings have.
_OF_EVALUATION = {
    "z_loss": ("perplexity", "token_accuracy", "bits_per_byte"),
    "ld_alpha": (*_OF_PAIRS, "logps_chosen", "logps_rejected", "logps_drop"),
    "desirable_weight": (
        "rewards_desirable", "rewards_undesirable", "reward_margin", "reward_accuracy", "logps_desirable", "logps_undesirable",
        "kl", "reward_auc",
    ),
    "center_rewards_coefficient": _OF_PAIRS,
}
MOST = 40
_PER_CLASS, CLASSES = "_per_class", 10  # how many classes there are is known when the data are read: the first ones


def metric_definitions(config: Any) -> list[dict[str, str]]:
    """The figures that a recipe with these settings prints: those of its training lines and of its evaluations.

    SageMaker takes the first group of each match for a number. A line of another kind, such as a generated sample, has none of
    these beginnings.
    """
    names = dict(_OF_TRAINING)
    figures = ["loss", *(name for setting, found in _OF_EVALUATION.items() if hasattr(config, setting) for name in found)]
    usual = USUAL_METRICS.get(getattr(config, "problem_type", ""), [])
    metrics = [name for name in getattr(config, "metrics", []) or usual if re.fullmatch(r"\w+", name)]
    figures += [name for name in metrics if not name.endswith(_PER_CLASS)]
    wanted = getattr(config, "metric_for_best_model", "eval_loss").removeprefix("eval_")
    by_class = [name.removesuffix(_PER_CLASS) for name in metrics if name.endswith(_PER_CLASS)]
    figures += [wanted, *(f"{name}_class_{number}" for name in by_class for number in range(CLASSES))]
    names |= {f"eval:{figure}": f"eval_{figure}" for figure in dict.fromkeys(figures)}
    return [{"Name": name, "Regex": _expression(printed)} for name, printed in names.items()][:MOST]


def _expression(printed: str) -> str:
    """A figure among the pairs of name and number that follow the step."""
    return rf"(?:^|\s)step [0-9]+/[0-9]+  (?:\S+ \S+  )*{re.escape(printed)} {_NUMBER}(?:\s|$)"
