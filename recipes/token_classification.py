"""Token classification: a tag for each word, such as names in a sentence or the roles of tokens in code.

    python recipes/token_classification.py
    accelerate launch recipes/token_classification.py --model answerdotai/ModernBERT-base --learning-rate 5e-5 \\
        --dataset train.conll
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.TokenClassificationConfig, tk.RowsConfig, tk.RunConfig
):  # fmt: skip
    model: str = "tiny-bert"
    dataset: str = "stdlib:tag"
    max_length: int = 256
    optim: str = "muon"
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 1.0
    group_by_length: bool = True
    output_dir: str = "runs/token_classification"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.space_before_words(tk.load_tokenizer(config))
    raw = tk.load_splits(config)
    tags = tk.find_tags(raw, config)
    splits = tk.tokenize_for_token_classification(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForTokenClassification", config, tokenizer, packed=None, **tags.settings)
    model = tk.add_adapter(model, config, tokenizer)

    layout = tk.choose_row_layout(model, config.row_layout)
    collate = partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id, aligned=True, layout=layout)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    loss_fn = partial(tk.token_classification_loss, label_smoothing_factor=config.label_smoothing_factor)
    metrics = tk.tag_metrics(tags.names, tags.scheme, config.metrics, strict=config.strict_entities)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_accuracy", lambda: tk.tag_baselines(raw, tags))
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
