"""Which settings do not go together: the tables of contradictions, and of settings without effect, put to a config.

The parameters of a rule's condition are the settings it reads, by name; a rule is checked only where the recipe has them
all. In the texts `{name}` means the setting as it would be typed, such as `--lr-scheduler-type cosine`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.config.contradictions import CONTRADICTIONS
from toolkit.config.files import changed_settings
from toolkit.config.no_effect import NO_EFFECT
from toolkit.config.reading import values_of
from toolkit.config.setting import Refusal, Settings, settings_of, show_setting


def check_together(config: Settings, given: frozenset[str] | None = None) -> None:
    """Refuse settings that contradict each other, and given ones that have no effect with the others.

    Args:
        config: all settings of a recipe.
        given: names of those that the user gave, in contrast to the recipe's defaults. Default: `config.given`.
    """
    messages = list(broken_rules(config, frozenset(config.given or ()) if given is None else given).values())
    if messages:
        raise Refusal(messages[0] if len(messages) == 1 else "\n  - ".join(["these settings do not go together", *messages]))


def check_made_in_code(config: Settings) -> None:
    """The same of settings that no command line has read: those that differ from their defaults are given.

    What one given setting implies of another (`IMPLIED`) nobody has typed, so it is refused where a default
    contradicts it.
    """
    given, values = changed_settings(config), values_of(config)
    check_together(config, frozenset(given))
    for name, (applies, others) in IMPLIED.items():
        for other, meant in others.items():
            if other == "eval_on_start":  # the run itself evaluates at the start only where it evaluates at all
                continue
            if given.get(name) and applies(given[name]) and other in values.keys() - given and values[other] != meant:
                raise Refusal(
                    f"{name}={given[name]!r} has no effect with {other}={values[other]!r}, a default: add {other}={meant!r}."
                )


def implied_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What given settings imply; anything that is given itself stays as it is."""
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
    "beta": (_always, {"distillation_loss": "jsd"}),  # of distillation; preference losses have no such setting
    "min_lr": (lambda rate: rate is not None, {"min_lr_ratio": 0.0}),
    "eval_fraction": (lambda share: share == 0, {"eval_strategy": "no", "eval_on_start": False}),
    "eval_strategy": (lambda strategy: strategy == "no", {"eval_on_start": False}),
}


def broken_rules(config: Settings, given: frozenset[str], unknown: frozenset[str] = frozenset()) -> dict[tuple[str, str], str]:
    """The message of each broken rule, by (setting concerned or "", text of the rule).

    `unknown`: settings whose values are not what was meant; a rule that reads one of them is not checked.
    """
    settings, values = settings_of(type(config)), values_of(config)
    typed = {name: show_setting(settings[name], value) for name, value in values.items()}
    values = {name: value for name, value in values.items() if name not in unknown}
    broken = {}
    for rule in CONTRADICTIONS:
        if _holds(rule.broken, values):
            broken["", rule.message] = rule.message.format_map(typed)
    for none in NO_EFFECT:
        for name in none.settings:
            if name in given and values.get(name) and _holds(none.idle, values, none.reads):
                broken[name, none.why] = f"{typed[name]} has no effect {none.why.format_map(typed)}"
    return broken


def left_off(config: Settings) -> frozenset[str]:
    """The settings that are off (0, false, empty) and that the others leave without effect anyway: nobody misses them."""
    values = values_of(config)
    idle = (none for none in NO_EFFECT if _holds(none.idle, values, none.reads))
    return frozenset(name for none in idle for name in none.settings if not values.get(name, True))


def _holds(condition: Callable[..., Any], values: Mapping[str, Any], reads: Sequence[str] | None = None) -> bool:
    reads = reads or list(inspect.signature(condition).parameters)
    return all(name in values for name in reads) and bool(condition(**{name: values[name] for name in reads}))
