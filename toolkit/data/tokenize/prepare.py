"""Splits to tokenized splits: read, checked, counted and cut batch by batch, and kept on disk.

The key of what is kept is its content: the rows, the tokenizer, the settings that matter. So a second run finds it there,
and so does every process but the first, which the others wait for at a file lock.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import ClassificationConfig, DataConfig, Refusal
from toolkit.data.compat import fingerprint_of
from toolkit.data.preflight.checks import Rules, check_supervision, check_tokens
from toolkit.data.preflight.preflight import ANSWER_CLASSES, Measures, SplitFigures, measure, summarize
from toolkit.data.sources.arrow_cache import cache_folder, check_uncut, mapped_files, open_splits, write_tables
from toolkit.data.tokenize.answers import ANSWER_COLUMNS, AnswerRows
from toolkit.data.tokenize.classify import LabelledTexts
from toolkit.data.tokenize.documents import Documents
from toolkit.data.tokenize.encoder import build_encoder, pair_frame, tokenizer_digest
from toolkit.data.tokenize.language import TextRows
from toolkit.data.tokenize.masks import read_chat_template, turn_end_ids
from toolkit.data.tokenize.pair_cuts import PARTS
from toolkit.data.tokenize.pairs import PairRows
from toolkit.data.tokenize.parallel import read_in_order
from toolkit.data.tokenize.plans import CHATS, Plan, is_wrapped
from toolkit.data.tokenize.preferences import ANSWER, PAIR

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 5  # raise it when the same rows and settings give other tokens, labels or figures, or a refusal
BATCH_ROWS = 512
STREAM_ROWS = 256  # of a stream: what is counted before training

Batch = dict[str, list[Any]]
Tokenized = tuple[Any, list[SplitFigures]]


def tokenize(splits: dict[str, Any], plans: dict[str, Plan], tokenizer: Any, config: DataConfig) -> Tokenized:
    """Tokenized splits and their figures, from the cache where they are in it.

    Raises:
        Refusal: a row that can't be trained on, or a split of which nothing is left.
    """
    full = {name: split for name, split in splits.items() if len(split)}
    full = {name: full[name] for name in sorted(full, key=lambda name: name != "train")}  # the others are compared with it
    if not full or ("train" in splits and "train" not in full):
        name = "train" if "train" in splits else next(iter(splits))
        raise Refusal(f"The {name} split has no rows. Look at the source, and at --train-split and --eval-split")
    key = _content_key(full, plans, tokenizer, config)
    build = partial(_build, splits=full, plans=plans, tokenizer=tokenizer, config=config)
    folder = cache_folder(key, build)
    figures = json.loads((folder / "figures.json").read_text())
    return open_splits(folder), [SplitFigures(**split) for split in figures]


def tokenize_stream(splits: dict[str, Any], plans: dict[str, Plan], tokenizer: Any, config: DataConfig) -> Tokenized:
    """Streams that are tokenized as they are read, and the figures of their first rows."""
    from datasets import IterableDatasetDict

    tokenized, figures = IterableDatasetDict(), []
    for name, split in splits.items():
        reader = build_reader(name, plans[name], tokenizer, config)
        first = list(islice(split, STREAM_ROWS))
        if not first:
            raise Refusal(f"The {name} split has no rows. Look at the source, and at --train-split and --eval-split")
        batch = {column: [row.get(column) for row in first] for column in plans[name].columns}
        _, measures = reader.read(batch, 0)
        names = class_names(plans[name], config)
        figures.append(summarize(name, [measures], plans[name].is_masked, config.max_length, names))
        columns = list(split.column_names or first[0])
        work = partial(_stream_batch, reader=reader)
        tokenized[name] = split.map(work, batched=True, batch_size=STREAM_ROWS, with_indices=True, remove_columns=columns)
    return tokenized, figures


@dataclass(frozen=True)
class Reader:
    """Reads batches of one split."""

    name: str
    plan: Plan
    rules: Rules
    rows: TextRows | LabelledTexts | PairRows | AnswerRows
    least: int | None = None  # tokens of an example; shorter ones are left out

    def read(self, batch: Batch, at: int) -> tuple[Documents, Measures]:
        """One batch, whose first row is row `at` of the split: tokenized, checked, cut, counted."""
        size = len(next(iter(batch.values())))
        given = batch.get("origin") or [None] * size
        origins = [origin or f"row {at + i} of the {self.name} split" for i, origin in enumerate(given)]
        whole, remarks = self.rows.read(batch, origins)
        check_tokens(whole, self.rules)
        if self.plan.classes is None:
            check_supervision(whole)
        if self.least is not None and (is_short := whole.whole < self.least).any():
            whole, remarks = whole.take(np.flatnonzero(~is_short)), remarks + Counter(short=int(is_short.sum()))
        kept, cut = self.rows.cut(whole)
        return kept, measure(whole, kept, cut, self.rules, remarks)


def _build(folder: Path, splits: dict[str, Any], plans: dict[str, Plan], tokenizer: Any, config: DataConfig) -> None:
    """Write each split as an Arrow file, and the figures of all beside them."""
    figures, train_rows, pairs = [], set[int](), count()  # pairs and answers are numbered through all splits
    for name, split in splits.items():
        reader, measures = build_reader(name, plans[name], tokenizer, config), list[Measures]()
        schema = _schema(plans[name], tokenizer, config)
        processes = config.preprocessing_num_workers or 1
        write_tables(folder / f"{name}.arrow", schema, _tables(split, reader, schema, measures, pairs, processes))
        names = class_names(plans[name], config)
        figures.append(vars(summarize(name, measures, plans[name].is_masked, config.max_length, names, train_rows)))
        if name == "train":
            train_rows.update(row for part in measures for row in part.rows)
    (folder / "figures.json").write_text(json.dumps(figures))


def _tables(
    split: Any, reader: Reader, schema: pa.Schema, measures: list[Measures], pairs: Iterator[int], processes: int
) -> Iterator[pa.Table]:
    import pyarrow as pa
    from tqdm.auto import tqdm

    files = mapped_files(split)
    rows = split.with_format(None).select_columns(list(reader.plan.columns))
    with tqdm(total=len(split), desc=f"Tokenizing {reader.name}", unit=" rows", disable=None, leave=False) as bar:
        for documents, part, number in read_in_order(rows, reader.read, BATCH_ROWS, processes):
            measures.append(part)
            bounds = pa.array(documents.bounds, pa.int32())
            columns = _columns(documents, reader.plan)
            if reader.plan.supervise in (PAIR, ANSWER):
                columns[reader.plan.supervise] = list(islice(pairs, len(documents)))
            for name, flat in (("input_ids", documents.values), ("labels", documents.labels)):
                if name in schema.names and name not in columns:
                    columns[name] = pa.ListArray.from_arrays(bounds, pa.array(flat, pa.int32()))
            yield pa.table(columns, schema=schema)
            bar.update(number)
            check_uncut(files)


def _stream_batch(batch: Batch, indices: list[int], reader: Reader) -> dict[str, list[Any]]:
    documents, _ = reader.read({name: batch[name] for name in reader.plan.columns if name in batch}, indices[0])
    columns = {name: list(values) for name, values in _columns(documents, reader.plan).items()}
    columns["input_ids"] = documents.lists(documents.values)
    return columns if documents.labels is None else columns | {"labels": documents.lists(documents.labels)}


def _columns(documents: Documents, plan: Plan) -> dict[str, Any]:
    """The columns that are not flat arrays of tokens."""
    columns: dict[str, Any] = {**documents.columns, "length": documents.lengths}
    if plan.classes is None:
        columns["supervised_tokens"] = documents.supervised()
    return columns | ({"origin": documents.origins} if "origin" in plan.columns else {})


def build_reader(name: str, plan: Plan, tokenizer: Any, config: DataConfig) -> Reader:
    """What reads the rows of a split as its plan says."""
    encoder = build_encoder(tokenizer)
    rows: TextRows | LabelledTexts | PairRows | AnswerRows
    if plan.classes is not None:
        assert isinstance(config, ClassificationConfig)
        rows = LabelledTexts(
            None if plan.layout == "tokenized" else encoder, pair_frame(tokenizer) if "text_pair" in plan.columns else None,
            plan.classes, _label_column(plan), config.problem_type, config.class_weights, config.max_length, config.overlong,
        )  # fmt: skip
    elif plan.supervise in (PAIR, ANSWER):
        template = read_chat_template(tokenizer) if plan.layout.startswith("chat") else None
        pairs = PairRows(plan, encoder, template, config.max_length, config.overlong, *_pairs_of_a_list(config))
        rows = pairs if plan.supervise == PAIR else AnswerRows(pairs)
    else:
        is_chat = plan.layout in CHATS or (plan.layout == "alpaca" and tokenizer.chat_template)
        template = read_chat_template(tokenizer) if is_chat else None
        overlong = None if is_wrapped(config) else config.overlong
        rows = TextRows(plan.layout, plan.supervise, encoder, template, config.max_length, overlong)
    try:
        ends = turn_end_ids(tokenizer)
    except Refusal:  # a template that can't render a plain chat; whether that matters shows when it renders the data
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Reader(name, plan, Rules(len(tokenizer), tokenizer.bos_token_id, tuple(ends)), rows, config.min_length)


def _pairs_of_a_list(config: DataConfig) -> tuple[str, int]:
    """Which pairs a list of answers makes, and how many at most, where the recipe has the settings."""
    return getattr(config, "pairs_per_prompt", "best_worst"), getattr(config, "max_pairs_per_prompt", 1)


def _label_column(plan: Plan) -> str:
    return next(column for column in ("label", "labels") if column in plan.columns)


def class_names(plan: Plan, config: DataConfig) -> list[str]:
    """The names under which examples are counted by class; none where labels are no classes."""
    if plan.supervise == ANSWER:
        return [*ANSWER_CLASSES]
    is_single = isinstance(config, ClassificationConfig) and config.problem_type == "single_label"
    return plan.classes.names if plan.classes and is_single else []


def _schema(plan: Plan, tokenizer: Any, config: DataConfig) -> pa.Schema:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    fields = {"input_ids": ids}
    if plan.classes is not None:
        assert isinstance(config, ClassificationConfig)
        kinds = {"single_label": pa.int32(), "multi_label": pa.list_(pa.float32()), "regression": pa.float32()}
        fields["labels"] = kinds[config.problem_type]
        fields |= {"weight": pa.float32()} if config.class_weights else {}
        if "text_pair" in plan.columns and "token_type_ids" in tokenizer.model_input_names:
            fields["token_type_ids"] = ids
    else:
        if plan.supervise == PAIR:  # the lengths of its parts say what is supervised
            fields |= {name: pa.int32() for name in (*PARTS, "pair")} | ({"margin": pa.float32()} if plan.margin else {})
        elif plan.supervise == ANSWER:
            fields |= {name: pa.type_for_alias(kind) for name, kind in ANSWER_COLUMNS.items()}
        elif plan.is_masked:
            fields["labels"] = ids
        fields["supervised_tokens"] = pa.int32()
    fields["length"] = pa.int32()
    return pa.schema(list((fields | ({"origin": pa.string()} if "origin" in plan.columns else {})).items()))


def _content_key(splits: dict[str, Any], plans: dict[str, Plan], tokenizer: Any, config: DataConfig) -> str:
    settings = [config.max_length, config.overlong, is_wrapped(config)]
    settings += [] if config.min_length is None else [f"at least {config.min_length}"]
    if isinstance(config, ClassificationConfig):
        settings += [config.problem_type, config.class_weights]
    if any(plan.layout.endswith("lists") for plan in plans.values()):
        settings += _pairs_of_a_list(config)
    rows = {name: [fingerprint_of(split), repr(plans[name])] for name, split in splits.items()}
    content = json.dumps([FORMAT_VERSION, rows, tokenizer_digest(tokenizer), settings], sort_keys=True)
    return f"tokenized-{hashlib.sha256(content.encode()).hexdigest()[:24]}"
