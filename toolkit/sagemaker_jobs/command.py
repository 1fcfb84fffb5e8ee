"""toolkit sagemaker: a recipe as a SageMaker training job; its state, its logs, what it made; the same job on this machine."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.command_line.placement import MOST_RANKS
from toolkit.command_line.recipe_file import Flags, Recipe, find_accelerate_config, find_recipe
from toolkit.config import Refusal
from toolkit.config.places import place_to_write
from toolkit.sagemaker_jobs.job import LONGEST_RUN, Job, name_of_job, read_pairs
from toolkit.system.console import as_typed, say

# Options may be among the recipe's flags: what isn't known here is the recipe's.
_AMONG_FLAGS = {"ignore_unknown_options": True}
_EXAMPLE_SECRET = "HF_TOKEN=my-secret"

app = typer.Typer(
    help="Run a recipe as a SageMaker training job.", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)  # fmt: skip

Name = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
Region = Annotated[str | None, typer.Option(metavar="REGION", help="AWS region. Default: that of your AWS configuration.")]
JobName = Annotated[str | None, typer.Option(metavar="NAME", help="Default: the recipe's and the time.")]
InstanceCount = Annotated[int, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Machines.")]
Processes = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Processes on each machine. Default: one for each GPU.")
]
TorchDistributed = Annotated[
    bool,
    typer.Option(
        "--torch-distributed",
        help="Let SageMaker start torchrun instead of the toolkit's launcher; its exit code is 1 whatever the cause.",
    ),
]
AccelerateConfig = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="An Accelerate config: a name of recipes/launch, such as zero2, or any file."),
]
Include = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="A file or folder to send with the recipe's code; repeatable.")
]
Secret = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VARIABLE=SECRET",
        help="A variable, such as HF_TOKEN or WANDB_API_KEY, that the container reads from Secrets Manager by a secret's name "
        "or ARN; repeatable.",
    ),
]
Token = Annotated[
    list[str] | None,
    typer.Option(
        metavar="VARIABLE",
        help="A variable of this environment to pass on. Whoever may describe the job can read it: --secret is better.",
    ),
]


@app.command(context_settings=_AMONG_FLAGS)
def submit(
    recipe: Recipe,
    instance_type: Annotated[str, typer.Option(metavar="TYPE", help="Such as ml.g5.12xlarge.")],
    flags: Flags = None,
    instance_count: InstanceCount = 1,
    role: Annotated[
        str | None, typer.Option(metavar="ARN", envvar="SAGEMAKER_ROLE", help="The role that the job runs as.")
    ] = None,
    region: Region = None,
    bucket: Annotated[str | None, typer.Option(metavar="NAME", help="S3 bucket. Default: sagemaker-REGION-ACCOUNT.")] = None,
    job_name: JobName = None,
    channel: Annotated[
        list[str] | None, typer.Option(metavar="NAME=S3_URI", help="Data from S3, for --dataset channel:NAME; repeatable.")
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Spot instances: cheaper; an interrupted job resumes by itself.")
    ] = False,
    max_run: Annotated[int, typer.Option(metavar="SECONDS", min=1, max=LONGEST_RUN, help="Longest runtime.")] = 24 * 3600,
    max_wait: Annotated[
        int | None,
        typer.Option(metavar="SECONDS", max=LONGEST_RUN, help="With --spot: waiting and running. Default: twice --max-run."),
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="S3_URI", help="Where checkpoints are kept; an earlier job's: resume it.")
    ] = None,
    volume_size: Annotated[int, typer.Option(metavar="GB", min=1, max=16384, help="Disk of each machine.")] = 100,
    keep_alive: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="Keep the machines warm for the next job; this is billed.")
    ] = None,
    image_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="Container image. Default: Hugging Face's, by the versions below.")
    ] = None,
    transformers_version: Annotated[str, typer.Option(metavar="X.Y.Z", help="Of the image.")] = "4.56.2",
    pytorch_version: Annotated[str, typer.Option(metavar="X.Y.Z", help="Of the image.")] = "2.8.0",
    py_version: Annotated[str, typer.Option(metavar="pyXYZ", help="Of the image.")] = "py312",
    processes: Processes = None,
    torch_distributed: TorchDistributed = False,
    accelerate_config: AccelerateConfig = None,
    include: Include = None,
    secret: Secret = None,
    token: Token = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A tag; repeatable.")] = None,
    subnet: Annotated[list[str] | None, typer.Option(metavar="ID", help="A subnet of your VPC; repeatable.")] = None,
    security_group: Annotated[list[str] | None, typer.Option(metavar="ID", help="A security group; repeatable.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the request and send nothing; needs no AWS account.")
    ] = False,
) -> None:
    """Run a recipe as a SageMaker job. The options may be before RECIPE or among its flags.

    Settings are checked here as the recipe would check them, and the job against SageMaker's limits, before anything is sent.
    """
    from toolkit.sagemaker_jobs.limits import warning_of_instance_type
    from toolkit.sagemaker_jobs.submit import submit as submit_job

    path = Path(find_recipe(recipe))
    job = Job(
        name=job_name or name_of_job(path), recipe=path, instance_type=instance_type,
        instance_count=instance_count, role=role, region=region, bucket=bucket,
        channels=read_pairs(channel or [], "--channel", "train=s3://BUCKET/PREFIX"), spot=spot, max_run=max_run,
        max_wait=max_wait, checkpoints=checkpoints, volume_size=volume_size, keep_alive=keep_alive, image_uri=image_uri,
        transformers_version=transformers_version, pytorch_version=pytorch_version, py_version=py_version,
        processes=processes, torch_distributed=torch_distributed, accelerate_config=_config_file(accelerate_config),
        include=tuple(map(Path, include or [])),
        secrets=read_pairs(secret or [], "--secret", _EXAMPLE_SECRET), tokens=tuple(token or []),
        tags=read_pairs(tag or [], "--tag", "team=speech"), subnets=tuple(subnet or []),
        security_groups=tuple(security_group or []),
    )  # fmt: skip
    settings, given = _read_flags(path, flags or [])
    if warning := warning_of_instance_type(job.instance_type):
        say(f"WARNING: {warning}", error=True)
    request = submit_job(job, settings, given, dry=dry_run)
    if dry_run:
        say(json.dumps(request, indent=2))
        say("Dry run: nothing was sent. Account 000000000000 is a placeholder for yours.", error=True)
        return
    for name in job.tokens:
        say(f"WARNING: {name} is in the job's environment: `aws sagemaker describe-training-job` shows it.", error=True)
    say(f"Submitted {job.name}: {job.instance_count} x {job.instance_type}{', spot' if job.spot else ''}")
    say(f"Checkpoints and metrics: {request['CheckpointConfig']['S3Uri']}")
    for words in (["status", job.name], ["logs", job.name, "--follow"], ["fetch", job.name]):
        say("  " + as_typed("toolkit", "sagemaker", *words, *(["--region", job.region] if job.region else [])))


@app.command()
def status(name: Name, region: Region = None) -> None:
    """Show a job's state, time, metrics, and where its files are."""
    from toolkit.sagemaker_jobs.follow import describe, status_lines

    say("\n".join(status_lines(describe(name, region))))


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    region: Region = None,
) -> None:
    """Print what a job has printed."""
    from toolkit.sagemaker_jobs.follow import log_lines

    for line in log_lines(name, region, follow=follow):
        say(line)


