"""What a checkpoint saves of a run: the fields of one dataclass, how a step and an evaluation change them, and the summary.

Weights, optimizer, random numbers and the tensors of `run.keep` are next to it in the checkpoint (`toolkit.checkpoint.State`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from toolkit.runs.summary import Summary, evaluations_by_step
from toolkit.tracking.step_metrics import StepMetrics
from toolkit.training.anomalies import MOST_ROLLBACKS, SPIKE_STEPS, Divergence, spike_above

if TYPE_CHECKING:
    from toolkit.data.loading.batch import Batch


@dataclass
class RunState:
    """A run as JSON can hold it. Its fields are the keys of `run` in a checkpoint's state.json, and nothing else is in there.

    Only the run changes its state. Fields marked "as of the last save" are those that live objects hold in between.
    """

    # how far it is
    step: int = 0  # global batches consumed
    applied: int = 0  # steps that changed the weights
    position: int = 0  # examples consumed
    examples_to_consume: int = 0
    epoch: float = 0.0  # as of the last save, like the next two
    seconds: float = 0.0  # in training, over all the processes that worked on it
    source: dict[str, Any] = field(default_factory=dict)  # what a stream needs next to the position
    tokens: float = 0.0  # supervised ones

    # what its evaluations found
    events: int = 0  # lines of metrics.jsonl
    objective: list[float] = field(default_factory=list)  # the deciding metric after each step > 0, smaller is better
    best: dict[str, Any] = field(default_factory=dict)  # name, value, step and sign of the best evaluation
    ranked: list[list[float]] = field(default_factory=list)  # [value, step] of the best ones, the best first
    baselines: dict[str, Any] = field(default_factory=dict)
    evaluation_is_owed: bool = False  # one that a deadline cut off, to be made up for after a resume

    # what is watched for, and what it has shown
    nonfinite_in_row: int = 0
    recent_losses: list[float] = field(default_factory=list)
    loss_spikes: int = 0
    last_due_save: int = 0  # the last step whose checkpoint was due by the settings, not by a signal
    rollbacks: list[list[int]] = field(default_factory=list)  # [step of the spike, step of the weights after it]
    divergence: Divergence = field(default_factory=Divergence)
    warnings: list[str] = field(default_factory=list)
    window: list[StepMetrics] = field(default_factory=list)  # read and not logged yet, as of the last save
    window_seconds: float = 0.0
    window_waiting: float = 0.0  # for data

    # the recipe's own
    memory: dict[str, Any] = field(default_factory=dict)

    # what it was made of, which a resume compares
    fingerprint: str = ""  # of the training data
    settings: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    reference_made_of: dict[str, Any] | None = None  # of a run that compares with a reference model
    continued: list[str] = field(default_factory=list)  # what changed at its resumes
    settings_read: list[str] = field(default_factory=list)  # as of the last save
    trackers: dict[str, str] = field(default_factory=dict)  # ids of its runs there, as of the last save

    @property
    def finished(self) -> bool:
        return self.position >= self.examples_to_consume

    def num_steps(self, global_batch_size: int) -> int:
        """Steps in all: those taken, and as many as the examples left over fill at this batch size."""
        return self.step + math.ceil(max(0, self.examples_to_consume - self.position) / global_batch_size)

    def resume(self, events: int, changes: Sequence[str]) -> None:
        """Go on with the lines of metrics.jsonl that are left, and with these changes from this step on."""
        self.events = events
        self.continued = [*self.continued, *(f"step {self.step}: {change}" for change in changes)]

    def record(self) -> dict[str, Any]:
        """What a checkpoint writes: the fields by name."""
        return {**asdict(replace(self, memory={})), "memory": self.memory}  # asdict would break a Counter in it

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RunState:
        """The state that a checkpoint holds; what an older one lacks has its default."""
        known = {each.name: record[each.name] for each in fields(cls) if each.name in record}
        known["divergence"] = Divergence(**(record.get("divergence") or {}))
        known["window"] = [StepMetrics(**step) for step in record.get("window", ())]
        return cls(**known)

    @classmethod
    def wrong_field(cls, record: object) -> str:
        """The field that keeps what was read from being a run's state, whatever digest it has; empty where none does."""
        if not isinstance(record, dict):
            return "run"
        missing = [name for name in ("step", "position", "source", "fingerprint") if name not in record]
        wrong = [each.name for each in fields(cls) if each.name in record and not _is_of(each.type, record[each.name])]
        if not wrong and record.get("best") and not {"name", "value", "step"} <= record["best"].keys():
            wrong = ["best"]
        if not wrong and any(len(each) != 2 for each in record.get("ranked", ())):
            wrong = ["ranked"]
        return next(iter(missing + wrong), "")

    def begin_step(self, batch: Batch) -> None:
        """The next global batch is taken."""
        self.step += 1
        self.take(batch)
        self.evaluation_is_owed = False

    def take(self, batch: Batch) -> None:
        """The examples of a batch are consumed."""
        self.position = batch.position + batch.size
        self.tokens += batch.totals.get("tokens", 0.0)

    def add_metrics(self, step: StepMetrics) -> tuple[float | None, list[str]]:
        """Take a step's metrics, once read: the median that its loss is a spike above, if it is one, and new warnings."""
        loss, applied, median = step.values["loss"], bool(step.values.get("applied", 1)), None
        self.applied += applied
        if step.values.get("nonfinite"):
            self.nonfinite_in_row += 1
        else:
            self.nonfinite_in_row, median = 0, spike_above(loss, self.recent_losses)
            self.recent_losses = [*self.recent_losses, loss][-SPIKE_STEPS:]
            self.loss_spikes += median is not None
        without_spread = step.values.get("groups_without_spread") == 1.0
        return median, self.divergence.after_step(loss, step.values["grad_norm"], applied, without_spread)

    def go_back(self, earlier: RunState) -> dict[str, Any]:
        """The weights are those of an earlier step, and the rows since stay consumed: those steps count as not applied.

        Returns what is recorded of it. Learning rates go on by the position, and evaluations stay what they were.
        """
        self.applied, self.recent_losses = earlier.applied, earlier.recent_losses
        self.memory.clear()  # a recipe may hold it
        self.memory.update(earlier.memory)
        self.rollbacks.append([self.step, earlier.step])
        passed = {"first_example": earlier.position, "end_example": self.position}
        return {"step": self.step, "weights_of_step": earlier.step, **passed}

    def rolls_back_in_vain(self) -> str | None:
        """A message where the same checkpoint was gone back to too often; None before that."""
        to = self.rollbacks[-1][1]
        times = sum(target == to for _, target in self.rollbacks)
        if times <= MOST_ROLLBACKS:
            return None
        return (
            f"stopped after step {self.step}: the loss jumped {times} times on the way from step {to}, whose weights were put "
            "back each time. Lower --learning-rate, or look at the rows in incidents/loss_spikes.jsonl."
        )

    def add_evaluation(self, name: str, value: float, sign: int, most: int) -> bool:
        """Take the deciding metric of an evaluation: is it one of the best `most` so far? `sign` is 1 where more is better."""
        if not self.step:  # no checkpoint has the weights before training; Trainer doesn't count their evaluation either
            return False
        self.objective.append(-sign * value)
        if not math.isfinite(value):
            return False
        if self.judged_by_another(name, sign):
            self.best, self.ranked = {}, []
        # the best first, of equal ones the earlier
        self.ranked = sorted([*self.ranked, [value, self.step]], key=lambda each: -sign * each[0])[:most]
        if not self.best or sign * value > sign * self.best["value"]:
            self.best = {"name": name, "value": value, "step": self.step, "sign": sign}
        return [value, self.step] in self.ranked

    def judged_by_another(self, name: str, sign: int) -> bool:
        """Whether the best evaluation so far was the best by another metric, or in the other direction."""
        return bool(self.best) and (self.best["name"], self.best.get("sign", sign)) != (name, sign)


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value that JSON holds can be one of a field's type, which is given as it is written."""
    if kind in _PARTS:  # a checkpoint that is older than `divergence` has none
        own = {each.name: each.type for each in fields(_PARTS[kind])}
        is_part = isinstance(value, dict) and value.keys() <= own.keys()
        return not value or (is_part and all(_is_of(own[name], each) for name, each in value.items()))
    if kind.endswith(" | None"):
        return value is None or _is_of(kind.removesuffix(" | None"), value)
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is_of(kind[5:-1], each) for each in value)
    if kind.startswith("dict["):
        return isinstance(value, dict)
    if kind == "int":
        return type(value) is int and 0 <= value < 2**63
    return type(value) in {"float": (int, float), "bool": (bool,), "str": (str,)}[kind]


