"""Supervised fine-tuning next to TRL: supervised tokens per second, and memory.

    python benchmarks/sft.py --pairs 5
    python benchmarks/sft.py --only head-heavy:1:1 --flags --pairs 1

Ours does what `recipes/sft.py` does, with AdamW as TRL: packed rows, the head at supervised positions only. TRL
runs with its defaults (1.16: bfloat16, padded, activations recomputed), and with flags that save work: no recomputation and one
row at a time, so that nothing is padded, or on a GPU packing. What each flag brings on this machine, --flags measures, which to
take, --search. A step sees as many tokens packed as padded: rows of the longest text's length, as many as hold the mean batch.
`benchmarks/side_by_side.py` says what is timed. On a CPU TRL's head is applied at every position, on a GPU at supervised ones
only: its ratios don't carry over. With --device cuda layers are compiled, the first steps are not timed, and model FLOP/s are
6 x parameters x tokens.
"""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from side_by_side import END, OURS, Comparison, Shape, Task, compare, our_settings, random_lengths, random_words, train_with_trl

import toolkit as tk

PACKED_ROWS = "rows_of_a_step"  # in place of a number: how many packed rows a step has
FLAGS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
    "packing": {"packing": True, "per_device_train_batch_size": PACKED_ROWS, "gradient_accumulation_steps": 1},
    "padding-free": {"padding_free": True, "max_length": None},
    "lengths grouped": {"train_sampling_strategy": "group_by_length"},
    "one row at a time, accumulated": {"per_device_train_batch_size": 1},
    "eager attention": {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}},
    "flex attention": {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "flex_attention"}},
    "two loader processes": {"dataloader_num_workers": 2},
    "compiled": {"torch_compile": True},
    "Liger": {"use_liger_kernel": True},
    "Hub kernels": {"model_init_kwargs": {"dtype": "float32", "use_kernels": True}},
}
BEST_FLAGS = {  # on a CPU as --search found them
    "cpu": "one row at a time, accumulated + no checkpointing + eager attention + lengths grouped",
    "cuda": "no checkpointing + packing",
}


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.RunConfig):
    """The settings of recipes/lora.py, which are those of sft.py and pretrain.py too."""


def make_rows(shape: Shape, share: float, count: int, random_numbers: np.random.Generator) -> dict[str, list[Any]]:
    """Tokenized rows, of which both sides take the columns they know. `share` of a row is the prompt."""
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": [], "supervised_tokens": []}
    for length in random_lengths(shape, count, random_numbers).tolist():
        tokens = [*random_words(shape, length - 1, random_numbers), END]
        prompt = max(1, round(share * length))
        row = (tokens, [-100] * prompt + tokens[prompt:], length, length - prompt)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def packed_rows_of_a_step(task: Task) -> int:
    """How many rows of the longest text's length hold as many tokens as the mean batch; in a check as many as there may be."""
    lengths = task.rows()["length"]
    return len(lengths) if task.is_check else max(1, round(task.batch * sum(lengths) / len(lengths) / task.shape.longest))


def measured(task: Task, model: Any) -> dict[str, float]:
    from toolkit.tracking.step_metrics import peak_flops

    rows = task.rows()
    counted = {"supervised tokens": task.watch.share() * sum(rows["supervised_tokens"])}
    peak = peak_flops(model.device) if task.device == "cuda" else None
    if peak is None:
        return counted
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = 6 * parameters * task.watch.share() * sum(rows["length"])
    return {**counted, "MFU %": 100 * flops / task.watch.total() / peak}


def ours(task: Task, **settings: Any) -> dict[str, float]:
    from datasets import DatasetDict

    rows, ranks = packed_rows_of_a_step(task), int(os.environ.get("WORLD_SIZE", "1"))
    at_once = settings.pop("rows_at_once", max(1, rows // ranks))  # of a rank
    config = Config(**{
        **our_settings(task), "packing": True, "max_length": task.shape.longest, "learning_rate": 2e-5,
        "per_device_train_batch_size": at_once, "global_batch_size": max(1, rows // (at_once * ranks)) * at_once * ranks,
        **settings,
    })  # fmt: skip
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    model = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=config.packing), config, tokenizer)
    train, _ = tk.build_dataloaders(DatasetDict(train=task.rows()), tk.collate_packed, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = partial(tk.causal_lm_loss, label_smoothing_factor=config.label_smoothing_factor, z_loss=config.z_loss)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)
    with task.watch.running(), tk.open_run(accelerator, config, model, optimizer, train) as run:
        for batch in run:
            rates = schedule(run.progress)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            task.watch.step_done()
    return measured(task, model)


def of_packed_rows(task: Task, settings: dict[str, Any]) -> dict[str, Any]:
    rows = packed_rows_of_a_step(task)
    return {name: rows if value == PACKED_ROWS else value for name, value in settings.items()}


def trl(task: Task, peft_config: Any = None, **settings: Any) -> dict[str, float]:
    from trl import SFTConfig, SFTTrainer

    rows = task.rows().select_columns(["input_ids", "labels"])
    trainer = train_with_trl(task, SFTTrainer, SFTConfig, rows, of_packed_rows(task, settings), peft_config=peft_config)
    return measured(task, trainer.model)


COMPARISON = Comparison(
    script=__file__,
    ours=ours,
    peer=trl,
    flags=FLAGS,
    best=BEST_FLAGS,
    others={f"{OURS}, rows at once: {number}": partial(ours, rows_at_once=number) for number in (1, 2, 4, 8)},
    make_rows=make_rows,
    counted=("supervised tokens",),
    default_examples={"cpu": 48, "cuda": 512},
    default_batch={"cpu": 8, "cuda": 32},
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
