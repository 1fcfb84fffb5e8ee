"""Values of settings as they are written: text on a command line, YAML of other trainers, JSON of a SageMaker job.

One reader for all of them, so that the same setting means the same thing wherever it stands.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.config.foreign_names import is_foreign, passed_over, translate
from toolkit.config.setting import Refusal, Setting, Settings, check_value, nearest, settings_of, show_value

WORDS_FOR_TRUE = ("true", "yes", "on", "1")
WORDS_FOR_FALSE = ("false", "no", "off", "0")
WORDS_FOR_NONE = ("none", "null")


def read_values(config_class: type[Settings], written: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Checked values by setting name, from what was written under names or aliases (with `_` or `-`).

    `source` is the file or variable they stand in, for the messages. A null for a plain switch says nothing, as in
    transformers' `bf16: null`.

    Raises:
        Refusal: an unknown key, a setting under two names, a value of the wrong type or outside its rules.
    """
    settings = settings_of(config_class)
    spellings = {spelling: each for each in settings.values() for spelling in (each.name, *each.aliases)}
    named = {str(key).replace("-", "_"): raw for key, raw in written.items()}
    meant, advice = foreign_settings(named, spellings)
    unknown = [key for key in named if key not in spellings and not is_foreign(key)]
    if unknown or advice:
        raise unknown_settings(unknown, settings, source, advice)
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for spelling, name, raw in [*((key, key, raw) for key, raw in named.items() if key in spellings), *meant]:
        setting = spellings[name]
        if setting.name in values:
            raise Refusal(
                f"{flag_of(spelled[setting.name])} and {flag_of(spelling)}{f' ({source})' if source else ''} "
                "are one setting: give it once."
            )
        if raw is None and setting.is_switch and not setting.takes_none:
            continue
        reform = _OTHER_TRAINERS.get(name)
        value = read_value(setting, reform(raw) if reform else raw, source)
        values[setting.name], spelled[setting.name] = value, spelling
    return values


def foreign_settings(
    named: Mapping[str, Any], spellings: Mapping[str, Setting]
) -> tuple[list[tuple[str, str, Any]], list[tuple[str, Any, str]]]:
    """What the keys of Trainer and TRL among those written mean here.

    Returns (key, setting's name, its value as written) for each setting that one of them says, and (key, value, what to do) for
    those that can't be honoured.
    """
    meant: list[tuple[str, str, Any]] = []
    advice: list[tuple[str, Any, str]] = []
    for key, raw in named.items():
        if key in spellings or not is_foreign(key):
            continue
        found = translate(key, raw, named)
        if instead := passed_over(key, raw):
            _say_once(f"passed over: {key} {show_value(raw)}: {instead}")
        if isinstance(found, str):
            advice.append((key, "..." if key == "env" else raw, found))  # its values may be keys
        elif any(name not in spellings for name in found):
            advice.append((key, raw, "leave it out: this recipe has no such thing."))
        else:
            meant += [(key, name, value) for name, value in found.items()]
    return meant, advice


