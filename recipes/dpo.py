"""Direct preference optimization (DPO) of a language model on pairs of a chosen and a rejected answer.

    python recipes/dpo.py
    accelerate launch recipes/dpo.py --config recipes/configs/qwen3_0.6b_dpo.yaml

Without an argument it resumes from the model that `make demo` has fine-tuned. A random one, which it takes where that is not
there, learns nothing from pairs in minutes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.RankedAnswersConfig, tk.PairsConfig, tk.ReferenceConfig,
    tk.PreferenceConfig, tk.OptimConfig, tk.SampleConfig, tk.RunConfig,
):  # fmt: skip
    model: str = tk.trained_model("runs/demo/sft/model", otherwise="tiny-llama")
    dataset: str = "stdlib:dpo"
    max_length: int = 512
    learning_rate: float = 5e-4
    warmup_steps: float = 0.05
    eval_on_start: bool = True
    output_dir: str = "runs/dpo"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_preference(
        raw, tokenizer, config, pairs_per_prompt=config.pairs_per_prompt, max_pairs_per_prompt=config.max_pairs_per_prompt
    )
    tk.print_data_report(splits.report)

    def make_model() -> Any:
        return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=None), config, tokenizer)

    model = make_model()
    layout = tk.choose_pair_layout(model, config.pair_layout)
    collate = partial(tk.collate_pairs, layout=layout, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = tk.build_reference(accelerator, model, make_model, train, evaluation, config, config.ld_alpha)

    def logps(model: Any, pairs: dict[str, Any]) -> Any:
        """Log-probabilities of both answers: of the model as it is, and of the reference, as it was."""
        before = reference(model, pairs)
        return tk.pair_logps(model, pairs, config.ld_alpha), before

    loss_values: dict[str, Any] = {
        "loss_type": config.loss_type, "loss_weights": config.loss_weights, "beta": config.beta,
        "label_smoothing": config.label_smoothing, "f_divergence_type": config.f_divergence_type,
        "f_alpha_divergence_coef": config.f_alpha_divergence_coef, "discopop_tau": config.discopop_tau,
        "simpo_gamma": config.simpo_gamma, "cpo_alpha": config.cpo_alpha,
    }  # fmt: skip

    def loss_fn(model: Any, pairs: dict[str, Any], totals: dict[str, float]) -> Any:
        policy, before = logps(model, pairs)
        return tk.preference_loss(policy, before, totals, **loss_values)

    metrics = tk.preference_metrics(logps, **loss_values)
    prompts = tk.sample_prompts(raw, tokenizer, config)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train, reference_made_of=reference.made_of) as run:
        tk.keep_reference(run, reference, config)
        run.compare_with("eval_reward_accuracy", lambda: tk.preference_baselines(splits))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
            run.add_samples(tk.sample_texts(accelerator, model, tokenizer, prompts, config))
        for batch in run:
            tk.sync_reference(run, reference, model, config)
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
