"""What a trained model must beat, from the same splits without a neural network.

Of text, compressors and n-gram models; of answers, n-grams; of masked tokens, how frequent each is; of classes, logistic
regression on words; of preferences, the
length of an answer and what it shares with its prompt. Nothing to compare with (an empty dict) without a validation split.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.loading.collate import IGNORED
from toolkit.data.loading.token_masks import special_ids
from toolkit.data.texts import texts_of_tokens
from toolkit.data.tokenize.columns import label_column
from toolkit.metrics.classes import area_under_curve
from toolkit.metrics.text import choose_text_metrics, compare_texts, usual_text_metrics

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.loading.loaders import EvalLoader

NGRAM_TOKENS = 4_000_000  # training tokens that n-grams are counted on: a few seconds
LABELED_ROWS = 20_000  # training rows that a classifier of words, or its like, is fitted to: a few seconds
Splits = Mapping[str, "Dataset"]
Labeled = tuple[Sequence[str], Sequence[int | str]]  # texts and their labels


def text_baselines(tokenized: Splits, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Bits per byte, on the text of the validation tokens, of gzip and xz and of n-gram models.

    The n-grams are counted on the first 4 million training tokens. Nothing for a stream.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    vocab_size, texts = len(tokenizer), texts_of_tokens(list(tokenized["validation"]["input_ids"]), tokenizer)
    num_bytes = sum(len(text.encode()) for text in texts)
    baselines = {name: bits for name, bits in compression_baselines(texts).items() if name != "bz2"}
    if vocab_size**3 < 2**63:
        train, held_out = _tokens(tokenized["train"]), _tokens(tokenized["validation"])
        for name, order in (("bigram", 2), ("trigram", 3)):
            baselines[name] = ngram_bits_per_byte(train, held_out, num_bytes, vocab_size, order)
    return baselines


def answer_baselines(tokenized: Splits, vocab_size: int) -> dict[str, float]:
    """Mean loss in nats of n-grams over the supervised tokens of the validation split, counted on those of the training split.

    They know which tokens answers are made of and which follow each other, and nothing of the question. Nothing for a stream.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    train, held_out = _supervised_tokens(tokenized["train"]), _supervised_tokens(tokenized["validation"])
    orders = {"unigram": 1, "bigram": 2}
    # "per byte" of as many bytes as tokens is per token
    bits = {name: ngram_bits_per_byte(train, held_out, len(held_out), vocab_size, order) for name, order in orders.items()}
    return {name: value * math.log(2) for name, value in bits.items()}


