"""The reference of preference pairs: three ways to ask for the same numbers, computed once, and one that moves."""

import random
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

import toolkit as tk
from toolkit.config.reading import forget_reads, settings_read
from toolkit.distributed.compat import forget_process_state
from toolkit.losses.answer_logps import pair_logps
from toolkit.preference import reference_cache
from toolkit.preference.reference import build_reference, keep_reference, sync_reference

pytestmark = pytest.mark.usefixtures("own_cache")


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.PairsConfig, tk.ReferenceConfig, tk.PreferenceConfig, tk.OptimConfig,
    tk.RunConfig,
):  # fmt: skip
    vocab_size: int | None = 260
    hidden_size: int | None = 16
    num_hidden_layers: int | None = 1
    num_attention_heads: int | None = 2
    intermediate_size: int | None = 32
    max_length: int = 32
    per_device_train_batch_size: int = 2
    per_device_eval_batch_size: int = 3
    lora_r: int = 2


class Tokens:
    """What load_model asks of a tokenizer."""

    pad_token_id, eos_token_id, bos_token_id = 0, 1, None

    def __len__(self) -> int:
        return 260


def splits(rows: int = 10, held_out: int = 4, seed: int = 0) -> dict[str, Dataset]:
    random_numbers = np.random.default_rng(seed)
    made = []
    for i in range(rows + held_out):
        p, c, r = (int(n) for n in random_numbers.integers(1, 7, size=3))
        made.append({
            "input_ids": random_numbers.integers(2, 260, p + c + r).tolist(), "prompt_tokens": p, "chosen_tokens": c,
            "rejected_tokens": r, "length": p + c + r, "supervised_tokens": c + r, "pair": i,
        })  # fmt: skip
    return {"train": Dataset.from_list(made[:rows]), "validation": Dataset.from_list(made[rows:])}


