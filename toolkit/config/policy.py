"""The settings of policy gradients: advantages, the loss of a policy, and PPO's value head."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class ClipConfig(Settings):
    """Policy ratios"""

    epsilon: float = setting(
        0.2, "How far below 1 the ratio to the policy that sampled still has a gradient; above too, without epsilon_high.",
        above=0.0, aliases=("cliprange",), on_resume="fixed",
    )
    epsilon_high: float | None = setting(
        None, "How far above 1 (DAPO: 0.28). cispo: the largest ratio itself, such as 5. Default: epsilon.", above=0.0,
        on_resume="fixed",
    )
    delta: float | None = setting(
        None, "Largest ratio also where the advantage is negative, above 1 + epsilon_high, such as 4. Default: none.",
        above=1.0, on_resume="fixed",
    )
    entropy_coef: float = setting(
        0.0, "Weight of the mean entropy of a token, which the loss is lowered by.", least=0.0, on_resume="fixed"
    )
    importance_sampling_correction: bool = setting(
        True, "Weight tokens by how likely the trained model and the sampler, where that is another program, find them.",
        aliases=("vllm_importance_sampling_correction",), on_resume="fixed",
    )
    importance_sampling_mode: str = setting(
        "token_truncate", "That weight: of each token or of its completion (sequence), truncated at the bounds, or 0 outside "
        "of them (mask).", choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        aliases=("vllm_importance_sampling_mode",), on_resume="fixed",
    )
    importance_sampling_clip_max: float | None = setting(
        3.0, "Largest such weight.", above=0.0,
        aliases=("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"), on_resume="fixed",
    )
    importance_sampling_clip_min: float | None = setting(
        None, "Smallest such weight. Default: 0.", least=0.0, aliases=("vllm_importance_sampling_clip_min",), on_resume="fixed"
    )


@dataclass(frozen=True)
class PolicyConfig(ClipConfig):
    """Policy loss"""

    loss_type: str = setting(
        "dapo", "Loss of the policy, by TRL's names. dapo: mean over tokens. grpo: over completions. dr_grpo: over "
        "max_completion_length. gspo, rloo: ratios of whole completions. cispo: weights are clipped. bnpo: as dapo.",
        choices=("dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo", "reinforce"), on_resume="fixed",
    )
    importance_sampling_level: str = setting(
        "token", "Ratios of tokens or of completions (sequence); gspo and rloo have their own.", choices=("token", "sequence"),
        on_resume="fixed",
    )
    advantage_estimator: str = setting(
        "auto", "What a reward is compared with. group: the mean of its group. rloo: the mean of the others in it. reinforce: "
        "the mean of the step. auto: that of loss_type, else group.",
        choices=("auto", "group", "rloo", "reinforce"), on_resume="fixed",
    )
    scale_rewards: str = setting(
        "auto", "Divide advantages by the standard deviation of the group or of the step's rewards (batch). auto: group; none "
        "for dr_grpo and without the group's mean.",
        choices=("auto", "group", "batch", "none"), on_resume="fixed",
    )
    normalize_advantages: bool = setting(
        False, "Then also bring a step's advantages to mean 0 and standard deviation 1 (REINFORCE++).", on_resume="fixed"
    )
    beta: float = setting(
        0.0, "Weight of the KL divergence from the reference model; 0: none, and no reference is made.", least=0.0,
        on_resume="fixed",
    )
    kl_in: str = setting(
        "auto", "Where the divergence from the reference counts: in the loss of each token, or in the reward of a completion. "
        "auto: of rloo in the reward.", choices=("auto", "loss", "reward"), on_resume="fixed",
    )
    kl_estimator: str = setting(
        "auto", "Estimate of the divergence at a token, d = log π - log π_ref. k1: d. k2: d²/2. k3: exp(-d) - 1 + d. auto: k3 "
        "in the loss, k1 in rewards.", choices=("auto", "k1", "k2", "k3"), on_resume="fixed",
    )
    use_bias_correction_kl: bool = setting(
        True, "In the loss, multiply the divergence by the ratio, which makes its gradient the right one.", on_resume="fixed"
    )
    dynamic_sampling: int = setting(
        1, "Replace groups whose rewards are all equal by those of further prompts, until a step has sampled N times its "
        "prompts (DAPO); 1: don't.", least=1, most=1024, aliases=("max_num_gen_batches",), on_resume="fixed",
    )
    overlong_cache: int = setting(
        0, "Lower the reward in a line, by 1 at most, over the last N tokens before the longest completion (DAPO: 4,096 of "
        "20,480); 0: don't.", least=0, most=2**20, aliases=("soft_punish_cache",), on_resume="fixed",
    )


@dataclass(frozen=True)
class PPOConfig(ClipConfig):
    """PPO"""

    beta: float = setting(
        0.05, "Weight of the KL divergence from the reference model in the rewards of tokens.", least=0.0, aliases=("kl_coef",),
        on_resume="fixed",
    )
    vf_coef: float = setting(0.1, "Weight of the value head's loss.", above=0.0, on_resume="fixed")
    cliprange_value: float | None = setting(
        0.2, "How far a value may move from that at the time of sampling; none: any way.", above=0.0, on_resume="fixed"
    )
    gamma: float = setting(1.0, "Discount of the reward of each later token.", above=0.0, most=1.0, on_resume="fixed")
    lam: float = setting(
        0.95, "λ of the advantages (GAE): 0 trusts the value of the next token, 1 the rewards alone.", least=0.0, most=1.0,
        on_resume="fixed",
    )
    whiten_rewards: bool = setting(
        False, "Bring the rewards of a step's tokens to standard deviation 1; advantages always are.", on_resume="fixed"
    )
    missing_eos_penalty: float | None = setting(
        None, "Subtracted from the reward of a completion that was cut at its longest length. Default: none.", above=0.0,
        on_resume="fixed",
    )
    kl_estimator: str = setting(
        "k1", "Estimate of the divergence in a token's reward, d = log π - log π_ref. k1: d. k3: exp(-d) - 1 + d.",
        choices=("k1", "k3"), on_resume="fixed",
    )
