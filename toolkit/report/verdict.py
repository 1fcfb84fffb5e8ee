"""What two compared runs come to, in words: equal to the bit, or from where on they differ and what is the likely cause."""

import json
from collections.abc import Sequence

from toolkit.report.compare import ABSENT, Comparison, Difference
from toolkit.system.numbers import is_usable

_CAUSES = ("setting", "environment", "model", "data")
_RATE = ("learning_rate", "lr_", "warmup_", "min_lr", "max_steps", "num_train_epochs", "layer_lr_decay", "loraplus_lr_ratio")
_MOST_NAMED = 3


def is_equal(comparison: Comparison) -> bool:
    """Whether all that either run recorded is the same in the other, and something shows it: metrics or tensors."""
    return not comparison.differences and not comparison.lacking and bool(comparison.steps or comparison.tensors)


def verdict(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> str:
    """One or two sentences; `names` are those of the runs."""
    differences, compared = comparison.differences, _compared(comparison)
    causes = [each for each in differences if each.stage in _CAUSES and each.has_effect]
    effects = [each for each in differences if each.stage not in _CAUSES]
    if not differences:
        if not compared:
            return "Nothing that both runs have could be compared."
        if comparison.lacking:
            cut = ", ".join(comparison.lacking)
            return f"What could be compared is equal to the bit ({compared}), and not all could be: {cut}."
        lacking = "" if comparison.tensors else " No weights were compared."
        return f"The runs are equal to the bit in all that they recorded: {compared}.{lacking}"
    if not effects:
        listed = _listed([each for each in differences if each.stage in _CAUSES], names)
        same = f"the same to the bit ({compared})" if compared else "not there to be compared"
        return f"What the runs came to is {same}, although {listed}."
    first = min(effects, key=_when)
    return f"{_begins(first, effects, names, comparison)}, {_because(first, effects, causes, names, differences)}."


def show_value(value: object) -> str:
    """A value of a difference in few characters."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def by_how_much(difference: Difference) -> str:
    """The second number minus the first, and its share of the first; of a tensor how far apart; else empty."""
    a, b = difference.values
    if difference.about:
        return difference.about
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return ""
    if not (is_usable(a) and is_usable(b)):
        return ""
    change = f"{b - a:+.3g}"
    if not a or difference.stage in ("setting", "environment"):
        return change
    share = (b - a) / abs(a)
    return f"{change} ({share:+.2%})" if abs(share) >= 1e-4 else f"{change} ({100 * share:+.1g}%)"


def _when(difference: Difference) -> tuple[float, int]:
    """Metrics before tensors of the same step, what has no step last."""
    order = ("step", "loss", "tensor", "result")
    return (float("inf") if difference.step is None else difference.step, order.index(difference.stage))


def _compared(comparison: Comparison) -> str:
    steps, tensors = comparison.steps, comparison.tensors
    counted = ((steps, "logged step"), (tensors, "tensor"))
    return " and ".join(f"{count:,} {what}{'s' * (count != 1)}" for count, what in counted if count)


def _begins(first: Difference, effects: Sequence[Difference], names: tuple[str, str], comparison: Comparison) -> str:
    if first.stage == "tensor":
        alike = "every logged metric is the same, and yet " if not any(each.stage == "step" for each in effects) else ""
        where = "model/" if first.step is None else f"the checkpoint of step {first.step}"
        begin = f"{alike}the weights differ, first in {first.name} of {where}"
        return begin[:1].upper() + begin[1:]
    if first.stage == "result":
        return f"The logged metrics and tensors are the same; {first.name} of the summary differs"
    if first.name == "last logged step":
        shorter = first.values.index(min(first.values))
        status = comparison.runs[shorter].summary.get("status")
        ended = f" ({status})" if status not in (None, "finished") else ""
        upto = f"The runs are equal up to step {first.step}, where {names[shorter]} ends{ended}"
        return f"{upto}; the other goes on to {max(first.values)}"
    if first.name == "logged":
        return f"Step {first.step} is logged in {names[first.values.index('yes')]} alone"
    metrics = list(dict.fromkeys(each.name for each in effects if each.stage == "step" and each.step == first.step))
    more = f" and {len(metrics) - _MOST_NAMED} more" if len(metrics) > _MOST_NAMED else ""
    return f"The runs differ from step {first.step} on, in {', '.join(metrics[:_MOST_NAMED])}{more}"


def _because(
    first: Difference, effects: Sequence[Difference], causes: list[Difference], names: tuple[str, str],
    all_of_them: list[Difference],
) -> str:  # fmt: skip
    """The differences in what went into the runs that explain the first one in what came out."""
    metrics = {each.name for each in effects if each.stage == "step" and each.step == first.step}
    rates = [each for each in causes if each.stage == "setting" and each.name.startswith(_RATE)]
    others = [each for each in causes if each not in rates]
    if first.name == "logged":
        return "so a line of the other's metrics.jsonl is lost"
    if first.name == "last logged step":
        length = [each for each in all_of_them if each.name in ("max_steps", "num_train_epochs", "stop_at_step")]
        if length:
            return f"because {_listed(length, names)}"
        return f"perhaps because {_listed(causes, names)}" if causes else "for a reason that is not in the settings"
    if metrics and metrics <= {"learning_rate"} and rates:
        likely = rates
    elif metrics and "learning_rate" not in metrics and others:
        likely = others
    else:
        likely = causes
    if not likely and metrics and all(name.startswith("eval_") for name in metrics):
        likely = [each for each in all_of_them if each.stage == "setting" and "eval" in each.name]
    for stage in _CAUSES:  # a version matters less than a setting; data that a setting has changed are its consequence
        if found := [each for each in likely if each.stage == stage]:
            return f"because {_listed(found, names)}" if len(found) == 1 else f"probably because {_listed(found, names)}"
    if first.stage in ("tensor", "result"):
        return "which nothing they recorded explains: a file may have been changed after the run"
    return (
        "which nothing they recorded explains: settings, environment and data are the same, or not recorded. What is left are "
        "operations that are not deterministic (see --full-determinism), or a file that was changed after the run"
    )


def _listed(causes: Sequence[Difference], names: tuple[str, str]) -> str:
    said = [_cause(each, names) for each in causes[:_MOST_NAMED]]
    more = [f"{len(causes) - _MOST_NAMED} more"] if len(causes) > _MOST_NAMED else []
    return ", ".join([*said[:-1], f"and {said[-1]}"] if len(said) > 1 and not more else [*said, *more])


def _cause(cause: Difference, names: tuple[str, str]) -> str:
    shown = [show_value(value) for value in cause.values]
    if cause.name == "fingerprint":
        return "the training data are not the same"
    if any(len(text) > 40 for text in shown) or cause.name.endswith("sha256"):
        known = {"recipe sha256": "the recipe's text", "toolkit sha256": "the toolkit's code"}
        return f"{known.get(cause.name, cause.name)} is not the same"
    verb = ["is missing" if text == ABSENT else f"is {text}" for text in shown]
    return f"{cause.name} {verb[0]} in {names[0]} and {verb[1].removeprefix('is ')} in {names[1]}"
