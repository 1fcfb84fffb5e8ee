"""Masked diffusion: a language model that writes the tokens of a text in any order, from scratch or from a trained model.

    python recipes/diffusion.py
    accelerate launch recipes/diffusion.py --model Qwen/Qwen3-0.6B --learning-rate 1e-5 --dataset trl-lib/Capybara

Tokens are hidden, few or all of them, and the model predicts them from both sides (LLaDA). Of prompts with answers only
the answers are hidden.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.DiffusionConfig, tk.OptimConfig, tk.SampleConfig, tk.RunConfig
):
    model: str = "nano-llama"
    dataset: str = "stdlib:pretrain"
    packing: bool = True
    overlong: str = "split"
    max_length: int = 128
    optim: str = "muon"
    learning_rate: float = 1e-2
    min_lr_ratio: float = 0.05
    warmup_steps: float = 0.02
    per_device_train_batch_size: int = 32
    max_steps: int | None = 500
    eval_strategy: str = "steps"
    eval_steps: int = 250
    logging_steps: int = 20
    eval_on_start: bool = True
    output_dir: str = "runs/diffusion"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_diffusion_tokenizer(config)
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_diffusion(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_diffusion_model(config, tokenizer, packed=config.packing)
    model = tk.add_adapter(model, config, tokenizer)

    noise = tk.build_noise(model, config)  # a function of (seed, epoch, example)
    collate = tk.collate_packed if config.packing else partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(
        splits, partial(collate, aligned=True), config, accelerator, augment=noise, augment_evaluation=noise
    )
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    prompts = tk.sample_prompts(raw, tokenizer, config)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, tk.diffusion_loss, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_loss", lambda: tk.answer_baselines(splits, len(tokenizer)))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, tk.diffusion_metrics))
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(
                tk.train_step(
                    accelerator, model, optimizer, batch, tk.diffusion_loss, rates, max_grad_norm=config.max_grad_norm
                )
            )
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, tk.diffusion_metrics))
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
