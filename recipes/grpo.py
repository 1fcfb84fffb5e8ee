"""Reinforcement learning of a language model on rewards: GRPO and its relatives (DAPO, Dr. GRPO, GSPO, CISPO, RLOO).

    python recipes/sft.py --config recipes/configs/arithmetic_start.yaml
    python recipes/grpo.py
    accelerate launch recipes/grpo.py --model Qwen/Qwen3-0.6B --learning-rate 1e-6 --dataset openai/gsm8k --reward-funcs number

The policy answers each prompt several times, and answers with a better reward than others of their group become likelier.
The first line above makes the model that the second one starts from.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.PromptConfig, tk.RolloutConfig, tk.RewardFunctionsConfig,
    tk.PolicyConfig, tk.OptimConfig, tk.RunConfig,
):  # fmt: skip
    model: str = tk.trained_model("runs/arithmetic/model", otherwise="tiny-llama")
    dataset: str = "synthetic:arithmetic"
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    max_completion_length: int = 8
    scale_rewards: str = "none"
    eval_temperature: float = 1.0
    optim: str = "muon"
    learning_rate: float = 6e-4
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 1024
    num_generations: int = 8
    max_steps: int | None = 220
    dropout: float = 0.0
    eval_steps: int = 40
    eval_strategy: str = "steps"
    eval_on_start: bool = True
    metric_for_best_model: str = "eval_reward"
    output_dir: str = "runs/grpo"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    server = tk.connect_server(accelerator, config, tokenizer, config.output_dir)
    environment = tk.load_environment(config, tokenizer)
    raw = tk.load_splits(config)
    rewards = tk.load_rewards(config, tokenizer, raw)
    splits = tk.tokenize_for_prompts(raw, tokenizer, config)
    tk.print_data_report(splits.report)

    def make_model() -> Any:
        return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=None), config, tokenizer)

    model = make_model()
    collate = partial(
        tk.collate_rollouts, layout=tk.choose_pair_layout(model), pad_token_id=tokenizer.pad_token_id,
        mask_truncated_completions=config.mask_truncated_completions,
    )  # fmt: skip
    in_prompts = tk.in_prompts(config, config.num_generations, accelerator)
    train, evaluation = tk.build_dataloaders(splits, tk.collate_prompts, in_prompts, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    drawn, asked = (tk.sampling_settings(config, model, tokenizer, splits, evaluates=each) for each in (False, True))
    model, optimizer = accelerator.prepare(model, optimizer)

    def logps_of(model: Any, completions: dict[str, Any]) -> Any:
        return tk.rollout_logps(model, completions, config.temperature)[0]

    before: dict[str, Any] = {}  # log-probabilities that are needed before the first update
    if server or config.steps_per_generation * config.num_iterations > 1:
        before["old_logps"] = logps_of
    if config.beta:
        before["reference_logps"] = tk.reference_logps(accelerator, make_model, config, logps_of, model=config.model)
    kl_in, kl_estimator = tk.choose_kl(config.loss_type, config.kl_in, config.kl_estimator)
    estimator, scale = tk.choose_advantages(config.loss_type, config.advantage_estimator, config.scale_rewards)

    def loss_fn(model: Any, completions: dict[str, Any], totals: dict[str, float]) -> Any:
        logps, entropies = tk.rollout_logps(model, completions, config.temperature, config.entropy_coef > 0)
        return tk.policy_loss(
            logps, completions.get("old_logps"), completions["advantages"], completions["mask"], totals,
            loss_type=config.loss_type, epsilon=config.epsilon, epsilon_high=config.epsilon_high, delta=config.delta,
            importance_sampling_level=config.importance_sampling_level, max_completion_length=config.max_completion_length,
            beta=config.beta if kl_in == "loss" else 0.0, reference_logps=completions.get("reference_logps"),
            kl_estimator=kl_estimator, use_bias_correction_kl=config.use_bias_correction_kl,
            entropy_coef=config.entropy_coef, entropies=entropies,
            sampler_weights=completions.get("sampler_weights"),
        )  # fmt: skip

    faults: dict[str, Any] = {"on_error": config.on_reward_error, "output": config.reward_output}  # of reward functions
    metrics = tk.sampled_reward_metrics(
        accelerator, tokenizer, rewards, asked, seed=config.seed, environment=environment, **faults
    )
    size = config.per_device_train_batch_size
    made_of = tk.rewards_made_of(config, config.model if config.beta else None)
    with tk.open_run(accelerator, config, model, optimizer, train, reference_made_of=made_of) as run:
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
        for batch in run:
            step, source = run.step, config.rollouts_from
            phase = tk.open_phase(accelerator, model, config.output_dir, step, drawn, seed=config.seed, source=source)
            sampled: list[tk.Rollout] = []
            prompts: tk.Batch | None = batch
            while prompts:
                rollouts = tk.sample_rollouts(
                    accelerator, model, tokenizer, prompts, drawn, num_generations=config.num_generations, seed=config.seed,
                    phase=phase, environment=environment, server=server,
                )  # fmt: skip
                sampled += tk.score_rollouts(rollouts, rewards, accelerator, say=run.say, **faults)
                prompts = run.take(tk.prompts_to_add(sampled, batch.size, config.dynamic_sampling * batch.size))
            tk.save_rollouts(accelerator, phase, sampled, config.rollouts_total_limit)
            rollouts = tk.groups_with_spread(sampled, batch.size)
            if before:
                rollouts = tk.with_logps(accelerator, model, rollouts, collate, micro_batch_size=size, **before)
            rollouts, of_server = tk.correct_for_server(
                server, rollouts, correction=config.importance_sampling_correction, mode=config.importance_sampling_mode,
                clip_max=config.importance_sampling_clip_max, clip_min=config.importance_sampling_clip_min,
            )  # fmt: skip
            scores = tk.shaped_rewards(
                rollouts, max_completion_length=config.max_completion_length, overlong_cache=config.overlong_cache,
                beta=config.beta if kl_in == "reward" else 0.0, kl_estimator=kl_estimator,
            )  # fmt: skip
            advantages = tk.advantages(
                scores, estimator=estimator, scale_rewards=scale, normalize_advantages=config.normalize_advantages
            )
            updates = tk.policy_batches(
                accelerator, rollouts, advantages.flatten(), collate, micro_batch_size=size, seed=config.seed,
                steps_per_generation=config.steps_per_generation, num_iterations=config.num_iterations, position=batch.position,
            )  # fmt: skip
            rates = schedule(run.progress, run.objective)
            steps = [
                tk.train_step(accelerator, model, optimizer, update, loss_fn, rates, max_grad_norm=config.max_grad_norm)
                for update in updates
            ]
            run.log({**tk.mean_metrics(steps), **of_server, **tk.rollout_metrics(sampled, phase, rollouts)})
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                run.add_samples(tk.best_and_worst(rollouts, config.num_samples))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
