"""What a run takes that it should not: time waiting for data, and memory that only grows. Each is reported once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

MOST_WAITING, LEAST_SECONDS = 0.2, 20.0  # share of the time that is reported, and the seconds of training it is taken over
BLOCK_STEPS = 100  # one number of memory, the least in use, is kept for this many steps
MOST_BLOCKS = 32  # of these; then two become one, so that the whole run stays in sight
GROWTH, LEAST_GROWTH_GB = 0.2, 0.2  # of the memory after the first block; both must be passed


@dataclass
class ResourceWatch:
    """What is remembered of this process's logging events. It decides nothing: weights do not depend on it."""

    seconds: float = 0.0
    waiting: float = 0.0
    block: int = -1
    steps_of_a_block: int = BLOCK_STEPS
    least: dict[str, list[float]] = field(default_factory=dict)  # memory in GB by where it is, one number a block
    said: set[str] = field(default_factory=set)

    def after_event(self, step: int, seconds: float, data_wait: float, memory: Mapping[str, float]) -> list[str]:
        """Take a logging event: the seconds its steps took, the share of them that waited for data, and memory in GB by where.

        Returns warnings, each of them once in a process.
        """
        self.seconds, self.waiting = self.seconds + seconds, self.waiting + seconds * data_wait
        return [*self._of_waiting(), *self._of_memory(step, memory)]

    def _of_waiting(self) -> list[str]:
        share = self.waiting / self.seconds if self.seconds else 0.0
        if self.seconds < LEAST_SECONDS or share <= MOST_WAITING:
            return []
        return self._once(
            "data", f"{share:.0%} of the time so far was spent waiting for data. Take more --dataloader-num-workers; toolkit "
            "profile shows the rest of a step",
        )  # fmt: skip

    def _of_memory(self, step: int, memory: Mapping[str, float]) -> list[str]:
        block = step // self.steps_of_a_block
        if block != self.block:
            self.block = block
            for name in memory:
                self.least.setdefault(name, []).append(memory[name])
        found = []
        for name, value in memory.items():
            least = self.least[name]
            least[-1] = min(least[-1], value)
            found += self._growth_of(name, least, step)
        if any(len(least) >= MOST_BLOCKS for least in self.least.values()):
            pairs = {name: zip(least[::2], least[1::2], strict=True) for name, least in self.least.items()}
            self.least = {name: [min(pair) for pair in each] for name, each in pairs.items()}
            self.steps_of_a_block *= 2
            self.block = step // self.steps_of_a_block
        return found

    def _growth_of(self, name: str, least: list[float], step: int) -> list[str]:
        """A leak raises the least of each block above those before, no slower than at first; what evaluations and saves take
        for a while does not, nor what an allocator takes until it has seen all shapes."""
        if len(least) < 8:
            return []
        begin, recent = least[1], least[-4:]  # the first block ends with what is allocated once
        growth = min(recent) - begin
        is_steady = all(later > earlier for earlier, later in zip(least[-6:], least[-5:], strict=False))
        pace, whole = (least[-1] - least[-5]) / 4, (least[-1] - begin) / (len(least) - 2)  # GB a block
        if not is_steady or pace < whole / 2 or growth < max(GROWTH * begin, LEAST_GROWTH_GB):
            return []
        return self._once(
            f"memory of {name}", f"the memory of {name} only grows: {begin:.2f} GB early on, {least[-1]:.2f} GB at step "
            f"{step}. Something is kept in each step, often a loss with its graph: keep loss.item() or loss.detach()",
        )  # fmt: skip

    def _once(self, name: str, warning: str) -> list[str]:
        if name in self.said:
            return []
        self.said.add(name)
        return [warning]


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Memory in use now, in GB: of this process what it shares with no other, and a CUDA device's tensors."""
    import psutil  # with accelerate

    usage = psutil.Process().memory_info()
    shared = usage.shared if sys.platform == "linux" else 0
    memory = {"this process": (usage.rss - shared) / 1e9}
    if device.type == "cuda":
        memory["the device"] = torch.cuda.memory_allocated(device) / 1e9
    return memory
