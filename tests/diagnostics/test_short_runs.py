"""Short runs of a recipe inside plan, doctor, profile and find-learning-rate: what a signal does to them."""

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.cli.recipe import read_recipe
from toolkit.diagnostics.doctor import examine
from toolkit.diagnostics.learning_rate import find_learning_rate
from toolkit.diagnostics.plan import plan
from toolkit.diagnostics.profile import profile
from toolkit.diagnostics.watch import Watch
from toolkit.training import opening
from toolkit.training.signals import StopSignal

RECIPE = Path(tk.__file__).parents[1] / "recipes" / "accelerated.py"


def examined(main: Callable[[Any], Any], config: Any) -> None:
    with Watch(str(RECIPE)) as watch:
        examine(main, config, watch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", [plan, examined, profile, find_learning_rate])
def test_a_signal_ends_it_at_once_and_leaves_nothing(
    command: Callable[[Any, Any], Any], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the run notes the signal, to save and to say how its temporary directory is resumed; or SIGTERM just kills."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    _, config = read_recipe(RECIPE, [])

    def main(config: Any) -> None:
        with opening.signals_noted(StopSignal()):
            signal.raise_signal(number)
            pytest.fail("goes on")

    with pytest.raises(KeyboardInterrupt):
        command(main, config)
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
