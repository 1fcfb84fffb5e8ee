"""The state of a run as a value: taken from live objects, and put back into them all at once or not at all."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.compat import origin_of
from toolkit.checkpoint.random_state import capture_random_state, wrong_random_state
from toolkit.checkpoint.trees import flatten, unflatten
from toolkit.config import Refusal
from toolkit.system.nonfinite import has_nonfinite

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class State:
    """Everything needed to continue a run exactly.

    `model`: parameters and buffers by name; of a model with frozen parameters (adapters), the trained ones and the buffers.
    `optimizer`: torch's state_dict of it. `parameter_names`: of each parameter group, so that another order is refused and
    not misread. `run`: JSON data (step, position, tokens, best metric, settings, memory of user code ...). `scaler`: of
    fp16, or empty. `kept`: tensors of user code, and dictionaries of tensors. `random`: the global generators, for user code.
    `base`: what identifies the frozen parameters that are not in here; empty where nothing is frozen.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    parameter_names: list[list[str]]
    run: dict[str, Any]
    scaler: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        tensors = [*self.model.values(), *flatten(self.optimizer)[0].values(), *flatten(self.kept)[0].values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def capture_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any], scaler: torch.amp.GradScaler | None = None,
    kept: Mapping[str, Any] | None = None, base: dict[str, Any] | None = None,
) -> State:  # fmt: skip
    """The state of live objects (unwrapped), without copying it. `base`: of `base_identity`, if that is known already."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return State(
        model=_saved_tensors(model),
        optimizer=optimizer.state_dict(),
        parameter_names=parameter_names(model, optimizer),
        run=run,
        scaler=scaler.state_dict() if scaler is not None else {},
        kept=dict(kept or {}),
        random=capture_random_state(),
        base=(base or base_identity(model)) if frozen else {},
    )


def copy_state(state: State, into: dict[str, torch.Tensor] | None = None) -> State:
    """The same state in memory of its own on the CPU, so that training can continue while it is written.

    `into` holds the tensors of an earlier copy, which are written over where name, shape and type are the same: memory that
    is there already is filled several times faster than new memory.
    """
    reusable = into if into is not None else {}

    def copied(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {}
        for name, tensor in tensors.items():
            place = reusable.get(prefix + name)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = reusable[prefix + name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            result[name] = place.copy_(tensor.detach())
        return result

    (optimizer, skeleton), (kept, kept_skeleton) = flatten(state.optimizer), flatten(state.kept)
    return replace(
        state,
        model=copied("model/", state.model),
        optimizer=unflatten(copied("optimizer/", optimizer), skeleton),
        kept=unflatten(copied("kept/", kept), kept_skeleton),
        run=copy.deepcopy(state.run),  # the memory of user code is in here, which it continues writing to
        scaler=copy.deepcopy(state.scaler),
    )


def apply_state(
    state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Put a loaded state into live objects; everything is compared first, so that on an error they are as they were.

    Raises:
        Refusal: names, shapes or the order of parameters differ, or the frozen parameters are not those it was trained on.
    """
    live = _saved_tensors(model)
    compare_shapes(_shapes(live), _shapes(state.model))
    if state.base:
        refuse_other_base(state.base, base_identity(model))
    if optimizer is not None:
        state = in_groups(state, parameter_names(model, optimizer))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        check_optimizer_state(state, optimizer.state_dict()["param_groups"], shapes)
    # What can still raise comes first: a scaler and an optimizer compare before they change anything.
    if scaler is not None and state.scaler:
        scaler.load_state_dict(state.scaler)
    if optimizer is not None:
        optimizer.load_state_dict(state.optimizer)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(state.model[name])


def wrong_part(state: State) -> str:
    """What keeps a state that was read from being one of a run, whatever digest it has; empty where nothing does."""
    for name in ("run", "scaler", "kept", "random", "base", "optimizer"):
        if not isinstance(getattr(state, name), dict):
            return f"{name} is no dictionary"
    moments, base = state.optimizer.get("state"), state.base
    groups: Any = state.optimizer.get("param_groups")
    is_grouped = _is_list_of(groups, dict) and all(_is_list_of(group.get("params"), int) for group in groups)
    if not isinstance(moments, dict) or not is_grouped:
        return "optimizer is no state of an optimizer"
    if not set(moments) <= {index for group in groups for index in group["params"]}:
        return "optimizer has moments of parameters that are in no group"
    if not _is_list_of(state.parameter_names, list) or not all(_is_list_of(names, str) for names in state.parameter_names):
        return "parameter_names holds no names"
    if base and not all(isinstance(base.get(name), str) for name in ("model", "sha256")):
        return "base is not what identifies a model"
    return wrong_random_state(state.random)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def base_identity(model: nn.Module) -> dict[str, Any]:
    """Name, commit and SHA-256 of the frozen parameters of a model: what an adapter's checkpoint is worthless without."""
    frozen = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return identity_of(model, {name: digest_of(name, parameter) for name, parameter in frozen})


def identity_of(model: nn.Module, digests: dict[str, str]) -> dict[str, Any]:
    """The identity that the digests of a model's frozen parameters make."""
    name, commit = origin_of(getattr(model, "config", None))
    get_base = getattr(model, "get_base_model", None)  # of peft
    inner = get_base() if get_base else model
    return {
        "model": name or type(inner).__name__,
        "revision": commit,
        "sha256": hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest(),
    }


