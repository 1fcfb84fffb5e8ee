"""What a tracker was given a run that resumes from a checkpoint.

A run that is killed between two saves trains the steps since the last one again. Their metrics are the same to the bit, so
a tracker that keeps every line it is sent need not have them twice; and what it was not sent before the kill it is sent then.
"""

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
