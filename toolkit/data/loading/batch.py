"""The batch: what one rank computes in one step."""

from dataclasses import dataclass, field
from typing import Any

import torch

Document = dict[str, Any]  # columns of one tokenized row: token ids, labels, whatever a collate function reads
MicroBatch = dict[str, Any]  # what a collate function makes: tensors by name, and integers (max_length_q) and lists (rows)
MISMATCHED = "mismatched_"  # what the names of all that is about mismatched answers begin with
OWN = "own_"  # and those of what a recipe adds for a loss or metric of its own
# What of a micro-batch is for losses and metrics, and not for the model's forward.
_NOT_FOR_THE_MODEL = frozenset({
    "labels", "word_labels", "weight", "supervised_positions",
    "token_weights", "seen_ahead", "attention_seeds",  # of masked diffusion
    "teacher_logps", "teacher_ids",
    "start_positions", "end_positions", "char_starts", "char_ends", "window",  # of question answering
    "documents", "most_documents", "by_length", "groups",  # of lists
    "answer_positions", "answer_tokens", "answer_slots", "longest_answer", "answers",
    "chosen_tokens", "rejected_tokens", "pair", "margin", "desirable", "answer",
    "advantages", "mask", "sampled_logps", "old_logps", "reference_logps", "sampler_weights", "old_values", "returns",
    "kept_rows", "kept_ids",
})  # fmt: skip


def model_inputs(micro_batch: MicroBatch) -> dict[str, Any]:
    """What of a micro-batch the model's forward gets: not its labels, nor what else is for losses and metrics alone.

    What a collate function of yours adds for your loss is left out by a name that begins with `own_`.
    """
    return {
        name: value for name, value in micro_batch.items()
        if name not in _NOT_FOR_THE_MODEL and not name.startswith((MISMATCHED, OWN))
    }  # fmt: skip


def precise(values: torch.Tensor) -> torch.Tensor:
    """What a model gives back, in float32; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass
class Batch:
    """The micro-batches of one step on this rank, and what the loss needs of the whole global batch.

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

    def __repr__(self) -> str:
        return f"Batch({len(self.micro_batches)} micro-batches at position {self.position:,}, totals {self.totals})"

    def pin_memory(self) -> "Batch":
        """Page-locked copies, so that the transfer to a CUDA device overlaps with compute."""
        self.micro_batches = [
            {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in micro_batch.items()}
            for micro_batch in self.micro_batches
        ]
        return self


def check_batch(batch: object) -> None:
    """What a DataLoader of the user's gives is rows alone: the loss needs the totals of the global batch too."""
    if not isinstance(batch, Batch):
        raise TypeError(f"a batch is a tk.Batch, not {type(batch).__name__}: tk.Batch([rows], totals, real=[True])")
