"""SageMaker's limits on a job, checked before anything is uploaded: botocore's service model, and rules between options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.config.setting import flag_of
from toolkit.sagemaker_jobs.job import SDK, SECRET, Job

if TYPE_CHECKING:
    from botocore.model import ServiceModel

_OF_THE_SDK = ("program", "submit_directory", "container_log_level", "job_name", "region")  # hyperparameters that it adds
_INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.(medium|large|\d*xlarge|metal)")
_OF_TORCH_DISTRIBUTED = ("torch_distributed_enabled", "instance_type")


def check_limits(job: Job, hyperparameters: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Refuse what the service would refuse; all of it in one message. Values of variables, which may be keys, are not shown.

    Args:
        hyperparameters: as they are sent, each value as JSON.

    Raises:
        Refusal: with what to change, or botocore isn't installed.
    """
    model = _service_model()
    given = _given(job, hyperparameters, environment)
    problems = [f"{option}: {problem}" for option, shape, value in given if (problem := _problem(model, shape, value))]
    problems += _broken_rules(job)
    if problems:
        raise Refusal(problems[0] if len(problems) == 1 else "\n  - ".join(["SageMaker would refuse this job", *problems]))


def warning_of_instance_type(instance_type: str) -> str:
    """A warning if botocore's service model doesn't list the type: AWS may have newer ones.

    Raises:
        Refusal: no type is written like that.
    """
    known = _service_model().shape_for("TrainingInstanceType").enum
    if instance_type in known:
        return ""
    near = difflib.get_close_matches(instance_type, known, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    if not _INSTANCE_TYPE.fullmatch(instance_type):
        raise Refusal(f"--instance-type {instance_type}: must be ml.FAMILY.SIZE, such as ml.g5.12xlarge.{meant}")
    return f"--instance-type {instance_type}: is none of the types in the installed botocore for training.{meant}"


def _service_model() -> ServiceModel:
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        raise Refusal(f"SageMaker jobs need the SDK: {SDK}") from None
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"))


def _given(
    job: Job, hyperparameters: Mapping[str, str], environment: Mapping[str, str]
) -> Iterator[tuple[str, str, str | int | Sized | None]]:
    """What the job sets: the option, the name of its shape in the service model, the value."""
    yield f"--job-name {job.name}", "TrainingJobName", job.name
    yield f"--role {job.role}", "RoleArn", job.role
    yield "--image-uri", "AlgorithmImage", job.image_uri
    yield f"--keep-alive {job.keep_alive}", "KeepAlivePeriodInSeconds", job.keep_alive
    yield f"--checkpoints {job.checkpoints}", "S3Uri", job.checkpoints
    yield "--channel", "InputDataConfig", job.channels or None
    for name, uri in job.channels.items():
        yield f"--channel {name}={uri}", "ChannelName", name
        yield f"--channel {name}={uri}", "S3Uri", uri
    yield "--subnet", "Subnets", job.subnets or None
    yield from ((f"--subnet {each}", "SubnetId", each) for each in job.subnets)
    yield "--security-group", "VpcSecurityGroupIds", job.security_groups or None
    yield from ((f"--security-group {each}", "SecurityGroupId", each) for each in job.security_groups)
    yield "--tag", "TagList", job.tags
    for key, value in job.tags.items():
        yield f"--tag {key[:40]}", "TagKey", key
        yield f"--tag {key[:40]}", "TagValue", value
    added = _OF_THE_SDK + (_OF_TORCH_DISTRIBUTED if job.torch_distributed else ())
    yield f"settings given, with {len(added)} of the SDK", "HyperParameters", [*hyperparameters, *added]
    yield from ((flag_of(name), "HyperParameterValue", value) for name, value in hyperparameters.items())
    yield "--secret and --token", "TrainingEnvironmentMap", environment
    for name, value in environment.items():
        option = f"--secret {name.removeprefix(SECRET)}" if name.startswith(SECRET) else name
        yield option, "TrainingEnvironmentKey", name
        yield option, "TrainingEnvironmentValue", value


def _problem(model: ServiceModel, shape: str, value: str | int | Sized | None) -> str:
    """What the service model has against a value; empty if nothing."""
    limits = model.shape_for(shape).metadata
    if value is None:
        return ""
    unit = "" if isinstance(value, int) else " characters" if isinstance(value, str) else " entries"
    size = value if isinstance(value, int) else len(value)
    least, most = limits.get("min", 0), limits.get("max", float("inf"))
    if not least <= size <= most:
        return f"{size}{unit}, but SageMaker takes {least} to {most} ({shape})."
    pattern = limits.get("pattern", ".*").replace(r"\p{L}\p{Z}\p{N}", r"\w\s")  # Java's classes
    if isinstance(value, str) and not re.fullmatch(pattern, value, re.DOTALL):
        return f"must match {pattern} ({shape})."
    return ""


def _broken_rules(job: Job) -> Iterator[str]:
    """Rules between options, which no service model has."""
    if job.torch_distributed and (job.processes or job.accelerate_config):
        option = "--processes" if job.processes else "--accelerate-config"
        yield f"--torch-distributed and {option}: torchrun starts one process for each GPU by itself. Leave one out."
    if job.max_wait is not None and not job.spot:
        yield f"--max-wait {job.max_wait}: has no effect without --spot."
    if job.max_wait is not None and job.max_wait < job.max_run:
        yield f"--max-wait {job.max_wait}: must be at least --max-run {job.max_run}; it counts waiting and running together."
    if job.keep_alive and job.spot:
        yield f"--keep-alive {job.keep_alive}: spot machines can't be kept warm; leave out one of --spot and --keep-alive."
    if bool(job.subnets) != bool(job.security_groups):
        yield "--subnet and --security-group: give both, or neither."
