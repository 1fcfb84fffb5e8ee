"""Plain text of a split: to train a tokenizer on, to count its bytes; and what a model trained on a split must beat."""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from toolkit.config import ClassificationConfig, Refusal
from toolkit.data.demo_corpus.baselines import (
    area_under_curve,
    compression_baselines,
    label_baselines,
    ngram_bits_per_byte,
    shared_tokens,
    shared_tokens_accuracy,
)
from toolkit.data.loading.collate import IGNORED
from toolkit.data.tokenize.columns import label_column

TOKENIZER_ROWS = 200_000  # rows of a stream that a tokenizer is trained on: more change it little
NGRAM_TOKENS = 4_000_000  # training tokens that n-grams are counted on: a few seconds
LABELED_ROWS = 20_000  # training rows that a classifier of words, or its like, is fitted to: a few seconds


def texts_of(split: Any) -> Iterator[str]:
    """The `text` of each row; of a stream, of the first 200,000 rows.

    Raises:
        Refusal: there is no such column, or a row of it is no text.
    """
    rows = split if hasattr(split, "__len__") else islice(split, TOKENIZER_ROWS)
    for number, row in enumerate(rows, start=1):
        text = row.get("text")
        if not isinstance(text, str):
            there = ", ".join(name for name in row if name != "origin")
            raise Refusal(
                f"{row.get('origin') or f'row {number}'}: pretraining reads the column text, and here it is "
                f"{'missing; the columns are ' + there if 'text' not in row else f'{text!r}'}. "
                "Rename a column with --rename-columns old=text, or correct the row."
            )
        yield text


def texts_of_tokens(documents: list[Any], tokenizer: Any) -> list[str]:
    """The text that the tokens of each document stand for: what is left of it after truncation, splitting and dropping."""
    return tokenizer.batch_decode(documents, skip_special_tokens=True)


def text_size(tokenized: Any, tokenizer: Any) -> dict[str, int]:
    """UTF-8 bytes and tokens of the validation split, and the size of the vocabulary: what bits per byte are counted with."""
    held_out = [row["input_ids"] for row in tokenized.get("validation", [])]
    num_bytes = sum(len(text.encode()) for text in texts_of_tokens(held_out, tokenizer))
    return {"num_bytes": num_bytes, "num_tokens": sum(map(len, held_out)), "vocab_size": len(tokenizer)}


def text_baselines(tokenized: Any, tokenizer: Any) -> dict[str, float]:
    """Bits per byte, on the text of the validation tokens, of gzip and xz and of n-gram models.

    The n-grams are counted on the first 4 million training tokens. Nothing to compare with (an empty dict) for a stream or
    without a validation split.
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


def answer_baselines(tokenized: Any, vocab_size: int) -> dict[str, float]:
    """Mean loss in nats of n-grams over the supervised tokens of the validation split, counted on those of the training split.

    They know which tokens answers are made of and which follow each other, and nothing of the question. Nothing to compare
    with (an empty dict) for a stream or without a validation split.
    """
    if "validation" not in tokenized or not all(hasattr(tokenized[name], "__len__") for name in ("train", "validation")):
        return {}
    train, held_out = _supervised_tokens(tokenized["train"]), _supervised_tokens(tokenized["validation"])
    orders = {"unigram": 1, "bigram": 2}
    # "per byte" of as many bytes as tokens is per token
    bits = {name: ngram_bits_per_byte(train, held_out, len(held_out), vocab_size, order) for name, order in orders.items()}
    return {name: value * math.log(2) for name, value in bits.items()}


def preference_baselines(tokenized: Any) -> dict[str, float]:
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


def unpaired_baselines(tokenized: Any) -> dict[str, float]:
    """Area under the curve on the validation answers of scores that take no model; 0.5 is chance.

    The length of an answer, and what it shares with its prompt, rare tokens counting more (rare among the first 20,000
    training prompts). Nothing to compare with (an empty dict) without a validation split.
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


def class_baselines(raw: Any, config: ClassificationConfig) -> dict[str, float]:
    """Accuracy on the validation rows of saying the most frequent class, and of logistic regression on words.

    The latter is fitted to the first 20,000 training rows. Nothing to compare with (an empty dict) for other problems than
    one class a row, for a stream, for rows that are tokenized already, and without a validation split.
    """
    names = ("train", "validation")
    if config.problem_type != "single_label" or not all(hasattr(raw.get(name), "__len__") for name in names):
        return {}
    if any("text" not in raw[name].column_names for name in names):
        return {}
    train = raw["train"].select(range(min(len(raw["train"]), LABELED_ROWS)))
    return label_baselines(_labeled_texts(train), _labeled_texts(raw["validation"]))


def _labeled_texts(rows: Any) -> tuple[list[str], list[Any]]:
    pairs = rows["text_pair"] if "text_pair" in rows.column_names else [""] * len(rows)
    texts = [f"{text} {pair}" for text, pair in zip(rows["text"], pairs, strict=True)]
    return texts, list(rows[label_column(rows.column_names, "train")])


def _supervised_tokens(split: Any) -> np.ndarray:
    """The tokens of a split whose labels count, from its beginning on."""
    rows = split.with_format("numpy", columns=["labels" if "labels" in split.column_names else "input_ids"])
    labels = np.concatenate([np.asarray(row[1:]) for (row,) in (tuple(row.values()) for row in rows)])
    return labels[labels != IGNORED][:NGRAM_TOKENS]


def _tokens(split: Any) -> np.ndarray:
    """The first tokens of a split, documents one behind the other."""
    enough = np.searchsorted(np.cumsum(np.asarray(split["length"][:])), NGRAM_TOKENS) + 1
    rows = split.select(range(min(len(split), int(enough)))).with_format("numpy", columns=["input_ids"])
    return np.concatenate([np.asarray(ids) for ids in rows["input_ids"][:]])[:NGRAM_TOKENS]
