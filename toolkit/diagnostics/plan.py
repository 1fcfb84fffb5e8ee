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
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit.config import Refusal, Settings
from toolkit.config.reading import values_of
from toolkit.diagnostics.compat import resized_storages
from toolkit.diagnostics.heap import find_heap
from toolkit.diagnostics.ledger import ENGINE, Ledger, remember_operations
from toolkit.diagnostics.one_rank import as_first_rank
from toolkit.diagnostics.planned_rollouts import SAMPLING
from toolkit.diagnostics.planned_run import Planned, Seen, followed
from toolkit.diagnostics.planned_teachers import TEACHER
from toolkit.diagnostics.short_runs import ended_by_signals, forget_accelerator, never_evaluated
from toolkit.distributed.engines import element_count
from toolkit.distributed.launch import NOTHING_MORE
from toolkit.models.without_weights import without_weights
from toolkit.system.console import first_line
from toolkit.system.devices import planned_for
from toolkit.system.files import temporary_folder

AnyConfig = TypeVar("AnyConfig", bound=Settings)
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


@dataclass
class Plan:
    """Bytes of tensors at the highest moment of a step or an evaluation, by part; and what the run is.

    `phase`: when that is; `in_evaluation`: whether it is after the steps. `process`: resident bytes of this process before the
    first step, the data read. `heap`: bytes that glibc holds for the tensors on a CPU, at its own highest moment; None where it
    is not known. `may_spare`: whether the run would spare memory where little is free, as `fit_micro_batch` does.
    Of several `ranks` it is the first one's, and `engine` says what they share ("" where there is one device).
    `micro_batch`: examples in one, `tokens` in the longest one (padding among them). `examples`: that there are, 0 where they
    are completions. `steps`: of the whole run. `precision`: "no", "bf16" or "fp16", in which it computes.
    """

    parts: dict[str, int]
    phase: str
    process: int = 0
    heap: int | None = None
    may_spare: bool = False
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
    environment: Mapping[str, str] = NOTHING_MORE, *, ampere: bool = True, sparing: bool = False,
) -> Plan:  # fmt: skip
    """Plan a recipe's `main` on one device of a kind, "cpu" or "cuda" (`ampere`: or later); nothing is computed, no weight is
    read or made.

    Of several `ranks` this process is the first, in a group that exchanges nothing. `environment`: what an Accelerate config
    file gives each of them. `sparing`: on a CPU whose memory is short, as `fit_micro_batch` finds it.

    Raises:
        Refusal: the recipe refuses its settings or data; or it computes with values, of which no plan is made.
    """
    check_plannable(config)
    remember_operations(kind)
    seen = Seen(Ledger(find_heap() if kind == "cpu" else None))
    seen.is_sparing = sparing
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
    seen.may_spare &= bool(values_of(config).get("auto_find_batch_size"))
    return _plan_of(seen)


def _follow(
    main: Callable[[Any], Any], config: Settings, seen: Seen, kind: str, ampere: bool, ranks: int,
    environment: Mapping[str, str], *, before_steps: bool,
) -> None:  # fmt: skip
    """The run up to where all was seen, or with `before_steps` up to its first one: what its evaluation leaves in the heap."""
    printed, seen.is_before_steps = io.StringIO(), before_steps
    forget_accelerator()
    with ended_by_signals(), temporary_folder("plan") as folder, contextlib.ExitStack() as stack:
        for each in (never_evaluated(), followed(seen, values_of(config)), planned_for(kind, ampere), without_weights(),
                     as_first_rank(ranks, environment), resized_storages(seen.ledger.resized)):  # fmt: skip
            stack.enter_context(each)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), seen.ledger:
                main(_alone(config, folder))
        except Planned:
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
    if values.get("streaming"):
        raise Refusal("--streaming: no plan of a stream, whose longest example nobody knows. Plan it with a part of its data.")


def _evaluates_first(config: Settings) -> bool:
    values = values_of(config)
    return bool(values.get("eval_on_start")) and values["eval_strategy"] != "no" and "num_generations" not in values


def _plan_of(seen: Seen) -> Plan:
    ledger, loader = seen.ledger, seen.train
    parts = {part: ledger.at_peak.get(part, 0) for part in PARTS}
    parts["activations"] += sum(size for part, size in ledger.at_peak.items() if part not in PARTS)
    heap = seen.before + ledger.heap.peak - ledger.heap.start if ledger.heap and not ledger.heap.is_refused else None
    model = next(model for model in seen.models if any(p.requires_grad for p in model.parameters()))
    trained, frozen = (
        sum(_numbers(p) for p in model.parameters() if p.requires_grad == wanted) for wanted in (True, False)
    )
    in_evaluation = seen.peak_of_steps is not None and ledger.peak > seen.peak_of_steps
    notes = list(seen.notes)
    if seen.layers.given_up:
        notes.append("Compiled layers keep less than planned: these can't be traced.")
    if "on the CPU" in seen.engine:
        notes.append("What waits on the CPU between the steps is counted here as if it were on the device.")
    if seen.is_sparing:
        notes.append("Little memory is free there: the steps spare it, and may take half as long again.")
    if in_evaluation:
        notes.append("That is in the evaluation, which needs less with a smaller --per-device-eval-batch-size.")
    name = type(model).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
    return Plan(
        parts, ledger.peak_phase, seen.process, heap, seen.may_spare, name, trained + frozen, trained, in_evaluation,
        seen.micro_batch_size, -(-seen.update_size // (seen.micro_batch_size * loader.num_data_ranks)),
        _tokens(seen.longest.micro_batches[0]) if seen.longest else 0, seen.examples, loader.num_steps,
        loader.num_data_ranks, seen.engine, seen.precision, notes,
    )  # fmt: skip


def _numbers(parameter: torch.nn.Parameter) -> int:
    packed = getattr(parameter, "quant_state", None)  # in 4 bits
    return element_count(parameter) if packed is None else packed.shape.numel()


def _tokens(micro_batch: Mapping[str, Any]) -> int:
    ids = [value for name, value in micro_batch.items() if name.endswith("input_ids") and isinstance(value, torch.Tensor)]
    return sum(each.numel() for each in ids)


def _alone(config: AnyConfig, folder: Path) -> AnyConfig:
    values = values_of(config)
    changes = {name: value for name, value in {**_ALONE, "output_dir": f"{folder}/run"}.items() if name in values}
    return dataclasses.replace(config, **changes)


