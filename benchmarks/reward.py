"""A reward model next to TRL's RewardTrainer: a whole epoch of pairs.

    python benchmarks/reward.py --pairs 5
    python benchmarks/reward.py --only head-heavy:1:1 --flags --pairs 1

Pairs of a prompt and two answers, those of `benchmarks/dpo.py`. Ours does what `recipes/reward.py` does, two pairs at a time:
prompts encoded once for both answers, nothing padded. TRL (1.16) runs with its defaults (bfloat16, padded, activations
recomputed), and with the flags that save work: on a CPU no recomputation, and one pair at a time, which pads least. What each
flag brings on this machine, --flags measures.
`benchmarks/side_by_side.py` says what is timed. Never run on a GPU yet (--device cuda).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import dpo
from side_by_side import Comparison, Task, compare, our_settings, train_with_trl

import toolkit as tk

FLAGS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
    "one pair at a time": {"per_device_train_batch_size": 1},
    "two pairs at a time": {"per_device_train_batch_size": 2},
    "lengths grouped": {"train_sampling_strategy": "group_by_length", "length_column_name": "length"},
    "eager attention": {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}},
    "two loader processes": {"dataloader_num_workers": 2},
}
BEST_FLAGS = {"cpu": "no checkpointing + one pair at a time", "cuda": "no checkpointing"}


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.RankedAnswersConfig, tk.PairsConfig, tk.RewardConfig, tk.OptimConfig,
    tk.RunConfig,
):  # fmt: skip
    """The settings of recipes/reward.py."""


def ours(task: Task, **settings: Any) -> dict[str, float]:
    from datasets import DatasetDict

    config = Config(**{
        **our_settings(task), "max_length": task.shape.longest, "learning_rate": 1e-6,
        "per_device_train_batch_size": 2, "global_batch_size": task.batch, **settings,
    })  # fmt: skip
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.pad_apart_from_end(tk.load_tokenizer(config))
    model = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, packed=None, num_labels=1)
    layout = tk.choose_scored_pair_layout(model, config.pair_layout)
    collate = partial(tk.collate_scored_pairs, layout=layout, pad_token_id=tokenizer.pad_token_id)
    train, _ = tk.build_dataloaders(DatasetDict(train=task.rows()), collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, tk.reward_loss, config)
    with task.watch.running(), tk.open_run(accelerator, config, model, optimizer, train) as run:
        for batch in run:
            rates = schedule(run.progress)
            norm = config.max_grad_norm
            run.log(tk.train_step(accelerator, model, optimizer, batch, tk.reward_loss, rates, max_grad_norm=norm))
            task.watch.step_done()
    return dpo.measured(task)


def trl(task: Task, **settings: Any) -> dict[str, float]:
    from trl import RewardConfig, RewardTrainer

    def whole(row: dict[str, list[int]]) -> dict[str, Any]:
        chosen, rejected = (row["prompt_ids"] + row[f"{name}_ids"] for name in ("chosen", "rejected"))
        return {"chosen_ids": chosen, "rejected_ids": rejected, "length": max(len(chosen), len(rejected))}

    rows = task.rows()
    train_with_trl(task, RewardTrainer, RewardConfig, rows.map(whole, remove_columns=rows.column_names), settings)
    return dpo.measured(task)


COMPARISON = Comparison(
    script=__file__,
    ours=ours,
    peer=trl,
    flags=FLAGS,
    best=BEST_FLAGS,
    make_rows=dpo.make_rows,
    counted=("pairs", "supervised tokens"),
    default_examples={"cpu": 64, "cuda": 512},
    default_batch={"cpu": 8, "cuda": 8},  # TRL's own
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
