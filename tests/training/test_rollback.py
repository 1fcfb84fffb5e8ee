"""After a spike of the loss: back to the last good checkpoint, past the rows of the steps since, to the bit."""

import copy
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from tests.training.test_run import Config, loss_fn, train, weights
from toolkit import checkpoint as ckpt
from toolkit.distillation.own_teacher import Average
from toolkit.distillation.teacher import Teacher, keep_teacher, update_teacher
from toolkit.system.interruptions import Interrupted
from toolkit.system.json_lines import read_lines
from toolkit.training.anomalies import Diverged

SPIKE, SAVED = 61, 50


def settings(directory: Path, **other: Any) -> Config:
    common: dict[str, Any] = {"loss_spike": "rollback", "num_train_epochs": 20.0, "save_strategy": "steps", "save_steps": 25}
    return Config(output_dir=str(directory), **common | other)


def spiking(*steps: int) -> dict[str, Any]:
    """A loss and a gradient that are 30 times too large in some steps, by the step and not by the call."""
    now = {}

    def spiked(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        loss, metrics = loss_fn(model, micro_batch, totals)
        return loss * (30 if now["step"] in steps else 1), metrics

    return {"step_loss": spiked, "before_step": lambda run: now.update(step=run.step)}


def test_a_rollback_ends_with_the_bits_of_a_run_whose_weights_were_put_back_by_hand(tmp_path: Path) -> None:
    """Also the moments, the applied steps, memory and kept tensors. Fails when: the optimizer is left as it is (`roll_back`
    applies the state to the model alone), recent losses keep the spike, or its step is logged with the checkpoint's rate."""
    saved: dict[str, Any] = {}

    def by_hand(run: tk.Run) -> None:
        if run.step == SAVED:
            saved.update(copy.deepcopy({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}))
        if run.step == SPIKE:
            run.model.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])

    expected, _ = train(settings(tmp_path / "by_hand", loss_spike="warn"), by_hand, **spiking(SPIKE))
    counter = torch.zeros(())

    def remember(run: tk.Run) -> None:
        run.memory["seen"] = run.memory.get("seen", 0) + 1
        run.keep("seen", counter.add_(1))

    model, run = train(settings(tmp_path / "run"), remember, **spiking(SPIKE))
    assert torch.equal(weights(model), weights(expected))
    # 50 steps, then the one of the spike, counted after the rollback, and 13 more
    assert (run.step, run.state.applied, run.memory["seen"], counter.item()) == (74, 63, 64, 64)
    (record,) = read_lines(tmp_path / "run/incidents/rollbacks.jsonl")
    assert record == {"step": SPIKE, "weights_of_step": SAVED, "first_example": 6 * SAVED, "end_example": 6 * SPIKE}
    events = read_lines(tmp_path / "run/metrics.jsonl")
    assert [event["step"] for event in events] == list(range(1, 75))
    rates = [event["learning_rate"] for event in read_lines(tmp_path / "by_hand/metrics.jsonl")]
    assert [event["learning_rate"] for event in events] == rates
    assert max(run.state.recent_losses) < 10
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["rollbacks"], summary["loss_spikes"]) == (1, 1)


@pytest.mark.parametrize(("stop_at", "background"), [(55, False), (SPIKE, True), (65, False)])
def test_a_rollback_does_not_depend_on_when_a_run_was_stopped_and_resumed(tmp_path: Path, stop_at: int, background: bool) -> None:
    """Stopped before the spike, in its step, and behind it; one checkpoint is kept. Fails when: the checkpoint of a signal counts
    as one to go back to (`last_due_save` set by every save), or the one that is due is pruned for it."""
    expected, _ = train(settings(tmp_path / "whole"), **spiking(SPIKE))
    config = settings(tmp_path / "run", save_total_limit=1, async_save=background)
    with pytest.raises(Interrupted):
        train(config, lambda run: os.kill(os.getpid(), signal.SIGTERM) if run.step == stop_at else None, **spiking(SPIKE))
    model, run = train(replace(config, resume=True), **spiking(SPIKE))
    assert torch.equal(weights(model), weights(expected))
    assert run.state.rollbacks == [[SPIKE, SAVED]]
    assert [path.name for path in ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == ["step-74"]


def test_a_rollback_that_a_crash_undid_is_done_and_recorded_once(tmp_path: Path) -> None:
    """Behind it, before the next checkpoint. Fails when: the records of steps that are taken again stay."""
    expected, _ = train(settings(tmp_path / "whole"), **spiking(SPIKE))
    config = settings(tmp_path / "run")

    def crash(run: tk.Run) -> None:
        if run.step == SPIKE + 2:
            raise KeyError("a crash")

    with pytest.raises(KeyError):
        train(config, crash, **spiking(SPIKE))
    model, _ = train(replace(config, resume=True), **spiking(SPIKE))
    assert torch.equal(weights(model), weights(expected))
    for name in ("loss_spikes", "rollbacks"):
        (record,) = read_lines(tmp_path / f"run/incidents/{name}.jsonl")
        assert record["step"] == SPIKE


def test_a_teacher_in_half_precision_goes_back_with_its_averages(tmp_path: Path) -> None:
    """Its model has the averages before each step. Fails when: nothing is in `on_rollback`, or `roll_back` does not call it."""
    teachers: list[Teacher] = []

    def build(run: tk.Run) -> None:
        teachers.append(Teacher(lambda *_: torch.zeros(()), None, Average(copy.deepcopy(run.model).bfloat16(), 0.5)))
        keep_teacher(run, *teachers)

    spiked = spiking(SPIKE)

    def before_step(run: tk.Run) -> None:
        spiked["before_step"](run)
        (average,) = [teacher.average for teacher in teachers]
        for name, parameter in average.model.named_parameters():
            assert torch.equal(parameter, average.means[name].bfloat16()), run.step
        update_teacher(*teachers, run.model)

    _, run = train(settings(tmp_path / "run"), step_loss=spiked["step_loss"], before_step=before_step, before_training=build)
    assert run.state.rollbacks == [[SPIKE, SAVED]]


def test_a_loss_that_jumps_again_and_again_from_one_checkpoint_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And before there is a checkpoint a spike is a warning. Fails when: rollbacks are not counted, or the first spike raises."""
    config = settings(tmp_path / "run", save_steps=40)
    with pytest.raises(Diverged, match=r"\b4 times .*\bstep 40\b"):
        train(config, **spiking(35, 45, 50, 55, 60))
    assert re.search(r"--loss-spike rollback: .*no checkpoint", capsys.readouterr().out)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "diverged"
    assert ckpt.latest_checkpoint(tmp_path / "run/checkpoints").name == "step-40"


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    """Fails when: the newest is taken without a look at its digests."""

    def damage(run: tk.Run) -> None:
        if run.step == 60:
            path = run.checkpoints / "step-50/model.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    _, run = train(settings(tmp_path / "run"), damage, **spiking(SPIKE))
    assert run.state.rollbacks == [[SPIKE, 25]]
