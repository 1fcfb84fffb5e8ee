"""Packing: the rows are those of the plain algorithm, every token is in exactly one of them, and it is fast."""

import time

import numpy as np
import pytest

from toolkit.data.loading.packing import pack_best_fit, pack_wrapped


def plain_best_fit(lengths, capacity):
    """Best-fit-decreasing as the textbook has it, O(n^2)."""
    rows, rooms = [], []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [(room, row) for row, room in enumerate(rooms) if room >= lengths[document]]
        if not fits:
            rows.append([])
            rooms.append(capacity)
        row = min(fits)[1] if fits else len(rows) - 1
        rows[row].append(document)
        rooms[row] -= lengths[document]
    return rows


def lognormal_lengths(count, capacity, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 1.0, count), 1, capacity).astype(np.int64)


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_gives_the_rows_of_the_plain_algorithm(seed):
    """Fails when `per_row` is 1 (a row is left after one document), or rows are taken from the back of `take_fullest`."""
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 60))
    lengths = generator.integers(1, capacity + 1, size=int(generator.integers(0, 300)))
    if seed % 2:
        lengths = np.minimum(lengths, generator.integers(1, capacity // 3 + 2, size=len(lengths)))
    packing = pack_best_fit(lengths, capacity)
    rows = [[document for document, _, _ in packing.row(i)] for i in range(len(packing))]
    assert rows == plain_best_fit(lengths.tolist(), capacity)


def test_every_document_is_whole_in_one_row_and_no_row_overflows():
    """Fails when a row's room is not reduced by what it took."""
    lengths = lognormal_lengths(20_000, 2048)
    packing = pack_best_fit(lengths, 2048)
    assert np.array_equal(np.sort(packing.documents), np.arange(len(lengths)))
    assert not packing.starts.any()
    assert np.array_equal(packing.ends, lengths[packing.documents])
    assert max(sum(end for _, _, end in packing.row(i)) for i in range(len(packing))) <= 2048
    assert packing.row_bounds[0] == 0
    assert packing.row_bounds[-1] == len(lengths)
    assert packing.fill > 0.99


def test_packing_is_a_function_of_the_lengths_alone():
    """Fails when the order of equal lengths or of equally full rows is left to chance (an unstable argsort)."""
    lengths = lognormal_lengths(5_000, 512)
    first, second = pack_best_fit(lengths, 512), pack_best_fit(lengths.astype(np.int32), 512)
    assert np.array_equal(first.documents, second.documents)
    assert np.array_equal(first.row_bounds, second.row_bounds)


def test_best_fit_takes_milliseconds_for_a_million_tokens():
    """Half a million documents; the textbook loop would take hours, one with bisection minutes.

    Fails when: a row takes one document at a time (`rows_used, per_row = rows[:1], 1`).
    """
    lengths = lognormal_lengths(500_000, 4096)
    started = time.process_time()
    packing = pack_best_fit(lengths, 4096)
    seconds_per_million_tokens = (time.process_time() - started) / (lengths.sum() / 1e6)
    assert seconds_per_million_tokens < 0.02
    assert packing.fill > 0.99


@pytest.mark.parametrize("seed", range(20))
def test_wrapped_rows_hold_the_stream_of_tokens_in_order(seed):
    """Reference: the concatenated tokens cut by slicing. Fails when a piece's offset in its document is forgotten."""
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 30))
    lengths = generator.integers(1, 70, size=int(generator.integers(1, 80)))
    stream = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    packing = pack_wrapped(lengths, capacity)
    rows = [[(d, t) for d, start, end in packing.row(i) for t in range(start, end)] for i in range(len(packing))]
    assert rows == [stream[i : i + capacity] for i in range(0, len(stream), capacity)]
    assert packing.fill == pytest.approx(len(stream) / (len(rows) * capacity))


@pytest.mark.parametrize("pack", [pack_best_fit, pack_wrapped])
def test_no_documents_make_no_rows(pack):
    """Fails when: the fill of no rows is 0."""
    packing = pack(np.array([], dtype=np.int64), 8)
    assert len(packing) == 0
    assert packing.fill == 1.0


def test_a_document_longer_than_a_row_is_refused_by_number():
    """Fails when: one more token than a row holds is let through."""
    with pytest.raises(ValueError, match=r"document 1 .*\b9 tokens.*\b8\b"):
        pack_best_fit(np.array([3, 9, 8]), 8)


@pytest.mark.parametrize("pack", [pack_best_fit, pack_wrapped])
def test_an_empty_document_is_refused_by_number(pack):
    """Fails when: a length of 0 is let through."""
    with pytest.raises(ValueError, match="document 2 has no tokens"):
        pack(np.array([3, 1, 0]), 8)


@pytest.mark.parametrize("capacity", [2, 3, 7, 64])
def test_wrapped_rows_with_overlap_predict_every_token_but_a_documents_first(capacity: int) -> None:
    """So an evaluation charges every token once, whatever the row's length. Fails when: a cut piece begins at the cut."""
    lengths = np.array([1, 5, 9, 2, 30, 1])
    packing = pack_wrapped(lengths, capacity, overlap=True)
    predicted = []
    for row in range(len(packing)):
        pieces = packing.row(row)
        assert sum(end - start for _, start, end in pieces) <= capacity
        predicted += [(document, token) for document, start, end in pieces for token in range(start + 1, end)]
    assert sorted(predicted) == [(document, token) for document, length in enumerate(lengths) for token in range(1, length)]
