"""The loss of spans against transformers' own and a plain loop over windows, however the global batch is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.data.loading.collate import collate_windows
from toolkit.losses.classification import question_answering_loss

WINDOWS = 12


def windows(lengths: list[int]) -> list[dict[str, Any]]:
    """Of these lengths; the answer of every third is elsewhere."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i, length in enumerate(lengths):
        first = 0 if i % 3 == 0 else 4 + i % 2
        made.append({
            "input_ids": torch.randint(5, 50, (length,), generator=generator).tolist(), "start_positions": first,
            "end_positions": first + (first > 0), "window": 0, "context_start": 4, "char_starts": list(range(length - 5)),
            "char_ends": list(range(1, length - 4)), "token_type_ids": [0] * 4 + [1] * (length - 4),
        })  # fmt: skip
    return made


RAGGED = [7, 19, 8, 30, 7, 11, 25, 9, 16, 7, 22, 13]


@pytest.fixture
def model() -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.5,
    )  # fmt: skip
    return BertForQuestionAnswering(config)


def gradient(model: nn.Module, losses: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def parts(model: nn.Module, rows: list[dict[str, Any]], sizes: list[int]) -> list[torch.Tensor]:
    losses, at = [], 0
    for size in sizes:
        losses.append(question_answering_loss(model, collate_windows(rows[at : at + size]), {"examples": float(len(rows))})[0])
        at += size
    assert at == len(rows)
    return losses


def one_by_one(model: nn.Module, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    """transformers' own loss of each window alone, where nothing is padded."""
    names = ("input_ids", "token_type_ids", "start_positions", "end_positions")
    return [model(**{name: torch.tensor([row[name]]) for name in names}).loss / len(rows) for row in rows]


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [1] * 12, [5, 1, 6], [7, 5]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"])
def test_loss_and_gradient_are_those_of_windows_one_by_one(
    model: nn.Module, sizes: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    """Windows of 7 to 30 tokens.

    Fails when: padding is left in the softmax, as in transformers' batches; a micro-batch is divided by its own size.
    """
    model.to(dtype)
    rows = windows(RAGGED)
    loss, grad = gradient(model, parts(model, rows, sizes))
    wanted, wanted_grad = gradient(model, one_by_one(model, rows))
    assert loss == pytest.approx(wanted, rel=tolerance)
    assert (grad - wanted_grad).norm() / wanted_grad.norm() < tolerance


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_decoder_has_the_loss_of_windows_one_by_one_too(kind: str) -> None:
    """Whose decoder reads the window once more: padding behind it changes nothing. In float64 to 1e-10.

    Fails when: padding is left in the softmax.
    """
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    torch.manual_seed(0)
    shared = {"vocab_size": 50, "d_model": 16, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes: dict[str, Any] = {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    if kind == "bart":
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0,
                 "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, "init_std": 0.5}  # fmt: skip
    model = AutoModelForQuestionAnswering.from_config(AutoConfig.for_model(kind, **shared, **sizes)).double()
    rows = [{name: value for name, value in row.items() if name != "token_type_ids"} for row in windows(RAGGED)]
    wanted, wanted_grad = gradient(model, [
        model(**{name: torch.tensor([row[name]]) for name in ("input_ids", "start_positions", "end_positions")}).loss / len(rows)
        for row in rows
    ])  # fmt: skip
    for sizes_of in ([12], [4, 4, 4], [5, 1, 6]):
        loss, grad = gradient(model, parts(model, rows, sizes_of))
        assert loss == pytest.approx(wanted, rel=1e-10)
        assert (grad - wanted_grad).norm() / wanted_grad.norm() < 1e-10


def test_without_padding_it_is_the_loss_of_transformers_with_padding_it_is_not(model: nn.Module) -> None:
    """12 windows of 20 tokens give transformers' loss of the batch, to 1e-6; ragged ones differ from it by 1 % and more, which is why
    padding is masked.

    Fails when: only context tokens are in the softmax.
    """

    def both(rows: list[dict[str, Any]]) -> tuple[float, float]:
        batch = collate_windows(rows)
        names = ("input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions")
        its = model(**{name: batch[name] for name in names}).loss.item()
        return question_answering_loss(model, batch, {"examples": float(WINDOWS)})[0].item(), its

    ours, its = both(windows([20] * WINDOWS))
    assert ours == pytest.approx(its, rel=1e-6)
    ours, its = both(windows(RAGGED))
    assert abs(ours - its) / its > 0.01


def test_accuracy_is_the_share_of_windows_with_both_places_right(model: nn.Module) -> None:
    """Fails when: one of the two places is enough."""
    rows = windows(RAGGED)
    with torch.no_grad():
        for i, row in enumerate(rows):
            output = model(input_ids=torch.tensor([row["input_ids"]]), token_type_ids=torch.tensor([row["token_type_ids"]]))
            row["start_positions"] = int(output.start_logits.argmax())
            row["end_positions"] = int(output.end_logits.argmax()) if i % 4 else 1 - min(int(output.end_logits.argmax()), 1)
        _, metrics = question_answering_loss(model, collate_windows(rows), {"examples": float(WINDOWS)})
    assert metrics["accuracy"].item() == pytest.approx(9 / 12)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("kind", "layout"), [("bert", "packed"), ("electra", "packed"), ("ernie", "packed"), ("t5", "padded")])
def test_windows_without_padding_have_the_loss_and_the_gradient_of_padded_ones(
    tmp_path: Path, kind: str, layout: str, adapted: bool
) -> None:
    """Of a proven type, of others that are tried when they are loaded, and of one that can't be packed. In float64 to 1e-10.

    Fails when: the tried logits are compared on padding too, `_try` knows no head but one of `logits`, or the body doesn't get
    the places of the tokens.
    """
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, vocab_size=50, pad_token_id=0, **sizes)
    AutoModelForQuestionAnswering.from_config(made).save_pretrained(tmp_path)
    config = tk.ModelConfig(model=str(tmp_path), dropout=0.0, attention_dropout=None if kind == "t5" else 0.0)
    model = tk.load_model("AutoModelForQuestionAnswering", config, packed=None, num_labels=2)
    model = tk.add_adapter(model, tk.AdapterConfig(use_peft=adapted, init_lora_weights="gaussian"))
    assert tk.choose_row_layout(model) == layout
    model = model.double()
    rows = [{name: value for name, value in row.items() if kind != "t5" or name != "token_type_ids"} for row in windows(RAGGED)]

    def of(layout: str) -> tuple[float, torch.Tensor]:
        return gradient(model, [question_answering_loss(model, collate_windows(rows, layout=layout), {"examples": 12.0})[0]])

    (loss, grad), (wanted, wanted_grad) = of(layout), of("padded")
    assert loss == pytest.approx(wanted, rel=1e-10)
    assert (grad - wanted_grad).norm() / wanted_grad.norm() < 1e-10


def test_an_adapter_does_not_keep_token_types_from_the_model(tmp_path: Path, model: Any) -> None:
    """Whose first update is none: it answers as the model does. Fails when: peft's class for this task drops them."""
    model.save_pretrained(tmp_path)
    batch = collate_windows(windows(RAGGED))
    alone = tk.load_model("AutoModelForQuestionAnswering", tk.ModelConfig(model=str(tmp_path), dropout=0.0), num_labels=2)
    expected = question_answering_loss(alone, batch, {"examples": 12.0})[0].item()
    adapted = tk.add_adapter(alone, tk.AdapterConfig(use_peft=True))
    assert question_answering_loss(adapted, batch, {"examples": 12.0})[0].item() == pytest.approx(expected, rel=1e-6)
    batch["token_type_ids"] = torch.zeros_like(batch["token_type_ids"])
    assert question_answering_loss(adapted, batch, {"examples": 12.0})[0].item() != pytest.approx(expected, rel=1e-3)
