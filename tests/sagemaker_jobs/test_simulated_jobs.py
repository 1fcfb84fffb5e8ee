"""Jobs on this machine: the real `train` command of the containers on one host and on two, spot interruptions, settings, keys.

Each test names the one-line change under which it fails.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from toolkit.sagemaker_jobs.contract import lay_out, outer_environment, script_arguments, script_environment
from toolkit.sagemaker_jobs.job import Job
from toolkit.sagemaker_jobs.recipe_settings import read_recipe_flags
from toolkit.sagemaker_jobs.request import metric_definitions
from toolkit.sagemaker_jobs.simulate import simulate as simulate_here

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--vocab-size", "300", "--max-length", "64", "--num-samples", "0", "--no-packing",
    "--dataset", "channel:train", "--max-train-examples", "60", "--max-eval-examples", "12", "--dropout", "0.1", "--logging-steps", "1",
    "--global-batch-size", "4", "--per-device-train-batch-size", "2", "--max-steps", "24", "--save-steps", "2", "--eval-steps", "8",
    "--save-total-limit", "1",
]  # fmt: skip
# Writes what it was given, and of its keys a digest.
TELLS = '''
import hashlib, json, os
from dataclasses import asdict, dataclass
from pathlib import Path
import toolkit as tk

@dataclass(frozen=True)
class Config(tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    text: str = "x"
    nothing: float | None = 1.0
    numbers: list[float] = tk.setting([1.0], "Numbers.")
    words: list[str] = tk.setting([], "Words.")
    count: int = 3

def main(config: Config) -> None:
    keys = {name: hashlib.sha256(os.environ[name].encode()).hexdigest() for name in ("HF_TOKEN", "WANDB_API_KEY") if name in os.environ}
    given = {"config": asdict(config), "keys": keys, "environment": sorted(os.environ)}
    Path(os.environ["SM_MODEL_DIR"], "given.json").write_text(json.dumps(given))
    print("step 1/1  loss 1.0", flush=True)

if __name__ == "__main__":
    tk.run_recipe(main)
'''
# Each kind of setting, as a job of the SDK may have it, and what the recipe must be given.
KINDS = {
    "learning_rate": (2e-4, 2e-4), "seed": (4294967295, 4294967295), "packing": (True, True), "streaming": (False, False),
    "nothing": (None, None), "completion_only_loss": (None, None), "numbers": ([1, 2.5, -3e-7], [1.0, 2.5, -3e-7]), "words": (["a b", "c,d", "'e'", '"f"'], ["a b", "c,d", "'e'", '"f"']),
    "rename_columns": ({"question": "prompt", "a": "b"}, ["a=b", "question=prompt"]), "text": ("it's \"quoted\" $HOME `x` \\ ünï\n--max-steps 3", "it's \"quoted\" $HOME `x` \\ ünï\n--max-steps 3"),
    "report_to": (["none"], ["none"]), "lr_patterns": ([], []), "count": (0, 0), "max_steps": (7, 7), "eval_split": ("None", None), "train_split": ("-1", "-1"), "warmup_steps": (0, 0.0),
    "dataset": ("channel:train:0.5,stdlib:sft:0.5", "{channel}:0.5,stdlib:sft:0.5"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"How many are {n} and {n + 1}?", "completion": f"{2 * n + 1}."} for n in range(60)]
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def whole(simulate: Any, sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of one machine, not interrupted, with our imitation of the container and in the environment of the tests."""
    folder = tmp_path_factory.mktemp("whole")
    ran = simulate(folder, "sft", *SMALL, "--channel", f"train={sums}", python=sys.executable)
    assert ran.code == 0, ran.err
    return folder / "job"


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "s3/model/model.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "s3/checkpoints/metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in metrics(folder) if "loss" in event]


