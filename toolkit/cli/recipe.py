"""A recipe's command line: from the annotation of its `main` to a checked config, and from its end to an exit code.

Later ones win: the recipe's defaults, --config FILE, SM_HPS (the settings of a SageMaker job), flags.
"""

import faulthandler
import inspect
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from toolkit.cli.arguments import canonical_arguments, read_hyperparameters, without_container_keys
from toolkit.cli.container import container_settings, deliver_model, find_channels
from toolkit.cli.help_page import build_command
from toolkit.cli.refusals import print_refusal
from toolkit.config import (
    Refusal,
    Settings,
    changed_settings,
    check_together,
    implied_settings,
    read_config_file,
    settings_of,
    show_value,
)
from toolkit.config.reading import forget_reads
from toolkit.config.rules import broken_rules
from toolkit.config.setting import refuse_all
from toolkit.config.values import read_what_can_be, split_list
from toolkit.distributed.mpi import adopt_mpi_ranks
from toolkit.system.console import keep_bars_out_of_logs, say

AnyConfig = TypeVar("AnyConfig", bound=Settings)
EXIT_REFUSED, EXIT_TRY_AGAIN, EXIT_STOPPED = 2, 75, 130  # the last as shells have it for SIGINT


def run_recipe(main: Callable[[AnyConfig], Any]) -> None:
    """Run a recipe's `main` with the config that the command line, SM_HPS and --config ask for.

    Exits with 2 and one message when settings or data are refused, and with an exception's own `exit_code` (a run that a
    signal stopped has 75) and its message when it has one. Other exceptions keep their traceback.
    """
    if sys.__stderr__ is not None:  # a crash in native code (a file cut under its mapping, say) shows where it was
        faulthandler.enable(sys.__stderr__)
    keep_bars_out_of_logs()
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
        say("\n".join(_changed_block(config)))
    forget_reads(config)  # those of the checks above
    try:
        main(config)
        deliver_model(getattr(config, "output_dir", ""), os.environ)
    except Refusal as refusal:
        # Data may be missing on one node alone: one message for each node.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_refusal(refusal)
        sys.exit(EXIT_REFUSED)
    except BaseException as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            if isinstance(error, KeyboardInterrupt):
                _end_interrupted()
            raise
        if exit_code == EXIT_TRY_AGAIN:  # another rank's signal stopped this one; its own may still come
            for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)):
                signal.signal(number, signal.SIG_IGN)
        if os.environ.get("RANK", "0") == "0" or getattr(error, "on_every_rank", False):
            say(error, error=True)
        sys.exit(exit_code)


def _end_interrupted() -> NoReturn:
    say("\ninterrupted", error=True)
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
        Refusal: anything unknown, mistyped or outside its rules, wherever it is written, in one message; with what doesn't go
            together among the rest.
        SystemExit: with code 0, after --help.
    """
    settings = settings_of(config_class)
    hyperparameters = read_hyperparameters(environment.get("SM_HPS"))
    canonical, wrong, mistakes = canonical_arguments(arguments, settings, hyperparameters)
    typed = build_command(settings, description).main(canonical, prog_name=sys.argv[0], standalone_mode=False)
    if not isinstance(typed, dict):
        if typed:  # the exit code that Typer has for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(0)  # the help page was asked for
    of_job = without_container_keys(hyperparameters)
    path, of_that_job = typed.pop("config"), of_job.pop("config", None)
    path = of_that_job if path is None else path
    if path is not None and not isinstance(path, str):
        raise Refusal(f"--config {show_value(path)} (SM_HPS): must be the name of a YAML file.")
    flags = {
        name: [item for text in written for item in split_list(text)] if isinstance(written, list) else written
        for name, written in typed.items()
        if written is not None
    }
    written, is_file_read = dict[str, Any](), True
    if path is not None:
        try:
            written = read_config_file(path)
        except Refusal as refusal:
            mistakes.append(refusal)
            is_file_read = False
    values, given = dict[str, Any](), set[str]()
    for each, source in ((written, str(path)), (of_job, "SM_HPS"), (flags, "")):
        read = read_what_can_be(config_class, each, source)
        mistakes += read.mistakes
        values |= read.values
        given |= {name for name, value in read.values.items() if each is not written or value != settings[name].default}
        wrong = wrong - read.values.keys() | read.wrong
    implied = {name: value for name, value in implied_settings(values).items() if name in settings}
    values = container_settings(environment, settings) | implied | values
    if mistakes and is_file_read:
        known = {name: value for name, value in values.items() if name not in wrong}
        mistakes += _broken_among(known, config_class, given, wrong)
    refuse_all(mistakes)
    return config_class(**values), frozenset(given)


def _broken_among(
    values: Mapping[str, Any], config_class: type[Settings], given: Collection[str], wrong: frozenset[str]
) -> list[Refusal]:
    """What does not go together among the values that could be read, so that it need not be found in a second attempt."""
    try:
        return [Refusal(message) for message in broken_rules(config_class(**values), frozenset(given), wrong).values()]
    except Refusal as refusal:
        return [refusal]


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
