"""Checkpoints damaged at rest: every damage is found, the older one taken, and nothing live is touched before all is read."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal

FILES = ["kept.safetensors", "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "MANIFEST.json"]
DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut at 1 %": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 100]),
    "cut at 50 %": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut at 99 %": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size * 99 // 100]),
}
BERT = ["--model", "tiny-bert", "--dropout", "0.1"]
FIXTURES = Path(__file__).parent / "fixtures"
OLD_RUN = ["--hidden-size", "8", "--intermediate-size", "8", "--max-steps", "8"]  # of fixtures/schema-1-run


@pytest.mark.fast(3)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(tiny, tally, long_form, file: str, damage: str) -> None:
    """In the long form each case is a run resumed to its end; in the short one, one case a file.

    Fails when: verify_checkpoint leaves a file out, or latest_checkpoint trusts names.
    """
    line = tally("F5", f"newest checkpoint's {file} missing, empty, or cut at 1, 50, 99 %: resumed from the older one")
    whole = tiny.reference(*BERT)
    folder = tiny.fresh()
    shutil.copytree(whole.folder, folder)
    (folder / "result.json").unlink()
    newest = folder / "checkpoints/step-20"
    DAMAGES[damage](newest / file)
    with line.trial(f"{file} {damage}"):
        said: list[str] = []
        assert ckpt.latest_checkpoint(folder / "checkpoints", said.append) == folder / "checkpoints/step-16"
        assert "step-20 is damaged and skipped" in said[0]
        assert file in said[0]
        with pytest.raises(Refusal, match="damaged"):
            ckpt.load_checkpoint(newest)
        if long_form or damage == "cut at 50 %":
            resumed = tiny(*BERT, "--resume")
            assert resumed.code == 0, resumed.out
            assert "step 16 of 20" in resumed.out
            assert f"{newest.name} is damaged and skipped" in resumed.out
            assert resumed.outcome == whole.outcome
            assert ckpt.verify_checkpoint(newest) == []
    line.check()


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(tiny, tally, chance, count, file: str) -> None:
    """Fails when: sizes are compared, or the manifest doesn't vouch for itself."""
    line = tally("F6", f"a bit flipped in {file}: found")
    newest = tiny.fresh("flipped") / "step-20"
    shutil.copytree(tiny.reference(*BERT).folder / "checkpoints/step-20", newest)
    original = (newest / file).read_bytes()
    for _ in range(count(10, 100)):
        bit = chance.randrange(len(original) * 8)
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        (newest / file).write_bytes(flipped)
        with line.trial(f"bit {bit}"):
            problems = ckpt.verify_checkpoint(newest)
            assert problems
            assert file in problems[0]
            with pytest.raises(Refusal, match="damaged"):
                ckpt.load_checkpoint(newest)
    line.check()


def live_objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def live_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors, _ = ckpt.flatten(optimizer.state_dict())
    return [tensor.clone() for tensor in (*model.state_dict().values(), *tensors.values())]


def without(mapping: dict, key: object) -> dict:
    return {name: value for name, value in mapping.items() if name != key}


def with_moment(state: ckpt.State, name: str, value: torch.Tensor) -> ckpt.State:
    """The state with the first parameter's moment of that name replaced."""
    moments = state.optimizer["state"][0] | {name: value}
    return dataclasses.replace(state, optimizer={**state.optimizer, "state": {**state.optimizer["state"], 0: moments}})


