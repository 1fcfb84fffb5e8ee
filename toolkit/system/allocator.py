"""Memory on a CPU: how much of what was freed stays with the process, and how much of what was prepared."""

import ctypes
import os
import platform

# glibc's malloc.h. Sizes in bytes; larger blocks than 32 MiB it always takes from the system.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST, _LARGEST_IF_SPARING = 256 * 2**20, 32 * 2**20, 2 * 2**20
# Both read at the first product, also where torch was imported before: of oneDNN, and of ideep, through which torch calls it.
PRIMITIVES, KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def keep_freed_memory(*, sparing: bool = False) -> None:
    """Keep up to 256 MiB of freed memory for the next tensors, on Linux with glibc; elsewhere nothing.

    sparing: blocks from 2 MiB on, not from 32, are the system's own, which takes more time: each comes zeroed. For engines that
    gather a layer's weights and let go of them again, as between activations they leave gaps in which no other layer fits: each
    of two ranks (14 M parameters) takes 1.74 GB in DPO under ZeRO-3, not 2.33, and 1.16 in SFT under FSDP2, not 1.45, for a
    fifth to a third more time. And where memory is short: glibc before 2.39 leaves gaps between any large blocks.

    By default glibc (2.36) gives memory back to the system as soon as 64 MiB at the end of its heap are free, and activations
    of a step are that, many times a step: the pages come back zeroed, one fault each. Sixty steps of `recipes/pretrain.py` on
    one core had 868,000 faults and 1.8 s of system time that way, and 161,000 and 0.5 s of 17 s this way. A larger model, whose
    tensors are mostly beyond the 32 MiB, gained nothing that could be measured.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IF_SPARING if sparing else _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)


def give_back_memory() -> None:
    """Give freed memory back to the system, on Linux with glibc: transformers loads in threads, each with a heap of its own."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_few_primitives() -> None:
    """Have oneDNN and ideep, which multiply bfloat16 on a CPU, keep 48 and 16 primitives if the environment gives no number.

    One is made for each shape that is multiplied (0.4 ms), of .3 to .55 MB, and by default each of the two keeps 1,024 (ideep
    of each operation and thread): texts have any length, so a run soon has them all. Sixty steps of `recipes/lora.py` and
    `sft.py` in bfloat16 (6 layers, 384 wide) held 2.7 and 2.4 GB, and hold 1.3 and 1.2; `accelerated.py`, which held 1.7, holds
    .7. They take as long or less: within a micro-batch layers have the same few shapes.
    """
    os.environ.setdefault(PRIMITIVES, "48")
    os.environ.setdefault(KERNELS, "16")
