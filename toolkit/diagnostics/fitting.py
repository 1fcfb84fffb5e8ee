"""What would fit on a device: the largest micro-batch, and other settings under which a run needs less memory."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.config import Refusal, Settings
from toolkit.config.conditions import OF_BITSANDBYTES
from toolkit.config.reading import values_of
from toolkit.diagnostics.devices import Device, beyond_tensors
from toolkit.diagnostics.plan import Plan
from toolkit.system.compat import multiplies_bf16

Planner = Callable[[Settings], Plan]
Known = dict[int, tuple[int, Plan]]  # by examples: the bytes that are left, and the plan
MOST = 2**16  # examples that a micro-batch may have
ENOUGH = 3  # alternatives that fit
_HELD = ("weights", "master weights", "optimizer state")  # throughout a step
_OF_ACTIVATIONS = {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"}


def needed(plan: Plan, device: Device) -> int:
    """Bytes with which a run does not fail: its tensors at the peak, what else the process holds, and the margin.

    Each rank has its own GPU; a CPU's memory is that of all ranks.
    """
    of_rank = plan.peak + sum(beyond_tensors(device, plan))
    return of_rank * plan.ranks if device.kind == "cpu" else of_rank


def alternatives(config: Settings, device: Device, make: Planner) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Changes of settings that may make the run fit, each with its plan, until ENOUGH do; first those that cost least time.

    A smaller micro-batch and recomputed activations give the same gradients; bf16 rounds, also weights, and an adapter trains
    something else.
    Where it is the evaluation that needs too much, its batches are halved too. What the recipe refuses is left out, such as
    an adapter of a model that can't have one; so is what makes activations smaller where the weights and the optimizer's
    state alone are too large.
    """
    found = held = 0
    for changes in ({}, *_candidates(config, device)):
        if held > device.memory and changes.keys() <= _OF_ACTIVATIONS:
            continue
        try:
            plan = make(with_changes(config, changes))
        except Refusal:
            continue
        if not changes:
            held = sum(plan.parts.get(part, 0) for part in _HELD) * (plan.ranks if device.kind == "cpu" else 1)
        size = values_of(config).get("per_device_eval_batch_size", 1)
        while plan.in_evaluation and needed(plan, device) > device.memory and size > 1:
            size = -(-size // 2)
            changes = {**changes, "per_device_eval_batch_size": size}
            plan = make(with_changes(config, changes))
        yield changes, plan
        found += needed(plan, device) <= device.memory
        if found == ENOUGH:
            return


def _candidates(config: Settings, device: Device) -> Iterator[dict[str, Any]]:
    values = values_of(config)
    size, count = values.get("per_device_train_batch_size", 1), values.get("gradient_accumulation_steps", 1)
    one = _split(values, 1, size * count)
    has_units = device.ampere if device.kind == "cuda" else multiplies_bf16(device.kind)
    named = True if values.get("fp8", "none") != "none" else values.get("bf16", True)
    half = {} if values.get("fp16") or (has_units if named is None else named) else {"bf16": True}
    again = {"gradient_checkpointing": True} if values.get("gradient_checkpointing") is False else {}
    adapter = {"use_peft": True, "dtype": "bfloat16"} if values.get("use_peft") is False and "dtype" in values else {}
    rounded = {"dtype": "bfloat16", "stochastic_rounding": True} if _may_round(values) else {}
    smaller = [size]
    while smaller[-1] > 2:
        smaller.append(-(-smaller[-1] // 2))
    tried: list[dict[str, Any]] = []
    for changes in (*(_split(values, less, size * count) for less in smaller), one, half, again, {**half, **again},
                    {**half, **one}, {**again, **one}, {**half, **again, **one}, rounded, {**rounded, **again, **one},
                    {**adapter, **half}, {**adapter, **half, **again}, {**adapter, **half, **again, **one}):  # fmt: skip
        if changes and changes not in tried:
            tried.append(changes)
            yield changes


def _may_round(values: dict[str, Any]) -> bool:
    """Whether weights in float32 may be held in bfloat16: not on shards, nor by an optimizer with kernels of its own."""
    shards = values.get("zero_stage") or values.get("fsdp") or values.get("deepspeed")
    unlike = values.get("optim") in OF_BITSANDBYTES or values.get("fp16") or values.get("use_peft")
    return "stochastic_rounding" in values and values.get("dtype") == "float32" and not (shards or unlike)


def _split(values: dict[str, Any], size: int, whole: int) -> dict[str, Any]:
    """Micro-batches of another size, for the same global batch; nothing where they have it already."""
    if size >= values.get("per_device_train_batch_size", 1) or whole % size:
        return {}
    changes = {"per_device_train_batch_size": size}
    return changes if values.get("global_batch_size") else {**changes, "gradient_accumulation_steps": whole // size}


def largest_micro_batch(config: Settings, device: Device, make: Planner) -> tuple[int, Plan] | None:
    """The most examples in a micro-batch that fit, up to a sixteenth; None where not even one does.

    Between two sizes, of which one fits and the other doesn't, the next one planned is where a line between them meets the
    memory: most of what is needed grows with the examples. The micro-batch holds the longest ones, so it ends with all of them.
    """
    values, known = values_of(config), Known()

    def plan_of(size: int) -> Plan:
        if size not in known:
            changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
            if "num_generations" in values:  # a step has whole groups, and here two micro-batches
                changes["global_batch_size"] = -(-2 * size // values["num_generations"]) * values["num_generations"]
            plan = make(with_changes(config, changes))
            known[size] = device.memory - needed(plan, device), plan
        return known[size][1]

    best, too_many = _doublings(values.get("per_device_train_batch_size", 1), device.memory, plan_of, known)
    while best and too_many - best > (step := max(1, best // 16)):
        tried = min(max(_edge(known, device.memory), best + step), too_many - step)
        has_more = plan_of(tried).tokens > plan_of(best).tokens
        if known[tried][0] < 0:
            too_many = tried
        elif has_more:
            best = tried
        else:
            break
    return (best, known[best][1]) if best else None


def _doublings(start: int, memory: int, plan_of: Callable[[int], Plan], known: Known) -> tuple[int, int]:
    """The largest of start, its halves and its doublings that fits, and the next one.

    0 in the place of the first where none fits, and of the second where the first has all examples.
    """
    examples = plan_of(start).examples
    sizes = [start >> halved for halved in range(start.bit_length())][::-1]
    first = len(sizes) - 1
    while sizes[-1] < (examples or MOST) and 2 * sizes[-1] <= MOST:
        sizes.append(2 * sizes[-1])
    low, high, tried = -1, len(sizes), first
    while high - low > 1:
        tokens = plan_of(sizes[tried]).tokens
        if known[sizes[tried]][0] < 0:
            high = tried
        elif not examples and low >= 0 and tokens / sizes[tried] < 0.75 * plan_of(sizes[low]).tokens / sizes[low]:
            enough = bisect.bisect_left(range(low, tried), tokens, key=lambda at: plan_of(sizes[at]).tokens)
            return sizes[low + enough], 0  # there are no more of them than that
        else:
            low = tried
        near = bisect.bisect_right(sizes, _edge(known, memory)) - 1
        if not examples and high == len(sizes):  # completions: a plan that is far too large takes long
            near = min(near, low + (1 if len(known) < 2 else 4))
        tried = min(max(near, low + 1), high - 1)
    return sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else 0


def _edge(known: Known, memory: int) -> int:
    """The examples with which the memory would be full, by a line through the two sizes that are next to it.

    Of one size alone that is too much, fewer fit than this, as if all that is needed grew with the examples.
    """
    spare = sorted((size, left) for size, (left, _) in known.items())
    fits, fails = [each for each in spare if each[1] >= 0], [each for each in spare if each[1] < 0]
    (size, left), *other = [*fits[-1:], *fails[:1]] if fits and fails else fits[-2:] or fails[:2]
    if not other:
        return 2 * size if left >= 0 else min(size, known[size][1].examples or size) * memory // (memory - left)
    more, less = other[0]
    return size + (more - size) * left // (left - less) if left > less else MOST


def with_changes(config: Settings, changes: dict[str, Any]) -> Settings:
    known = values_of(config)
    return dataclasses.replace(config, **{name: value for name, value in changes.items() if name in known})
