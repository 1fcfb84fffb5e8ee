"""What the service would refuse is refused here, each limit at its edge and one beyond; numbers are botocore's own.

Each test names the one-line change under which it fails.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import Refusal
from toolkit.sagemaker_jobs.job import Job, name_of_job, read_pairs
from toolkit.sagemaker_jobs.limits import check_limits
from toolkit.sagemaker_jobs.recipe_settings import read_recipe_flags
from toolkit.sagemaker_jobs.request import metric_definitions

MONTH = 28 * 24 * 3600
JOB = {"name": "job-1", "recipe": "recipes/sft.py", "instance_type": "ml.g5.12xlarge"}


def many(number: int) -> dict[str, str]:
    return {f"name_{n}": "1" for n in range(number)}


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a" * 63}, {"name": "A-1--b"}, {"role": "arn:aws-cn:iam::123456789012:role/service-role/Sage+Maker"},
        {"spot": True, "max_run": 60, "max_wait": 60}, {"keep_alive": 21600}, {"tags": many(50)}, {"tags": {"k" * 128: "v" * 256}},
        {"tags": {"Größe": "a/b: c@d"}}, {"channels": {f"c.{n}-": "s3://data-1/a" for n in range(20)}}, {"channels": {"c" * 64: "s3://data-1"}},
        {"checkpoints": "s3://data.1/a b/c"}, {"subnets": ["subnet-1"] * 16, "security_groups": ["sg-1"] * 5}, {"image_uri": "x" * 255},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_is_within_the_limits_is_taken(sdk: Any, fields: dict[str, Any]) -> None:
    """Fails when: a comparison is off by one toward refusing."""
    assert sdk.refusal(JOB | fields, many(95), {"A_1": "v" * 512}) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "a" * 64}, "--job-name a+: 64 characters, .* 1 to 63"),
        ({"name": "my_job"}, "--job-name my_job: must match"),
        ({"name": "-a"}, "--job-name -a: must match"),
        ({"name": "a-"}, "--job-name a-: must match"),
        ({"role": "arn:aws:iam::123456789012:user/me"}, "--role arn:.*: must match"),
        ({"image_uri": "x" * 256}, "--image-uri: 256 characters"),
        ({"max_wait": 90000}, "--max-wait 90000: .*--spot"),
        ({"spot": True, "max_run": 61, "max_wait": 60}, "--max-wait 60: .*--max-run 61"),
        ({"keep_alive": -1}, "--keep-alive -1: -1, .* 0 to 21600"),
        ({"keep_alive": 21601}, "--keep-alive 21601: 21601, .* 0 to 21600"),
        ({"keep_alive": 60, "spot": True}, "--keep-alive 60: .*--spot"),
        ({"tags": many(51)}, "--tag: 51 entries, .* 0 to 50"),
        ({"tags": {"k" * 129: "v"}}, "--tag k{40}: 129 characters"),
        ({"tags": {"k": "v" * 257}}, "--tag k: 257 characters"),
        ({"tags": {"a*b": "v"}}, r"--tag a\*b: must match"),
        ({"channels": {f"c{n}": "s3://data-1/a" for n in range(21)}}, "--channel: 21 entries, .* 1 to 20"),
        ({"channels": {"c" * 65: "s3://data-1/a"}}, "--channel c+=.*: 65 characters"),
        ({"channels": {"a b": "s3://data-1/a"}}, "--channel a b=.*: must match"),
        ({"channels": {"a": "data.jsonl"}}, "--channel a=data.jsonl: must match .*s3"),
        ({"channels": {"a": "s3://data-1/" + "x" * 1013}}, "--channel a=.*: 1025 characters"),
        ({"checkpoints": "s3:/bucket/x"}, "--checkpoints s3:/bucket/x: must match"),
        ({"subnets": ["subnet-1"]}, "--subnet and --security-group"),
        ({"subnets": ["subnet-1"] * 17, "security_groups": ["sg-1"]}, "--subnet: 17 entries, .* 1 to 16"),
        ({"subnets": ["subnet-1"], "security_groups": ["sg-1"] * 6}, "--security-group: 6 entries"),
        ({"subnets": ["subnet_1"], "security_groups": ["sg-1"]}, "--subnet subnet_1: must match"),
        ({"torch_distributed": True, "processes": 4}, "--torch-distributed and --processes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_the_service_would_refuse_is_refused_here(sdk: Any, fields: dict[str, Any], said: str) -> None:
    """Fails when: the option's line is left out of limits.py, or a comparison is off by one toward taking it."""
    assert re.match(said, sdk.refusal(JOB | fields, {}, {}))


