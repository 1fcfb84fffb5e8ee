"""Token classification: words with a tag each, or texts with spans, to documents whose sub-words have labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal, TokenClassificationConfig
from toolkit.data.report import Piece
from toolkit.data.tokenize.columns import Batch, Plan, as_whole, check_texts, columns_of, describe
from toolkit.data.tokenize.documents import CHUNK_CHARACTERS, IGNORED, Cut, Documents, Encoder, check_room, cut_as_read
from toolkit.data.tokenize.format import Format, Splits
from toolkit.data.tokenize.labels import Classes
from toolkit.data.tokenize.spans import read_spans, tag_words
from toolkit.data.tokenize.tags import READ_ROWS, WRITTEN, continuations, declared_tags, find_tags, parts_of_tags, tag_columns
from toolkit.system.console import printable, quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

_SHOWN_WORDS = 40


def token_classification_format(config: DataConfig, class_names: list[str] | None = None) -> Format:
    """How tagged words are read; `config` holds the settings of TokenClassificationConfig too.

    `class_names` are the tags in the order of their numbers, of a model that has them already.
    """
    import pyarrow as pa

    if not isinstance(config, TokenClassificationConfig):
        raise TypeError("token classification needs the settings of TokenClassificationConfig next to those of DataConfig")
    label_all, is_checked = config.label_all_tokens, config.tag_scheme != "auto" or config.strict_entities

    def plan(splits: Splits, given: DataConfig) -> tuple[dict[str, Plan], list[str]]:
        tags = find_tags(splits, config, class_names)
        plans = {}
        for name, split in splits.items():
            present = columns_of(split, name)
            layout, words, column = tag_columns(present, name)
            numbered = declared_tags(split, column, layout) if layout == "words" else None
            places = class_names if class_names and not any(each.isdecimal() for each in class_names) else None
            columns = (words, column, *(["origin"] if "origin" in present else []))
            plans[name] = Plan(layout, tags.scheme, columns, Classes(tags.names, numbered=numbered or places))
        return plans, []

    def rows(plan: Plan, encoder: Encoder, given: DataConfig) -> TaggedWords:
        check_room(given.max_length, len(encoder.prefix) + len(encoder.suffix))
        return TaggedWords(plan, encoder, label_all, is_checked, given.max_length, given.overlong)

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        labels = pa.list_(pa.int32())
        return {"labels": labels} | ({"word_labels": labels} if label_all else {})

    return Format(
        "token_classification", plan, rows, columns, _describe, _show, settings=(label_all, is_checked),
        class_names=lambda plan: tuple(plan.classes.names) if plan.classes else (), ends_texts=False,
        unsplit="an entity may lie across the cut",
    )  # fmt: skip


@dataclass(frozen=True)
class TaggedWords:
    """Reads batches of rows: all that it needs next to them."""

    plan: Plan
    encoder: Encoder
    label_all: bool  # all sub-words of a word have its tag, not only the first
    is_checked: bool  # tags that break their scheme are refused, not counted
    max_length: int
    overlong: str

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents, or shortened ones where over-long rows are truncated: what is after the words must stay."""
        assert self.plan.classes is not None
        remarks, names = Counter[str](), self.plan.classes.names
        words, tags = _words_and_tags(self.plan, batch, origins, remarks)
        self._check_scheme(words, tags, origins, remarks)
        later, prefix, suffix = continuations(names), self.encoder.prefix, self.encoder.suffix
        room = max(self.max_length - len(prefix) - len(suffix), 0) if self.overlong == "truncate" else None
        values, labels, of_words, whole = [], [], list[list[int]](), []
        for row, encoding in zip(tags, self._encodings(words), strict=True):
            places = np.array(encoding.word_ids, dtype=np.int64)
            is_first = np.diff(places, prepend=-1) != 0
            first = np.where(is_first, row[places], IGNORED)
            marked = np.where(is_first, row[places], later[row[places]]) if self.label_all else first
            kept = first[:room]
            remarks.update(untokenized_words=len(row) - int(is_first.sum()), cut_words=int(is_first[len(kept) :].sum()))
            remarks.update({f"class {names[tag]}": int(n) for tag, n in enumerate(np.bincount(kept[kept >= 0])) if n})
            values.append(np.array([*prefix, *encoding.ids[:room], *suffix], dtype=np.int32))
            labels.append(_framed(marked[:room], len(prefix), len(suffix)))
            of_words.append(_framed(kept, len(prefix), len(suffix)).tolist() if self.label_all else [])
            whole.append(len(encoding.ids) + len(prefix) + len(suffix))
        documents = Documents(
            np.concatenate(values), np.concatenate([[0], np.cumsum(list(map(len, values)))]), np.concatenate(labels), origins,
            np.array(whole, dtype=np.int64), {"word_labels": of_words} if self.label_all else {}, aligned=True,
        )  # fmt: skip
        return documents, +remarks

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Drop or refuse what is too long, or count what was truncated."""
        return cut_as_read(documents, self.max_length, self.overlong)

    def _check_scheme(self, words: list[list[str]], tags: list[np.ndarray], origins: list[str], remarks: Counter[str]) -> None:
        assert self.plan.classes is not None
        scheme, parts = self.plan.supervise, parts_of_tags(self.plan.classes.names)
        if parts is None or not (broken := parts.breaches(tags, scheme)).any():
            return
        if not self.is_checked:
            remarks.update(broken_tags=int(broken.sum()))
            return
        at = int(np.argmax(broken))
        row = int(np.searchsorted(np.cumsum([len(sentence) for sentence in tags]), at, side="right"))
        word = at - sum(len(sentence) for sentence in tags[:row])
        tag = self.plan.classes.names[tags[row][word]]
        before = self.plan.classes.names[tags[row][word - 1]] if word else "nothing"
        raise Refusal(
            f"{origins[row]}: word {word + 1}, {quoted(words[row][word])}, has the tag {quoted(tag)} after {before}, which "
            f"breaks {scheme.upper()}: {WRITTEN[scheme]}. Correct the tag, or take --tag-scheme auto, which reads it as it is."
        )

    def _encodings(self, words: list[list[str]]) -> Iterator[Encoding]:
        """The sub-words of each row, with the word that each is of, as a tokenizer finds them word by word."""
        start, size = 0, 0
        for i, row in enumerate(words):
            size += sum(map(len, row))
            if size >= CHUNK_CHARACTERS or i == len(words) - 1:
                piece: Any = words[start : i + 1]
                yield from self.encoder.fast.encode_batch(piece, is_pretokenized=True, add_special_tokens=False)
                start, size = i + 1, 0


def tagged_words(split: Dataset, names: list[str]) -> Iterator[tuple[list[str], list[int]]]:
    """The words of each row and the numbers of their tags, as `find_tags` numbers them; rows must be whole."""
    layout, words, tags = tag_columns(split.column_names, "train")
    numbered = declared_tags(split, tags, layout)
    plan = Plan(layout, "plain", (words, tags), Classes(names, numbered=numbered))
    rows = split.with_format(None).select_columns([words, tags])
    for at in range(0, len(rows), READ_ROWS):
        batch = rows[at : at + READ_ROWS]
        origins = [f"row {at + i}" for i in range(len(batch[words]))]
        for found, numbers in zip(*_words_and_tags(plan, batch, origins, Counter()), strict=True):
            yield found, numbers.tolist()


def _words_and_tags(
    plan: Plan, batch: Batch, origins: list[str], remarks: Counter[str]
) -> tuple[list[list[str]], list[np.ndarray]]:
    """The words of each row, and the numbers of their tags."""
    assert plan.classes is not None
    classes, (first, second) = plan.classes, plan.columns[:2]
    places = {name: number for number, name in enumerate(classes.names)}
    if classes.numbered is not None:
        places |= {number: places[name] for number, name in enumerate(classes.numbered) if name in places}  # type: ignore[misc]
    words, tags = [], []
    if plan.layout == "spans":
        check_texts(batch[first], first, origins)
    for value, of_words, origin in zip(batch[first], batch[second], origins, strict=True):
        if plan.layout == "spans":
            found, written, cut = tag_words(value, read_spans(of_words, value, second, origin), origin)
            remarks.update(spans_in_words=cut)
        else:
            _check_words(value, of_words, first, second, origin)
            found, written = value, [as_whole(tag) for tag in of_words]
        numbers = [places.get(tag, -1) for tag in written]
        if -1 in numbers:
            at = numbers.index(-1)
            classes.number(written[at], f"{origin}: word {at + 1}, {quoted(found[at])}")  # refuses it
            numbers = [classes.number(tag, origin) for tag in written]
        words.append(found)
        tags.append(np.array(numbers, dtype=np.int64))
    return words, tags


def _check_words(words: Any, tags: Any, words_column: str, tags_column: str, origin: str) -> None:
    """Refuse what is not a list of words with a list of as many tags."""
    for value, column, what in ((words, words_column, "words"), (tags, tags_column, "tags")):
        if not isinstance(value, list) or not value:
            raise Refusal(f"{origin}: {column} is {describe(value)}, and must be a list of {what}. Correct or remove the row.")
    if len(words) != len(tags):
        raise Refusal(f"{origin}: {len(words)} words and {len(tags)} tags; each word has one tag. Correct or remove the row.")
    for number, word in enumerate(words, 1):
        if not isinstance(word, str) or not word.strip():
            what = describe(word) if not isinstance(word, str) or not word else "nothing but white space"
            raise Refusal(f"{origin}: word {number} of {words_column} is {what}. Remove it with its tag, or correct it.")


def _framed(labels: np.ndarray, before: int, after: int) -> np.ndarray:
    return np.pad(labels.astype(np.int32), (before, after), constant_values=IGNORED)


def _describe(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> str:
    number = len(plan.classes.names) if plan.classes else 0
    what = "words with a tag each" if plan.layout == "words" else "texts with spans"
    return f"{what}, {number} tags ({'plain' if plan.supervise == 'plain' else plan.supervise.upper()})"


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    """The first words as word/tag; those with a tag other than O are marked."""
    assert plan.classes is not None
    labels = row.get("word_labels", row["labels"])
    starts = [i for i, label in enumerate(labels) if label != IGNORED]
    pieces: list[Piece] = []
    for start, end in zip(starts[:_SHOWN_WORDS], [*starts[1:], len(labels)], strict=False):
        ids = [token for token in row["input_ids"][start:end] if token not in tokenizer.all_special_ids]
        tag = plan.classes.names[labels[start]]
        pieces += [(f"{printable(str(tokenizer.decode(ids)).strip())}/{tag}", tag != "O"), (" ", False)]
    return "", [*pieces, (f"... {len(starts) - _SHOWN_WORDS} more words", False)] if len(starts) > _SHOWN_WORDS else pieces
