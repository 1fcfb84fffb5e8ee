"""What SageMaker refuses, checked here, where it costs no upload and no waiting: the limits of CreateTrainingJob."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from toolkit.config import Refusal
from toolkit.config.values import flag_of
from toolkit.sagemaker_jobs.job import LONGEST_NAME, Job

LONGEST_RUN = 28 * 24 * 3600  # seconds
LONGEST_KEEP_ALIVE = 21600  # seconds
MOST_HYPERPARAMETERS, LONGEST_HYPERPARAMETER = 100, 2500
OF_THE_SDK = 6  # hyperparameters that the SDK adds: program, code, log level, job name, region, and one to spare
MOST_VARIABLES, LONGEST_VARIABLE = 100, 512
MOST_TAGS, LONGEST_TAG, LONGEST_TAG_VALUE = 50, 128, 256
MOST_CHANNELS, LONGEST_CHANNEL = 20, 64
MOST_SUBNETS, MOST_SECURITY_GROUPS = 16, 5
LONGEST_URI = 1024
LARGEST_VOLUME = 16384  # GB
_TAG = r"[\w\s.:/=+\-@]*"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_S3 = rf"s3://{_BUCKET}(/.*)?"


def check_limits(job: Job, hyperparameters: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Refuse what the service would refuse; all of it in one message.

    `hyperparameters` as they are sent: each value as JSON.

    Raises:
        Refusal: with what to change.
    """
    checks = (_of_name_and_machines(job), _of_time(job), _of_places(job), _of_tags(job), _of_maps(hyperparameters, environment))
    problems = [problem for check in checks for problem in check]
    if problems:
        first = problems[0] if len(problems) == 1 else "\n  - ".join(["SageMaker would refuse this job", *problems])
        raise Refusal(first)


def warning_of_instance_type(instance_type: str) -> str:
    """Of a type that the installed description of the service (botocore's) doesn't list; empty where it does, or isn't there.

    No refusal: AWS has newer types than an older description knows.
    """
    try:
        from botocore.exceptions import DataNotFoundError
        from botocore.loaders import Loader
    except ImportError:
        return ""
    try:
        known = Loader().load_service_model("sagemaker", "service-2")["shapes"]["TrainingInstanceType"]["enum"]
    except (DataNotFoundError, LookupError):
        return ""
    if instance_type in known:
        return ""
    near = difflib.get_close_matches(instance_type, known, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"--instance-type {instance_type}: is none of the types that the installed botocore knows for training.{meant}"


def _of_name_and_machines(job: Job) -> Iterator[str]:
    if len(job.name) > LONGEST_NAME:
        yield f"--job-name {job.name}: has {len(job.name)} characters; at most {LONGEST_NAME}."
    if not re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9])*", job.name):
        yield f"--job-name {job.name}: letters, digits and single dashes between them only."
    if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", job.instance_type):
        meant = "" if job.instance_type.startswith("ml.") else f" Did you mean ml.{job.instance_type}?"
        yield f"--instance-type {job.instance_type}: must be such as ml.g5.12xlarge.{meant}"
    if job.instance_count < 1:
        yield f"--instance-count {job.instance_count}: must be at least 1."
    if not 1 <= job.volume_size <= LARGEST_VOLUME:
        yield f"--volume-size {job.volume_size}: must be 1 to {LARGEST_VOLUME} (GB)."
    if job.role and not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/?[\w+=,.@/-]+", job.role):
        yield f"--role {job.role}: must be a role's ARN, such as arn:aws:iam::111122223333:role/SageMakerExecution."
    if job.torch_distributed and (job.processes or job.accelerate_config):
        option = "--processes" if job.processes else "--accelerate-config"
        yield f"--torch-distributed and {option}: torchrun starts one process for each GPU by itself. Leave one out."
    if job.image_uri and (len(job.image_uri) > 255 or re.search(r"\s", job.image_uri)):
        yield "--image-uri: at most 255 characters, without spaces."


