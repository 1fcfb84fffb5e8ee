"""No test writes into the working tree: what is there before the first test is there after the last one, and nothing else.

A plugin of pytest's, loaded by conftest.py. It needs no git, and looks once at each end; with xdist the process looks that
starts the others.
"""

import os
from pathlib import Path
from typing import Any

import pytest

# What tools keep for themselves, and environments.
_PASSED_OVER = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".idea", ".vscode"}
BEFORE: pytest.StashKey[dict[str, tuple[int, int]]] = pytest.StashKey()
CHANGED: pytest.StashKey[list[str]] = pytest.StashKey()


def files_under(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of each file, by its path under `root`; of an empty folder (0, 0)."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.endswith(".egg-info")]
        for name in names:
            path = Path(folder, name)
            status = path.lstat()
            found[str(path.relative_to(root))] = (status.st_size, status.st_mtime_ns)
        if not folders and not names:
            found[str(Path(folder).relative_to(root)) + os.sep] = (0, 0)
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = files_under(session.config.rootpath)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(BEFORE, None)
    if before is None:
        return
    after = files_under(session.config.rootpath)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    session.config.stash[CHANGED] = changed
    if changed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    changed = config.stash.get(CHANGED, [])
    if changed:
        terminalreporter.write_line(f"the working tree was written to while the tests ran: {', '.join(changed[:20])}", red=True)
        terminalreporter.write_line("Give the test that does it a folder of its own: tmp_path, with cwd=tmp_path for a process.", red=True)
