"""Tiny runs in processes of their own, forked from one that has the heavy imports done: a run costs what it trains.

`tests/tiny_run.py` is what they run; the fixture `tiny` starts it, as one process or as ranks.
"""

import contextlib
import gc
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def _load(name: str) -> Any:
    """A file of this folder as a module: pytest's importlib mode puts no folder on the path."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_TALLY, _WORKING_TREE, _WARM = _load("tally"), _load("working_tree"), _load("warm_python")
tally, count, chance, long_form = _TALLY.tally, _TALLY.count, _TALLY.chance, _TALLY.long_form
as_marked, warm_python, warm_programs, client_script_fixture = _WARM.as_marked, _WARM.warm_python, _WARM.warm_programs, _WARM.client_script_fixture
pytest_sessionstart, pytest_sessionfinish = _WORKING_TREE.pytest_sessionstart, _WORKING_TREE.pytest_sessionfinish


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for plugin in (_TALLY, _WORKING_TREE):
        plugin.pytest_terminal_summary(terminalreporter, config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: the garbage collector passes it over, now and in each test."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(tryfirst=True)  # before the cases are chosen with -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.fast(2)`: two of a test's cases, the first and one in the middle, mean all in `make test`; the others are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("fast"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for some in cases.values():
        wanted = some[0].get_closest_marker("fast").args[0]  # type: ignore[union-attr]
        kept = {number * len(some) // wanted for number in range(wanted)}
        for number in set(range(len(some))) - kept:
            some[number].add_marker("slow")


ROOT = HERE.parent
TINY_RUN = str(HERE / "tiny_run.py")
PRELOADED = [
    "torch", "transformers", "datasets", "accelerate", "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert", "toolkit.training.run", "toolkit.command_line.recipe", "toolkit.models", "toolkit.optim",
    "toolkit.data.loading.loaders", "toolkit.losses.causal_lm", "toolkit.losses.classification", "safetensors.torch",
    "toolkit.data.tokenize.tasks", "toolkit.models.load", "toolkit.training.evaluation", "toolkit.generation.samples",
    "toolkit.command_line.help_page", "typer._adapters", "filelock", "toolkit.checkpoint", "toolkit.distributed.engines.start", "toolkit.distributed.engines.zero",
    "toolkit.distributed.engines.fsdp", "peft", "sklearn.pipeline", "sklearn.linear_model", "sklearn.feature_extraction.text", "rich.console",
    "torch.distributed.fsdp", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else []),
]  # fmt: skip


# torch reads it when it is loaded, in the process that the others are forked from: two threads each would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The same precision where a test names none, whatever CPU it runs on: as on one without units for bfloat16.
LIMIT = os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a script starts with `&`: tests that send it need it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _configurations() -> list[str]:
    """transformers' modules of configurations: looking up a model's class imports most of them, which takes a second."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models"  # type: ignore[union-attr,arg-type]
    return [f"transformers.models.{path.parent.name}.{path.stem}" for path in folder.glob("*/configuration_*.py")]


def _of_every_run() -> list[str]:
    """The toolkit's modules that runs import when they come to them, in whatever recipe: they take a tenth of a short run."""
    rooms = ("baselines", "cache", "checkpoint", "config", "data", "demo_corpus", "export", "hub", "losses", "metrics", "models", "optim", "preference", "runs", "system",
             "tracking", "training")  # fmt: skip
    files = [path for room in rooms for path in sorted((ROOT / "toolkit" / room).rglob("[!_]*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]


@dataclass
class Finished:
    """A run that has ended. `code` is negative where a signal ended it."""

    code: int | None  # None: it was still running at the time limit
    out: str
    seconds: float
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        return [(event["step"], event["loss"], event["grad_norm"]) for event in self.metrics if "loss" in event]

    @property
    def outcome(self) -> dict[str, Any]:
        """What must not depend on having been interrupted."""
        return {**self.result, "curve": self.curve}


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)


def resumed_from(finished: Finished) -> int:
    """The step a run was resumed from; 0 when it began again."""
    found = re.search(r"Resumed from .* at step (\d+)", finished.out)
    return int(found[1]) if found else 0


def _hub_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("HF_", "HUGGING"))}