def digest_of(name: str, parameter: torch.Tensor) -> str:
    """SHA-256 of a parameter's name, shape and bits: those of bfloat16, in which ZeRO may hold what others hold in float32."""
    digest = hashlib.sha256(f"{name} {tuple(parameter.shape)}".encode())
    parameter = parameter.bfloat16() if parameter.is_floating_point() else parameter
    digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_other_base(stored: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse to put trained parameters on top of others than they were trained on."""
    if stored["sha256"] != found["sha256"]:
        raise Refusal(
            f"the checkpoint holds what was trained on top of {_named(stored)}; the frozen parameters here are others: "
            f"{_named(found)}. Name the model it began from, and its revision."
        )


def nonfinite_parameter(state: State) -> str | None:
    """The name of a trained tensor that holds a number which is not finite, if any does."""
    return next((name for name, tensor in state.model.items() if has_nonfinite(tensor)), None)


def _saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters and persistent buffers, each storage under its first name only: tied weights are stored once."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    seen: set[tuple[int, int]] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if name in frozen or (tensor.numel() and key in seen):
            continue
        seen.add(key)
        tensors[name] = tensor
    return tensors


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group.

    Raises:
        Refusal: it has some that are not in the model, which then doesn't learn by them.
    """
    name = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    count, foreign = sum(map(len, groups)), sum(key not in name for group in groups for key in group)
    if foreign:
        raise Refusal(
            f"{foreign} of the optimizer's {count} parameters are not in the model that is trained: build the optimizer from "
            "it, after the last line that copies it."
        )
    return [[name[key] for key in group] for group in groups]


def in_groups(state: State, names: list[list[str]]) -> State:
    """The state with its optimizer's parameters in these groups, if it has as many groups of the same parameters.

    Versions differ in what decays: in 0.1.0 T5's tables of biases did.

    Raises:
        Refusal: other parameters, another order of the same groups, or moments of another kind than the group's.
    """
    if state.parameter_names == names:
        return state
    groups, moments = state.optimizer["param_groups"], state.optimizer["state"]
    numbers = {name: number for number, name in enumerate(itertools.chain(*state.parameter_names))}
    order, grouped = list(itertools.chain(*names)), sorted(map(sorted, names))
    if sorted(order) != sorted(numbers) or len(groups) != len(names) or grouped == sorted(map(sorted, state.parameter_names)):
        raise Refusal("the checkpoint's optimizer holds other parameters, or another order of them, than this model's.")
    for group in names:
        if len({tuple(moments[numbers[name]]) for name in group if numbers[name] in moments}) > 1:
            raise Refusal("the checkpoint's optimizer updates some parameters by another rule than this one.")
    count = itertools.count()
    held = [{**group, "params": [next(count) for _ in each]} for group, each in zip(groups, names, strict=True)]
    found = {number: moments[numbers[name]] for number, name in enumerate(order) if numbers[name] in moments}
    return replace(state, optimizer={**state.optimizer, "state": found, "param_groups": held}, parameter_names=names)


def check_optimizer_state(state: State, live_groups: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse an optimizer's state of another kind, or with a moment of another shape than its parameter's.

    torch's own load_state_dict looks at numbers of parameters only: a moment of another shape would fail steps later.
    """
    stored = state.optimizer
    keys = [[sorted(set(group) - {"params"}) for group in groups] for groups in (live_groups, stored["param_groups"])]
    sizes = [[len(group["params"]) for group in groups] for groups in (live_groups, stored["param_groups"])]
    if keys[0] != keys[1] or sizes[0] != sizes[1]:
        raise Refusal("the checkpoint's optimizer is of another kind than this one.")
    names = [name for group in state.parameter_names for name in group]
    for index, moments in stored["state"].items():
        for kind in _FULL_MOMENTS:
            moment = moments.get(kind) if isinstance(moments, dict) else None
            shape = tuple(moment.shape) if isinstance(moment, torch.Tensor) else None
            if shape is not None and shape != shapes[names[index]]:
                raise Refusal(f"the checkpoint's {kind} of {names[index]} is {shape}, here {shapes[names[index]]}")


# Names under which torch's optimizers keep what has its parameter's shape.
_FULL_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def compare_shapes(live: dict[str, Any], stored: dict[str, Any]) -> None:
    """Refuse what has not exactly these shapes under these names."""
    if live == stored:
        return
    name = next(name for name in sorted(live.keys() | stored.keys()) if live.get(name) != stored.get(name))
    if name in live and name in stored:
        raise Refusal(f"the checkpoint does not fit this model: {name} is {stored[name]}, here {live[name]}")
    here, there = ("is trained here", "was not") if name in live else ("is frozen or missing here", "was trained")
    raise Refusal(
        f"the checkpoint does not fit this model: {name} {here}, and {there} when it was written. requires_grad is set before "
        "open_run and stays; what is to be trained later has a group of the optimizer whose rate is 0 until then."
    )


def _named(base: dict[str, Any]) -> str:
    revision = f"@{base['revision']}" if base["revision"] else ""
    return f"{base['model']}{revision} (SHA-256 {base['sha256'][:12]})"
