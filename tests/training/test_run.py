"""The run: what is due when, exact logs, saving, resuming, stopping; on a model small enough to train in milliseconds."""

import ast
import copy
import itertools
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from torch import nn

import toolkit as tk
from toolkit import checkpoint as ckpt
from toolkit.data.loading.loaders import TrainLoader
from toolkit.runs.run_card import digests_of_settings, files_changed
from toolkit.system.console import own_ends
from toolkit.system.interruptions import Interrupted
from toolkit.system.json_lines import read_lines
from toolkit.tracking import resources
from toolkit.training.anomalies import Unstable, describe_row
from toolkit.training.run_state import RunState


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 3
    num_train_epochs: float = 3.0
    learning_rate: float = 1e-2
    eval_strategy: str = "no"
    save_strategy: str = "no"
    logging_steps: int = 1


class Bigram(nn.Module):
    """The next token from this one, with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.table, self.dropout = nn.Embedding(20, 20), nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.table(input_ids))


def loss_fn(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
    logits = model(micro_batch["input_ids"])[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum")
    return loss / totals["tokens"], {}


def rows(poisoned: int | None = None) -> DatasetDict:
    random_numbers = np.random.default_rng(0)
    ids = [random_numbers.integers(0, 20, size=int(n)).tolist() for n in random_numbers.integers(2, 9, size=22)]
    return DatasetDict(
        train=Dataset.from_dict({
            "input_ids": ids, "length": [len(i) for i in ids], "supervised_tokens": [len(i) - 1 for i in ids],
            "origin": [f"rows.jsonl:{i + 1}" for i in range(len(ids))],
        })
    )  # fmt: skip


def test_each_save_first_gives_what_is_free_back_to_the_system(tmp_path, monkeypatch):
    """Fails when: it is left out, and the heap of a long run falls into pieces that stay; benchmarks/leaks.py measures that."""
    given = []
    monkeypatch.setattr("toolkit.training.saving.give_back_memory", lambda: given.append(len(list(tmp_path.glob("run/checkpoints/step-*")))))
    train(Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=1, max_steps=2))
    assert given == [0, 1]


def train(config: Config, on_step=None, step_loss=loss_fn, before_step=None, before_training=None) -> tuple[nn.Module, tk.Run]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(config.seed)
    model = Bigram()
    torch.seed()  # whatever ran before: a step must not draw from it
    loader, _ = tk.build_dataloaders(rows(), tk.collate_padded, config, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    with tk.open_run(accelerator, config, model, optimizer, loader) as run:
        if before_training is not None:
            before_training(run)
        for batch in run:
            if before_step is not None:
                before_step(run)
            run.log(tk.train_step(accelerator, model, optimizer, batch, step_loss, [config.learning_rate * (1 - run.progress)]))
            if on_step is not None and on_step(run):
                break
    return model, run


def weights(model: nn.Module) -> torch.Tensor:
    return model.table.weight.detach().clone()


def test_a_samples_line_shows_what_tells_its_prompt_from_the_others() -> None:
    """Fails when: prompts are cut at their ends, show what the chat template adds to each, or lose their own last sign."""
    prompts = [f"<user> Say in one sentence what this Python function does. def {name}(): <end> <assistant>" for name in ("add", "mean")]
    assert [len(each) for each in own_ends(prompts, 20)] == [20, 20]
    assert [each[-8:] for each in own_ends(prompts, 20)] == [" def add", "def mean"]
    assert own_ends(["same", "same"], 9) == ["same", "same"]
    assert own_ends(["2+2=", "3+4="], 9) == ["2+2=", "3+4="]
    assert own_ends(["a  b"], 9) == ["a b"]


def test_the_trackers_of_a_resumed_run_are_told_of_the_lines_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: what a killed life had not sent is looked for by nobody."""
    config = Config(output_dir=str(tmp_path / "out"), save_strategy="steps", save_steps=4)
    train(config, lambda run: run.step == 5)
    reported: list[int] = []
    monkeypatch.setattr("toolkit.tracking.trackers.Trackers.catch_up", lambda self, events: reported.extend(event["step"] for event in events))
    train(replace(config, resume=True))
    assert reported == [1, 2, 3, 4]


def test_tokens_are_those_of_the_batch_that_a_recipe_has_made(tmp_path: Path) -> None:
    """Of each step three more than the data have, as of answers that the model writes. Fails when: those of the data count."""
    config = Config(output_dir=str(tmp_path / "run"), logging_steps=1, max_steps=3)
    accelerator = Accelerator(cpu=True)
    model, (loader, _) = Bigram(), tk.build_dataloaders(rows(), tk.collate_padded, config, accelerator)
    optimizer, expected = torch.optim.AdamW(model.parameters()), [0.0]
    with tk.open_run(accelerator, config, model, optimizer, loader) as run:
        for batch in run:
            batch = replace(batch, totals={**batch.totals, "tokens": batch.totals["tokens"] + 3})
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, [1e-3]), batch)
            expected.append(expected[-1] + batch.totals["tokens"])
    assert [event["supervised_tokens"] for event in run.events] == expected[1:]
    of_an_example = [event["tokens_per_second"] / event["examples_per_second"] for event in run.events]
    assert of_an_example == pytest.approx([(after - before) / 6 for before, after in itertools.pairwise(expected)])


