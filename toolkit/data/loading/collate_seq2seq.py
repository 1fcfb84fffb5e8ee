"""From sources with their targets to the tensors of one micro-batch: for the encoder, and for the decoder."""


import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.collate import IGNORED


def collate_seq2seq(
    documents: list[Document], *, pad_token_id: int, decoder_start_token_id: int | None
) -> MicroBatch:
    """Put one example in each row, padded on the right to the longest source and the longest target.

    Returns `input_ids` and `attention_mask` `[examples, source]`; `decoder_input_ids`, the target behind the start token, and
    `labels`, the target itself, -100 on padding, `[examples, target]`; `supervised_positions`, the flat indices of labels that
    count. The decoder needs no mask of its own: it is causal, and padding comes last.

    Each document has `input_ids`, source and target one behind the other, and `source_tokens`, how many are the source's.

    Args:
        decoder_start_token_id: what `decoder_start` found of the model; None: each target's own last token (mBART).
    """
    cuts = [int(document["source_tokens"]) for document in documents]
    tokens = [np.asarray(document["input_ids"], dtype=np.int64) for document in documents]
    sources = [row[:cut] for row, cut in zip(tokens, cuts, strict=True)]
    targets = [row[cut:] for row, cut in zip(tokens, cuts, strict=True)]
    labels = _filled(targets, IGNORED)
    shifted = [np.append(_first_input(target, decoder_start_token_id), target[:-1]) for target in targets]
    return {
        "input_ids": torch.from_numpy(_filled(sources, pad_token_id)),
        "attention_mask": torch.from_numpy(_filled([np.ones_like(source) for source in sources], 0)),
        "decoder_input_ids": torch.from_numpy(_filled(shifted, pad_token_id)),
        "labels": torch.from_numpy(labels),
        "supervised_positions": torch.from_numpy(np.flatnonzero(labels != IGNORED)),
    }


def _first_input(target: np.ndarray, token: int | None) -> int:
    return int(target[-1]) if token is None else token


def _filled(rows: list[np.ndarray], fill: int) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table
