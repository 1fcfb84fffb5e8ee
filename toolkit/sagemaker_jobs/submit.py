"""Submit a job through the SDK, or (a dry run) make the same request and answer it here."""

import copy
import io
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.sagemaker_jobs.job import SDK, Job
from toolkit.sagemaker_jobs.limits import check_limits
from toolkit.sagemaker_jobs.recipe_settings import check_places, packages_for
from toolkit.sagemaker_jobs.request import (
    UNKNOWN_ROLE,
    encoded,
    environment_of,
    estimator_arguments,
    make_source,
    metric_definitions,
)
from toolkit.system.files import temporary_folder

HIDDEN = "(not shown)"
_EVENT = "provide-client-params.sagemaker.CreateTrainingJob"


def submit(job: Job, settings: Mapping[str, Any], hyperparameters: Mapping[str, Any], *, dry: bool = False) -> dict[str, Any]:
    """Check everything, upload the code, create the training job, and return the request that was (or, dry, would be) sent.

    A dry run needs no AWS account: each call is answered here, with account 000000000000. Values of tokens are hidden in what
    is returned.

    Args:
        settings: all settings of the recipe by name; `hyperparameters` are those that were given.

    Raises:
        Refusal: whatever SageMaker or the container would refuse, as far as it can be known here; the SDK isn't installed; AWS
            has refused.
    """
    environment = environment_of(job)
    check_places(settings, hyperparameters, list(job.channels), job.include)
    check_limits(job, encoded(hyperparameters), environment)
    if job.role is None and not dry:
        raise Refusal("--role: is missing, the ARN of the role that the job runs as; or set SAGEMAKER_ROLE.")
    with temporary_folder("source") as folder:
        make_source(folder, job, packages_for(settings, job.recipe, job.accelerate_config))
        request = _fit(job, folder, hyperparameters, metric_definitions(settings), environment, dry)
    for name in job.tokens:
        request["Environment"][name] = HIDDEN
    return request


def estimator_class() -> Any:
    """The SDK's HuggingFace estimator.

    Raises:
        Refusal: the SDK isn't installed, or is 3.x, which has none.
    """
    before = sys.excepthook
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    logging.getLogger("sagemaker.config").setLevel(logging.WARNING)
    try:
        # Not `import sagemaker`: a folder of that name, as in a checkout of the toolkit, would do for that.
        from sagemaker.huggingface import HuggingFace
    except ImportError as error:
        raise Refusal(f"SageMaker jobs need the SDK, version 2 ({error}): {SDK}") from None
    finally:
        sys.excepthook = before  # the SDK puts one of its own there
    return HuggingFace


def _fit(
    job: Job, source: Path, hyperparameters: Mapping[str, Any], definitions: list[dict[str, str]],
    environment: Mapping[str, str], dry: bool,
) -> dict[str, Any]:  # fmt: skip
    hugging_face = estimator_class()
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError, UnknownRegionError
    from sagemaker.session import Session

    requests: list[dict[str, Any]] = []
    region = job.region or boto3.Session().region_name or ("us-east-1" if dry else None)
    if region is None:
        raise Refusal("--region: is missing, and no AWS configuration has one; such as --region eu-west-1.")
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"} if dry else {}
    session = boto3.Session(region_name=region, **keys)
    try:
        session.get_partition_for_region(region)
    except UnknownRegionError:
        raise Refusal(f"--region {region}: AWS has no such region; it is written such as --region eu-west-1.") from None
    session.events.register(_EVENT, lambda params, **_: requests.append(copy.deepcopy(params)))
    if dry:
        session.events.register("before-send", _answer)
    try:
        sdk = Session(boto_session=session, default_bucket=job.bucket, sagemaker_config=_without_telemetry())
        arguments = estimator_arguments(job, source, hyperparameters, definitions, sdk.default_bucket(), environment)
        arguments["role"] = job.role or UNKNOWN_ROLE
        estimator = hugging_face(**arguments, sagemaker_session=sdk)
        estimator.fit(job.channels or None, wait=False, logs=False, job_name=job.name)
    except (BotoCoreError, ClientError) as error:
        raise Refusal(f"AWS: {error}") from None
    except ValueError as error:  # what the SDK itself refuses, such as an unknown image
        raise Refusal(f"the SageMaker SDK: {error}") from None
    return requests[0]


def _without_telemetry() -> dict[str, Any]:
    """The caller's own configuration of the SDK, which otherwise reports each call with the account's number."""
    from sagemaker.config import load_sagemaker_config

    config = copy.deepcopy(load_sagemaker_config() or {})
    config.setdefault("SchemaVersion", "1.0")
    modules = config.setdefault("SageMaker", {}).setdefault("PythonSDK", {}).setdefault("Modules", {})
    modules["TelemetryOptOut"] = True
    return config


def _answer(request: Any, **_: Any) -> Any:
    """What AWS would answer, so that nothing leaves this machine."""
    from botocore.awsrequest import AWSResponse

    target = request.headers.get("X-Amz-Target", b"")
    operation = (target.decode() if isinstance(target, bytes) else target).rpartition(".")[2]
    body, kind = b"", "text/xml"
    if operation:
        body, kind = b'{"TrainingJobArn": "arn:aws:sagemaker:dry:000000000000:training-job/dry"}', "application/json"
    elif ".amazonaws.com" in request.url and "//sts." in request.url:
        body = (
            b'<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
            b"<Arn>arn:aws:iam::000000000000:user/dry</Arn><UserId>DRY</UserId><Account>000000000000</Account>"
            b"</GetCallerIdentityResult></GetCallerIdentityResponse>"
        )

    elif request.method == "GET":  # of the buckets
        body = b"<ListAllMyBucketsResult><Owner/><Buckets/></ListAllMyBucketsResult>"

    class Raw(io.BytesIO):
        def stream(self, **_: Any) -> Any:
            yield self.read()

    return AWSResponse(request.url, 200, {"Content-Type": kind, "Content-Length": str(len(body))}, Raw(body))
