"""Checkpoints of a run: room for them, saves that failed, and what is put back from one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit import checkpoint as ckpt
from toolkit.checkpoint.state import wrong_part
from toolkit.config import Refusal
from toolkit.distributed.engines import element_count, engine_of
from toolkit.distributed.ranks import largest, on_all, on_main
from toolkit.runs import directory as output
from toolkit.system.allocator import give_back_memory
from toolkit.system.json_lines import append_line, truncate_lines
from toolkit.tracking.records import FILES
from toolkit.training.anomalies import INCIDENTS
from toolkit.training.resume import changes_since, keeps_its_length, other_reference
from toolkit.training.run_state import RunState

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedModel

    from toolkit.config import RunConfig
    from toolkit.data.loading.loaders import StreamLoader, TrainLoader
    from toolkit.training.signals import StopSignal


class SaveFailed(Exception):
    """A checkpoint could not be written, and `save_error` is stop."""

    exit_code = 1


def check_room(model: nn.Module, config: RunConfig) -> None:
    """Refuse a disk without room for the model and the checkpoints that are kept, next to the one being written."""
    weights = sum(element_count(parameter) * 4 for parameter in model.parameters())
    kept = 0 if config.save_strategy == "no" else (config.save_total_limit or 1) + config.save_best_limit
    what = f"this run (a model{f' and {kept} checkpoints' if kept else ''})"
    output.check_disk_space(config.output_dir, int(1.1 * weights * (1 + 3 * kept)), what)  # a checkpoint has two moments too


class Saver:
    """Writes the checkpoints of a run, and counts those that failed."""

    def __init__(
        self, accelerator: Accelerator, config: RunConfig, model: PreTrainedModel, optimizer: torch.optim.Optimizer,
        stop: StopSignal, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.accelerator, self.config, self.model, self.optimizer = accelerator, config, model, optimizer
        self.stop, self.say = stop, say
        self.base: dict[str, Any] = {}  # identifies the frozen parameters, which checkpoints don't hold; empty until known
        self.output_dir, self.shards = Path(config.output_dir), engine_of(accelerator).shards
        root, background = self.output_dir / "checkpoints", config.async_save
        self.writer = ckpt.CheckpointWriter(root, config.save_total_limit, background=background)
        self.failed, self._seconds = 0, 0.0  # saves, and the run's seconds in training at the last one
        self.model_step: int | None = None  # whose weights the model has, once the best ones are loaded; None: the last step's
        self.on_saved: list[Callable[[Path], None]] = []  # called on the main process with each checkpoint that is on the disk
        self.on_rollback: list[Callable[[], None]] = []  # called once kept tensors have been put back

    def save(self, state: RunState, kept: Mapping[str, Any]) -> None:
        """Write a checkpoint of this moment, or begin to; `report` shows how it went. All ranks call it."""
        give_back_memory()  # between steps, where little is in use: what a long run leaves free in pieces
        if not self.shards:
            self.save_alone(state, kept)
            self.accelerator.wait_for_everyone()
            return
        with self.stop.saving():  # on every rank: a deadline must not part them in the middle
            if not self.base and self._is_frozen_in_part():  # on every rank: finding it is a collective
                self.base = ckpt.sharded_base_identity(self.accelerator, self.model)
            record = state.record()
            saved = ckpt.capture_sharded_state(self.accelerator, self.model, self.optimizer, record, kept, self.base)
            if saved is not None:
                self._write(saved, state)
            self.accelerator.wait_for_everyone()

    def save_alone(self, state: RunState, kept: Mapping[str, Any]) -> None:
        """The main process's part of it, without a collective. Where the engine shards, nothing is written."""
        if self.shards:
            self.say(f"no time to gather step {state.step} from all ranks: what followed the newest checkpoint is lost")
        elif self.accelerator.is_main_process:
            with self.stop.saving():
                scaler = self.accelerator.scaler
                saved = ckpt.capture_state(self.model, self.optimizer, state.record(), scaler, kept, self.base)
                self.base = saved.base
                self._write(saved, state)
            self.stop.seconds_to_save = self.writer.seconds

    def check(self, step: int, wait: bool = False) -> None:
        """Report the saves that have ended; raises `SaveFailed` on all ranks for a failed one where `save_error` is stop."""
        self.report(wait)
        if self.config.save_error == "stop" and largest(self.accelerator, self.failed):
            raise SaveFailed(f"a checkpoint could not be written by step {step}; the last good one is kept.")

    def report(self, wait: bool = False) -> None:
        """Call `on_saved` for each save that has ended, and warn of those that failed. `wait`: for one still being written."""
        for outcome in self.writer.wait() if wait else self.writer.finished():
            if outcome.is_written:
                for observer in self.on_saved:
                    observer(self.writer.root / f"step-{outcome.step}")
            if outcome.error is None:
                continue
            if not isinstance(outcome.error, OSError):
                raise outcome.error
            if outcome.is_written:  # the next save does it again
                what = f"the checkpoint at step {outcome.step} is written, but not its pointer, or older ones stay"
                self.say(f"WARNING: {what}: {outcome.error}")
            else:
                self.failed += 1
                record = {"step": outcome.step, "error": str(outcome.error), "time": round(self._seconds, 3)}
                with contextlib.suppress(OSError):  # the disk may be full for this line too
                    append_line(self.output_dir / "incidents" / "saves.jsonl", record)
                self.say(f"WARNING: no checkpoint at step {outcome.step}: {outcome.error}. The last good one is kept.")

    def point_to_best(self, step: int) -> None:
        """Let `best` show the checkpoint of a step, where there is one: it was evaluated after it had been saved."""
        try:
            if (path := self.writer.root / f"step-{step}").is_dir():
                ckpt.write_pointer(self.writer.root, "best", path)
        except OSError as error:  # a resume writes it again, of the state that the next checkpoint has
            self.say(f"WARNING: checkpoints/best.json doesn't show step {step}: {error}")

    def put_model(self, saved: ckpt.State, step: int) -> None:
        """Put the weights of a checkpoint into the model. All ranks call it."""
        if self.shards:
            ckpt.apply_sharded_state(self.accelerator, saved, self.model, self.optimizer, only_model=True)
        else:
            on_all(self.accelerator, lambda: ckpt.apply_state(saved, self.model, None))
        self.model_step = step

    def roll_back(self, state: RunState, kept: Mapping[str, Any]) -> ckpt.State | None:
        """Put the last good checkpoint that was due into model, optimizer and kept tensors. All ranks call it.

        Returns the checkpoint; None, with a warning, where there is none.
        """
        self.report(wait=True)  # of one that is still being written

        def find() -> Path | None:
            due = [path for path in ckpt.list_checkpoints(self.writer.root) if int(path.name[5:]) <= state.last_due_save]
            return next((path for path in reversed(due) if not ckpt.verify_checkpoint(path)), None)

        path = on_main(self.accelerator, find)
        if path is None:
            self.say("WARNING: --loss-spike rollback: there is no checkpoint to go back to yet; training goes on")
            return None
        saved = on_all(self.accelerator, lambda: ckpt.load_checkpoint(path))
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.shards:
            ckpt.apply_sharded_state(self.accelerator, saved, self.model, self.optimizer)
        else:
            scaler = self.accelerator.scaler
            on_all(self.accelerator, lambda: ckpt.apply_state(saved, self.model, self.optimizer, scaler))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # of the step that is logged next
        live, stored = ckpt.flatten(dict(kept))[0], ckpt.flatten(saved.kept)[0]
        with torch.no_grad():
            for name in live.keys() & stored.keys():
                live[name].copy_(stored[name])
        for observer in self.on_rollback:
            observer()
        return saved

    def steps_to_keep(self, state: RunState) -> frozenset[int]:
        """The steps whose checkpoints are kept, however old: of the best evaluations, and what a rollback goes back to."""
        best = frozenset(int(step) for _, step in state.ranked) if self.config.load_best_model_at_end else frozenset()
        return best | ({state.last_due_save} if self.config.loss_spike == "rollback" else set())

    def _is_frozen_in_part(self) -> bool:
        return any(not parameter.requires_grad for parameter in self.model.parameters())

    def _write(self, saved: ckpt.State, state: RunState) -> None:
        if broken := ckpt.nonfinite_parameter(saved):
            self.say(f"WARNING: no checkpoint at step {state.step}: {broken} is not finite. The last good one is kept.")
            return
        self._seconds = state.seconds
        is_best, files = state.best.get("step") == state.step, [self.output_dir / name for name in FILES]
        self.writer.save(state.step, saved, best=is_best, keep_steps=self.steps_to_keep(state), also_synced=files)


