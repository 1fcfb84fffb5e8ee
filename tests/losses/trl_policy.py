"""TRL's own policy-gradient losses and advantages: its trainers' methods on given log-probabilities and rewards.

The trainers are made without their `__init__`, which wants a real model and a data set; what the methods read is set here.
"""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class _Nothing(nn.Module):
    is_gradient_checkpointing = False


def grpo(
    tables: dict[str, torch.Tensor],
    mask: torch.Tensor,
    advantages: torch.Tensor,
    *,
    sampler_ratio: torch.Tensor | None = None,
    accumulation: int = 1,
    steps_per_generation: int | None = None,
    num_items_in_batch: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """GRPOTrainer's loss of one micro-batch and what it logs.

    tables: "logps", and where they are needed "old_logps", "reference_logps", "entropies"; settings: those of GRPOConfig;
    num_items_in_batch: tokens of the generation batch, where it is more than this micro-batch.
    """
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(output_dir="unused", report_to="none", bf16=False, num_generations=2, per_device_train_batch_size=2, **settings)
    trainer = object.__new__(GRPOTrainer)
    trainer.args, trainer.accelerator, trainer.aux_loss_enabled = args, _alone(), False
    trainer.model = _Nothing()
    for name in ("loss_type", "importance_sampling_level", "beta", "entropy_coef", "off_policy_mask_threshold", "max_completion_length",
                 "top_entropy_quantile", "use_adaptive_entropy"):  # fmt: skip
        setattr(trainer, name, getattr(args, name))
    trainer.epsilon_low, trainer.epsilon_high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = sampler_ratio is not None
    trainer._entropy_bonus_enabled = args.entropy_coef != 0
    trainer.current_gradient_accumulation_steps = accumulation
    args.steps_per_generation = steps_per_generation or accumulation
    trainer._metrics = {"train": defaultdict(list)}
    entropies = tables.get("entropies", torch.zeros_like(tables["logps"]))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (tables["logps"], entropies, None)
    tokens = float(mask.sum()) if num_items_in_batch is None else num_items_in_batch
    inputs = {**_inputs(mask, advantages), "num_items_in_batch": torch.tensor(tokens)}
    inputs |= {f"{name}_per_token_logps": tables[key] for name, key in (("old", "old_logps"), ("ref", "reference_logps")) if key in tables}
    if sampler_ratio is not None:
        inputs["importance_sampling_ratio"] = sampler_ratio
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def rloo(
    logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """RLOOTrainer's loss of a batch and what it logs."""
    from trl import RLOOConfig, RLOOTrainer

    args = RLOOConfig(output_dir="unused", report_to="none", bf16=False, num_generations=2, per_device_train_batch_size=2, **settings)
    trainer = object.__new__(RLOOTrainer)
    trainer.args, trainer.accelerator, trainer.aux_loss_enabled = args, _alone(), False
    trainer.model = _Nothing()
    trainer.epsilon_low, trainer.epsilon_high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    inputs = {**_inputs(mask, advantages), "old_logps": (old_logps * mask).sum(1)}
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def advantages(
    trainer_name: str,
    rewards: torch.Tensor,
    logps: torch.Tensor | None = None,
    reference_logps: torch.Tensor | None = None,
    **settings: Any,
) -> torch.Tensor:
    """What GRPOTrainer or RLOOTrainer makes of rewards `[groups, G]`, NaN where no function applied: the whole of the method
    that samples and scores. Log-probabilities `[groups * G, tokens]`; a token is masked where that of the reference is NaN, and
    must be at the end."""
    import trl

    args = getattr(trl, f"{trainer_name}Config")(
        output_dir="unused", report_to="none", bf16=False, num_generations=rewards.shape[1], per_device_train_batch_size=rewards.numel(),
        **settings,
    )  # fmt: skip
    trainer: Any = object.__new__(getattr(trl, f"{trainer_name}Trainer"))
    trainer.args, trainer.accelerator, trainer.model = args, _alone(), _Nothing()
    args.steps_per_generation, rows = 1, rewards.numel()
    logps = torch.zeros(rows, 1) if logps is None else logps
    reference_logps = logps if reference_logps is None else reference_logps
    trainer.num_generations = rewards.shape[1]
    for name in ("beta", "num_iterations", "mask_truncated_completions", "pad_to_multiple_of", "reward_clip_range", "normalize_advantages",
                 "multi_objective_aggregation", "scale_rewards"):  # fmt: skip
        setattr(trainer, name, getattr(args, name, None))
    trainer.pad_to_multiple_of = trainer.environment_factories = trainer.tools = None
    trainer.ref_model = _Nothing()
    trainer.environments, trainer.use_vllm, trainer.log_multimodal = [], False, False
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.reward_weights, trainer.reward_funcs, trainer.reward_func_names = torch.ones(1), [None], ["reward"]
    trainer._metrics, trainer._logs = {"train": defaultdict(list)}, defaultdict(list, rewards=defaultdict(list), extra={})
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._calculate_rewards = lambda *_: rewards.reshape(-1, 1)
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        (logps if model is trainer.model else reference_logps.nan_to_num(0.0)), None, None
    )
    ids = [[1] * int((~row.isnan()).sum()) for row in reference_logps]
    made = (ids, ids, None, [""] * rows, None, {}, None, None) if trainer_name == "GRPO" else (ids, ids, [""] * rows)
    trainer._generate = lambda prompts: made
    found = trainer._generate_and_score_completions([{"prompt": ""}] * rows)
    return found["advantages"].view_as(rewards)


def _alone() -> Any:
    """One rank: nothing is gathered."""
    return SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True, gather=lambda x: x,
        reduce=lambda x, reduction: x, autocast=nullcontext,
    )  # fmt: skip


def _inputs(mask: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    prompt = torch.ones(len(mask), 1, dtype=torch.long)
    mask = mask.long()
    return {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask, "advantages": advantages,
    }  # fmt: skip
