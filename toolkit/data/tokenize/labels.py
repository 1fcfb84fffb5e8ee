"""Labels of classification and regression: the names of the classes, and each row's label as a model takes it."""

from __future__ import annotations

import difflib
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.config import ClassificationConfig, Refusal
from toolkit.data.tokenize.columns import describe, is_finite, label_column
from toolkit.system.console import first_of, quoted

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from toolkit.data.tokenize.format import Splits


@dataclass(frozen=True)
class Classes:
    """The classes of a problem, and how one split writes them."""

    names: list[str]  # in the order of their numbers; empty for regression
    multi_hot: bool = False  # a label is a vector with a place for each class
    numbered: list[str] | None = None  # the split declares names (ClassLabel), and its labels are numbers of these

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def number(self, label: object, origin: str) -> int:
        """The class that a label of the split means."""
        if self.numbered is not None and isinstance(label, int):
            if not 0 <= label < len(self.numbered):
                hidden = " A negative label means that it is withheld." if label < 0 else ""
                raise Refusal(
                    f"{origin}: label {label} is out of range: there are {len(self.numbered)} classes, 0 to "
                    f"{len(self.numbered) - 1}.{hidden} Correct or remove the row."
                )
            label = self.numbered[label]
        if label is None or isinstance(label, (list, float)):
            numbers = "For numbers: --problem-type regression"
            if isinstance(label, float) and label.is_integer():  # as pandas writes whole ones next to an empty row
                numbers = f"For classes write {label:.0f}, without a point. {numbers}"
            types = {list: "For several classes: --problem-type multi_label", float: numbers}
            fix = types.get(type(label), "Correct or remove the row.")
            raise Refusal(f"{origin}: the label is {describe(label)}, and must be one class. {fix}")
        if str(label) not in self._places:
            close = difflib.get_close_matches(str(label), self.names, n=1)
            fix = f"Did you mean {quoted(close[0])}?" if close else "Correct or remove the row."
            classes = f"the train split's classes: {first_of(self.names)}"
            raise Refusal(f"{origin}: the label {quoted(label)} is none of {classes}. {fix}")
        return self._places[str(label)]


def label_names(splits: Splits) -> list[str]:
    """The classes in the order of their numbers; empty where the labels are floats, to regress on.

    They are the names that the dataset declares (`ClassLabel`), else the distinct labels of the training split, sorted.
    The classes of multi-hot vectors are called by their places.
    """
    return find_classes(splits).names


def label_settings(splits: Splits, config: ClassificationConfig) -> dict[str, Any]:
    """What a classification model's config has of the labels: their number, names and kind."""
    if config.problem_type == "regression":
        return {"num_labels": 1, "problem_type": "regression"}
    names = label_names(splits)
    kind = {"single_label": "single_label_classification", "multi_label": "multi_label_classification"}[config.problem_type]
    return {
        "num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": kind,
    }  # fmt: skip


def find_classes(splits: Splits) -> Classes:
    """The classes of the training split; without one, of the first."""
    from datasets import Dataset

    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    column = label_column(list(train.column_names or next(iter(train))), "train")
    declared = declared_names(train, column)
    if declared is not None:
        return Classes(declared)
    if not isinstance(train, Dataset):
        raise Refusal("A stream must declare its classes (a ClassLabel feature): it can't be read to the end to find them.")
    values = train[column][:]
    if not all(isinstance(value, (int, float, list)) for value in values):
        _refuse_missing(values, train)
    if _is_multi_hot(values):
        return Classes([str(place) for place in range(len(values[0]))], multi_hot=True)
    distinct = {label for value in values for label in (value if isinstance(value, list) else [value]) if label is not None}
    if any(isinstance(label, float) for label in distinct):
        return Classes([])
    names = sorted(distinct, key=lambda label: (isinstance(label, str), label))
    _refuse_look_alikes(names, values, train)
    return Classes([str(label) for label in names])


