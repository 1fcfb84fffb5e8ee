"""Distillation next to TRL's GKDTrainer and DistillationTrainer: supervised tokens per second, and memory.

    python benchmarks/gkd.py --float32 --pairs 3
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
from side_by_side import OURS, Comparison, Shape, Task, compare, first_step_callback, our_settings, trl_arguments

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
    """GKDTrainer. What a run of it asks first is the loss of its first step, which `logging_steps` has it say."""
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    arguments = {"lmbda": 0.0, **_arguments(task, settings)}
    trainer = GKDTrainer(
        model=task.model, teacher_model=task.teacher, args=GKDConfig(**arguments), train_dataset=task.rows(),
        processing_class=AutoTokenizer.from_pretrained(task.model), callbacks=[first_step_callback(task.watch)],
    )  # fmt: skip
    return _train(task, trainer, own=arguments["lmbda"] == 1.0)


def distillation_trainer(task: Task, **settings: Any) -> dict[str, float]:
    from transformers import AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    arguments = _arguments(task, {"beta": 0.5, "max_completion_length": NEW_TOKENS, **settings})
    del arguments["max_length"]
    trainer = DistillationTrainer(
        model=task.model, teacher_model=task.teacher, args=DistillationConfig(**arguments),
        train_dataset=task.rows().select_columns(["prompt"]), processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[first_step_callback(task.watch)],
    )  # fmt: skip
    return _train(task, trainer, own=True)


def _arguments(task: Task, settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("per_device_train_batch_size") == 1:
        settings = {**settings, "gradient_accumulation_steps": task.batch}  # a step is of as many rows, however they are cut
    schedule = {"num_train_epochs": EPOCHS, "logging_steps": 1, "learning_rate": RATE}
    return trl_arguments(task, {"teacher_model_init_kwargs": {"dtype": "float32"}, **schedule, **settings})


def _train(task: Task, trainer: Any, own: bool) -> dict[str, float]:
    with task.watch.running():
        trainer.train()
    rows = task.rows()
    losses = [said["loss"] for said in trainer.state.log_history if "loss" in said]
    return measured(task, NEW_TOKENS * len(rows) if own else sum(rows["supervised_tokens"]), losses[0])


def all_stored(task: Task) -> dict[str, float]:
    return ours(task, teacher_top_k=task.shape.settings["vocab_size"])


COMPARISON = Comparison(
    script=__file__,
    ours=ours,
    ours_too={f"{OURS}, 32 stored": partial(ours, teacher_top_k=32)},
    peer=trl,
    flags=FLAGS,
    best=dict.fromkeys(("cpu", "cuda"), BEST_FLAGS),
    others={
        f"{OURS}, all stored, float32": all_stored,
        f"{OURS}, own answers": partial(ours, on_policy_share=1.0, max_new_tokens=NEW_TOKENS),
        "TRL GKD, own answers": partial(trl, **OWN_ANSWERS, bf16=False),
        "TRL GKD, own answers, best flags": partial(trl, **OWN_ANSWERS, **BEST_SETTINGS, bf16=False),
        "TRL DistillationTrainer": partial(distillation_trainer, bf16=False),
        "TRL DistillationTrainer, best flags": partial(distillation_trainer, gradient_checkpointing=False, bf16=False),
    },
    make_rows=make_rows,
    counted=("supervised tokens",),
    default_examples={"cpu": 8, "cuda": 32},
    default_batch={"cpu": 8, "cuda": 32},
    teacher_of=twice_as_wide,
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
