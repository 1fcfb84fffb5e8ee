"""A recipe's command line: from the annotation of its `main` to a checked config, and from its end to an exit code.

Later ones win: the recipe's defaults, --config FILE, SM_HPS (the settings of a SageMaker job), flags.
"""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from toolkit.cli.arguments import canonical_arguments, read_hyperparameters, without_container_keys
from toolkit.cli.help_page import build_command
from toolkit.cli.refusals import print_refusal
from toolkit.config import (
    Refusal,
    Settings,
    changed_settings,
    check_together,
    implied_settings,
    read_config_file,
    read_values,
    settings_of,
    show_value,
)
from toolkit.config.values import split_list
from toolkit.container import container_settings, deliver_model, find_channels
from toolkit.mpi import adopt_mpi_ranks

AnyConfig = TypeVar("AnyConfig", bound=Settings)
EXIT_REFUSED, EXIT_TRY_AGAIN, EXIT_STOPPED = 2, 75, 130  # the last as shells have it for SIGINT


def run_recipe(main: Callable[[AnyConfig], Any]) -> None:
    """Run a recipe's `main` with the config that the command line, SM_HPS and --config ask for.

    Exits with 2 and one message when settings or data are refused, and with an exception's own `exit_code` (a run that a
    signal stopped has 75) and its message when it has one. Other exceptions keep their traceback.
    """
    config_class = config_class_of(main)
    description = sys.modules[main.__module__].__doc__ or ""
    try:
        adopt_mpi_ranks()
        config, given = read_command_line(config_class, sys.argv[1:], os.environ, description)
        check_together(config, given)
        config = find_channels(config, os.environ)
        object.__setattr__(config, "given", given)  # for the run card; a config is frozen so that recipes don't change it
    except Refusal as refusal:
        # Every rank reads the same settings, so every rank refuses them: one message is enough.
        if os.environ.get("RANK", "0") == "0":
            print_refusal(refusal)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        _end_interrupted()
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(_changed_block(config)), flush=True)
    try:
        main(config)
        deliver_model(getattr(config, "output_dir", ""), os.environ)
    except Refusal as refusal:
        # Data may be missing on one node alone: one message for each node.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_refusal(refusal)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        _end_interrupted()
    except BaseException as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            raise
        if exit_code == EXIT_TRY_AGAIN:  # another rank's signal stopped this one; its own may still come
            for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)):
                signal.signal(number, signal.SIG_IGN)
        if os.environ.get("RANK", "0") == "0" or getattr(error, "on_every_rank", False):
            print(error, file=sys.stderr, flush=True)
        sys.exit(exit_code)


def _end_interrupted() -> NoReturn:
    print("\ninterrupted", file=sys.stderr, flush=True)
    sys.exit(EXIT_STOPPED)


def config_class_of(main: Callable[[AnyConfig], Any]) -> type[AnyConfig]:
    """The class that annotates the parameter of a recipe's `main`."""
    parameters = list(inspect.signature(main).parameters.values())
    config_class = parameters[0].annotation if parameters else None
    if isinstance(config_class, str):  # from __future__ import annotations
        # Not typing.get_type_hints: it would resolve `-> tk.Summary` too, and load torch for a help page.
        config_class = eval(config_class, main.__globals__)
    if not (isinstance(config_class, type) and issubclass(config_class, Settings)):
        raise TypeError(f"{main.__name__}: annotate its parameter with the recipe's Config class")
    return cast(type[AnyConfig], config_class)


def read_command_line(
    config_class: type[AnyConfig], arguments: Sequence[str], environment: Mapping[str, str], description: str = ""
) -> tuple[AnyConfig, frozenset[str]]:
    """The config that was asked for, and the names of the settings that someone gave.

    A key of --config that holds the recipe's default is not given: config.yaml, which holds them all, must repeat its run.

    Raises:
        Refusal: anything unknown, mistyped or outside its rules.
        SystemExit: with code 0, after --help.
    """
    settings = settings_of(config_class)
    hyperparameters = read_hyperparameters(environment.get("SM_HPS"))
    canonical = canonical_arguments(arguments, settings, hyperparameters)
    typed = build_command(settings, description).main(canonical, prog_name=sys.argv[0], standalone_mode=False)
    if not isinstance(typed, dict):
        if typed:  # the exit code that Typer has for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(0)  # the help page was asked for
    of_job = without_container_keys(hyperparameters)
    path = typed.pop("config") or of_job.pop("config", None)
    flags = {
        name: [item for text in written for item in split_list(text)] if isinstance(written, list) else written
        for name, written in typed.items()
        if written is not None
    }
    from_file = read_values(config_class, read_config_file(path), str(path)) if path else {}
    from_job = read_values(config_class, of_job, "SM_HPS")
    from_flags = read_values(config_class, flags)
    given = {name for name, value in from_file.items() if value != settings[name].default} | {*from_job, *from_flags}
    values = from_file | from_job | from_flags
    implied = {name: value for name, value in implied_settings(values).items() if name in settings}
    return config_class(**(container_settings(environment, settings) | implied | values)), frozenset(given)


def _changed_block(config: Settings) -> list[str]:
    """The settings that differ from the recipe's defaults, one a line, with the default beside each."""
    settings = settings_of(type(config))
    rows = [(name, show_value(value), show_value(settings[name].default)) for name, value in changed_settings(config).items()]
    # A default model may be one that another recipe has trained here, or else a random one.
    model = getattr(config, "model", None)
    who = f"{sys.argv[0]} (model {model})" if model is not None and model == settings["model"].default else sys.argv[0]
    if not rows:
        return [f"{who}: all settings at their defaults"]
    names = max(len(name) for name, _, _ in rows)
    values = min(max(len(value) for _, value, _ in rows), 32)  # one long value must not push the others' defaults away
    lines = [f"  {name:<{names}} = {value:<{values}}  (default {default})" for name, value, default in rows]
    return [f"{who}: settings that differ from the defaults", *lines]