def test_a_checkpoint_holds_the_fields_of_the_state_and_gives_them_back(tmp_path: Path) -> None:
    """Every field, with another value than its default where the run has one. Fails when: a field is left out of `record`, a key
    is written that is no field, or `from_record` forgets one."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=4, logging_steps=3, max_steps=4)

    def remember(run: tk.Run) -> None:
        run.memory["counts"] = Counter({"a": 2})
        if run.step == 2:
            run.log({"eval_loss": 1.0})

    _, run = train(config, remember)
    written = json.loads((tmp_path / "run/checkpoints/step-4/state.json").read_text())["run"]
    assert written.keys() == {field.name for field in fields(RunState)}
    assert json.loads(json.dumps(RunState.from_record(written).record())) == written
    assert (written["step"], written["position"], written["objective"], written["events"]) == (4, 24, [1.0], 3)
    assert [step["step"] for step in written["window"]] == []
    assert written["memory"] == {"counts": {"a": 2}}
    assert written["best"] == {"name": "eval_loss", "value": 1.0, "step": 2, "sign": -1}
    assert RunState.from_record({"step": 4, "of_another_version": 1}) == RunState(step=4)
    assert run.state.memory is run.memory


def test_a_resumed_state_counts_the_lines_that_are_left_and_lists_what_has_changed() -> None:
    """Fails when: lines that were lost are counted again at the next resume, or earlier changes are forgotten."""
    state = RunState(step=7, events=5, continued=["step 3: once"])
    state.resume(2, ["lr 1e-3 -> 1e-4"])
    assert (state.events, state.continued) == (2, ["step 3: once", "step 7: lr 1e-3 -> 1e-4"])


def test_asking_what_is_due_changes_nothing(tmp_path: Path) -> None:
    """Also an evaluation that is owed stays owed until the next step. Fails when: `due` resets it, or nothing does."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=4, max_steps=8)
    train(config, lambda run: run.step == 5)
    path = tmp_path / "run/checkpoints/step-4"
    state = ckpt.load_checkpoint(path)
    state.run["evaluation_is_owed"] = True
    shutil.rmtree(path)
    ckpt.save_checkpoint(path.parent, 4, state)
    accelerator, model = Accelerator(cpu=True), Bigram()
    loader, _ = tk.build_dataloaders(rows(), tk.collate_padded, config, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tk.open_run(accelerator, replace(config, resume=True), model, optimizer, loader) as run:
        before = copy.deepcopy(run.state)
        asked = [run.due(what) for what in ("eval_on_start", "eval", "log", "save") for _ in range(2)]
        assert asked[:2] == [True, True]
        assert run.state == before
        for batch in run:
            assert not run.due("eval_on_start")
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, [1e-3]))
            break


def test_only_the_run_changes_itself() -> None:
    """No file of the package assigns to a run's attributes, or types a run as Any. Fails when: `run.status = "failed"` is
    written in training/opening.py, or `run: Any` anywhere."""
    package, found = Path(tk.__file__).parent, []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
            names = [ast.unparse(each) for target in targets for each in ast.walk(target) if isinstance(each, ast.Attribute)]
            found += [f"{path.name}: {name}" for name in names if name.startswith("run.")]
            if isinstance(node, ast.arg) and node.arg == "run" and (node.annotation is None or ast.unparse(node.annotation) == "Any"):
                found.append(f"{path.name}: an argument `run`")
    assert found == []


def test_what_is_to_be_beaten_is_asked_for_where_something_is_evaluated() -> None:
    """Fails when: baselines are looked for though nothing will be compared with them."""
    asked: list[Any] = []
    for strategy, metrics in (("no", []), ("epoch", []), ("epoch", ["f1"]), ("epoch", ["f1", "accuracy"]), ("epoch", ["my_module.py"])):
        config = SimpleNamespace(eval_strategy=strategy, metrics=metrics)
        run = SimpleNamespace(step=0, accelerator=SimpleNamespace(is_main_process=True), config=config)
        tk.Run.compare_with(run, "eval_accuracy", lambda config=config: asked.append((config.eval_strategy, config.metrics)) or {})
    assert asked == [("epoch", []), ("epoch", ["f1", "accuracy"]), ("epoch", ["my_module.py"])]


def test_metrics_file_has_the_exact_loss_of_each_step_and_one_line_a_step(tmp_path: Path) -> None:
    """Logging every fourth step writes the mean of those four. Fails when: a window is averaged over the wrong steps."""
    train(Config(output_dir=str(tmp_path / "each")))
    train(Config(output_dir=str(tmp_path / "fourth"), logging_steps=4))
    each, fourth = read_lines(tmp_path / "each/metrics.jsonl"), read_lines(tmp_path / "fourth/metrics.jsonl")
    assert [e["step"] for e in each] == list(range(1, 12))
    assert [e["step"] for e in fourth] == [4, 8, 11]
    losses = [e["loss"] for e in each]
    assert [e["loss"] for e in fourth] == pytest.approx([np.mean(losses[:4]), np.mean(losses[4:8]), np.mean(losses[8:])], rel=1e-12)
    assert {"step", "epoch", "examples", "time", "grad_norm", "learning_rate", "tokens_per_second", "supervised_tokens"} <= set(each[0])
    assert each[-1]["examples"] == 66
    assert each[-1]["epoch"] == 3


def test_a_step_whose_metrics_were_read_already_is_logged_as_one(tmp_path: Path) -> None:
    """As those of a loop that took `.item()` of each. Fails when: only tensors make a step, and the numbers are an evaluation's."""
    accelerator, model, config = Accelerator(cpu=True), Bigram(), Config(output_dir=str(tmp_path), logging_steps=4)
    loader, _ = tk.build_dataloaders(rows(), tk.collate_padded, config, accelerator)
    optimizer = torch.optim.AdamW(model.parameters())
    with tk.open_run(accelerator, config, model, optimizer, loader) as run:
        for batch in run:
            metrics = tk.train_step(accelerator, model, optimizer, batch, loss_fn, [1e-3])
            run.log({name: value.item() for name, value in metrics.items()})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [4, 8, 11]
    assert "tokens_per_second" in lines[0]


