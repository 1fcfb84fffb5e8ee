"""Recipes run as their users run them: the script, its command line, its exit code, its files."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


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

        model = self.output_dir / "model/model.safetensors"
        return load_file(model if model.exists() else model.with_name("adapter_model.safetensors"))


@pytest.fixture
def run_recipe(fork_run: Callable[..., Any], tmp_path: Path) -> Callable[..., Finished]:
    """`run_recipe("sft", "--max-steps", "2")` runs recipes/sft.py in tmp_path, writing to tmp_path/out."""
    number = 0

    def run(
        recipe: str, *arguments: str, output_dir: str = "out", timeout: float = 180, env: dict[str, str] | None = None,
        while_running: Callable[[int], None] | None = None,
    ) -> Finished:  # fmt: skip
        nonlocal number
        number += 1
        script = recipe if recipe.endswith(".py") else str(ROOT / "recipes" / f"{recipe}.py")
        out, err = tmp_path / f"{number}.out", tmp_path / f"{number}.err"
        flags = [*arguments, *(["--output-dir", output_dir] if output_dir else [])]
        process = fork_run(script, flags, out, tmp_path, env or {}, err=err)
        process.start()
        try:
            if while_running is not None:
                while_running(process.pid)
            process.join(timeout)
            assert not process.is_alive(), f"{recipe} did not end in {timeout} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return Finished(process.exitcode, out.read_text(), err.read_text(), tmp_path / output_dir)

    return run
