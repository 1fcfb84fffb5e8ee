"""ZeRO's formula against the metrics of its paper, and the counts that enter it against a model's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import toolkit as tk
from toolkit.diagnostics.memory_table import Elements, Memory, count_elements, memory_of_stage, used_memory, zero_memory_table

BILLION = 10**9
PAPER = Elements(parameters=75 * BILLION // 10, trained=75 * BILLION // 10, moments=15 * BILLION)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_example_of_the_paper(stage: int, gigabytes: float) -> None:
    """Figure 1 of Rajbhandari et al. 2020: 7.5 billion parameters, 64 GPUs, Adam, mixed precision. There a gradient takes 2 bytes in
    every stage; the float32 shards of stages 2 and 3 take 2 more here.

    Fails when: a stage divides one thing too few or too many, or stage 1's gradients take 4 bytes.
    """
    finer = 2 * PAPER.trained / 64 if stage > 1 else 0
    assert round((memory_of_stage(stage, PAPER, 64, "bf16").total - finer) / BILLION, 1) == gigabytes


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [(0, 16.0), (1, 9.5), (2, 6.0), (3, 2.5)])
def test_float32_on_eight_ranks(stage: int, bytes_per_parameter: float) -> None:
    """As the files of recipes/launch say: 16; 8 + 8/N and 4/N for DeepSpeed's copy; 4 + 12/N + 4/N; 16/N + 4/N.

    Fails when: DeepSpeed's masters are left out in float32.
    """
    assert memory_of_stage(stage, PAPER, 8).total / PAPER.parameters == bytes_per_parameter


@pytest.mark.parametrize(("stage", "on_gpu"), [(0, 16.0), (1, 8.0), (2, 4.0), (3, 0.5)])
def test_offloading_the_optimizer_leaves_weights_and_whole_gradients_on_the_gpu(stage: int, on_gpu: float) -> None:
    """In float32 on eight ranks. Fails when: stage 1's gradients, whole until the last micro-batch, are taken for shards."""
    memory = memory_of_stage(stage, PAPER, 8, offload="optimizer")
    assert (memory.total - memory.on_cpu) / PAPER.parameters == on_gpu


def test_offloading_parameters_leaves_nothing_on_the_gpu_but_what_is_too_small_to_shard() -> None:
    """Fails when: the parameters that ZeRO-3 keeps whole are taken for offloaded, or stages 1 and 2 for able to."""
    memory = memory_of_stage(3, Elements(1000, 1000, 2000, kept_whole=10), 4, offload="parameters")
    assert memory.total - memory.on_cpu == 40
    assert memory_of_stage(2, PAPER, 8, offload="parameters").on_cpu == 0


@pytest.mark.parametrize("optim", ["adamw_torch", "muon", "sgd", "rmsprop", "nadam", "radam"])
def test_the_moments_are_those_that_the_optimizer_has_after_a_step(optim: str) -> None:
    """With a frozen embedding, and with tied weights. Fails when: Muon's AdamW part is counted as Muon's, or the frozen as trained."""
    config = tk.OptimConfig(optim=optim)
    model = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model="tiny-llama", hidden_size=32, num_hidden_layers=2))
    model.get_input_embeddings().weight.requires_grad_(False)
    optimizer, _ = tk.build_optimizer(model, config, 10)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    elements = count_elements(model, config)
    assert elements.moments == sum(value.numel() for value in state if value.dim())
    assert elements.trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert elements.parameters == model.num_parameters()


def test_one_process_holds_what_the_formula_says_of_plain_training() -> None:
    """Exactly: nothing is padded. Gradients count until they are freed. Fails when: the optimizer's counters of steps are moments, or
    gradients that nobody has freed yet are not looked for."""
    config = tk.OptimConfig(optim="muon")
    model = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model="tiny-llama", hidden_size=32, num_hidden_layers=2))
    optimizer, _ = tk.build_optimizer(model, config, 10)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    formula = zero_memory_table(model, config, 1)[0]
    assert used_memory(accelerator, model, optimizer) == formula
    model.zero_grad()
    assert used_memory(accelerator, model, optimizer) == Memory(formula.weights, 0, 0, formula.moments)
    rows = tk.memory_table(accelerator, model, optimizer, config).splitlines()
    plain, held = (next(row for row in rows if row.startswith(f"  {label}")).split() for label in ("plain", "held (plain)"))
    assert held[2:] == [plain[1], "freed", "-", plain[4], f"{(formula.total - formula.gradients) / 1e6:.2f}"]


MEASURING = """\
        import json, dataclasses, os
        from toolkit.diagnostics.memory_table import used_memory
        elements = dataclasses.asdict(count_elements(model, config))
        held = dataclasses.asdict(used_memory(accelerator, model, optimizer))
        with open(f"held-{os.environ['RANK']}.json", "w") as file:
            json.dump([elements, held], file)
"""


@pytest.mark.slow
def test_two_ranks_of_fsdp2_hold_half_of_everything_and_no_masters(tiny: Any, root: Path) -> None:
    """To 1 %: rows that two ranks can't share evenly. Fails when: the shards count a second time as what the optimizer updates."""
    recipe, line = (root / "recipes/accelerated.py").read_text(), "        tk.load_best(run)\n"
    assert recipe.count(line) == 1
    recipe = recipe.replace(line, MEASURING + line).replace("import toolkit as tk\n", (
        "import toolkit as tk\nfrom toolkit.diagnostics.memory_table import count_elements\n"
    ))  # fmt: skip
    (tiny.folder / "my_recipe.py").write_text(recipe)
    flags = ["--hidden-size", "64", "--num-hidden-layers", "2", "--max-train-examples", "60", "--max-eval-examples", "12"]
    ranks = tiny.ranks(2, *flags, "--max-length", "32", "--max-steps", "2", "--fsdp", script=str(tiny.folder / "my_recipe.py"))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    for rank in (0, 1):
        elements, held = json.loads((tiny.folder / f"held-{rank}.json").read_text())
        assert held["weights"] == pytest.approx(4 * elements["parameters"] / 2, rel=0.01)
        assert held["moments"] == pytest.approx(4 * elements["moments"] / 2, rel=0.01)
        assert (held["gradients"], held["masters"]) == (0, 0)