def _of_time(job: Job) -> Iterator[str]:
    if not 1 <= job.max_run <= LONGEST_RUN:
        yield f"--max-run {job.max_run}: must be 1 to {LONGEST_RUN} seconds (28 days)."
    if job.max_wait is not None and not job.spot:
        yield f"--max-wait {job.max_wait}: has no effect without --spot."
    if job.max_wait is not None and job.max_wait < job.max_run:
        yield f"--max-wait {job.max_wait}: must be at least --max-run {job.max_run}; it counts waiting and running together."
    if job.max_wait is not None and job.max_wait > LONGEST_RUN:
        yield f"--max-wait {job.max_wait}: must be at most {LONGEST_RUN} seconds (28 days)."
    if job.keep_alive is not None and not 0 <= job.keep_alive <= LONGEST_KEEP_ALIVE:
        yield f"--keep-alive {job.keep_alive}: must be 0 to {LONGEST_KEEP_ALIVE} seconds."
    if job.keep_alive and job.spot:
        yield f"--keep-alive {job.keep_alive}: spot machines can't be kept warm; leave out one of --spot and --keep-alive."


def _of_places(job: Job) -> Iterator[str]:
    uris = {"--checkpoints": job.checkpoints} if job.checkpoints else {}
    for name, uri in {**uris, **{f"--channel {name}": uri for name, uri in job.channels.items()}}.items():
        if not re.fullmatch(_S3, uri) or len(uri) > LONGEST_URI:
            yield f"{name}={uri}: must be s3://BUCKET/PREFIX, at most {LONGEST_URI} characters."
    if job.bucket is not None and not re.fullmatch(_BUCKET, job.bucket):
        meant = "; without s3://" if job.bucket.startswith("s3://") else ""
        yield f"--bucket {job.bucket}: must be 3 to 63 lower-case letters, digits, dots and dashes, such as my-jobs{meant}."
    if len(job.channels) > MOST_CHANNELS:
        yield f"--channel: {len(job.channels)} channels; at most {MOST_CHANNELS}."
    for name in job.channels:
        if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{LONGEST_CHANNEL}}}", name):
            yield f"--channel {name}: letters, digits, dots, dashes and underscores only, at most {LONGEST_CHANNEL} characters."
    yield from _of_network("--subnet", job.subnets, MOST_SUBNETS)
    yield from _of_network("--security-group", job.security_groups, MOST_SECURITY_GROUPS)
    if bool(job.subnets) != bool(job.security_groups):
        yield "--subnet and --security-group: give both, or neither."


def _of_network(option: str, values: Sequence[str], most: int) -> Iterator[str]:
    if len(values) > most:
        yield f"{option}: {len(values)} of them; at most {most}."
    for value in values:
        if not re.fullmatch("[-0-9a-zA-Z]{1,32}", value):
            yield f"{option} {value}: must be an id, such as {'subnet' if 'subnet' in option else 'sg'}-0123456789abcdef0."


def _of_tags(job: Job) -> Iterator[str]:
    if len(job.tags) > MOST_TAGS:
        yield f"--tag: {len(job.tags)} tags; at most {MOST_TAGS}."
    for name, value in job.tags.items():
        if len(name) > LONGEST_TAG or len(value) > LONGEST_TAG_VALUE:
            yield f"--tag {name[:40]}: at most {LONGEST_TAG} characters for a name, {LONGEST_TAG_VALUE} for a value."
        if not re.fullmatch(_TAG, name + value) or name.lower().startswith("aws:"):
            yield f"--tag {name[:40]}: letters, digits, spaces and . : / = + - @ _ only, and not aws: at the beginning."


def _of_maps(hyperparameters: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[str]:
    most = MOST_HYPERPARAMETERS - OF_THE_SDK
    if len(hyperparameters) > most:
        yield f"{len(hyperparameters)} settings are given; SageMaker takes {most} beside its own. Leave some at their defaults."
    for name, value in hyperparameters.items():
        if len(value) > LONGEST_HYPERPARAMETER:
            yield (
                f"{flag_of(name)}: has {len(value)} characters as JSON; SageMaker takes {LONGEST_HYPERPARAMETER}. "
                "Put it into a file of your own recipe, or bring it as a channel."
            )
    if len(environment) > MOST_VARIABLES:
        yield f"{len(environment)} environment variables; at most {MOST_VARIABLES}. Give fewer of --secret."
    for name, value in environment.items():
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or len(name) > LONGEST_VARIABLE:
            yield f"{_option_of(name)}: is not the name of an environment variable."
        if len(value) > LONGEST_VARIABLE:  # which is not shown: it may be a key
            yield f"{_option_of(name)}: has {len(value)} characters; a variable of a job has at most {LONGEST_VARIABLE}."


def _option_of(variable: str) -> str:
    from toolkit.sagemaker_jobs.start import SECRET

    return f"--secret {variable.removeprefix(SECRET)}" if variable.startswith(SECRET) else variable
