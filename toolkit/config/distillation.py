"""The settings groups of distillation: the teacher, and how a language model or a classifier is compared with it."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class TeacherConfig(Settings):
    """Teacher"""

    teacher: str | None = setting(
        None, "The model to learn from: a directory, a run, a Hub id, or (distill) the address of a vLLM server, of the "
        "student's tokens. Default: one is trained here first, twice as wide, on the same data.",
        aliases=("teacher_model_name_or_path",), on_resume="fixed",
    )
    teacher_revision: str | None = setting(
        None, "Branch, tag or commit of the teacher on the Hub.", aliases=("teacher_model_revision",), on_resume="fixed"
    )
    teacher_dtype: str = setting(
        "auto", "Type in which the teacher is held and computes. auto: that of its files; from float32 as the run computes.",
        choices=("auto", "float32", "bfloat16", "float16"), on_resume="fixed",
    )
    temperature: float = setting(
        1.0, "Of both distributions; the divergence is multiplied by its square. Above 1 the teacher's small probabilities "
        "count for more.", above=0.0, on_resume="fixed",
    )
    cross_entropy_share: float = setting(
        0.0, "Share of the data's own cross-entropy in the loss; the rest is the divergence.", least=0.0, below=1.0,
        on_resume="fixed",
    )


@dataclass(frozen=True)
class DistillationConfig(TeacherConfig):
    """Distillation"""

    self_distillation: str | None = setting(
        None, "The student is its own teacher. ema: the average of its weights so far. base: the model with its adapter off.",
        choices=("ema", "base"), on_resume="fixed",
    )
    ema_decay: float = setting(
        0.999, "ema: how much of the average stays at each step.", least=0.0, below=1.0, on_resume="fixed"
    )
    teacher_top_k: int | None = setting(
        None, "Query the teacher once, before the first step, and keep the log-probabilities of its k most probable tokens at "
        "each supervised position on disk, for this run and others. Default: it is queried in each step. A server is queried "
        "for k tokens, with --on-policy-share in each step.",
        least=1, most=2**20, on_resume="fixed",
    )
    on_policy_share: float = setting(
        0.0, "Share of the answers that the student writes itself in each step, for its teacher to correct (GKD).",
        least=0.0, most=1.0, aliases=("lmbda",), on_resume="fixed",
    )
    max_new_tokens: int = setting(
        128, "Longest answer that the student writes, in tokens.", least=1, most=2**20, aliases=("max_completion_length",),
        on_resume="fixed",
    )
    distillation_loss: str = setting(
        "forward_kl", "How far the student is from its teacher. forward_kl: the usual. reverse_kl: only what the teacher is "
        "sure of. jsd: between both (GKD). skewed_*: DistiLLM.",
        choices=("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"), on_resume="fixed",
    )
    beta: float = setting(
        0.5, "jsd: the teacher's share of the mixture that both are compared with; near 0 like forward_kl, near 1 like "
        "reverse_kl.", least=0.0, most=1.0, on_resume="fixed",
    )
    skew_alpha: float = setting(
        0.1, "skewed_*: how much of the compared distribution is mixed into the other; 0 is the plain KL.",
        least=0.0, below=1.0, on_resume="fixed",
    )


@dataclass(frozen=True)
class ClassifierDistillationConfig(TeacherConfig):
    """Distillation"""

    match_layers: str = setting(
        "uniform", "Which of the teacher's layers the student's are compared with, through a trained projection. uniform: "
        "evenly spread ones, the embeddings too (TinyBERT). last: its last ones (PKD). none: only outputs are compared.",
        choices=("uniform", "last", "none"), on_resume="fixed",
    )
    match_attention: bool = setting(
        False, "Compare the attention of these layers too. Needs as many heads as the teacher has.", on_resume="fixed"
    )
    match_weight: float = setting(1.0, "Weight of the layers and the attention in the loss.", above=0.0, on_resume="fixed")
