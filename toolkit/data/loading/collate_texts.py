"""From tokenized groups of texts (an anchor, its positive, hard negatives) to the tensors of one micro-batch."""

from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.layouts import bounds_of, places_within


def collate_text_groups(documents: list[Document], *, pad_token_id: int = 0, layout: str = "padded") -> MicroBatch:
    """All texts of all examples, those of an example one behind the other.

    `padded`: `input_ids` and `attention_mask` `[texts, longest]`, padded on the right. `packed`: one row without padding,
    `input_ids` and `position_ids` `[1, tokens]` with the bounds of texts as in `collate_packed`; anchors are often much
    shorter than what they are paired with. What suits a model, `choose_text_layout` says.

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
    inputs = _packed(texts) if layout == "packed" else _padded(texts, pad_token_id)
    return {**inputs, **{name: torch.from_numpy(values) for name, values in about.items()}}


def _packed(texts: list[np.ndarray]) -> dict[str, Any]:
    lengths = np.array([len(text) for text in texts])
    bounds, longest = bounds_of(lengths), int(lengths.max())
    return {
        "input_ids": torch.from_numpy(np.concatenate(texts))[None],
        "position_ids": torch.from_numpy(places_within(lengths))[None],
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def _padded(texts: list[np.ndarray], pad_token_id: int) -> dict[str, Any]:
    ids = np.full((len(texts), max(map(len, texts))), pad_token_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
