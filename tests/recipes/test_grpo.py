"""recipes/grpo.py: the same bits in every run and after a stop, one rank's rollouts on two, and what is refused."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.rollouts.ledger import rollouts_of

TESTS = Path(__file__).resolve().parents[1]
SMALL = [
    "--model", "tiny-llama", "--hidden-size", "32", "--num-hidden-layers", "1", "--dataset", "rows.jsonl", "--eval-fraction", "0.2",
    "--vocab-size", "260", "--max-completion-length", "6", "--num-generations", "4", "--per-device-train-batch-size", "8",
    "--reward-funcs", "rewards.py:digits", "--reward-processes", "0", "--logging-steps", "1", "--learning-rate", "0.01",
    "--eval-steps", "100", "--num-samples", "1",
]  # fmt: skip
REWARD = "def digits(prompts, completions, answer, **columns):\n    return [sum(sign.isdigit() for sign in text) / 6 for text in completions]\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(6) for b in range(5))
    )
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def losses(run: Any) -> list[tuple[float, float]]:
    return [(event["loss"], event["reward"]) for event in run.metrics if "loss" in event]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


HARD = [
    "--beta", "0.05", "--num-iterations", "2", "--steps-per-generation", "2", "--top-p", "0.95", "--gradient-accumulation-steps", "2",
    "--loss-type", "grpo", "--entropy-coef", "0.01", "--dropout", "0.1",
]  # fmt: skip


def test_a_run_ended_by_sigterm_continues_to_the_same_bits(run_recipe: Any, rows: Path) -> None:
    """Several updates on one set of rollouts, a reference, dropout and top-p. The config it writes repeats it.

    Fails when: the keys of completions count how many were sampled in this process.
    """
    flags = [*SMALL, *HARD, "--max-steps", "8", "--save-strategy", "no"]
    whole = run_recipe("grpo", *flags, output_dir="whole")
    assert whole.code == 0, whole.err
    assert {"reward", "reward_std", "reward_digits", "groups_without_spread", "completion_length", "truncated", "kl", "entropy", "data_wait"} <= {
        *next(event for event in whole.metrics if "loss" in event)
    }
    assert whole.summary["eval_reward"] >= 0

    stopped = run_recipe("grpo", *flags, while_running=_stop_after(rows / "out/metrics.jsonl", 3))
    assert stopped.code == 75, stopped.err
    resumed = run_recipe("grpo", *flags, "--resume")
    assert resumed.code == 0, resumed.err
    assert same(whole.weights(), resumed.weights())
    assert losses(whole) == losses(resumed)
    again = run_recipe("grpo", "--config", str(whole.output_dir / "config.yaml"), output_dir="again")
    assert same(whole.weights(), again.weights())


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_resume_with_another_reward_under_the_same_name_is_refused(run_recipe: Any, rows: Path, recipe: str) -> None:
    """Unless it is allowed by name. Fails when: the recipe does not give open_run what its rewards are made of."""
    flags = [*SMALL, "--max-steps", "2"]
    stopped = run_recipe(recipe, *flags, "--stop-at-step", "1")
    assert stopped.code == 75, stopped.err
    (rows / "rewards.py").write_text(REWARD.replace("/ 6", "/ -6"))
    refused = run_recipe(recipe, *flags, "--resume")
    assert (refused.code, "--allow-change reward_funcs" in refused.err) == (2, True), refused.err
    allowed = run_recipe(recipe, *flags, "--resume", "--allow-change", "reward_funcs")
    assert allowed.code == 0, allowed.err
    assert re.search(r"\breward .*other files: .*--allow-change", allowed.out)


@pytest.mark.parametrize("flags", [
    ["--num-generations", "1"], ["--num-generations", "3"], ["--reward-funcs", "rewards.py:none"], ["--reward-funcs", "nothing"],
    ["--temperature", "0"], ["--top-p", "0"], ["--max-completion-length", "4000"], ["--packing"],
    ["--reward-funcs", "rewards.py:short"],
], ids=" ".join)  # fmt: skip
def test_what_cannot_be_trained_is_refused(run_recipe: Any, rows: Path, flags: list[str]) -> None:
    """One message and exit code 2. Fails when: `in_prompts` rounds, or `_check_room` is dropped."""
    with (rows / "rewards.py").open("a") as file:
        file.write("def short(prompts, completions, **columns):\n    return [1.0]\n")
    run = run_recipe("grpo", *SMALL, *flags, "--max-steps", "2")
    assert run.code == 2, run.out + run.err
    assert "Traceback" not in run.err
    assert "refused" in run.err or "rror" in run.err


def test_an_evaluation_skips_and_hides_what_the_settings_say(run_recipe: Any, rows: Path) -> None:
    """Fails when: `faults` are not given to `sampled_reward_metrics`: the run ends at its first evaluation."""
    (rows / "rewards.py").write_text("def digits(completions, **columns):\n    print('chatty')\n    return [1 / (len(text) % 2) for text in completions]\n")
    run = run_recipe("grpo", *SMALL, "--on-reward-error", "skip", "--reward-output", "hide", "--max-steps", "1", "--eval-temperature", "1")
    assert run.code == 0, run.err
    assert "chatty" not in run.out + run.err
    assert run.out.count("skipped") >= 2
    assert all(event["eval_reward"] == 1 for event in run.metrics if "eval_reward" in event)


WORLD = """
class World:
    def reset(self, row):
        self.answer = row["answer"]
        self.turns = 0

    def step(self, messages):
        self.turns += 1
        return [{"role": "user", "content": f"<{self.turns}>"}], float(sum(sign.isdigit() for sign in messages[-1]["content"])), self.turns == 3
