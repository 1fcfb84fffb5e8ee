"""Faults inside a run's own process, put there before its script starts: `inject(plan)`.

A plan is JSON, so that a test can hand it over: {"kill_at_operation": 17}.
"""

import builtins
import contextlib
import errno
import functools
import io
import json
import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCHED = ("rename", "replace", "fsync", "unlink", "remove", "rmdir", "mkdir", "chmod", "truncate")  # of os


def inject(plan: dict[str, Any]) -> None:
    for name, argument in plan.items():
        INJECTIONS[name](argument)


def at_each_operation(act: Callable[[int, str], None]) -> None:
    """Call `act(number, name)` before each operation on a file that this process (and its threads) makes, counted from 1.

    A write counts twice: before it, and when half of it is in the file.
    """
    number, process = 0, os.getpid()

    def now(name: str) -> None:
        nonlocal number
        if os.getpid() == process:  # not a loader's worker
            number += 1
            act(number, name)

    def watched(module: Any, name: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            now(name)
            return original(*args, **kwargs)

        setattr(module, name, call)

    for name in WATCHED:
        watched(os, name)

    original_open = builtins.open

    class Halving:
        """A text or binary file whose writes come in two halves."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            now("write")
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            now("half a write")
            self._file.write(data[len(data) // 2 :])
            return len(data)

        def __enter__(self) -> "Halving":
            return self

        def __exit__(self, *problem: Any) -> None:
            self._file.close()

        def __iter__(self) -> Any:
            return iter(self._file)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and set(mode) & set("wax+"):
            now("open")
            return Halving(original_open(file, mode, *args, **kwargs))
        return original_open(file, mode, *args, **kwargs)

    builtins.open = io.open = opened  # type: ignore[assignment]

    import safetensors.torch

    original_save = safetensors.torch.save_file

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        now("save_file")
        original_save(tensors, filename, *args, **kwargs)
        whole = Path(filename).stat().st_size
        os.truncate(filename, whole // 2)  # counted itself
        now("half a save_file")
        original_save(tensors, filename, *args, **kwargs)

    safetensors.torch.save_file = save_file


def kill_at_operation(target: int) -> None:
    """SIGKILL before this operation."""

    def act(number: int, name: str) -> None:
        if number == target:
            os.kill(os.getpid(), signal.SIGKILL)

    at_each_operation(act)


def count_operations(path: str) -> None:
    """Write the names of all operations to a file, one a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    at_each_operation(lambda number, name: os.write(descriptor, f"{name}\n".encode()) and None)


def watch_checkpoints(options: dict[str, str]) -> None:
    """At each operation after the first commit: a whole checkpoint is there, and the best one once it was. Breaches are written."""
    from toolkit import checkpoint as ckpt

    root, report, seen, busy = Path(options["root"]), Path(options["report"]), {"any": False, "best": False, "checks": 0}, []

    def act(number: int, name: str) -> None:
        if busy:
            return
        busy.append(number)
        whole = [path.name for path in ckpt.list_checkpoints(root) if not ckpt.verify_checkpoint(path)]
        best = ckpt.read_pointer(root, "best")
        is_whole = best is not None and best.name in whole
        breaches = (["no whole checkpoint"] if seen["any"] and not whole else []) + (
            ["the best one is gone"] if seen["best"] and not is_whole else []
        )
        seen.update(any=seen["any"] or bool(whole), best=seen["best"] or is_whole, checks=seen["checks"] + 1)
        with os.fdopen(os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w") as file:
            file.write(json.dumps({"operation": number, "name": name, "breaches": breaches}) + "\n")
        busy.clear()

    at_each_operation(act)


def around_saves(before: Callable[[int], None], after: Callable[[int, Path, int], None]) -> None:
    """Call `before(number)` and `after(number, root, step)` around each save_checkpoint of the writer; `after` also on errors."""
    import toolkit.checkpoint.writer as writer

    original, number = writer.save_checkpoint, 0

    def save_checkpoint(root: Path, step: int, state: Any) -> Path:
        nonlocal number
        number += 1
        before(number)
        try:
            return original(root, step, state)
        finally:
            after(number, root, step)

    writer.save_checkpoint = save_checkpoint


def slow_save(seconds: float) -> None:
    """Each save takes so much longer."""
    around_saves(lambda number: time.sleep(seconds), lambda *_: None)


def fail_save(options: dict[str, Any]) -> None:
    """The save of this number fails with EIO."""

    def before(number: int) -> None:
        if number == options["number"]:
            raise OSError(errno.EIO, "Input/output error")

    around_saves(before, lambda *_: None)


def limit_file(options: dict[str, Any]) -> None:
    """In the save of this number the file of this name can't be written beyond half its size (RLIMIT_FSIZE)."""
    import safetensors.torch

    current = {"number": 0}
    around_saves(lambda number: current.update(number=number), lambda *_: current.update(number=0))

    @contextlib.contextmanager
    def limited(path: Any, size: int) -> Any:
        is_it = current["number"] == options["number"] and Path(path).name.strip(".").removesuffix(".tmp") == options["file"]
        if not is_it:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    original_save, original_open = safetensors.torch.save_file, builtins.open

    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with limited(filename, size):
            original_save(tensors, filename, *args, **kwargs)

    class Limited:
        def __init__(self, file: Any, path: Any) -> None:
            self._file, self._path = file, path

        def write(self, data: str) -> int:
            with limited(self._path, len(data)):
                written = self._file.write(data)
                self._file.flush()
                return written

        def __enter__(self) -> "Limited":
            return self

        def __exit__(self, *problem: Any) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        made = original_open(file, mode, *args, **kwargs)
        return Limited(made, file) if current["number"] == options["number"] and "w" in mode else made

    safetensors.torch.save_file = save_file
    builtins.open = io.open = opened  # type: ignore[assignment]


def fill_disk(options: dict[str, Any]) -> None:
    """In the save of this number the disk has `free` bytes left, which it doesn't say; afterwards it has room again."""
    plain = shutil.disk_usage

    def before(number: int) -> None:
        if number != options["number"]:
            return
        padding = Path(options["mount"], "filler")
        shutil.disk_usage = lambda path: plain(path)._replace(free=1 << 40)
        with open(padding, "wb") as file:
            file.write(b"x" * max(plain(options["mount"]).free - options["free"], 0))

    def after(number: int, root: Path, step: int) -> None:
        if number == options["number"]:
            Path(options["mount"], "filler").unlink()
            shutil.disk_usage = plain

    around_saves(before, after)


def kill_after_save(target: int) -> None:
    """SIGKILL once the save of this number has returned or failed, and the step after it has begun."""
    from toolkit.training.run import Run

    current = {"number": 0}
    around_saves(lambda number: current.update(number=number), lambda *_: None)
    original = Run.log

    def log(run: Any, metrics: Any) -> None:
        original(run, metrics)
        if current["number"] >= target:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.log = log


def copy_image(options: dict[str, str]) -> None:
    """As each save returns, copy the image file that the disk is: what a power loss in that moment would leave."""

    def after(number: int, root: Path, step: int) -> None:
        shutil.copyfile(options["image"], Path(options["copies"]) / f"{step}.img")

    around_saves(lambda number: None, after)


def durable_part(root: Path) -> Callable[[Path], None]:
    """A function that rebuilds, elsewhere, what of `root` is durable by the letter of POSIX.

    Bytes of a file are as they were at its last fsync, names in a directory as they were at the directory's last fsync.
    """
    contents: dict[int, bytes] = {}
    names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
    original = os.fsync

    def fsync(descriptor: int) -> None:
        original(descriptor)
        told_of, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(told_of.st_mode):
            names[told_of.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            for entry in os.scandir(path):
                if entry.is_dir():
                    names.setdefault(entry.inode(), {})
                else:
                    names.pop(entry.inode(), None)  # the number was that of a directory which is gone
        else:
            names.pop(told_of.st_ino, None)
            contents[told_of.st_ino] = path.read_bytes()

    def rebuild(inode: int, target: Path) -> None:
        if inode in names:
            target.mkdir(parents=True)
            for name, below in names[inode].items():
                rebuild(below, target / name)
        else:
            target.write_bytes(contents.get(inode, b""))

    os.fsync = fsync
    return lambda target: rebuild(root.stat().st_ino, target)


def keep_durable(options: dict[str, str]) -> None:
    """As each save returns, rebuild what is durable."""
    rebuild = durable_part(Path(options["root"]))
    around_saves(lambda number: None, lambda number, _, step: rebuild(Path(options["copies"]) / str(step)))


def use_cache(folder: str) -> None:
    """Keep prepared data there."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(folder)


def limit_memory(megabytes: int) -> None:
    """The process may have so much memory beyond what it has now (RLIMIT_AS)."""
    have = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + megabytes * 1_000_000, resource.RLIM_INFINITY))


def small_windows(documents: int) -> None:
    """Streams are mixed in windows of N documents, so that a short run sees several."""
    import toolkit.data.loading.streams

    toolkit.data.loading.streams.STREAM_BUFFER = documents


INJECTIONS: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (
        kill_at_operation, count_operations, watch_checkpoints, slow_save, fail_save, limit_file, fill_disk, kill_after_save,
        copy_image, keep_durable, limit_memory, small_windows, use_cache,
    )
}  # fmt: skip
