"""Values of settings: read from text on a command line, YAML or JSON, by one reader for all of them, and checked."""

from __future__ import annotations

import ast
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from toolkit.config.reading import values_of
from toolkit.config.setting import (
    Refusal,
    Setting,
    Settings,
    did_you_mean,
    flag_of,
    refuse_all,
    settings_of,
    show_value,
    spellings_of,
)
from toolkit.system.console import holds_password, warn_once

WORDS_FOR_TRUE = ("true", "yes", "on", "1")
WORDS_FOR_FALSE = ("false", "no", "off", "0")
WORDS_FOR_NONE = ("none", "null")


class Read(NamedTuple):
    """What could be read of what was written, and what could not."""

    values: dict[str, Any]  # by setting name
    wrong: frozenset[str]  # settings that were written wrongly, or probably meant by an unknown key
    mistakes: list[Refusal]


def read_values(config_class: type[Settings], written: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Checked values by setting name, from what was written under names or aliases (with `_` or `-`).

    `source` is the file or variable they are in, for the messages. A null for a plain switch, and where it is Trainer's or
    TRL's default, sets nothing, as in transformers' `bf16: null`.

    Raises:
        Refusal: unknown keys, settings under two names, values of the wrong type or outside their rules; all at once.
    """
    read = read_what_can_be(config_class, written, source)
    refuse_all(read.mistakes)
    return read.values


def read_what_can_be(config_class: type[Settings], written: Mapping[str, Any], source: str = "") -> Read:
    """The same, with the mistakes returned, for a message that names those of other places as well."""
    settings = settings_of(config_class)
    spellings = spellings_of(settings)
    named = {str(key).replace("-", "_"): raw for key, raw in written.items()}
    if named.get("packing_strategy") == "bfd_split" and "overlong" in spellings:  # TRL's, which splits overlong documents
        named = {"overlong": "split", **named, "packing_strategy": "bfd"}
    written_here = [(key, key, raw) for key, raw in named.items() if key in spellings]
    wrong, spelled, found = set[str](), dict[str, str](), list[Refusal]()
    if len(written_here) < len(named):
        from toolkit.config.unknown_keys import read_other_keys

        meant, wrong, found = read_other_keys(named, settings, source)
        written_here += meant
    values: dict[str, Any] = {}
    for spelling, name, raw in written_here:
        setting = spellings[name]
        if setting.name in spelled:
            twice = f"{flag_of(spelled[setting.name])} and {flag_of(spelling)}{f' ({source})' if source else ''}"
            found.append(Refusal(f"{twice} are one setting: give it once."))
            continue
        if raw is None and not setting.takes_none and (setting.is_switch or spelling in _NULL_THERE):
            continue
        reform, spelled[setting.name] = _OTHER_TRAINERS.get(name), spelling
        try:
            values[setting.name] = read_value(setting, reform(raw) if reform else raw, source)
        except Refusal as refusal:
            found.append(refusal)
            wrong.add(setting.name)
    return Read(values, frozenset(wrong), found)


def read_value(setting: Setting, raw: object, source: str = "") -> Any:
    """The checked value of one setting, from text or from what YAML or JSON made of it."""
    if setting.is_list:
        value: Any = [_read_item(setting, item) for item in _items(raw)]
    elif raw is None or (setting.takes_none and str(raw).lower() in WORDS_FOR_NONE):
        value = None
    else:
        value = _read_item(setting, raw)
    if setting.kind is str and not setting.is_list and not isinstance(value, str | None):
        # YAML made something else of it (no, 0123, 2024-01-01): the text as it was written is lost.
        raise Refusal(f"{setting.flag} {show_value(value)}{f' ({source})' if source else ''}: must be text; put it in quotes.")
    check_value(setting, value, source)
    return value


def split_list(text: str) -> list[Any]:
    """The items of a list in one piece of text: JSON (or Python's way of printing a list), else between commas."""
    if text.strip().startswith("[") and text.strip().endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                return list(parse(text))
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                continue
    return [item.strip() for item in text.split(",") if item.strip()]


def _items(raw: object) -> list[Any]:
    if isinstance(raw, Mapping):  # rename_columns: {old: new} is how one would write it in YAML
        return [f"{key}={value}" if not isinstance(value, Mapping | list) else {key: value} for key, value in raw.items()]
    if isinstance(raw, str):
        return split_list(raw)
    return list(raw) if isinstance(raw, list | tuple) else [raw]


def _read_item(setting: Setting, raw: object) -> Any:
    """One value in the type of its setting where it can be read as one; else as it is, for the check to refuse."""
    if setting.kind is bool:
        word = str(raw).lower()
        return True if word in WORDS_FOR_TRUE else False if word in WORDS_FOR_FALSE else raw
    if setting.kind is str:
        # YAML 1.1 reads a bare `no` as false, and `eval_strategy: no` is how everybody writes it.
        if raw is False and "no" in setting.choices:
            return "no"
        return raw.strip() if isinstance(raw, str) and not setting.keeps_spaces else raw
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return raw
    try:
        if setting.kind is int and (isinstance(raw, int) or (isinstance(raw, str) and raw.strip().lstrip("+-").isdigit())):
            return int(raw)  # exact, however long
        number = float(raw)  # PyYAML reads 2e-4 as text: YAML 1.1 requires a dot in it
    except (ValueError, OverflowError):
        return raw
    if setting.kind is float:
        return number
    return int(number) if number.is_integer() else raw


# Settings whose default in transformers and TRL is null, and here is not.
_NULL_THERE = frozenset({
    "output_dir", "eval_steps", "metric_for_best_model", "ddp_backend", "model_name_or_path", "attn_implementation",
    "dataset_name", "loss_weights", "lora_target_modules", "lora_modules_to_save", "warmup_ratio",
    "torch_compile_backend",
})  # fmt: skip


def _mixture(raw: object) -> Any:
    """`dataset: {a: 0.7, b: 0.3}` and `dataset: [a:0.7, b:0.3]` are the mixture a:0.7,b:0.3."""
    if isinstance(raw, Mapping):
        return ",".join(f"{name}:{weight}" for name, weight in raw.items())
    if isinstance(raw, list):
        return ",".join(_mixture(item) for item in raw)
    return raw


def _fsdp(raw: object) -> Any:
    """Trainer's text of options: full_shard and auto_wrap are what FSDP2 does."""
    words = set(map(str, raw) if isinstance(raw, list) else str(raw).split())
    return bool(words) if words <= {"full_shard", "auto_wrap"} else raw


def _said(name: str, raw: object, find: Callable[[str], str | None]) -> Any:
    """The value that a former or another one means, with a warning."""
    meant = find(raw) if isinstance(raw, str) else None
    if meant and os.environ.get("RANK", "0") == "0":
        warn_once(f"{name} {raw}: read as {meant}.")
    return meant or raw


def _ratio(raw: Any) -> Any:
    """A warm-up ratio of 1 would be read as one step."""
    try:
        whole = float(raw) >= 1
    except (TypeError, ValueError):
        return raw
    if whole:
        raise Refusal(f"--warmup-ratio {raw}: must be below 1, a share of the run. A number of steps is --warmup-steps.")
    return raw


def _every(name: str, raw: Any) -> Any:
    """Trainer takes a share of the run here too."""
    try:
        is_share = not isinstance(raw, bool) and 0 < float(raw) < 1
    except (TypeError, ValueError):
        return raw
    if is_share:
        raise Refusal(
            f"{flag_of(name)} {raw}: must be a whole number of steps. Trainer's share of the run is {raw} x its steps, "
            f"rounded up: of 1,000 steps {flag_of(name)} {math.ceil(1000 * float(raw))}."
        )
    return raw


def metric_of_trl(name: str) -> str | None:
    """What one of TRL's evaluation metrics is called here; None for other names."""
    found = {
        "mean_token_accuracy": "token_accuracy", "rewards/chosen": "rewards_chosen", "rewards/rejected": "rewards_rejected",
        "rewards/accuracies": "reward_accuracy", "rewards/margins": "reward_margin", "logps/chosen": "logps_chosen",
        "logps/rejected": "logps_rejected",
    }.get(name.removeprefix("eval_"))  # fmt: skip
    return found and f"eval_{found}"


def former_optimizer(name: str) -> str | None:
    """The setting `optim` that makes the steps of one of Trainer's optimizers that differs in how it is computed; else None."""
    return {
        "adamw_hf": "adamw_torch", "adamw": "adamw_torch", "adamw_torch_xla": "adamw_torch", "paged_adamw": "adamw_torch",
        "paged_adamw_32bit": "adamw_torch", "adamw_torch_npu_fused": "adamw_torch_fused",
        "adamw_apex_fused": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "adamw_bnb_8bit",
        "lion": "lion_32bit", "paged_lion_32bit": "lion_32bit", "paged_lion_8bit": "lion_8bit",
    }.get(name)  # fmt: skip


def former_packing(name: str) -> str | None:
    """The packing strategy that whole documents mean under their former and other names; else None."""
    whole = ("greedy", "first_fit", "first_fit_decreasing", "ffd", "best_fit", "best_fit_decreasing")
    return "bfd" if name.replace("-", "_") in whole else None


# What transformers, TRL and their users write where the value here has another form; by the spelling it is under.
_OTHER_TRAINERS: dict[str, Callable[[Any], Any]] = {
    "max_steps": lambda raw: None if str(raw) in ("-1", "-1.0") else raw,
    "dtype": lambda raw: raw.removeprefix("torch.") if isinstance(raw, str) else raw,
    "torch_dtype": lambda raw: raw.removeprefix("torch.") if isinstance(raw, str) else raw,
    "optim": lambda raw: _said("optim", raw, former_optimizer),
    "packing_strategy": lambda raw: _said("packing_strategy", raw, former_packing),
    "fsdp": lambda raw: _fsdp(raw),
    "report_to": lambda raw: ["none"] if raw is None else raw,
    "init_lora_weights": lambda raw: str(raw).lower() if isinstance(raw, bool) else raw,
    "scale_rewards": lambda raw: {"true": "group", "false": "none"}.get(str(raw).lower(), raw),
    "dataset": _mixture,
    "dataset_name": _mixture,
    "warmup_ratio": _ratio,
    "metric_for_best_model": lambda raw: _said("metric_for_best_model", raw, metric_of_trl),
    **{name: partial(_every, name) for name in ("logging_steps", "eval_steps", "save_steps")},
}


def check_values(config: Settings) -> None:
    """Refuse the values outside the rules next to their fields, all of them at once."""
    found, values = [], values_of(config)
    for each in settings_of(type(config)).values():
        try:
            check_value(each, values[each.name])
        except Refusal as refusal:
            found.append(refusal)
    refuse_all(found)


def check_value(setting: Setting, value: Any, source: str = "") -> None:
    """Refuse a value of the wrong type or outside the rules of its setting; `source` is where it was written."""
    if value is None and setting.takes_none:
        return
    needs_article = setting.is_list or setting.kind in (int, float)
    must_be = f"must be {'a ' if needs_article else ''}{describe(setting)}"
    if setting.is_list and not isinstance(value, list | tuple):
        raise _refused(setting, value, source, must_be)
    for item in value if setting.is_list else [value]:
        if not _is_of_kind(item, setting.kind):
            raise _refused(setting, value, source, must_be)
        if setting.choices and item not in setting.choices:
            hint = did_you_mean(str(item), setting.choices)
            raise _refused(setting, value, source, f"must be one of {', '.join(setting.choices)}", hint)
        if setting.kind is not str and not _within(setting, item):
            raise _refused(setting, value, source, f"must be {_range(setting, item)}")
        if setting.kind is str:
            _check_text(setting, item, source)


def describe(setting: Setting) -> str:
    """The values a setting takes, in words: 'whole number', 'list of numbers'."""
    one, many = {
        str: ("text", "texts"),
        bool: ("true or false", "true or false"),
        int: ("whole number", "whole numbers"),
        float: ("number", "numbers"),
    }[setting.kind]
    return f"list of {many}" if setting.is_list else one


def _is_of_kind(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str) and value != ""
    if isinstance(value, bool) or kind is bool:  # bool is an int to Python, not to a person
        return isinstance(value, bool) and kind is bool
    if isinstance(value, numbers.Integral):
        return True  # of any length; whether it is too large is for its range
    return kind is float and isinstance(value, numbers.Real) and math.isfinite(value)


# What 64 bits, and float32 on a device, can hold.
_LARGEST = {bool: 1, int: 2**63 - 1, float: 3.4e38}


def _check_text(setting: Setting, text: str, source: str) -> None:
    """Refuse what no path and no name can hold, and what must not be written into config.yaml, a card or a tracker."""
    shown = f"{setting.flag}{f' ({source})' if source else ''}"
    if holds_password(text):
        raise Refusal(
            f"{shown}: holds a URL with a password or token, which would be written to config.yaml and shown to others. Log in "
            "instead (hf auth login), or download the file first and name that."
        )
    if "\0" in text:
        raise Refusal(f"{shown}: holds a NUL character, which no name can hold.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{shown}: character {error.start + 1} is not Unicode text. Rename what it names in UTF-8.") from None


def _within(setting: Setting, value: float) -> bool:
    return (
        abs(value) <= _LARGEST[setting.kind]
        and (setting.least is None or value >= setting.least)
        and (setting.most is None or value <= setting.most)
        and (setting.above is None or value > setting.above)
        and (setting.below is None or value < setting.below)
    )


def _range(setting: Setting, value: float) -> str:
    """The rule in words; an upper end that nobody meets by chance is left out where it isn't what was broken."""
    most = setting.most
    if most is not None and most > 1000 and value <= most:
        most = None
    if abs(value) > _LARGEST[setting.kind] and most is None and setting.below is None:
        most = _LARGEST[setting.kind]
    bounds = [("at least", setting.least), ("above", setting.above), ("at most", most), ("below", setting.below)]
    return " and ".join(f"{words} {_bound(bound)}" for words, bound in bounds if bound is not None)


def _bound(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _refused(setting: Setting, value: Any, source: str, rule: str, hint: str = "") -> Refusal:
    try:
        text, rule = ("''", "must not be empty") if isinstance(value, str) and value == "" else (show_value(value), rule)
    except (ValueError, RecursionError):  # Python writes no whole number of more than 4,300 digits, and no list in itself
        text = "..."
    text = text if len(text) <= 200 else f"{text[:80]}... ({len(text):,} characters)"
    return Refusal(f"{setting.flag} {text}{f' ({source})' if source else ''}: {rule}.{hint}")
