"""Distillation next to TRL's GKDTrainer and DistillationTrainer: supervised tokens per second, and memory.

    python benchmarks/gkd.py --pairs 3
    python benchmarks/gkd.py --pairs 3 --sides "ours, own answers" "TRL GKD, own answers" "TRL GKD, own answers, best flags"

Ours does what `recipes/distill.py` does, with GKD's loss (beta .5) and AdamW as TRL: packed rows, one at a time, accumulated;
teacher and student compared at supervised positions only, or a teacher that was asked before for its 32 likeliest tokens
(`teacher s`, not in `seconds`) or for all. The teacher is twice as wide as the student. There are two epochs of one step of all
rows each, so that the first step is of the same tokens on all sides: `first loss` is the same where the losses are.

TRL runs with its defaults and `lmbda=0` (padded, activations recomputed, logits of both at every position), and with those
flags that save work. Own answers are written by the student behind each prompt (`lmbda=1`), 32 tokens each; DistillationTrainer
does only that. `benchmarks/side_by_side.py` says what is timed.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flag_search import settings_of
from sft import make_rows as tokenized_rows
from side_by_side import OURS, Comparison, Shape, Task, compare, our_settings, train_with_trl

import toolkit as tk

EPOCHS, NEW_TOKENS, RATE = 2, 32, 1e-6
FLAGS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
    "one row at a time, accumulated": {"per_device_train_batch_size": 1},
}
BEST_FLAGS = "one row at a time, accumulated + no checkpointing"
BEST_SETTINGS = settings_of(BEST_FLAGS, FLAGS)
OWN_ANSWERS = {"lmbda": 1.0, "max_new_tokens": NEW_TOKENS, "temperature": 1.0}


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.DistillationConfig, tk.SampleConfig, tk.RunConfig
):
    """The settings of recipes/distill.py."""


def twice_as_wide(shape: Shape) -> Shape:
    sizes = {name: 2 * shape.settings[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    return replace(shape, settings={**shape.settings, **sizes})


def make_rows(shape: Shape, share: float, count: int, random_numbers: np.random.Generator) -> dict[str, list[Any]]:
    """Those of `sft.py`, with the columns that say to TRL where the prompt ends."""
    columns = tokenized_rows(shape, share, count, random_numbers)
    prompts = [length - answer for length, answer in zip(columns["length"], columns["supervised_tokens"], strict=True)]
    rows = list(zip(prompts, columns["input_ids"], strict=True))
    return {
        **columns, "prompt": [" ".join(f"w{token}" for token in tokens[:prompt]) for prompt, tokens in rows],
        "completion_mask": [[0] * prompt + [1] * (len(tokens) - prompt) for prompt, tokens in rows],
    }  # fmt: skip


def measured(task: Task, tokens: float, first_loss: float, **more: float) -> dict[str, float]:
    return {"supervised tokens": task.watch.share() * EPOCHS * tokens, "first loss": first_loss, **more}


def ours(task: Task, **settings: Any) -> dict[str, float]:
    from datasets import DatasetDict

    config = Config(**{
        **our_settings(task), "teacher": task.teacher, "packing": True, "max_length": task.shape.longest, "learning_rate": RATE,
        "per_device_train_batch_size": 1, "global_batch_size": task.batch, "num_train_epochs": EPOCHS,
        "distillation_loss": "jsd", **settings,
    })  # fmt: skip
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=config.packing)
    rows = task.rows().select_columns(["input_ids", "labels", "length", "supervised_tokens"])
    train, evaluation = tk.build_dataloaders(DatasetDict(train=rows), tk.collate_packed, config, accelerator)
    train.global_batch_size = train.epoch_size  # packed rows are fewer than texts
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    began = task.watch.now()
    teacher, train, _ = tk.build_teacher(
        accelerator, model, tokenizer, config, train, evaluation, teacher=config.teacher, max_length=config.max_length,
        packed=config.packing,
    )  # fmt: skip
    asked = {"teacher s": task.watch.now() - began} if config.teacher_top_k else {}

    def loss_fn(model: Any, micro_batch: dict[str, Any], totals: dict[str, float]) -> Any:
        return tk.distillation_loss(
            model, micro_batch, totals, teacher=teacher, divergence=config.distillation_loss, beta=config.beta
        )

    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)
    losses, tokens = list[float](), 0.0
    with task.watch.running(), tk.open_run(accelerator, config, model, optimizer, train) as run:
        for batch in run:
            batch = tk.with_own_answers(accelerator, model, tokenizer, train, batch, config)
            values = tk.train_step(accelerator, model, optimizer, batch, loss_fn, schedule(run.progress), max_grad_norm=1.0)
            run.log(values)
            losses.append(values["loss"].item())
            tokens += batch.totals["tokens"]
            task.watch.step_done()
    return measured(task, tokens / EPOCHS, losses[0], **asked)


def trl(task: Task, **settings: Any) -> dict[str, float]:
    """GKDTrainer."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    settings = {"lmbda": 0.0, **settings}
    return _train(task, GKDTrainer, GKDConfig, task.rows(), settings, own=settings["lmbda"] == 1.0)


def distillation_trainer(task: Task, **settings: Any) -> dict[str, float]:
    from trl import DistillationConfig, DistillationTrainer

    def without_max_length(max_length: int, **arguments: Any) -> Any:
        return DistillationConfig(**arguments)

    settings = {"beta": 0.5, "max_completion_length": NEW_TOKENS, **settings}
    return _train(task, DistillationTrainer, without_max_length, task.rows().select_columns(["prompt"]), settings, own=True)


def _train(task: Task, trainer: Any, arguments: Any, rows: Any, settings: dict[str, Any], own: bool) -> dict[str, float]:
    """Each step is logged, so that the first one's loss is known."""
    schedule = {"num_train_epochs": EPOCHS, "logging_steps": 1, "learning_rate": RATE}
    settings = {"teacher_model_init_kwargs": {"dtype": "float32"}, **schedule, **settings}
    train_with_trl(task, trainer, arguments, rows, settings, teacher_model=task.teacher)
    tokens = NEW_TOKENS * len(rows) if own else sum(task.rows()["supervised_tokens"])
    return measured(task, tokens, task.watch.logged["loss"])


def all_stored(task: Task, **settings: Any) -> dict[str, float]:
    return ours(task, teacher_top_k=task.shape.settings["vocab_size"], **settings)


COMPARISON = Comparison(
    script=__file__,
    ours=ours,
    ours_too={f"{OURS}, 32 stored": partial(ours, teacher_top_k=32)},
    peer=trl,
    flags=FLAGS,
    best=dict.fromkeys(("cpu", "cuda"), BEST_FLAGS),
    others={
        f"{OURS}, all stored": all_stored,
        f"{OURS}, own answers": partial(ours, on_policy_share=1.0, max_new_tokens=NEW_TOKENS),
        "TRL GKD, own answers": partial(trl, **OWN_ANSWERS),
        "TRL GKD, own answers, best flags": partial(trl, **OWN_ANSWERS, **BEST_SETTINGS),
        "TRL DistillationTrainer": distillation_trainer,
        "TRL DistillationTrainer, best flags": partial(distillation_trainer, gradient_checkpointing=False),
    },
    make_rows=make_rows,
    counted=("supervised tokens",),
    default_examples={"cpu": 8, "cuda": 32},
    default_batch={"cpu": 8, "cuda": 32},
    teacher_of=twice_as_wide,
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
