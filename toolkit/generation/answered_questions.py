"""Questions answered by a model of spans: samples while it trains, and answers of a trained one, each with its n best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from toolkit.config import DataConfig, QuestionAnsweringConfig
from toolkit.data.loading.collate import collate_windows
from toolkit.data.tokenize.classification import pair_frame
from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.question_answering import QuestionRows, reference_answers
from toolkit.generation.samples import spread_rows, trim_for_display
from toolkit.metrics.question_answering import best_spans, joined_spans, span_logits, words_of_context
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


class FoundAnswer(NamedTuple):
    """An answer, the character of the context where it starts, its score, and its probability among the best.

    No answer is an empty text that starts nowhere.
    """

    text: str
    start: int | None
    score: float
    probability: float


@dataclass(frozen=True)
class SampledQuestions:
    """Rows of a dataset, and whether a question of it may have no answer."""

    rows: list[dict[str, Any]]
    may_have_none: bool


def sample_questions(splits: Mapping[str, Dataset | IterableDataset], num_samples: int) -> SampledQuestions:
    """A few held-out questions, spread evenly over the validation split (else test, else train), the same at every call."""
    name = next((name for name in ("validation", "test", "train") if name in splits), None)
    if name is None or num_samples == 0:
        return SampledQuestions([], False)
    may_have_none = not all(answers for _, answers in reference_answers({"validation": splits[name]}))
    return SampledQuestions(list(spread_rows(splits[name], num_samples)), may_have_none)


def sample_answers(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, asked: SampledQuestions, config: DataConfig
) -> list[dict[str, Any]]:
    """For `run.add_samples`, of each question: `prompt` (after its context), `text` (the answer), `reference` and `n_best`.

    `config` holds the settings of QuestionAnsweringConfig too. Every rank finds the same, since each forward of a sharded model
    needs all of them.
    """
    assert isinstance(config, QuestionAnsweringConfig)
    with accelerator.autocast():
        answers = answer_questions(
            model, tokenizer, asked.rows, max_length=config.max_length, doc_stride=config.doc_stride,
            n_best_size=config.n_best_size, max_answer_length=config.max_answer_length, device=accelerator.device,
            null_score_diff_threshold=config.null_score_diff_threshold if asked.may_have_none else None,
        )  # fmt: skip
    references = reference_answers({"validation": asked.rows})
    return [
        {"prompt": f"{trim_for_display(row['context'])}\n\n{row['question']}", "text": n_best[0].text,
         "reference": (texts or [""])[0], "n_best": [answer._asdict() for answer in n_best]}
        for row, n_best, (_, texts) in zip(asked.rows, answers, references, strict=True)
    ]  # fmt: skip


def answer_questions(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], *, max_length: int = 384,
    doc_stride: int = 128, n_best_size: int = 20, max_answer_length: int = 30, null_score_diff_threshold: float | None = None,
    device: torch.device | str = "cpu",
) -> list[list[FoundAnswer]]:  # fmt: skip
    """The best answers to each question in its context, the best first.

    Args:
        rows: each with `question` and `context`.
        null_score_diff_threshold: no answer (an empty text, without a start) is the first one where it scores higher than the
            best span by more than this. None: questions have an answer.

    Raises:
        Refusal: a question or a context without text, or a question that leaves no room for the context.
    """
    reader = QuestionRows(build_encoder(tokenizer), pair_frame(tokenizer), max_length, doc_stride, "split")
    answers = []
    for number, row in enumerate(rows):
        batch = {name: [row[name]] for name in ("question", "context")} | {"answers": [{"text": [], "answer_start": []}]}
        documents, _ = reader.read(batch, [str(row.get("origin") or f"question {number + 1}")])
        windows, _ = reader.cut(documents)
        columns = {**windows.columns, "input_ids": windows.lists(windows.values)}
        examples = [{name: values[i] for name, values in columns.items()} for i in range(len(windows))]
        found = []
        with evaluation_mode(model):
            for example in examples:  # one by one: no answer depends on what it shares a batch with
                micro_batch = {name: value.to(device) for name, value in collate_windows([example]).items()}
                spans = best_spans(*span_logits(model, micro_batch), micro_batch, n_best_size, max_answer_length)
                found.append({"window": micro_batch["window"], **spans})
        of_all_windows = {name: torch.cat([part[name] for part in found]).cpu().numpy() for name in found[0]}
        no_answer, joined = next(joined_spans(of_all_windows))
        best: list[tuple[str, int | None, float]] = []
        best += [(text, span.start, span.score) for text, span in words_of_context(row["context"], joined)]
        best = best[:n_best_size]
        if null_score_diff_threshold is not None or not best:
            is_first = not best or no_answer - best[0][2] > (null_score_diff_threshold or 0.0)
            place = 0 if is_first else max(1, sum(score >= no_answer for _, _, score in best))
            best.insert(place, ("", None, no_answer))
        highest = max(score for _, _, score in best)
        total = math.fsum(math.exp(score - highest) for _, _, score in best)
        answers.append([FoundAnswer(*each, math.exp(each[2] - highest) / total) for each in best])
    return answers
