"""recipes/zero.py: a plugin made in code trains as the settings do, and what a rank holds is what the formula says."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

# Which is not imported to collect the tests: runs are forked from a process that has it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="without deepspeed")

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "recipes/zero.py").read_text()
# Embeddings of 2 x 131,072 elements and more are sharded by ZeRO-3; the layers' matrices, below 100,000 each, are not.
SMALL = [
    "--hidden-size", "64", "--num-hidden-layers", "2", "--max-train-examples", "60", "--max-eval-examples", "12", "--max-length", "32",
    "--max-steps", "3", "--logging-steps", "1", "--global-batch-size", "4", "--per-device-train-batch-size", "1", "--dropout", "0",
]  # fmt: skip
MEASURING = """\
        import json, dataclasses, os
        from toolkit.diagnostics.memory_table import used_memory, zero_memory_table
        offload = config.offload
        table = zero_memory_table(accelerator.unwrap_model(model), config, accelerator.num_processes,
                                     mixed_precision=accelerator.mixed_precision, offload=offload)
        both = [table[config.zero_stage or 2], used_memory(accelerator, model, optimizer)]
        with open(f"held-{os.environ['RANK']}.json", "w") as file:
            json.dump([dataclasses.asdict(memory) for memory in both], file)
"""


def test_the_two_recipes_differ_in_the_plugin_and_the_table() -> None:
    """Fails when: one of the two is changed and the other is not."""
    own = set(RECIPE.splitlines()) - set((ROOT / "recipes/accelerated.py").read_text().splitlines())
    code = RECIPE.split('"""')[2].splitlines()
    assert [line.strip() for line in code if line in own] == [
        'output_dir: str = "runs/zero"',
        "from accelerate.utils import DeepSpeedPlugin",
        "plugin = DeepSpeedPlugin(",
        "zero_stage=config.zero_stage,  # None: the stage of accelerate launch, else 2",
        'offload_optimizer_device=None if config.offload == "none" else "cpu",',
        'offload_param_device="cpu" if config.offload == "parameters" else None,',
        ")",
        'plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = 6_250_000  # no flag has it: 25 MB at a time, as in DDP',
        "accelerator = tk.build_accelerator(config, deepspeed_plugin=plugin)",
        "run.say(tk.memory_table(accelerator, model, optimizer, config))",
    ]


def test_a_group_of_one_rank_trains_as_accelerated_does(run_recipe: Any) -> None:
    """Fails when: the plugin's stage or its "auto" values reach DeepSpeed as other settings than --zero-stage's."""
    plain, zero = run_recipe("accelerated", *SMALL), run_recipe("zero", *SMALL, output_dir="zero")
    assert zero.code == 0, zero.err
    for name in ("loss", "grad_norm", "eval_loss"):
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (zero, plain))
        assert len(expected) > 0
        assert found == pytest.approx(expected, rel=1e-4)
    assert all(0 < event["data_wait"] < 1 for event in zero.metrics if "loss" in event)
    assert "held (ZeRO-2)" in zero.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        ("1", []),
        ("2", ["--bf16", "--optim", "adamw_torch"]),
        ("3", []),
        ("3", ["--bf16", "--optim", "sgd", "--offload", "parameters"]),
    ],
)
def test_two_ranks_hold_what_the_formula_says(tiny: Any, stage: str, flags: list[str]) -> None:
    """To 1 %: what DeepSpeed pads its partitions with. Gradients are freed after a step, but for those that have a buffer.

    Fails when: masters, which DeepSpeed keeps in float32 training too, or the parameters that ZeRO-3 leaves whole are not counted;
    when Muon's matrices have two moments; when a view counts as often as there are views.
    """
    line = "        run.say(tk.memory_table(accelerator, model, optimizer, config))\n"
    assert RECIPE.count(line) == 1
    (tiny.folder / "my_zero.py").write_text(RECIPE.replace(line, line + MEASURING))
    ranks = tiny.ranks(2, *SMALL, "--zero-stage", stage, *flags, script=str(tiny.folder / "my_zero.py"))
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    assert f"held (ZeRO-{stage})" in ranks[0].out
    assert "memory of a rank" not in ranks[1].out
    for rank in (0, 1):
        computed, held = json.loads((tiny.folder / f"held-{rank}.json").read_text())
        assert held["weights"] - held["gathered"] == pytest.approx(computed["weights"], rel=0.01)
        assert held["masters"] == pytest.approx(computed["masters"], rel=0.01)
        assert held["moments"] == pytest.approx(computed["moments"], rel=0.01)
        kept = computed["gradients"] if stage == "3" else 0
        assert held["gradients"] == pytest.approx(kept, rel=0.01)
