"""Blocks that a plan asks glibc for: counted, never written to, and not put where an earlier plan's were."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from toolkit.diagnostics.devices import resident
from toolkit.diagnostics.heap import Heap, find_heap

MIB = 2**20
IN_THE_HEAP = 100 * 2**10  # larger ones may be mappings of their own


@pytest.fixture
def heap() -> Iterator[Heap]:
    found = find_heap()
    if found is None:
        pytest.skip("not glibc")
    yield found
    found.clear()


def test_blocks_are_counted_at_their_highest_moment_and_take_no_memory(heap: Heap) -> None:
    """Fails when: a block that is given back stays, or what is held is not looked at after each one."""
    heap.restart()
    before = resident()
    for key in range(200):
        heap.hold(key, 3 * MIB)
    for key in range(200):
        heap.hold(key, MIB if key % 2 else 0)
    assert 599 * MIB < heap.peak - heap.start < 620 * MIB
    assert resident() - before < 4 * MIB
    for key in range(1000, 1040):
        heap.hold(key, MIB)
    assert heap.peak - heap.start < 620 * MIB


def test_a_plan_is_the_same_after_another_one_left_its_heap_in_pieces(heap: Heap) -> None:
    """Fails when: what is free is not taken before the first step."""
    first = Heap(ctypes.CDLL(None))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    small = []
    for key in range(1000):
        first.hold(key, IN_THE_HEAP)
        small.append(ctypes.c_void_p(libc.malloc(2000)))
    first.clear()
    heap.restart()
    for key in range(1000):
        heap.hold(key, IN_THE_HEAP)
    assert heap.peak - heap.start > 998 * IN_THE_HEAP
    for address in small:
        libc.free(address)


def test_a_request_that_is_refused_is_known(heap: Heap) -> None:
    heap.hold(1, 2**60)
    assert heap.is_refused
    heap.hold(1, 0)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN multiplies no bfloat16 there")
def test_a_product_of_a_new_shape_takes_memory_and_one_of_a_known_shape_takes_none(heap: Heap) -> None:
    """Fails when: each product is one that oneDNN has kept, or its name is not its shape."""
    heap._shapes |= dict.fromkeys(range(3000), 0)  # which this process may have multiplied for another test
    sizes = []
    for shape in ("a", "b", "b", "a"):
        before = heap._libc.mallinfo2().used
        heap.multiply(shape)
        sizes.append(heap._libc.mallinfo2().used - before)
    assert min(sizes[:2]) > 0.03 * MIB
    assert max(map(abs, sizes[2:])) < 0.01 * MIB
