"""The user's own code in the training process: what it sets there is set back, and what it raises is a fault or a signal."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.rollouts_of import rollouts_of
from toolkit.config import Refusal
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.rollouts.environments import Environments, load_environment
from toolkit.rollouts.rewards import Reward, load_rewards
from toolkit.rollouts.scoring import score_rollouts
from toolkit.rollouts.users_code import faults_described

CHANGES: dict[str, Callable[[], Any]] = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "folder": lambda: os.chdir("/"),
}
ROLLOUTS = [({"prompt": "p"}, ["a"])]


def state() -> list[Any]:
    made = torch.ones(1)
    return [torch.is_grad_enabled(), made.dtype, made.device, torch.get_num_threads(), os.getcwd()]


@pytest.fixture(autouse=True)
def put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also where a test fails."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_reward_or_an_environment_sets_for_the_process_is_set_back(name: str) -> None:
    """Training would go on with it. Fails when: a line of `_settings_of_the_process` is left out, or `process_kept` at either call."""
    change, before = CHANGES[name], state()

    def reward(completions: list[str], **columns: Any) -> list[float]:
        change()
        return [1.0]

    async def later(completions: list[str], **columns: Any) -> list[float]:
        return reward(completions)

    class Changes:
        def reset(self, row: Any) -> None:
            change()

    for function in (reward, later):
        assert score_rollouts(rollouts_of(ROLLOUTS), [Reward("changes", function)])[0].reward == 1.0
        assert state() == before
    assert Environments("Changes", Changes, None).prompt_of({}, [1]) == ({}, [1])  # type: ignore[arg-type]
    assert state() == before


def test_what_importing_a_file_sets_for_the_process_is_set_back(tmp_path: Path) -> None:
    """Also where functions run in processes of their own. Fails when: `import_object` has no `process_kept`."""
    before = state()
    (tmp_path / "judge.py").write_text(
        "import os, torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\nos.chdir('/')\n"
        "def one(completions, **columns):\n    return [1.0] * len(completions)\n"
        "class Talks:\n    reset = step = print\n"
    )
    load_rewards(RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/judge.py:one"]))
    assert state() == before
    load_environment(RewardFunctionsConfig(environment=f"{tmp_path}/judge.py:Talks"), None)  # type: ignore[arg-type]
    assert state() == before


def interrupts(completions: list[str], **columns: Any) -> list[float]:
    raise KeyboardInterrupt


def is_interrupted(completions: list[str], **columns: Any) -> list[float]:
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.01)
    return [1.0]


def test_an_interrupt_that_no_signal_raised_is_a_fault_and_ctrl_c_is_not() -> None:
    """A run notes Ctrl-C and raises nothing; a handler that raises, and Python's own, are the user's wish.

    Fails when: `_is_by_signal` is always True, or does not look at Python's handler, or not at the frames.
    """

    def raises(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def scored_under(handler: Any, function: Any) -> None:
        before = signal.signal(signal.SIGINT, handler)
        try:
            score_rollouts(rollouts_of(ROLLOUTS), [Reward("own", function)])
        finally:
            signal.signal(signal.SIGINT, before)

    with pytest.raises(Refusal, match="reward own: KeyboardInterrupt"):
        scored_under(lambda number, frame: None, interrupts)
    for handler in (raises, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt):
            scored_under(handler, is_interrupted)


def test_a_fault_is_one_line() -> None:
    """Fails when: `describe` leaves line breaks in."""
    with faults_described() as problems:
        raise ValueError("no\nkey")
    assert str(problems[0]).startswith("ValueError: no key (test_users_code.py:")
