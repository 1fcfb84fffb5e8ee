"""A recipe as a program: its `main` is called with the config of its command line, and its end becomes an exit code."""

import contextlib
import faulthandler
import importlib.util
import inspect
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

from toolkit.command_line.reading import find_channels, read_command_line
from toolkit.command_line.refusals import print_refusal
from toolkit.config import Refusal, Settings, changed_settings, check_together, settings_of, show_value
from toolkit.config.reading import forget_reads, values_of
from toolkit.distributed.heartbeat import explained_by_ranks, failed_alone
from toolkit.distributed.mpi import adopt_mpi_ranks
from toolkit.system.console import first_line, keep_bars_out_of_logs, say
from toolkit.system.free_memory import OutOfMemory, is_out_of_memory
from toolkit.system.standard_streams import outlive_the_log

AnyConfig = TypeVar("AnyConfig", bound=Settings)
EXIT_REFUSED, EXIT_TRY_AGAIN, EXIT_STOPPED = 2, 75, 130  # the last as shells have it for SIGINT


def run_recipe(main: Callable[[AnyConfig], Any]) -> None:
    """Run a recipe's `main` with the config that the command line, SM_HPS and --config define.

    Exits with 2 and one message when settings or data are refused, and with an exception's own `exit_code` (a run that a
    signal stopped has 75) and its message when it has one. Other exceptions keep their traceback.
    """
    if sys.__stderr__ is not None:  # a crash in native code (such as of a file cut under its mapping) shows where it was
        faulthandler.enable(sys.__stderr__)
    outlive_the_log()
    keep_bars_out_of_logs()
    try:
        config_class = config_class_of(main)
        description = sys.modules[main.__module__].__doc__ or ""
        adopt_mpi_ranks()
        config = read_command_line(config_class, sys.argv[1:], os.environ, description)
        check_together(config)
        config = find_channels(config, os.environ)
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
        deliver_model(values_of(config).get("output_dir", ""), os.environ)
    except Refusal as refusal:
        # Data may be missing on one node alone: one message for each node.
        alone = failed_alone()
        if alone or os.environ.get("LOCAL_RANK", "0") == "0":
            print_refusal(Refusal(f"rank {os.environ['RANK']}: {refusal}") if alone else refusal)
        sys.exit(EXIT_REFUSED)
    except BaseException as error:
        error = _explained_by_memory(explained_by_ranks(error), Path(main.__code__.co_filename))
        failed_alone()
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


def _explained_by_memory(error: BaseException, script: Path) -> BaseException:
    """An `OutOfMemory` with the recipe's line where none was left outside of a run, which says so itself; else the error."""
    if not isinstance(error, (MemoryError, RuntimeError, ImportError, OSError)) or not is_out_of_memory(error):
        return error
    return OutOfMemory(
        f"out of memory at {script}:{_last_line(error, script)}: {first_line(error)}\nTake a smaller model, its weights in "
        "half precision (--dtype bfloat16), fewer examples, or a larger machine: `toolkit plan` finds what is needed."
    )


def _end_interrupted() -> NoReturn:
    say("\ninterrupted", error=True)
    sys.exit(EXIT_STOPPED)


def config_class_of(main: Callable[[AnyConfig], Any]) -> type[AnyConfig]:
    """The class that annotates the parameter of a recipe's `main`.

    Raises:
        Refusal: main isn't a function of one config, or is not annotated with that config's class.
    """
    if not inspect.isfunction(main):
        raise Refusal(f"main is {main!r}, and no function main(config: Config), as a recipe has.")
    parameters = list(inspect.signature(main).parameters.values())
    config_class = parameters[0].annotation if parameters else None
    if isinstance(config_class, str):  # from __future__ import annotations
        # Not typing.get_type_hints: it would resolve `-> tk.Summary` too, and load torch for a help page.
        with contextlib.suppress(Exception):  # of a name that there isn't: refused below
            config_class = eval(config_class, main.__globals__)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each for each in parameters if each.default is each.empty and each.kind not in variable]
    if len(required) > 1 or not (isinstance(config_class, type) and issubclass(config_class, Settings)):
        place = f"{main.__code__.co_filename}:{main.__code__.co_firstlineno}"
        raise Refusal(f"{place}: main takes one config; annotate it with the recipe's class of settings: main(config: Config).")
    return cast(type[AnyConfig], config_class)


