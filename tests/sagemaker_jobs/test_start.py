"""What the container's program makes of the container's variables: machines, processes, and keys.

Each test names the one-line change under which it fails.
"""

import json
from pathlib import Path

import pytest

from toolkit.command_line.placement import placement_of
from toolkit.config import Refusal
from toolkit.sagemaker_jobs.recipe_settings import check_places, packages_for, read_recipe_flags
from toolkit.sagemaker_jobs.start import _value_of, options_of_container, read_secrets

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {"SM_HOSTS": '["algo-1","algo-2","algo-3"]', "SM_NUM_GPUS": "4", "TRAINING_JOB_NAME": "job-1"}


def test_three_machines_are_twelve_ranks_that_meet_on_the_first() -> None:
    """Fails when: each machine takes itself for the first, or they look for each other at different ports."""
    places = [placement_of(options_of_container({**HOSTS, "SM_CURRENT_HOST": f"algo-{n}"})) for n in (1, 2, 3)]
    assert [(place.processes, place.nodes.count, place.nodes.this) for place in places] == [(4, 3, 0), (4, 3, 1), (4, 3, 2)]
    assert {(place.nodes.main_address, place.nodes.main_port) for place in places} == {("algo-1", places[0].nodes.main_port)}
    other = options_of_container({**HOSTS, "SM_CURRENT_HOST": "algo-1", "TRAINING_JOB_NAME": "job-2"})
    assert other["main_port"] != places[0].nodes.main_port


