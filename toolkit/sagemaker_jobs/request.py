"""What a job sends: its code folder, its environment, its metric definitions, and the arguments of the SDK's estimator."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import toolkit
from toolkit.config import Refusal
from toolkit.config.conditions import USUAL_METRICS, USUAL_TAG_METRICS
from toolkit.sagemaker_jobs.job import LONGEST_RUN, SECRET, Job

ENTRY = "start.py"
_TAKEN = {ENTRY, "toolkit", "recipes", "launch", "requirements.txt", "setup.py"}
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "_recipes", ".*")
PREFIX = "toolkit-jobs"  # of everything in the bucket
CHECKPOINTS = "/opt/ml/checkpoints"
UNKNOWN_ROLE = "arn:aws:iam::000000000000:role/the-role-that-role-names"
_NUMBER = r"([-+]?[0-9][0-9.]*(?:e[-+]?[0-9]+)?)"
# Name in SageMaker: name in the line `step 10/200  loss 2.3456  lr 1.00e-03 ...`
_OF_TRAINING = {
    "train:loss": "loss", "train:learning_rate": "lr", "train:grad_norm": "norm",
    "train:tokens_per_second": "supervised_tokens/s",
    "train:examples_per_second": "examples/s", "train:mfu": "mfu",
}  # fmt: skip
_OF_ROLLOUTS = {"train:reward": "reward", "train:completion_length": "length"}
_OF_PAIRS = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
# Metrics of the recipes' evaluations next to eval_loss, by a setting that only those recipes have.
_OF_EVALUATION = {
    "z_loss": ("perplexity", "token_accuracy", "bits_per_byte"),
    "ld_alpha": (*_OF_PAIRS, "logps_chosen", "logps_rejected", "logps_drop"),
    "desirable_weight": (
        "rewards_desirable", "rewards_undesirable", "reward_margin", "reward_accuracy", "logps_desirable", "logps_undesirable",
        "kl", "reward_auc",
    ),
    "center_rewards_coefficient": _OF_PAIRS,
    "teacher_top_k": ("perplexity", "token_accuracy", "kl", "kl_at_most"),
    "denoising_steps": ("loss_stderr", "perplexity", "masked_accuracy"),
    "reward_funcs": ("reward", "completion_length", "truncated"),
    "predict_with_generate": (
        "perplexity", "token_accuracy", "bleu", "chrf", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match",
    ),
    "mlm_probability": ("pseudo_perplexity", "masked_accuracy"),
    "embedding_loss": ("mrr", "map", "recall_at_1", "ndcg_at_1", "recall_at_10", "ndcg_at_10", "spearman", "pearson"),
    "ranking_loss": ("mrr", "map", "recall_at_1", "ndcg_at_1", "recall_at_10", "ndcg_at_10"),
    "doc_stride": (
        "exact_match", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_exact_thresh",
        "best_f1", "best_f1_thresh",
    ),
}
_MOST_METRICS = 40  # of MetricDefinitionList in botocore's service model
_PER_CLASS, _CLASSES = "_per_class", 10  # how many classes there are is known when the data are read: the first ones


def make_source(folder: Path, job: Job, packages: Sequence[str] = ()) -> None:
    """Fill an empty folder with what the container runs.

    Nothing else of the working directory goes along, neither dot files nor what is not listed. `packages` are added to
    requirements.txt.

    Raises:
        Refusal: an included file is missing, or has a name that is taken.
    """
    package = Path(toolkit.__file__).resolve().parent
    shutil.copytree(package, folder / "toolkit", ignore=_LEFT_OUT)
    (folder / "recipes").mkdir()
    shutil.copy(job.recipe, folder / "recipes" / job.recipe.name)
    if job.accelerate_config:
        (folder / "launch").mkdir()
        shutil.copy(job.accelerate_config, folder / "launch" / job.accelerate_config.name)
    shutil.copy(Path(__file__).with_name(ENTRY), folder / ENTRY)
    fixed = Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8")
    (folder / "requirements.txt").write_text(fixed + "".join(f"{name}\n" for name in packages), encoding="utf-8")
    for path in job.include:
        if not path.exists():
            raise Refusal(f"--include {path}: no such file or folder.")
        if path.name in _TAKEN or path.name.startswith("."):
            raise Refusal(f"--include {path}: a job's folder can't hold another {path.name}. Give it another name.")
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=_LEFT_OUT)
        else:
            shutil.copy(path, folder / path.name)


def encoded(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """Hyperparameters as the service stores them, each value as JSON: the container reads their types back into SM_HPS."""
    return {name: json.dumps(value) for name, value in hyperparameters.items()}


def environment_of(job: Job) -> dict[str, str]:
    """The environment of the job's containers: what to run, names of secrets, and this environment's tokens as requested.

    Raises:
        Refusal: this environment has no such variable.
    """
    found = {"TOOLKIT_RECIPE": f"recipes/{job.recipe.name}"}
    if job.accelerate_config:
        found["TOOLKIT_ACCELERATE_CONFIG"] = f"launch/{job.accelerate_config.name}"
    if job.processes:
        found["TOOLKIT_PROCESSES"] = str(job.processes)
    found |= {f"{SECRET}{name}": secret for name, secret in job.secrets.items()}
    for name in job.tokens:
        if not os.environ.get(name):
            raise Refusal(f"--token {name}: this environment has no {name}. Set it, or use --secret {name}=NAME_OR_ARN.")
        if name in job.secrets:
            raise Refusal(f"--token {name} and --secret {name}: one of them is enough.")
        found[name] = os.environ[name]
    return found


def estimator_arguments(
    job: Job, source: Path, hyperparameters: Mapping[str, Any], definitions: list[dict[str, str]], bucket: str,
    environment: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The arguments of `sagemaker.huggingface.HuggingFace`.

    Without `distribution` `start.py` starts the ranks on each machine itself. The profiler and debugger that the SDK adds to
    each job by itself are off: they cost time and a processing job, and expect another loop.
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


def metric_definitions(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """The metrics that a recipe with these settings prints, in its training lines and its evaluations: name and expression.

    SageMaker reads the first group of each match as a number. Other lines, such as a generated sample, don't begin this way.
    """
    names = ["loss", *(name for setting, found in _OF_EVALUATION.items() if setting in settings for name in found)]
    usual = USUAL_TAG_METRICS if "tag_scheme" in settings else USUAL_METRICS.get(settings.get("problem_type", ""), [])
    metrics = [name for name in settings.get("metrics") or usual if re.fullmatch(r"\w+", name)]
    names += [name for name in metrics if not name.endswith(_PER_CLASS)]
    names.append(settings.get("metric_for_best_model", "eval_loss").removeprefix("eval_"))
    by_class = [name.removesuffix(_PER_CLASS) for name in metrics if name.endswith(_PER_CLASS)]
    names += [f"{name}_class_{number}" for name in by_class for number in range(_CLASSES)]
    sampled = _OF_ROLLOUTS if "reward_funcs" in settings else {}
    printed = _OF_TRAINING | sampled | {f"eval:{name}": f"eval_{name}" for name in dict.fromkeys(names)}
    return [{"Name": name, "Regex": _expression(text)} for name, text in printed.items()][:_MOST_METRICS]


def _expression(printed: str) -> str:
    """A metric among the pairs of name and number that follow the step."""
    return rf"(?:^|\s)step [0-9]+/[0-9]+  (?:\S+ \S+  )*{re.escape(printed)} {_NUMBER}(?:\s|$)"
