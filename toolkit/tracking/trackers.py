"""Trackers (wandb, TensorBoard, trackio, MLflow) that are given a run in the background.

Each has a thread of its own, in which everything happens that could fail or wait for a network: its start, its metrics, its
end. So one that raises costs a warning, and one that hangs what it was to be sent; training never waits for either.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import RunConfig
from toolkit.tracking.services import ADD_TABLE, KEEP_FILES, OPEN, Opened

if TYPE_CHECKING:
    from accelerate import Accelerator

WAITING = 10_000  # records that wait for a tracker before further ones are lost
CLOSE_SECONDS, HURRIED_SECONDS = 60.0, 3.0  # at the end of a run, and of one that a signal stopped
LOOKS_EVERY = 0.1  # seconds: how soon a tracker with nothing to do sees that the run is over
_WHERE = ("step", "epoch", "examples", "time")  # in a line of metrics.jsonl, next to its metrics
Record = Callable[[Opened], None]


class Trackers:
    """The trackers of a run on the main process; none elsewhere, and none without `report_to`.

    `ids`: by tracker, what continues its run after a resume; those of services that give one are there once they answered.
    """

    def __init__(
        self, names: Sequence[str], config: RunConfig, ids: Mapping[str, str], step: int, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        from toolkit.config.reading import public_settings

        self.ids, self._say = dict(ids), say
        plain = (bool, int, float, str)
        settings = {name: v if isinstance(v, plain) else str(v) for name, v in public_settings(config).items()}
        self._senders = [_Sender(name, OPEN[name], config, settings, self.ids, step) for name in names]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of one step. Returns at once."""
        self._send(partial(_log, metrics=dict(metrics), step=step))

    def catch_up(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Lines of metrics.jsonl from before the checkpoint that a run continues from: a killed run's may not have arrived.

        For trackers that can be queried for what they have. The others keep what they were sent at once, in files.
        """
        self._send(partial(_log_lacking, events=list(events)))

    def add_samples(self, samples: Sequence[Mapping[str, str]], step: int) -> None:
        """Texts that the model wrote, as a table where the tracker has such."""
        columns = list(dict.fromkeys(name for sample in samples for name in sample))
        rows = [[str(sample.get(name, "")) for name in columns] for sample in samples]
        for sender in self._senders:
            sender.put(partial(_log_table, ADD_TABLE[sender.name], columns=columns, rows=rows, step=step))
        self._say_news()

    def close(self, files: Callable[[], Sequence[Path]], hurried: bool = False) -> None:
        """Wait a little for what is still to be sent, and leave the rest.

        `files()` makes those that go with the run where the tracker keeps files: the run card and the report.
        """
        keeping = [sender for sender in self._senders if sender.name in KEEP_FILES]
        if keeping and not hurried:
            there = [path for path in files() if path.exists()]
            for sender in keeping:
                sender.put(partial(_keep_files, KEEP_FILES[sender.name], there))
        ends = time.monotonic() + (HURRIED_SECONDS if hurried else CLOSE_SECONDS)
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.wait(max(0.1, ends - time.monotonic()))
        self._say_news()
        self._senders = []

    def _send(self, record: Record) -> None:
        for sender in self._senders:
            sender.put(record)
        self._say_news()

    def _say_news(self) -> None:
        for sender in self._senders:
            while sender.news:
                self._say(f"WARNING: {sender.name}: {sender.news.pop(0)}")


def open_trackers(
    accelerator: Accelerator, config: RunConfig, ids: dict[str, str], step: int, say: Callable[[str], None]
) -> Trackers:
    """Start the trackers of the settings, with settings that are safe to send and never the environment.

    Args:
        ids: those of a run that is continued after `step`, by tracker.
        say: shows a line to the user.
    """
    names = [str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with]
    if names and "wandb" not in ids:
        ids = {"wandb": os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4), **ids}
    return Trackers(names if accelerator.is_main_process else [], config, ids, step, say)


class _Sender:
    """One tracker, its thread, and what waits for it."""

    def __init__(self, name: str, opened: Callable[..., Opened], *what: Any) -> None:
        self.name, self.news = name, list[str]()
        self._records: queue.Queue[Record] = queue.Queue(WAITING)
        self._is_over = threading.Event()
        self._lost, self._failed, self._reason = 0, 0, ""
        self._thread = threading.Thread(target=self._work, args=(opened, *what), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """What waits is the last there is."""
        self._is_over.set()

    def put(self, record: Record) -> None:
        """Returns at once."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                self.news.append(f"does not answer: {WAITING:,} records wait for it, further ones are left out")

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            lacking = self._records.qsize() + self._lost
            self.news.append(f"does not end; it may lack the last {max(lacking, 1):,} records, which metrics.jsonl has")
        elif self._failed:
            self.news.append(f"{self._failed} records were not taken ({self._reason})")

    def _work(self, opened: Callable[..., Opened], *what: Any) -> None:
        tracker = None
        try:
            tracker = opened(*what)
        except BaseException as error:  # wandb and others end a process by SystemExit, and here that is a thread's own affair
            self._reason = _one_line(error)
            self.news.append(f"could not start, and is left out: {self._reason}")
        while not (self._is_over.is_set() and self._records.empty()):
            with contextlib.suppress(queue.Empty):
                self._try(tracker, self._records.get(timeout=LOOKS_EVERY))
        self._try(tracker, lambda opened: opened.tracker.finish())

    def _try(self, tracker: Opened | None, record: Record) -> None:
        if tracker is None:
            return
        try:
            record(tracker)
        except BaseException as error:
            self._failed += 1
            self._reason = _one_line(error)
            if self._failed == 1:
                self.news.append(f"{self._reason}. The run continues; metrics.jsonl has all metrics")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _log(opened: Opened, metrics: dict[str, float], step: int) -> None:
    if new := {name: value for name, value in metrics.items() if opened.lacks(name, step)}:
        opened.tracker.log(new, step=step)


def _log_lacking(opened: Opened, events: Sequence[Mapping[str, Any]]) -> None:
    if opened.logged is not None:
        for event in events:
            metrics = {name: value for name, value in event.items() if name not in _WHERE and isinstance(value, (int, float))}
            _log(opened, metrics, event["step"])


def _log_table(add: Callable[..., None], opened: Opened, columns: list[str], rows: list[list[str]], step: int) -> None:
    if opened.lacks("samples", step):
        add(opened.tracker, columns=columns, rows=rows, step=step)


def _keep_files(keep: Callable[[Any, Sequence[Path]], None], files: Sequence[Path], opened: Opened) -> None:
    keep(opened.tracker, files)
