"""Products of the layers' matrices in 8-bit floats (https://arxiv.org/abs/2209.05433), through torchao."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.config import Refusal
from toolkit.distributed.ranks import say_once
from toolkit.models.compat import linear_in_float8
from toolkit.models.layers import layers_of
from toolkit.models.without_weights import builds_without_weights
from toolkit.system.devices import chosen_type
from toolkit.system.imports import imported_to_stay

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MULTIPLE = 16  # what torch's products of float8 need of both widths of a matrix


def multiply_in_float8(model: PreTrainedModel, scaled: str, device: str) -> None:
    """Let the linear layers of a model's layers multiply in float8, in place, what they would multiply in bfloat16.

    The parameters stay what they are, and have the same names. Each product's two matrices are scaled by their largest value
    (dynamic scaling: nothing is kept from one step to the next) and rounded, and the sum is in float32. A head, an embedding
    and layers whose widths are no multiples of 16 are left as they are. Products in float32 stay what they are, so that checks
    of a model that is loaded see its own numbers.

    Args:
        scaled: "rowwise" or "tensorwise": whether each row of a matrix has a scale of its own, or all have one.
        device: the kind of device that training will be on; a CPU computes the same with products in float32.

    Raises:
        Refusal: torchao is missing, the device has no products of float8, or the model no layer for them.
    """
    flag = f"--fp8 {scaled}"
    if importlib.util.find_spec("torchao") is None:
        raise Refusal(f"{flag} needs torchao, which is not installed. Install it: pip install torchao")
    kind = chosen_type(torch.device(device))
    _check_device(flag, kind)
    with imported_to_stay():
        from torchao.float8 import Float8LinearConfig

        made, emulated = linear_in_float8(), kind == "cpu"
    # The products of gradients and inputs are over the tokens, of which a row may have any number.
    config = replace(Float8LinearConfig.from_recipe_name(scaled), emulate=emulated, pad_inner_dim=True)
    converted = 0
    for parent in [module for layer in layers_of(model) for module in layer.modules()]:
        for name, child in parent.named_children():
            if type(child) is nn.Linear and not (child.in_features % _MULTIPLE or child.out_features % _MULTIPLE):
                setattr(parent, name, made.from_float(child, config))
                converted += 1
    if not converted:
        raise Refusal(
            f"{flag}: {type(model).__name__} has no layer with a matrix whose sides are multiples of {_MULTIPLE}. Remove it."
        )
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    where = ", emulated on the CPU: for trying it out, slower than bf16" if emulated else ""
    say_once(f"{converted} of {linear} linear layers multiply in float8 ({scaled}){where}")


def _check_device(flag: str, kind: str) -> None:
    """A plan is for other devices than this machine's, and knows of them how much memory they have."""
    if kind == "cpu" or (builds_without_weights() and kind == "cuda"):
        return
    needed = "a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), or --use-cpu to try it out"
    if kind != "cuda":
        raise Refusal(f"{flag} needs {needed}, and training would be on {kind}. Leave it out.")
    if (has := torch.cuda.get_device_capability()) < (8, 9):
        raise Refusal(f"{flag} needs {needed}, and {torch.cuda.get_device_name()} has {has[0]}.{has[1]}. Leave it out: bf16.")
