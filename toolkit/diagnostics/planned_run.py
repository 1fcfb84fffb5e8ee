"""The run that a plan follows: what makes its models, batches and steps is replaced by what makes them of fake tensors.

Its batches are of the longest micro-batch of the data, and what is computed with them is watched by the plan's ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from toolkit.data.loading.batch import Batch, MicroBatch
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.diagnostics.compat import FakeTensor, products_of_experts, shapes_of_whole_tensors
from toolkit.diagnostics.devices import resident
from toolkit.diagnostics.documents import Kept, first_and_last
from toolkit.diagnostics.ledger import ENGINE, Ledger, as_fake, mark_phases
from toolkit.diagnostics.one_rank import exchanged
from toolkit.diagnostics.planned_layers import PlannedLayers
from toolkit.diagnostics.planned_rollouts import PlannedRollouts
from toolkit.diagnostics.planned_teachers import replace_teachers
from toolkit.diagnostics.planned_weights import product
from toolkit.diagnostics.replacements import Replacements
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.models import load
from toolkit.models.attention import kernels
from toolkit.preference import reference
from toolkit.training import accelerator, run
from toolkit.training.memory import most_needed

STEPS = 2
EVALUATED = 3  # batches of an evaluation before the first step

_KEPT: Kept = {}  # what attention of a document keeps, of all plans of this process: those of a search are much alike


class Planned(BaseException):
    """All that is planned was done. It is no Exception: a recipe that catches those must not go on."""


class Seen:
    """What a plan sees of the run."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.models, self.batches, self.process, self.before = ledger, list[nn.Module](), 0, 0, 0
        self.removed: list[Callable[[], None]] = []
        self.is_before_steps = self.is_sparing = self.may_spare = False
        self.layers = PlannedLayers(ledger)
        self.train: Any = None
        self.longest: Batch | None = None
        self.accumulated = 1
        self.engine, self.precision = "", "no"
        self.peak_of_steps: int | None = None  # once the evaluation begins
        self.notes: list[str] = []
        self.micro_batch_size, self.update_size = 0, 0  # examples in one, and in all of an update
        self.examples = 0

    def start(self) -> None:
        """Begin to follow the heap: the first batch is about to be computed."""
        if not self.process:
            if self.ledger.heap:
                with self.ledger.pausing():
                    self.ledger.heap.restart(has_multiplied=self.precision == "bf16")
            self.process, self.before = resident(), self.ledger.total

    def forget_models(self) -> None:
        """Those of the run before, which was followed up to its first step."""
        self.models.clear()
        self.removed.clear()
        self.layers = PlannedLayers(self.ledger)
        gc.collect()
        self.ledger.forget()
        self.ledger.phase = "other"

    def updating(self, batch: Batch, micro_batch_size: int, update_size: int) -> None:
        """A micro-batch of completions, where the loader's are of prompts."""
        self.longest, self.micro_batch_size, self.update_size, self.examples = batch, micro_batch_size, update_size, 0

