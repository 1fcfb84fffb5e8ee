"""The tags of a dataset for token classification: in which columns they are, which there are, and the scheme
(B-, I-, E-, S-) that they follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import Refusal, TokenClassificationConfig
from toolkit.data.tokenize.columns import as_whole, columns_of, describe, wrong_columns
from toolkit.data.tokenize.format import Splits
from toolkit.data.tokenize.labels import declared_names
from toolkit.data.tokenize.spans import read_spans
from toolkit.system.console import quoted

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_WORDS, _TAGS, _SPANS = ("tokens", "words"), ("tags", "ner_tags", "labels"), ("spans", "entities")
READ_ROWS = 10_000  # rows of a column that are in memory at once


@dataclass(frozen=True)
class Tags:
    """The tags in the order of their numbers, and the scheme that they follow: plain, iob1, iob2 or iobes."""

    names: list[str]
    scheme: str

    @property
    def settings(self) -> dict[str, Any]:
        """What a model's config has of them."""
        return {
            "num_labels": len(self.names), "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }  # fmt: skip


def find_tags(splits: Splits, config: TokenClassificationConfig, class_names: list[str] | None = None) -> Tags:
    """The tags of the training split (without one, of the first): those that the dataset declares, else those that occur.

    Args:
        class_names: those of a model that has learned its tags already; then only the scheme is looked for.

    Raises:
        Refusal: columns without words and tags, a tag that is missing, a scheme that the tags do not have.
    """
    from datasets import Dataset

    name = "train" if "train" in splits else next(iter(splits))
    split = splits[name]
    layout, _, column = tag_columns(columns_of(split, name), name)
    declared = class_names or declared_tags(split, column, layout)
    if not isinstance(split, Dataset):
        if declared is None:
            raise Refusal("A stream must declare its tags (a ClassLabel feature): it can't be read to the end to find them.")
        return Tags(declared, _checked_scheme(scheme_of(declared, []), declared, config))
    names = declared or _names_in(split, column, layout)
    if layout == "spans":
        return Tags(names, _checked_scheme("iob2", names, config))
    if declared is None and config.tag_scheme == "auto" and (others := tags_of_no_scheme(names)):
        _refuse_tag(split, column, others[0])
    return Tags(names, _checked_scheme(scheme_of(names, _sentences(split, column, names)), names, config))


def tag_columns(present: list[str], split: str) -> tuple[str, str, str]:
    """The layout, words or spans, and the columns of the words (or text) and of their tags (or spans)."""
    words, tags, spans = (next((name for name in names if name in present), None) for names in (_WORDS, _TAGS, _SPANS))
    if words and tags:
        return "words", words, tags
    if "text" in present and spans:
        return "spans", "text", spans
    hint = ". A CoNLL file must end in .conll, .bio or .iob." if present in (["text"], ["text", "origin"]) else ""
    needed = "tokens (a list of words) and tags (one a word); or text and spans (a list of start, end and label)"
    raise Refusal(wrong_columns(present, split, needed, ()) + hint)


def declared_tags(split: Dataset | IterableDataset, column: str, layout: str) -> list[str] | None:
    return declared_names(split, column) if layout == "words" else None


def _refuse_tag(split: Dataset, column: str, tag: str) -> None:
    """One tag without a prefix would make all of them plain, and the metrics those of single words."""
    row = next(at + i for at, rows in _batches(split, column) for i, tags in enumerate(rows) if tag in tags)
    raise Refusal(
        f"{_origin(split, row)}: {column} has the tag {quoted(tag)}, and others are O and B-...: it has no such prefix. "
        "Correct it, or count each word by itself with --tag-scheme plain."
    )


def _names_in(split: Dataset, column: str, layout: str) -> list[str]:
    """The tags that occur in a split, O first and then by type; refuses what is missing."""
    found: set[Any] = set()
    for at, values in _batches(split, column):
        for i, value in enumerate(values):
            if layout == "spans":
                is_list = isinstance(value, list) and all(isinstance(span, dict) for span in value)
                labels: list[Any] = [as_whole(span.get("label")) for span in value] if is_list else [None]
                if not all(isinstance(label, (str, int)) for label in labels):
                    text = str(split[at + i]["text"])
                    labels = [label for _, _, label in read_spans(value, text, column, _origin(split, at + i))]  # refuses it
                found.update(labels)
                continue
            are_usual = isinstance(value, list) and "" not in value and set(map(type, value)) <= {str, int}
            if wrong := [] if are_usual else _no_tags(value):
                what = "a list in which a tag is " if isinstance(value, list) else ""
                fix = "A tag is a word or a whole number: correct or remove the row."
                raise Refusal(f"{_origin(split, at + i)}: {column} is {what}{describe(wrong[0])}. {fix}")
            found.update(value)
    if not found:
        raise Refusal(f"The train split has no tags: {column} is an empty list in each row.")
    if layout == "spans":
        return ["O", *(f"{prefix}-{label}" for label in sorted(map(str, found)) for prefix in "BI")]
    numbers = sorted(as_whole(tag) for tag in found if not isinstance(tag, str))
    names = sorted((tag for tag in found if isinstance(tag, str)), key=lambda tag: (tag != "O", tag[2:], tag))
    if parts_of_tags(names) is None:
        names = sorted(names)
    if len(numbers) + len(names) < 2:
        raise Refusal(f"All tags of the train split are {quoted([*numbers, *names][0])}: there is nothing to classify.")
    return [*map(str, numbers), *names]


def _no_tags(value: Any) -> list[Any]:
    """What of a row's tags is none; the value itself where it is no list."""
    if not isinstance(value, list):
        return [value]
    return [tag for tag in value if tag == "" or not isinstance(as_whole(tag), (str, int))]


def _sentences(split: Dataset, column: str, names: list[str]) -> Iterator[list[np.ndarray]]:
    """The numbers of the tags of all rows, some at a time; what is no tag is refused where the rows are read."""
    declared = declared_names(split, column)
    places: dict[Any, int] = {name: number for number, name in enumerate(names)}
    if declared is not None:
        places |= {number: places[name] for number, name in enumerate(declared) if name in places}
    for _, values in _batches(split, column):
        yield [np.array([places[tag] for tag in value if tag in places], dtype=np.int64) for value in values if value]


def _batches(split: Dataset, column: str) -> Iterator[tuple[int, list[Any]]]:
    rows = split.with_format(None).select_columns([column])
    for at in range(0, len(rows), READ_ROWS):
        yield at, rows[at : at + READ_ROWS][column]


def _origin(split: Dataset, number: int) -> str:
    return split[number].get("origin") or f"row {number} of the train split"


def _checked_scheme(found: str, names: Sequence[str], config: TokenClassificationConfig) -> str:
    """The requested scheme, where the tags have it; else the one that was found."""
    wanted = config.tag_scheme
    if wanted not in ("auto", "plain") and (found == "plain" or (found == "iobes") != (wanted == "iobes")):
        what = "have no prefixes B- and I-" if found == "plain" else f"are those of {found.upper()}"
        raise Refusal(f"--tag-scheme {wanted}: the tags {what} ({', '.join(list(names)[:8])}). Take --tag-scheme auto.")
    scheme = found if wanted == "auto" else wanted
    if config.strict_entities and scheme == "plain":
        raise Refusal("--strict-entities: plain tags have no entities, each word counts by itself. Remove it.")
    return scheme


OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
PREFIXES = {"O": OUTSIDE, "B": BEGIN, "I": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}  # L and U: BILOU's
WRITTEN = {
    "iob1": "a B- only divides two entities of one type; else an entity begins with I-",
    "iob2": "an entity begins with B- and continues with I- of the same type",
    "iobes": "an entity is B-, I- ... and E- of one type, or a single S-",
}
_TAG = re.compile(r"O|[BIELSU](-.+)?", re.DOTALL)


@dataclass(frozen=True)
class TagParts:
    """The prefix and the number of the type of each tag `[tags]`."""

    prefixes: np.ndarray
    kinds: np.ndarray

    def breaches(self, sentences: Sequence[np.ndarray], scheme: str) -> np.ndarray:
        """Whether each tag of the sentences, one behind the other, breaks the scheme: `[words]`, all false for plain tags."""
        if scheme == "plain" or not sentences:
            return np.zeros(sum(map(len, sentences)), dtype=bool)
        outside = np.array([-1])
        flat = np.concatenate([part for sentence in sentences for part in (sentence, outside)])
        prefix = np.where(flat < 0, OUTSIDE, self.prefixes[flat])
        kind = np.where(flat < 0, -1, self.kinds[flat])
        before, is_same = np.roll(prefix, 1), np.roll(kind, 1) == kind  # what is last is outside, also before the first
        was_open = (before == BEGIN) | (before == INSIDE)
        follows = was_open & is_same
        if scheme == "iobes":
            goes_on = (prefix == INSIDE) | (prefix == END)
            breaks = (was_open | goes_on) & ~(follows & goes_on)
            breaks[:-1] |= breaks[1:] & (flat[1:] < 0)  # a sentence that ends too early: its last word
        else:
            breaks = (prefix == (INSIDE if scheme == "iob2" else BEGIN)) & ~follows
        return breaks[flat >= 0]


def parts_of_tags(names: Sequence[str]) -> TagParts | None:
    """The parts of tags such as O, B-PER and I-PER; None where they are plain: not all of this form."""
    if not all(_TAG.fullmatch(name) for name in names) or not any(name[0] in "BI" for name in names):
        return None
    kinds = {name: number for number, name in enumerate(dict.fromkeys(name[2:] for name in names if name != "O"))}
    return TagParts(
        np.array([PREFIXES[name[0]] for name in names]),
        np.array([-1 if name == "O" else kinds[name[2:]] for name in names]),
    )


def tags_of_no_scheme(names: Sequence[str]) -> list[str]:
    """Those among tags such as O and B-PER that have no such form, such as a mistyped B_LOC or Q-; usually none."""
    others = [name for name in names if not _TAG.fullmatch(name)]
    return others if "O" in names and any(name.startswith("B-") and len(name) > 2 for name in names) else []


def scheme_of(names: Sequence[str], batches: Iterable[Sequence[np.ndarray]]) -> str:
    """plain, iobes, or which of iob1 and iob2 the sentences of tags follow; iob2 where they follow neither."""
    parts = parts_of_tags(names)
    if parts is None:
        return "plain"
    if {END, SINGLE} & set(parts.prefixes.tolist()):
        return "iobes"
    broken = {"iob2": False, "iob1": False}
    for sentences in batches:
        for scheme in broken:
            broken[scheme] = broken[scheme] or bool(parts.breaches(sentences, scheme).any())
        if all(broken.values()):
            break
    return "iob1" if broken["iob2"] and not broken["iob1"] else "iob2"


def continuations(names: Sequence[str]) -> np.ndarray:
    """The tag `[tags]` of the later sub-words of a word, where these have one: I- after B-, if there is such a tag."""
    places = {name: number for number, name in enumerate(names)}
    if parts_of_tags(names) is None:
        return np.arange(len(names))
    return np.array([places.get(f"I{name[1:]}", i) if name[0] == "B" else i for i, name in enumerate(names)])