def _refuse_look_alikes(names: list[Any], values: list[Any], rows: Any) -> None:
    """Two spellings of one class, which look the same on a screen, are a mistake in the data."""
    known: dict[str, Any] = {}
    for name in names:
        plain = unicodedata.normalize("NFC", " ".join(str(name).split()))
        if plain not in known:
            known[plain] = name
            continue
        lists = [value if isinstance(value, list) else [value] for value in values]
        counts = {each: sum(each in labels for labels in lists) for each in (name, known[plain])}
        odd, usual = sorted(counts, key=lambda each: counts[each])
        number = next(i for i, labels in enumerate(lists) if odd in labels)
        origin = rows[number].get("origin") or f"row {number + 1} of the train split"
        raise Refusal(
            f"{origin}: the label {quoted(odd)} ({counts[odd]:,} rows) differs from {quoted(usual)} ({counts[usual]:,} rows) "
            "only in white space or in how a letter is encoded. Write them alike."
        )


def declared_names(split: Dataset | IterableDataset, column: str) -> list[str] | None:
    """Names of the classes as the split's features declare them."""
    from datasets import ClassLabel

    feature = split.features[column] if split.features else None
    feature = getattr(feature, "feature", feature)  # of a list, what it holds
    return list(feature.names) if isinstance(feature, ClassLabel) else None


def read_labels(values: list[Any], classes: Classes, problem_type: str, origins: list[str]) -> list[Any]:
    """Labels as int (single_label), list of floats, one a class (multi_label), or float (regression).

    Raises:
        Refusal: a label that is missing, of another kind than the problem's, or of no known class.
    """
    if problem_type == "regression":
        return [_number(value, origin) for value, origin in zip(values, origins, strict=True)]
    if problem_type == "single_label":
        return [classes.number(value, origin) for value, origin in zip(values, origins, strict=True)]
    read = _vector if classes.multi_hot else _several
    return [read(value, classes, origin) for value, origin in zip(values, origins, strict=True)]


def check_label_settings(classes: Classes, problem_type: str, class_weights: list[float]) -> None:
    """Refuse settings that don't fit the labels."""
    names = classes.names
    if class_weights and problem_type != "single_label":
        raise Refusal(f"--class-weights weighs a row by its class; with --problem-type {problem_type} that has no effect.")
    if len(names) == 1 and problem_type == "single_label":
        raise Refusal(f"All labels of the train split are {quoted(names[0])}: there is nothing to classify.")
    if class_weights and len(class_weights) != len(names):
        raise Refusal(f"--class-weights gives {len(class_weights)} weights; there are {len(names)} classes: {first_of(names)}.")


def _refuse_missing(values: list[Any], rows: Any) -> None:
    """A class without a name is a mistake in the data: the row is named before it becomes a class of its own."""
    for number, value in enumerate(values):
        if missing := missing_label(value):
            origin = rows[number].get("origin") or f"row {number + 1} of the train split"
            raise Refusal(f"{origin}: {missing}")


def missing_label(value: object) -> str:
    """The message for a label that is missing; empty where it is."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return f"the label is {'missing' if value is None else 'empty'}. Correct or remove the row."
    return ""


def _is_multi_hot(values: list[Any]) -> bool:
    """Whether labels are vectors with a place for each class: of floats, or of 0 and 1 where no list of classes could be."""
    if not values or not all(isinstance(value, list) and len(value) == len(values[0]) > 0 for value in values):
        return False
    if all(isinstance(label, float) for value in values for label in value):
        return True
    is_binary = all(label in (0, 1) and not isinstance(label, str) for value in values for label in value)
    return is_binary and any(len(set(value)) < len(value) for value in values)


def _several(value: Any, classes: Classes, origin: str) -> list[float]:
    if not isinstance(value, list):
        raise Refusal(f"{origin}: the label is {describe(value)}, and --problem-type multi_label needs a list of classes.")
    numbers = {classes.number(label, origin) for label in value}
    return [float(number in numbers) for number in range(len(classes.names))]


def _vector(value: Any, classes: Classes, origin: str) -> list[float]:
    if not isinstance(value, list) or len(value) != len(classes.names) or not all(label in (0, 1) for label in value):
        raise Refusal(f"{origin}: the label is {describe(value)}, and must be {len(classes.names)} numbers, each 0 or 1.")
    return [float(label) for label in value]


def _number(value: Any, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
        raise Refusal(f"{origin}: the label is {describe(value)}, and --problem-type regression needs a finite number.")
    return float(value)
