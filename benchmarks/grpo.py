"""GRPO next to TRL's GRPOTrainer: CPU seconds of sampling and of learning from it, and the memory of each side.

    python benchmarks/grpo.py

The same model with random weights, the same prompts of random tokens, the same reward, one update a step, float32; each run in
a process of its own, both sides in turn. Completions have the same length on both sides, since nothing ends them. Sampling is
everything up to the advantages (log-probabilities that a side computes before the update are in it), learning is the rest of a
step. Time is CPU time of one thread; the first step is left out.
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
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import END, FIRST_WORD, PAD, SHAPES, peak_memory

RECIPE = Path(__file__).resolve().parents[1] / "recipes/grpo.py"
COMPLETIONS, PROMPT_TOKENS, NEW_TOKENS, STEPS = 32, 256, 32, 3
MICRO_BATCH = COMPLETIONS // 8  # of the peer's best flags; ours is at least half a group, whose prompt is read once in it
OURS, DEFAULTS, BEST = "ours", "TRL, its defaults", "TRL, best flags"


class Stopwatch:
    """CPU seconds of each step, and those of sampling in it."""

    def __init__(self) -> None:
        self.sampling: list[float] = []
        self.ends = [time.process_time()]

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def sample(*arguments: Any, **keywords: Any) -> Any:
            began = time.process_time()
            found = function(*arguments, **keywords)
            self.sampling.append(time.process_time() - began)
            return found

        return sample

    def measured(self) -> dict[str, float]:
        steps = np.diff(self.ends)[1:]
        sampling = np.array(self.sampling[1 : len(steps) + 1])
        return {"sampling": float(np.median(sampling)), "learning": float(np.median(steps - sampling)), "GB": peak_memory()}


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def ours(folder: Path, group: int) -> dict[str, float]:
    import toolkit as tk
    from toolkit.training.run import Run

    watch = Stopwatch()
    tk.sample_rollouts = watch.timed(tk.sample_rollouts)
    tk.load_rewards = lambda *_: [tk.Reward("length", lambda prompts, completions, **columns: reward(completions))]
    before = Run.log

    def log(run: Run, metrics: Any) -> None:
        before(run, metrics)
        watch.ends.append(time.process_time())

    Run.log = log  # type: ignore[method-assign]
    recipe = runpy.run_path(str(RECIPE), run_name="recipe")
    size = max(MICRO_BATCH, group // 2)
    recipe["main"](recipe["Config"](
        model=str(folder / "model"), dataset=str(folder / "rows.jsonl"), output_dir=str(folder / "output"), use_cpu=True,
        per_device_train_batch_size=size, gradient_accumulation_steps=COMPLETIONS // size,
        num_generations=group, max_completion_length=NEW_TOKENS, max_steps=STEPS,
        eval_strategy="no", eval_on_start=False, save_strategy="no", optim="adamw_torch", learning_rate=1e-6,
        scale_rewards="group",
    ))  # fmt: skip
    return watch.measured()


def trl(folder: Path, group: int, **flags: Any) -> dict[str, float]:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    watch = Stopwatch()

    class StepDone(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.ends.append(time.process_time())

    settings = {
        "per_device_train_batch_size": COMPLETIONS, "num_generations": group, "max_completion_length": NEW_TOKENS,
        "max_steps": STEPS, "output_dir": str(folder / "output"), "use_cpu": True, "bf16": False, "save_strategy": "no",
        "report_to": "none", "beta": 0.0, "temperature": 1.0, "model_init_kwargs": {"dtype": "float32"}, **flags,
    }  # fmt: skip
    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache"))
    arguments = GRPOConfig(**settings)
    trainer = GRPOTrainer(str(folder / "model"), reward, args=arguments, train_dataset=rows, callbacks=[StepDone()])
    trainer._generate_and_score_completions = watch.timed(trainer._generate_and_score_completions)
    watch.ends = [time.process_time()]
    trainer.train()
    return watch.measured()


SIDES: dict[str, Callable[[Path, int], dict[str, float]]] = {
    OURS: ours,
    DEFAULTS: trl,
    BEST: lambda folder, group: trl(
        folder, group, gradient_checkpointing=False, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=COMPLETIONS // MICRO_BATCH,
    ),
}


def prepare(folder: Path, shape: str) -> None:
    """The model, a tokenizer that has little to do, and the prompts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape].config())
    model.save_pretrained(folder / "model")
    size = SHAPES[shape].settings["vocab_size"]
    words = {"<end>": END, "<pad>": PAD} | {f"w{i}": i for i in range(FIRST_WORD, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    prompts = (" ".join(f"w{i}" for i in random.integers(FIRST_WORD, size, PROMPT_TOKENS)) for _ in range(COMPLETIONS * STEPS))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def run(shape: str, group: int, side: str) -> dict[str, float]:
    """One side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), shape)
        done = subprocess.run(
            [sys.executable, __file__, "--run", side, folder, str(group)], capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{side} failed: {done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=["head-heavy", "body-heavy"], choices=[*SHAPES])
    parser.add_argument("--groups", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--run", nargs=3, metavar=("SIDE", "FOLDER", "GROUP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        side, folder, group = options.run
        print(json.dumps(SIDES[side](Path(folder), int(group))))
        return
    print("| model | group | side | sampling, s | learning, s | GB | sampling / ours | learning / ours | GB / ours |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for shape in options.shapes:
        for group in options.groups:
            rounds = [{side: run(shape, group, side) for side in SIDES} for _ in range(options.rounds)]
            for side in SIDES:
                found = medians(rounds, side)
                ratios = [found[key] / ours for key, ours in medians(rounds, OURS).items()]
                cells = [f"{value:.2f}" for value in (*found.values(), *ratios)]
                print(f"| {shape} | {group} | {side} | {' | '.join(cells)} |", flush=True)


def medians(rounds: list[dict[str, dict[str, float]]], side: str) -> dict[str, float]:
    return {key: statistics.median(each[side][key] for each in rounds) for key in rounds[0][side]}


if __name__ == "__main__":
    main()
