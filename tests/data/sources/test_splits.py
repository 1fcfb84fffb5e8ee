"""Rows held out by content: no leak, no move, and the same split from a file, a stream, or in another order."""

import hashlib
import random

import datasets
import numpy as np
import pytest
from datasets import Dataset

from toolkit.config import Refusal
from toolkit.data.sources.held_out import batch_keys, first_key, row_keys, split_by_content, stream_by_content

FRACTION = 0.1


def texts(count: int, seed: int = 0) -> list[dict]:
    letters = random.Random(seed)
    return [{"text": "".join(letters.choices("abcdefgh ", k=20)), "origin": f"file:{row}"} for row in range(count)]


def sides(rows: list[dict], fraction: float = FRACTION) -> tuple[list[dict], list[dict]]:
    dataset = Dataset.from_list(rows)
    train, held_out = split_by_content(dataset, fraction, frozenset({first_key(dataset, "rows")}), "rows")
    return train.to_list(), held_out.to_list()


def held_out_by_a_loop(rows: list[dict], fraction: float) -> list[dict]:
    """The rule, said again: the first row's text, and each text whose hash is in the lowest share."""
    found = []
    for row in rows:
        number = int(hashlib.blake2b(row["text"].strip().encode(), digest_size=8).hexdigest(), 16)
        if number < fraction * 2**64 or row["text"].strip() == rows[0]["text"].strip():
            found.append(row)
    return found


def test_held_out_rows_are_those_of_a_plain_loop_over_hashes() -> None:
    """Fails when: the hash takes the origin in, or the comparison is turned around."""
    rows = texts(3000)
    train, held_out = sides(rows)
    assert held_out == held_out_by_a_loop(rows, FRACTION)
    assert train == [row for row in rows if row not in held_out]
    assert abs(len(held_out) - 300) < 4 * (3000 * FRACTION * (1 - FRACTION)) ** 0.5  # four standard deviations


def test_no_row_changes_sides_as_a_file_grows() -> None:
    """From the smallest file on. Fails when: a file with no row in the share gives its lowest hash instead of its first row."""
    rows = texts(150)
    side: dict[str, bool] = {}
    for count in (*range(2, 40), 60, 90, 150):
        train, held_out = sides(rows[:count], 0.02)
        assert train
        assert held_out
        for row in train:
            assert side.setdefault(row["text"], False) is False
        for row in held_out:
            assert side.setdefault(row["text"], True) is True


def test_no_row_but_the_first_changes_sides_when_the_file_is_shuffled() -> None:
    """Fails when: a row's place enters its hash."""
    rows = texts(500)
    shuffled = random.Random(1).sample(rows, len(rows))
    first = {rows[0]["text"], shuffled[0]["text"]}
    before, after = ({row["text"] for row in sides(order)[1]} - first for order in (rows, shuffled))
    assert before == after


def test_a_column_that_appears_later_moves_no_row() -> None:
    """Its nulls, and the floats of a column of whole numbers. Fails when: _canonical keeps nulls, or 1.0 apart from 1."""
    early = [{"a": number, "b": {"d": f"b{number}"}} for number in range(300)]
    late = [*early, {"a": 0.5, "b": {"d": "b", "e": "new"}, "c": "new"}]
    grown = Dataset.from_list([{**row, "c": row.get("c")} for row in late])
    assert row_keys(Dataset.from_list(early)).tolist() == row_keys(grown)[:300].tolist()


@pytest.mark.parametrize(
    "siblings",
    [
        [{"text": "same", "label": 0}, {"text": "same\n", "label": 1}],
        [{"prompt": "same", "completion": "one"}, {"prompt": "same", "completion": "two"}],
        [{"prompt": "same", "chosen": "a", "rejected": "b"}, {"prompt": "same", "chosen": "c", "rejected": "d"}],
        [{"context": "same", "question": "who?"}, {"context": "same", "question": "when?"}],
        [{"source": "same", "target": "eins"}, {"source": "same", "target": "zwei"}],
        [{"tokens": ["same", "one"], "tags": [0, 1]}, {"tokens": ["same", "one"], "tags": [1, 1]}],
        [
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "same"}]},
            {"messages": [{"role": "user", "content": "same"}, {"role": "assistant", "content": "b"}]},
        ],
        [{"id": 1, "premise": "p", "hypothesis": "h", "label": 0}, {"id": 2, "premise": "p", "hypothesis": "h", "label": 1}],
        [{"a": "x", "origin": "f:1"}, {"a": "x", "origin": "f:2"}],
    ],
    ids=lambda siblings: "+".join(siblings[0]),
)
def test_rows_with_the_same_input_stay_on_one_side(siblings: list[dict]) -> None:
    """Fails when: batch_keys hashes all columns of every row."""
    one, two = (batch_keys({name: [value] for name, value in row.items()})[0] for row in siblings)
    assert one == two


@pytest.mark.parametrize(
    "different",
    [
        [{"prompt": "", "completion": "one"}, {"prompt": "", "completion": "two"}],
        [{"text": "one", "source": "web"}, {"text": "two", "source": "web"}],
        [{"text": "one", "context": "web"}, {"text": "two", "context": "web"}],
        [{"premise": "p", "hypothesis": "h"}, {"premise": "p", "hypothesis": "i"}],
        [{"input_ids": [1, 2]}, {"input_ids": [12]}],
    ],
    ids=lambda different: "+".join(different[0]),
)
def test_rows_with_different_inputs_are_told_apart(different: list[dict]) -> None:
    """Fails when: an empty prompt counts as an input, or a column called source does without a target."""
    one, two = (batch_keys({name: [value] for name, value in row.items()})[0] for row in different)
    assert one != two


def test_a_stream_is_split_like_the_table_it_was() -> None:
    """Fails when: stream_by_content keeps `held_out` the wrong way round."""
    rows = [{"messages": [{"role": "user", "content": row["text"]}], "extra": None} for row in texts(400)]
    dataset = Dataset.from_list(rows)
    always = frozenset({first_key(dataset, "rows")})
    table = split_by_content(dataset, FRACTION, always, "rows")
    stream = stream_by_content(dataset.to_iterable_dataset(num_shards=3), FRACTION, always)
    for expected, found in zip(table, stream, strict=True):
        assert list(found) == expected.to_list()
    assert first_key(stream[0], "rows") not in always


@pytest.mark.parametrize("rows", [[{"text": "a"}], [{"text": "a"}, {"text": "a "}]])
def test_what_can_only_be_held_out_whole_is_refused(rows: list[dict]) -> None:
    """Fails when: the check of an empty training side is left out."""
    with pytest.raises(Refusal, match="--eval-fraction 0"):
        sides(rows)


def test_keys_do_not_depend_on_batches_or_on_an_indices_mapping() -> None:
    """Fails when: row_keys reads the Arrow table under a selection."""
    dataset = Dataset.from_list(texts(50))
    keys = row_keys(dataset)
    some = [7, 3, 41, 3]
    assert np.array_equal(row_keys(dataset.select(some)), keys[some])
    assert np.array_equal(np.concatenate([row_keys(dataset.select([place])) for place in range(50)]), keys)


def test_an_unreadable_stream_is_refused_and_not_shown_as_a_traceback() -> None:
    """Fails when: first_key lets the reader's error through."""

    def broken() -> object:
        raise ValueError("JSON parse error in row 0")
        yield {}

    with pytest.raises(Refusal, match="mine can't be read: JSON parse error in row 0"):
        first_key(datasets.IterableDataset.from_generator(broken), "mine")
