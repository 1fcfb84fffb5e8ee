"""What a SageMaker container runs, on each of its machines: read the keys, start the recipe's ranks, hand on their exit code.

Copied as it is to the top of a job's code. The ranks are started as `toolkit train` starts them, unless torchrun has done so
already (--torch-distributed): it turns a refusal's code 2 and its one message into 1 and a table, and takes no Accelerate
config. The container has where the machines are in both cases.
"""

import json
import os
import sys
import zlib
from collections.abc import Mapping

from toolkit.command_line.placement import placement_of
from toolkit.command_line.refusals import print_refusal
from toolkit.config import Refusal
from toolkit.distributed.launch import launch
from toolkit.sagemaker_jobs.job import SECRET

_PORTS = range(20000, 32768)  # below those that Linux hands out by itself


def main() -> None:
    """Run the recipe that TOOLKIT_RECIPE names, with this process's arguments; never returns."""
    try:
        keys = read_secrets(os.environ)
        command = [sys.executable, os.environ["TOOLKIT_RECIPE"], *sys.argv[1:]]
        if "TORCHELASTIC_RUN_ID" in os.environ:  # this process is a rank of torchrun's
            os.execve(sys.executable, command, {**os.environ, **keys})
        placement = placement_of(options_of_container(os.environ))
    except Refusal as refusal:
        print_refusal(refusal)
        sys.exit(2)
    sys.exit(launch(command, placement.processes, placement.nodes, environment={**placement.environment, **keys}))


def options_of_container(environment: Mapping[str, str]) -> dict[str, object]:
    """The machines of a job as the options of `toolkit train`: one process for each GPU, all meeting on the first host."""
    hosts = json.loads(environment["SM_HOSTS"])
    several = len(hosts) > 1
    config = environment.get("TOOLKIT_ACCELERATE_CONFIG")
    processes = environment.get("TOOLKIT_PROCESSES") or environment.get("SM_NUM_GPUS") or "1"
    job = environment.get("TRAINING_JOB_NAME", "")
    return {
        "processes": max(int(processes), 1),
        "accelerate_config": config,
        "nodes": len(hosts),
        "node_rank": hosts.index(environment["SM_CURRENT_HOST"]) if several else None,
        "main_address": hosts[0] if several else None,
        "main_port": _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if several else None,
    }


def read_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose values wait in Secrets Manager. A secret is the value itself, or JSON with the variable's name.

    Raises:
        Refusal: one can't be read, or hasn't the variable.
    """
    named = {name.removeprefix(SECRET): secret for name, secret in environment.items() if name.startswith(SECRET)}
    if not named:
        return {}
    import boto3  # every SageMaker container has it
    from botocore.exceptions import BotoCoreError, ClientError

    found = {}
    for name, secret in named.items():
        region = secret.split(":")[3] if secret.startswith("arn:") else None
        region = region or environment.get("AWS_REGION") or environment.get("SAGEMAKER_REGION")
        try:
            text = boto3.client("secretsmanager", region_name=region).get_secret_value(SecretId=secret)["SecretString"]
        except (BotoCoreError, ClientError, KeyError) as error:
            raise Refusal(
                f"--secret {name}={secret}: can't be read ({type(error).__name__}: {error}). The job's role needs "
                "secretsmanager:GetSecretValue for it, and the secret must be text."
            ) from None
        found[name] = _value_of(name, secret, text)
    return found


def _value_of(name: str, secret: str, text: str) -> str:
    if not text.lstrip().startswith("{"):
        return text.strip()
    try:
        value = json.loads(text)[name]
    except (ValueError, KeyError, TypeError):
        value = None
    if not isinstance(value, str):
        raise Refusal(f"--secret {name}={secret}: is JSON without a text named {name}.")
    return value


if __name__ == "__main__":
    main()
