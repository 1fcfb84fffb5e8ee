"""What an engine is: the functions in which plain data parallelism, ZeRO and FSDP2 differ."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


def local_part(tensor: Any) -> torch.Tensor:
    """What this rank has of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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

    `backward(accelerator, model, loss, last)`: of a part of the loss that was normalized for the whole world, so that an
    average over the ranks makes the exact mean. `accumulating(accelerator, model, last)`: the context of a micro-batch's
    forward and backward, which keeps ranks from exchanging gradients before the last one where the engine allows it.
    `clip_and_update(accelerator, model, optimizer, loss, max_grad_norm)`: clip by the global norm, update unless something
    is not finite, clear the gradients.

    Of the engines that shard, else None: `pieces(accelerator, model, optimizer)` are those of all trained parameters, in one
    order on every rank; `whole_parameters(model)` gives each parameter in turn, whole, to every rank (a collective);
    `put_whole(accelerator, model, tensors)` puts whole parameters, by name, where forward reads them.
    """

    name: str
    backward: Callable[[Any, Any, torch.Tensor, bool], None]
    accumulating: Callable[[Any, Any, bool], AbstractContextManager[Any]]
    clip_and_update: Callable[[Any, Any, Any, torch.Tensor, float], dict[str, torch.Tensor]]
    pieces: Callable[[Any, Any, Any], list[Piece]] | None = None
    whole_parameters: Callable[[Any], Iterator[tuple[str, torch.Tensor]]] | None = None
    put_whole: Callable[[Any, Any, dict[str, torch.Tensor]], None] | None = None

    @property
    def shards(self) -> bool:
        """Whether a rank keeps only a part of the optimizer's state."""
        return self.pieces is not None
