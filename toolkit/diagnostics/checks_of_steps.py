"""Checks of updates, and of the modes they are made in: functions of what was recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.checks_of_gradients import names_of, why_none
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Gradients, Record
from toolkit.models.added_heads import VALUE_HEAD
from toolkit.models.loaded import loaded

_HEADS = ("classifier", "score", "qa_outputs", "classification_head")
_VECTOR = "norms, biases and other vectors"


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
    """Every trainable parameter is in the optimizer and gets a gradient; frozen ones stay, no adapter or new head is."""
    model, optimizer = record.model, record.optimizer
    if model is None or optimizer is None or not record.updates:
        return skipped(why_none(record) or "no model with an optimizer was seen")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    outside = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    silent = [
        name for name, p in named.items()
        if p.requires_grad and id(p) in held and "experts" not in name
        and not any(_is_reached(update.unclipped.get(name)) for update in record.updates)
    ]  # fmt: skip
    moved = [name for name, before in record.frozen_before.items() if not torch.equal(before, after[name])]
    new_heads = {part for name in loaded(model).new_modules for part in name.split(".") if part in _HEADS} | {VALUE_HEAD}
    frozen_heads = [
        name for head in sorted(new_heads)
        if (own := [n for n in named if head in n.split(".")]) and not any(named[n].requires_grad for n in own) for name in own
    ]  # fmt: skip
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
        _about(frozen_heads, "are of a new head, whose weights are random, and frozen",
               "Train it whole, as tk.add_adapter does; of peft itself: LoraConfig(modules_to_save=[its name]).", record),
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


def _about(
    names: Sequence[str], what: str, change: str, record: Record, check: str = "trained", where: str = ""
) -> Finding | None:
    return Finding(check, f"{names_of(names)} {what}.", change, where or record.optimizer_where) if names else None
