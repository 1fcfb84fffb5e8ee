"""A tally of trials with faults: how many survived, and the table of docs/reliability.md that is made of it.

    make chaos                 all of it in the long form, with its table in docs/reliability.md
    make chaos TRIALS=10       a tenth of the trials

The variable FAULT_TRIALS is the share of the long form's trials in percent; without it each fault is tried a few times.
"""

import contextlib
import os
import random
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).resolve().parent / "faults/table.py"


@dataclass
class Tally:
    """One line of the table: a fault, what is done, how often, what survived, and numbers worth knowing."""

    fault: str
    what: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    measured: str = ""

    @contextlib.contextmanager
    def trial(self, label: object = "") -> Iterator[None]:
        """Count a trial; what fails in it is kept until all are done."""
        self.tried += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # the others are still to be tried
            self.failures.append(f"trial {self.tried} ({label}): {str(error)[:3000]}")

    def check(self) -> None:
        """Fail when a trial did."""
        assert not self.failures, f"{len(self.failures)} of {self.tried}:\n" + "\n".join(self.failures[:3])


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[..., Tally]:
    """`tally("F1", "what is done")` opens a line of the table."""

    def open_line(fault: str, what: str) -> Tally:
        line = Tally(fault, what)
        request.config.stash.setdefault(LINES, []).append(line)
        return line

    return open_line


@pytest.fixture(scope="session")
def long_form() -> bool:
    return bool(os.environ.get("FAULT_TRIALS"))


@pytest.fixture(scope="session")
def count(long_form: bool) -> Callable[[int, int], int]:
    """`count(short, long)`: how often to try, a few times, or the share of the long form that FAULT_TRIALS asks for."""
    share = float(os.environ.get("FAULT_TRIALS") or 0)
    return lambda short, long: max(short, round(long * share / 100)) if long_form else short


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random moments; the seed is FAULT_SEED, or drawn and printed."""
    seed = os.environ.get("FAULT_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"FAULT_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


LINES: pytest.StashKey[list[Tally]] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show the lines of the table; with FAULT_TABLE put them into that file."""
    lines = config.stash.get(LINES, [])
    if not lines or not os.environ.get("FAULT_TRIALS"):
        return
    for line in lines:
        terminalreporter.write_line(f"{line.fault:4} {line.tried - len(line.failures)} of {line.tried}  {line.what}  {line.measured}")
    if os.environ.get("FAULT_TABLE"):
        runpy.run_path(str(TABLE))["write_table"](Path(os.environ["FAULT_TABLE"]), lines)
