"""Checks of gradients and updates: functions of what was recorded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import nn

from toolkit.config import Settings
from toolkit.config.conditions import couples_a_micro_batch
from toolkit.config.reading import values_of
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Gradients, Record, Update

SAME = 1e-3  # relative distance of two gradients that are to be equal; rounding in float32 is about 1e-6
SAME_IN_HALF = 0.05  # of bfloat16 weights
_NOT_FINITE = "a gradient was not finite"
_VECTOR = "norms, biases and other vectors"


def check_split(split: Record, whole: Record, config: Settings) -> Outcome:
    """The first gradient of eight micro-batches of one example is that of one micro-batch of eight."""
    if couples_a_micro_batch(config):
        return skipped("this loss compares the examples of a micro-batch with each other")
    if not split.updates or not whole.updates:
        return skipped(_why(split) or _why(whole) or "no update was seen")
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
    if error < same_enough(record):
        return found(note)
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


def check_rates(record: Record, config: Settings) -> Outcome:
    """At each update the groups have the rates that the schedule gives for the progress of the run."""
    if not record.updates or record.optimizer is None:
        return skipped("no update was seen")
    findings: list[Finding | None] = []
    often = max(record.updates, key=lambda update: update.scheduled)
    if often.scheduled > 1 and sum(update.scheduled > 1 for update in record.updates) > 1:
        what = (
            f"The scheduler is stepped {often.scheduled} times for one update of the optimizer ({often.micro_batches} "
            "micro-batches)."
        )
        change = "Step it once, after optimizer.step(): outside of the loop over micro-batches."
        findings.append(Finding("rates", what, change, often.schedule_where))
    is_constant = all(update.rates == record.updates[0].rates for update in record.updates)
    if record.optimizer is record.built and record.schedule is not None and (record.asks_schedule or is_constant):
        off = first_other_rate(record)
        if values_of(config).get("lr_scheduler_type", "") == "reduce_lr_on_plateau":
            return found("rates of reduce_lr_on_plateau depend on evaluations and are not compared", *findings)
        if off is not None:
            step, actual, wanted = off
            what = (
                f"At step {step} the learning rate is {actual:.3g}, and the schedule says {wanted:.3g} for the run's progress."
            )
            change = (
                "Set the rates of each step to schedule(run.progress): examples consumed over examples to consume, one "
                "value a step."
            )
            findings.append(Finding("rates", what, change, record.updates[step - 1].where))
    else:
        findings.append(_own_rate(record, config))
    peak = max(max(update.rates) for update in record.updates)
    groups = len(record.optimizer.param_groups)
    return found(f"{groups} groups, {len(record.updates)} updates, highest rate {peak:.3g}", *findings)


def first_other_rate(record: Record) -> tuple[int, float, float] | None:
    """The first update with a rate that is not the schedule's: its number, the rate, and what it should be."""
    assert record.schedule is not None
    scale = max(max(record.schedule(i / 20)) for i in range(21)) or 1.0
    for number, update in enumerate(record.updates, start=1):
        if update.progress is None:
            continue
        wanted = record.schedule(update.progress)
        for actual, rate in zip(update.rates, wanted, strict=False):
            if abs(actual - rate) > 1e-5 * scale:
                return number, actual, rate
    return None


def _own_rate(record: Record, config: Settings) -> Finding | None:
    """Of an optimizer that the recipe made itself: no group ever has the rate that was asked for, nor nearly."""
    rate = values_of(config).get("learning_rate")
    if not rate or record.optimizer is None:
        return None
    rates = {group.get("initial_lr", group["lr"]) for group in record.optimizer.param_groups}
    rates |= {each for update in record.updates for each in update.rates}
    if any(0.5 * rate <= each <= 1.001 * rate for each in rates):
        return None
    what = (
        f"--learning-rate is {rate:.3g}, and the optimizer's rates are "
        f"{', '.join(f'{each:.3g}' for each in sorted(rates)[-3:])}."
    )
    change = "Build the optimizer with lr=config.learning_rate, or with tk.build_optimizer(model, config, train.num_steps)."
    return Finding("rates", what, change, record.optimizer_where)


def check_trained(record: Record, after: Gradients) -> Outcome:
    """Every trainable parameter is in the optimizer and gets a gradient; frozen ones stay, and an adapter is not frozen."""
    model, optimizer = record.model, record.optimizer
    if model is None or optimizer is None or not record.updates:
        return skipped(_why(record) or "no model with an optimizer was seen")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    outside = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    silent = [
        name for name, p in named.items()
        if p.requires_grad and id(p) in held and "experts" not in name
        and not any(_is_reached(update.unclipped.get(name)) for update in record.updates)
    ]  # fmt: skip
    moved = [name for name, before in record.frozen_before.items() if not torch.equal(before, after[name])]
    frozen_adapter = [name for name, p in named.items() if "lora_" in name and not p.requires_grad]
    findings = [
        _about(outside, "are trainable and not in the optimizer",
               "Build the optimizer after the model is whole (head and adapter added), over all of its parameters.", record),
        _about(silent, "never get a gradient",
               "Look for a .detach(), a torch.no_grad() or a disabled adapter between them and the loss; what is not meant to "
               "be trained: requires_grad_(False).", record),
        _about(moved, "are frozen (requires_grad is False) and changed",
               "Leave them out of the optimizer, and write to no weight by hand.", record),
        _about(frozen_adapter, "are of an adapter and frozen",
               "Build the model with tk.add_adapter last, and call requires_grad_(False) on nothing of the adapter.", record),
    ]  # fmt: skip
    count = sum(p.numel() for p in named.values() if p.requires_grad)
    return found(f"{count:,} of {sum(p.numel() for p in named.values()):,} parameters are trained", *findings)


