"""What a run sends to the Hub, and when: a check before the first step, a queue while it trains, a bounded wait at its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.checkpoint import read_pointer
from toolkit.config import Refusal
from toolkit.distributed.engines import engine_of
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.distributed.ranks import on_main
from toolkit.export.card import with_name
from toolkit.export.model_directory import card_of_run, write_model
from toolkit.hub.client import NotNow, check_write_access, hub_api
from toolkit.hub.files import WEIGHTS, checkpoint_files, collect, has_same_tensors, model_files
from toolkit.hub.queue import QUEUE, Job, add_job, clean_queue, leave_out_replaced, list_jobs
from toolkit.hub.sender import start_sender
from toolkit.models.adapter_files import is_adapted, warning_of_base
from toolkit.runs.summary import evaluations_by_step
from toolkit.system.console import as_typed
from toolkit.system.interruptions import OutOfTime

LONGEST_WAIT = 1800.0  # seconds at the end of a run, while something still goes up
PATIENCE = 30.0  # seconds at the end of a run, while nothing does


def save_to_hub(run: Any) -> None:
    """Send `output_dir/model` to the Hub when --push-to-hub is given; `save_model` has written it.

    Nothing is raised: what can't be sent is kept in `output_dir/hub_queue`, and `toolkit push` sends it later. Inside
    `open_run` this only adds to the queue; the wait for it comes at the end of the run.
    """
    if run.uploads is not None:
        run.uploads.send_model()


@contextlib.contextmanager
def hub_uploads(run: Any) -> Iterator[None]:
    """While the run is open, send what its `hub_strategy` says. Whether we may is found out before the first step.

    Raises:
        Refusal: no write access, or no way to write models in between.
    """
    if not run.config.push_to_hub:
        yield
        return
    repo_id = on_main(run.accelerator, lambda: _find_repository(run))
    if not run.accelerator.is_main_process:
        yield
        return
    uploads = run.uploads = Uploads(run, repo_id)
    try:
        yield
    except BaseException:
        uploads.leave()
        raise
    uploads.finish()


class Uploads:
    """The queue of a run, on its main process."""

    def __init__(self, run: Any, repo_id: str) -> None:
        self.run, self.repo_id, self.queue = run, repo_id, run.output_dir / QUEUE
        self.is_open, self.warned = True, False
        self.beside_weights: dict[str, bytes] | None = None  # of a model whose weights are a checkpoint's file as it is
        self.sender: subprocess.Popen[bytes] | None = None
        clean_queue(self.queue)
        if list_jobs(self.queue):
            self.sender = start_sender(self.queue)

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is on the disk: send what the strategy sends of it. Costs a warning when that fails."""
        run, strategy = self.run, self.run.config.hub_strategy
        best = read_pointer(run.checkpoints, "best")
        if strategy == "end" or (strategy == "best" and (best is None or best.name != checkpoint.name)):
            return
        step, stopping = int(checkpoint.name.removeprefix("step-")), run.stop.number is not None
        if stopping and strategy != "checkpoint":  # a model takes time to write, and the run that goes on has it again
            return

        def fill(files: Path) -> None:
            if not stopping:
                self._add_model(checkpoint, step, files)
            if strategy == "checkpoint":
                collect(checkpoint_files(checkpoint), files)

        self._add(f"{'Checkpoint' if stopping else 'Training in progress'}, step {step}", checkpoint.name, fill)

    def send_model(self) -> None:
        """Send the final model; with the strategy "best" only if it is that."""
        run = self.run
        run.finish_saves()  # a checkpoint that is still being written comes before
        best_step = run.best.get("step") if run.config.hub_strategy == "best" else None
        if best_step not in (None, run.step, run.figures_of):
            run.say(f"the Hub keeps the best model, of step {best_step}; the last one is in {run.output_dir / 'model'}")
            return

        def fill(files: Path) -> None:
            collect(model_files(run.output_dir / "model"), files)
            self._name_card(files)

        self._add(f"End of training, step {run.step}", "end", fill)
        if not self.is_open:
            self.finish()

    def finish(self) -> None:
        """Wait for what is still to be sent: while it gets on, and not for ever."""
        began = shown = time.monotonic()
        first, since = None, began
        try:
            while jobs := list_jobs(self.queue):
                now = time.monotonic()
                if self.sender is None or self.sender.poll() is not None or now - began > LONGEST_WAIT:
                    break
                if jobs[0].problem is None or jobs[0].folder != first:
                    first, since = jobs[0].folder, now
                if now - since > PATIENCE:
                    break
                if shown == began and now - began > 3:
                    self.run.say(f"waiting for the Hub: {len(jobs)} commit(s) to {self.repo_id}")
                    shown = now
                time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        if self.sender is not None and not list_jobs(self.queue):
            self.run.say(f"on the Hub: {hub_api().endpoint}/{self.repo_id}")
        self.leave()

    def leave(self) -> None:
        """Wait for nothing: what isn't sent yet stays in the queue, and is named."""
        self.is_open = False
        if self.sender is not None:
            self.sender.kill()  # at any moment: that is what the queue is for
            self.sender.wait()
            self.sender = None
        if jobs := list_jobs(self.queue):
            why = f" ({jobs[0].problem})" if jobs[0].problem else ""
            self.run.say(
                f"WARNING: not on the Hub yet: {len(jobs)} commit(s) to {self.repo_id}{why}. They are sent when this run goes "
                f"on, or with:\n  {as_typed('toolkit', 'push', self.run.output_dir)}"
            )
        else:
            shutil.rmtree(self.queue, ignore_errors=True)

    def _add(self, message: str, name: str, fill: Any) -> None:
        config = self.run.config
        job = Job(self.repo_id, message, config.hub_revision, config.hub_private_repo)
        try:
            add_job(self.queue, job, name, fill)
            for left_out in leave_out_replaced(self.queue):
                self.run.say(f"the Hub is behind: left out, as a later one brings it newer: {left_out.message}")
            if self.sender is None or self.sender.poll() is not None:  # refused before, it may be allowed by now
                self.sender = start_sender(self.queue)
        except OutOfTime:
            raise
        except Exception as error:  # whatever a disk or a library can say: training goes on
            self.run.say(f"WARNING: not sent to the Hub: {message}: {error}")

    def _add_model(self, checkpoint: Path, step: int, files: Path) -> None:
        """Put the model of a checkpoint under `files`; where its weights are the checkpoint's file, that is linked."""
        run, directory = self.run, files.with_name("model")
        evaluated = evaluations_by_step(event for event in run.events if event["step"] <= step)
        figures = evaluated[max(evaluated)] if evaluated else {}
        if self.beside_weights is not None:
            for name, content in self.beside_weights.items():
                (files / name).parent.mkdir(parents=True, exist_ok=True)
                (files / name).write_bytes(content)
            (files / "README.md").write_text(card_of_run(run.model, run.config, figures), encoding="utf-8")
            collect({WEIGHTS: checkpoint / WEIGHTS}, files)
        else:
            self._write_model(checkpoint, directory, figures)
            written = model_files(directory)
            collect(written, files)
            if has_same_tensors(directory / WEIGHTS, checkpoint / WEIGHTS):
                rest = written.keys() - {WEIGHTS, "README.md"}
                self.beside_weights = {name: written[name].read_bytes() for name in rest}
            shutil.rmtree(directory)
        self._name_card(files)

    def _write_model(self, checkpoint: Path, directory: Path, figures: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        run = self.run
        state = load_file(checkpoint / WEIGHTS)
        if not engine_of(run.accelerator).shards:
            state = (whole_state_dict(None, run.model) or {}) | state  # what is frozen isn't in a checkpoint
        write_model(directory, run.model, state, run.model.tokenizer, run.config, figures)

    def _name_card(self, files: Path) -> None:
        card = files / "README.md"
        if card.exists():
            card.write_text(with_name(card.read_text(encoding="utf-8"), self.repo_id), encoding="utf-8")


def _find_repository(run: Any) -> str:
    """The repository's name, once it is clear that we may write there."""
    config = run.config
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise Refusal("--push-to-hub needs the Hub, from which HF_HUB_OFFLINE keeps: unset it, or use toolkit push later.")
    if config.hub_strategy != "end":
        _check_models_in_between(run)
    if is_adapted(run.model):
        warning = warning_of_base(run.model.peft_config["default"].base_model_name_or_path, run.output_dir / "model")
        if warning:
            run.say(warning)
    wanted = config.hub_model_id or run.output_dir.absolute().name
    try:
        return check_write_access(hub_api(), wanted, config.hub_private_repo, config.hub_revision)
    except NotNow as error:
        run.say(f"WARNING: the Hub can't be asked whether we may write to {wanted} ({error}); what is sent waits in the queue")
        return str(wanted)


def _check_models_in_between(run: Any) -> None:
    take = f"--hub-strategy {run.config.hub_strategy} sends models while it trains"
    if getattr(run.model, "tokenizer", None) is None:
        raise Refusal(f"{take}, with their tokenizer: give it to tk.load_model, or take --hub-strategy end.")
    base_inside = is_adapted(run.model) and not run.model.peft_config["default"].base_model_name_or_path
    if base_inside and engine_of(run.accelerator).shards:
        raise Refusal(f"{take}, and of an adapter on a base made here the base is sharded: take --hub-strategy end.")
