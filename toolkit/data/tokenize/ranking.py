"""Ranking: queries with lists of documents and a label for each, to pairs of query and document, one behind the other.

A row of the tokenized data is a query with its whole list, so that no list is ever cut: not by a batch, a rank or a setting.
Rows of one document are gathered into lists by their query first.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, RankingConfig, Refusal
from toolkit.data.compat import fingerprint_of, set_fingerprint
from toolkit.data.report import Piece, part_pieces
from toolkit.data.tokenize.classification import PairFrame, pair_frame
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, columns_of, describe, is_finite, rows_of, wrong_columns
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, check_room, join_documents, leave_out
from toolkit.data.tokenize.format import Format, Splits
from toolkit.system.console import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

_LAYOUTS = (("query", "documents", "labels"), ("query", "document", "label"), ("query", "positive", "negative"))
_NEEDED = (
    "query, documents (a list) and labels; or query, document and label; or query (or anchor), positive and negative (or "
    "negatives)"
)
_LARGEST_GRADE = 30.0  # of the lambda loss: its gain is 2^label
_RANGES = {"bce": (0.0, 1.0), "lambda": (-math.inf, _LARGEST_GRADE)}


@dataclass(frozen=True)
class QueryList:
    """A query with its documents, the label of each, and where each is from."""

    query: str
    documents: list[str]
    labels: list[float]
    origins: list[str]


def ranking_format(config: DataConfig) -> Format:
    """How lists of documents are read; `config` may hold the settings of RankingConfig too, for the range of labels."""
    loss = config.ranking_loss if isinstance(config, RankingConfig) else "ranknet"

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> ListRows:
        read_row, frame = partial(_read_list, layout=plan.layout, loss=loss), pair_frame(encoder.tokenizer)
        check_room(config.max_length, frame.size, texts=2)
        return ListRows(encoder, frame, read_row, loss, config.max_length, config.overlong)

    return Format(
        "ranking", _plan, rows, list_columns, lambda plan, tokenizer: f"queries with lists of documents ({plan.layout})", _show,
        part_names=("query", "most relevant document", "least relevant document"), settings=(loss,), supervises_tokens=False,
        ends_texts=False, gather=gather_lists, unsplit="the label of a document can't be split",
    )  # fmt: skip


def list_columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
    """The columns of tokenized lists, with Arrow types."""
    import pyarrow as pa

    whole, many = pa.int32(), pa.list_(pa.int32())
    fields = {"labels": pa.list_(pa.float32()), "document_tokens": many, "query_tokens": whole, "documents": whole,
              "comparisons": whole}  # fmt: skip
    return fields | ({"token_type_ids": many} if "token_type_ids" in tokenizer.model_input_names else {})


def gather_lists(splits: Splits) -> dict[str, Any]:
    """Splits in which rows of one document are gathered into a list for each query, in the order of its first row.

    Raises:
        Refusal: a stream of such rows, whose end is unknown.
    """
    return {name: _gathered(split, name) for name, split in splits.items()}


def read_lists(splits: Splits, name: str) -> Iterator[QueryList]:
    """The lists of a split, checked."""
    split = _gathered(splits[name], name)
    plan = _plan({name: split}, DataConfig())[0][name]
    for number, row in enumerate(split):
        yield _read_list(row, row.get("origin") or f"row {number} of the {name} split", layout=plan.layout, loss="ranknet")


def _gathered(split: Any, name: str) -> Any:
    from datasets import Dataset

    present = columns_of(split, name)
    label = next((column for column in ("label", "score") if column in present), None)
    if "documents" in present or not {"query", "document"} <= set(present) or label is None:
        return split
    if not isinstance(split, Dataset):
        raise Refusal(
            "--streaming: rows of one document are gathered by their query, which takes all of them. Read them whole, or give "
            "lists: query, documents and labels."
        )
    lists: dict[Any, dict[str, Any]] = {}
    for number, row in enumerate(split.with_format(None)):
        origin = row.get("origin") or f"row {number} of the {name} split"
        check_texts([row["query"]], "query", [origin])
        found = lists.setdefault(
            row["query"], {"query": row["query"], "documents": [], "labels": [], "origins": [], "origin": origin}
        )
        check_texts([row["document"]], "document", [origin])
        found["documents"].append(row["document"])
        found["labels"].append(_grade(row[label], label, origin))
        found["origins"].append(origin)
    rows = Dataset.from_list(list(lists.values()))
    rows.info.description = split.info.description
    set_fingerprint(rows, hashlib.sha256(f"lists of {fingerprint_of(split)} {label}".encode()).hexdigest()[:16])
    return rows


def _plan(splits: Splits, config: DataConfig) -> tuple[dict[str, Plan], list[str]]:
    plans = {}
    for name, split in splits.items():
        present = columns_of(split, name)
        labels = next((column for column in ("labels", "scores") if column in present), "")
        if {"query", "documents"} <= set(present) and labels:
            layout = labels
            columns: tuple[str, ...] = ("query", "documents", labels, "origins", "origin")
        elif (query := query_column(present)) and "positive" in present and (negatives := _negatives(present)):
            layout, columns = "positive, negative", (query, "positive", *negatives, "origin")
        else:
            raise Refusal(wrong_columns(present, name, _NEEDED, _LAYOUTS))
        plans[name] = Plan(layout, "class", tuple(column for column in columns if column in present))
    return plans, ["median, 95 % and longest are of the longest document of a list, with its query"]


def query_column(columns: Sequence[str]) -> str | None:
    """The column of queries, which files for embeddings call anchor."""
    return next((name for name in ("query", "anchor") if name in columns), None)


def _negatives(columns: Sequence[str]) -> list[str]:
    """The columns of what is irrelevant: negative, negatives, negative_1, negative_2 ..."""
    return [name for name in columns if name in ("negative", "negatives") or name.startswith("negative_")]


@dataclass(frozen=True)
class ListRows:
    """Reads batches of rows, each a list: all that it needs next to them.

    read_row(row, origin): the list, checked. `whole_documents`: of an over-long pair the query is cut first, not the document.
    """

    encoder: Encoder
    frame: PairFrame
    read_row: Callable[[dict[str, Any], str], QueryList]
    loss: str
    max_length: int
    overlong: str
    whole_documents: bool = False

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Lists with all tokens of their documents, each behind its query, as the tokenizer frames a pair."""
        lists = [self.read_row(row, origin) for row, origin in zip(rows_of(batch), origins, strict=True)]
        queries = [encoding.ids for encoding in self.encoder.encode([each.query for each in lists])]
        texts = self.encoder.encode([text for each in lists for text in each.documents])
        ids, columns, longest, remarks = list[list[int]](), _no_columns(self._has_types), list[int](), Counter[str]()
        for each, query in zip(lists, queries, strict=True):
            pairs = [self.frame.join(query, next(texts).ids, None) for _ in each.documents]
            ids.append([token for tokens, _ in pairs for token in tokens])
            longest.append(max(len(tokens) for tokens, _ in pairs))
            labels = np.asarray(each.labels, dtype=np.float32)  # compared as the loss compares them
            columns["labels"].append(labels.tolist())
            columns["document_tokens"].append([len(tokens) for tokens, _ in pairs])
            columns["query_tokens"].append(len(query))
            columns["documents"].append(len(pairs))
            columns["comparisons"].append(int((labels[:, None] > labels[None, :]).sum()))
            if self._has_types:
                columns["token_type_ids"].append([kind for _, kinds in pairs for kind in kinds])
            remarks["no_relevant"] += bool(labels.max() <= 0)
            remarks["same_label"] += self.loss != "bce" and not columns["comparisons"][-1]
            is_cut = self.overlong == "truncate" and longest[-1] > self.max_length
            if self.whole_documents:
                remarks["cut_choices"] += is_cut and longest[-1] - len(query) > self.max_length
                remarks["right_twice"] += each.documents.count(each.documents[int(labels.argmax())]) > 1
            else:
                remarks["cut_queries"] += is_cut and len(query) > self._half
                judged = set(zip(each.documents, columns["labels"][-1], strict=True))
                remarks["two_labels"] += len(judged) > len(set(each.documents))
        documents = join_documents(ids, None, origins, columns)
        documents.whole[:] = longest  # what --max-length is about
        return documents, remarks

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Truncate documents, or drop or refuse lists that have an over-long one."""
        is_over = documents.whole > self.max_length
        if not is_over.any():
            return documents, Cut()
        if self.overlong != "truncate":
            return leave_out(documents, self.max_length, self.overlong, "the query with its longest document")
        kept = self._truncated(documents, is_over)
        return kept, Cut(overlong=int(is_over.sum()), tokens=len(documents.values) - len(kept.values))

    def _truncated(self, documents: Documents, is_over: np.ndarray) -> Documents:
        """Of an over-long pair the document gives way, and the query only where it alone takes more than half of the room.

        Where documents are whole, the query gives way, and the document where it alone takes more than all of the room.
        """
        ids, columns = documents.lists(documents.values), {name: [*values] for name, values in documents.columns.items()}
        for row in np.flatnonzero(is_over).tolist():
            start = len(self.frame.before)
            end = start + columns["query_tokens"][row]
            after = len(self.frame.after)
            pairs = []
            for pair in pieces_of(ids[row], columns["document_tokens"][row]):
                query, document = pair[start:end], pair[end + len(self.frame.between) : len(pair) - after]
                if self.whole_documents:
                    query = query[: max(self.max_length - self.frame.size - len(document), 0)]
                pairs.append(self.frame.join(query, document, self.max_length))
            ids[row] = [token for tokens, _ in pairs for token in tokens]
            columns["document_tokens"][row] = [len(tokens) for tokens, _ in pairs]
            if self._has_types:
                columns["token_type_ids"][row] = [kind for _, kinds in pairs for kind in kinds]
        return replace(join_documents(ids, None, documents.origins, columns), whole=documents.whole)

    @property
    def _half(self) -> int:
        return (self.max_length - self.frame.size + 1) // 2

    @property
    def _has_types(self) -> bool:
        return "token_type_ids" in self.encoder.tokenizer.model_input_names


def _no_columns(has_types: bool) -> dict[str, list[Any]]:
    names = ("labels", "document_tokens", "query_tokens", "documents", "comparisons", *(["token_type_ids"] * has_types))
    return {name: [] for name in names}


def pieces_of(flat: list[int], lengths: list[int]) -> Iterator[list[int]]:
    at = 0
    for length in lengths:
        yield flat[at : at + length]
        at += length


def _read_list(row: dict[str, Any], origin: str, *, layout: str, loss: str) -> QueryList:
    named = query_column(list(row)) or "query"
    query = row[named]
    check_texts([query], named, [origin])
    if layout == "positive, negative":
        positives = row["positive"] if isinstance(row["positive"], list) else [row["positive"]]
        negatives = list[str]()
        for name in _negatives(list(row)):
            negatives += row[name] if isinstance(row[name], list) else [row[name]]
        if not positives:
            raise Refusal(f"{origin}: positive is an empty list: there is nothing to find. Fill it in or remove the row.")
        check_texts(positives, "positive", [origin] * len(positives))
        check_texts(negatives, "negative", [origin] * len(negatives))
        labels = [1.0] * len(positives) + [0.0] * len(negatives)
        return QueryList(query, positives + negatives, labels, [origin] * len(labels))
    documents, given = row["documents"], row[layout]
    for name, values in (("documents", documents), (layout, given)):
        if not isinstance(values, list):
            raise Refusal(f"{origin}: {name} is {describe(values)}, and must be a list. Correct or remove the row.")
    if not documents:
        raise Refusal(f"{origin}: documents is an empty list: there is nothing to rank. Fill it in or remove the row.")
    if len(documents) != len(given):
        raise Refusal(
            f"{origin}: {layout} has {len(given)} numbers, and documents are {len(documents)}: each document needs one. "
            "Correct or remove the row."
        )
    origins = row.get("origins") or [origin] * len(documents)
    check_texts(documents, "documents", origins)
    least, most = _RANGES.get(loss, (-math.inf, math.inf))
    grades = [_grade(value, layout, where) for value, where in zip(given, origins, strict=True)]
    for number, (grade, where) in enumerate(zip(grades, origins, strict=True)):
        if not least <= grade <= most:
            low = f"from {least:g} " if math.isfinite(least) else ""
            raise Refusal(
                f"{where}: the label {grade:g} of document {number + 1} is outside of what --ranking-loss {loss} takes: "
                f"numbers {low}to {most:g}. Rescale the labels, or choose --ranking-loss ranknet or listnet."
            )
    return QueryList(query, documents, grades, origins)


def _grade(value: Any, name: str, origin: str) -> float:
    """How relevant a document is, as a number."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise Refusal(
                f"{origin}: {name} is the text {quoted(value[:40])}, and must be a number. Correct the row."
            ) from None
    if not isinstance(value, (bool, int, float)) or not is_finite(value):
        raise Refusal(f"{origin}: {name} is {describe(value)}, and must be a number. Correct or remove the row.")
    return float(value)


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """The query, the most and the least relevant document, and all labels."""
    frame, labels = pair_frame(tokenizer), row["labels"]
    pairs = [*pieces_of(row["input_ids"], row["document_tokens"])]
    start, end = len(frame.before), len(frame.before) + row["query_tokens"]
    shown = [pairs[0][start:end]]
    for index in (int(np.argmax(labels)), int(np.argmin(labels))):
        shown.append(pairs[index][end + len(frame.between) : len(pairs[index]) - len(frame.after)])
    said = f"{len(labels)} documents, labels {', '.join(f'{label:g}' for label in labels)}"
    return said, part_pieces(shown, lambda ids: str(tokenizer.decode(ids)))
