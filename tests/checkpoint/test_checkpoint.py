"""Checkpoints: exact, complete or not there, and never the last good one removed."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal
from toolkit.system import digests


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: Adafactor(p, lr=1e-2, scale_parameter=False, relative_step=False),  # a count that is no tensor
}


def trained(optimizer_name: str = "adamw", steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(root: Path, number: int = 3, optimizer_name: str = "adamw") -> Path:
    model, optimizer = trained(optimizer_name, number)
    return ckpt.save_checkpoint(root, number, ckpt.capture_state(model, optimizer, {"step": number}, kept={"mine": torch.ones(2)}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Buffers and tied weights included. Fails when: any optimizer tensor is left out of `flatten`."""
    model, optimizer = trained(name)
    path = ckpt.save_checkpoint(tmp_path, 3, ckpt.capture_state(model, optimizer, {"step": 3}))
    step(model, optimizer)
    torch.manual_seed(9)
    other = Tied()
    other_optimizer = OPTIMIZERS[name](other.parameters())
    ckpt.apply_state(ckpt.load_checkpoint(path), other, other_optimizer)
    step(other, other_optimizer)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_everything_in_a_checkpoint_is_safetensors_or_json(tmp_path: Path) -> None:
    """Fails when: what user code keeps is not written, or a file has another format."""
    path = saved(tmp_path)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}
    assert ckpt.load_checkpoint(path).kept["mine"].tolist() == [1, 1]
    assert ckpt.load_checkpoint(path).run == {"step": 3}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "kept.safetensors", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "flipped"])
