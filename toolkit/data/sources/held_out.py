"""Rows held out by a hash of their content, so that a split never leaks and never moves.

What is hashed is the row's *input*: the prompt, the first user turn, the context, the source, the tokens or the text; of two
answers that are texts and begin with their prompt, what both begin with, up to a border that does not depend on the answers. So
verbatim copies, copies with another label, several answers to one prompt and several questions about one context all stay on
one side. Neither the seed nor a row's place matters: a file that grows, is shuffled or is cut into several keeps its split.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.cache.arrow import cache_folder
from toolkit.config import Refusal
from toolkit.data.compat import fingerprint_of
from toolkit.data.tokenize import masks
from toolkit.data.tokenize.masks import common_prefix
from toolkit.system.console import first_line, warn_once
from toolkit.system.progress import with_progress

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BATCH_ROWS = 10_000
KEPT_ROWS = 200_000  # of a source whose keys are kept for the next start
# next to a row's input these are who, where and what of it; two rows that differ only here are the same row
ABOUT_A_ROW = frozenset({"origin", "id", "idx", "index", "label", "labels", "score", "weight"})
# Two texts that begin with their prompt may continue alike for a while, and how far differs from pair to pair. So the prompt
# ends at a mark for the beginning of the answer, without one at the end of the first question: what follows moves neither.
# Without either it is taken to end at the last end of a line, else of a sentence, a word, which answers that begin alike do
# move.
_ANSWER_BEGINS = re.compile(
    r"""(?:^|\n)[ \t]*[#*]*[ ]*(?:assistant|ai|bot|chatbot|chatgpt|gpt|model|response|answer|output|completion|reply|a)[ ]*[*]*:
    |(?:^|\n)[#]+[ ]*(?:assistant|response|answer|output)\b
    |(?:^|\n)[ \t]*TL;?DR:
    |(?-i:\sASSISTANT:)
    |<\|(?:im_start|start_header_id|start_of_role|start)\|>\s*assistant\b | <start_of_turn>model\b
    |<[|｜](?:assistant|bot|chatbot_token)[|｜]> | \[/INST\]""",
    re.IGNORECASE | re.VERBOSE,
)
_QUESTION_ENDS = re.compile(r"\?(?=\s)")
_BORDERS = (re.compile(r"\n"), re.compile(r"[.!:;](?=\s)"), re.compile(r"\s"))
_WITH_PARTNER = (
    ("context", "question"), ("source", "target"), ("query", "document"), ("query", "documents"), ("query", "positive"),
    ("article", "question"), ("question", "choices"), ("question", "options"),
)  # fmt: skip
_ROWS_LOOKED_AT = 100  # of a stream, for pairs whose prompt can't be determined


def split_by_content(
    rows: Dataset, fraction: float, always: frozenset[int], name: str, is_needed: bool = True
) -> tuple[Dataset, Dataset]:
    """Training and held-out rows, each in the order of the source.

    A row is held out when its key falls into the lowest `fraction` of all possible keys, or is in `always`: the key of the
    first row, so that a small file has an evaluation row too, and the same one when it grows. Where none would be left to
    train on and no evaluation is needed, none is held out.

    Raises:
        Refusal: no row of the source called `name` would be left to train on; for one, all have the same input.
    """
    if {"chosen", "rejected"} <= set(rows.column_names) and "prompt" not in rows.column_names:
        _warn_of_untold_prompts(rows.select_columns(["chosen", "rejected"]).iter(batch_size=BATCH_ROWS), name)
    keys = _kept_keys(rows)
    held_out = _is_held_out(keys, fraction, always)
    if held_out.all() and not is_needed:
        return rows, rows.select([])
    if held_out.all():
        same = " with the same input" if len(rows) > 1 and len(np.unique(keys)) == 1 else ""
        raise Refusal(
            f"{name} has {len(rows):,} row{'s'[: len(rows) > 1]}{same}, too few to hold any out without leaking. Name an "
            "evaluation split (--eval-split, or a folder with train.* and validation.*), or train without: --eval-fraction 0"
            + (" A text file can be read in smaller rows: --sample-by paragraph" if name.endswith(".txt") else "")
        )
    content = hashlib.blake2b(f"{fingerprint_of(rows)} ".encode() + held_out.tobytes(), digest_size=12).hexdigest()
    training, held = (  # with names of ours: datasets would pickle all the numbers to make one
        rows.select(np.flatnonzero(chosen), new_fingerprint=f"{side}-{content}")
        for side, chosen in (("training", ~held_out), ("held-out", held_out))
    )
    return training, held


def stream_by_content(
    rows: IterableDataset, fraction: float, always: frozenset[int], name: str = "the stream"
) -> tuple[IterableDataset, IterableDataset]:
    """The same split of a stream called `name`, row by row."""
    first: dict[str, Any] = next(iter(rows), {})
    if {"chosen", "rejected"} <= set(first) and "prompt" not in first:
        looked_at = ({key: [value] for key, value in row.items()} for row in islice(rows, _ROWS_LOOKED_AT))
        _warn_of_untold_prompts(looked_at, name, "the first ")
    sides = (partial(_is_on_side, held_out=side, fraction=fraction, always=always) for side in (False, True))
    training, held_out = (rows.filter(side, batched=True, batch_size=100) for side in sides)
    return training, held_out


def first_key(rows: Dataset | IterableDataset, name: str) -> int:
    """Key of the first row of the source called `name`.

    Raises:
        Refusal: a stream without rows, or whose first ones can't be read.
    """
    try:
        first = next(iter(rows), None)
    except (ValueError, OSError) as error:
        raise Refusal(f"{name} can't be read: {first_line(error)}") from error
    if first is None:
        raise Refusal(f"{name} has no rows.")
    return int(batch_keys({name: [value] for name, value in first.items()})[0])


def row_keys(rows: Dataset) -> np.ndarray:
    """Keys of all rows, uint64 [rows]; a few seconds for a million texts."""
    keys, done = np.zeros(len(rows), np.uint64), 0
    for table in with_progress(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), "Hashing rows", "rows", len(rows), len):
        read = cache(lambda name, table=table: table[name].to_pylist())
        keys[done : done + len(table)] = _keys(table.column_names, read, len(table))
        done += len(table)
    return keys


def _kept_keys(rows: Dataset) -> np.ndarray:
    """Of many rows they are kept in the cache, under a key of the rows: to hash ten million takes most of a second start."""
    if len(rows) < KEPT_ROWS:
        return row_keys(rows)
    files = (__file__, masks.__file__)  # whose code decides what an input is
    code = hashlib.blake2b(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    content = f"{code} {fingerprint_of(rows)} {sorted(rows.column_names)}"
    folder = cache_folder(
        f"keys-{hashlib.sha256(content.encode()).hexdigest()[:24]}", lambda folder: np.save(folder / "keys.npy", row_keys(rows))
    )
    keys: np.ndarray = np.load(folder / "keys.npy", allow_pickle=False)
    return keys


def batch_keys(batch: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Keys of the rows of a batch of columns, uint64 [rows]."""
    return _keys(list(batch), batch.__getitem__, len(next(iter(batch.values()), ())))


def _keys(names: list[str], column: Callable[[str], Sequence[Any]], count: int) -> np.ndarray:
    """A hash of each row's input, or of all its content where it has none; `column` is called for needed columns only."""
    data = [b""] * count
    if {"chosen", "rejected"} <= set(names) and "prompt" not in names:
        data = [_implicit_prompt(*pair) for pair in zip(column("chosen"), column("rejected"), strict=True)]
    elif {"instruction", "output"} <= set(names) and not _input_columns(names):  # Alpaca's columns
        inputs = column("input") if "input" in names else [""] * count
        data = [_canonical(f"{one or ''}\n{two or ''}") for one, two in zip(column("instruction"), inputs, strict=True)]
    for name in _input_columns(names):
        if not all(data):
            data = [found or _canonical(value, name) for found, value in zip(data, column(name), strict=True)]
    if not all(data):  # for instance an empty prompt before each completion
        content = [[_canonical(value) for value in column(name)] for name in sorted(set(names) - ABOUT_A_ROW)]
        data = [found or b"\x1f".join(filter(None, values)) for found, *values in zip(data, *content, strict=True)]
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in data), ">u8").astype(np.uint64)


