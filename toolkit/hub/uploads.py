"""What a run sends to the Hub, and when: a check before the first step, a queue while it trains, a bounded wait at its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoint import read_pointer
from toolkit.config import ModelConfig, Refusal, RunConfig
from toolkit.distributed.engines import engine_of
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.distributed.ranks import on_main
from toolkit.export.model_directory import card_of_run, write_model
from toolkit.hub.client import NotNow, check_write_access, hub_api
from toolkit.hub.files import WEIGHTS, checkpoint_files, collect, has_same_tensors, model_files
from toolkit.hub.queue import QUEUE, Job, add_job, clean_queue, leave_out_replaced, list_jobs
from toolkit.hub.sender import start_sender
from toolkit.models.adapter_files import is_adapted, warning_of_base
from toolkit.models.loaded import loaded
from toolkit.runs.summary import Summary, evaluations_by_step, read_settings
from toolkit.system.console import as_typed
from toolkit.system.interruptions import OutOfTime

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST_WAIT = 1800.0  # seconds at the end of a run, while something still goes up
PATIENCE = 30.0  # seconds at the end of a run, while nothing does


@contextlib.contextmanager
def hub_uploads(
    accelerator: Accelerator, config: RunConfig, model: PreTrainedModel, files: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[Uploads | None]:
    """While a run is open, its uploads on the main process, where `push_to_hub` is set; at the end they are waited for.

    Whether we may write is found out before the first step. `files`: what a model directory holds next to the model, by path.

    Raises:
        Refusal: no write access, or no way to write models in between.
    """
    if not config.push_to_hub:
        yield None
        return
    shards = engine_of(accelerator).shards
    repo_id = on_main(accelerator, lambda: _find_repository(config, model, shards, say))
    if not accelerator.is_main_process:
        yield None
        return
    uploads = Uploads(repo_id, config, model, shards, files, say)
    try:
        yield uploads
    except BaseException:
        uploads.leave()
        raise
    uploads.finish()


class Uploads:
    """The queue of a run, on its main process. `model`: not wrapped; `shards`: whether a rank has a part of it alone."""

    def __init__(
        self, repo_id: str, config: RunConfig, model: PreTrainedModel, shards: bool, files: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.repo_id, self.config, self.model, self.shards, self.files, self.say = repo_id, config, model, shards, files, say
        self.output_dir = Path(config.output_dir)
        self.queue, self.is_open = self.output_dir / QUEUE, True
        self.beside_weights: dict[str, bytes] | None = None  # of a model whose weights are a checkpoint's file as it is
        self.sender: subprocess.Popen[bytes] | None = None
        clean_queue(self.queue)
        if list_jobs(self.queue):
            self.sender = start_sender(self.queue)

    def saved(self, checkpoint: Path, events: Iterable[Mapping[str, Any]], is_stopping: bool) -> None:
        """A checkpoint is on the disk: send what the strategy sends of it. Costs a warning when that fails.

        Args:
            events: the lines of metrics.jsonl, for the model card.
            is_stopping: the run is about to end by a signal, and is going to be resumed.
        """
        strategy, best = self.config.hub_strategy, read_pointer(checkpoint.parent, "best")
        if strategy == "end" or (strategy == "best" and (best is None or best.name != checkpoint.name)):
            return
        if is_stopping and strategy != "checkpoint":  # a model takes time to write, and the run that continues has it again
            return
        step = int(checkpoint.name.removeprefix("step-"))

        def fill(files: Path) -> None:
            if not is_stopping:
                self._add_model(checkpoint, step, files, events)
            if strategy == "checkpoint":
                collect(checkpoint_files(checkpoint), files)

        self._add(f"{'Checkpoint' if is_stopping else 'Training in progress'}, step {step}", checkpoint.name, fill)

    def send_model(self, step: int, best_step: int | None, model_step: int | None) -> None:
        """Send the final model; with the strategy "best" only if it is that.

        Args:
            step: the last one.
            best_step: the step of the best evaluation, if there was one.
            model_step: the step whose weights the model has, where these are not the last ones.
        """
        best_step = best_step if self.config.hub_strategy == "best" else None
        if best_step not in (None, step, model_step):
            self.say(f"the Hub keeps the best model, of step {best_step}; the last one is in {self.output_dir / 'model'}")
            return

        def fill(files: Path) -> None:
            collect(model_files(self.output_dir / "model"), files)

        self._add(f"End of training, step {step}", "end", fill)
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
                    self.say(f"waiting for the Hub: {len(jobs)} commit(s) to {self.repo_id}")
                    shown = now
                time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        if self.sender is not None and not list_jobs(self.queue):
            self.say(f"on the Hub: {hub_api().endpoint}/{self.repo_id}")
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
            self.say(
                f"WARNING: not on the Hub yet: {len(jobs)} commit(s) to {self.repo_id}{why}. They are sent when this run goes "
                f"on, or with:\n  {as_typed('toolkit', 'push', self.output_dir)}"
            )
        else:
            shutil.rmtree(self.queue, ignore_errors=True)

    def _add(self, message: str, name: str, fill: Callable[[Path], None]) -> None:
        config = self.config
        job = Job(self.repo_id, message, config.hub_revision, config.hub_private_repo)
        try:
            add_job(self.queue, job, name, fill)
            for left_out in leave_out_replaced(self.queue):
                self.say(f"the Hub is behind: left out, as a later one brings it newer: {left_out.message}")
            if self.sender is None or self.sender.poll() is not None:  # refused before, it may be allowed by now
                self.sender = start_sender(self.queue)
        except OutOfTime:
            raise
        except Exception as error:  # whatever a disk or a library can raise: training continues
            self.say(f"WARNING: not sent to the Hub: {message}: {error}")

    def _add_model(self, checkpoint: Path, step: int, files: Path, events: Iterable[Mapping[str, Any]]) -> None:
        """Put the model of a checkpoint under `files`; where its weights are the checkpoint's file, that is linked."""
        directory = files.with_name("model")
        evaluated = evaluations_by_step(event for event in events if event["step"] <= step)
        summary = Summary(evaluated[max(evaluated)] if evaluated else {}, read_settings(self.config))
        tokenizer = loaded(self.model).tokenizer
        assert tokenizer is not None  # checked before the first step
        card = card_of_run(self.model, tokenizer, self.output_dir, summary, self.files)
        if self.beside_weights is not None:
            for name, content in self.beside_weights.items():
                (files / name).parent.mkdir(parents=True, exist_ok=True)
                (files / name).write_bytes(content)
            (files / "README.md").write_text(card, encoding="utf-8")
            collect({WEIGHTS: checkpoint / WEIGHTS}, files)
        else:
            self._write_model(checkpoint, directory, tokenizer, card)
            written = model_files(directory)
            collect(written, files)
            if has_same_tensors(directory / WEIGHTS, checkpoint / WEIGHTS):
                rest = written.keys() - {WEIGHTS, "README.md"}
                self.beside_weights = {name: written[name].read_bytes() for name in rest}
            shutil.rmtree(directory)

    def _write_model(self, checkpoint: Path, directory: Path, tokenizer: PreTrainedTokenizerBase, card: str) -> None:
        from safetensors.torch import load_file

        state = load_file(checkpoint / WEIGHTS)
        if not self.shards:
            state = (whole_state_dict(None, self.model) or {}) | state  # what is frozen isn't in a checkpoint
        dtype = self.config.dtype if isinstance(self.config, ModelConfig) else "auto"
        write_model(directory, self.model, state, tokenizer, card, dtype, self.files)


