"""Which settings of policy gradients do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.config.conditions import Contradiction, NoEffect, needs

_CONTRADICTIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (lambda loss_type, epsilon, epsilon_high: loss_type == "cispo" and (epsilon_high or epsilon) <= 1,
     "{loss_type} bounds the ratio itself by --epsilon-high, so that must be above 1: add --epsilon-high 5."),
    (lambda delta, epsilon, epsilon_high: delta is not None and delta <= 1 + (epsilon_high or epsilon),
     "{delta} must be above 1 + epsilon_high, to which ratios with a positive advantage are clipped; 4 is usual."),
    (lambda importance_sampling_clip_min, importance_sampling_clip_max:
         None not in (importance_sampling_clip_min, importance_sampling_clip_max)
         and importance_sampling_clip_min >= importance_sampling_clip_max,
     "{importance_sampling_clip_min} must be below {importance_sampling_clip_max}."),
    (lambda loss_type, advantage_estimator, scale_rewards: scale_rewards == "group" and _of_all(loss_type, advantage_estimator),
     "{scale_rewards} next to {loss_type} {advantage_estimator}, which compares with the mean of all: a group whose rewards "
     "are equal would be divided by 0. Take --scale-rewards batch."),
    (lambda loss_type, advantage_estimator, num_generations:
         num_generations < 2 and not _of_all(loss_type, advantage_estimator),
     "{num_generations} is no group to compare a completion with: take at least 2, or --advantage-estimator reinforce."),
    (lambda loss_type, kl_in, kl_estimator, beta, use_bias_correction_kl:
         beta and kl_estimator == "k1" and not use_bias_correction_kl and not _in_reward(loss_type, kl_in),
     "{kl_estimator} in the loss has a gradient with the mean 0: take k2, k3, --kl-in reward, or --use-bias-correction-kl."),
    (lambda dynamic_sampling, streaming: dynamic_sampling > 1 and streaming,
     "{dynamic_sampling} takes further prompts from anywhere in the data, which --streaming cannot: leave one of them out."),
    (lambda rollout_server, top_k, top_p, min_p: rollout_server and not top_k and (top_p < 1 or min_p),
     "{rollout_server} returns which tokens could be drawn at each place for --top-k alone: add --top-k 20 (and start vLLM "
     "with --max-logprobs 20 or more), or leave {top_p} and {min_p} out."),
    (lambda top_k, num_generations: top_k == 1,
     "{top_k} leaves one token to draw, with the probability 1, so that nothing is learned: take more, or 0 for all."),
    (lambda min_p, num_generations: min_p == 1,
     "{min_p} leaves the most probable token alone, with the probability 1, so that nothing is learned: take less."),
    (lambda environment, vf_coef: bool(environment),
     "{environment}: PPO learns a value of every token, also of those that an environment wrote. Take recipes/grpo.py."),
    (lambda environment, rollout_server: bool(environment and rollout_server),
     "{environment} answers the turns of the model that trains, and not of a server: leave {rollout_server} out."),
    (lambda loss_type, steps_per_generation, num_iterations:
         loss_type == "reinforce" and steps_per_generation * num_iterations > 1,
     "{loss_type} has no ratio, so its gradient is of the policy that sampled alone, and with {steps_per_generation} "
     "{num_iterations} later updates have another: take --loss-type rloo."),
    (lambda overlong_cache, max_completion_length: overlong_cache > max_completion_length,
     "{overlong_cache} must be at most {max_completion_length}."),
)  # fmt: skip
POLICY_CONTRADICTIONS = [Contradiction(*row) for row in _CONTRADICTIONS]

_NO_EFFECT: tuple[NoEffect | tuple[tuple[str, ...], Callable[..., Any], str], ...] = (
    (("epsilon",), lambda loss_type: loss_type in ("cispo", "reinforce"),
     "with {loss_type}, which has no such bound: leave it out."),
    (("epsilon_high",), lambda loss_type, epsilon: loss_type == "reinforce",
     "with {loss_type}, which has no ratio: leave it out."),
    (("delta",), lambda loss_type, epsilon: loss_type in ("cispo", "reinforce"),
     "with {loss_type}, which has no such bound: leave it out."),
    (("importance_sampling_level",),
     lambda loss_type, importance_sampling_level:
         importance_sampling_level != "token" and loss_type in ("gspo", "rloo", "reinforce"),
     "with {loss_type}, which has its own ratio or none: leave it out."),
    (("kl_in", "kl_estimator"), lambda beta, kl_in: not beta,
     "without a weight of the divergence: leave it out, or add --beta 0.04."),
    (("kl_estimator",), lambda beta, vf_coef: not beta,
     "without a weight of the divergence: leave it out, or add --beta 0.05."),
    (("epsilon", "epsilon_high", "delta", "cliprange_value"),
     lambda steps_per_generation, num_iterations, vf_coef, dropout: steps_per_generation * num_iterations == 1 and dropout == 0,
     "with one update a step, where every ratio is 1 and no value has moved: leave it out, or add --num-iterations 2."),
    (("max_turns",), lambda environment: not environment, "without --environment: leave it out."),
    (("dynamic_sampling",),
     lambda dynamic_sampling, loss_type, advantage_estimator, num_generations:
         dynamic_sampling > 1 and (num_generations < 2 or _of_all(loss_type, advantage_estimator)),
     "where rewards are compared with those of all prompts, so that no group needs a spread: leave it out."),
    needs(
        ("rollout_server_model", "rollout_server_reload", "rollout_server_requests", "rollout_server_timeout",
         "rollout_server_retries", "rollout_server_max_gap", "importance_sampling_mode", "importance_sampling_clip_max",
         "importance_sampling_clip_min"), "rollout_server",
    ),
    (("importance_sampling_mode", "importance_sampling_clip_max", "importance_sampling_clip_min"),
     lambda importance_sampling_correction: not importance_sampling_correction,
     "without --importance-sampling-correction: leave it out."),
)  # fmt: skip
POLICY_NO_EFFECT = [NoEffect(*row) for row in _NO_EFFECT]


def _of_all(loss_type: str, advantage_estimator: str) -> bool:
    """Whether rewards are compared with those of all prompts, not with their group's."""
    return advantage_estimator == "reinforce" or (advantage_estimator == "auto" and loss_type == "reinforce")


def _in_reward(loss_type: str, kl_in: str) -> bool:
    return kl_in == "reward" or (kl_in == "auto" and loss_type == "rloo")
