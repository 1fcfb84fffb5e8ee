"""A recipe as on an accelerator, without one: its tensors say that they are on another device, and are computed on the CPU.

    python tests/devices/on_a_device.py recipes/sft.py --max-steps 4

What mixes tensors of both devices raises, as CUDA does, but for what CUDA takes as well: numbers, indices, and copies from one to
the other. So do `numpy()` of a tensor there, and saving what was not fetched. Kernels that only a GPU has are not tried.
"""

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("hpu", 0)  # a name that torch knows and has no code for; what code there asks of its module is below
INSIDE = torch.device("cpu", 1)  # what torch's C++ code takes a tensor there for: it has no second CPU of its own
_MAY_MIX = {
    getattr(torch.ops.aten, name) for name in ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_")
}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor of the device; its numbers are in `inner`, on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        like = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=INSIDE, requires_grad=False, **like)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {})

    def __repr__(self, **named: Any) -> str:
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, **named: Any) -> Any:
        raise TypeError(f"a tensor on {DEVICE} can't be a numpy array: fetch it first, with .cpu()")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def storage(self) -> Any:
        return self.inner.storage()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()


class Devices(TorchDispatchMode):
    """A block in which tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {})


def _carry_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, OnDevice)]
    here = [each for each in tensors if not isinstance(each, OnDevice) and each.dim() > 0]
    if there and here and func._overloadpacket not in _MAY_MIX:
        shapes = [[tuple(each.shape) for each in group] for group in (there, here)]
        raise RuntimeError(f"{func}: tensors on two devices: {shapes[0]} on {DEVICE}, {shapes[1]} on the CPU")
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    is_there = bool(there) if asked is None else asked.type == DEVICE.type or asked == INSIDE
    if asked is not None and is_there:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._overloadpacket is torch.ops.aten.copy_:
        return args[0]
    if not is_there:
        return found
    known = {id(each.inner): each for each in there}  # what was changed in place stays the tensor that it was
    return tree_map(lambda each: known.get(id(each), _on_device(each)), found)


def _on_device(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _be_there() -> None:
    module = types.ModuleType("torch.hpu")
    for name, found in {"_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0, "synchronize": None}.items():
        setattr(module, name, lambda *args, found=found: found)
    sys.modules["torch.hpu"] = torch.hpu = module  # type: ignore[attr-defined]
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=) comes through `Devices`
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied when a model is moved there
    state = accelerate.state.PartialState
    made = state.__init__

    def on_device(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.device = DEVICE

    state.__init__ = on_device  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    _be_there()
    with Devices():
        runpy.run_path(sys.argv[0], run_name="__main__")
