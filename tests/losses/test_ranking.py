"""Ranking losses against plain loops, against sentence-transformers on a real cross-encoder, and cut in every way."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.data.loading.collate_groups import collate_lists
from toolkit.losses.ranking import ranking_list_metrics, ranking_loss, score_lists

LOSSES = ("bce", "ranknet", "margin_mse", "listnet", "lambda")
GRADED = [[3.0, 0.0, 1.0], [0.0, 2.0], [1.0], [0.0, 0.0, 0.0, 1.0, 2.0], [1.0, 1.0], [0.0, 0.0, 4.0, 4.0]]
BINARY = [[min(label, 1.0) for label in labels] for labels in GRADED]


class Scorer(nn.Module):
    """A cross-encoder of the usual inputs and outputs, so small that a loop can follow it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 4, dtype=dtype)
        self.head = nn.Linear(4, 1, dtype=dtype)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        mask = attention_mask.to(self.head.weight.dtype)[..., None]
        return SimpleNamespace(logits=self.head(torch.tanh((self.words(input_ids) * mask).sum(1))))


def lists_of(labels: list[list[float]]) -> list[dict[str, Any]]:
    """Documents of 2 to 7 tokens."""
    generator = torch.Generator().manual_seed(1)
    lists = []
    for of_list in labels:
        lengths = torch.randint(2, 8, (len(of_list),), generator=generator)
        ids = torch.randint(1, 50, (int(lengths.sum()),), generator=generator)
        lists.append({"input_ids": ids.tolist(), "document_tokens": lengths.tolist(), "labels": of_list})
    return lists


def totals_of(labels: list[list[float]]) -> dict[str, float]:
    return {
        "examples": float(len(labels)),
        "documents": float(sum(map(len, labels))),
        "comparisons": float(sum(a > b for each in labels for a, b in itertools.product(each, each))),
    }