def built(config: Config, data: Any = None) -> SimpleNamespace:
    forget_process_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if config.bf16 else "no")

    def make_model() -> Any:
        return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, Tokens(), packed=None), config)  # type: ignore[arg-type]

    model = make_model()
    train, evaluation = tk.build_dataloaders(data or splits(), partial(tk.collate_pairs, layout="shared"), config)
    reference = build_reference(accelerator, model, make_model, train, evaluation, config, config.ld_alpha)
    return SimpleNamespace(accelerator=accelerator, model=model, reference=reference, train=train, evaluation=evaluation)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pairs of each forward pass that the cache has made."""
    seen: list[int] = []

    def counted(model: Any, micro_batch: dict[str, Any], *more: Any) -> Any:
        seen.extend(micro_batch["pair"].tolist())
        return pair_logps(model, micro_batch, *more)

    monkeypatch.setattr(reference_cache, "pair_logps", counted)
    return seen


@pytest.mark.parametrize(("way", "flags"), [
    ("cache", {}), ("model", {}), ("cache", {"use_peft": True}), ("model", {"use_peft": True}), ("adapter", {"use_peft": True}),
    ("cache", {"use_peft": True, "init_lora_weights": "pissa"}), ("cache", {"dropout": 0.3}), ("cache", {"ld_alpha": 0.5}),
    ("model", {"ld_alpha": 0.5}),
], ids=str)  # fmt: skip
def test_every_way_gives_the_logps_of_the_model_as_training_starts(way: str, flags: dict[str, Any]) -> None:
    """Asked after the model has changed, for both splits. Fails when: dropout is on; the changed model is asked; ld_alpha is left
    out; a reference has no `__repr__` of its own."""
    config = Config(reference=way, **flags)
    run = built(config)
    assert (run.reference.way, repr(run.reference)) == (way, f"Reference({way})")
    batches = [batch.micro_batches[0] for loader in (run.train.batches(), iter(run.evaluation)) for batch in loader]
    run.model.eval()
    with torch.no_grad():
        expected = [pair_logps(run.model, batch, config.ld_alpha) for batch in batches]
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    run.model.train()
    for batch, wanted in zip(batches, expected, strict=True):
        found = run.reference(run.model, batch)
        assert torch.allclose(found.chosen, wanted.chosen, rtol=1e-5, atol=1e-5)
        assert torch.allclose(found.rejected, wanted.rejected, rtol=1e-5, atol=1e-5)
        assert not found.chosen.requires_grad
        assert torch.equal(found.chosen_tokens, batch["chosen_tokens"])
    assert len(batches) == 5 + 2
    assert run.model.training


def test_a_pair_is_computed_once_and_only_if_it_will_be_seen(forwards: list[int], own_cache: Path) -> None:
    """Fails when: rows that a short run never reaches are computed; a second run does not find the file; a damaged one is believed."""
    few = built(Config(max_steps=2))  # four of ten training pairs
    seen = [pair for batch in few.train.batches() for pair in batch.micro_batches[0]["pair"].tolist()]
    assert sorted(forwards) == sorted([*seen, 10, 11, 12, 13])
    forwards.clear()
    built(Config())
    assert sorted(forwards) == sorted(set(range(10)) - set(seen))
    forwards.clear()
    built(Config(num_train_epochs=3, learning_rate=1.0))
    assert forwards == []
    (file,) = own_cache.glob("reference-*.npy")
    file.write_bytes(file.read_bytes()[:-5])
    built(Config())
    assert sorted(forwards) == list(range(14))


def test_a_damaged_reference_is_computed_anew_with_one_line_that_names_it(forwards: list[int], own_cache: Path, capsys: Any) -> None:
    """Bits flipped, cut, emptied, exchanged, at seeded places: another reference would train to other weights without a word.

    Fails when: the digest behind the numbers is not compared; np.load alone finds 5 of these 29.
    """

    def table() -> torch.Tensor:
        run, counts = built(Config()), torch.zeros(14)
        found = run.reference(run.model, {"pair": torch.arange(14), "chosen_tokens": counts, "rejected_tokens": counts})
        return torch.stack([found.chosen, found.rejected])

    whole = table()
    (file,) = own_cache.glob("reference-*.npy")
    content, chance = file.read_bytes(), random.Random(0)
    damaged = [content[: chance.randrange(len(content))] for _ in range(5)]
    damaged += [b"", content + b"\0", content[:-19], content.replace(content[128:136], content[136:144], 1)]
    for _ in range(20):
        bit, flipped = chance.randrange(8 * len(content)), bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for number, bad in enumerate([*damaged, None]):
        file.unlink()
        file.mkdir() if bad is None else file.write_bytes(bad)
        forwards.clear()
        capsys.readouterr()
        assert torch.equal(table(), whole), number
        said = [line for line in capsys.readouterr().out.splitlines() if "is damaged (" in line]
        assert len(said) == 1, number
        assert str(file) in said[0]
        assert sorted(forwards) == list(range(14))
        assert file.read_bytes() == content


@pytest.mark.parametrize("change", [
    {"seed": 1}, {"hidden_size": 24}, {"ld_alpha": 0.5}, {"bf16": True}, {"use_peft": True}, {"dtype": "bfloat16"}, "data",
    pytest.param({"fp8": "rowwise"}, marks=pytest.mark.skipif(find_spec("torchao") is None, reason="make test-float8")),
], ids=str)  # fmt: skip
def test_another_model_precision_or_data_is_computed_anew(change: Any, forwards: list[int]) -> None:
    """Fails when: what changes is left out of the key."""
    built(Config())
    forwards.clear()
    built(Config(), splits(seed=1)) if change == "data" else built(Config(**change))
    assert sorted(forwards) == list(range(14))


def test_another_directory_of_weights_is_another_reference(tmp_path: Path, forwards: list[int]) -> None:
    """Fails when: a directory counts by its name."""
    config = Config(vocab_size=None, hidden_size=None, num_hidden_layers=None, num_attention_heads=None, intermediate_size=None)
    made = tk.load_model("AutoModelForCausalLM", Config(), Tokens())  # type: ignore[arg-type]
    made.save_pretrained(tmp_path / "model")
    built(replace(config, model=str(tmp_path / "model")))
    forwards.clear()
    built(replace(config, model=str(tmp_path / "model")))
    assert forwards == []
    with torch.no_grad():
        made.lm_head.weight.mul_(2)
    made.save_pretrained(tmp_path / "model")
    built(replace(config, model=str(tmp_path / "model")))
    assert sorted(forwards) == list(range(14))


def test_another_base_under_an_adapter_is_another_reference(tmp_path: Path, forwards: list[int]) -> None:
    """The adapter's own files stay as they are. Fails when: only these are in the key, and not those of the base they name."""
    shape = {"vocab_size": None, "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "intermediate_size": None}
    config = Config(**shape, model=str(tmp_path / "base"), use_peft=True, output_dir=str(tmp_path / "run"))
    made = tk.load_model("AutoModelForCausalLM", Config(), Tokens())  # type: ignore[arg-type]
    made.save_pretrained(tmp_path / "base")
    adapted = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, Tokens()), config)  # type: ignore[arg-type]
    adapted.save_pretrained(tmp_path / "adapter")
    further = replace(config, model=str(tmp_path / "adapter"))
    built(further)
    forwards.clear()
    built(further)
    assert forwards == []
    with torch.no_grad():
        made.lm_head.weight.mul_(2)
    made.save_pretrained(tmp_path / "base")
    built(further)
    assert sorted(forwards) == list(range(14))


def test_work_that_was_cut_off_goes_on_where_it_was_written(monkeypatch: pytest.MonkeyPatch, forwards: list[int]) -> None:
    """Fails when: nothing is written before the end."""
    monkeypatch.setattr(reference_cache, "SECONDS_BETWEEN_WRITES", -1.0)
    counted = reference_cache.pair_logps

    def dies(*arguments: Any) -> Any:
        if len(forwards) >= 18 * 3:
            raise KeyboardInterrupt
        return counted(*arguments)

    monkeypatch.setattr(reference_cache, "pair_logps", dies)
    data = splits(rows=60)
    with pytest.raises(KeyboardInterrupt):
        built(Config(), data)
    done = set(forwards[: 16 * 3])  # written after sixteen batches of three
    forwards.clear()
    monkeypatch.setattr(reference_cache, "pair_logps", counted)
    built(Config(), data)
    assert set(forwards) == set(range(64)) - done


