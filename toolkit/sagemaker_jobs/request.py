"""From a job to what the SDK's estimator is given, and to the environment of its containers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.sagemaker_jobs.job import Job
from toolkit.sagemaker_jobs.limits import LONGEST_RUN
from toolkit.sagemaker_jobs.source import ENTRY
from toolkit.sagemaker_jobs.start import SECRET

PREFIX = "toolkit-jobs"  # of everything in the bucket
CHECKPOINTS = "/opt/ml/checkpoints"
UNKNOWN_ROLE = "arn:aws:iam::000000000000:role/the-role-that-role-names"


def encoded(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """Hyperparameters as the service stores them, each value as JSON: the container reads their types back into SM_HPS."""
    return {name: json.dumps(value) for name, value in hyperparameters.items()}


def environment_of(job: Job, caller: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the job's containers: what to run, names of secrets, and tokens of the caller that were asked for.

    Raises:
        Refusal: the caller has no such variable.
    """
    found = {"TOOLKIT_RECIPE": f"recipes/{job.recipe.name}"}
    if job.accelerate_config:
        found["TOOLKIT_ACCELERATE_CONFIG"] = f"launch/{job.accelerate_config.name}"
    if job.processes:
        found["TOOLKIT_PROCESSES"] = str(job.processes)
    found |= {f"{SECRET}{name}": secret for name, secret in job.secrets.items()}
    for name in job.tokens:
        if not caller.get(name):
            raise Refusal(f"--token {name}: this environment has no {name}. Set it, or use --secret {name}=NAME_OR_ARN.")
        if name in job.secrets:
            raise Refusal(f"--token {name} and --secret {name}: one of them is enough.")
        found[name] = caller[name]
    return found


def estimator_arguments(
    job: Job, source: Path, hyperparameters: Mapping[str, Any], definitions: list[dict[str, str]], bucket: str,
    environment: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The arguments of `sagemaker.huggingface.HuggingFace`.

    Without `distribution` `start.py` starts the ranks on each machine itself. The profiler and debugger that the SDK adds to
    each job by itself are off: they cost time and a processing job, and know another loop.
    """
    image = {"image_uri": job.image_uri} if job.image_uri else {}
    versions = {"transformers_version": job.transformers_version, "pytorch_version": job.pytorch_version}
    arguments: dict[str, Any] = {
        "entry_point": ENTRY, "source_dir": str(source), "role": job.role,
        "instance_type": job.instance_type, "instance_count": job.instance_count, "volume_size": job.volume_size,
        **image, **versions, "py_version": job.py_version,
        "hyperparameters": dict(hyperparameters), "environment": dict(environment), "metric_definitions": definitions,
        "max_run": job.max_run, "use_spot_instances": job.spot,
        "output_path": f"s3://{bucket}/{PREFIX}", "code_location": f"s3://{bucket}/{PREFIX}",
        "checkpoint_s3_uri": job.checkpoints or f"s3://{bucket}/{PREFIX}/{job.name}/checkpoints",
        "checkpoint_local_path": CHECKPOINTS,
        "tags": [{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
        "disable_profiler": True, "debugger_hook_config": False,
    }  # fmt: skip
    if job.spot:
        arguments["max_wait"] = job.max_wait or min(2 * job.max_run, LONGEST_RUN)
    if job.torch_distributed:
        arguments["distribution"] = {"torch_distributed": {"enabled": True}}
    if job.keep_alive is not None:
        arguments["keep_alive_period_in_seconds"] = job.keep_alive
    if job.subnets:
        arguments |= {"subnets": list(job.subnets), "security_group_ids": list(job.security_groups)}
    return arguments
