"""Recipes run as their users run them: the script, its command line, its exit code, its files.

Each run is a process of its own, forked from one that has the heavy imports done, so that a run costs what it trains.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ["torch", "transformers", "datasets", "accelerate", "transformers.models.llama.modeling_llama", "toolkit.run"]


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    out: str
    err: str
    output_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output_dir / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]

    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.output_dir / "model/model.safetensors")


def _child(script: str, arguments: list[str], out: str, err: str, folder: str, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # a loader's workers start as they do in a user's process
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [script, *arguments]
    code: Any = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


@pytest.fixture(scope="session")
def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def run_recipe(forks: Any, tmp_path: Path) -> Callable[..., Finished]:
    """`run_recipe("sft", "--max-steps", "2")` runs recipes/sft.py in tmp_path, writing to tmp_path/out."""
    number = 0

    def run(
        recipe: str, *arguments: str, output_dir: str = "out", timeout: float = 180, env: dict[str, str] | None = None,
        while_running: Callable[[int], None] | None = None,
    ) -> Finished:  # fmt: skip
        nonlocal number
        number += 1
        script = recipe if recipe.endswith(".py") else str(ROOT / "recipes" / f"{recipe}.py")
        out, err = str(tmp_path / f"{number}.out"), str(tmp_path / f"{number}.err")
        flags = [*arguments, *(["--output-dir", output_dir] if output_dir else [])]
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        process = forks.Process(target=_child, args=(script, flags, out, err, str(tmp_path), environment))
        process.start()
        try:
            if while_running is not None:
                while_running(process.pid)
            process.join(timeout)
            assert not process.is_alive(), f"{recipe} did not end in {timeout} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return Finished(process.exitcode, Path(out).read_text(), Path(err).read_text(), tmp_path / output_dir)

    return run
