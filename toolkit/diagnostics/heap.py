"""What glibc takes from the system for tensors: it is asked for their blocks, which nobody writes to.

torch asks for blocks at multiples of 64 bytes. For one, glibc's `memalign` looks for 96 bytes more than its size, and what it
cuts off at both ends goes to small objects, or to caches of small blocks, where it doesn't merge with a neighbor (mended after
2.38: https://sourceware.org/bugzilla/show_bug.cgi?id=30723). So a block that was freed is too small for the next one of its own
size, and a heap may take twice what is in it. How much it takes depends on the order of all blocks, those of autograd's and
Python's objects too. A plan makes these as a run does, in the same allocator.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Hashable

import torch

from toolkit.system.allocator import PRIMITIVES

_ALIGNMENT = 64  # c10::gAlignment
_SHAPES = 2**10  # of products
_PLUGS = [2**power for power in range(24, 15, -1)]  # bytes, from 16 MiB to 64 KiB


class _Held(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("heap", "a", "b", "c", "mapped", "d", "e", "used", "free", "end")]


class Heap:
    """Blocks of this process that stand for those of a run.

    `start` and `peak`: bytes that malloc held at `restart`, and the most since then. `is_refused`: where it had none to give.
    """

    def __init__(self, libc: ctypes.CDLL) -> None:
        libc.mallinfo2.restype = _Held
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        self._libc, self._blocks, self._plugs = libc, dict[int, int](), list[int]()
        self.start = self.peak = 0
        self.is_refused = False
        self._shapes = dict[Hashable, int]()
        self._factors = [torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((_SHAPES, 64), (64, 64), (_SHAPES, 64))]

    def hold(self, key: int, size: int) -> None:
        """Have a block of this size under this key, in the place of what it has now; none with size 0."""
        if key in self._blocks:
            self._libc.free(self._blocks.pop(key))
        if not size:
            return
        address = ctypes.c_void_p()
        self.is_refused |= bool(self._libc.posix_memalign(ctypes.byref(address), _ALIGNMENT, size))
        self._blocks[key] = address.value or 0
        self.peak = max(self.peak, self._held())

    def multiply(self, shape: Hashable) -> None:
        """Have oneDNN make a primitive as for a product of this shape in bfloat16, unless it has it: .55 MB in this heap."""
        rows = self._shapes.setdefault(shape, len(self._shapes)) % _SHAPES + 1
        left, right, out = self._factors
        torch.mm(left[:rows], right, out=out[:rows])
        self.peak = max(self.peak, self._held())

    def restart(self, *, has_multiplied: bool = False) -> None:
        """Forget the peak so far, and take what is free in the heap now: an earlier plan of this process may have left it.

        `has_multiplied`: in bfloat16, in an evaluation, after which oneDNN has kept as many products as it may.
        """
        kept = os.environ.get(PRIMITIVES, "")
        for number in range(int(kept) if has_multiplied and kept.isdigit() else 0):
            self.multiply(number)
        for size in _PLUGS:
            before = self._held()
            while (address := self._libc.malloc(size)) and self._held() == before:
                self._plugs.append(address)
            self._libc.free(address)
        self.start = self.peak = self._held()

    def clear(self) -> None:
        """Give all back, to the system too: it would count in the memory of the process before the next plan."""
        for address in (*self._blocks.values(), *self._plugs):
            self._libc.free(address)
        self._blocks.clear()
        self._plugs.clear()
        self._libc.malloc_trim(0)

    def _held(self) -> int:
        found = self._libc.mallinfo2()
        return int(found.heap + found.mapped)


def find_heap() -> Heap | None:
    """The heap of this process, or None where it is not glibc's, 2.33 or later."""
    libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    return Heap(libc) if libc and hasattr(libc, "mallinfo2") else None
