"""What ranks wait for each other, from their traces: communication that no computation hides, and who is late."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Interval = tuple[float, float]
Mine = TypeVar("Mine")
_ON_CPU = ("gloo:", "mpi:")  # as torch (2.13) names what these backends do


@dataclass
class Spent:
    """Seconds of a phase of one traced step, and how many of them this rank did nothing but communicate."""

    seconds: float = 0.0
    exchanging: float = 0.0


@dataclass
class RankTimes:
    """What one rank measured.

    `seconds`: of a step by phase. `traced`: of each traced step, by phase. `operations`: (name, share of the traced time, calls
    a step), the longest first. `padding`: share of the positions that no token fills, in the worst step. `tokens_per_second`,
    `mfu`: as logged, the first of all ranks. `busy`: seconds of a step in which a GPU computes, without communication.
    """

    seconds: dict[str, float]
    traced: list[dict[str, Spent]] = field(default_factory=list)
    operations: list[tuple[str, float, float]] = field(default_factory=list)
    padding: float = 0.0
    tokens_per_second: float | None = None
    mfu: float | None = None
    busy: float | None = None

    def apart(self) -> dict[str, float]:
        """Seconds by phase, and those of `communication` apart from what they interrupt.

        Torch's profiler makes computing slower, so each phase gives up the share that it has in the traced steps.
        """
        parts, communication = dict(self.seconds), 0.0
        for phase, seconds in self.seconds.items():
            spent = [step[phase] for step in self.traced if phase in step]
            share = sum(each.exchanging for each in spent) / (sum(each.seconds for each in spent) or 1.0)
            communication += share * seconds
            parts[phase] -= share * seconds
        return {**parts, "communication": communication}


def share_of_waiting(ranks: Sequence[RankTimes]) -> float:
    """The part of all ranks' communication that is waiting for the slowest of them, 0 to 1.

    In each step the rank that others wait for waits for nobody: what it spends is the transfer, and what they spend beyond it
    is waiting. Where another rank is the slowest in each half of a step, more is waiting than this shows.
    """
    waiting = all_of_it = 0.0
    for steps in zip(*(rank.traced for rank in ranks), strict=True):
        spent = [sum(phase.exchanging for phase in step.values()) for step in steps]
        waiting += sum(spent) - len(spent) * min(spent)
        all_of_it += sum(spent)
    return waiting / all_of_it if all_of_it else 0.0


def means(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each phase over the ranks."""
    ranks = list(ranks)
    return {phase: statistics.fmean(rank[phase] for rank in ranks) for phase in ranks[0]}


def traced_steps(events: Iterable[Any], marks: Mapping[str, tuple[int, str]], on_gpu: bool) -> list[dict[str, Spent]]:
    """The phases of each traced step.

    Args:
        events: of torch's profiler.
        marks: the step and the phase that each of the names marks, under which a part of the step ran.
        on_gpu: the device computes and communicates, not the processor.
    """
    gpu = torch.autograd.DeviceType.CUDA
    parts, exchanges, computations = list[tuple[int, str, Interval]](), list[Interval](), list[Interval]()
    for event in events:
        interval = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        is_kernel = event.device_type == gpu and not event.is_user_annotation
        if event.device_type != gpu and event.name in marks:
            parts.append((*marks[event.name], interval))
        elif is_collective(event.name) and (is_kernel or (event.device_type != gpu and event.name.startswith(_ON_CPU))):
            exchanges.append(interval)
        elif is_kernel or (not on_gpu and event.name.startswith("aten::")):
            computations.append(interval)
    alone = not_hidden(exchanges, computations)
    steps: dict[int, dict[str, Spent]] = {}
    for step, phase, (begin, end) in parts:
        spent = steps.setdefault(step, {}).setdefault(phase, Spent())
        spent.seconds += end - begin
        spent.exchanging += sum(max(0.0, min(end, last) - max(begin, first)) for first, last in alone)
    return [steps[number] for number in sorted(steps)]


def is_collective(name: str) -> bool:
    """Whether an event of torch's profiler is an exchange between ranks."""
    return name.startswith((*_ON_CPU, "c10d::")) or "nccl" in name.lower()


def not_hidden(exchanges: Iterable[Interval], computations: Iterable[Interval]) -> list[Interval]:
    """When something is exchanged and nothing computed; the intervals of either kind may overlap."""
    edges = [(time, 0, change) for pair in exchanges for time, change in zip(pair, (1, -1), strict=True)]
    edges += [(time, 1, change) for pair in computations for time, change in zip(pair, (1, -1), strict=True)]
    found, running, since = list[Interval](), [0, 0], 0.0
    for time, kind, change in sorted(edges):
        if running[0] and not running[1] and time > since:
            found.append((since, time))
        running[kind] += change
        since = time
    return found


def from_all_ranks(mine: Mine) -> list[Mine]:
    """What each rank measured, on every rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found
