"""SIGKILL while a policy samples, scores, learns or saves: the same bits as without it, and a ledger that is whole."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RECIPE = str(RECIPES / "grpo.py")
ROWS = "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(6) for b in range(5))
REWARD = (
    "import time\n"
    "def digits(prompts, completions, answer, **columns):\n"
    "    time.sleep(0.02)\n"
    "    return [sum(sign.isdigit() for sign in text) / 6 for text in completions]\n"
)
FLAGS = [
    "--use-cpu", "--model", "tiny-llama", "--hidden-size", "32", "--num-hidden-layers", "1", "--eval-fraction", "0.2", "--vocab-size", "260",
    "--max-completion-length", "12", "--num-generations", "4", "--per-device-train-batch-size", "16", "--reward-processes", "0",
    "--learning-rate", "0.01", "--eval-strategy", "no", "--num-samples", "0", "--max-steps", "8", "--save-steps", "3", "--save-strategy",
    "steps", "--beta", "0.05", "--num-iterations", "2", "--top-p", "0.95", "--logging-steps", "1", "--dropout", "0.1",
]  # fmt: skip


def outcome(run: Any) -> tuple[Any, ...]:
    weights = {name: tensor.tolist() for name, tensor in load_file(run.folder / "model/model.safetensors").items()}
    metrics = [(event["step"], event["loss"], event["reward"], event["kl"]) for event in run.metrics if "loss" in event]
    ledger = {path.name: path.read_bytes() for path in sorted((run.folder / "rollouts").iterdir())}
    return weights, metrics, ledger


@pytest.mark.fast(2)
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_killed_run_ends_with_the_same_weights_and_the_same_ledger(tiny: Any, tally: Any, chance: Any, count: Any, recipe: str) -> None:
    """Sampling, scoring, the reference, two updates on each set of rollouts, saving.

    Fails when: a cut line of the ledger is taken for a group, or the parts of a step stay behind it.
    """
    (tiny.folder / "rows.jsonl").write_text(ROWS)
    (tiny.folder / "rewards.py").write_text(REWARD)
    flags = [*FLAGS, "--dataset", str(tiny.folder / "rows.jsonl"), "--reward-funcs", f"{tiny.folder}/rewards.py:digits"]
    script = str(RECIPES / f"{recipe}.py")
    whole = tiny(*flags, script=script, output_dir="whole")
    assert whole.code == 0, whole.out[-3000:]
    assert len(list((whole.folder / "rollouts").iterdir())) == 8
    seconds = whole.metrics[-1]["time"]
    line, expected = tally("F1", f"SIGKILL at a random moment of a run of {recipe}.py, resumed: weights, metrics and every byte of the ledger"), outcome(whole)
    for _ in range(count(1, 40)):
        tiny.fresh()
        after = chance.uniform(0, 1.05 * seconds)
        tiny.killed(*flags, script=script, after=after)
        with line.trial(f"killed after {after:.3f} s"):
            resumed = tiny(*flags, "--resume", script=script)
            assert resumed.code == 0, resumed.out[-3000:]
            assert outcome(resumed) == expected
    line.check()


@pytest.mark.slow
def test_a_run_trained_from_a_ledger_samples_nothing_and_has_the_same_bits(tiny: Any) -> None:
    """Fails when: the rollouts of the ledger are not those of the run, bit for bit, or are sampled all the same."""
    (tiny.folder / "rows.jsonl").write_text(ROWS)
    (tiny.folder / "rewards.py").write_text(REWARD)
    flags = [*FLAGS, "--dataset", str(tiny.folder / "rows.jsonl"), "--reward-funcs", f"{tiny.folder}/rewards.py:digits"]
    whole = tiny(*flags, script=RECIPE, output_dir="whole")
    assert whole.code == 0, whole.out[-3000:]
    (tiny.folder / "mine.py").write_text(
        Path(RECIPE).read_text().replace("import toolkit as tk\n", "import toolkit as tk\nfrom toolkit.rollouts import sampling\n", 1)
        .replace("def main(", "def none(model, prompts, *_, **__):\n    assert not prompts, 'sampled'\n\n\nsampling.sample_groups = none\n\n\ndef main(", 1)
    )  # fmt: skip
    taken = tiny(*flags, "--rollouts-from", "whole", script=str(tiny.folder / "mine.py"))
    assert taken.code == 0, taken.out[-3000:]
    assert outcome(taken) == outcome(whole)
    other = tiny(*flags, "--rollouts-from", "whole", "--learning-rate", "0.02", script=RECIPE, output_dir="other")
    assert other.code == 2, other.out[-3000:]
    assert re.search(r"--rollouts-from whole: .*step \d .*policy", other.out)