def test_rates_are_those_of_the_steps_without_what_happens_between_them(tmp_path: Path) -> None:
    """Half a second of "evaluation" after each step. Fails when: the clock runs on between steps."""
    train(Config(output_dir=str(tmp_path / "run"), max_steps=3), lambda run: time.sleep(0.5))
    events = read_lines(tmp_path / "run/metrics.jsonl")
    assert all(e["examples_per_second"] > 6 / 0.4 for e in events[1:])


def test_the_share_of_time_that_waits_for_data_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that take 50 ms to make, under steps that take 50 ms more. Fails when: the clock of `wait_for` is stopped early, or
    what was waited before an event counts in the next one, the warning is on the screen alone, or it ends the run."""
    batches = TrainLoader.batches

    def slow(self: Any, position: int = 0) -> Any:
        for batch in batches(self, position):
            time.sleep(0.05)
            yield batch

    monkeypatch.setattr(TrainLoader, "batches", slow)
    monkeypatch.setattr(resources, "LEAST_SECONDS", 0.1)
    config = Config(output_dir=str(tmp_path / "run"), max_steps=6, logging_steps=3, divergence="stop")  # which it is not
    train(config, before_step=lambda run: time.sleep(0.05))
    shares = [event["data_wait"] for event in read_lines(tmp_path / "run/metrics.jsonl")]
    assert all(0.3 < share < 0.6 for share in shares), shares
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], len(summary["warnings"])) == ("finished", 1)
    assert "waiting for data" in summary["warnings"][0]


def test_two_runs_with_the_same_settings_end_with_the_same_bits(tmp_path: Path) -> None:
    """Fails when: dropout is not seeded by the micro-batch."""
    first, _ = train(Config(output_dir=str(tmp_path / "a")))
    torch.rand(17)
    second, _ = train(Config(output_dir=str(tmp_path / "b"), logging_steps=5))
    assert torch.equal(weights(first), weights(second))


@pytest.mark.parametrize("stop_at", [1, 4, 7, 10])
def test_a_run_stopped_by_a_signal_and_resumed_ends_with_the_same_bits(tmp_path: Path, stop_at: int) -> None:
    """Dropout on, accumulation 3, steps across epochs, in the middle of an epoch. Fails when: the optimizer is not restored."""
    whole, _ = train(Config(output_dir=str(tmp_path / "whole")))
    config = Config(output_dir=str(tmp_path / "stopped"))

    def interrupt(run: tk.Run) -> None:
        if run.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=r"main\(dataclasses.replace\(config, resume=True\)\)") as caught:
        train(config, interrupt)  # by no command line
    assert caught.value.exit_code == 75
    assert not isinstance(caught.value, KeyboardInterrupt | Exception)  # not by a keyboard, and not to be passed over by a sweep
    assert json.loads((tmp_path / "stopped/summary.json").read_text())["status"] == "interrupted"
    resumed, run = train(replace(config, resume=True))
    assert torch.equal(weights(whole), weights(resumed))
    assert [e["step"] for e in read_lines(tmp_path / "stopped/metrics.jsonl")] == list(range(1, 12))
    losses = [[e["loss"] for e in read_lines(tmp_path / d / "metrics.jsonl")] for d in ("whole", "stopped")]
    assert losses[0] == losses[1]
    assert run.state.applied == 11


def test_a_crash_between_saves_is_resumed_from_the_last_one_without_a_step_twice(tmp_path: Path) -> None:
    """Fails when: metrics.jsonl is not cut back to the checkpoint's step."""
    whole, _ = train(Config(output_dir=str(tmp_path / "whole")))
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=3)

    def crash(run: tk.Run) -> None:
        if run.step == 8:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        train(config, crash)
    assert [p.name for p in ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == ["step-3", "step-6"]
    resumed, _ = train(replace(config, resume=True))
    assert torch.equal(weights(whole), weights(resumed))
    assert [e["step"] for e in read_lines(tmp_path / "run/metrics.jsonl")] == list(range(1, 12))


def test_an_output_directory_with_a_run_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    """Fails when: nobody looks whether a run is there."""
    config = Config(output_dir=str(tmp_path / "run"))
    train(config)
    with pytest.raises(tk.Refusal, match="--overwrite-output-dir"):
        train(config)
    (tmp_path / "run/notes.txt").write_text("mine")
    train(replace(config, overwrite_output_dir=True))
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 11


def test_a_directory_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    """Fails when: the lock is not taken."""
    config = Config(output_dir=str(tmp_path / "run"))

    def second_writer(run: tk.Run) -> None:
        with pytest.raises(tk.Refusal, match=f"--output-dir {tmp_path}/run: process {os.getpid()} on "):
            train(replace(config, overwrite_output_dir=True))

    train(replace(config, max_steps=1), second_writer)


def test_a_disk_that_is_too_small_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the free space is not compared with what is needed."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(tk.Refusal, match="free"):
        train(Config(output_dir=str(tmp_path / "run"), save_strategy="epoch"))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_is_a_warning_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Fails when: save() lets an OSError through."""
    whole, _ = train(Config(output_dir=str(tmp_path / "whole")))
    commit, calls = ckpt.directory._commit, []

    def sometimes_full(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        commit(*args)

    monkeypatch.setattr(ckpt.directory, "_commit", sometimes_full)
    model, _ = train(Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=3, save_total_limit=1))
    assert "No space left" in capsys.readouterr().out
    assert torch.equal(weights(whole), weights(model))
    assert [p.name for p in ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == ["step-11"]


def test_a_checkpoint_whose_pointer_cannot_be_written_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also for --save-error stop. Fails when: is_written is whether there was no error."""

    def full(root: Path, name: str, checkpoint: Path) -> None:
        raise OSError(28, "No space left on device", f"{root}/{name}.json")

    monkeypatch.setattr("toolkit.checkpoint.writer.write_pointer", full)
    _, run = train(Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=3, save_error="stop"))
    output = capsys.readouterr().out
    assert "last.json" in output
    assert "no checkpoint" not in output
    assert run.saver.failed == 0


