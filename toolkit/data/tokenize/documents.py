"""Tokenized documents of a batch, one behind the other in flat arrays, and what is done with those that are too long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from toolkit.config import Refusal

IGNORED = -100  # label of a token that is not supervised


@dataclass(frozen=True)
class Documents:
    """Tokens of several documents. `whole` is each one's length before anything was cut off."""

    values: np.ndarray  # int32 [tokens]
    bounds: np.ndarray  # int64 [documents + 1]
    labels: np.ndarray | None  # int32 [tokens], IGNORED where not supervised; None: all are supervised
    origins: list[str]
    whole: np.ndarray  # int64 [documents]
    columns: dict[str, list[Any]] = field(default_factory=dict)  # what else a row holds, one entry a document

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)

    def supervised(self) -> np.ndarray:
        """Supervised tokens of each document, without its first one: nothing comes before that to predict it from."""
        if self.labels is None:
            return np.maximum(self.lengths - 1, 0)
        counted = self.labels != IGNORED
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
            {name: [column[row] for row in rows] for name, column in self.columns.items()},
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
    dropped: int = 0  # for being too long
    unsupervised: int = 0  # dropped because none of the tokens that were left is supervised
    tokens: int = 0  # cut off or dropped
    identical: int = 0  # pairs dropped because cutting made their answers the same
    clipped: int = 0  # pairs whose prompt was cut


def cut_documents(documents: Documents, max_length: int, overlong: str) -> tuple[Documents, Cut]:
    """No document longer than `max_length`: by truncating, dropping, splitting into documents, or refusing.

    Truncation cuts on the right. A document left without a supervised token teaches nothing and is dropped.
    """
    lengths = documents.lengths
    is_over = lengths > max_length
    if not is_over.any():
        return documents, Cut()
    if overlong == "refuse":
        worst = int(np.argmax(lengths))
        raise Refusal(
            f"{documents.origins[worst]}: {lengths[worst]:,} tokens, more than --max-length {max_length}. Shorten the row, "
            "raise --max-length, or choose --overlong truncate, drop or split"
        )
    cut = {"truncate": _truncate, "drop": _drop, "split": _split}[overlong](documents, max_length)
    is_taught = cut.supervised() > 0
    kept = cut.take(np.flatnonzero(is_taught))
    dropped = int(is_over.sum()) if overlong == "drop" else 0
    return kept, Cut(int(is_over.sum()), dropped, int((~is_taught).sum()), int(len(documents.values) - len(kept.values)))


def _truncate(documents: Documents, max_length: int) -> Documents:
    lengths = documents.lengths
    kept = np.minimum(lengths, max_length)
    place = np.arange(len(documents.values)) - np.repeat(documents.bounds[:-1], lengths)
    is_kept = place < np.repeat(kept, lengths)
    labels = None if documents.labels is None else documents.labels[is_kept]
    return replace(documents, values=documents.values[is_kept], labels=labels, bounds=np.concatenate([[0], np.cumsum(kept)]))


def _drop(documents: Documents, max_length: int) -> Documents:
    return documents.take(np.flatnonzero(documents.lengths <= max_length))


def _split(documents: Documents, max_length: int) -> Documents:
    """Pieces of `max_length`, each a document: the tokens stay where they are, only bounds are added."""
    pieces = [np.arange(start, end, max_length) for start, end in zip(documents.bounds[:-1], documents.bounds[1:], strict=True)]
    rows = np.repeat(np.arange(len(documents)), [len(starts) for starts in pieces])
    return replace(
        documents, bounds=np.append(np.concatenate(pieces), documents.bounds[-1]), whole=documents.whole[rows],
        origins=[documents.origins[row] for row in rows],
        columns={name: [column[row] for row in rows] for name, column in documents.columns.items()},
    )  # fmt: skip
