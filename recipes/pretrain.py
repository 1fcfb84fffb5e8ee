"""Pretraining from scratch: a byte-level tokenizer and a causal language model, both made from the text at hand.

    python recipes/pretrain.py
    accelerate launch recipes/pretrain.py --dataset my_texts/ --hidden-size 512 --num-hidden-layers 12
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.SampleConfig, tk.RunConfig):
    dataset: str = "stdlib:pretrain"
    sample_by: str = "document"
    packing: bool = True
    packing_strategy: str = "wrapped"
    overlong: str = "split"
    max_length: int = 256
    optim: str = "muon"
    learning_rate: float = 5e-3
    min_lr_ratio: float = 0.05
    warmup_steps: float = 0.02
    per_device_train_batch_size: int = 4
    max_steps: int | None = 800
    eval_strategy: str = "steps"
    eval_steps: int = 400
    logging_steps: int = 20
    output_dir: str = "runs/pretrain"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    raw = tk.load_splits(config)
    if config.tokenizer is None and tk.is_built_in(config.model):
        tokenizer = tk.train_tokenizer(tk.texts_of(raw["train"]), config.vocab_size or 4096)
    else:
        tokenizer = tk.load_tokenizer(config)
    splits = tk.tokenize_for_lm(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=config.packing)

    collate = tk.collate_packed if config.packing else tk.collate_padded
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = partial(tk.causal_lm_loss, label_smoothing_factor=config.label_smoothing_factor, z_loss=config.z_loss)
    metrics = tk.causal_lm_metrics_with_bytes(splits, tokenizer)
    prompts = tk.sample_prompts(raw, tokenizer, config)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_bits_per_byte", lambda: tk.text_baselines(splits, tokenizer))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                run.add_samples(tk.sample_texts(accelerator, model, tokenizer, prompts, config))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
