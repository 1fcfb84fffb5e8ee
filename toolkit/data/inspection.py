"""A dataset as training would see it, looked at whole: every row that training would refuse, not only the first.

Rows are read, checked, counted and cut as for training; a batch in which a row is refused is read again row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.data.loading.packing import Packing, pack_best_fit, pack_wrapped
from toolkit.data.report import DataReport, Piece
from toolkit.data.split_counts import Measures, NeedsBothKinds, SplitCounts, row_hashes
from toolkit.data.tokenize.columns import Batch, Plan, label_column, likely_renames
from toolkit.data.tokenize.documents import Documents
from toolkit.data.tokenize.labels import missing_label
from toolkit.data.tokenize.multiple_choice import is_multiple_choice
from toolkit.data.tokenize.preferences import ANSWER_LISTS
from toolkit.data.tokenize.prepare import BATCH_ROWS, STREAM_ROWS, Reader, build_reader
from toolkit.data.tokenize.seq2seq import PAIRS, TRANSLATION
from toolkit.data.tokenize.tasks import COMPARED, FORMATS, check_compared, example_of, plan_splits

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

# What columns of other names are probably meant for, the surest first.
_LIKELY = (
    ("anchor", "positive"),
    ("chosen", "rejected"), ("question", "context", "answers"), ("text", "label"), ("prompt", "completion"), ("messages",),
    ("text",),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """What training would refuse: of a row, or of a whole split, where `origin` is empty."""

    split: str
    origin: str
    what: str


@dataclass(frozen=True)
class Inspection:
    """What was found. `whole` and `kept`: lengths of each split's documents in tokens before and after cutting."""

    report: DataReport
    problems: list[Problem]
    whole: dict[str, np.ndarray]
    kept: dict[str, np.ndarray]
    examples: list[tuple[str, list[Piece]]] = field(default_factory=list)


def guess_task(columns: list[str]) -> str:
    """What rows with these columns are for: one of FORMATS.

    Raises:
        Refusal: nothing that the columns are known for.
    """
    present = set(columns)
    if {"chosen", "rejected"} <= present or ("prompt" in present and present & set(ANSWER_LISTS)):
        return "preference"
    if {"question", "context", "answers"} <= present:
        return "question_answering"
    if is_multiple_choice(columns):
        return "multiple_choice"
    if {"anchor", "positive"} <= present or {"sentence1", "sentence2", "score"} <= present:
        return "embedding"
    if {"query", "positive"} <= present and not any(name.startswith("negative") for name in present):
        return "embedding"  # a reranker needs other candidates
    if {"prompt", "completion", "label"} <= present:
        return "unpaired"
    if "query" in present and present & {"document", "documents", "positive"}:
        return "ranking"
    if present & {"tokens", "words"} and present & {"tags", "ner_tags", "labels"}:
        return "token_classification"
    if "text" in present and present & {"spans", "entities"}:
        return "token_classification"
    if TRANSLATION in present or any(present >= {*pair} for pair in PAIRS):
        return "seq2seq"
    if "label" in present or ({"text", "labels"} <= present and "input_ids" not in present):
        return "classification"
    if (
        present & {"messages", "conversations", "labels", "completion_mask", "assistant_masks"}
        or {"prompt", "completion"} <= present
        or ({"instruction", "output"} <= present and "text" not in present)
    ):
        return "sft"
    if present & {"text", "input_ids"}:
        return "lm"
    if present & {"prompt", "problem"}:
        return "prompts"
    shown = ", ".join(name for name in columns if name != "origin")
    renames = [likely_renames(columns, (layout,)) for layout in _LIKELY]
    meant = " or ".join(f"--rename-columns {each}" for each in dict.fromkeys(renames) if each)
    raise Refusal(
        f"The columns {shown or '(none)'} are none that training reads: messages; prompt and completion; text; text and label; "
        f"anchor and positive; sentence1, sentence2 and score; "
        f"chosen and rejected; query, documents and labels; question, context and answers; instruction, input and output; "
        f"question, choices and label; "
        f"tokens and tags; source and target; prompt; input_ids. "
        + (f"Did you mean: {meant}" if meant else "Rename with --rename-columns old=new")
    )


