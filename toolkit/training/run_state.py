"""A run's state on its way to a checkpoint and back."""

import contextlib
import time
from pathlib import Path
from typing import Any

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal
from toolkit.config.reading import add_reads, settings_read
from toolkit.data.loading.batch import Batch
from toolkit.distributed.engines import element_count, engine_of, unwrapped
from toolkit.distributed.ranks import largest, on_all, on_main
from toolkit.runs import directory as output
from toolkit.runs.run_card import write_run_card
from toolkit.system.json_lines import append_line, read_lines, truncate_lines
from toolkit.tracking.console import Progress
from toolkit.tracking.step_metrics import StepFigures
from toolkit.training.divergence import restored
from toolkit.training.resume import ALLOWED, changes_since, keeps_its_length, plain_settings, run_layout

FIGURES = ("metrics.jsonl", "samples.jsonl")


class SaveFailed(Exception):
    """A checkpoint could not be written, and `save_error` says stop."""

    exit_code = 1


def check_room(run: Any) -> None:
    """Refuse a disk without room for the model and the checkpoints that are kept, beside the one being written."""
    weights = sum(element_count(parameter) * 4 for parameter in run.model.parameters())
    kept = 0 if run.config.save_strategy == "no" else (run.config.save_total_limit or 1) + run.config.save_best_limit
    what = f"this run (a model{f' and {kept} checkpoints' if kept else ''})"
    output.check_disk_space(run.output_dir, int(1.1 * weights * (1 + 3 * kept)), what)  # a checkpoint has two moments as well


def save_run(run: Any) -> None:
    """Write a checkpoint of this moment, or begin to; whether it went well, `run.writer` tells. All ranks call it."""
    shards, began = engine_of(run.accelerator).shards, time.monotonic()
    if shards:
        run.stop.busy_saving = True  # on every rank: a deadline must not part them in the middle
        if not run.base and any(not parameter.requires_grad for parameter in run.model.parameters()):
            run.base = ckpt.sharded_base_identity(run.accelerator, run.model)  # on every rank: finding it is a collective
        state = ckpt.capture_sharded_state(run.accelerator, run.model, run.optimizer, run_record(run), run.kept, run.base)
        if state is not None:
            _write_state(run, state)
    else:
        write_checkpoint(run)
    run.accelerator.wait_for_everyone()
    if shards:
        run.stop.busy_saving, run.stop.seconds_to_save = False, time.monotonic() - began


def write_checkpoint(run: Any) -> None:
    """The main process's part of it, without a collective. Where the state is sharded, nothing is written."""
    accelerator = run.accelerator
    if accelerator.is_main_process and not engine_of(accelerator).shards:
        record = run_record(run)
        _write_state(run, ckpt.capture_state(run.model, run.optimizer, record, accelerator.scaler, run.kept, run.base))


def _write_state(run: Any, state: ckpt.State) -> None:
    run.base = state.base
    broken = ckpt.nonfinite_parameter(state)
    if broken:
        run.say(f"WARNING: no checkpoint at step {run.step}: {broken} is not finite. The last good one is kept.")
        return
    run.stop.busy_saving = True
    figures = [run.output_dir / name for name in FIGURES]
    run.writer.save(run.step, state, best=run.best.get("step") == run.step, best_steps=best_steps(run), beside=figures)
    run.stop.busy_saving, run.stop.seconds_to_save = False, run.writer.seconds


def best_steps(run: Any) -> frozenset[int]:
    """The steps of the best evaluations, whose checkpoints are kept."""
    return frozenset(step for _, step in run.ranked) if run.config.load_best_model_at_end else frozenset()


