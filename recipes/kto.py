"""Kahneman-Tversky optimization (KTO) of a language model on single answers that are marked desirable or undesirable.

    python recipes/kto.py
    accelerate launch recipes/kto.py --model Qwen/Qwen3-0.6B --learning-rate 1e-6 --dataset trl-lib/kto-mix-14k

`dpo.py` needs two answers to each prompt, this one a thumb up or down; a pair makes one of each. What differs is what the loss
measures from: a mean over answers that belong to other prompts, taken over the global batch before each step. Without an
argument it resumes from the model that `make demo` has fine-tuned.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.ReferenceConfig, tk.UnpairedConfig, tk.OptimConfig, tk.SampleConfig,
    tk.RunConfig,
):  # fmt: skip
    model: str = tk.trained_model("runs/demo/sft/model", otherwise="tiny-llama")
    dataset: str = "stdlib:dpo"
    max_length: int = 512
    learning_rate: float = 5e-4
    per_device_train_batch_size: int = 16
    warmup_steps: float = 0.05
    eval_on_start: bool = True
    output_dir: str = "runs/kto"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_unpaired(
        raw, tokenizer, config, desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight
    )
    tk.print_data_report(splits.report)
    if config.loss_type == "kto":
        splits.update(tk.mismatch_answers(splits, config.max_length))

    def make_model() -> Any:
        return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=None), config, tokenizer)

    model = make_model()
    collate = partial(tk.collate_answers, layout=tk.choose_answer_layout(model), pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = tk.build_reference(accelerator, model, make_model, train, evaluation, config)

    def logps(model: Any, answers: dict[str, Any]) -> Any:
        """Log-probabilities of the answers: of the model as it is, and of the reference, as it was."""
        before = reference(model, answers)
        return tk.answer_logps(model, answers), before

    def logps_of_mismatched(model: Any, answers: dict[str, Any]) -> Any:
        """The same of answers that belong to other prompts."""
        return tk.mismatched_logps(model, answers), reference.mismatched(model, answers)

    loss_values: dict[str, Any] = {
        "loss_type": config.loss_type, "beta": config.beta, "desirable_weight": config.desirable_weight,
        "undesirable_weight": config.undesirable_weight,
    }  # fmt: skip

    def loss_fn(model: Any, answers: dict[str, Any], totals: dict[str, float], kl: Any) -> Any:
        policy, before = logps(model, answers)
        return tk.unpaired_loss(policy, before, answers["desirable"], kl, totals, **loss_values)

    metrics = tk.unpaired_metrics(logps, logps_of_mismatched, **loss_values)
    prompts = tk.sample_prompts(raw, tokenizer, config)
    any_kl = partial(loss_fn, kl=0.0)  # it changes neither time nor memory
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, any_kl, config)

    with tk.open_run(accelerator, config, model, optimizer, train, reference_made_of=reference.made_of) as run:
        tk.keep_reference(run, reference, config)
        run.compare_with("eval_reward_auc", lambda: tk.unpaired_baselines(splits))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
            run.add_samples(tk.sample_texts(accelerator, model, tokenizer, prompts, config))
        for batch in run:
            tk.sync_reference(run, reference, model, config)
            kl = tk.estimate_kl(accelerator, model, batch, logps_of_mismatched) if config.loss_type == "kto" else 0.0
            step_loss, rates = partial(loss_fn, kl=kl), schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, step_loss, rates, max_grad_norm=config.max_grad_norm))
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
