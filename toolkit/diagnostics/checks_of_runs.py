"""Checks that compare runs: evaluations, the loss at the start and at the end, what is saved, what is resumed, types."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.checks_of_gradients import distance, loss_place, norm_of
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Gradients, Record
from toolkit.diagnostics.short_runs import EVAL_BATCH, LEAST_STEPS, losses_of
from toolkit.system.console import first_line
from toolkit.system.evaluation_mode import evaluation_mode

SAME = 2e-4  # relative difference of metrics of the same weights
AMPLIFIED = 300.0  # times by which metrics may differ more than weights do, which rounding and two updates have moved apart
_OF_LOGPS = 2.5e-4  # of log-probabilities of answers: a reward, which is their difference, is as exact as one of this size
# of the first loss. The least of a loss is not known: that of listnet, or of smoothed labels, is up to 12% below the first.
_LEARNED = 0.02
_CONSTANT = 1e-6  # likewise: the rounding of a loss that never changes
_NO_METRIC = ("second", "time", "memory", "examples")
_OF_CLASSES = ("classification", "token_classification")
# The short runs next to the first one, as what they are for a recipe.
OF_RUNS = {"split": "1 example a micro-batch", "whole": "8 examples a micro-batch", "overfit": "8 examples, again and again"}


def check_finite(records: Mapping[str, Record]) -> Outcome:
    """No run skipped a step because its loss or its gradient was not finite."""
    steps, findings = 0, list[Finding | None]()
    for name, record in records.items():
        trained = [event for event in record.events if "learning_rate" in event]
        skips = sum(int(event.get("nonfinite_steps") or 0) for event in trained)
        steps += len(trained)
        if skips:
            how = f" with {OF_RUNS[name]}" if name in OF_RUNS else ""
            what = f"In {skips} of {len(trained)} steps{how} the loss or the gradient was not finite; they changed nothing."
            change = (
                "Look for a division by a count that can be 0, a logarithm or root of 0, an exponential without bound: add up "
                "sums and divide by batch.totals, clamp what goes into them."
            )
            findings.append(Finding("finite", what, change, loss_place(record)))
    return found(f"{steps} steps", *findings[:1]) if steps else skipped("no metrics of a step were logged")


def check_evaluation(split: Record, whole: Record, weights: dict[str, Gradients]) -> Outcome:
    """Metrics with a batch of 1 are those with large ones, of the same weights.

    The last evaluation is compared, if the runs have the same weights then. Before the first update, two answers, say,
    may be equally likely, and rounding decides.
    """
    away = distance(weights.get("split", {}), weights.get("whole", {}))[0]
    same_weights = away < 1e-4
    pick = -1 if same_weights else 0
    one, other = evaluation_of(split, pick), evaluation_of(whole, pick)
    if not same_weights and one.get("step") != 0:
        return skipped("the two runs have other weights, and no evaluation was before the first update")
    shared = [name for name in one if name in other]
    if len(shared) < 2:
        return skipped("no evaluation was logged")
    shared.remove("step")
    least = max(2.5e-3, *(_OF_LOGPS * abs(other[n]) for n in shared if "logps" in n), 0.0)
    error, name = max((abs(one[n] - other[n]) / max(abs(other[n]), least), n) for n in shared)
    note = f"{len(shared)} metrics, largest relative difference {error:.1e}"
    if error < SAME + AMPLIFIED * (away if same_weights else 0.0):
        return found(note)
    what = (
        f"{name} is {one[name]:.5g} with --per-device-eval-batch-size 1 and {other[name]:.5g} with {EVAL_BATCH}, of the "
        "same weights and rows."
    )
    change = (
        "Add up sums and counts over the batches and divide once at the end; means of batches count short ones too much. "
        "tk.eval_with_gather does."
    )
    where = next((forward.where for forward in whole.of_model("eval") if forward.where), "")
    return found(note, Finding("evaluation", what, change, where))


def evaluation_of(record: Record, which: int) -> dict[str, float]:
    """The step and the finite metrics of an evaluation that was logged: the first (0) or the last (-1).

    Empty where none was.
    """
    found = []
    for event in record.events:
        metrics = {
            name: float(value) for name, value in event.items()
            if name.startswith("eval_") and isinstance(value, int | float) and not any(word in name for word in _NO_METRIC)
        }  # fmt: skip
        if metrics:
            found.append({"step": float(event["step"]), **{n: value for n, value in metrics.items() if math.isfinite(value)}})
    return found[which] if found else {}


def check_start(record: Record, config: Settings) -> Outcome:
    """The loss is of logits; a random model's first one is that of an even guess, where it is known what that is."""
    if record.of_probabilities:
        what = "The cross-entropy is given probabilities, and takes their softmax: it is never near 0."
        return found("", Finding("start", what, "Pass it the model's logits, without a softmax.", record.of_probabilities))
    losses, guess = losses_of(record.events), guessing(record, config)
    if not losses:
        return skipped("no loss was logged")
    if guess is None:
        return found(f"{losses[0]:.4g}; what guessing costs is not known for this loss")
    value, name = guess
    note = f"{losses[0]:.4g}, guessing: {value:.4g} = {name}"
    if 0.75 * value <= losses[0] <= 1.35 * value:
        return found(note)
    what = f"The first loss of a random model is {losses[0]:.4g}, and guessing costs {value:.4g} = {name}."
    change = (
        "Take the mean over the supervised tokens (or examples) of the global batch: a sum divided by batch.totals once. A "
        "loss far below that of guessing says that the model sees what it is to predict. One that is meant to be another loss, "
        "such as a focal loss or a sum of two, begins elsewhere by right."
    )
    return found(note, Finding("start", what, change, loss_place(record)))


