"""Two trainers side by side: the same model, rows and steps, in turn, each run in a process of its own.

`benchmarks/sft.py`, `lora.py`, `pretrain.py`, `dpo.py`, `kto.py`, `reward.py` and `gkd.py` say what the sides do; here is what
they share. Models have random weights and rows random tokens: neither changes how long anything takes. That the work is the
same, --check shows: the loss of one step of the same rows in float32, and the norm of its gradient (of which torch's sum over
a large table on a CPU misses up to 5e-4; ours is taken in rows). Time is CPU time, which other processes on the machine
disturb less than the clock on the wall; with several --threads, which use CPU time while they wait, and on a GPU (--device
cuda) it is the time that passes, for which nothing else may run. What is counted is training, and for preferences the
reference model's work: not imports, not loading, not tokenizing, not the making of a trainer. All of these are in the time to
the first step, which begins with the process. Under our seconds stands their floor (`floor.py`): how much of them no other way
to train could save.

Ours computes in the precision that a recipe takes on this machine, TRL in its own default, bfloat16, and with its best flags in
float32 where a CPU is not faster in bfloat16. The table names each; `SIDE, float32` and `SIDE, bfloat16` choose one.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from flag_search import Flags, best_flags, named, settings_of

BEGAN = time.perf_counter()
END, PAD, FIRST_WORD = 0, 1, 2
OURS, DEFAULTS, BEST = "ours", "TRL, its defaults", "TRL, best flags"
ITS_FLOOR = ", its floor"  # after a side's name: what floor.py replays of it
PRECISIONS = {"float32": False, "bfloat16": True}  # after a side's name, and whether it is the setting bf16


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and how long the texts for it are."""

    architecture: str
    settings: dict[str, Any]
    median_tokens: int
    longest: int

    def config(self) -> Any:
        import transformers

        made: Any = getattr(transformers, f"{self.architecture}Config")
        # room for packed rows of several texts
        return made(**self.settings, max_position_embeddings=8 * self.longest, eos_token_id=END, pad_token_id=PAD,
                    bos_token_id=None, tie_word_embeddings=True)  # fmt: skip