@app.command()
def fetch(
    name: Name,
    folder: Annotated[str | None, typer.Argument(metavar="[FOLDER]", help="Default: runs/JOB.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Copy checkpoints too; they are large.")] = False,
    region: Region = None,
) -> None:
    """Copy a job's settings, metrics, samples and model from S3, as a run's directory."""
    from toolkit.sagemaker_jobs.fetch import fetch as fetch_job

    fetch_job(name, region, place_to_write(folder or f"runs/{name}", "FOLDER"), checkpoints=checkpoints)


@app.command(context_settings=_AMONG_FLAGS)
def simulate(
    recipe: Recipe,
    flags: Flags = None,
    folder: Annotated[str, typer.Option(metavar="FOLDER", help="Folder of the simulated machines and S3.")] = "runs/simulated",
    instance_count: InstanceCount = 1,
    channel: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="A file or folder of this machine as a channel; repeatable.")
    ] = None,
    interrupt_after: Annotated[
        list[float] | None,
        typer.Option(metavar="SECONDS", help="Interrupt after this time in training, as spot instances are; repeatable."),
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Run the `train` command of the package sagemaker-training, as containers do.")
    ] = False,
    job_name: JobName = None,
    processes: Processes = None,
    torch_distributed: TorchDistributed = False,
    accelerate_config: AccelerateConfig = None,
    include: Include = None,
    secret: Secret = None,
    token: Token = None,
) -> None:
    """Run the job on this machine, as its container would be: same code, files, variables and arguments.

    Packages are those of this Python. Ends with the job's exit code. FOLDER/s3 is what S3 would hold.
    """
    from toolkit.sagemaker_jobs.simulate import simulate as simulate_job

    path = Path(find_recipe(recipe))
    job = Job(
        name=job_name or name_of_job(path), recipe=path, instance_type="ml.local.simulated", instance_count=instance_count,
        channels=read_pairs(channel or [], "--channel", "train=data.jsonl"), processes=processes,
        torch_distributed=torch_distributed, accelerate_config=_config_file(accelerate_config),
        include=tuple(map(Path, include or [])),
        secrets=read_pairs(secret or [], "--secret", _EXAMPLE_SECRET), tokens=tuple(token or []),
    )  # fmt: skip
    settings, given = _read_flags(path, flags or [])
    place = place_to_write(folder, "--folder")
    code = simulate_job(job, settings, given, place, interrupt_after=interrupt_after or (), real=real)
    if code == 0:
        s3 = os.path.join(place, "s3")
        say(f"Checkpoints and metrics: {s3}/checkpoints; model: {s3}/model")
    raise typer.Exit(code)


def _config_file(written: str | None) -> Path | None:
    return Path(find_accelerate_config(written)) if written else None


def _read_flags(recipe: Path, flags: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recipe's settings, and those given. A mistyped option of this command is refused as an option."""
    from toolkit.config.setting import nearest
    from toolkit.sagemaker_jobs.recipe_settings import read_recipe_flags

    try:
        return read_recipe_flags(recipe, flags)
    except Refusal as refusal:
        commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
        options = {name.removeprefix("--") for command in commands for option in command.params for name in option.opts}
        for word in flags:
            flag = word.partition("=")[0].removeprefix("--").replace("_", "-")
            unknown = f"unknown setting {word.partition('=')[0]}. --help lists them all."
            near = nearest(flag, options) if str(refusal) == unknown else None
            if near:
                raise Refusal(f"unknown option {word}. Did you mean --{near}?") from None
        raise
