"""Log-probabilities and entropies in blocks, whose gradient takes the place of the logits, against float64 and autograd."""

import pytest
import torch

from toolkit.losses import token_losses
from toolkit.losses.token_entropies import LogpsAndEntropies, logps_and_entropies

ROWS, VOCABULARY = 9, 50
DEVICES = [
    "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_entropies", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 8e-3)])
def test_values_and_gradient_are_those_of_torch(
    dtype: torch.dtype, tolerance: float, of_entropies: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a temperature, in blocks of four rows; on a GPU by the kernel in Triton, in parts of 16 tokens. With tokens that are
    ruled out, over a whole part too, there with gradients as fp16's scale makes them, and a row that is almost certain.

    Fails when: the temperature is left out of the gradient, a block or part is skipped, the entropy's own term is missing from
    its derivative, entropies have a gradient that was not requested, or 0 log 0 is not 0, nor times a large gradient."""
    monkeypatch.setattr(token_losses, "_BLOCK_BYTES", 4 * VOCABULARY * max(4, dtype.itemsize))
    if device == "cuda":
        kernel = pytest.importorskip("toolkit.losses.token_entropies_gpu")
        monkeypatch.setattr(kernel, "BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, generator=generator).mul(3).to(dtype)
    targets = torch.randint(30, VOCABULARY, (ROWS,), generator=generator)
    logits[0, 3], logits[1, :20], logits[2, targets[2]] = -torch.inf, -torch.inf, 40
    of_values = torch.randn(ROWS, 2, generator=generator)
    of_values[1] *= 2**16
    leaf = logits.double().requires_grad_()
    log_q = (leaf / 0.7).log_softmax(-1)
    entropies = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)
    logps = log_q.gather(1, targets[:, None])[:, 0]
    (logps @ of_values[:, 0].double() + of_entropies * (entropies @ of_values[:, 1].double())).backward()

    there = logits.to(device).requires_grad_()
    own = there.clone()
    values = LogpsAndEntropies.apply(own, targets.to(device), 0.7, of_entropies, own.detach())
    assert torch.equal(values, logps_and_entropies(logits.to(device), targets.to(device), 0.7))
    wanted = torch.stack([logps, entropies], dim=1)
    torch.testing.assert_close(values.cpu().double(), wanted, rtol=min(tolerance, 1e-6), atol=min(tolerance, 1e-6))
    (values * of_values.to(device)).sum().backward(retain_graph=True)
    torch.testing.assert_close(there.grad.cpu().double(), leaf.grad, rtol=tolerance, atol=tolerance)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (values * of_values.to(device)).sum().backward()