def test_any_damage_is_found_and_the_older_checkpoint_taken(tmp_path: Path, file: str, damage: str) -> None:
    """Fails when: verify_checkpoint compares sizes only (flipped), or latest_checkpoint trusts names."""
    older, newer = saved(tmp_path, 2), saved(tmp_path, 3)
    target = newer / file
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 4
    {
        "missing": target.unlink,
        "empty": lambda: target.write_bytes(b""),
        "half": lambda: target.write_bytes(target.read_bytes()[: len(data) // 2]),
        "flipped": lambda: target.write_bytes(bytes(data)),
    }[damage]()
    said: list[str] = []
    chosen = ckpt.latest_checkpoint(tmp_path, said.append)
    assert chosen == older
    assert "step-3" in said[0]
    assert file in said[0]
    with pytest.raises(Refusal, match="damaged"):
        ckpt.load_checkpoint(newer)


def test_a_save_that_fails_leaves_nothing_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: files are written under the final name."""
    older = saved(tmp_path, 2)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ckpt.directory, "_commit", full)
    with pytest.raises(OSError, match="No space"):
        saved(tmp_path, 3)
    assert [p.name for p in tmp_path.iterdir()] == [older.name]
    assert ckpt.verify_checkpoint(older) == []


def test_pruning_keeps_the_newest_and_the_protected_and_waits_for_a_whole_one(tmp_path: Path) -> None:
    """Fails when: the newest one is not looked at before older ones go."""
    paths = [saved(tmp_path, n) for n in range(1, 6)]
    assert ckpt.prune_checkpoints(tmp_path, 2, [paths[0]]) == paths[1:3]
    assert ckpt.list_checkpoints(tmp_path) == [paths[0], paths[3], paths[4]]
    (paths[4] / "model.safetensors").unlink()
    assert ckpt.prune_checkpoints(tmp_path, 1, []) == []
    assert ckpt.prune_checkpoints(tmp_path, None, []) == []


@pytest.mark.parametrize("frozen_at_the_save", [True, False])
def test_a_weight_that_is_frozen_on_one_side_alone_is_refused_by_its_name(frozen_at_the_save: bool) -> None:
    """As after layers were frozen or unfrozen in the loop. Fails when: their shapes are shown, one of which is None."""
    model, other = Tied(), Tied()
    (model if frozen_at_the_save else other).norm.requires_grad_(False)
    state = ckpt.capture_state(model, torch.optim.AdamW(model.parameters()), {})
    with pytest.raises(Refusal, match=r"norm\.bias.*requires_grad") as refused:
        ckpt.apply_state(state, other, torch.optim.AdamW(other.parameters()))
    assert ("is trained here" if frozen_at_the_save else "is frozen or missing here") in str(refused.value)


def test_a_state_that_does_not_fit_leaves_the_live_objects_as_they_were(tmp_path: Path) -> None:
    """Fails when: weights are copied before the optimizer's parameters are compared."""
    state = ckpt.load_checkpoint(saved(tmp_path))
    wide = Tied(5)
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    with pytest.raises(Refusal, match="does not fit"):
        ckpt.apply_state(state, wide, torch.optim.AdamW(wide.parameters()))
    narrow = Tied()
    reversed_order = torch.optim.AdamW(list(narrow.parameters())[::-1])
    before_narrow = {name: tensor.clone() for name, tensor in narrow.state_dict().items()}
    with pytest.raises(Refusal, match="another order"):
        ckpt.apply_state(state, narrow, reversed_order)
    for model, was in ((wide, before), (narrow, before_narrow)):
        assert all(torch.equal(tensor, was[name]) for name, tensor in model.state_dict().items())


def in_two_groups(model: nn.Module, *decaying: str) -> torch.optim.Optimizer:
    parts = [[each for name, each in model.named_parameters() if (name in decaying) is decays] for decays in (True, False)]
    return OPTIMIZERS["adamw"]([{"params": parts[0]}, {"params": parts[1], "weight_decay": 0.0}])


def test_a_state_in_other_groups_goes_on_with_each_parameters_own_moments() -> None:
    """As between versions that differ in what decays: the bits of a run whose parameters changed groups midway. Fails when: moments are
    taken by their number in the checkpoint, or a group of other rules is taken."""
    model = Tied()
    optimizer = in_two_groups(model, "embedding.weight", "norm.weight")
    step(model, optimizer)
    state = ckpt.copy_state(ckpt.capture_state(model, optimizer, {}))
    other = Tied()
    other_optimizer = in_two_groups(other, "embedding.weight", "norm.bias")
    ckpt.apply_state(state, other, other_optimizer)
    moved = in_two_groups(model, "embedding.weight", "norm.bias")
    moved.state.update(optimizer.state)
    for each, its_optimizer in ((model, moved), (other, other_optimizer)):
        step(each, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    without = {number: each for number, each in state.optimizer["state"].items() if number != 2}  # it never got a gradient
    ckpt.apply_state(dataclasses.replace(state, optimizer=state.optimizer | {"state": without}), other, other_optimizer)
    del state.optimizer["state"][2]["exp_avg_sq"]  # of norm.bias, as of another rule
    with pytest.raises(Refusal, match="another rule"):
        ckpt.apply_state(state, other, other_optimizer)


def test_pointers_name_a_checkpoint_and_a_lost_one_is_none(tmp_path: Path) -> None:
    """Fails when: a pointer is returned without a look whether its checkpoint exists."""
    path = saved(tmp_path)
    ckpt.write_pointer(tmp_path, "best", path)
    assert ckpt.read_pointer(tmp_path, "best") == path
    assert ckpt.read_pointer(tmp_path, "last") is None
    (tmp_path / "best.json").write_text(json.dumps({"checkpoint": "step-99"}))
    assert ckpt.read_pointer(tmp_path, "best") is None


def test_nested_state_survives_with_its_key_types() -> None:
    """Fails when: the keys of a dictionary are written as texts."""
    tree = {"state": {0: {"step": torch.tensor(1.0), "flags": (1, None, True)}}, "groups": [{"betas": (0.9, 0.99)}]}
    tensors, skeleton = ckpt.flatten(tree)
    back = ckpt.unflatten(tensors, json.loads(json.dumps(skeleton)))
    assert back == tree
    assert isinstance(next(iter(back["state"])), int)


def adapted(seed: int) -> nn.Module:
    """A frozen base with peft's LoRA on it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    torch.manual_seed(1)  # the same adapter on any base
    return get_peft_model(base, LoraConfig(target_modules=["0", "2"], r=2))  # type: ignore[arg-type]


def test_a_checkpoint_of_adapters_holds_them_alone_and_pins_their_base(tmp_path: Path) -> None:
    """Fails when: frozen parameters are saved, or `base` is not compared before the adapters are put in."""
    model = adapted(0)
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained_parameters, lr=1e-2)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    path = ckpt.save_checkpoint(tmp_path, 1, ckpt.capture_state(model, optimizer, {"step": 1}))
    state = ckpt.load_checkpoint(path)
    assert set(state.model) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in state.model)
    same_base, other_base = adapted(0), adapted(5)
    fresh = torch.optim.AdamW([parameter for parameter in same_base.parameters() if parameter.requires_grad], lr=1e-2)
    ckpt.apply_state(state, same_base, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same_base.state_dict().values(), strict=True))
    before = {name: tensor.clone() for name, tensor in other_base.state_dict().items()}
    with pytest.raises(Refusal, match="frozen parameters here are others"):
        ckpt.apply_state(state, other_base, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other_base.state_dict().items())


def test_a_copy_in_memory_stays_as_it_was_while_training_goes_on(tmp_path: Path) -> None:
    """Also the second copy, into the memory of the first. Fails when: copy_state returns live tensors, or those of a kept
    dictionary."""
    model, optimizer = trained()
    average = torch.zeros(3)
    memory: dict[str, torch.Tensor] = {}
    before: dict[str, int] = {}
    for number in (1, 2):
        copied = ckpt.copy_state(ckpt.capture_state(model, optimizer, {"step": number}, kept={"ema": {"w": average}}), memory)
        average += 1
        assert copied.kept["ema"]["w"].tolist() == [number - 1.0] * 3
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        places = {name: tensor.data_ptr() for name, tensor in copied.model.items()}
        step(model, optimizer)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in copied.model.items())
        if number == 2:
            assert places == before
        before = places


def test_a_file_that_can_not_be_read_is_damage_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector, or a manifest of another form. Fails when: verify_checkpoint lets the operating system's error through."""
    older, newer = saved(tmp_path, 2), saved(tmp_path, 3)
    digest = digests.ALGORITHMS["sha256"]

    def bad_sector(path: Path) -> str:
        if path.parent.name == newer.name:
            raise OSError(5, "Input/output error")
        return digest(path)

    monkeypatch.setitem(digests.ALGORITHMS, "sha256", bad_sector)
    said: list[str] = []
    assert ckpt.latest_checkpoint(tmp_path, said.append) == older
    assert "Input/output error" in said[0]
    monkeypatch.undo()
    (newer / "MANIFEST.json").write_text("[1, 2]")
    assert ckpt.latest_checkpoint(tmp_path, said.append) == older


@pytest.mark.parametrize(
    "tree",
    [
        {(0, 1): torch.ones(1)}, {1: torch.ones(1), "1": torch.ones(1)}, {None: torch.ones(1)}, {"__metadata__": torch.ones(1)},
        {"a": {True: torch.ones(1)}}, {"a": 3}, {"a": torch.ones(2, dtype=torch.complex128)}, {"a": torch.ones(2).to_sparse()},
        {"a": torch.ones(2, device="meta")},
    ],
    ids=["tuple", "1 and '1'", "None", "metadata", "bool", "number", "complex128", "sparse", "meta"],
)  # fmt: skip
def test_what_a_file_would_not_bring_back_is_refused_before_it_is_kept(tree: dict) -> None:
    """Fails when: `only_tensors` looks at values alone, and takes any tensor: the checkpoint is then whole and can't be loaded."""
    with pytest.raises(TypeError, match=r"run\.keep"):
        ckpt.only_tensors(tree, "run.keep")


def test_a_conjugate_view_is_kept_as_what_it_shows() -> None:
    """Fails when: the bytes of a lazily conjugated or negated tensor are written as they are."""
    plain = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensors, skeleton = ckpt.flatten({"conjugate": plain.conj(), "negative": plain.conj().imag})
    assert not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors.values())
    found = ckpt.unflatten(tensors, skeleton)
    assert found["conjugate"].tolist() == plain.conj().tolist()
    assert found["negative"].tolist() == [-3.0, -4.0]
