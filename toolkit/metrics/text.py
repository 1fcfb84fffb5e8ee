"""Metrics of generated texts: BLEU and chrF as sacrebleu counts them, ROUGE as rouge-score does, exact match.

What is gathered from the ranks is token ids, one row of fixed width an example, in the order of the examples: no logits, and
each example once. The texts are compared on one process, each with the text of the data and not with what its tokens decode to.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.data.loading.batch import MicroBatch
from toolkit.metrics.external import MetricName, flat_metrics, load_metric, names_of, title_of
from toolkit.metrics.metric import Metrics

TextMetric = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
Generate = Callable[[nn.Module, MicroBatch], torch.Tensor]

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_TRIAL = (["one two three four five", "six"], ["one two three four five", "seven"])


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Share of predictions that equal their references, 0 to 1."""
    equal = sum(one == other for one, other in zip(predictions, references, strict=True))
    return {"exact_match": equal / len(references) if references else math.nan}


def bleu(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU of the corpus, 0 to 100, with sacrebleu's defaults: its tokenizer 13a, exponential smoothing, case kept."""
    from sacrebleu.metrics import BLEU

    return {"bleu": float(BLEU().corpus_score(predictions, [references]).score)}


def chrf(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """chrF2 of the corpus, 0 to 100, with sacrebleu's defaults: of characters, so that it needs no split into words."""
    from sacrebleu.metrics import CHRF

    return {"chrf": float(CHRF().corpus_score(predictions, [references]).score)}


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Means over the examples of the F-measures of rouge-score with stemming, 0 to 1; rougeLsum takes a line for a sentence.

    ROUGE counts words of a-z and 0-9 alone: not a number where no reference has one.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(reference, prediction) for prediction, reference in zip(predictions, references, strict=True)]
    if not any(sign.isascii() and sign.isalnum() for reference in references for sign in reference):
        return dict.fromkeys(ROUGE, math.nan)
    return {name: math.fsum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}


TEXT_METRICS: dict[str, TextMetric] = {"bleu": bleu, "chrf": chrf, "rouge": rouge, "exact_match": exact_match}
_LIBRARIES = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge": "rouge_score"}


def usual_text_metrics() -> tuple[list[str], list[str]]:
    """The built-in metrics whose library is installed, and those whose library is not."""
    missing = [name for name, library in _LIBRARIES.items() if importlib.util.find_spec(library) is None]
    return [name for name in TEXT_METRICS if name not in missing], missing


def choose_text_metrics(names: Sequence[MetricName] | MetricName) -> dict[str, TextMetric]:
    """Functions of texts by name: built in (`TEXT_METRICS`), a module of `evaluate` that compares texts, or a function
    `f(predictions, references) -> dict` of the user's. Without a name the built-in ones whose library is installed.

    Raises:
        Refusal: an unknown metric, one for something else than texts, or one whose library is not installed.
    """
    chosen: dict[str, TextMetric] = {}
    for name in names_of(names) or usual_text_metrics()[0]:
        if isinstance(name, str) and name in TEXT_METRICS:
            library = _LIBRARIES.get(name)
            if library and importlib.util.find_spec(library) is None:
                package = library.replace("_", "-")
                raise Refusal(f"--metrics {name}: needs {package}, which is not installed. Type: pip install {package}")
            chosen[name] = TEXT_METRICS[name]
            continue
        if name in ROUGE:
            raise Refusal(f"--metrics {name}: all of ROUGE are computed at once. Type --metrics rouge.")
        chosen[title_of(name)] = _lists_to(load_metric(name, TEXT_METRICS, _TRIAL))
    return chosen


def _lists_to(compute: Callable[..., dict[str, Any]]) -> TextMetric:
    return lambda predictions, references: compute([*predictions], [*references])


def compare_texts(metrics: dict[str, TextMetric], predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """All metrics of the texts, as numbers by name; white space around a text counts nowhere."""
    said, wanted = ([text.strip() for text in texts] for texts in (predictions, references))
    values: dict[str, float] = {}
    for name, compute in metrics.items():
        values |= flat_metrics(name, compute(said, wanted), taken=values)
    return values


def generated_text_metrics(
    generate: Generate, decode: Callable[[np.ndarray], list[str]], references: Sequence[str], metrics: dict[str, TextMetric],
    *, width: int, pad_token_id: int,
) -> Metrics:  # fmt: skip
    """Metrics of what a model generates. There is no loss among them: log them next to those of the loss.

    Args:
        generate: `(model, micro_batch) -> ids` `[examples, at most width]`, of each example's own text alone.
        decode: ids `[examples, width]`, filled with `pad_token_id`, to texts without special tokens.
        references: of all examples of the split, in the order of their indices.
        metrics: of `choose_text_metrics`.
        width: the most tokens of a text.
    """

    def gather(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        ids = generate(model, micro_batch)
        if ids.shape[1] > width:
            raise ValueError(f"texts of {ids.shape[1]} tokens were generated, and at most {width} were expected")
        return {"ids": torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=pad_token_id)}

    def finalize(rows: dict[str, np.ndarray]) -> dict[str, float]:
        return compare_texts(metrics, decode(rows["ids"]), references)

    return Metrics(update=None, finalize=finalize, gather=gather)