def inspect_splits(
    task: str, splits: Mapping[str, Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase, config: DataConfig,
    num_examples: int = 3,
) -> Inspection:  # fmt: skip
    """Read, check, count and cut all splits for a task, without keeping the tokens.

    Of a stream the first `config.max_train_examples` rows, or 256.

    Raises:
        Refusal: columns or settings that can't be trained with at all.
    """
    from datasets import Dataset

    given, problems = dict(splits), list[Problem]()
    if task == "classification" and isinstance(given["train"], Dataset):
        given["train"] = _labeled(given["train"], problems)
    form = FORMATS[task](config)
    given = dict(form.gather(given))
    try:
        plans, notes = plan_splits(form, given, tokenizer, config)
    except Refusal as refusal:
        raise Refusal("\n".join([str(refusal), *(f"{problem.origin}: {problem.what}" for problem in problems)])) from refusal
    is_stream = not all(isinstance(given[name], Dataset) for name in plans)
    counts, whole, kept = list[SplitCounts](), dict[str, np.ndarray](), dict[str, np.ndarray]()
    train_rows, candidates, compared = None, list[Documents](), list[Batch]()
    for name in sorted(plans, key=lambda name: name != "train"):
        plan = plans[name]
        reader = build_reader(form, name, plan, tokenizer, config)
        measures, lengths = list[Measures](), [np.zeros(0, dtype=np.int64)]
        for at, batch in _batches(given[name], plan, config):
            for documents, part in _read_around(reader, batch, at, problems):
                measures.append(part)
                lengths.append(documents.lengths)
                if name == "train":
                    compared.append({column: values for column, values in documents.columns.items() if column in COMPARED})
                if name == next(iter(plans)) and len(documents):
                    candidates.append(documents.take(np.unique(np.linspace(0, len(documents) - 1, num_examples).astype(int))))
        whole[name] = np.concatenate([np.zeros(0, dtype=np.int64), *(part.whole for part in measures)])
        kept[name] = np.concatenate(lengths)
        refused = [problem.what for problem in problems if problem.split == name]
        if refused and not len(whole[name]):
            continue  # nothing more is known of rows that were all refused
        try:
            counts.append(reader.summarize(measures, form.longest(config), train_rows))
        except NeedsBothKinds as refusal:
            if not any(what.startswith("label is ") for what in refused):  # which kind those are is not known
                problems.append(Problem(name, "", str(refusal)))
        except Refusal as refusal:
            problems.append(Problem(name, "", str(refusal)))
        if name == "train":
            train_rows = row_hashes(measures)
    if not is_stream and not problems:
        try:
            check_compared(task, compared, config)
        except Refusal as refusal:
            problems.append(Problem("train", "", str(refusal)))
    first = next(iter(plans.values()))
    report = DataReport(
        form.describe(first, tokenizer), form.longest(config), form.overlong or config.overlong, counts, notes,
        example_names=form.part_names, first_rows=_stream_rows(config) if is_stream else None,
        length_flag=form.length_flag,
    )  # fmt: skip
    rows = [row for documents in candidates for row in _rows(documents)]
    chosen: list[int] = np.unique(np.linspace(0, len(rows) - 1, num_examples).astype(int)).tolist() if rows else []
    return Inspection(report, problems, whole, kept, [example_of(form, rows[i], first, tokenizer) for i in chosen])


def packed(lengths: np.ndarray, config: DataConfig) -> Packing:
    """How documents of these lengths are packed by `config.packing_strategy`."""
    pack = pack_wrapped if config.packing_strategy == "wrapped" else pack_best_fit
    return pack(lengths, config.max_length)


def padded_fill(lengths: np.ndarray, batch_size: int) -> float:
    """Share of padded micro-batches that holds tokens, 0 to 1, with documents in a random order."""
    if not len(lengths):
        return 1.0
    mixed = np.random.default_rng(0).permutation(lengths)
    padded = sum(int(batch.max()) * len(batch) for batch in np.array_split(mixed, -(-len(mixed) // batch_size)))
    return float(lengths.sum()) / padded


def _labeled(split: Any, problems: list[Problem]) -> Any:
    """The rows that have a label; the others become problems, before the classes are looked for."""
    missing = [missing_label(value) for value in split[label_column(split.column_names, "train")][:]]
    if not any(missing) or all(missing):
        return split
    for number, what in enumerate(missing):
        if what:
            problems.append(Problem("train", split[number].get("origin") or f"row {number} of the train split", what))
    return split.select([number for number, what in enumerate(missing) if not what])


def _batches(split: Any, plan: Plan, config: DataConfig) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """The columns that the plan reads, with the number of the first row."""
    if hasattr(split, "__len__"):
        at = 0
        for batch in split.with_format(None).select_columns(list(plan.columns)).iter(BATCH_ROWS):
            yield at, batch
            at += len(next(iter(batch.values())))
        return
    rows = list(islice(split, _stream_rows(config)))
    if rows:
        yield 0, {column: [row.get(column) for row in rows] for column in plan.columns}


def _stream_rows(config: DataConfig) -> int:
    return config.max_train_examples or STREAM_ROWS


def _read_around(
    reader: Reader, batch: dict[str, list[Any]], at: int, problems: list[Problem]
) -> list[tuple[Documents, Measures]]:
    """The batch as the reader reads it; without the rows that it refuses, which become problems."""
    try:
        return [reader.read(batch, at)]
    except Refusal:
        pass
    size = len(next(iter(batch.values())))
    is_good = np.ones(size, dtype=bool)
    for i in range(size):
        row = {name: values[i : i + 1] for name, values in batch.items()}
        try:
            reader.read(row, at + i)
        except Refusal as refusal:
            origin = (row.get("origin") or [None])[0] or f"row {at + i} of the {reader.name} split"
            problems.append(Problem(reader.name, origin, str(refusal).removeprefix(f"{origin}: ")))
            is_good[i] = False
    good = {name: [value for value, keep in zip(values, is_good, strict=True) if keep] for name, values in batch.items()}
    return [reader.read(good, at)] if is_good.any() else []


def _rows(documents: Documents) -> list[dict[str, Any]]:
    """Documents as rows of the tokenized dataset."""
    rows = [
        {"input_ids": ids, "origin": origin, **{name: values[i] for name, values in documents.columns.items()}}
        for i, (ids, origin) in enumerate(zip(documents.lists(documents.values), documents.origins, strict=True))
    ]
    if documents.labels is not None:
        for row, labels in zip(rows, documents.lists(documents.labels), strict=True):
            row["labels"] = labels
    return rows
