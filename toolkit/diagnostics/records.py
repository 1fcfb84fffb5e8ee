"""What is recorded of a run of a recipe: batches, forward passes, gradients, updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.diagnostics.findings import Finding
from toolkit.rollouts.rollout import Rollout

Documents = list[Document]
Gradients = dict[str, torch.Tensor]


@dataclass
class MadeBatch:
    """One that a loader made: its tensors, the documents in it, and the collate function."""

    tensors: MicroBatch
    documents: Documents
    collate: Callable[[Documents], MicroBatch]
    where: str = ""  # of the collate function, where it is the recipe's
    kind: str = ""  # "train" or "eval", once it is used


@dataclass
class Forward:
    """A forward pass of the trained model, seen at its input embeddings.

    `kind`: of the loader whose batch is in use, "train", "eval" or "". `norms`: of the gradient of each embedded token,
    `[batch, length]`, once there was a backward pass. `is_masked`: whether the body got an attention mask or documents'
    bounds; None where that was not seen. `span_gradients`: of the logits of answers' "start" and "end", `[batch, length]`.
    """

    kind: str
    training: bool
    with_gradient: bool
    input_ids: torch.Tensor
    where: str
    owner: nn.Module
    norms: torch.Tensor | None = None
    is_masked: bool | None = None
    span_gradients: Gradients = field(default_factory=dict)


@dataclass
class Update:
    """One step of an optimizer: rates and gradients as it got them, and the gradients before they were clipped.

    `progress`: of the run, examples consumed before the step over those to consume. `scheduled`: how often a scheduler of torch
    was stepped since the last update, and where. `left_over`: parameters that had a gradient before the first forward pass.
    `is_repeated`: of the same optimizer as the update before, without a forward pass between them.
    `unchanged`: the share of elements with a gradient that the update left as they were. `shrunk`: by what the recipe itself
    multiplied parameters since the update before, by name, where that is below 1.
    """

    rates: list[float]
    gradients: Gradients
    unclipped: Gradients
    progress: float | None
    micro_batches: int
    where: str
    scheduled: int = 0
    schedule_where: str = ""
    left_over: list[str] = field(default_factory=list)
    is_repeated: bool = False
    unchanged: float = 0.0
    shrunk: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """One run of a recipe."""

    tokenizer: Any = None
    columns: list[str] = field(default_factory=list)
    task: str = ""  # of the tokenize_for_* that was called
    splits: dict[str, Any] = field(default_factory=dict)
    auto_class: str = ""
    models: list[nn.Module] = field(default_factory=list)
    train: Any = None
    made_batches: dict[int, MadeBatch] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    optimizer_where: str = ""
    schedule: Callable[..., list[float]] | None = None
    asks_schedule: bool = False  # else the recipe may have a curve of its own
    built: Any = None  # the optimizer that tk.build_optimizer made
    alone: list[tuple[float, int, str]] = field(default_factory=list)  # error, documents, place of the loss function
    uneven: list[tuple[float, str]] = field(default_factory=list)  # the same error of lists of unequal lengths, place
    loss_types: set[torch.dtype] = field(default_factory=set)
    frozen_before: Gradients = field(default_factory=dict)
    counted: list[tuple[int, int, str]] = field(default_factory=list)  # cross_entropy in the recipe: targets, labels, place
    of_probabilities: str = ""  # where cross_entropy was given probabilities in place of logits
    within_0_and_1: dict[str, bool] = field(default_factory=dict)  # what binary_cross_entropy_with_logits was given, by place
    written_at: str = ""  # where the recipe itself changes the trained model's parameters
    events: list[dict[str, Any]] = field(default_factory=list)
    samples_policy: bool = False
    rollouts: list[Rollout] = field(default_factory=list)  # before the first update, with their rewards
    off_sampled: list[tuple[float, str]] = field(default_factory=list)  # nats between log-probabilities and sampling's, place
    direction: float | None = None  # cosine of the first update with what the rows prefer
    has_known_loss: bool = False  # of pairs: one of the toolkit's
    noted: list[Finding] = field(default_factory=list)  # by loss_parts.py
    completions: MicroBatch = field(default_factory=dict)  # the last whose log-probabilities the recipe asked for
    off_axis: int = 0  # steps whose advantages add up to 0 over completions of one number, and not over those of a prompt
    embeds: list[Callable[..., torch.Tensor]] = field(default_factory=list)  # of the pass with a gradient
    pooling: str = ""  # of embeddings, that is written to the model directory
    error: BaseException | None = None
    error_where: str = ""

    @property
    def model(self) -> nn.Module | None:
        """The trained model: the last of those that were made which holds parameters of the optimizer."""
        if self.optimizer is None:
            return self.models[0] if self.models else None
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return next((m for m in reversed(self.models) if any(id(p) in trained for p in m.parameters())), None)

    def of_model(self, kind: str) -> list[Forward]:
        """The forward passes of the trained model in which a batch of this kind was in use."""
        inside = {id(module) for module in self.model.modules()} if self.model is not None else set()
        return [forward for forward in self.forwards if forward.kind == kind and id(forward.owner) in inside]
