"""A job on this machine, by the container's contract: the same code folder, files, variables and arguments, and S3 as a folder.

A spot interruption is played as it happens: everything is killed at once, and a new machine begins with what S3 holds.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.distributed.launch import REFUSED
from toolkit.sagemaker_jobs.contract import lay_out, outer_environment, script_arguments, script_environment
from toolkit.sagemaker_jobs.job import Job
from toolkit.sagemaker_jobs.recipe_settings import check_places
from toolkit.sagemaker_jobs.request import ENTRY, environment_of, make_source
from toolkit.system.console import say

_POLL_SECONDS, _COPY_SECONDS = 0.05, 0.1
Seen = dict[str, tuple[int, int]]  # of each file its time of change and its size, when it was copied last


def simulate(
    job: Job, settings: Mapping[str, Any], hyperparameters: Mapping[str, Any], folder: Path, *,
    interrupt_after: Sequence[float] = (), real: bool = False,
) -> int:  # fmt: skip
    """Run a job under `folder`; returns its exit code.

    Args:
        job: its channels name files and folders of this machine; `instance_count` machines run at the same time.
        folder: `s3/checkpoints` and `s3/model` are what a job leaves in S3; `machine-1` and so on the machines' /opt/ml.
        interrupt_after: seconds after which machines are taken away, once for each, counted from when the run opens its folder.
        real: run the `train` command of the package sagemaker-training, which is in the containers, in place of its imitation.

    Raises:
        Refusal: a channel isn't on this machine, the package isn't installed, or `folder` holds something else.
    """
    if job.torch_distributed and not real:
        raise Refusal("--torch-distributed: it is the real `train` command that starts torchrun. Add --real.")
    for name, place in job.channels.items():
        if not Path(place).exists():
            raise Refusal(f"--channel {name}={place}: no such file or folder here; simulate takes data from this machine.")
    check_places(settings, hyperparameters, list(job.channels), job.include, simulated=True)
    folder = folder.resolve()
    if folder.exists() and any(path.name != "s3" and not path.name.startswith("machine-") for path in folder.iterdir()):
        raise Refusal(f"--folder {folder}: holds something else; take another or an empty one.")
    train = _train_command() if real else None
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: machines must not outlive this process
    goes_on = any(path.is_file() for path in (folder / "s3/checkpoints").rglob("*"))
    if goes_on:
        say(f"simulated: resumes from what is in {folder / 's3/checkpoints'}; --folder begins another job")
    code = 0
    for seconds in [*interrupt_after, None]:
        code = _one_life(job, hyperparameters, folder, seconds, train)
        if code >= 0:
            break
        say(f"simulated: the machines were taken away after {seconds:g} s; new ones begin with what S3 holds")
    if code == REFUSED and goes_on:
        say(
            f"simulated: the job could not resume from what is in {folder / 's3/checkpoints'}. A simulated job's output "
            "directory is that of --folder: for a new run name another one.", error=True)  # fmt: skip
    return code


def _one_life(job: Job, hyperparameters: Mapping[str, Any], folder: Path, seconds: float | None, train: str | None) -> int:
    """Start new machines and wait for their end; -1 when they were taken away before it."""
    bucket = folder / "s3/checkpoints"
    # Addresses for names: these resolve everywhere.
    hosts = [f"127.0.0.{number}" for number in range(1, job.instance_count + 1)]
    bases = [folder / f"machine-{number}" for number in range(1, job.instance_count + 1)]
    copied: list[Seen] = []
    for host, base in zip(hosts, bases, strict=True):
        shutil.rmtree(base, ignore_errors=True)
        channels = {name: Path(place) for name, place in job.channels.items()}
        lay_out(base, hosts, host, hyperparameters, channels, job.instance_type, job.torch_distributed)
        make_source(base / "code", job)
        (base / "code/requirements.txt").unlink()  # this Python's own packages are used
        copied.append(_download(bucket, base / "checkpoints"))
    with contextlib.ExitStack() as machines:
        copies = [_synced(base / "checkpoints", bucket, seen) for base, seen in zip(bases, copied, strict=True)]
        gone = [machines.enter_context(copy) for copy in copies]
        processes = [machines.enter_context(_machine(job, base, hyperparameters, train)) for base in bases]
        made, opened = time.time(), None
        while any(process.poll() is None for process in processes):
            if opened is None and _changed(bases[0] / "checkpoints/config.yaml") >= made:
                opened = time.monotonic()
            if seconds is not None and opened is not None and time.monotonic() - opened >= seconds:
                for event in gone:
                    event.set()
                return -1
            time.sleep(_POLL_SECONDS)
    codes = [process.returncode for process in processes]
    shutil.copytree(bases[0] / "model", folder / "s3/model", dirs_exist_ok=True)
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _changed(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


@contextlib.contextmanager
def _machine(job: Job, base: Path, hyperparameters: Mapping[str, Any], train: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """A running container; whatever of it still runs when the block ends is killed."""
    environment = outer_environment(job.name, base, environment_of(job))
    if train:
        command = [train]
        environment |= {"SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main"}
    else:
        command = [sys.executable, ENTRY, *script_arguments(hyperparameters)]
        environment |= script_environment(base, hyperparameters)
    process = subprocess.Popen(command, cwd=base / "code", env=environment, start_new_session=True)
    try:
        yield process
    finally:
        _kill_all(process)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and to all that it started, which have sessions of their own. Stopped first, it starts no others."""
    import psutil  # with accelerate

    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        waiting = [psutil.Process(process.pid)]
        while waiting:
            found.append(waiting.pop())
            with contextlib.suppress(psutil.NoSuchProcess):
                found[-1].suspend()
                waiting += found[-1].children()
    for member in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(found[1:], timeout=10)
    process.wait()


