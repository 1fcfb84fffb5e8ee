"""A run opened and closed: its directory claimed, a checkpoint restored, signals noted, its summary written."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit import checkpoint as ckpt
from toolkit.config import Refusal, RunConfig
from toolkit.config.reading import add_reads, add_reads_of
from toolkit.data.loading.streams import StreamLoader
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.heartbeat import Heartbeat, heartbeat_of_process, start_heartbeat
from toolkit.distributed.ranks import close_process_group, on_main
from toolkit.hub.uploads import hub_uploads
from toolkit.runs import directory as output
from toolkit.runs.overview import verdict_of
from toolkit.runs.run_card import digests_of_settings, end_run_card, files_changed, unwrapped_optimizer, write_run_card
from toolkit.system.interruptions import Interrupted, OutOfTime
from toolkit.system.json_lines import read_lines
from toolkit.tracking.console import Progress
from toolkit.tracking.records import Records
from toolkit.tracking.step_metrics import Window
from toolkit.tracking.trackers import open_trackers
from toolkit.training.anomalies import Diverged
from toolkit.training.resume import checkpoint_to_resume, plain_settings, run_layout
from toolkit.training.run import Run
from toolkit.training.run_state import RunState
from toolkit.training.saving import Saver, check_room, is_own, put_back, settle_directory
from toolkit.training.signals import StopSignal, signals_noted, stop_deadline
from toolkit.training.stopping import explained, how_to_continue, interruption, leave

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from toolkit.data.loading.loaders import TrainLoader


@contextlib.contextmanager
def open_run(
    accelerator: Accelerator, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer,
    train: TrainLoader | StreamLoader, *, reference_made_of: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Iterator[Run]:  # fmt: skip
    """Claim the output directory, restore a checkpoint when requested, and yield the run; write its summary at the end.

    The model and the optimizer are the prepared ones. While it is open, SIGTERM and SIGINT end the run at the next step's
    end with a checkpoint and exit code 75; a second signal ends it at once.

    Args:
        reference_made_of: of a run that compares with a reference model, what that is made of (`Reference.made_of`), or what
            its rewards are (`rewards_made_of`): a resume with another one is refused.
        files: as of `save_model`, for models that are sent to the Hub while the run goes on.

    Raises:
        Refusal: the directory is in use, the disk is too small, the checkpoint does not fit, or the optimizer is another
            model's.
    """
    plain, optimizer = unwrapped(model), getattr(optimizer, "optimizer", optimizer)
    if not engine_of(accelerator).shards:
        ckpt.parameter_names(plain, optimizer)
    add_reads_of(config, unwrapped_optimizer(optimizer))
    checkpoints, stop = Path(config.output_dir) / "checkpoints", StopSignal(stop_deadline(config))
    display = Progress(train.num_steps, 0, accelerator.is_main_process)
    heartbeat = heartbeat_of_process() or start_heartbeat(accelerator, config.hang_timeout)
    if heartbeat:
        heartbeat.begin_run(lambda: how_to_continue(checkpoints, config))
    with contextlib.ExitStack() as closing:
        closing.enter_context(output.claimed(config, accelerator))
        uploads = closing.enter_context(hub_uploads(accelerator, config, plain, files or {}, display.say))
        on_main(accelerator, lambda: check_room(plain, config))
        on_main(accelerator, lambda: ckpt.clean_leftovers(checkpoints))
        saver = Saver(accelerator, config, plain, optimizer, stop, display.say)
        run = _begin(saver, train, reference_made_of, display, heartbeat)
        if uploads is not None:
            saver.on_saved.append(lambda path: uploads.saved(path, run.events, is_stopping=stop.number is not None))
            run.on_model_saved.append(lambda: uploads.send_model(run.step, run.state.best.get("step"), saver.model_step))
        status = "failed"
        with signals_noted(stop):  # until all is closed: a late signal must not cut that short
            try:
                yield run
                saver.check(run.step, wait=True)
                run.check_ranks()
                run.check_end()
                status = "finished" if run.finished else "stopped early"
            except Diverged:
                status = "diverged"
                raise
            except Interrupted:
                status = "interrupted"
                raise
            except OutOfTime:
                status = "interrupted"
                _leave_in_time(run)
            except Refusal as refusal:  # as of a stream's row, hours after the start
                if ckpt.read_pointer(checkpoints, "last"):
                    refusal.args = (f"{refusal}\n{how_to_continue(checkpoints, config)}",)
                raise
            except (MemoryError, RuntimeError) as error:
                known = explained(error, run.step, heartbeat, how_to_continue(checkpoints, config))
                if known is None:
                    raise
                raise known from error
            finally:
                stop.disarm()
                _close(run, status)
                if heartbeat:
                    heartbeat.close(failed=status == "failed")
                close_process_group(accelerator, model)


def save_to_hub(run: Run) -> None:
    """Send `output_dir/model` to the Hub when --push-to-hub is given; `save_model` has written it.

    Nothing is raised: what can't be sent is kept in `output_dir/hub_queue`, and `toolkit push` sends it later. Inside
    `open_run` this only adds to the queue; the wait for it comes at the end of the run.
    """
    run.saver.report(wait=True)  # a checkpoint that is still being written comes before
    for send in run.on_model_saved:
        send()


def _begin(
    saver: Saver, train: TrainLoader | StreamLoader, reference_made_of: Mapping[str, Any] | None, display: Progress,
    heartbeat: Heartbeat | None,
) -> Run:  # fmt: skip
    """A new run, or the one that a checkpoint holds; config.yaml and run.json are written once it is clear that it runs."""
    accelerator, config, say = saver.accelerator, saver.config, display.say
    source = on_main(accelerator, lambda: checkpoint_to_resume(config, saver.writer.root, say))
    state = RunState(
        examples_to_consume=train.examples_to_consume, fingerprint=train.fingerprint, settings=plain_settings(config),
        layout=run_layout(accelerator, train), reference_made_of=dict(reference_made_of) if reference_made_of else None,
    )  # fmt: skip
    kept, events, is_over, files = dict[str, Any](), list[dict[str, Any]](), False, None
    if source is not None:
        saved, state, notes = put_back(source, saver, train, state)
        files = on_main(accelerator, lambda: digests_of_settings(config))
        card, is_stream = source.parent.parent / "run.json", isinstance(train, StreamLoader)  # rows of others are compared
        notes += on_main(accelerator, lambda: files_changed(card, files, config, with_data=is_stream))
        on_main(accelerator, lambda: settle_directory(source, saver, state))
        kept, events = saved.kept, read_lines(saver.output_dir / "metrics.jsonl")
        own = is_own(source, saver.writer.root)
        is_over = own and state.finished and all((saver.output_dir / name).exists() for name in ("config.yaml", "run.json"))
        display.resume(state.num_steps(train.global_batch_size), state.step)
        _show_resume(source, state, train.global_batch_size, notes, state.events - len(events) if own else 0, say)
        came = [] if own else [f"resumed from a checkpoint of another run, {source}"]
        state.resume(len(events), [] if is_over else [*came, *notes])  # else the files say what the weights were made with
        add_reads(config, state.settings_read)
        ckpt.restore_random_state(saved.random)
    elif accelerator.is_main_process:
        output.clear_metrics(saver.output_dir)

    def describe() -> None:
        output.write_config(config)
        write_run_card(
            saver.output_dir / "run.json", accelerator, config, saver.model, train, saver.optimizer, state.continued, say,
            state.reference_made_of, files,
        )  # fmt: skip

    if not is_over:
        on_main(accelerator, describe)
    trackers = open_trackers(accelerator, config, state.trackers, state.step, say)
    trackers.catch_up(events)
    window = Window(steps=state.window, seconds=state.window_seconds, waiting=state.window_waiting)
    return Run(
        accelerator, config, saver.model, saver.optimizer, train, state, saver, Records(saver.output_dir, display, trackers),
        saver.stop, heartbeat, kept, events, window,
    )  # fmt: skip


def _show_resume(source: Path, state: RunState, global_batch_size: int, notes: list[str], lost: int, say: Any) -> None:
    say(f"Resumed from {source} at step {state.step} of {state.num_steps(global_batch_size)}")
    for note in notes:
        say(f"  {note}")
    if lost > 0:
        say(
            f"WARNING: metrics.jsonl lacks {lost} of the {state.events} lines that were logged by then: it was damaged or "
            "removed. The history, and early stopping with it, goes by those that are left"
        )


def _leave_in_time(run: Run) -> NoReturn:
    """The deadline is near: save if the weights are those of a whole step, then leave, without waiting for another rank."""
    if run.between_steps:
        last = [event for event in run.events if event["step"] == run.step]
        is_evaluated = any(name.startswith("eval_") for event in last for name in event)
        run.read_window()
        owed = run.due("eval") and not is_evaluated
        run.saver.save_alone(replace(run.snapshot(), evaluation_is_owed=owed), run.kept)
    run.saver.report(wait=True)
    number = run.stop.number or signal.SIGTERM
    leave(interruption(number, run.step, how_to_continue(run.checkpoints, run.config), run.config), run.heartbeat)


def _close(run: Run, status: str) -> None:
    """Finish what is being written, and write summary.json."""
    run.end(status)
    values = run.summary.metrics
    if run.accelerator.is_main_process:
        try:
            output.write_summary(run.output_dir, run.summary)
            end_run_card(run.output_dir / "run.json", status, run.seconds, values, run.config, run.say)
        except OSError as error:
            run.say(f"WARNING: no summary.json: {error}")
    run.records.trackers.close(lambda: _files_for_trackers(run), hurried=status == "interrupted")
    if verdict := verdict_of(status, values, run.config):
        run.say(verdict)
    run.records.display.close()


def _files_for_trackers(run: Run) -> list[Path]:
    """The run card and a report, for trackers that keep files."""
    from toolkit.report import write_report

    report = run.output_dir / "trackers" / "report.html"
    report.parent.mkdir(exist_ok=True)
    try:
        write_report([run.output_dir], report)
    except Exception as error:  # a report is not worth a run
        run.say(f"WARNING: no report for the trackers: {type(error).__name__}: {error}")
    return [run.output_dir / "run.json", report]
