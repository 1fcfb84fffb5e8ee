"""A recipe's command line: from flags, a SageMaker job's settings and a file of settings to one checked config.

Later ones win: the recipe's defaults, --config FILE, SM_HPS (the settings of a SageMaker job), flags. Whatever a setting is
written in, `toolkit.config.values` reads it.
"""

import dataclasses
import json
import os
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from toolkit.config.files import read_config_file
from toolkit.config.foreign_values import is_foreign
from toolkit.config.json_and_yaml import parse_json
from toolkit.config.reading import values_of
from toolkit.config.rules import broken_rules, implied_settings
from toolkit.config.setting import Refusal, Setting, Settings, flag_of, refuse_all, settings_of, show_value, spellings_of
from toolkit.config.values import WORDS_FOR_FALSE, WORDS_FOR_NONE, WORDS_FOR_TRUE, read_what_can_be, split_list
from toolkit.system.console import as_typed

AnyConfig = TypeVar("AnyConfig", bound=Settings)
_SWITCH_WORDS = (*WORDS_FOR_TRUE, *WORDS_FOR_FALSE, *WORDS_FOR_NONE)
_CHANNEL = re.compile(r"(?<![\w/.-])channel:([A-Za-z0-9._-]+)")


def read_command_line(
    config_class: type[AnyConfig], arguments: Sequence[str], environment: Mapping[str, str], description: str = ""
) -> AnyConfig:
    """The config that the command line means; `given` holds the names of the settings that someone gave.

    A key of --config that holds the recipe's default is not given: config.yaml, which holds them all, must repeat its run.

    Raises:
        Refusal: anything unknown, mistyped or outside its rules, wherever it is written, in one message; with what doesn't go
            together among the rest.
        SystemExit: with code 0, after --help.
    """
    settings = settings_of(config_class)
    hyperparameters = read_hyperparameters(environment.get("SM_HPS"))
    flags = read_flags(arguments, settings, hyperparameters)
    if flags.wants_help:
        from toolkit.command_line.help_page import show_settings

        show_settings(settings, description)
        sys.exit(0)
    of_job = without_container_keys(hyperparameters)
    path = flags.written.pop("config", of_job.pop("config", None))
    if path is not None and not isinstance(path, str):
        raise Refusal(f"--config {show_value(path)} (SM_HPS): must be the name of a YAML file.")
    mistakes, wrong, is_file_read = flags.mistakes, flags.wrong, True
    of_file, values, given = dict[str, Any](), dict[str, Any](), set[str]()
    if path is not None:
        try:
            of_file = read_config_file(path)
        except Refusal as refusal:
            mistakes.append(refusal)
            is_file_read = False
    for each, source in ((of_file, str(path)), (of_job, "SM_HPS"), (flags.written, "")):
        read = read_what_can_be(config_class, each, source)
        mistakes += read.mistakes
        values |= read.values
        given |= {name for name, value in read.values.items() if each is not of_file or value != settings[name].default}
        wrong = wrong - read.values.keys() | read.wrong
    implied = {name: value for name, value in implied_settings(values).items() if name in settings}
    values = container_settings(environment, settings) | implied | values
    if mistakes and is_file_read:
        known = {name: value for name, value in values.items() if name not in wrong}
        mistakes += _broken_among(known, config_class, given, wrong)
    refuse_all(mistakes)
    return config_class(**values, given=tuple(sorted(given)))


class Flags(NamedTuple):
    """What was typed, not read yet: a text by name, with underscores; of a list its items."""

    written: dict[str, Any]
    wants_help: bool
    wrong: frozenset[str]  # settings that were typed without a value
    mistakes: list[Refusal]


