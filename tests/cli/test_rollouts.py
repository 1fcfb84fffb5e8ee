"""toolkit rollouts: what a run sampled, filtered and scored again."""

import json
import math
from pathlib import Path

import pytest
from accelerate import Accelerator
from torch import nn
from typer.testing import CliRunner

import toolkit as tk
from tests.rollouts.rollouts_of import rollouts_of
from toolkit.cli.main import app
from toolkit.generation.distribution import SamplingSettings


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of two groups; the reward is the length of a completion, and the third one of a group has none."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    for step in range(1, 4):
        phase = tk.open_phase(accelerator, model, tmp_path, step, SamplingSettings())
        rows = [({"prompt": f"p{number}", "answer": "aa"}, ["a" * step, "aa", "b"]) for number in range(2)]
        rollouts = rollouts_of(rows)
        for rollout in rollouts:
            known = rollout.index < 2
            rollout.rewards = {"length": float(len(rollout.completion)) if known else None}
            rollout.reward = float(len(rollout.completion)) if known else float("nan")
            rollout.truncated = rollout.index == 1
        tk.save_rollouts(accelerator, phase, rollouts)
    return tmp_path


def said(*words: object) -> list[str]:
    result = CliRunner().invoke(app, ["rollouts", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_line_for_each_step_and_one_for_each_reward(run: Path) -> None:
    """Fails when: completions without a reward count in the mean."""
    lines = said(run)
    assert lines[0].split()[:3] == ["step", "completions", "reward"]
    assert [line.split()[:3] for line in lines[1:]] == [["1", "6", "1.5000"], ["2", "6", "2"], ["3", "6", "2.5000"]]


def test_completions_are_filtered(run: Path) -> None:
    """Fails when: a filter is dropped, or the best and the worst overlap."""
    assert [line for line in said(run, "--best", 1, "--worst", 1) if line.startswith("step")] == [
        "step 3, made.jsonl:1, completion 0: reward 3", "step 1, made.jsonl:2, completion 0: reward 1"
    ]  # fmt: skip
    assert len([line for line in said(run, "--step", 1, "--best", 9, "--worst", 9) if line.startswith("step")]) == 4
    found = [json.loads(line) for line in said(run, "--above", 2, "--truncated", "--json")]
    assert [(each["step"], each["index"], each["completion"]) for each in found] == [(step, 1, "aa") for step in (1, 1, 2, 2, 3, 3)]
    assert [each["reward"] for each in map(json.loads, said(run, "--contains", "b", "--json"))] == [None] * 6
    assert said(run, "--below", -1) == ["no completion is like that"]


def test_completions_are_scored_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the answers of their rows. Fails when: the rewards of the ledger are shown."""
    monkeypatch.setattr("toolkit.models.tokenizer.load_tokenizer", lambda config: None)
    lines = said(run, "--reward-funcs", "exact_match", "--step", 1, "--best", 2)
    assert [line.split(", ") for line in lines if line.startswith("step")] == [
        ["step 1", f"made.jsonl:{row}", "completion 1: reward 1", "without an end"] for row in (1, 2)
    ]


def test_a_function_may_have_another_time_than_in_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the flag is taken out of rollouts."""
    monkeypatch.setattr("toolkit.models.tokenizer.load_tokenizer", lambda config: None)
    (tmp_path / "slow.py").write_text("import time\n\n\ndef slow(completions):\n    time.sleep(60)\n")
    lines = said(run, "--reward-funcs", tmp_path / "slow.py:slow", "--reward-timeout", 0.2, "--step", 1)
    assert "0.2 seconds" in lines[0]


def test_a_reward_that_fails_is_warned_of_once_and_not_among_the_completions(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: each step is warned of, or the warnings are on standard output, where the JSON is."""
    monkeypatch.setattr("toolkit.models.tokenizer.load_tokenizer", lambda config: None)
    (tmp_path / "broken.py").write_text("def broken(completions):\n    raise ValueError\n")
    result = CliRunner().invoke(app, ["rollouts", str(run), "--reward-funcs", f"{tmp_path}/broken.py:broken", "--json"])
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["step"] for each in found] == [step for step in (1, 2, 3) for _ in range(6)]
    skipped, without, more = result.stderr.splitlines()
    assert ("6 of 6" in skipped, "6 of 6" in without, "3 steps" in more) == (True, True, True)


def test_a_conversation_is_shown_turn_by_turn(tmp_path: Path) -> None:
    """Fails when: its turns are one text, or the tokens that the policy did not write can't be told from its own in the JSON."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    rollouts = rollouts_of([({"prompt": [{"role": "user", "content": "2+2+2="}]}, ["2+2= tool 4 assistant 6"])])
    turns = [("assistant", "2+2="), ("tool", "4"), ("assistant", "6")]
    rollouts[0].messages = [{"role": role, "content": content} for role, content in turns]
    rollouts[0].written = [False] * len(rollouts[0].completion_ids)
    tk.save_rollouts(accelerator, tk.open_phase(accelerator, model, tmp_path, 1, SamplingSettings()), rollouts)
    assert [line.partition("| ")[2] for line in said(tmp_path, "--step", 1)[1:]] == [
        "user: 2+2+2=", "assistant: 2+2=", "tool: 4", "assistant: 6"
    ]  # fmt: skip
    found = json.loads(said(tmp_path, "--json")[0])
    assert (found["messages"], found["written"]) == (rollouts[0].messages, rollouts[0].written)
    assert tk.best_and_worst(rollouts, 1)[0]["text"] == "assistant: 2+2=\ntool: 4\nassistant: 6"


def test_samples_of_a_group_are_its_best_and_its_worst_and_none_of_one_without_rewards() -> None:
    """As a group is whose judge did not answer. Fails when: a group is taken to have a reward, or one completion is shown twice."""
    rollouts = rollouts_of([({"prompt": "a"}, "xyz"), ({"prompt": "b"}, "xyz"), ({"prompt": "c"}, "xyz")])
    for each, reward in zip(rollouts, [1.0, 3.0, 2.0, math.nan, math.nan, math.nan, math.nan, 5.0, math.nan], strict=True):
        each.reward = reward
    found = [(sample["prompt"], sample["score"]) for sample in tk.best_and_worst(rollouts, 3)]
    assert found == [("a", "reward 3"), ("a", "reward 1"), ("c", "reward 5")]


@pytest.mark.parametrize(("words", "message"), [
    (["--step", "7"], "--step 7: .*step 3"), (["--reward-funcs", "nothing.py:f"], "nothing.py"), (["--reward-length", "2"], "--reward-length .*without --reward-funcs"),
])  # fmt: skip
def test_what_is_not_there_is_refused(run: Path, words: list[str], message: str) -> None:
    """Fails when: a step that was not sampled shows nothing, without a word."""
    with pytest.raises(tk.Refusal, match=message):
        CliRunner().invoke(app, ["rollouts", str(run), *words], catch_exceptions=False)
    with pytest.raises(tk.Refusal, match="no rollouts are there"):
        CliRunner().invoke(app, ["rollouts", str(run / "rollouts")], catch_exceptions=False)


def test_a_damaged_step_is_passed_over_and_where_all_are_that_is_said(run: Path) -> None:
    """Fails when: `continue` or the Refusal is left out of `_overview`: metrics of nothing end with a traceback."""
    files = sorted((run / "rollouts").glob("step-*.jsonl"))
    files[0].write_text('{"a"')
    assert [line.split()[0] for line in said(run) if not line.startswith("WARNING")] == ["step", "2", "3"]
    for file in files[1:]:
        file.write_bytes(b"\xff\xfe")
    with pytest.raises(tk.Refusal, match="no whole completion"):
        CliRunner().invoke(app, ["rollouts", str(run)], catch_exceptions=False)