def _find_repository(config: RunConfig, model: PreTrainedModel, shards: bool, say: Callable[[str], None]) -> str:
    """The repository's name, once it is clear that we may write there."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise Refusal("--push-to-hub needs the Hub, from which HF_HUB_OFFLINE keeps: unset it, or use toolkit push later.")
    if config.hub_strategy != "end":
        _check_models_in_between(config.hub_strategy, model, shards)
    output_dir = Path(config.output_dir)
    if is_adapted(model):
        base: Any = model.peft_config["default"].base_model_name_or_path
        if warning := warning_of_base(base, output_dir / "model"):
            say(warning)
    wanted = config.hub_model_id or output_dir.absolute().name
    try:
        return check_write_access(hub_api(), wanted, config.hub_private_repo, config.hub_revision)
    except NotNow as error:
        say(f"WARNING: the Hub can't be queried for write access to {wanted} ({error}); what is sent waits in the queue")
        return str(wanted)


def _check_models_in_between(strategy: str, model: PreTrainedModel, shards: bool) -> None:
    take = f"--hub-strategy {strategy} sends models while it trains"
    if loaded(model).tokenizer is None:
        raise Refusal(f"{take}, with their tokenizer: give it to tk.load_model, or take --hub-strategy end.")
    base_inside = is_adapted(model) and not model.peft_config["default"].base_model_name_or_path
    if base_inside and shards:
        raise Refusal(f"{take}, and of an adapter on a base made here the base is sharded: take --hub-strategy end.")