def test_every_kind_of_setting_reaches_the_recipe_unchanged_through_the_real_train_command(
    tmp_path: Path, sums: Path, sdk_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As argv, SM_HPS and variables; and the same by our imitation. Fails when: an argument that repeats SM_HPS is read again
    ('' for None, Python's way of printing a list), or the container's own keys are settings."""
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("PATH", f"{Path(sdk_python).parent}:{os.environ['PATH']}")
    given = {}
    for real in (True, False):
        folder = tmp_path / f"job-{real}"
        job = Job(name="tells-1", recipe=tmp_path / "tells.py", instance_type="ml.local.x", channels={"train": str(sums)})
        settings, _ = read_recipe_flags(job.recipe, ["--dataset", "stdlib:sft"])
        assert simulate_here(job, settings, {name: sent for name, (sent, _) in KINDS.items()}, folder, real=real) == 0
        given[real] = json.loads((folder / "s3/model/given.json").read_text())
        machine = folder / "machine-1"
        expected = {name: value for name, (_, value) in KINDS.items()}
        expected["dataset"] = expected["dataset"].replace("{channel}", str(machine / "input/data/train"))
        found = given[real]["config"]
        assert {name: found[name] for name in expected} == expected
        assert (found["output_dir"], found["resume"], found["run_name"]) == (str(machine / "checkpoints"), True, "tells-1")
        assert json.loads((machine / "input/config/hyperparameters.json").read_text())["nothing"] == "null"
    assert {name for name in given[False]["environment"] if name.startswith("SM_")} <= set(given[True]["environment"])


@pytest.mark.parametrize("code", [0, 2])
def test_a_second_job_in_one_folder_says_that_it_goes_on_and_what_begins_another(code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--output-dir, which a recipe's refusal advises, is the container's. Fails when: nobody looks whether S3 holds a run."""
    (tmp_path / "ends.py").write_text(f"import sys; from pathlib import Path; Path('../checkpoints/metrics.jsonl').write_text('x'); sys.exit({code})")
    job = Job(name="ends-1", recipe=tmp_path / "ends.py", instance_type="ml.local.x")
    settings, _ = read_recipe_flags(ROOT / "recipes/sft.py", [])
    said = []
    for _ in range(2):
        assert simulate_here(job, settings, {}, tmp_path / "job") == code
        said.append(capfd.readouterr())
    assert "simulated:" not in said[0].out + said[0].err
    assert re.search(rf"simulated: resumes .*{tmp_path}/job/s3/checkpoints; --folder ", said[1].out)
    assert ("could not resume" in said[1].err and "--folder" in said[1].err) is (code == 2)


def test_the_imitated_variables_are_those_of_the_training_package(tmp_path: Path, sums: Path, sdk_python: str) -> None:
    """From the same files. Fails when: one of them has another text, such as a JSON with spaces in it."""
    hyperparameters = {name: sent for name, (sent, _) in KINDS.items()}
    lay_out(tmp_path / "ml", ["algo-1", "algo-2"], "algo-2", hyperparameters, {"train": sums, "my-base": tmp_path}, "ml.g5.xlarge")
    ours = script_environment(tmp_path / "ml", hyperparameters)
    script = "import json; from sagemaker_training.environment import Environment as E; e = E(); print('@', json.dumps([e.to_env_vars(), e.to_cmd_args()]))"
    ran = subprocess.run(
        [sdk_python, "-c", script], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
        env=outer_environment("job-1", tmp_path / "ml", {}),
    )  # fmt: skip
    theirs, arguments = json.loads(ran.stdout.partition("@")[2])
    ours.pop("PYTHONPATH")
    same = {name: theirs.get(name) for name in ours}
    same["SM_MODULE_DIR"] = ours["SM_MODULE_DIR"]
    assert ours == same
    assert script_arguments(hyperparameters) == arguments
    assert set(theirs) - set(ours) == {
        "SM_CURRENT_INSTANCE_GROUP", "SM_CURRENT_INSTANCE_GROUP_HOSTS", "SM_DISTRIBUTION_INSTANCE_GROUPS", "SM_FRAMEWORK_MODULE", "SM_FRAMEWORK_PARAMS",
        "SM_INPUT_DATA_CONFIG", "SM_INSTANCE_GROUPS", "SM_INSTANCE_GROUPS_DICT", "SM_IS_HETERO", "SM_RESOURCE_CONFIG", "SM_TRAINING_ENV",
    }  # fmt: skip


def test_keys_reach_the_recipe_from_secrets_manager_and_are_written_nowhere(sdk: Any, simulate: Any, tmp_path: Path) -> None:
    """Planted in the caller's environment, a login and two secrets; all that was written and printed is searched. Fails when:
    start.py prints what it has read, or the caller's tokens are handed on."""
    secrets = {"HF_TOKEN": "hf_" + "secretOne" * 3, "WANDB_API_KEY": "f00d" * 10}
    sdk.aws("secretsmanager", "create_secret", Name="team/hub", SecretString=json.dumps({"HF_TOKEN": secrets["HF_TOKEN"], "other": "x"}))
    sdk.aws("secretsmanager", "create_secret", Name="wandb", SecretString=secrets["WANDB_API_KEY"] + "\n")
    login = tmp_path / "home/.cache/huggingface/token"
    login.parent.mkdir(parents=True)
    login.write_text("hf_loginTOKEN")
    (tmp_path / "tells.py").write_text(TELLS)
    aws = {"AWS_ENDPOINT_URL": sdk.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "plantedAwsKey", "AWS_REGION": "eu-west-1"}
    words = ["tells.py", "--secret", "HF_TOKEN=team/hub", "--secret", "WANDB_API_KEY=wandb"]
    environment = {**aws, "HF_TOKEN": "hf_callersTOKEN", "OTHER_TOKEN": "hf_callersTOKEN", "HOME": str(login.parents[2])}
    ran = simulate(tmp_path, *words, "--real", **environment)
    assert ran.code == 0, ran.err + ran.out
    given = json.loads((tmp_path / "job/s3/model/given.json").read_text())
    assert given["keys"] == {name: hashlib.sha256(value.encode()).hexdigest() for name, value in secrets.items()}
    assert "OTHER_TOKEN" not in given["environment"]
    assert "SM_HPS" in ran.err  # the command does print its variables
    written = ran.out + ran.err + "".join(path.read_text(errors="replace") for path in (tmp_path / "job").rglob("*") if path.is_file())
    for planted in (*secrets.values(), "hf_callersTOKEN", "hf_loginTOKEN", "plantedAwsKey"):
        assert planted not in written
    refused = simulate(tmp_path, "tells.py", "--secret", "HF_TOKEN=no/such", folder="other", **environment)
    assert refused.code == 2
    assert "refused: --secret HF_TOKEN=no/such" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.slow
def test_two_hosts_of_the_real_train_command_train_as_one_process_does(simulate: Any, whole: Path, tmp_path: Path, sums: Path) -> None:
    """The same losses, metrics that the definitions find in what is printed, one model. Fails when: the hosts don't meet and train
    apart, the second host delivers a model too, or the log's numbers have commas."""
    two = simulate(tmp_path, "sft", *SMALL, "--channel", f"train={sums}", "--real", "--instance-count", 2)
    assert two.code == 0, two.err + two.out[-3000:]
    folder = tmp_path / "job"
    assert json.loads((folder / "s3/checkpoints/run.json").read_text())["layout"]["processes"] == 2
    assert [step for step, _ in curve(folder)] == list(range(1, 25))
    assert [loss for _, loss in curve(folder)] == pytest.approx([loss for _, loss in curve(whole)], rel=1e-5)
    assert (folder / "s3/model/config.json").exists()
    assert not list((folder / "machine-2/model").iterdir())
    _assert_definitions_find_the_metrics(two.out, folder)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_that_sagemakers_torchrun_starts_train_as_one_process_does(
    simulate: Any, whole: Path, tmp_path: Path, sums: Path, hosts: int
) -> None:
    """On one host and on two. Fails when: `train` isn't given it, the hosts train apart, or the settings are not read there."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # torchrun is next to this Python
    words = ["--channel", f"train={sums}", "--real", "--torch-distributed", "--instance-count", hosts]
    ran = simulate(tmp_path, "sft", *SMALL, *words, PATH=path)
    assert ran.code == 0, ran.err + ran.out[-3000:]
    assert "torchrun" in ran.out + ran.err
    assert json.loads((tmp_path / "job/s3/checkpoints/run.json").read_text())["layout"]["processes"] == hosts
    assert [loss for _, loss in curve(tmp_path / "job")] == pytest.approx([loss for _, loss in curve(whole)], rel=1e-5)


def _assert_definitions_find_the_metrics(out: str, folder: Path) -> None:
    settings, _ = read_recipe_flags(ROOT / "recipes/sft.py", SMALL)
    definitions = {each["Name"]: each["Regex"] for each in metric_definitions(settings)}
    found = {name: [float(match[1]) for line in out.splitlines() if (match := re.search(regex, line))] for name, regex in definitions.items()}
    names = {"train:loss": "loss", "train:learning_rate": "learning_rate", "train:grad_norm": "grad_norm", "train:tokens_per_second": "tokens_per_second",
             "train:examples_per_second": "examples_per_second"}  # fmt: skip
    names |= {name: name.replace(":", "_") for name in definitions if name.startswith("eval:") and "bits" not in name}
    events = metrics(folder)
    for name, key in names.items():
        expected = [event[key] for event in events if key in event]
        assert len(expected) >= 3
        shown = 5e-3 if key.endswith("per_second") else 1e-3  # three digits of a rate
        assert found[name] == pytest.approx(expected, rel=shown, abs=1e-3), name
    printed = {key for event in events for key in event if key.startswith("eval_")}
    assert printed <= set(names.values())


@pytest.mark.slow
def test_a_job_whose_machines_are_taken_away_ends_with_the_weights_of_an_uninterrupted_one(
    simulate: Any, whole: Path, tally: Any, count: Any, chance: Any, tmp_path: Path, sums: Path
) -> None:
    """SIGKILL to the real `train` command and all below it at a random moment; a new machine begins with what S3 holds of the
    files, which were on their way there in random order. Bit for bit. Fails when: a container doesn't resume by itself, half a
    checkpoint is taken for a whole one, or a second machine begins with an empty folder."""
    line, trials = tally("spot", "SageMaker's `train` command: its machine is taken away at a random moment, a new one goes on"), count(2, 10)
    # The time in the metrics is counted from about when the folder is opened.
    seconds, steps, in_part = metrics(whole)[-1]["time"], [], 0
    for attempt in range(3 * trials):
        moment, folder = round(chance.uniform(0.0, 1.0) * seconds, 2), f"job-{attempt}"
        ran = simulate(tmp_path, "sft", *SMALL, "--channel", f"train={sums}", "--real", "--interrupt-after", moment, folder=folder)
        if ran.code == 0 and "taken away" not in ran.out:  # it was quicker than the one that was not interrupted
            continue
        with line.trial(f"interrupted after {moment} s"):
            assert ran.code == 0, ran.err[-1500:] + ran.out[-1500:]
            found, expected = weights(tmp_path / folder), weights(whole)
            assert found.keys() == expected.keys()
            assert all(found[name].equal(tensor) for name, tensor in expected.items())
            assert curve(tmp_path / folder) == curve(whole)
            resumed = re.search(r"Resumed from .* at step (\d+)", ran.out)
            steps.append(int(resumed[1]) if resumed else 0)
            in_part += ran.out.count("came back from S3 in part")
        if line.tried == trials:
            break
    line.measured = f"went on from steps {', '.join(map(str, sorted(steps)))} of 24; {in_part} checkpoints had reached S3 in part"
    line.check()
    assert line.tried == trials
