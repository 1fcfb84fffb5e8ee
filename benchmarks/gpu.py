"""What one GPU does with the toolkit, in under ten minutes: `make gpu`.

    python benchmarks/gpu.py                      # all parts, in their order, each within its time
    python benchmarks/gpu.py steps syncs          # some of them
    python benchmarks/gpu.py --tiny               # the same at toy shapes, on a CPU where there is no GPU: a rehearsal

| part | what it does |
| --- | --- |
| `tests` | the tests marked gpu |
| `exact` | `toolkit verify-resume sft --full-determinism` in float32, bf16 and fp16, with compiled layers and without |
| `recipes` | 12 steps of every recipe with its own data, in bf16, four at a time |
| `steps` | SFT (fp8 too), LoRA, DPO, classification, as Qwen3-0.6B and 1.7B: tokens/s, MFU, peak memory as a run logs them |
| `heads` | `benchmarks/heads.py` with the widths of the shapes: losses of the head by our kernels and by torch's operations |
| `syncs` | each place where a step of SFT or DPO waits for the device, found by torch's sync debug mode |
| `peers` | `benchmarks/sft.py`, `dpo.py` and `grpo.py` next to TRL's defaults and best flags at 0.6B |
| `profile` | `toolkit profile sft` at 0.6B: phases of a step, the longest operations |

Models have random weights and texts random words: neither changes how long anything takes. Every part is processes of its own;
one that fails or runs out of time is listed so, and the next begins. Output: `results.md` and `results.jsonl` in --output, with
date, versions, device and command, to be taken into benchmarks/RESULTS.md; what each process printed is in `logs/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import BEST, DEFAULTS, END, FIRST_WORD, OURS, PAD, SHAPES, SHAPES_OF, Shape, random_lengths

ROOT = Path(__file__).parents[1]
WARM_UP, STEPS, LOGGED = 6, 18, 3  # the first compile; a log line waits for the device
TINY = Shape(
    "Qwen3",
    {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "head_dim": 16},
    median_tokens=40, longest=128,
)  # fmt: skip

# For each method its recipe, flags, how many examples of `median_tokens` a step has, and the columns of a row.
METHODS: dict[str, tuple[str, list[str], int, tuple[str, ...]]] = {
    "sft": ("sft", ["--packing", "--per-device-train-batch-size", "4"], 40, ("prompt", "completion")),
    "lora": ("lora", ["--packing", "--per-device-train-batch-size", "4"], 40, ("prompt", "completion")),
    "dpo": ("dpo", ["--per-device-train-batch-size", "16"], 16, ("prompt", "chosen", "rejected")),
    "classification": ("accelerated", ["--per-device-train-batch-size", "32"], 32, ("text",)),
}  # fmt: skip

# Of `steps`: the end of a row's name, and its flags.
WAYS = {
    "": ["--torch-compile"], ", not compiled": [],
    **{f", fp8 {scaled}": ["--torch-compile", "--fp8", scaled] for scaled in ("tensorwise", "rowwise")},
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Where it runs, and when it must have ended."""

    output: Path
    tiny: bool
    ends: float  # by time.monotonic()
    names: tuple[str, ...]  # of shapes
    methods: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"tiny": TINY} if self.tiny else {name: SHAPES[name] for name in self.names}

    def run(self, name: str, command: list[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
        """A process of its own, in `logs/NAME.txt`; None where it did not end in time."""
        log = self.output / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": found}
        left = min(3 * seconds if self.tiny else seconds, self.ends - time.monotonic())  # a CPU takes longer
        if left <= 0:
            return None
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=left, check=False)
        except subprocess.TimeoutExpired as expired:
            log.write_text(str(expired.stdout or b"") + str(expired.stderr or b""))
            return None
        log.write_text(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}")
        return done

    def record(self, part: str, name: str, **values: Any) -> None:
        """A line of results.jsonl, and of the screen."""
        with open(self.output / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, "name": name, **values}) + "\n")
        print(f"{part:8} {name:28}", "  ".join(f"{key} {value}" for key, value in values.items()), flush=True)