def _is_reached(gradient: torch.Tensor | None) -> bool:
    """A loss of differences of scores gives their bias, one number, a gradient of 0."""
    return gradient is not None and (gradient.numel() == 1 or bool((gradient != 0).any()))


def check_decay(record: Record, config: Settings) -> Outcome:
    """Matrices decay by what was asked for; norms, biases and other vectors do not."""
    model, optimizer = record.model, record.optimizer
    if model is None or optimizer is None:
        return skipped("no model with an optimizer was seen")
    asked = values_of(config).get("weight_decay", 0.0)
    rates = {id(p): group.get("weight_decay", 0.0) for group in optimizer.param_groups for p in group["params"]}
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    vectors = [n for n, p in model.named_parameters() if rates.get(id(p)) and is_vector(n, p, owners[id(p)])]
    matrices = [(n, p) for n, p in model.named_parameters() if not is_vector(n, p, owners[id(p)])]
    shrunk = {name: by for update in record.updates for name, by in update.shrunk.items()}  # by the recipe's own hand
    spared = [
        n for n, p in matrices
        if asked and rates.get(id(p)) == 0.0 and n not in shrunk and not isinstance(owners[id(p)], nn.Embedding)
    ]  # fmt: skip
    twice = [n for n, p in model.named_parameters() if n in shrunk and rates.get(id(p))]
    reached = [n for n, p in model.named_parameters() if n in shrunk and is_vector(n, p, owners[id(p)])]
    by_hand, line = f"by hand (times {next(iter(shrunk.values()), 1.0):.6g} a step)", record.written_at
    findings = [
        _about(reached, f"decay {by_hand}, and are {_VECTOR}",
               "Leave them out, or leave all decay to tk.build_optimizer (--weight-decay).", record, "decay", line),
        _about(twice, f"decay twice: {by_hand} and by the optimizer's weight_decay",
               "Remove this line, or give the optimizer weight_decay 0.", record, "decay", line),
        _about(vectors, f"decay, and are {_VECTOR}",
               "Give them a group with weight_decay 0, as tk.build_optimizer does.", record, "decay"),
        _about(spared, f"are matrices and do not decay (--weight-decay {asked:g})",
               "Give the groups of matrices weight_decay=config.weight_decay.", record, "decay"),
    ]  # fmt: skip
    return found(f"--weight-decay {asked:g}", *findings)


def is_vector(name: str, parameter: nn.Parameter, owner: nn.Module) -> bool:
    """Whether weight decay is not meant for a parameter."""
    return parameter.dim() < 2 or name.endswith("bias") or "norm" in type(owner).__name__.lower()


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
    what = f"A step begins with the gradient of the one before: {_names(late.left_over)}."
    return found("", Finding("cleared", what, "Call optimizer.zero_grad() after each optimizer.step().", late.where))


def check_modes(record: Record) -> Outcome:
    """Evaluation is in evaluation mode, as models are that aren't trained; training in training mode."""
    trained = [forward for forward in record.of_model("train") if forward.with_gradient]
    evaluated = record.of_model("eval")
    if not trained:
        return skipped("no forward pass of a training step was seen")
    wrong_eval = next((forward for forward in evaluated if forward.training), None)
    wrong_train = next((forward for forward in trained if not forward.training), None)
    with_graph = next((forward for forward in evaluated if forward.with_gradient), None)
    own = {id(forward.owner) for forward in trained}
    others = (forward for forward in record.forwards if forward.kind == "train" and id(forward.owner) not in own)
    of_others = next((forward for forward in others if forward.training and not forward.with_gradient), None)
    findings = [
        None if wrong_eval is None else Finding(
            "modes", "The model is evaluated in training mode: dropout stays on, and metrics are of a weakened model.",
            "Call model.eval() before the evaluation and model.train() after it, or use tk.eval_with_gather.", wrong_eval.where,
        ),
        None if wrong_train is None else Finding(
            "modes", "The model is trained in evaluation mode: dropout is off"
            f"{' from the first step on' if wrong_train is trained[0] else ' after an evaluation'}.",
            f"Call model.train() {'before the loop' if wrong_train is trained[0] else 'after each evaluation'}.",
            wrong_train.where,
        ),
        None if with_graph is None else Finding(
            "modes", "The evaluation builds graphs for gradients, which takes memory and time.",
            "Put it under torch.no_grad().", with_graph.where,
        ),
        None if of_others is None else Finding(
            "modes", "A model that is not trained, such as a teacher or a reference, is in training mode: its dropout is on.",
            "Call its eval() before the loop.", of_others.where,
        ),
    ]  # fmt: skip
    return found(f"{len(trained)} forward passes in training, {len(evaluated)} in evaluations", *findings)


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


def _about(
    names: Sequence[str], what: str, change: str, record: Record, check: str = "trained", where: str = ""
) -> Finding | None:
    return Finding(check, f"{_names(names)} {what}.", change, where or record.optimizer_where) if names else None


def _names(names: Sequence[str]) -> str:
    short = [re.sub(r"^base_model\.model\.", "", name) for name in names[:2]]
    more = f" and {len(names) - 2} other parameters" if len(names) > 2 else ""
    return (", " if more else " and ").join(short) + more


def _why(record: Record) -> str:
    return f"that run ended with {type(record.error).__name__}: {record.error}"[:200] if record.error is not None else ""
