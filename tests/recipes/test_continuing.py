"""A run that goes on: from which checkpoint, with which settings, by which command. And what a run leaves behind."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.warm
COLD = sys.executable  # of a command that is executed as it was printed

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--dataset", "rows", "--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "32", "--vocab-size", "300",
    "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "3", "--logging-steps", "1", "--learning-rate", "0.002",
]  # fmt: skip
CONSTANT = ["--lr-scheduler-type", "constant", "--warmup-steps", "0"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """rows/train.csv and rows/validation.csv: two classes, every fourth label wrong, so that nothing is learned to the end."""
    (tmp_path / "rows").mkdir()
    for name, numbers in (("train", range(50)), ("validation", range(50, 66))):
        lines = [f"the {i} {('good', 'bad')[i % 2]} thing,{('up', 'down')[(i + (i % 8 > 5)) % 2]}" for i in numbers]
        (tmp_path / f"rows/{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return tmp_path / "rows"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checkpoints(output_dir: Path) -> set[str]:
    return {path.name for path in (output_dir / "checkpoints").iterdir() if path.is_dir()}


def signaled_after(metrics: Path, losses: int) -> Callable[[int], None]:
    def signaled(pid: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"loss"') >= losses):
            time.sleep(0.005)
        os.kill(pid, signal.SIGTERM)

    return signaled


def copy_of_recipe(folder: Path, name: str, old: str, new: str) -> str:
    """A user's own copy of a recipe with one place changed."""
    text = (ROOT / f"recipes/{name}.py").read_text()
    assert text.count(old) == 1, old
    (folder / f"my_{name}.py").write_text(text.replace(old, new))
    return str(folder / f"my_{name}.py")


