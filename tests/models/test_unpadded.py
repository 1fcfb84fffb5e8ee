"""Rows computed without their padding next to padded rows in transformers' own model with torch's attention.

Each test names the one-line change under which it was seen to fail.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.losses.classification import classification_loss, multi_label_loss, regression_loss

VOCABULARY, PAD = 90, 1
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.2, "max_position_embeddings": 40}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, pad_token_id=PAD, n_embd=32, n_layer=2, n_head=4, n_positions=40, initializer_range=0.2, bos_token_id=2, eos_token_id=3, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0),
    "bert": lambda: transformers.BertConfig(**SIZES, **QUIET),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, **QUIET),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES, **QUIET),
    "modernbert": lambda: transformers.ModernBertConfig(**MODERN),
    "modernbert, mean": lambda: transformers.ModernBertConfig(**MODERN, classifier_pooling="mean"),
    "distilbert": lambda: transformers.DistilBertConfig(vocab_size=VOCABULARY, pad_token_id=PAD, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=40, initializer_range=0.2, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0),
}  # fmt: skip
LOSSES: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "single_label": (classification_loss, lambda i: i % 3),
    "multi_label": (multi_label_loss, lambda i: [i % 2, 1, int(i > 3)]),
    "regression": (regression_loss, lambda i: i / 3 - 1),
}


def both(name: str, folder: Path, dtype: torch.dtype, head: str = "AutoModelForSequenceClassification", **settings: Any) -> tuple[Any, Any]:
    """A model as a recipe loads it, and transformers' own with the same weights; no dropout."""
    torch.manual_seed(0)
    config = MODELS[name]()
    for field, value in {"num_labels": 3, "classifier_dropout": 0.0, **settings}.items():
        setattr(config, field, value)
    auto = getattr(transformers, head)
    auto.from_config(config).to(dtype).save_pretrained(folder)
    ours = tk.load_model(head, tk.ModelConfig(model=str(folder), dtype="auto"), None, packed=None)
    return ours, auto.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).train()


