"""An agent of a W&B sweep: the server proposes, each trial is a run of the recipe that logs to W&B itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.distributed.launch import kill_group
from toolkit.runs.directory import holds_a_run
from toolkit.sweeps.trials import flags_of
from toolkit.system.children import death_with_this_process
from toolkit.system.console import say

_GRACE_SECONDS = 60.0  # for the checkpoint of a trial that is stopped


def run_agent(
    sweep: str, recipe: str, words: Sequence[str], folder: Path, names: Collection[str], trials: int | None = None
) -> None:
    """Run the trials that a W&B sweep proposes, one after another, until it has no more.

    Args:
        sweep: ENTITY/PROJECT/ID, as W&B shows it.
        recipe: a recipe's file; `words`: its flags that are the same in every trial.
        folder: each trial's run directory is FOLDER/trials/ID, with W&B's ID of the run.
        names: the recipe's settings.
        trials: at most this many in this process.

    Raises:
        Refusal: W&B is not installed, does not have the sweep, or the sweep searches what is no setting.
    """
    try:
        import wandb
    except ImportError:
        raise Refusal("--wandb: needs wandb, which is not installed. Type pip install wandb.") from None
    try:
        searched = wandb.Api().sweep(sweep).config.get("parameters") or {}
    except Exception as error:  # of several kinds: no key, no such sweep, no network
        raise Refusal(f"--wandb {sweep}: {' '.join(str(error).split()) or type(error).__name__}") from None
    if unknown := [name for name in searched if name not in names]:
        raise Refusal(f"--wandb {sweep}: searches {unknown[0]}, which is no setting of this recipe.")

    is_given = any(word.startswith("--report-to") for word in words)
    logs = ["--report-to", "wandb"] if "report_to" in names and not is_given else []
    command = [sys.executable, recipe, *words, *logs]

    def trial() -> None:
        identity, settings = os.environ["WANDB_RUN_ID"], _proposed(Path(os.environ["WANDB_SWEEP_PARAM_PATH"]))
        run = folder / "trials" / identity
        again = ["--resume"] if holds_a_run(run) else []
        run.mkdir(parents=True, exist_ok=True)
        code = _ran([*command, *flags_of(settings), "--output-dir", str(run), *again], run / "log.txt")
        say(f"trial {identity}  exit code {code}  {' '.join(flags_of(settings))}  in {run}")
        if code:
            raise RuntimeError(f"exit code {code}; its output is in {run / 'log.txt'}")

    with _terminated_as_interrupted():
        wandb.agent(sweep, function=trial, count=trials)


def _proposed(path: Path) -> Mapping[str, Any]:
    import yaml

    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    values = {name: each["value"] for name, each in found.items() if isinstance(each, dict) and "value" in each}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}


def _ran(words: Sequence[str], log: Path) -> int:
    """The exit code of a process; where W&B stops the trial, by an exception in this thread, it may save a checkpoint."""
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # it has a service of its own
    with open(log, "ab") as file:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            preexec_fn=death_with_this_process(),
        )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        kill_group(process)
        process.wait()
        raise


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A block in which SIGTERM ends W&B's agent as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