def masked_token_baselines(
    tokenized: Splits, evaluation: EvalLoader | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Mean loss in nats, over the tokens that evaluations hide, of a unigram model of the training tokens.

    It knows how often each token is, and nothing of its neighbors. Special tokens, which are never hidden, are not counted.
    Nothing for a stream.
    """
    if evaluation is None or not hasattr(tokenized["train"], "__len__"):
        return {}
    train = _tokens(tokenized["train"])
    whole = replace(evaluation, rank=0, world_size=1, workers=0)
    labels = np.concatenate([batch.micro_batches[0]["labels"].numpy().ravel() for batch in whole])
    hidden = labels[labels != IGNORED]
    counted = train[~np.isin(train, special_ids(tokenizer))]
    return {"unigram": ngram_bits_per_byte(counted, hidden, len(hidden), len(tokenizer), 1) * math.log(2)}


def preference_baselines(tokenized: Splits) -> dict[str, float]:
    """Accuracy on the validation pairs of taking one answer of the two for the chosen one, without a model.

    The longer one, the shorter one (in tokens), and the one that shares more with its prompt, rare tokens counting more (rare
    among the first 20,000 training prompts). A pair of like answers counts half. Nothing to compare with (an empty dict)
    without a validation split.
    """
    if "validation" not in tokenized:
        return {}
    held_out = tokenized["validation"]
    chosen, rejected = (np.asarray(held_out[f"{side}_tokens"][:]) for side in ("chosen", "rejected"))
    longer = float(np.mean((chosen > rejected) + 0.5 * (chosen == rejected)))
    train = tokenized["train"]
    prompts = [row["input_ids"][: row["prompt_tokens"]] for row in train.select(range(min(len(train), LABELED_ROWS)))]
    pairs = [_prompt_and_answers(row) for row in held_out]
    overlap = shared_tokens_accuracy(prompts, pairs)
    return {"longer answer": longer, "shorter answer": 1 - longer, "answer that shares more with the prompt": overlap}


def unpaired_baselines(tokenized: Splits) -> dict[str, float]:
    """Area under the curve on the validation answers of scores that take no model; 0.5 is chance.

    The length of an answer, and what it shares with its prompt, rare tokens counting more (rare among the first 20,000
    training prompts).
    """
    if "validation" not in tokenized:
        return {}
    train, held_out = tokenized["train"], tokenized["validation"]
    prompts = [row["input_ids"][: row["prompt_tokens"]] for row in train.select(range(min(len(train), LABELED_ROWS)))]
    answers = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in held_out]
    desirable = np.asarray(held_out["desirable"][:], dtype=bool)
    lengths = np.asarray(held_out["completion_tokens"][:], dtype=np.float64)
    shared = np.asarray(shared_tokens(prompts, answers))
    return {
        "chance": 0.5,
        "longer answer": area_under_curve(lengths, desirable),
        "answer that shares more with the prompt": area_under_curve(shared, desirable),
    }


def _prompt_and_answers(row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    ids, prompt, end = row["input_ids"], row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    return ids[:prompt], ids[prompt:end], ids[end:]


def copy_baselines(
    tokenized: Splits, tokenizer: PreTrainedTokenizerBase, metric: str, source_prefix: str | None = None
) -> dict[str, float]:
    """A metric of texts on the validation split where the target is guessed without a model: the whole source, or its first
    line, or the one target of the training split that is most like the others of a sample of 100.

    Nothing without a validation split, for a stream, or where the metric is none of those built in that are installed.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    names = [name for name in usual_text_metrics()[0] if metric.startswith(name)]
    if not names:
        return {}
    held_out, train = tokenized["validation"], tokenized["train"]
    ids = [row[:cut] for row, cut in zip(held_out["input_ids"], held_out["source_tokens"], strict=True)]
    sources = [text.removeprefix(source_prefix or "") for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    few = [train[(2 * i + 1) * len(train) // 200]["target"] for i in range(100)]
    metrics, references = choose_text_metrics(names), list(held_out["target"])

    def score(said: list[str], wanted: list[str]) -> float:
        return compare_texts(metrics, said, wanted)[metric]

    usual = max(dict.fromkeys(few), key=lambda text: score([text] * len(few), few))
    guesses = {
        "copy of the source": sources,
        "first line of the source": [text.strip().partition("\n")[0] for text in sources],
        "one target for all": [usual] * len(references),
    }
    return {name: score(said, references) for name, said in guesses.items()}


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


def _supervised_tokens(split: Dataset) -> np.ndarray:
    """The tokens of a split whose labels count, from its beginning on."""
    rows = split.with_format("numpy", columns=["labels" if "labels" in split.column_names else "input_ids"])
    labels = np.concatenate([np.asarray(row[1:]) for (row,) in (tuple(row.values()) for row in rows)])
    return labels[labels != IGNORED][:NGRAM_TOKENS]


def _tokens(split: Dataset) -> np.ndarray:
    """The first tokens of a split, documents one behind the other."""
    enough = np.searchsorted(np.cumsum(np.asarray(split["length"][:])), NGRAM_TOKENS) + 1
    rows = split.select(range(min(len(split), int(enough)))).with_format("numpy", columns=["input_ids"])
    return np.concatenate([np.asarray(ids) for ids in rows["input_ids"][:]])[:NGRAM_TOKENS]


def compression_baselines(texts: Sequence[str]) -> dict[str, float]:
    """Bits per byte of gzip, bz2 and xz at their strongest settings, each over the concatenation of the texts.

    A compressor sees no training text, but it adapts to what it has read of these ones.
    """
    data = "".join(texts).encode()
    compressors = {
        "gzip": lambda: gzip.compress(data, 9),
        "bz2": lambda: bz2.compress(data, 9),
        "xz": lambda: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(compress()) / len(data) for name, compress in compressors.items()}


def ngram_bits_per_byte(
    train_ids: Sequence[int] | np.ndarray, eval_ids: Sequence[int] | np.ndarray, num_bytes: int, vocab_size: int, order: int
) -> float:
    """Bits per byte that an n-gram model counted on `train_ids` spends on `eval_ids`.

    Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3), the strongest of the classical ones: three
    discounts for each order from the counts of counts, lower orders from the number of distinct contexts, and below the
    unigram a uniform distribution, so that no token is impossible. Documents are one stream here; with an end token between
    them, as in training, nothing needs to know where one starts. The first tokens of `eval_ids` have a shorter context.

    Args:
        train_ids, eval_ids: token ids in [0, vocab_size), documents one after the other.
        num_bytes: UTF-8 bytes of the text behind `eval_ids`.
        order: 1 for unigrams, 3 for trigrams; `vocab_size ** order` must fit into 63 bits.
    """
    train, held_out = np.asarray(train_ids, np.int64), np.asarray(eval_ids, np.int64)
    if vocab_size**order >= 2**63:
        raise ValueError(f"{order}-grams over {vocab_size} tokens don't fit into 63 bits")
    probability = np.full(len(held_out), 1 / vocab_size)
    for length in range(1, order + 1):
        # the highest order counts occurrences, the ones below it the distinct tokens seen before
        counted = _windows(train, length, vocab_size) if length == order else _continuations(train, length, vocab_size)
        asked = _windows(held_out, length, vocab_size)
        probability[length - 1 :] = _interpolate(counted, asked, probability[length - 1 :], vocab_size)
    return float(-np.log2(probability).sum() / num_bytes)


def _windows(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Each window of `length` tokens as one number, the context in its high digits."""
    keys = np.zeros(max(len(ids) - length + 1, 0), np.int64)
    for step in range(length):
        keys = keys * vocab_size + ids[step : step + len(keys)]
    return keys


def _continuations(ids: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Each window once for every distinct token that is before it somewhere."""
    return np.unique(_windows(ids, length + 1, vocab_size)) % vocab_size**length


def _interpolate(counted: np.ndarray, asked: np.ndarray, lower: np.ndarray, vocab_size: int) -> np.ndarray:
    """P(token | context) of the n-grams `asked`, from the n-grams `counted` and the lower order's probabilities."""
    ngrams, counts = np.unique(counted, return_counts=True)
    discounts = _discounts(counts)
    taken = discounts[np.minimum(counts, 3)]
    contexts, starts = np.unique(ngrams // vocab_size, return_index=True)
    total = np.add.reduceat(counts, starts)
    reserved = np.add.reduceat(taken, starts) / total  # what the discounts leave to the lower order

    place = np.minimum(np.searchsorted(ngrams, asked), len(ngrams) - 1)
    kept = np.where(ngrams[place] == asked, counts[place] - taken[place], 0.0)
    context = asked // vocab_size
    at = np.minimum(np.searchsorted(contexts, context), len(contexts) - 1)
    return np.where(contexts[at] == context, kept / total[at] + reserved[at] * lower, lower)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of n-grams seen 0, 1, 2, and 3 or more times (equation 17 of Chen and Goodman)."""
    once, twice, thrice, four = (max(int((counts == times).sum()), 1) for times in (1, 2, 3, 4))
    share = once / (once + 2 * twice)
    discounts = [0.0, 1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice]
    return np.clip(discounts, [0, 0.1, 0.1, 0.1], [0, 1, 2, 3])


def shared_tokens_accuracy(prompts: Sequence[Sequence[int]], pairs: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of pairs whose chosen answer has more in common with its prompt: the sum of log(N / n) over distinct tokens.

    N: of `prompts`, those that are counted over; n: those with the token (both one more, so that an unknown token counts too).
    `pairs`: token ids of prompt, chosen and rejected answer. A pair of like sums counts half.
    """
    chosen, rejected = (shared_tokens(prompts, [(pair[0], pair[side]) for pair in pairs]) for side in (1, 2))
    return float(np.mean([(a > b) + 0.5 * (a == b) for a, b in zip(chosen, rejected, strict=True)]))


def shared_tokens(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """How much each answer has in common with its prompt, as above; `answers`: token ids of prompt and answer."""
    seen_in = Counter(token for prompt in prompts for token in set(prompt))
    return [
        math.fsum(math.log((len(prompts) + 1) / (seen_in[token] + 1)) for token in set(prompt) & set(answer))
        for prompt, answer in answers
    ]


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
