"""Multiple choice: an encoder reads a question with each of its choices, and the highest score is the answer.

    python recipes/multiple_choice.py
    accelerate launch recipes/multiple_choice.py --model answerdotai/ModernBERT-base --learning-rate 3e-5 \\
        --dataset questions.jsonl

Rows as those of SWAG, RACE, ARC, CommonsenseQA, HellaSwag and MMLU are read as they are. Questions may have different numbers
of choices: an example is a question, a batch of 16 is 16 of them, and the loss is the cross-entropy over the choices of each.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "tiny-bert-uncased"
    dataset: str = "stdlib:choose"
    max_length: int = 192
    learning_rate: float = 5e-4
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 16
    num_train_epochs: float = 3.0
    eval_on_start: bool = True
    metric_for_best_model: str = "eval_accuracy"
    output_dir: str = "runs/multiple_choice"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_multiple_choice(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForMultipleChoice", config, tokenizer)
    model = tk.add_adapter(model, config, tokenizer)

    collate = partial(tk.collate_lists, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    loss_fn, metrics = tk.multiple_choice_loss, tk.multiple_choice_metrics
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_accuracy", lambda: tk.choice_baselines(raw))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