def due_steps(tmp_path: Path, what: str, **settings: object) -> list[int]:
    seen = []
    config = Config(output_dir=str(tmp_path / f"run{len(list(tmp_path.iterdir()))}"), **settings)
    train(config, lambda run: seen.append(run.step) if run.due(what) else None)
    return seen


def test_what_a_notebook_shows_of_a_run_is_a_line(tmp_path: Path) -> None:
    """Fails when: `Run.__repr__` is removed: a dataclass shows the model, the data and every line of metrics.jsonl."""
    shown: list[str] = []
    train(Config(output_dir=str(tmp_path / "run"), max_steps=2), lambda run: shown.append(repr(run)))
    assert [f"step {step} of 2" in line for step, line in enumerate(shown, 1)] == [True, True]
    assert len(shown[0]) < 100 + len(str(tmp_path))


def test_strategies_say_when_something_is_due(tmp_path: Path) -> None:
    """Epochs of 22 examples in steps of 6: they end in steps 4, 8 and 11; the last step always counts. Fails when: an
    epoch's end inside a step is missed."""
    assert due_steps(tmp_path, "eval", eval_strategy="epoch") == [4, 8, 11]
    assert due_steps(tmp_path, "eval", eval_strategy="steps", eval_steps=5) == [5, 10, 11]
    assert due_steps(tmp_path, "eval", eval_strategy="steps", eval_steps=2, eval_delay=6) == [6, 8, 10, 11]
    assert due_steps(tmp_path, "eval", eval_strategy="epoch", eval_delay=2.0) == [8, 11]
    assert due_steps(tmp_path, "eval", eval_strategy="no") == []
    assert due_steps(tmp_path, "log", logging_strategy="epoch") == [4, 8, 11]


def test_the_best_weights_come_back_and_training_stops_when_nothing_improves(tmp_path: Path) -> None:
    """A made-up metric that is best at step 3, but for the evaluation before training, whose weights no checkpoint has.

    Fails when: the best checkpoint is pruned, the wrong direction is taken, or step 0 counts as the best or in the patience.
    """
    metrics = {0: 0.5, 1: 5.0, 2: 4.0, 3: 1.0, 4: 2.0, 5: 3.0, 6: 1.0}
    at_best: list[torch.Tensor] = []
    config = Config(
        output_dir=str(tmp_path / "run"), eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_total_limit=1,
        save_strategy="steps", save_steps=1, early_stopping_patience=3,
    )  # fmt: skip

    def evaluate(run: tk.Run) -> bool:
        if run.step == 3:
            at_best.append(weights(run.model))
        run.log({"eval_loss": metrics[run.step]})
        return tk.stopped_improving(run.history("eval_loss"), config.early_stopping_patience)

    model, run = train(config, evaluate, before_training=evaluate)
    assert run.step == 6
    assert run.history("eval_loss", from_step=0) == list(metrics.values())
    assert run.history("eval_loss") == list(metrics.values())[1:]
    assert not torch.equal(weights(model), at_best[0])
    tk.load_best(run)
    assert torch.equal(weights(model), at_best[0])
    assert run.state.best["step"] == 3
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "stopped early"


