"""Keys that no setting of a recipe has: what those of other trainers mean here, and what a mistyped one may mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.config.foreign_values import is_foreign, passed_over, translate
from toolkit.config.other_trainers import counterpart
from toolkit.config.setting import Refusal, Setting, Settings, flag_of, nearest, settings_of, show_value, spellings_of
from toolkit.system.console import as_typed, warn_once

# Keys of secrets, which are never settings; in a file that leaves them empty there is nothing to refuse.
SECRETS = ("hub_token", "push_to_hub_token", "use_auth_token", "token")
NO_SECRET = (None, True, False, "", "<HUB_TOKEN>", "<PUSH_TO_HUB_TOKEN>")


def read_other_keys(
    written: Mapping[str, Any], settings: Mapping[str, Setting], source: str
) -> tuple[list[tuple[str, str, Any]], set[str], list[Refusal]]:
    """What was written under keys that no setting has, with `_`.

    Returns:
        (key, name of the setting that it means, value) of other trainers' keys; the settings that mistyped keys were probably
        meant for; and the refusal of what is unknown or can't be honored, if anything.
    """
    spellings = spellings_of(settings)
    written = {key: raw for key, raw in written.items() if key not in SECRETS or raw not in NO_SECRET}
    meant, advice = foreign_settings(written, spellings)
    unknown = [key for key in written if key not in spellings and not is_foreign(key)]
    near = (nearest(name.lower().strip("_").removeprefix("no_"), spellings) for name in unknown)
    refusals = [unknown_settings(unknown, settings, source, advice)] if unknown or advice else []
    return meant, {spellings[spelling].name for spelling in near if spelling}, refusals


def unknown_keywords(config_class: type[Settings], named: Mapping[str, Any]) -> Refusal:
    """The refusal of keywords that `config_class` has no field for, aliases included, which only files and flags take."""
    settings = settings_of(config_class)
    spellings = spellings_of(settings)
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

    Returns (key, setting's name, its value as written) for each setting that one of them sets, and (key, value, what to do) for
    those that can't be honored.
    """
    meant: list[tuple[str, str, Any]] = []
    advice: list[tuple[str, Any, str]] = []
    for key, raw in named.items():
        if key in spellings or not is_foreign(key):
            continue
        found = translate(key, raw, named)
        if (instead := passed_over(key, raw)) and os.environ.get("RANK", "0") == "0":  # one of a run's processes prints it
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


def unknown_settings(
    names: list[str], settings: Mapping[str, Setting], source: str = "", foreign: Sequence[tuple[str, Any, str]] = ()
) -> Refusal:
    """The refusal of keys that no setting has, each with what was probably meant. Never repeats their values: one may be a key.

    `foreign`: keys of other trainers, their values, and what to do about each.
    """
    shown = str if source else flag_of
    where = f"{source}: " if source else ""
    in_python = source.endswith("(...)")
    lines = [f"{shown(name)}.{_suggestion(name, settings, shown, in_python)}" for name in names]
    if foreign:
        lines = [f"unknown: {line}" for line in lines]
        lines = [f"{shown(key)} {show_value(value)}: {advice}" for key, value, advice in foreign] + lines
        whose = "other trainers" if any(counterpart(name, frozenset()) for name in names) else "Trainer and TRL"
        return Refusal("\n  - ".join([f"{where}settings of {whose} that can't be taken as they are", *lines]))
    if len(lines) == 1:
        return Refusal(f"{where}unknown setting {lines[0]}")
    return Refusal("\n  - ".join([f"{where}unknown settings", *lines]))


def _suggestion(name: str, settings: Mapping[str, Setting], shown: Callable[[str], str], in_python: bool) -> str:
    plain = name.lower().strip("_")
    if re.search(r"(^|_)(token|api_key|password|secret)$", plain):
        return " Tokens and keys are never settings: log in (hf auth login, wandb login) or set an environment variable."
    known = counterpart(plain, frozenset(settings))
    if known:
        names, note = known
        if not names:
            return f" Instead: {note}"
        return f" Its counterpart here: {', '.join(map(shown, names))}{f' ({note[:-1]})' if note else ''}."
    spellings = [spelling for each in settings.values() for spelling in (each.name, *each.aliases)]
    found = [other for other in spellings if other.endswith(f"_{plain}")][:3]
    if in_python and not found and (groups := groups_with(plain)):
        return f" It is a setting of {', '.join(f'tk.{group}' for group in groups)}."
    if not found and (recipe := recipe_with(plain.removeprefix("no_"))):
        return f" This recipe has no such setting; {recipe} has it (`{as_typed('toolkit', 'train', recipe)}`)."
    near = nearest(plain.removeprefix("no_"), spellings)
    found = found or ([near] if near else [other for other in spellings if plain in other.split("_")][:3])
    return f" Did you mean {' or '.join(shown(other) for other in found)}?" if found else " --help lists them all."


# For each group of settings that not every recipe has a recipe with it.
RECIPES_WITH = {
    "EmbeddingConfig": "embedding",
    "RunConfig": "accelerated", "CausalLMConfig": "sft", "AdapterConfig": "lora", "ClassificationConfig": "accelerated",
    "RowsConfig": "accelerated",
    "SampleConfig": "sft", "AnswerConfig": "sft", "PreferenceConfig": "dpo", "PairsConfig": "dpo", "ReferenceConfig": "dpo",
    "RankedAnswersConfig": "dpo", "UnpairedConfig": "kto", "RewardConfig": "reward", "RankingConfig": "reranker",
    "QuestionAnsweringConfig": "question_answering",
    "MaskedLMConfig": "masked_lm",
    "TokenClassificationConfig": "token_classification",
    "PolicyConfig": "grpo", "PromptConfig": "grpo", "RewardFunctionsConfig": "grpo", "RolloutConfig": "grpo",
    "PPOConfig": "ppo", "DistillationConfig": "distill",
    "ClassifierDistillationConfig": "distill_classifier", "DiffusionConfig": "diffusion",
    "Seq2SeqConfig": "seq2seq", "GeneratedTextConfig": "seq2seq",
}  # fmt: skip


def recipe_with(name: str) -> str | None:
    """A recipe that has the setting of this name, where a group declares it."""
    return next((RECIPES_WITH[group] for group in groups_with(name) if group in RECIPES_WITH), None)


def groups_with(name: str) -> list[str]:
    """The groups of settings that declare this one."""
    import toolkit.config

    def declares(group: str) -> bool:
        settings = settings_of(getattr(toolkit.config, group)).values()
        return any(name in (each.name, *each.aliases) for each in settings)

    return [group for group in (*RECIPES_WITH, "ModelConfig", "DataConfig", "OptimConfig") if declares(group)]