@contextlib.contextmanager
def followed(seen: Seen, values: Mapping[str, Any]) -> Iterator[None]:
    """What makes models, batches and steps, replaced by what makes them of fake tensors and follows them."""
    with Replacements() as replace:
        for name in ("load_model", "load_encoder"):
            replace.public(name, functools.partial(_made, seen))
        for name in ("add_adapter", "add_value_head"):
            replace.public(name, functools.partial(_made, seen))
        replace.public("build_optimizer", functools.partial(_optimizer, seen))
        replace.public("fit_micro_batch", functools.partial(_fitted, seen))
        replace.attribute(TrainLoader, "batches", functools.partial(longest_batches, seen))
        replace.attribute(EvalLoader, "__iter__", functools.partial(longest_evaluation, seen))
        if "num_generations" not in values:  # an evaluation there is sampling
            replace.attribute(run.Run, "due", functools.partial(evaluates, seen))
        replace.public("cache_gradients", functools.partial(cached, seen))
        replace.attribute(torch.Tensor, "backward", functools.partial(_backward, seen))
        replace.attribute(kernels, "one_by_one", functools.partial(first_and_last, seen.ledger, _KEPT))
        replace.attribute(nn.Module, "to", _stay)
        replace.attribute(reference, "reference_table", lambda *_, **__: AnyRow())
        replace.attribute(reference, "place_frozen", functools.partial(_frozen, seen))
        replace.attribute(load, "check_compiler", lambda *_: None)
        if seen.is_sparing:
            replace.attribute(accelerator, "keep_freed_memory", lambda keep, **_: keep(sparing=True))
        replace.attribute(run, "report_incident", lambda *_: None)  # of losses without a value, with all rows of a step
        replace.attribute(products_of_experts(), "_can_use_grouped_mm", _has_fake_kernel)
        replace.attribute(*shapes_of_whole_tensors(), functools.partial(_uncounted, seen))
        if values.get("load_in_4bit"):
            bitsandbytes = importlib.import_module("bitsandbytes")
            replace.attribute(bitsandbytes, "matmul_4bit", lambda _, *given, **named: product(*given, **named))
        seen.layers.replace(replace)
        replace.attribute(Accelerator, "prepare", functools.partial(_prepared, seen))
        if "teacher" in values:
            replace_teachers(replace, seen.ledger)
        if "num_generations" in values:
            size, updates = values["per_device_train_batch_size"], values["steps_per_generation"]
            PlannedRollouts(seen.ledger, size, updates, seen.updating).replace(replace)
        yield


def _uncounted(seen: Seen, original: Callable[..., Any], *values: Any) -> Any:
    """What no run holds: it has fake tensors there too."""
    with seen.ledger.pausing():
        return original(*values)


