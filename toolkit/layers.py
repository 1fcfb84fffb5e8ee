"""A model's layers, recomputed in backward or compiled."""

import functools
from typing import Any

import torch

from toolkit.config import Refusal


def checkpoint_layers(model: Any) -> None:
    """Let the model recompute its layers' activations in backward."""
    if not model.supports_gradient_checkpointing:
        raise Refusal(f"--gradient-checkpointing: {type(model).__name__} does not support it. Remove it.")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its older name
    enable({"use_reentrant": False})


def check_compiler() -> None:
    """Refuse --torch-compile on a CPU where inductor couldn't compile or link its C++, which it finds out in the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise Refusal(
            "--torch-compile: on a CPU layers are compiled by a C++ compiler, and there is none here. Install g++ (Debian and "
            "Ubuntu: apt install g++), or name one in the environment, CXX=PATH. Or remove it."
        ) from None
    if " " in torch.__file__:
        raise Refusal(
            f"--torch-compile: torch is in a folder with a space in its name, {torch.__file__!r}, where what it compiles for a "
            "CPU can't be linked (torch 2.13). Make the virtual environment in a folder without one, or remove it."
        )


def compile_layers(model: Any, recomputed: bool) -> None:
    """Compile each layer by itself: one compilation serves all of them, whatever the number.

    `dynamic=None` was not bit-exact after a resume, where lengths vary. The recomputation goes around the compiled layer:
    transformers (5.23) puts it inside, where the loop over documents, which is not compiled, makes torch give the layer up
    and run it as it was, silently.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise Refusal(f"--torch-compile: {type(model).__name__} has no layers of the kind that can be compiled. Remove it.")
    for layer in layers:
        if recomputed:
            # The layer is an argument, not bound into the compiled function, so that a copy of the model calls its own.
            layer.forward = functools.partial(_recomputed, layer, torch.compile(type(layer).forward, dynamic=True))
        else:
            layer.compile(dynamic=True)


def _recomputed(layer: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not (layer.training and torch.is_grad_enabled()):
        return forward(layer, *args, **kwargs)
    if kwargs.get("past_key_values") is not None:
        kwargs["past_key_values"] = None  # the second pass would write into the cache once more
    return checkpoint(forward, layer, *args, use_reentrant=False, **kwargs)
