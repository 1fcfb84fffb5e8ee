"""The installed wheel alone, in an environment of its own and an empty folder: every recipe is there, is copied, and runs.

Each test names the one-line change under which it was seen to fail.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
TINY = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-steps", "2", "--max-length", "256"]
FEW = ["--max-train-examples", "40", "--max-eval-examples", "24"]
SILENT = ["--num-samples", "0"]
OF = {
    "basic": FEW, "accelerated": FEW, "reward": FEW, "zero": FEW, "sft": [*FEW, *SILENT], "lora": [*FEW, *SILENT], "dpo": [*FEW, *SILENT],
    "pretrain": ["--max-train-examples", "8", "--max-eval-examples", "1", "--vocab-size", "300", *SILENT],
}  # fmt: skip
# All copies in one process, since the imports take longer than the runs.
RUNS_ALL = """
import json, runpy, sys
for name, flags in json.loads(sys.argv[1]):
    from accelerate.state import AcceleratorState, GradientState
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    sys.argv = [f"{name}.py", *flags]
    try:
        runpy.run_path(f"{name}.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code, (name, end.code)
    import toolkit
print("FROM", toolkit.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's programs. Heavy libraries are found where they are installed here; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "toolkit", source / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "recipes", source / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = ["wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, *build], check=True, timeout=300)
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=120)
    python = folder / "env/bin/python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")}))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a plain path: no other .pth is read there
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=300
    )
    return folder / "env/bin"


def run(command: list[Any], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=folder, timeout=600, check=False,
        env={**clean, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def copied(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder into which everything was copied."""
    folder = tmp_path_factory.mktemp("empty")
    listed = run([installed / "toolkit", "recipes"], folder).stdout
    names = [path.stem for path in [*(ROOT / "recipes").glob("*.py"), *(ROOT / "recipes").glob("*/*.yaml")]]
    assert len(names) > 20
    assert all(f"\n  {name} " in listed for name in names)
    assert str(ROOT) not in listed
    for name in names:
        done = run([installed / "toolkit", "copy", name], folder) if name in RECIPES[:2] else None
        assert done is None or done.returncode == 0
    # the rest in one process
    script = "import sys; from toolkit.copies import *; [make_copy(s, Path(s.name)) for s in map(find_own_file, sys.argv[1:])]"
    done = run([installed / "python", "-c", script, *(name for name in names if name not in RECIPES[:2])], folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_file_is_copied_as_it_is_in_the_source(copied: Path) -> None:
    """Fails when: recipes, configs or launch files are not in the wheel."""
    for path in [*(ROOT / "recipes").glob("*.py"), *(ROOT / "recipes").glob("*/*.yaml")]:
        first, _, rest = (copied / path.name).read_text().partition("\n")
        assert first.startswith(f"# Copied from {path.relative_to(ROOT / 'recipes')} of toolkit ")
        assert rest == path.read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_shows_its_help(installed: Path, copied: Path, recipe: str) -> None:
    """Fails when: a recipe imports a file that only the source tree has."""
    done = run([installed / "python", f"{recipe}.py", "--help"], copied)
    assert done.returncode == 0, done.stderr
    assert f"Usage: python {recipe}.py" in done.stdout
    assert "--output-dir" in done.stdout


@pytest.mark.slow
def test_every_copy_trains(installed: Path, copied: Path) -> None:
    """Two steps of a tiny model, and a model directory at the end. Fails when: the package lacks a file that a run needs."""
    recipes = [name for name in RECIPES if name != "zero"]
    jobs = [[name, [*TINY, *OF[name], "--output-dir", f"runs/{name}"]] for name in recipes]
    done = run([installed / "python", "-c", RUNS_ALL, json.dumps(jobs)], copied)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"FROM {installed.parent}" in done.stdout
    for name in recipes:
        assert list((copied / f"runs/{name}/model").glob("*.safetensors")), name
        summary = json.loads((copied / f"runs/{name}/summary.json").read_text())
        assert summary["eval_loss"] > 0
        assert name == "basic" or summary["steps"] == 2


@pytest.mark.slow
def test_the_name_of_a_copy_runs_it_and_a_launch_file_is_found(installed: Path, copied: Path) -> None:
    """toolkit train, with the file of the package under its name. Fails when: names are looked up in the source tree alone."""
    pytest.importorskip("deepspeed")
    flags = [*TINY, *OF["zero"], "--output-dir", "runs/launched"]
    done = run([installed / "toolkit", "train", "zero", "--processes", "1", *flags], copied)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.startswith("starting: python zero.py ")
    script = "from toolkit.cli.recipe_file import *; print(find_accelerate_config('zero2'), find_recipe('sft'))"
    below = copied / "below"
    below.mkdir()
    named = run([installed / "python", "-c", script], below).stdout.split()
    assert [Path(below, name).resolve() for name in named] == [
        next(installed.parent.glob("lib/python*/site-packages/toolkit/_recipes")) / name for name in ("launch/zero2.yaml", "sft.py")
    ]


def test_somebodys_own_package_of_recipes_is_not_taken_for_the_toolkits(installed: Path, tmp_path: Path) -> None:
    """Fails when: the folder beside the installed package is looked at."""
    packages = next(installed.parent.glob("lib/python*/site-packages"))
    assert not (packages / "recipes").exists()
    (packages / "recipes").mkdir()
    (packages / "recipes/theirs.py").write_text('"""Something else."""\n')
    try:
        listed = run([installed / "toolkit", "recipes"], tmp_path).stdout
        assert "theirs" not in listed
        assert "\n  sft " in listed
    finally:
        shutil.rmtree(packages / "recipes")
