"""Each optimizer that an engine may shard trains there as it does in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

LAYOUTS = {
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ["--deepspeed", "ds_config.json"],
    "fsdp2": ["--fsdp"],
}
# DeepSpeed keeps parameters of fewer than 100,000 elements whole, which would be all of them here.
ALL_SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
# Six steps of seven examples in micro-batches of two: ranks with unequal shares, groups that differ in rate and decay.
RAGGED = [
    "--dropout", "0", "--global-batch-size", "7", "--max-steps", "6", "--save-steps", "6", "--weight-decay", "0.1",
    "--max-grad-norm", "1.0",
]  # fmt: skip
OPTIMIZERS: dict[str, list[str]] = {
    "adamw_torch": ["--learning-rate", "1e-3", "--layer-lr-decay", "0.5"],
    "adamw_torch_fused": ["--learning-rate", "1e-3"],
    "sgd": ["--learning-rate", "1e-1", "--momentum", "0.9"],
    "nadam": ["--learning-rate", "1e-3"],
    "radam": ["--learning-rate", "1e-3"],
    "rmsprop": ["--learning-rate", "1e-4", "--momentum", "0.5", "--lr-patterns", "embed=0.1"],
    "muon": ["--learning-rate", "1e-2", "--momentum", "0.9"],
}
TWO_RANKS = [
    ("adamw_torch", "zero2"), ("adamw_torch", "zero3"), ("adamw_torch", "fsdp2"), ("adamw_torch_fused", "zero3"), ("sgd", "fsdp2"),
    ("nadam", "zero2"), ("radam", "zero3"), ("rmsprop", "fsdp2"), ("muon", "fsdp2"),
]  # fmt: skip


def weights(finished: Any) -> dict[str, Any]:
    return load_file(finished.folder / "checkpoints/step-6/model.safetensors")


def largest_error(found: Any, expected: Any) -> float:
    """The largest distance of a parameter from the expected one, relative to its length."""
    reference = weights(expected)
    return max(((tensor - reference[name]).norm() / reference[name].norm()).item() for name, tensor in weights(found).items())


def assert_same(tiny: Any, optimizer: str, layout: str, ranks: int) -> None:
    flags = [*RAGGED, "--optim", optimizer, *OPTIMIZERS[optimizer]]
    Path(tiny.folder, "ds_config.json").write_text(json.dumps(ALL_SHARDED))
    one = tiny.reference(*flags)
    found = tiny.ranks(ranks, *flags, *LAYOUTS[layout])
    assert [rank.code for rank in found] == [0] * ranks, found[0].out[-3000:]
    assert found[0].result["order"] == one.result["order"]
    losses, norms = ([event[column] for event in one.curve] for column in (1, 2))
    assert len(losses) == 6
    assert abs(losses[-1] - losses[0]) > 0.01, "nothing was learned, so nothing is compared"
    assert [event[1] for event in found[0].curve] == pytest.approx(losses, rel=1e-5)
    assert [event[2] for event in found[0].curve] == pytest.approx(norms, rel=1e-5)
    assert weights(found[0]).keys() == weights(one).keys()
    assert largest_error(found[0], one) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "layout"), TWO_RANKS)
def test_an_optimizer_on_shards_updates_as_on_the_whole(tiny: Any, optimizer: str, layout: str) -> None:
    """Losses, norms and weights to 1e-5. Fails when: sharded_muon_step orthogonalizes its own rows (no add_up)."""
    assert_same(tiny, optimizer, layout, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_muon_orthogonalizes_whole_matrices_that_three_ranks_hold_in_uneven_pieces(tiny: Any, layout: str) -> None:
    """Fails when: add_up is left out, or zero.py's pieces take the owner from its first element on."""
    assert_same(tiny, "muon", layout, ranks=3)