def _is_on_side(batch: Mapping[str, Sequence[Any]], held_out: bool, fraction: float, always: frozenset[int]) -> list[bool]:
    return (_is_held_out(batch_keys(batch), fraction, always) == held_out).tolist()


def _is_held_out(keys: np.ndarray, fraction: float, always: frozenset[int]) -> np.ndarray:
    chosen = keys < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    return chosen | np.isin(keys, np.fromiter(always, np.uint64))


def _input_columns(columns: Iterable[str]) -> list[str]:
    """The columns that may hold a row's input, the first with content counts.

    `source` and `context` are common names for other things (where a row is from, what else is given), so they count only
    next to the column that makes them an input.
    """
    names = set(columns)
    found: list[str] = [name for name in ("prompt", "messages", "conversations") if name in names]
    found += [name for name, partner in _WITH_PARTNER if {name, partner} <= names]
    return found + [name for name in ("chosen", "tokens", "text", "input_ids") if name in names and "prompt" not in names]


def _canonical(value: Any, column: str = "") -> bytes:
    """The value as bytes, the same whether it came as a stream or from Arrow, with or without the nulls of other rows."""
    if column in ("messages", "conversations", "chosen"):
        value = _first_user_turn(value)
    if value is None:
        return b""
    if not isinstance(value, str):
        value = json.dumps(_without_nulls(value), sort_keys=True, ensure_ascii=False, default=str) if value != [] else ""
    return value.strip().encode("utf-8", "surrogatepass")


