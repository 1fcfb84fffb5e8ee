"""GRPO next to TRL's GRPOTrainer: CPU seconds of sampling and of learning from it, and the memory of each side.

    python benchmarks/grpo.py

The same model with random weights, the same prompts of random tokens, the same reward, one update a step, float32; each run in
a process of its own, both sides in turn. Completions have the same length on both sides, since nothing ends them. Sampling is
everything up to the advantages (log-probabilities that a side computes before the update are in it), learning is the rest of a
step. Time is CPU time of one thread; the first step is left out. With `--device cuda` it is the time that passes, with a
model that a GPU is for, in bfloat16 over float32 weights.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import END, FIRST_WORD, PAD, SHAPES, SHAPES_OF, peak_memory

RECIPE = Path(__file__).resolve().parents[1] / "recipes/grpo.py"
STEPS = 3
OURS, DEFAULTS, BEST = "ours", "TRL, its defaults", "TRL, best flags"


@dataclass(frozen=True)
class Work:
    """What a step has on a kind of device. The micro-batch is that of the peer's best flags; ours is at least half a group."""

    device: str
    completions: int
    prompt_tokens: int
    new_tokens: int
    micro_batch: int

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    def memory(self) -> float:
        if self.device == "cpu":
            return peak_memory()
        import torch

        return torch.cuda.max_memory_allocated() / 1e9


WORK = {"cpu": Work("cpu", 32, 256, 32, 4), "cuda": Work("cuda", 64, 256, 256, 16)}


class Stopwatch:
    """Seconds of each step, and those of sampling in it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sampling: list[float] = []
        self.ends = [work.now()]

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def sample(*arguments: Any, **keywords: Any) -> Any:
            began = self.work.now()
            found = function(*arguments, **keywords)
            self.sampling.append(self.work.now() - began)
            return found

        return sample

    def measured(self) -> dict[str, float]:
        steps = np.diff(self.ends)[1:]
        sampling = np.array(self.sampling[1 : len(steps) + 1])
        learning = float(np.median(steps - sampling))
        return {"sampling": float(np.median(sampling)), "learning": learning, "GB": self.work.memory()}


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def ours(folder: Path, group: int, work: Work) -> dict[str, float]:
    import toolkit as tk
    from toolkit.training.run import Run

    watch = Stopwatch(work)
    tk.sample_rollouts = watch.timed(tk.sample_rollouts)
    tk.load_rewards = lambda *_: [tk.Reward("length", lambda prompts, completions, **columns: reward(completions))]
    before = Run.log

    def log(run: Run, metrics: Any) -> None:
        before(run, metrics)
        watch.ends.append(work.now())

    Run.log = log  # type: ignore[method-assign]
    recipe = runpy.run_path(str(RECIPE), run_name="recipe")
    size = max(work.micro_batch, group // 2)
    recipe["main"](recipe["Config"](
        model=str(folder / "model"), dataset=str(folder / "rows.jsonl"), output_dir=str(folder / "output"),
        use_cpu=work.device == "cpu", bf16=work.device != "cpu",
        per_device_train_batch_size=size, gradient_accumulation_steps=work.completions // size,
        num_generations=group, max_completion_length=work.new_tokens, max_steps=STEPS,
        eval_strategy="no", eval_on_start=False, save_strategy="no", optim="adamw_torch", learning_rate=1e-6,
        scale_rewards="group",
    ))  # fmt: skip
    return watch.measured()


def trl(folder: Path, group: int, work: Work, **flags: Any) -> dict[str, float]:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    watch = Stopwatch(work)

    class StepDone(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ends.append(work.now())

    settings = {
        "per_device_train_batch_size": work.completions, "num_generations": group, "max_completion_length": work.new_tokens,
        "max_steps": STEPS, "output_dir": str(folder / "output"), "use_cpu": work.device == "cpu", "bf16": work.device != "cpu",
        "save_strategy": "no",
        "report_to": "none", "beta": 0.0, "temperature": 1.0, "model_init_kwargs": {"dtype": "float32"}, **flags,
    }  # fmt: skip
    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache"))
    arguments = GRPOConfig(**settings)
    trainer = GRPOTrainer(str(folder / "model"), reward, args=arguments, train_dataset=rows, callbacks=[StepDone()])
    trainer._generate_and_score_completions = watch.timed(trainer._generate_and_score_completions)
    watch.ends = [work.now()]
    trainer.train()
    return watch.measured()


SIDES: dict[str, Callable[[Path, int, Work], dict[str, float]]] = {
    OURS: ours,
    DEFAULTS: trl,
    BEST: lambda folder, group, work: trl(
        folder, group, work, gradient_checkpointing=False, per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.completions // work.micro_batch,
    ),
}


def prepare(folder: Path, shape: str, work: Work) -> None:
    """The model, a tokenizer that has little to do, and the prompts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device(work.device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape].config())
    model.save_pretrained(folder / "model")
    size = SHAPES[shape].settings["vocab_size"]
    words = {"<end>": END, "<pad>": PAD} | {f"w{i}": i for i in range(FIRST_WORD, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    words_of = (random.integers(FIRST_WORD, size, work.prompt_tokens) for _ in range(work.completions * STEPS))
    prompts = (" ".join(f"w{i}" for i in each) for each in words_of)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def run(shape: str, group: int, side: str, work: Work) -> dict[str, float]:
    """One side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), shape, work)
        done = subprocess.run(
            [sys.executable, __file__, "--run", side, folder, str(group), "--device", work.device],
            capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{side} failed: {done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=[*WORK], default="cpu")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], help="by default those for the device")
    parser.add_argument("--groups", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--run", nargs=3, metavar=("SIDE", "FOLDER", "GROUP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = WORK[options.device]
    if options.run:
        side, folder, group = options.run
        print(json.dumps(SIDES[side](Path(folder), int(group), work)))
        return
    print("| model | group | side | sampling, s | learning, s | GB | sampling / ours | learning / ours | GB / ours |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in options.shapes or SHAPES_OF[options.device]:
        for group in options.groups:
            rounds = [{side: run(shape, group, side, work) for side in SIDES} for _ in range(options.rounds)]
            for side in SIDES:
                found = medians(rounds, side)
                ratios = [found[key] / ours for key, ours in medians(rounds, OURS).items()]
                cells = [f"{value:.2f}" for value in (*found.values(), *ratios)]
                print(f"| {shape} | {group} | {side} | {' | '.join(cells)} |", flush=True)


def medians(rounds: list[dict[str, dict[str, float]]], side: str) -> dict[str, float]:
    return {key: statistics.median(each[side][key] for each in rounds) for key in rounds[0][side]}


if __name__ == "__main__":
    main()