def test_a_pointer_that_cannot_be_written_costs_neither_the_run_nor_the_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each evaluation comes after its step was saved. Fails when: point_to_best() lets an OSError through, or load_best()
    takes what best.json shows."""
    metrics, at_best = {3: 2.0, 6: 1.0, 9: 3.0, 11: 4.0}, []
    config = Config(
        output_dir=str(tmp_path / "run"), eval_strategy="steps", eval_steps=3, load_best_model_at_end=True, save_total_limit=1,
        save_strategy="steps", save_steps=3,
    )  # fmt: skip
    write_pointer = ckpt.write_pointer

    def sometimes_full(root: Path, name: str, checkpoint: Path) -> None:
        if (name, checkpoint.name) == ("best", "step-6"):
            raise OSError(28, "No space left on device")
        write_pointer(root, name, checkpoint)

    for module in ("toolkit.checkpoint", "toolkit.checkpoint.writer"):
        monkeypatch.setattr(f"{module}.write_pointer", sometimes_full)

    def evaluate(run: tk.Run) -> None:
        if run.step in metrics:
            run.save()
            run.saver.check(run.step, wait=True)
            if run.step == 6:
                at_best.append(weights(run.model))
            run.log({"eval_loss": metrics[run.step]})

    model, run = train(config, evaluate)
    assert "best.json" in capsys.readouterr().out
    tk.load_best(run)
    assert torch.equal(weights(model), at_best[0])


def test_a_metric_named_without_its_prefix_is_that_of_the_evaluations(tmp_path: Path) -> None:
    """As in YAML of Trainer, whose default is `loss`; the loss of each step has the same name.

    Fails when: `history` takes the name as it is, where events have it.
    """
    config = Config(output_dir=str(tmp_path / "run"), eval_strategy="steps", eval_steps=1, max_steps=3, metric_for_best_model="loss")
    seen: list[list[float]] = []

    def evaluate(run: tk.Run) -> bool:
        run.log({"eval_loss": 10.0 + run.step})
        seen.append(run.history(config.metric_for_best_model))
        return False

    _, run = train(config, evaluate)
    assert seen == [[11.0], [11.0, 12.0], [11.0, 12.0, 13.0]]
    assert len(run.history("grad_norm")) == 3


def test_numbers_of_numpy_are_logged_and_what_is_no_number_is_named(tmp_path: Path) -> None:
    """As a metric of the user's returns them. Fails when: one of NumPy's types reaches JSON, or another value does."""
    config = Config(output_dir=str(tmp_path / "run"), eval_strategy="steps", eval_steps=1, max_steps=1)
    metrics = {"eval_loss": np.float32(0.5), "eval_count": np.int64(3), "eval_one": np.array([2.0])}
    _, run = train(config, lambda run: run.log(metrics))
    assert [run.history(name) for name in metrics] == [[0.5], [3], [2.0]]
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {name: logged[-1][name] for name in metrics} == metrics
    for value in (np.zeros(2), "much", None):
        with pytest.raises(TypeError, match=rf"eval_of_mine .*{type(value).__name__}"):
            train(replace(config, overwrite_output_dir=True), lambda run, value=value: run.log({"eval_loss": 1.0, "eval_of_mine": value}))


@pytest.mark.parametrize("first", ["eval_loss", "eval_second"])
def test_metrics_that_are_logged_in_several_calls_at_one_step_are_one_evaluation(tmp_path: Path, first: str) -> None:
    """Fails when: the summary takes the last call of a step alone, or a call without the deciding metric is refused."""
    config = Config(
        output_dir=str(tmp_path / "run"), eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_strategy="steps",
        save_steps=2, max_steps=6,
    )  # fmt: skip
    losses = {2: 5.0, 4: 1.0, 6: 3.0}

    def evaluate(run: tk.Run) -> None:
        if run.due("eval"):
            metrics = {"eval_loss": losses[run.step], "eval_second": 10.0 + run.step}
            for name in (first, *(metrics.keys() - {first})):
                run.log({name: metrics[name]})
            run.log({"of_my_own": 1.0})
            if run.finished:
                tk.load_best(run)

    train(config, evaluate)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    wanted = {"eval_loss": 1.0, "eval_second": 14.0, "first_eval_loss": 5.0, "first_eval_second": 12.0}
    assert {name: summary.get(name) for name in wanted} == wanted
    assert wanted.items() <= json.loads((tmp_path / "run/run.json").read_text())["end"]["figures"].items()
    with pytest.raises(tk.Refusal, match="metric-for-best-model"):
        train(replace(config, output_dir=str(tmp_path / "typo"), metric_for_best_model="eval_los"), evaluate)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stop_at", [None, 4])
def test_as_many_of_the_best_checkpoints_are_kept_as_asked_for(tmp_path: Path, background: bool, stop_at: int | None) -> None:
    """Against a sort of all evaluations, after every save; an older one of equal value wins. With a stop and a resume, too.

    Fails when: the second best is pruned once it is old, one that dropped out is kept, or the ranking is not in the checkpoint;
    the summary gives the metrics of the last evaluation for each.
    """
    metrics = {1: 5.0, 2: 2.0, 3: 4.0, 4: 1.0, 5: 2.0, 6: 9.0, 7: 3.0, 8: 8.0}
    config = Config(
        output_dir=str(tmp_path / "run"), eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_total_limit=1,
        save_strategy="steps", save_steps=1, save_best_limit=3, async_save=background, max_steps=8,
    )  # fmt: skip

    def evaluate(run: tk.Run) -> bool:
        run.log({"eval_loss": metrics[run.step], "eval_f1": 0.1 * run.step})
        return run.step == stop_at

    _, run = train(config, evaluate)
    if stop_at is not None:
        _, run = train(replace(config, resume=True), lambda run: run.log({"eval_loss": metrics[run.step], "eval_f1": 0.1 * run.step}))
    best = sorted(metrics, key=lambda step: (metrics[step], step))[:3]
    assert best == [4, 2, 5]
    assert {path.name for path in ckpt.list_checkpoints(tmp_path / "run/checkpoints")} == {f"step-{step}" for step in (*best, 8)}
    pointer = ckpt.read_pointer(tmp_path / "run/checkpoints", "best")
    assert pointer is not None
    assert pointer.name == "step-4"
    listed = [{"step": step, "eval_loss": metrics[step], "eval_f1": 0.1 * step} for step in best]
    assert run.summary.metrics["best_checkpoints"] == listed


def test_steps_that_are_not_finite_are_skipped_named_and_end_the_run_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Fails when: the guard forgets to reset, or a skipped step enters the logged mean."""

    def poisoned(bad_steps: set[int]):
        calls = iter(range(10_000))

        def loss(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
            value, metrics = loss_fn(model, micro_batch, totals)
            return (value * float("nan") if next(calls) // 3 + 1 in bad_steps else value), metrics

        return loss

    _, run = train(Config(output_dir=str(tmp_path / "a"), logging_steps=4), step_loss=poisoned({2, 3, 5}))
    assert (run.step, run.state.applied) == (11, 8)
    events = read_lines(tmp_path / "a/metrics.jsonl")
    assert [e.get("nonfinite_steps") for e in events] == [2, 1, None]
    assert all(np.isfinite(e["loss"]) for e in events)
    incidents = read_lines(tmp_path / "a/incidents/nonfinite.jsonl")
    assert [i["step"] for i in incidents] == [2, 3, 5]
    row = incidents[0]["rows"][0]
    example = row["example"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.data.sources.find_files._GIVEN", {"rows.jsonl": "data/rows.jsonl"})
        assert describe_row(run.train, example)["origin"] == [f"data/rows.jsonl:{example + 1}"]
    assert row["origin"] == [f"rows.jsonl:{row['example'] + 1}"]
    assert row["input_ids"] == [rows()["train"][row["example"]]["input_ids"]]
    assert "step 2 skipped" in capsys.readouterr().out

    with pytest.raises(Unstable, match="3 step"):
        train(Config(output_dir=str(tmp_path / "b")), step_loss=poisoned({3, 4, 5}))
    with pytest.raises(Unstable, match="step 3"):
        train(Config(output_dir=str(tmp_path / "c"), nonfinite="stop"), step_loss=poisoned({3}))


def test_memory_and_kept_tensors_of_user_code_survive_a_resume(tmp_path: Path) -> None:
    """Fails when: what `run.keep` was given is not in the checkpoint."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2)

    def remember(run: tk.Run) -> bool:
        run.memory["seen"] = run.memory.get("seen", 0) + 1
        run.keep("average", run.kept.get("average", torch.zeros(())) + 1)
        if run.step == 4 and not config.resume:
            raise RuntimeError
        return False

    with pytest.raises(RuntimeError):
        train(config, remember)
    config = replace(config, resume=True)
    _, run = train(config, remember)
    assert run.memory["seen"] == 11
    assert run.kept["average"].item() == 11


@pytest.mark.parametrize("background", [False, True])
def test_a_dictionary_of_kept_tensors_survives_a_resume_bit_for_bit(tmp_path: Path, background: bool) -> None:
    """An average of the weights that is changed in place, next to a run that never stopped. `tied` is the same memory twice, and
    names with a slash are kept apart. Fails when: `keep` takes tensors alone, `_savable` does not clone, or `flatten`
    writes a key's slash as it is."""

    def average(run: tk.Run) -> bool:
        ema = run.kept.get("ema")
        if ema is None:
            table = weights(run.model)
            ema = {"table": table, "tied": table, "a/b": {"c": torch.zeros(2)}, "a": {"b/c": torch.ones(2)}}
            run.keep("ema", ema)
        ema["table"].lerp_(weights(run.model), 0.3)
        if stops and run.step == 5:
            raise RuntimeError
        return False

    stops, config = False, Config(output_dir=str(tmp_path / "a"), save_strategy="steps", save_steps=2, async_save=background)
    _, whole = train(config, average)
    stops, config = True, replace(config, output_dir=str(tmp_path / "b"))
    with pytest.raises(RuntimeError):
        train(config, average)
    stops = False
    _, resumed = train(replace(config, resume=True), average)
    assert torch.equal(resumed.kept["ema"]["table"], whole.kept["ema"]["table"])
    assert resumed.kept["ema"]["a/b"]["c"].tolist() == [0, 0]
    assert resumed.kept["ema"]["a"]["b/c"].tolist() == [1, 1]
    with pytest.raises(TypeError, match=r"ema'\]\['decay'\] .*\bfloat\b"):
        resumed.keep("ema", {"decay": 0.9})


def test_other_data_than_the_checkpoint_was_trained_on_is_refused(tmp_path: Path) -> None:
    """The fingerprint in the checkpoint is changed, as if it came from another dataset. Fails when: it is not compared."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, max_steps=4)
    train(config)
    path = tmp_path / "run/checkpoints/step-4"
    state = ckpt.load_checkpoint(path)
    state.run["fingerprint"] = "another"
    ckpt.save_checkpoint(path.parent, 5, state)
    with pytest.raises(tk.Refusal, match="training data are not those"):
        train(replace(config, resume=True))


@pytest.mark.parametrize("earlier", ["3cd29ec97b62b262-rows", f"tokenized-{'0' * 24}-rows", "-rows"])
def test_data_of_an_earlier_version_s_fingerprint_are_called_incomparable_and_the_run_goes_on(tmp_path: Path, capsys, earlier: str) -> None:
    """Fails when: an earlier fingerprint is compared, and the run refused, or nothing is said."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, max_steps=4)
    train(config)
    path = tmp_path / "run/checkpoints/step-4"
    state = ckpt.load_checkpoint(path)
    state.run["fingerprint"] = earlier
    shutil.rmtree(path)
    ckpt.save_checkpoint(path.parent, 4, state)
    train(replace(config, resume=True))
    assert "the data can't be compared" in capsys.readouterr().out


def test_random_numbers_of_user_code_go_on_after_a_resume(tmp_path: Path) -> None:
    """torch's, NumPy's and random's, drawn before each step, whose forward seeds them again.

    Fails when: restore_random_state is not called, or too early.
    """
    import random

    def drawing(into: list):
        return lambda run: into.append((torch.rand(()).item(), np.random.rand(), random.random()))

    whole: list = []
    config = Config(output_dir=str(tmp_path / "whole"))
    train(config, before_step=drawing(whole))
    parts: list = []
    config = replace(config, output_dir=str(tmp_path / "parts"), save_strategy="steps", save_steps=2)

    def dies_after_five(run: tk.Run) -> bool:
        if run.step == 5:
            raise KeyError("dies")
        return False

    with pytest.raises(KeyError):
        train(config, dies_after_five, before_step=drawing(parts))
    del parts[4:]  # the checkpoint is that of step 4
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    train(replace(config, resume=True), before_step=drawing(parts))
    assert parts[1:] == whole[1:]  # what comes before the first step of all is not the run's


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, "dropout masks differ"),
        ({"per_device_train_batch_size": 1}, "none is lost"),
        ({"logging_steps": 2, "save_total_limit": 5, "run_name": "other"}, None),
    ],
)
def test_what_changes_randomness_is_said_and_what_changes_nothing_is_not(tmp_path: Path, capsys, changed: dict, reported: str | None) -> None:
    """Fails when: a setting declares another `on_resume`, or the checkpoint doesn't hold the settings."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2)
    train(config, lambda run: run.step == 5)
    capsys.readouterr()
    train(replace(config, resume=True, **changed))
    lines = [line for line in capsys.readouterr().out.splitlines() if " was " in line and " is " in line]
    assert (reported in " ".join(lines)) if reported else not lines


def test_a_file_with_another_content_is_named_once(tmp_path: Path, capsys) -> None:
    """Not that of data whose rows are compared anyway. Fails when: `_begin` does not look for `files_changed`, or for all of them."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("dataset", "chat_template")}
    config = Config(
        output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, **{name: str(path) for name, path in files.items()}
    )
    named = []
    for step, row in enumerate(("one", "one", "two", "two"), start=3):
        for path in files.values():
            path.write_text(f'{{"text": "{row}"}}\n')
        capsys.readouterr()
        train(replace(config, resume=step > 3), lambda run, step=step: run.step == step)
        named.append(re.findall(r"(\w+)\.jsonl has another content", capsys.readouterr().out))
    assert named == [[], [], ["chat_template"], []]
    files["dataset"].write_text("three")
    of_stream = files_changed(tmp_path / "run/run.json", digests_of_settings(config), config, with_data=True)
    assert [re.findall(r"\w+\.jsonl", line) for line in of_stream] == [["dataset.jsonl"]]


