"""The mark of tokenized rows: which vocabulary their numbers are of, so that a model with another one never reads them.

It is a column, one text for all rows: that survives Parquet, a stream, a mixture and the cache, which lose metadata of files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.system.console import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZED_WITH = "tokenized_with"


def vocabulary_mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's name and a digest of its tokens with their numbers, such as `Qwen/Qwen3-0.6B 1f0c5d6a7b8e9f00`.

    A chat template, or merges that cut a text otherwise, change no token's meaning and are not part of it. Of a directory the
    name is its last two folders: where that is on someone's machine is not for those who get the rows.
    """
    numbers = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    name = str(tokenizer.name_or_path or "")
    if os.path.isdir(name):
        name = "/".join(Path(name).absolute().parts[-2:])
    return f"{name or 'trained here'} {hashlib.sha256(numbers.encode()).hexdigest()[:16]}"


def check_marks(marks: Sequence[object], mark: str, origins: list[str]) -> None:
    """Refuse rows whose numbers are of another vocabulary than that of `mark`; None is a row without a mark, of a mixture."""
    digest = _digest(mark)
    for found in dict.fromkeys(marks):
        if found is not None and _digest(found) != digest:
            raise Refusal(
                f"{origins[list(marks).index(found)]}: was tokenized with {quoted(found)}, and the tokenizer here is "
                f"{quoted(mark)}: the same numbers are other tokens. Name the tokenizer of the rows (--tokenizer), or tokenize "
                "the text again: toolkit prepare"
            )


def _digest(mark: object) -> str:
    return str(mark).rpartition(" ")[2]