def put_back(
    path: Path, saver: Saver, train: TrainLoader | StreamLoader, now: RunState
) -> tuple[ckpt.State, RunState, list[str]]:
    """Put a checkpoint into model, optimizer and loader. Everything is checked before anything changes. All ranks call it.

    Returns the checkpoint, the state of the run that resumes from it, and a line about each change since.

    Raises:
        Refusal: the checkpoint is damaged or of another model, or data or settings have changed that the result depends on.
    """
    accelerator, config = saver.accelerator, saver.config

    def load() -> tuple[ckpt.State, list[str]]:
        saved = ckpt.load_checkpoint(path)
        field = RunState.wrong_field(saved.run)
        if wrong := wrong_part(saved) or (field and f"its field {field}"):
            raise Refusal(f"{path}: holds no state of a run ({wrong}). Take another checkpoint.")
        notes = changes_since(saved.run, config, accelerator, train)
        notes += other_reference(saved.run.get("reference_made_of"), now.reference_made_of, config)
        # --max-steps counts in the batches the run began with
        length = saved.run.get("examples_to_consume") if keeps_its_length(config) else None
        train.restore(saved.run["source"], saved.run["position"], length)
        if not saver.shards:
            ckpt.apply_state(saved, saver.model, saver.optimizer, accelerator.scaler)
        return saved, notes

    saved, notes = on_all(accelerator, load)
    if saver.shards:  # with collectives, which a refusal of one rank alone must not leave open: all read the same file
        ckpt.apply_sharded_state(accelerator, saved, saver.model, saver.optimizer)
    saver.base = saved.base
    state = replace(
        RunState.from_record(saved.run), examples_to_consume=train.examples_to_consume, fingerprint=now.fingerprint,
        settings=now.settings, layout=now.layout, reference_made_of=now.reference_made_of,
    )  # fmt: skip
    return saved, state, notes


def settle_directory(path: Path, saver: Saver, state: RunState) -> None:
    """Make the output directory that of a run whose newest checkpoint is at `path`: a kill may have come at any moment."""
    root, own = saver.writer.root, is_own(path, saver.writer.root)
    for moved in ckpt.set_aside_later(root, state.step if own else -1, state.best.get("step")):
        saver.say(f"  set aside, as it is {'later than the one resumed from' if own else 'of another run'}: {moved}")
    for name in (*FILES, *INCIDENTS):
        truncate_lines(saver.output_dir / name, state.step)
    best = root / f"step-{state.best.get('step')}"
    if best.is_dir():  # the pointer moves after the checkpoint
        ckpt.write_pointer(root, "best", best)
    else:
        (root / "best.json").unlink(missing_ok=True)
    if own:
        ckpt.write_pointer(root, "last", path)
    saver.writer.prune(saver.steps_to_keep(state))


def is_own(path: Path, checkpoints: Path) -> bool:
    """Whether a checkpoint is one of the run's own directory."""
    return path.resolve().parent == checkpoints.resolve()