def test_what_changes_the_mathematics_is_refused_by_name_and_allowed_by_name(tmp_path: Path) -> None:
    """And nothing has changed when it is. Fails when: `changes_since` is called after apply_state, or a fixed setting is missed."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2)
    train(config, lambda run: run.step == 5)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    with pytest.raises(tk.Refusal, match=r"weight_decay .*\b0\.0 .*\b0\.1; .*--allow-change .*weight_decay") as refused:
        train(replace(config, resume=True, weight_decay=0.1, adam_beta1=0.8))
    assert re.search(r"adam_beta1 .*\b0\.9 .*\b0\.8\b", str(refused.value))
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    _, run = train(replace(config, resume=True, weight_decay=0.1, allow_change=["weight_decay"]))
    assert run.step == 11


@dataclass(frozen=True)
class PairsConfig(Config, tk.PreferenceConfig):
    """With a loss of pairs by name; the loss itself is the one of this file."""


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_another_micro_batch_is_another_loss_where_the_loss_compares_its_examples(tmp_path: Path, capsys, loss: str) -> None:
    """Same steps, other cuts: refused, allowed by name and then not called a matter of masks. The same cut continues.

    Fails when: `couples_a_micro_batch` is not asked, or the settings are compared in the place of the cut that there was.
    """
    config = PairsConfig(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, loss_type=["sft", loss])
    train(config, lambda run: run.step == 5)
    other = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(tk.Refusal, match=rf"\b2 examples .*\b3, .*--loss-type sft,{loss} .*--allow-change per_device_train"):
        train(replace(config, resume=True, **other))
    train(replace(config, resume=True), lambda run: run.step == 6)
    capsys.readouterr()
    train(replace(config, resume=True, allow_change=["per_device_train_batch_size"], **other))
    reported = capsys.readouterr().out
    assert re.search(r"per_device_train_batch_size .*\b2 .*\b3\b", reported)
    assert "dropout masks" not in reported


@pytest.mark.parametrize(("loss", "goes_on"), [("sigmoid", True), ("aot", False)])
def test_a_micro_batch_is_not_halved_where_that_would_be_another_loss(tmp_path: Path, loss: str, goes_on: bool) -> None:
    """Fails when: `fit_micro_batch` halves it for any loss."""
    config = PairsConfig(output_dir=str(tmp_path), per_device_train_batch_size=6, gradient_accumulation_steps=1, loss_type=[loss])
    accelerator, model = Accelerator(cpu=True), Bigram()
    loader, _ = tk.build_dataloaders(rows(), tk.collate_padded, config, accelerator)
    optimizer = torch.optim.AdamW(model.parameters())

    def needs_memory(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        if len(micro_batch["input_ids"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss_fn(model, micro_batch, totals)

    def fit() -> Any:
        return tk.fit_micro_batch(accelerator, model, optimizer, loader, needs_memory, config)

    if goes_on:
        assert fit().micro_batch_size == 3
    else:
        with pytest.raises(tk.Refusal, match=r"--loss-type aot .*--per-device-train-batch-size 3 --global-batch-size 6"):
            fit()


def test_a_loss_far_above_those_before_is_said_with_its_rows(tmp_path: Path, capsys) -> None:
    """Noise is not. Fails when: the spread is not robust, or the spike itself counts among those before."""
    config = Config(output_dir=str(tmp_path / "run"), num_train_epochs=20.0)

    def spiking(model: nn.Module, micro_batch: dict, totals: dict) -> tuple[torch.Tensor, dict]:
        loss, metrics = loss_fn(model, micro_batch, totals)
        spiking.calls += 1
        return loss * (30 if spiking.calls in (181, 182, 183) else 1), metrics

    spiking.calls = 0
    _, run = train(config, step_loss=spiking)
    assert run.summary.metrics["loss_spikes"] == 1
    (record,) = read_lines(tmp_path / "run/incidents/loss_spikes.jsonl")
    assert record["step"] == 61
    assert record["rows"][0]["origin"][0].startswith("rows.jsonl:")
    assert capsys.readouterr().out.count("WARNING: step 61: loss") == 1


def test_a_refusal_in_the_middle_keeps_what_was_saved(tmp_path: Path) -> None:
    """And says what continues it. Before anything was logged. Fails when: the directory of a refused run is removed unless
    metrics.jsonl is there; open_run leaves a refusal as it is."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, logging_strategy="no")

    def refuses(run: tk.Run) -> bool:
        if run.step == 5:
            raise tk.Refusal("no such metric")
        return False

    with pytest.raises(tk.Refusal, match=r"(?s)no such metric\n.*checkpoints/step-4 .*resume=True"):
        train(config, refuses)
    assert [path.name for path in ckpt.list_checkpoints(tmp_path / "run/checkpoints")] == ["step-2", "step-4"]


