"""Names of Typer that are not public: how a parameter is converted, and a Typer app's commands before they are built.

Seen in Typer 0.29; tests/cli/test_compat.py fails when they move.
"""

import os
import typing
from pathlib import Path
from typing import Any

import typer


def set_classes(app: typer.Typer, group: type, command: type) -> None:
    """Let what is built of an app be of these classes: the app itself, and each of its commands."""
    app.info.cls = group
    for registered in app.registered_commands:
        registered.cls = command


def without_pydantic(parameter: Any) -> Any:
    """Typer imports pydantic, a third of a short command's time, to convert what needs no conversion.

    That are options nobody typed, texts, and paths that can be read or don't exist: Typer refuses the others.
    """
    if "process_value" in vars(parameter):  # done
        return parameter
    convert, annotation = parameter.process_value, parameter.type_descriptor.annotation
    is_list = parameter.multiple or parameter.nargs == -1
    kind = (typing.get_args(annotation) or (annotation,))[0]

    def is_plain(text: Any) -> bool:
        is_path = kind is Path and isinstance(text, str) and (os.access(text, os.R_OK) or not os.path.exists(text))
        return is_path or (kind is str and isinstance(text, str))

    def process_value(context: Any, value: Any) -> Any:
        values = () if value is None else tuple(value) if is_list and not isinstance(value, str) else (value,)
        if not all(map(is_plain, values)) or (not values and parameter.required):
            return convert(context, value)
        taken: Any = list(map(kind, values)) if is_list else kind(value) if values else None
        return parameter.callback(context, parameter, taken) if parameter.callback else taken

    parameter.process_value = process_value
    return parameter