def _has_fake_kernel(original: Callable[..., bool], inputs: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    """Of torch's (2.13) grouped product the fake kernel takes bfloat16 alone, the real ones the other types too."""
    return weight.dtype == torch.bfloat16 and original(inputs, weight, offs)


def _made(seen: Seen, original: Callable[..., Any], *values: object, **named: object) -> Any:
    model = as_fake(original(*values, **named))
    if not any(each is model for each in seen.models):
        seen.models.append(model)
    return model


def _frozen(seen: Seen, original: Callable[..., Any], *values: object, **named: object) -> Any:
    frozen = original(*values, **named)
    for tensor in (*frozen.parameters(), *frozen.buffers()):
        seen.ledger.see(tensor, "reference")
    return frozen


def _optimizer(seen: Seen, original: Callable[..., Any], model: nn.Module, *values: object, **named: object) -> Any:
    optimizer, schedule = original(model, *values, **named)
    for buffer in model.buffers():
        seen.ledger.see(buffer, "weights")
    seen.removed += mark_phases(seen.ledger, model, optimizer)
    return optimizer, schedule


def _fitted(seen: Seen, original: Callable[..., Any], accelerator: Any, model: nn.Module, *values: Any) -> Any:
    _, train, *_ = values
    longest, spares = train.longest_micro_batch(), engine_of(accelerator).shards_weights(accelerator)
    seen.may_spare = not spares and longest is not None and most_needed(unwrapped(model), longest) is not None
    return original(accelerator, model, *values)


def _prepared(seen: Seen, original: Callable[..., Any], accelerator: Any, *values: object, **named: object) -> Any:
    """Without moving what has no values; the model's forward is wrapped in autocast as always."""
    engine = engine_of(accelerator)
    seen.precision = accelerator.mixed_precision
    seen.engine = engine.label(accelerator) if engine.shards else "DDP" if accelerator.num_processes > 1 else ""
    seen.layers.has_whole_weights = not engine.shards_weights(accelerator)
    if not engine.shards:
        named["device_placement"] = [False] * len(values)
    with seen.ledger.during(ENGINE):
        prepared = original(accelerator, *values, **named)
    for model in prepared if isinstance(prepared, tuple | list) else [prepared]:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.register_comm_hook(None, exchanged)
        if isinstance(model, nn.Module):
            for piece in engine.pieces(accelerator, unwrapped(model), None) if engine.pieces else []:
                seen.ledger.see(piece.owner, "master weights")
            for parameter in model.parameters():
                seen.ledger.see(parameter, "weights")
                if hasattr(parameter, "ds_tensor"):
                    seen.ledger.see(parameter.ds_tensor, "weights")
    return prepared


def _stay(original: Callable[..., Any], model: nn.Module, *values: object, **named: object) -> nn.Module:
    """A model that is fake is where it will be computed already: `Module.to` would swap its parameters for others."""
    fake = any(isinstance(p, FakeTensor) for p in model.parameters())
    types = [v for v in (*values, *named.values()) if isinstance(v, torch.dtype)]
    return model if fake and not types else original(model, *values, **named)


def _backward(seen: Seen, original: Callable[..., Any], *values: object, **named: object) -> Any:
    with seen.ledger.during("activations"):
        return original(*values, **named)


def longest_batches(seen: Seen, original: Callable[..., Iterator[Batch]], loader: Any, *values: Any) -> Iterator[Batch]:
    """Two batches, of the longest micro-batch each, which is accumulated where the run accumulates."""
    if seen.is_before_steps:
        raise Planned
    seen.train, seen.micro_batch_size, seen.update_size = loader, loader.micro_batch_size, loader.global_batch_size
    longest, seen.examples = loader.longest_micro_batch(), len(loader.rows.lengths)
    for number, batch in enumerate(original(loader, *values)):
        if number == STEPS:
            break
        seen.accumulated = len(batch.micro_batches)
        seen.longest = _repeated(batch, longest, min(seen.accumulated, 2), loader.longest_examples())
        seen.batches += 1
        seen.start()
        seen.ledger.restart()
        seen.ledger.phase = "activations"
        yield seen.longest
    raise Planned


def _repeated(batch: Batch, micro_batch: MicroBatch, count: int, examples: list[int]) -> Batch:
    return dataclasses.replace(
        batch, micro_batches=[micro_batch] * count, real=[True] * count, seeds=[batch.seeds[0]] * count,
        indices=[examples] * count, epochs=[batch.epochs[0]] * count,
    )  # fmt: skip


def cached(
    seen: Seen, original: Callable[..., Batch], accelerator: Any, model: nn.Module, batch: Batch, *values: Any
) -> Batch:  # fmt: skip
    """The first pass of a contrastive loss is over the whole global batch; the second is accumulated like other steps."""
    micro_batch, count = batch.micro_batches[0], seen.accumulated
    anchors = int((micro_batch["role"] == 0).sum()) * count * accelerator.num_processes
    whole = _repeated(batch, micro_batch, count, batch.indices[0])
    whole = dataclasses.replace(whole, totals={**batch.totals, "examples": float(anchors)})
    done = original(accelerator, model, whole, *values)
    return dataclasses.replace(batch, micro_batches=done.micro_batches[: len(batch.micro_batches)])


def evaluates(seen: Seen, original: Callable[..., bool], opened: run.Run, what: str) -> bool:
    if what == "eval_on_start":
        return seen.is_before_steps
    after_steps = what == "eval" and seen.batches == min(STEPS, opened.num_steps) and opened.config.eval_strategy != "no"
    return after_steps or original(opened, what)


def longest_evaluation(seen: Seen, original: Callable[..., Iterator[Batch]], loader: Any) -> Iterator[Batch]:
    """The first batch of an evaluation after the steps, which is the longest. A loop of the recipe's own may evaluate after its
    first step, if that is its last one."""
    if seen.is_before_steps:
        seen.start()
        seen.ledger.phase = "evaluation"
        yield from itertools.islice(original(loader), EVALUATED)
        raise Planned
    if not seen.batches:
        yield from original(loader)
        return
    seen.peak_of_steps, seen.ledger.phase = seen.ledger.peak, "evaluation"
    yield next(original(loader))
    raise Planned


class AnyRow:
    """A table of stored log-probabilities, of which any row is zero."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, columns = (key[0], ()) if isinstance(key, tuple) else (key, (2,))
        return torch.zeros(len(rows), *columns)
