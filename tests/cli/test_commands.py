"""The `toolkit` command as a whole: what its help costs, what it says to a mistake, and what a shell completes.

Each test names the one-line change under which it was seen to fail.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import COMMANDS

pytestmark = pytest.mark.warm
COLD = sys.executable  # for tests of what is imported

ROOT = Path(__file__).resolve().parents[2]
ALL = [name for panel in COMMANDS.values() for name in panel]
HEAVY = {
    "torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "peft", "rich", "pydantic", "huggingface_hub", "sagemaker",
    "boto3", "yaml.cyaml",
}  # fmt: skip
LOADED = """
import json, sys
sys.argv = ["toolkit", *json.loads(sys.argv[1])]
from toolkit.cli.main import main
try:
    main()
except SystemExit as end:
    print("LOADED", json.dumps([end.code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def toolkit(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    python = COLD if "COLUMNS" in environment else sys.executable  # which Rich and Typer read when they are imported
    return subprocess.run(
        [python, "-m", "toolkit", *words], capture_output=True, text=True, cwd=cwd, timeout=120, check=False,
        env={**clean, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("command", ["", *ALL])
def test_a_help_page_loads_nothing_heavy(command: str) -> None:
    """So it is there at once: under 0.2 seconds of the processor, of which a heavy library alone would take more.

    Fails when: a command's module imports torch at its top, Rich draws the page, or Typer converts options that nobody typed.
    """
    words = json.dumps([*([command] if command else []), "--help"])
    done = subprocess.run([COLD, "-c", LOADED, words], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    page, _, reported = done.stdout.partition("LOADED ")
    code, loaded = json.loads(reported)
    assert code == 0
    assert HEAVY & set(loaded) == set()
    assert f"Usage: toolkit {command}".rstrip() in page


@pytest.mark.parametrize("words", [("runs", "."), ("train", "sft", "--help"), ("train", "no-such-recipe"), ("checkpoints", "--help")])
def test_texts_and_paths_are_taken_without_pydantic_and_without_settings(words: tuple[str, ...], tmp_path: Path) -> None:
    """Fails when: Typer converts a text, a path or an option that nobody typed; or `toolkit.config` loads every group of settings."""
    reported = subprocess.run(
        [COLD, "-c", LOADED.replace('name.partition(".")[0] for name', "name for name"), json.dumps(words)],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    loaded = set(json.loads(reported.partition("LOADED ")[2])[1])
    assert {"torch", "numpy", "pydantic", "toolkit.config.rollouts"} & loaded == set()


def test_what_typer_converts_it_still_does(tmp_path: Path) -> None:
    """Fails when: every value is taken as it was typed, or a missing argument is taken for none."""
    assert "--processes" in toolkit("train", "--processes", "two", "sft").stderr
    assert "RECIPE" in toolkit("train").stderr
    assert "RUN_DIR" in toolkit("report").stderr
    assert toolkit("report", str(tmp_path / "no such run")).returncode == 2


def test_the_list_of_commands_loads_none_of_them() -> None:
    """Fails when: listing or completing builds each command from its function."""
    reported = subprocess.run(
        [COLD, "-c", LOADED.replace('name.partition(".")[0] for name', "name for name"), '["--help"]'],
        capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
    ).stdout  # fmt: skip
    page, _, loaded = reported.partition("LOADED ")
    assert [name for name in ALL if not re.search(rf"^│ {name} ", page, re.M)] == []
    modules = {where.partition(":")[0] for panel in COMMANDS.values() for where, _ in panel.values()}
    assert modules & set(json.loads(loaded)[1]) == set()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_help_page_fits_the_terminal(columns: int) -> None:
    """Fails when: a long flag pushes the text out of its panel."""
    lines = toolkit("inspect", "--help", COLUMNS=str(columns)).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    borders = {len(line) for line in lines if line.startswith(("╭", "│", "╰"))}
    assert len(borders) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["inspct", "x"], "Did you mean 'inspect'?"),
        (["--bogus"], "No such option: --bogus"),
        (["merge"], "Missing argument 'ADAPTER'"),
        (["copy", "sfx"], "Did you mean sft?"),
        (["diff", "nowhere.py"], "nowhere.py: can't be read"),
        (["inspect"], "Invalid value for DATASET: which?"),
        (["inspect", "x.jsonl", "--task", "sleep"], "sleep: is none of sft, lm, preference, unpaired"),
        (["inspect", "x.jsonl", "--max-length", "long"], "--max-length long: "),
        (["generate", "tiny-llama", "--prompt", "x"], "tiny-llama: is a shape"),
        (["generate", "org/none", "--prompt", "x"], "HF_HUB_OFFLINE is not set), or give a directory\n"),
        (["evaluate", "org/none", "--dataset", "stdlib:sft"], "HF_HUB_OFFLINE is not set), or give a directory\n"),
        (["chat", "tests"], "tests: there is no model"),
        (["evaluate", "runs"], "Invalid value for --dataset: which?"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_is_one_message_and_code_2(words: list[str], message: str) -> None:
    """Fails when: a message goes to standard output, Typer's usage is before it, or the exit code is 1."""
    done = toolkit(*words, HF_HUB_OFFLINE="1")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("refused: ")
    assert message in done.stderr
    assert done.stderr.count("refused:") == 1
    assert "Traceback" not in done.stderr


def completions(typed: str) -> list[str]:
    """What bash is given for the line as typed so far."""
    words = typed.split(" ")
    done = toolkit(_TOOLKIT_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    return done.stdout.split()


def test_a_shell_completes_commands_recipes_and_launch_files() -> None:
    """Fails when: an argument has no autocompletion, or a command is not found by its beginning."""
    assert completions("toolkit ver") == ["verify-resume"]
    assert set(completions("toolkit train ")) >= {"sft", "dpo", "basic"}
    assert completions("toolkit verify-resume acc") == ["accelerated"]
    assert completions("toolkit copy zero3") == ["zero3", "zero3_offload"]
    assert completions("toolkit train --accelerate-config fsdp2_") == ["fsdp2_offload"]
    assert "--max-length" in completions("toolkit inspect --max-")


def test_the_completion_script_is_shown() -> None:
    """Fails when: add_completion is off."""
    done = toolkit("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_TOOLKIT_COMPLETE=complete_bash" in done.stdout
