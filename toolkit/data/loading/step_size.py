"""Whether a step has more examples than the data, or than there is memory for."""

import torch

from toolkit.config import Refusal
from toolkit.system.console import warn_once
from toolkit.system.free_memory import free_memory
from toolkit.system.numbers import show_bytes

BYTES_OF_EXAMPLE, BYTES_OF_TOKEN = 1000, 32  # of a batch, with the documents that it is made from; as measured, rather fewer


def check_step(size: int, count: int, mean_length: float, data_rank: int, readers: int, unit: str = "examples") -> None:
    """Warn where a step of `size` examples is more than the `count` of an epoch, and refuse one that memory can't hold then.

    `unit`: what they are called, such as packed rows. `mean_length`: tokens of one. `readers`: the ranks that share in reading
    a step.
    """
    if not 0 < count < size:  # what is of one epoch takes no more than the data do
        return
    if data_rank == 0:
        warn_once(
            f"A step of {size:,} {unit} goes {size / count:,.1f} times over the {count:,} that there are. Take "
            "a smaller --global-batch-size (or --gradient-accumulation-steps), or more data."
        )
    needed = int(size / readers * (BYTES_OF_EXAMPLE + BYTES_OF_TOKEN * mean_length))
    free = free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise Refusal(
            f"--global-batch-size: the {size:,} {unit} of a step need about {show_bytes(needed)} of memory, and "
            f"{show_bytes(free)} are free. Take a smaller one (or --gradient-accumulation-steps)."
        )
