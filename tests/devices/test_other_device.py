"""Recipes on a device that is not the CPU: every tensor where the others are. A GPU where there is one, else what stands for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "24", "--max-eval-examples", "3", "--max-steps", "3",
    "--logging-steps", "1", "--global-batch-size", "8", "--per-device-train-batch-size", "4", "--eval-strategy", "steps", "--eval-steps", "2", "--dropout", "0", "--no-bf16",
]  # fmt: skip
SAMPLED = ["--num-samples", "1", "--sample-max-new-tokens", "4"]
FEW = ["--max-train-examples", "4", "--max-eval-examples", "1"]  # whole files
ROLLOUTS = ["--model", "tiny-llama", "--max-completion-length", "4", "--num-generations", "4", "--num-samples", "1",
            "--reward-funcs", "regex", "--reward-pattern", "[a-m]", "--reward-processes", "0", "--eval-temperature", "0"]  # fmt: skip
RECIPES = {
    "sft": [*SAMPLED, "--metrics", "exact_match", "--answer-max-new-tokens", "4", "--z-loss", "1e-4", "--label-smoothing-factor", "0.1"],
    "sft padded": [*SAMPLED, "--no-packing", "--gradient-checkpointing", "--optim", "adamw_torch", "--load-best-model-at-end", "--save-steps", "1", "--async-save"],
    "pretrain": [*SAMPLED, "--vocab-size", "300", "--max-length", "64", *FEW],
    "lora": SAMPLED,
    "dpo": SAMPLED,
    "dpo padded": [*SAMPLED, "--pair-layout", "padded", "--use-peft"],
    "kto": SAMPLED,
    "reward": ["--center-rewards-coefficient", "0.01"],
    "grpo": [*ROLLOUTS, "--beta", "0.05", "--num-iterations", "2", "--entropy-coef", "0.01", "--top-p", "0.9"],
    "ppo": ROLLOUTS,
    "distill": [*SAMPLED, "--dataset", "stdlib:sft", "--max-length", "512", "--teacher", "teacher", "--teacher-top-k", "8"],
    "diffusion": [*SAMPLED, "--vocab-size", "300", "--max-length", "64", *FEW],
    "accelerated": [],
    "masked_lm": ["--vocab-size", "300", "--max-length", "64", *FEW],
    "token_classification": [],
    "question_answering": ["--num-samples", "1"],
    "embedding": ["--two-way", "--false-negative-margin", "0.1"],
    "reranker": ["--ranking-loss", "listnet"],
    "multiple_choice": [],
    "seq2seq": ["--num-samples", "1", "--max-target-length", "8", "--num-beams", "2"],
}


def flags_of(recipe: str) -> tuple[str, list[str]]:
    return str(ROOT / f"recipes/{recipe.split()[0]}.py"), [*SMALL, *RECIPES[recipe]]


TEACHER = [*SMALL, "--num-samples", "0", "--max-length", "512"]


def compare(plain: list[dict[str, Any]], there: list[dict[str, Any]], error: float) -> None:
    for event, other in zip(plain, there, strict=True):
        wanted = {name: value for name, value in event.items() if name in ("loss", "grad_norm") or name.startswith("eval_")}
        norm = wanted.pop("grad_norm", None)
        assert {name: other[name] for name in wanted} == pytest.approx(wanted, rel=error, abs=error, nan_ok=True)
        assert norm is None or other["grad_norm"] == pytest.approx(norm, rel=10 * error)  # added up in float64 on the CPU alone


@pytest.mark.fast(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_another_device_as_on_the_cpu(tiny: Any, recipe: str) -> None:
    """Losses and evaluations of the two to 1e-5, norms to 1e-4: a step, an evaluation, samples and saves mix no tensors of both.

    Fails when: a metric of a step is made on the CPU and another on the device, or a batch is left where it was collated.
    """
    script, flags = flags_of(recipe)
    if recipe == "distill":
        taught = tiny(*TEACHER, script=str(ROOT / "recipes/sft.py"), output_dir="teacher")
        assert taught.code == 0, taught.out[-3000:]
    plain = tiny(*flags, "--use-cpu", script=script, output_dir="plain")
    assert plain.code == 0, plain.out[-3000:]
    there = tiny(script, *flags, script=str(HERE / "on_a_device.py"), output_dir="there")
    assert there.code == 0, there.out[-3000:]
    assert "1 process on hpu" in there.out
    compare(plain.metrics, there.metrics, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_a_gpu_as_on_the_cpu(recipe: str, tmp_path: Path) -> None:
    """The same to 1e-4, in processes that begin anew: one forked from where CUDA was started, as bitsandbytes does, can't use it.

    With AdamW: Muon computes its updates in bfloat16 on CUDA.

    Fails when (by reading it, not run): micro-batches stay where they were collated (`to_device` returns its argument).
    """

    def train(script: str, folder: str, *flags: str) -> list[dict[str, Any]]:
        command = [sys.executable, script, *flags, "--optim", "adamw_torch", "--output-dir", folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]

    script, flags = flags_of(recipe)
    if recipe == "distill":
        train(str(ROOT / "recipes/sft.py"), "teacher", *TEACHER, "--use-cpu")
    compare(train(script, "plain", *flags, "--use-cpu"), train(script, "there", *flags), 1e-4)


REFUSES = """
import torch
there = torch.ones(2, device="hpu")
for wrong in (lambda: there + torch.ones(2), lambda: torch.stack([there, torch.ones(2)]), there.numpy):
    try:
        wrong()
    except (RuntimeError, TypeError) as error:
        print("refused:", error)
there[torch.tensor([0])] = (there + torch.tensor(1.0))[torch.tensor([0])]
print("taken:", there.cpu().numpy(), torch.tensor([1.0, 2.0], device="hpu:0").device)
"""


def test_what_a_device_refuses_is_refused_there(tiny: Any, tmp_path: Path) -> None:
    """Numbers and indices of the CPU are taken, as CUDA takes them. Fails when: `_carry_out` looks at no shapes."""
    (tmp_path / "script.py").write_text(REFUSES)
    done = tiny(str(tmp_path / "script.py"), script=str(HERE / "on_a_device.py"))
    assert done.code == 0, done.out
    assert [word in line for word, line in zip(["two devices", "two devices", "fetch it", "[2. 1.] hpu:0"], done.out.splitlines(), strict=True)] == [True] * 4, done.out
