"""How many rows a product of matrices needs for a row's bits not to depend on how many there are."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST = 16
_found: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def rows_for_equal_bits(model: PreTrainedModel) -> int:
    """The smallest power of 2 whose multiples give a row of the model's products the same bits; at most 16.

    No library promises it, so it is tried, once a model: each shape of its matrices with 1 to 16 rows. On a GPU kernels are
    chosen by the number of rows as well, up to thousands: there it is 1, and completions in other batches are equal but for
    rounding.
    """
    if next(model.parameters()).device.type != "cpu":
        return 1
    if model not in _found:
        shapes = {(module.weight.shape, module.weight.dtype) for module in model.modules() if isinstance(module, nn.Linear)}
        _found[model] = max((_rows_of(*shape, dtype) for shape, dtype in shapes if len(shape) == 2), default=4)
    return _found[model]


def _rows_of(width_out: int, width_in: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(width_out, 4096), width_in, generator=generator).to(dtype)
    rows = torch.randn(2 * MOST, width_in, generator=generator).to(dtype)
    whole = nn.functional.linear(rows, weight)
    count = 1
    for step in range(1, MOST + 1):
        if step % count == 0 and not torch.equal(nn.functional.linear(rows[:step], weight), whole[:step]):
            while step % count == 0:
                count *= 2
    return min(count, MOST)
