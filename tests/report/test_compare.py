"""`toolkit compare`: a difference that was planted in a copy of a run is named, in its stage and with its place."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from toolkit.cli.main import app
from toolkit.config import Refusal
from toolkit.report.compare import Difference
from toolkit.report.verdict import by_how_much

pytestmark = pytest.mark.warm
ROOT = Path(__file__).resolve().parents[2]
WEIGHT = "model.layers.0.mlp.up_proj.weight"
Plant = Callable[[Path], None]


def train(folder: Path, name: str, *flags: str) -> Path:
    words = ["--max-steps", "12", "--save-steps", "6", "--eval-strategy", "steps", "--eval-steps", "4", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(ROOT / "tests/tiny_run.py"), *words, "--output-dir", name],
        cwd=folder, env=environment, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "a")


def compared(*runs: Path) -> dict[str, Any]:
    """The first comparison of `toolkit compare --json`; its text must have come to the same end, and be whole."""
    ran = CliRunner().invoke(app, ["compare", *map(str, runs), "--json"])
    assert ran.exit_code in (0, 1), ran.output
    found = json.loads(ran.stdout, parse_constant=pytest.fail)["comparisons"][0]
    shown = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert shown.exit_code == ran.exit_code == (0 if found["equal"] else 1)
    assert found["verdict"] in shown.stdout
    return found


def settings(old: str, new: str) -> Plant:
    def plant(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert f"\n{old}" in text
        (run / "config.yaml").write_text(text.replace(f"\n{old}", f"\n{new}"))

    return plant


def card(section: str, name: str, value: Any) -> Plant:
    def plant(run: Path) -> None:
        found = json.loads((run / "run.json").read_text())
        found[section][name] = value
        (run / "run.json").write_text(json.dumps(found))

    return plant


def lines(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Plant:
    def plant(run: Path) -> None:
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in change(events)))

    return plant


def metric(step: int, name: str, change: Callable[[float], float | None]) -> Plant:
    return lines(lambda events: [e if e["step"] != step or name not in e else {**e, name: change(e[name])} for e in events])


def weights(place: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Plant:
    def plant(run: Path) -> None:
        path = run / place
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return plant


def one_element(tensors: dict[str, torch.Tensor]) -> None:
    tensors[WEIGHT][3, 5] += 0.25


def other_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors[WEIGHT] = tensors[WEIGHT].half()


def no_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[WEIGHT]


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[WEIGHT] = tensors[WEIGHT][:-1].contiguous()


def minus_zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight" if "lm_head.weight" in tensors else WEIGHT][0, 0] *= -1


MODEL = "checkpoints/step-12/model.safetensors"
# what was planted, and (stage, name, step) of the first difference that must be named
PLANTED: dict[str, tuple[Plant, tuple[str, str, int | None]]] = {
    "a setting": (settings("weight_decay: 0.0", "weight_decay: 0.1"), ("setting", "weight_decay", None)),
    "a text setting": (settings("lr_scheduler_type: cosine", "lr_scheduler_type: linear"), ("setting", "lr_scheduler_type", None)),
    "a setting that is missing": (settings("seed: 42\n", ""), ("setting", "seed", None)),
    "a version": (card("versions", "torch", "1.0.0"), ("environment", "torch", None)),
    "a library that is not installed": (lambda run: dropped(run, "versions", "peft"), ("environment", "peft", None)),
    "the recipe's text": (card("recipe", "sha256", "0" * 64), ("environment", "recipe sha256", None)),
    "the processor": (card("hardware", "processor", "an abacus"), ("environment", "processor", None)),
    "the number of processes": (card("layout", "processes", 2), ("environment", "layout processes", None)),
    "the data": (card("data", "fingerprint", "content-0000-rows"), ("data", "fingerprint", None)),
    "the number of rows": (card("data", "epoch_size", 31), ("data", "epoch_size", None)),
    "a file of the data": (card("files", "rows.jsonl", "0" * 64), ("data", "file", None)),
    "a loss": (metric(7, "loss", lambda value: value + 1e-12), ("step", "loss", 7)),
    "a learning rate": (metric(7, "learning_rate", lambda value: 2 * value), ("step", "learning_rate", 7)),
    "a gradient norm": (metric(7, "grad_norm", lambda value: value / 2), ("step", "grad_norm", 7)),
    "an evaluation": (metric(8, "eval_loss", lambda value: value - 1), ("step", "eval_loss", 8)),
    "a loss that is not finite": (metric(5, "loss", lambda value: None), ("step", "loss", 5)),
    "a metric that is not logged": (
        lines(lambda events: [{n: v for n, v in e.items() if n != "grad_norm" or e["step"] != 3} for e in events]), ("step", "grad_norm", 3),
    ),
    "a step that is missing": (lines(lambda events: [e for e in events if e["step"] != 7]), ("step", "logged", 7)),
    "fewer steps": (lines(lambda events: [e for e in events if e["step"] <= 10]), ("step", "last logged step", 10)),
    "an element of a tensor": (weights(MODEL, one_element), ("tensor", WEIGHT, 12)),
    "an element of an earlier checkpoint": (weights("checkpoints/step-6/model.safetensors", one_element), ("tensor", WEIGHT, 6)),
    "the sign of an element": (weights(MODEL, minus_zero), ("tensor", "", 12)),
    "the type of a tensor": (weights(MODEL, other_type), ("tensor", WEIGHT, 12)),
    "the shape of a tensor": (weights(MODEL, other_shape), ("tensor", WEIGHT, 12)),
    "a tensor that is missing": (weights(MODEL, no_tensor), ("tensor", WEIGHT, 12)),
}  # fmt: skip


def dropped(run: Path, section: str, name: str) -> None:
    found = json.loads((run / "run.json").read_text())
    del found[section][name]
    (run / "run.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_the_first_that_is_named(planted: str, run: Path, tmp_path: Path) -> None:
    """Fails when: a stage is left out, or settings are compared after metrics."""
    plant, (stage, name, step) = PLANTED[planted]
    other = tmp_path / "b"
    shutil.copytree(run, other)
    plant(other)
    found = compared(run, other)
    first = found["differences"][0]
    assert (first["stage"], first["step"]) == (stage, step)
    assert first["name"] == name or not name
    assert first["values"][0] != first["values"][1] or first["difference"]
    assert not found["equal"]
    others = [each for each in found["differences"] if (each["stage"], each["name"]) != (stage, first["name"])]
    assert [each["stage"] for each in others if each["stage"] not in ("loss", "result")] == []
    if stage == "step":
        assert f"tep {step}" in found["verdict"]
    if first["name"] == WEIGHT:
        assert WEIGHT in found["verdict"]
        assert planted != "an element of a tensor" or "0.25" in first["difference"]


def test_a_run_is_equal_to_its_copy_elsewhere(run: Path, tmp_path: Path) -> None:
    """Fails when: output_dir counts as a difference, or a time, a rate or the memory in use does."""
    other = tmp_path / "elsewhere"
    shutil.copytree(run, other)
    settings("output_dir: a", "output_dir: elsewhere")(other)
    lines(lambda events: [{**e, "time": 99.0, "tokens_per_second": 1.0, "data_wait": 0.9} for e in events])(other)
    found = compared(run, other)
    assert found["equal"]
    assert (found["steps"], found["differences"]) == (12, [])
    assert found["tensors"] > 10
    assert "equal to the bit" in found["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "cause", "step", "metrics"),
    [
        (["--seed", "7"], "seed", 1, {"loss", "grad_norm"}),
        (["--lr-scheduler-type", "linear"], "lr_scheduler_type", 2, {"learning_rate"}),
        (["--learning-rate", "0.02", "--logging-steps", "1"], "learning_rate", 1, {"learning_rate"}),
        ([], "", None, set()),
    ],
)
def test_trained_runs_differ_from_the_step_and_by_the_setting_that_it_was(
    flags: list[str], cause: str, step: int | None, metrics: set[str], run: Path
) -> None:
    """Fails when: the verdict takes another setting for the cause, or two equal runs are said to differ."""
    found = compared(run, train(run.parent, f"b{step}{cause}", *flags))
    steps = [each["step"] for each in found["differences"] if each["stage"] == "step"]
    assert min(steps, default=None) == step
    assert found["equal"] == (not flags)
    if flags:
        at_first = {each["name"] for each in found["differences"] if each["stage"] == "step" and each["step"] == step}
        assert metrics <= at_first
        assert f"because {cause} is " in found["verdict"]
        assert any(each["stage"] == "tensor" for each in found["differences"])


def test_data_files_that_still_lie_there_are_compared_by_rows(run: Path, tmp_path: Path) -> None:
    """Fails when: the rows are not looked up, or those of a file that was changed since are shown."""
    from toolkit.runs.provenance import digest_of_source

    other = tmp_path / "b"
    shutil.copytree(run, other)
    files = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for path, third in zip(files, ("three", "another"), strict=True):
        path.write_text(f'{{"text": "one"}}\n{{"text": "two"}}\n{{"text": "{third}"}}\n')
    first = tmp_path / "a"
    shutil.copytree(run, first)
    for each, path in zip((first, other), files, strict=True):
        card("files", str(path), digest_of_source(str(path)))(each)
    rows = [each for each in compared(first, other)["differences"] if each["stage"] == "data"]
    assert [each["name"] for each in rows] == ["file", "row 3"]
    assert rows[1]["values"] == ['{"text": "three"}', '{"text": "another"}']
    files[1].write_text("{}\n")
    assert [each["name"] for each in compared(first, other)["differences"] if each["stage"] == "data"] == ["file"]


def test_a_recipes_own_text_is_not_shown(run: Path, tmp_path: Path) -> None:
    """A key may be in it. Fails when: settings that the run card leaves out are printed."""
    other = tmp_path / "b"
    shutil.copytree(run, other)
    settings("source: same", "source: sk-123456")(other)
    for options in ([], ["--json"]):
        shown = CliRunner().invoke(app, ["compare", str(run), str(other), *options])
        assert "source" in shown.output
        assert "sk-123456" not in shown.output


def text(name: str, change: Callable[[str], str]) -> Plant:
    def damage(run: Path) -> None:
        (run / name).write_text(change((run / name).read_text()))

    return damage


def gone(*names: str) -> Plant:
    def damage(run: Path) -> None:
        for name in names:
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return damage


DAMAGES: dict[str, Plant] = {
    "empty metrics": text("metrics.jsonl", lambda _: ""),
    "no metrics": gone("metrics.jsonl"),
    "a cut line": text("metrics.jsonl", lambda written: written[:-40]),
    "odd steps": text("metrics.jsonl", lambda _: '{"step": "x", "loss": 1}\n{"step": 1e300}\n{"step": null}\n[]\n{"step": 1.5, "loss": []}\n'),
    "no config": gone("config.yaml"),
    "a config that is no YAML": text("config.yaml", lambda _: "a: [\n\x00"),
    "no card": gone("run.json"),
    "a card of another shape": text("run.json", lambda _: '{"versions": 3, "model": [], "files": {"x": 1}, "started": "x", "end": 7}'),
    "neither": gone("run.json", "config.yaml"),
    "a summary of another shape": text("summary.json", lambda _: '{"status": [1], "best": {"name": 3}, "eval_loss": {}}'),
    "numbers that no float is": text("summary.json", lambda _: f'{{"steps": {10**400}, "seconds": Infinity, "eval_loss": NaN, "a": "\\ud800"}}'),
    "a card of such numbers": text("run.json", lambda _: f'{{"layout": {{"steps": {10**400}, "processes": -Infinity}}, "a": "\\ud800"}}'),
    "a cut tensor file": lambda run: os.truncate(run / MODEL, 100),
    "no checkpoints": gone("checkpoints"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_and_the_rest_is_compared(damage: str, run: Path, tmp_path: Path) -> None:
    """Fails when: a file that is missing, cut or of another shape ends in a traceback, or NaN stays in the JSON: `is_usable` is always true,
    the page is written without an error handler, or strict_json is left out."""
    other = tmp_path / "b"
    shutil.copytree(run, other)
    DAMAGES[damage](other)
    for pair in ((run, other), (other, run)):
        found = compared(*pair)
        assert found["notes"] or found["differences"], damage
    page = tmp_path / "page.html"
    ran = CliRunner().invoke(app, ["compare", str(run), str(other), "--output", str(page)])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), damage
    assert page.read_text().count("<article") == 2
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert listed.exit_code == 0, listed.output


LOST: dict[str, tuple[Plant, list[str]]] = {
    "metrics": (text("metrics.jsonl", lambda _: ""), ["step", "loss"]),
    "run.json": (gone("run.json"), ["environment", "model", "data"]),
    "parts of run.json": (text("run.json", lambda card: json.dumps({**json.loads(card), "versions": 3, "model": []})), ["environment", "model"]),
    "the summary": (text("summary.json", lambda _: "{"), ["result"]),
    "a checkpoint's weights": (lambda run: os.truncate(run / MODEL, 100), ["tensor"]),
}


@pytest.mark.parametrize("lost", LOST)
def test_runs_are_not_equal_where_one_lacks_what_the_other_has(lost: str, run: Path, tmp_path: Path) -> None:
    """Fails when: a stage of which one run has nothing counts as one without a difference."""
    damage, stages = LOST[lost]
    other = tmp_path / "b"
    shutil.copytree(run, other)
    damage(other)
    found = compared(run, other)
    assert (found["equal"], found["lacking"], found["differences"]) == (False, stages, [])
    shown = CliRunner().invoke(app, ["compare", str(run), str(other)]).stdout
    same = next(line for line in shown.splitlines() if line.startswith("no difference found"))
    assert not set(stages) & set(same.replace(":", ",").replace(" ", "").split(","))


def test_a_comparison_shows_how_far_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gigabytes it takes minutes. Fails when: tensors are compared without a word, or what it says is in the JSON."""
    monkeypatch.setattr("toolkit.system.progress.LOG_SECONDS", 0)
    ran = CliRunner().invoke(app, ["compare", str(run), str(run), "--json"])
    assert ran.stderr.count(" tensors, ") == json.loads(ran.stdout)["comparisons"][0]["tensors"] > 0