def tests(bench: Bench) -> None:
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    processes = str(max(1, min(6, (os.cpu_count() or 1) // 2)))
    # Without the project's -q: a line for each test, so that one cut off by time has said which failed.
    flags = ["-o", "addopts=--import-mode=importlib", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-n", processes]
    done = bench.run("tests", [sys.executable, "-m", "pytest", *files, *flags], 240)
    bench.record("tests", "pytest -m gpu", result=_last_line(done))


def exact(bench: Bench) -> None:
    ways = {"float32": ["--no-bf16"], "bf16": ["--bf16"], "bf16, compiled": ["--bf16", "--torch-compile"], "fp16": ["--fp16"]}
    if not torch.cuda.is_available():
        del ways["fp16"]
    for name, flags in ways.items():
        command = [*_toolkit("verify-resume", "sft"), "--full-determinism", "--hidden-size", "64", "--num-samples", "0", *flags]
        done = bench.run(f"exact-{name.replace(', ', '-')}", command, 100)
        bench.record("exact", name, result=_last_line(done), code=None if done is None else done.returncode)


def recipes(bench: Bench) -> None:
    def train(recipe: Path) -> None:
        flags = ["--max-steps", "12", "--output-dir", str(bench.output / "runs" / recipe.stem), "--overwrite-output-dir"]
        flags += ["--bf16"] if recipe.stem != "basic" else []
        began = time.monotonic()
        done = bench.run(f"recipe-{recipe.stem}", [sys.executable, str(recipe), *flags], 120)
        bench.record("recipes", recipe.stem, result=_end_of(done), seconds=round(time.monotonic() - began, 1))

    with ThreadPoolExecutor(8 if (os.cpu_count() or 1) >= 16 else 4) as several:
        list(several.map(train, sorted((ROOT / "recipes").glob("*.py"))))


def steps(bench: Bench) -> None:
    for shape_name, shape in bench.shapes.items():
        model = _make_model(bench.output / "models" / shape_name, shape)
        for method in bench.methods:
            for way in [", not compiled"] if bench.tiny else WAYS if method == "sft" else [""]:
                name = f"{method} {shape_name}{way}"
                run = bench.output / "runs" / name.replace(" ", "-").replace(",", "")
                flags = _flags(bench, method, shape, model, run) + WAYS[way]
                done = bench.run(f"steps-{run.name}", [sys.executable, _recipe(method), *flags], 90)
                if done is None or done.returncode:
                    bench.record("steps", name, result=_end_of(done))
                else:
                    bench.record("steps", name, **_logged(run))


def heads(bench: Bench) -> None:
    for name, shape in bench.shapes.items():
        flags = ["--rows", "64" if bench.tiny else "3500", "--device", "cuda" if torch.cuda.is_available() else "cpu"]
        for flag, setting in {"--vocabulary": "vocab_size", "--width": "hidden_size"}.items():
            flags += [flag, str(shape.settings[setting])]
        done = bench.run(f"heads-{name}", [sys.executable, "benchmarks/heads.py", *flags], 60)
        bench.record("heads", name, result=_end_of(done), table="" if done is None else done.stdout)


def syncs(bench: Bench) -> None:
    """Places where a step waits: sync debug mode names each; none are wanted once the first steps are done."""
    if not torch.cuda.is_available():
        bench.record("syncs", "all", result="needs a GPU")
        return
    name, shape = next(iter(bench.shapes.items()))
    model = _make_model(bench.output / "models" / name, shape)
    for method in ("sft", "dpo"):
        flags = _flags(bench, method, shape, model, bench.output / "runs" / f"syncs-{method}")
        command = [sys.executable, "-m", "benchmarks.gpu_syncs", _recipe(method), str(WARM_UP), *flags]
        done = bench.run(f"syncs-{method}", command, 90)
        lines = [] if done is None else done.stdout.splitlines()
        places = [line.removeprefix("SYNC ") for line in lines if line.startswith("SYNC ")]
        bench.record("syncs", method, result=_end_of(done), places=places)


def peers(bench: Bench) -> None:
    if bench.tiny:
        bench.record("peers", "all", result="not rehearsed: python benchmarks/sft.py runs on a CPU too")
        return
    once = ["--pairs", "1", "--examples", "256", "--only", "qwen3-0.6b:1:1", "--sides", OURS, DEFAULTS, BEST]
    for script, flags in (("sft", once), ("dpo", once), ("grpo", ["--rounds", "1", "--groups", "8", "--shapes", "qwen3-0.6b"])):
        command = [sys.executable, f"benchmarks/{script}.py", "--device", "cuda", *flags]
        done = bench.run(f"peers-{script}", command, 180)
        table = "" if done is None else "\n".join(line for line in done.stdout.splitlines() if line.startswith("|"))
        bench.record("peers", script, result=_end_of(done), table=table)


def profile(bench: Bench) -> None:
    name, shape = next(iter(bench.shapes.items()))
    flags = _flags(bench, "sft", shape, _make_model(bench.output / "models" / name, shape), bench.output / "runs/profile")
    flags += [] if bench.tiny else ["--torch-compile"]
    done = bench.run("profile", [*_toolkit("profile", "sft"), *flags], 90)
    bench.record("profile", f"sft {name}", result=_end_of(done), printed="" if done is None else done.stdout)


PARTS: dict[str, Callable[[Bench], None]] = {
    each.__name__: each for each in (tests, exact, steps, heads, syncs, recipes, peers, profile)
}  # fmt: skip


def _flags(bench: Bench, method: str, shape: Shape, model: Path, run: Path) -> list[str]:
    _, own, examples, columns = METHODS[method]
    data = _make_rows(bench.output / "data" / f"{model.name}-{method}.jsonl", shape, columns, (WARM_UP + STEPS + 4) * examples)
    flags = ["--model", str(model), "--dataset", str(data), "--max-length", str(shape.longest), "--optim", "adamw_torch"]
    flags += ["--max-steps", str(WARM_UP + STEPS), "--logging-steps", str(LOGGED)]
    flags += ["--save-strategy", "no", "--eval-strategy", "no"]
    flags += ["--no-eval-on-start"] if method in ("sft", "lora", "dpo") else []
    flags += ["--num-samples", "0"] if method in ("sft", "lora") else []
    return [*flags, *own, "--bf16", "--output-dir", str(run), "--overwrite-output-dir"]


def _make_model(folder: Path, shape: Shape) -> Path:
    if (folder / "tokenizer_config.json").exists():  # written last
        return folder
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(shape.config()).save_pretrained(folder)
    words = {"<end>": END, "<pad>": PAD} | {f"w{i}": i for i in range(FIRST_WORD, shape.settings["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    return folder


def _make_rows(path: Path, shape: Shape, columns: tuple[str, ...], count: int) -> Path:
    """Texts of random words: 30 % prompt where there is one."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)

    def text(tokens: float) -> str:
        return " ".join(f"w{i}" for i in random.integers(FIRST_WORD, shape.settings["vocab_size"], size=max(4, int(tokens))))

    with open(path, "w", encoding="utf-8") as file:
        for length in random_lengths(shape, count, random).tolist():
            length = min(length, shape.longest - 8)
            parts = {"prompt": 0.3, "completion": 0.7, "chosen": 0.5, "rejected": 0.5, "text": 1.0}
            row = {column: text(parts[column] * length) for column in columns}
            file.write(json.dumps(row if columns != ("text",) else {**row, "label": int(random.integers(4))}) + "\n")
    return path


def _logged(run: Path) -> dict[str, Any]:
    """Medians over the lines behind the warm-up, as the run logged them."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if "loss" in line][WARM_UP // LOGGED :]
    names = ("examples_per_second", "tokens_per_second", "mfu", "loss", "grad_norm")
    found = {name: statistics.median(line[name] for line in timed) for name in names if all(name in line for line in timed)}
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    found["peak_memory_gb"] = summary["peak_memory_gb"]
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _recipe(method: str) -> str:
    return f"recipes/{METHODS[method][0]}.py"


def _toolkit(*words: str) -> list[str]:
    return [sys.executable, "-m", "toolkit", *words]


def _last_line(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return "ran out of time"
    return next((line.strip() for line in reversed((done.stdout + done.stderr).splitlines()) if line.strip()), "no output")


def _end_of(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return "ran out of time"
    return "done" if done.returncode == 0 else f"ended with {done.returncode}: {_last_line(done)[:300]}"


def _report(output: Path) -> Iterator[str]:
    """results.jsonl as Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    yield f"`{command}`, {date.today()}; {device}; Python {platform.python_version()}, {packages}."
    records = [json.loads(line) for line in (output / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for part in PARTS:
        rows = [{key: value for key, value in each.items() if key != "part"} for each in records if each["part"] == part]
        columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("table", "printed")))
        if not rows:
            continue
        yield f"\n{part}\n"
        yield f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"
        for row in rows:
            yield f"| {' | '.join(str(row.get(column, '')) for column in columns)} |"
        for row in rows:
            yield from (f"\n{row[key]}" for key in ("table", "printed") if row.get(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them where none is named")
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES_OF["cuda"], default=SHAPES_OF["cuda"])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS], help="of `steps`")
    parser.add_argument("--minutes", type=float, default=9.5, help="after which no part begins and a running one is ended")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/gpu")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: is none of {', '.join(PARTS)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here. A rehearsal at toy shapes: --tiny")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.jsonl").write_text("")
    ends = time.monotonic() + 60 * options.minutes
    bench = Bench(options.output.resolve(), options.tiny, ends, tuple(options.shapes), tuple(options.methods))
    for name in options.parts or PARTS:
        PARTS[name](bench)
    text = "\n".join(_report(bench.output)) + "\n"
    (bench.output / "results.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
