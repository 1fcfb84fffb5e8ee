"""Baselines of text modeling against the formulas written as loops."""

import math
import random
import zlib
from collections import Counter, defaultdict

import numpy as np
import pytest
from datasets import Dataset

import toolkit as tk
from toolkit.baselines import language as language_baselines
from toolkit.baselines.classes import class_baselines, label_baselines
from toolkit.baselines.language import answer_baselines, compression_baselines, ngram_bits_per_byte, text_baselines
from toolkit.data.texts import text_size

VOCAB = 7


def tokens(count: int, seed: int) -> list[int]:
    """Tokens that depend on the two before them, so that a trigram has something to learn."""
    draw, found = random.Random(seed), [0, 1]
    while len(found) < count:
        found.append((found[-1] + 2 * found[-2] + (draw.random() < 0.3) * draw.randrange(VOCAB)) % VOCAB)
    return found


def kneser_ney(train: list[int], order: int):  # type: ignore[no-untyped-def]
    """P(token | context) by interpolated modified Kneser-Ney, with dictionaries (Chen and Goodman 1998, section 3)."""
    counts: list[Counter] = [Counter() for _ in range(order + 1)]
    counts[order] = Counter(tuple(train[at : at + order]) for at in range(len(train) - order + 1))
    for length in range(1, order):
        longer = {tuple(train[at : at + length + 1]) for at in range(len(train) - length)}
        counts[length] = Counter(ngram[1:] for ngram in longer)
    discounts = [[0.0] * 4]
    for length in range(1, order + 1):
        n1, n2, n3, n4 = (max(sum(c == times for c in counts[length].values()), 1) for times in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        raw = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        discounts.append([0.0, *(min(max(value, 0.1), most) for most, value in enumerate(raw, 1))])
    followers: list[dict] = [defaultdict(list) for _ in range(order + 1)]
    for length in range(1, order + 1):
        for ngram, count in counts[length].items():
            followers[length][ngram[:-1]].append(count)

    def probability(context: tuple[int, ...], token: int) -> float:
        lower = probability(context[1:], token) if context else 1 / VOCAB
        length = len(context) + 1
        seen = followers[length].get(context)
        if not seen:
            return lower
        count = counts[length][(*context, token)]
        kept = count - discounts[length][min(count, 3)]
        return (kept + sum(discounts[length][min(c, 3)] for c in seen) * lower) / sum(seen)

    return probability


@pytest.mark.parametrize("order", [1, 2, 3])
def test_an_ngram_model_spends_the_bits_of_the_formula(order: int) -> None:
    """Fails when: lower orders are counted by occurrences, or a discount's row is off by one."""
    train, held_out = tokens(400, 1), tokens(150, 2)
    probability = kneser_ney(train, order)
    bits = -sum(math.log2(probability(tuple(held_out[max(0, at - order + 1) : at]), held_out[at])) for at in range(150))
    assert ngram_bits_per_byte(train, held_out, 100, VOCAB, order) == pytest.approx(bits / 100, rel=1e-12)


@pytest.mark.parametrize("count", [200, 2])
@pytest.mark.parametrize("context", [[3, 1], [6, 6], [0, 5]])
def test_the_probabilities_of_all_next_tokens_sum_to_one(context: list[int], count: int) -> None:
    """Also after a context that was never seen. Fails when: what the discounts take isn't given to the lower order, or trigrams
    are asked for that two tokens have none of."""
    train = [token for token in tokens(count, 3) if token != 5]

    def bits(ids: list[int]) -> float:
        return ngram_bits_per_byte(train, ids, 1, VOCAB, 3)

    assert sum(2 ** -(bits([*context, token]) - bits(context)) for token in range(VOCAB)) == pytest.approx(1, rel=1e-9)


def test_longer_contexts_help_where_there_is_something_in_them() -> None:
    """Fails when: the lower order's probabilities are used in place of the interpolated ones."""
    train, held_out = tokens(20_000, 1), tokens(2_000, 2)
    unigram, bigram, trigram = (ngram_bits_per_byte(train, held_out, 1000, VOCAB, order) for order in (1, 2, 3))
    assert trigram < 0.8 * bigram
    assert max(unigram, bigram) < 1.01 * 2 * math.log2(VOCAB)


def test_ids_that_do_not_fit_into_the_keys_are_an_error() -> None:
    """Fails when: the check is left out and keys wrap around."""
    with pytest.raises(ValueError, match="63 bits"):
        ngram_bits_per_byte([1], [1], 1, 2**22, 3)


def test_compressors_see_all_texts_as_one() -> None:
    """Bits, not bytes, per UTF-8 byte. Fails when: each text is compressed alone, or characters are counted."""
    texts = ["naïve " * 3 + str(number) for number in range(200)]
    data = "".join(texts).encode()
    deflated = len(zlib.compress(data, 9)) * 8 / len(data)
    found = compression_baselines(texts)
    assert found.keys() == {"gzip", "xz"}
    assert found["gzip"] == pytest.approx(deflated, rel=0.05)  # the same method in another envelope
    noise = np.random.default_rng(0).integers(0, 128, 20_000).astype(np.uint8).tobytes().decode()
    assert all(6.9 < bits < 7.8 for bits in compression_baselines([noise]).values())


class Letters:
    """A tokenizer of letters."""

    def __len__(self) -> int:
        return VOCAB

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("abcdefg"[i] for i in ids)


def test_of_a_large_validation_split_the_first_documents_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits and bytes of the same text, in whole documents.

    Fails when: the bytes are those of all documents, or one document too few is taken.
    """
    documents = [tokens(20, seed) for seed in range(60)]
    splits = {
        name: Dataset.from_dict({"input_ids": part, "length": list(map(len, part))})
        for name, part in (("train", documents[:30]), ("validation", documents[30:]), ("first", documents[30:36]))
    }
    whole = text_baselines(splits, Letters())
    assert text_size(splits, Letters()) == {"num_bytes": 600, "num_tokens": 600, "vocab_size": VOCAB}
    first = text_baselines({"train": splits["train"], "validation": splits["first"]}, Letters())
    monkeypatch.setattr(language_baselines, "HELD_OUT_TOKENS", 110)
    assert text_baselines(splits, Letters()) == first != whole


def test_a_character_that_a_split_cuts_is_counted_once() -> None:
    """Pieces of 5 tokens, each of a byte, of characters of three. Fails when: both of its pieces are decoded to a character."""
    text = "\u4e16\u754c" * 20
    tokenizer = tk.train_tokenizer(["plain words"], vocab_size=300)
    (tokens,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode()) == 120
    pieces = Dataset.from_dict({"input_ids": [tokens[start : start + 5] for start in range(0, 120, 5)]})
    assert text_size({"validation": pieces}, tokenizer)["num_bytes"] == 120


def test_answers_are_judged_by_their_supervised_tokens_only() -> None:
    """Against a loop over the supervised tokens. Fails when: unsupervised labels are counted, or bits are not made nats."""
    train = [{"input_ids": [5, 5, *answer], "labels": [-100, -100, *answer]} for answer in ([1, 2], [1, 3], [1, 2], [2, 2])]
    held_out = [{"input_ids": [5, 1, 2], "labels": [-100, 1, 2]}]
    splits = {"train": Dataset.from_list(train), "validation": Dataset.from_list(held_out)}
    supervised = [label for row in train for label in row["labels"][1:] if label != -100]
    found = answer_baselines(splits, VOCAB)
    for name, order in (("unigram", 1), ("bigram", 2)):
        probability = kneser_ney(supervised, order)
        expected = [probability((1, 2)[max(0, at - order + 1) : at], (1, 2)[at]) for at in range(2)]
        assert found[name] == pytest.approx(-sum(map(math.log, expected)) / 2, rel=1e-9)


def test_classes_are_judged_by_frequency_and_words() -> None:
    """Fails when: the most frequent class of the validation rows is taken, or labels of the wrong split."""
    topics = {0: "cat dog bird", 1: "loan bank money"}
    rows = [{"text": f"{topics[label]} {n}", "label": label} for n in range(12) for label in ((0, 0, 1) if n % 2 else (0, 1))]
    held_out = [{"text": topics[label], "label": label} for label in (1, 1, 1, 0)]
    raw = {"train": Dataset.from_list(rows), "validation": Dataset.from_list(held_out)}
    assert class_baselines(raw) == {"most frequent class": 0.25, "words": 1.0}
    assert class_baselines(raw, "multi_label") == {}
    assert class_baselines({"train": raw["train"]}) == {}


@pytest.mark.parametrize("texts", [["cat", "dog", "bird"], ["1", "2", "3"]])
def test_what_no_classifier_of_words_can_be_fitted_to_is_compared_with_frequency_alone(texts: list[str]) -> None:
    """One class, or no words: a baseline must not end a run. Fails when: such splits are fitted all the same."""
    train = Dataset.from_list([{"text": text, "label": 0} for text in texts])
    raw = {"train": train, "validation": Dataset.from_list([{"text": "cat", "label": 0}])}
    assert class_baselines(raw) == {"most frequent class": 1.0}


def test_held_out_texts_without_a_known_word_end_no_run() -> None:
    """As sentences of a language without spaces mostly are. Fails when: places of words are a tensor of what type they have."""
    train = Dataset.from_list([{"text": text, "label": number % 2} for number, text in enumerate(("今天天气很好", "我不知道", "再见"))])
    raw = {"train": train, "validation": Dataset.from_list([{"text": "你好吗", "label": 0}])}
    assert class_baselines(raw) == {"most frequent class": 1.0, "words": 1.0}


def test_the_classifier_of_words_is_scikit_learns() -> None:
    """Against TfidfVectorizer and LogisticRegression. Fails when: rows are not of length 1, or the penalty is another one."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    draw = random.Random(0)
    words = [f"w{number}" for number in range(60)]

    def labeled(count: int) -> tuple[list[str], list[str]]:
        labels = [draw.choice("abc") for _ in range(count)]
        starts = {"a": 0, "b": 12, "c": 24}
        texts = [" ".join(words[(starts[label] + int(draw.expovariate(0.03))) % 60] for _ in range(6)) for label in labels]
        return texts, labels

    train, held_out = labeled(300), labeled(400)
    theirs = make_pipeline(TfidfVectorizer(sublinear_tf=True), LogisticRegression(C=10.0, max_iter=1000, tol=1e-8)).fit(*train)
    expected = theirs.score(*held_out)
    assert 0.4 < expected < 0.95
    assert label_baselines(train, held_out)["words"] == pytest.approx(expected, abs=0.003)
