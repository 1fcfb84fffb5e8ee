"""The files of deploy/: what a linter and a schema say of them, that they name what there is, and that their flags are accepted."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import pytest
import torch
import yaml
from packaging.requirements import Requirement

from toolkit.command_line.reading import read_command_line
from toolkit.command_line.recipe import config_class_of_file
from toolkit.config import check_together

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
OF_THE_LAUNCHER = {"--processes", "--nodes", "--node-rank", "--main-address"}


def in_venv(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def all_steps() -> list[tuple[str, str]]:
    """Instructions and what follows them, as written but for line breaks."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line and not line.startswith("#")]


def steps(instruction: str) -> list[str]:
    return [text for each, text in all_steps() if each == instruction]


def copy(step: str, folder: Path) -> None:
    """A COPY step, into its image's working directory."""
    *sources, target = step.split()
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, folder / target)


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """Fails when: a package is not pinned, a cache stays in the image, or an instruction is none."""
    found = subprocess.run([in_venv("hadolint"), str(ROOT / "deploy/Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_what_the_image_copies_is_all_that_the_package_is_built_from(tmp_path: Path) -> None:
    """Its COPY steps in a clean directory, then a wheel of that. Fails when: a file that the build reads is not copied, a name is not
    there, an extra is none of pyproject.toml's, or something is installed without its tested version.
    """
    for copied in steps("COPY"):
        copy(copied, tmp_path)
    installs = [step for step in steps("RUN") if step.startswith("pip install")]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in step for step in installs)
    extras = re.search(r"\.\[(.*)\]", installs[1])[1].split(",")
    assert set(extras) <= set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    wheel = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", "made"]
    made = subprocess.run(wheel, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert made.returncode == 0, made.stderr
    (built,) = (tmp_path / "made").iterdir()
    listed = subprocess.run([sys.executable, "-m", "zipfile", "-l", str(built)], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "toolkit/_recipes/sft.py" in listed
    assert steps("ENTRYPOINT") == ['["toolkit"]']


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder in place of / in which the Dockerfile's steps were taken, and the environment of a container. Python is that of a new
    virtual environment, and without Debian's packages."""
    if torch.version.cuda:
        pytest.skip("PyTorch with CUDA is 5 GB")  # pip took it for .venv, and would here
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")}
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "usr")], check=True, timeout=120)
    outside |= {"PATH": f"{tmp_path / 'usr/bin'}:{os.environ['PATH']}", "PIP_NO_COMPILE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    run = partial(subprocess.run, capture_output=True, text=True, env=outside)
    try:
        reached = run(["pip", "download", "--retries=0", "--no-cache-dir", "--no-deps", f"--dest={tmp_path}", "lazy_loader"], timeout=200)
        if reached.returncode:
            pytest.skip(f"no package index: {reached.stderr.splitlines()[-1]}")
        index = re.search(r"\.index-url='(.*)'$", run(["pip", "config", "list"], timeout=60).stdout, re.MULTILINE)
        build_arguments = {"TORCH_INDEX": index[1]} if index else {}
        folder = tmp_path
        for instruction, text in all_steps():
            name, _, value = text.partition("=")
            if instruction == "ARG":
                outside[name] = build_arguments.get(name, value)
            elif instruction == "ENV":
                outside[name] = value.replace("/", f"{tmp_path}/", 1) if value.startswith("/") else value
            elif instruction == "WORKDIR":
                folder = tmp_path / text.removeprefix("/")
                folder.mkdir(parents=True)
            elif instruction == "COPY":
                copy(text, folder)
            elif instruction == "RUN" and not text.startswith("apt-get"):
                done = run(["sh", "-c", text], cwd=folder, timeout=400)
                assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr}"
                assert "does not provide the extra" not in done.stderr
        yield folder, outside
    finally:
        shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_the_steps_of_the_image_make_one_that_trains(image: tuple[Path, dict[str, str]]) -> None:
    """Its pip installs as they are written, then what it starts with, a run in its empty workspace, and what its extras bring.
    Fails when: `toolkit` or `recipes` is not copied, an extra is misspelled, a version can't be had, or only root may write to the cache.
    """
    workspace, environment = image
    assert Path(environment["HF_HOME"]).stat().st_mode & 0o1777 == 0o1777
    ((entry,),) = map(json.loads, steps("ENTRYPOINT"))
    (default,) = map(json.loads, steps("CMD"))

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=workspace, env=environment, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        return done.stdout

    assert " train " in run(entry, *default)
    few = ["--max-train-examples", "40", "--max-eval-examples", "8", "--max-length", "128", "--num-samples", "0"]
    run(entry, "train", "sft", "--hidden-size", "32", "--num-hidden-layers", "1", "--max-steps", "2", *few, "--output-dir", "out")
    assert json.loads((workspace / "out/summary.json").read_text())["steps"] == 2
    assert (workspace / "out/model/model.safetensors").is_file()
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = [Requirement(text).name for extra in re.search(r"\.\[(.*)\]", steps("RUN")[-1])[1].split(",") for text in optional[extra]]
    run("python", "-c", f"import {', '.join(brought).replace('-', '_')}")


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))


