"""status, logs and fetch of a job, against moto: what is shown, and what comes home.

Each test names the one-line change under which it fails.
"""

import io
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.sagemaker_jobs.follow import status_lines

ROLE = "arn:aws:iam::123456789012:role/SageMakerExecution"
GROUP = "/aws/sagemaker/TrainingJobs"


@pytest.fixture(scope="module")
def job(sdk: Any) -> str:
    """A job that moto takes for completed, with files in S3 and lines in the logs of two machines."""
    submitted = sdk.toolkit(
        "sagemaker", "submit", "sft", "--instance-type", "ml.g5.xlarge", "--instance-count", 2, "--role", ROLE, "--job-name", "followed",
        "--bucket", "followed-1", "--spot",
    )  # fmt: skip
    assert submitted.code == 0, submitted.err
    prefix = "toolkit-jobs/followed"
    files = {
        "config.yaml": b"seed: 1\n", "metrics.jsonl": b'{"step": 1, "loss": 2.0}\n', "checkpoints/step-1/MANIFEST.json": b"{}",
        ".lock": b"", "checkpoints/.tmp-step-2-7/state.json": b"{}", "../../outside.txt": b"x",
    }  # fmt: skip
    for name, content in files.items():
        sdk.aws("s3", "put_object", Bucket="followed-1", Key=f"{prefix}/checkpoints/{name}", Body=content)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in {"config.json": b"{}", "model.safetensors": b"weights"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    described = sdk.aws("sagemaker", "describe_training_job", TrainingJobName="followed")
    bucket, _, key = described["ModelArtifacts"]["S3ModelArtifacts"].removeprefix("s3://").partition("/")
    if bucket != "followed-1":
        sdk.aws("s3", "create_bucket", Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    sdk.aws("s3", "put_object", Bucket=bucket, Key=key, Body=packed.getvalue())
    sdk.aws("logs", "create_log_group", logGroupName=GROUP)
    for machine, lines in (("algo-1", [f"step {n}/300  loss 1.5" for n in range(300)]), ("algo-2", ["hello"])):
        stream = f"followed/{machine}-1700000000"
        sdk.aws("logs", "create_log_stream", logGroupName=GROUP, logStreamName=stream)
        now = int(time.time() * 1000)
        events = [{"timestamp": now + n, "message": line} for n, line in enumerate(lines)]
        sdk.aws("logs", "put_log_events", logGroupName=GROUP, logStreamName=stream, logEvents=events)
    return "followed"


def test_status_says_state_machines_and_places(sdk: Any, job: str) -> None:
    """Fails when: one of them is left out."""
    shown = sdk.toolkit("sagemaker", "status", job)
    assert shown.code == 0, shown.err
    lines = dict(line.split("  ", 1) for line in shown.out.splitlines() if "  " in line)
    assert lines["state"].strip() == "Completed"
    assert lines["machines"].strip() == "2 x ml.g5.xlarge, spot"
    assert lines["checkpoints"].strip() == "s3://followed-1/toolkit-jobs/followed/checkpoints"
    assert "model.tar.gz" in lines["model"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [("ExecuteUserScriptError: ExitCode 2\nErrorMessage", "refused its settings or data"), ("ExitCode 137", "memory ran out"), ("CapacityError", None)],
)  # fmt: skip
def test_status_explains_the_exit_codes_that_recipes_have(reason: str, said: str | None) -> None:
    """Fails when: a reason without a known code is explained as well, or time saved is that which was billed."""
    described = {
        "TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", "FailureReason": reason, "TrainingTimeInSeconds": 600, "BillableTimeInSeconds": 150,
        "FinalMetricDataList": [{"MetricName": "eval:loss", "Value": 1.25}],
    }  # fmt: skip
    text = "\n".join(status_lines(described))
    assert ("meaning" in text) == (said is not None)
    assert said is None or said in text
    assert "10.0 min, 2.5 min billed, 75% saved" in text
    assert "eval:loss  1.25" in text


@pytest.mark.parametrize("follow", [[], ["--follow"]], ids=["once", "follow"])
def test_logs_are_those_of_all_machines_whole_and_each_line_once(sdk: Any, job: str, follow: list[str]) -> None:
    """Fails when: only the first page is read, or following reads a page again."""
    shown = sdk.toolkit("sagemaker", "logs", job, *follow)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert sorted(lines) == sorted([f"algo-1  step {n}/300  loss 1.5" for n in range(300)] + ["algo-2  hello"])


def test_fetch_makes_a_runs_directory_and_leaves_checkpoints_and_dot_files_there(sdk: Any, job: str, tmp_path: Path) -> None:
    """Fails when: the prefix is copied whole, or a key with .. in it leads out of the directory."""
    fetched = sdk.toolkit("sagemaker", "fetch", job, "a/b/here", cwd=tmp_path)
    assert fetched.code == 0, fetched.err
    found = {str(path.relative_to(tmp_path / "a/b/here")): path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert found == {
        "config.yaml": b"seed: 1\n", "metrics.jsonl": b'{"step": 1, "loss": 2.0}\n', "model/config.json": b"{}", "model/model.safetensors": b"weights",
    }  # fmt: skip
    assert not list(tmp_path.rglob("outside.txt"))
    assert sdk.toolkit("sagemaker", "fetch", job, "a/b/here", "--checkpoints", cwd=tmp_path).code == 0
    assert (tmp_path / "a/b/here/checkpoints/step-1/MANIFEST.json").exists()
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("command", ["status", "logs", "fetch"])
def test_a_job_that_is_not_there_is_one_message_and_code_2(sdk: Any, command: str) -> None:
    """Fails when: botocore's exception comes out as a traceback."""
    ran = sdk.toolkit("sagemaker", command, "no-such-job")
    assert ran.code == 2
    assert "refused: AWS: " in ran.err
    assert "Traceback" not in ran.err
