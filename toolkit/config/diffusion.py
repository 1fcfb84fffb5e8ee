"""The settings group of masked diffusion: where a token is predicted, how long answers are, and how texts are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


@dataclass(frozen=True)
class DiffusionConfig(Settings):
    """Masked diffusion"""

    shift_logits: bool | None = setting(
        None, "Predict a token at its left neighbor, as the causal model did that training begins from. Default: from such a "
        "model yes; from scratch and from a masked language model no.", on_resume="fixed",
    )
    attention_annealing: float = setting(
        0.0, "Share of the run in which attention goes from causal to both sides, when training begins from a causal model "
        "(DiffuLLaMA). 0: both sides from the first step.", least=0.0, most=1.0, on_resume="fixed",
    )
    answer_length: int = setting(
        128, "Tokens that each answer to a prompt is filled up to with its end token, so that the model learns where to end; "
        "also what is sampled by default.", least=1, most=2**20, on_resume="fixed",
    )
    denoising_steps: int | None = setting(
        None, "Forward passes in which a sample is written. Default: one for each token.", least=1, most=2**20,
        on_resume="evaluation",
    )
    block_length: int = setting(
        32, "Tokens of a sample that are finished before the next ones are begun (semi-autoregressive).", least=1, most=2**20,
        on_resume="evaluation",
    )
