"""The noise of masked diffusion: the expectation of what it counts, and what is never hidden."""

import itertools

import numpy as np
import pytest

from toolkit.data.loading.noise import hide_tokens
from toolkit.data.loading.order import generator_of

MASK = 99


def hide(document: dict, number: int = 0, **settings) -> dict:
    return hide_tokens(document, generator_of(number, "noise"), 0.5, mask_token_id=MASK, **settings)


def test_the_expected_sum_is_the_bound_of_both_of_its_forms() -> None:
    """Against all subsets of four tokens, and against hiding each with a probability t that is integrated from 0 to 1.

    Fails when: a hidden token counts 1 / l, or the number of hidden tokens begins at 0.
    """
    length = 4
    subsets = [set(s) for count in range(1, length + 1) for s in itertools.combinations(range(length), count)]
    nll = {frozenset(s): {i: 1.0 + i + 0.3 * len(s) ** 2 + (0.7 if 0 in s else 0) for i in s} for s in subsets}  # of any model: depends on all that is hidden
    even = sum(
        np.mean([sum(nll[frozenset(s)].values()) for s in subsets if len(s) == count]) / count for count in range(1, length + 1)
    )  # 1 / L for each l, times L / l
    points, weights = np.polynomial.legendre.leggauss(20)
    shares = (points + 1) / 2
    by_share = sum(
        w / 2 * sum(t ** len(s) * (1 - t) ** (length - len(s)) / t * sum(nll[frozenset(s)].values()) for s in subsets)
        for t, w in zip(shares, weights, strict=True)
    )
    assert even == pytest.approx(by_share, rel=1e-12)
    found = []
    for number in range(20_000):
        noised = hide({"input_ids": np.arange(length)}, number)
        hidden = frozenset(np.flatnonzero(noised["input_ids"] == MASK).tolist())
        found.append(sum(nll[hidden][i] * w for i, w in zip(sorted(hidden), noised["token_weights"], strict=True)))
    assert np.mean(found) == pytest.approx(even, abs=4 * float(np.std(found)) / len(found) ** 0.5)
    assert np.std(found) / len(found) ** 0.5 < 0.01 * even


@pytest.mark.parametrize("shift", [False, True])
def test_prompts_stay_and_labels_are_at_the_places_that_predict(shift: bool) -> None:
    """Fails when: a prompt is hidden, the first token of a text is asked of a model that predicts from the left neighbor, or the
    tokens that count are those that are hidden.
    """
    ids = np.array([5, 6, 7, 8, 9, 10])
    labels = np.array([-100, -100, 7, 8, -100, 10])
    seen = set()
    for number in range(60):
        noised = hide({"input_ids": ids, "labels": labels}, number, shift_logits=shift)
        hidden = np.flatnonzero(noised["input_ids"] == MASK)
        assert set(hidden) <= {2, 3, 5}
        assert noised["supervised_tokens"] == 3
        assert noised["token_weights"].tolist() == pytest.approx([3 / len(hidden)] * len(hidden))
        assert (np.flatnonzero(noised["labels"] != -100) == hidden - shift).all()
        assert (noised["labels"][hidden - shift] == ids[hidden]).all()
        seen |= {tuple(hidden)}
        of_text = hide({"input_ids": ids}, number, shift_logits=shift)
        assert of_text["supervised_tokens"] == 6 - shift
        assert not (shift and of_text["input_ids"][0] == MASK)
    assert len(seen) == 7  # every subset but the empty one


def test_attention_is_annealed_by_the_progress_of_the_run_alone() -> None:
    """Fails when: annealing draws before the tokens are hidden, so that it changes which ones are."""
    document = {"input_ids": np.arange(20)}
    plain, half = hide(document), hide(document, annealing=0.8)
    assert (plain["input_ids"] == half["input_ids"]).all()
    assert "seen_ahead" not in plain
    assert half["seen_ahead"] == 0.5 / 0.8
    assert hide(document, annealing=0.2)["seen_ahead"] == 1.0


def test_a_document_without_supervised_tokens_is_left_as_it_is() -> None:
    """As the piece of a cut document that holds nothing but its prompt. Fails when: the number of hidden tokens is drawn from an empty range."""
    noised = hide({"input_ids": np.arange(3), "labels": np.full(3, -100)})
    assert noised["input_ids"].tolist() == [0, 1, 2]
    assert (noised["supervised_tokens"], len(noised["token_weights"])) == (0, 0)
