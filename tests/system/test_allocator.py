"""What a run on a CPU sets of its memory."""

import os

import pytest

from toolkit.system.allocator import PRIMITIVES, keep_few_primitives


@pytest.mark.parametrize(("given", "kept"), [(None, "64"), ("1024", "1024")])
def test_few_primitives_are_kept_where_the_environment_names_no_number(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: oneDNN keeps its own 1,024, or the user's number is replaced."""
    monkeypatch.setenv(PRIMITIVES, given or "")
    if given is None:
        monkeypatch.delenv(PRIMITIVES)
    keep_few_primitives()
    assert os.environ[PRIMITIVES] == kept
