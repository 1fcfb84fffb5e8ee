"""The batch: what one rank computes in one step."""

from dataclasses import dataclass, field
from typing import Any

import torch

Document = dict[str, Any]  # columns of one tokenized row: token ids, labels, whatever a collate function reads
MicroBatch = dict[str, Any]  # what a collate function makes: tensors by name, and integers (max_length_q) and lists (rows)


@dataclass
class Batch:
    """The micro-batches of one step on this rank, and what the loss needs to know about the whole global batch.

    `totals`: sums over the global batch, of all ranks: "examples", "tokens" (supervised tokens) where the rows have them,
    "weight" where the rows have one, "pairs" and "chosen_tokens" of preference pairs, "desirable" and "undesirable" ones of
    single answers, "documents" and "comparisons" of lists.
    `real`: whether a micro-batch counts; a padding micro-batch has weight zero. `seeds`: of the random numbers
    in each forward pass, from (seed, epoch, first example). `position`: examples consumed before this step, `size` those in it,
    `examples` their indices over all ranks; `indices` those of each micro-batch of this rank, `epochs` their epochs.
    """

    micro_batches: list[MicroBatch]
    totals: dict[str, float]
    real: list[bool]
    seeds: list[int] = field(default_factory=list)
    position: int = 0
    size: int = 0
    examples: list[int] = field(default_factory=list)
    indices: list[list[int]] = field(default_factory=list)
    epochs: list[list[int]] = field(default_factory=list)

    def pin_memory(self) -> "Batch":
        """Page-locked copies, so that the transfer to a CUDA device overlaps with compute."""
        self.micro_batches = [
            {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in micro_batch.items()}
            for micro_batch in self.micro_batches
        ]
        return self
