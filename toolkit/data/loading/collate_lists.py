"""From queries with their lists of documents to the tensors of one micro-batch: one row for each document."""

from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch

NOT_FOR_THE_MODEL = ("labels", "documents", "most_documents", "by_length", "groups")
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
