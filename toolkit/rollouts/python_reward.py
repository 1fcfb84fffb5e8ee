"""The reward of Python code: the share of a row's tests that pass, run in a process with limits on all that it may use.

The limits are in `sandbox`. A completion's code is its last block between ``` fences, else all of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.system.console import warn_once
from toolkit.system.files import temporary_folder

FILE_MIB = 16
START_SECONDS = 60.0  # until Python has started, on a busy machine
_FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*\1`*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def python(
    completions: list[Any], tests: list[Any], *, cpu_seconds: float = 5.0, memory_mib: int = 512, **columns: list[Any]
) -> list[float | None]:
    """The share of tests that each completion's code passes, 0 to 1; None where a row has none.

    Args:
        tests: of each row: code that raises where the answer is wrong, such as `assert double(2) == 4`, or a list of such. Each
            runs after the completion's code, in names of its own.
        cpu_seconds: longest CPU time; twice as long on the clock.
    """
    return [
        run_tests(code_of(text_of(completion)), each, cpu_seconds, memory_mib) if each else None
        for completion, each in zip(completions, tests, strict=True)
    ]


def code_of(text: str) -> str:
    """The last block of Python between fences, else the last one, else the whole text."""
    blocks = [(language.lower(), code) for _, language, code in _FENCED.findall(text)]
    of_python = [code for language, code in blocks if language in ("python", "py", "python3")]
    return (of_python or [code for _, code in blocks] or [text])[-1]


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The words of a completion, which is text or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def run_tests(code: str, tests: str | Iterable[str], cpu_seconds: float = 5.0, memory_mib: int = 512) -> float:
    """The share of the tests that pass after the code has run, 0 to 1."""
    tests = [tests] if isinstance(tests, str) else list(tests)
    word = secrets.token_hex(16)
    task = json.dumps({"code": code, "tests": tests}) + f"\n{word}\n"
    with temporary_folder("completion") as folder:
        lines = _run(task.encode(), str(folder), cpu_seconds, memory_mib)
    _say_missing(tuple(json.loads(lines[0])))
    return len({line for line in lines if line.startswith(f"{word} ")}) / len(tests)


def _run(task: bytes, folder: str, cpu_seconds: float, memory_mib: int) -> list[str]:
    """The lines that the sandbox has written when it ended, or was ended: first of all which limits it has not got.

    Raises:
        RuntimeError: it has not come so far, which is no fault of the code.
    """
    read, write = os.pipe()
    limits = [str(write), str(max(1, round(cpu_seconds))), str(memory_mib), str(FILE_MIB)]
    process = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("sandbox.py")), *limits], cwd=folder, pass_fds=(write,),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        # nothing of the environment, where tokens and keys are
        env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    os.close(write)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(task)
        if select.select([read], [], [], START_SECONDS)[0]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * cpu_seconds)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        lines = _read_now(read)
    if not lines:
        raise RuntimeError(f"the process that runs code has not started (it ended with {process.returncode})")
    return lines


def _read_now(descriptor: int) -> list[str]:
    """What is in a pipe; what still holds its other end, where processes could not be kept from starting, is not waited for."""
    os.set_blocking(descriptor, False)
    with open(descriptor, "rb", buffering=0) as stream:
        written, until = b"", time.monotonic() + 1.0
        while time.monotonic() < until:
            part = stream.read(1 << 16)
            if not part:
                break
            written += part
    return written.decode("utf-8", "replace").splitlines()


@functools.cache
def _say_missing(missing: tuple[str, ...]) -> None:
    what = {
        "network": "reaching the network", "processes": "starting processes", "files": "writing outside of its own directory",
        "time": "using more CPU time", "memory": "using more memory", "sizes": "writing large files",
        "cores": "dumping its memory", "open": "opening many files",
    }  # fmt: skip
    if missing:
        warn_once(
            f"WARNING: reward python: this machine can't keep a completion's code from "
            f"{' and '.join(what.get(each, each) for each in missing)}"
        )