def test_the_kubernetes_file_is_what_kubernetes_takes() -> None:
    """Fails when: a field is misspelled, or in a place where none of its name is."""
    validate = pytest.importorskip("kubernetes_validate")
    for each in kubernetes():
        validate.validate(each, "1.33", strict=True)
    service, job = kubernetes()
    name, pods = service["metadata"]["name"], job["spec"]
    assert {name} == {job["metadata"]["name"], service["spec"]["selector"]["job-name"], pods["template"]["spec"]["subdomain"]}
    arguments = pods["template"]["spec"]["containers"][0]["args"]
    assert f"--main-address={name}-0.{name}" in arguments
    assert f"--nodes={pods['completions']}" in arguments
    assert pods["completions"] == pods["parallelism"]


@pytest.fixture
def skypilot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SkyPilot's schemas as its server has them. What they import of its servers and clouds is not installed."""
    folder = ROOT / ".venv/skypilot/sky"
    if not folder.is_dir():
        pytest.skip("make .venv/installed-skypilot")
    before = set(sys.modules)
    package: Any = ModuleType("sky")
    package.__path__, package.__version__, package.__commit__ = [str(folder)], "0.14.1", ""
    for name in ("sky.skylet.autostop_lib", "sky.data.storage", "sky.serve", "sky.server"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, "sky", package)
    monkeypatch.setenv("IS_SKYPILOT_SERVER", "true")  # a client lets keys of job_recovery pass that it doesn't know
    yield importlib.import_module("sky.utils.schemas")
    for name in set(sys.modules) - before:
        if name.startswith("sky."):
            del sys.modules[name]


def test_the_skypilot_file_is_what_skypilot_takes(skypilot: Any) -> None:
    """Fails when: a key is none of its task's, or of its resources', job recovery's or storage's."""
    task = yaml.safe_load((ROOT / "deploy/skypilot.yaml").read_text())
    jsonschema.validate(task, skypilot.get_task_schema())
    jsonschema.validate(task["resources"], skypilot.get_resources_schema())
    jsonschema.validate(task["file_mounts"]["/data"], skypilot.get_storage_schema())


def words_of(file: str) -> list[str]:
    if file == "kubernetes.yaml":
        return kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    if file == "skypilot.yaml":
        return shlex.split(yaml.safe_load((ROOT / "deploy/skypilot.yaml").read_text())["run"].replace("\\\n", " "))[1:]
    return shlex.split(re.search(r"# .* toolkit (train .*)", DOCKERFILE)[1])


@pytest.mark.parametrize("file", ["kubernetes.yaml", "skypilot.yaml", "Dockerfile"])
def test_the_recipe_takes_the_flags_and_goes_on_where_it_stopped(file: str) -> None:
    """Fails when: a flag is none of the recipe's or of `toolkit train`, or a run that comes back begins anew."""
    command, recipe, *words = words_of(file)
    assert command == "train"
    flags, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0] in OF_THE_LAUNCHER:
            rest = rest if "=" in word else rest[1:]
        else:
            flags.append(word)
    config_class = config_class_of_file(ROOT / f"recipes/{recipe}.py")
    config: Any = read_command_line(config_class, flags, {}, "")
    check_together(config)
    assert config.resume == (file != "Dockerfile")