def guessing(record: Record, config: Settings) -> tuple[float, str] | None:
    """The loss of an even guess, in nats, and its name; None where it is not known."""
    model: Any = record.model
    settings = values_of(config)
    if model is None or "teacher" in settings:
        return None
    if record.task in ("sft", "lm", "masked_lm", "diffusion", "seq2seq"):
        size = model.config.get_text_config().vocab_size
        return math.log(size), f"ln {size} tokens"
    if record.task in _OF_CLASSES and settings.get("problem_type", "single_label") == "single_label":
        classes = model.config.num_labels
        return (math.log(classes), f"ln {classes} classes") if classes > 1 else None
    if record.task == "preference" and record.has_known_loss and settings.get("loss_type", ["sigmoid"]) == ["sigmoid"]:
        is_plain = not settings.get("center_rewards_coefficient")
        return (math.log(2), "ln 2 answers") if is_plain else None
    return None


def check_overfit(record: Record) -> Outcome:
    """At most sixty steps on the same eight examples bring the loss down."""
    losses = losses_of(record.events)
    rate = max((max(update.rates) for update in record.updates), default=0.0)
    if record.error is not None or len(losses) < LEAST_STEPS:
        return skipped(f"that run ended early: {record.error}"[:200] if record.error else "too few losses were logged")
    first, last = losses[0], sum(losses[-5:]) / 5
    note = f"loss {first:.4g}, after {len(losses)} steps {last:.4g}"
    if rate < 1e-3:
        return skipped(f"{note}; the recipe's own rate of {rate:.1e} is too low to tell")
    of_sigmoids = next((place for place, within in record.within_0_and_1.items() if within), None)
    if of_sigmoids is not None:
        what = "binary_cross_entropy_with_logits is given probabilities, and takes their sigmoid: it is never near 0."
        return found(note, Finding("overfit", what, "Pass it the model's logits, without a sigmoid.", of_sigmoids))
    if first - last > _LEARNED * abs(first):
        return found(note)
    what = (
        f"After {len(losses)} steps on the same 8 examples the loss is {last:.4g} of {first:.4g}: too little is learned."
    )
    update = record.updates[-1]
    if max(losses) - min(losses) <= _CONSTANT * abs(first) and norm_of(update.gradients) and update.unchanged < 0.5:
        change = (
            "The weights change, and it does not: a reference that is the model itself, as it is now, makes a loss constant. "
            "Take the reference of tk.build_reference, or a copy that nothing trains; of an adapter the model with it off."
        )
        return found(note, Finding("overfit", what, change, loss_place(record)))
    change = (
        "Look at the findings above. Else: the sign of the loss, labels that belong to other rows, numbers to predict that are "
        f"far larger than 1, updates that are not applied, or a rate (here at most {rate:.1e}) that is too low for so few "
        "steps with this optimizer."
    )
    return found(note, Finding("overfit", what, change, loss_place(record)))


def check_saved(record: Record, after: Gradients, directory: Path) -> Outcome:
    """The model directory, read again, gives the logits of the model in memory."""
    model: Any = record.model
    if model is None:
        return skipped("no model was seen")
    if not (directory / "config.json").exists() and not (directory / "adapter_config.json").exists():
        return skipped("no model directory was written")
    try:
        loaded = _load(model, directory)
    except Exception as error:  # whatever transformers says of a directory that it can't read
        what = f"The saved model can't be read again: {type(error).__name__}: {first_line(error)}"
        return found("", Finding("saved", what, "Write it with tk.save_model."))
    ours, theirs = logits_of(model), logits_of(loaded)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return skipped("its outputs can't be compared")
    away = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30))
    note, pooling = f"largest relative difference {away:.1e}", [each for each in record.noted if each.check == "saved"]
    if away < (1e-4 if model.dtype == torch.float32 else 2e-2):
        return found(note, *pooling)
    what = f"The saved model gives other logits than the one in memory: up to {away:.0%} of the largest."
    change = "Save after the last update, the trained model itself: tk.save_model(accelerator, model, ...)."
    return found(note, Finding("saved", what, change), *pooling)