@pytest.mark.parametrize("accumulation", [1, 5])
def test_a_run_continued_with_another_batch_ends_after_the_same_examples(tmp_path: Path, accumulation: int) -> None:
    """--max-steps counts in the batches the run began with; the steps that are shown, in those of now.

    Fails when: the examples to consume are counted again at a resume; `num_steps` takes all of them for batches of now.
    """
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, max_steps=10)
    train(config, lambda run: run.step == 6)
    totals = set()

    def look(run: tk.Run) -> bool:
        totals.add(run.num_steps)
        return False

    _, run = train(replace(config, resume=True, gradient_accumulation_steps=accumulation), look)
    assert totals == {run.step}
    assert run.step == 4 + -(-6 * 6 // (2 * accumulation))  # from step 4's checkpoint
    assert run.position == 10 * 6
    assert run.progress < 1
    assert run.summary.metrics["status"] == "finished"


def test_an_evaluation_made_up_for_after_its_step_was_saved_can_be_the_best(tmp_path: Path) -> None:
    """As after a deadline cut it off. Fails when: `best` is only pointed at while its step is saved."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, save_total_limit=1)
    train(config, lambda run: run.step == 5)
    accelerator = Accelerator(cpu=True)
    model = Bigram()
    config = replace(config, resume=True)
    loader, _ = tk.build_dataloaders(rows(), tk.collate_padded, config, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tk.open_run(accelerator, config, model, optimizer, loader) as run:
        assert run.step == 4
        run.log({"eval_loss": 0.1})
        for batch in run:
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, [1e-3]))
    best = ckpt.read_pointer(tmp_path / "run/checkpoints", "best")
    assert best is not None
    assert best.name == "step-4"


def test_a_run_needs_the_settings_of_a_run_and_no_others(tmp_path: Path) -> None:
    """A RunConfig alone, as in a notebook, through a step that is not finite. Fails when: RunConfig is no IncidentConfig."""
    accelerator, model = Accelerator(cpu=True), Bigram()
    loader, _ = tk.build_dataloaders(rows(), tk.collate_padded, tk.DataConfig(), accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = tk.RunConfig(output_dir=str(tmp_path / "run"), eval_strategy="no", logging_steps=1)
    with tk.open_run(accelerator, config, model, optimizer, loader) as run:
        for batch in run:
            metrics = tk.train_step(accelerator, model, optimizer, batch, loss_fn, [1e-2])
            run.log(metrics | {"nonfinite": torch.tensor(float(run.step == 1))})
    assert run.summary.metrics["status"] == "finished"


def test_a_refused_resume_changes_nothing(tmp_path: Path) -> None:
    """Not even config.yaml. Fails when: it is written before the checkpoint's settings are compared."""
    config = Config(output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, max_steps=4)
    train(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".owner.json"}
    with pytest.raises(tk.Refusal, match="weight_decay"):
        train(replace(config, resume=True, weight_decay=0.1))
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".owner.json"}
    changed = [path.name for path in after if after[path] != before.get(path) and path.name != "summary.json"]
    assert not changed


