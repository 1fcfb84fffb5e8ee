"""`toolkit plan` next to what torch's allocator holds when the same steps are really taken, and next to the process.

    python -m benchmarks.plan                  # all cells, each in processes of its own
    python -m benchmarks.plan sft-bf16 dpo     # some of them

Each cell is a recipe with flags. Both sides take two steps on the longest micro-batch of the recipe's data and evaluate on the
longest one there. `allocator`: the highest sum of live storages from the second step on, by torch's profiler. `process`: the
highest resident memory of the whole process without a profiler, next to what the plan says it needs, its margin included.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.system.console import say

ROOT = Path(__file__).parents[1]
_MODEL = ["--hidden-size", "384", "--num-hidden-layers", "6", "--num-attention-heads", "6", "--intermediate-size", "1152"]
_WIDE = ["--hidden-size", "512", "--num-hidden-layers", "4", "--num-attention-heads", "8", "--intermediate-size", "1536"]
_QWEN, _BF16, _CKPT = ["--model", "tiny-qwen3"], ["--bf16"], ["--gradient-checkpointing"]
_ADAMW, _PADDED = ["--optim", "adamw_torch"], ["--no-packing"]
_SPLIT = ["--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "4"]
_COMPLETIONS = ["--per-device-train-batch-size", "128"]
_FEW = [*_WIDE, "--max-train-examples", "200"]
# In another type than the file's, whose float32 embedding would hold all of it mapped: 22 MB that nobody needs.
_IN_4_BITS = ["--model", "a language model", "--load-in-4bit", "--dtype", "bfloat16"]
_MANY, _MORE = ["--per-device-train-batch-size", "16"], ["--per-device-train-batch-size", "64"]
_TAUGHT = [*_FEW, "--teacher", "a language model"]  # made where the benchmark runs
CELLS: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", _MODEL),
    "sft-adamw": ("sft", [*_MODEL, *_ADAMW]),
    "sft-bf16": ("sft", [*_MODEL, *_BF16, *_ADAMW]),
    "sft-bf16-weights": ("sft", [*_MODEL, *_BF16, *_ADAMW, "--dtype", "bfloat16"]),
    "sft-rounded": ("sft", [*_MODEL, *_ADAMW, "--dtype", "bfloat16", "--stochastic-rounding"]),
    "sft-qwen3": ("sft", [*_MODEL, *_QWEN]),
    "sft-qwen3-bf16-long": ("sft", [*_MODEL, *_QWEN, *_BF16, "--max-length", "1024"]),
    "sft-padded": ("sft", [*_MODEL, *_PADDED]),
    "sft-padded-bf16": ("sft", [*_MODEL, *_PADDED, *_BF16]),
    "sft-recomputed": ("sft", [*_WIDE, *_CKPT]),
    "sft-recomputed-bf16": ("sft", [*_WIDE, *_CKPT, *_BF16, *_ADAMW]),
    "sft-recomputed-padded": ("sft", [*_WIDE, *_CKPT, *_PADDED]),
    "sft-accumulated": ("sft", [*_WIDE, *_SPLIT]),
    "sft-sgd": ("sft", [*_WIDE, "--optim", "sgd"]),
    "sft-adafactor": ("sft", [*_WIDE, "--optim", "adafactor"]),
    "sft-smoothed": ("sft", [*_WIDE, "--label-smoothing-factor", "0.1", "--z-loss", "1e-4"]),
    "sft-dropout": ("sft", [*_WIDE, "--attention-dropout", "0.1"]),
    "sft-unclipped": ("sft", [*_WIDE, "--max-grad-norm", "0"]),
    "lora": ("lora", _MODEL),
    "lora-bf16": ("lora", [*_MODEL, *_BF16]),
    "lora-bf16-weights": ("lora", [*_WIDE, *_BF16, "--dtype", "bfloat16"]),
    "lora-recomputed": ("lora", [*_WIDE, *_CKPT]),
    "lora-padded": ("lora", [*_WIDE, *_PADDED]),
    "lora-4-bit": ("lora", [*_IN_4_BITS, *_BF16]),
    "lora-4-bit-nested": ("lora", [*_IN_4_BITS, *_CKPT, "--bnb-4bit-use-double-quant"]),
    "lora-dora": ("lora", [*_WIDE, "--use-dora"]),
    "lora-full-rank": ("lora", [*_WIDE, "--lora-r", "64"]),
    "dpo": ("dpo", _MODEL),
    "dpo-bf16": ("dpo", [*_MODEL, *_BF16, *_ADAMW]),
    "dpo-second-model": ("dpo", [*_MODEL, "--reference", "model"]),
    "dpo-recomputed": ("dpo", [*_WIDE, *_CKPT]),
    "dpo-padded": ("dpo", [*_WIDE, "--pair-layout", "padded"]),
    "dpo-accumulated": ("dpo", [*_WIDE, *_SPLIT]),
    "dpo-lora": ("dpo", [*_WIDE, "--use-peft"]),
    "kto": ("kto", _MODEL),
    "kto-bf16": ("kto", [*_WIDE, *_BF16]),
    "reward": ("reward", _MODEL),
    "reward-bf16": ("reward", [*_WIDE, *_BF16]),
    "pretrain": ("pretrain", _MODEL),
    "pretrain-bf16": ("pretrain", [*_WIDE, *_BF16]),
    "accelerated": ("accelerated", []),
    "accelerated-evaluated": ("accelerated", ["--per-device-eval-batch-size", "256"]),
    "accelerated-bf16": ("accelerated", [*_BF16, "--hidden-size", "384"]),
    "token-classification": ("token_classification", []),
    "question-answering": ("question_answering", []),
    "seq2seq": ("seq2seq", []),
    "masked-lm": ("masked_lm", []),
    "embedding": ("embedding", []),
    "reranker": ("reranker", []),
    "multiple-choice": ("multiple_choice", []),
    "grpo": ("grpo", [*_MODEL, *_COMPLETIONS]),
    "grpo-bf16-reference": ("grpo", [*_WIDE, *_BF16, *_COMPLETIONS, "--beta", "0.04", "--top-k", "20"]),
    "grpo-lora": ("grpo", [*_WIDE, *_COMPLETIONS, "--use-peft", "--gradient-accumulation-steps", "2"]),
    "grpo-recomputed": ("grpo", [*_WIDE, *_COMPLETIONS, *_CKPT, "--steps-per-generation", "2", "--num-iterations", "2"]),
    "ppo": ("ppo", [*_WIDE, *_COMPLETIONS]),
    "ppo-bf16": ("ppo", [*_MODEL, *_COMPLETIONS, *_BF16, *_ADAMW, "--gradient-accumulation-steps", "2"]),
    "distill": ("distill", [*_TAUGHT]),
    "distill-bf16": ("distill", [*_TAUGHT, *_BF16, "--cross-entropy-share", "0.5"]),
    "distill-stored": ("distill", [*_TAUGHT, "--teacher-top-k", "32"]),
    "distill-own-answers": ("distill", [*_TAUGHT, "--dataset", "stdlib:sft", "--on-policy-share", "0.5"]),
    "distill-itself": ("distill", [*_FEW, "--self-distillation", "ema", "--cross-entropy-share", "0.5"]),
    "distill-adapter-off": ("distill", [*_FEW, "--use-peft", "--self-distillation", "base"]),
    "distill-classifier": ("distill_classifier", ["--teacher", "a classifier", "--hidden-size", "256"]),
}  # fmt: skip
# As `fit_micro_batch` has it where memory is short, with larger micro-batches.
_SPARING = "-sparing"
CELLS |= {
    f"sft{_SPARING}": ("sft", [*_WIDE, *_MANY]),
    f"sft-bf16{_SPARING}": ("sft", [*_WIDE, *_MANY, *_BF16]),
    f"lora{_SPARING}": ("lora", [*_WIDE, *_MANY]),
    f"lora-recomputed{_SPARING}": ("lora", [*_WIDE, *_MANY, *_CKPT]),
    f"dpo{_SPARING}": ("dpo", [*_WIDE, *_MANY]),
    f"reward{_SPARING}": ("reward", [*_WIDE, *_MANY]),
    f"pretrain{_SPARING}": ("pretrain", [*_WIDE, *_MANY]),
    f"accelerated{_SPARING}": ("accelerated", [*_WIDE, *_MORE]),
    f"seq2seq{_SPARING}": ("seq2seq", ["--hidden-size", "384", "--per-device-train-batch-size", "32"]),
    f"distill{_SPARING}": ("distill", [*_TAUGHT, *_MANY]),
}  # fmt: skip
# Of two ranks: what shards them, and the cells that each does.
_ALL_SHARDED = ["--deepspeed", str(ROOT / "tests" / "all_sharded.json")]  # a default file leaves small parameters whole
_ENGINES = {
    "ddp": [], "zero1": ["--zero-stage", "1"], "zero2": ["--zero-stage", "2"], "zero3": _ALL_SHARDED,
    "zero2-offload": ["--zero-stage", "2", "--offload", "optimizer"],
    "zero3-offload": [*_ALL_SHARDED, "--offload", "parameters"], "fsdp": ["--fsdp"],
}  # fmt: skip
_SHARDED = {
    "sft": ("sft", [*_WIDE, *_ADAMW]),
    "sft-bf16": ("sft", [*_WIDE, *_ADAMW, *_BF16]),
    "sft-padded-recomputed": ("sft", [*_WIDE, *_ADAMW, *_PADDED, *_CKPT]),
    "sft-accumulated": ("sft", [*_WIDE, *_ADAMW, "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "2"]),
    "lora": ("lora", _WIDE),
    "dpo": ("dpo", [*_WIDE, *_ADAMW]),
    "accelerated": ("accelerated", ["--hidden-size", "384", "--max-train-examples", "500", *_ADAMW]),
}
CELLS |= {
    f"{name}-{engine}": (recipe, [*flags, *words])
    for name, (recipe, flags) in _SHARDED.items()
    for engine, words in _ENGINES.items()
}


def ranks_of(name: str) -> int:
    return 2 if any(name == f"{cell}-{engine}" for cell in _SHARDED for engine in _ENGINES) else 1


def main(names: list[str]) -> None:
    """Print a row for each cell, and the largest difference."""
    say(f"{'cell':<24}{'plan MB':>10}{'allocator':>11}{'':>8}{'plan MB':>10}{'process':>10}{'':>8}{'plan s':>8}")
    errors: list[tuple[float, float]] = []
    for name in names or CELLS:
        planned, real, process = (_in_process(name, side) for side in ("plan", "real", "process"))
        error, whole = planned["peak"] / real["allocator"] - 1, planned["process"] / process["process"] - 1
        errors.append((error, whole))
        megabytes = [each / 1e6 for each in (planned["peak"], real["allocator"], planned["process"], process["process"])]
        sizes = (*megabytes[:2], error, *megabytes[2:], whole)
        say("{:<24}{:>10.1f}{:>11.1f}{:>+8.2%}{:>10.1f}{:>10.1f}{:>+8.1%}{:>8.1f}".format(name, *sizes, planned["seconds"]))
    for what, column in (("allocator", 0), ("process", 1)):
        found = [error[column] for error in errors]
        say(f"to the {what}: {min(found):+.2%} to {max(found):+.2%} in {len(found)} cells")


def command_of(name: str, side: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.plan", f"--{side}", name]
    start = "import sys; from toolkit.distributed.launch import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"
    several = side != "plan" and ranks_of(name) > 1
    return [sys.executable, "-c", start, str(ranks_of(name)), *command] if several else command


def _in_process(name: str, side: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = command_of(name, side)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, side: str) -> dict[str, float]:
    """One side of one cell, in this process."""
    from toolkit.command_line.reading import read_command_line
    from toolkit.command_line.recipe import config_class_of, import_recipe
    from toolkit.diagnostics.devices import beyond_tensors, find_device
    from toolkit.diagnostics.plan import plan
    from toolkit.diagnostics.replacements import Replacements
    from toolkit.training import accelerator

    recipe, flags = CELLS[name]
    script = import_recipe(ROOT / "recipes" / f"{recipe}.py")
    flags = [_make_teacher(each) if each in _TEACHERS else each for each in flags]
    precision = [] if "--bf16" in flags else ["--no-bf16"]
    config = read_command_line(config_class_of(script.main), [*flags, *precision, "--use-cpu"], os.environ, "")
    began = time.monotonic()
    if side == "plan":
        found = plan(script.main, config, ranks=ranks_of(name), sparing=name.endswith(_SPARING))
        process = found.peak + sum(beyond_tensors(find_device("this"), found))
        return {"peak": found.peak, "seconds": time.monotonic() - began, "process": process}
    with Replacements() as replace:
        if name.endswith(_SPARING):
            replace.attribute(accelerator, "keep_freed_memory", lambda keep, **_: keep(sparing=True))
        return _really(script.main, config, profiled=side == "real")


_TEACHERS = {
    "a language model": ("AutoModelForCausalLM", "tiny-llama", {}),
    "a classifier": ("AutoModelForSequenceClassification", "tiny-bert", {"num_labels": 7}),
}  # fmt: skip


def _make_teacher(name: str) -> str:
    """A directory here with a model of random weights, made by the first rank that needs it."""
    import toolkit as tk

    auto_class, shape, settings = _TEACHERS[name]
    if not Path(name).is_dir():
        config = tk.ModelConfig(model=shape, hidden_size=512)
        tokenizer = tk.load_tokenizer(config)
        model = tk.load_model(auto_class, config, tokenizer, **settings)
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    return name


def _really(main: Any, config: Any, profiled: bool) -> dict[str, float]:
    """The same two steps with real tensors: the highest moment of the second by torch's allocator, or of the process."""
    import torch

    import toolkit as tk
    from toolkit.diagnostics import plan as planner, planned_run
    from toolkit.diagnostics.ledger import Ledger
    from toolkit.diagnostics.planned_rollouts import PlannedRollouts
    from toolkit.diagnostics.planned_teachers import replace_teachers
    from toolkit.diagnostics.replacements import Replacements
    from toolkit.preference import reference
    from toolkit.training.run import Run

    seen = planned_run.Seen(Ledger())
    # From the start: what engines and DDP hold, Python can't list.
    profiler = torch.autograd.profiler.profile(enabled=profiled, profile_memory=True, use_kineto=True)

    def batches(original: Any, loader: Any, *values: Any) -> Iterator[Any]:
        longest = planned_run.longest_batches(seen, original, loader, *values)
        yield next(longest)
        with torch.autograd.profiler.record_function("second step"):
            yield next(longest)
        next(longest)

    def wait(original: Any, *values: Any) -> Any:
        done = original(*values)
        time.sleep(0.002)  # Gloo's thread lets go of the tensors first: the profiler sees only what this one frees
        return done

    with tempfile.TemporaryDirectory() as folder, Replacements() as replace, profiler, contextlib.suppress(planned_run.Planned):
        replace.attribute(torch.distributed.Work, "wait", wait)
        loaders = importlib.import_module(tk.build_dataloaders.__module__)
        replace.attribute(loaders.TrainLoader, "batches", batches)
        replace.attribute(loaders.EvalLoader, "__iter__", functools.partial(planned_run.longest_evaluation, seen))
        if "num_generations" not in vars(config):
            replace.attribute(Run, "due", functools.partial(planned_run.evaluates, seen))
        if "teacher" in vars(config):  # answers of the same lengths, and as many that are stored
            replace_teachers(replace, seen.ledger)
        if "num_generations" in vars(config):
            size, updates = config.per_device_train_batch_size, config.steps_per_generation
            PlannedRollouts(seen.ledger, size, updates, seen.updating).replace(replace)
        if "desirable_weight" in vars(config):  # else the reference of all rows is computed first
            replace.attribute(reference, "reference_table", lambda *_, **__: planned_run.AnyRow())
        replace.public("cache_gradients", functools.partial(planned_run.cached, seen))
        main(planner._alone(config, folder))
    if not profiled:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {"process": int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024}
    events = sorted(_with_inner(profiler.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    begin = next(event.start_time_ns for event in events if event.name == "second step")
    # What one of Gloo's threads is the last to hold is not seen to be freed, only that its address is taken again: left out.
    taken: dict[int, int] = {}  # address: the event that gave it out last
    changes = [0] * len(events)
    for place, event in enumerate(events):
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation):
            address, changes[place] = event.extra_fields.ptr, event.extra_fields.alloc_size
            before = taken.pop(address, None)
            if changes[place] > 0:
                taken[address] = place
                if before is not None:
                    changes[before] = 0
            elif before is None:
                changes[place] = 0
    held = list(itertools.accumulate(changes))
    top = max(size for size, event in zip(held, events, strict=True) if event.start_time_ns >= begin)
    return {"allocator": top}


def _with_inner(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _with_inner(event.children)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--plan"], ["--real"], ["--process"]):
        # Elsewhere, or a recipe would begin from a model that was trained here, which has a shape of its own.
        with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
            measured = measure(sys.argv[2], sys.argv[1].removeprefix("--"))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(measured), flush=True)
    else:
        main(sys.argv[1:])