@pytest.mark.parametrize(("flags", "way"), [
    ({}, "cache"), ({"use_peft": True}, "cache"), ({"sync_ref_model": True}, "model"), ({"loss_type": ["simpo", "sft"]}, "none"),
    ({"loss_type": ["simpo", "ipo"]}, "cache"),
], ids=str)  # fmt: skip
def test_the_cheapest_exact_way_is_the_default(flags: dict[str, Any], way: str) -> None:
    """Fails when: a loss without a reference pays for one."""
    assert built(Config(**flags)).reference.way == way


@pytest.mark.parametrize(("flags", "reason"), [
    ({}, "there is no adapter"),
    ({"use_peft": True, "init_lora_weights": "pissa"}, "--init-lora-weights pissa"),
])  # fmt: skip
def test_turning_the_adapter_off_is_refused_where_that_is_another_model(flags: dict[str, Any], reason: str) -> None:
    """Fails when: an initialization that moves the frozen weights is let through."""
    with pytest.raises(tk.Refusal, match=f"--reference adapter: {reason}"):
        built(Config(reference="adapter", **flags))


def test_a_reference_in_bfloat16_follows_in_steps_that_bfloat16_cannot_add() -> None:
    """Forty syncs of a thousandth, and after a resume and a rollback what a checkpoint has kept, which is no rounded weight.

    Fails when: the mixture is made in the type of the weights, or the model doesn't get what was put back.
    """
    config = Config(dtype="bfloat16", sync_ref_model=True, ref_model_mixup_alpha=1e-3, ref_model_sync_steps=1)
    run = built(config)
    kept: dict[str, torch.Tensor] = {}
    state = SimpleNamespace(step=0, kept=kept, keep=kept.__setitem__, saver=SimpleNamespace(on_rollback=[]))
    expected = {name: p.detach().double() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    for step in range(1, 42):
        state.step = step
        sync_reference(state, run.reference, run.model, config)
    for name, parameter in run.model.named_parameters():
        expected[name] = torch.lerp(parameter.detach().double(), expected[name], 0.999**40)
    for name, parameter in run.reference.frozen.named_parameters():
        assert torch.allclose(kept[f"reference.{name}"].double(), expected[name], rtol=1e-5, atol=1e-5), name
        assert torch.equal(parameter, kept[f"reference.{name}"].bfloat16())
    for tensor in kept.values():
        tensor.add_(0.5)  # as a rollback puts its own back
    for put_back in state.saver.on_rollback:
        put_back()
    again = built(config)
    state = SimpleNamespace(step=42, kept=dict(kept), keep=lambda *_: None, saver=SimpleNamespace(on_rollback=[]))
    keep_reference(state, again.reference, config)
    for frozen in (run.reference.frozen, again.reference.frozen):
        for name, parameter in frozen.named_parameters():
            assert torch.equal(parameter, kept[f"reference.{name}"].bfloat16())


def test_a_synced_reference_is_the_stated_mixture_and_comes_back_after_a_resume() -> None:
    """Steps 1 to 5, synced before 3 and 5. Fails when: the shares are swapped; it is synced after each step; a resume starts over;
    its settings are not read in the first step, after which a run warns of those that nothing has read."""
    config = Config(sync_ref_model=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=2)
    run = built(config)
    kept: dict[str, torch.Tensor] = {}
    state = SimpleNamespace(step=0, kept=kept, keep=kept.__setitem__, saver=SimpleNamespace(on_rollback=[]))
    expected = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    forget_reads(config)
    for step in range(1, 6):
        state.step = step
        sync_reference(state, run.reference, run.model, config)
        assert {"ref_model_mixup_alpha", "ref_model_sync_steps"} <= settings_read(config)
        if step in (3, 5):
            for name, parameter in run.model.named_parameters():
                expected[name] = 0.25 * parameter.detach() + 0.75 * expected[name]
        for name, parameter in run.reference.frozen.named_parameters():
            assert torch.allclose(parameter, expected[name], rtol=1e-6, atol=1e-7), (step, name)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(0.1)
    again = built(config)
    saved = {name: tensor.clone() for name, tensor in kept.items()}
    state = SimpleNamespace(step=5, kept=saved, keep=saved.__setitem__, saver=SimpleNamespace(on_rollback=[]))
    keep_reference(state, again.reference, config)
    for name, parameter in again.reference.frozen.named_parameters():
        assert torch.equal(parameter, kept[f"reference.{name}"])
    state.step = 6
    sync_reference(state, again.reference, again.model, config)
    for name, parameter in again.reference.frozen.named_parameters():
        assert torch.equal(parameter, kept[f"reference.{name}"])
