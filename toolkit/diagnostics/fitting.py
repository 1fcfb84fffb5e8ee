"""What would fit on a device: the largest micro-batch, and other settings under which a run needs less memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.devices import Device, beyond_tensors
from toolkit.diagnostics.plan import Plan

Planner = Callable[[Settings], Plan]
ENOUGH = 3  # alternatives that fit


def needed(plan: Plan, device: Device) -> int:
    """Bytes with which a run does not fail: its tensors at the peak, what else the process holds, and the margin.

    Each rank has its own GPU; a CPU's memory is that of all ranks.
    """
    of_rank = plan.peak + sum(beyond_tensors(device, plan.peak, plan.process))
    return of_rank * plan.ranks if device.kind == "cpu" else of_rank


def alternatives(config: Settings, device: Device, make: Planner) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Changed settings under which the run fits, each with its plan; first those that cost least time.

    A smaller micro-batch and recomputed activations give the same gradients; bf16 rounds, and an adapter trains something else.
    """
    found = 0
    for changes in _candidates(config):
        plan = make(with_changes(config, changes))
        if needed(plan, device) <= device.memory:
            yield changes, plan
            found += 1
            if found == ENOUGH:
                return


def _candidates(config: Settings) -> Iterator[dict[str, Any]]:
    values = values_of(config)
    size, count = values.get("per_device_train_batch_size", 1), values.get("gradient_accumulation_steps", 1)
    one = _split(values, 1, size * count)
    half = {"bf16": True} if values.get("bf16") is False and not values.get("fp16") else {}
    again = {"gradient_checkpointing": True} if values.get("gradient_checkpointing") is False else {}
    adapter = {"use_peft": True, "dtype": "bfloat16"} if values.get("use_peft") is False and "dtype" in values else {}
    smaller = size
    while smaller > 2:
        smaller = -(-smaller // 2)
        yield _split(values, smaller, size * count)
    tried: list[dict[str, Any]] = []
    for changes in (one, half, again, {**half, **again}, {**half, **one}, {**again, **one}, {**half, **again, **one},
                    {**adapter, **half}, {**adapter, **half, **again}, {**adapter, **half, **again, **one}):  # fmt: skip
        if changes and changes not in tried:
            tried.append(changes)
            yield changes


def _split(values: dict[str, Any], size: int, whole: int) -> dict[str, Any]:
    """Micro-batches of another size, for the same global batch; nothing where they have it already."""
    if size >= values.get("per_device_train_batch_size", 1) or whole % size:
        return {}
    changes = {"per_device_train_batch_size": size}
    return changes if values.get("global_batch_size") else {**changes, "gradient_accumulation_steps": whole // size}


def largest_micro_batch(config: Settings, device: Device, make: Planner) -> tuple[int, Plan] | None:
    """The most examples in a micro-batch that fit, up to a sixteenth; None where not even one does.

    Doubled or halved from the config's own until one fits and one doesn't, then where a line between the two meets the memory:
    most of what is needed grows with the examples. The micro-batch holds the longest ones, so it ends with all of them.
    """
    values = values_of(config)
    tried, best, too_many = values.get("per_device_train_batch_size", 1), None, 0
    left, over = 0, 0  # bytes, of the best and of too many
    while True:
        changes = {"per_device_train_batch_size": tried, "gradient_accumulation_steps": 1}
        if "num_generations" in values:  # a step has whole groups, and here two micro-batches
            changes["global_batch_size"] = -(-2 * tried // values["num_generations"]) * values["num_generations"]
        plan = make(with_changes(config, changes))
        spare = device.memory - needed(plan, device)
        if spare >= 0 and best and plan.tokens == best[1].tokens:  # no more examples than that
            return best
        if spare >= 0:
            best, left = (tried, plan), spare
        else:
            too_many, over = tried, -spare
        if best is None:
            if tried == 1:
                return None
            tried //= 2
        elif not too_many:
            tried *= 2
        else:
            size, step = best[0], max(1, best[0] // 16)
            if too_many - size <= step:
                return best
            guess = size + (too_many - size) * left // (left + over)
            tried = min(max(guess, size + step), too_many - step)


def with_changes(config: Settings, changes: dict[str, Any]) -> Settings:
    known = values_of(config)
    return dataclasses.replace(config, **{name: value for name, value in changes.items() if name in known})
