"""Values of settings as they are written: text on a command line, YAML of other trainers, JSON of a SageMaker job.

One reader for all of them, so that the same setting means the same thing wherever it stands.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.config.foreign_names import is_foreign, passed_over, translate
from toolkit.config.former_names import NO_SECRET, SECRETS, former_optimizer, former_packing
from toolkit.config.other_trainers import counterpart
from toolkit.config.setting import Refusal, Setting, Settings, check_value, nearest, refuse_all, settings_of, show_value
from toolkit.system.console import as_typed, warn_once

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

    `source` is the file or variable they stand in, for the messages. A null for a plain switch, and where it is Trainer's or
    TRL's default, says nothing, as in transformers' `bf16: null`.

    Raises:
        Refusal: unknown keys, settings under two names, values of the wrong type or outside their rules; all at once.
    """
    read = read_what_can_be(config_class, written, source)
    refuse_all(read.mistakes)
    return read.values


def read_what_can_be(config_class: type[Settings], written: Mapping[str, Any], source: str = "") -> Read:
    """The same, with the mistakes returned, for a message that names those of other places as well."""
    settings = settings_of(config_class)
    spellings = {spelling: each for each in settings.values() for spelling in (each.name, *each.aliases)}
    named = {str(key).replace("-", "_"): raw for key, raw in written.items()}
    named = {key: raw for key, raw in named.items() if key not in SECRETS or raw not in NO_SECRET}
    if named.get("packing_strategy") == "bfd_split" and "overlong" in spellings:  # TRL's, which splits overlong documents
        named = {"overlong": "split", **named, "packing_strategy": "bfd"}
    meant, advice = foreign_settings(named, spellings)
    unknown = [key for key in named if key not in spellings and not is_foreign(key)]
    found = [unknown_settings(unknown, settings, source, advice)] if unknown or advice else []
    values: dict[str, Any] = {}
    wrong, spelled = probably_meant(unknown, spellings), dict[str, str]()
    for spelling, name, raw in [*((key, key, raw) for key, raw in named.items() if key in spellings), *meant]:
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


def probably_meant(unknown: Iterable[str], spellings: Mapping[str, Setting]) -> set[str]:
    """The settings whose names were probably misspelled as these."""
    near = (nearest(name.lower().strip("_").removeprefix("no_"), spellings) for name in unknown)
    return {spellings[spelling].name for spelling in near if spelling}


def unknown_keywords(config_class: type[Settings], named: Mapping[str, Any]) -> Refusal:
    """The refusal of keywords that `config_class` has no field for, aliases included, which only files and flags take."""
    settings = settings_of(config_class)
    spellings = {spelling: each for each in settings.values() for spelling in (each.name, *each.aliases)}
    without = {key: why for key, raw in named.items() if key not in spellings and (why := passed_over(key, raw))}
    meant, advice = foreign_settings({key: raw for key, raw in named.items() if key not in without}, spellings)
    meant += [(key, spellings[key].name, raw) for key, raw in named.items() if key in spellings]
    advice += [(key, named[key], f"in Python it is written {name}={value!r}.") for key, name, value in meant]
    advice += [(key, named[key], f"leave it out: {why}") for key, why in without.items()]
    unknown = [key for key in named if key not in spellings and not is_foreign(key)]
    return unknown_settings(unknown, settings, f"{config_class.__name__}(...)", advice)


def foreign_settings(
    named: Mapping[str, Any], spellings: Mapping[str, Setting]
) -> tuple[list[tuple[str, str, Any]], list[tuple[str, Any, str]]]:
    """What the keys of Trainer and TRL among those written mean here.

    Returns (key, setting's name, its value as written) for each setting that one of them says, and (key, value, what to do) for
    those that can't be honored.
    """
    meant: list[tuple[str, str, Any]] = []
    advice: list[tuple[str, Any, str]] = []
    for key, raw in named.items():
        if key in spellings or not is_foreign(key):
            continue
        found = translate(key, raw, named)
        if (instead := passed_over(key, raw)) and os.environ.get("RANK", "0") == "0":  # one of a run's processes says it
            warn_once(f"passed over: {key} {show_value(raw)}: {instead}")
        if isinstance(found, str):
            advice.append((key, "..." if key == "env" else raw, found))  # its values may be keys
        elif missing := [name for name in found if name not in spellings]:
            if all(found[name] in (False, None) for name in missing):
                continue  # turned off, as the recipe has it anyway
            advice.append((key, raw, "leave it out: this recipe has no such thing."))
        else:
            meant += [(key, name, value) for name, value in found.items()]
    return meant, advice


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
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
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
        whose = "other trainers" if any(counterpart(name, frozenset()) for name in names) else "Trainer and TRL"
        return Refusal("\n  - ".join([f"{where}settings of {whose} that can't be taken as they are", *lines]))
    if len(lines) == 1:
        return Refusal(f"{where}unknown setting {lines[0]}")
    return Refusal("\n  - ".join([f"{where}unknown settings", *lines]))


