"""A shell like a reader's, in which `python` and `toolkit` start with the heavy imports done (`tests/warm_python.py`)."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400  # for one block, on a machine where other tests run next to it


@pytest.fixture(scope="session")
def reader(warm_programs: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`reader(shell, folder)` runs a block in bash as a reader would, and gives its exit code and its output."""
    folder = tmp_path_factory.mktemp("bin")
    warm_programs(folder, Path(__file__).with_name("as_a_reader.py"))
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip

    def run(shell: str, where: Path) -> subprocess.CompletedProcess[str]:
        if not (where / ".venv").exists():
            (where / ".venv").mkdir()
            (where / ".venv/bin").symlink_to(folder)
            (where / "recipes").symlink_to(ROOT / "recipes")
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", shell], cwd=where, env=environment, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(shell, process.returncode, out)

    return run
