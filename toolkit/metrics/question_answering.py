"""Extractive question answering: exact match and F1 over whole contexts, from the best spans of each window.

A window gives few numbers, so that all start and end logits are never held; windows are joined once they are all known. The
rules are those of SQuAD's two evaluation scripts (https://rajpurkar.github.io/SQuAD-explorer), metrics as shares, 0 to 1.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.metrics.metric import Metrics, ratio

References = Sequence[tuple[str, Sequence[str]]]  # of each question its context and its answers; none: it has no answer


class Span(NamedTuple):
    """A piece of a context in characters, and the sum of its start and end logits."""

    start: int
    end: int
    score: float


def span_logits(model: nn.Module, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Start and end logits `[windows, longest]` in float32 (float64 stays), -inf on padding.

    transformers' own losses leave padding in, so that they depend on which windows share a batch; without it they don't.
    """
    output = model(**model_inputs(micro_batch))
    is_padding = micro_batch["attention_mask"] == 0
    start, end = (
        precise(logits).masked_fill(is_padding, -math.inf) for logits in (output.start_logits, output.end_logits)
    )
    return start, end


def span_losses(start_logits: torch.Tensor, end_logits: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """The mean of both cross-entropies of each window, `[windows]`."""
    start = functional.cross_entropy(start_logits, micro_batch["start_positions"], reduction="none")
    end = functional.cross_entropy(end_logits, micro_batch["end_positions"], reduction="none")
    return (start + end) / 2


def best_spans(
    start_logits: torch.Tensor, end_logits: torch.Tensor, micro_batch: MicroBatch, n_best_size: int, max_answer_length: int
) -> dict[str, torch.Tensor]:
    """The best spans of each window, in rows of fixed width: `starts`, `ends` (characters), `scores` `[windows, n_best_size]`.

    Searched among all spans of at most `max_answer_length` tokens of the context. Where there are fewer, starts and ends are -1
    and scores -inf. `no_answer` `[windows]` is the score of the first token, which windows without the answer are trained to
    point at.
    """
    char_starts, char_ends = micro_batch["char_starts"], micro_batch["char_ends"]
    is_outside, longest = char_starts < 0, start_logits.shape[1]
    width = min(max_answer_length, longest)
    starts = start_logits.masked_fill(is_outside, -math.inf)
    ends = functional.pad(end_logits.masked_fill(is_outside, -math.inf), (0, width - 1), value=-math.inf)
    sums = (starts[:, :, None] + ends.unfold(1, width, 1)).flatten(1)  # [windows, longest x width]
    found = min(n_best_size, sums.shape[1])
    scores, places = sums.topk(found, dim=1)
    first = places // width
    last = (first + places % width).clamp(max=longest - 1)
    is_none = scores == -math.inf
    rows = {
        "starts": char_starts.gather(1, first).masked_fill(is_none, -1),
        "ends": char_ends.gather(1, last).masked_fill(is_none, -1),
    }
    missing = (0, n_best_size - found)
    return {
        **{name: functional.pad(values, missing, value=-1) for name, values in rows.items()},
        "scores": functional.pad(scores, missing, value=-math.inf),
        "no_answer": start_logits[:, 0] + end_logits[:, 0],
    }


def joined_spans(rows: Mapping[str, np.ndarray]) -> Iterator[tuple[float, list[Span]]]:
    """Of each question the score of no answer, and the best spans of all its windows, each once, the best first.

    `rows`: `best_spans` of the windows in their order, and `window`, the number of each within its question. No answer scores
    what it does in the window that is least for it, as in transformers' examples.
    """
    firsts = np.flatnonzero(rows["window"] == 0)
    for first, end in zip(firsts, [*firsts[1:], len(rows["window"])], strict=True):
        best: dict[tuple[int, int], float] = {}
        columns = (rows[name][first:end].tolist() for name in ("starts", "ends", "scores"))
        for starts, ends, scores in zip(*columns, strict=True):
            for span, score in zip(zip(starts, ends, strict=True), scores, strict=True):
                if score > best.get(span, -math.inf):
                    best[span] = score
        ordered = sorted(best.items(), key=lambda item: (-item[1], item[0]))
        yield float(rows["no_answer"][first:end].min()), [Span(*span, score) for span, score in ordered]


def words_of_context(context: str, spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    """The spans that have words, without the white space around these."""
    for span in spans:
        if text := context[span.start : span.end].strip():  # a token may begin with the space before it
            start = context.index(text, span.start)
            yield text, Span(start, start + len(text), span.score)


def question_answering_metrics(
    references: References, *, n_best_size: int = 20, max_answer_length: int = 30, null_score_diff_threshold: float = 0.0
) -> Metrics:
    """Loss (mean over windows), `exact_match` and `f1` (mean over questions) of what `tokenize_for_question_answering` makes.

    Where a question has no answer, SQuAD 2.0's rules hold, with `HasAns_` and `NoAns_` of both, and `best_exact` and `best_f1`
    with the thresholds (`best_exact_thresh`, `best_f1_thresh`) that make them so on these questions.

    Args:
        references: context and answers of each question, in the order of the rows (`reference_answers`).
        null_score_diff_threshold: the answer is none where no answer scores higher than the best span by more than this.
    """

    def rows(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        start_logits, end_logits = span_logits(model, micro_batch)
        spans = best_spans(start_logits, end_logits, micro_batch, n_best_size, max_answer_length)
        losses = span_losses(start_logits, end_logits, micro_batch)
        return {"loss": losses, "window": micro_batch["window"], **spans}

    def finalize(observed: dict[str, np.ndarray]) -> dict[str, float]:
        predictions, margins = list[str](), list[float]()
        for (context, _), (no_answer, spans) in zip(references, joined_spans(observed), strict=True):
            text, best = next(words_of_context(context, spans), ("", None))
            predictions.append(text)
            margins.append(no_answer - best.score if best else math.inf)
        loss = ratio(observed["loss"].astype(np.float64).sum(), len(observed["loss"]))
        answers = [list(texts) for _, texts in references]
        return {"loss": loss, **squad_metrics(predictions, answers, margins, null_score_diff_threshold)}

    return Metrics(update=None, finalize=finalize, gather=rows)


def squad_metrics(
    predictions: Sequence[str], references: Sequence[Sequence[str]], margins: Sequence[float] = (), threshold: float = 0.0
) -> dict[str, float]:
    """Exact match and F1 of predicted answers by SQuAD 1.1's rules or, where a question has no answer, by those of 2.0.

    Args:
        references: answers of each question; the one that a prediction scores best with counts.
        margins: how much higher no answer scores than the prediction, for each question; used where some have none.
        threshold: above it the answer is none.
    """
    has_answer = np.array([bool(answers) for answers in references])
    if has_answer.all():
        scores = {"exact_match": exact_match, "f1": f1}
        return {name: _mean(_best(score, predictions, references)) for name, score in scores.items()}
    # A gold answer of articles and punctuation alone counts for nothing in 2.0, and no answer is one without words.
    kept = [[answer for answer in answers if normalized(answer)] or [""] for answers in references]
    differences, means, best = np.asarray(margins, dtype=np.float64), dict[str, float](), dict[str, float]()
    for name, short, score in (("exact_match", "exact", exact_match), ("f1", "f1", _f1_or_no_words)):
        raw = np.array(_best(score, predictions, kept))
        final = np.where(differences > threshold, ~has_answer, raw)
        means |= {name: _mean(final)}
        means |= {f"HasAns_{short}": _mean(final[has_answer]), f"NoAns_{short}": _mean(final[~has_answer])}
        best[f"best_{short}"], best[f"best_{short}_thresh"] = _best_threshold(predictions, raw, differences, has_answer)
    return {name: value for name, value in (means | best).items() if not math.isnan(value)}


def exact_match(prediction: str, answer: str) -> float:
    """1 where both are the same but for case, punctuation, articles and white space."""
    return float(normalized(prediction) == normalized(answer))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words of a prediction, after normalizing; 0 where they share none."""
    said, wanted = normalized(prediction).split(), normalized(answer).split()
    shared = (Counter(said) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def normalized(text: str) -> str:
    """In lower case, without ASCII punctuation, English articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _f1_or_no_words(prediction: str, answer: str) -> float:
    """F1 as 2.0 has it: where no answer is right, whether the prediction has no words either."""
    return f1(prediction, answer) if answer else exact_match(prediction, answer)


def _best(score: Any, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    pairs = zip(predictions, references, strict=True)
    return [max(score(prediction, answer) for answer in answers) for prediction, answers in pairs]


def _best_threshold(
    predictions: Sequence[str], scores: np.ndarray, margins: np.ndarray, has_answer: np.ndarray
) -> tuple[float, float]:
    """The highest mean over all thresholds, and the threshold that gives it: the first one, from that of no answer at all on.

    Questions are given their answer one by one, the surest first: one more answer gains its score or, where there is none to
    find, loses the question.
    """
    order = np.argsort(margins, kind="stable")
    gains = np.where(has_answer, scores, [-1.0 if prediction else 0.0 for prediction in predictions])[order]
    totals = np.cumsum(np.concatenate([[float((~has_answer).sum())], gains]))
    at = int(np.argmax(totals))
    return float(totals[at]) / len(scores), float(margins[order[at - 1]]) if at else 0.0


def _mean(values: Any) -> float:
    values = np.asarray(values, dtype=np.float64)
    return ratio(math.fsum(values), len(values))
