"""From examples of several texts (lists of documents, an anchor with its positive) to the tensors of one micro-batch."""

from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.layouts import bounds_of_documents, padded_inputs, places_within

_GROUP = 8  # rows at least that are read together: fewer have less padding and use a device worse
_MOST_GROUPS = 8


def collate_lists(lists: list[Document], *, pad_token_id: int = 0) -> MicroBatch:
    """Each document, with its query before it, in a row of its own, padded on the right to the longest; lists of any lengths.

    Returns `input_ids` and `attention_mask` `[documents, longest]`, `token_type_ids` where the rows have them, `labels`
    `[documents]`, float32; `documents` `[lists]`, how many of these rows are of each list, and `most_documents`, an integer;
    `by_length` `[documents]`, the rows in the order of their lengths, and `groups`, how many of them can be read together with
    little padding, and how long the longest is: pairs of integers.

    Each list has `input_ids`, the tokens of all its rows one behind the other, `document_tokens`, how many are of each, and
    `labels`.
    """
    counts = [len(each["document_tokens"]) for each in lists]
    lengths = np.concatenate([np.asarray(each["document_tokens"], dtype=np.int64) for each in lists])
    is_token = np.arange(lengths.max())[None] < lengths[:, None]

    def rows(name: str, padding: int) -> torch.Tensor:
        padded = np.full(is_token.shape, padding, dtype=np.int64)
        padded[is_token] = np.concatenate([np.asarray(each[name], dtype=np.int64) for each in lists])
        return torch.from_numpy(padded)

    batch: dict[str, Any] = {
        "input_ids": rows("input_ids", pad_token_id),
        "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
    }
    if "token_type_ids" in lists[0]:
        batch["token_type_ids"] = rows("token_type_ids", 0)
    labels = np.concatenate([np.asarray(each["labels"], dtype=np.float32) for each in lists])
    by_length = np.argsort(lengths, kind="stable")
    parts = np.array_split(lengths[by_length], min(max(len(lengths) // _GROUP, 1), _MOST_GROUPS))
    return {
        **batch, "labels": torch.from_numpy(labels), "documents": torch.tensor(counts), "most_documents": max(counts),
        "by_length": torch.from_numpy(by_length), "groups": [(len(part), int(part[-1])) for part in parts],
    }  # fmt: skip


def collate_text_groups(documents: list[Document], *, pad_token_id: int = 0, layout: str = "padded") -> MicroBatch:
    """All texts of all examples, those of an example one behind the other.

    `padded`: `input_ids` and `attention_mask` `[texts, longest]`, padded on the right. `packed`: one row without padding,
    `input_ids` and `position_ids` `[1, tokens]` with the bounds of texts as in `collate_packed`; anchors are often much
    shorter than what they are paired with. `choose_text_layout` finds what suits a model.

    And of each text, `[texts]`: `example`, the number of its example in the micro-batch; `role`, 0 for the anchor, 1 for the
    positive, 2 and more for hard negatives; `text_key`, equal for equal texts; `score`, the similarity that the row gives its
    two texts, 0 where it gives none.

    Each document has `input_ids`, its texts one behind the other, `text_tokens`, how many each has, and `text_keys`.
    """
    lengths = [np.asarray(document["text_tokens"], dtype=np.int64) for document in documents]
    texts = [
        text
        for document, sizes in zip(documents, lengths, strict=True)
        for text in np.split(np.asarray(document["input_ids"], dtype=np.int64), np.cumsum(sizes)[:-1])
    ]
    counts = [len(sizes) for sizes in lengths]
    scores = [float(document.get("score", 0.0)) for document in documents]
    about = {
        "example": np.repeat(np.arange(len(documents)), counts),
        "role": np.concatenate([np.arange(count) for count in counts]),
        "text_key": np.concatenate([np.asarray(document["text_keys"], dtype=np.int64) for document in documents]),
        "score": np.repeat(np.array(scores, dtype=np.float32), counts),
    }
    if layout == "padded":
        inputs: dict[str, Any] = padded_inputs(texts, pad_token_id)
    else:
        sizes = np.concatenate(lengths)
        inputs = {
            "input_ids": torch.from_numpy(np.concatenate(texts))[None],
            "position_ids": torch.from_numpy(places_within(sizes))[None],
            **bounds_of_documents(sizes, sizes),
        }
    return {**inputs, **{name: torch.from_numpy(values) for name, values in about.items()}}