"""
TALKING = [
    "--environment", "world.py:World", "--max-turns", "3", "--stop-strings", "0,1,2,a,e", "--max-completion-length", "96", "--top-p", "0.95"
]  # fmt: skip
ZERO3 = str(TESTS / "all_sharded.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "also"),
    [([], []), ([], ["--dynamic-sampling", "3"]), (["--deepspeed", ZERO3], []), (["--fsdp"], []), (["--deepspeed", ZERO3], TALKING)],
    ids=["ddp", "dynamic", "zero3", "fsdp2", "zero3-environment"],
)
def test_two_ranks_have_the_rollouts_and_the_gradients_of_one(tiny: Any, rows: Path, engine: list[str], also: list[str]) -> None:
    """Rewards equal, losses and norms to 1e-5. Fails when: keys follow the rank, or a rank scores another's group as its own."""
    script = str(TESTS.parent / "recipes/grpo.py")
    (rows / "world.py").write_text(WORLD)
    files = {"world.py:World": f"{rows}/world.py:World", "rows.jsonl": str(rows / "rows.jsonl"), "rewards.py:digits": f"{rows}/rewards.py:digits"}
    flags = [files.get(flag, flag) for flag in [*SMALL, "--max-steps", "3", "--global-batch-size", "24", "--beta", "0.05", *also]]
    one = tiny(*flags, script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    ranks = tiny.ranks(2, *flags, *engine, script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    assert sorted(path.name for path in (ranks[0].folder / "rollouts").iterdir()) == sorted(
        path.name for path in (one.folder / "rollouts").iterdir()
    )
    read = [[(each.prompt, each.index, each.completion, each.reward) for each in rollouts_of(run.folder, 1)] for run in (one, ranks[0])]
    assert read[0] == read[1]
    steps, others = ([event for event in run.metrics if "loss" in event] for run in (one, ranks[0]))
    assert len(steps) == len(others) == (2 if "--dynamic-sampling" in also else 3)
    for step, other in zip(steps, others, strict=True):
        assert step["reward"] == pytest.approx(other["reward"], abs=1e-9)
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert other[name] == pytest.approx(step[name], rel=1e-4, abs=1e-5), name


DYNAMIC = [
    "--model", "tiny-llama", "--hidden-size", "32", "--num-hidden-layers", "1", "--dataset", "rows.jsonl", "--eval-strategy", "no",
    "--eval-fraction", "0.2", "--vocab-size", "260", "--max-completion-length", "2", "--num-generations", "2",
    "--per-device-train-batch-size", "8", "--reward-funcs", "rewards.py:digits", "--reward-processes", "0", "--logging-steps", "1",
    "--learning-rate", "0.01", "--max-steps", "12", "--dynamic-sampling", "3",
]  # fmt: skip


def test_groups_without_spread_give_their_places_to_the_next_prompts(run_recipe: Any, rows: Path) -> None:
    """Prompts are consumed in the order of the training, each once; a stop in between changes nothing, nor does a ledger.

    Fails when: `Run.take` leaves the position where it was, or the next batch is not read from there; tokens of a second sampling
    are left out of its rate or count as learned, or those of a ledger count as sampled.
    """
    whole = run_recipe("grpo", *DYNAMIC, output_dir="whole")
    assert whole.code == 0, whole.err
    steps = [event for event in whole.metrics if "loss" in event]
    plain = run_recipe("grpo", *DYNAMIC[:-2], output_dir="plain")
    assert plain.code == 0, plain.err
    consumed = [
        [(each.epoch, each.prompt) for step in range(1, run.summary["steps"] + 1) for each in rollouts_of(run.output_dir, step)[::2]]
        for run in (whole, plain)
    ]
    assert consumed[0] == consumed[1]  # 48 prompts, however many a step took
    assert len(consumed[0]) == 48 == whole.summary["examples"]
    assert len(steps) < 12
    kept = [len(rollouts_of(whole.output_dir, step)) for step in range(1, len(steps) + 1)]
    assert max(kept) > 8
    assert all(size <= 24 for size in kept)
    for step, event in enumerate(steps, 1):
        sampled = rollouts_of(whole.output_dir, step)
        pairs = sorted(zip(sampled[::2], sampled[1::2], strict=True), key=lambda pair: pair[0].reward == pair[1].reward)
        tokens, learned = (sum(len(each.completion_ids) for pair in some for each in pair) for some in (pairs, pairs[:4]))
        assert event["sampled_tokens_per_second"] * event["sampling_seconds"] == pytest.approx(tokens)
        assert event["learned_tokens_per_second"] * event["learning_seconds"] == pytest.approx(learned)

    stopped = run_recipe("grpo", *DYNAMIC, "--save-steps", "1", while_running=_stop_after(rows / "out/metrics.jsonl", 2))
    assert stopped.code == 75, stopped.err
    resumed = run_recipe("grpo", *DYNAMIC, "--resume")
    assert resumed.code == 0, resumed.err
    assert same(whole.weights(), resumed.weights())
    assert losses(whole) == losses(resumed)
    replayed = run_recipe("grpo", *DYNAMIC, "--rollouts-from", str(whole.output_dir), output_dir="replayed")
    assert replayed.code == 0, replayed.err
    assert same(whole.weights(), replayed.weights())
    assert not any("sampled_tokens_per_second" in event for event in replayed.metrics)


def test_conversations_are_trained_on_and_a_stopped_run_continues_to_the_same_bits(run_recipe: Any, rows: Path) -> None:
    """With a reference, top-p and several updates. The ledger has the turns, and trains again without sampling.

    Fails when: the ledger leaves out which tokens the policy wrote.
    """
    (rows / "world.py").write_text(WORLD)
    flags = [*SMALL, *TALKING, "--max-steps", "3", "--beta", "0.05", "--num-iterations", "2", "--save-strategy", "steps", "--save-steps", "1"]
    whole = run_recipe("grpo", *flags, output_dir="whole")
    assert whole.code == 0, whole.err
    first = next(event for event in whole.metrics if "loss" in event)
    assert {"reward_environment", "reward_digits", "kl"} <= {*first}
    assert whole.summary["eval_reward_environment"] >= 0
    written = [each.written for each in rollouts_of(whole.output_dir, 1)]
    assert any(False in (tokens or []) for tokens in written)
    stopped = run_recipe("grpo", *flags, while_running=_stop_after(rows / "out/metrics.jsonl", 1))
    assert stopped.code == 75, stopped.err
    resumed = run_recipe("grpo", *flags, "--resume")
    assert resumed.code == 0, resumed.err
    assert same(whole.weights(), resumed.weights())
    replayed = run_recipe("grpo", *flags, "--rollouts-from", str(whole.output_dir), output_dir="replayed")
    assert replayed.code == 0, replayed.err
    assert same(whole.weights(), replayed.weights())
    refused = run_recipe("ppo", *SMALL[:-4], "--environment", "world.py:World", "--max-steps", "1")
    assert refused.code == 2, refused.err
    assert "grpo.py" in refused.err


def _stop_after(metrics: Path, steps: int) -> Any:
    def stop(pid: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"loss"') >= steps):
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    return stop
