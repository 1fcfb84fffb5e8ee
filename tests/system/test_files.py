"""A lock that is waited for says so; a limit on time ends what has none; what can't be written names its place."""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import BPE

from toolkit.system import files
from toolkit.system.files import write_atomically, written_next_to
from toolkit.system.interruptions import time_limit


def test_waiting_for_another_process_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, and not where the lock is free. Fails when: the lock is taken without a time limit."""
    monkeypatch.setattr(files, "SILENT_SECONDS", 0.1)
    with files.waiting_lock(tmp_path / "a.lock", "prepares data"):
        pass
    assert capsys.readouterr().err == ""
    held = threading.Event()

    def hold() -> None:
        with FileLock(str(tmp_path / "a.lock")):
            held.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(10)
    with files.waiting_lock(tmp_path / "a.lock", "prepares data"):
        assert re.fullmatch(rf"waiting for .*prepares data .*{tmp_path}/a\.lock\)\n", capsys.readouterr().err)
    other.join()


HOLDS = """
import time
from toolkit.system.files import temporary_folder
with temporary_folder("plan") as folder:
    (folder / "run").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: neither that of a living process nor what has another name, is no folder or is so new that it may have no lock
    yet. Fails when: none is removed, the lock is not taken or not looked at, or the age is not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    holders = [subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        lives, killed = (Path(process.stdout.readline().strip()) for process in holders if process.stdout)
        holders[1].kill()
        holders[1].wait(10)
        new, other, linked = tmp_path / "toolkit-temporary-plan-new", tmp_path / "plan-other", tmp_path / "toolkit-temporary-plan-link"
        for folder in (new, other):
            folder.mkdir()
        linked.symlink_to(other)
        for folder in (lives, killed, other):
            os.utime(folder, (0, 0))
        os.utime(linked, (0, 0), follow_symlinks=False)
        with files.temporary_folder("doctor") as folder:
            assert set(tmp_path.iterdir()) == {lives, new, other, linked, folder}
        assert set(tmp_path.iterdir()) == {lives, new, other, linked}
    finally:
        for process in holders:
            process.kill()
            process.communicate(timeout=10)


def test_a_block_without_an_end_is_ended_and_an_earlier_timer_goes_on() -> None:
    """Fails when: the timer is not set, or the one that was set before is forgotten."""
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.5 s"), time_limit(0.5):  # noqa: PT012 - what comes after is within the outer one
        with pytest.raises(TimeoutError, match=r"0\.1 s"), time_limit(0.1):
            _never_end()
        _never_end()
    assert 0.4 < time.monotonic() - began < 5


def _never_end() -> None:
    while True:
        pass


def test_what_is_written_first_is_in_the_same_folder_and_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: it is where a rename can't reach it, on another disk, or where a glob takes it for the file."""
    seen, replace = list[Path](), os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (seen.append(Path(old)), replace(old, new))[1])
    files.write_atomically(tmp_path / "file.json", "whole")
    assert [(path.parent, path.name[0]) for path in seen] == [(tmp_path, ".")]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def _full_for_safetensors(folder: Path) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def _full_for_tokenizers(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("/dev/full")
    Tokenizer(BPE()).save(str(folder / "tokenizer.json"))


def _full_for_python(folder: Path) -> None:
    (folder / "README.md").symlink_to("/dev/full")
    (folder / "README.md").write_text("a card")


@pytest.mark.parametrize("write", [_full_for_safetensors, _full_for_tokenizers, _full_for_python])
def test_a_full_disk_is_an_oserror_that_names_the_place_and_leaves_nothing(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Fails when: it stays an error in a library's own words, or that of the operating system, which names no place."""
    temporary = tmp_path / "run/.model.tmp"
    temporary.mkdir(parents=True)
    with pytest.raises(OSError, match="No space left") as caught, written_next_to(temporary):
        write(temporary)
    assert f"{tmp_path}/run" in str(caught.value)
    assert not temporary.exists()


@pytest.mark.parametrize("own", ["", "with the process"])
def test_a_file_that_a_full_disk_cuts_is_named_and_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    """Fails when: what was written first stays, or the error is that of the operating system, without a name."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "file.json").write_text("before")
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "file.json", "whole", own and tmp_path / own)
    assert str(tmp_path / "file.json") in str(caught.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
