"""A training of a few steps that ends with a model directory: the whole model's, or with --lora an adapter's.

    python tests/devices/adapter_run.py --output-dir /tmp/run

The main process writes live.safetensors, the logits of the trained model before it was saved, and each rank
memory-RANK.json: the bytes of all tensors that it held while the model came together, beyond those it held before.
"""

import gc
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import save_file

import toolkit as tk
from toolkit.config import setting
from toolkit.distributed.engines import pieces

VOCABULARY = 260


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "tiny-llama"
    dataset: str = "made on the spot"
    max_length: int = 24
    learning_rate: float = 1e-2
    per_device_train_batch_size: int = 2
    global_batch_size: int | None = 7
    max_steps: int | None = 4
    logging_steps: int = 1
    save_strategy: str = "steps"
    save_steps: int = 2
    use_cpu: bool = True
    output_dir: str = "out"
    lora: bool = setting(False, "Train an adapter on top of the model.")
    spoiled: bool = setting(False, "Put a number that is not finite into what is saved.")


def make_splits() -> DatasetDict:
    random_numbers = np.random.default_rng(0)
    ids = [random_numbers.integers(1, VOCABULARY, size=int(random_numbers.integers(4, 12))).tolist() for _ in range(30)]
    lengths = [len(row) for row in ids]
    return DatasetDict(train=Dataset.from_dict({"input_ids": ids, "length": lengths, "supervised_tokens": [n - 1 for n in lengths]}))


def with_adapter(model: Any, config: Config) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", task_type="CAUSAL_LM")
    return get_peft_model(model, settings)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
    model.eval()
    return model(input_ids=ids, use_cache=False).logits.float().contiguous()


def bytes_of_tensors() -> int:
    """Of all tensors alive in this process, each storage once."""
    with torch.no_grad():
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        plain = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain if each.device.type == "cpu"}
    return sum(storages.values())


def watch_memory() -> list[int]:
    """Bytes of tensors that are alive each time a whole parameter comes together; first, before anything does.

    The thread that did the last exchange of the forward pass lets its buffer go when it is next run: a second is waited.
    """
    gc.collect()
    before = []
    for _ in range(20):
        before.append(bytes_of_tensors())
        time.sleep(0.05)
    seen, add_up = [min(before)], pieces.add_up

    def watched(parts: torch.Tensor, *, everywhere: bool) -> None:
        seen.append(bytes_of_tensors())
        add_up(parts, everywhere=everywhere)

    pieces.add_up = watched
    return seen


def spoil(model: Any) -> None:
    """Let a tensor be not a number by the time it is written."""
    write = model.save_pretrained

    def write_spoiled(folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        name = sorted(state_dict)[-1]
        write(folder, state_dict={**state_dict, name: state_dict[name] * float("nan")})

    model.save_pretrained = write_spoiled


def main(config: Config) -> None:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.train_tokenizer(["a"], VOCABULARY)
    model = tk.load_model("AutoModelForCausalLM", config)
    if config.lora:
        model = with_adapter(model, config)
    train, _ = tk.build_dataloaders(make_splits(), tk.collate_padded, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        for batch in run:
            run.log(tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, schedule(run.progress)))
        logits = logits_of(model)
        if accelerator.is_main_process:
            save_file({"logits": logits}, Path(config.output_dir, "live.safetensors"))
        if config.spoiled:
            spoil(accelerator.unwrap_model(model))
        seen = watch_memory()
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        more = [size - seen[0] for size in seen]
        Path(config.output_dir, f"memory-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(more))


if __name__ == "__main__":
    tk.run_recipe(main)
