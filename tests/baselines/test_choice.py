"""Choosing without a model, counted by hand; the questions of stdlib:choose."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

import toolkit as tk
from toolkit.baselines.word_overlap import choice_baselines
from toolkit.demo_corpus.near_duplicates import plain
from toolkit.demo_corpus.tasks import CHOICES

ROWS = [
    {"question": "the red house", "choices": ["a red thing", "some tree here"], "label": 0},
    {"question": "the old tree", "choices": ["a tree", "the car", "it was a boat"], "label": 0},
    {"question": "readHeader", "choices": ["a header that is read", "footer", "nothing", "xx"], "label": 0},
    {"question": "the red car", "choices": ["a house", "a table"], "label": 1},
]


def test_baselines_are_those_counted_by_hand() -> None:
    """Longest: 0, 0, 1, and of two with 7 characters one. Words: 1, 1, no word in common 1/4, a tie 1/2.

    "the" is in three of four questions and "tree" in one, so "a tree" scores more than "the car". Fails when: ties count whole.
    """
    raw = {name: Dataset.from_list(ROWS) for name in ("train", "validation")}
    found = choice_baselines(raw)
    assert found["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 2) / 4)
    assert found["longest choice"] == pytest.approx((0 + 0 + 1 + 1 / 2) / 4)
    assert found["BM25 on words"] == pytest.approx((1 + 1 + 1 / 4 + 1 / 2) / 4)
    assert found["BM25 on parts of words"] == pytest.approx((1 + 1 + 1 + 1 / 2) / 4)
    assert choice_baselines({"train": raw["train"]}) == {}


@pytest.mark.slow
def test_each_question_of_the_corpus_has_one_right_choice_that_neither_place_nor_length_gives_away() -> None:
    """Fails when: the right choice is always first, or the others are not of like length."""
    splits = tk.load_splits(tk.DataConfig(dataset="stdlib:choose"))
    for rows in splits.values():
        assert all(len({plain(choice) for choice in row["choices"]}) == CHOICES for row in rows)
    train = splits["train"]
    place = Counter(train["label"])
    assert min(place[number] for number in range(CHOICES)) > len(train) / CHOICES / 1.2
    sizes = np.array([[len(choice) for choice in row["choices"]] for row in train])
    own = sizes[np.arange(len(train)), np.array(train["label"])]
    assert abs(np.log(own / sizes.mean(1)).mean()) < 0.1
