"""What a user combines with a layout changes no number there, and accumulating exchanges gradients once a step.

Run as a script, this file is a tiny run that notes what its steps exchange.
"""

import functools
import json
import math
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

LAYOUTS = {
    "ddp": [],
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ["--deepspeed", "ds_config.json"],
    "fsdp2": ["--fsdp"],
}
ALL_SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
# Five steps of six in micro-batches of one: on two ranks three each, and where rows are packed a fifth step across two epochs.
RAGGED = [
    "--dropout", "0", "--learning-rate", "1e-3", "--global-batch-size", "6", "--per-device-train-batch-size", "1",
    "--max-steps", "5", "--save-steps", "5",
]  # fmt: skip


def on_two_ranks(tiny: Any, *flags: str, **more: Any) -> Any:
    Path(tiny.folder, "ds_config.json").write_text(json.dumps(ALL_SHARDED))
    ranks = tiny.ranks(2, *flags, **more)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    return ranks[0]


def assert_same_curve(found: Any, expected: Any, loss: float = 1e-5, grad_norm: float = 1e-5) -> None:
    assert found.result["order"] == expected.result["order"]
    assert len(expected.curve) == 5
    assert [event[1] for event in found.curve] == pytest.approx([event[1] for event in expected.curve], rel=loss)
    assert [event[2] for event in found.curve] == pytest.approx([event[2] for event in expected.curve], rel=grad_norm)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2", "zero3", "fsdp2"])
def test_packed_rows_of_workers_with_recomputed_layers_train_as_in_one_process(tiny: Any, layout: str) -> None:
    """Fails when: a layer is recomputed without the bounds of its documents."""
    flags = [*RAGGED, "--packing", "--gradient-checkpointing", "--dataloader-num-workers", "1"]
    assert_same_curve(on_two_ranks(tiny, *flags, *LAYOUTS[layout]), tiny.reference(*flags))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_a_packed_stream_trains_as_in_one_process(tiny: Any, layout: str) -> None:
    """Fails when: a rank reads on from where its own share ended."""
    flags = [*RAGGED, "--packing", "--streaming"]
    assert_same_curve(on_two_ranks(tiny, *flags, *LAYOUTS[layout]), tiny.reference(*flags))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2", "zero3", "fsdp2"])
def test_bf16_trains_float32_weights_as_in_one_process(tiny: Any, layout: str) -> None:
    """Losses to 1e-3 and norms to 1e-2 of one process's autocast; 3e-5 and 1.4e-3 were measured.

    Fails when: the checkpoint takes the weights of the forward pass, which are rounded.
    """
    flags = [*RAGGED, "--bf16", "--group-by-length"]
    found, one = on_two_ranks(tiny, *flags, *LAYOUTS[layout]), tiny.reference(*flags)
    assert_same_curve(found, one, loss=1e-3, grad_norm=1e-2)
    for name, tensor in load_file(found.folder / "checkpoints/step-5/model.safetensors").items():
        assert tensor.dtype == torch.float32, name
        assert torch.isfinite(tensor).all(), name
        # updates smaller than bfloat16's steps are kept
        assert (tensor != tensor.bfloat16().float()).float().mean() > 0.9, name


@pytest.mark.slow
def test_compiled_layers_of_packed_rows_train_on_shards_as_in_one_process(tiny: Any) -> None:
    """Captured and differentiated by torch.compile, run without inductor, whose C++ takes a minute here.

    Under ZeRO-3 the capture alone takes a minute; by hand it gave the same losses and norms, with inductor too.

    Fails when: `loop_kernel` is compiled too (its `@torch.compiler.disable` is taken off), which never ends.
    """
    flags = [*RAGGED, "--packing", "--gradient-checkpointing"]
    found = on_two_ranks(tiny, *flags, "--torch-compile", "--torch-compile-backend", "aot_eager", "--fsdp", script=__file__)
    assert_same_curve(found, tiny.reference(*flags, "--dataloader-num-workers", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp2"])
def test_gradients_are_exchanged_once_a_step_however_many_micro_batches_it_has(tiny: Any, layout: str) -> None:
    """Each gradient's elements cross once. ZeRO-2 and 3 keep shards of them, and so exchange in each micro-batch.

    Fails when: `accumulating` of plain.py is empty; zero.py names no boundary.
    """
    flags = [
        "--dropout", "0", "--global-batch-size", "6", "--per-device-train-batch-size", "1", "--num-train-epochs", "0.67",
        "--save-strategy", "no",
    ]  # fmt: skip
    found = on_two_ranks(tiny, *flags, *LAYOUTS[layout], script=__file__)
    steps = json.loads((found.folder.parent / "exchanges-0.json").read_text())
    assert [step["micro_batches"] for step in steps] == [3, 3, 3, 2]
    assert [step["reduced"] for step in steps] == [steps[0]["parameters"]] * 4


def note_exchanges(name: str) -> None:
    """Wrap the step: how many elements it reduced, and for how many micro-batches, goes into a file."""
    import toolkit as tk

    step, steps = tk.train_step, []

    @functools.wraps(step)
    def noted(accelerator: Any, model: Any, optimizer: Any, batch: Any, *more: Any, **named: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            metrics = step(accelerator, model, optimizer, batch, *more, **named)
        # gloo scatters by reducing the whole; norms and metrics are a few numbers
        sizes = [math.prod(e.input_shapes[0]) for e in profile.events() if e.name in ("gloo:all_reduce", "gloo:reduce_scatter")]
        steps.append({
            "micro_batches": len(batch.micro_batches),
            "reduced": sum(size for size in sizes if size > 16),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        })
        Path(name).write_text(json.dumps(steps))
        return metrics

    tk.train_step = noted


if __name__ == "__main__":
    note_exchanges(f"exchanges-{os.environ['RANK']}.json")
    runpy.run_path(str(Path(__file__).parents[1] / "tiny_run.py"), run_name="__main__")
