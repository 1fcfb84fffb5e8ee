"""A lock that is waited for says so; a limit on time ends what has none; what can't be written names its place."""

import os
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from safetensors import SafetensorError

from toolkit.system import files
from toolkit.system.files import written_next_to
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
        assert capsys.readouterr().err == f"waiting for another process, which prepares data (it holds {tmp_path / 'a.lock'})\n"
    other.join()


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


def test_an_error_of_safetensors_names_the_place_and_leaves_nothing(tmp_path: Path) -> None:
    """Fails when: it stays in safetensors' own words, which name none."""
    temporary = tmp_path / "run/.model.tmp"
    temporary.mkdir(parents=True)
    with pytest.raises(OSError, match=f"{tmp_path}/run: .*No space left"), written_next_to(temporary):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert not temporary.exists()