def _qwen3(width: int, intermediate: int) -> Shape:
    settings = {"vocab_size": 151_936, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = {"hidden_size": width, "intermediate_size": intermediate, "head_dim": 128}
    return Shape("Qwen3", {**settings, **sizes}, median_tokens=450, longest=4096)


def _llama(vocabulary: int, width: int, layers: int, intermediate: int) -> Shape:
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": intermediate}
    return Shape("Llama", {**sizes, "num_attention_heads": width // 64}, median_tokens=150, longest=512)


SHAPES = {
    "head-heavy": _llama(32_768, 384, 6, 1024), "body-heavy": _llama(4_096, 512, 12, 1408),
    "qwen3-0.6b": _qwen3(1024, 3072), "qwen3-1.7b": _qwen3(2048, 6144),
}  # fmt: skip
SHAPES_OF = {"cpu": ("head-heavy", "body-heavy"), "cuda": ("qwen3-0.6b", "qwen3-1.7b")}
UNTIMED_STEPS = {"cpu": 0, "cuda": 4}  # those that compile
PROMPT_SHARES = {"1:1": 1 / 2, "4:1": 4 / 5, "0:1": 0.0}  # prompt : answer


@dataclass
class Stopwatch:
    """Seconds of the timed steps, of what is done once before them, and up to the end of the process's first step."""

    device: str
    threads: int = 1
    warm_up: int = 0  # steps before the timing begins, such as those that compile
    seconds: float = 0.0
    before: float = 0.0
    first_step: float = 0.0
    steps: int = 0
    logged: dict[str, float] = field(default_factory=dict)  # of the first step, where a trainer logs it
    recorder: Any = None  # of floor.py
    _since: float = 0.0

    def now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        if self.device == "cuda" or self.threads > 1:
            return time.perf_counter() - BEGAN
        used = os.times()  # of worker processes as well, once they have ended
        return used.user + used.system + used.children_user + used.children_system

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._since = self.now()
        with self.recorder or contextlib.nullcontext():
            yield
        if self.steps:
            self.seconds += self.now() - self._since
        else:
            self.before += self.now() - self._since

    def step_done(self) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first_step = self.now()
        if self.steps == self.warm_up:
            self.seconds, self._since = 0.0, self.now()
            if self.recorder:
                self.recorder.calls.clear()
        if self.recorder:
            self.recorder.step_done(self.steps)

    def share(self) -> float:
        """Of all steps those that were timed."""
        if self.steps <= self.warm_up:
            raise SystemExit(f"{self.steps} steps, of which the first {self.warm_up} are not timed: take more --examples")
        return (self.steps - self.warm_up) / self.steps

    def total(self) -> float:
        """Seconds of the timed steps, and their share of what was done before all of them."""
        return self.seconds + self.share() * self.before


@dataclass(frozen=True)
class Task:
    """What one run works on: a folder with `model`, `data` and room for the output."""

    folder: Path
    shape: Shape
    device: str
    batch: int  # examples in a step
    watch: Stopwatch
    is_check: bool = False  # one step of all rows

    def rows(self) -> Any:
        from datasets import load_from_disk

        return load_from_disk(str(self.folder / "data"))

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def teacher(self) -> str:
        return str(self.folder / "teacher")

    @property
    def output(self) -> str:
        return str(self.folder / "output")


Side = Callable[..., dict[str, float]]  # of a task, and settings for a trainer
Results = dict[str, list[dict[str, float]]]  # by side, of its runs
MakeRows = Callable[[Shape, float, int, np.random.Generator], dict[str, list[Any]]]


@dataclass(frozen=True)
class Comparison:
    """A script's part: our side, TRL's with its flags, how rows are made, and which columns matter."""

    script: str
    ours: Side
    peer: Side
    flags: Flags
    best: dict[str, str]  # flags to take, by device
    make_rows: MakeRows
    counted: tuple[str, ...]  # what is shown per second; the first one is compared
    default_examples: dict[str, int]  # rows, by device
    default_batch: dict[str, int]  # of them in a step, by device
    ours_too: dict[str, Side] = field(default_factory=dict)  # shown below ours
    others: dict[str, Side] = field(default_factory=dict)  # that are run where --sides names them
    teacher_of: Callable[[Shape], Shape] | None = None  # of a distillation
    ratios: tuple[str, ...] = ("1:1", "4:1")

    def usual(self, with_floor: bool, float32: bool) -> list[str]:
        """The sides of a table, in its order."""
        names = [OURS, *([OURS + ITS_FLOOR] if with_floor else []), *self.ours_too, DEFAULTS, BEST]
        return [f"{name}, float32" for name in names] if float32 else names

    def side(self, name: str, device: str) -> Side:
        """One by its name: `TRL, a + b` is TRL with two of the flags, `SIDE, float32` a side in that precision."""
        before, _, last = name.rpartition(", ")
        plain, precision = (before, {"bf16": PRECISIONS[last]}) if last in PRECISIONS else (name, {})
        if not precision and plain.endswith("best flags") and not _is_faster_in_bf16(device):
            precision = {"bf16": False}
        if plain in (own := {OURS: self.ours, **self.ours_too, **self.others, DEFAULTS: self.peer, "TRL": self.peer}):
            return partial(own[plain], **precision)
        flags = self.best[device] if plain == BEST else plain.removeprefix("TRL, ")
        if not set(flags.split(" + ")) <= self.flags.keys():
            known = ", ".join([*self.usual(device == "cpu", False), *self.others, *(f"TRL, {each}" for each in self.flags)])
            sys.exit(f"--sides {name!r}: is none of {known}")
        return partial(self.peer, **{**settings_of(flags, self.flags), **precision})


def _is_faster_in_bf16(device: str) -> bool:
    import torch

    from toolkit.system.devices import is_faster_in_bf16

    return is_faster_in_bf16(torch.device(device))


def random_lengths(shape: Shape, count: int, random_numbers: np.random.Generator) -> np.ndarray:
    """Tokens of texts, lognormal, at least 10."""
    drawn = np.exp(random_numbers.normal(np.log(shape.median_tokens), 0.6, size=count))
    return np.clip(drawn.round(), 10, shape.longest).astype(int)


def random_words(shape: Shape, count: int, random_numbers: np.random.Generator) -> list[int]:
    return random_numbers.integers(FIRST_WORD, shape.settings["vocab_size"], size=count).tolist()


def first_step_callback(watch: Stopwatch) -> Any:
    """Tells the stopwatch of each of a Trainer's steps, and what it logs of the first."""
    from transformers import TrainerCallback

    class StepDone(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step_done()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            watch.logged = watch.logged or logs

    return StepDone()


def compare(comparison: Comparison, description: str | None) -> None:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side; medians are shown")
    parser.add_argument("--examples", type=int, help="rows to train on, once")
    parser.add_argument("--batch", type=int, help="examples in a step")
    parser.add_argument("--only", metavar="SHAPE:RATIO", help="one cell, such as head-heavy:1:1")
    named_ones = ", ".join([*comparison.usual(True, False), *comparison.others])
    sides_help = f"{named_ones}; two flags, as in `TRL, a + b`; SIDE{ITS_FLOOR}; SIDE, {' or '.join(PRECISIONS)}"
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help=sides_help)
    parser.add_argument("--flags", action="store_true", help="TRL's defaults, and next to them each of its flags alone")
    parser.add_argument("--search", action="store_true", help="finds TRL's best flags, one after the other")
    parser.add_argument("--check", action="store_true", help="only compare the loss and the gradient's norm of one step")
    parser.add_argument("--float32", action="store_true", help="all sides in float32")
    parser.add_argument("--device", choices=[*SHAPES_OF], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="processes; what is shown is rank 0's, but for the tokens of all")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # one run, in a process of its own
    settings = parser.parse_args()
    settings.examples = settings.examples or comparison.default_examples[settings.device]
    settings.batch = settings.batch or comparison.default_batch[settings.device]
    if settings.check:
        settings.examples, settings.pairs, settings.float32 = settings.batch, 1, True
    if settings.folder:
        _run_one(comparison, settings.sides[0], settings)
        return
    alone = [DEFAULTS, *(f"TRL, {name}" for name in comparison.flags)]
    usual = comparison.usual(settings.device == "cpu" and not settings.check, settings.float32)
    names = settings.sides or (alone if settings.flags else usual)
    for name in names:
        comparison.side(_with_floor(name)[0], settings.device)
    cells = [f"{shape}:{ratio}" for shape in SHAPES_OF[settings.device] for ratio in comparison.ratios]
    for cell in [settings.only] if settings.only else cells:
        results = _search(comparison, cell, settings) if settings.search else _measure(comparison, cell, names, settings)
        if settings.check:
            continue
        print(f"\n{_table(comparison, cell, results, settings)}", flush=True)
    print(f"\n{circumstances(settings)}")


def _measure(comparison: Comparison, cell: str, names: list[str], settings: Any) -> Results:
    """All runs of a cell, in turn: each round in the opposite order of the one before."""
    results: Results = {name: [] for name in names}
    with runs(comparison, cell, settings) as measured:
        for number in range(settings.pairs):
            for name in names if number % 2 == 0 else reversed(names):
                results[name] += measured(name)
    return results


def _search(comparison: Comparison, cell: str, settings: Any) -> Results:
    """What was tried to find TRL's best flags; the best are printed."""
    results: Results = {}
    with runs(comparison, cell, settings) as measured:

        def measure(names: tuple[str, ...]) -> float | None:
            side = f"TRL, {named(names)}" if names else DEFAULTS
            results[side] = [run for _ in range(settings.pairs) for run in measured(side)]
            return statistics.median(run["seconds"] for run in results[side]) if results[side] else None

        found = best_flags(comparison.flags, measure)
    print(f"\n{cell}: TRL's best flags are {named(found) or 'its defaults'}", flush=True)
    return results


@contextlib.contextmanager
def runs(comparison: Comparison, cell: str, settings: Any) -> Iterator[Callable[[str], list[dict[str, float]]]]:
    """A function that runs a side in a process of its own; what was measured, an empty list where it failed."""
    with tempfile.TemporaryDirectory() as temporary:
        shared, own = Path(temporary, "shared"), Path(temporary, "run")
        _prepare(comparison, cell, shared, settings)

        def run(name: str) -> list[dict[str, float]]:
            shutil.copytree(shared, own)  # of its own, so that no side finds what another one has cached next to the rows
            measured = _in_a_process(comparison.script, cell, name, own, settings)
            shutil.rmtree(own)
            shown = {key: round(value, 6 if settings.check else 2) for key, value in measured.items()}
            print(f"{cell}  {name}  {shown or 'failed'}", file=sys.stderr, flush=True)
            return [measured] if measured else []

        yield run


def _prepare(comparison: Comparison, cell: str, folder: Path, settings: Any) -> None:
    """The model, a tokenizer that has little to do, and the rows."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    shape, share = _cell(cell)
    torch.manual_seed(0)
    with torch.device(settings.device):
        AutoModelForCausalLM.from_config(shape.config()).save_pretrained(folder / "model")
        if comparison.teacher_of is not None:
            AutoModelForCausalLM.from_config(comparison.teacher_of(shape).config()).save_pretrained(folder / "teacher")
    words = {"<end>": END, "<pad>": PAD} | {f"w{i}": i for i in range(FIRST_WORD, shape.settings["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    for saved in folder.iterdir():
        loaded.save_pretrained(saved)
    rows = comparison.make_rows(shape, share, settings.examples, np.random.default_rng(0))
    Dataset.from_dict(rows).save_to_disk(str(folder / "data"))


def _cell(cell: str) -> tuple[Shape, float]:
    """A shape, changed as in `body-heavy,num_hidden_layers=24,median_tokens=50:1:1`, and the prompt's share."""
    name, _, ratio = cell.partition(":")
    name, *changes = name.split(",")
    if name not in SHAPES or ratio not in PROMPT_SHARES:
        sys.exit(f"--only {cell}: is SHAPE:RATIO of {', '.join(SHAPES)} and {', '.join(PROMPT_SHARES)}")
    numbers = {key: int(number) for key, number in (change.split("=") for change in changes)}
    texts = {key: numbers.pop(key) for key in ("median_tokens", "longest") if key in numbers}
    return replace(SHAPES[name], settings={**SHAPES[name].settings, **numbers}, **texts), PROMPT_SHARES[ratio]


def _in_a_process(script: str, cell: str, name: str, folder: Path, settings: Any) -> dict[str, float]:
    start = [sys.executable]
    if settings.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
    command = [*start, script, "--folder", str(folder), "--only", cell, "--sides", name, "--device", settings.device]
    command += ["--batch", str(settings.batch), "--threads", str(settings.threads), *(["--check"] if settings.check else [])]
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reason = [line for line in done.stderr.splitlines() if line.strip()] or ["?"]
    print(f"{name} failed: {reason[-1][:300]}", file=sys.stderr, flush=True)
    return {}


def _with_floor(name: str) -> tuple[str, bool]:
    """The side's name alone, and whether its floor is meant."""
    return name.replace(ITS_FLOOR, ""), ITS_FLOOR in name


def _run_one(comparison: Comparison, name: str, settings: Any) -> None:
    """One run; what it took goes out as the last line."""
    watch = Stopwatch(settings.device, settings.threads, UNTIMED_STEPS[settings.device])
    task = Task(settings.folder, _cell(settings.only)[0], settings.device, settings.batch, watch, settings.check)
    plain, its_floor = _with_floor(name)
    side = comparison.side(plain, settings.device)
    if its_floor:
        from floor import Recorder

        recorder = watch.recorder = Recorder()
        print(f"\n{json.dumps({**side(task), 'seconds': recorder.seconds(), 'bits': _bits(), **recorder.held})}")
        return
    if settings.check:
        side(task)
        logged = watch.logged or json.loads(Path(task.output, "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
        print(f"\n{json.dumps({name: logged[name] for name in ('loss', 'grad_norm')} | {'steps': watch.steps})}")
        return
    measured = {**side(task), "seconds": task.watch.total(), "first step": task.watch.first_step, "bits": _bits()}
    if os.environ.get("RANK", "0") != "0":
        return
    measured["peak GB"] = peak_memory()
    if settings.device == "cuda":
        import torch

        measured["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    print(f"\n{json.dumps(measured)}")


def _bits() -> float:
    """Of the numbers that this process's Accelerator, ours or Trainer's, multiplies."""
    from accelerate.state import AcceleratorState

    return 32.0 if AcceleratorState().mixed_precision == "no" else 16.0


def peak_memory() -> float:
    """GB that this process held at most. `ru_maxrss` begins with what the process held that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return float(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9


def _table(comparison: Comparison, cell: str, results: Results, settings: Any) -> str:
    """Medians as Markdown, and how they compare with ours, or with TRL's defaults where flags are tried."""
    rates = [f"{name} / s" for name in comparison.counted]
    for runs in results.values():
        for run in runs:
            run.update({f"{name} / s": run[name] / run["seconds"] for name in comparison.counted})
    medians = {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in results.items() if runs
    }
    columns = [*rates, "seconds", "peak GB", "first step"]
    sometimes = ("weights GB", "gradients GB", "optimizer GB", "MFU %", "teacher s", "first loss")
    columns += [name for name in sometimes if any(name in measured for measured in medians.values())]
    lines = [f"| {cell} | {' | '.join(columns)} | runs |", "| --- " * (len(columns) + 2) + "|"]
    for side, runs in results.items():
        shown = [_number(medians[side].get(name)) for name in columns] if runs else ["failed", *[""] * (len(columns) - 1)]
        precision = ("bfloat16" if runs[0]["bits"] == 16 else "float32") if runs else "?"
        lines.append(f"| {side} ({precision}) | {' | '.join(shown)} | {len(runs)} |")
    ours = next((side for side in medians if side.startswith(OURS)), DEFAULTS)
    base = DEFAULTS if settings.flags or settings.search else ours
    for side, measured in medians.items():
        if side == base or base not in medians:
            continue
        name = f"{base} / {side}" if base == ours else f"{side} / {base}"
        over, under = (medians[base], measured) if base == ours else (measured, medians[base])
        ratios = [f"{over[column] / under[column]:.2f}" if under.get(column) and column in over else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(ratios)} | |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def circumstances(settings: Any) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "accelerate"))
    seconds = "CPU seconds" if settings.device == "cpu" and settings.threads == 1 else "seconds that pass"
    return (
        f"`python {' '.join(sys.argv)}`, {date.today()}; {settings.examples} rows, {settings.batch} in a step; s: {seconds}. "
        f"Python {platform.python_version()}, {packages}; {settings.threads} thread(s), {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}."
    )


def trl_arguments(task: Task, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of every trainer of TRL here: where and how long; all else is its default."""
    if "per_device_train_batch_size" in settings:  # a step is of as many rows, however they are cut
        accumulated = max(1, task.batch // settings["per_device_train_batch_size"])
        settings = {"gradient_accumulation_steps": accumulated, **settings}
    return {
        "output_dir": task.output, "per_device_train_batch_size": task.batch, "model_init_kwargs": {"dtype": "float32"},
        "num_train_epochs": 1, "max_length": task.shape.longest, "save_strategy": "no",
        "report_to": "none", "use_cpu": task.device == "cpu", **({"logging_steps": 1} if task.is_check else {}), **settings,
    }  # fmt: skip


def train_with_trl(task: Task, trainer: Any, arguments: Any, rows: Any, settings: dict[str, Any], **more: Any) -> Any:
    """Makes a trainer of TRL's on the task's model and these rows, and times its training; gives it back."""
    from transformers import AutoTokenizer

    made = trainer(
        model=task.model, args=arguments(**trl_arguments(task, settings)), train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(task.model), callbacks=[first_step_callback(task.watch)], **more,
    )  # fmt: skip
    with task.watch.running():
        made.train()
    return made


def on_tokenized_rows(trainer: Any, watch: Stopwatch) -> Any:
    """A preference trainer of TRL's that takes rows which are tokenized already, and whose reference's pass is timed too."""

    class OnTokenizedRows(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, *args: Any) -> Any:
            with watch.running():
                return super()._precompute_ref_logps(*args)

    return OnTokenizedRows


def in_halves(ours: Side, task: Task, **settings: Any) -> dict[str, float]:
    """Our side with half of a batch in a micro-batch."""
    return ours(task, per_device_train_batch_size=task.batch // 2, gradient_accumulation_steps=2, **settings)


def our_settings(task: Task) -> dict[str, Any]:
    """The same of ours."""
    gpu = task.device == "cuda"
    return {
        "model": task.model, "output_dir": task.output, "lr_scheduler_type": "linear", "save_strategy": "no",
        "eval_strategy": "no", "use_cpu": not gpu, "torch_compile": gpu,
    }  # fmt: skip
