"""A name of datasets that is not public, and that caches need, is where it was."""

from datasets import Dataset

from toolkit.data.compat import fingerprint_of, set_fingerprint


def test_the_fingerprint_that_is_set_is_the_one_that_derived_rows_are_named_by() -> None:
    """Fails when: datasets keeps the fingerprint elsewhere, so that a cache would be named by a file's time of modification."""
    ours, others = (Dataset.from_dict({"text": ["a", "b"]}) for _ in range(2))
    for rows in (ours, others):
        set_fingerprint(rows, "0123")
        assert fingerprint_of(rows) == "0123"
    derived = [fingerprint_of(rows.select([1])) for rows in (ours, others)]
    assert derived[0] == derived[1] != "0123"
