"""train_step against plain loops: the exact mean, clipping, the guard, fp16's scale search."""

import math
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from toolkit.data.loading.batch import Batch
from toolkit.data.loading.order import cut_step, hash_numbers
from toolkit.training.step import accumulate_gradients, accumulate_micro_batch, clip_and_update, sum_over_ranks, train_step

FEATURES, CLASSES, EXAMPLES = 6, 5, 11


def ragged_examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Examples of 1 to 9 tokens: features [tokens, 6] and labels [tokens], some of them ignored."""
    random_numbers = torch.Generator().manual_seed(0)
    examples = []
    for i in range(EXAMPLES):
        tokens = 1 + (i * 5) % 9
        labels = torch.randint(0, CLASSES, (tokens,), generator=random_numbers)
        labels[torch.rand(tokens, generator=random_numbers) < 0.3] = -100
        examples.append((torch.randn(tokens, FEATURES, generator=random_numbers, dtype=torch.float64), labels))
    return examples


def token_loss(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
    logits = model(micro_batch["features"].to(next(model.parameters()).dtype))
    total = nn.functional.cross_entropy(logits, micro_batch["labels"], ignore_index=-100, reduction="sum")
    return total / totals["tokens"], {"token_accuracy": (logits.argmax(-1) == micro_batch["labels"]).sum() / totals["tokens"]}


def batch_of(examples: list, micro: int, rank: int = 0, world_size: int = 1) -> Batch:
    plan = cut_step([(0, i) for i in range(len(examples))], 0, micro, rank, world_size)
    pieces = [[examples[i] for _, i in piece] for piece, _ in plan.pieces]
    return Batch(
        [{"features": torch.cat([f for f, _ in piece]), "labels": torch.cat([y for _, y in piece])} for piece in pieces],
        {"tokens": float(sum((y != -100).sum() for _, y in examples)), "examples": float(len(examples))},
        [real for _, real in plan.pieces],
        [hash_numbers(0, piece[0]) for piece, _ in plan.pieces],
    )


def small_model(dtype: torch.dtype, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, CLASSES)).to(dtype)


def captured_gradient(accelerator: Accelerator, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, dict]:
    """The gradient that reaches the optimizer, and the step's metrics."""
    model = small_model(dtype)
    seen: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step = lambda: seen.extend(p.grad.flatten().clone() for p in model.parameters())  # type: ignore[method-assign]
    metrics = train_step(accelerator, model, optimizer, batch, token_loss, [0.0], max_grad_norm=0.0)
    return torch.cat(seen), metrics


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("micro", [1, 2, 4, 8, 11])
def test_gradient_is_that_of_the_mean_over_all_supervised_tokens_for_every_split(
    accelerator: Accelerator, dtype: torch.dtype, tolerance: float, micro: int
) -> None:
    """Reference: one mean cross-entropy over everything, in float64.

    Fails when: the loss of a micro-batch is divided by its own count (mean of means).
    """
    examples = ragged_examples()
    model = small_model(torch.float64)
    logits = model(torch.cat([features for features, _ in examples]))
    labels = torch.cat([labels for _, labels in examples])
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    loss.backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters()])
    gradient, metrics = captured_gradient(accelerator, batch_of(examples, micro), dtype)
    assert ((gradient.double() - reference).norm() / reference.norm()).item() < tolerance
    assert metrics["loss"].item() == pytest.approx(loss.item(), rel=tolerance)
    assert metrics["grad_norm"].item() == pytest.approx(reference.norm().item(), rel=tolerance)
    accuracy = (logits.argmax(-1) == labels).sum().item() / (labels != -100).sum().item()
    assert metrics["token_accuracy"].item() == pytest.approx(accuracy, rel=1e-6)


def test_a_filler_adds_nothing_to_gradient_and_metrics(accelerator: Accelerator) -> None:
    """Fails when: the weight of a padding micro-batch is not zero."""
    examples = ragged_examples()
    batch = batch_of(examples, 4)
    filled = Batch([*batch.micro_batches, batch.micro_batches[0]], batch.totals, [*batch.real, False], [*batch.seeds, 1])
    plain, padded = captured_gradient(accelerator, batch, torch.float64), captured_gradient(accelerator, filled, torch.float64)
    assert torch.equal(plain[0], padded[0])
    assert {name: v.item() for name, v in plain[1].items()} == {name: v.item() for name, v in padded[1].items()}


def test_a_metric_named_max_is_the_largest_of_all_micro_batches(accelerator: Accelerator) -> None:
    """Next to the sums, which stay; a padding micro-batch counts as 0. Fails when: the parts are added, or the last one is taken."""
    examples = ragged_examples()

    def loss_with_maximum(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        loss, metrics = token_loss(model, micro_batch, totals)
        return loss, {**metrics, "feature_max": micro_batch["features"].max()}

    for micro in (1, 3, 11):
        batch = batch_of(examples, micro)
        batch.real[-1] = micro == 11
        found = accumulate_gradients(accelerator, small_model(torch.float64), batch, loss_with_maximum)
        real = [piece["features"].max() for piece, is_real in zip(batch.micro_batches, batch.real, strict=True) if is_real]
        assert found["feature_max"] == max(real)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "applied", "nonfinite"])
