"""What a SageMaker container's environment says to a recipe, and which checkpoints wait for S3 there.

Each test names the one-line change under which it fails.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import toolkit as tk
from toolkit import checkpoint as ckpt
from toolkit.command_line.reading import channels_named, container_settings, find_channels, read_command_line
from toolkit.command_line.recipe import deliver_model
from toolkit.config import Refusal, settings_of
from toolkit.system.numbers import show_decimals
from toolkit.system.sagemaker_container import waits_for_s3


@dataclass(frozen=True)
class Config(tk.DataConfig, tk.RunConfig):
    output_dir: str = "runs/here"


@dataclass(frozen=True)
class Basic(tk.OutputConfig):
    output_dir: str = "runs/here"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a container whose /opt/ml is tmp_path, with checkpoints."""
    for folder in ("model", "checkpoints", "output/data"):
        (tmp_path / folder).mkdir(parents=True)
    variables = {
        "SM_MODEL_DIR": str(tmp_path / "model"), "SM_HOSTS": '["algo-1"]', "SM_OUTPUT_DATA_DIR": str(tmp_path / "output/data"),
        "SM_CHANNELS": '["train","my-base"]', "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
        "SM_CHANNEL_MY-BASE": "/opt/ml/input/data/my-base", "TRAINING_JOB_NAME": "job-7",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_a_recipe_writes_to_the_checkpoints_and_goes_on_there_unless_told_otherwise(machine: dict[str, str], tmp_path: Path) -> None:
    """Fails when: what the container says wins over what the job's settings say."""
    config = read_command_line(Config, [], machine)
    assert (config.output_dir, config.resume, config.run_name) == (str(tmp_path / "checkpoints"), True, "job-7")
    assert config.given == ()  # they are no one's wish, so none of them is refused for having no effect
    hyperparameters = {"SM_HPS": json.dumps({"output_dir": "there", "resume": False, "run_name": "mine"})}
    config = read_command_line(Config, [], machine | hyperparameters)
    assert (config.output_dir, config.resume, config.run_name) == ("there", False, "mine")


def test_without_checkpoints_the_run_goes_into_the_jobs_output(machine: dict[str, str], tmp_path: Path) -> None:
    """Fails when: a job without a prefix for checkpoints writes where nothing is copied from."""
    (tmp_path / "checkpoints").rmdir()
    assert container_settings(machine, settings_of(Config))["output_dir"] == str(tmp_path / "output/data/run")


def test_a_recipe_that_cannot_resume_begins_again(machine: dict[str, str]) -> None:
    """Fails when: half a run of a machine that was taken away is refused as one that would be overwritten."""
    assert "resume" not in container_settings(machine, settings_of(Basic))
    assert read_command_line(Basic, [], machine).overwrite_output_dir


def test_outside_a_container_nothing_is_decided() -> None:
    """Fails when: one variable that other programs set too, such as SM_HPS, is taken for a container."""
    assert container_settings({"SM_HPS": "{}", "SM_MODEL_DIR": "/x"}, settings_of(Config)) == {}
    assert waits_for_s3([Path("a/checkpoints/step-1")]) == []


def test_channels_are_replaced_by_their_folders_wherever_a_setting_names_one(machine: dict[str, str]) -> None:
    """In mixtures, in lists, with a file in it. Fails when: only a whole value is replaced, or a path that holds the word."""
    config = Config(dataset="channel:train/a.jsonl:0.7,channel:my-base:0.3", rename_columns=["a=channel:train"], eval_split="x/channel:no")
    found = find_channels(config, machine)
    assert found.dataset == "/opt/ml/input/data/train/a.jsonl:0.7,/opt/ml/input/data/my-base:0.3"
    assert (found.rename_columns, found.eval_split) == (["a=/opt/ml/input/data/train"], "x/channel:no")
    assert find_channels(found, {}) is found
    assert channels_named({"dataset": config.dataset, "x": ["channel:train"], "y": 3}) == ["my-base", "train"]


@pytest.mark.parametrize(("environment", "said"), [({}, "only SageMaker jobs have channels"), ({"SM_CHANNELS": '["a","b"]'}, "channels are a, b")])
def test_a_channel_that_is_not_there_is_refused(environment: dict[str, str], said: str) -> None:
    """Fails when: it is handed on, and looked for on the Hub."""
    with pytest.raises(Refusal, match=said):
        find_channels(Config(dataset="channel:train"), environment)


def test_the_model_moves_to_where_sagemaker_takes_it_from(machine: dict[str, str], tmp_path: Path) -> None:
    """Fails when: every rank moves it, or it stays to be copied to S3 twice."""
    model = tmp_path / "checkpoints/model"
    (model / "deep").mkdir(parents=True)
    (model / "deep/a.bin").write_text("weights")
    deliver_model(tmp_path / "checkpoints", machine | {"RANK": "1"})
    assert model.exists()
    deliver_model(tmp_path / "checkpoints", machine | {"RANK": "0"})
    assert (tmp_path / "model/deep/a.bin").read_text() == "weights"
    assert not model.exists()


def saved(root: Path, step: int, age: float, now: float = 1_000_000.0) -> Path:
    path = ckpt.save_checkpoint(root, step, ckpt.State({"weight": torch.full((10,), float(step))}, {}, [["weight"]], {"step": step}))
    for file in path.iterdir():
        os.utime(file, (now - age, now - age))
    return path


def test_one_checkpoint_that_s3_surely_holds_stays_and_the_next_one_to_be_held(machine: dict[str, str], tmp_path: Path) -> None:
    """Saves every 20 s, of which two are kept: a copy that takes 61 s must not be overtaken for ever. Fails when: the protected
    ones are the newest copied alone (none ever gets old enough then), or the age is not compared."""
    root = tmp_path / "checkpoints/checkpoints"
    now, held = 1_000_000.0, []
    for step in range(1, 20):
        now += 20.0
        saved(root, step, 0.0, now)
        found = ckpt.list_checkpoints(root)
        protected = waits_for_s3(found, now)
        ckpt.prune_checkpoints(root, 2, protected)
        there = ckpt.list_checkpoints(root)
        assert len(there) <= 4
        old = [path for path in there if now - (path / "MANIFEST.json").stat().st_mtime > 61]
        held.append(int(old[-1].name[5:]) if old else 0)
        assert old or step <= 4  # from then on one is always there that was copied
    assert held[-1] >= 19 - 8
    assert held == sorted(held)


def test_a_large_checkpoint_is_given_longer(machine: dict[str, str], tmp_path: Path) -> None:
    """Fails when: the size is left out."""
    root = tmp_path / "checkpoints/checkpoints"
    first, second, third = (saved(root, step, age) for step, age in ((1, 500.0), (2, 70.0), (3, 0.0)))
    assert waits_for_s3([first, second, third], 1_000_000.0) == [second, third]
    with open(second / "model.safetensors", "ab") as file:
        file.truncate(2_000_000_000)  # a hole: no room on the disk
    os.utime(second / "model.safetensors", (1_000_000.0 - 70, 1_000_000.0 - 70))
    assert waits_for_s3([first, second, third], 1_000_000.0) == [first, second]


def test_half_a_checkpoint_that_came_back_from_s3_is_removed_and_an_older_one_found(machine: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file missing, a manifest missing, an empty file. Fails when: they stay, and their numbers keep pruning from its work."""
    root = tmp_path / "checkpoints/checkpoints"
    whole, without_file, without_manifest, short = (saved(root, step, 0.0) for step in (1, 2, 3, 4))
    (without_file / "optimizer.safetensors").unlink()
    (without_manifest / "MANIFEST.json").unlink()
    (short / "state.json").write_text("")
    ckpt.clean_leftovers(root)
    assert ckpt.list_checkpoints(root) == [whole]
    assert ckpt.latest_checkpoint(root) == whole
    assert re.findall(r"checkpoint (\S+) .*S3", capsys.readouterr().out) == [str(path) for path in (without_file, without_manifest, short)]


def test_numbers_have_no_commas_in_a_container(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """SageMaker reads them with float. Fails when: they are shown as on a terminal."""
    numbers = [1234567, 4096.0, 12345.678, 0.5]
    assert [float(show_decimals(number)) for number in numbers] == [1234567, 4096, 12346, 0.5]
    monkeypatch.delenv("SM_HOSTS")
    assert [show_decimals(number) for number in numbers] == ["1,234,567", "4,096", "12,346", "0.5000"]
    assert [show_decimals(number) for number in (3.14159e93, -2e15, 2e6)] == ["3.14e+93", "-2.00e+15", "2,000,000"]


def test_outside_a_container_damage_is_left_for_a_person_to_look_at(tmp_path: Path) -> None:
    """Fails when: half a checkpoint is removed wherever the run is."""
    damaged = saved(tmp_path, 2, 0.0)
    (damaged / "state.json").unlink()
    ckpt.clean_leftovers(tmp_path)
    assert damaged.exists()
