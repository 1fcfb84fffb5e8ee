"""Trackers of a recipe: real ones offline, all at once and over a resume; and ones that raise or hang, which cost a run nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from toolkit.report import write_report
from toolkit.tracking.services import PROJECT

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "40", "--max-eval-examples", "5", "--max-length", "128",
    "--num-samples", "2", "--sample-max-new-tokens", "4", "--logging-steps", "1", "--use-cpu", "--per-device-train-batch-size", "2",
]  # fmt: skip



FAKES = {
    "raises": "def init(**options):\n    raise ConnectionError('the service is away')\n",
    "hangs": "import time\ndef init(**options):\n    time.sleep(3600)\n",
}


@pytest.mark.parametrize("fault", FAKES)
def test_a_recipe_trains_the_same_beside_a_tracker_that_fails(run_recipe: Any, tmp_path: Path, fault: str) -> None:
    """A library in the place of wandb's that raises, or never returns: the losses are those of a run without trackers.

    Fails when: trackers are started or logged to in the thread that trains.
    """
    fake = tmp_path / "fake" / "wandb"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(FAKES[fault])
    script = tmp_path / "sft_beside.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(fake.parent)!r}, {str(ROOT / 'recipes')!r}]\nimport toolkit as tk, toolkit.tracking.trackers\n"
        "toolkit.tracking.trackers.CLOSE_SECONDS = 1.0\nfrom sft import Config, main\nmain.__module__ = '__main__'\ntk.run_recipe(main)\n"
    )
    flags = [*SMALL, "--max-steps", "3"]
    alone = run_recipe("sft", *flags, "--run-name", "The first one", output_dir="alone")
    tracked = run_recipe(str(script), *flags, "--report-to", "wandb", output_dir="tracked")
    assert tracked.code == 0, tracked.out + tracked.err
    losses = [[event["loss"] for event in run.metrics if "loss" in event] for run in (alone, tracked)]
    assert losses[0] == losses[1]
    expected = {"raises": "ConnectionError: the service is away", "hangs": "does not end"}
    assert re.search(f"WARNING: wandb: .*{expected[fault]}", tracked.out)
    # without a tracker a run has a name too. Fails when: --run-name is refused, or its card or report has the directory's name
    assert alone.code == 0, alone.err
    title = {"alone": "The first one", "tracked": "tracked"}
    for name, shown in title.items():
        card = (tmp_path / name / "model/README.md").read_text()
        assert f"\n# {shown}\n" in card
        assert f"name: {shown}\n" in card
        page = write_report([tmp_path / name], tmp_path / "page.html").read_text()
        assert f"<title>{shown} · training report</title>" in page


@pytest.mark.slow
def test_every_tracker_gets_the_run_and_goes_on_with_it_after_a_resume(run_recipe: Any, tmp_path: Path) -> None:
    """wandb offline, TensorBoard, trackio and MLflow on local files, at once: metrics, settings, samples, run card and report.

    Fails when: a resume starts another run in one of them, or a key of a setting is sent (see test_planted_tokens).
    """
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true"}
    flags = [*SMALL, "--report-to", "wandb,tensorboard,trackio,mlflow", "--save-strategy", "steps", "--save-steps", "2"]
    first = run_recipe("sft", *flags, "--max-steps", "4", env=env)
    assert first.code == 0, first.out + first.err
    again = run_recipe("sft", *flags, "--max-steps", "6", "--resume", "--allow-change", "max_steps", env=env)
    assert again.code == 0, again.out + again.err
    assert "WARNING" not in first.out + again.out
    losses = {event["step"]: event["loss"] for event in again.metrics if "loss" in event}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]

    assert _in_mlflow(again.output_dir / "trackers/mlflow/mlflow.db") == pytest.approx(losses)
    assert _in_tensorboard(again.output_dir / "trackers/toolkit") == pytest.approx(losses)
    assert len({path.name.rpartition("-")[2] for path in (again.output_dir / "trackers/wandb").glob("offline-run-*")}) == 1
    assert list((again.output_dir / "trackers/wandb").rglob("samples_*.table.json"))
    assert _in_trackio(tmp_path / "trackio") == pytest.approx(losses)
    kept = {path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file()}
    assert (again.output_dir / "run.json").read_bytes() in kept


def _in_mlflow(database: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    (experiment,) = (each for each in client.search_experiments() if each.name == PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["learning_rate"] == "0.001"
    kept = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert kept == {"run.json", "report.html", "samples.json"}
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}


def _in_tensorboard(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert any("samples" in tag for tag in events.Tags()["tensors"])
    return {event.step: event.value for event in events.Scalars("loss")}


def _in_trackio(folder: Path) -> dict[int, float]:
    import sqlite3

    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    found = [(step, json.loads(text)) for step, text in rows]
    return {step: metrics["loss"] for step, metrics in found if "loss" in metrics}
