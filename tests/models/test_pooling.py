"""Embeddings of packed texts next to those of each text alone, and which models get packed rows."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, PreTrainedModel, RobertaConfig, RobertaModel

import toolkit as tk

VOCABULARY = 90
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0}
MODERN: dict[str, Any] = {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}


def groups(count: int = 7) -> list[dict[str, Any]]:
    """An anchor of few tokens, and one to three documents of up to 20."""
    numbers = np.random.default_rng(0)
    made = []
    for _ in range(count):
        sizes = [int(numbers.integers(1, 6)), *numbers.integers(1, 21, size=numbers.integers(1, 4)).tolist()]
        made.append({
            "input_ids": numbers.integers(3, VOCABULARY, size=sum(sizes)).tolist(), "text_tokens": sizes,
            "text_keys": numbers.integers(0, 2**40, size=len(sizes)).tolist(),
        })  # fmt: skip
    return made


def loaded(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    model.save_pretrained(folder)
    return tk.load_encoder(tk.ModelConfig(model=str(folder)), None).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("make", [lambda: BertModel(BertConfig(**SIZES, initializer_range=0.2)), lambda: ModernBertModel(ModernBertConfig(**MODERN, initializer_range=0.2))])
def test_packed_texts_have_the_embeddings_and_gradients_of_each_text_alone(make: Any, pooling: str, tmp_path: Path) -> None:
    """Embeddings to 1e-5, gradients of all weights to 1e-4 of their size; texts alone are rows without padding.

    Fails when: bounds[:-1] of the first token is bounds[1:], or positions go on from text to text.
    """
    torch.manual_seed(0)
    model = loaded(tmp_path, make())
    assert tk.choose_text_layout(model) == "packed"
    batch = tk.collate_text_groups(groups(), layout="packed")
    embed = partial(tk.embed_texts, pooling=pooling)
    found = embed(model, batch)
    wanted = torch.cat([embed(model, {"input_ids": text[None], "attention_mask": torch.ones_like(text)[None]}) for text in texts_of(batch)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad and "position" not in name]
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad((each * direction).sum(), [weight for _, weight in weights]) for each in (found, wanted)]
    for (name, _), ours, theirs in zip(weights, *gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-5, name


@pytest.mark.parametrize("targets", [["all-linear"], ["query", "dense"]])
def test_an_adapter_leaves_out_the_pooler_that_no_embedding_passes(targets: list[str], tmp_path: Path) -> None:
    """Fails when: a frozen pooler is a target: on two ranks DDP ends the run for want of its gradient."""
    model = loaded(tmp_path, BertModel(BertConfig(**SIZES)))
    adapted = tk.add_adapter(model, tk.AdapterConfig(use_peft=True, lora_target_modules=targets))
    tk.embed_texts(adapted, tk.collate_text_groups(groups(), layout="packed"), pooling="mean").sum().backward()
    trained = {name: weight.grad for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert any("encoder" in name for name in trained)
    assert [name for name, gradient in trained.items() if gradient is None] == []


def test_an_encoder_of_a_built_in_shape_gets_the_adapter_in_its_layers() -> None:
    """Its embeddings are trained whole, as a built-in decoder's are. Fails when: a model without a head counts as nothing but head."""
    config = tk.ModelConfig(model="tiny-bert", hidden_size=32, num_hidden_layers=2, vocab_size=300)
    model = tk.add_adapter(tk.load_encoder(config, tk.load_tokenizer(config)), tk.AdapterConfig(use_peft=True))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or "embeddings" in name for name in trained)
    assert {f"layer.{number}" for number in (0, 1)} <= {match[0] for name in trained if (match := re.search(r"layer\.\d", name))}
    assert not [name for name in trained if "pooler" in name]


def texts_of(batch: dict[str, Any]) -> list[torch.Tensor]:
    return list(batch["input_ids"][0].split(batch["cu_seq_lens_q"].diff().tolist()))


def test_both_layouts_hold_the_same_texts_and_say_the_same_of_them() -> None:
    """Fails when: texts of a packed row are in another order than `example` and `role`."""
    packed, padded = (tk.collate_text_groups(groups(), layout=layout) for layout in ("packed", "padded"))
    rows = [row[mask.bool()] for row, mask in zip(padded["input_ids"], padded["attention_mask"], strict=True)]
    assert [text.tolist() for text in texts_of(packed)] == [row.tolist() for row in rows]
    for name in ("example", "role", "text_key", "score"):
        assert torch.equal(packed[name], padded[name]), name


def test_a_model_whose_packed_rows_are_not_exact_gets_padded_ones(tmp_path: Path) -> None:
    """RoBERTa counts its positions from behind the padding's. Fails when: `load_encoder` takes packed=True or the layout is always packed."""
    model = loaded(tmp_path, RobertaModel(RobertaConfig(**{**SIZES, "pad_token_id": 1}, max_position_embeddings=40)))
    assert tk.choose_text_layout(model) == "padded"