def read_flags(arguments: Iterable[str], settings: Mapping[str, Setting], hyperparameters: Mapping[str, Any]) -> Flags:
    """Take the flags apart: --name text, --name=text, --switch, --no-switch, with - or _ alike; lists may repeat theirs.

    A SageMaker container repeats every hyperparameter as a flag whose text has lost its type (None is '', a list is its
    Python repr). Such an argument adds nothing and is left out; one with another text is the user's own.
    """
    spellings = spellings_of(settings)
    repeats = {key.replace("-", "_"): lossy_text(value) for key, value in hyperparameters.items()}
    words, flag = deque(arguments), ""
    written, wrong, mistakes = dict[str, Any](), set[str](), list[Refusal]()
    while words:
        word = words.popleft()
        if word in ("-h", "--help"):
            return Flags({}, True, frozenset(), [])
        if not word.startswith("--"):
            mistakes.append(_stray(word, flag, spellings))
            _skip_values(words)  # more of the same text, for instance
            continue
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in repeats and (text if equals else words[0] if words else None) == repeats[name]:
            if not equals:
                words.popleft()
            continue
        setting, positive = spellings.get(name), spellings.get(name.removeprefix("no_"))
        has_value = bool(words) and not words[0].startswith("--")
        if setting is None and positive is not None and positive.is_switch and not equals:
            name, text = name.removeprefix("no_"), "false"
        elif setting is not None and setting.is_switch and not equals:
            text = words.popleft() if words and words[0].lower() in _SWITCH_WORDS else "true"
        elif setting is None and name != "config":  # of another trainer, or of nobody
            text = text if equals else words.popleft() if has_value else "true"
            if not is_foreign(name):
                text = "..."  # never repeated: it may be a key
                _skip_values(words)
        elif not equals and has_value:
            text = words.popleft()
        elif not equals:
            example = f", such as {_example(setting)}" if setting else " (a YAML or JSON file)"
            mistakes.append(Refusal(f"{flag_of(name)}: needs a value{example}."))
            wrong |= {setting.name} if setting else set()
            continue
        written[name] = [*written.get(name, []), *split_list(text)] if setting is not None and setting.is_list else text
    return Flags(written, False, frozenset(wrong), mistakes)


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


def lossy_text(value: object) -> str:
    """A hyperparameter as the container writes it into argv (sagemaker-training 5.1, mapping.to_cmd_args)."""
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)


def container_settings(environment: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """What a SageMaker container decides where nobody gave it: the output directory, that a run in it resumes, its name.

    A recipe that can't resume begins again: a machine that was taken away left half a run behind.
    """
    if "SM_MODEL_DIR" not in environment:
        return {}
    from toolkit.system.sagemaker_container import checkpoint_folder, in_container

    if not in_container(environment):
        return {}
    output = environment.get("SM_OUTPUT_DATA_DIR") or Path(environment["SM_MODEL_DIR"]).parent / "output/data"
    found: dict[str, Any] = {
        "output_dir": str(checkpoint_folder(environment) or Path(output) / "run"),
        "resume" if "resume" in settings else "overwrite_output_dir": True,
        "run_name": environment.get("TRAINING_JOB_NAME") or None,
    }
    return {name: value for name, value in found.items() if name in settings and value is not None}


def find_channels(config: AnyConfig, environment: Mapping[str, str] = os.environ) -> AnyConfig:
    """The config with each `channel:NAME` replaced by the folder into which SageMaker copied that channel's data.

    Raises:
        Refusal: there is no channel of that name.
    """

    def folder(match: re.Match[str]) -> str:
        name = match[1]
        path = environment.get(f"SM_CHANNEL_{name.upper()}")
        if path is None:
            there = ", ".join(json.loads(environment.get("SM_CHANNELS") or "[]"))
            known = f"this job's channels are {there}." if there else "only SageMaker jobs have channels."
            raise Refusal(f"channel:{name}: {known} A job gets one with --channel {name}=s3://BUCKET/PREFIX.")
        return path

    def replaced(value: object) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return _CHANNEL.sub(folder, value) if isinstance(value, str) else value

    found = {name: new for name, value in values_of(config).items() if (new := replaced(value)) != value}
    return dataclasses.replace(config, **found) if found else config


def channels_named(values: Mapping[str, Any]) -> list[str]:
    """The channels that settings name, each once."""
    texts = [text for value in values.values() for text in (value if isinstance(value, list) else [value])]
    return sorted({name for text in texts if isinstance(text, str) for name in _CHANNEL.findall(text)})


def _broken_among(
    values: Mapping[str, Any], config_class: type[Settings], given: Collection[str], wrong: frozenset[str]
) -> list[Refusal]:
    """What does not go together among the values that could be read, so that it need not be found in a second attempt."""
    try:
        return [Refusal(message) for message in broken_rules(config_class(**values), frozenset(given), wrong).values()]
    except Refusal as refusal:
        return [refusal]


def _skip_values(words: deque[str]) -> None:
    while words and not words[0].startswith("--"):
        words.popleft()


def _example(setting: Setting) -> str:
    if setting.choices:
        return f"{setting.flag} {next((choice for choice in setting.choices if choice != setting.default), setting.default)}"
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
