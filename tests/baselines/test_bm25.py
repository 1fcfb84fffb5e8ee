"""BM25 and a random order against their formulas written as loops; the lists of stdlib:rank."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

import toolkit as tk
from toolkit.baselines.word_overlap import bm25, parts_of_words, plain_words, ranking_baselines
from toolkit.demo_corpus.near_duplicates import plain
from toolkit.demo_corpus.tasks import RANKED
from toolkit.metrics.retrieval import ranking_metrics, ranks_in_lists

DOCUMENTS = ["read the whole file", "write a file", "close close close it", "the a of in to and so on at length, said at length"]


def test_bm25_is_its_formula() -> None:
    """Fails when: `norm` leaves out the length, or a word of the query that is there twice counts once."""
    score, number = bm25(DOCUMENTS, plain_words), len(DOCUMENTS)
    mean = sum(len(plain_words(text)) for text in DOCUMENTS) / number
    for query, document in itertools.product(["read a file", "close the file the", "nothing"], DOCUMENTS):
        words, expected = Counter(plain_words(document)), 0.0
        for word in plain_words(query):
            holding = sum(word in plain_words(text) for text in DOCUMENTS)
            rarity = math.log(1 + (number - holding + 0.5) / (holding + 0.5))
            norm = 1.2 * (1 - 0.75 + 0.75 * sum(words.values()) / mean)
            expected += rarity * words[word] / (words[word] + norm)
        assert score(query, document) == pytest.approx(expected, rel=1e-12)


def test_identifiers_are_cut_into_their_words() -> None:
    """Fails when: a capital within a run of capitals begins a word."""
    assert parts_of_words("readHTTPHeader_2 = self.max_size") == ["read", "http", "header", "2", "self", "max", "size"]


def test_any_order_is_the_mean_over_all_orders() -> None:
    """Fails when: the gains are not sorted for the best order."""
    rows = [{"query": "z", "documents": list("abcde"), "labels": [0, 2, 0, 1, 0]}]
    raw = {name: Dataset.from_list(rows) for name in ("train", "validation")}
    labels = np.array(rows[0]["labels"], dtype=float)
    found = [
        ranking_metrics(ranks_in_lists(np.array(order, dtype=float), labels, np.zeros(5)))["ndcg_at_10"]
        for order in itertools.permutations(range(5))
    ]
    assert ranking_baselines(raw)["any order"] == pytest.approx(sum(found) / len(found), rel=1e-12)
    assert ranking_baselines({"train": raw["train"]}) == {}


@pytest.mark.slow
def test_each_list_of_the_corpus_has_one_relevant_document_and_others_of_like_length() -> None:
    """Fails when: a function with the same sentence is among the others, or the relevant one is always first."""
    splits = tk.load_splits(tk.DataConfig(dataset="stdlib:rank"))
    for rows in splits.values():
        assert all(len(row["documents"]) == len(row["labels"]) == RANKED and sum(row["labels"]) == 1 for row in rows)
        assert all(len({plain(text) for text in row["documents"]}) == RANKED for row in rows)
    train = splits["train"]
    place = Counter(labels.index(1) for labels in train["labels"])
    assert min(place[number] for number in range(RANKED)) > len(train) / RANKED / 1.5
    own = np.array([len(row["documents"][row["labels"].index(1)]) for row in train])
    others = np.array([np.mean([len(text) for text in row["documents"]]) for row in train])
    assert abs(np.log(own / others).mean()) < 0.1
