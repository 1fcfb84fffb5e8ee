"""What a classifier must beat: the most frequent class, logistic regression on words, and a dictionary of words' tags."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.baselines.word_overlap import tf_idf
from toolkit.data.tokenize.columns import label_column
from toolkit.data.tokenize.tags import Tags
from toolkit.data.tokenize.token_tags import tagged_words

if TYPE_CHECKING:
    from datasets import Dataset

LABELED_ROWS = 20_000  # training rows that logistic regression is fitted to: a few seconds
Splits = Mapping[str, "Dataset"]
Labeled = tuple[Sequence[str], Sequence[int | str]]  # texts and their labels


def class_baselines(raw: Splits, problem_type: str = "single_label") -> dict[str, float]:
    """Accuracy on the validation rows of always predicting the most frequent class, and of logistic regression on words.

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

    "most frequent class" is the most frequent one in training, whatever the text; "words" is logistic regression on the
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

    def words(text: str) -> list[str]:
        return re.findall(r"\b\w\w+\b", text.lower())

    inputs, asked = tf_idf(texts, texts, words), tf_idf(held_out, texts, words)
    if not inputs.shape[1] or labels.max() == 0:
        return None
    wanted = functional.one_hot(torch.from_numpy(labels)).double()
    transposed = inputs.to_sparse_coo().t().to_sparse_csr()  # of which products are 20 times as fast as of a view
    weights = torch.zeros(inputs.shape[1], wanted.shape[1], dtype=torch.float64)
    bias = torch.zeros(wanted.shape[1], dtype=torch.float64)
    enough = 1e-5 * 10 * len(texts)  # of the gradient: a tenth of where scikit-learn stops
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=1000, tolerance_grad=enough, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        logps = (inputs @ weights + bias).log_softmax(-1)
        slope = 10 * (logps.exp() - wanted)
        weights.grad, bias.grad = transposed @ slope + weights, slope.sum(0)
        return weights.square().sum() / 2 - 10 * (logps * wanted).sum()

    optimizer.step(closure)
    return (asked @ weights + bias).argmax(-1).numpy()


Sentence = tuple[Sequence[str], Sequence[int]]


def tag_baselines(raw: Mapping[str, Dataset], tags: Tags) -> dict[str, float]:
    """Accuracy on the validation words of the most frequent tag for all, and of each word's most frequent tag.

    Both are counted on the training split; a word that is not in it gets the most frequent tag of words that are in it once.
    Nothing to compare with (an empty dict) without a validation split, and for a stream.
    """
    if not all(hasattr(raw.get(name), "__len__") for name in ("train", "validation")):
        return {}
    return dictionary_baselines(list(tagged_words(raw["train"], tags.names)), list(tagged_words(raw["validation"], tags.names)))


def dictionary_baselines(train: Sequence[Sentence], held_out: Sequence[Sentence]) -> dict[str, float]:
    """The same of words and the numbers of their tags."""
    of_word: dict[str, Counter[int]] = defaultdict(Counter)
    of_all, of_rare = Counter[int](), Counter[int]()
    for words, tags in train:
        for word, tag in zip(words, tags, strict=True):
            of_word[word][tag] += 1
            of_all[tag] += 1
    for counts in of_word.values():
        if counts.total() == 1:
            of_rare.update(counts)
    usual = of_all.most_common(1)[0][0]
    unknown = of_rare.most_common(1)[0][0] if of_rare else usual
    known = {word: counts.most_common(1)[0][0] for word, counts in of_word.items()}
    pairs = [pair for words, tags in held_out for pair in zip(words, tags, strict=True)]
    return {
        "most frequent tag": sum(tag == usual for _, tag in pairs) / len(pairs),
        "dictionary": sum(tag == known.get(word, unknown) for word, tag in pairs) / len(pairs),
    }
