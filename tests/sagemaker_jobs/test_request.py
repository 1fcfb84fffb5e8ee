"""The unmodified SDK against moto on loopback: the request as it arrives, whole; the code that is uploaded; dry runs.

Each test names the one-line change under which it fails.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLE = "arn:aws:iam::123456789012:role/SageMakerExecution"
IMAGE = "763104351884.dkr.ecr.eu-west-1.amazonaws.com/huggingface-pytorch-training:2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04"
BUCKET = "jobs-1"  # given in each test: the SDK asks for the account, which the default is named after, at a fixed address
BY_CHANCE = "a_recipe_of_mine"
MINE = """
from dataclasses import dataclass
import toolkit as tk
@dataclass(frozen=True)
class Config(tk.DataConfig, tk.OutputConfig):
    flavor: str = 'plain "quoted"'
def main(config: Config) -> None: ...
"""


def number(name: str) -> str:
    """The expression for a metric, written out once more."""
    return rf"(?:^|\s)step [0-9]+/[0-9]+  (?:\S+ \S+  )*{name} ([-+]?[0-9][0-9.]*(?:e[-+]?[0-9]+)?)(?:\s|$)"


def named(sdk: Any, uri: str) -> dict[str, bytes]:
    """The files of a packed source folder in S3."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    packed = sdk.aws("s3", "get_object", Bucket=bucket, Key=key)["Body"]
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name.removeprefix("./"): archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def test_the_request_of_a_job_with_everything_is_this_one(sdk: Any) -> None:
    """Compared whole, as it arrives on the wire. Fails when: any argument of the estimator is left out, or its default changes."""
    ran = sdk.toolkit(
        "sagemaker", "submit", "sft", "--bucket", BUCKET, "--instance-type", "ml.g5.12xlarge", "--instance-count", 2, "--spot", "--max-run", 7200,
        "--max-wait", 9000, "--role", ROLE, "--job-name", "everything", "--channel", "train=s3://data-1/chats",
        "--channel", "base=s3://data-1/model/", "--model", "channel:base", "--dataset", "channel:train:0.7,stdlib:sft:0.3",
        "--learning-rate", "2e-4", "--max-steps", "40", "--no-packing", "--bf16", "--report-to", "wandb,tensorboard", "--eval-split", "a, \"b\"",
        "--secret", "HF_TOKEN=team/hub", "--tag", "team=speech", "--tag", "cost center=12", "--volume-size", "250",
        "--subnet", "subnet-1", "--security-group", "sg-1", "--accelerate-config", "fsdp2", "--processes", 4,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert len(ran.requests) == 1
    expected = {
        "TrainingJobName": "everything",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE,
            "TrainingInputMode": "File",
            "EnableSageMakerMetricsTimeSeries": True,
            "MetricDefinitions": [
                {"Name": "train:loss", "Regex": number("loss")},
                {"Name": "train:learning_rate", "Regex": number("lr")},
                {"Name": "train:grad_norm", "Regex": number("norm")},
                {"Name": "train:tokens_per_second", "Regex": number("supervised_tokens/s")},
                {"Name": "train:examples_per_second", "Regex": number("examples/s")},
                {"Name": "train:mfu", "Regex": number("mfu")},
                *({"Name": f"eval:{name}", "Regex": number(f"eval_{name}")} for name in ("loss", "perplexity", "token_accuracy", "bits_per_byte")),
            ],
        },
        "HyperParameters": {
            "model": '"channel:base"', "dataset": '"channel:train:0.7,stdlib:sft:0.3"', "learning_rate": "0.0002", "max_steps": "40",
            "packing": "false", "bf16": "true", "report_to": '["wandb", "tensorboard"]', "eval_split": '"a, \\"b\\""',
            "sagemaker_submit_directory": f'"s3://{BUCKET}/toolkit-jobs/everything/source/sourcedir.tar.gz"',
            "sagemaker_program": '"start.py"', "sagemaker_container_log_level": "20", "sagemaker_job_name": '"everything"',
            "sagemaker_region": '"eu-west-1"',
        },
        "Environment": {
            "TOOLKIT_RECIPE": "recipes/sft.py", "TOOLKIT_ACCELERATE_CONFIG": "launch/fsdp2.yaml", "TOOLKIT_PROCESSES": "4",
            "TOOLKIT_SECRET_HF_TOKEN": "team/hub",
        },
        "InputDataConfig": [
            {"ChannelName": name, "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}}}
            for name, uri in (("train", "s3://data-1/chats"), ("base", "s3://data-1/model/"))
        ],
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/toolkit-jobs"},
        "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/toolkit-jobs/everything/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2, "VolumeSizeInGB": 250},
        "StoppingCondition": {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 9000},
        "EnableManagedSpotTraining": True,
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "Tags": [{"Key": "team", "Value": "speech"}, {"Key": "cost center", "Value": "12"}],
        "ProfilerConfig": {"DisableProfiler": True},
    }  # fmt: skip
    assert ran.requests[0] == expected
    files = named(sdk, f"s3://{BUCKET}/toolkit-jobs/everything/source/sourcedir.tar.gz")
    assert "wandb" in files["requirements.txt"].decode().splitlines()
    assert files["launch/fsdp2.yaml"] == (ROOT / "recipes/launch/fsdp2.yaml").read_bytes()


def test_the_smallest_request_has_no_spot_no_channels_and_one_day(sdk: Any) -> None:
    """Fails when: an option that isn't given leaves a trace, such as an empty list, which the service refuses."""
    ran = sdk.toolkit("sagemaker", "submit", "sft", "--instance-type", "ml.g5.xlarge", "--job-name", "small", "--bucket", BUCKET, SAGEMAKER_ROLE=ROLE)
    assert ran.code == 0, ran.err
    request = ran.requests[0]
    request.pop("AlgorithmSpecification")
    request.pop("HyperParameters")
    assert request == {
        "TrainingJobName": "small", "RoleArn": ROLE, "Environment": {"TOOLKIT_RECIPE": "recipes/sft.py"},
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/toolkit-jobs"},
        "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/toolkit-jobs/small/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 100},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400}, "ProfilerConfig": {"DisableProfiler": True},
    }  # fmt: skip


def test_torch_distributed_is_the_estimators(sdk: Any) -> None:
    """Fails when: the option doesn't reach the estimator, or its options go together with those that torchrun knows nothing of."""
    words = ["sagemaker", "submit", "sft", "--instance-type", "ml.g5.12xlarge", "--instance-count", 2, "--bucket", BUCKET, "--torch-distributed"]
    ran = sdk.toolkit(*words, SAGEMAKER_ROLE=ROLE)
    assert ran.code == 0, ran.err
    sent = ran.requests[0]["HyperParameters"]
    assert sent["sagemaker_torch_distributed_enabled"] == "true"
    assert sent["sagemaker_instance_type"] == '"ml.g5.12xlarge"'
    refused = sdk.toolkit(*words, "--processes", 4, SAGEMAKER_ROLE=ROLE)
    assert refused.code == 2
    assert "--torch-distributed and --processes" in refused.err
    assert not refused.requests


def test_an_image_and_warm_machines_and_an_earlier_jobs_checkpoints_are_taken(sdk: Any) -> None:
    """Fails when: an image of one's own still needs to be one that the SDK knows, or --checkpoints gets the job's name added."""
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mine:1"
    ran = sdk.toolkit(
        "sagemaker", "submit", "sft", "--instance-type", "ml.g5.xlarge", "--role", ROLE, "--job-name", "warm", "--image-uri", image,
        "--keep-alive", "600", "--checkpoints", "s3://other-1/job/checkpoints", "--bucket", "mine-1",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    request = ran.requests[0]
    assert request["AlgorithmSpecification"]["TrainingImage"] == image
    assert request["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600
    assert request["CheckpointConfig"]["S3Uri"] == "s3://other-1/job/checkpoints"
    assert request["OutputDataConfig"]["S3OutputPath"] == "s3://mine-1/toolkit-jobs"


def test_the_code_is_the_toolkit_one_recipe_and_what_was_included_and_no_token(sdk: Any, tmp_path: Path) -> None:
    """Tokens are planted in the environment, next to the recipe and in a login. They are searched for in the request, the code and
    all that is printed. Fails when: the folder of the recipe goes along, dot files do, or --token shows its value."""
    token = "hf_" + "plantedTOKEN" * 2
    (tmp_path / f"{BY_CHANCE}.py").write_text(MINE)
    (tmp_path / "notes.txt").write_text(token)
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra/.env").write_text(token)
    (tmp_path / "extra/prompts.txt").write_text("hello")
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text(token)
    words = ["sagemaker", "submit", f"{BY_CHANCE}.py", "--instance-type", "ml.g5.xlarge", "--role", ROLE, "--include", "extra", "--bucket", BUCKET]
    keys = {"HF_TOKEN": token, "WANDB_API_KEY": token[::-1], "HOME": str(tmp_path)}
    ran = sdk.toolkit(*words, "--job-name", "mine", "--flavor", "two words", "--secret", "WANDB_API_KEY=keys", cwd=tmp_path, **keys)
    assert ran.code == 0, ran.err
    files = named(sdk, f"s3://{BUCKET}/toolkit-jobs/mine/source/sourcedir.tar.gz")
    own = {name for name in files if not name.startswith("toolkit/")}
    assert own == {"start.py", "requirements.txt", f"recipes/{BY_CHANCE}.py", "extra/prompts.txt"}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "toolkit").rglob("*") if path.suffix in (".py", ".pyi", ".txt", ".md", ".typed")}
    assert {name for name in files if name.startswith("toolkit/")} == package
    everything = ran.out + ran.err + json.dumps(ran.requests) + "".join(content.decode("utf-8", "replace") for content in files.values())
    for secret in (token, token[::-1]):
        assert secret not in everything
    assert ran.requests[0]["HyperParameters"]["flavor"] == '"two words"'

    asked_for = sdk.toolkit(*words, "--job-name", "asked", "--token", "HF_TOKEN", cwd=tmp_path, **keys)
    shown = sdk.toolkit(*words, "--job-name", "asked", "--token", "HF_TOKEN", "--dry-run", cwd=tmp_path, **keys)
    assert asked_for.code == shown.code == 0
    assert asked_for.requests[0]["Environment"]["HF_TOKEN"] == token
    assert "WARNING: HF_TOKEN" in asked_for.err
    assert "(not shown)" in shown.out
    assert token not in asked_for.out + asked_for.err + shown.out + shown.err + json.dumps(asked_for.requests[0]["HyperParameters"])


def test_a_dry_run_prints_the_request_that_would_be_sent_without_an_account(sdk: Any, tmp_path: Path) -> None:
    """No credentials, a closed port as AWS. Fails when: a call reaches the network, or the printed request is another one."""
    words = ["sagemaker", "submit", "sft", "--instance-type", "ml.g5.xlarge", "--job-name", "dry", "--spot", "--max-steps", "4", "--role", ROLE]
    sent = sdk.toolkit(*words, "--bucket", BUCKET)
    without = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_DEFAULT_REGION": None, "AWS_ENDPOINT_URL": None}
    nowhere = {**without, "HTTPS_PROXY": "http://127.0.0.1:9", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    dry = sdk.toolkit(*words, "--region", "eu-west-1", "--dry-run", **nowhere)
    assert (sent.code, dry.code) == (0, 0), dry.err + sent.err
    assert dry.requests == []
    assert json.loads(dry.out.replace("sagemaker-eu-west-1-000000000000", BUCKET)) == sent.requests[0]


def test_submit_py_is_the_same_command_and_says_what_to_install(tmp_path: Path) -> None:
    """In an environment without the SDK. Fails when: the folder `sagemaker` of a checkout is taken for the SDK."""
    words = ["sft", "--instance-type", "ml.g5.xlarge", "--dry-run", "--max-steps", "3"]
    for folder in (ROOT, tmp_path):
        ran = subprocess.run(
            [sys.executable, str(ROOT / "sagemaker/submit.py"), *words], capture_output=True, text=True, cwd=folder, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "pip install 'sagemaker>=2.257,<3'" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-step", "3"], "Did you mean --max-steps?"),
        (["--spott"], "unknown option --spott. Did you mean --spot?"),
        (["--learning-rate", "high"], "--learning-rate high: must be a number"),
        (["--packing", "--max-length", "1"], "--max-length 1: must be at least 2"),
        (["--output-dir", "here"], "--output-dir: a job"),
        (["--resume"], "--resume: a job"),
        (["--dataset", "README.md"], "--dataset README.md: is on this machine"),
        (["--dataset", "channel:train"], "Add --channel train=s3://BUCKET/PREFIX."),
        (["--dataset", "channel:tain", "--channel", "train=s3://data-1/x"], "The job's channels are train."),
        (["--include", "nothing.txt"], "--include nothing.txt: no such file"),
        (["--include", "toolkit"], "can't hold another toolkit"),
        (["--token", "NO_SUCH_VARIABLE"], "this environment has no NO_SUCH_VARIABLE"),
        (["--secret", "hf_aToken"], "--secret: must be NAME=VALUE"),
        (["--tag", "a=1", "--tag", "a=2"], "--tag a: given twice"),
        (["--instance-count", "0"], "--instance-count"),
        (["--volume-size", "16385"], "--volume-size"),
        (["--max-run", "2419201"], "--max-run"),
        (["--spot", "--max-wait", "2419201"], "--max-wait"),
        (["--job-name", "a_b"], "--job-name a_b: must match"),
        (["--region", "nowhere-1"], "--region nowhere-1: AWS"),
        (["--transformers-version", "1.2.3"], "the SageMaker SDK: Unsupported huggingface version: 1.2.3"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_message_and_code_2_before_anything_is_sent(sdk: Any, words: list[str], said: str) -> None:
    """Fails when: the check is left to the container, or to AWS."""
    ran = sdk.toolkit("sagemaker", "submit", "sft", "--instance-type", "ml.g5.xlarge", "--role", ROLE, "--bucket", BUCKET, *words)
    assert ran.code == 2, ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert ran.requests == []


def test_the_containers_requirements_are_the_packages_own() -> None:
    """Fails when: a dependency is added to pyproject.toml and not to the container's file."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "sagemaker/requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert set(lines) - {"torchvision", "torchaudio"} == set(project["dependencies"])
