"""Splits to tokenized splits by their plans: read, checked, counted and cut batch by batch, and kept on disk.

The key of what is kept is what decides its content: the rows, the tokenizer, the settings that matter. So a second run finds
it, and so does every process but the first, which the others wait for at a file lock. A stream is tokenized as it is read, or
likewise to its end.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.cache.arrow import cache_folder, check_uncut, journal_of, mapped_files, open_splits
from toolkit.config import DataConfig, Refusal
from toolkit.data.compat import fingerprint_of, set_fingerprint
from toolkit.data.sources.stream_state import state_of
from toolkit.data.split_counts import (
    Measures,
    SplitCounts,
    measure,
    measures_from_json,
    measures_to_json,
    row_hashes,
    summarize,
)
from toolkit.data.tokenize.columns import Batch, Plan, is_wrapped
from toolkit.data.tokenize.documents import Documents, Rules, build_encoder, check_supervision, check_tokens, tokenizer_digest
from toolkit.data.tokenize.format import Format, FormatRows, Splits
from toolkit.data.tokenize.masks import turn_end_ids
from toolkit.data.tokenize.pieces import Pieces, read_in_order
from toolkit.data.tokenize.vocabulary import TOKENIZED_WITH, check_marks, vocabulary_mark
from toolkit.system.progress import progress

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 7  # raise it when the same rows and settings give other tokens, labels or counts, or a refusal
BATCH_ROWS = 512
STREAM_ROWS = 256  # of a stream: what is counted before training

Work = tuple[dict[str, Any], list[SplitCounts]]


def tokenize_splits(
    form: Format, splits: Splits, plans: dict[str, Plan], tokenizer: PreTrainedTokenizerBase, config: DataConfig,
    content: str | None = None,
) -> Work:  # fmt: skip
    """Tokenized splits and their counts, from the cache where they are in it.

    Args:
        content: of streams, what changes with their rows.

    Raises:
        Refusal: a row that can't be trained on, or a split of which nothing is left.
    """
    full = {name: split for name, split in splits.items() if content or len(split)}
    full = {name: full[name] for name in sorted(full, key=lambda name: name != "train")}  # the others are compared with it
    if not full or ("train" in splits and "train" not in full):
        raise _no_rows("train" if "train" in splits else next(iter(splits)))
    settings = [config.max_length, config.overlong, is_wrapped(config), config.min_length, form.task, *form.settings]
    rows = {name: [content or fingerprint_of(split), repr(plans[name])] for name, split in full.items()}
    kept = [FORMAT_VERSION, *(each.name for each in fields(SplitCounts))]  # another version may share the cache, and count more
    content = json.dumps([kept, rows, tokenizer_digest(tokenizer), settings], sort_keys=True)
    key = f"tokenized-{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    processes = config.preprocessing_num_workers or 1  # read here: where all is cached, nobody builds
    build = partial(_write, form=form, splits=full, plans=plans, tokenizer=tokenizer, config=config, processes=processes)
    try:
        folder = cache_folder(key, build, goes_on=True)
    except Refusal as refusal:
        if re.match(r"\S+:\d+: ", str(refusal)):  # a row of a file: the first of perhaps many
            refusal.args = (f"{refusal} `toolkit inspect` lists every row that is refused.",)
        raise
    found = json.loads((folder / "counts.json").read_text())
    tokenized = open_splits(folder)
    for name, digest in found["digests"].items():
        set_fingerprint(tokenized[name], digest)  # of the tokens: a resume compares their content
    return tokenized, [SplitCounts(**split) for split in found["splits"]]


def tokenize_streams(
    form: Format, splits: Splits, plans: dict[str, Plan], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Work:
    """Streams that are tokenized as they are read, and the counts of their first rows."""
    tokenized, counts = dict[str, Any](), list[SplitCounts]()
    for name, split in splits.items():
        reader, first = build_reader(form, name, plans[name], tokenizer, config), list(islice(split, STREAM_ROWS))
        if not first:
            raise _no_rows(name)
        _, measures = reader.read({column: [row.get(column) for row in first] for column in reader.plan.columns}, 0)
        counts.append(reader.summarize([measures], form.longest(config), None))
        columns = list(split.column_names or first[0])
        work = partial(_stream_batch, reader=reader)
        tokenized[name] = split.map(work, batched=True, batch_size=STREAM_ROWS, with_indices=True, remove_columns=columns)
    return tokenized, counts


@dataclass(frozen=True)
class Reader:
    """Reads batches of one split."""

    form: Format
    name: str
    plan: Plan
    rules: Rules
    rows: FormatRows
    least: int | None  # tokens of an example; shorter ones are left out
    mark: str | None = None  # of the tokenizer's vocabulary, where the rows have one

    def read(self, batch: Batch, at: int) -> tuple[Documents, Measures]:
        """One batch, whose first row is row `at` of the split: tokenized, checked, cut, counted."""
        size = len(next(iter(batch.values())))
        given = batch.get("origin") or [None] * size
        origins = [origin or f"row {at + i} of the {self.name} split" for i, origin in enumerate(given)]
        if self.mark is not None:
            check_marks(batch[TOKENIZED_WITH], self.mark, origins)
            batch = {name: values for name, values in batch.items() if name != TOKENIZED_WITH}
        whole, remarks = self.rows.read(batch, origins)
        check_tokens(whole, self.rules)
        if self.form.supervises_tokens:
            check_supervision(whole)
        if self.least is not None and (is_short := whole.whole < self.least).any():
            whole, remarks = whole.take(np.flatnonzero(~is_short)), remarks + Counter(short=int(is_short.sum()))
        kept, cut = self.rows.cut(whole)
        return kept, measure(whole, kept, cut, self.rules, remarks)

    def summarize(self, measures: list[Measures], max_length: int, train_rows: np.ndarray | None) -> SplitCounts:
        """The counts of all batches of the split; `train_rows` are hashes of those of the training split."""
        classes = [*self.form.class_names(self.plan)]
        return summarize(self.name, measures, self.plan.is_masked, max_length, classes, train_rows, self.form.length_flag)


def build_reader(form: Format, name: str, plan: Plan, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Reader:
    """What reads the rows of a split by its plan."""
    ends = turn_end_ids(tokenizer) if plan.is_masked and form.ends_texts else []
    rules = Rules(len(tokenizer), tokenizer.bos_token_id, tuple(ends))
    mark = vocabulary_mark(tokenizer) if TOKENIZED_WITH in plan.columns else None
    return Reader(form, name, plan, rules, form.rows(plan, build_encoder(tokenizer), config), config.min_length, mark)


def _write(
    folder: Path, form: Format, splits: Splits, plans: dict[str, Plan], tokenizer: PreTrainedTokenizerBase,
    config: DataConfig, processes: int,
) -> None:  # fmt: skip
    """Write each split as an Arrow file, with the counts of all next to them."""
    counts, digests, train_rows, numbers = [], dict[str, str](), None, count()  # pairs are numbered through all splits
    for name, split in splits.items():
        reader = build_reader(form, name, plans[name], tokenizer, config)
        journal = journal_of(folder) / f"{name}.jsonl"
        with Pieces(folder / f"{name}.arrow", journal, _schema(reader, tokenizer)) as pieces:
            measures, digest = _write_split(split, reader, pieces, numbers, processes)
        if not measures:  # of a stream
            raise _no_rows(name)
        counts.append(vars(reader.summarize(measures, form.longest(config), train_rows)))
        digests[name] = f"tokens-{digest}-{name}"
        if name == "train":
            train_rows = row_hashes(measures)
    (folder / "counts.json").write_text(json.dumps({"splits": counts, "digests": digests}))


def _write_split(
    split: Dataset | IterableDataset, reader: Reader, pieces: Pieces, numbers: Iterator[int], processes: int
) -> tuple[list[Measures], str]:
    """Write a split, from the last piece on that is there; the measures of all pieces, and a digest of the rows."""
    from datasets import Dataset

    measures, digest, begin = list[Measures](), hashlib.blake2b(digest_size=12), 0
    files, total = (mapped_files(split), len(split)) if isinstance(split, Dataset) else ({}, None)
    state, states = None, deque[dict[str, Any] | None]()  # of a stream; behind each batch that is being read
    with progress(f"Tokenizing {reader.name}", "rows", total) as add:
        for note, table in pieces.kept():
            measures.append(measures_from_json(note["measures"]))
            _add_rows(digest, note, table)
            begin, state = begin + note["rows"], note.get("state")
            if reader.form.numbered:
                deque(islice(numbers, len(table)), maxlen=0)
        add(begin)
        rows: Any
        if isinstance(split, Dataset):
            rows = split.with_format(None).select_columns(list(reader.plan.columns))
        else:
            rows = _batches_of(split, reader.plan.columns, begin, state, states.append)
        for documents, part, number in read_in_order(rows, reader.read, BATCH_ROWS, processes, begin):
            measures.append(part)
            table, columns, flat = _table(documents, reader, pieces.schema, numbers)
            note = {"rows": number, "columns": columns, "flat": flat, "measures": measures_to_json(part)}
            if states:
                note["state"] = states.popleft()
            _add_rows(digest, note, table)
            pieces.append(table, note)
            add(number)
            check_uncut(files)
    return measures, digest.hexdigest()


def _batches_of(
    stream: IterableDataset, columns: Iterable[str], begin: int, state: dict[str, Any] | None, note: Callable[[Any], object]
) -> Iterator[tuple[int, Batch]]:
    """Batches of a stream with the number of their first row, from row `begin` on, where its state was `state`, if known.

    The state behind each batch is given to `note` before it.
    """
    stream = copy.deepcopy(stream)
    if state is not None:
        stream.load_state_dict(state)
    rows = islice(stream, begin if state is None else 0, None)
    while batch := list(islice(rows, BATCH_ROWS)):
        note(state_of(stream))
        yield begin, {name: [row.get(name) for row in batch] for name in columns}
        begin += len(batch)


def _table(documents: Documents, reader: Reader, schema: pa.Schema, numbers: Iterator[int]) -> tuple[pa.Table, str, list[str]]:
    """Documents as rows; their columns as JSON, but for flat arrays of tokens; the names of these."""
    import pyarrow as pa

    columns = _columns(documents, reader)
    if reader.form.numbered:
        columns[reader.form.numbered] = list(islice(numbers, len(documents)))
    as_json = json.dumps(columns, default=lambda value: value.tolist())
    arrays = {"input_ids": documents.values, "labels": documents.labels}
    flat = [name for name, values in arrays.items() if name in schema.names and name not in columns and values is not None]
    bounds = pa.array(documents.bounds, pa.int32())
    columns |= {name: pa.ListArray.from_arrays(bounds, pa.array(arrays[name], pa.int32())) for name in flat}
    return pa.table(columns, schema=schema), as_json, flat


def _add_rows(digest: hashlib.blake2b, note: dict[str, Any], table: pa.Table) -> None:
    digest.update(note["columns"].encode())
    for name in note["flat"]:
        for part in table[name].chunks:
            digest.update(part.flatten().to_numpy())


def _stream_batch(batch: Batch, indices: list[int], reader: Reader) -> Batch:
    documents, _ = reader.read({name: batch[name] for name in reader.plan.columns if name in batch}, indices[0])
    columns = {name: list(values) for name, values in _columns(documents, reader).items()}
    columns["input_ids"] = documents.lists(documents.values)
    return columns if documents.labels is None else columns | {"labels": documents.lists(documents.labels)}


def _columns(documents: Documents, reader: Reader) -> dict[str, Any]:
    """The columns that are not flat arrays of tokens."""
    columns: dict[str, Any] = {**documents.columns, "length": documents.lengths}
    if reader.form.supervises_tokens:
        columns["supervised_tokens"] = documents.supervised()
    return columns | ({"origin": documents.origins} if "origin" in reader.plan.columns else {})


def _schema(reader: Reader, tokenizer: PreTrainedTokenizerBase) -> pa.Schema:
    import pyarrow as pa

    form, plan = reader.form, reader.plan
    fields = {"input_ids": pa.list_(pa.int32()), **form.columns(plan, tokenizer)}
    fields |= {form.numbered: pa.int32()} if form.numbered else {}
    fields |= {"supervised_tokens": pa.int32()} if form.supervises_tokens else {}
    fields |= {"length": pa.int32()} | ({"origin": pa.string()} if "origin" in plan.columns else {})
    return pa.schema(list(fields.items()))


def _no_rows(name: str) -> Refusal:
    return Refusal(f"The {name} split has no rows. Look at the source, and at --train-split and --eval-split")
