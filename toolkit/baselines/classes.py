"""What a classifier must beat: the most frequent class, and logistic regression on words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.tokenize.columns import label_column

if TYPE_CHECKING:
    from datasets import Dataset

LABELED_ROWS = 20_000  # training rows that logistic regression is fitted to: a few seconds
Splits = Mapping[str, "Dataset"]
Labeled = tuple[Sequence[str], Sequence[int | str]]  # texts and their labels


def class_baselines(raw: Splits, problem_type: str = "single_label") -> dict[str, float]:
    """Accuracy on the validation rows of saying the most frequent class, and of logistic regression on words.

    Both are fitted to the first 20,000 training rows. Nothing for other problems than one class a row, for a stream, and for
    rows that are tokenized already.
    """
    names = ("train", "validation")
    if problem_type != "single_label" or not all(hasattr(raw.get(name), "__len__") for name in names):
        return {}
    if any("text" not in raw[name].column_names for name in names):
        return {}
    train = raw["train"].select(range(min(len(raw["train"]), LABELED_ROWS)))
    return label_baselines(_labeled_texts(train), _labeled_texts(raw["validation"]))


def _labeled_texts(rows: Dataset) -> tuple[list[str], list[Any]]:
    pairs = rows["text_pair"] if "text_pair" in rows.column_names else [""] * len(rows)
    texts = [f"{text} {pair}" for text, pair in zip(rows["text"], pairs, strict=True)]
    return texts, list(rows[label_column(rows.column_names, "train")])


def label_baselines(train: Labeled, held_out: Labeled) -> dict[str, float]:
    """Accuracy on held-out (texts, labels) of two classifiers without a neural network.

    "most frequent class" says what is most frequent in training, whatever the text; "words" is logistic regression on the
    words of the text, weighted by TF-IDF, a strong baseline where topics differ in vocabulary.
    """
    labels, numbers, frequency = np.unique(train[1], return_inverse=True, return_counts=True)
    answers = np.asarray(held_out[1])
    baselines = {"most frequent class": float(np.mean(answers == labels[frequency.argmax()]))}
    predicted = _predict_from_words(train[0], numbers, held_out[0])
    if predicted is not None:
        baselines["words"] = float(np.mean(answers == labels[predicted]))
    return baselines


def _predict_from_words(texts: Sequence[str], labels: np.ndarray, held_out: Sequence[str]) -> np.ndarray | None:
    """Classes of held-out texts; None where there is one class only, or no word.

    Words, their TF-IDF (sublinear, smooth, rows of length 1) and the penalty (C = 10) are those of scikit-learn's
    TfidfVectorizer and LogisticRegression; the minimum is one, so the predictions are its own up to rounding.
    """
    import torch
    from torch.nn import functional

    counts = [Counter(re.findall(r"\b\w\w+\b", text.lower())) for text in texts]
    seen_in = Counter(word for count in counts for word in count)
    if not seen_in or labels.max() == 0:
        return None
    place = {word: number for number, word in enumerate(sorted(seen_in))}
    weight = {word: math.log((1 + len(texts)) / (1 + seen_in[word])) + 1 for word in place}

    def features(counted: Sequence[Counter[str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns, where each row's begin, and values."""
        columns, starts, values = list[int](), list[int](), list[float]()
        for count in counted:
            known = {word: (1 + math.log(times)) * weight[word] for word, times in count.items() if word in place}
            length = math.sqrt(math.fsum(value * value for value in known.values()))
            starts.append(len(columns))
            columns += [place[word] for word in known]
            values += [value / length for value in known.values()]
        return torch.tensor(columns, dtype=torch.int64), torch.tensor(starts), torch.tensor(values, dtype=torch.float64)

    def logits(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        columns, starts, values = inputs
        return functional.embedding_bag(columns, weights, starts, mode="sum", per_sample_weights=values) + bias

    inputs, targets = features(counts), torch.from_numpy(labels)
    weights = torch.zeros(len(place), int(labels.max()) + 1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(weights.shape[1], dtype=torch.float64, requires_grad=True)
    enough = 1e-4 * 10 * len(texts)  # of the gradient, where scikit-learn stops
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=1000, tolerance_grad=enough, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 10 * functional.cross_entropy(logits(inputs), targets, reduction="sum") + weights.square().sum() / 2
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    asked = features([Counter(re.findall(r"\b\w\w+\b", text.lower())) for text in held_out])
    with torch.no_grad():
        return logits(asked).argmax(-1).numpy()
