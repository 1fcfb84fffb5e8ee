"""The reference of preference optimization: the model as training starts, evaluated in the cheapest way that is exact.

`cache`: its log-probabilities are computed once, before the first step, and kept on disk. `adapter`: it is the model with its
adapter off. `model`: it is a second one, frozen, in memory; the only one that can move (`sync_reference`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import AdapterConfig, ReferenceConfig, Refusal
from toolkit.config.conditions import STARTS_ON_THE_BASE, is_adapter
from toolkit.data.loading.batch import Batch, MicroBatch, precise
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.data.loading.streams import StreamLoader
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import say_once
from toolkit.losses.answer_logps import answer_logps, mismatched_logps, pair_logps
from toolkit.losses.pair_losses import PairLogps
from toolkit.losses.preference import needs_reference
from toolkit.losses.unpaired import LogpsOf as LogpsOfBoth
from toolkit.models.compat import commit_of
from toolkit.models.frozen import half_of, place_frozen, put_into
from toolkit.preference.reference_cache import ReferenceSettings, is_of_pairs, reference_table
from toolkit.system.digests import digests_of_directories
from toolkit.system.evaluation_mode import evaluation_mode
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from toolkit.training.run import Run

LogpsOf = Callable[[nn.Module, MicroBatch], Any]  # of (model, micro-batch): PairLogps, or a tensor `[answers]`


def _of_pairs(model: nn.Module, micro_batch: MicroBatch) -> Any:
    raise TypeError("mismatched answers are those of unpaired data: this reference is of pairs")


@dataclass
class Reference:
    """`reference(model, micro_batch)`: the reference's log-probabilities of a micro-batch, without a gradient.

    `PairLogps` of pairs; of single answers a tensor `[answers]`, and `mismatched(model, micro_batch)` the same of the answers
    that belong to other prompts. `way`: cache, adapter, model, or none for losses that have no reference, where the call gives
    None. `frozen`: the second model, where there is one. `means`: the weights of one that moves, in float32 at least: a small
    share of another model is less than what bfloat16 can add. They are its own parameters where these have that type.
    """

    way: str
    logps: LogpsOf
    mismatched: LogpsOf = _of_pairs
    frozen: nn.Module | None = None
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    is_kept: bool = False  # whether the run's checkpoints have it
    made_of: dict[str, Any] | None = None  # commit and digests of the files it is made of, for `open_run`

    def __repr__(self) -> str:
        return f"Reference({self.way})"

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Any:
        return self.logps(model, micro_batch)


def build_reference(
    accelerator: Accelerator,
    model: nn.Module,
    make_model: Callable[[], PreTrainedModel],
    train: TrainLoader | StreamLoader,
    evaluation: EvalLoader | None,
    config: ReferenceSettings,
    ld_alpha: float | None = None,
) -> Reference:
    """The reference of a run that has not begun; prints which way it takes.

    Args:
        model: the prepared one, with the weights that training starts from; also when a run is going to be resumed.
        make_model: makes the same model once more, for a second one.
        train, evaluation: the loaders of the pairs or answers; evaluation may be None.
        config: ReferenceConfig with the settings of the model, of its adapter, and `loss_type`.
        ld_alpha: that of the policy's `pair_logps`.

    Raises:
        Refusal: `reference` is a way that would not be exact.
    """
    assert isinstance(train, TrainLoader), "pairs are numbered by their rows: a stream has none"
    way, of_pairs = _choose_way(train, config), is_of_pairs(train)
    if way == "none":
        return Reference("none", lambda model, micro_batch: None)
    if way == "cache":
        reference = _cached(reference_table(accelerator, model, train, evaluation, config, ld_alpha), of_pairs)
    else:  # of pairs both answers, of single answers their own; and of mismatched ones, which only single answers have
        logps_of: LogpsOf = partial(pair_logps, ld_alpha=ld_alpha) if of_pairs else answer_logps
        if way == "adapter":
            say_once("reference: the model with its adapter off")
            reference = Reference(way, _with_adapter_off(logps_of), _with_adapter_off(mismatched_logps))
        else:
            frozen = _second_model(accelerator, make_model, moves=config.sync_ref_model)
            own, mismatched = (_of_frozen(accelerator, frozen, each) for each in (logps_of, mismatched_logps))
            moving = unwrapped(frozen).named_parameters() if config.sync_ref_model else ()
            reference = Reference(way, own, mismatched, frozen, {name: precise(parameter) for name, parameter in moving})
    # checkpoints keep it: a run that continues must have the same reference
    reference.made_of = {"commit": commit_of(unwrapped(model).config), **digests_of_directories(config.model)}
    return reference


def _choose_way(train: TrainLoader, config: ReferenceSettings) -> str:
    if is_of_pairs(train) and not needs_reference(config.loss_type):
        return "none"
    if config.reference == "adapter" and (problem := _adapter_problem(config)):
        raise Refusal(f"--reference adapter: {problem}. Take --reference auto.")
    if config.reference != "auto":
        return config.reference
    return "model" if config.sync_ref_model else "cache"


def _adapter_problem(config: ReferenceSettings) -> str | None:
    """Why the model with its adapter off is not the model as training starts, or None."""
    if not config.use_peft:
        return "there is no adapter to turn off"
    if is_adapter(config.model):
        return f"training starts from the adapter in {config.model}, not from the model under it"
    if config.init_lora_weights not in STARTS_ON_THE_BASE:
        return f"--init-lora-weights {config.init_lora_weights} changes the model under the adapter"
    return None


def _cached(table: torch.Tensor, of_pairs: bool) -> Reference:
    def pairs(model: nn.Module, micro_batch: MicroBatch) -> PairLogps:
        chosen, rejected = table[micro_batch["pair"]].unbind(1)
        return PairLogps(chosen, rejected, micro_batch["chosen_tokens"], micro_batch["rejected_tokens"])

    if of_pairs:
        return Reference("cache", pairs)
    own, mismatched = (lambda _, micro_batch, column=column: table[micro_batch["answer"], column] for column in (0, 1))
    return Reference("cache", own, mismatched)


def _with_adapter_off(logps_of: LogpsOf) -> LogpsOf:
    def logps(model: nn.Module, micro_batch: MicroBatch) -> Any:
        with evaluation_mode(model), unwrapped(model).disable_adapter():
            return logps_of(model, micro_batch)

    return logps


def _second_model(accelerator: Accelerator, make_model: Callable[[], PreTrainedModel], moves: bool = False) -> nn.Module:
    engine = engine_of(accelerator)
    frozen = place_frozen(accelerator, make_model(), None if moves else half_of(accelerator))
    how = f"sharded by {engine.label(accelerator)}" if engine.shards_weights(accelerator) else "whole on every rank"
    say_once(f"reference: a second model, frozen, {how}")
    return frozen


def _of_frozen(accelerator: Accelerator, frozen: nn.Module, logps_of: LogpsOf) -> LogpsOf:
    def logps(model: nn.Module, micro_batch: MicroBatch) -> Any:
        with torch.no_grad(), accelerator.autocast():
            return logps_of(frozen, micro_batch)

    return logps


def reference_logps(
    accelerator: Accelerator, make_model: Callable[[], PreTrainedModel], config: AdapterConfig, logps_of: LogpsOf, *, model: str
) -> LogpsOf:
    """`logps_of` of the model as training starts: the model with its adapter off where that is it, else a second one, frozen.

    For what is sampled while the run goes on, and so in no cache. `model`: the name that training starts from.
    """
    if config.use_peft and not is_adapter(model) and config.init_lora_weights in STARTS_ON_THE_BASE:
        say_once("reference: the model with its adapter off")
        return _with_adapter_off(logps_of)
    return _of_frozen(accelerator, _second_model(accelerator, make_model), logps_of)


@torch.no_grad()
def keep_reference(run: Run, reference: Reference, config: ReferenceConfig) -> None:
    """Put a reference that moves into every checkpoint; after a resume, take it from there. Called once, before evaluation."""
    if not config.sync_ref_model or reference.frozen is None or reference.is_kept:
        return
    for name, mean in reference.means.items():
        mean.copy_(run.kept.get(f"reference.{name}", mean))
        run.keep(f"reference.{name}", mean)
    into_model = partial(put_into, unwrapped(reference.frozen), reference.means)
    into_model()
    run.saver.on_rollback.append(into_model)
    reference.is_kept = True


@torch.no_grad()
def sync_reference(run: Run, reference: Reference, model: nn.Module, config: ReferenceConfig) -> None:
    """TR-DPO (Gorbatovski et al. 2024, arXiv:2404.09656): draw the reference toward the model every N steps.

        reference = alpha * model + (1 - alpha) * reference, alpha = `ref_model_mixup_alpha`, every `ref_model_sync_steps`

    An alpha of 1 is the hard update. Called before each step. What the reference has become is part of every checkpoint
    (`keep_reference`).
    """
    if not config.sync_ref_model or reference.frozen is None:
        return
    keep_reference(run, reference, config)  # of a recipe that didn't
    means, taken = reference.means, run.step - 1
    alpha, between = config.ref_model_mixup_alpha, config.ref_model_sync_steps  # read in the first step, as others are
    if taken and taken % between == 0:
        for name, parameter in unwrapped(model).named_parameters():
            means[name].lerp_(parameter.to(means[name].dtype), alpha)
        put_into(unwrapped(reference.frozen), means)


def estimate_kl(accelerator: Accelerator, model: nn.Module, batch: Batch, logps_of_mismatched: LogpsOfBoth) -> torch.Tensor:
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
