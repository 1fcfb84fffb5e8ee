"""The memory that a recipe needs, found by running it on tensors without contents.

The recipe's own `main` takes two steps, each on the longest micro-batch of its data, and evaluates on the longest one there:
data, collate function, loss, optimizer, clipping and metrics are the real ones, on shapes alone. Two steps, as the first has no
optimizer state in its forward pass. For a CPU the run is followed twice, first through the evaluation before its first
step: what that leaves in the heap is in the way of the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from toolkit.config import Refusal, Settings
from toolkit.config.reading import values_of
from toolkit.data.loading.batch import Batch, MicroBatch
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.diagnostics.compat import FakeTensor, resized_storages
from toolkit.diagnostics.devices import resident
from toolkit.diagnostics.documents import Kept, first_and_last
from toolkit.diagnostics.heap import find_heap
from toolkit.diagnostics.ledger import ENGINE, Ledger, as_fake, mark_phases
from toolkit.diagnostics.one_rank import as_first_rank, exchanged
from toolkit.diagnostics.planned_layers import PlannedLayers
from toolkit.diagnostics.planned_rollouts import SAMPLING, PlannedRollouts
from toolkit.diagnostics.planned_teachers import TEACHER, replace_teachers
from toolkit.diagnostics.replacements import Replacements
from toolkit.diagnostics.short_runs import ended_by_signals, forget_accelerator, never_evaluated
from toolkit.distributed.engines import element_count, engine_of, unwrapped
from toolkit.distributed.launch import NOTHING_MORE
from toolkit.models import load
from toolkit.models.attention import kernels
from toolkit.models.without_weights import without_weights
from toolkit.preference import reference
from toolkit.system.console import first_line
from toolkit.system.devices import planned_for
from toolkit.training import run

AnyConfig = TypeVar("AnyConfig", bound=Settings)
STEPS = 2
EVALUATED = 3  # batches of an evaluation before the first step
PARTS = (
    "weights", "master weights", "gradients", "optimizer state", "reference", TEACHER, "reward model", "activations", "logits",
    SAMPLING, "update", ENGINE, "other",
)  # fmt: skip
# Where the run goes, what it is compared with, what it does now and then: not what a step needs.
_ALONE: dict[str, Any] = {
    "overwrite_output_dir": True, "resume": False, "resume_from": None, "report_to": ["none"], "push_to_hub": False,
    "use_cpu": True, "dataloader_num_workers": 0, "auto_find_batch_size": False, "stop_at_step": None,
    "stop_deadline": None, "early_stopping_patience": None, "load_best_model_at_end": False, "logging_strategy": "no",
    "save_strategy": "no", "divergence": "warn", "loss_spike": "warn", "nonfinite": "skip", "async_save": False,
    "eval_steps": 10**6, "save_steps": 10**6,  # of basic.py, whose loop is its own
    "rollouts_from": None, "dynamic_sampling": 1, "max_nonfinite_steps": 10**9,
}  # fmt: skip

_KEPT: Kept = {}  # what attention of a document keeps, of all plans of this process: those of a search are much alike


class _Planned(BaseException):
    """All that is planned was done. It is no Exception: a recipe that catches those must not go on."""


@dataclass
class Plan:
    """Bytes of tensors at the highest moment of a step or an evaluation, by part; and what the run is.

    `phase`: when that is; `in_evaluation`: whether it is after the steps. `process`: resident bytes of this process before the
    first step, the data read. `heap`: bytes that glibc holds for the tensors on a CPU, at its own highest moment; None where it
    is not known.
    Of several `ranks` it is the first one's, and `engine` says what they share ("" where there is one device).
    `micro_batch`: examples in one, `tokens` in the longest one (padding among them). `examples`: that there are, 0 where they
    are completions. `steps`: of the whole run. `precision`: "no", "bf16" or "fp16", in which it computes.
    """

    parts: dict[str, int]
    phase: str
    process: int = 0
    heap: int | None = None
    model: str = ""
    parameters: int = 0
    trained: int = 0
    in_evaluation: bool = False
    micro_batch: int = 0
    accumulation: int = 1
    tokens: int = 0
    examples: int = 0
    steps: int = 0
    ranks: int = 1
    engine: str = ""
    precision: str = "no"
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def plan(
    main: Callable[[Any], Any], config: Settings, kind: str = "cpu", ranks: int = 1,
    environment: Mapping[str, str] = NOTHING_MORE, *, ampere: bool = True,
) -> Plan:  # fmt: skip
    """Plan a recipe's `main` on one device of a kind, "cpu" or "cuda" (`ampere`: or later); nothing is computed, no weight is
    read or made.

    Of several `ranks` this process is the first, in a group that exchanges nothing. `environment`: what an Accelerate config
    file gives each of them.

    Raises:
        Refusal: the recipe refuses its settings or data; or it computes with values, of which no plan is made.
    """
    check_plannable(config)
    seen = _Seen(Ledger(find_heap() if kind == "cpu" else None))
    follow = functools.partial(_follow, main, config, seen, kind, ampere, ranks, environment)
    try:
        if seen.ledger.heap and _evaluates_first(config):
            follow(before_steps=True)
        follow(before_steps=False)
    finally:
        if seen.ledger.heap:
            seen.ledger.heap.clear()
    if not seen.batches:
        raise Refusal("no plan of this run: it took no step with batches of tk.build_dataloaders.")
    return seen.plan()


def _follow(
    main: Callable[[Any], Any], config: Settings, seen: _Seen, kind: str, ampere: bool, ranks: int,
    environment: Mapping[str, str], *, before_steps: bool,
) -> None:  # fmt: skip
    """The run up to where all was seen, or with `before_steps` up to its first one: what its evaluation leaves in the heap."""
    printed, seen.is_before_steps = io.StringIO(), before_steps
    forget_accelerator()
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="plan-") as folder, contextlib.ExitStack() as stack:
        for each in (never_evaluated(), _replaced(seen, values_of(config)), planned_for(kind, ampere), without_weights(),
                     as_first_rank(ranks, environment), resized_storages(seen.ledger.resized)):  # fmt: skip
            stack.enter_context(each)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), seen.ledger:
                main(_alone(config, folder))
        except _Planned:
            pass
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if seen.ledger.phase == "other" and not seen.models:
                raise
            if seen.peak_of_steps is None and not before_steps:
                raise Refusal(f"no plan of this run: it needs the values of its tensors ({first_line(error)})") from error
            if not before_steps:
                seen.notes.append(f"The evaluation was planned as far as it needs no values ({first_line(error)}).")
        finally:
            for remove in seen.removed:
                remove()
            forget_accelerator()
    if before_steps:
        seen.forget_models()


def check_plannable(config: Settings) -> None:
    """Refuse what no plan is made of."""
    values = values_of(config)
    if "teacher" in values and not values["teacher"] and not values.get("self_distillation"):
        raise Refusal("--teacher: no plan of one that is trained first, where none is named. Give the directory of a model.")
    if values.get("load_in_4bit"):
        raise Refusal("--load-in-4bit: no plan of weights in 4 bits. Plan it with --dtype bfloat16: it needs less than that.")
    if values.get("streaming"):
        raise Refusal("--streaming: no plan of a stream, whose longest example nobody knows. Plan it with a part of its data.")


class _Seen:
    """What a plan sees of the run."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.models, self.batches, self.process, self.before = ledger, list[nn.Module](), 0, 0, 0
        self.removed: list[Callable[[], None]] = []
        self.is_before_steps = False
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

    def plan(self) -> Plan:
        model = self.trained_model
        parts = {part: self.ledger.at_peak.get(part, 0) for part in PARTS}
        parts["activations"] += sum(size for part, size in self.ledger.at_peak.items() if part not in PARTS)
        notes = list(self.notes)
        if self.layers.given_up:
            notes.append("Compiled layers keep less than planned: these can't be traced.")
        if "on the CPU" in self.engine:
            notes.append("What waits on the CPU between the steps is counted here as if it were on the device.")
        trained, frozen = (
            sum(element_count(p) for p in model.parameters() if p.requires_grad == wanted) for wanted in (True, False)
        )
        in_evaluation = self.peak_of_steps is not None and self.ledger.peak > self.peak_of_steps
        if in_evaluation:
            notes.append("That is in the evaluation, which needs less with a smaller --per-device-eval-batch-size.")
        name = type(model).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
        return Plan(
            parts, self.ledger.peak_phase, self.process, self.heap, name, trained + frozen, trained, in_evaluation,
            self.micro_batch_size, -(-self.update_size // (self.micro_batch_size * self.train.world_size)),
            _tokens(self.longest.micro_batches[0]) if self.longest else 0, self.examples, self.train.num_steps,
            self.train.world_size, self.engine, self.precision, notes,
        )  # fmt: skip

    @property
    def heap(self) -> int | None:
        heap = self.ledger.heap
        return self.before + heap.peak - heap.start if heap and not heap.is_refused else None

    @property
    def trained_model(self) -> nn.Module:
        return next(model for model in self.models if any(p.requires_grad for p in model.parameters()))


def _tokens(micro_batch: Mapping[str, Any]) -> int:
    ids = [value for name, value in micro_batch.items() if name.endswith("input_ids") and isinstance(value, torch.Tensor)]
    return sum(each.numel() for each in ids)


def _alone(config: AnyConfig, folder: str) -> AnyConfig:
    values = values_of(config)
    changes = {name: value for name, value in {**_ALONE, "output_dir": f"{folder}/run"}.items() if name in values}
    return dataclasses.replace(config, **changes)


@contextlib.contextmanager
def _replaced(seen: _Seen, values: Mapping[str, Any]) -> Iterator[None]:
    """What makes models, batches and steps, replaced by what makes them of fake tensors and follows them."""
    with Replacements() as replace:
        for name in ("load_model", "load_encoder"):
            replace.public(name, functools.partial(_made, seen))
        for name in ("add_adapter", "add_value_head"):
            replace.public(name, functools.partial(_made, seen))
        replace.public("build_optimizer", functools.partial(_optimizer, seen))
        replace.attribute(TrainLoader, "batches", functools.partial(_longest_batches, seen))
        replace.attribute(EvalLoader, "__iter__", functools.partial(_longest_evaluation, seen))
        if "num_generations" not in values:  # an evaluation there is sampling
            replace.attribute(run.Run, "due", functools.partial(_evaluates, seen))
        replace.public("cache_gradients", functools.partial(_cached, seen))
        replace.attribute(torch.Tensor, "backward", functools.partial(_backward, seen))
        replace.attribute(kernels, "one_by_one", functools.partial(first_and_last, seen.ledger, _KEPT))
        replace.attribute(nn.Module, "to", _stay)
        replace.attribute(reference, "reference_table", lambda *_, **__: _AnyRow())
        replace.attribute(reference, "_place_frozen", functools.partial(_frozen, seen))
        replace.attribute(load, "check_compiler", lambda *_: None)
        replace.attribute(run, "report_incident", lambda *_: None)  # of losses without a value, with all rows of a step
        seen.layers.replace(replace)
        replace.attribute(Accelerator, "prepare", functools.partial(_prepared, seen))
        if "teacher" in values:
            replace_teachers(replace, seen.ledger)
        if "num_generations" in values:
            size, updates = values["per_device_train_batch_size"], values["steps_per_generation"]
            PlannedRollouts(seen.ledger, size, updates, seen.updating).replace(replace)
        yield


def _made(seen: _Seen, original: Callable[..., Any], *values: object, **named: object) -> Any:
    model = as_fake(original(*values, **named))
    if not any(each is model for each in seen.models):
        seen.models.append(model)
    return model


def _frozen(seen: _Seen, original: Callable[..., Any], *values: object, **named: object) -> Any:
    frozen = original(*values, **named)
    for tensor in (*frozen.parameters(), *frozen.buffers()):
        seen.ledger.see(tensor, "reference")
    return frozen


def _optimizer(seen: _Seen, original: Callable[..., Any], model: nn.Module, *values: object, **named: object) -> Any:
    optimizer, schedule = original(model, *values, **named)
    for buffer in model.buffers():
        seen.ledger.see(buffer, "weights")
    seen.removed += mark_phases(seen.ledger, model, optimizer)
    return optimizer, schedule


def _prepared(seen: _Seen, original: Callable[..., Any], accelerator: Any, *values: object, **named: object) -> Any:
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


def _backward(seen: _Seen, original: Callable[..., Any], *values: object, **named: object) -> Any:
    with seen.ledger.during("activations"):
        return original(*values, **named)


def _longest_batches(seen: _Seen, original: Callable[..., Iterator[Batch]], loader: Any, *values: Any) -> Iterator[Batch]:
    """Two batches, of the longest micro-batch each, which is accumulated where the run accumulates."""
    if seen.is_before_steps:
        raise _Planned
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
    raise _Planned


def _repeated(batch: Batch, micro_batch: MicroBatch, count: int, examples: list[int]) -> Batch:
    return dataclasses.replace(
        batch, micro_batches=[micro_batch] * count, real=[True] * count, seeds=[batch.seeds[0]] * count,
        indices=[examples] * count, epochs=[batch.epochs[0]] * count,
    )  # fmt: skip


def _cached(
    seen: _Seen, original: Callable[..., Batch], accelerator: Any, model: nn.Module, batch: Batch, *values: Any
) -> Batch:  # fmt: skip
    """The first pass of a contrastive loss is over the whole global batch; the second is accumulated like other steps."""
    micro_batch, count = batch.micro_batches[0], seen.accumulated
    anchors = int((micro_batch["role"] == 0).sum()) * count * accelerator.num_processes
    whole = _repeated(batch, micro_batch, count, batch.indices[0])
    whole = dataclasses.replace(whole, totals={**batch.totals, "examples": float(anchors)})
    done = original(accelerator, model, whole, *values)
    return dataclasses.replace(batch, micro_batches=done.micro_batches[: len(batch.micro_batches)])


def _evaluates(seen: _Seen, original: Callable[..., bool], opened: run.Run, what: str) -> bool:
    if what == "eval_on_start":
        return seen.is_before_steps
    after_steps = what == "eval" and seen.batches == min(STEPS, opened.num_steps) and opened.config.eval_strategy != "no"
    return after_steps or original(opened, what)


def _evaluates_first(config: Settings) -> bool:
    values = values_of(config)
    return bool(values.get("eval_on_start")) and values["eval_strategy"] != "no" and "num_generations" not in values


def _longest_evaluation(seen: _Seen, original: Callable[..., Iterator[Batch]], loader: Any) -> Iterator[Batch]:
    """The first batch of an evaluation after the steps, which is the longest. A loop of the recipe's own may evaluate after its
    first step, if that is its last one."""
    if seen.is_before_steps:
        seen.start()
        seen.ledger.phase = "evaluation"
        yield from itertools.islice(original(loader), EVALUATED)
        raise _Planned
    if not seen.batches:
        yield from original(loader)
        return
    seen.peak_of_steps, seen.ledger.phase = seen.ledger.peak, "evaluation"
    yield next(original(loader))
    raise _Planned


class _AnyRow:
    """A table of stored log-probabilities, of which any row is zero."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, columns = (key[0], ()) if isinstance(key, tuple) else (key, (2,))
        return torch.zeros(len(rows), *columns)
