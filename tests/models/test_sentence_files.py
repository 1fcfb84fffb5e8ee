"""A model directory is one of sentence-transformers: the same vectors, and the same training as with its own losses."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate_groups import collate_text_groups
from toolkit.data.tokenize.columns import Plan
from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.text_groups import TextGroups
from toolkit.losses.contrastive import info_nce
from toolkit.models.sentence_files import EmbeddingStyle

TEXTS = [f"{color} {thing} number {n}" for n, (color, thing) in enumerate([("red", "house"), ("green", "boat"), ("old", "tree")] * 4)]
PROMPTS = ("search: ", "found: ")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tk.train_tokenizer(TEXTS, vocab_size=300, encoder=True)


def saved(folder: Path, tokenizer: Any, pooling: str) -> tuple[Any, Path]:
    """A small encoder, trained in no way, and its model directory."""
    config = tk.ModelConfig(model="tiny-bert", hidden_size=32, num_hidden_layers=2, dropout=0.0, attention_dropout=0.0)
    model = tk.load_encoder(config, tokenizer)
    files = tk.sentence_files(model, EmbeddingStyle(pooling, *PROMPTS), max_length=24)
    return model, tk.save_model(None, model, tokenizer, folder, files=files)


def groups(tokenizer: Any, rows: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    """As `tokenize_for_embedding` makes them: anchor, positive, negatives."""
    names = ("anchor", "positive", "negative_1")[: len(rows[0])]
    reader = TextGroups(Plan("grouped", "all", names), build_encoder(tokenizer), PROMPTS, 1.0, 24, "truncate")
    batch = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    documents, _ = reader.read(batch, [f"row {i}" for i in range(len(rows))])
    ids = documents.lists(documents.values)
    return [{"input_ids": ids[i], **{name: values[i] for name, values in documents.columns.items()}} for i in range(len(ids))]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_are_those_of_sentence_transformers(tokenizer: Any, tmp_path: Path, pooling: str) -> None:
    """To 1e-6, ragged texts in one batch, one of them truncated, with the prompts of queries and documents.

    Fails when: padding enters the mean; the files name another pooling; the prompt is left out of the tokens.
    """
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model, directory = saved(tmp_path, tokenizer, pooling)
    theirs = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    rows = [(TEXTS[0], TEXTS[1] + " and the old tree" * 9), (TEXTS[2] + " or so", TEXTS[3])]
    micro_batch = collate_text_groups(groups(tokenizer, rows), pad_token_id=tokenizer.pad_token_id)
    with torch.no_grad():
        ours = torch.nn.functional.normalize(tk.embed_texts(model.eval(), micro_batch, pooling=pooling), dim=-1)
    for role, name in enumerate(("query", "document")):
        wanted = theirs.encode([row[role] for row in rows], prompt_name=name, convert_to_tensor=True)
        torch.testing.assert_close(ours[micro_batch["role"] == role], wanted, rtol=0, atol=1e-6)


def test_a_directory_of_sentence_transformers_is_trained_as_it_was(tokenizer: Any, tmp_path: Path) -> None:
    """Its pooling and prompts are read; what is typed goes before. One that its own library wrote is read too.

    Fails when: the settings' "auto" is the mean, or only the old names of poolings are known.
    """
    sentence_transformers = pytest.importorskip("sentence_transformers")
    _, directory = saved(tmp_path, tokenizer, "cls")
    again = tmp_path / "again"
    sentence_transformers.SentenceTransformer(str(directory), device="cpu").save(str(again))
    for folder in (directory, again):
        config = tk.ModelConfig(model=str(folder))
        assert tk.embedding_style(config) == EmbeddingStyle("cls", *PROMPTS)
        assert tk.embedding_style(config, pooling="mean", query_prompt="") == EmbeddingStyle("mean", "", PROMPTS[1])
        assert tk.load_encoder(config, tokenizer).config.hidden_size == 32
    assert tk.embedding_style(tk.ModelConfig(model="tiny-bert")) == EmbeddingStyle()
    modules = json.loads((directory / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Refusal, match="Dense"):
        tk.embedding_style(tk.ModelConfig(model=str(directory)))


def test_loss_and_gradient_are_those_of_their_cached_loss(tokenizer: Any, tmp_path: Path) -> None:
    """CachedMultipleNegativesRankingLoss on a global batch of 12 triplets, theirs in mini-batches of 4, ours in micro-batches of 5:
    the loss to 1e-6, each parameter's gradient to 1e-5 of the largest. No two texts are the same, which it would not notice.

    Fails when: the hard negatives of other examples are no negatives; the scale is not 1 / temperature.
    """
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    model, directory = saved(tmp_path, tokenizer, "mean")
    rows = [(text, f"the {text}", f"no {text}") for text in TEXTS]
    theirs = SentenceTransformer(str(directory), device="cpu")
    loss_of = CachedMultipleNegativesRankingLoss(theirs, scale=20.0, mini_batch_size=4)
    prompted = [[PROMPTS[i > 0] + row[i] for row in rows] for i in range(3)]
    features = [theirs.tokenize(texts) for texts in prompted]
    theirs.train()
    wanted = loss_of(features, torch.zeros(len(rows)))
    wanted.backward()
    every = groups(tokenizer, rows)
    cuts = [every[start : start + 5] for start in range(0, len(every), 5)]
    batch = Batch([collate_text_groups(cut) for cut in cuts], {"examples": float(len(rows))}, [True] * len(cuts), list(range(len(cuts))))
    accelerator, embed = Accelerator(cpu=True), partial(tk.embed_texts, pooling="mean")
    cached = tk.cache_gradients(accelerator, model.train(), batch, embed, partial(info_nce, temperature=0.05))
    found = tk.accumulate_gradients(accelerator, model, cached, tk.cached_gradient_loss(embed))
    assert float(found["loss"]) == pytest.approx(float(wanted.detach()), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs[0].named_parameters() if parameter.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            its = next(gradient for other, gradient in gradients.items() if other.endswith(name))
            assert float((parameter.grad - its).abs().max()) < 1e-5 * largest, name
            compared += 1
    assert compared > 20
