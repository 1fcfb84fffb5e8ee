"""A model that was loaded has no NaN or infinity in it, or is refused by the tensor's name."""

from typing import Any

import torch

from toolkit.config.setting import Refusal
from toolkit.system.nonfinite import describe_nonfinite


def check_finite(model: Any, name: str) -> None:
    """Refuse a model with a number that is not finite, which training would blame on its data; `name` begins the message.

    In a buffer infinity may be meant, as in a mask; NaN never is.
    """
    persistent = model.state_dict().keys()
    buffers = ((key, torch.isnan(each)) for key, each in model.named_buffers() if key in persistent and not each.is_meta)
    spoiled = next((f"the buffer {key} holds NaN" for key, is_nan in buffers if bool(is_nan.any())), None)
    found = describe_nonfinite(model.named_parameters()) or spoiled
    if found:
        raise Refusal(f"{name}: {found}. The run that made it diverged, or a file is damaged: use another, or copy it again.")