PIECES = {
    "a tensor of the model is missing": lambda s: dataclasses.replace(s, model=without(s.model, "0.weight")),
    "a tensor of the model is too many": lambda s: dataclasses.replace(s, model={**s.model, "more": torch.zeros(1)}),
    "a tensor of the model has another shape": lambda s: dataclasses.replace(s, model={**s.model, "2.bias": torch.zeros(3)}),
    "parameters in another order": lambda s: dataclasses.replace(s, parameter_names=[s.parameter_names[0][::-1]]),
    "a first moment has another shape": lambda s: with_moment(s, "exp_avg", torch.zeros(2, 2)),
    "a second moment has another shape": lambda s: with_moment(s, "exp_avg_sq", torch.zeros(2, 2)),
    "the optimizer has no groups": lambda s: dataclasses.replace(s, optimizer={**s.optimizer, "param_groups": []}),
    "the optimizer's group is short": lambda s: dataclasses.replace(
        s, optimizer={**s.optimizer, "param_groups": [{**s.optimizer["param_groups"][0], "params": [0, 1]}]}
    ),
    "the optimizer is of another kind": lambda s: dataclasses.replace(
        s, optimizer={**s.optimizer, "param_groups": [without(s.optimizer["param_groups"][0], "betas")]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_state_with_a_damaged_piece_leaves_the_live_objects_as_they_were(tally, piece: str) -> None:
    """Whole files that hold a state which does not fit. Fails when: anything is copied before all of it was compared."""
    line = tally("F20", f"a state that doesn't fit is refused, live objects unchanged: {piece}")
    model, optimizer = live_objects()
    state = PIECES[piece](ckpt.copy_state(ckpt.capture_state(model, optimizer, {})))
    model.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    before = live_bits(model, optimizer)
    with line.trial():
        with pytest.raises(Refusal):
            ckpt.apply_state(state, model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, live_bits(model, optimizer), strict=True))
    line.check()


def test_a_checkpoint_of_each_schema_still_loads_and_trains_on(tally) -> None:
    """The fixture was written when its schema was new, two steps into `live_objects`. Fails when: a file, a name or the
    manifest's layout changes without a way to read the old one."""
    line = tally("F22", "a kept checkpoint of schema 1 loads and trains on to the same bits")
    with line.trial():
        assert ckpt.verify_checkpoint(FIXTURES / "schema-1") == []
        state = ckpt.load_checkpoint(FIXTURES / "schema-1")
        assert state.run == {"step": 2}
        assert state.kept["mine"].tolist() == [1.0, 2.0]
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        ckpt.apply_state(state, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        moments = [moment["exp_avg"] for moment in optimizer.state_dict()["state"].values()]
        assert sum(float(moment.abs().sum()) for moment in moments) == pytest.approx(float(state.kept["moments"]), rel=1e-6)
        assert sum(float(p.double().sum()) for p in model.state_dict().values()) == pytest.approx(float(state.kept["weights"]), rel=1e-6)
    line.check()


def test_a_run_continues_from_a_checkpoint_of_each_schema(tiny, tally) -> None:
    """Step 4 of 8 of a run of then; what its record lacks has a default. Fails when: a resume asks for a key it did not have."""
    line = tally("F22", "a kept checkpoint of a run of schema 1: the run resumes from it to its end")
    tiny.fresh()
    # another version of datasets may fingerprint the same rows otherwise
    run = tiny(*OLD_RUN, "--resume-from", str(FIXTURES / "schema-1-run"), "--allow-change", "dataset")
    with line.trial():
        assert run.code == 0, run.out
        assert "step 4 of 8" in run.out
        assert [step for step, *_ in run.curve] == [5, 6, 7, 8]
        assert len(run.result["order"]) == 8
    line.check()


@pytest.mark.parametrize("damage", ["none", "a bit", "removed"])
def test_lines_that_a_damaged_log_lacks_are_counted_at_a_resume(tiny, damage: str) -> None:
    """Fails when: the checkpoint does not say how many lines were logged: early stopping then goes by fewer without a word."""
    begun = tiny("--save-steps", "4", plan={"kill_after_save": 2})
    assert begun.code == -9, begun.out
    metrics = begun.folder / "metrics.jsonl"
    if damage == "a bit":
        content = metrics.read_bytes()
        metrics.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    if damage == "removed":
        metrics.unlink()
    resumed = tiny("--save-steps", "4", "--resume")
    assert resumed.code == 0, resumed.out
    lacking = {"none": None, "a bit": "lacks 1 of the 8 lines", "removed": "lacks 8 of the 8 lines"}[damage]
    assert ("WARNING" in resumed.out) == (lacking is not None)
    assert lacking is None or lacking in resumed.out