def restore_run(run: Any, path: Path) -> None:
    """Continue from a checkpoint: weights, optimizer, position and history. Everything is checked before anything changes.

    Raises:
        Refusal: the checkpoint is damaged or of another model, or data or settings have changed that the result depends on.
    """
    accelerator, train = run.accelerator, run.train

    def load() -> tuple[ckpt.State, list[str]]:
        state = ckpt.load_checkpoint(path)
        notes = changes_since(state.run, run.config, accelerator, train)
        notes += _other_reference(state.run, run)
        train.restore(state.run["source"], state.run["position"])
        if not shards:
            ckpt.apply_state(state, run.model, run.optimizer, accelerator.scaler)
        return state, notes

    shards = engine_of(accelerator).shards
    state, notes = on_all(accelerator, load)
    if shards:  # with collectives, which a refusal of one rank alone must not leave open: all read the same file
        ckpt.apply_sharded_state(accelerator, state, run.model, run.optimizer)
    record = state.run
    if "examples_to_consume" in record and keeps_its_length(run.config):
        train.examples_to_consume = record["examples_to_consume"]  # --max-steps counts in the batches the run began with
    run.step, run.applied, run.position = record["step"], record["applied"], record["position"]
    run.tokens, run.memory, run.best = record["tokens"], record["memory"], record["best"]
    run.objective, run.ranked = record.get("objective", []), record.get("ranked", [])
    run.baselines, run.seconds_before, run.kept = record["baselines"], record["seconds"], state.kept
    run.tracker_ids, run.loss_spikes = record["trackers"], record["loss_spikes"]
    run.guard.in_row, run.spikes.losses = record["nonfinite_in_row"], record["recent_losses"]
    run.base, run.evaluation_is_owed = state.base, record["evaluation_is_owed"]
    run.window.steps = [_read_step(step) for step in record.get("window", [])]
    run.window.seconds = record.get("window_seconds", 0.0)
    on_main(accelerator, lambda: _settle(run, path))
    run.events = read_lines(run.output_dir / "metrics.jsonl")
    lost = record.get("events", 0) - len(run.events) if _is_own(run, path) else 0
    run.display = Progress(run.num_steps, run.step, accelerator.is_main_process)
    run.say(f"resumed from {path}: step {run.step} of {run.num_steps}")
    for note in notes:
        run.say(f"  {note}")
    if lost > 0:
        run.say(
            f"WARNING: {run.output_dir / 'metrics.jsonl'} lacks {lost} of the {record['events']} lines that were logged by "
            "then: it was damaged or removed. The history, and early stopping with it, goes by those that are left"
        )
    came = [] if _is_own(run, path) else [f"went on from a checkpoint of another run, {path}"]
    now = [] if _keeps_its_card(run, path) else [f"step {run.step}: {note}" for note in [*came, *notes]]
    run.continued = [*record.get("continued", ()), *now]
    add_reads(run.config, record.get("settings_read", ()))
    run.divergence, run.warnings = restored(record.get("divergence")), record.get("warnings", [])
    ckpt.restore_random_state(state.random)


def describe_run(run: Any, source: Path | None) -> None:
    """Write config.yaml and run.json, once it is clear that the run goes on, and from where (None: from its beginning)."""
    if source is None or not _keeps_its_card(run, source):
        output.write_config(run.config)
        card = run.output_dir / "run.json"
        write_run_card(card, run.accelerator, run.config, run.model, run.train, run.optimizer, run.continued, run.say)


def _keeps_its_card(run: Any, checkpoint: Path) -> bool:
    """Whether nothing is left to train of the directory's own run: its files say what the weights were made with."""
    files = [run.output_dir / name for name in ("config.yaml", "run.json")]
    return run.finished and _is_own(run, checkpoint) and all(path.exists() for path in files)


def _reference_made_of(run: Any) -> dict[str, Any] | None:
    """Of a run that compares with a reference model: which weights that is made of."""
    return getattr(unwrapped(run.model), "reference_made_of", None)


def _other_reference(record: dict[str, Any], run: Any) -> list[str]:
    """What to say where the reference is made of other files than it was; refused unless `allow_change` names the model."""
    before, now = record.get("reference_made_of"), _reference_made_of(run)
    if not before or before == now:
        return []
    if "model" not in run.config.allow_change:
        raise Refusal(
            f"--resume: the files of --model {run.config.model}, which the reference is made of, are not those that the run "
            "began with. Bring them back, begin a new run in another --output-dir, or go on with another reference: "
            "--allow-change model"
        )
    return [f"the reference is made of other files: {ALLOWED}"]


