"""One call of a reward function: what it is given, what is taken of what it returns, and how its faults are reported.

It has TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, and is called with the
completions of one prompt. So the calls are the same for any batch and number of ranks. Nothing heavy is imported here: worker
processes begin with this file.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toolkit.config import Refusal
from toolkit.rollouts.users_code import faults_described, import_object, written_of

RewardFunction = Callable[..., list[float | None] | Awaitable[list[float | None]]]
LARGEST = 1e30  # of a reward: float32, in which losses are computed, must hold its sums
Call = dict[str, list[Any]]  # by argument: prompts, completions, completion_ids and the columns, one item a completion


@dataclass(frozen=True)
class Source:
    """Where a process finds a function: `module:function` or `file.py:function`, and arguments that are always the same."""

    written: str
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass
class Outcome:
    """What came of one call."""

    values: list[float | None]  # of each completion; None where the function does not apply, or failed
    problems: dict[int, str] = field(default_factory=dict)  # of the completions it failed for, by place
    misfit: str = ""  # it can't be used at all: another number of values, an argument that no column has
    output: str = ""  # what it wrote to the screen


def failed(call: Call, problem: str) -> Outcome:
    """The outcome of a call that ended without any value."""
    count = len(call["completions"])
    return Outcome([None] * count, dict.fromkeys(range(count), problem))


def load_function(source: Source) -> RewardFunction:
    """The function of a source.

    Raises:
        Refusal: it can't be imported, is not there, or can't be called.
    """
    flag = f"--reward-funcs {source.written}"
    function: Any = import_object(source.written, "--reward-funcs")
    if inspect.isclass(function):
        raise Refusal(f"{flag}: is a class. Name a function f(prompts, completions, **columns) -> list of numbers.")
    if not callable(function):
        raise Refusal(f"{flag}: is {_of_type(function)}, which can't be called. Name a function.")
    return partial(function, **dict(source.arguments)) if source.arguments else function


def is_async(function: RewardFunction) -> bool:
    """Whether a call gives something to wait for: `async def`, also of an object's `__call__` or behind `partial`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def carry_out(function: RewardFunction, call: Call) -> Outcome:
    """Call a function. Where that fails, each completion is tried alone, so that one of them does not cost the others."""
    arguments, misfit = _arguments(function, call)
    if misfit:
        return Outcome([], misfit=misfit)
    count = len(call["completions"])  # before the function, which may change what it is given
    with faults_described() as problems:
        return _read(function(**arguments), count)
    if isinstance(problems[0], Refusal):
        return Outcome([], misfit=str(problems[0]))
    if count == 1:
        return failed(call, problems[0])
    return _joined([carry_out(function, alone) for alone in _one_by_one(call)])


async def carry_out_async(function: RewardFunction, call: Call, timeout: float) -> Outcome:
    """The same for an async function, with a time limit over all of it, in seconds."""
    try:
        return await asyncio.wait_for(_awaited(function, call), timeout)
    except TimeoutError:
        return failed(call, too_slow(timeout))


async def _awaited(function: RewardFunction, call: Call) -> Outcome:
    arguments, misfit = _arguments(function, call)
    if misfit:
        return Outcome([], misfit=misfit)
    count = len(call["completions"])
    with faults_described() as problems:
        return _read(await function(**arguments), count)  # type: ignore[misc]  # is_async was true
    if isinstance(problems[0], Refusal):
        return Outcome([], misfit=str(problems[0]))
    if count == 1:
        return failed(call, problems[0])
    return _joined(list(await asyncio.gather(*(_awaited(function, alone) for alone in _one_by_one(call)))))


def too_slow(timeout: float) -> str:
    return f"no answer within {timeout:g} seconds (--reward-timeout)"


def what_is_missing(function: RewardFunction, columns: Sequence[str]) -> str:
    """The arguments of a function that rows with these columns don't have, in words; empty where there is nothing."""
    return _arguments(function, {name: [] for name in ("prompts", "completions", "completion_ids", *columns)})[1]


def _arguments(function: RewardFunction, call: Call) -> tuple[Call, str]:
    """What of the call the function takes: all of it where it has `**columns`; and what it lacks."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return call, ""
    if any(each.kind is each.POSITIONAL_ONLY and each.default is each.empty for each in parameters):
        return {}, "has arguments without names; take prompts, completions and **columns"
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    wanted = [name for name, each in named.items() if each.default is each.empty and name not in call]
    if wanted:
        return {}, f"takes {' and '.join(wanted)}; there are {', '.join(call)}"
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return call if takes_all else {name: values for name, values in call.items() if name in named}, ""


def _one_by_one(call: Call) -> list[Call]:
    return [{name: values[place : place + 1] for name, values in call.items()} for place in range(len(call["completions"]))]


def _joined(alone: Sequence[Outcome]) -> Outcome:
    """The outcomes of calls with one completion each, as one."""
    misfit = next((each.misfit for each in alone if each.misfit), "")
    if misfit:
        return Outcome([], misfit=misfit)
    problems = {place: each.problems[0] for place, each in enumerate(alone) if each.problems}
    return Outcome([value for each in alone for value in each.values], problems)


def _read(returned: Any, count: int) -> Outcome:
    """The values of a call's completions: finite numbers, or None."""
    if hasattr(returned, "tolist"):  # a numpy array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return Outcome([], misfit=f"returned {_of_type(returned)}; a list of {count} numbers, one a completion, would be right")
    if len(returned) != count:
        return Outcome([], misfit=f"returned {len(returned)} values for {count} completions; it must be one a completion")
    values, problems = list[float | None](), dict[int, str]()
    for place, each in enumerate(returned):
        value = each.item() if hasattr(each, "item") and getattr(each, "ndim", 0) == 0 else each
        if value is None:
            values.append(None)
        elif not isinstance(value, numbers.Real):
            problems[place] = f"returned {_of_type(value)}, not a number"
            values.append(None)
        else:
            number = _as_float(value)
            is_usable = abs(number) <= LARGEST  # not a number is not
            values.append(number if is_usable else None)
            if not is_usable:
                problems[place] = f"returned {number}" + (f", beyond {LARGEST:g}" if math.isfinite(number) else "")
    return Outcome(values, problems)


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number that no float can hold
        return -math.inf if value < 0 else math.inf


def _of_type(value: object) -> str:
    shown = written_of(value, repr)
    return f"{type(value).__name__} {shown[:60]}{'...' if len(shown) > 60 else ''}"
