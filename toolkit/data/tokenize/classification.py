"""Classification and regression: texts, alone or in pairs, with a label, to documents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import ClassificationConfig, DataConfig, Refusal
from toolkit.data.report import Piece, example_pieces
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, columns_of, label_column
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, check_room, cut_as_read, join_documents
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.labels import Classes, check_label_settings, declared_names, find_classes, read_labels
from toolkit.data.tokenize.language import tokenized_rows

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


def classification_format(config: DataConfig, class_names: list[str] | None = None) -> Format:
    """How rows with a label are read; `config` holds the settings of ClassificationConfig too.

    `class_names` are the classes in the order of their numbers, of a model that has them already.
    """
    import pyarrow as pa

    if not isinstance(config, ClassificationConfig):
        raise TypeError("classification needs the settings of ClassificationConfig next to those of DataConfig")
    problem_type, class_weights = config.problem_type, config.class_weights
    kinds = {"single_label": pa.int32(), "multi_label": pa.list_(pa.float32()), "regression": pa.float32()}

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> LabeledTexts:
        assert plan.classes is not None
        frame = pair_frame(encoder.tokenizer) if "text_pair" in plan.columns else None
        if plan.layout != "tokenized":
            own = frame.size if frame else len(encoder.prefix) + len(encoder.suffix)
            check_room(config.max_length, own, texts=2 if frame else 1)
        return LabeledTexts(
            None if plan.layout == "tokenized" else encoder, frame,
            plan.classes, next(column for column in ("label", "labels") if column in plan.columns), problem_type,
            class_weights, config.max_length, config.overlong,
        )  # fmt: skip

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        fields = {"labels": kinds[problem_type]} | ({"weight": pa.float32()} if class_weights else {})
        has_types = "text_pair" in plan.columns and "token_type_ids" in tokenizer.model_input_names
        return fields | ({"token_type_ids": pa.list_(pa.int32())} if has_types else {})

    def class_names_of(plan: Plan) -> tuple[str, ...]:
        return tuple(plan.classes.names) if plan.classes and problem_type == "single_label" else ()

    return Format(
        "classification", lambda splits, config: _plan(splits, config, class_names), rows, columns, describe_classification,
        _show, class_names=class_names_of, settings=(problem_type, class_weights), supervises_tokens=False, ends_texts=False,
        unsplit="the label of an example can't be split",
    )  # fmt: skip


def _plan(splits: Splits, config: DataConfig, class_names: list[str] | None) -> tuple[dict[str, Plan], list[str]]:
    """Plans for classification and regression; splits whose labels are withheld are left out, with a note.

    The classes are those of the data, or `class_names`, where a model has learned them already: then a label that is a number
    and no name is the place of one.
    """
    assert isinstance(config, ClassificationConfig)
    labels = {name: label_column(columns_of(split, name), name) for name, split in splits.items()}
    classes = Classes([]) if config.problem_type == "regression" else find_classes(splits)
    if class_names:
        classes = replace(classes, names=class_names)
    places = class_names if class_names and not any(name.isdecimal() for name in class_names) else None
    check_label_settings(classes, config.problem_type, config.class_weights)
    plans, notes = {}, []
    for name, split in splits.items():
        if name != "train" and is_withheld(split, labels[name]):
            notes.append(f"{name}: left out, as its labels are withheld")
            continue
        present = columns_of(split, name)
        layout = "tokenized" if "input_ids" in present else "text"
        texts = ("input_ids", "attention_mask") if layout == "tokenized" else ("text", "text_pair")
        columns = tuple(column for column in (*texts, labels[name], "origin") if column in present)
        plans[name] = Plan(layout, "class", columns, replace(classes, numbered=declared_names(split, labels[name]) or places))
    if not plans:
        raise Refusal("The labels are withheld: each is -1 or missing. Take another split.")
    return plans, notes


@dataclass(frozen=True)
class LabeledTexts:
    """Reads batches of rows: all that it needs next to them."""

    encoder: Encoder | None  # None: the rows are tokenized
    frame: PairFrame | None  # of a second text
    classes: Classes
    label: str  # column
    problem_type: str
    class_weights: list[float]
    max_length: int
    overlong: str

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents, or shortened ones where over-long texts are truncated: what is after a text must stay."""
        labels = read_labels(batch[self.label], self.classes, self.problem_type, origins)
        columns: dict[str, list[Any]] = {"labels": labels}
        if self.class_weights:
            columns["weight"] = [self.class_weights[label] for label in labels]
        room = self.max_length if self.overlong == "truncate" else None
        ids, whole = self._ids(batch, origins, columns, room)
        documents = join_documents(ids, None, origins, columns)
        counted = labels if self.problem_type == "single_label" else []
        remarks = Counter(f"class {self.classes.names[label]}" for label in counted)
        return Documents(documents.values, documents.bounds, None, origins, np.asarray(whole, dtype=np.int64), columns), remarks

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Drop or refuse what is too long, or count what was truncated."""
        return cut_as_read(documents, self.max_length, self.overlong)

    def _ids(
        self, batch: Batch, origins: list[str], columns: dict[str, list[Any]], room: int | None
    ) -> tuple[list[list[int]], list[int]]:
        """Ids of each row within `room`, and how many there were."""
        if self.encoder is None:
            ids = tokenized_rows(batch, origins)
            return [row[:room] for row in ids], list(map(len, ids))
        check_texts(batch["text"], "text", origins)
        first = [encoding.ids for encoding in self.encoder.encode(batch["text"])]
        if self.frame is None:
            around = len(self.encoder.prefix) + len(self.encoder.suffix)
            kept = None if room is None else max(room - around, 0)
            return (
                [[*self.encoder.prefix, *ids[:kept], *self.encoder.suffix] for ids in first],
                [len(ids) + around for ids in first],
            )
        check_texts(batch["text_pair"], "text_pair", origins)
        second = [encoding.ids for encoding in self.encoder.encode(batch["text_pair"])]
        joined = [self.frame.join(one, two, room) for one, two in zip(first, second, strict=True)]
        if "token_type_ids" in self.encoder.tokenizer.model_input_names:
            columns["token_type_ids"] = [types for _, types in joined]
        frame = len(self.frame.before) + len(self.frame.between) + len(self.frame.after)
        return [ids for ids, _ in joined], [len(one) + len(two) + frame for one, two in zip(first, second, strict=True)]


def describe_classification(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> str:
    """The plan in words."""
    number = len(plan.classes.names) if plan.classes else 0
    kind = "token ids" if plan.layout == "tokenized" else "text"
    return f"{kind}, labeled with " + (f"{number} classes" if number else "numbers")


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """The text, and its labels by name."""
    assert plan.classes is not None
    names, label = plan.classes.names, row["labels"]
    if isinstance(label, list):
        shown = [name for name, is_one in zip(names, label, strict=True) if is_one]
    else:
        shown = [names[label]] if names else [f"{label:g}"]
    pieces = example_pieces(row["input_ids"], None, lambda ids: str(tokenizer.decode(ids)))
    return f"labeled {', '.join(shown) or 'with no class'}", pieces


@dataclass(frozen=True)
class PairFrame:
    """What a tokenizer puts before, between and after two texts, and the token types of all five parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[int, int, int, int, int]

    @property
    def size(self) -> int:
        """Tokens of a pair of empty texts."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: list[int], second: list[int], room: int | None) -> tuple[list[int], list[int]]:
        """Ids and token types of a pair; to fit `room` tokens, the longer text is shortened first."""
        if room is not None:
            room -= self.size
            kept = min(len(first), max(room - len(second), (room + 1) // 2))
            first, second = first[:kept], second[: room - kept] if kept < len(first) else second[: max(room - len(first), 0)]
        parts = (self.before, first, self.between, second, self.after)
        ids = [token for part in parts for token in part]
        return ids, [kind for part, kind in zip(parts, self.types, strict=True) for _ in part]


def pair_frame(tokenizer: PreTrainedTokenizerBase) -> PairFrame:
    """Found by tokenizing two short texts."""
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "b"))
    full = tokenizer("a", "b", return_token_type_ids=True)
    ids, types = full["input_ids"], full["token_type_ids"]
    at = next(i for i in range(len(ids)) if ids[i : i + len(one)] == one)
    then = next(i for i in range(at + len(one), len(ids)) if ids[i : i + len(two)] == two)
    middle, end = at + len(one), then + len(two)
    kinds = [types[min(place, len(types) - 1)] for place in (0, at, middle, then, end)]
    return PairFrame(ids[:at], ids[middle:then], ids[end:], (kinds[0], kinds[1], kinds[2], kinds[3], kinds[4]))


def is_withheld(split: Dataset | IterableDataset, label: str, withheld: tuple[int | str | None, ...] = (-1, None)) -> bool:
    """Whether all labels are -1 or missing, as in the test splits of benchmarks."""
    from datasets import Dataset

    if not isinstance(split, Dataset) or not hasattr(split.features[label], "dtype"):
        return False
    return set(split.unique(label)) <= {*withheld}