def test_directories_that_are_no_runs_and_runs_of_other_kinds_are_refused(run: Path, tmp_path: Path) -> None:
    """Fails when: losses that mean different things are compared, or the refusal is a traceback."""
    (tmp_path / "empty").mkdir()
    for place in ("empty", "missing"):
        with pytest.raises(Refusal, match=place):
            CliRunner().invoke(app, ["compare", str(run), str(tmp_path / place)], catch_exceptions=False, standalone_mode=False)
    other = tmp_path / "classes"
    shutil.copytree(run, other)
    card("model", "architecture", "BertForSequenceClassification")(other)
    with pytest.raises(Refusal, match=r"different kinds.*CausalLM.*SequenceClassification"):
        CliRunner().invoke(app, ["compare", str(run), str(other)], catch_exceptions=False, standalone_mode=False)
    ran = subprocess.run(
        [sys.executable, "-m", "toolkit", "compare", str(run), str(other)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.match("refused: .*different kinds", ran.stderr)
    assert CliRunner().invoke(app, ["compare", str(run)]).exit_code == 2


def test_the_page_has_the_curves_of_all_runs_in_one_frame(run: Path, tmp_path: Path) -> None:
    """Fails when: a run's curve is left out of the frame, or the page shows no verdict."""
    place = Path(__file__).with_name("test_report.py")
    spec = importlib.util.spec_from_file_location("report_page", place)
    assert spec is not None
    assert spec.loader is not None
    reading = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reading)
    runs = [run, tmp_path / "b<i>", tmp_path / "c"]
    for other in runs[1:]:
        shutil.copytree(run, other)
    metric(7, "loss", lambda value: value + 1)(runs[1])
    target = tmp_path / "page.html"
    shown = CliRunner().invoke(app, ["compare", *map(str, runs), "--output", str(target)])
    assert shown.exit_code == 1
    text = target.read_text(encoding="utf-8")
    page = reading.Page(text)
    together = next(figure for figure in page.figures if figure["title"] == "Loss")
    assert [line["class"] for line in together["lines"]] == ["train", "held"] * 3
    values = page.values("Loss", "train")
    losses = [[json.loads(line).get("loss") for line in (each / "metrics.jsonl").read_text().splitlines()] for each in runs]
    assert [value for _, value in values] == pytest.approx([v for each in losses for v in each if v is not None], abs=1e-3)
    assert "b<i>" not in text
    assert "from step 7 on, in loss" in text


@pytest.mark.parametrize(
    ("a", "b", "shown"), [(2.0, 1.0, "-1 (-50.00%)"), (8.0, 8.0 - 1e-6, "-1e-06 (-1e-05%)"), (0, 1, "+1"), (True, 1, ""), (1.0, 1e301, "")]
)
def test_a_difference_too_small_for_two_digits_is_not_shown_as_none(a: float, b: float, shown: str) -> None:
    """Fails when: each share of the first has two digits."""
    assert by_how_much(Difference("loss", "loss", (a, b), 4)) == shown
