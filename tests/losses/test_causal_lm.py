"""The language-model loss against plain references: full logits in float64, transformers, TRL, one pass over everything."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)  # fmt: skip
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_pt_utils import LabelSmoother

from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.losses import chunked
from toolkit.losses.causal_lm import causal_lm_loss

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT2_SHAPE = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
Result = tuple[float, float, dict[str, torch.Tensor]]


def llama(**changes: Any) -> nn.Module:
    return made(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **changes}))


def made(model_class: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():  # far from a fresh start, where soft-caps and biases do nothing
        parameter.data.normal_(0.0, 0.3)
    return model


class CutVocabulary(LlamaForCausalLM):
    """A head padded beyond the vocabulary, cut after it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits[..., : VOCABULARY - 7]
        return outputs


class WithoutLogitsToKeep(LlamaForCausalLM):
    """A forward from before `logits_to_keep`, with logits that are scaled after the head."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden) * 0.7)


class TwoMatrices(nn.Module):
    """A head whose two weights get one and the same gradient tensor, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(VOCABULARY, SHAPE["hidden_size"]))
        self.second = nn.Parameter(torch.randn(VOCABULARY, SHAPE["hidden_size"]))
        self.bias = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.first + self.second, self.bias)


def llama_with_two_matrices() -> nn.Module:
    model = llama(tie_word_embeddings=False)
    model.lm_head = TwoMatrices()
    return model


def llama_with_borrowed_weights() -> nn.Module:
    """A head that computes with a parameter of another module."""
    model = llama(tie_word_embeddings=False)
    model.lm_head.forward = lambda hidden: functional.linear(hidden, model.lm_head.weight + model.model.embed_tokens.weight)
    return model


def llama_with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=3, target_modules=["q_proj", "lm_head"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(llama(tie_word_embeddings=False), settings)


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # how to make it, and whether its head can be replaced
    "llama": (partial(llama, tie_word_embeddings=False), True),
    "llama tied": (partial(llama, tie_word_embeddings=True), True),
    "gpt2": (lambda: made(GPT2LMHeadModel, GPT2Config(**GPT2_SHAPE)), True),
    "two matrices and a bias": (llama_with_two_matrices, True),
    "adapters on the head": (llama_with_adapters, True),
    "borrowed weights": (llama_with_borrowed_weights, False),
    "gemma2 soft-cap": (lambda: made(Gemma2ForCausalLM, Gemma2Config(**SHAPE, final_logit_softcapping=3.0)), False),
    "cohere scale": (lambda: made(CohereForCausalLM, CohereConfig(**SHAPE, logit_scale=0.3)), False),
    "granite scale": (lambda: made(GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=4.0)), False),
    "cut vocabulary": (lambda: made(CutVocabulary, LlamaConfig(**SHAPE)), False),
    "without logits_to_keep": (lambda: made(WithoutLogitsToKeep, LlamaConfig(**SHAPE)), False),
}  # fmt: skip


def documents(count: int = 7, vocabulary: int = VOCABULARY - 7) -> list[dict[str, list[int]]]:
    """Ragged documents of 2 to 12 tokens, about half of them supervised; one without any."""
    random_numbers = torch.Generator().manual_seed(3)
    made = []
    for i in range(count):
        length = 2 + (i * 7) % 11
        tokens = torch.randint(2, vocabulary, (length,), generator=random_numbers)
        hidden = torch.rand(length, generator=random_numbers) < (1.0 if i == 2 else 0.5)
        hidden[-1] = i == 2
        made.append({"input_ids": tokens.tolist(), "labels": tokens.masked_fill(hidden, -100).tolist(), "supervised_tokens": 1})
    return made


def totals_of(micro_batches: list[dict[str, Any]]) -> dict[str, float]:
    return {"tokens": float(sum((m["labels"][:, 1:] != -100).sum() for m in micro_batches))}