def test_a_metric_by_the_name_of_one_of_the_step_is_refused(accelerator: Accelerator, name: str) -> None:
    """It would be logged, and guarded, in place of the loss. Fails when: the names are merged without a look."""

    def loss_fn(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        return token_loss(model, micro_batch, totals)[0], {name: torch.tensor(float("nan"))}

    with pytest.raises(ValueError, match=name):
        accumulate_gradients(accelerator, small_model(torch.float32), batch_of(ragged_examples(), 4), loss_fn)


@pytest.mark.parametrize("returned", [torch.tensor(1.0), (torch.tensor(1.0),), None])
def test_a_loss_function_without_metrics_is_told_what_to_return(accelerator: Accelerator, returned: Any) -> None:
    """A tensor was an error of an iteration over a 0-d tensor. Fails when: what is returned is unpacked without a look."""
    with pytest.raises(TypeError, match=r"return loss, \{\}"):
        accumulate_gradients(accelerator, small_model(torch.float32), batch_of(ragged_examples(), 4), lambda *_: returned)


def test_rows_in_the_place_of_a_batch_are_refused(accelerator: Accelerator) -> None:
    """As a DataLoader of the user's gives them. Fails when: a batch is taken apart without a look."""
    rows: Any = batch_of(ragged_examples(), 4).micro_batches[0]
    with pytest.raises(TypeError, match=r"tk\.Batch.* dict"):
        accumulate_gradients(accelerator, small_model(torch.float32), rows, token_loss)


def test_a_metric_may_be_a_number_or_hold_a_graph(accelerator: Accelerator) -> None:
    """Also in a padding micro-batch, and the graph is not kept until the sum is read. Fails when: parts are taken as they are."""

    def loss_fn(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        loss, _ = token_loss(model, micro_batch, totals)
        return loss, {"examples": len(micro_batch["labels"]) / totals["tokens"], "squared": loss.square(), "most_max": 3.0}

    batch = batch_of(ragged_examples(), 4, rank=1, world_size=2)
    assert batch.real == [True, False]
    found = accumulate_gradients(accelerator, small_model(torch.float64), batch, loss_fn)
    assert float(found["examples"]) == pytest.approx(len(batch.micro_batches[0]["labels"]) / batch.totals["tokens"])
    assert (float(found["most_max"]), found["squared"].requires_grad) == (3.0, False)


def _reduced_on_a_rank(rank: int, store: str, found: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parts = {"loss": 1.0 + rank, "ratio_max": 5.0 - rank, "share": 0.25, "gap_max": 2.0 * rank}
    reduced = sum_over_ranks(SimpleNamespace(num_processes=2), {name: torch.tensor(value) for name, value in parts.items()})
    found.put({name: float(value) for name, value in reduced.items()})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_one_sum_and_one_maximum(tmp_path: Path) -> None:
    """Of gloo. Fails when: maxima are reduced as sums, or names and values are mixed up."""
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Queue()
    ranks = [spawn.Process(target=_reduced_on_a_rank, args=(rank, str(tmp_path / "store"), found)) for rank in range(2)]
    for each in ranks:
        each.start()
    for _ in ranks:
        assert found.get(timeout=60) == {"loss": 3.0, "ratio_max": 5.0, "share": 0.5, "gap_max": 2.0}
    for each in ranks:
        each.join(60)


@pytest.mark.parametrize(("fused", "tolerance"), [(False, 1e-10), (True, 2e-6)])
def test_twenty_steps_with_clipping_and_dropout_equal_a_plain_loop(accelerator: Accelerator, fused: bool, tolerance: float) -> None:
    """Reference: seed, one backward of the mean, torch's own clipping and AdamW, in float64; a fused kernel clips in float32, and
    not at all where the norm is below. Fails when: clipping or seeding is left out, `grad_scale` is the reverse, or stays."""
    examples = ragged_examples()
    ours, theirs = small_model(torch.float32 if fused else torch.float64, 0.1), small_model(torch.float64, 0.1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=on) for m, on in ((ours, fused), (theirs, False))]
    norms = []
    for step in range(20):
        batch = batch_of(examples[step % 4 :], 3)
        rate = 1e-2 * (1 - step / 20)
        metrics = train_step(accelerator, ours, optimizers[0], batch, token_loss, [rate], max_grad_norm=0.3)
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch, seed in zip(batch.micro_batches, batch.seeds, strict=True):
            torch.manual_seed(seed)
            logits = theirs(micro_batch["features"])
            total = total + nn.functional.cross_entropy(logits, micro_batch["labels"], ignore_index=-100, reduction="sum")
        (total / batch.totals["tokens"]).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        optimizers[1].param_groups[0]["lr"] = rate
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=tolerance if fused else 1e-12)
        norms.append(norm.item())
    assert min(norms) < 0.3 < max(norms)
    assert getattr(optimizers[0], "grad_scale", None) is None  # a step of the user's own is not divided by the last one's
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a.double(), b, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("opened", ["batch", "micro-batches"])
def test_an_open_inner_loop_of_its_functions_gives_the_bits_of_train_step(accelerator: Accelerator, opened: str) -> None:
    """With dropout, clipping and a padding micro-batch; in between `.grad` is the gradient of the mean over the global batch, here against
    one mean cross-entropy in float64. Fails when: `train_step` does not hand on `max_grad_norm`, or averages the parts."""
    examples = ragged_examples()
    ours, theirs = small_model(torch.float32, 0.1), small_model(torch.float32, 0.1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for step in range(6):
        batch = batch_of(examples[step % 4 :], 3)
        batch = Batch([*batch.micro_batches, batch.micro_batches[0]], batch.totals, [*batch.real, False], [*batch.seeds, 1])
        expected = train_step(accelerator, ours, optimizers[0], batch, token_loss, [1e-2 / (step + 1)], max_grad_norm=0.05)
        if opened == "batch":
            metrics = accumulate_gradients(accelerator, theirs, batch, token_loss)
        else:
            parts = [accumulate_micro_batch(accelerator, theirs, batch, i, token_loss) for i in range(len(batch.micro_batches))]
            metrics = {name: parts[0][name] for name in parts[0]}
            for part in parts[1:]:
                metrics = {name: metrics[name] + part[name] for name in metrics}
            metrics = sum_over_ranks(accelerator, metrics)
        norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).double().norm()
        metrics |= clip_and_update(accelerator, theirs, optimizers[1], metrics["loss"], [1e-2 / (step + 1)], max_grad_norm=0.05)
        assert norm.item() == pytest.approx(metrics["grad_norm"].item(), rel=1e-6)
        assert {name: value.item() for name, value in metrics.items()} == {name: value.item() for name, value in expected.items()}
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))

    model, labels = small_model(torch.float64), torch.cat([labels for _, labels in examples])
    accumulate_gradients(accelerator, model, batch_of(examples, 4), token_loss)
    reference = small_model(torch.float64)
    logits = reference(torch.cat([features for features, _ in examples]))
    nn.functional.cross_entropy(logits, labels, ignore_index=-100).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("rates", [[1e-2, 1e-2], 1e-2])
