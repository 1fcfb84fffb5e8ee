"""What rollouts are worth: each reward of each completion, and their weighted sum.

A function is called with the completions of one prompt, whatever the batch and the number of ranks. Each rank scores a part of
the prompts, and all of them get all values. A reward that fails ends the run or is left out, by `on_error`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.data.sources.find_files import with_given_paths
from toolkit.distributed.ranks import from_all, say_once
from toolkit.rollouts.reward_calls import LARGEST, Call, Outcome
from toolkit.rollouts.rollout import ENVIRONMENT, Rollout, groups_of
from toolkit.system.console import one_line, quoted

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.rollouts.rewards import Reward

SHOWN = 300  # characters of a prompt and of a completion in messages
SHOWN_LINES = 20  # of what a function wrote while it scored the rollouts of a step


def score_rollouts(
    rollouts: list[Rollout],
    rewards: Sequence[Reward],
    accelerator: Accelerator | None = None,
    *,
    on_error: str = "stop",
    output: str = "show",
    say: Callable[[str], None] | None = None,
) -> list[Rollout]:
    """The rollouts with their `rewards`, by name, and `reward`, their weighted sum; the same on every rank.

    What an environment gave them, `environment`, stays, with the weight 1.

    Rewards that do not apply (None) are left out of a sum. A rollout that has none at all, as where each was skipped, has the
    reward "not a number", and `advantages` gives it none.

    Args:
        rollouts: all of a step, on every rank.
        accelerator: deals the prompts to the ranks. None: all are scored here.
        on_error: "stop" refuses the first completion that a function fails for; "skip" leaves it out, counted in one line.
        output: "show" what functions write, a line at a time with their name, or "hide" it.
        say: shows a line. Default: on the main process, on standard output.

    Raises:
        Refusal: a function that can't be used: it returns another number of values, or takes a column that rows don't have;
            and with "stop" one that raises, takes too long, or returns what is no finite number. It names function, row
            and completion. And one that with its weight is beyond what is taken of a reward.
    """
    say = say or say_once
    values: dict[str, list[float | None]] = {}
    for reward in rewards:
        parts, outcomes = _outcomes(rollouts, reward, accelerator, on_error)
        values[reward.name] = _collect(reward, rollouts, parts, outcomes, on_error, output, say)
    weights, scored = {reward.name: reward.weight for reward in rewards}, []
    for place, rollout in enumerate(rollouts):
        own = {name: value for name, value in rollout.rewards.items() if name == ENVIRONMENT}
        own |= {name: column[place] for name, column in values.items()}
        scored.append(replace(rollout, rewards=own, reward=weighted_sum(own, weights)))
    for rollout in scored:
        for name, value in rollout.rewards.items():
            if value is not None and abs(weights.get(name, 1.0) * value) > LARGEST:
                raise Refusal(
                    f"--reward-weights: {weights.get(name, 1.0):g} times the reward {name} of a completion, {value:g}, is "
                    f"beyond {LARGEST:g}. Give a smaller one.\n{_named(rollout)}"
                )
    without = sum(math.isnan(rollout.reward) for rollout in scored)
    if without:
        say(f"WARNING: {without} of {len(scored)} completions have no reward at all: they count nowhere")
    return scored


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The sum of the rewards that apply, each times its weight; not a number where none does."""
    parts = [weights.get(name, 1.0) * value for name, value in rewards.items() if value is not None]
    return sum(parts) if parts else math.nan


def call_of(group: Sequence[Rollout]) -> Call:
    """What a function is called with for completions of one prompt: copies, which it may change.

    Where the prompt is a list of messages, each completion is a list of one message, or of all that follow it.
    """
    row: dict[str, Any] = group[0].row
    names = [name for name in row if name not in ("prompt", "completion")]
    columns = {name: [copy.deepcopy(each.row.get(name)) for each in group] for name in names}
    is_chat = isinstance(row.get("prompt"), list)
    said = [copy.deepcopy(each.messages or [{"role": "assistant", "content": each.completion}]) for each in group]
    return {
        "prompts": [copy.deepcopy(each.row.get("prompt")) for each in group],
        "completions": said if is_chat else [each.completion for each in group],
        "completion_ids": [list(each.completion_ids) for each in group],
        **{name: column for name, column in columns.items() if name not in ("prompts", "completions", "completion_ids")},
    }


