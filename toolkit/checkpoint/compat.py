"""A name of transformers that is not public; tests/checkpoint/test_compat.py fails when it moves. Seen in transformers 5.23."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def origin_of(config: PretrainedConfig | None) -> tuple[str | None, str | None]:
    """Name and commit of what a model's config was read from; None where it was made here, or by another library."""
    return getattr(config, "name_or_path", None) or None, getattr(config, "_commit_hash", None)