def _load(model: Any, directory: Path) -> nn.Module:
    if not (directory / "adapter_config.json").exists():
        return type(_plain(model)).from_pretrained(directory)
    from peft import PeftModel

    inside = directory / "base"  # of a model that was made by the recipe
    base = inside if inside.is_dir() else model.peft_config["default"].base_model_name_or_path
    plain = _plain(model)
    settings = copy.deepcopy(plain.config)  # of the task: a base may have other classes, fewer tokens, another attention
    settings.get_text_config().vocab_size = type(settings).from_pretrained(base).get_text_config().vocab_size
    whole = type(plain).from_pretrained(base, config=settings)
    rows = plain.get_input_embeddings().weight.shape[0]
    if rows != whole.get_input_embeddings().weight.shape[0]:
        whole.resize_token_embeddings(rows, mean_resizing=False)
    return PeftModel.from_pretrained(whole, directory)


def _plain(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def logits_of(model: Any) -> torch.Tensor | None:
    """What a model returns first for sixteen made-up tokens, in evaluation mode."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(16)[None] * 37 + 11) % vocabulary
    if "MultipleChoice" in type(_plain(model)).__name__:
        ids = ids.reshape(1, 2, 8)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :8]
    with evaluation_mode(model):
        output = model(**inputs)
    values = output.values() if isinstance(output, dict) else [output]
    return next((v.float() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 0), None)


def check_resume(weights: dict[str, Gradients], resumed: Record | None) -> Outcome:
    """A run that is resumed from a checkpoint in the middle ends with the weights of the one that wrote it."""
    if resumed is None:
        return skipped("the recipe leaves no checkpoint to resume from")
    if resumed.error is not None:
        what = f"A resumed run ends with {type(resumed.error).__name__}: {resumed.error}"[:300]
        return found("", Finding("resume", what, "Try it: toolkit verify-resume RECIPE", resumed.error_where))
    whole, again = weights["as_is"], weights["resumed"]
    other = next((name for name, tensor in whole.items() if not torch.equal(tensor, again.get(name, tensor[:0]))), None)
    if other is None:
        return found(f"{len(whole)} tensors, bit for bit")
    what = f"A run that is resumed in the middle ends with other weights; the first tensor that differs is {other}."
    change = (
        "What a variable alone holds is lost by a resume: put it into run.memory or run.keep(...). Draw random numbers "
        "from the batch's seeds."
    )
    return found("", Finding("resume", what, change))


def check_types(record: Record, config: Settings) -> Outcome:
    """Weights have the type of --dtype, the loss is float32, and updates are not lost in the rounding of the weights."""
    model = record.model
    if model is None or not record.updates:
        return skipped("no model with an optimizer was seen")
    findings: list[Finding | None] = []
    asked = values_of(config).get("dtype", "auto")
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if asked != "auto" and kinds - {asked, "float32"}:
        what = f"Trained weights are {', '.join(sorted(kinds))}, and --dtype is {asked}."
        change = "Leave the type to tk.load_model; half precision in computing alone is --bf16."
        findings.append(Finding("types", what, change, record.optimizer_where))
    lost = record.updates[-2].unchanged if len(record.updates) > 1 and max(record.updates[-2].rates) > 0 else 0.0
    if kinds & {"bfloat16", "float16"} and lost > 0.5 and not values_of(config).get("stochastic_rounding"):
        what = (
            f"{lost:.0%} of the weights with a gradient were left as they were by an update: it is smaller than their rounding."
        )
        change = "Train float32 weights with --bf16 in place of --dtype bfloat16, or bfloat16 ones with --stochastic-rounding."
        findings.append(Finding("types", what, change, record.optimizer_where))
    low = {str(kind).removeprefix("torch.") for kind in record.loss_types if kind in (torch.bfloat16, torch.float16)}
    if low:
        change = "Raise logits to float32 before the softmax: logits.float()."
        findings.append(Finding("types", f"The loss is computed in {', '.join(low)}.", change, loss_place(record)))
    return found(f"weights {', '.join(sorted(kinds))}", *findings)