def inputs_of(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """What the model itself takes."""
    return {name: value for name, value in micro_batch.items() if name not in ("labels", "supervised_positions")}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ours(model: nn.Module, micro_batches: list[dict[str, Any]], **settings: float) -> Result:
    """Loss, token accuracy and gradients, summed over micro-batches."""
    model.zero_grad()
    totals, parts = totals_of(micro_batches), []
    for micro_batch in micro_batches:
        loss, metrics = causal_lm_loss(model, micro_batch, totals, **settings)
        loss.backward()
        parts.append((loss.item(), metrics["token_accuracy"].item()))
    return sum(loss for loss, _ in parts), sum(accuracy for _, accuracy in parts), gradients(model)


def plain(
    model: nn.Module, micro_batches: list[dict[str, Any]], label_smoothing_factor: float = 0.0, z_loss: float = 0.0
) -> Result:
    """The same by the book: all logits, a loop over tokens, one division at the end."""
    model.zero_grad()
    losses, right = [], 0
    for micro_batch in micro_batches:
        inputs = inputs_of(micro_batch)
        logits = model(**inputs).logits
        for row, labels in zip(logits, micro_batch["labels"], strict=True):
            for scores, label in zip(row, labels[1:], strict=False):
                if label == -100:
                    continue
                log_normalizer = torch.log(torch.exp(scores).sum())
                log_probabilities = scores - log_normalizer
                smooth = -log_probabilities.sum() / len(scores)
                nll = -log_probabilities[label]
                losses.append((1 - label_smoothing_factor) * nll + label_smoothing_factor * smooth + z_loss * log_normalizer**2)
                right += int(scores.argmax() == label)
    loss = torch.stack(losses).sum() / len(losses)
    loss.backward()
    return loss.item(), right / len(losses), gradients(model)


def assert_same_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        distance = (found[name].double() - gradient.double()).norm() / gradient.double().norm().clamp(min=1e-30)
        assert distance <= tolerance, f"{name}: {distance}"


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda vocabulary, device: 4)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1, "z_loss": 1e-2}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_those_of_full_logits_for_any_kind_of_head(
    name: str, settings: dict[str, float], dtype: torch.dtype, tolerance: float
) -> None:
    """Reference: a loop over tokens on the model's own logits, in the same type.

    Fails when: only the last chunk's gradient of the head is kept; a second tensor shared by two weights is not copied;
    a model that changes its logits is not recognized (`head_comes_last` returns True); the head's parameters are not
    checked against its graph ("borrowed weights").
    """
    model = MODELS[name][0]().to(dtype)
    micro_batch = collate_padded(documents())
    loss, accuracy, gradient = ours(model, [micro_batch], **settings)
    wanted_loss, wanted_accuracy, wanted = plain(model, [micro_batch], **settings)
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    assert accuracy == pytest.approx(wanted_accuracy, abs=1e-12)
    assert_same_gradients(gradient, wanted, tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_head_cannot_be_replaced_is_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """And the others never.

    Fails when: the pattern is compared in shape only; or the answer is not kept, and said again at each call.
    """
    model, replaceable = MODELS[name][0](), MODELS[name][1]
    for _ in range(2):
        causal_lm_loss(model, collate_padded(documents()), {"tokens": 1.0})
    messages = [record.message for record in caplog.records if record.name.startswith("toolkit")]
    assert len(messages) == (0 if replaceable else 1)
    assert all("held in memory" in message for message in messages)


class Sizes(TorchDispatchMode):
    """Notes the number of elements of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


@pytest.mark.usefixtures("chunks_of_four")
def test_no_tensor_ever_holds_the_logits_of_all_supervised_positions() -> None:
    """Counted over forward and backward: nothing is larger than a chunk's logits, or the head itself.

    Fails when: the head runs over all rows at once; or the logits of all chunks are concatenated.
    """
    model = llama(vocab_size=2003, hidden_size=8, intermediate_size=8)
    rows = [{"input_ids": list(range(2, 62))} for _ in range(4)]  # all supervised: P = 4 * 59
    micro_batch = collate_padded(rows)
    totals = totals_of([micro_batch])
    causal_lm_loss(model, micro_batch, totals)
    with Sizes() as sizes:
        causal_lm_loss(model, micro_batch, totals)[0].backward()
    assert sizes.largest <= 2003 * 8
    with torch.no_grad(), Sizes() as sizes:
        causal_lm_loss(model, micro_batch, totals)
    assert sizes.largest <= 2003 * 8


def test_a_soft_capped_model_never_builds_logits_at_unsupervised_positions() -> None:
    """Three supervised positions of 60: at most three columns of logits, for each row of the batch.

    Fails when: `logits_to_keep` is left out of the plain path.
    """
    model = made(Gemma2ForCausalLM, Gemma2Config(**{**SHAPE, "vocab_size": 2003}, final_logit_softcapping=3.0))
    labels = [-100] * 57 + [5, 6, 7]
    micro_batch = collate_padded([{"input_ids": list(range(2, 62)), "labels": labels, "supervised_tokens": 3}] * 2)
    causal_lm_loss(model, micro_batch, {"tokens": 6.0})
    with Sizes() as sizes:
        causal_lm_loss(model, micro_batch, {"tokens": 6.0})[0].backward()
    assert sizes.largest <= max(2 * 3 * 2003, 2003 * 16)


def test_label_smoothing_is_that_of_transformers() -> None:
    """Reference: transformers' LabelSmoother on full logits.

    Fails when: the second term is a sum over the vocabulary instead of a mean.
    """
    model, micro_batch = llama().double(), collate_padded(documents())
    inputs = inputs_of(micro_batch)
    wanted = LabelSmoother(0.2)({"logits": model(**inputs).logits}, micro_batch["labels"], shift_labels=True)
    loss, _, _ = ours(model, [micro_batch], label_smoothing_factor=0.2)
    assert loss == pytest.approx(wanted.item(), rel=1e-7)  # LabelSmoother adds up in float32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("micro", [1, 2, 3, 7])
@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_sum_over_micro_batches_is_the_whole_for_every_split_packed_and_padded(
    collate: Any, micro: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Reference: everything as one padded micro-batch, by a loop over tokens in float64. One split has no supervised token.

    Fails when: a micro-batch is divided by its own number of tokens.
    """
    wanted_loss, wanted_accuracy, wanted = plain(llama().double(), [collate_padded(documents())])
    pieces = [documents()[i : i + micro] for i in range(0, 7, micro)]
    loss, accuracy, gradient = ours(llama().to(dtype), [collate(piece) for piece in pieces])
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    assert accuracy == pytest.approx(wanted_accuracy, rel=1e-6)
    assert_same_gradients(gradient, wanted, tolerance)


def test_the_end_of_a_row_predicts_nothing() -> None:
    """Two rows whose first tokens carry labels: no row of the batch is predicted from the one above it.

    Fails when: labels are shifted over the flattened batch.
    """
    model, tokens = llama().double(), torch.arange(2, 14).view(2, 6)
    loss, _, _ = ours(model, [{"input_ids": tokens, "labels": tokens}])
    log_p = model(input_ids=tokens).logits.log_softmax(-1)
    wanted = [-log_p[b, t, tokens[b, t + 1]].item() for b in range(2) for t in range(5)]
    assert loss == pytest.approx(sum(wanted) / 10, rel=1e-10)


@pytest.mark.parametrize("name", ["llama", "llama tied", "adapters on the head", "gemma2 soft-cap", "without logits_to_keep"])
@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_without_a_supervised_token_the_loss_is_a_zero_that_reaches_every_parameter(name: str, collate: Any) -> None:
    """DDP and ZeRO wait for the gradient of each trainable parameter.

    Fails when: no chunk is computed for an empty set of positions; or the sum is divided by a total of 0.
    """
    model = MODELS[name][0]()
    micro_batch = collate([documents()[2]])
    loss, metrics = causal_lm_loss(model, micro_batch, {"tokens": 0.0})
    loss.backward()
    assert loss.item() == 0.0
    assert metrics["token_accuracy"].item() == 0.0
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert not parameter.grad.any(), parameter_name


@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_positions_found_by_the_collate_function_give_the_same_loss(collate: Any) -> None:
    """With `supervised_positions` in the micro-batch and without, where the loss looks for them.

    Fails when: either side means the positions of the labels themselves.
    """
    model, micro_batch = llama().double(), collate(documents())
    loss, _, gradient = ours(model, [micro_batch])
    micro_batch.pop("supervised_positions")
    found, _, wanted = ours(model, [micro_batch])
    assert loss == found
    assert_same_gradients(gradient, wanted, 0.0)


@pytest.mark.parametrize("head", ["autocast", "float32"])
def test_autocast_gives_the_gradient_of_full_logits_under_autocast(head: str) -> None:
    """bfloat16 on the CPU; a head that follows autocast and one that keeps itself out of it.

    Fails when: the head runs outside of autocast; the gradient is taken under autocast, which casts the products of a
    float32 head; gradients are rounded to bfloat16.
    """
    model, micro_batch = llama(tie_word_embeddings=False), collate_padded(documents())
    if head == "float32":

        def wide(hidden: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return functional.linear(hidden.float(), model.lm_head.weight)

        model.lm_head.forward = wide
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = causal_lm_loss(model, micro_batch, {"tokens": 1.0})
        logits = model(**inputs_of(micro_batch)).logits[:, :-1].flatten(0, 1)
        wanted = functional.cross_entropy(logits, micro_batch["labels"][:, 1:].flatten(), reduction="sum")
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(found, gradients(model), 1e-5)


def test_gradient_of_a_bfloat16_head_is_no_worse_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error of the head's gradient against float64, in one chunk and in chunks of one position.

    Fails when: chunks are added up in bfloat16 (the error grows fourfold).
    """
    rows = [{"input_ids": [3 + (i * j) % 80 for j in range(60)]} for i in range(8)]
    micro_batch = collate_padded(rows)
    _, _, wanted = ours(llama(tie_word_embeddings=False).to(torch.bfloat16).double(), [micro_batch])

    def error(size: int) -> float:
        monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda vocabulary, device: size)
        _, _, gradient = ours(llama(tie_word_embeddings=False).to(torch.bfloat16), [micro_batch])
        return float((gradient["lm_head.weight"].double() - wanted["lm_head.weight"]).norm())

    assert error(1) < 1.5 * error(1000)


@pytest.fixture
def model_in_training() -> nn.Module:
    model = llama(attention_dropout=0.5)
    model.train()
    model.model.norm.eval()  # a user froze it
    return model


def test_trying_the_head_out_leaves_random_numbers_and_modes_as_they_were(model_in_training: nn.Module) -> None:
    """Otherwise the first step of a resumed run would draw other numbers than that step of a run never interrupted.

    Fails when: the trial runs in training mode, or `model.train()` restores all modules alike.
    """
    modes = [module.training for module in model_in_training.modules()]
    micro_batch = collate_padded(documents())
    losses = []
    for _ in range(2):  # with the trial and without
        torch.manual_seed(5)
        losses.append(causal_lm_loss(model_in_training, micro_batch, {"tokens": 1.0})[0].item())
    assert losses[0] == losses[1]
    assert [module.training for module in model_in_training.modules()] == modes
    assert "forward" not in vars(model_in_training.lm_head)


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    """Fails when: the stored gradient is scaled in place twice."""
    loss, _ = causal_lm_loss(llama(), collate_padded(documents()), {"tokens": 10.0})
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


def test_loss_and_gradient_agree_with_trl(tmp_path: Any) -> None:
    """Reference: SFTTrainer's own collator and compute_loss on the same examples; ours padded and packed.

    Fails when: the labels are not shifted, or the first token of a document is predicted from the one before.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    examples = [{k: v for k, v in d.items() if k != "supervised_tokens"} for i, d in enumerate(documents()) if i != 2]
    settings = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False)
    trainer = SFTTrainer(
        model=llama(), args=settings, train_dataset=Dataset.from_list(examples), processing_class=tokenizer
    )  # fmt: skip
    micro_batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    tokens = (micro_batch["labels"][:, 1:] != -100).sum()
    trainer.model.zero_grad()
    wanted = trainer.compute_loss(trainer.model, dict(micro_batch), num_items_in_batch=tokens)
    wanted.backward()
    for collate in (collate_padded, collate_packed):
        loss, _, gradient = ours(llama(), [collate([{**row, "supervised_tokens": 1} for row in examples])])
        assert loss == pytest.approx(wanted.item(), rel=1e-6)
        assert_same_gradients(gradient, gradients(trainer.model), 2e-6)