def _child(
    script: str, arguments: list[str], read: str, out: str, err: str, folder: str, environment: dict[str, str], plan: dict[str, Any],
    clean: bool,
) -> None:  # fmt: skip
    os.setpgid(0, 0)
    interrupt = signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # as a process that still imports
    multiprocessing.set_start_method("fork", force=True)  # a loader's workers start as they do in a user's process
    old = _hub_variables()
    if clean:
        os.environ.clear()
    os.environ.update(environment)
    if "HF_DATASETS_CACHE" in environment:  # the library that was imported before the fork has read the variable already
        sys.modules["datasets"].config.HF_DATASETS_CACHE = environment["HF_DATASETS_CACHE"]  # type: ignore[attr-defined]
    elif clean and old != _hub_variables():
        for name in ("huggingface_hub.constants", "datasets.config"):
            importlib.reload(sys.modules[name])
    os.chdir(folder)
    for number, path, how in ((0, read, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        os.dup2(os.open(path, how | (os.O_CREAT | os.O_APPEND if number else 0)), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [script, *arguments]
    signal.signal(signal.SIGINT, interrupt)
    code: Any = 1
    try:
        if plan:
            runpy.run_path(str(HERE / "faults" / "injection.py"))["inject"](plan)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


@dataclass
class Runner:
    """Starts tiny runs in `folder`; an uninterrupted one of each kind is made once and kept."""

    folder: Path
    fork_run: Callable[..., Any]
    references: dict[str, Finished]
    number: int = 0

    def __call__(
        self, *flags: str, output_dir: str | Path = "out", plan: dict[str, Any] | None = None, ill: dict[str, Any] | None = None,
        while_running: Callable[[int], None] | None = None, timeout: float = 120, script: str = TINY_RUN,
    ) -> Finished:  # fmt: skip
        self.number += 1
        out = self.folder / f"{self.number}.txt"
        environment = {"TINY_RUN": json.dumps(ill or {})}
        arguments = [*flags, "--output-dir", str(output_dir)]
        began = time.monotonic()
        process = self.fork_run(script, arguments, out, self.folder, environment, plan=plan)
        process.start()
        try:
            if while_running is not None:
                while_running(process.pid)
            process.join(timeout)
            assert not process.is_alive(), f"no end in {timeout} s: {out.read_text()[-2000:]}"
        finally:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        return Finished(process.exitcode, out.read_text() if out.exists() else "", time.monotonic() - began, self.folder / output_dir)

    def ranks(
        self, world_size: int, *flags: str, output_dir: str | Path = "out", ill: dict[str, Any] | None = None,
        while_running: Callable[[list[int]], None] | None = None, timeout: float = 120, script: str = TINY_RUN,
        plan: dict[str, Any] | None = None,
    ) -> list[Finished]:  # fmt: skip
        """The same run as N ranks; `while_running` is given their process ids, in the order of the ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes, outs = [], []
        for rank in range(world_size):
            self.number += 1
            outs.append(self.folder / f"{self.number}.txt")
            environment = {
                "TINY_RUN": json.dumps(ill or {}), "RANK": str(rank),
                "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            arguments = [*flags, "--output-dir", str(output_dir)]
            processes.append(self.fork_run(script, arguments, outs[-1], self.folder, environment, plan=plan))
        began = time.monotonic()
        try:
            for process in processes:
                process.start()
            if while_running is not None:
                while_running([process.pid for process in processes])
            for process in processes:
                process.join(max(began + timeout - time.monotonic(), 0.1))
            seconds = time.monotonic() - began
            codes = [process.exitcode if not process.is_alive() else None for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join(10)
        folder = self.folder / output_dir
        return [Finished(code, out.read_text(), seconds, folder) for code, out in zip(codes, outs, strict=True)]

    def reference(self, *flags: str, plan: dict[str, Any] | None = None, ill: dict[str, Any] | None = None) -> Finished:
        """The same run, uninterrupted."""
        faults = {name: value for name, value in (ill or {}).items() if not name.endswith("_seconds")}
        key = json.dumps([flags, plan, faults])
        if key not in self.references:
            folder = self.folder / "reference" / hashlib.sha256(key.encode()).hexdigest()[:12]
            finished = self(*flags, output_dir=folder, plan=plan, ill=faults)
            assert finished.code == 0, finished.out
            self.references[key] = finished
        return self.references[key]

    def killed(self, *flags: str, after: float, **more: Any) -> Finished:
        """A run whose process is killed (SIGKILL, no process but that one) N seconds after its directory was claimed."""
        folder = self.folder / more.get("output_dir", "out")

        def kill(pid: int) -> None:
            wait_for(lambda: (folder / "config.yaml").exists() or not alive(pid))
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # done already: then what is resumed is a finished run
                os.kill(pid, signal.SIGKILL)

        return self(*flags, while_running=kill, **more)

    def wait_for_lines(self, lines: int, output_dir: str = "out") -> None:
        """Until N lines of metrics have been written."""
        path = self.folder / output_dir / "metrics.jsonl"
        wait_for(lambda: path.exists() and path.read_text().count("\n") >= lines)

    def seconds_in_run(self, reference: Finished) -> float:
        """From the claim of the directory to the result, in an uninterrupted run."""
        return (reference.folder / "result.json").stat().st_mtime - (reference.folder / "config.yaml").stat().st_mtime

    def fresh(self, output_dir: str = "out") -> Path:
        """The path of an output directory in which nothing is."""
        shutil.rmtree(self.folder / output_dir, ignore_errors=True)
        return self.folder / output_dir


@pytest.fixture(scope="module", autouse=True)
def as_it_started() -> Iterator[None]:
    """What a file's tests change in their process is undone before the next file's: the precision that an Accelerator leaves to
    the one after it, torch's switches, the environment, the folders that modules are looked for in."""
    environment, folders = dict(os.environ), list(sys.path)
    yield
    sys.path[:] = folders
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if states := sys.modules.get("accelerate.state"):
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


class _Process(multiprocessing.get_context("forkserver").Process):
    """One that only its own thread asks for its exit code: another thread's `start` would read it too, and leave 255 to this one."""

    def start(self) -> None:
        super().start()
        multiprocessing.process._children.discard(self)


@pytest.fixture(scope="session")
def fork_run() -> Callable[..., Any]:
    """A process, not started yet, that runs a script as a user would, in a process group of its own. `clean`: its environment is
    the one given, with nothing of this process's."""
    context = multiprocessing.get_context("forkserver")
    # This file too, since each child looks for `_child` in it: its import of pytest takes a third of a second.
    imported = [*PRELOADED, *_configurations(), *_of_every_run()]
    own = (__name__.replace("conftest", name) for name in ("without_collector", "conftest", "built_before"))
    context.set_forkserver_preload([next(own), *imported, *own])
    first = context.Process(target=time.sleep, args=(0,))  # the imports take a minute on a busy machine: in no test's time limit
    first.start()
    first.join()

    def prepare(
        script: str, arguments: list[str], out: Path, folder: Path, environment: dict[str, str], *,
        err: Path | None = None, read: str = os.devnull, plan: dict[str, Any] | None = None, clean: bool = False,
    ) -> Any:  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ONEDNN_MAX_CPU_ISA": LIMIT, **environment}
        files = read, str(out), str(err or out), str(folder)
        return _Process(target=_child, args=(script, arguments, *files, environment, plan or {}, clean))

    return prepare


@pytest.fixture(scope="session")
def references() -> dict[str, Finished]:
    return {}


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory, fork_run: Callable[..., Any], references: dict[str, Finished]) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("faults")
    yield Runner(folder, fork_run, references)
    for path in folder.iterdir():  # hundreds of runs would fill a small disk
        if path.is_dir() and path.name != "reference":
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session", name="resumed_from")
def resumed_from_fixture() -> Callable[[Finished], int]:
    return resumed_from


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of this test alone."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def accelerator() -> Any:
    """One process on the CPU."""
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
