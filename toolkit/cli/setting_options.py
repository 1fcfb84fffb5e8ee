"""Options of commands that mean what a recipe's settings of the same name do: their help, their values, their refusals."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from toolkit.config import Refusal, Settings, read_config_file, settings_of
from toolkit.config.places import place_to_write
from toolkit.config.setting import refuse_all, spellings_of
from toolkit.config.values import read_what_can_be, split_list

AnyConfig = TypeVar("AnyConfig", bound=Settings)

TASKS = (
    "sft", "lm", "preference", "unpaired", "embedding", "seq2seq", "classification", "ranking", "question_answering",
    "masked_lm", "diffusion", "token_classification", "multiple_choice",
)  # fmt: skip

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's output directory, a model's or an adapter's directory, or a Hub id.")
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="Such as cuda:1 or cpu. Default: an accelerator, if any.")
]

OF_MODEL = "tokenizer chat_template model_revision trust_remote_code"
_METAVARS = {"rename_columns": "OLD=NEW,...", "chat_template": "FILE"}


def directory_to_write(into: Path, source: Path, overwrite: bool) -> Path:
    """The directory --into, which is made of `source`: a new or empty one, or with `overwrite` one that it replaces.

    Raises:
        Refusal: as `place_to_write`.
        BadParameter: it is there and not empty, or `source` is in it and would be replaced too.
    """
    place = place_to_write(into, "--into")
    if place.resolve() in (source.resolve(), *source.resolve().parents):
        raise typer.BadParameter(f"{place}: {source} is in it. Name another.", param_hint="--into")
    if place.exists() and any(place.iterdir()) and not overwrite:
        raise typer.BadParameter(f"{place}: is there and not empty. Name another, or add --overwrite.", param_hint="--into")
    return place


def check_task(task: str | None, tasks: tuple[str, ...] = TASKS) -> None:
    """Refuse what is none of the tasks."""
    if task is not None and task not in tasks:
        meant = {"reranker": "ranking", "dpo": "preference", "kto": "unpaired", "pretrain": "lm"}.get(task, "")
        hint = f" Did you mean {meant}?" if meant in tasks else ""
        raise typer.BadParameter(f"{task}: is none of {', '.join(tasks)}.{hint}", param_hint="--task")


def option(config_class: type[Settings], name: str, help: str | None = None) -> Any:
    """The option of a setting; typed as text, or as a switch. `help`: where the setting's own refers to other settings."""
    setting = settings_of(config_class)[name]
    usual = {str: "TEXT", int: "N", float: "X", bool: None}[setting.kind]
    metavar = _METAVARS.get(name) or ("|".join(setting.choices) if setting.choices else "A,B" if setting.is_list else usual)
    flag = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if setting.is_switch else setting.flag
    return typer.Option(flag, metavar=metavar, help=help or setting.help)


def with_settings(names: str, *groups: type[Settings], **helps: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with an option for each of these settings of the groups too: what was typed is its argument `typed`.

    `names`: in the order of its --help, with spaces between. `helps`: where a setting's own help refers to other settings.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.name != "typed"]
        for name in names.split():
            group = next(group for group in groups if name in settings_of(group))
            kind = bool if settings_of(group)[name].is_switch else str
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None,
                                  annotation=Annotated[kind | None, option(group, name, helps.get(name))])
            )  # fmt: skip

        @wraps(command)
        def called(**values: Any) -> None:
            typed = {name: values.pop(name) for name in names.split()}
            command(**values, typed=typed)

        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return with_options


def read_options(
    config_class: type[AnyConfig], typed: Mapping[str, Any], file: Path | None = None, without: frozenset[str] = frozenset()
) -> AnyConfig:
    """The config of what was typed (None: nothing) and, of a recipe's YAML, of the settings that it has in common.

    `without`: settings that are not read of the YAML.

    Raises:
        Refusal: values that their settings don't take, of the file and typed, or a file that can't be read.
    """
    settings = settings_of(config_class)
    spellings = spellings_of(settings)
    written = read_config_file(file) if file is not None else {}
    found = {key: spellings.get(key.replace("-", "_")) for key in written}
    shared = {key: written[key] for key, each in found.items() if each is not None and each.name not in without}
    if file and not shared:
        raise Refusal(f"--config {file}: has no setting that is read here.")
    flags = {name: split_list(value) if settings[name].is_list else value for name, value in typed.items() if value is not None}
    of_file, of_flags = read_what_can_be(config_class, shared, str(file)), read_what_can_be(config_class, flags)
    refuse_all([*of_file.mistakes, *of_flags.mistakes])
    return config_class(**(of_file.values | of_flags.values))
