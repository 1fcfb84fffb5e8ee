"""The SDK, moto and the container's training package, in an environment of their own over .venv that `make test` makes."""

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SDK_PYTHON = Path(sys.prefix) / "sagemaker/bin/python"
ROLE = "arn:aws:iam::123456789012:role/SageMakerExecution"


@dataclass
class Answer:
    """What a command did: its exit code, what it printed, and the bodies of the CreateTrainingJob requests that arrived."""

    code: int
    out: str
    err: str
    requests: list[dict[str, Any]]


class Sdk:
    """A process with the SDK imported and a moto server; each command line runs in a fork of it, with the server as AWS."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def toolkit(self, *words: object, cwd: Path = ROOT, **environment: str | None) -> Answer:
        return Answer(**self._ask({"words": [str(word) for word in words], "cwd": str(cwd), "environment": environment}))

    def aws(self, service: str, operation: str, **arguments: Any) -> Any:
        """What a client's operation returns; bytes go and come as bytes."""
        coded = {name: {"base64": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for name, v in arguments.items()}
        answer = self._ask({"service": service, "operation": operation, "arguments": coded})
        if isinstance(answer, dict) and "base64" in answer.get("Body", {}):
            answer["Body"] = base64.b64decode(answer["Body"]["base64"])
        return answer

    def refusal(self, job: dict[str, Any], hyperparameters: dict[str, str], environment: dict[str, str]) -> str | None:
        """What `check_limits` refuses a job with; None if nothing."""
        return self._ask({"job": job, "hyperparameters": hyperparameters, "environment": environment})

    @property
    def endpoint(self) -> str:
        return self._ask({"endpoint": True})

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(120, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, "the process with the SDK has died"
        return json.loads(line)


@pytest.fixture(scope="session")
def sdk_python() -> str:
    if not SDK_PYTHON.exists():
        pytest.skip(f"no SDK: {SDK_PYTHON} is missing; `make test` makes it")
    return str(SDK_PYTHON)


@pytest.fixture(scope="session")
def sdk(sdk_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sdk]:
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SAGEMAKER_", "SM_"))}
    environment |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if os.access("/dev/shm", os.W_OK):  # a command copies the toolkit for the SDK: each new file on a disk is .3 ms of CPU
        environment["TMPDIR"] = "/dev/shm"
    process = subprocess.Popen(
        [sdk_python, str(HERE / "sdk_process.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        yield Sdk(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def simulate(sdk_python: str) -> Callable[..., Answer]:
    """`simulate(tmp_path, "sft", "--max-steps", "2")` runs a job under tmp_path/job, with the environment that has the SDK."""

    def run(
        cwd: Path, *words: object, python: str = sdk_python, folder: str = "job", timeout: float = 300, **environment: str
    ) -> Answer:
        command = [python, "-m", "toolkit", "sagemaker", "simulate", *map(str, words), "--folder", folder]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
        process = subprocess.Popen(
            command, cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # it takes its machines with it
        return Answer(process.returncode, out, err, [])

    return run
