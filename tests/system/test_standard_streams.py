"""A training whose log can't be written goes on, and ends with its own exit code."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.system import standard_streams

RECIPE = """
import os, sys
from dataclasses import dataclass
import toolkit as tk

@dataclass(frozen=True)
class Config(tk.RunConfig):
    pass

def main(config: Config) -> None:
    print("step 1")
    descriptor = os.open("opened", os.O_WRONLY | os.O_CREAT)
    with open("ran", "w") as file:
        file.write(f"{descriptor} {config.output_dir}")
    sys.stdout.write("x" * 100_000)

if __name__ == "__main__":
    tk.run_recipe(main)
"""


@pytest.mark.parametrize("streams", ["> /dev/full", "> /dev/full 2>&1", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_log_that_cannot_be_written_does_not_end_a_run(tmp_path: Path, streams: str) -> None:
    """A full disk, and what a daemon closes; no file of the run is what libraries print to. Fails when: `run_recipe` leaves
    the streams as they are, or one that is closed is None, or its number is free."""
    (tmp_path / "mine.py").write_text(RECIPE)
    command = ["bash", "-c", f'"$@" {streams}', "bash", sys.executable, "mine.py", "--output-dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    descriptor, directory = (tmp_path / "ran").read_text().split()
    assert int(descriptor) > 2
    assert directory == "out"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["recipes"], ["plan", "--help"]])
def test_a_command_whose_output_cannot_be_written_says_so_once(words: list[str], unbuffered: str) -> None:
    """Fails when: it ends with a traceback, with 0, or with what Python writes of a stream that it can't empty at its end."""
    command = ["bash", "-c", '"$@" > /dev/full', "bash", sys.executable, "-m", "toolkit", *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"standard output: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.parametrize(("words", "code"), [(["recipes"], 0), (["plan", "--help"], 0), (["doctor", "no-such-recipe"], 2)])
def test_a_command_with_closed_streams_ends_with_its_own_code(words: list[str], code: int) -> None:
    """As daemons start it. Fails when: `main` of the command leaves a closed stream as None, which ended in a traceback."""
    command = ["bash", "-c", '"$@" <&- >&-', "bash", sys.executable, "-m", "toolkit", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


class _Disk(io.StringIO):
    """That is full at times."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error: OSError | None = error

    def flush(self) -> None:
        if self.error:
            self.truncate(0)
            self.seek(0)
            raise self.error


def test_lines_that_were_left_out_are_counted_and_a_closed_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the number is not written or not forgotten, or `| head` no longer ends what it reads from."""
    disk = _Disk(OSError(28, "No space left on device"))
    monkeypatch.setattr(sys, "stdout", disk)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    standard_streams.outlive_the_log()
    standard_streams.outlive_the_log()
    sys.stdout.write("one\n")
    sys.stdout.write("two\nthree\n")
    disk.error = None
    sys.stdout.writelines(["four\n", "five\n"])
    sys.stdout.write("six\n")
    assert disk.getvalue() == "\nWARNING: 3 lines of this log could not be written\nfour\nfive\nsix\n"
    disk.error = BrokenPipeError(32, "Broken pipe")
    with pytest.raises(BrokenPipeError):
        sys.stdout.write("seven\n")