def _suggestion(name: str, settings: Mapping[str, Setting], shown: Callable[[str], str]) -> str:
    plain = name.lower().strip("_")
    if re.search(r"(^|_)(token|api_key|password|secret)$", plain):
        return " Tokens and keys are never settings: log in (hf auth login, wandb login) or set an environment variable."
    known = counterpart(plain, frozenset(settings))
    if known:
        names, note = known
        if not names:
            return f" Instead: {note}"
        return f" Its counterpart here: {', '.join(map(shown, names))}{f' ({note[:-1]})' if note else ''}."
    if recipe := recipe_with(plain.removeprefix("no_")):
        return f" This recipe has no such setting; {recipe} has it (`{as_typed('toolkit', 'train', recipe)}`)."
    spellings = [spelling for each in settings.values() for spelling in (each.name, *each.aliases)]
    near = nearest(plain.removeprefix("no_"), spellings)
    found = [near] if near else [other for other in spellings if plain in other.split("_")][:3]
    return f" Did you mean {' or '.join(shown(other) for other in found)}?" if found else " --help lists them all."


# For each group of settings that not every recipe has a recipe with it.
RECIPES_WITH = {
    "RunConfig": "accelerated", "CausalLMConfig": "sft", "AdapterConfig": "lora", "ClassificationConfig": "accelerated",
    "SampleConfig": "sft", "PreferenceConfig": "dpo", "PairsConfig": "dpo", "ReferenceConfig": "dpo",
    "RankedAnswersConfig": "dpo", "UnpairedConfig": "kto", "RewardConfig": "reward",
}  # fmt: skip


def recipe_with(name: str) -> str | None:
    """A recipe that has the setting of this name, where a group declares it."""
    import toolkit.config as groups

    for group, recipe in RECIPES_WITH.items():
        declared = settings_of(getattr(groups, group)).values()
        if any(name in (each.name, *each.aliases) for each in declared):
            return recipe
    return None


def _items(raw: Any) -> list[Any]:
    if isinstance(raw, Mapping):  # rename_columns: {old: new} is how one would write it in YAML
        return [f"{key}={value}" if not isinstance(value, Mapping | list) else {key: value} for key, value in raw.items()]
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


# Settings whose default in transformers and TRL is null, and here is not.
_NULL_THERE = frozenset({
    "output_dir", "eval_steps", "metric_for_best_model", "ddp_backend", "model_name_or_path", "attn_implementation",
    "dataset_name", "loss_weights", "lora_target_modules", "lora_modules_to_save", "warmup_ratio",
    "torch_compile_backend",
})  # fmt: skip


def _mixture(raw: Any) -> Any:
    """`dataset: {a: 0.7, b: 0.3}` and `dataset: [a:0.7, b:0.3]` are the mixture a:0.7,b:0.3."""
    if isinstance(raw, Mapping):
        return ",".join(f"{name}:{weight}" for name, weight in raw.items())
    if isinstance(raw, list):
        return ",".join(_mixture(item) for item in raw)
    return raw


def _fsdp(raw: Any) -> Any:
    """Trainer's text of options: full_shard and auto_wrap are what FSDP2 does."""
    words = set(map(str, raw) if isinstance(raw, list) else str(raw).split())
    return bool(words) if words <= {"full_shard", "auto_wrap"} else raw


def _said(name: str, raw: Any, find: Callable[[str], str | None]) -> Any:
    """The value that a former or another one stands for, which is said."""
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


# What transformers, TRL and their users write where the value here has another form; by the spelling it stands under.
_OTHER_TRAINERS: dict[str, Callable[[Any], Any]] = {
    "max_steps": lambda raw: None if str(raw) in ("-1", "-1.0") else raw,
    "dtype": lambda raw: raw.removeprefix("torch.") if isinstance(raw, str) else raw,
    "torch_dtype": lambda raw: raw.removeprefix("torch.") if isinstance(raw, str) else raw,
    "optim": lambda raw: _said("optim", raw, former_optimizer),
    "packing_strategy": lambda raw: _said("packing_strategy", raw, former_packing),
    "fsdp": lambda raw: _fsdp(raw),
    "report_to": lambda raw: ["none"] if raw is None else raw,
    "init_lora_weights": lambda raw: str(raw).lower() if isinstance(raw, bool) else raw,
    "dataset": _mixture,
    "dataset_name": _mixture,
    "warmup_ratio": _ratio,
}
