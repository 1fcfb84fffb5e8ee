"""Plain data parallelism: its norm, and models that it can't train."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.distributed.engines.plain import accumulating, squared_norm


def test_the_norm_of_a_large_gradient_is_exact_on_the_cpu() -> None:
    """To 1e-6 of float64's, and of bfloat16 gradients as well.

    Fails when: torch's (2.13) own norm is taken, which adds up a million numbers one after another.
    """
    gradients = [torch.randn(1000, 4096, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for dtype in (torch.float32, torch.bfloat16):
        found = squared_norm([gradient.to(dtype) for gradient in gradients])
        expected = sum(gradient.to(dtype).double().square().sum() for gradient in gradients)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0), dtype


@pytest.mark.parametrize("last", [False, True])
def test_a_model_that_is_not_prepared_is_not_trained_by_several_ranks(last: bool) -> None:
    """Each rank would train one of its own, on its part of the rows. Fails when: `accumulating` does not look at the model."""
    alone, ranks = (SimpleNamespace(num_processes=number, no_sync=lambda model: model.no_sync()) for number in (1, 2))
    made: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear: the model is not prepared for 2 ranks"):
        accumulating(ranks, made, last)  # type: ignore[arg-type]
    made.no_sync = lambda: torch.enable_grad()  # as DDP's wrapper has it
    for accelerator in (alone, ranks):
        with accumulating(accelerator, made, last):  # type: ignore[arg-type]
            pass