@pytest.mark.parametrize(
    ("hyperparameters", "environment", "said"),
    [
        (many(96), {}, "settings given, with 5 of the SDK: 101 entries, .* 0 to 100"),
        ({"dataset": "x" * 2501}, {}, "--dataset: 2501 characters"),
        ({}, many(101), "--secret and --token: 101 entries, .* 0 to 100"),
        ({}, {"A": "v" * 513}, "A: 513 characters"),
        ({}, {"TOOLKIT_SECRET_A-B": "x"}, "--secret A-B: must match"),
    ],
    ids=["hyperparameters", "hyperparameter", "variables", "variable", "name"],
)
def test_too_many_or_too_long_is_refused_without_showing_the_value_of_a_variable(sdk: Any, hyperparameters: Any, environment: Any, said: str) -> None:
    """Fails when: the length is that of the value before it is JSON, or a variable's value, which may be a key, is shown."""
    refusal = sdk.refusal(JOB, hyperparameters, environment)
    assert re.match(said, refusal)
    assert "vvv" not in refusal


def test_all_problems_are_in_one_message(sdk: Any) -> None:
    """Fails when: the first one ends the check."""
    assert sdk.refusal(JOB | {"name": "a_b", "keep_alive": -1, "tags": many(51)}, {}, {}).count("\n  - ") == 3


def test_without_the_sdk_the_check_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the check passes where botocore is missing."""
    monkeypatch.setitem(sys.modules, "botocore.loaders", None)
    with pytest.raises(Refusal, match="pip install 'sagemaker"):
        check_limits(Job(name="a", recipe=Path("a.py"), instance_type="ml.g5.xlarge"), {}, {})


@pytest.mark.parametrize(
    ("instance_type", "said"),
    [
        ("ml.g5.2xlarge", None),
        ("ml.g5.999xlarge", r"WARNING: --instance-type ml\.g5\.999xlarge: "),
        ("ml.g99-a1.xlarge", r"WARNING: --instance-type ml\.g99-a1\.xlarge: "),
    ],
)  # fmt: skip
def test_an_instance_type_that_botocore_does_not_know_is_warned_of_and_let_through(sdk: Any, instance_type: str, said: str | None) -> None:
    """AWS has newer ones than a description knows. Fails when: it is refused, or nobody looks it up."""
    ran = sdk.toolkit("sagemaker", "submit", "sft", "--max-steps", "3", "--region", "eu-west-1", "--dry-run", "--instance-type", instance_type)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["ResourceConfig"]["InstanceType"] == instance_type
    assert re.search(said, ran.err) if said else ("WARNING" not in ran.err)


@pytest.mark.parametrize("instance_type", ["ml.g5.2xlarg", "ml.g5.2xlargee", "g5.2xlarge", "ml.g5-2xlarge"])
def test_what_is_not_written_like_an_instance_type_is_refused(sdk: Any, instance_type: str) -> None:
    """Fails when: it is warned of alone, as newer types are, or `.fullmatch` is `.match`."""
    ran = sdk.toolkit("sagemaker", "submit", "sft", "--max-steps", "3", "--region", "eu-west-1", "--dry-run", "--instance-type", instance_type)
    assert ran.code == 2, ran.err
    assert f"--instance-type {instance_type}: " in ran.err
    assert "Did you mean ml.g5" in ran.err


@pytest.mark.parametrize("stem", ["sft", "a_recipe.of-mine", "x" * 200, "___"])
def test_a_jobs_own_name_is_within_the_limits_and_new_each_time(stem: str) -> None:
    """Fails when: the recipe's name is taken as it is."""
    names = {name_of_job(Path(f"{stem}.py")) for _ in range(20)}
    assert all(re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) and len(name) <= 63 for name in names)
    assert len(names) > 18


