"""Completions in groups: `tk.sample_groups` next to transformers' `generate` and continuous batching, tokens per CPU second.

    python benchmarks/rollouts.py

A model with random weights, prompts of random tokens, completions that all have the same length, the sides in turn in one
process: `generate` on the prompts repeated for their groups, padded on the left, as trainers of policies call it;
`generate_batch` with a group's completions as sequences of one prompt, whose blocks they share. Time is CPU time of one thread.
All draw from the same distribution; the tokens differ, as the random numbers do. With `--check` greedy tokens are compared.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation import ContinuousBatchingConfig

import toolkit as tk

SHAPES = {
    "head-heavy (256 x 6, 32k tokens)": (32_000, 256, 6, 688),
    "body-heavy (512 x 8, 4k tokens)": (4_096, 512, 8, 1_376),
}
NEW_TOKENS, ROWS = 64, 32


def ours(model: torch.nn.Module, prompts: list[list[int]], size: int, temperature: float) -> list[list[int]]:
    keys = np.array([[tk.completion_key(0, 0, p, i) for i in range(size)] for p in range(len(prompts))], dtype=np.uint64)
    settings = tk.SamplingSettings(max_new_tokens=NEW_TOKENS, temperature=temperature)
    return [each.tokens for group in tk.sample_groups(model, prompts, keys, settings) for each in group]


def theirs(model: torch.nn.Module, prompts: list[list[int]], size: int, temperature: float) -> list[list[int]]:
    rows = [ids for ids in prompts for _ in range(size)]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=temperature > 0, temperature=temperature or None, top_k=0, pad_token_id=0
    )
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
    return [row[longest:] for row in output.tolist()]


def continuous(model: torch.nn.Module, prompts: list[list[int]], size: int, temperature: float) -> list[list[int]]:
    """With room for all rows at once: its own choice on a CPU, by free memory, takes seven times as long."""
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=temperature > 0, temperature=temperature or None, top_k=0, pad_token_id=0,
        eos_token_id=-1, num_return_sequences=size if size > 1 else None,
    )  # fmt: skip
    room = ContinuousBatchingConfig(max_batch_tokens=1024, num_blocks=2 * ROWS, page_size=256)
    found = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=room)  # type: ignore[operator]
    return [each.generated_tokens for each in found.values()]


SIDES = {"ours": ours, "generate": theirs, "generate_batch": continuous}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="compare greedy tokens in place of timing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    for name, (vocabulary, width, layers, intermediate) in SHAPES.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, intermediate_size=intermediate,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
        for length in (30, 300):
            for size in (1, 4, 16):
                lengths = random.integers(length // 2, length + 1, ROWS // size)
                prompts = [random.integers(1, vocabulary, each).tolist() for each in lengths]
                if options.check:
                    tokens = [sorted(run(model, prompts, size, 0)) for run in SIDES.values()]
                    assert tokens[0] == tokens[1] == tokens[2], (name, length, size)
                    continue
                seconds: dict[str, list[float]] = {side: [] for side in SIDES}
                for _ in range(options.rounds):
                    for side, run in SIDES.items():
                        began = time.process_time()
                        run(model, prompts, size, 1.0)
                        seconds[side].append(time.process_time() - began)
                rates = {side: ROWS * NEW_TOKENS / statistics.median(each) for side, each in seconds.items()}
                spread = max(max(each) / min(each) for each in seconds.values())
                found = ", ".join(f"{side} {rate:,.0f} (ratio {rates['ours'] / rate:.2f})" for side, rate in rates.items())
                print(f"{name}, prompts of up to {length}, groups of {size}: {found} (spread {spread:.2f})", flush=True)


if __name__ == "__main__":
    main()