@pytest.mark.parametrize(("variables", "processes"), [({"SM_NUM_GPUS": "0"}, 1), ({}, 1), ({"SM_NUM_GPUS": "8", "TOOLKIT_PROCESSES": "2"}, 2)])
def test_one_machine_runs_a_process_for_each_gpu_or_as_many_as_asked_for(variables: dict[str, str], processes: int) -> None:
    """Fails when: a machine without GPUs runs none."""
    place = placement_of(options_of_container({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", **variables}))
    assert (place.processes, place.nodes.count) == (processes, 1)


def test_an_accelerate_config_of_the_job_is_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the variable that names it is another one."""
    monkeypatch.chdir(ROOT / "recipes")
    one = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "TOOLKIT_ACCELERATE_CONFIG": "launch/zero2.yaml", "TOOLKIT_PROCESSES": "2"}
    place = placement_of(options_of_container(one))
    assert place.environment["ACCELERATE_USE_DEEPSPEED"] == "true"


def test_without_secrets_nothing_is_asked_for() -> None:
    """In an environment without boto3. Fails when: it is imported for nothing."""
    assert read_secrets({"TOOLKIT_RECIPE": "x"}) == {}


@pytest.mark.parametrize(("text", "value"), [("abc\n", "abc"), ('{"KEY": "abc", "x": 1}', "abc"), ('{"x": "abc"}', None), ("{broken", None), ('{"KEY": 3}', None)])
def test_a_secret_is_its_text_or_json_with_the_name(text: str, value: str | None) -> None:
    """Fails when: what is wrong is shown with the secret's text."""
    if value is not None:
        assert _value_of("KEY", "my/secret", text) == value
        return
    with pytest.raises(Refusal, match=r"--secret KEY=my/secret: .*JSON.* KEY") as refused:
        _value_of("KEY", "my/secret", text)
    assert "abc" not in str(refused.value)


def test_settings_of_a_file_become_hyperparameters_and_flags_win(tmp_path: Path) -> None:
    """Defaults that are written out, as in a config.yaml, are not sent. Fails when: the file's name is sent in place of it."""
    (tmp_path / "mine.yaml").write_text("max_steps: 5\nlearning_rate: 0.5\nseed: 42\ndataset: {channel:a: 0.25, 'stdlib:sft': 0.75}\n")
    settings, given = read_recipe_flags(ROOT / "recipes/sft.py", ["--config", str(tmp_path / "mine.yaml"), "--max-steps", "7"])
    assert given == {"max_steps": 7, "learning_rate": 0.5, "dataset": "channel:a:0.25,stdlib:sft:0.75"}
    assert json.loads(json.dumps(given)) == given
    assert settings["max_steps"] == 7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": "{here}/a.jsonl"}, "is on this machine"),
        ({"dataset": "{here}/a.jsonl:0.5,stdlib:sft:0.5"}, "is on this machine"),
        ({"model": "{here}"}, "--model channel:data"),
        ({"chat_template": "{here}/a.jsonl"}, "--include .*a.jsonl s3://BUCKET/PREFIX/, .*--chat-template channel:data/a.jsonl"),
        ({"dataset": "channel:b"}, "The job's channels are a"),
        ({"dataset": "channel:a/x.jsonl:0.5,stdlib:sft", "model": "org/name", "chat_template": "a.jsonl"}, None),
    ],
)
def test_what_is_on_this_machine_only_is_refused(settings: dict[str, str], said: str | None, tmp_path: Path) -> None:
    """Fails when: one part of a mixture is looked at, an included file's own name is refused, or a file is copied as a folder."""
    (tmp_path / "a.jsonl").write_text("{}")
    settings = {name: value.replace("{here}", str(tmp_path)) for name, value in settings.items()}
    if said is None:
        check_places({}, settings, ["a"], (tmp_path / "a.jsonl",))
        return
    with pytest.raises(Refusal, match=said):
        check_places({}, settings, ["a"], ())


@pytest.mark.parametrize("settings", [{"dataset": "channel:train"}, {"dataset": "{here}/a.jsonl"}])
def test_a_simulated_job_is_given_what_is_here_as_its_channel(settings: dict[str, str], tmp_path: Path) -> None:
    """simulate takes no address in S3. Fails when: what `submit` takes is advised."""
    (tmp_path / "a.jsonl").write_text("{}")
    settings = {name: value.replace("{here}", str(tmp_path)) for name, value in settings.items()}
    for simulated in (False, True):
        with pytest.raises(Refusal) as refused:
            check_places({}, settings, [], (), simulated=simulated)
        assert ("s3://" in str(refused.value)) is not simulated
        assert "--channel" in str(refused.value)


@pytest.mark.parametrize("recipe", ["dpo", "kto", "lora", "reward"])
def test_a_default_that_is_a_directory_here_is_refused(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make demo`: the job would train a random model in its place. Fails when: given settings alone are looked at."""
    monkeypatch.chdir(tmp_path)
    settings, given = read_recipe_flags(ROOT / f"recipes/{recipe}.py", [])
    check_places(settings, given, [], ())
    for made in ("pretrain", "sft"):
        (tmp_path / f"runs/demo/{made}/model").mkdir(parents=True)
    settings, given = read_recipe_flags(ROOT / f"recipes/{recipe}.py", [])
    with pytest.raises(Refusal, match=r"--model: .*runs/demo/.*/model, .*--model"):
        check_places(settings, given, [], ())
    settings, given = read_recipe_flags(ROOT / f"recipes/{recipe}.py", ["--model", "Qwen/Qwen3-0.6B"])
    check_places(settings, given, [], ())


@pytest.mark.parametrize(
    ("recipe", "flags", "packages"),
    [
        ("sft", [], []),
        ("sft", ["--report-to", "wandb,tensorboard"], ["tensorboard", "wandb"]),
        ("sft", ["--zero-stage", "2"], ["deepspeed"]),
        ("zero", [], ["deepspeed"]),
        ("lora", ["--load-in-4bit", "--model", "Qwen/Qwen3-0.6B"], ["bitsandbytes"]),
        *(("sft", ["--optim", name], ["bitsandbytes"]) for name in ("adamw_bnb_8bit", "lion_32bit", "lion_8bit")),
        ("sft", ["--fp8", "rowwise"], ["torchao"]),
        ("sft", ["--optim", "adafactor"], []),
    ],
    ids=lambda value: "_".join(value) or "none" if isinstance(value, list) else value,
)  # fmt: skip
def test_packages_that_settings_need_are_added(recipe: str, flags: list[str], packages: list[str]) -> None:
    """Fails when: `none` of report_to is taken for a package, or a recipe's own DeepSpeedPlugin isn't seen."""
    path = ROOT / f"recipes/{recipe}.py"
    settings, _ = read_recipe_flags(path, flags)
    assert packages_for(settings, path) == packages


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "recipes/launch").glob("*.yaml"))])
def test_an_accelerate_config_that_says_deepspeed_brings_it(name: str) -> None:
    """Fails when: the file isn't looked at, or any file brings it."""
    path = ROOT / "recipes/sft.py"
    settings, _ = read_recipe_flags(path, [])
    assert packages_for(settings, path, ROOT / f"recipes/launch/{name}.yaml") == (["deepspeed"] if name.startswith("zero") else [])