def test_metric_definitions_stay_within_the_limits_with_many_metrics() -> None:
    """Fails when: the list isn't cut, or a metric that is a file of one's own goes into a name."""

    found = metric_definitions({"metrics": [*many(60), "path/to/mine.py"], "metric_for_best_model": "eval_f1"})
    assert len(found) == 40
    assert all(len(each["Regex"]) <= 500 and len(each["Name"]) <= 255 for each in found)
    assert all(re.compile(each["Regex"]).groups == 1 for each in found)
    assert not any("mine" in each["Name"] for each in found)


@pytest.mark.parametrize("text", ["a", "=b", "a="])
def test_a_pair_without_a_name_or_a_value_is_refused_without_being_shown(text: str) -> None:
    """Fails when: the text, which may be a key, is part of the message."""
    with pytest.raises(Refusal) as refused:
        read_pairs([f"{text}hf_secret" if text == "a" else text], "--secret", "A=b")
    assert "hf_secret" not in str(refused.value)
    assert read_pairs(["a=b=c"], "--x", "") == {"a": "b=c"}


LINES = {
    "sft": "step 3/6  eval_loss 5.6392  eval_perplexity 1281.2348  eval_token_accuracy 0.0500",
    "lora": "step 1/1  loss 8.3175  lr 0  norm 0.9876  supervised_tokens/s 2798  examples/s 39.9745  mfu 0.4100  ETA 0:00",
    "pretrain": "step 1/1  eval_loss 8.3179  eval_perplexity 4097  eval_token_accuracy 0.0037  eval_bits_per_byte 3.4226",
    "dpo": "step 0/1  eval_loss 0.6931  eval_rewards_chosen 0  eval_rewards_rejected 0  eval_reward_margin -2.35e-04  "
    "eval_reward_accuracy 0  eval_logps_chosen -69.4381  eval_logps_rejected -76.0175  eval_logps_drop 0",
    "kto": "step 6/6  eval_loss 0.5002  eval_rewards_desirable -0.0045  eval_rewards_undesirable -0.0032  eval_reward_margin -0.0013  "
    "eval_reward_accuracy 0.5208  eval_logps_desirable -78.4870  eval_logps_undesirable -79.2801  eval_kl 0  eval_reward_auc 0.4635",
    "reward": "step 1/1  eval_loss 0.6933  eval_rewards_chosen -0.0598  eval_rewards_rejected -0.0596  eval_reward_margin -2.35e-04  "
    "eval_reward_accuracy 0.5000",
    "embedding": "step 3/3  eval_loss 4.1234  eval_mrr 0.0818  eval_map 0.0818  eval_recall_at_1 0.0240  eval_ndcg_at_1 0.0240  "
    "eval_recall_at_10 0.1680  eval_ndcg_at_10 0.0858",
    "reranker": "step 3/3  eval_loss 1.7072  eval_mrr 0.3194  eval_map 0.3194  eval_recall_at_1 0.1000  eval_ndcg_at_1 0.1000  "
    "eval_recall_at_10 1  eval_ndcg_at_10 0.4800",
    "multiple_choice": "step 654/654  eval_loss 1.0781  eval_accuracy 0.6947",
    "question_answering": "step 1/1  eval_loss 4.0737  eval_exact_match 0.0500  eval_f1 0.1264  eval_HasAns_exact 0.5000  "
    "eval_NoAns_exact 0  eval_HasAns_f1 0.5000  eval_NoAns_f1 0  eval_best_exact 1  eval_best_exact_thresh -1.5000  eval_best_f1 1  "
    "eval_best_f1_thresh -1.5000",
    "masked_lm": "step 0/505  eval_loss 8.3624  eval_pseudo_perplexity 4283  eval_masked_accuracy 3.67e-04",
    "distill": "step 3/6  eval_loss 5.6392  eval_perplexity 281.2348  eval_token_accuracy 0.0500  eval_kl 1.2034  eval_kl_at_most 1.3000",
    "grpo": "step 3/6  eval_reward 0.3700  eval_completion_length 4.5000  eval_truncated 0.0100",
    "ppo": "step 140/220  reward 0.6961  length 3.4261  loss 0.0015  lr 2.15e-04  norm 1.5537  examples/s 118  ETA 1:39",
    "seq2seq": "step 6/6  eval_loss 4.6392  eval_perplexity 103.4622  eval_token_accuracy 0.2500  eval_bleu 0.7000  eval_chrf 11.2000  "
    "eval_rouge1 0.1500  eval_rouge2 0.0300  eval_rougeL 0.1370  eval_rougeLsum 0.1370  eval_exact_match 0",
    "diffusion": "step 500/500  eval_loss 5.3100  eval_loss_stderr 0.0314  eval_perplexity 202.3406  eval_masked_accuracy 0.1607",
    "accelerated": "step 1/1  eval_loss 1.9366  eval_accuracy 0.2500  eval_f1 0",
    "distill_classifier": "step 4/4  eval_loss 1.9457  eval_accuracy 0.3125  eval_f1 0.2000",
    "token_classification": "step 20/20  eval_loss 1.1202  eval_accuracy 0.6473  eval_precision 0.3473  eval_recall 0.2802  eval_f1 0.2974  "
    "eval_f1_macro 0.2974",
    "zero": "step 10/200  loss 1.9366  lr 9.05e-04  norm 12.5000  examples/s 1,200  ETA 1:30",
}  # printed by the recipes, in a container but for the last one


