"""Numbers that are not finite, on one rank of two, and a loss that jumps: no shard takes them, and no rank decides alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

LAYOUTS = {"zero2": ["--zero-stage", "2"], "zero3": ["--deepspeed", "ds_config.json"], "fsdp2": ["--fsdp"]}
ALL_SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
RAGGED = [
    "--dropout", "0", "--global-batch-size", "7", "--max-steps", "12", "--save-steps", "12",
    "--optim", "sgd", "--learning-rate", "0.1",
]  # fmt: skip
# A loss that is not a number; gradients that are not finite under a finite loss; an infinite loss whose gradients are finite.
KINDS = {"3": "loss", "6": "gradients", "9": "constant"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_is_not_finite_on_one_rank_changes_no_parameter_on_any(tiny: Any, layout: str) -> None:
    """Three such steps of twelve; the nine others are those of one process that skipped the same three.

    Fails when: zero.py leaves the loss to DeepSpeed, which looks at gradients alone; fsdp.py asks the norm alone.
    """
    Path(tiny.folder, "ds_config.json").write_text(json.dumps(ALL_SHARDED))
    one = tiny.reference(*RAGGED, ill={"kinds": KINDS})
    ranks = tiny.ranks(2, *RAGGED, *LAYOUTS[layout], ill={"kinds": KINDS, "ranks": [1]})
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    second = json.loads((ranks[0].folder / "result-1.json").read_text())
    assert [one.result["applied"], ranks[0].result["applied"], second["applied"]] == [9, 9, 9]

    lines = (ranks[0].folder / "incidents/nonfinite.jsonl").read_text().splitlines()
    incidents = [json.loads(line) for line in lines]
    assert [incident["step"] for incident in incidents] == [int(step) for step in KINDS]
    for incident in incidents:  # the rows of both ranks
        origins = [origin for row in incident["rows"] for origin in row["origin"]]
        assert origins == [f"rows.jsonl:{example + 1}" for example in one.result["order"][incident["step"] - 1]]
        assert f"step {incident['step']} skipped" in ranks[0].out
    assert [incident["loss"] for incident in incidents][::2] == ["nan", "inf"]

    good = [event for event in one.curve if str(event[0]) not in KINDS]
    found = [event for event in ranks[0].curve if str(event[0]) not in KINDS]
    assert [event[0] for event in found] == [event[0] for event in good]
    assert [event[1] for event in found] == pytest.approx([event[1] for event in good], rel=1e-5)
    assert [event[2] for event in found] == pytest.approx([event[2] for event in good], rel=1e-5)
    expected, weights = (load_file(run.folder / "checkpoints/step-12/model.safetensors") for run in (one, ranks[0]))
    for name, tensor in weights.items():
        assert torch.isfinite(tensor).all(), name
        assert (tensor - expected[name]).norm() < 1e-5 * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", *LAYOUTS])
def test_all_ranks_go_back_to_the_same_checkpoint_after_a_spike(tiny: Any, layout: str) -> None:
    """A loss that is 30 times too large on one rank of two; weights are those of one process that went back too, and to the bit
    those of two ranks that never took the rows in between.

    Fails when: `Saver.roll_back` leaves the optimizer's moments on sharded engines (`only_model=True`).
    """
    Path(tiny.folder, "ds_config.json").write_text(json.dumps(ALL_SHARDED))
    flags = ["--dropout", "0", "--global-batch-size", "7", "--max-steps", "44", "--save-steps", "16", "--loss-spike", "rollback"]
    one = tiny.reference(*flags, ill={"kinds": {"40": "spike"}})
    ranks = tiny.ranks(2, *flags, *LAYOUTS.get(layout, []), ill={"kinds": {"40": "spike"}, "ranks": [1]})
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    for run in (one, ranks[0]):
        (record,) = map(json.loads, (run.folder / "incidents/rollbacks.jsonl").read_text().splitlines())
        assert record == {"step": 40, "weights_of_step": 32, "first_example": 7 * 32, "end_example": 7 * 40}
        assert run.result["applied"] == 36
    expected, weights = (load_file(run.folder / "checkpoints/step-44/model.safetensors") for run in (one, ranks[0]))
    for name, tensor in weights.items():
        assert (tensor - expected[name]).norm() < 1e-4 * expected[name].norm(), name

    passed_over = {str(step): "loss" for step in range(33, 41)}  # not finite, so that nothing takes those rows
    flags += [*LAYOUTS.get(layout, []), "--max-nonfinite-steps", "9"]
    other = tiny.ranks(2, *flags, output_dir="passed-over", ill={"kinds": passed_over, "ranks": [1]})
    assert [rank.code for rank in other] == [0, 0], other[0].out[-3000:]
    assert other[0].result["applied"] == 36
    for name, tensor in load_file(other[0].folder / "checkpoints/step-44/model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name
