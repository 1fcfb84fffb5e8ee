"""Which way a metric improves."""

_SMALLER = ("loss", "perplexity", "error", "bits_per", "mse", "mae")
_SMALLER_WORDS = frozenset({"wer", "cer", "bits", "truncated"})  # whole words: an "answer" is no word error rate


def greater_is_better(name: str, given: bool | None = None) -> bool:
    """Whether more of a metric is better: as given, else less for losses, errors, perplexities and what was truncated."""
    if given is not None:
        return given
    return not any(part in name for part in _SMALLER) and not _SMALLER_WORDS.intersection(name.split("_"))
