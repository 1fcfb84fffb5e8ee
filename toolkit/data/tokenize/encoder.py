"""A tokenizer as the data rooms use it: plain text to ids, special tokens added in sight, exact positions of characters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

CHUNK_CHARACTERS = 1_000_000  # text encoded at a time: an encoding takes some 150 bytes a token while it lives


@dataclass(frozen=True)
class Encoder:
    """What it takes to turn text into documents.

    `plain` is the tokenizer without its post-processor. That one only adds the special tokens, which are here as `prefix`
    and `suffix`, and trims white space off the positions of tokens (Llama 3's does), which would move a mask.
    """

    tokenizer: Any
    plain: Tokenizer
    prefix: list[int]  # what the tokenizer puts before a text, such as BOS
    suffix: list[int]  # and after it
    end: int | None  # end-of-text token
    vocabulary: int

    def encode(self, texts: list[str], positions: bool = False) -> Iterator[Encoding]:
        """Encodings without special tokens, in the order of `texts`; character positions only where asked for."""
        encode = self.plain.encode_batch if positions else self.plain.encode_batch_fast
        start, size = 0, 0
        for i, text in enumerate(texts):
            size += len(text)
            if size >= CHUNK_CHARACTERS or i == len(texts) - 1:
                yield from encode(texts[start : i + 1], add_special_tokens=False)
                start, size = i + 1, 0

    def add_start(self, ids: list[int]) -> list[int]:
        """With what the tokenizer puts first, unless the text began with it: a BOS is never doubled."""
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def add_end(self, ids: list[int]) -> list[int]:
        """With what the tokenizer puts last and an end of text, unless it is there already."""
        if self.suffix and ids[-len(self.suffix) :] != self.suffix:
            ids = ids + self.suffix
        return ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]


def build_encoder(tokenizer: Any) -> Encoder:
    """Costs a copy of the tokenizer (half a second for a large vocabulary), so that the caller's own stays as it is."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.post_processor = None
    plain.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    prefix, suffix = _special_tokens_around(tokenizer)
    return Encoder(tokenizer, plain, prefix, suffix, tokenizer.eos_token_id, len(tokenizer))


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of all that decides how texts and chats become ids. Truncation and padding, which use changes, are left out."""
    content = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')[2]  # they stand before it
    rest = [tokenizer.chat_template, tokenizer.special_tokens_map, list(_special_tokens_around(tokenizer))]
    return hashlib.sha256((content + json.dumps(rest, sort_keys=True, default=str)).encode()).hexdigest()


@dataclass(frozen=True)
class PairFrame:
    """What a tokenizer puts before, between and after two texts, and the token types of all five parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[int, int, int, int, int]

    def join(self, first: list[int], second: list[int], room: int | None) -> tuple[list[int], list[int]]:
        """Ids and token types of a pair; to fit `room` tokens, the longer text is shortened first."""
        if room is not None:
            room -= len(self.before) + len(self.between) + len(self.after)
            kept = min(len(first), max(room - len(second), (room + 1) // 2))
            first, second = first[:kept], second[: room - kept] if kept < len(first) else second[: max(room - len(first), 0)]
        parts = (self.before, first, self.between, second, self.after)
        ids = [token for part in parts for token in part]
        return ids, [kind for part, kind in zip(parts, self.types, strict=True) for _ in part]


def pair_frame(tokenizer: Any) -> PairFrame:
    """Found by tokenizing two short texts."""
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "b"))
    full = tokenizer("a", "b", return_token_type_ids=True)
    ids, types = full["input_ids"], full["token_type_ids"]
    at = next(i for i in range(len(ids)) if ids[i : i + len(one)] == one)
    then = next(i for i in range(at + len(one), len(ids)) if ids[i : i + len(two)] == two)
    middle, end = at + len(one), then + len(two)
    kinds = [types[min(place, len(types) - 1)] for place in (0, at, middle, then, end)]
    return PairFrame(ids[:at], ids[middle:then], ids[end:], (kinds[0], kinds[1], kinds[2], kinds[3], kinds[4]))


def _special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids a tokenizer puts before and after one text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:at], full[at + len(bare) :]
