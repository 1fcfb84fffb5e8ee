"""The settings groups of preferences: losses of pairs and of single answers, reward models, the reference."""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class PreferenceConfig(Settings):
    """Preference loss"""

    loss_type: list[str] = setting(
        ["sigmoid"], "Losses of a pair, by TRL's names; several are added. sigmoid: DPO. sft: likelihood of chosen answers. "
        "simpo, cpo, orpo, sft: without a reference model.",
        choices=("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop", "nca_pair", "bco_pair",
                 "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "simpo", "cpo", "orpo", "sft"), on_resume="fixed",
    )
    loss_weights: list[float] = setting([], "Weight of each of these losses. Default: 1 each.", on_resume="fixed")
    beta: float = setting(
        0.1, "How strongly the policy is held to the reference model; ipo: its τ, orpo: its λ.", above=0.0, on_resume="fixed"
    )
    label_smoothing: float = setting(
        0.0, "Share of pairs whose labels are taken to be flipped (conservative DPO, robust, exo_pair, aot ...).",
        least=0.0, below=0.5, on_resume="fixed",
    )
    f_divergence_type: str = setting(
        "reverse_kl", "Divergence between policy and reference (f-DPO).",
        choices=("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"), on_resume="fixed",
    )
    f_alpha_divergence_coef: float = setting(
        0.5, "alpha_divergence: from 0, the forward KL, to 1, the reverse KL (1 - α of the paper, as TRL computes it).",
        least=0.0, most=1.0, on_resume="fixed",
    )
    ld_alpha: float | None = setting(
        None, "LD-DPO: weight of an answer's tokens beyond the length of the pair's shorter answer.", least=0.0, most=1.0,
        on_resume="fixed",
    )
    discopop_tau: float = setting(
        0.05, "discopop: temperature of the switch between its two losses.", above=0.0, most=1.0, on_resume="fixed"
    )
    simpo_gamma: float = setting(
        0.5, "simpo: the margin that the chosen answer's reward should have.", least=0.0, on_resume="fixed"
    )
    cpo_alpha: float = setting(1.0, "cpo: weight of the likelihood of chosen answers, per token.", least=0.0, on_resume="fixed")


@dataclass(frozen=True)
class UnpairedConfig(Settings):
    """Unpaired loss"""

    loss_type: str = setting(
        "kto", "Loss of an answer, by TRL's names. kto: measured from the divergence so far. apo_zero_unpaired: from 0.",
        choices=("kto", "apo_zero_unpaired"), on_resume="fixed",
    )
    beta: float = setting(0.1, "How strongly the policy is held to the reference model.", above=0.0, on_resume="fixed")
    desirable_weight: float = setting(
        1.0, "Weight of desirable answers in the loss; more where they are few, so that both kinds weigh about the same.",
        above=0.0, on_resume="fixed",
    )
    undesirable_weight: float = setting(1.0, "Weight of undesirable answers in the loss.", above=0.0, on_resume="fixed")


@dataclass(frozen=True)
class RankedAnswersConfig(Settings):
    """Lists of answers"""

    pairs_per_prompt: str = setting(
        "best_worst", "Pairs made of a list of scored or ranked answers. best_others: the best with each worse one. all: each "
        "with each worse one.",
        choices=("best_worst", "best_others", "all"), on_resume="fixed",
    )
    max_pairs_per_prompt: int = setting(
        10, "Most pairs of one list: those whose answers lie furthest apart.", least=1, most=10**6, on_resume="fixed"
    )


@dataclass(frozen=True)
class RewardConfig(Settings):
    """Reward model"""

    center_rewards_coefficient: float | None = setting(
        None, "Weight of the square of a pair's summed rewards, which holds their mean near 0; 0.01 is usual.", least=0.0,
        on_resume="fixed",
    )
    margin_coefficient: float = setting(
        0.0, "A chosen reward must lead by N times the row's margin: its column margin, or how far its scores differ. TRL: 1.",
        least=0.0, on_resume="fixed",
    )


@dataclass(frozen=True)
class PairsConfig(Settings):
    """Pairs"""

    pair_layout: str = setting(
        "auto", "shared: a prompt is encoded once for both answers. packed: twice, unpadded. auto: the fastest exact one.",
        choices=("auto", "shared", "packed", "padded"), on_resume="fixed",
    )


@dataclass(frozen=True)
class ReferenceConfig(Settings):
    """Reference"""

    reference: str = setting(
        "auto", "cache: computed once, kept on disk. adapter: the model with its adapter off. model: a second one in memory.",
        choices=("auto", "cache", "adapter", "model"), on_resume="fixed",
    )
    sync_ref_model: bool = setting(
        False, "TR-DPO: draw the reference, a second model, toward the trained one.", on_resume="fixed"
    )
    ref_model_mixup_alpha: float = setting(
        0.6, "Share of the trained model in the synced reference.", above=0.0, most=1.0, on_resume="fixed"
    )
    ref_model_sync_steps: int = setting(512, "Steps between two syncs.", least=1, most=10**9, on_resume="fixed")