def _train_command() -> str:
    installed = Path(sys.executable).with_name("train")
    found = str(installed) if installed.exists() else shutil.which("train")
    if found is None:
        raise Refusal(
            "--real: the `train` command isn't installed: pip install sagemaker-training, then "
            "pip install --no-deps sagemaker-pytorch-training"
        )
    return found


def _download(bucket: Path, folder: Path) -> Seen:
    """Copy all that is in the bucket; returns what is in the folder now."""
    bucket.mkdir(parents=True, exist_ok=True)
    shutil.copytree(bucket, folder, dirs_exist_ok=True)
    return _files(folder)


@contextlib.contextmanager
def _synced(folder: Path, bucket: Path, seen: Seen) -> Iterator[threading.Event]:
    """While the block runs, copy what changes in the folder; once more at its end, unless the event is set (machine gone).

    Files are copied in random order, one after another: at any moment the bucket may hold half of what belongs together. A
    single file is there whole or not at all, as in S3.
    """
    gone, ended = threading.Event(), threading.Event()

    def work() -> None:
        while not ended.wait(_COPY_SECONDS) and not gone.is_set():
            _copy_changes(folder, bucket, seen, gone)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield gone
    finally:
        ended.set()
        thread.join()
        _copy_changes(folder, bucket, seen, gone)


def _copy_changes(folder: Path, bucket: Path, seen: Seen, gone: threading.Event) -> None:
    """One round: files that are new or changed, and deletions of those that this machine had."""
    now = _files(folder)
    todo = [path for path, state in now.items() if seen.get(path) != state] + [path for path in seen if path not in now]
    random.shuffle(todo)
    for path in todo:
        if gone.is_set():
            return
        if path not in now:
            (bucket / path).unlink(missing_ok=True)
            del seen[path]
            continue
        target, temporary = bucket / path, bucket.parent / f".copying-{threading.get_ident()}"
        with contextlib.suppress(OSError):  # gone or renamed in the meantime: the next round sees that
            shutil.copyfile(folder / path, temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
            seen[path] = now[path]


def _files(folder: Path) -> Seen:
    found: Seen = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            state = path.stat()
            if path.is_file():
                found[str(path.relative_to(folder))] = (state.st_mtime_ns, state.st_size)
    return found
