"""What is used of other libraries, and is not public or may grow, is as it was."""

import inspect

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from toolkit.data.compat import fingerprint_of, set_fingerprint
from toolkit.data.tokenize.columns import _OF_RENDERING


def test_every_argument_of_rendering_is_kept_from_a_row() -> None:
    """Fails when: transformers' apply_chat_template has another argument than `_OF_RENDERING` names."""
    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert arguments - {"self", "kwargs", "tools", "documents"} == _OF_RENDERING - {"messages"}


def test_the_fingerprint_that_is_set_is_the_one_that_derived_rows_are_named_by() -> None:
    """Fails when: datasets keeps the fingerprint elsewhere, so that a cache would be named by a file's time of modification."""
    ours, others = (Dataset.from_dict({"text": ["a", "b"]}) for _ in range(2))
    for rows in (ours, others):
        set_fingerprint(rows, "0123")
        assert fingerprint_of(rows) == "0123"
    derived = [fingerprint_of(rows.select([1])) for rows in (ours, others)]
    assert derived[0] == derived[1] != "0123"
