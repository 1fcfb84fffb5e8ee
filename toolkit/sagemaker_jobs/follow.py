"""The state, metrics and logs of a job."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.config import Refusal
from toolkit.sagemaker_jobs.job import SDK

ENDED = ("Completed", "Failed", "Stopped")
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_POLL_SECONDS = 10.0
# What the container's exit code means, where it is in the reason of the failure.
_CODES = {
    "ExitCode 2": "the recipe refused its settings or data: `toolkit sagemaker logs` shows the line that begins with refused:",
    "ExitCode 75": "a signal stopped the run after a checkpoint: submit again with --checkpoints to go on",
    "ExitCode 137": "killed, most often since memory ran out: a larger instance, or a smaller micro-batch",
}


def aws_client(service: str, region: str | None) -> Any:
    """A client of one of AWS's services.

    Raises:
        Refusal: boto3, which comes with the SDK, isn't installed; or no region is known.
    """
    try:
        import boto3
        from botocore.exceptions import NoRegionError
    except ImportError:
        raise Refusal(f"SageMaker jobs need the SDK: {SDK}") from None
    try:
        return boto3.client(service, region_name=region)
    except NoRegionError:
        raise Refusal("--region: is missing, and no AWS configuration has one; such as --region eu-west-1.") from None


def describe(name: str, region: str | None) -> dict[str, Any]:
    """SageMaker's description of a job.

    Raises:
        Refusal: there is no such job, or AWS doesn't permit the request.
    """
    return asked(lambda: aws_client("sagemaker", region).describe_training_job(TrainingJobName=name))


def asked(call: Callable[[], Any]) -> Any:
    """What a call to AWS returns; what it refuses, as a refusal."""
    try:
        return call()
    except Refusal:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("botocore", "boto3"):
            raise Refusal(f"AWS: {error}") from None
        raise


def status_lines(job: dict[str, Any]) -> list[str]:
    """What a person wants to know of a described job, one thing a line."""
    state = job["TrainingJobStatus"]
    detail = job.get("SecondaryStatus", state)
    rows = [("state", state if detail == state else f"{state} ({detail})")]
    reason = job.get("FailureReason")
    if reason:
        rows.append(("reason", " ".join(reason.split())))
        rows += [("meaning", said) for code, said in _CODES.items() if code in reason]
    machines = job.get("ResourceConfig", {})
    if "InstanceType" in machines:
        spot = ", spot" if job.get("EnableManagedSpotTraining") else ""
        rows.append(("machines", f"{machines.get('InstanceCount', 1)} x {machines['InstanceType']}{spot}"))
    seconds, billed = job.get("TrainingTimeInSeconds"), job.get("BillableTimeInSeconds")
    if seconds is not None:
        saved = f", {1 - billed / seconds:.0%} saved" if billed is not None and 0 < billed < seconds else ""
        of_bill = f", {billed / 60:.1f} min billed{saved}" if billed is not None else ""
        rows.append(("time", f"{seconds / 60:.1f} min{of_bill}"))
    rows += [(metric["MetricName"], f"{metric['Value']:.6g}") for metric in job.get("FinalMetricDataList", [])]
    if "CheckpointConfig" in job:
        rows.append(("checkpoints", job["CheckpointConfig"]["S3Uri"]))
    if job.get("ModelArtifacts", {}).get("S3ModelArtifacts"):
        rows.append(("model", job["ModelArtifacts"]["S3ModelArtifacts"]))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def log_lines(name: str, region: str | None, *, follow: bool = False) -> Iterator[str]:
    """The lines of a job's logs, all machines' so far; with `follow` until the job has ended.

    With several machines each line begins with its machine's name.

    Raises:
        Refusal: there is no such job, or AWS doesn't let us read.
    """
    logs, places = aws_client("logs", region), dict[str, str]()
    count = describe(name, region).get("ResourceConfig", {}).get("InstanceCount", 1)
    while True:
        ended = describe(name, region)["TrainingJobStatus"] in ENDED  # before reading: what came until then is read
        for stream in asked(lambda: _streams(logs, name)):
            machine = stream.split("/", 1)[1].rpartition("-")[0]
            for line in _new_lines(logs, stream, places):
                yield f"{machine}  {line}" if count > 1 else line
        if ended or not follow:
            return
        time.sleep(_POLL_SECONDS)


def _streams(logs: Any, name: str) -> list[str]:
    try:
        pages = logs.get_paginator("describe_log_streams").paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{name}/")
        return sorted(stream["logStreamName"] for page in pages for stream in page["logStreams"])
    except logs.exceptions.ResourceNotFoundException:  # no job of this account has written a line yet
        return []


def _new_lines(logs: Any, stream: str, places: dict[str, str]) -> Iterator[str]:
    """The lines since the last call; `places` holds where that ended, by stream."""
    while True:
        token = {"nextToken": places[stream]} if stream in places else {}
        page = logs.get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **token)
        yield from (event["message"] for event in page["events"])
        unmoved = places.get(stream) == page["nextForwardToken"]
        places[stream] = page["nextForwardToken"]
        if unmoved:  # a page in between may be empty
            return
