"""Evaluations of made-up models, one a task, cut into batches of any size, which ranks may share among them.

What one process finds in them is held against seqeval, SQuAD's scripts, sacrebleu and rouge-score, and trec_eval by the tests next
to this file; `tests/training/test_evaluation.py` holds two ranks against one process.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.metrics import test_question_answering as answers, test_spans as spans, test_text_metrics as texts
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate_groups import collate_lists
from toolkit.losses.ranking import ranking_list_metrics
from toolkit.metrics.metric import Metrics
from toolkit.metrics.question_answering import question_answering_metrics
from toolkit.metrics.spans import IGNORED, tag_metrics
from toolkit.metrics.text import choose_text_metrics, generated_text_metrics

Evaluated = tuple[nn.Module, list[Batch], Metrics]


def share_of(batches: list[Batch], rank: int, world_size: int) -> list[Batch]:
    """Those of one rank, and a padding micro-batch where it has one less than others."""
    mine = batches[rank::world_size]
    padding = -(-len(batches) // world_size) - len(mine)
    return [*mine, *(Batch(batches[0].micro_batches, {}, [False], indices=batches[0].indices) for _ in range(padding))]


def _pieces(examples: int, size: int) -> list[list[int]]:
    order = sorted(range(examples), key=lambda i: (i * 37) % 101)
    return [order[start : start + size] for start in range(0, examples, size)]


def tags(examples: int, size: int) -> Evaluated:
    names = spans.names_of("iob2")
    rows = spans.sentences(names, examples, seed=examples)

    def batch(piece: list[int]) -> dict[str, torch.Tensor]:
        labels = torch.full((len(piece), max(len(rows[i]) for i in piece)), IGNORED)
        predicted = torch.zeros_like(labels)
        for place, i in enumerate(piece):
            labels[place, : len(rows[i])], predicted[place, : len(rows[i])] = torch.tensor([[names.index(t) for t in pair] for pair in rows[i]]).T
        return {"input_ids": nn.functional.one_hot(predicted, len(names)).double(), "labels": labels}

    metrics = tag_metrics(names, "iob2", ["accuracy", "f1", "precision", "recall", "f1_macro", "f1_per_class"], strict=False)
    return spans.Given(), [Batch([batch(piece)], {}, [True], indices=[piece]) for piece in _pieces(examples, size)], metrics


def spans_of_answers(examples: int, size: int) -> Evaluated:
    numbers = np.random.default_rng(examples)
    questions = [answers.question(i, numbers, i % 3 > 0) for i in range(examples)]
    windows = [window for each in questions for window in each["windows"]]
    places = [number for each in questions for number in range(len(each["windows"]))]
    references = [(each["context"], each["answers"]) for each in questions]
    metrics = question_answering_metrics(references, n_best_size=4, max_answer_length=3, null_score_diff_threshold=0.2)
    return answers.Logits(windows), answers.batches(windows, places, size), metrics


def generated(examples: int, size: int) -> Evaluated:
    wanted, said = texts.texts(examples, 1), texts.texts(examples, 2)
    said[::3] = wanted[::3]
    width = max(len(text.encode()) for text in said) + 2

    def generate(model: nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        rows = [list(said[i].encode()) for i in micro_batch["example"]]
        return torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])

    def decode(ids: np.ndarray) -> list[str]:
        return [bytes(row[row != 0].tolist()).decode() for row in ids]

    metrics = generated_text_metrics(generate, decode, wanted, choose_text_metrics([]), width=width, pad_token_id=0)
    batches = [Batch([{"example": piece}], {}, [True], indices=[piece]) for piece in _pieces(examples, size)]
    return nn.Identity(), batches, metrics


class FirstToken(nn.Module):
    """The score of a document is in its first token."""

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.sin(input_ids[:, :1].double()))


def lists(examples: int, size: int) -> Evaluated:
    numbers = np.random.default_rng(examples)
    rows = []
    for _ in range(examples):
        tokens = numbers.integers(1, 9, numbers.integers(1, 12))
        grades = numbers.integers(0, 4, len(tokens)).tolist()
        rows.append({"input_ids": numbers.integers(0, 999, tokens.sum()), "document_tokens": tokens, "labels": grades})
    batches = [Batch([collate_lists([rows[i] for i in piece])], {}, [True], indices=[piece]) for piece in _pieces(examples, size)]
    return FirstToken(), batches, ranking_list_metrics(ranking_loss="lambda")


TASKS = {"tags": tags, "answers": spans_of_answers, "texts": generated, "lists": lists}
