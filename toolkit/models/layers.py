"""A model's layers, recomputed in backward or compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.models.compat import finds_cpp_compiler, is_compiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let the model recompute its layers' activations in backward."""
    if not model.supports_gradient_checkpointing:
        raise Refusal(f"--gradient-checkpointing: {type(model).__name__} does not support it. Remove it.")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its older name
    enable(_recomputation())


def check_compiler(backend: str, device: str) -> None:
    """Refuse a backend of --torch-compile that can't work on this kind of device, which would be found out in the first step.

    On a CPU inductor compiles and links C++.
    """
    if backend != "inductor" or device != "cpu":
        return
    if not finds_cpp_compiler():
        raise Refusal(
            "--torch-compile: on a CPU layers are compiled by a C++ compiler, and none was found. Install g++ (Debian and "
            "Ubuntu: apt install g++), or name one in the environment, CXX=PATH. Or remove it."
        )
    if " " in torch.__file__:
        raise Refusal(
            f"--torch-compile: torch is in a folder with a space in its name, {torch.__file__!r}, where what it compiles for a "
            "CPU can't be linked (torch 2.13). Make the virtual environment in a folder without one, or remove it."
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers, of which it is a stack: nothing of its head and its embedding is in them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module, recomputed: bool, backend: str = "inductor") -> None:
    """Compile each layer by itself: one compilation serves all of them, whatever the number.

    `dynamic=None` was not bit-exact after a resume, where lengths vary. The recomputation goes around the compiled layer:
    transformers (5.23) puts it inside, where the loop over documents, which is not compiled, makes torch give the layer up
    and run it as it was, silently.
    """
    layers = layers_of(model)
    if not layers:
        raise Refusal(f"--torch-compile: {type(model).__name__} has no layers of the kind that can be compiled. Remove it.")
    for layer in layers:
        if recomputed:
            # The layer is an argument, not bound into the compiled function, so that a copy of the model calls its own.
            forward = torch.compile(type(layer).forward, dynamic=True, backend=backend)
            layer.forward = functools.partial(_recomputed, layer, forward)
        else:
            layer.compile(dynamic=True, backend=backend)


def uncompiled(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A block in which compiled layers run as they were written, where lengths change too often to compile for each.

    Dynamo compiles a function at most eight times (torch 2.13), and gives it up silently after that, for training as well.
    """
    if any(is_compiled(module) or _is_recomputed(module) for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def _is_recomputed(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, functools.partial) and forward.func is _recomputed


def _recomputed(layer: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not (layer.training and torch.is_grad_enabled()):
        return forward(layer, *args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        kwargs["past_key_values"] = None  # the second pass would write into the cache once more
    return checkpoint(forward, layer, *args, **_recomputation(), **kwargs)


def _recomputation() -> dict[str, Any]:
    """How torch's `checkpoint` runs a layer again: with the random numbers of the first time, for dropout.

    It keeps the states of the CPU's and of CUDA's generators, and not that of an Apple GPU, whose gradient would be that of
    other dropout masks (torch 2.13: it reads `_initialized`, which torch.mps doesn't have).
    """
    return {"use_reentrant": False, **({"context_fn": _same_on_mps} if torch.backends.mps.is_available() else {})}


def _same_on_mps() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _mps_drawing_from(torch.mps.get_rng_state())


@contextlib.contextmanager
def _mps_drawing_from(state: torch.Tensor) -> Iterator[None]:
    before = torch.mps.get_rng_state()
    torch.mps.set_rng_state(state)
    try:
        yield
    finally:
        torch.mps.set_rng_state(before)