def test_rates_of_another_number_than_groups_are_refused_before_a_gradient_is_left(accelerator: Accelerator, rates: Any) -> None:
    """A notebook's next cell would add to it. Fails when: `train_step` leaves the check to `clip_and_update`, or a number has no length."""
    model = small_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="parameter group, 1 in all"):
        train_step(accelerator, model, optimizer, batch_of(ragged_examples(), 4), token_loss, rates)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_nonfinite_step_changes_no_parameter_and_no_optimizer_state(accelerator: Accelerator, poison: float, fused: bool) -> None:
    """Fails when: `if bool(finite)` is left out, or a fused kernel gets no `found_inf`, or keeps it."""
    examples = ragged_examples()
    model = small_model(torch.float32 if fused else torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    train_step(accelerator, model, optimizer, batch_of(examples, 4), token_loss, [1e-2])
    weights = [p.clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    bad = batch_of(examples, 4)
    bad.micro_batches[1]["features"][0, 0] = poison
    metrics = train_step(accelerator, model, optimizer, bad, token_loss, [1e-2])
    assert (metrics["applied"].item(), metrics["nonfinite"].item()) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert train_step(accelerator, model, optimizer, batch_of(examples, 4), token_loss, [1e-2])["applied"].item() == 1


def test_a_gradient_outside_the_optimizer_is_cleared_too(accelerator: Accelerator) -> None:
    """Fails when: the optimizer's zero_grad is used: a leftover gradient enters the next norm."""
    examples = ragged_examples()
    model = small_model(torch.float64)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.0)
    norms = [train_step(accelerator, model, optimizer, batch_of(examples, 4), token_loss, [0.0])["grad_norm"].item() for _ in range(3)]
    assert norms[0] == pytest.approx(norms[2], rel=1e-12)


def test_the_search_of_the_loss_scale_is_no_incident_but_an_infinite_loss_is() -> None:
    """A real GradScaler, too high on purpose: steps are skipped until it fits, none is reported, and training continues.

    Fails when: `searching` is ignored.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    accelerator = SimpleNamespace(
        scaler=scaler, num_processes=1, device=torch.device("cpu"), no_sync=lambda model: torch.autograd.set_grad_enabled(True),
        distributed_type=SimpleNamespace(value="NO"),
    )

    def loud_loss(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        loss, metrics = token_loss(model, micro_batch, totals)
        return loss * 1e6, metrics

    examples = ragged_examples()
    model = small_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = [train_step(accelerator, model, optimizer, batch_of(examples, 11), loud_loss, [1e-9]) for _ in range(60)]
    applied = [r["applied"].item() for r in results]
    assert applied[0] == 0
    assert applied[-1] == 1
    assert applied == sorted(applied)
    assert sum(r["nonfinite"].item() for r in results) == 0
    bad = batch_of(examples, 11)
    bad.micro_batches[0]["features"][:] = np.nan
    assert train_step(accelerator, model, optimizer, bad, token_loss, [1e-2])["nonfinite"].item() == 1
