"""Numbers that are not finite in tensors: found at the speed of a sum, and named."""

from collections.abc import Iterable

import torch


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of floating-point numbers holds NaN or infinity; False for other types, and without data (meta)."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return False
    tensor = tensor.detach()
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 has no sum
    # The sum of what is finite may overflow, but is found several times faster: only then each number is looked at.
    return not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all())


def describe_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first of named tensors that holds a number which is not finite, and how many there are; None where all are finite."""
    for name, tensor in tensors:
        if has_nonfinite(tensor):
            flat = tensor.detach().float().flatten()
            wrong = ~torch.isfinite(flat)
            at = [int(place) for place in torch.unravel_index(wrong.nonzero()[0, 0], tensor.shape)]
            value = "NaN" if bool(torch.isnan(flat[wrong][0])) else "infinity"
            return f"{name} holds {value} at {at}; of its {flat.numel():,} numbers {int(wrong.sum()):,} are not finite"
    return None


