"""Texts that belong together: an anchor with its positive and hard negatives, or two sentences with a score, to documents."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.data.report import Piece
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, columns_of, describe, is_finite, wrong_columns
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, check_room, join_documents, leave_out
from toolkit.data.tokenize.format import Format, Splits

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

SCORED, GROUPED = "scored", "grouped"
LAYOUTS = (("anchor", "positive"), ("query", "positive"), ("sentence1", "sentence2", "score"))
_NEGATIVE = re.compile(r"negatives?|negative_\d+")


def text_group_format(query_prompt: str = "", document_prompt: str = "", score_scale: float = 1.0) -> Format:
    """How groups of texts are read: `anchor` or `query`, `positive`, and `negative`, `negative_1` ... or a list of `negatives`;
    or `sentence1`, `sentence2` and `score`.

    Args:
        query_prompt: put before each anchor, and before both sentences of a scored pair.
        document_prompt: put before positives and negatives.
        score_scale: what scores are divided by; then they lie between -1 and 1.
    """
    import pyarrow as pa

    prompts = (query_prompt, document_prompt)

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        fields = {"text_tokens": pa.list_(pa.int32()), "text_keys": pa.list_(pa.int64())}
        return fields | ({"score": pa.float64()} if plan.layout == SCORED else {})

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> TextGroups:
        prompt = max(len(encoding.ids) for encoding in encoder.encode([*prompts]))
        check_room(config.max_length, len(encoder.prefix) + prompt + len(encoder.suffix))
        return TextGroups(plan, encoder, prompts, score_scale, config.max_length, config.overlong)

    return Format(
        "embedding", _plan, rows, columns, lambda plan, tokenizer: _DESCRIBED[plan.layout], _show,
        part_names=("anchor", "positive"), settings=(query_prompt, document_prompt, score_scale), supervises_tokens=False,
        ends_texts=False, unsplit="a text has one embedding and can't be split",
    )  # fmt: skip


_DESCRIBED = {SCORED: "pairs of sentences with a score", GROUPED: "anchors with their positives"}


def _plan(splits: Splits, config: DataConfig) -> tuple[dict[str, Plan], list[str]]:
    plans = {}
    for name, split in splits.items():
        present = columns_of(split, name)
        layout = next((layout for layout in LAYOUTS if set(layout) <= set(present)), None)
        if layout is None:
            needed = "anchor (or query) and positive, with negatives or without; or sentence1, sentence2 and score"
            raise Refusal(wrong_columns(present, name, needed, LAYOUTS))
        negatives = negative_columns(present)
        kind = SCORED if layout == LAYOUTS[-1] else GROUPED
        read = (*layout, *(negatives if kind == GROUPED else ()), *(["origin"] if "origin" in present else []))
        plans[name] = Plan(kind, "all", read)
    if len({plan.layout for plan in plans.values()}) > 1:
        kinds = ", ".join(f"{name} has {_DESCRIBED[plan.layout]}" for name, plan in plans.items())
        raise Refusal(f"The splits are of two kinds: {kinds}. Take another --eval-split, or --eval-strategy no.")
    return plans, []


@dataclass(frozen=True)
class TextGroups:
    """Reads batches of rows; a document is a row's texts one behind the other."""

    plan: Plan
    encoder: Encoder
    prompts: tuple[str, str]  # before anchors, before documents
    score_scale: float
    max_length: int
    overlong: str

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Every text by itself, with the special tokens that the tokenizer puts around one; `whole` is the longest's length."""
        names = [name for name in self.plan.columns if name not in ("score", "origin")]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]
        groups = [_texts_of(row, origin) for row, origin in zip(rows, origins, strict=True)]
        first, second = (self.prompts[0],) * 2 if self.plan.layout == SCORED else self.prompts
        encodings = self.encoder.encode([(second if i else first) + text for group in groups for i, text in enumerate(group)])
        around = len(self.encoder.prefix) + len(self.encoder.suffix)
        room = max(self.max_length - around, 0) if self.overlong == "truncate" else None
        ids, tokens, whole = list[list[int]](), list[list[int]](), list[int]()
        for group, origin in zip(groups, origins, strict=True):
            every = [next(encodings).ids for _ in group]
            if not all(every):
                raise Refusal(f"{origin}: a text has no token of its own. Fill it in, or remove the row.")
            cut = [[*self.encoder.prefix, *text[:room], *self.encoder.suffix] for text in every]
            ids.append([token for text in cut for token in text])
            tokens.append(list(map(len, cut)))
            whole.append(max(map(len, every)) + around)
        columns: dict[str, list[Any]] = {"text_tokens": tokens, "text_keys": [list(map(text_key, group)) for group in groups]}
        if self.plan.layout == SCORED:
            columns["score"] = [self._score(value, origin) for value, origin in zip(batch["score"], origins, strict=True)]
        documents = join_documents(ids, None, origins, columns)
        return replace(documents, whole=np.array(whole, dtype=np.int64)), Counter()

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Count rows with a truncated text, or drop or refuse them."""
        is_over = documents.whole > self.max_length
        if not is_over.any():
            return documents, Cut()
        if self.overlong != "truncate":
            return leave_out(documents, self.max_length, self.overlong, "its longest text")
        lost = documents.whole - [max(tokens) for tokens in documents.columns["text_tokens"]]
        return documents, Cut(overlong=int(is_over.sum()), tokens=int(lost.sum()))

    def _score(self, value: Any, origin: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
            raise Refusal(f"{origin}: score is {describe(value)}, and must be a number. Correct or remove the row.")
        if abs(value) > self.score_scale:
            raise Refusal(
                f"{origin}: score is {value:g}, and must lie between {-self.score_scale:g} and {self.score_scale:g}. Correct "
                "the row, or divide all scores by their greatest value: --score-scale 5"
            )
        return value / self.score_scale


def check_comparable(train: Iterable[Batch], loss_type: str) -> None:
    """Refuse texts or scores that are all alike: a loss that compares them is 0 and teaches nothing."""
    if loss_type == "cosine":
        return
    found = set[Any]()
    for batch in train:
        found.update(batch["score"] if "score" in batch else (tuple(keys[1:]) for keys in batch["text_keys"]))
        if len(found) > 1:
            return
    (only,) = found
    if isinstance(only, float):
        raise Refusal("All scores of the train split are equal, and cosent compares them. Take --embedding-loss cosine.")
    if len(only) == 1:
        raise Refusal(
            "The train split has one positive text and no negatives: a contrastive loss compares each anchor's positive with "
            "other texts. Add rows with other positives, or a column negatives."
        )


def text_key(text: str) -> int:
    """A number that is equal for equal texts, whatever white space is around them: 64 bits of BLAKE2b."""
    digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def negative_columns(columns: list[str]) -> list[str]:
    """Those that hold hard negatives: negative_2 before negative_10."""
    return sorted(filter(_NEGATIVE.fullmatch, columns), key=lambda column: (len(column), column))


def texts_of_row(row: Mapping[str, Any], origin: str = "") -> list[str]:
    """The texts of columns, in their order; a negative that is missing (null) is none."""
    texts = list[str]()
    for column, value in row.items():
        is_negative = bool(_NEGATIVE.fullmatch(column))
        values = value if column == "negatives" and isinstance(value, list) else [value]
        given = [text for text in values if not (is_negative and text is None)]
        check_texts(given, column, [origin] * len(given))
        texts += given
    return texts


def _texts_of(row: Mapping[str, Any], origin: str) -> list[str]:
    """Anchor, positive and negatives of a row."""
    texts = texts_of_row(row, origin)
    (anchor, positive), negatives = (text.strip() for text in texts[:2]), texts[2:]
    for negative in negatives:
        if negative.strip() in (anchor, positive):
            which = "positive" if negative.strip() == positive else "anchor"
            raise Refusal(f"{origin}: a negative is the same text as the {which}. Take it out, or remove the row.")
    return texts


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    bounds = [0, *accumulate(row["text_tokens"][:2])]
    parts = [str(tokenizer.decode(row["input_ids"][start:end])) for start, end in pairwise(bounds)]
    said = [f"score {row['score']:g}"] if plan.layout == SCORED else []
    negatives = len(row["text_tokens"]) - 2
    said += [f"{negatives} hard negative{'s' * (negatives != 1)}"] * bool(negatives)
    return ", ".join(said), [(part, False) for part in parts]
