"""KTO's reference point: how far the policy has gone from its reference, estimated before each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.data.loading.batch import Batch
from toolkit.losses.unpaired import LogpsOf
from toolkit.system.evaluation_mode import evaluation_mode
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator


def estimate_kl(accelerator: Accelerator, model: nn.Module, batch: Batch, logps_of_mismatched: LogpsOf) -> torch.Tensor:
    """z of a step, 0-d, without gradient: max(0, mean of log π - log π_ref over mismatched answers), in nats per answer.

    The mean is over those of the global batch, one for each example, of all micro-batches and ranks: a collective. It takes a
    forward pass in evaluation mode, so that z has no dropout in it and draws no random number. KTO, arXiv:2402.01306,
    section 4.1. TRL 1.16 takes the mean of a micro-batch over the ranks, so there another micro-batch size is another loss.

    `logps_of_mismatched(model, micro_batch)`: log-probabilities of the policy and of the reference, each `[answers]`.
    """
    precise = torch.float32 if accelerator.device.type == "mps" else torch.float64  # MPS has nothing wider
    total = torch.zeros((), dtype=precise, device=accelerator.device)
    with evaluation_mode(model):
        for micro_batch, is_real in zip(batch.micro_batches, batch.real, strict=True):
            policy, reference = logps_of_mismatched(model, to_device(micro_batch, accelerator.device))
            if is_real:  # a padding micro-batch is computed all the same: engines communicate in the forward pass
                total += (policy - reference).sum(dtype=precise)
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(total)
    return (total / batch.totals["examples"]).clamp(min=0)
