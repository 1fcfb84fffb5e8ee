"""Trackers that raise or hang cost warnings, and the others nothing."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit import trackers


@dataclass(frozen=True)
class Config(tk.OutputConfig):
    run_name: str | None = None


class Told:
    """A tracker that keeps what it is told, and does something before."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before, self.records, self.finished = before, [], False

    def log(self, values: dict[str, float], step: int) -> None:
        self.before()
        self.records.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[trackers.Trackers, list[str]]]:
    def open_them(**made: Callable[[], Any]) -> tuple[trackers.Trackers, list[str]]:
        said: list[str] = []
        for name, make in made.items():
            monkeypatch.setitem(trackers._OPEN, name, lambda *what, make=make: make())
        return trackers.Trackers(list(made), Config(output_dir=str(tmp_path)), {}, 0, said.append), said

    return open_them


def test_a_tracker_that_raises_costs_a_warning_and_the_others_nothing(opened: Any) -> None:
    """Fails when: an error leaves the thread of its tracker, is said for each record, or ends the others."""
    good, bad = Told(), Told(before=lambda: 1 / 0)  # type: ignore[arg-type,return-value]

    def unable() -> None:
        raise SystemExit("no login")

    sent, said = opened(tensorboard=lambda: bad, trackio=lambda: good, wandb=unable)
    for step in range(5):
        sent.log({"loss": 1.0 / (step + 1)}, step)
    sent.close(lambda: [])
    assert good.records == [(step, {"loss": 1.0 / (step + 1)}) for step in range(5)]
    assert good.finished
    assert bad.finished
    assert sum("wandb: could not start, and is left out: SystemExit: no login" in line for line in said) == 1
    assert sum("tensorboard: ZeroDivisionError" in line for line in said) == 1
    assert sum("tensorboard: 5 records were not taken" in line for line in said) == 1
    assert len(said) == 3


def test_a_tracker_that_hangs_is_waited_for_at_the_end_only_and_not_long(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Fails when: a full queue blocks, or the end waits for a thread without a limit."""
    monkeypatch.setattr(trackers, "WAITING", 50)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.5)
    forever, good = threading.Event(), Told()
    sent, said = opened(tensorboard=lambda: Told(before=forever.wait), trackio=lambda: good)  # type: ignore[arg-type]
    began = time.monotonic()
    for step in range(200):
        sent.log({"loss": 1.0}, step)
        time.sleep(0.001)  # a step: the good one keeps up
    sent.close(lambda: [])
    assert time.monotonic() - began < 5
    assert len(good.records) == 200
    assert sum("tensorboard: does not answer: 50 records wait" in line for line in said) == 1
    assert sum("tensorboard: does not end; it may lack the last 199 records" in line for line in said) == 1
    forever.set()