def examples(label: Callable[[int], Any], kinds: bool) -> list[dict[str, Any]]:
    """Of 1 to 19 tokens; with token types where the model has them, and with the weights of their classes."""
    numbers, made = np.random.default_rng(0), []
    for i, length in enumerate([5, 1, 19, 9, 14, 2, 11]):
        row = {"input_ids": numbers.integers(4, VOCABULARY, size=length), "labels": label(i), "weight": 1.0 + i % 3}
        made.append(row | ({"token_type_ids": (np.arange(length) > length // 2).astype(np.int64)} if kinds else {}))
    return made


def gradient(model: Any, loss_fn: Any, micro_batches: list[dict[str, Any]], totals: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and all gradients in one vector, both sums over micro-batches."""
    model.zero_grad()
    losses = [loss_fn(model, micro_batch, totals)[0] for micro_batch in micro_batches]
    for loss in losses:
        loss.backward()
    found = [(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in model.parameters() if each.requires_grad]
    return torch.stack(losses).sum().detach(), torch.cat(found)


def assert_equal(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], tolerance: float | None = None) -> None:
    tolerance = tolerance or (1e-10 if expected[0].dtype == torch.float64 else 1e-5)
    assert abs(found[0] - expected[0]) <= tolerance * abs(expected[0])
    assert (found[1] - expected[1]).norm() <= tolerance * expected[1].norm()


@pytest.mark.parametrize(("name", "problem", "dtype"), [
    *[(name, "single_label", torch.float64) for name in MODELS],
    ("llama", "single_label", torch.float32), ("bert", "single_label", torch.float32), ("bert", "multi_label", torch.float64),
    ("modernbert", "regression", torch.float64),
])  # fmt: skip
def test_loss_and_gradient_are_those_of_padded_rows_for_every_split(name: str, problem: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Fails when: `token_places` are counted from 1; the pooler's output is left that of the row's first token (bert);
    `numbering` is None (roberta); `token_type_ids` is not in `_OF_TOKENS` (bert)."""
    loss_fn, label = LOSSES[problem]
    model, plain = both(name, tmp_path, dtype, num_labels=1 if problem == "regression" else 3)
    assert tk.choose_row_layout(model) == "packed"
    rows = examples(label, kinds=name == "bert")
    totals = {"examples": len(rows), "weight": sum(row["weight"] for row in rows)}
    expected = gradient(plain, loss_fn, [tk.collate_padded(rows, PAD)], totals)
    for size in (7, 3, 1):
        batches = [tk.collate_padded(rows[at : at + size], PAD, layout="packed") for at in range(0, len(rows), size)]
        assert_equal(gradient(model, loss_fn, batches, totals), expected)


def test_no_position_of_padding_is_computed(tmp_path: Path) -> None:
    """Fails when: the body's hook passes the padded rows on."""
    model, _ = both("bert", tmp_path, torch.float32)
    layout, seen = tk.choose_row_layout(model), []
    model.bert.encoder.layer[0].register_forward_pre_hook(lambda layer, states: seen.append(states[0].shape[:2].numel()))
    rows = examples(lambda i: i % 3, kinds=True)
    classification_loss(model, tk.collate_padded(rows, PAD, layout=layout), {"examples": 7, "weight": 1})
    assert seen == [sum(len(row["input_ids"]) for row in rows)]


def pairs() -> list[dict[str, Any]]:
    """Prompts of 3 to 7 tokens, answers of 1 to 9."""
    numbers, made = np.random.default_rng(0), []
    for sizes in [(3, 4, 9), (7, 1, 2), (5, 6, 6), (4, 8, 1)]:
        named = dict(zip(("prompt_tokens", "chosen_tokens", "rejected_tokens"), sizes, strict=True))
        made.append({"input_ids": numbers.integers(4, VOCABULARY, size=sum(sizes)), "pair": len(made), "margin": 0.5 * len(made), **named})
    return made


@pytest.mark.parametrize(("name", "layout"), [("llama", "shared"), ("llama", "packed"), ("qwen3", "shared"), ("gpt2", "shared"), ("bert", "packed")])
def test_rewards_of_pairs_have_the_gradient_of_padded_rows(name: str, layout: str, tmp_path: Path) -> None:
    """Fails when: places of rejected answers' tokens are those in the chosen rows (`row % pairs * longest`)."""
    model, plain = both(name, tmp_path, torch.float64, num_labels=1)
    assert tk.choose_scored_pair_layout(model) == ("packed" if name == "bert" else "shared")
    loss_fn = partial(tk.reward_loss, center_rewards_coefficient=0.1, margin_coefficient=1.0)
    rows, totals = pairs(), {"pairs": 4.0}
    expected = gradient(plain, loss_fn, [tk.collate_scored_pairs(rows, pad_token_id=PAD)], totals)
    for size in (4, 3, 1):
        batches = [tk.collate_scored_pairs(rows[at : at + size], layout=layout, pad_token_id=PAD) for at in range(0, 4, size)]
        # Llama's norms are in float32 whatever the weights are, and a shared prompt's see the sum of two gradients
        assert_equal(gradient(model, loss_fn, batches, totals), expected, 1e-6 if layout == "shared" and name != "gpt2" else 1e-10)


def test_tags_have_the_gradient_of_padded_rows(tmp_path: Path) -> None:
    """A head that reads every token. Fails when: hidden states are put back with `token_places` reversed."""
    model, plain = both("roberta", tmp_path, torch.float64, "AutoModelForTokenClassification")
    rows = examples(lambda i: i, kinds=False)
    for row in rows:
        row |= {"labels": row["input_ids"] % 3, "supervised_tokens": len(row["input_ids"])}
    collate = partial(tk.collate_padded, pad_token_id=PAD, aligned=True)
    totals = {"tokens": float(sum(row["supervised_tokens"] for row in rows))}
    batch = collate(rows, layout=tk.choose_row_layout(model))
    assert_equal(gradient(model, tk.token_classification_loss, [batch], totals), gradient(plain, tk.token_classification_loss, [collate(rows)], totals))


def test_an_adapter_with_a_trained_head_has_the_gradient_of_padded_rows(tmp_path: Path) -> None:
    """Fails when: `body_of` looks at the model with its adapter, whose body is not apart, and rows stay padded."""
    model, _ = both("llama", tmp_path, torch.float64)
    model = tk.add_adapter(model, tk.AdapterConfig(use_peft=True, lora_r=4)).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first, and with it the gradient of lora_A
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    assert any("modules_to_save" in name for name, weight in model.named_parameters() if weight.requires_grad)
    rows = examples(lambda i: i % 3, kinds=False)
    totals = {"examples": 7.0, "weight": 10.0}
    expected = gradient(model, classification_loss, [tk.collate_padded(rows, PAD)], totals)
    layout = tk.choose_row_layout(model)
    assert layout == "packed"
    found = gradient(model, classification_loss, [tk.collate_padded(rows, PAD, layout=layout)], totals)
    assert_equal(found, expected)


def test_metrics_of_an_evaluation_are_those_of_padded_rows(tmp_path: Path) -> None:
    """Fails when: `collate_padded` adds nothing to `labels` of packed rows and returns `without_padding` alone."""
    model, plain = both("distilbert", tmp_path, torch.float64)
    rows, metrics = examples(lambda i: i % 3, kinds=False), tk.classification_metrics([], 3)
    assert metrics.update is not None
    found = metrics.update(model.eval(), tk.collate_padded(rows, PAD, layout=tk.choose_row_layout(model)))
    expected = metrics.update(plain.eval(), tk.collate_padded(rows, PAD))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def test_each_example_has_dropout_of_its_own(tmp_path: Path) -> None:
    """Equal examples of one micro-batch get different scores in training, in hidden states and attention, and the same in evaluation.

    Fails when: dropout is off in the loop over documents and in the model's modules.
    """
    for rates in ({"hidden_dropout_prob": 0.3}, {"attention_probs_dropout_prob": 0.3}):
        model, _ = both("bert", tmp_path / next(iter(rates)), torch.float32, **rates)
        row = examples(lambda i: 0, kinds=True)[2]
        batch = tk.collate_padded([row, row, row], PAD, layout=tk.choose_row_layout(model))
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "weight")}
        assert len(model(**inputs).logits[:, 0].unique()) == 3
        same = model.eval()(**inputs).logits[:, 0]
        assert float((same - same[0]).abs().max()) < 1e-6  # places in a row of products are rounded each in their way


def test_models_that_cannot_do_without_padding_are_padded_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Albert's pooler takes a token's state. Fails when: shapes are not compared, or the layout is always packed."""
    config = transformers.AlbertConfig(**SIZES, **QUIET, embedding_size=16)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model = tk.load_model("AutoModelForSequenceClassification", tk.ModelConfig(model=str(tmp_path)), None, packed=None)
    before = [hook for module in model.modules() for hook in module._forward_pre_hooks]
    assert tk.choose_row_layout(model) == "padded"
    assert re.search(r"rows are padded: .*'albert' ", capsys.readouterr().out)
    assert not before
    with pytest.raises(Refusal, match=r"--row-layout packed: .*'albert' .*--row-layout auto"):
        tk.choose_row_layout(model, "packed")
    rows = examples(lambda i: i % 2, kinds=False)
    loss, _ = classification_loss(model, tk.collate_padded(rows, PAD), {"examples": 7.0, "weight": 10.0})
    assert loss.isfinite()


def test_a_shared_prompt_is_refused_where_it_would_not_be_exact(tmp_path: Path) -> None:
    """Fails when: `_check_sharing` asks for no direction, or for no dropout."""
    model, _ = both("bert", tmp_path / "bert", torch.float32, num_labels=1)
    with pytest.raises(Refusal, match=r"--pair-layout shared: .*last token"):
        tk.choose_scored_pair_layout(model, "shared")
    model, _ = both("gpt2", tmp_path / "gpt2", torch.float32, num_labels=1, resid_pdrop=0.1)
    with pytest.raises(Refusal, match=r"--pair-layout shared: .*dropout of 0\.1"):
        tk.choose_scored_pair_layout(model, "shared")
    assert tk.choose_scored_pair_layout(model) == "packed"


def test_a_layer_that_sees_its_neighbors_is_found(tmp_path: Path) -> None:
    """In a model type that nobody has compared. Fails when: `_try` compares `found` neither with `others` nor with `expected`."""
    model, _ = both("xlm-roberta", tmp_path, torch.float32)
    model.roberta.encoder.layer[0].register_forward_hook(lambda layer, args, output: output + 1e-3 * output.roll(1, dims=1))
    assert tk.choose_row_layout(model) == "padded"
    assert tk.choose_row_layout(model, "padded") == "padded"


def test_a_step_of_train_step_is_that_of_padded_rows(tmp_path: Path) -> None:
    """Through the Accelerator, whose autocast wraps the model's forward. Fails when: the hooks are on the model, not on its body."""
    found = []
    for layout in ("padded", "packed"):
        accelerator = tk.build_accelerator(tk.RunConfig(use_cpu=True, bf16=False))
        model, _ = both("modernbert", tmp_path, torch.float32)
        tk.choose_row_layout(model, layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = examples(lambda i: i % 3, kinds=False)
        pieces = [tk.collate_padded(rows[at : at + 3], PAD, layout=layout) for at in (0, 3, 6)]
        batch = Batch(pieces, {"examples": 7.0, "weight": 13.0}, [True] * 3, seeds=[1, 2, 3])
        metrics = tk.train_step(accelerator, model, optimizer, batch, classification_loss, [0.1])
        found.append(torch.stack([metrics["loss"].detach(), metrics["grad_norm"].detach()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0.0)
