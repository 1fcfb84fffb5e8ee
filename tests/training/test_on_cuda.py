"""Steps on a GPU: in the steady state nothing waits for the device, and with full determinism equal runs give equal bits."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

import toolkit as tk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before a test of this process uses CUDA, else determinism is refused
VOCABULARY, STEPS, WARM_UP = 512, 8, 3


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.RunConfig):
    """The settings of recipes/sft.py."""


class FakeTokenizer:
    """What load_model asks of a tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = None, 1, 0
    special_tokens_map: dict = {}  # noqa: RUF012

    def __len__(self) -> int:
        return VOCABULARY


def documents(count: int = 400) -> DatasetDict:
    random = np.random.default_rng(0)
    ids = [random.integers(2, VOCABULARY, size=int(n)).tolist() for n in random.integers(5, 120, size=count)]
    labels = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids]
    columns = {"input_ids": ids, "labels": labels, "length": [len(row) for row in ids]}
    return DatasetDict(train=Dataset.from_dict({**columns, "supervised_tokens": [len(row) - len(row) // 3 for row in ids]}))


def train(folder: Path, device: str = "cuda", **settings: object) -> list[torch.Tensor]:
    """A few packed steps; those behind the warm-up raise where they wait for the device. Returns the weights."""
    torch.manual_seed(0)
    config = Config(**{
        "model": "tiny-qwen3", "packing": True, "max_length": 256, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "bf16": True, "optim": "adamw_torch", "output_dir": str(folder), "eval_strategy": "no",
        "use_cpu": device == "cpu", **settings,
    })  # fmt: skip
    accelerator = tk.build_accelerator(config)
    model = tk.load_model("AutoModelForCausalLM", config, FakeTokenizer(), packed=True)
    loader, _ = tk.build_dataloaders(documents(), tk.collate_packed, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, loader.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    for number, batch in zip(range(STEPS), loader.batches(), strict=False):
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if number >= WARM_UP else "default")
        try:
            tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, schedule(number / STEPS))
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"torch_compile": True}, {"gradient_checkpointing": True}, {"bf16": False}], ids=str)
def test_a_step_in_the_steady_state_waits_nowhere(tmp_path: Path, settings: dict[str, object]) -> None:
    """Fails when: the loss is read with `.item()` in accumulate_micro_batch, or a mask is looked through in an `if`."""
    assert all(torch.isfinite(weights).all() for weights in train(tmp_path, **settings))


@pytest.mark.parametrize("settings", [{}, {"torch_compile": True}], ids=str)
def test_two_runs_with_full_determinism_end_with_the_same_bits(tmp_path: Path, settings: dict[str, object]) -> None:
    """Fails when: `full_determinism` does not reach flash attention's backward."""
    first, second = (train(tmp_path / name, full_determinism=True, **settings) for name in ("first", "second"))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
