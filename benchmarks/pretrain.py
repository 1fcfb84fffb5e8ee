"""Pretraining on packed rows next to TRL's SFTTrainer and transformers' Trainer: tokens per second, and memory.

    python benchmarks/pretrain.py --pairs 5
    python benchmarks/pretrain.py --only head-heavy:0:1 --search --pairs 1

Whole texts, all tokens supervised, one behind the other in rows of the longest text's length (`benchmarks/sft.py` has the
rows, but for their prompts). Ours does what `recipes/pretrain.py` does, with AdamW as TRL: texts are cut to fill the rows, and
each attends to itself alone. TRL packs whole texts, which attend to themselves alone, and recomputes activations;
its `wrapped` packing cuts texts as ours, and each token attends to the row's earlier texts too. `Trainer` trains on such rows
as transformers' example script of language modeling does, in TRL's precision: its own is `Trainer + float32`.
--check compares whole texts.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import sft
from side_by_side import OURS, Task, compare, first_step_callback, trl_arguments

PER_STEP = {"per_device_train_batch_size": sft.PACKED_ROWS, "gradient_accumulation_steps": 1}
FLAGS: dict[str, dict[str, Any]] = {
    "wrapped": {"packing_strategy": "wrapped"},
    "Trainer": {"packing_strategy": None, "gradient_checkpointing": False},
    "one row at a time": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": sft.PACKED_ROWS},
    **{name: sft.FLAGS[name] for name in ("float32", "no checkpointing", "eager attention", "two loader processes")},
}
BEST_FLAGS = "Trainer"


def ours(task: Task, **settings: Any) -> dict[str, float]:
    return sft.ours(task, **({} if task.is_check else {"packing_strategy": "wrapped", "overlong": "split"}), **settings)


def peer(task: Task, **settings: Any) -> dict[str, float]:
    settings = {**PER_STEP, "packing_strategy": "bfd", **settings}
    if settings["packing_strategy"] is not None:
        return sft.trl(task, **settings, packing=True)
    return trainer(task, sft.of_packed_rows(task, settings))


def trainer(task: Task, settings: dict[str, Any]) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    texts, length = task.rows(), task.shape.longest
    columns = {name: [token for text in texts[name] for token in text] for name in ("input_ids", "labels")}
    ends = range(length, len(columns["labels"]) + 1, length)
    rows = {name: [tokens[end - length : end] for end in ends] for name, tokens in columns.items()}
    arguments = trl_arguments(task, {"bf16": True, **settings})
    known = {name: value for name, value in arguments.items() if name in TrainingArguments.__dataclass_fields__}
    made = Trainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, **arguments["model_init_kwargs"]),
        args=TrainingArguments(**known), train_dataset=Dataset.from_dict(rows), data_collator=default_data_collator,
        callbacks=[first_step_callback(task.watch)],
    )  # fmt: skip
    with task.watch.running():
        made.train()
    return sft.measured(task, made.model)


COMPARISON = replace(
    sft.COMPARISON,
    script=__file__,
    ours=ours,
    others={},
    ours_too={f"{OURS}, one row at a time": partial(ours, rows_at_once=1)},
    peer=peer,
    flags=FLAGS,
    best=dict.fromkeys(("cpu", "cuda"), BEST_FLAGS),
    ratios=("0:1",),
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
