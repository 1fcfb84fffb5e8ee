"""What an engine is: the functions in which plain data parallelism, ZeRO and FSDP2 differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

Exchanged = Literal["nothing", "gradients", "weights"]  # weights: they and their gradients


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor, and any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)  # importing the class of DTensors takes a while
    return to_local() if to_local else tensor


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements that this rank keeps, in the optimizer's own precision.

    `parameter`, `shape`: of the whole. `start`: the first element, counted in the flattened whole. `owner`: the tensor under
    which the optimizer keeps its state. `offset`: the first element, counted in the flattened owner. `count`: elements; 0
    where this rank keeps none.
    """

    parameter: str
    shape: torch.Size
    start: int
    owner: torch.Tensor
    offset: int
    count: int

    @property
    def laid_out(self) -> torch.Tensor:
        """The owner as a plain tensor."""
        return local_part(self.owner)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same run in the owner, or in any tensor laid out like it: a view `[count]`."""
        return local_part(tensor).detach().reshape(-1)[self.offset : self.offset + self.count]

    def of_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same run in a whole tensor of the parameter's shape."""
        return tensor.reshape(-1)[self.start : self.start + self.count]


@dataclass(frozen=True)
class Engine:
    """How one kind of engine does what all of them do.

    `label(accelerator)`: the engine and what waits on the CPU, for records and people: "ZeRO-2, optimizer on the CPU".
    `backward(accelerator, model, loss, last)`: of a part of the loss that was normalized for the whole world, so that an
    average over the ranks makes the exact mean. `accumulating(accelerator, model, last)`: the context of a micro-batch's
    forward and backward, which keeps ranks from exchanging gradients before the last one where the engine allows it.
    `clip_and_update(accelerator, model, optimizer, loss, max_grad_norm)`: clip by the global norm, update unless something
    is not finite, clear the gradients. `place_frozen(accelerator, model)`: a second model that is only evaluated, sharded where
    the engine shards weights. `exchanged(accelerator)`: between the ranks in each micro-batch.

    Of the engines that shard, else None: `pieces(accelerator, model, optimizer)` are those of all trained parameters, in one
    order on every rank; `whole_parameters(model)` gives each parameter in turn, whole, to every rank (a collective);
    `put_whole(accelerator, model, tensors)` puts whole parameters, by name, where forward reads them.
    """

    label: Callable[[Accelerator], str]
    backward: Callable[[Accelerator, nn.Module, torch.Tensor, bool], None]
    accumulating: Callable[[Accelerator, nn.Module, bool], AbstractContextManager[None]]
    clip_and_update: Callable[[Accelerator, nn.Module, Optimizer, torch.Tensor, float], dict[str, torch.Tensor]]
    place_frozen: Callable[[Accelerator, nn.Module], nn.Module]
    exchanged: Callable[[Accelerator], Exchanged] = lambda accelerator: "nothing"
    pieces: Callable[[Accelerator, nn.Module, Optimizer | None], list[Piece]] | None = None
    whole_parameters: Callable[[nn.Module], Iterator[tuple[str, torch.Tensor]]] | None = None
    put_whole: Callable[[Accelerator, nn.Module, dict[str, torch.Tensor]], None] | None = None

    @property
    def shards(self) -> bool:
        """Whether a rank keeps only a part of the optimizer's state."""
        return self.pieces is not None

    def shards_weights(self, accelerator: Accelerator) -> bool:
        """Whether a rank keeps only a part of the parameters between two steps."""
        return self.exchanged(accelerator) == "weights"
