"""The loss of encoder-decoders against their own `labels=` and against a plain loop, for each family's real configuration."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate import collate_seq2seq
from toolkit.losses import chunked, selective_head
from toolkit.losses.seq2seq import seq2seq_loss, seq2seq_metrics
from toolkit.models.encoder_decoder import decoder_start
from toolkit.training.evaluation import eval_with_gather

VOCABULARY, PAD, END = 61, 1, 2
SMALL = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "pad_token_id": PAD, "eos_token_id": END, "scale_embedding": True,
}  # fmt: skip
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}

# What the decoder reads first (None: the target's last token), and a model of the family at small width.
FAMILIES: dict[str, tuple[int | None, Callable[[], PreTrainedModel]]] = {
    "t5": (0, lambda: T5ForConditionalGeneration(T5Config(**T5, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))),
    "flan-t5": (0, lambda: T5ForConditionalGeneration(T5Config(
        **T5, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ))),
    "bart": (END, lambda: BartForConditionalGeneration(BartConfig(**SMALL, decoder_start_token_id=END))),
    "mbart": (None, lambda: MBartForConditionalGeneration(MBartConfig(**SMALL))),
    "pegasus": (0, lambda: PegasusForConditionalGeneration(PegasusConfig(**SMALL | {"pad_token_id": 0}, decoder_start_token_id=0))),
    "marian": (60, lambda: MarianMTModel(MarianConfig(**SMALL | {"pad_token_id": 60}, decoder_start_token_id=60))),
    "nllb": (END, lambda: M2M100ForConditionalGeneration(M2M100Config(**SMALL, decoder_start_token_id=END))),
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """With a bias on its logits, as Marian's checkpoints have one, and an embedding apart from its start."""
    torch.manual_seed(0)
    model = FAMILIES[family][1]().to(dtype).train()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias = torch.randn(1, VOCABULARY, dtype=dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3.0)
    return model


def documents(examples: int = 12) -> list[dict[str, Any]]:
    """Sources and targets of unlike lengths, the targets in the language token 50 and ended."""
    draw = np.random.default_rng(1)
    found = []
    for _ in range(examples):
        source, target = (draw.integers(5, 45, draw.integers(low, high)) for low, high in ((2, 14), (1, 9)))
        found.append({"input_ids": np.concatenate([source, [END], target, [END, 50]]), "source_tokens": len(source) + 1})
    return found


def collate_for(model: PreTrainedModel) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    return partial(
        collate_seq2seq, pad_token_id=int(model.config.pad_token_id or 0), decoder_start_token_id=decoder_start(model)
    )


def tokens_of(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["input_ids"]) - row["source_tokens"] for row in rows)


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_the_models_own_labels(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In chunks of 7 rows, so that no call of the head sees all of them. Float64; the largest difference seen is 3e-16.

    Fails when: a family's decoder begins with another token; the bias of BART's logits is left out; the head's input is not
    scaled as T5 does.
    """
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda vocabulary, device: 7)
    model = model_of(family)
    micro_batch = collate_for(model)(documents())
    assert decoder_start(model) == FAMILIES[family][0]
    largest: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, given: largest.append(given[0].shape[0] * given[0].shape[1]))
    loss, metrics = seq2seq_loss(model, micro_batch, {"tokens": tokens_of(documents())})
    found = gradients(model, loss)
    assert "logits" not in caplog.text  # the head ran at the target's positions alone

    reference = model(
        input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"], labels=micro_batch["labels"]
    )
    wanted = gradients(model, reference.loss)
    right = (reference.logits.argmax(-1) == micro_batch["labels"]).sum() / tokens_of(documents())
    torch.testing.assert_close(loss.detach(), reference.loss.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(metrics["token_accuracy"].to(right.dtype), right)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", ["t5", "bart", "mbart"])
def test_every_split_of_the_global_batch_has_the_loss_and_gradient_of_torch_on_the_whole(
    family: str, dtype: torch.dtype, most: float
) -> None:
    """1 x 12, 3 x 4, and 5, 1, 6 examples, with label smoothing; the reference takes one example at a time, without padding.

    Fails when: a micro-batch is divided by its own number of tokens; padding is attended to; smoothing is left out.
    """
    rows, smoothing = documents(), 0.1
    model = model_of(family, dtype)
    total = tokens_of(rows)
    expected = torch.zeros((), dtype=dtype)
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        source, target = ids[: row["source_tokens"]][None], ids[row["source_tokens"] :][None]
        logits = model(input_ids=source, labels=target).logits[0]
        expected = expected + torch.nn.functional.cross_entropy(logits, target[0], reduction="sum", label_smoothing=smoothing)
    wanted, expected = gradients(model, expected / total), expected.detach() / total
    for cuts in ([12], [4, 8], [5, 6]):
        pieces = np.split(np.arange(12), cuts)
        parts = [collate_for(model)([rows[i] for i in piece]) for piece in pieces if len(piece)]
        losses = [seq2seq_loss(model, part, {"tokens": total}, label_smoothing_factor=smoothing)[0] for part in parts]
        loss = torch.stack(losses).sum()
        assert abs(float(loss) - float(expected)) < most
        found = gradients(model, loss)
        assert all(float((found[name] - wanted[name]).abs().max()) < most for name in wanted)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("examples", [1, 7, 97])
def test_evaluation_is_that_of_one_example_at_a_time(examples: int, size: int) -> None:
    """Fails when: means of micro-batches are averaged; labels of padding count."""
    rows, model = documents(examples), model_of("bart").eval()
    nll = right = 0.0
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        target = ids[row["source_tokens"] :]
        with torch.no_grad():
            logits = model(input_ids=ids[: row["source_tokens"]][None], labels=target[None]).logits[0]
        nll += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
        right += int((logits.argmax(-1) == target).sum())
    pieces = [list(range(start, min(start + size, examples))) for start in range(0, examples, size)]
    loader = [Batch([collate_for(model)([rows[i] for i in piece])], {}, [True], indices=[piece]) for piece in pieces]
    found = eval_with_gather(Accelerator(cpu=True), model, loader, seq2seq_metrics, prefix="")
    assert found["loss"] == pytest.approx(nll / tokens_of(rows), abs=1e-12)
    assert found["token_accuracy"] == right / tokens_of(rows)
    assert found["perplexity"] == pytest.approx(np.exp(nll / tokens_of(rows)), rel=1e-12)


def test_a_bias_on_the_logits_is_where_it_was_afterwards() -> None:
    """Also when the forward pass fails. Fails when: the bias is not put back."""
    model = model_of("bart")
    bias = model.final_logits_bias
    micro_batch = collate_for(model)(documents(2))
    seq2seq_loss(model, micro_batch, {"tokens": 1})
    assert model.final_logits_bias is bias
    inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    with pytest.raises(ZeroDivisionError):
        selective_head.at_positions(model, inputs, torch.arange(2), lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    assert model.final_logits_bias is bias


def test_a_model_whose_decoder_reads_something_else_is_refused() -> None:
    """Fails when: what the model makes of two targets is not looked at."""
    odd = SimpleNamespace(config=None, prepare_decoder_input_ids_from_labels=lambda labels: labels)
    with pytest.raises(Refusal, match="shifted by one"):
        decoder_start(odd)  # type: ignore[arg-type]
    unset = T5ForConditionalGeneration(T5Config(**T5, pad_token_id=0, eos_token_id=1))
    unset.config.decoder_start_token_id = None
    with pytest.raises(Refusal, match="decoder_start_token_id"):
        decoder_start(unset)
