"""This process as the first of several ranks, without the others and without a GPU: a process group that moves nothing."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from toolkit.diagnostics.compat import FakeTensor, forget_deepspeed, start_group_of_nobody, storage_key
from toolkit.diagnostics.replacements import Replacements
from toolkit.distributed.launch import Nodes, rank_environments


@contextlib.contextmanager
def as_first_rank(ranks: int, environment: Mapping[str, str]) -> Iterator[None]:
    """What this process would be as rank 0 of `ranks`, with the variables that a launcher gives each of them.

    A GPU of this machine is not seen: engines would take it. (DeepSpeed asks once, when it is imported.)
    """
    before, linear = dict(os.environ), torch.nn.functional.linear
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Where one rank is not to be alone, the engine makes the group of one itself.
    os.environ.update(rank_environments(ranks, Nodes(main_port=1))[0] | dict(environment))
    try:
        with Replacements() as replace:
            importlib.import_module("torch.distributed.nn.functional")
            replace.attribute(torch.distributed, "init_process_group", _group_of_nobody)
            replace.attribute(torch.distributed, "all_gather_object", _all_alike)
            replace.attribute(torch.distributed, "new_group", _other_group)
            replace.attribute(torch.Tensor, "data_ptr", _address)
            for where in (torch.accelerator, torch.cuda, torch.backends.mps):
                replace.attribute(where, "is_available", lambda _: False)
            for where in (torch.accelerator, torch.cuda):
                replace.attribute(where, "device_count", lambda _: 0)
            replace.attribute(torch.accelerator, "current_accelerator", lambda *_, **__: None)
            yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        forget_deepspeed()
        torch.nn.functional.linear = linear  # DeepSpeed 0.19 replaces it under ZeRO-3, for good
        os.environ.clear()
        os.environ.update(before)


def _group_of_nobody(original: Callable[..., Any], *_: Any, **__: Any) -> None:
    start_group_of_nobody(original, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _other_group(original: Callable[..., Any], *values: object, **named: object) -> Any:
    return original(*values, **(named | {"backend": "fake"}))


def _all_alike(_: Callable[..., Any], found: list[Any], mine: Any, *__: Any, **___: Any) -> None:
    found[:] = [mine] * len(found)


def exchanged(_: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's exchange of gradients, of which a group that moves nothing gives no result. (DDP reads these annotations.)"""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _address(original: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int:
    """Of a tensor without contents, by which engines tell parameters apart, one that no other has."""
    return storage_key(tensor.untyped_storage()) if isinstance(tensor, FakeTensor) else original(tensor)
