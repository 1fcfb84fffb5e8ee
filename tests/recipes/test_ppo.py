"""recipes/ppo.py: the same bits in every run and after a stop, also with an adapter, one rank's step on two, and what is refused."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
SMALL = [
    "--model", "tiny-llama", "--hidden-size", "32", "--num-hidden-layers", "1", "--dataset", "rows.jsonl", "--eval-fraction", "0.2",
    "--vocab-size", "260", "--max-completion-length", "6", "--num-generations", "2", "--per-device-train-batch-size", "8",
    "--reward-funcs", "rewards.py:digits", "--reward-processes", "0", "--logging-steps", "1", "--learning-rate", "0.01",
    "--eval-steps", "100", "--num-samples", "1",
]  # fmt: skip
REWARD = "def digits(prompts, completions, answer, **columns):\n    return [sum(sign.isdigit() for sign in text) / 6 for text in completions]\n"
# Four updates on one set of rollouts; all that is added to rewards; dropout, so that ratios are none of 1.
HARD = [
    "--num-iterations", "2", "--steps-per-generation", "2", "--gradient-accumulation-steps", "2", "--top-p", "0.95", "--dropout", "0.1",
    "--beta", "0.05", "--whiten-rewards", "--missing-eos-penalty", "0.5", "--entropy-coef", "0.01", "--max-steps", "8", "--save-strategy", "no",
]  # fmt: skip
WATCHED = {
    "reward", "reward_digits", "kl", "approx_kl", "entropy", "policy_loss", "value_loss", "explained_variance", "clip_ratio_low",
    "clip_ratio_high", "value_clip_ratio", "value", "value_target", "completion_length", "truncated", "data_wait",
}  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(6) for b in range(5))
    )
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def losses(run: Any) -> list[tuple[float, float, float]]:
    return [(event["loss"], event["reward"], event["value_loss"]) for event in run.metrics if "loss" in event]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("adapter", [[], pytest.param(["--use-peft", "--optim", "adamw_torch"], marks=pytest.mark.slow)], ids=["whole", "lora"])
def test_a_run_ended_by_sigterm_continues_to_the_same_bits(run_recipe: Any, rows: Path, adapter: list[str]) -> None:
    """Several updates on one set of rollouts. The config it writes repeats it, and its model has no value head.

    Fails when: checkpoints hold zeros for the value head, or the optimizer does not have it.
    """
    flags = [*SMALL, *HARD, *adapter]
    whole = run_recipe("ppo", *flags, output_dir="whole")
    assert whole.code == 0, whole.err
    steps = [event for event in whole.metrics if "loss" in event]
    assert steps[0].keys() >= WATCHED
    assert steps[-1]["value"] != 0
    assert not [name for name in whole.weights() if "value_head" in name]

    def stop_after_some_steps(pid: int) -> None:
        metrics, deadline = rows / "out/metrics.jsonl", time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"loss"') >= 3):
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    stopped = run_recipe("ppo", *flags, while_running=stop_after_some_steps)
    assert stopped.code == 75, stopped.err
    resumed = run_recipe("ppo", *flags, "--resume")
    assert resumed.code == 0, resumed.err
    assert same(whole.weights(), resumed.weights())
    assert losses(whole) == losses(resumed)
    again = run_recipe("ppo", "--config", str(whole.output_dir / "config.yaml"), output_dir="again")
    assert same(whole.weights(), again.weights())


@pytest.mark.parametrize(("flags", "named"), [
    (["--reward-funcs", "[]"], "--reward-funcs"),
    (["--reward-funcs", "rewards.py:none"], "none"),
    (["--reward-funcs", "other/model"], "another vocabulary"),
    (["--reward-funcs", "policy/model"], "recipes/reward.py"),
    (["--beta", "0", "--kl-estimator", "k3"], "--kl-estimator"),
    (["--num-iterations", "1", "--epsilon", "0.1"], "--num-iterations 2"),
    (["--num-iterations", "1", "--cliprange-value", "0.1"], "--num-iterations 2"),
    (["--lam", "1.5"], "--lam"), (["--gamma", "0"], "--gamma"), (["--loss-type", "grpo"], "loss-type"), (["--packing"], "packing"),
    (["--num-generations", "3"], "--num-generations"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_what_cannot_be_trained_is_refused(run_recipe: Any, rows: Path, flags: list[str], named: str) -> None:
    """One message and exit code 2. Fails when: a rule of `policy_rules.py` is taken out, or `check_vocabulary` is not called."""
    for name in ("other", "policy"):
        if any(flag.startswith(name) for flag in flags):
            make_model(rows / name, "AutoModelForSequenceClassification" if name == "other" else "AutoModelForCausalLM")
    place = SMALL.index("--reward-funcs")
    usual = SMALL[:place] + SMALL[place + 2 :] if flags[0] == "--reward-funcs" else SMALL  # given twice, a list has both
    run = run_recipe("ppo", *usual, *flags, "--max-steps", "2")
    assert run.code == 2, run.out + run.err
    assert "Traceback" not in run.err
    assert named in run.err


def make_model(directory: Path, kind: str) -> None:
    import toolkit as tk

    config = tk.ModelConfig(hidden_size=32, num_hidden_layers=1, vocab_size=300)
    tokenizer = tk.train_tokenizer(["one and two and three are the numbers"] * 50, 300)
    model = tk.load_model(kind, config, tokenizer, **({"num_labels": 1} if "Sequence" in kind else {"packed": None}))
    tk.save_model(None, model, tokenizer, directory)


@pytest.mark.slow
def test_a_reward_model_scores_the_completions(run_recipe: Any, rows: Path) -> None:
    """A directory that recipes/reward.py made, with the policy's tokenizer. Fails when: `weighted_sum` takes the first alone."""
    with (rows / "pairs.jsonl").open("w") as file:
        for number in range(40):
            file.write(json.dumps({"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "no"}) + "\n")
    tiny = ["--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "260", "--max-steps", "2"]
    reward = run_recipe("reward", "--model", "tiny-llama", "--dataset", "pairs.jsonl", "--eval-fraction", "0.2", "--max-length", "64", *tiny, output_dir="rm")
    assert reward.code == 0, reward.err
    run = run_recipe("ppo", *SMALL, "--reward-funcs", "rm", "--max-steps", "2")  # next to digits
    assert run.code == 0, run.err
    steps = [event for event in run.metrics if "loss" in event]
    assert all("reward_rm" in step and "reward_digits" in step for step in steps)
    assert steps[0]["reward"] == pytest.approx(steps[0]["reward_rm"] + steps[0]["reward_digits"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [[], ["--deepspeed", str(TESTS / "all_sharded.json")], ["--fsdp"]], ids=["ddp", "zero3", "fsdp2"]
)
def test_two_ranks_have_the_rollouts_and_the_gradients_of_one(tiny: Any, rows: Path, engine: list[str]) -> None:
    """Two updates a step; rewards equal, losses and norms to 1e-4. Fails when: `counted` in `_batch` is of a rank alone."""
    script = str(TESTS.parent / "recipes/ppo.py")
    files = {"rows.jsonl": str(rows / "rows.jsonl"), "rewards.py:digits": f"{rows}/rewards.py:digits"}
    flags = [*SMALL, "--max-steps", "3", "--global-batch-size", "24", "--num-iterations", "2", "--beta", "0.05", "--learning-rate", "0.003"]
    flags = [files.get(flag, flag) for flag in flags]
    one = tiny(*flags, script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    ranks = tiny.ranks(2, *flags, *engine, script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    steps, others = ([event for event in run.metrics if "loss" in event] for run in (one, ranks[0]))
    assert len(steps) == len(others) == 3
    assert steps[-1]["value"] > 0
    for step, other in zip(steps, others, strict=True):
        assert step["reward"] == pytest.approx(other["reward"], abs=1e-9)
        for name in ("loss", "grad_norm", "kl", "entropy", "value", "value_loss", "explained_variance"):
            assert other[name] == pytest.approx(step[name], rel=1e-4, abs=1e-5), name
