"""Losses in blocks whose gradient takes the place of the logits, against torch's cross-entropy and its own backward."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from toolkit.losses import chunked, token_losses as blocks
from toolkit.losses.chunked import logps_in_chunks, sums_in_chunks, values_in_chunks
from toolkit.losses.token_entropies import LogpsAndEntropies, logps_and_entropies
from toolkit.losses.token_losses import token_losses

VOCABULARY, ROWS = 50, 23
DEVICES = [
    "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])
]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "smoothed": {"label_smoothing_factor": 0.1}, "z-loss": {"z_loss": 1e-2},
    "all": {"label_smoothing_factor": 0.2, "z_loss": 1e-2, "weights": torch.linspace(0, 3, ROWS)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def blocks_of_four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 4 * 4 * VOCABULARY)


def logits_and_targets(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole and half numbers, among which are many ties, one very sure row, and one that is wrong by far."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, generator=generator).mul(4).round().div(2)
    targets = logits.argmax(-1)
    targets[::3] = torch.randint(0, VOCABULARY, (len(targets[::3]),), generator=generator)
    logits[4, targets[4]], logits[5, targets[5]] = 40, -40
    return logits.to(dtype), targets


def by_torch(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing_factor: float = 0.0, z_loss: float = 0.0, weights: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    losses = functional.cross_entropy(wide, targets, reduction="none", label_smoothing=label_smoothing_factor)
    losses = losses + z_loss * wide.logsumexp(-1).square()
    losses = losses if weights is None else losses * weights
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_losses_and_gradient_in_the_place_of_the_logits_are_those_of_torch(
    name: str, dtype: torch.dtype, tolerance: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU by the kernel in Triton, in parts of 16 tokens. Also of a row that is almost certain, whose loss is 1e-16 or 0.

    Fails when: the last block, which is short, is left out; the gradient's term of z-loss misses its factor 2; weights are
    left out of the gradient; the log-normalizer is rounded before the target's logit is taken from it.
    """
    logits, targets = (tensor.to(device) for tensor in logits_and_targets(dtype))
    settings = {key: value.to(device) if torch.is_tensor(value) else value for key, value in SETTINGS[name].items()}
    if device == "cuda":
        kernel = pytest.importorskip("toolkit.losses.token_losses_gpu")
        monkeypatch.setattr(kernel, "BLOCK", 16)
    wanted, gradient = by_torch(logits, targets, **settings)
    correct = torch.empty(ROWS, dtype=torch.bool, device=device)
    best = logits.argmax(-1)
    losses = token_losses(logits, targets, **settings, gradient=logits, correct=correct)
    closest, more = (1e-6, 1) if device == "cpu" else (1e-5, 5)  # the kernel adds part by part
    torch.testing.assert_close(losses, wanted, rtol=min(tolerance, closest), atol=1e-6 * min(tolerance, 1e-7))
    torch.testing.assert_close(logits, gradient, rtol=2 * tolerance if more > 1 else tolerance, atol=more * tolerance / 10)
    assert torch.equal(correct, best == targets)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_are_ruled_out_have_no_probability(device: str) -> None:
    """-inf, in places and over a whole part of the kernel. Fails when: the mean of the logits, which is -inf, is taken times 0."""
    logits = torch.linspace(-1, 1, 2 * VOCABULARY, device=device).view(2, VOCABULARY)
    logits[0, 3], logits[1, :30] = -torch.inf, -torch.inf
    targets = torch.tensor([7, 40], device=device)
    wanted, gradient = by_torch(logits, targets)
    losses = token_losses(logits, targets, gradient=logits)
    torch.testing.assert_close((losses, logits), (wanted, gradient), rtol=1e-5, atol=1e-6)


def test_of_several_largest_logits_the_first_is_the_prediction() -> None:
    """As argmax has it. Fails when: `correct` is whether the target's logit is the largest."""
    correct = torch.empty(3, dtype=torch.bool)
    token_losses(torch.tensor([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0], [2.0, 2.0, 2.0]]), torch.tensor([1, 2, 0]), correct=correct)
    assert correct.tolist() == [True, False, True]


class Capped(nn.Module):
    """A head that caps its own logits: the backward of tanh needs what it returned."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, VOCABULARY, dtype=dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(rows))


@pytest.mark.parametrize("of", ["sums", "logps"])
@pytest.mark.parametrize("cap", ["no cap", "cap", "rows are logits"])
def test_logits_that_something_else_needs_are_not_written_over(of: str, cap: str) -> None:
    """Fails when: `_logits_and_room` finds every head's logits free (without a cap it has to)."""
    head = Capped(torch.float64)
    rows = torch.randn(ROWS, VOCABULARY if cap == "rows are logits" else 8, dtype=torch.float64, requires_grad=True)
    kept, (_, targets) = rows.detach().clone(), logits_and_targets(torch.float64)
    logits_of: Any = {"no cap": head.linear, "cap": head, "rows are logits": lambda rows: rows}[cap]
    parameters = () if cap == "rows are logits" else tuple(head.parameters())
    if of == "sums":
        sums_in_chunks(logits_of, parameters, rows, targets, VOCABULARY)[0].backward()
    else:
        logps_in_chunks(logits_of, parameters, rows, targets, VOCABULARY).sum().neg().backward()
    found = [rows.grad, *(parameter.grad for parameter in parameters)]
    wanted = torch.autograd.grad(functional.cross_entropy(logits_of(rows), targets, reduction="sum"), [rows, *parameters])
    torch.testing.assert_close(found, list(wanted), rtol=1e-10, atol=1e-12)
    assert torch.equal(rows, kept)


def test_a_second_backward_through_log_probabilities_is_refused_rather_than_wrong() -> None:
    """Fails when: the gradient is kept outside of what torch watches (`ctx.gradient = gradient`)."""
    rows, head = torch.randn(ROWS, 8, requires_grad=True), nn.Linear(8, VOCABULARY)
    logps = logps_in_chunks(head, tuple(head.parameters()), rows, logits_and_targets(torch.float32)[1], VOCABULARY)
    logps.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()


@pytest.mark.parametrize("chunk", [7, ROWS])
@pytest.mark.parametrize("of", ["sums", "logps", "entropies"])
def test_a_second_derivative_is_refused_rather_than_wrong(of: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a backward that writes in place counts as one that has a derivative itself (no `once_differentiable`)."""
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda *_: chunk)
    rows, head, (_, targets) = torch.randn(ROWS, 8, requires_grad=True), nn.Linear(8, VOCABULARY), logits_and_targets(torch.float32)
    parameters = tuple(head.parameters())

    def values_of(piece: slice, logits: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is None:
            return logps_and_entropies(logits, targets[piece])
        return LogpsAndEntropies.apply(logits, targets[piece], 1.0, True, gradient)

    if of == "sums":
        found = sums_in_chunks(head, parameters, rows, targets, VOCABULARY)[0]
    elif of == "logps":
        found = logps_in_chunks(head, parameters, rows, targets, VOCABULARY)
    else:
        found = values_in_chunks(values_of, head, parameters, rows, VOCABULARY)
    (gradient,) = torch.autograd.grad(found.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