def _settle(run: Any, path: Path) -> None:
    """Make the output directory that of a run whose newest checkpoint is this one: a kill may have come at any moment."""
    own = _is_own(run, path)
    for moved in ckpt.set_aside_later(run.checkpoints, run.step if own else -1, run.best.get("step")):
        run.say(f"  set aside, as it is {'later than the one continued from' if own else 'of another run'}: {moved}")
    for name in FIGURES:
        truncate_lines(run.output_dir / name, run.step)
    _point_to_best(run)
    if own:
        ckpt.write_pointer(run.checkpoints, "last", path)
    run.writer.best_steps = best_steps(run)
    run.writer.prune()


def _is_own(run: Any, checkpoint: Path) -> bool:
    return checkpoint.resolve().parent == run.checkpoints.resolve()


def _point_to_best(run: Any) -> None:
    """Let the pointer say what the run's own record says: it moves after the checkpoint."""
    best = run.checkpoints / f"step-{run.best.get('step')}"
    if best.is_dir():
        ckpt.write_pointer(run.checkpoints, "best", best)
    else:
        (run.checkpoints / "best.json").unlink(missing_ok=True)


def check_saves(run: Any, outcomes: list[ckpt.Outcome]) -> None:
    """Report the saves that failed, and end the run for it on all ranks where `save_error` is stop."""
    report_saves(run, outcomes)
    if run.config.save_error == "stop" and largest(run.accelerator, run.failed_saves):
        raise SaveFailed(f"a checkpoint could not be written by step {run.step}; the last good one is kept.")


def report_saves(run: Any, outcomes: list[ckpt.Outcome]) -> None:
    """Say and write down which saves failed."""
    for outcome in outcomes:
        if outcome.error is None:
            if run.uploads is not None:
                run.uploads.saved(run.checkpoints / f"step-{outcome.step}")
            continue
        if not isinstance(outcome.error, OSError):
            raise outcome.error
        run.failed_saves += 1
        record = {"step": outcome.step, "error": str(outcome.error), "time": round(run.seconds, 3)}
        with contextlib.suppress(OSError):  # the disk may be full for this line too
            append_line(run.output_dir / "incidents" / "saves.jsonl", record)
        run.say(f"WARNING: no checkpoint at step {outcome.step}: {outcome.error}. The last good one is kept.")


def run_record(run: Any) -> dict[str, Any]:
    """What of a run is JSON: counts, position, history of the guards, and what a resume compares."""
    return {
        "examples_to_consume": run.train.examples_to_consume,
        "step": run.step, "applied": run.applied, "position": run.position, "epoch": run.epoch, "tokens": run.tokens,
        "seconds": run.seconds, "best": run.best, "memory": run.memory, "baselines": run.baselines,
        "events": len(run.events), "objective": run.objective, "ranked": run.ranked,
        "nonfinite_in_row": run.guard.in_row, "recent_losses": run.spikes.losses, "loss_spikes": run.loss_spikes,
        "fingerprint": run.train.fingerprint, "source": run.train.state(), "settings": plain_settings(run.config),
        "layout": run_layout(run.accelerator, run.train), "trackers": dict(run.trackers.ids),
        "evaluation_is_owed": run.evaluation_is_owed, "reference_made_of": _reference_made_of(run),
        "divergence": run.divergence.state(), "warnings": run.warnings,
        "continued": run.continued, "settings_read": sorted(settings_read(run.config)),
        "window": [_step_record(step) for step in run.window.steps], "window_seconds": run.window.seconds,
    }  # fmt: skip


# Steps whose figures were read and not logged yet: the next logging event is the mean over its steps, after a resume too.
_OF_BATCH = ("totals", "position", "size", "examples")


def _step_record(step: StepFigures) -> dict[str, Any]:
    return {"step": step.step, "values": step.values, **{name: getattr(step.batch, name) for name in _OF_BATCH}}


def _read_step(record: dict[str, Any]) -> StepFigures:
    batch = Batch(micro_batches=[], real=[], seeds=[], indices=[], **{name: record[name] for name in _OF_BATCH})
    return StepFigures(record["step"], batch, record["values"])
