"""What of this machine a run card tells: each digest changes with what it is of, and with nothing else."""

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toolkit
from toolkit.runs.provenance import digest_of_source, digests_of_files, toolkit_identity, working_directory
from toolkit.system.environment import processor_name

ROOT = Path(__file__).resolve().parents[2]


def test_a_changed_module_is_another_toolkit_and_a_recipe_of_its_wheel_is_not(tmp_path: Path, monkeypatch: Any) -> None:
    """Fails when: only the version is recorded, folders are passed over, or the recipes of a wheel count."""
    package = tmp_path / "site-packages/toolkit"
    shutil.copytree(ROOT / "toolkit", package, ignore=shutil.ignore_patterns("__pycache__"))
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)  # somebody else's clone, around the environment
    monkeypatch.setattr(toolkit, "__file__", str(package / "__init__.py"))
    before = toolkit_identity()
    assert (before["version"], before["commit"]) == (toolkit.__version__, None)
    (package / "_recipes").mkdir()
    (package / "_recipes/sft.py").write_text("")
    (package / "notes.txt").write_text("")
    assert toolkit_identity() == before
    loss = package / "losses/causal_lm.py"
    loss.write_text(loss.read_text() + "\n")
    changed = toolkit_identity()["sha256"]
    assert changed != before["sha256"]
    loss.rename(loss.with_name("causal.py"))
    assert toolkit_identity()["sha256"] not in (changed, before["sha256"])


def test_files_of_data_have_a_digest_of_their_content_wherever_they_lie(tmp_path: Path, monkeypatch: Any) -> None:
    """Also those of a mixture, and its own file; nothing of the Hub or the embedded corpus. Fails when: a name is read as a whole."""
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder / "data").mkdir(parents=True)
        for name in ("train.jsonl", "test.jsonl"):
            (tmp_path / folder / "data" / name).write_text('{"text": "a"}\n')
    assert digest_of_source("one/data") == digest_of_source(str(tmp_path / "two/data")) == digest_of_source("two/data/*.jsonl")
    (tmp_path / "two/data/test.jsonl").write_text('{"text": "b"}\n')
    assert digest_of_source("one/data") != digest_of_source("two/data")
    assert digest_of_source("stdlib:sft") is digest_of_source("org/name:small@v1") is None
    assert digests_of_files("one/data:0.5,org/name:0.5", None).keys() == {"one/data"}
    (tmp_path / "mine.yaml").write_text("- {dataset: one/data, weight: 1}\n- {dataset: stdlib:sft, weight: 1}\n")
    assert digests_of_files("mine.yaml", "two/data/train.jsonl").keys() == {"mine.yaml", "one/data", "two/data/train.jsonl"}
    assert digests_of_files("images/of/mine.npz", None) == {}  # a recipe's own affair


@pytest.mark.parametrize(("folder", "written"), [("home/work", "~/work"), ("home", "~"), ("homework", None)])
def test_the_card_does_not_say_whose_home_it_is(tmp_path: Path, monkeypatch: Any, folder: str, written: str | None) -> None:
    """Fails when: the path is written as it is, or any that begins like the home directory's is cut."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "home").mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / folder)
    assert working_directory() == (written or str(tmp_path / folder))
    assert Path(working_directory()).expanduser() == Path(os.getcwd())


def test_the_processor_is_told_by_its_model(monkeypatch: Any) -> None:
    """Fails when: it is the architecture where Linux tells the model."""
    cpu = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU @ 2.00GHz: fast\nmodel name\t: Other\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **more: cpu)
    assert processor_name() == "Some CPU @ 2.00GHz: fast"
    monkeypatch.setattr(Path, "read_text", lambda path, **more: "CPU implementer\t: 0x41\n")
    monkeypatch.setattr("toolkit.system.environment.platform", SimpleNamespace(processor=lambda: "", machine=lambda: "aarch64"))
    assert processor_name() == "aarch64"
