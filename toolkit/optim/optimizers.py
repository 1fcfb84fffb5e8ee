"""Optimizers: torch's own, Muon with AdamW as one object, and bitsandbytes' on CUDA devices."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.config import OptimConfig, Refusal
from toolkit.config.conditions import OF_BITSANDBYTES, momentum_of
from toolkit.config.reading import add_reads, note_made_of, read_apart
from toolkit.distributed.engines.engine import Piece
from toolkit.distributed.ranks import say_once
from toolkit.optim.compat import devices_of_fused_kernels
from toolkit.optim.muon import COEFFICIENTS, ITERATIONS, muon_step, sharded_muon_step
from toolkit.optim.parameter_groups import Group, parameter_groups
from toolkit.optim.rounding import StochasticRounding
from toolkit.optim.schedules import build_schedule

_OF_THE_RATES = frozenset({"learning_rate", "layer_lr_decay", "lr_patterns"})

__all__ = ["MuonWithAdamW", "build_optimizer", "build_schedule"]


def build_optimizer(
    model: nn.Module, config: OptimConfig, num_steps: int, loraplus_lr_ratio: float = 1.0
) -> tuple[torch.optim.Optimizer, Callable[..., list[float]]]:
    """The optimizer over the trainable parameters of `model`, and the learning rate of each of its groups by progress.

    `schedule(progress)` is for progress in [0, 1] the list of learning rates in the order of `optimizer.param_groups`.
    `schedule(progress, run.objective)` serves reduce_lr_on_plateau as well, which goes by the evaluations so far.
    Weight decay is decoupled (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) except in sgd, rmsprop and adagrad,
    where it is torch's L2 term in the gradient. A recipe may take the schedule and build an optimizer of its own: the records
    then count only the settings of the rates as read. Weights in bfloat16 are updated in float32 and rounded at random with
    `stochastic_rounding`; without it they are rounded to the nearest, with a warning.

    `loraplus_lr_ratio`: how many times as fast the matrices B of a LoRA adapter learn.

    Raises:
        Refusal: no trainable parameter, a rate pattern that is no regex or matches nothing, or an optimizer that this
            machine cannot run.
    """
    with read_apart(config) as names:
        groups = parameter_groups(model, config, loraplus_lr_ratio)
        optimizer = _OPTIMIZERS[config.optim](groups, config, model)
        optimizer = _for_half(optimizer, config.stochastic_rounding)
    note_made_of(optimizer, names)
    add_reads(config, names & _OF_THE_RATES)
    factor = build_schedule(config, num_steps)
    if num_steps == 1 and factor(0.0, ()) == 0:
        say_once("The only step is the first of a warm-up, at rate 0: nothing is learned. Train longer, or --warmup-steps 0")
    highest = [group["lr"] for group in optimizer.param_groups]

    def schedule(progress: float, objective: Sequence[float] | None = None) -> list[float]:
        share = factor(progress, objective)
        return [rate * share for rate in highest]

    return optimizer, schedule


def _for_half(optimizer: torch.optim.Optimizer, at_random: bool) -> torch.optim.Optimizer:
    """The same where it trains no weights in bfloat16, else one that rounds them at random, or a warning that it doesn't."""
    halves = [p for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.bfloat16]
    if not halves:
        if at_random:
            say_once("--stochastic-rounding changes nothing: no weights that are trained are in bfloat16")
        return optimizer
    if not at_random:
        say_once(
            "WARNING: weights are trained in bfloat16, and most of an update is lost where it is below a 512th of a weight. "
            "--stochastic-rounding keeps it on average; --dtype float32 --bf16 keeps all of it"
        )
        return optimizer
    distributed = torch.distributed
    if not (distributed.is_initialized() and distributed.get_world_size() > 1):
        for parameter in halves:  # micro-batches add up in float32; DDP (torch 2.13) fails with gradients of another type
            parameter.grad_dtype = torch.float32
    return _loading_saved_types(StochasticRounding(optimizer))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups whose `rule` is muon, AdamW for the others, as one optimizer.

    Groups and state are those of one torch optimizer, so saving, loading, scaling and moving parameters work as for any other.
    AdamW's step is torch's. Muon's is ours, in the weights' precision and for many matrices at a time (`muon_step`):
    torch.optim.Muon takes them one by one and always in bfloat16. Its update has the size of AdamW's, so one learning rate
    serves both.
    """

    def __init__(self, groups: list[Group], config: OptimConfig) -> None:
        # The keys of torch.optim.Muon's groups, which checkpoints hold and compare.
        of_torch = {
            "momentum": momentum_of(config), "nesterov": True, "ns_coefficients": COEFFICIENTS, "eps": 1e-7,
            "ns_steps": ITERATIONS, "adjust_lr_fn": "match_rms_adamw",
        }  # fmt: skip
        muon = [{**group, **of_torch} for group in groups if group["rule"] == "muon"]
        rest = [group for group in groups if group["rule"] == "adamw"]
        self.adamw = _adamw(rest, config, fused=_can_fuse(rest)) if rest else None
        super().__init__([*muon, *(self.adamw.param_groups if self.adamw else ())], {"lr": config.learning_rate})
        # An engine that shards sets these before the first step: Newton and Schulz's iteration is over a whole matrix.
        self.needs_pieces, self.device = True, torch.device("cpu")
        self.pieces: list[Piece] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.adamw:
            # Linked again each time: loading a state, or an engine that shards parameters, puts other objects here.
            self.adamw.param_groups = [group for group in self.param_groups if group["rule"] == "adamw"]
            self.adamw.state = self.state
            self.adamw.step()
        for group in self.param_groups:
            if group["rule"] == "adamw":
                continue
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            rates = (group["lr"], group["momentum"], group["weight_decay"])
            if self.pieces:
                owners = {id(parameter) for parameter in with_gradient}
                sharded_muon_step([p for p in self.pieces if id(p.owner) in owners], self.state, *rates, self.device)
            else:
                muon_step(with_gradient, self.state, *rates)
        return loss


def _can_fuse(groups: list[Group]) -> bool:
    devices = devices_of_fused_kernels()
    return all(p.device.type in devices and p.is_floating_point() for group in groups for _, p in group["params"])


def _betas(config: OptimConfig) -> tuple[float, float]:
    return (config.adam_beta1, config.adam_beta2)


def _adamw(groups: list[Group], config: OptimConfig, fused: bool) -> torch.optim.Optimizer:
    # fused=False would also turn off torch's second-fastest way, which None leaves to it.
    return torch.optim.AdamW(groups, betas=_betas(config), eps=config.adam_epsilon, fused=fused or None)


def _build_adamw_fused(groups: list[Group], config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    if not _can_fuse(groups):
        devices = sorted({p.device.type for group in groups for _, p in group["params"]})
        raise Refusal(f"--optim adamw_torch_fused: torch has no fused AdamW for {', '.join(devices)}. Use --optim adamw_torch.")
    return _adamw(groups, config, fused=True)


def _build_adafactor(groups: list[Group], config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """transformers', as Trainer sets it: the learning rate is absolute.

    torch's own multiplies the rate by max(1e-3, RMS of the weight) (Shazeer and Stern, https://arxiv.org/abs/1804.04235,
    section 8): the same rate makes steps some 50 times smaller there.
    """
    from transformers.optimization import Adafactor

    optimizer = Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    return _loading_saved_types(optimizer)


def _loading_saved_types(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with hooks by which a loaded state keeps the types it was saved in.

    torch (2.13) loads a state in the type of the weights: with bfloat16 weights, what is float32 by design (NAdam's
    `mu_product`, all of Adafactor's) would be rounded, and the run would continue with other numbers than it was saved with.
    """
    loaded: list[dict[int, Any]] = []

    def remember(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        loaded[:] = [state_dict["state"]]

    def restore(optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, saved in loaded.pop().items():
            state = optimizer.state[parameters[index]]
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and value.dtype != state[key].dtype:
                    state[key] = value.to(state[key].device, copy=True)

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer


def _build_bitsandbytes(groups: list[Group], config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    instead = "Use --optim adamw_torch, or --optim adafactor for less memory."
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Refusal(f"--optim {config.optim} needs the library bitsandbytes: pip install bitsandbytes. {instead}")
    if not torch.cuda.is_available():
        raise Refusal(f"--optim {config.optim} needs a CUDA device, and torch sees none. {instead}")
    import bitsandbytes

    bits = 32 if config.optim.endswith("32bit") else 8
    if bits == 8:
        # Embeddings are unstable with 8-bit state (Dettmers et al., https://arxiv.org/abs/2110.02861, section 2.3).
        overrides = bitsandbytes.optim.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                overrides.register_module_override(module, "weight", {"optim_bits": 32})
    if config.optim.startswith("lion"):
        return bitsandbytes.optim.Lion(groups, lr=config.learning_rate, betas=_betas(config), optim_bits=bits)
    return bitsandbytes.optim.AdamW(
        groups, lr=config.learning_rate, betas=_betas(config), eps=config.adam_epsilon, optim_bits=bits
    )


_OPTIMIZERS: dict[str, Callable[[list[Group], OptimConfig, nn.Module], torch.optim.Optimizer]] = {
    "adamw_torch": lambda groups, config, _: _adamw(groups, config, fused=_can_fuse(groups)),
    "adamw_torch_fused": _build_adamw_fused,
    "sgd": lambda groups, config, _: torch.optim.SGD(groups, lr=config.learning_rate, momentum=momentum_of(config)),
    "adafactor": _build_adafactor,
    "nadam": lambda groups, config, _: _loading_saved_types(
        torch.optim.NAdam(groups, betas=_betas(config), eps=config.adam_epsilon, decoupled_weight_decay=True)
    ),
    "radam": lambda groups, config, _: torch.optim.RAdam(
        groups, betas=_betas(config), eps=config.adam_epsilon, decoupled_weight_decay=True
    ),
    "rmsprop": lambda groups, config, _: torch.optim.RMSprop(groups, lr=config.learning_rate, momentum=momentum_of(config)),
    "adagrad": lambda groups, config, _: torch.optim.Adagrad(groups, lr=config.learning_rate),
    "muon": lambda groups, config, _: MuonWithAdamW(groups, config),
    **dict.fromkeys(OF_BITSANDBYTES, _build_bitsandbytes),
}
