"""The check that no test writes into the working tree."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TEST = """
from pathlib import Path

def test_one(tmp_path):
    (tmp_path / "mine").write_text("anywhere")

def test_two():
    {line}
"""
WRITES = {
    "a new file": "Path('folder/mlflow.db').write_text('')",
    "a new folder": "Path('runs').mkdir()",
    "another text": "Path('README.md').write_text('two')",
    "a file less": "Path('README.md').unlink()",
    "nothing": "pass",
}


@pytest.mark.parametrize(("what", "workers"), [*((what, []) for what in WRITES), ("a new file", ["-n", "2"])], ids=str)
def test_a_test_that_writes_into_the_working_tree_fails_the_session(tmp_path: Path, what: str, workers: list[str]) -> None:
    """Outside git. Fails when: the exit status stays, files alone are looked at, or the workers of xdist look for themselves."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "README.md").write_text("one line")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TEST.format(line=WRITES[what]))
    plugin = f"import sys; sys.path.insert(0, {str(HERE)!r})\nfrom working_tree import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary\n"
    (tmp_path / "conftest.py").write_text(plugin)
    command = [sys.executable, "-m", "pytest", "-q", *workers, "--basetemp", str(tmp_path.parent / f"{tmp_path.name}-base")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "2 passed" in done.stdout, done.stdout
    assert done.returncode == (0 if what == "nothing" else 1), done.stdout
    assert ("working tree was written" in done.stdout) == (what != "nothing")
    named = {"a new file": "folder/mlflow.db", "a new folder": "runs/", "nothing": ""}.get(what, "README.md")
    assert named in done.stdout
