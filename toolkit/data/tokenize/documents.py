"""Texts to token ids, and documents: the tokens of a batch of rows one behind the other in flat arrays, checked and cut."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import Refusal

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a token that is not supervised
CHUNK_CHARACTERS = 1_000_000  # text encoded at a time: an encoding takes some 150 bytes a token while it lives


@dataclass(frozen=True)
class Encoder:
    """What it takes to turn text into documents.

    `plain` is the tokenizer without its post-processor. That one only adds the special tokens, which are here as `prefix`
    and `suffix`, and trims white space off the positions of tokens (Llama 3's does), which would move a mask.
    """

    tokenizer: PreTrainedTokenizerBase
    plain: Tokenizer | None  # None: a tokenizer in Python (Marian's), which encodes whole texts by itself and no others
    prefix: list[int]  # what the tokenizer puts before a text, such as BOS
    suffix: list[int]  # and after it
    end: int | None  # end-of-text token
    vocabulary: int

    @property
    def fast(self) -> Tokenizer:
        if self.plain is None:
            raise Refusal(f"{type(self.tokenizer).__name__}: has no fast version (tokenizer.json), which these rows need.")
        return self.plain

    def encode(self, texts: list[str], positions: bool = False) -> Iterator[Encoding]:
        """Encodings without special tokens, in the order of `texts`; character positions only where requested."""
        encode = self.fast.encode_batch if positions else self.fast.encode_batch_fast
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


def build_encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Costs a copy of the tokenizer (half a second for a large vocabulary), so that the caller's own stays as it is."""
    from tokenizers import Tokenizer

    prefix, suffix = _special_tokens_around(tokenizer)
    if not has_fast_version(tokenizer):
        return Encoder(tokenizer, None, prefix, suffix, tokenizer.eos_token_id, len(tokenizer))
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.post_processor = None
    plain.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    return Encoder(tokenizer, plain, prefix, suffix, tokenizer.eos_token_id, len(tokenizer))


def check_room(limit: int, own: int, texts: int = 1, flag: str = "--max-length") -> None:
    """Refuse a limit that leaves no token for each text between the tokenizer's `own` tokens: all texts would be equal."""
    if limit < own + texts:
        what = "leaves no room for a text next to what is put around it"
        raise Refusal(f"{flag} {limit}: {what}. Take at least {own + texts}.")


def has_fast_version(tokenizer: PreTrainedTokenizerBase) -> bool:
    return getattr(tokenizer, "backend_tokenizer", None) is not None


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that decides how texts and chats become ids. Truncation and padding, which use changes, are left out."""
    if has_fast_version(tokenizer):
        content = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')[2]  # they are before it
    else:
        with TemporaryDirectory() as folder:
            content = repr([Path(path).read_bytes() for path in tokenizer.save_vocabulary(folder) or ()])
    rest = [tokenizer.chat_template, tokenizer.special_tokens_map, list(_special_tokens_around(tokenizer))]
    return hashlib.sha256((content + json.dumps(rest, sort_keys=True, default=str)).encode()).hexdigest()


def _special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids a tokenizer puts before and after one text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return around(bare, full)


def around(bare: list[int], full: list[int]) -> tuple[list[int], list[int]]:
    """What is before and behind the ids `bare` in `full`."""
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:at], full[at + len(bare) :]


@dataclass(frozen=True)
class Documents:
    """Tokens of several documents. `whole` is each one's length before anything was cut off."""

    values: np.ndarray  # int32 [tokens]
    bounds: np.ndarray  # int64 [documents + 1]
    labels: np.ndarray | None  # int32 [tokens], IGNORED where not supervised; None: all are supervised
    origins: list[str]
    whole: np.ndarray  # int64 [documents]
    columns: dict[str, list[Any]] = field(default_factory=dict)  # what else a row holds, one entry a document
    aligned: bool = False  # labels are of the tokens themselves, such as tags, and not of what the tokens before predict

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)

    def supervised(self) -> np.ndarray:
        """Supervised tokens of each document. Unless labels are aligned, its first one is none: nothing comes before it."""
        if self.labels is None:
            return np.maximum(self.lengths - 1, 0)
        counted = self.labels != IGNORED
        if not self.aligned:
            counted[self.bounds[:-1][self.lengths > 0]] = False
        return np.diff(np.concatenate([[0], np.cumsum(counted)])[self.bounds])

    def take(self, rows: np.ndarray) -> Documents:
        """The documents at `rows`, in that order."""
        lengths = self.lengths[rows]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.repeat(self.bounds[:-1][rows] - bounds[:-1], lengths) + np.arange(bounds[-1])
        return Documents(
            self.values[tokens], bounds, None if self.labels is None else self.labels[tokens],
            [self.origins[row] for row in rows], self.whole[rows],
            {name: [column[row] for row in rows] for name, column in self.columns.items()}, self.aligned,
        )  # fmt: skip

    def lists(self, flat: np.ndarray) -> list[list[int]]:
        """A flat array of tokens or labels as one list a document."""
        return [part.tolist() for part in np.split(flat, self.bounds[1:-1])] if len(self) else []


