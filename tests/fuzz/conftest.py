"""Runs recipes and commands on malformed inputs in forked processes, next to a copy of a finished run."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_SPEC = importlib.util.spec_from_file_location("malformed", HERE / "malformed.py")
assert _SPEC is not None
assert _SPEC.loader is not None
malformed = sys.modules["malformed"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(malformed)

SECONDS = 90  # for one case, on a busy machine
OFFLINE = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def run_script(fork_run: Callable[..., Any]) -> Callable[..., tuple[int | None, str]]:
    def run(script: str, arguments: tuple[str, ...], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
        path = ROOT / "toolkit/__main__.py" if script == "toolkit" else ROOT / "recipes" / f"{script}.py"
        out = folder / "out.txt"
        process = fork_run(str(path), list(arguments), out, folder, {**OFFLINE, **environment})
        process.start()
        process.join(SECONDS)
        alive = process.is_alive()
        if alive:
            os.killpg(process.pid, 9)
            process.join(10)
        return None if alive else process.exitcode, out.read_text(errors="backslashreplace") if out.exists() else ""

    return run


@pytest.fixture(scope="session")
def finished_run(run_script: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with its model and its checkpoints."""
    folder = tmp_path_factory.mktemp("fuzz")
    malformed._with_good(lambda _: None)(folder)
    flags = (
        "--hidden-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "16", "--vocab-size", "300",
        "--max-steps", "2", "--save-steps", "1", "--use-cpu", "--max-length", "64", "--eval-fraction", "0", "--no-packing", "--num-samples", "0",
        "--dataset", "good.jsonl", "--per-device-train-batch-size", "2", "--output-dir", malformed.BASE,
    )  # fmt: skip
    code, out = run_script("sft", flags, folder, {})
    assert code == 0, out
    return folder / malformed.BASE


@pytest.fixture
def check(finished_run: Path, run_script: Callable[..., Any], tmp_path: Path) -> Callable[[Any], None]:
    """Run a case and hold its end against what it declares."""

    def check_case(case: Any) -> None:
        shutil.copytree(finished_run, tmp_path / malformed.BASE)
        if case.first:
            malformed._with_good(lambda _: None)(tmp_path)
            code, out = run_script(case.script, case.arguments, tmp_path, case.environment)
            assert code == 0, out
            shutil.rmtree(tmp_path / "out")
            (tmp_path / "out.txt").unlink()
        case.prepare(tmp_path)
        code, out = run_script(case.script, case.arguments, tmp_path, case.environment)
        reported = f"{case.kind}: {case.what}\n{case.script} {' '.join(case.arguments)[:600]}\n{out[-3000:]}"
        assert code is not None, f"no end in {SECONDS} s: {reported}"
        assert "Traceback" not in out, reported
        assert "hunter2" not in out, reported
        assert "\x1b" not in out, reported
        assert all(word in out for word in case.words), f"must name {case.words}: {reported}"
        if case.settings is None:
            assert code in case.codes, f"exit {code}, {reported}"
            return
        assert code == 0, reported
        config = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
        assert {name: config[name] for name in case.settings} == case.settings, reported

    return check_case
