"""Blocks that a plan asks glibc for: counted, never written to, and not put where an earlier plan's were."""

import ctypes
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from toolkit.command_line.recipe import read_recipe
from toolkit.diagnostics.compat import FakeTensor
from toolkit.diagnostics.devices import resident
from toolkit.diagnostics.heap import Heap, find_heap
from toolkit.diagnostics.ledger import Ledger
from toolkit.diagnostics.plan import plan
from toolkit.diagnostics.planned_run import Seen
from toolkit.distributed.engines.engine import local_part
from toolkit.system.allocator import PRIMITIVES
from toolkit.training import accelerator

ROOT = Path(__file__).parents[2]
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
    """Fails when: what malloc returns for a block is not looked at."""
    heap.hold(1, 2**60)
    assert heap.is_refused
    heap.hold(1, 0)


@pytest.mark.parametrize(("flag", "least", "most"), [("--no-bf16", 0, 0), ("--bf16", 64 + 10, 10_000)])
def test_a_plan_in_bfloat16_multiplies_for_what_onednn_keeps_and_for_each_product(
    flag: str, least: int, most: int, heap: Heap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: products of the steps, or those of the evaluation before them, leave nothing in the heap; or a run in float32 does."""
    shapes = list[object]()
    monkeypatch.setenv(PRIMITIVES, "64")
    monkeypatch.setattr(Heap, "multiply", lambda heap, shape: shapes.append(shape))
    words = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--num-attention-heads", "2", "--max-train-examples", "64"]
    main, config = read_recipe(ROOT / "recipes/accelerated.py", [*words, "--use-cpu", flag])
    plan(main, config)
    kept = [shape for shape in shapes if isinstance(shape, int)]
    assert len(kept) == min(least, 64)
    assert least - len(kept) <= len(shapes) - len(kept) <= most


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_before_the_steps_is_in_the_heap_and_its_model_is_not_counted_again(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the heap begins with the first step, or what DeepSpeed's hooks keep of the first model is counted with the second."""
    begun, start = list[bool](), Seen.start
    monkeypatch.setattr(Seen, "start", lambda seen: (begun.append(seen.is_before_steps), start(seen))[1])
    words = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--num-attention-heads", "2", "--max-train-examples", "64"]
    parts = []
    for flags in (["--eval-on-start"], []):
        begun.clear()
        zero = ["--zero-stage", "1"] * (ranks == 2)
        main, config = read_recipe(ROOT / "recipes/accelerated.py", [*words, *flags, *zero, "--use-cpu", "--no-bf16"])
        parts.append(plan(main, config, ranks=ranks).parts)
        assert begun[0] == bool(flags)
    assert parts[0] == parts[1]


@pytest.mark.parametrize("sparing", [False, True])
@pytest.mark.parametrize(("recipe", "flags", "may_spare"), [("accelerated", [], True), ("accelerated", ["--no-auto-find-batch-size"], False), ("grpo", [], False)])
def test_a_plan_of_a_run_that_spares_memory_has_the_blocks_of_such_a_run(
    recipe: str, flags: list[str], may_spare: bool, sparing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: a plan's heap is always that of a run with much memory, or always the other; or a run that never asks what is free may spare it."""
    kept = list[bool]()
    monkeypatch.setattr(accelerator, "keep_freed_memory", lambda *, sparing: kept.append(sparing))
    words = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--num-attention-heads", "2", "--max-train-examples", "64"]
    main, config = read_recipe(ROOT / f"recipes/{recipe}.py", [*words, *flags, "--use-cpu", "--no-bf16"])
    found = plan(main, config, sparing=sparing)
    assert (set(kept), found.may_spare) == ({sparing}, may_spare)
    assert len(found.notes) == sparing


def test_a_plan_of_shards_makes_no_weights_and_counts_none_that_no_run_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is real is as small as a batch, and the first step takes no more than the second.

    Fails when: what an engine gathers weights into is real (all computed with them then is, too), or the whole tensors whose
    shapes DTensor looks at in its first step are counted, or it is planned once more where memory is short.
    """
    real, peaks, see, restart = list[int](), list[int](), Ledger.see, Ledger.restart

    def noted(ledger: Ledger, tensor: torch.Tensor, part: str | None = None) -> None:
        local = local_part(tensor)
        if not isinstance(local, FakeTensor) and local.device.type == "cpu":
            real.append(local.untyped_storage().nbytes())
        see(ledger, tensor, part)

    def restarted(ledger: Ledger) -> None:
        peaks.append(ledger.peak)
        restart(ledger)

    monkeypatch.setattr(Ledger, "see", noted)
    monkeypatch.setattr(Ledger, "restart", restarted)
    words = ["--hidden-size", "64", "--num-hidden-layers", "1", "--intermediate-size", "64", "--num-attention-heads", "2", "--max-train-examples", "16"]
    words += ["--per-device-train-batch-size", "1", "--max-length", "256", "--optim", "adamw_torch", "--eval-strategy", "no", "--no-eval-on-start"]
    main, config = read_recipe(ROOT / "recipes/sft.py", [*words, "--fsdp", "--use-cpu", "--no-bf16"])
    found = plan(main, config, ranks=2)
    assert max(real) < 0.02 * found.peak, max(real)
    assert not found.may_spare  # it does in any case
    assert 0 < peaks[1] <= found.peak


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN multiplies no bfloat16 there")
def test_a_product_of_a_new_shape_takes_memory_and_one_of_a_known_shape_takes_none() -> None:
    """In a process of its own. Fails when: each product is one that oneDNN has kept, or its name is not its shape."""
    program = """
        from toolkit.diagnostics.heap import find_heap
        heap = find_heap()
        for shape in ("first", "a", "b", "b", "a"):
            before = heap._libc.mallinfo2().used
            heap.multiply(shape)
            print(heap._libc.mallinfo2().used - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=True)
    _, *sizes = map(int, done.stdout.split())
    assert min(sizes[:2]) > 0.03 * MIB
    assert max(map(abs, sizes[2:])) < 0.01 * MIB
