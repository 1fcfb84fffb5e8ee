"""The user's own code, such as rewards and environments: imported, and called so that it can't end or change the run unseen.

What it raises is put into words, a copy of the process that it forks ends, and what it sets for the whole process is set back.
Nothing heavy is imported here: worker processes begin with this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from toolkit.config import Refusal
from toolkit.config.setting import did_you_mean

IN_WORKER = False  # set by reward_worker
_STDLIB = os.path.dirname(os.__file__) + os.sep
_TOOLKIT = os.path.dirname(os.path.dirname(__file__)) + os.sep


def import_object(written: str, setting: str) -> object:
    """What a setting names as module:name or file.py:name.

    Raises:
        Refusal: it can't be imported, or is not there.
    """
    place, colon, name = written.rpartition(":")
    if not colon and written.endswith(".py"):
        raise Refusal(f"{setting} {written}: which of this file? Write {written}:name.")
    if not colon:  # as TRL writes it: module.function
        place, _, name = written.rpartition(".")
    flag = f"{setting} {written}"
    if not place or not name:
        raise Refusal(f"{flag}: write module:function, or path/to/file.py:function.")
    try:
        with process_kept():
            module = _module_of_file(place, flag) if place.endswith(".py") else _import(place)
    except Refusal:
        raise
    except ModuleNotFoundError as error:
        missing = f"no module {error.name}" if error.name else str(error)
        where = "" if error.name and place.startswith(error.name) else f", which {place} imports"
        raise Refusal(
            f"{flag}: there is {missing}{where}. A module is looked for as Python does, and in {os.getcwd()}; a file is "
            "given as path/to/file.py:function."
        ) from error
    except BaseException as error:
        if _is_from_outside(error):
            raise
        raise Refusal(f"{flag}: importing {place} ended with {describe(error)}. Mend it first.") from error
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            meant = did_you_mean(part, [each for each in dir(function) if callable(getattr(function, each))])
            raise Refusal(f"{flag}: {place} has no {part}.{meant}")
        function = getattr(function, part)
    return function


@contextlib.contextmanager
def faults_described() -> Iterator[list[str | Refusal]]:
    """A block of the user's code: what it raises is in the list, in words, unless it is meant for the process."""
    problems, process = list[str | Refusal](), os.getpid()
    try:
        yield problems
    except Refusal as refusal:
        problems.append(refusal)
    except BaseException as error:
        if os.getpid() == process and _is_from_outside(error):
            raise
        problems.append(describe(error))
    finally:
        end_fork(process)


def end_fork(process: int) -> None:
    """End a copy of the process that the user's code has forked: it would answer, or train, a second time."""
    if os.getpid() != process:
        os._exit(0)


def _is_from_outside(error: BaseException) -> bool:
    """Whether it is meant for the process: Ctrl-C, which a worker never gets, or the time limit of an async call."""
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop
            return False
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        return _is_by_signal(error) and not IN_WORKER
    return isinstance(error, GeneratorExit) and not IN_WORKER


def _is_by_signal(error: KeyboardInterrupt) -> bool:
    """While a run is open, Ctrl-C is noted and raises nothing until it comes again: then Python's own handler is back."""
    handler, frames = signal.getsignal(signal.SIGINT), list(traceback.walk_tb(error.__traceback__))
    raised_it = bool(frames) and frames[-1][0].f_code is getattr(handler, "__code__", None)
    return raised_it or handler is signal.default_int_handler


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """A block of the user's code in this process: what it sets for all of it, and training depends on, is set back."""
    process = os.getpid()
    before = [(read, write, read()) for read, write in _settings_of_the_process()]
    try:
        yield
    finally:
        end_fork(process)
        for read, write, value in before:
            if read() != value:
                write(value)


def _settings_of_the_process() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How each is read and written; none in a worker process, which is the user's own."""
    if IN_WORKER:
        return []
    found: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [(_folder, os.chdir)]
    if "torch" in sys.modules:
        import torch

        def set_device(device: torch.device) -> None:
            torch.set_default_device(None if device.type == "cpu" else device)  # None: none is set, as at the start

        found += [
            (torch.is_grad_enabled, torch.set_grad_enabled), (torch.get_default_dtype, torch.set_default_dtype),
            (torch.get_default_device, set_device), (torch.get_num_threads, torch.set_num_threads),
        ]  # fmt: skip
    return found


def _folder() -> str:
    """The working directory; the root where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


def describe(error: BaseException) -> str:
    """An exception in one line, with the line of the user's code that it comes from."""
    words = " ".join(written_of(error, str).split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TOOLKIT)]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(_STDLIB)]
    last = (own or frames)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}{f': {words[:300]}' if words else ''}{where}"


def _import(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _module_of_file(written: str, flag: str) -> ModuleType:
    """A file as a module; what lies next to it can be imported from it."""
    path = os.path.abspath(os.path.expanduser(written))
    if not os.path.isfile(path):
        raise Refusal(f"{flag}: there is no file {written} (looked for in {os.getcwd()}).")
    name = f"rewards_of_{os.path.splitext(os.path.basename(path))[0]}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def written_of(value: object, write: Callable[[object], str]) -> str:
    """The repr of an object of the user, which may fail too."""
    try:
        return write(value)
    except Exception:
        return ""
