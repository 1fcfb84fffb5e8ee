"""Which keys the tokens of a document see, as masks that all layers and documents of the same lengths share."""

import functools
import math
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def once_a_row(make: Callable[[torch.Tensor], T]) -> Callable[[torch.Tensor], T]:
    """`make`, which waits for the device, for the two tensors used last: the layers of a row and its backward share them."""
    kept: list[tuple[weakref.ref[torch.Tensor], T]] = []

    @torch.compiler.disable  # it looks at the identity of a tensor
    @functools.wraps(make)
    def of(tensor: torch.Tensor) -> T:
        for row, made in kept:
            if row() is tensor:
                return made
        made = make(tensor)
        kept[:] = [*kept[-1:], (weakref.ref(tensor), made)]
        return made

    return of


class Masks(dict[tuple[int, int, int, int | None, bool, torch.dtype], torch.Tensor]):
    """The masks of a row's documents, which its layers share: 0 where a key is seen, -inf elsewhere, `[queries, keys]`.

    By the first query's place among the keys, the numbers of queries and of keys, window, causal and type. Making a mask takes
    longer than the attention of a short answer to its prompt, and a mask of booleans is made into numbers in each call, which
    are kept for its backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __missing__(self, key: tuple[int, int, int, int | None, bool, torch.dtype]) -> torch.Tensor:
        before, queries, keys, window, causal, dtype = key
        seen = band(range(before, before + queries), range(keys), window, causal, self.device)
        self[key] = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -math.inf)
        return self[key]


@once_a_row
def masks_of(bounds: torch.Tensor) -> Masks:
    return Masks(bounds.device)


def band(queries: range, keys: range, window: int | None, causal: bool, device: torch.device) -> torch.Tensor:
    """Which keys of a document which queries see: bool `[queries, keys]`."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)
