"""A job as it is requested: machines, time, places and names. The settings of its recipe are not in it."""

import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.config import Refusal

SDK = "pip install 'sagemaker>=2.257,<3'"  # as the extra `sagemaker`; it brings boto3 and botocore
SECRET = "TOOLKIT_SECRET_"  # TOOLKIT_SECRET_HF_TOKEN names the secret that becomes HF_TOKEN
LONGEST_NAME = 63
LONGEST_RUN = 28 * 24 * 3600  # seconds; in AWS's documentation, not in its service model


@dataclass(frozen=True)
class Job:
    """What is requested of SageMaker. Times in seconds, the volume in GB; None: the default, which `request` fills in.

    `channels` by name; `secrets` and `tags` by the name of the variable or tag; `tokens` are names of variables of the caller.
    """

    name: str
    recipe: Path
    instance_type: str
    instance_count: int = 1
    role: str | None = None
    region: str | None = None
    bucket: str | None = None
    image_uri: str | None = None
    transformers_version: str = "4.56.2"  # the newest image in the SDK (2.257); requirements.txt brings newer packages
    pytorch_version: str = "2.8.0"
    py_version: str = "py312"
    spot: bool = False
    max_run: int = 24 * 3600
    max_wait: int | None = None
    keep_alive: int | None = None
    volume_size: int = 100
    checkpoints: str | None = None
    channels: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    processes: int | None = None
    torch_distributed: bool = False
    accelerate_config: Path | None = None
    include: tuple[Path, ...] = ()


def name_of_job(recipe: Path) -> str:
    """A name that no other job has: the recipe's, the time, four random digits."""
    stem = re.sub("[^a-zA-Z0-9]+", "-", recipe.stem).strip("-") or "job"
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    ending = f"-{when}-{secrets.token_hex(2)}"
    return stem[: LONGEST_NAME - len(ending)].rstrip("-") + ending


def read_pairs(written: list[str], option: str, example: str) -> dict[str, str]:
    """NAME=VALUE options as a dictionary.

    Raises:
        Refusal: one without a name or a value, or a name twice. A value is not repeated: it may be a key.
    """
    pairs: dict[str, str] = {}
    for text in written:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise Refusal(f"{option}: must be NAME=VALUE, such as {option} {example}.")
        if name in pairs:
            raise Refusal(f"{option} {name}: given twice; keep one.")
        pairs[name] = value
    return pairs
