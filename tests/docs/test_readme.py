"""The README shows what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_recipe_on_the_page_is_the_recipe_in_the_file() -> None:
    """Fails when: a line of recipes/sft.py is changed, and not the page's."""
    assert BLOCKS[0] == (ROOT / "recipes/sft.py").read_text()


def test_the_functions_called_from_your_own_code_run_as_shown() -> None:
    """Fails when: the schedule gives twice the rate."""
    namespace: dict = {}
    exec(BLOCKS[1], namespace)
    assert namespace["schedule"](0.0) == [group["lr"] for group in namespace["optimizer"].param_groups]


def test_every_file_it_names_is_there() -> None:
    """Fails when: a file that the page names is renamed."""
    named = set(re.findall(r"`((?:recipes|toolkit|tests|benchmarks|docs)/[\w./]+)`", README)) | set(re.findall(r"\]\((\S+?\.md)\)", README))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_table_has_every_command_and_no_other() -> None:
    """Fails when: a command is added to the command line alone, or renamed there."""
    table = README.partition("| command | what it does |")[2].partition("\n\n")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {words.split()[0] for cell in first_cells for words in re.findall(r"`([^`]+)`", cell)}
    assert named == {name for panel in COMMANDS.values() for name in panel}


@pytest.mark.parametrize("name", ["gpu", "sft"])
def test_benchmarks_start(name: str) -> None:
    """As scripts of their folder, as `make gpu` and `make bench` start them. Fails when: one imports another as a package's."""
    done = subprocess.run([sys.executable, f"benchmarks/{name}.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}.py")
