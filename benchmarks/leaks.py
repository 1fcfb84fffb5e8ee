"""Whether a run of thousands of steps keeps what it should give back: its private memory and its open files, step by step.

    python benchmarks/leaks.py sft dpo --steps 5000

Each recipe trains a tiny model in a process of its own, logs every 10 steps, evaluates and saves every 100. /proc is read while
it trains (Linux): `Private_Dirty` of smaps_rollup, and the number of files in fd. `Private_Clean`, pages of libraries, grows
when another process that has them too ends. Compared are the 250 steps after step 500 and the last 250: their medians, and the
least of each, which is what the run holds. The rest is free in the heap, as much as chance has it, until the next save gives it
back. Ends with 1 where what is held grew by 1 % or more, or the number of open files is another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, WINDOW, MOST = 500, 250, 0.01
SHAPE = "--hidden-size 16 --num-hidden-layers 1 --num-attention-heads 2 --intermediate-size 16"
DATA = "--max-train-examples 64 --max-eval-examples 8 --per-device-train-batch-size 2"
RUN = "--logging-steps 10 --eval-strategy steps --eval-steps 100 --save-strategy steps --save-steps 100 --use-cpu"
ONCE = "--gradient-accumulation-steps 1"
SAMPLES = "--num-samples 1 --sample-max-new-tokens 4"
FLAGS = {
    "accelerated": f"--max-length 48 {ONCE}",
    "sft": f"--max-length 256 {ONCE} {SAMPLES}",
    "pretrain": f"--max-length 48 {ONCE} {SAMPLES}",
    "dpo": f"--model nano-llama --max-length 256 {ONCE} --num-samples 0",
    "grpo": f"--model nano-llama --max-completion-length 8 --num-generations 2 {ONCE} --num-samples 0",
    "ppo": f"--model nano-llama --max-completion-length 8 --num-generations 2 {ONCE} --num-samples 0",
    "kto": f"--model nano-llama --max-length 256 {ONCE} --num-samples 0",
    "reward": f"--model nano-llama --max-length 256 {ONCE}",
    "lora": f"--model nano-llama --max-length 256 {ONCE} {SAMPLES}",
    "distill": f"--max-length 48 {ONCE} {SAMPLES}",
    "diffusion": f"--max-length 48 {ONCE} {SAMPLES}",
    "masked_lm": f"--max-length 48 {ONCE}",
    "embedding": f"--max-length 48 {ONCE}",
    "reranker": f"--max-length 48 {ONCE}",
    "multiple_choice": f"--max-length 48 {ONCE}",
    "token_classification": f"--max-length 48 {ONCE}",
    "question_answering": f"--max-length 64 --doc-stride 16 {ONCE} --num-samples 1",
    "seq2seq": f"--max-length 48 --max-target-length 8 {ONCE} --num-samples 1",
    "distill_classifier": f"--max-length 48 {ONCE}",
}


class Sample(NamedTuple):
    step: int
    private: float  # MB
    files: int


def watched(recipe: str, steps: int, folder: Path) -> tuple[list[Sample], float]:
    """Samples of a run of `steps` steps, and its CPU seconds."""
    words = f"{SHAPE} {DATA} {RUN} {FLAGS.get(recipe, '')} --max-steps {steps} --output-dir {folder / 'run'}".split()
    log = folder / "log.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, ROOT / "recipes" / f"{recipe}.py", *words], stdout=out, stderr=out, env=environment, cwd=folder
        )
        samples = []
        while process.poll() is None:
            try:
                step = last_step(folder / "run" / "metrics.jsonl")
                samples += [Sample(step, private_memory(process.pid), len(os.listdir(f"/proc/{process.pid}/fd")))]
            except (OSError, ValueError, IndexError):
                pass  # nothing is logged yet, or it has just ended
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{recipe} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    usage = os.times()
    return samples, usage.children_user + usage.children_system


def last_step(metrics: Path) -> int:
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4000))
        return int(json.loads(file.read().splitlines()[-1])["step"])


def private_memory(pid: int) -> float:
    """MB that a process has written, and no other process has too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(FLAGS))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--samples", type=Path, help="A file for all samples, a line each: recipe, step, MB, files.")
    asked = parser.parse_args()
    failed, before = False, 0.0
    print("| recipe | steps | private MB at 500 | at the end | growth | least at 500 | at the end | growth | files | CPU s |")
    print("| --- " * 10 + "|", flush=True)
    for recipe in asked.recipes:
        with tempfile.TemporaryDirectory(prefix="leaks-") as folder:
            samples, seconds = watched(recipe, asked.steps, Path(folder))
        if asked.samples:
            with asked.samples.open("a") as file:
                file.writelines(f"{recipe} {each.step} {each.private:.2f} {each.files}\n" for each in samples)
        first = [each for each in samples if WARM_UP < each.step <= WARM_UP + WINDOW]
        last = [each for each in samples if asked.steps - WINDOW < each.step < asked.steps]  # it closes its files at the end
        of_both = [[each.private for each in window] for window in (first, last)]
        medians, least = ([take(each) for each in of_both] for take in (statistics.median, min))
        files = [round(statistics.median(each.files for each in window)) for window in (first, last)]
        failed |= least[1] / least[0] - 1 >= MOST or files[0] != files[1]
        shown = " | ".join(f"{begin:.1f} | {end:.1f} | {end / begin - 1:+.2%}" for begin, end in (medians, least))
        print(f"| {recipe} | {asked.steps:,} | {shown} | {files[0]}, {files[1]} | {seconds - before:.0f} |", flush=True)
        before = seconds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