_PARTS: dict[Any, Any] = {"Divergence": Divergence, "StepMetrics": StepMetrics}


def summarize(
    state: RunState, events: Sequence[Mapping[str, Any]], status: str, model_step: int | None, failed_saves: int,
    memory_gb: float, settings_read: dict[str, Any],
) -> Summary:  # fmt: skip
    """What summary.json holds: counts, the metrics of the run's model, and those of the first evaluation to compare them with.

    Args:
        events: the lines of metrics.jsonl.
        model_step: the step whose weights the model has, once the best ones are loaded; None: the last step's.
        memory_gb: most memory in use so far.
        settings_read: the public ones, which the model card lists.
    """
    evaluated = evaluations_by_step(events)
    first = {f"first_{name}": value for name, value in next(iter(evaluated.values())).items()} if len(evaluated) > 1 else {}
    of_model = [metrics for step, metrics in evaluated.items() if model_step in (None, step)]
    losses = [event["loss"] for event in events if event.get("loss") is not None]
    ranked = [{"step": int(step), **evaluated.get(int(step), {})} for _, step in state.ranked]
    return Summary({
        "status": status, "steps": state.step, "applied_steps": state.applied, "examples": state.position,
        "epoch": state.epoch, "supervised_tokens": state.tokens, "seconds": state.seconds, "peak_memory_gb": memory_gb,
        **({"train_loss": losses[-1]} if losses else {}), **first, **(of_model[-1] if of_model else {}),
        "warnings": state.warnings, "best": state.best, **({"best_checkpoints": ranked} if len(ranked) > 1 else {}),
        "baselines": state.baselines,
        "failed_saves": failed_saves, "loss_spikes": state.loss_spikes, "rollbacks": len(state.rollbacks),
    }, settings_read)  # fmt: skip
