"""Writing checkpoints while training waits, or in the background."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.directory import list_checkpoints, prune_checkpoints, read_pointer, save_checkpoint, write_pointer
from toolkit.checkpoint.state import State, copy_state
from toolkit.system.files import sync
from toolkit.system.sagemaker_container import waits_for_s3


@dataclass(frozen=True)
class Outcome:
    """How one save went: the step, whether its checkpoint is on the disk, and the error, also one after that."""

    step: int
    is_written: bool
    error: Exception | None = None


class CheckpointWriter:
    """Saves states under one root, one at a time; keeps the pointers, and removes old checkpoints once the new one is whole.

    In the background, `save` copies the state and returns; the outcome comes with a later `finished` or `wait`. A second save
    waits for the first. On one device the copy is all that training waits for.
    """

    def __init__(self, root: Path, keep: int | None, *, background: bool = False) -> None:
        self.root, self.keep, self.background = root, keep, background
        self.seconds = 0.0  # of the last save, which is how long before a deadline one must begin
        self._copies: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    def save(
        self, step: int, state: State, *, best: bool = False, keep_steps: frozenset[int] = frozenset(),
        also_synced: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """Write a checkpoint of `state`; with `best` the pointer of that name will show it.

        Checkpoints of `keep_steps` are kept, however old, from when this one is whole. The files `also_synced`,
        where they are there, are on the disk before the checkpoint is.
        """
        self._join()
        if not self.background:
            self._write(step, state, best, keep_steps, also_synced)
            return
        arguments = (step, copy_state(state, self._copies), best, keep_steps, also_synced)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def finished(self) -> list[Outcome]:
        """Outcomes that have come since the last call; does not wait."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> list[Outcome]:
        """The same, once nothing is being written any more."""
        self._join()
        return self.finished()

    def prune(self, keep_steps: frozenset[int] = frozenset()) -> None:
        """Remove the checkpoints that are too many; not those that the pointers show, nor those of `keep_steps`."""
        pointed = [read_pointer(self.root, name) for name in ("best", "last")]
        pointed += [self.root / f"step-{step}" for step in keep_steps]
        waiting = waits_for_s3(list_checkpoints(self.root))
        prune_checkpoints(self.root, self.keep, [path for path in [*pointed, *waiting] if path])

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: State, best: bool, keep_steps: frozenset[int], also_synced: Sequence[Path]) -> None:
        began = time.monotonic()
        path, error = None, None
        try:
            for file in also_synced:
                if file.exists():
                    sync(file)
                    sync(file.parent)
            path = save_checkpoint(self.root, step, state)
            if best:
                write_pointer(self.root, "best", path)
            write_pointer(self.root, "last", path)
            self.prune(keep_steps)
        except Exception as problem:  # in the background nobody else would see it
            error = problem
        self.seconds = time.monotonic() - began
        self._outcomes.append(Outcome(step, path is not None, error))