def test_a_run_continued_from_an_older_checkpoint_begins_a_new_timeline_there(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """Back to step 4 of 8 with another rate: checkpoints of the new run have the old names, the old ones are set aside, and the end is
    that of a directory which never held more than step 4. --resume then continues with the new ones.

    Fails when: a checkpoint that is already there is not written again, or the newest of the old timeline is taken.
    """
    flags = [*TINY, *CONSTANT, "--save-steps", "2", "--save-total-limit", "none"]
    first = run_recipe("accelerated", *flags, "--max-steps", "8")
    assert first.code == 0, first.err
    shutil.copytree(first.output_dir / "checkpoints/step-4", tmp_path / "other/checkpoints/step-4")
    new = [*flags, "--learning-rate", "0.006"]
    allowed = ["--allow-change", "learning_rate"]
    source = ["--resume-from", "out/checkpoints/step-4"]
    again = run_recipe("accelerated", *new, "--max-steps", "8", *source, *allowed)
    assert again.code == 0, again.err
    expected = {"step-2", "step-4", "step-6", "step-8", "superseded-1-step-6", "superseded-1-step-8"}
    assert checkpoints(again.output_dir) == expected
    events = [event for event in again.metrics if "loss" in event]
    assert [event["step"] for event in events] == list(range(1, 9))
    assert [event["learning_rate"] for event in events] == pytest.approx([0.002] * 4 + [0.006] * 4)
    other = run_recipe("accelerated", *new, "--max-steps", "8", "--resume", *allowed, output_dir="other")
    assert other.code == 0, other.err
    assert same(again.weights(), other.weights())

    longer = [*new, "--max-steps", "10", "--resume", "--allow-change", "max_steps"]  # the rate is that of the new checkpoints
    further = run_recipe("accelerated", *longer)
    assert further.code == 0, further.err
    assert "Resumed from out/checkpoints/step-8" in further.out
    assert checkpoints(further.output_dir) == {*expected, "step-10"}
    assert same(further.weights(), run_recipe("accelerated", *longer, output_dir="other").weights())


@pytest.mark.parametrize("begun", ["fresh", "from a checkpoint of another run"])
def test_the_command_on_the_screen_continues_the_run(run_recipe: Any, rows: Path, tmp_path: Path, begun: str) -> None:
    """Executed by the shell as it was printed. Fails when: it leaves --resume-from in, a path is not quoted, or it names a program
    that is missing."""
    out = "my runs/out"
    flags = [*TINY, "--max-steps", "40", "--save-strategy", "no"]
    source = []
    if begun != "fresh":
        flags = [*TINY, "--max-steps", "40", "--save-steps", "15", "--save-total-limit", "none"]
        assert run_recipe("accelerated", *flags, output_dir="earlier").code == 0
        source = ["--resume_from_checkpoint", "earlier/checkpoints/step-15"]
    whole = run_recipe("accelerated", *flags, *source, output_dir="whole")
    assert whole.code == 0, whole.err
    stop = signaled_after(tmp_path / out / "metrics.jsonl", 4)
    stopped = run_recipe("accelerated", *flags, *source, output_dir=out, while_running=stop)
    assert stopped.code == 75, stopped.out + stopped.err
    steps = stopped.summary["steps"]
    assert steps < 40
    command = stopped.err.split("Continue with:\n")[1].strip()
    if begun != "fresh":  # by a Python with the imports done
        assert shlex.split(command)[0] == COLD
        command = shlex.join([sys.executable, *shlex.split(command)[1:]])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {steps} of 40" in done.stdout
    assert stopped.summary["status"] == "finished"  # of the continued run, which writes into the same directory
    assert same(stopped.weights(), whole.weights())


NOTEBOOK = """
import hashlib, signal, sys
from dataclasses import replace
from pathlib import Path

import toolkit as tk
sys.path.insert(0, {recipes!r})
import sft

steps, train_step = [], tk.train_step

def pressed(*values, **named):
    steps.append(1)
    for press in range({{6: 1, 9: 2}}.get(len(steps), 0)):  # the stop button: once, and later twice
        signal.raise_signal(signal.SIGINT)
    return train_step(*values, **named)

config = sft.Config(
    hidden_size=32, num_hidden_layers=1, max_steps=10, max_train_examples=48, max_eval_examples=8, max_length=128, num_samples=0,
    per_device_train_batch_size=2, gradient_accumulation_steps=2, dropout=0.1, save_steps=4, save_strategy="steps", eval_steps=5,
    eval_strategy="steps", output_dir="stopped", overwrite_output_dir=True,
)
tk.train_step = pressed
ended = []
for cell in range(3):
    try:
        sft.main(replace(config, resume=cell > 0, overwrite_output_dir=cell == 0))
    except BaseException as error:
        ended += [type(error).__name__, isinstance(error, tk.Interrupted), isinstance(error, KeyboardInterrupt), isinstance(error, Exception)]
tk.train_step = train_step
sft.main(replace(config, output_dir="whole"))
digests = [hashlib.sha256(Path(run, "model/model.safetensors").read_bytes()).hexdigest() for run in ("stopped", "whole")]
print("ENDED", *ended, "SAME" if digests[0] == digests[1] else "OTHER")
"""


def test_a_notebook_that_was_interrupted_goes_on_in_the_same_process(run_recipe: Any, tmp_path: Path) -> None:
    """main(replace(config, resume=True)) after the stop button, pressed once (a checkpoint is written) and then twice (KeyboardInterrupt
    in the middle of a step): the bits of a run that was left alone. Both are KeyboardInterrupt, and neither is an Exception, which a
    sweep might pass over. Fails when: `open_run` leaves its handlers or its lock behind, or `Interrupted` is an Exception."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(recipes=str(ROOT / "recipes")))
    run = run_recipe(str(tmp_path / "notebook.py"), output_dir="")
    assert "ENDED InterruptedByKeyboard True True False KeyboardInterrupt False True False SAME" in run.out, run.out + run.err


def test_the_metrics_of_a_model_are_those_of_its_best_weights_when_these_are_saved(run_recipe: Any, rows: Path) -> None:
    """The loss of the model directory, read by transformers alone, is eval_loss of summary.json and of the model card.

    Fails when: the last evaluation's metrics are next to the best one's weights.
    """
    flags = [*TINY, *CONSTANT, "--learning-rate", "0.5", "--max-steps", "12", "--eval-steps", "2", "--load-best-model-at-end"]
    run = run_recipe("accelerated", *flags)
    assert run.code == 0, run.err
    losses = {event["step"]: event["eval_loss"] for event in run.metrics if "eval_loss" in event}
    best = min(losses, key=lambda step: losses[step])
    assert best != 12, f"the last one is the best: take another rate ({losses})"
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(run.output_dir / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.output_dir / "model")
    lines = [line.rsplit(",", 1) for line in (rows / "validation.csv").read_text().splitlines()[1:]]
    with torch.no_grad():
        logits = torch.cat([model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits for text, _ in lines])
    labels = torch.tensor([model.config.label2id[label] for _, label in lines])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(losses[best], rel=1e-5)
    assert run.summary["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert f"| loss | {loss:.4f} |" in (run.output_dir / "model/README.md").read_text()


CHANGES = {
    "learning_rate": (["--learning-rate", "0.004"], "learning_rate was 0.002 and is 0.004"),
    "seed": (["--seed", "7"], "seed was 42 and is 7"),
    "dataset": ([], "training data"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_with_other_settings_or_data_only_where_that_is_allowed_by_name(
    run_recipe: Any, rows: Path, change: str
) -> None:
    """And the run card says so. Fails when: a setting is missing from the comparison, or the rows' content from the fingerprint; or
    what needs no other setting, other rows of the same name, is not said; or `max_steps` is one of `_OF_DATA`."""
    flags = [*TINY, *CONSTANT, "--max-steps", "4", "--save-steps", "2"]
    first = run_recipe("accelerated", *flags)
    assert first.code == 0, first.err
    weights = first.weights()  # before the continued run writes its own there
    shutil.rmtree(first.output_dir / "checkpoints/step-4")
    if change == "dataset":
        lines = (rows / "train.csv").read_text()
        (rows / "train.csv").write_text(lines.replace("the 3 bad", "the 3 worst"))
    others, named = CHANGES[change]
    before = (first.output_dir / "metrics.jsonl").read_text()
    refused = run_recipe("accelerated", *flags, *others, "--resume")
    assert refused.code == 2, refused.out + refused.err
    assert named in refused.err
    assert f"--allow-change {change}" in refused.err
    assert (first.output_dir / "metrics.jsonl").read_text() == before
    assert ("Data:" in refused.out) == (change == "dataset"), "a setting is refused before the data are prepared"
    if change == "dataset":
        longer = [*TINY, *CONSTANT, "--max-steps", "6", "--save-steps", "2", "--resume", "--allow-change", "max_steps"]
        assert run_recipe("accelerated", *longer).code == 2, "a longer run is no reason for other rows"
    allowed = run_recipe("accelerated", *flags, *others, "--resume", "--allow-change", change)
    assert allowed.code == 0, allowed.err
    assert [event["step"] for event in allowed.metrics if "loss" in event] == [1, 2, 3, 4]
    assert not same(weights, allowed.weights())
    reported = f"{named if change != 'dataset' else 'the training data are others'}: allowed by --allow-change"
    assert reported in allowed.out
    assert json.loads((allowed.output_dir / "run.json").read_text())["continued"] == [f"step 2: {reported}"]


def test_a_key_in_a_recipes_own_field_is_in_no_file_but_its_settings(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """With checkpoints, a tracker, samples of the report and the model card. Fails when: a writer takes all settings for harmless."""
    secret = "sk-" + "S3cr3t" * 6
    recipe = copy_of_recipe(tmp_path, "accelerated", '    output_dir: str = "runs/accelerated"\n', (
        '    output_dir: str = "runs/accelerated"\n    api_key: str = tk.setting("none", "Key of a service of my own.")\n'
    ))  # fmt: skip
    flags = [*TINY, "--max-steps", "4", "--save-steps", "2", "--report-to", "tensorboard", "--api-key", secret]
    run = run_recipe(recipe, *flags, env={"PYTHONPATH": str(ROOT)})
    assert run.code == 0, run.err
    files = [path for path in run.output_dir.rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in files)
    holding = [str(path.relative_to(run.output_dir)) for path in files if secret.encode() in path.read_bytes()]
    assert holding == ["config.yaml"]


def test_an_empty_label_is_refused_by_file_and_line(run_recipe: Any, rows: Path) -> None:
    """Row 17 of a CSV is line 18: the header is the first. Fails when: the empty field becomes a class of its own."""
    lines = (rows / "train.csv").read_text().splitlines()
    lines[17] = lines[17].rsplit(",", 1)[0] + ","
    (rows / "train.csv").write_text("\n".join(lines) + "\n")
    run = run_recipe("accelerated", *TINY, "--max-steps", "1")
    assert run.code == 2, run.out + run.err
    assert "rows/train.csv:18" in run.err
    assert "label" in run.err
    assert not run.output_dir.exists()


# which steps are NaN, the settings, the steps in incidents/nonfinite.jsonl, the exit code
STEPS_OF_NAN: dict[str, tuple[str, list[str], list[int], int]] = {
    "skipped": ("step == 3", [], [3], 0),
    "too many in a row": ("step >= 3", ["--max-nonfinite-steps", "2"], [3, 4], 1),
    "two, and one alone": ("step in (2, 3, 5)", ["--max-nonfinite-steps", "3"], [2, 3, 5], 0),
    "stopped at once": ("step >= 3", ["--nonfinite", "stop"], [3], 1),
}


@pytest.mark.parametrize("case", STEPS_OF_NAN)
def test_the_plain_recipe_skips_or_stops_at_a_loss_that_is_nan(run_recipe: Any, rows: Path, tmp_path: Path, case: str) -> None:
    """Fails when: the counter is not set back by a good step, the limit is off by one, or a NaN reaches the weights."""
    condition, settings, steps, code = STEPS_OF_NAN[case]
    line = "                part.backward()\n"
    recipe = copy_of_recipe(tmp_path, "basic", line, f"                part = part * float('nan') if {condition} else part\n{line}")
    run = run_recipe(recipe, *TINY, "--max-steps", "6", *settings, env={"PYTHONPATH": str(ROOT)})
    assert run.code == code, run.out + run.err
    incidents = [json.loads(text) for text in (run.output_dir / "incidents/nonfinite.jsonl").read_text().splitlines()]
    assert [incident["step"] for incident in incidents] == steps
    assert [len(incident["rows"]) for incident in incidents] == [6] * len(steps)
    assert all("train.csv:" in row["origin"][0] for incident in incidents for row in incident["rows"])
    if code:
        assert "Traceback" not in run.err
        assert f"the last of them {steps[-1]}" in run.err
    else:
        assert all(bool(torch.isfinite(tensor).all()) for tensor in run.weights().values())


@pytest.mark.parametrize("divergence", ["warn", "stop"])
def test_the_plain_recipe_ends_a_run_that_diverged_where_it_shall(run_recipe: Any, rows: Path, tmp_path: Path, divergence: str) -> None:
    """A loss that is 9 times as high from step 4 on. Fails when: `warn` doesn't ask the setting, or no summary is written."""
    line = "                part.backward()\n"
    recipe = copy_of_recipe(tmp_path, "basic", line, f"                part = part * (9 if step > 3 else 1)\n{line}")
    run = run_recipe(recipe, *TINY, "--max-steps", "20", "--divergence", divergence, env={"PYTHONPATH": str(ROOT)})
    assert "Traceback" not in run.err
    assert re.match(r"the loss .*first .*\b10 steps", run.summary["warnings"][0])
    if divergence == "warn":
        assert (run.code, run.summary["status"]) == (0, "finished"), run.err
        return
    assert (run.code, run.summary["status"]) == (1, "diverged"), run.err
    assert re.search(r"after step 13, .*--divergence stop", run.err)
    assert not (run.output_dir / "model").exists()


CLOCK = """class time:  # of which nothing passes but what is slept
    now = 0.0
    monotonic = classmethod(lambda cls: cls.now)
    sleep = classmethod(lambda cls, seconds: setattr(cls, "now", cls.now + seconds))
"""


def test_the_plain_recipe_logs_the_share_of_time_that_waits_for_data(run_recipe: Any, rows: Path, tmp_path: Path) -> None:
    """From step 4 on a batch takes .3 seconds, each step .1, an evaluation .6. Fails when: an evaluation or the step before counts as
    waiting, or what was waited before an event counts in the next one."""
    batches = "train.batches()"
    recipe = Path(copy_of_recipe(tmp_path, "basic", batches, f"(time.sleep(0.3 * (b.position > 17)) or b for b in {batches})"))
    for line, replaced in (
        ("import time\n", CLOCK), ("part.backward()", "part.backward(); time.sleep(0.1)"), ("model.eval()", "model.eval(); time.sleep(0.6)")
    ):
        assert line in recipe.read_text()
        recipe.write_text(recipe.read_text().replace(line, replaced))
    flags = [*TINY, "--per-device-train-batch-size", "6", "--gradient-accumulation-steps", "1", "--logging-steps", "3", "--eval-steps", "3"]
    run = run_recipe(str(recipe), *flags, "--max-steps", "6", env={"PYTHONPATH": str(ROOT)})
    assert run.code == 0, run.out + run.err
    assert [event["data_wait"] for event in run.metrics if "loss" in event] == pytest.approx([0.0, 0.75])


def test_pretraining_goes_on_with_the_tokenizer_of_a_given_model(run_recipe: Any, tmp_path: Path) -> None:
    """On text from which another one would be made. Fails when: a tokenizer is trained whatever --model says."""
    for name, words in (("first", "the river runs under the bridge "), ("second", "eine Katze sitzt auf dem Dach ")):
        lines = [json.dumps({"text": f"{words * 4}{number}"}) for number in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--max-length", "32", "--max-steps", "2", "--num-samples", "0", "--eval-steps", "2"]
    shape = ["--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "290"]
    first = run_recipe("pretrain", *flags, *shape, "--dataset", "first.jsonl", output_dir="first")
    assert first.code == 0, first.err
    second = run_recipe("pretrain", *flags, "--model", "first/model", "--dataset", "second.jsonl")
    assert second.code == 0, second.err
    vocabularies = [json.loads((r.output_dir / "model/tokenizer.json").read_text())["model"]["vocab"] for r in (first, second)]
    assert vocabularies[0] == vocabularies[1]
    name = "model.embed_tokens.weight"
    assert first.weights()[name].shape == second.weights()[name].shape
