"""The norm of plain data parallelism."""

import torch

from toolkit.distributed.engines.plain import squared_norm


def test_the_norm_of_a_large_gradient_is_exact_on_the_cpu() -> None:
    """To 1e-6 of float64's, and of bfloat16 gradients as well.

    Fails when: torch's (2.13) own norm is taken, which adds up a million numbers one after another.
    """
    gradients = [torch.randn(1000, 4096, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for dtype in (torch.float32, torch.bfloat16):
        found = squared_norm([gradient.to(dtype) for gradient in gradients])
        expected = sum(gradient.to(dtype).double().square().sum() for gradient in gradients)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0), dtype
