"""Runs of the peers, each in a process of its own, forked from one that has the imports done."""

import json
import multiprocessing
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = {"Trainer": "Trainer", "SFTTrainer": "TRL"}  # a class, and what the table calls it
Scenario = dict[str, Any]  # settings and faults of a run, by name
FORKS: Any = multiprocessing.get_context("fork")


def load_libraries() -> None:
    """Import what the runs need, before processes are forked."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    from .peers import prepare

    prepare()


@dataclass
class Finished:
    """A run that has ended. `code` is negative where a signal ended it; `reached` is the last step that was done."""

    code: int
    out: str
    reached: int
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """The name of the exception that ended it."""
        traceback_ = self.out.rpartition("Traceback (most recent call last):\n")[2]
        return next((line.split(":")[0].split(".")[-1] for line in traceback_.splitlines() if line[:1].strip()), "no message")


@dataclass
class Bench:
    """Starts runs in `folder`; an uninterrupted one of each kind is made once and kept."""

    folder: Path
    uninterrupted: dict[str, Finished] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def fresh(self, template: Path | None = None) -> None:
        """Make the output directory a copy of the template, or none."""
        shutil.rmtree(self.out, ignore_errors=True)
        if template is not None:
            shutil.copytree(template, self.out)

    def run(self, peer: str, scenario: Scenario, while_running: Callable[[int], None] | None = None) -> Finished:
        for name in ("printed", "steps", "result.json"):
            (self.folder / name).unlink(missing_ok=True)
        process = FORKS.Process(target=_child, args=(peer, scenario, self.folder))
        process.start()
        if while_running is not None:
            while_running(process.pid)
        process.join(60)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"a run of {peer} with {scenario} did not end: {(self.folder / 'printed').read_text()[-2000:]}")
        steps, result = self.folder / "steps", self.folder / "result.json"
        return Finished(
            process.exitcode,
            (self.folder / "printed").read_text(),
            max([0, *map(int, steps.read_text().split())]) if steps.exists() else 0,
            json.loads(result.read_text()) if result.exists() else {},
        )

    def whole(self, peer: str, scenario: Scenario) -> Finished:
        """The same run, uninterrupted."""
        key = json.dumps([peer, scenario])
        if key not in self.uninterrupted:
            self.fresh()
            finished = self.run(peer, scenario)
            assert finished.code == 0, finished.out
            self.uninterrupted[key] = finished
        return self.uninterrupted[key]


def _child(peer: str, scenario: Scenario, folder: Path) -> None:
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    from .peers import train

    code: Any = 0
    try:
        train(peer, scenario)
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
