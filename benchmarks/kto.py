"""Kahneman-Tversky optimization (KTO) next to TRL's KTOTrainer: a whole epoch, with the reference's log-probabilities.

    python benchmarks/kto.py --pairs 5
    python benchmarks/kto.py --only head-heavy:1:1 --search --pairs 1

Prompts with one answer each, every second one desirable; the lengths are those of `benchmarks/dpo.py`. Both sides compute each
answer, and one that belongs to another prompt, with the model and with its reference. Ours does what `recipes/kto.py` does:
nothing padded, the reference computed once before training. TRL (1.16) runs with its defaults (bfloat16, padded, activations
recomputed, a second model for the reference), and with the flags that save work. It takes the mean over mismatched answers of a
micro-batch, ours of the global batch: with --check, where the model is its own reference, both are 0.
`benchmarks/side_by_side.py` says what is timed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import dpo
import numpy as np
from side_by_side import OURS, Comparison, Shape, Task, compare, in_halves, on_tokenized_rows, our_settings, train_with_trl

import toolkit as tk

FLAGS: dict[str, dict[str, Any]] = {
    **{name: dpo.FLAGS[name] for name in ("float32", "no checkpointing", "reference precomputed", "eager attention")},
    "two answers at a time": {"per_device_train_batch_size": 2},
    "four answers at a time": {"per_device_train_batch_size": 4},
}
BEST_FLAGS = "two answers at a time + no checkpointing"


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.ReferenceConfig, tk.UnpairedConfig, tk.OptimConfig, tk.RunConfig
):
    """The settings of recipes/kto.py."""


def make_rows(shape: Shape, share: float, count: int, random_numbers: np.random.Generator) -> dict[str, list[Any]]:
    """The chosen answers of pairs, in our columns and in TRL's."""
    pairs = dpo.make_rows(shape, share, count, random_numbers)
    prompts, answers = pairs["prompt_ids"], pairs["chosen_ids"]
    tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    marks = [row % 2 == 0 for row in range(count)]
    return {
        "input_ids": tokens, "length": [len(row) for row in tokens], "answer": list(range(count)),
        "prompt_key": list(range(count)), "prompt_tokens": pairs["prompt_tokens"], "completion_tokens": pairs["chosen_tokens"],
        "desirable": marks, "prompt_ids": prompts, "completion_ids": answers, "label": marks,
    }  # fmt: skip


def measured(task: Task) -> dict[str, float]:
    rows = task.rows()
    return {
        "answers": task.watch.share() * len(rows), "supervised tokens": task.watch.share() * sum(rows["completion_tokens"])
    }  # fmt: skip


def ours(task: Task, **settings: Any) -> dict[str, float]:
    from datasets import DatasetDict

    config = Config(**{
        **our_settings(task), "max_length": task.shape.longest, "learning_rate": 1e-6,
        "per_device_train_batch_size": task.batch, **settings,
    })  # fmt: skip
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)

    def make_model() -> Any:
        return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=None), config, tokenizer)

    model = make_model()
    rows = task.rows().remove_columns(["prompt_ids", "completion_ids", "label"])
    splits = tk.mismatch_answers(DatasetDict(train=rows), config.max_length)
    collate = partial(tk.collate_answers, layout=tk.choose_answer_layout(model), pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(DatasetDict(splits), collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    with task.watch.running():
        reference = tk.build_reference(accelerator, model, make_model, train, evaluation, config)

    def logps_of_mismatched(model: Any, answers: dict[str, Any]) -> Any:
        return tk.mismatched_logps(model, answers), reference.mismatched(model, answers)

    def loss_fn(model: Any, answers: dict[str, Any], totals: dict[str, float], kl: Any) -> Any:
        before = reference(model, answers)
        policy = tk.answer_logps(model, answers)
        return tk.unpaired_loss(policy, before, answers["desirable"], kl, totals, loss_type=config.loss_type, beta=config.beta)

    train = tk.fit_micro_batch(accelerator, model, optimizer, train, partial(loss_fn, kl=0.0), config)
    with task.watch.running(), tk.open_run(accelerator, config, model, optimizer, train) as run:
        for batch in run:
            step_loss = partial(loss_fn, kl=tk.estimate_kl(accelerator, model, batch, logps_of_mismatched))
            rates = schedule(run.progress)
            run.log(tk.train_step(accelerator, model, optimizer, batch, step_loss, rates, max_grad_norm=config.max_grad_norm))
            task.watch.step_done()
    return measured(task)


def trl(task: Task, **settings: Any) -> dict[str, float]:
    from trl import KTOConfig, KTOTrainer

    def shifted(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"KL_completion_ids": [rows["completion_ids"][-1], *rows["completion_ids"][:-1]]}

    at_once = settings.get("per_device_train_batch_size", task.batch)
    rows = task.rows().select_columns(["prompt_ids", "completion_ids", "label"]).map(shifted, batched=True, batch_size=at_once)
    train_with_trl(task, on_tokenized_rows(KTOTrainer, task.watch), KTOConfig, rows, settings)
    return measured(task)


COMPARISON = Comparison(
    script=__file__,
    ours=ours,
    ours_too={f"{OURS}, half of the answers at a time": partial(in_halves, ours)},
    peer=trl,
    flags=FLAGS,
    best=dict.fromkeys(("cpu", "cuda"), BEST_FLAGS),
    make_rows=make_rows,
    counted=("answers", "supervised tokens"),
    default_examples={"cpu": 32, "cuda": 512},
    default_batch={"cpu": 8, "cuda": 8},  # TRL's own
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