def _outcomes(
    rollouts: list[Rollout], reward: Reward, accelerator: Accelerator | None, on_error: str
) -> tuple[list[list[int]], list[Outcome]]:
    """The parts that are scored at once, as places of their rollouts, and what came of each."""
    rank, ranks = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    if reward.model is None:
        parts = groups_of(rollouts)

        def score() -> list[Outcome]:
            calls = [call_of([rollouts[place] for place in part]) for part in parts[rank::ranks]]
            found = list[Outcome]()
            with contextlib.closing(reward.outcomes(calls)) as outcomes:
                for outcome in outcomes:
                    found.append(outcome)
                    if outcome.misfit or (on_error == "stop" and outcome.problems):  # others would be waited for in vain
                        break
            return found + [Outcome([None] * len(call["completions"])) for call in calls[len(found) :]]
    else:
        import torch

        from toolkit.rollouts.reward_model import blocks_of

        parts, model = blocks_of(rollouts), reward.model
        device = accelerator.device if accelerator is not None else torch.device("cpu")

        def score() -> list[Outcome]:
            with accelerator.autocast() if accelerator is not None else contextlib.nullcontext():
                return [model.score([rollouts[place] for place in part], device) for part in parts[rank::ranks]]

    by_rank = [score()] if accelerator is None else from_all(accelerator, score)
    return parts, [by_rank[number % ranks][number // ranks] for number in range(len(parts))]


def _collect(
    reward: Reward, rollouts: list[Rollout], parts: list[list[int]], outcomes: list[Outcome], on_error: str, output: str,
    say: Callable[[str], None],
) -> list[float | None]:  # fmt: skip
    """The values of one reward in the order of the rollouts; its faults end or are counted, its output is shown."""
    values: list[float | None] = [None] * len(rollouts)
    problems: dict[int, str] = {}
    written = [line for outcome in outcomes for line in outcome.output.splitlines() if line.strip()]
    for part, outcome in zip(parts, outcomes, strict=True):
        if outcome.misfit:
            _show(reward.name, written, output, say)
            raise Refusal(f"reward {reward.name}: {outcome.misfit}.\n{_named(rollouts[part[0]])}")
        for place, value in zip(part, outcome.values, strict=True):
            values[place] = value
        problems.update({part[number]: problem for number, problem in outcome.problems.items()})
    _show(reward.name, written, output, say)
    if problems:
        first = min(problems)
        if on_error == "stop":
            raise Refusal(
                f"reward {reward.name}: {problems[first]}\n{_named(rollouts[first])}\n"
                "Mend the function, or go on without such values: --on-reward-error skip"
            )
        where = with_given_paths(rollouts[first].row.get("origin", f"prompt {rollouts[first].prompt}"))
        completion = quoted(one_line(rollouts[first].completion, 80))
        say(
            f"WARNING: reward {reward.name}: skipped {len(problems)} of {len(rollouts)} completions; the first is number "
            f"{rollouts[first].index} of {where}, {completion}: {problems[first]}"
        )
    return values


def _show(name: str, written: list[str], output: str, say: Callable[[str], None]) -> None:
    if output == "show":
        for line in written[:SHOWN_LINES]:
            say(f"[{name}] {one_line(line, 500)}")
        if len(written) > SHOWN_LINES:
            say(f"[{name}] ... and {len(written) - SHOWN_LINES:,} more lines")


def _named(rollout: Rollout) -> str:
    """The prompt's row and the completion, for a message."""
    prompt = rollout.row.get("prompt", "")
    if isinstance(prompt, list):
        prompt = " ".join(str(message.get("content", "")) for message in prompt)
    where = rollout.row.get("origin", f"number {rollout.prompt}")
    return (
        f"    prompt {where}: {quoted(one_line(str(prompt), SHOWN))}\n"
        f"    completion {rollout.index}: {quoted(one_line(rollout.completion, SHOWN))}"
    )