def config_class_of_file(recipe: Path) -> type[Settings]:
    """The `Config` of a recipe's file, which is imported, as its --help does, and not run."""
    return config_class_of(import_recipe(recipe).main)


def import_recipe(recipe: Path) -> ModuleType:
    """A recipe's file as a module; as in a script of Python, it may import files next to it.

    Raises:
        Refusal: it can't be imported, or has no main.
    """
    name, folder = f"recipe_{recipe.stem}", str(recipe.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, recipe)
    if spec is None or spec.loader is None:
        raise Refusal(f"{recipe}: is not a Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise Refusal(f"{recipe}: can't be imported here ({error}).") from error
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        line = _last_line(error, recipe)
        raise Refusal(f"{recipe}:{line}: can't be imported here ({type(error).__name__}: {error}).") from error
    if not hasattr(module, "main"):
        raise Refusal(f"{recipe}: has no function main(config), as a recipe has.")
    return module


def read_recipe(script: Path, words: list[str]) -> tuple[Callable[[Any], Any], Settings]:
    """A recipe's `main`, for a command that calls it, and the config that the words after its name define.

    Raises:
        Refusal: the recipe can't be imported, or its settings are refused.
    """
    module = import_recipe(script)
    config = read_command_line(config_class_of(module.main), words, os.environ, module.__doc__ or "")
    check_together(config)
    return module.main, find_channels(config, os.environ)


@contextlib.contextmanager
def errors_refused(script: Path) -> Iterator[None]:
    """A block that calls a recipe's `main` for a command whose exit codes mean other things: an error of the recipe, or its
    exit, is refused with its line, below its traceback.

    Raises:
        Refusal: in place of what the recipe raised.
    """
    try:
        yield
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, Exception):
            traceback.print_exception(error)
        line = _last_line(error, script)
        raise Refusal(f"{script}:{line}: the recipe ended here with {type(error).__name__}: {error}") from error


def _last_line(error: BaseException, script: Path) -> int:
    """The line of a recipe at which it raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == str(script.absolute())), 0)


def deliver_model(output_dir: str | Path, environment: Mapping[str, str]) -> None:
    """Move the model that a finished run left to SM_MODEL_DIR, which SageMaker packs and sends to S3; on the first rank."""
    from toolkit.system.files import sync_tree
    from toolkit.system.sagemaker_container import in_container

    model = Path(output_dir) / "model"
    if not in_container(environment) or environment.get("RANK", "0") != "0" or not model.is_dir():
        return
    target = Path(environment["SM_MODEL_DIR"])
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, target, dirs_exist_ok=True)
    sync_tree(target)
    shutil.rmtree(model)  # last: a machine that is taken away now finds it again, or makes it again from the last checkpoint
    say(f"Saved the model to {target}")


def _changed_block(config: Settings) -> list[str]:
    """The settings that differ from the recipe's defaults, one a line, with the default next to each."""
    settings = settings_of(type(config))
    rows = [(name, show_value(value), show_value(settings[name].default)) for name, value in changed_settings(config).items()]
    # A default model may be one that another recipe has trained here, or else a random one.
    model = values_of(config).get("model")
    who = f"{sys.argv[0]} (model {model})" if model is not None and model == settings["model"].default else sys.argv[0]
    if not rows:
        return [f"{who}: all settings at their defaults"]
    names = max(len(name) for name, _, _ in rows)
    values = min(max(len(value) for _, value, _ in rows), 32)  # one long value must not push the others' defaults away
    lines = [f"  {name:<{names}} = {value:<{values}}  (default {default})" for name, value, default in rows]
    return [f"{who}: settings that differ from the defaults", *lines]
