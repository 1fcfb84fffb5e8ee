"""Supervised fine-tuning beside TRL: CPU seconds and peak memory for the same examples, model and steps.

    python benchmarks/sft.py --pairs 3

Each side runs in a process of its own, in turn. TRL runs with its defaults, which compute in bfloat16, and once more in
float32, since a processor without units for bfloat16 is slow at it; ours runs in float32. The model is a Llama of width
384 with 6 layers and a vocabulary of 32,768 with random weights; the examples are those of stdlib:sft, tokenised once. What
is measured begins when the model and the data are there: training alone, without imports and without compilation.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

EXAMPLES, BATCH, MAX_LENGTH, VOCABULARY = 64, 8, 1024, 32_768


def prepare(folder: Path) -> None:
    """The tokenised examples and the model both sides read."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import toolkit as tk

    tokenizer = tk.load_tokenizer(tk.ModelConfig())
    config = tk.DataConfig(dataset="stdlib:sft", max_length=MAX_LENGTH, max_train_examples=EXAMPLES)
    tk.tokenize_for_sft(tk.load_splits(config), tokenizer, config)["train"].save_to_disk(str(folder / "data"))
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=6,
        intermediate_size=1024, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def run_ours(folder: Path) -> dict[str, float]:
    from datasets import DatasetDict, load_from_disk

    import toolkit as tk

    accelerator = tk.build_accelerator(tk.RunConfig(output_dir=str(folder / "ours"), overwrite_output_dir=True, use_cpu=True))
    model_config = tk.ModelConfig(model=str(folder / "model"))
    model = tk.load_model("AutoModelForCausalLM", model_config, tk.load_tokenizer(model_config), packed=True)
    splits = DatasetDict(train=load_from_disk(str(folder / "data")))
    # rows of MAX_LENGTH hold about eight examples: one row a step sees what one batch of eight sees there
    config = tk.DataConfig(packing=True, max_length=MAX_LENGTH, per_device_train_batch_size=1)
    train, _ = tk.build_dataloaders(splits, tk.collate_packed, config, accelerator)
    settings = tk.OptimConfig(learning_rate=2e-5, lr_scheduler_type="linear")
    optimizer, schedule = tk.build_optimizer(model, settings, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    started, tokens = time.process_time(), 0.0
    for batch in train.batches():
        rates = schedule(batch.position / train.examples_to_consume)
        tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, rates)
        tokens += batch.totals["tokens"]
    return {"cpu": time.process_time() - started, "tokens": tokens}


def run_trl(folder: Path, **settings: Any) -> dict[str, float]:
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = load_from_disk(str(folder / "data"))
    tokens = float(sum(rows["supervised_tokens"]))

    def with_mask(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}

    arguments = SFTConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH, num_train_epochs=1, max_length=MAX_LENGTH,
        save_strategy="no", report_to="none", use_cpu=True, completion_only_loss=True, **settings,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=arguments,
        train_dataset=rows.map(with_mask, remove_columns=rows.column_names),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    started = time.process_time()
    trainer.train()
    return {"cpu": time.process_time() - started, "tokens": tokens}


SIDES = {"ours": run_ours, "trl": run_trl, "trl fp32": partial(run_trl, bf16=False)}


def measure(side: str, folder: Path) -> dict[str, float]:
    """One side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        figures = SIDES[arguments.side](arguments.folder)
        figures["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary))
        results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(arguments.pairs):
            for side in SIDES if number % 2 == 0 else reversed(list(SIDES)):
                results[side].append(measure(side, Path(temporary)))
                print(side, results[side][-1], flush=True)
    median = {
        side: {
            "rate": statistics.median(run["tokens"] / run["cpu"] for run in runs),
            "peak": statistics.median(run["peak_gb"] for run in runs),
        }
        for side, runs in results.items()
    }
    print(f"\n{'':8}{'supervised tokens per CPU second':>36}{'peak memory, GB':>20}")
    for side, figures in median.items():
        print(f"{side:8}{figures['rate']:>36.0f}{figures['peak']:>20.2f}")
    ours = median["ours"]
    for side in list(SIDES)[1:]:
        trl = median[side]
        print(f"ours / {side:9}{ours['rate'] / trl['rate']:>28.2f}{ours['peak'] / trl['peak']:>20.2f}")


if __name__ == "__main__":
    main()