@pytest.mark.parametrize(
    ("typed", "saved", "overwrites", "expected"),
    [
        (["--resume", "true", "--max-steps", "4"], True, False, ["--max-steps", "4", "--resume"]),
        (["--overwrite_output_dir=true", "--seed", "1"], True, True, ["--seed", "1", "--resume"]),
        (["--resume-from", "a/step-4", "--seed", "1"], True, False, ["--seed", "1", "--resume"]),
        (["--resume-from", "a/step-4", "--seed", "1"], False, False, ["--resume-from", "a/step-4", "--seed", "1"]),
        (["--config", "c.yaml"], True, True, ["--config", "c.yaml", "--resume", "--no-overwrite-output-dir"]),
    ],
)
def test_the_command_that_continues_says_what_was_typed_less_what_began_the_run(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], saved: bool, overwrites: bool, expected: list[str]
) -> None:
    """Fails when: a flag's value stays behind, or a file's overwrite_output_dir meets --resume."""
    import shlex
    import sys

    from toolkit.training.stopping import continuing_command

    monkeypatch.setattr(sys, "argv", ["recipes/sft.py", *typed])
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert shlex.split(continuing_command(saved, overwrites)) == [sys.executable, "recipes/sft.py", *expected]


def test_an_optimizer_of_another_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """As one that was built before the model was copied. Fails when: only a checkpoint looks up the names of its parameters."""
    accelerator, config = Accelerator(cpu=True), Config(output_dir=str(tmp_path / "run"))
    loader = tk.build_dataloaders(rows(), lambda documents: {}, config)[0]
    optimizer, _ = tk.build_optimizer(Bigram(), config, loader.num_steps)
    with pytest.raises(tk.Refusal, match="1 of the optimizer's 1 parameters"), tk.open_run(accelerator, config, Bigram(), optimizer, loader):
        pytest.fail("opened")
    assert not (tmp_path / "run").exists()