@pytest.mark.parametrize("recipe", LINES)
def test_every_metric_in_a_line_of_a_recipe_is_found_by_one_definition_and_whole(recipe: str) -> None:
    """Fails when: an evaluation's metric has no definition, `loss` finds eval_loss, or a number is cut off at its comma."""
    settings, _ = read_recipe_flags(Path(__file__).resolve().parents[2] / f"recipes/{recipe}.py", [])
    pairs = [pair.split(" ") for pair in LINES[recipe].split("  ")[1:] if "ETA" not in pair]
    found = [float(match[1]) for each in metric_definitions(settings) if (match := re.search(each["Regex"], LINES[recipe]))]
    assert sorted(found) == sorted(float(number) for _, number in pairs if "," not in number)


def test_a_metric_by_class_has_a_definition_for_each_of_the_first_classes() -> None:
    """Its metrics have the classes' numbers. Fails when: the metric's name, which is in no line, is looked for."""
    path = Path(__file__).resolve().parents[2] / "recipes/accelerated.py"
    settings, _ = read_recipe_flags(path, ["--metrics", "accuracy,f1_per_class"])
    line = "step 6/6  eval_loss 1.9366  eval_accuracy 0.2500  eval_f1_class_0 0.1250  eval_f1_class_1 0  eval_f1_class_9 0.5000"
    found = {each["Name"]: match[1] for each in metric_definitions(settings) if (match := re.search(each["Regex"], line))}
    expected = {"loss": "1.9366", "accuracy": "0.2500", "f1_class_0": "0.1250", "f1_class_1": "0", "f1_class_9": "0.5000"}
    assert found == {f"eval:{name}": number for name, number in expected.items()}
    assert not any("per_class" in each["Name"] for each in metric_definitions(settings))


@pytest.mark.parametrize("line", ["  sample ┃ the loss 3 fell ┃ loss 2.5", "to beat, eval_loss: unigram 2.0763", "rank 1: loss 3.1", "step 3 of 5  loss 2"])
def test_other_lines_hold_no_metric(line: str) -> None:
    """Fails when: an expression finds its name anywhere."""
    settings, _ = read_recipe_flags(Path(__file__).resolve().parents[2] / "recipes/sft.py", [])
    assert not any(re.search(each["Regex"], line) for each in metric_definitions(settings))