def plain_loss(scores: list[list[torch.Tensor]], labels: list[list[float]], loss_type: str, weight: float) -> torch.Tensor:
    """Each formula document by document, pair by pair."""
    terms, totals = [], totals_of(labels)
    for s, y in zip(scores, labels, strict=True):
        order = sorted(range(len(s)), key=lambda i, s=s: -s[i].item())
        rank = {document: place + 1 for place, document in enumerate(order)}
        best = sum((2**label - 1) / math.log2(2 + place) for place, label in enumerate(sorted(y, reverse=True)))
        if loss_type == "bce":
            for score, label in zip(s, y, strict=True):
                p = torch.sigmoid(score)
                terms.append(-(weight * label * p.log() + (1 - label) * (1 - p).log()))
        elif loss_type == "listnet":
            wanted, had = torch.softmax(torch.tensor(y, dtype=torch.float64), 0), torch.softmax(torch.stack(s), 0)
            terms.append(-(wanted * had.log()).sum())
        for i, j in itertools.permutations(range(len(s)), 2) if loss_type in ("ranknet", "margin_mse", "lambda") else ():
            if y[i] <= y[j]:
                continue
            if loss_type == "margin_mse":
                terms.append((s[i] - s[j] - (y[i] - y[j])) ** 2)
                continue
            apart = abs(rank[i] - rank[j])
            delta = abs(1 / math.log2(1 + apart) - 1 / math.log2(2 + apart))
            ranks = abs(1 / math.log2(1 + rank[i]) - 1 / math.log2(1 + rank[j]))
            worth = (10 * delta + ranks) * abs((2 ** y[i] - 2 ** y[j]) / best) if loss_type == "lambda" else 1.0
            terms.append(-worth * torch.log2(torch.sigmoid(s[i] - s[j])))
    unit = {"bce": "documents", "listnet": "examples"}.get(loss_type, "comparisons")
    return torch.stack(terms).sum() / totals[unit]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient_are_those_of_a_plain_loop(loss_type: str) -> None:
    """Fails when: the mask of a comparison is `>=`, or `mu *` is left out of the weights."""
    labels = BINARY if loss_type == "bce" else GRADED
    lists, weight = lists_of(labels), 3.0 if loss_type == "bce" else 1.0
    model, plain = Scorer(), Scorer()
    loss, _ = ranking_loss(model, collate_lists(lists), totals_of(labels), ranking_loss=loss_type, positive_weight=weight)
    loss.backward()
    scores = []
    for each in lists:
        rows = torch.tensor(each["input_ids"]).split(each["document_tokens"])
        scores.append([plain(row[None], torch.ones_like(row)[None]).logits[0, 0] for row in rows])
    expected = plain_loss(scores, labels, loss_type, weight)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for got, wanted in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("cuts", [(12,), (3,) * 4, (1, 5, 2, 4)], ids=str)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_parts_of_every_split_add_up_to_the_whole(
    loss_type: str, cuts: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    """Fails when: the loss is divided by what is in the micro-batch."""
    labels = (BINARY if loss_type == "bce" else GRADED) * 2
    lists, totals = lists_of(labels), totals_of(labels)
    whole, cut = Scorer(dtype), Scorer(dtype)
    loss, shown = ranking_loss(whole, collate_lists(lists), totals, ranking_loss=loss_type)
    loss.backward()
    added, precision, at = 0.0, 0.0, 0
    for size in cuts:
        part, shares = ranking_loss(cut, collate_lists(lists[at : at + size]), totals, ranking_loss=loss_type)
        part.backward()
        added, precision, at = added + part.item(), precision + shares["precision_at_1"].item(), at + size
    assert added == pytest.approx(loss.item(), rel=tolerance)
    assert precision == pytest.approx(shown["precision_at_1"].item(), rel=1e-5)
    for got, wanted in zip(gradients(cut), gradients(whole), strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_documents_of_like_length_are_read_together() -> None:
    """Scores are those of all rows together, with a third less padding. Fails when: `by_length` keeps the order of the lists."""
    model, read = Scorer(), []
    model.register_forward_pre_hook(lambda _, args, inputs: read.append(inputs["input_ids"].shape), with_kwargs=True)
    batch = collate_lists(lists_of(GRADED * 2))
    found, _, is_document = score_lists(model, batch)
    wanted = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    torch.testing.assert_close(found[is_document], wanted, rtol=1e-12, atol=0)
    *groups, whole = (rows * longest for rows, longest in read)
    assert len(groups) == len(wanted) // 8
    assert sum(groups) - batch["attention_mask"].sum() <= (whole - batch["attention_mask"].sum()) * 2 / 3


def test_a_batch_in_which_nothing_can_be_compared_has_the_loss_zero() -> None:
    """Fails when: `or 1.0` is left out."""
    model, labels = Scorer(), [[1.0], [0.0, 0.0]]
    loss, _ = ranking_loss(model, collate_lists(lists_of(labels)), totals_of(labels), ranking_loss="lambda")
    loss.backward()
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(model))


def test_equal_scores_put_no_relevant_document_first() -> None:
    """Fails when: `amin` is `amax`."""
    model = Scorer()
    nn.init.zeros_(model.head.weight)
    _, shown = ranking_loss(model, collate_lists(lists_of(GRADED)), totals_of(GRADED), ranking_loss="bce")
    assert shown["precision_at_1"].item() == pytest.approx(2 / 6)  # the lists of relevant documents alone


@pytest.mark.parametrize("number", [1, 7, 97])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_metrics_are_those_of_trec_eval_for_every_batch_size(loss_type: str, size: int, number: int) -> None:
    """Fails when: a mean is added without `* len(scores)`, or `loss_total` counts lists for every loss."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    labels = list(itertools.islice(itertools.cycle(BINARY if loss_type == "bce" else GRADED), number))
    lists, model, metrics = lists_of(labels), Scorer(), ranking_list_metrics(ranking_loss=loss_type)
    assert metrics.update is not None
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for at in range(0, number, size):
            for name, value in metrics.update(model, collate_lists(lists[at : at + size])).items():
                sums[name] = sums.get(name, 0.0) + value
        scores, _, is_document = score_lists(model, collate_lists(lists))
        expected_loss, _ = ranking_loss(model, collate_lists(lists), totals_of(labels), ranking_loss=loss_type)
    got = metrics.finalize({name: value.numpy() for name, value in sums.items()})
    qrels = {str(q): {f"d{i}": int(label) for i, label in enumerate(each)} for q, each in enumerate(labels)}
    run = {
        str(q): {f"d{i}": float(score) for i, score in enumerate(row[mask].tolist())}
        for q, (row, mask) in enumerate(zip(scores, is_document, strict=True))
    }
    judged = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank", "map", "ndcg_cut.1,10", "recall.1,10"}).evaluate(run)
    names = {"mrr": "recip_rank", "map": "map", "ndcg_at_1": "ndcg_cut_1", "ndcg_at_10": "ndcg_cut_10",
             "recall_at_1": "recall_1", "recall_at_10": "recall_10"}  # fmt: skip
    for ours, theirs in names.items():
        assert got[ours] == pytest.approx(sum(query[theirs] for query in judged.values()) / number, rel=1e-12), ours
    assert got["loss"] == pytest.approx(expected_loss.item(), rel=1e-10)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(30))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], model_max_length=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.5,
    ))  # fmt: skip
    directory: Path = tmp_path_factory.mktemp("cross-encoder")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return CrossEncoder(str(directory), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient_are_those_of_sentence_transformers(cross_encoder: Any, loss_type: str) -> None:
    """Fails when: bits are nats, or a comparison's weight leaves out LambdaRank's part. Equal to 1e-6."""
    from sentence_transformers.cross_encoder import losses

    labels = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]] if loss_type in ("bce", "margin_mse") else GRADED
    if loss_type == "margin_mse":
        labels = [sorted(each, reverse=True) for each in labels]  # theirs has the positive document first
    queries = [f"w{i} w{i + 1}" for i in range(len(labels))]
    documents = [[f"w{3 * i + j} w{j} " * (j + 1) for j in range(len(each))] for i, each in enumerate(labels)]
    plain = cross_encoder.model if hasattr(cross_encoder, "model") else cross_encoder[0].model
    lists = []
    for query, texts, of_list in zip(queries, documents, labels, strict=True):
        rows = [cross_encoder.tokenizer(query, text) for text in texts]
        lists.append({
            "input_ids": [id for row in rows for id in row["input_ids"]],
            "token_type_ids": [kind for row in rows for kind in row["token_type_ids"]],
            "document_tokens": [len(row["input_ids"]) for row in rows], "labels": of_list,
        })  # fmt: skip
    cross_encoder.zero_grad()
    ours, _ = ranking_loss(plain, collate_lists(lists), totals_of(labels), ranking_loss=loss_type)
    ours.backward()
    our_gradients = gradients(plain)
    cross_encoder.zero_grad()
    flat = [label for each in labels for label in each]
    as_lists = [torch.tensor(each) for each in labels]
    if loss_type == "bce":
        repeated = [query for query, texts in zip(queries, documents, strict=True) for _ in texts]
        theirs = losses.BinaryCrossEntropyLoss(cross_encoder)([repeated, [t for d in documents for t in d]], torch.tensor(flat))
    elif loss_type == "margin_mse":
        columns = [list(column) for column in zip(*documents, strict=True)]
        theirs = losses.MarginMSELoss(cross_encoder)([queries, *columns], torch.stack(as_lists))
    else:
        named = {"ranknet": losses.RankNetLoss, "listnet": losses.ListNetLoss, "lambda": losses.LambdaLoss}
        theirs = named[loss_type](cross_encoder)([queries, documents], as_lists)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for got, wanted in zip(our_gradients, gradients(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
