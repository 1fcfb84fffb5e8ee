"""The output head with its loss, forward and backward: the toolkit's, next to the same loss by torch's operations and autograd.

    python benchmarks/heads.py
    python benchmarks/heads.py --device cuda --rows 2048 --vocabulary 151936 --width 1024

Both sides make the logits of the same hidden states by the same products, in chunks that `toolkit.losses.chunked` chooses and
that the other side takes too. On a GPU ours are kernels in Triton; on a CPU blocks that stay in its cache. `products` are the
head's alone, forward and backward. Times are the least of `--rounds`, both sides in turn: CPU milliseconds of one thread, on a
GPU CUDA events. `apart` is the largest difference of the hidden states' gradients, as a part of the largest of them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from toolkit.losses.chunked import added_in_chunks, logps_in_chunks, rows_in_a_chunk, sums_in_chunks, values_in_chunks
from toolkit.losses.divergences import TeacherLogps, divergence_named, divergence_of_tokens
from toolkit.losses.token_entropies import LogpsAndEntropies
from toolkit.system.allocator import keep_freed_memory

TEMPERATURE = 0.9  # of rollouts
Grad = torch.Tensor | None


@dataclass
class Head:
    """`weight` `[V, width]`, hidden states `rows` `[P, width]`, `targets` `[P]`, a teacher's log-probabilities `[P, V]`."""

    weight: torch.nn.Parameter
    rows: torch.Tensor
    targets: torch.Tensor
    teacher: torch.Tensor
    half: bool

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.half):
            return functional.linear(rows, self.weight)

    def products(self, ones: torch.Tensor) -> None:
        self.logits_of(self.rows).backward(ones)

    def gradient(self, loss: "Loss") -> torch.Tensor:
        self.rows.grad = self.weight.grad = None
        loss(self)
        assert self.rows.grad is not None
        return self.rows.grad


Loss = Callable[[Head], None]  # with its backward


def cross_entropy(head: Head) -> None:
    sums_in_chunks(head.logits_of, [head.weight], head.rows, head.targets, len(head.weight))[0].backward()


def logps(head: Head) -> None:
    logps_in_chunks(head.logits_of, [head.weight], head.rows, head.targets, len(head.weight)).sum().backward()


def logps_and_entropies(head: Head) -> None:
    def values_of(piece: slice, logits: torch.Tensor, gradient: Grad) -> torch.Tensor:
        return LogpsAndEntropies.apply(logits, head.targets[piece], TEMPERATURE, False, gradient)

    values_in_chunks(values_of, head.logits_of, [head.weight], head.rows, len(head.weight))[:, 0].sum().backward()


def jensen_shannon(head: Head) -> None:
    def sums_of(piece: slice, logits: torch.Tensor, gradient: Grad) -> torch.Tensor:
        of_teacher = TeacherLogps(head.teacher[piece])
        return divergence_of_tokens(of_teacher, logits, divergence_named("jsd"), gradient=gradient).sum()[None]

    added_in_chunks(sums_of, head.logits_of, [head.weight], head.rows, len(head.weight))[0].backward()


def in_torch(of_chunk: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], head: Head) -> None:
    """Each chunk's loss by autograd, backward at once, so that no more than a chunk is in memory."""
    size = rows_in_a_chunk(len(head.weight), head.rows.device)
    for start in range(0, len(head.rows), size):
        piece = slice(start, start + size)
        of_chunk(head.logits_of(head.rows[piece]).float(), head.targets[piece], head.teacher[piece]).backward()


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, targets, reduction="sum")


def _logps(logits: torch.Tensor, targets: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return -functional.cross_entropy(logits, targets, reduction="sum")


def _logps_and_entropies(logits: torch.Tensor, targets: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    logits = logits / TEMPERATURE
    with torch.no_grad():
        log_q = logits.log_softmax(-1)
        (log_q.exp() * log_q).sum(-1)
    return _logps(logits, targets, _)


def _jensen_shannon(logits: torch.Tensor, _: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    log_q = logits.log_softmax(-1)
    log_m = torch.logaddexp(teacher, log_q) + torch.tensor(0.5).log()
    return 0.5 * ((teacher.exp() * (teacher - log_m)).sum() + (log_q.exp() * (log_q - log_m)).sum())


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "cross-entropy": (cross_entropy, partial(in_torch, _cross_entropy)),
    "log-probabilities (DPO)": (logps, partial(in_torch, _logps)),
    "log-probabilities and entropies (GRPO)": (logps_and_entropies, partial(in_torch, _logps_and_entropies)),
    "Jensen-Shannon (distillation)": (jensen_shannon, partial(in_torch, _jensen_shannon)),
}


def milliseconds(device: str, call: Callable[..., Any], *arguments: Any) -> float:
    if device == "cpu":
        start = time.process_time()
        call(*arguments)
        return 1000 * (time.process_time() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(*arguments)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    for name, default in {"rows": 1024, "vocabulary": 32768, "width": 256, "rounds": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    torch.manual_seed(0)
    count, vocabulary, width, device = options.rows, options.vocabulary, options.width, options.device
    weight = torch.nn.Parameter(torch.randn(vocabulary, width, device=device) / width**0.5)
    rows = torch.randn(count, width, device=device).requires_grad_()
    targets = torch.randint(0, vocabulary, (count,), device=device)
    teacher = torch.randn(count, vocabulary, device=device).log_softmax(-1)
    print("| loss | precision | products, ms | ours, ms | torch, ms | above the products, torch / ours | apart |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for half in (False, True):
        head = Head(weight, rows, targets, teacher, half)
        ones = torch.ones(count, vocabulary, device=device, dtype=torch.bfloat16 if half else torch.float32)
        for name, losses in LOSSES.items():
            found, wanted = (head.gradient(loss).clone() for loss in losses)
            apart = ((found - wanted).abs().max() / wanted.abs().max()).item()
            rounds = [
                (milliseconds(device, head.products, ones), *(milliseconds(device, head.gradient, loss) for loss in losses))
                for _ in range(options.rounds)
            ]
            products, ours, theirs = (min(each) for each in zip(*rounds, strict=True))
            cells = (products, ours, theirs, (theirs - products) / max(ours - products, 1e-9))
            print(f"| {name} | {'bf16' if half else 'fp32'} | {' | '.join(f'{cell:.3g}' for cell in cells)} | {apart:.1e} |")


if __name__ == "__main__":
    main()
