"""What stands on a recipe's command line and in SM_HPS, in one canonical spelling: --name=text for every setting."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.config.foreign_names import is_foreign
from toolkit.config.parsing import parse_json
from toolkit.config.setting import Refusal, Setting, show_value
from toolkit.config.values import (
    WORDS_FOR_FALSE,
    WORDS_FOR_NONE,
    WORDS_FOR_TRUE,
    flag_of,
    foreign_settings,
    probably_meant,
    unknown_settings,
)
from toolkit.system.console import as_typed

_SWITCH_WORDS = (*WORDS_FOR_TRUE, *WORDS_FOR_FALSE, *WORDS_FOR_NONE)


def canonical_arguments(
    arguments: Iterable[str], settings: Mapping[str, Setting], hyperparameters: Mapping[str, Any]
) -> tuple[list[str], frozenset[str], list[Refusal]]:
    """The arguments, the settings that were mistyped among them, and what is wrong.

    Wrong is an unknown flag, a flag without its value, a word that belongs to no flag.

    The arguments come as `--flag-name=text`: dashes for underscores, a bare switch as true, `--no-x` as false.

    A SageMaker container repeats every hyperparameter as a flag whose text has lost its type (None is '', a list is its
    Python repr). Such an argument says nothing new and is left out; one with another text is the user's own.
    """
    spellings = {spelling: each for each in settings.values() for spelling in (each.name, *each.aliases)}
    repeats = {key.replace("-", "_"): lossy_text(value) for key, value in hyperparameters.items()}
    words, canonical, unknown, flag = deque(arguments), [], [], ""
    foreign, mistakes, wrong = dict[str, str](), list[Refusal](), set[str]()
    while words:
        word = words.popleft()
        if word in ("-h", "--help"):
            return ["--help"], frozenset(), []
        if not word.startswith("--"):
            mistakes.append(_stray(word, flag, spellings))
            while words and not words[0].startswith("--"):  # more of the same text, say
                words.popleft()
            continue
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in repeats and (text if equals else words[0] if words else None) == repeats[name]:
            if not equals:
                words.popleft()
            continue
        setting, positive = spellings.get(name), spellings.get(name.removeprefix("no_"))
        if setting is None and positive is not None and positive.is_switch and not equals:
            canonical.append(f"{flag_of(name.removeprefix('no_'))}=false")
        elif setting is None and is_foreign(name):
            foreign[name] = text if equals else words.popleft() if words and not words[0].startswith("--") else "true"
        elif setting is None and name != "config":
            unknown.append(name)
            while words and not words[0].startswith("--"):  # the value that was meant for it
                words.popleft()
        elif equals:
            canonical.append(f"{flag_of(name)}={text}")
        elif setting is not None and setting.is_switch:
            has_value = words and words[0].lower() in _SWITCH_WORDS
            canonical.append(f"{flag_of(name)}={words.popleft() if has_value else 'true'}")
        elif words and not words[0].startswith("--"):
            canonical.append(f"{flag_of(name)}={words.popleft()}")
        else:
            example = f", such as {_example(setting)}" if setting else " (a YAML or JSON file)"
            mistakes.append(Refusal(f"{flag_of(name)}: needs a value{example}."))
            wrong |= {setting.name} if setting else set()
    given = {name.removeprefix("--").replace("-", "_"): text for name, _, text in (each.partition("=") for each in canonical)}
    meant, advice = foreign_settings(given | foreign, spellings)
    if unknown or advice:
        mistakes.insert(0, unknown_settings(unknown, settings, "", advice))
    canonical += [f"{flag_of(name)}={show_value(value)}" for _, name, value in meant]
    return canonical, frozenset(wrong | probably_meant(unknown, spellings)), mistakes


def read_hyperparameters(text: str | None) -> dict[str, Any]:
    """The hyperparameters of a SageMaker job, typed, from the text of SM_HPS; empty outside a container."""
    if not text:
        return {}
    hyperparameters = parse_json(text, "SM_HPS")
    if not isinstance(hyperparameters, dict):
        raise Refusal("SM_HPS: must be a JSON object such as {\"learning_rate\": 0.0002}.")
    return hyperparameters


def without_container_keys(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The user's hyperparameters: SageMaker's estimators, containers and tuning jobs add keys of their own."""
    return {
        key: value
        for key, value in hyperparameters.items()
        if not key.startswith("sagemaker_") and key != "_tuning_objective_metric"
    }


def lossy_text(value: Any) -> str:
    """A hyperparameter as the container writes it into argv (sagemaker-training 5.1, mapping.to_cmd_args)."""
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)


def _example(setting: Setting) -> str:
    if setting.choices:
        return f"{setting.flag} {setting.choices[0]}"
    by_kind = {str: "text", bool: "true", int: "8", float: "0.1"}
    default = setting.default if setting.default not in (None, []) else by_kind[setting.kind]
    return f"{setting.flag} {show_value(default)}"


def _stray(word: str, flag: str, spellings: Mapping[str, Setting]) -> Refusal:
    name, equals, text = word.lstrip("-–—").partition("=")
    before = spellings.get(flag.removeprefix("--").replace("-", "_"))
    if name.replace("-", "_") in spellings:
        hint = f" Did you mean {flag_of(name.replace('-', '_'))}{f' {text}' if equals else ''}?"
    elif word.endswith((".yaml", ".yml", ".json")):
        hint = f" Did you mean {as_typed('--config', word)}?"
    elif before is not None and before.is_switch:
        hint = f" {before.flag} takes true or false, or nothing."
    elif before is not None and before.is_list:
        hint = f" A list is written with commas: {before.flag} a,b."
    else:
        hint = " A setting is written --name value; text with spaces goes into quotes."
    return Refusal(f"{word}: belongs to no flag.{hint}")
