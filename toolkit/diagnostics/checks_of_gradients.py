"""Checks of gradients: functions of what was recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from toolkit.config import Settings
from toolkit.config.conditions import couples_a_micro_batch
from toolkit.config.reading import values_of
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Gradients, Record, Update

SAME = 1e-3  # relative distance of two gradients that are to be equal; rounding in float32 is about 1e-6
SAME_IN_HALF = 0.05  # of bfloat16 weights
_NOT_FINITE = "a gradient was not finite"


def check_split(split: Record, whole: Record, config: Settings) -> Outcome:
    """The first gradient of eight micro-batches of one example is that of one micro-batch of eight."""
    if couples_a_micro_batch(config):
        return skipped("this loss compares the examples of a micro-batch with each other")
    if not split.updates or not whole.updates:
        return skipped(why_none(split) or why_none(whole) or "no update was seen")
    one, other = split.updates[0], whole.updates[0]
    error, ratio, cosine = distance(one.unclipped, other.unclipped)
    if not math.isfinite(error):
        norms = norm_of(one.unclipped) + norm_of(other.unclipped)
        return skipped("no gradient was seen" if math.isfinite(norms) else _NOT_FINITE)
    note = f"relative error {error:.1e}"
    if error < same_enough(whole):
        return found(note)
    parts, similar = max(one.micro_batches, 2), cosine > 0.999
    if similar and abs(ratio * parts - 1) < 0.05:
        cause = f"the sum over micro-batches is divided by their number ({parts})"
    elif similar and abs(ratio / parts - 1) < 0.05:
        cause = f"each of the {parts} micro-batches is divided by its own size and not by that of the global batch"
    elif similar:
        cause = "the loss depends on how many micro-batches there are"
    else:
        cause = (
            "micro-batches of different sizes count alike (a mean of means), the forward pass sees padding or other examples, "
            "or examples get lost"
        )
    what = (
        f"With 8 micro-batches of 1 example the gradient is {ratio:.3g} times as long as with 1 of 8 of the same examples, and "
        f"{error:.0%} away from it: {cause}."
    )
    change = (
        "Divide the sum of the micro-batch's losses by the total of the global batch (batch.totals), and add up, without "
        "another division, what each micro-batch's backward leaves."
    )
    return found(note, Finding("split", what, change, loss_place(whole) or other.where))


def check_alone(record: Record, config: Settings) -> Outcome:
    """Documents that share a row or a padded micro-batch do not see each other."""
    if couples_a_micro_batch(config):
        return skipped("this loss compares the examples of a micro-batch with each other")
    if not record.alone:
        return skipped("no micro-batch of several documents that tk.train_step could be tried on")
    finite = [each for each in record.alone if math.isfinite(each[0])]
    if not finite:
        return skipped(_NOT_FINITE)
    error, documents, where = max(finite)
    packed = bool(values_of(config).get("packing", False))
    note = f"relative error {error:.1e}, {documents} documents {'packed' if packed else 'padded'}"
    uneven, place = max((each for each in record.uneven if math.isfinite(each[0])), default=(0.0, ""))
    of_lists = None if uneven < same_enough(record) else Finding(
        "alone",
        f"Lists of unequal lengths have a gradient {uneven:.0%} away from that of each alone: what is no document counts.",
        "Leave it out: scores.masked_fill(~is_document, -math.inf) before a softmax, values * is_document before a sum.",
        place,
    )  # fmt: skip
    if error < same_enough(record):
        return found(note, of_lists)
    what = (
        f"{documents} documents in one {'packed row' if packed else 'micro-batch'} have a gradient {error:.0%} away from "
        "that of each alone."
    )
    change = (
        "Give the model the documents' bounds and positions that tk.collate_packed makes (cu_seq_lens_q ..., "
        "position_ids), put no label on the first token of a document, and divide by batch.totals." if packed else
        "Give the model the attention_mask of the micro-batch, put no label on padding, and divide by batch.totals."
    )  # fmt: skip
    return found(note, Finding("alone", what, change, where))


def check_clipping(record: Record, config: Settings) -> Outcome:
    """No update takes a gradient that is longer than --max-grad-norm."""
    limit = values_of(config).get("max_grad_norm", 0.0)
    if not limit or not record.updates:
        return skipped("--max-grad-norm 0" if not limit else "no update was seen")
    norms = [(norm_of(update.gradients), number, update) for number, update in enumerate(record.updates, start=1)]
    longest, number, update = max(norms, key=lambda each: each[0])
    raw = max(norm_of(each.unclipped) for each in record.updates)
    if longest <= limit * 1.001:
        return found(f"longest gradient {raw:.3g}, after clipping {longest:.3g}")
    what = f"At step {number} the optimizer gets a gradient of norm {longest:.3g}, and --max-grad-norm is {limit:g}."
    change = (
        "Clip once a step, after the backward of the last micro-batch: torch.nn.utils.clip_grad_norm_(model.parameters(), "
        "config.max_grad_norm)."
    )
    return found("", Finding("clipping", what, change, update.where))


def check_cleared(record: Record) -> Outcome:
    """Before the first forward pass of a step there is no gradient of the step before, and no update takes that one again."""
    if len(record.updates) < 2:
        return skipped("fewer than two updates were seen")
    again = next((update for update in record.updates if update.is_repeated), None)
    if again is not None and any(forward.with_gradient for forward in record.of_model("train")):
        what = "The optimizer is stepped again with the gradient of the update before: no forward pass is between them."
        return found("", Finding("cleared", what, "Step it once for each batch.", again.where))
    late: Update | None = next((update for update in record.updates[1:] if update.left_over), None)
    if late is None:
        return found(f"{len(record.updates)} updates")
    what = f"A step begins with the gradient of the one before: {names_of(late.left_over)}."
    return found("", Finding("cleared", what, "Call optimizer.zero_grad() after each optimizer.step().", late.where))


def distance(one: Gradients, other: Gradients) -> tuple[float, float, float]:
    """Of the first gradient from the second one: relative distance, ratio of lengths, cosine; NaN where there is none."""
    names = sorted(one.keys() | other.keys())
    like = {name: one.get(name, other.get(name)) for name in names}
    a, b = (
        torch.cat([(each[name] if name in each else torch.zeros_like(like[name])).flatten().double() for name in names])  # type: ignore[arg-type]
        if names else torch.zeros(1, dtype=torch.float64)
        for each in (one, other)
    )  # fmt: skip
    if not b.norm() and not a.norm():
        return math.nan, math.nan, math.nan
    whole = float(b.norm().clamp_min(1e-30))
    cosine = float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-60))
    return float((a - b).norm()) / whole, float(a.norm()) / whole, cosine


def same_enough(record: Record) -> float:
    """The relative distance up to which two gradients of a run are equal."""
    kinds = {gradient.dtype for update in record.updates for gradient in update.unclipped.values()}
    return SAME_IN_HALF if kinds & {torch.bfloat16, torch.float16} else SAME


def norm_of(gradients: Gradients) -> float:
    """The norm of all gradients together."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def loss_place(record: Record) -> str:
    """Where the recipe calls the model in a training step."""
    return next((forward.where for forward in record.of_model("train") if forward.with_gradient and forward.where), "")


def names_of(names: Sequence[str]) -> str:
    """Of parameters the first two, and how many more there are."""
    short = [re.sub(r"^base_model\.model\.", "", name) for name in names[:2]]
    more = f" and {len(names) - 2} other parameters" if len(names) > 2 else ""
    return (", " if more else " and ").join(short) + more


def why_none(record: Record) -> str:
    """The error that a run ended with; empty where it had none."""
    return f"that run ended with {type(record.error).__name__}: {record.error}"[:200] if record.error is not None else ""
