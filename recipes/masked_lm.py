"""Masked language modeling: an encoder goes on learning from text, as it was pretrained.

    python recipes/masked_lm.py
    accelerate launch recipes/masked_lm.py --model answerdotai/ModernBERT-base --learning-rate 5e-5 \\
        --dataset corpus.txt --sample-by document

Which tokens are hidden is drawn anew in each epoch, and is the same in each evaluation.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.MaskedLMConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "tiny-bert"
    dataset: str = "stdlib:pretrain"
    packing: bool = True
    max_length: int = 128
    overlong: str = "split"
    mlm_probability: float = 0.3
    optim: str = "muon"
    learning_rate: float = 4e-3
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 0.6
    eval_on_start: bool = True
    output_dir: str = "runs/masked_lm"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    splits = tk.tokenize_for_masked_lm(tk.load_splits(config), tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForMaskedLM", config, tokenizer, packed=config.packing)
    model = tk.add_adapter(model, config, tokenizer)

    masks = tk.build_masks(tokenizer, config)  # a function of (seed, epoch, example) and of how far the run is
    collate = tk.collate_packed if config.packing else partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(
        splits, partial(collate, aligned=True), config, accelerator, augment=masks, augment_evaluation=masks
    )
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, tk.masked_lm_loss, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_loss", lambda: tk.masked_token_baselines(splits, evaluation, tokenizer))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, tk.masked_lm_metrics))
        for batch in run:
            rates = schedule(run.progress, run.objective)
            step = tk.train_step(
                accelerator, model, optimizer, batch, tk.masked_lm_loss, rates, max_grad_norm=config.max_grad_norm
            )
            run.log(step)
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, tk.masked_lm_metrics))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
