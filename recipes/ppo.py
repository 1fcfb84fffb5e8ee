"""Reinforcement learning of a language model by PPO, with a value head that estimates the worth of each token.

    python recipes/sft.py --config recipes/configs/arithmetic_start.yaml
    python recipes/ppo.py
    accelerate launch recipes/ppo.py --model Qwen/Qwen3-0.6B --learning-rate 1e-6 \\
        --dataset prompts.jsonl --reward-funcs runs/reward

The policy answers prompts, rewards score the answers (functions, or a reward model that recipes/reward.py made), and
a penalty keeps it near the model it began as. A linear layer on its hidden states learns to predict the reward; tokens after
which things went better than predicted become likelier. The first line makes the model that the second one starts from.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.PromptConfig, tk.RolloutConfig, tk.RewardFunctionsConfig,
    tk.PPOConfig, tk.OptimConfig, tk.RunConfig,
):  # fmt: skip
    model: str = tk.trained_model("runs/arithmetic/model", otherwise="tiny-llama")
    dataset: str = "synthetic:arithmetic"
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    max_completion_length: int = 8
    eval_temperature: float = 1.0
    beta: float = 0.01
    optim: str = "muon"
    learning_rate: float = 4e-4
    lr_patterns: list[str] = field(default_factory=lambda: ["value_head=20"])  # it begins at 0
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 1024
    num_generations: int = 4
    num_iterations: int = 2
    max_steps: int | None = 120
    dropout: float = 0.0
    eval_steps: int = 40
    eval_strategy: str = "steps"
    eval_on_start: bool = True
    metric_for_best_model: str = "eval_reward"
    output_dir: str = "runs/ppo"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    server = tk.connect_server(accelerator, config, tokenizer, config.output_dir)
    raw = tk.load_splits(config)
    rewards = tk.load_rewards(config, tokenizer, raw)
    splits = tk.tokenize_for_prompts(raw, tokenizer, config)
    tk.print_data_report(splits.report)

    def make_model() -> Any:
        return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=None), config, tokenizer)

    model = tk.add_value_head(make_model())
    collate = partial(
        tk.collate_rollouts, layout=tk.choose_pair_layout(model), pad_token_id=tokenizer.pad_token_id,
        mask_truncated_completions=config.mask_truncated_completions, mask_unscored_completions=True,
    )  # fmt: skip
    prompts = tk.in_prompts(config, config.num_generations, accelerator)
    train, evaluation = tk.build_dataloaders(splits, tk.collate_prompts, prompts, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    drawn, asked = (tk.sampling_settings(config, model, tokenizer, splits, evaluates=each) for each in (False, True))
    model, optimizer = accelerator.prepare(model, optimizer)

    def before_updates(model: Any, completions: dict[str, Any]) -> dict[str, Any]:
        logps, _, values = tk.logps_and_values(model, completions, config.temperature)
        return {"old_logps": logps, "old_values": values}

    def logps_of(model: Any, completions: dict[str, Any]) -> Any:
        return tk.rollout_logps(model, completions, config.temperature)[0]

    before: dict[str, Any] = {"old": before_updates}
    if config.beta:
        before["reference_logps"] = tk.reference_logps(accelerator, make_model, config, logps_of, model=config.model)

    def loss_fn(model: Any, completions: dict[str, Any], totals: dict[str, float]) -> Any:
        logps, entropies, values = tk.logps_and_values(model, completions, config.temperature, config.entropy_coef > 0)
        policy_loss, of_policy = tk.policy_loss(
            logps, completions["old_logps"], completions["advantages"], completions["mask"], totals, loss_type="ppo",
            epsilon=config.epsilon, epsilon_high=config.epsilon_high, delta=config.delta,
            entropy_coef=config.entropy_coef, entropies=entropies,
            sampler_weights=completions.get("sampler_weights"),
        )  # fmt: skip
        value_loss, of_values = tk.value_loss(
            values, completions["old_values"], completions["returns"], completions["mask"], totals,
            cliprange_value=config.cliprange_value,
        )  # fmt: skip
        both = {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach()}
        return policy_loss + config.vf_coef * value_loss, {**both, **of_policy, **of_values}

    faults: dict[str, Any] = {"on_error": config.on_reward_error, "output": config.reward_output}  # of reward functions
    metrics = tk.sampled_reward_metrics(accelerator, tokenizer, rewards, asked, seed=config.seed, **faults)
    size = config.per_device_train_batch_size

    made_of = tk.rewards_made_of(config, config.model if config.beta else None)
    with tk.open_run(accelerator, config, model, optimizer, train, reference_made_of=made_of) as run:
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
        for batch in run:
            phase = tk.open_phase(
                accelerator, model, config.output_dir, run.step, drawn, seed=config.seed, source=config.rollouts_from
            )
            rollouts = tk.sample_rollouts(
                accelerator, model, tokenizer, batch, drawn, num_generations=config.num_generations, seed=config.seed,
                phase=phase, server=server,
            )  # fmt: skip
            rollouts = tk.score_rollouts(rollouts, rewards, accelerator, say=run.say, **faults)
            tk.save_rollouts(accelerator, phase, rollouts, config.rollouts_total_limit)
            rollouts = tk.with_logps(accelerator, model, rollouts, collate, micro_batch_size=size, **before)
            rollouts, of_server = tk.correct_for_server(
                server, rollouts, correction=config.importance_sampling_correction, mode=config.importance_sampling_mode,
                clip_max=config.importance_sampling_clip_max, clip_min=config.importance_sampling_clip_min,
            )  # fmt: skip
            rollouts, advantages, of_step = tk.token_advantages(
                rollouts, beta=config.beta, kl_estimator=config.kl_estimator, gamma=config.gamma, lam=config.lam,
                whiten_rewards=config.whiten_rewards, missing_eos_penalty=config.missing_eos_penalty or 0.0,
                mask_truncated_completions=config.mask_truncated_completions,
            )  # fmt: skip
            updates = tk.policy_batches(
                accelerator, rollouts, advantages, collate, micro_batch_size=size, seed=config.seed,
                steps_per_generation=config.steps_per_generation, num_iterations=config.num_iterations, position=batch.position,
            )  # fmt: skip
            rates = schedule(run.progress, run.objective)
            steps = [
                tk.train_step(accelerator, model, optimizer, update, loss_fn, rates, max_grad_norm=config.max_grad_norm)
                for update in updates
            ]
            run.log({**tk.mean_metrics(steps), **of_step, **of_server, **tk.rollout_metrics(rollouts, phase)})
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
