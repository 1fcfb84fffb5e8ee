"""A ledger of live tensors: how many bytes there are at each moment, by part, and at the highest one."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from toolkit.diagnostics.compat import (
    INDEXING,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    calling_engine,
    own_tables,
    reads_a_value,
    storage_key,
    tree_leaves,
)
from toolkit.diagnostics.heap import Heap
from toolkit.distributed.engines.engine import local_part

ENGINE = "engine"  # the part that FSDP2 or DeepSpeed allocates: gathered weights, buckets, partitions of the gradients
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def remember_operations(kind: str) -> None:
    """Let fake tensors take what an operation makes from a cache, but on a CPU: it holds tensors, and small objects all over
    the heap, that a run has not. On other devices no heap is planned, and 32 layers are in half the time."""
    FAKE.cache_enabled = kind != "cpu"
    if kind == "cpu":
        FAKE.cache_clear()


def _places(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `nonzero` makes of a mask; a fake one has no values and is taken to be all true, the most that it can choose."""
    if not isinstance(mask, FakeTensor):
        return mask.nonzero(as_tuple=True)
    return tuple(mask.new_empty(mask.numel(), dtype=torch.long) for _ in range(mask.dim()))


class Ledger(TorchDispatchMode):
    """Follows the storage of every tensor that an operation returns, from its making to its end, of fake tensors too.

    `phase` names the part that new storages belong to; `at_peak` is the bytes of each part at the highest moment. `heap` is
    asked for a block for each of them.
    """

    def __init__(self, heap: Heap | None = None) -> None:
        super().__init__()
        self.heap = heap
        self.phase, self.total, self.peak, self.peak_phase, self._is_pausing = "other", 0, 0, "", False
        self.live: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self._of: dict[int, tuple[str, int, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):  # a DTensor first does the same on its local part
            return NotImplemented
        engine = calling_engine()
        if kwargs and args and isinstance(args[0], FakeTensor) and str(kwargs.get("device")).startswith("cpu:"):
            kwargs = {**kwargs, "device": torch.device("cpu")}  # as a rank's accelerator has it; fakes of the two don't mix
        # A fake has no value. What asks for one goes on as if all were well: others ask whether a norm is finite, DeepSpeed
        # whether it is not, in a truth value or a byte, and would pass over the step that makes the optimizer's state.
        if reads_a_value(func) and isinstance(args[0], FakeTensor):
            kind = args[0].dtype
            is_well = engine != "deepspeed" if kind == torch.bool else kind != torch.uint8
            return 1.0 if kind.is_floating_point else is_well if kind == torch.bool else int(is_well)
        # What engines gather weights into isn't made of the model's tensors, and would be real, as all computed with them.
        makes = engine == "deepspeed" or (engine == "fsdp" and func is torch.ops.aten.empty.memory_format)
        takes_none = makes and not any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs)))
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            func, args, kwargs = torch.ops.aten.stack.default, (_places(args[0]), 1), None
        if func.overloadpacket in INDEXING:  # a loss's `logits[labels != -100]`, and its backward
            masks = [each is not None and each.dtype == torch.bool for each in args[1]]
            if any(masks) and any(isinstance(each, FakeTensor) for each in tree_leaves(args)):
                places = zip(args[1], masks, strict=True)
                args = (args[0], [index for each, mask in places for index in (_places(each) if mask else [each])], *args[2:])
        with FAKE if takes_none else contextlib.nullcontext(), self.during(ENGINE if engine else self.phase):
            output = func(*args, **(kwargs or {}))
            if self.heap and func.overloadpacket in _PRODUCTS and args[-1].dtype == torch.bfloat16 and not self._is_pausing:
                self.heap.multiply((func, *((each.shape, each.stride()) for each in args if isinstance(each, torch.Tensor))))
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        return output

    def see(self, tensor: torch.Tensor, part: str | None = None) -> None:
        """Count a storage, once; with `part`, say what it is, also where it was counted as something else before."""
        if tensor.layout != torch.strided:  # none of a model's: a baseline, which a recipe's own loop computes
            return
        tensor = local_part(tensor)
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._of:
            old, size, reference = self._of[key]
            if part and old != part:
                self.live[old] -= size
                self.live[part] += size
                self._of[key] = (part, size, reference)
            return
        size, part = storage.nbytes(), part or self.phase
        # A fake tensor may be one of the meta device too: DeepSpeed keeps the shapes of all weights so.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if not size or device.type == "meta" or self._is_pausing:
            return
        self._of[key] = (part, size, weakref.ref(storage, lambda _: self._gone(key)))
        self._add(part, size)
        if self.heap:
            self.heap.hold(key, size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage by its new size: FSDP2 gives back a layer's gathered weights, and takes that much again, in place."""
        key = storage_key(storage)
        part, size, reference = self._of.get(key, (ENGINE, 0, None))
        if reference is not None:
            self._of[key] = (part, storage.nbytes(), reference)
            self._add(part, storage.nbytes() - size)
            if self.heap:
                self.heap.hold(key, storage.nbytes())

    def _add(self, part: str, size: int) -> None:
        self.live[part] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak, self.peak_phase = self.total, dict(self.live), self.phase

    def restart(self) -> None:
        """Forget the highest moment so far; what is live stays counted."""
        self.peak, self.at_peak, self.peak_phase = self.total, dict(self.live), self.phase

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """A block whose storages are no part of the run."""
        self._is_pausing = True
        try:
            yield
        finally:
            self._is_pausing = False

    def forget(self) -> None:
        """Count all that is live as gone: it is of a run that has ended. (DeepSpeed's hooks keep its weights.)"""
        for key in list(self._of):
            self._gone(key)

    def _gone(self, key: int) -> None:
        if key not in self._of:
            return
        part, size, _ = self._of.pop(key)
        self._add(part, -size)
        if self.heap:
            self.heap.hold(key, 0)


def as_fake(model: nn.Module) -> nn.Module:
    """The model with fake tensors of the CPU in place of its parameters and buffers, in place; tied ones stay tied."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    with FAKE:
        for module in model.modules():
            for table in own_tables(module):
                for name, old in table.items():
                    if old is None or isinstance(old, FakeTensor):
                        continue
                    if id(old) not in made:
                        new: torch.Tensor = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                        if isinstance(old, nn.Parameter):
                            new = nn.Parameter(new, old.requires_grad)
                            vars(new).update(vars(old))  # of a weight in 4 bits, what is packed in it
                        made[id(old)] = new, old
                    table[name] = made[id(old)][0]
    return model


def mark_phases(ledger: Ledger, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Callable[[], None]]:
    """Hooks that tell the ledger weights, gradients, optimizer state and the head apart; the functions that remove them."""
    removed: list[Callable[[], None]] = []
    head, outer = _head(model), list[str]()
    if head is not None:

        def enter(*_: Any) -> None:
            outer.append(ledger.phase)
            ledger.phase = "logits"

        def leave(*_: Any) -> None:
            ledger.phase = outer.pop()

        removed += [head.register_forward_pre_hook(enter).remove, head.register_forward_hook(leave).remove]
    for parameter in model.parameters():
        ledger.see(parameter, "weights")
        if parameter.requires_grad:

            def accumulated(parameter: torch.Tensor) -> None:
                if parameter.grad is not None:
                    ledger.see(parameter.grad, "gradients")

            removed.append(parameter.register_post_accumulate_grad_hook(accumulated).remove)

    def before(*_: Any) -> None:
        outer.append(ledger.phase)
        ledger.phase = "update"

    def after(stepped: torch.optim.Optimizer, *_: Any) -> None:
        for state in stepped.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    ledger.see(value, "optimizer state")
        ledger.phase = outer.pop()

    removed += [optimizer.register_step_pre_hook(before).remove, optimizer.register_step_post_hook(after).remove]
    return removed


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    try:
        return find() if find else None
    except (AttributeError, NotImplementedError):
        return None
