"""Scoring: what functions are given, weighted sums, order, and faults that end a run or are skipped; all with real functions in files."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollouts.rollouts_of import rollouts_of
from toolkit.config import Refusal
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.data.sources import find_files
from toolkit.rollouts.rewards import Reward, load_rewards
from toolkit.rollouts.rollout import Rollout
from toolkit.rollouts.scoring import score_rollouts

GROUPS = [
    ({"prompt": "2+2=", "answer": "4"}, ["4", "5", "four"]),
    ({"prompt": "3+3=", "answer": "6"}, ["6"]),
    ({"prompt": "1+1=", "answer": "2"}, ["two", "2"]),
]
WAYS = {"in this process": 0, "in a process": 1, "in three": 3}

FUNCTIONS = """
import asyncio, ctypes, os, sys, time

def right(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

async def later(completions, **columns):
    await asyncio.sleep(0.05 / len(completions))
    return [len(c) for c in completions]

def slow_first(completions, prompts):
    time.sleep(0.5 if prompts[0] == "2+2=" else 0)
    return [len(c) for c in completions]

def some(completions, answer, **columns):
    return [None if c == "5" else 1 for c in completions]

def raises_for_four(completions, **columns):
    return [int(c) for c in completions if c != "two"] + [0] * completions.count("two")

def nan(completions, **columns):
    return [float("nan") if c == "5" else 1.0 for c in completions]

def endless(completions, **columns):
    return [-(10**400) if c == "5" else 10**9 for c in completions]

class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")

def wordless(completions, **columns):
    sys.stdout = sys.stdout if "5" not in completions else None
    if "5" in completions:
        raise Wordless
    return [1.0] * len(completions)

def words(completions, **columns):
    return ["good" if c == "5" else 1.0 for c in completions]

def hangs(completions, **columns):
    while "five" in completions or "5" in completions:
        time.sleep(10)
    return [1.0] * len(completions)

async def hangs_later(completions, **columns):
    await asyncio.sleep(1000 if "5" in completions else 0)
    return [1.0] * len(completions)

async def blocks(completions, **columns):
    time.sleep(1000)

def dies(completions, **columns):
    if "5" in completions:
        ctypes.string_at(0)
    return [1.0] * len(completions)

def leaves(completions, **columns):
    if "5" in completions:
        sys.exit(3)
    return [1.0] * len(completions)

def short(completions, **columns):
    return [1.0] * (len(completions) - 1)

def forgets(completions, **columns):
    [1.0] * len(completions)

def wants_more(completions, solution):
    return [1.0] * len(completions)

def prints(completions, **columns):
    print("scored", len(completions))
    print("to stderr", file=sys.stderr)
    return [1.0] * len(completions)

def prints_below_python(completions, **columns):
    os.write(1, b"from C\\n")
    return [1.0] * len(completions)

def chatters(completions, **columns):
    for number in range(1000):
        print(number)
    return [1.0] * len(completions)
"""


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., list[Rollout]]:
    """Scores GROUPS by functions of FUNCTIONS, by their names."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def score(*names: str, on_error: str = "stop", output: str = "show", said: list[str] | None = None, groups: Any = GROUPS, **settings: Any) -> list[Rollout]:
        config = RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/functions.py:{name}" for name in names], **settings)
        lines = said if said is not None else []
        return score_rollouts(rollouts_of(groups), load_rewards(config), on_error=on_error, output=output, say=lines.append)

    return score


@pytest.mark.parametrize("processes", WAYS.values(), ids=WAYS)
def test_values_and_weighted_sums_are_those_of_a_plain_loop(scored: Callable[..., list[Rollout]], processes: int) -> None:
    """Fails when: the weight is left out of `parts`, or `outcomes` are put in the order in which they came."""
    found = scored("right", "later", "slow_first", reward_processes=processes, reward_weights=[2.0, -0.5, 1.0])
    assert [each.prompt for each in found] == [0, 0, 0, 1, 2, 2]
    for rollout in found:
        right, long = float(rollout.completion == rollout.row["answer"]), float(len(rollout.completion))
        assert rollout.rewards == {"right": right, "later": long, "slow_first": long}
        assert rollout.reward == pytest.approx(2 * right - 0.5 * long + long, abs=1e-12)


def test_a_function_gets_what_trl_gives_it() -> None:
    """Texts of a text prompt, messages of a chat, columns as lists, token ids. Fails when: `is_chat` is always False."""
    given: list[dict[str, Any]] = []

    def note(**arguments: Any) -> list[float]:
        given.append(arguments)
        return [0.0] * len(arguments["completions"])

    chat = [{"role": "user", "content": "Hi"}]
    score_rollouts(rollouts_of([({"prompt": "Say", "answer": 1}, ["a", "bc"]), ({"prompt": chat, "answer": 2}, ["d"])]), [Reward("note", note)])
    assert given == [
        {"prompts": ["Say", "Say"], "completions": ["a", "bc"], "completion_ids": [[97], [98, 99]], "answer": [1, 1], "origin": ["made.jsonl:1"] * 2},
        {"prompts": [chat], "completions": [[{"role": "assistant", "content": "d"}]], "completion_ids": [[100]], "answer": [2], "origin": ["made.jsonl:2"]},
    ]


def test_a_function_may_change_what_it_is_given() -> None:
    """Fails when: `completion_ids` are the rollout's own lists, which are trained on."""

    def spoil(prompts: Any, completions: Any, completion_ids: Any, tests: Any) -> list[float]:
        for each in (prompts[0], completions[0], completion_ids[0], tests[0]):
            each.clear()
        return [0.0]

    rollouts = rollouts_of([({"prompt": [{"role": "user", "content": "Hi"}], "tests": ["a"]}, ["d"])])
    score_rollouts(rollouts, [Reward("spoil", spoil)])
    assert rollouts == rollouts_of([({"prompt": [{"role": "user", "content": "Hi"}], "tests": ["a"]}, ["d"])])


def test_none_is_left_out_of_the_sum_and_alone_gives_no_reward(scored: Callable[..., list[Rollout]]) -> None:
    """Fails when: the sum of nothing is 0."""
    both = scored("some", "right", reward_processes=0)
    assert [each.rewards["some"] for each in both] == [1, None, 1, 1, 1, 1]
    assert [each.reward for each in both] == [2, 0, 1, 2, 1, 2]
    said: list[str] = []
    groups = [({"prompt": "p", "answer": "4"}, ["4", "5", "4"]), ({"prompt": "q", "answer": "4"}, ["5"])]
    alone = scored("some", reward_processes=0, groups=groups, said=said, reward_weights=[3.0])
    assert [each.reward for each in alone] == pytest.approx([3, math.nan, 3, math.nan], nan_ok=True)
    assert [line for line in said if "2 of 4" in line]


FAULTS = {  # function: (settings, place of the completion that is named, what is said, places that are skipped)
    "raises_for_four": ({}, 2, "ValueError", [2]),
    "nan": ({}, 1, "nan", [1]),
    "endless": ({}, 1, "-inf", [1]),
    "wordless": ({}, 1, "Wordless", [1]),
    "words": ({}, 1, "str 'good'", [1]),
    "leaves": ({}, 1, "SystemExit", [1]),
    "hangs": ({"reward_timeout": 0.5}, 0, "0.5 seconds", [0, 1, 2]),
    "hangs_later": ({"reward_timeout": 0.5}, 0, "0.5 seconds", [0, 1, 2]),
    "dies": ({}, 0, "SIGSEGV", [0, 1, 2]),
}
IN_PROCESS = ("raises_for_four", "nan", "endless", "words", "leaves", "hangs_later")


@pytest.mark.parametrize(("name", "processes"), [*((name, 1) for name in FAULTS), *((name, 0) for name in IN_PROCESS)])
def test_a_fault_ends_with_function_row_and_completion_or_is_skipped_and_counted(
    scored: Callable[..., list[Rollout]], name: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: `_one_by_one` is not tried (raises_for_four), `math.isfinite` is not asked (nan), `_drop` is left out (hangs), or the row
    that a skipped completion is of has another path than the one that was given."""
    monkeypatch.setitem(find_files._GIVEN, "made.jsonl", "given/made.jsonl")
    settings, place, problem, skipped = FAULTS[name]
    with pytest.raises(Refusal) as refused:
        scored(name, reward_processes=processes, **settings)
    completion = ["4", "5", "four"][place]
    for words in (f"reward {name}", problem, "made.jsonl:1", "2+2=", f"completion {place}: '{completion}'", "--on-reward-error skip"):
        assert words in str(refused.value)
    said: list[str] = []
    found = scored(name, reward_processes=processes, on_error="skip", said=said, **settings)
    assert [number for number, each in enumerate(found) if each.rewards[name] is None] == skipped
    assert sum(f"skipped {len(skipped)} of 6" in line and f"of given/made.jsonl:1, '{completion}'" in line for line in said) == 1
    assert [number for number, each in enumerate(found) if math.isnan(each.reward)] == skipped


@pytest.mark.parametrize("name", ["short", "forgets", "wants_more"])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_that_does_not_fit_is_refused_whatever_the_setting(scored: Callable[..., list[Rollout]], name: str, processes: int) -> None:
    """Fails when: the number of values is not compared, or a missing argument is left to Python's TypeError and skipped."""
    wanted = {"short": ("2 values for 3",), "forgets": ("NoneType",), "wants_more": ("solution", "answer")}[name]
    with pytest.raises(Refusal) as refused:
        scored(name, on_error="skip", reward_processes=processes)
    assert all(words in str(refused.value) for words in (name, "made.jsonl:1", *wanted))


def test_an_async_function_that_blocks_its_loop_is_killed(scored: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the deadline of `_run_together` is not looked at."""
    monkeypatch.setattr("toolkit.rollouts.reward_processes.GRACE_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(Refusal, match=r"0\.2 seconds"):
        scored("blocks", reward_timeout=0.2)
    assert time.monotonic() - began < 20


def test_calls_of_an_async_function_run_at_the_same_time(tmp_path: Path) -> None:
    """Fails when: the calls are awaited one after the other."""
    (tmp_path / "waits.py").write_text("import asyncio\nasync def waits(completions, **c):\n    await asyncio.sleep(0.5)\n    return [1.0] * len(completions)\n")
    groups = [({"prompt": str(n)}, ["x"]) for n in range(40)]
    for processes in (0, 1):
        rewards = load_rewards(RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/waits.py:waits"], reward_processes=processes))
        score_rollouts(rollouts_of(groups[:1]), rewards)  # starts the process
        began = time.monotonic()
        score_rollouts(rollouts_of(groups), rewards)
        assert time.monotonic() - began < 8


@pytest.mark.parametrize("processes", [0, 1])
def test_output_is_shown_by_name_or_hidden_and_never_reaches_the_screen_itself(
    scored: Callable[..., list[Rollout]], capfd: pytest.CaptureFixture[str], processes: int
) -> None:
    """Fails when: the worker inherits the screen, or `output` is not asked in `_show`."""
    said: list[str] = []
    scored("prints", said=said, reward_processes=processes)
    assert said.count("[prints] scored 3") == 1
    assert said.count("[prints] to stderr") == 3
    hidden: list[str] = []
    scored("prints", said=hidden, output="hide", reward_processes=processes)
    assert hidden == []
    assert capfd.readouterr() == ("", "")


def test_output_from_below_python_is_caught_and_a_flood_is_cut(scored: Callable[..., list[Rollout]], capfd: pytest.CaptureFixture[str]) -> None:
    """Fails when: SHOWN_LINES is not looked at."""
    said: list[str] = []
    scored("prints_below_python", "chatters", said=said)
    assert said[:3] == ["[prints_below_python] from C"] * 3
    assert len(said) == 3 + 20 + 1
    assert said[-1] == "[chatters] ... and 2,980 more lines"
    assert capfd.readouterr() == ("", "")


def test_a_hung_function_is_replaced_and_leaves_no_process(tmp_path: Path) -> None:
    """What it started is ended too. Fails when: `kill` ends the process and not its group."""
    (tmp_path / "nested.py").write_text(
        "import os, subprocess, time\n"
        "def nested(completions, **columns):\n"
        "    if completions[0] == 'hang':\n"
        f"        child = subprocess.Popen(['sleep', '1000']); open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "        time.sleep(1000)\n"
        "    return [1.0] * len(completions)\n"
    )
    rewards = load_rewards(RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/nested.py:nested"], reward_timeout=2.0))
    groups = [({"prompt": "a"}, ["fine"]), ({"prompt": "b"}, ["hang"]), ({"prompt": "c"}, ["fine"])]
    found = score_rollouts(rollouts_of(groups), rewards, on_error="skip", say=lambda line: None)
    assert [each.rewards["nested"] for each in found] == [1.0, None, 1.0]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        for _ in range(50):
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().split()[2] == "Z":
                break
            time.sleep(0.1)
        else:
            os.kill(pid, 9)
            pytest.fail(f"{pid} is still there")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_when_the_run_is_killed_its_processes_end(tmp_path: Path) -> None:
    """Also one whose function hangs. Fails when: `_receive` returns at the end of the connection and kills nothing."""
    (tmp_path / "hung.py").write_text("import os, time\ndef hung(completions, **columns):\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(1000)\n")
    (tmp_path / "run.py").write_text(
        "import toolkit as tk\n"
        "rewards = tk.load_rewards(tk.RewardFunctionsConfig(reward_funcs=['hung.py:hung']))\n"
        "tk.score_rollouts([tk.Rollout(0, 0, [1], [2], [0.0], False, {'prompt': 'p'}, 'c')], rewards)\n"
    )
    pid = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path)
    try:
        wait_until(lambda: pid.exists() and pid.read_text() != "", 60)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not is_alive(int(pid.read_text())), 10)


def is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().split()[2] != "Z"


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow  # importing TRL
def test_values_and_sums_are_those_of_trls_trainer(tmp_path: Path) -> None:
    """GRPOTrainer's own method on the same completions, with its functions and with None. Fails when: a weight or a column is mixed up."""
    import asyncio
    import threading

    import torch
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.rewards import think_format_reward

    (tmp_path / "functions.py").write_text(FUNCTIONS)
    names = [f"{tmp_path}/functions.py:{name}" for name in ("right", "later", "some")]
    weights = [1.0, -0.25, 0.5]
    rewards = load_rewards(RewardFunctionsConfig(reward_funcs=names, reward_weights=weights, reward_processes=0))
    rollouts = rollouts_of(GROUPS)
    mine = score_rollouts(rollouts, rewards)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = SimpleNamespace(
        accelerator=Accelerator(cpu=True), reward_funcs=[each.function for each in rewards], reward_processing_classes=[None] * 3,
        reward_func_names=["right", "later", "some"], state=SimpleNamespace(global_step=0), environments=None, async_loop=loop, args=SimpleNamespace(report_to=[]),
        _log_completion_extra=None, _log_metric=None,
    )  # fmt: skip
    inputs = [each.row for each in rollouts]
    theirs = GRPOTrainer._calculate_rewards.__wrapped__(  # without its profiling
        trainer, inputs, [row["prompt"] for row in inputs], [each.completion for each in rollouts], [each.completion_ids for each in rollouts]
    )
    loop.call_soon_threadsafe(loop.stop)
    mine_by_function = torch.tensor([[math.nan if value is None else value for value in each.rewards.values()] for each in mine])
    torch.testing.assert_close(mine_by_function, theirs, equal_nan=True, rtol=0, atol=1e-6)
    sums = (theirs * torch.tensor(weights)).nansum(dim=1)
    assert [each.reward for each in mine] == pytest.approx(sums.tolist(), abs=1e-6)

    thoughts = ["<think>\nyes\n</think>\n4", "4"]
    chat = rollouts_of([({"prompt": [{"role": "user", "content": "2+2?"}]}, thoughts)])
    found = score_rollouts(chat, load_rewards(RewardFunctionsConfig(reward_funcs=["trl.rewards:think_format_reward"])))
    assert [each.reward for each in found] == think_format_reward([[{"content": text}] for text in thoughts]) == [1.0, 0.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_may_empty_the_lists_that_it_is_given(is_async: bool) -> None:
    """Fails when: completions are counted behind the call."""

    def taking(completions: list[str], **columns: Any) -> list[float]:
        values = [float(len(text)) for text in completions]
        completions.clear()
        return values

    async def later(completions: list[str], **columns: Any) -> list[float]:
        return taking(completions)

    scored = score_rollouts(rollouts_of([({}, ("a", "bb"))]), [Reward("taking", later if is_async else taking)])
    assert [each.reward for each in scored] == [1.0, 2.0]


FAULTS_OF_THEIR_OWN = """
import asyncio, os, sys

class Odd(BaseException):
    pass

class Liar(float):
    def __float__(self):
        raise RuntimeError("no float")

def odd(completions, **columns):
    raise Odd("not an Exception")

def interrupt(completions, **columns):
    raise KeyboardInterrupt

async def cancelled(completions, **columns):
    raise asyncio.CancelledError

def liar(completions, **columns):
    return [Liar(1.0) for _ in completions]

def large(completions, **columns):
    return [1e39 for _ in completions]

def forks(completions, **columns):
    if os.fork() == 0 and completions[0] != "6":
        sys.exit(0)  # the other child goes on, and would answer too
    return [len(c) for c in completions]
"""


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("name", "said"), [("odd", "Odd: not an Exception"), ("interrupt", "KeyboardInterrupt"), ("cancelled", "CancelledError"),
                       ("liar", "RuntimeError: no float"), ("large", "returned 1e+39")],
)  # fmt: skip
def test_whatever_a_function_raises_or_returns_is_a_fault_by_its_name(tmp_path: Path, name: str, said: str, processes: int) -> None:
    """A KeyboardInterrupt in the training process is Ctrl-C, and ends the run.

    Fails when: `carry_out` catches Exception alone, `_read` is called outside of it, or LARGEST is 1e300.
    """
    if name == "interrupt" and processes == 0:
        return
    (tmp_path / "own.py").write_text(FAULTS_OF_THEIR_OWN)
    rewards = load_rewards(RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/own.py:{name}"], reward_processes=processes))
    with pytest.raises(Refusal, match=f"reward {name}: {re.escape(said)}.*(\n.*)*completion 0"):
        score_rollouts(rollouts_of(GROUPS), rewards)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_process_that_a_function_forks_answers_nothing(tmp_path: Path, processes: int) -> None:
    """It would be taken for the answer to the next call, and in the training process it would train as well.

    Fails when: `end_fork` does nothing.
    """
    (tmp_path / "own.py").write_text(FAULTS_OF_THEIR_OWN)
    rewards = load_rewards(RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/own.py:forks"], reward_processes=processes))
    process = os.getpid()
    try:
        scored = score_rollouts(rollouts_of(GROUPS), rewards)
    finally:
        if os.getpid() != process:
            os._exit(1)
    assert [each.reward for each in scored] == [1.0, 1.0, 4.0, 1.0, 3.0, 1.0]


def test_a_file_without_the_name_of_a_function_is_said() -> None:
    """Fails when: the end of the file's name is taken for a function's."""
    with pytest.raises(Refusal, match=r"Write rewards\.py:name"):
        load_rewards(RewardFunctionsConfig(reward_funcs=["rewards.py"]))


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_the_first_fault_ends_the_scoring_and_what_runs_next_to_it_answers_no_later_call(tmp_path: Path, processes: int) -> None:
    """Fails when: the loop in `_outcomes` goes on behind a fault (0, 1), or `run` leaves the running workers as they are (3)."""
    (tmp_path / "own.py").write_text(
        "import time\n"
        "def noted(completions, **columns):\n"
        f"    open({str(tmp_path / 'calls')!r}, 'a').write(completions[0])\n"
        "    time.sleep(30 if completions[0] in 'cdef' else 0)\n"  # longer than the worker of a takes to start
        "    return [ord(completions[0]) / (completions[0] != 'b')]\n"
    )
    rewards = load_rewards(RewardFunctionsConfig(reward_funcs=[f"{tmp_path}/own.py:noted"], reward_processes=processes))
    with pytest.raises(Refusal, match="ZeroDivisionError"):
        score_rollouts(rollouts_of([({"prompt": each}, [each]) for each in "abcdef"]), rewards)
    called = (tmp_path / "calls").read_text()
    assert "f" not in called
    assert processes or called == "ab"
    mixed = score_rollouts(rollouts_of([({"prompt": each}, [each]) for each in "bxyz"]), rewards, on_error="skip", say=lambda line: None)
    assert [each.rewards["noted"] for each in mixed] == [None, *map(ord, "xyz")]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_weighted_reward_is_bounded_as_a_reward_is(on_error: str) -> None:
    """float32, in which losses are computed, would hold no sum of it. Fails when: the weight is left out of what LARGEST bounds."""
    with pytest.raises(Refusal, match=r"--reward-weights: 1e\+31 .*one .*(\n.*)*completion 1: 'b'"):
        score_rollouts(rollouts_of([({}, ["a", "b"])]), [Reward("one", lambda completions: [c == "b" for c in completions], 1e31)], on_error=on_error)
