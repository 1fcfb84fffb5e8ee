"""Policy gradients with a server as the sampler: whole runs against one on the loopback."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rollouts.server_double import serving
from toolkit.rollouts.ledger import rollouts_of

pytestmark = pytest.mark.slow
TESTS = Path(__file__).resolve().parents[1]
SMALL = [
    "--dataset", "rows.jsonl", "--eval-fraction", "0.2", "--max-completion-length", "6", "--num-generations", "4",
    "--per-device-train-batch-size", "8", "--reward-funcs", "rewards.py:digits", "--reward-processes", "0",
    "--logging-steps", "1", "--learning-rate", "0.01", "--warmup-steps", "0", "--eval-steps", "100", "--num-samples", "1",
]  # fmt: skip
TINY = ["--model", "tiny-llama", "--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "260"]
REWARD = "def digits(prompts, completions, **columns):\n    return [sum(sign.isdigit() for sign in text) / 6 for text in completions]\n"


def started(run_recipe: Any, folder: Path, recipe: str) -> Path:
    """A model to begin with, after one step; rows and a reward function next to it."""
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(6) for b in range(5))
    )
    (folder / "rewards.py").write_text(REWARD)
    first = run_recipe(recipe, *TINY, *SMALL, "--max-steps", "1", output_dir="first")
    assert first.code == 0, first.err
    return folder / "first/model"


@pytest.mark.parametrize("engine", [[], ["--deepspeed", str(TESTS / "all_sharded.json")], ["--fsdp"]], ids=["ddp", "zero3", "fsdp2"])
def test_two_ranks_have_the_rollouts_and_the_losses_of_one(run_recipe: Any, tiny: Any, tmp_path: Path, engine: list[str]) -> None:
    """With the weights of a sharded model handed over before each step. Losses and norms to 1e-4 of them.

    Fails when: `hand_over` writes the shards of one rank, or each rank asks for the groups of all.
    """
    start = started(run_recipe, tmp_path, "grpo")
    files = {"rows.jsonl": str(tmp_path / "rows.jsonl"), "rewards.py:digits": f"{tmp_path}/rewards.py:digits"}
    with serving(AutoModelForCausalLM.from_pretrained(start).eval(), AutoTokenizer.from_pretrained(start)) as double:
        flags = ["--use-cpu", "--model", str(start), *(files.get(flag, flag) for flag in SMALL), "--max-steps", "3"]
        flags += ["--global-batch-size", "24", "--rollout-server", double.url]
        script = str(TESTS.parent / "recipes/grpo.py")
        one = tiny(*flags, script=script, output_dir="one")
        assert one.code == 0, one.out[-3000:]
        ranks = tiny.ranks(2, *flags, *engine, script=script, output_dir="two")
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    for step in (1, 2, 3):
        texts = [[(each.prompt, each.completion) for each in rollouts_of(run.folder, step)] for run in (one, ranks[0])]
        assert texts[0] == texts[1]
    steps, others = ([event for event in run.metrics if "loss" in event] for run in (one, ranks[0]))
    assert len(steps) == len(others) == 3
    for step, other in zip(steps, others, strict=True):
        assert other["sampler_logp_gap_max"] < 1e-4
        for name in ("loss", "grad_norm", "reward"):
            assert other[name] == pytest.approx(step[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_run_trains_from_a_server_through_faults_and_refuses_lies(run_recipe: Any, tmp_path: Path, recipe: str) -> None:
    """Six steps, each with the weights that were handed over before it: log-probabilities differ by less than 1e-4 nats. A dropped
    connection and a 500 change nothing. A server that keeps old weights ends the run with exit code 2 and one message.

    Fails when: the recipe does not hand `server` to `sample_rollouts`, or `hand_over` returns at once.
    """
    start = started(run_recipe, tmp_path, recipe)
    tokenizer = AutoTokenizer.from_pretrained(start)
    with serving(AutoModelForCausalLM.from_pretrained(start).eval(), tokenizer) as double:
        flags = ["--model", str(start), *SMALL, "--max-steps", "6", "--rollout-server", double.url]
        double.faults = ["", "drop", "500"]
        run = run_recipe(recipe, *flags)
        assert run.code == 0, run.err
        steps = [event for event in run.metrics if "sampler_logp_gap" in event]
        assert len(steps) == 6
        assert max(event["sampler_logp_gap_max"] for event in steps) < 1e-4
        files = sorted((run.output_dir / "rollouts").glob("step-*.jsonl"))
        policies = {json.loads(file.read_text().splitlines()[0])["policy"] for file in files}
        assert sum(path == "/collective_rpc" for path, _ in double.asked) == len(policies) >= 5  # a step without rewards moves none
        double.lie = "old"
        refused = run_recipe(recipe, *flags, output_dir="lied")
        assert refused.code == 2, refused.err
        assert "Traceback" not in refused.err
        assert "--rollout-server" in refused.err
        double.lie = "tokenizer"
        assert "another tokenizer" in run_recipe(recipe, *flags, output_dir="other").err
