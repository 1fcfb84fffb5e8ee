"""toolkit rollouts: the completions that a run sampled, with their rewards, and what other rewards would have made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.setting_options import read_options, with_settings
from toolkit.cli.table import table
from toolkit.config import ModelConfig, Refusal
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.config.setting import flag_of
from toolkit.system.console import one_line, say
from toolkit.system.json_lines import json_line
from toolkit.system.numbers import show_decimals

if TYPE_CHECKING:
    from toolkit.rollouts.rollout import Rollout

_MOST_STEPS = 20  # lines of the overview: of more steps, this many at even distances
_SHOWN = 2000  # characters of a prompt and of a completion
_COLUMNS = (
    "prompt", "epoch", "index", "row", "completion", "prompt_ids", "completion_ids", "logps", "truncated", "rewards", "reward",
    "messages", "written",
)  # fmt: skip


@dataclass(frozen=True)
class _Config(ModelConfig, RewardFunctionsConfig):
    """What is read of a run's settings."""


@with_settings(
    "reward_funcs reward_weights answer_column reward_pattern reward_length reward_timeout",
    _Config,
    reward_funcs="Score the completions again, with these rewards. Nothing is written.",
)
def rollouts(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run that samples completions.")],
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="Show completions of this step.")] = None,
    best: Annotated[int, typer.Option(metavar="K", min=0, help="The K completions with the highest reward.")] = 0,
    worst: Annotated[int, typer.Option(metavar="K", min=0, help="The K completions with the lowest reward.")] = 0,
    above: Annotated[float | None, typer.Option(metavar="X", help="Those with a reward of at least this.")] = None,
    below: Annotated[float | None, typer.Option(metavar="X", help="Those with a reward of at most this.")] = None,
    contains: Annotated[str | None, typer.Option(metavar="TEXT", help="Those with this text in them.")] = None,
    truncated: Annotated[bool, typer.Option("--truncated", help="Those without an end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a completion, tokens and all.")] = False,
    *,
    typed: dict[str, Any],
) -> None:
    """Show what a run sampled, step by step, or the completions of one step or of all that a filter leaves.

    With --reward-funcs the completions are scored again, by the run's other settings of rewards.
    """
    from toolkit.rollouts.ledger import rollouts_of, steps_of

    alone = [name for name, value in typed.items() if value is not None and not typed["reward_funcs"]]
    if alone:
        raise Refusal(f"{flag_of(alone[0])} has no effect without --reward-funcs: add it, or leave this out.")
    rewards = _rewards(directory, typed) if typed["reward_funcs"] else []
    steps = steps_of(directory)
    if not steps:
        raise Refusal(f"{directory}: no rollouts are there. Runs of recipes/grpo.py and ppo.py write them to DIR/rollouts.")
    if step is not None and step not in steps:
        near = min(steps, key=lambda each: abs(each - step))
        raise Refusal(f"--step {step}: {directory} has no rollouts of it; the nearest it has are those of step {near:,}.")

    warned: list[int] = []  # steps; of the first one alone it is shown what of

    def read(number: int) -> list[Rollout]:
        from toolkit.rollouts.scoring import score_rollouts

        found, lines = rollouts_of(directory, number), list[str]()
        if not rewards:
            return found
        scored = score_rollouts(found, rewards, on_error="skip", say=lines.append)
        warnings = [line for line in lines if line.startswith("WARNING")]
        for line in lines:
            if not (warned and line in warnings):
                say(line, error=True)
        warned.extend([number] if warnings else [])
        return scored

    def is_wanted(rollout: Rollout) -> bool:
        return (
            (above is None or rollout.reward >= above) and (below is None or rollout.reward <= below)
            and (contains is None or contains in rollout.completion) and (rollout.truncated or not truncated)
        )  # fmt: skip

    filters = best or worst or above is not None or below is not None or contains is not None or truncated or as_json
    if step is None and not filters:
        _overview(steps, read)
    else:
        wanted = [(number, each) for number in ([step] if step else steps) for each in read(number) if is_wanted(each)]
        if best or worst:
            known = sorted((each for each in wanted if not math.isnan(each[1].reward)), key=lambda each: -each[1].reward)
            wanted = [*known[:best], *known[max(best, len(known) - worst) :]]
        for number, each in wanted:
            _show(number, each, as_json)
        if not wanted:
            say("no completion is like that")
    if len(warned) > 1:
        say(f"WARNING: completions of {len(warned)} steps were skipped: those of step {warned[0]} are above", error=True)


def _rewards(directory: Path, typed: dict[str, str | None]) -> list[Any]:
    """Those that were typed, by the run's other settings; reward models read what its policy does."""
    from toolkit.models.tokenizer import load_tokenizer
    from toolkit.rollouts.rewards import load_rewards

    config = directory / "config.yaml"
    settings = read_options(_Config, typed, config if config.exists() else None, without=frozenset({"reward_weights"}))
    model = directory / "model"
    return load_rewards(settings, load_tokenizer(ModelConfig(model=str(model)) if model.is_dir() else settings))


def _overview(steps: Sequence[int], read: Any) -> None:
    """A line for each of some steps, with the metrics that were logged of it."""
    from toolkit.rollouts.overview import rollout_metrics

    last = min(len(steps), _MOST_STEPS) - 1
    shown = [steps[number * (len(steps) - 1) // max(last, 1)] for number in range(last + 1)]
    lines = list[list[str]]()
    for number in shown:
        found = read(number)
        if not found:
            continue  # the reason was printed as it was read
        metrics = {name: float(value) for name, value in rollout_metrics(found).items()}
        if not lines:
            lines.append(["step", "completions", *metrics])
        lines.append([f"{number:,}", f"{len(found):,}", *(show_decimals(metrics.get(name, math.nan)) for name in lines[0][2:])])
    if not lines:
        raise Refusal("There is no whole completion in these files: each was cut or changed.")
    for line in table(lines, right=frozenset(range(len(lines[0])))):
        say(line)
    if len(shown) < len(steps):
        say(f"{len(shown)} of {len(steps):,} steps. --step N shows the completions of one.")


def _show(step: int, rollout: Rollout, as_json: bool) -> None:
    if as_json:
        say(json_line({"step": step, **{name: getattr(rollout, name) for name in _COLUMNS}}))
        return
    from toolkit.rollouts.overview import turns_of

    prompt = rollout.row.get("prompt", "")
    asked = prompt if isinstance(prompt, str) else "\n".join(turns_of(prompt))
    each = {name: "none" if value is None else show_decimals(value) for name, value in rollout.rewards.items()}
    parts = f" ({', '.join(f'{name} {value}' for name, value in each.items())})" if len(each) > 1 else ""
    end = ", without an end" if rollout.truncated else ""
    where = rollout.row.get("origin", f"prompt {rollout.prompt}")
    say(f"step {step}, {where}, completion {rollout.index}: reward {show_decimals(rollout.reward)}{parts}{end}")
    say(f"  prompt     | {one_line(asked, _SHOWN)}")
    turns = [rollout.completion] if rollout.messages is None else turns_of(rollout.messages)
    for number, turn in enumerate(turns):
        say(f"  {'' if number else 'completion':10} | {one_line(turn, _SHOWN)}")
