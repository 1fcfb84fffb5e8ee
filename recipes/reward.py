"""A reward model: which of two answers is the better one, learned from pairs of a chosen and a rejected answer.

    python recipes/reward.py
    accelerate launch recipes/reward.py --model Qwen/Qwen3-0.6B --learning-rate 1e-4 \\
        --dataset trl-lib/ultrafeedback_binarized --use-peft

`dpo.py` teaches a language model from the same pairs: the difference between the two files is model and loss. Without an
argument it resumes from the model that `make demo` has fine-tuned; a random one learns nothing from pairs in minutes.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.RankedAnswersConfig, tk.PairsConfig, tk.RewardConfig, tk.OptimConfig,
    tk.RunConfig,
):  # fmt: skip
    model: str = tk.trained_model("runs/demo/sft/model", otherwise="tiny-llama")
    dataset: str = "stdlib:dpo"
    max_length: int = 256
    learning_rate: float = 5e-4
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 16
    num_train_epochs: float = 3.0
    group_by_length: bool = True
    eval_on_start: bool = True
    output_dir: str = "runs/reward"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.pad_apart_from_end(tk.load_tokenizer(config))  # the model reads its score at the last token before padding
    splits = tk.tokenize_for_preference(
        tk.load_splits(config), tokenizer, config, pairs_per_prompt=config.pairs_per_prompt,
        max_pairs_per_prompt=config.max_pairs_per_prompt,
    )  # fmt: skip
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, packed=None, num_labels=1)
    model = tk.add_adapter(model, config, tokenizer)

    layout = tk.choose_scored_pair_layout(model, config.pair_layout)
    collate = partial(tk.collate_scored_pairs, layout=layout, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    center, margin = config.center_rewards_coefficient, config.margin_coefficient
    loss_fn = partial(tk.reward_loss, center_rewards_coefficient=center, margin_coefficient=margin)
    metrics = tk.reward_metrics(center_rewards_coefficient=center, margin_coefficient=margin)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_reward_accuracy", lambda: tk.preference_baselines(splits))
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
