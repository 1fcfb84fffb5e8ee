"""TRL's own preference losses on given log-probabilities: its trainers' methods, with a stand-in for the model.

The trainers are made without their `__init__`, which wants a real model and a data set; what their loss reads is set here.
"""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

PROMPT = 2


class Answers(nn.Module):
    """What a model with TRL's fused head returns: the log-probabilities of its labels, from a table, 0 where unlabeled."""

    is_gradient_checkpointing = False

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, labels: torch.Tensor, **_: Any) -> SimpleNamespace:
        log_probs = self.table * (labels[:, 1:] != -100)
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def masks(counts: torch.Tensor, longest: int) -> torch.Tensor:
    """`[rows, PROMPT + longest]`: 1 at the tokens of each row's answer, behind a prompt of PROMPT tokens."""
    place = torch.arange(-PROMPT, longest)
    return ((place >= 0) & (place < counts[:, None])).long()


def alone() -> Any:
    """One rank: nothing is gathered."""
    return SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, autocast=nullcontext
    )


def dpo(
    policy: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """DPOTrainer's loss and logged metrics.

    policy, reference: log-probabilities of answer tokens `[2 * pairs, longest]`, chosen ones above rejected ones; counts: of
    the tokens, `[2 * pairs]`; settings: those of DPOConfig.
    """
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(output_dir="unused", report_to="none", bf16=False, **settings)
    trainer = object.__new__(DPOTrainer)
    trainer.args, trainer.accelerator, trainer.aux_loss_enabled = args, alone(), False
    trainer.model, trainer.ref_model = Answers(_after_prompt(policy)), Answers(_after_prompt(reference))
    trainer.beta, trainer.label_smoothing, trainer.use_weighting = args.beta, args.label_smoothing, False
    trainer.loss_types, trainer.loss_weights = args.loss_type, args.loss_weights or [1.0] * len(args.loss_type)
    trainer.f_divergence_type, trainer.f_alpha_divergence_coef = args.f_divergence_type, args.f_alpha_divergence_coef
    trainer.ld_alpha, trainer.precompute_ref_logps = args.ld_alpha, False
    trainer._metrics = {"train": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    mask = masks(counts, policy.shape[1])
    rows = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = trainer._compute_loss(trainer.model, rows, return_outputs=False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def kto(
    policy: torch.Tensor,
    reference: torch.Tensor,
    kl_policy: torch.Tensor,
    kl_reference: torch.Tensor,
    desirable: torch.Tensor,
    **settings: Any,
) -> tuple[torch.Tensor, float]:
    """KTOTrainer's loss and its estimate of the divergence, of answers of one token: all arguments `[examples]`."""
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(output_dir="unused", report_to="none", bf16=False, per_device_train_batch_size=len(policy), **settings)
    trainer = object.__new__(KTOTrainer)
    trainer.args, trainer.accelerator, trainer.aux_loss_enabled = args, alone(), False
    trainer.loss_type, trainer.beta = args.loss_type, args.beta
    trainer.desirable_weight, trainer.undesirable_weight = args.desirable_weight, args.undesirable_weight
    trainer.calculate_KL, trainer.precompute_ref_logps = args.loss_type == "kto", False
    trainer._metrics = {"train": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    # mismatched answers differ from the others by the id of their tokens
    trainer.model, trainer.ref_model = _Either(policy, kl_policy), _Either(reference, kl_reference)
    mask = masks(torch.ones(len(policy)), 1)
    rows = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    mismatched = {f"KL_{name}": values for name, values in rows.items()} | {"KL_input_ids": torch.ones_like(mask)}
    loss = trainer._compute_loss(trainer.model, {**rows, **mismatched, "label": desirable}, return_outputs=False)
    return loss, trainer._metrics["train"]["kl"][-1]


class _Either(Answers):
    def __init__(self, matched: torch.Tensor, mismatched: torch.Tensor) -> None:
        super().__init__(matched)
        self.tables = [_after_prompt(matched[:, None]), _after_prompt(mismatched[:, None])]

    def forward(self, labels: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        self.table = self.tables[int(inputs["input_ids"][0, 0])]
        return super().forward(labels)


def without_reference(
    trainer_name: str, logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, prompt: int, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss and logged metrics of CPOTrainer or ORPOTrainer.

    logits: `[2 * pairs, prompt + longest, vocabulary]`, chosen above rejected; tokens `[2 * pairs, prompt + longest]`; counts:
    of the answers' tokens, behind `prompt` tokens that are not theirs; settings: those of CPOConfig or ORPOConfig.
    """
    from trl.experimental import cpo, orpo

    config_class, trainer_class = {
        "cpo": (cpo.CPOConfig, cpo.CPOTrainer), "orpo": (orpo.ORPOConfig, orpo.ORPOTrainer)
    }[trainer_name]  # fmt: skip
    args = config_class(output_dir="unused", report_to="none", bf16=False, **settings)
    trainer: Any = object.__new__(trainer_class)
    trainer.accelerator, trainer.aux_loss_enabled, trainer.is_encoder_decoder = alone(), False, False
    trainer.pad_token_id = trainer.padding_value = 0
    for name in ("beta", "label_smoothing", "loss_type", "cpo_alpha", "simpo_gamma", "alpha"):
        setattr(trainer, name, getattr(args, name, None))
    place = torch.arange(-prompt, tokens.shape[1] - prompt)
    labels = tokens.where((place >= 0) & (place < counts[:, None]), -100)
    rows = {"input_ids": tokens, "labels": labels, "attention_mask": (place < counts[:, None]).long()}
    batch = {f"{side}_{name}": part for name, both in rows.items() for side, part in zip(("chosen", "rejected"), both.chunk(2), strict=True)}
    model = lambda *_, **__: SimpleNamespace(logits=logits)  # noqa: E731
    loss, metrics = trainer.get_batch_loss_metrics(model, batch)
    return loss, metrics


def _after_prompt(table: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of answer tokens with those of the prompt's before them: TRL predicts every token but the first."""
    return torch.nn.functional.pad(table, (PROMPT - 1, 0), value=-7.0)
