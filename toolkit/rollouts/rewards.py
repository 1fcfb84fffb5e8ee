"""Which rewards a run has, each with its name, its weight, and how completions are scored by it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import ModelConfig, Refusal
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.config.setting import nearest, show_value
from toolkit.data.tokenize.columns import columns_of
from toolkit.rollouts.builtin_rewards import BUILT_IN, check_pattern, jsonschema_installed, read_schema
from toolkit.rollouts.python_reward import python
from toolkit.rollouts.reward_calls import (
    Call,
    Outcome,
    RewardFunction,
    Source,
    carry_out,
    carry_out_async,
    is_async,
    load_function,
    what_is_missing,
)
from toolkit.rollouts.reward_processes import RewardProcesses
from toolkit.rollouts.users_code import process_kept
from toolkit.system.digests import digests_of_directories, directory_digest, sha256_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.rollouts.reward_model import RewardModel

SECONDS, CODE_SECONDS = 60.0, 5.0  # that a function has for the completions of a prompt, and one completion's code

Runner = Callable[[list[Call]], Generator[Outcome, None, None]]


@dataclass(frozen=True)
class Reward:
    """One reward: a function of completions with a name and a weight.

    `function` has TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`. In a recipe,
    `tk.Reward("short", my_function)` is one that runs in the training process.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    run: Runner | None = None  # carries out calls of the function; None: in this process, one after the other
    model: RewardModel | None = None  # in place of the function

    def outcomes(self, calls: list[Call]) -> Generator[Outcome, None, None]:
        """What came of each call, in their order. Whoever takes no more of them ends the calls that are running."""
        return (self.run or partial(run_here, self.function))(calls)


def load_rewards(
    config: RewardFunctionsConfig, tokenizer: PreTrainedTokenizerBase | None = None,
    splits: Mapping[str, Dataset | IterableDataset] | None = None,
) -> list[Reward]:  # fmt: skip
    """The rewards of `config.reward_funcs`, all imported and checked: what is wrong is found before the model is loaded.

    Args:
        tokenizer: the policy's, for reward models, which must have its vocabulary. Default: that of `config.model`.
        splits: of `load_splits`, which must have the columns that the rewards read. Default: that is not checked.

    Raises:
        Refusal: no reward and no environment, one that can't be imported or called, another number of weights, a reward
            model with another vocabulary, a setting that a built-in reward needs, a column that a split does not have.
    """
    written, weights = config.reward_funcs, config.reward_weights
    if not written and not config.environment:
        raise Refusal(
            "--reward-funcs: no reward, so there is nothing to learn. Name a function (my_rewards.py:correct), a directory of "
            f"recipes/reward.py, one of {', '.join(NAMES)}, or an --environment that gives one."
        )
    if weights and len(weights) != len(written):
        raise Refusal(
            f"--reward-weights {show_value(weights)}: {len(weights)} for {len(written)} of --reward-funcs "
            f"({', '.join(written)}). Give one for each."
        )
    if weights and not any(weights):
        raise Refusal("--reward-weights: all are 0, so there is nothing to learn. Give a reward another weight.")
    twice = next((each for number, each in enumerate(written) if each in written[:number]), None)
    if twice:
        raise Refusal(f"--reward-funcs {twice}: given twice. Give it once, with the sum of both --reward-weights.")
    processes = RewardProcesses(config.reward_processes) if config.reward_processes else None
    loaded = [_load(each, config, tokenizer, processes) for each in written]
    names = _distinct([reward.name for reward in loaded], written)
    taken = {"std", *(f"{name}_std" for name in names)}.intersection(names)
    if taken:
        raise Refusal(f"--reward-funcs: another metric has the name reward_{min(taken)}. Rename the function {min(taken)}.")
    for split, rows in (splits or {}).items():
        columns = [name for name in columns_of(rows, split) if name not in ("prompt", "completion")]  # as `call_of` leaves out
        for each, reward in zip(written, loaded, strict=True):
            if split != "test":  # which no run reads
                _check_columns(each, reward, columns, split)
    return [
        Reward(name, reward.function, weight, reward.run, reward.model)
        for name, reward, weight in zip(names, loaded, weights or [1.0] * len(loaded), strict=True)
    ]


def rewards_made_of(config: RewardFunctionsConfig, reference: str | None = None) -> dict[str, Any]:
    """Digests of what rewards come from, for `open_run`, so that a run does not go on with others under the same names.

    Of functions and environments the file that is named, not what it imports; of reward models their directory, as of the
    reference model of a KL, where there is one.
    """
    files = [each for each in (*config.reward_funcs, config.environment, config.reward_schema) if each and each not in NAMES]
    setting = "reward_funcs" if config.reward_funcs else "environment"
    rewards = {"who": "reward", "setting": setting, "files": {each: _digest_of(each) for each in files}}
    if reference is None:
        return rewards
    return {**rewards, "reference": {"who": "reference", "setting": "model", "files": digests_of_directories(reference)}}


def _digest_of(written: str) -> str:
    """Of a directory, of a file, or of that of `file.py:function` or `module:function`; empty where there is none."""
    path = os.path.expanduser(written)
    if os.path.isdir(path):
        return directory_digest(path)
    if not os.path.isfile(path):
        path = path.rpartition(":" if ":" in path else ".")[0]
        path = getattr(sys.modules.get(path), "__file__", None) or path  # `load_rewards` has imported it
    return sha256_of(Path(path)) if os.path.isfile(path) else ""


def _check_columns(written: str, reward: Reward, columns: Sequence[str], split: str) -> None:
    """A function's arguments must be there; what a built-in one compares with is a setting of its own."""
    compared = reward.function.keywords.get("column") if isinstance(reward.function, partial) else None
    if compared is not None and compared not in columns:
        near = nearest(compared, columns)
        raise Refusal(
            f"--reward-funcs {written}: compares with the column {compared}; the split {split} has {', '.join(columns)}. "
            f"Give --answer-column{f' {near}' if near else ', the one with the right answer'}."
        )
    if reward.model is None and (missing := what_is_missing(reward.function, columns)):
        raise Refusal(f"--reward-funcs {written}: {missing} in the split {split}.")


def run_here(function: RewardFunction, calls: list[Call], timeout: float | None = None) -> Generator[Outcome, None, None]:
    """The outcomes of calls in this process; async ones all at once, in a thread whose loop is their own."""
    if not is_async(function):
        for call in calls:
            with _captured() as output:
                outcome = carry_out(function, call)
            outcome.output = output.getvalue()
            yield outcome
        return

    async def all_at_once() -> list[Outcome]:
        return list(await asyncio.gather(*(carry_out_async(function, call, timeout or 1e9) for call in calls)))

    def in_a_loop() -> list[Outcome]:
        return asyncio.run(all_at_once())

    with _captured() as output, ThreadPoolExecutor(1) as thread:
        outcomes = thread.submit(in_a_loop).result()
    for outcome in outcomes[-1:]:
        outcome.output = output.getvalue()
    yield from outcomes


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """A block of the user's code in this process, whose printed lines are kept from the screen."""
    with process_kept(), contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        yield output


def _load(
    written: str, config: RewardFunctionsConfig, tokenizer: PreTrainedTokenizerBase | None, processes: RewardProcesses | None
) -> Reward:
    """One reward by what was written, with the name that its function has."""
    if written in NAMES:
        return _built_in(written, config, processes)
    if os.path.isdir(os.path.expanduser(written)):
        return _of_model(written, config, tokenizer)
    if ":" not in written and ("." not in written or "/" in written):
        near = nearest(written, NAMES)
        meant = f" Did you mean {near}?" if near else f" One of TRL's is trl.rewards:{written}." if "_reward" in written else ""
        raise Refusal(
            f"--reward-funcs {written}: is neither built in ({', '.join(NAMES)}) nor a directory here. A function is given as "
            f"module:function or file.py:function.{meant}"
        )
    source = Source(written)
    function = load_function(source)
    name = written.replace(":", ".").rpartition(".")[2]
    return _in_processes(name, function, source, config, processes)


def _in_processes(
    name: str, function: RewardFunction, source: Source, config: RewardFunctionsConfig, processes: RewardProcesses | None
) -> Reward:
    timeout = config.reward_timeout or SECONDS
    if processes is None:
        return Reward(name, function, run=partial(run_here, function, timeout=timeout))
    run = partial(processes.run, source, timeout=timeout, is_async=is_async(function))
    return Reward(name, function, run=run)


def _built_in(name: str, config: RewardFunctionsConfig, processes: RewardProcesses | None) -> Reward:
    """A built-in reward with its settings. Those whose patterns come from elsewhere may hang, and run where functions do."""
    if name == "python":
        each = partial(python, cpu_seconds=config.reward_timeout or CODE_SECONDS, memory_mib=config.reward_memory)
        return Reward(name, each, run=partial(_run_codes, each, max(1, config.reward_processes)))
    arguments: dict[str, Any] = {}
    if name in ("exact_match", "number"):
        arguments = {"column": config.answer_column}
    elif name == "length":
        if config.reward_length is None:
            raise Refusal("--reward-funcs length: up to how many tokens is a completion not too long? Add --reward-length N.")
        arguments = {"tokens": config.reward_length}
    elif name == "regex" and config.reward_pattern is not None:
        check_pattern(config.reward_pattern)
        arguments = {"compiled_from": config.reward_pattern}
    elif name == "json_schema":
        jsonschema_installed()
        if config.reward_schema is not None:
            arguments = {"schema_text": read_schema(config.reward_schema)}
    function = partial(BUILT_IN[name], **arguments)
    if name not in ("regex", "json_schema"):
        return Reward(name, function)
    source = Source(f"toolkit.rollouts.builtin_rewards:{name}", tuple(arguments.items()))
    return _in_processes(name, function, source, config, processes)


def _run_codes(function: RewardFunction, at_once: int, calls: list[Call]) -> Generator[Outcome, None, None]:
    """Calls of the reward python, which starts a process for each completion and waits for it."""
    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(partial(carry_out, function), calls)


def _of_model(written: str, config: RewardFunctionsConfig, tokenizer: PreTrainedTokenizerBase | None) -> Reward:
    from toolkit.models.tokenizer import load_tokenizer
    from toolkit.rollouts.reward_model import RewardModel

    if tokenizer is None:
        if not isinstance(config, ModelConfig):
            raise TypeError("a reward model is compared with the policy's tokenizer: load_rewards(config, tokenizer)")
        tokenizer = load_tokenizer(config)
    folder = os.path.basename(os.path.abspath(os.path.expanduser(written)))
    name = os.path.basename(os.path.dirname(os.path.abspath(os.path.expanduser(written)))) if folder == "model" else folder
    return Reward(name, _only_tokens, model=RewardModel(written, tokenizer))


def _only_tokens(**columns: Any) -> list[float | None]:
    raise TypeError("a reward model reads the tokens of rollouts: score_rollouts")


def _distinct(names: Sequence[str], written: Sequence[str]) -> list[str]:
    """Names that are all different: where two functions have one name, they get those of their files and modules."""
    if len(set(names)) == len(names):
        return list(names)
    longer = [
        f"{os.path.basename(place.rpartition(':')[0]).removesuffix('.py') or place}.{name}" if names.count(name) > 1 else name
        for name, place in zip(names, written, strict=True)
    ]
    return longer if len(set(longer)) == len(longer) else list(written)


NAMES = (*BUILT_IN, "python")