def _implicit_prompt(chosen: Any, rejected: Any) -> bytes:
    """The beginning that two texts share, up to a border that is the same for other answers to the prompt; empty for chats.

    Of a dialogue it ends with the first turn of the user, as that of a chat does.
    """
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return b""
    shared = chosen[: common_prefix(chosen, rejected)]
    end = _told_end(shared)
    if end is None:
        lasts = (found.end() for border in _BORDERS for found in [*border.finditer(shared)][-1:])
        ends = (last for last in lasts if shared[:last].strip())
        end = next(ends, len(shared))
    return _canonical(shared[:end])


def _told_end(shared: str) -> int | None:
    """Where a prompt ends at which two texts begin alike, whatever the answers; None where that can't be determined."""
    marks = (mark.start() for mark in _ANSWER_BEGINS.finditer(shared) if shared[: mark.start()].strip())
    questions = (found.end() for found in _QUESTION_ENDS.finditer(shared) if shared[: found.start()].strip())
    end = next(marks, None)
    return next(questions, None) if end is None else end


def _warn_of_untold_prompts(batches: Iterable[Mapping[str, Sequence[Any]]], name: str, first: str = "") -> None:
    """One line where answers to one prompt may be on both sides: pairs of texts without a border that no answer moves."""
    count = untold = 0
    for batch in batches:
        if "prompt" in batch or not {"chosen", "rejected"} <= set(batch):
            return
        both = zip(batch["chosen"], batch["rejected"], strict=True)
        pairs = [pair for pair in both if all(isinstance(text, str) for text in pair)]
        count += len(pairs)
        untold += sum(_told_end(chosen[: common_prefix(chosen, rejected)]) is None for chosen, rejected in pairs)
    if untold:
        warn_once(
            f"{name}: of {untold:,} of {first}{count:,} pairs the end of the prompt can't be determined (no "
            "mark such as 'Assistant:', no question), so answers to one prompt may be both trained on and held out. Give the "
            "prompt a column of its own: prompt, chosen, rejected."
        )


def _first_user_turn(turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns if isinstance(turns, str) else None
    for turn in turns:
        if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("user", "human"):
            return turn.get("content") or turn.get("value") or turns
    return turns


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value] if value and isinstance(value[0], dict | list | float) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value  # a column of ints turns to floats later
