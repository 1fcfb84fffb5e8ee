"""Supervised fine-tuning through an adapter (LoRA) next to TRL with peft: supervised tokens per second, and memory.

    python benchmarks/lora.py --pairs 5
    python benchmarks/lora.py --only head-heavy:1:1 --search --pairs 1

The rows and the sides of `benchmarks/sft.py`, with an adapter of rank 32 on every linear layer but the head. Ours does what
`recipes/lora.py` does, TRL what it does with that `LoraConfig` and its defaults, or with the flags that save work.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import sft
from side_by_side import OURS, Task, compare

RANK, ALPHA, LAYERS = 32, 64, "all-linear"
FLAGS: dict[str, dict[str, Any]] = {
    **{name: sft.FLAGS[name] for name in ("float32", "no checkpointing", "packing", "lengths grouped", "eager attention")},
    "one row at a time, accumulated": {"per_device_train_batch_size": 1},
    "weights in bfloat16": {"model_init_kwargs": {"dtype": "bfloat16"}},
}
BEST_FLAGS = "one row at a time, accumulated + no checkpointing"


def first_weights(task: Task) -> dict[str, Any]:
    """In a check those of a factorization of the model's, the same on both sides."""
    return {"init_lora_weights": "olora"} if task.is_check else {}


def ours(task: Task, **settings: Any) -> dict[str, float]:
    adapter = {"use_peft": True, "lora_r": RANK, "lora_alpha": float(ALPHA), "lora_target_modules": [LAYERS]}
    return sft.ours(task, **adapter, **first_weights(task), **settings)


def trl(task: Task, **settings: Any) -> dict[str, float]:
    from peft import LoraConfig

    adapter = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=LAYERS, **first_weights(task))
    return sft.trl(task, peft_config=adapter, **settings)


COMPARISON = replace(
    sft.COMPARISON,
    script=__file__,
    ours=ours,
    others={},
    ours_too={f"{OURS}, one row at a time": partial(ours, rows_at_once=1)},
    peer=trl,
    flags=FLAGS,
    best=dict.fromkeys(("cpu", "cuda"), BEST_FLAGS),
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
