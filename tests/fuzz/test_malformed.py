"""Malformed inputs: no traceback, no hang, no silent acceptance. FUZZ_CASES says how many, FUZZ_SEED which.

The short form has at least one case of every kind. `make chaos` runs the long form, with another seed every day:

    FUZZ_CASES=300 python -m pytest tests/fuzz/test_malformed.py

Each test names the one-line change under which it was seen to fail.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

malformed = sys.modules["malformed"]  # loaded by conftest.py
SEED, COUNT = int(os.environ.get("FUZZ_SEED", 13)), int(os.environ.get("FUZZ_CASES", 40))
CASES = list(malformed.draw(SEED, COUNT))


@pytest.mark.parametrize("seed", [SEED, 1, 20260131])
def test_the_short_form_has_every_kind(seed: int) -> None:
    """Fails when: the first places of `order` are not one of each kind, or the short form has fewer cases than there are kinds."""
    kinds = malformed.order(seed)
    assert set(kinds[:40]) == set(malformed.KINDS)
    assert {kind: kinds.count(kind) for kind in malformed.KINDS} == malformed.KINDS


@pytest.mark.fast(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.replace(" ", "-"))
def test_a_malformed_input_is_refused_by_name_or_harmless(check: Callable[[Any], None], case: Any) -> None:
    """Fails when: RecursionError is not caught where JSON is parsed, when `check_value` returns at once, or `say` prints raw."""
    check(case)