@functools.cache
def _say_once(text: str) -> None:
    """However often settings are read, and by one of a run's processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def read_value(setting: Setting, raw: Any, source: str = "") -> Any:
    """The checked value of one setting, from text or from what YAML or JSON made of it."""
    if setting.is_list:
        value: Any = [_read_item(setting, item) for item in _items(raw)]
    elif raw is None or (setting.takes_none and str(raw).lower() in WORDS_FOR_NONE):
        value = None
    else:
        value = _read_item(setting, raw)
    if setting.kind is str and not setting.is_list and not isinstance(value, str | None):
        # YAML made something else of it (no, 0123, 2024-01-01): only the person who wrote it knows the text.
        raise Refusal(f"{setting.flag} {show_value(value)}{f' ({source})' if source else ''}: must be text; put it in quotes.")
    check_value(setting, value, source)
    return value


def split_list(text: str) -> list[Any]:
    """The items of a list in one piece of text: JSON (or Python's way of printing a list), else between commas."""
    if text.strip().startswith("[") and text.strip().endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                return list(parse(text))
            except (ValueError, SyntaxError):
                continue
    return [item.strip() for item in text.split(",") if item.strip()]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def unknown_settings(
    names: list[str], settings: Mapping[str, Setting], source: str = "", foreign: Sequence[tuple[str, Any, str]] = ()
) -> Refusal:
    """The refusal of keys that no setting has, each with what was probably meant. Never repeats their values: one may be a key.

    `foreign`: keys of other trainers, their values, and what to do about each.
    """
    shown = str if source else flag_of
    where = f"{source}: " if source else ""
    lines = [f"{shown(name)}.{_suggestion(name, settings, shown)}" for name in names]
    if foreign:
        lines = [f"unknown: {line}" for line in lines]
        lines = [f"{shown(key)} {show_value(value)}: {advice}" for key, value, advice in foreign] + lines
        return Refusal("\n  - ".join([f"{where}settings of Trainer and TRL that can't be taken as they are", *lines]))
    if len(lines) == 1:
        return Refusal(f"{where}unknown setting {lines[0]}")
    return Refusal("\n  - ".join([f"{where}unknown settings", *lines]))


def _suggestion(name: str, settings: Mapping[str, Setting], shown: Callable[[str], str]) -> str:
    plain = name.lower().strip("_")
    if re.search(r"(^|_)(token|api_key|password|secret)$", plain):
        return " Tokens and keys are never settings: log in (hf auth login, wandb login) or set an environment variable."
    counterpart = [other for other in _COUNTERPARTS.get(plain, ()) if other in settings]
    if counterpart:
        return f" Its counterpart here: {', '.join(shown(other) for other in counterpart)}."
    spellings = [spelling for each in settings.values() for spelling in (each.name, *each.aliases)]
    near = nearest(plain.removeprefix("no_"), spellings)
    found = [near] if near else [other for other in spellings if plain in other.split("_")][:3]
    return f" Did you mean {' or '.join(shown(other) for other in found)}?" if found else " --help lists them all."


def _items(raw: Any) -> list[Any]:
    if isinstance(raw, Mapping):  # rename_columns: {old: new} is how one would write it in YAML
        return [f"{key}={value}" for key, value in raw.items()]
    if isinstance(raw, str):
        return split_list(raw)
    return list(raw) if isinstance(raw, list | tuple) else [raw]


def _read_item(setting: Setting, raw: Any) -> Any:
    """One value in the type of its setting where it can be read as one; else as it is, for the check to refuse."""
    if setting.kind is bool:
        word = str(raw).lower()
        return True if word in WORDS_FOR_TRUE else False if word in WORDS_FOR_FALSE else raw
    if setting.kind is str:
        # YAML 1.1 reads a bare `no` as false, and `eval_strategy: no` is how everybody writes it.
        return "no" if raw is False and "no" in setting.choices else raw.strip() if isinstance(raw, str) else raw
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return raw
    try:
        if setting.kind is int and (isinstance(raw, int) or (isinstance(raw, str) and raw.strip().lstrip("+-").isdigit())):
            return int(raw)  # exact, however long
        number = float(raw)  # PyYAML reads 2e-4 as text: YAML 1.1 wants a dot in it
    except (ValueError, OverflowError):
        return raw
    if setting.kind is float:
        return number
    return int(number) if number.is_integer() else raw


def _mixture(raw: Any) -> Any:
    """`dataset: {a: 0.7, b: 0.3}` and `dataset: [a:0.7, b:0.3]` are the mixture a:0.7,b:0.3."""
    if isinstance(raw, Mapping):
        return ",".join(f"{name}:{weight}" for name, weight in raw.items())
    if isinstance(raw, list):
        return ",".join(_mixture(item) for item in raw)
    return raw


def _fsdp(raw: Any) -> Any:
    """Trainer's text of options: full_shard and auto_wrap are what FSDP2 does."""
    words = set(raw if isinstance(raw, list) else str(raw).split())
    return bool(words) if words <= {"full_shard", "auto_wrap"} else raw


def _ratio(raw: Any) -> Any:
    """A warm-up ratio of 1 would be read as one step."""
    try:
        whole = float(raw) >= 1
    except (TypeError, ValueError):
        return raw
    if whole:
        raise Refusal(f"--warmup-ratio {raw}: must be below 1, a share of the run. A number of steps is --warmup-steps.")
    return raw


# What transformers, TRL and their users write where the value here has another form; by the spelling it stands under.
_OTHER_TRAINERS: dict[str, Callable[[Any], Any]] = {
    "max_steps": lambda raw: None if str(raw) in ("-1", "-1.0") else raw,
    "dtype": lambda raw: raw.removeprefix("torch.") if isinstance(raw, str) else raw,
    "torch_dtype": lambda raw: raw.removeprefix("torch.") if isinstance(raw, str) else raw,
    "optim": lambda raw: {"adamw_8bit": "adamw_bnb_8bit"}.get(raw, raw) if isinstance(raw, str) else raw,
    "fsdp": lambda raw: _fsdp(raw),
    "lr_scheduler_type": lambda raw: "cosine" if raw == "cosine_with_min_lr" else raw,  # with min_lr_rate, our min_lr_ratio
    "report_to": lambda raw: ["none"] if raw is None else raw,
    "init_lora_weights": lambda raw: str(raw).lower() if isinstance(raw, bool) else raw,
    "dataset": _mixture,
    "dataset_name": _mixture,
    "warmup_ratio": _ratio,
}

# What is asked for under these names has other ones here.
_COUNTERPARTS = {
    "dataset_config_name": ("dataset",),
    "batch_size": ("per_device_train_batch_size", "global_batch_size"),
    "epochs": ("num_train_epochs",),
    "lr": ("learning_rate",),
    "steps": ("max_steps",),
}
