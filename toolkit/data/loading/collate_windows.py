"""From windows of contexts to the tensors of one micro-batch of extractive question answering."""

from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch


def collate_windows(windows: list[Document], pad_token_id: int = 0) -> MicroBatch:
    """Put one window in each row, padded on the right to the longest.

    Returns `input_ids`, `attention_mask` and, where the rows have them, `token_type_ids` `[windows, longest]`;
    `start_positions` and `end_positions` `[windows]`, 0 where a window doesn't hold the answer; `window`, its number within
    its question; and `char_starts` and `char_ends` `[windows, longest]`: of each token of the context its characters there,
    -1 elsewhere.
    """
    lengths = [len(window["input_ids"]) for window in windows]

    def padded(values: list[Any], fill: int, starts: list[int]) -> torch.Tensor:
        rows = np.full((len(windows), max(lengths)), fill, dtype=np.int64)
        for i, (row, start) in enumerate(zip(values, starts, strict=True)):
            rows[i, start : start + len(row)] = row
        return torch.from_numpy(rows)

    def column(name: str) -> list[Any]:
        return [window[name] for window in windows]

    first = [0] * len(windows)
    contexts = [int(start) for start in column("context_start")]
    batch = {
        "input_ids": padded(column("input_ids"), pad_token_id, first),
        "attention_mask": padded([[1] * length for length in lengths], 0, first),
    }
    batch |= {name: padded(column(name), -1, contexts) for name in ("char_starts", "char_ends")}
    for name in ("start_positions", "end_positions", "window"):
        batch[name] = torch.tensor([int(value) for value in column(name)])
    if "token_type_ids" in windows[0]:
        batch["token_type_ids"] = padded(column("token_type_ids"), 0, first)
    return batch
