"""Texts, alone or in pairs, with a label, to tokenized documents: what a classification or regression model reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.data.tokenize.columns import check_texts
from toolkit.data.tokenize.documents import Cut, Documents, cut_documents, join_documents
from toolkit.data.tokenize.encoder import Encoder, PairFrame
from toolkit.data.tokenize.labels import Classes, read_labels
from toolkit.data.tokenize.language import tokenized_rows


@dataclass(frozen=True)
class LabelledTexts:
    """Reads batches of rows: all that it needs beside them."""

    encoder: Encoder | None  # None: the rows are tokenized
    frame: PairFrame | None  # of a second text
    classes: Classes
    label: str  # column
    problem_type: str
    class_weights: list[float]
    max_length: int
    overlong: str

    def read(self, batch: dict[str, list[Any]], origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents, or shortened ones where over-long texts are truncated: what stands after a text must stay."""
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
        if self.overlong != "truncate":
            return cut_documents(documents, self.max_length, self.overlong)
        lost = int(documents.whole.sum() - len(documents.values))
        return documents, Cut(overlong=int((documents.whole > self.max_length).sum()), tokens=lost)

    def _ids(
        self, batch: dict[str, list[Any]], origins: list[str], columns: dict[str, list[Any]], room: int | None
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
