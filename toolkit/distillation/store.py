"""A teacher's log-probabilities on disk: for each supervised token the most probable tokens, and the mass of all others.

A store is a folder of blocks, addressed by a digest of all that its numbers depend on. A block is a file of consecutive
examples, with the name of its store and its CRC-32, written at once: a killed run leaves whole blocks, and the next one goes on
to the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.packing import Rows, count_supervised
from toolkit.distributed.ranks import say_once
from toolkit.system.digests import read_sealed, seal
from toolkit.system.files import make_folder, remove, write_atomically

BLOCK_BYTES = 32 << 20
ABANDONED = 3600.0  # seconds since a block that is being written has grown
Collate = Callable[[list[Document]], MicroBatch]
_ARRAYS = ("store", "examples", "tokens", "logps", "ids")  # of a block; the last is missing where all tokens are stored


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one example lies: a file, the first of its tokens there, and how many."""

    path: Path
    first: int
    tokens: int
    places: Mapping[str, tuple[int, np.dtype, int]]  # of logps and ids: offset in bytes, type, numbers a token


@dataclass
class Store:
    """What is kept of one split, of `top_k` tokens out of `vocabulary`: all of them have no ids and no tail."""

    folder: Path
    top_k: int
    vocabulary: int
    known: dict[int, Stored] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> int:
        return 4 * self.vocabulary if self._is_whole else 4 * (self.top_k + 1) + self._id_type.itemsize * self.top_k

    @property
    def _is_whole(self) -> bool:
        return self.top_k == self.vocabulary

    @property
    def _id_type(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    def open(self) -> None:
        """Read every block once and note where its examples lie. A damaged one is removed, with a warning; so are parts
        of blocks that a killed process has left."""
        self.known = {}
        for path in self.folder.glob(".*.block.*"):  # of a process that was killed while it wrote one, which takes seconds
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    remove(path)
        for path in sorted(self.folder.glob("*.block")):
            try:
                self.known |= _places(path)
            except FileNotFoundError:  # removed by another process that found it damaged
                continue
            except (OSError, ValueError) as error:
                say_once(f"{path} is damaged ({error}): its log-probabilities are computed anew")
                remove(path)

    def write(self, number: int, examples: list[int], tokens: list[int], logps: np.ndarray, ids: np.ndarray | None) -> None:
        """Write a block.

        Args:
            number: of the block among those of the split.
            examples, tokens: the numbers of its examples, and the supervised tokens of each.
            logps, ids: `[tokens, top_k + 1]` and `[tokens, top_k]`, or `[tokens, vocabulary]` and None.

        Raises:
            OSError: it can't be written.
        """
        numbers = np.array(examples, dtype=np.int64)
        of_tokens = [logps.astype(np.float32, copy=False), *([] if ids is None else [ids.astype(self._id_type)])]
        content = io.BytesIO()
        for array in (_name_of(self.folder), numbers, np.array(tokens, dtype=np.int64), *of_tokens):
            np.save(content, array)
        make_folder(self.folder)
        name = f"{number:06}-{hashlib.sha256(numbers.tobytes()).hexdigest()[:8]}.block"
        own = self.folder / f".{name}.{os.getpid()}"  # two runs on the same data may write at the same time
        write_atomically(self.folder / name, seal(content.getvalue()), own)

    def read(self, example: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Log-probabilities `[tokens, top_k + 1]` and ids `[tokens, top_k]` of an example; `[tokens, vocabulary]` and None."""
        stored = self.known[example]
        with open(stored.path, "rb") as file:
            found = {name: _part(file, stored, *place) for name, place in stored.places.items()}
        return found["logps"], found.get("ids")


@dataclass
class TaughtRows:
    """The rows of a split, with the teacher's log-probabilities of each document's supervised tokens, for `collate_taught`."""

    rows: Rows
    store: Store

    def __post_init__(self) -> None:
        self.lengths, self.units = self.rows.lengths, self.rows.units

    def __len__(self) -> int:
        return len(self.rows)

    def origins(self, example: int) -> list[str]:
        return self.rows.origins(example)

    def documents(self, examples: list[int]) -> list[dict[str, Any]]:
        documents = self.rows.documents(examples)
        found = [self.store.read(example) for example in examples]
        bounds = np.cumsum([0, *(count_supervised(document) for document in documents)])
        taught = {"teacher_logps": np.concatenate([logps for logps, _ in found])}
        if found[0][1] is not None:
            taught["teacher_ids"] = np.concatenate([ids for _, ids in found if ids is not None])
        if bounds[-1] != len(taught["teacher_logps"]):
            raise ValueError(f"{bounds[-1]} supervised tokens, and the store has {len(taught['teacher_logps'])}")
        return [
            {**document, **{name: values[start:end] for name, values in taught.items()}}
            for document, start, end in zip(documents, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]


def collate_taught(
    documents: list[Document], collate: Collate
) -> MicroBatch:
    """A micro-batch of `collate` with `teacher_logps` float32 and `teacher_ids` int64, one row a supervised token."""
    micro_batch = collate(documents)
    for name, dtype in (("teacher_logps", np.float32), ("teacher_ids", np.int64)):
        if name in documents[0]:
            values = np.concatenate([document[name] for document in documents])
            micro_batch[name] = torch.from_numpy(values.astype(dtype, copy=False))
    return micro_batch


def store_path(content: Mapping[str, Any]) -> Path:
    """The folder of a store whose numbers depend on `content` (of what JSON holds), next to the tokenized data."""
    from datasets import config as datasets_config

    key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return Path(datasets_config.HF_DATASETS_CACHE) / f"teacher-{key}"


def blocks_of(rows: Rows, examples: np.ndarray, bytes_per_token: int) -> list[tuple[int, list[int]]]:
    """Number and examples of each block that some examples of a split are written in, in order.

    Which examples share a block follows from the split alone, so that a killed run's blocks are those of the next one.
    """
    tokens = rows.units["tokens"]
    block_of = ((np.cumsum(tokens) - tokens) * bytes_per_token // BLOCK_BYTES).astype(np.int64)
    numbers, first = np.unique(block_of[examples], return_index=True)
    parts = np.split(examples, first[1:]) if len(examples) else []
    return list(zip(numbers.tolist(), (part.tolist() for part in parts), strict=True))


def _places(path: Path) -> dict[int, Stored]:
    content = io.BytesIO(read_sealed(path))
    store, examples, tokens = (np.load(content, allow_pickle=False) for _ in _ARRAYS[:3])
    if not np.array_equal(store, _name_of(path.parent)):
        raise ValueError("it was written for another store")
    places: dict[str, tuple[int, np.dtype, int]] = {}
    for name in _ARRAYS[3:]:
        if content.tell() < len(content.getbuffer()):
            np.lib.format.read_magic(content)
            shape, _, dtype = np.lib.format.read_array_header_1_0(content)
            places[name] = (content.tell(), dtype, shape[1])
            content.seek(shape[0] * shape[1] * dtype.itemsize, os.SEEK_CUR)
    firsts = np.cumsum(tokens) - tokens
    return {
        example: Stored(path, first, count, places)
        for example, first, count in zip(examples.tolist(), firsts.tolist(), tokens.tolist(), strict=True)
    }


def _name_of(folder: Path) -> np.ndarray:
    """The name of a store, which its blocks hold: one that was moved or copied here from another has another name."""
    return np.frombuffer(folder.name.encode(), dtype=np.uint8)


def _part(file: Any, stored: Stored, offset: int, dtype: np.dtype, width: int) -> np.ndarray:
    file.seek(offset + stored.first * width * dtype.itemsize)
    found = np.fromfile(file, dtype, stored.tokens * width)
    if len(found) < stored.tokens * width:
        raise Refusal(f"{stored.path} was cut while this run read it. Go on with --resume: it is computed anew.")
    return found.reshape(stored.tokens, width)