def join_documents(
    ids: list[list[int]],
    spans: list[list[tuple[int, int]]] | None,
    origins: list[str],
    columns: dict[str, list[Any]] | None = None,
) -> Documents:
    """Documents from the ids of each and, unless all tokens are supervised, the token ranges that are."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    values = np.fromiter(chain.from_iterable(ids), np.int32, bounds[-1])
    labels = None
    if spans is not None:
        labels = np.full_like(values, IGNORED)
        for start, ranges in zip(bounds[:-1].tolist(), spans, strict=True):
            for first, end in ranges:
                labels[start + first : start + end] = values[start + first : start + end]
    return Documents(values, bounds, labels, origins, lengths, columns or {})


@dataclass(frozen=True)
class Cut:
    """What became of over-long documents."""

    overlong: int = 0
    unsupervised: int = 0  # dropped because none of the tokens that were left is supervised
    tokens: int = 0  # cut off or dropped
    identical: int = 0  # pairs dropped because cutting made their answers the same
    clipped: int = 0  # pairs whose prompt was cut


def cut_documents(documents: Documents, max_length: int, overlong: str) -> tuple[Documents, Cut]:
    """No document longer than `max_length`: by truncating, dropping, splitting into documents, or refusing.

    Truncation cuts on the right. A document left without a supervised token teaches nothing and is dropped.
    """
    is_over = documents.lengths > max_length
    if not is_over.any():
        return documents, Cut()
    if overlong in ("drop", "refuse"):
        return leave_out(documents, max_length, overlong, instead="--overlong truncate, drop or split")
    cut = {"truncate": _truncate, "split": _split}[overlong](documents, max_length)
    is_taught = cut.supervised() > 0
    kept = cut.take(np.flatnonzero(is_taught))
    lost = int(len(documents.values) - len(kept.values))
    return kept, Cut(int(is_over.sum()), unsupervised=int((~is_taught).sum()), tokens=lost)


def cut_as_read(documents: Documents, max_length: int, overlong: str) -> tuple[Documents, Cut]:
    """As `cut_documents`, of a task that truncates as it reads, since what follows the text must stay: only counted then."""
    if overlong != "truncate":
        return cut_documents(documents, max_length, overlong)
    lost = int(documents.whole.sum() - len(documents.values))
    return documents, Cut(overlong=int((documents.whole > max_length).sum()), tokens=lost)


def leave_out(
    documents: Documents, max_length: int, overlong: str, measured: str = "", *, flag: str = "--max-length",
    instead: str = "--overlong truncate or drop",
) -> tuple[Documents, Cut]:  # fmt: skip
    """Without those longer than `max_length` (drop), or none of them (refuse), by `whole`, the length of what is `measured`."""
    is_over = documents.whole > max_length
    if not is_over.any():
        return documents, Cut()
    if overlong == "refuse":
        worst = int(np.argmax(documents.whole))
        where = f" in {measured}" if measured else ""
        raise Refusal(
            f"{documents.origins[worst]}: {documents.whole[worst]:,} tokens{where}, more than {flag} {max_length}. Shorten the "
            f"row, raise {flag}, or choose {instead}."
        )
    kept, count = documents.take(np.flatnonzero(~is_over)), int(is_over.sum())
    return kept, Cut(overlong=count, tokens=len(documents.values) - len(kept.values))


def _truncate(documents: Documents, max_length: int) -> Documents:
    lengths = documents.lengths
    kept = np.minimum(lengths, max_length)
    place = np.arange(len(documents.values)) - np.repeat(documents.bounds[:-1], lengths)
    is_kept = place < np.repeat(kept, lengths)
    labels = None if documents.labels is None else documents.labels[is_kept]
    return replace(documents, values=documents.values[is_kept], labels=labels, bounds=np.concatenate([[0], np.cumsum(kept)]))


def _split(documents: Documents, max_length: int) -> Documents:
    """Pieces of `max_length`, each a document: the tokens stay where they are, only bounds are added."""
    pieces = [np.arange(start, end, max_length) for start, end in zip(documents.bounds[:-1], documents.bounds[1:], strict=True)]
    rows = np.repeat(np.arange(len(documents)), [len(starts) for starts in pieces])
    return replace(
        documents, bounds=np.append(np.concatenate(pieces), documents.bounds[-1]), whole=documents.whole[rows],
        origins=[documents.origins[row] for row in rows],
        columns={name: [column[row] for row in rows] for name, column in documents.columns.items()},
    )  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """What the checks need of a tokenizer."""

    vocabulary: int
    bos: int | None
    turn_ends: tuple[int, ...]  # ids that end a text or a turn


def check_tokens(documents: Documents, rules: Rules) -> None:
    """Refuse a document without tokens, with a doubled BOS, or with an id that the tokenizer doesn't have."""
    lengths, starts, values = documents.lengths, documents.bounds[:-1], documents.values
    _refuse(documents, lengths == 0, "no tokens at all. Remove the row.")
    if rules.bos is not None:
        second = np.minimum(starts + 1, len(values) - 1)
        doubled = (lengths > 1) & (values[starts] == rules.bos) & (values[second] == rules.bos)
        where = "Take it out of the text, or out of the chat template (--chat-template FILE)."
        _refuse(documents, doubled, f"begins with BOS (token {rules.bos}) twice. {where}")
    outside = (values < 0) | (values >= rules.vocabulary)
    if outside.any():
        at = int(np.argmax(outside))
        row = int(np.searchsorted(documents.bounds, at, side="right")) - 1
        raise Refusal(
            f"{documents.origins[row]}: token id {values[at]} is outside the vocabulary of {rules.vocabulary:,}. The data were "
            "tokenized with another tokenizer: name it with --tokenizer"
        )


def check_supervision(documents: Documents) -> None:
    """Refuse a document with nothing to learn."""
    nothing = "no token is supervised: there is nothing to learn from it. Remove the row, or correct its mask."
    single = "a single token: there is nothing to predict. Remove the row."
    _refuse(documents, documents.supervised() == 0, single if documents.labels is None else nothing)


def _refuse(documents: Documents, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        raise Refusal(f"{documents.origins[int(np.argmax(wrong))]}: {what}")
