"""A Hub on loopback (`hub_server.py`), the real client that talks to it, and queues of small commits."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


def _module_beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module_beside("card_rules")
hub_server = _module_beside("hub_server")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The Hub; the environment of this process and of those it starts leads to it, as alice, who may write."""
    for name in ("HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read when another test's environment had it
    with hub_server.Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
        yield hub


@pytest.fixture
def api(hub: Any, no_waiting: Any) -> Any:
    """The real client."""
    from toolkit.hub.client import hub_api

    return hub_api()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The client's own pauses between its tries, and ours, are noted and not waited for."""
    import logging

    from huggingface_hub.utils import _http, disable_progress_bars, logging as hub_logging

    from toolkit.hub import client

    waited: list[float] = []
    clock = type("Clock", (), {"sleep": staticmethod(waited.append)})
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(client, "time", clock)
    monkeypatch.setattr("huggingface_hub._commit_api.constants.HF_HUB_DISABLE_XET", True)
    hub_logging.set_verbosity(logging.CRITICAL)
    disable_progress_bars()
    yield waited
    hub_logging.set_verbosity_warning()


@pytest.fixture
def queued(tmp_path: Path) -> Callable[..., Any]:
    """`queued({"config.json": b"{}"}, message="step 1")` adds a commit of these files to tmp_path/hub_queue."""
    from toolkit.hub.queue import Job, add_job

    def add(files: dict[str, bytes], message: str = "step 1", repo_id: str = "alice/model", **more: Any) -> Any:
        def fill(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

        return add_job(tmp_path / "hub_queue", Job(repo_id, message, **more), message.replace(" ", "-"), fill)

    return add


SMALL = [
    "--dataset", "rows.jsonl", "--hidden-size", "32", "--num-hidden-layers", "1", "--num-attention-heads", "2",
    "--intermediate-size", "48", "--max-length", "64", "--vocab-size", "300", "--max-steps", "4", "--save-steps", "2",
    "--num-samples", "0", "--eval-strategy", "no", "--per-device-train-batch-size", "2",
]  # fmt: skip
# A recipe as its users run it, but at the end patient for seconds only.
IMPATIENT = """
import faulthandler, runpy, sys
faulthandler.dump_traceback_later(100)
from toolkit.hub import uploads
uploads.PATIENCE = 2.0
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def run_sft(fork_run: Callable[..., Any], hub: Any, tmp_path: Path) -> Callable[..., Any]:
    """`run_sft("--push-to-hub")` runs a small recipes/sft.py in tmp_path, as alice; returns (exit code, what it printed)."""
    import contextlib
    import json
    import os
    import signal
    import socket

    recipes = Path(__file__).resolve().parents[2] / "recipes"
    rows = [{"prompt": f"say {i}", "completion": f"number {i} it is"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    number = 0

    def run(
        *flags: str, output_dir: str = "out", ranks: int = 1, while_running: Callable[[int], None] | None = None,
        env: dict[str, str] | None = None, recipe: str = "sft", timeout: float = 150, small: Sequence[str] = SMALL,
    ) -> tuple[int, str]:  # fmt: skip
        nonlocal number
        number += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        arguments = [str(recipes / f"{recipe}.py"), *small, *flags, "--output-dir", output_dir]
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1", **(env or {})}
        outs, processes = [], []
        for rank in range(ranks):
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            outs.append(tmp_path / f"{number}-{rank}.txt")
            its = {**environment, **({**world, **address} if ranks > 1 else {})}
            processes.append(fork_run(str(tmp_path / "impatient.py"), arguments, outs[-1], tmp_path, its))
        try:
            for process in processes:
                process.start()
            if while_running is not None:
                while_running(processes[0].pid)
            for process in processes:
                process.join(timeout)
                assert not process.is_alive(), "\n".join(out.read_text()[-3000:] for out in outs)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        return processes[0].exitcode, "\n".join(out.read_text() for out in outs if out.exists())

    return run


@pytest.fixture
def push(hub: Any, tmp_path: Path) -> Callable[..., Any]:
    """`push("out")` runs `toolkit push out` in tmp_path; returns (exit code, what it printed)."""
    import subprocess

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "toolkit", "push", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run
