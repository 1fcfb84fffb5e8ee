"""The settings of what completions are worth: reward functions, their weights, limits and faults."""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class RewardFunctionsConfig(Settings):
    """Rewards"""

    reward_funcs: list[str] = setting(
        [], "What scores completions; several are added. module:function or file.py:function, a directory of "
        "recipes/reward.py, or exact_match, number, regex, json_schema, length, python.", on_resume="fixed",
    )
    reward_weights: list[float] = setting([], "Weight of each of them. Default: 1 each.", on_resume="fixed")
    on_reward_error: str = setting(
        "stop", "When a reward function raises, exceeds its time or returns a value that is not finite: stop the run, or skip "
        "this value, which then counts nowhere.", choices=("stop", "skip"), on_resume="free",
    )
    reward_timeout: float | None = setting(
        None, "Seconds that a function may take for the completions of one prompt; python: CPU seconds of one completion's "
        "code. Default: 60; python: 5.", above=0.0, most=86_400.0, on_resume="free",
    )
    reward_processes: int = setting(
        1, "Processes on each rank that functions run in. 0: the training process, where only async ones have a time limit.",
        least=0, most=1024, on_resume="free",
    )
    reward_output: str = setting(
        "show", "What functions write to the screen: show it, each line with the function's name, or hide it.",
        choices=("show", "hide"), on_resume="free",
    )
    environment: str | None = setting(
        None, "What answers the turns of a completion, for tools and several turns: module:Class or file.py:Class with "
        "reset(row) and step(messages). Its rewards are added to those of reward_funcs.", on_resume="fixed",
    )
    max_turns: int = setting(
        8, "Turns of the policy in one completion with an environment.", least=1, most=1024, on_resume="fixed"
    )
    answer_column: str = setting("answer", "exact_match, number: the column with the right answer.", on_resume="fixed")
    reward_pattern: str | None = setting(
        None, "regex: what a completion must hold, searched in all of it. Default: the row's column pattern.", on_resume="fixed"
    )
    reward_schema: str | None = setting(
        None, "json_schema: a file with the JSON schema. Default: the row's column schema.", is_path=True, on_resume="fixed"
    )
    reward_length: int | None = setting(
        None, "length: tokens up to which a completion is worth 0; from there it falls in a line to -1 at twice as many.",
        least=1, most=2**24, on_resume="fixed",
    )
    reward_memory: int = setting(
        512, "python: MiB of memory that a completion's code may have.", least=64, most=2**20, on_resume="fixed"
    )
