"""What differs between wandb, TensorBoard, trackio and MLflow: how each is installed, starts, takes a table and files,
and what it was sent before a run resumes.

A run that is killed between two saves trains the steps since the last one again. Their metrics are the same to the bit, so
a tracker that keeps every line it is sent need not have them twice; and what it was not sent before the kill it is sent then.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config import Refusal, RunConfig
from toolkit.system.files import write_atomically

PROJECT = "toolkit"


@dataclass(frozen=True)
class Opened:
    """A tracker of Accelerate's, and what it was sent before its run was resumed (None: not queried, or no answer)."""

    tracker: Any
    logged: Logged | None = None

    def lacks(self, name: str, step: int) -> bool:
        return (name, step) not in (self.logged or ())


def _started(kind: str, stored: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
    """Accelerate's tracker of that kind, started, with the run's settings stored."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = os.environ.get("WANDB_PROJECT", PROJECT) if kind == "wandb" else PROJECT
    tracker = LOGGER_TYPE_TO_CLASS[kind](project, *arguments, **options)
    tracker.start()
    tracker.store_init_configuration(dict(stored))
    return tracker


def _name(config: RunConfig) -> str:
    return config.run_name or Path(config.output_dir).absolute().name


def _folder(config: RunConfig) -> str:
    return os.path.join(config.output_dir, "trackers")


def _open_wandb(config: RunConfig, settings: Mapping[str, Any], ids: dict[str, str], step: int) -> Opened:
    os.makedirs(_folder(config), exist_ok=True)
    options = {"name": _name(config), "dir": _folder(config), "id": ids["wandb"], "resume": "allow"}
    # no git metadata: the address of a remote can hold a token
    return Opened(_started("wandb", settings, **options, settings={"disable_git": True}))


def _open_tensorboard(config: RunConfig, settings: Mapping[str, Any], ids: dict[str, str], step: int) -> Opened:
    # what was logged after the checkpoint, before the run was cut off, is shown no more; all of it where there was none yet
    return Opened(_started("tensorboard", settings, _folder(config), purge_step=step + 1 if step else 0))


def _open_trackio(config: RunConfig, settings: Mapping[str, Any], ids: dict[str, str], step: int) -> Opened:
    tracker = _started("trackio", settings, name=_name(config), resume="allow" if step else "never")
    if not step or config.allow_change:
        return Opened(tracker)
    return Opened(tracker, logged_to_trackio(PROJECT, tracker.run.name, tracker.run.id))


def _open_mlflow(config: RunConfig, settings: Mapping[str, Any], ids: dict[str, str], step: int) -> Opened:
    import mlflow

    folder = Path(_folder(config), "mlflow").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    is_here = "MLFLOW_TRACKING_URI" not in os.environ  # where the next line puts it
    if is_here:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    kept = folder / "run_id"  # the service gives it, perhaps after the checkpoint that a run is continued from
    known = ids.get("mlflow") or (kept.read_text(encoding="utf-8") if step and kept.exists() else None)
    # A known one without settings: MLflow refuses another value for a parameter that it has, such as resume.
    what, same = ({}, {"run_id": known}) if known else (settings, {"run_name": _name(config)})
    if is_here:  # files too: else they go to `mlruns` where the run was started
        same["logging_dir"] = (folder / "files").as_uri()
    tracker = _started("mlflow", what, **same)
    logged = None
    if step and not config.allow_change:
        logged = logged_to_mlflow(known) if known else set()
    ids["mlflow"] = tracker.tracker.info.run_id
    write_atomically(kept, ids["mlflow"])
    return Opened(tracker, logged)


def _wandb_table(tracker: Any, columns: list[str], rows: list[list[str]], step: int) -> None:
    tracker.log_table("samples", columns=columns, data=rows, step=step)


def _tensorboard_table(tracker: Any, columns: list[str], rows: list[list[str]], step: int) -> None:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    text = "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])
    tracker.writer.add_text("samples", text, global_step=step)
    tracker.writer.flush()


def _trackio_table(tracker: Any, columns: list[str], rows: list[list[str]], step: int) -> None:
    import pandas
    import trackio

    tracker.log({"samples": trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)


def _mlflow_table(tracker: Any, columns: list[str], rows: list[list[str]], step: int) -> None:
    import mlflow

    data = {"step": [step] * len(rows), **{name: [row[i] for row in rows] for i, name in enumerate(columns)}}
    mlflow.log_table(data, artifact_file="samples.json")  # appends


def _wandb_files(tracker: Any, files: Sequence[Path]) -> None:
    import wandb

    artifact = wandb.Artifact(f"run-{tracker.run.id}", type="run")
    for path in files:
        artifact.add_file(str(path))
    tracker.run.log_artifact(artifact)


def _trackio_files(tracker: Any, files: Sequence[Path]) -> None:
    import trackio

    if hasattr(trackio, "log_artifact"):  # not in its first versions
        for path in files:
            trackio.log_artifact(str(path), name=path.stem, type="run")


def _mlflow_files(tracker: Any, files: Sequence[Path]) -> None:
    for path in files:
        tracker.log_artifact(str(path))


# By tracker; TensorBoard keeps no files.
OPEN = {"wandb": _open_wandb, "tensorboard": _open_tensorboard, "trackio": _open_trackio, "mlflow": _open_mlflow}
ADD_TABLE = {"wandb": _wandb_table, "tensorboard": _tensorboard_table, "trackio": _trackio_table, "mlflow": _mlflow_table}
KEEP_FILES = {"wandb": _wandb_files, "trackio": _trackio_files, "mlflow": _mlflow_files}
# What a tracker is installed with where that isn't its name: the whole of MLflow needs other versions of pyarrow and protobuf.
_PACKAGES = {"mlflow": ("mlflow-skinny", "sqlalchemy", "alembic")}


def tracker_names(config: RunConfig) -> list[str]:
    """The requested trackers, each with its library present."""
    names = [name for name in config.report_to if name != "none"]
    if "all" in names:
        return [name for name in OPEN if importlib.util.find_spec(name)]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        what = "the library is" if len(missing) == 1 else "their libraries are"
        packages = " ".join(package for name in missing for package in packages_of(name))
        raise Refusal(f"--report-to {','.join(missing)}: {what} not installed. Type: pip install {packages}")
    return names


def packages_of(name: str) -> tuple[str, ...]:
    """What is to be installed for a tracker."""
    return _PACKAGES.get(name, (name,))


Logged = set[tuple[str, int]]  # names of metrics, with their steps


def logged_to_mlflow(run_id: str) -> Logged | None:
    """Of a run that MLflow has: its metrics, and "samples" where their table has such a step. None: it can't be known."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    try:
        names = client.get_run(run_id).data.metrics
        logged = {(name, each.step) for name in names for each in client.get_metric_history(run_id, name)}
    except MlflowException:  # a server that fails: at worst what is trained again is there twice
        return None
    try:
        table = mlflow.artifacts.load_dict(f"runs:/{run_id}/samples.json")
        steps = [row[table["columns"].index("step")] for row in table["data"]]
    except (MlflowException, OSError, LookupError, ValueError):  # it has no table
        return logged
    return logged | {("samples", step) for step in steps}


def logged_to_trackio(project: str, name: str, run_id: str) -> Logged | None:
    """Of a run that is on this machine; None where it may be elsewhere. trackio (0.43) reads metrics by no public function."""
    try:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(project, name, run_id=run_id)
    except Exception:  # another version: at worst what is trained again is there twice
        return None
    return None if not logs else {(name, entry["step"]) for entry in logs for name in entry}
