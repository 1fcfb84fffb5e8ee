"""Plain data parallelism: its norm, and models that it can't train."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.distributed.engines.plain import accumulating, clip_and_update, squared_norm

ON_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])


def test_the_norm_of_a_large_gradient_is_exact_on_the_cpu() -> None:
    """To 1e-6 of float64's, and of bfloat16 gradients as well.

    Fails when: torch's (2.13) own norm is taken, which adds up a million numbers one after another.
    """
    gradients = [torch.randn(1000, 4096, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for dtype in (torch.float32, torch.bfloat16):
        found = squared_norm([gradient.to(dtype) for gradient in gradients])
        expected = sum(gradient.to(dtype).double().square().sum() for gradient in gradients)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0), dtype


@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_step_clips_as_torch_does(device: str, dtype: torch.dtype) -> None:
    """The kernel divides by `grad_scale`; next to torch's own clipping and AdamW one tensor at a time. Fails when: it is the reverse."""
    steps: list[list[torch.Tensor]] = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(300, 70).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=None if fused else False)
        for size in (3.0, 1e-3):
            for parameter in model.parameters():
                parameter.grad = size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            if fused:
                loss = torch.zeros((), device=device)
                clip_and_update(SimpleNamespace(scaler=None), model, optimizer, loss, 1.0)  # type: ignore[arg-type]
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        steps.append([parameter.detach().float() for parameter in model.parameters()])
    for ours, theirs in zip(*steps, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3 if dtype == torch.bfloat16 else 1e-7)


@pytest.mark.parametrize("last", [False, True])
def test_a_model_that_is_not_prepared_is_not_trained_by_several_ranks(last: bool) -> None:
    """Each rank would train one of its own, on its part of the rows. Fails when: `accumulating` does not look at the model."""
    alone, ranks = (SimpleNamespace(num_processes=number, no_sync=lambda model: model.no_sync()) for number in (1, 2))
    made: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^Linear: .*\b2 ranks.*accelerator\.prepare"):
        accumulating(ranks, made, last)  # type: ignore[arg-type]
    made.no_sync = lambda: torch.enable_grad()  # as DDP's wrapper has it
    for accelerator in (alone, ranks):
        with accumulating(accelerator, made, last):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_large_embedding_are_added_to_its_gradient(tied: bool) -> None:
    """Next to torch's own accumulation, with tokens that come twice, padding, and a head on the same weights.

    Fails when: rows are not added but put there; `sparse` stays on (the first micro-batch of the next step).
    """
    gradients = []
    for by_rows in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(1000, 1001, padding_idx=0, dtype=torch.float64)
        seen = []
        table.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.sparse))
        for step in range(2):
            table.weight.grad = None
            for tokens in (7, 3, 5):
                context = accumulating(SimpleNamespace(num_processes=1), table, last=False)  # type: ignore[arg-type]
                with context if by_rows else contextlib.nullcontext():
                    rows = table(torch.tensor([0, 1, 1, *range(2, tokens + step)]))
                    head = rows[:4].detach() @ table.weight.t() if tied else rows
                    (rows.square().sum() + head.square().sum()).backward()
        assert seen == (2 * [False, True, True] if by_rows else 6 * [False])
        assert table.weight.grad is not None
        assert not table.weight.grad.is_sparse
        gradients.append(table.weight.grad)
    assert torch.allclose(*gradients, rtol=1e-14, atol=1e-12)
