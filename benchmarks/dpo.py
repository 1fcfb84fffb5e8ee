"""Direct preference optimization next to TRL: a whole epoch, with the reference model's log-probabilities.

    python benchmarks/dpo.py --pairs 5
    python benchmarks/dpo.py --only head-heavy:1:1 --flags --pairs 1

Pairs of a prompt and two answers. Ours does what `recipes/dpo.py` does: prompts encoded once for both answers, the reference
computed once before training. TRL (1.16) runs with its defaults (bfloat16, padded, activations recomputed, a second model for
the reference), and with the flags that save work: on a CPU no recomputation, and one pair at a time, which pads least. What
each flag brings on this machine, --flags measures, and which to take, --search.
`benchmarks/side_by_side.py` says what is timed. On a CPU TRL's head is applied at every position, on a GPU at answers only:
its ratios don't carry over. The first steps on a GPU are not timed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from side_by_side import (
    END,
    OURS,
    Comparison,
    Shape,
    Task,
    compare,
    in_halves,
    on_tokenized_rows,
    our_settings,
    random_lengths,
    random_words,
    train_with_trl,
)

import toolkit as tk

FLAGS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "no checkpointing": {"gradient_checkpointing": False},
    "reference precomputed": {"precompute_ref_log_probs": True},
    "padding-free": {"padding_free": True},
    "eager attention": {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}},
    "two loader processes": {"dataloader_num_workers": 2},
    "one pair at a time, accumulated": {"per_device_train_batch_size": 1},
    "compiled": {"torch_compile": True},
    "Liger": {"use_liger_kernel": True},
    "Hub kernels": {"model_init_kwargs": {"dtype": "float32", "use_kernels": True}},
}
BEST_FLAGS = {  # on a CPU as --search found them head-heavy; body-heavy the reference is precomputed too
    "cpu": "one pair at a time, accumulated + eager attention + no checkpointing",
    "cuda": "no checkpointing + reference precomputed",
}  # fmt: skip


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.PairsConfig, tk.ReferenceConfig, tk.PreferenceConfig, tk.OptimConfig,
    tk.RunConfig,
):  # fmt: skip
    """The settings of recipes/dpo.py."""


def make_rows(shape: Shape, share: float, count: int, random_numbers: np.random.Generator) -> dict[str, list[Any]]:
    """Tokenized pairs, in our columns and in TRL's. `share` of prompt and mean answer together are the prompt."""
    columns: dict[str, list[Any]] = {}
    for pair, total in enumerate(random_lengths(shape, count, random_numbers).tolist()):
        mean, factors = (1 - share) * total, np.exp(random_numbers.normal(0, 0.3, size=2))
        answers = [min(max(2, round(mean * factor)), shape.longest // 2) for factor in factors]
        prompt = max(2, min(round(share * total), shape.longest - max(answers)))
        parts = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
        ids = {name: random_words(shape, size, random_numbers) for name, size in parts.items()}
        ids["chosen"][-1] = ids["rejected"][-1] = END
        row = {
            "input_ids": ids["prompt"] + ids["chosen"] + ids["rejected"], "length": sum(parts.values()), "pair": pair,
            **{f"{name}_tokens": size for name, size in parts.items()}, **{f"{name}_ids": ids[name] for name in parts},
        }  # fmt: skip
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def measured(task: Task) -> dict[str, float]:
    rows = task.rows()
    supervised = sum(rows["chosen_tokens"]) + sum(rows["rejected_tokens"])
    return {"pairs": task.watch.share() * len(rows), "supervised tokens": task.watch.share() * supervised}


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
    layout = tk.choose_pair_layout(model, config.pair_layout)
    collate = partial(tk.collate_pairs, layout=layout, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(DatasetDict(train=task.rows()), collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    with task.watch.running():
        reference = tk.build_reference(accelerator, model, make_model, train, evaluation, config, config.ld_alpha)

    def loss_fn(model: Any, pairs: dict[str, Any], totals: dict[str, float]) -> Any:
        before = reference(model, pairs)
        policy = tk.pair_logps(model, pairs, config.ld_alpha)
        return tk.preference_loss(policy, before, totals, loss_type=config.loss_type, beta=config.beta)

    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)
    with task.watch.running(), tk.open_run(accelerator, config, model, optimizer, train) as run:
        for batch in run:
            tk.sync_reference(run, reference, model, config)
            rates = schedule(run.progress)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            task.watch.step_done()
    return measured(task)


def trl(task: Task, **settings: Any) -> dict[str, float]:
    from trl import DPOConfig, DPOTrainer

    rows = task.rows().select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
    train_with_trl(task, on_tokenized_rows(DPOTrainer, task.watch), DPOConfig, rows, settings)
    return measured(task)


COMPARISON = Comparison(
    script=__file__,
    ours=ours,
    ours_too={f"{OURS}, half of the pairs at a time": partial(in_halves, ours)},
    peer=trl,
    flags=FLAGS,
    best=BEST_FLAGS,
    make_rows=make_rows,
    counted=("pairs", "supervised tokens"),
    default_examples={"cpu": 32, "cuda": 512},
    default_batch={"cpu": 8, "cuda": 8},  # TRL's own
)

if __name__ == "__main__":
    compare(COMPARISON, __doc__)
