"""Examples of a tokenized dataset: one document each, or the pieces of a packed row."""

from typing import Any, Protocol

import numpy as np

from toolkit.data.loading.collate import IGNORED
from toolkit.data.loading.packing import Packing
from toolkit.data.sources.arrow_cache import check_uncut, mapped_files

Document = dict[str, Any]
MODEL_COLUMNS = (
    "input_ids", "labels", "token_type_ids", "supervised_tokens", "weight",
    "prompt_tokens", "chosen_tokens", "rejected_tokens", "pair", "margin",
    "completion_tokens", "desirable", "answer", "mismatched_row", "mismatched_tokens",
)  # fmt: skip


class Rows(Protocol):
    """What a loader needs to know of a dataset: how many examples, the documents of some of them, and their sums."""

    def __len__(self) -> int: ...
    def documents(self, examples: list[int]) -> list[Document]: ...
    def origins(self, example: int) -> list[str]: ...

    lengths: np.ndarray
    units: dict[str, np.ndarray]


def column(dataset: Any, name: str) -> np.ndarray:
    """A column of numbers of a map-style dataset."""
    return np.asarray(dataset.with_format("numpy", columns=[name])[name][:])


class PlainRows:
    """One document an example."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format("numpy", columns=[c for c in MODEL_COLUMNS if c in dataset.column_names])
        self._files = mapped_files(dataset)
        self._origin = dataset.with_format(None).select_columns(["origin"]) if "origin" in dataset.column_names else None
        self.lengths = column(dataset, "length")
        self.units = _units(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def documents(self, examples: list[int]) -> list[Document]:
        check_uncut(self._files)
        columns = self.dataset[examples]
        documents = [{name: values[i] for name, values in columns.items()} for i in range(len(examples))]
        return self._with_mismatched(documents) if "mismatched_row" in columns else documents

    def _with_mismatched(self, documents: list[Document]) -> list[Document]:
        """Each with `mismatched`: the tokens of an answer that belongs to another prompt."""
        others = self.dataset[[int(document["mismatched_row"]) for document in documents]]
        answers = [ids[start:] for ids, start in zip(others["input_ids"], others["prompt_tokens"], strict=True)]
        return [
            {**document, "mismatched": answer[: document["mismatched_tokens"]]}
            for document, answer in zip(documents, answers, strict=True)
        ]

    def origins(self, example: int) -> list[str]:
        """Where the example comes from, as file and row, when the source says so."""
        return [str(self._origin[example]["origin"])] if self._origin else []


class PackedRows:
    """One packed row an example: pieces of documents, listed by an index over the tokenized dataset."""

    def __init__(self, dataset: Any, packing: Packing) -> None:
        self.plain, self.packing = PlainRows(dataset), packing
        self.lengths = np.add.reduceat(packing.ends - packing.starts, packing.row_bounds[:-1])
        tokens = np.add.reduceat(self._piece_tokens(), packing.row_bounds[:-1])
        self.units = {"examples": np.ones(len(packing)), "tokens": tokens}

    def __len__(self) -> int:
        return len(self.packing)

    def documents(self, examples: list[int]) -> list[Document]:
        pieces = [piece for example in examples for piece in self.packing.row(example)]
        whole = self.plain.documents([document for document, _, _ in pieces])
        return [cut_document(document, start, end) for document, (_, start, end) in zip(whole, pieces, strict=True)]

    def origins(self, example: int) -> list[str]:
        """Where the documents of the row come from, as file and row, when the source says so."""
        return [origin for document, _, _ in self.packing.row(example) for origin in self.plain.origins(document)]

    def _piece_tokens(self) -> np.ndarray:
        """Supervised tokens of each piece; of a cut document, those after the first token of the piece."""
        packing = self.packing
        tokens = self.plain.units["tokens"][packing.documents].copy()
        cut = np.flatnonzero(packing.ends - packing.starts != self.plain.lengths[packing.documents])
        if "labels" not in self.plain.dataset.column_names:
            tokens[cut] = packing.ends[cut] - packing.starts[cut] - 1
            return tokens
        for i in cut.tolist():
            labels = np.asarray(self.plain.dataset[int(packing.documents[i])]["labels"])
            tokens[i] = (labels[packing.starts[i] + 1 : packing.ends[i]] != IGNORED).sum()
        return tokens


def cut_document(document: Document, start: int, end: int) -> Document:
    """The tokens from `start` to `end` of a document, and the labels that go with them."""
    return {name: value[start:end] if name in ("input_ids", "labels") else value for name, value in document.items()}


def _units(dataset: Any) -> dict[str, np.ndarray]:
    units = {"examples": np.ones(len(dataset))}
    if "supervised_tokens" in dataset.column_names:
        units["tokens"] = column(dataset, "supervised_tokens").astype(np.float64)
    if "weight" in dataset.column_names:
        units["weight"] = column(dataset, "weight").astype(np.float64)
    if "chosen_tokens" in dataset.column_names:
        units["pairs"] = units["examples"]
        units["chosen_tokens"] = column(dataset, "chosen_tokens").astype(np.float64)
    if "desirable" in dataset.column_names:
        units["desirable"] = column(dataset, "desirable").astype(np.float64)
        units["undesirable"] = 1.0 - units["desirable"]
    return units
