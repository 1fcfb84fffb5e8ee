"""An agent of a W&B sweep: W&B's own client against a server on loopback that answers what it asks; the trials log offline."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.loopback import LoopbackServer
from toolkit.cli.main import app
from toolkit.config import Refusal

pytestmark = pytest.mark.warm
ROOT = Path(__file__).parents[2]
SMALL = ["--max-train-examples", "96", "--max-eval-examples", "40", "--use-cpu", "--hidden-size", "16", "--num-hidden-layers", "1"]


class Server(LoopbackServer):
    """W&B's GraphQL, as far as an agent needs it: a sweep over one setting, and its commands."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.searched = "learning_rate"
        self.commands: list[dict[str, Any]] = []
        self.states: list[str] = []

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "createAgent" in query:
            return {"createAgent": {"agent": {"id": "agent"}}}
        if "agentHeartbeat" in query:
            self.states.append(variables["runState"])
            command = self.commands.pop(0) if self.commands else {}
            return {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": json.dumps([command])}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "ent", "username": "u", "email": "", "flags": "{}", "teams": {"edges": []}}}
        config = f"parameters: {{{self.searched}: {{min: 0.0001, max: 0.1}}}}\nmethod: random\n"
        named = dict.fromkeys(("id", "name", "displayName"), "swp")
        times = dict.fromkeys(("createdAt", "updatedAt"), "2026-01-01")
        counts = {"runCount": 0, "runCountExpected": None, "bestLoss": None, "description": "", "method": "random", "state": "RUNNING"}
        return {"project": {"sweep": {**named, **times, **counts, "config": config}}}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = json.loads(body) if self.path == "/graphql" else {"query": "", "variables": {}}
        content = json.dumps({"data": self.server.answer(asked["query"], asked.get("variables") or {})}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    thread = threading.Thread(target=started.serve_forever, daemon=True)
    thread.start()
    yield started
    started.shutdown()
    started.server_close()


def agent(server: Server, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40, "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline", "WANDB_DIR": str(folder),
    }  # fmt: skip
    command = [sys.executable, "-m", "toolkit", "sweep", str(ROOT / "recipes" / "accelerated.py"), "--wandb", "ent/proj/swp", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, env=environment, start_new_session=True)


def run_command(name: str, rate: float, kind: str = "run") -> dict[str, Any]:
    return {"type": kind, "run_id": name, "args": {"learning_rate": {"value": rate}}}


def refused(says: str, *words: str) -> None:
    done = CliRunner().invoke(app, ["sweep", *words])
    assert isinstance(done.exception, Refusal), done.output
    assert says in str(done.exception)


@pytest.mark.slow
def test_each_run_that_the_server_asks_for_is_a_trial_with_its_id(server: Server, tmp_path: Path) -> None:
    """Fails when: run_agent in wandb_agent.py leaves out the settings, or Trackers make an id of their own."""
    pytest.importorskip("wandb")
    server.commands = [run_command("good", 0.01)]
    done = agent(server, tmp_path, *SMALL, "--max-steps", "6", "--sweep-dir", "s", "--trials", "1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bgood .*exit code 0 .*--learning-rate 0\.01", done.stdout), done.stdout + done.stderr
    runs = tmp_path / "s" / "trials"
    assert "learning_rate: 0.01" in (runs / "good" / "config.yaml").read_text()
    assert [path.name.rsplit("-", 1)[1] for path in (runs / "good" / "trackers" / "wandb").glob("offline-run-*")] == ["good"]
    assert (runs / "good" / "summary.json").exists()


@pytest.mark.slow
def test_a_run_that_w_and_b_stops_saves_a_checkpoint(server: Server, tmp_path: Path) -> None:
    """Stopped some 30 s after its start, of 100,000 steps. Fails when: _ran in wandb_agent.py sends no signal."""
    pytest.importorskip("wandb")
    server.commands = [run_command("long", 0.01), {}, {}, {}, {}, {}, {"type": "stop", "run_id": "long"}]
    assert agent(server, tmp_path, *SMALL, "--max-steps", "100000", "--save-strategy", "no", "--sweep-dir", "s", "--trials", "1").returncode == 0
    assert list((tmp_path / "s" / "trials" / "long" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--wandb", "a/b/c", "--output-dir", "x"], "--output-dir: each trial has its own"), (["--wandb", "c"], "write ENTITY/PROJECT/ID"),
     (["--wandb", "a/b/c", "--search", "seed=1,2"], "--search: has no effect"), (["--wandb", "a/b/c", "--prune", "asha"], "--prune: has no effect"),
     (["--wandb", ""], "--wandb: is empty")],
)  # fmt: skip
def test_what_w_and_b_decides_is_refused(words: list[str], says: str) -> None:
    """Fails when: sweep in cli/sweep.py does not call check_agent, or takes every option with --wandb."""
    refused(says, str(ROOT / "recipes" / "accelerated.py"), *words)


@pytest.mark.slow
def test_a_sweep_over_what_is_no_setting_is_refused(server: Server, tmp_path: Path) -> None:
    """Fails when: run_agent in wandb_agent.py does not compare the names, or lets W&B's own errors through."""
    pytest.importorskip("wandb")
    server.searched = "learning_speed"
    refused = agent(server, tmp_path, "--max-steps", "6")
    assert refused.returncode == 2
    assert "searches learning_speed" in refused.stderr
