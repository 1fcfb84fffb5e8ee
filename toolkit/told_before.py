"""What a tracker was told of steps after the checkpoint that a run goes on from.

A run that is killed between two saves trains the steps since the last one again. Their figures are the same to the bit, so
a tracker that keeps every line it is sent need not have them twice.
"""

from typing import Any

Told = set[tuple[str, int]]  # names of figures, with their steps


def told_to_mlflow(run_id: str, after: int) -> Told:
    """Of a run that MLflow has: figures of steps above `after`, and "samples" where their table has such a step."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    try:
        names = client.get_run(run_id).data.metrics
        told = {(name, each.step) for name in names for each in client.get_metric_history(run_id, name) if each.step > after}
    except MlflowException:  # a server that fails: at worst they are there twice
        return set()
    try:
        table = mlflow.artifacts.load_dict(f"runs:/{run_id}/samples.json")
        steps = [row[table["columns"].index("step")] for row in table["data"]]
    except (MlflowException, OSError, LookupError, ValueError):  # it has no table
        return told
    return told | {("samples", step) for step in steps if step > after}


def told_to_trackio(project: str, run: Any, after: int) -> Told:
    """Of a run that is on this machine. trackio (0.43) reads figures by no public function."""
    try:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
    except Exception:  # another version: at worst they are there twice
        return set()
    return {(name, entry["step"]) for entry in logs for name in entry if entry["step"] > after}
