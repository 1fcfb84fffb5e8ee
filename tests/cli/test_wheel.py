"""The installed wheel with what it says it needs, in an environment of its own and an empty folder: every recipe is there, is
copied, and runs.

Each test names the one-line change under which it was seen to fail.
"""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
TINY = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-steps", "2", "--max-length", "256"]
FEW = ["--max-train-examples", "40", "--max-eval-examples", "24"]
SILENT = ["--num-samples", "0"]
OF = {
    "embedding": FEW,
    "basic": FEW, "accelerated": FEW, "question_answering": FEW, "reward": FEW, "reranker": FEW, "multiple_choice": FEW, "token_classification": FEW, "zero": FEW, "sft": [*FEW, *SILENT], "lora": [*FEW, *SILENT], "dpo": [*FEW, *SILENT],
    "kto": [*FEW, *SILENT],
    "distill": [*FEW, *SILENT, "--dataset", "stdlib:sft"],
    "distill_classifier": FEW,
    "grpo": [*FEW, *SILENT, "--per-device-train-batch-size", "16"],
    "ppo": [*FEW, *SILENT, "--per-device-train-batch-size", "16"],
    "masked_lm": ["--max-train-examples", "4", "--max-eval-examples", "1", "--vocab-size", "300"],
    "diffusion": ["--max-train-examples", "8", "--max-eval-examples", "1", "--vocab-size", "300", *SILENT],
    "seq2seq": [*FEW, *SILENT, "--max-target-length", "8"],
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


# What the code imports, and a dependency of ours that brings it along.
COMES_WITH = {
    "fsspec": "datasets", "numpy": "datasets", "pandas": "datasets", "pyarrow": "datasets", "filelock": "datasets", "tqdm": "datasets",
    "huggingface_hub": "transformers", "tokenizers": "transformers", "psutil": "accelerate", "rich": "typer", "jinja2": "torch",
}  # fmt: skip
# What it imports where a setting or a command asks for it, and says so where it is missing.
ON_DEMAND = {"aiohttp", "bitsandbytes", "boto3", "botocore", "triton"}  # triton comes with torch for CUDA


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions that these requirements lead to, of those that are installed here."""
    found: dict[tuple[str, frozenset[str]], None] = {}
    waiting = [(Requirement(text), {""}) for text in requirements]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in found:
            found[key] = None
            needed = importlib.metadata.requires(requirement.name) or []
            waiting += [(Requirement(text), {"", *requirement.extras}) for text in needed]
    return {name for name, _ in found}


def link_distributions(names: set[str], folder: Path) -> None:
    """Make a folder of packages that holds these distributions alone, as links to their files here."""
    here = Path(sysconfig.get_path("purelib"))
    tops = {}
    for distribution in importlib.metadata.distributions(path=[str(here)]):
        files = [file for file in distribution.files or [] if ".." not in file.parts and "__pycache__" not in file.parts]
        tops[canonicalize_name(distribution.name)] = (files, {file.parts[0] for file in files})
    owners = Counter(top for _, each in tops.values() for top in each)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        files, each = tops[name]
        for top in each:
            if owners[top] == 1:
                (folder / top).symlink_to(here / top)
        for file in files:
            if owners[file.parts[0]] > 1:  # a folder of several distributions
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).symlink_to(here / file)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's programs. It has what the wheel requires, without extras, and nothing is downloaded."""
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
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=300
    )
    (ours,) = importlib.metadata.distributions(path=[str(packages)])
    link_distributions(closure(ours.requires or []), packages)
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
    script = "import sys; from toolkit.runs.copies import *; [make_copy(s, Path(s.name)) for s in map(find_own_file, sys.argv[1:])]"
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
def test_copies_are_type_checked_against_the_wheel(installed: Path, copied: Path, tmp_path: Path) -> None:
    """As an editor does, with the names that `tk` has. Fails when: py.typed or the stub is not in the wheel, or a recipe's types are wrong."""
    (wheel,) = installed.parents[1].glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=120)
    python = tmp_path / "env/bin/python"
    install = ["install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "-q", "--python", str(python), *install], check=True, timeout=300)
    check = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", tmp_path, "--disable-error-code", "import-not-found"]
    done = run([*check, *(f"{name}.py" for name in RECIPES)], copied)
    assert done.returncode == 0, done.stdout
    misspelled = tmp_path / "mine.py"
    misspelled.write_text((copied / "sft.py").read_text().replace("tk.train_step(", "tk.train_stepp("))
    done = run([*check, misspelled], copied)
    assert (done.returncode, "train_stepp" in done.stdout) == (1, True), done.stdout


def test_the_environment_has_nothing_that_the_wheel_does_not_require(installed: Path) -> None:
    """Fails when: the libraries are found where they are installed for the tests."""
    script = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    done = run([installed / "python", "-c", script, "pytest", "trl", "wandb", "tensorboard", "deepspeed", "pip", "peft", "toolkit"], installed)
    assert done.stdout == "['peft', 'toolkit']\n", done.stderr


def test_what_the_code_imports_is_a_dependency_or_comes_with_one() -> None:
    """Fails when: a dependency is taken out of pyproject.toml that another one happens to bring along, pyyaml say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for name, each in project["optional-dependencies"].items() if name != "dev" for text in each]
    ours = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    for package, parent in COMES_WITH.items():
        needed = map(Requirement, importlib.metadata.requires(parent) or [])
        assert parent in ours
        assert canonicalize_name(package) in {canonicalize_name(each.name) for each in needed if not each.marker or each.marker.evaluate({"extra": ""})}
    distributions = importlib.metadata.packages_distributions()
    known = ours | {canonicalize_name(Requirement(text).name) for text in extras}
    for path in [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for package in {name.partition(".")[0] for name in names} - {"toolkit", *sys.stdlib_module_names, *COMES_WITH, *ON_DEMAND}:
                owners = {canonicalize_name(name) for name in distributions.get(package, [package])} | {package}
                assert owners & known, f"{path.relative_to(ROOT)} imports {package}, which pyproject.toml doesn't name"


@pytest.mark.slow
def test_every_copy_trains(installed: Path, copied: Path) -> None:
    """Two steps of a tiny model, and a model directory at the end. Fails when: the package lacks a file that a run needs."""
    recipes = [name for name in RECIPES if name != "zero"]
    jobs = [[name, [*TINY, *OF.get(name, [*FEW, *SILENT]), "--output-dir", f"runs/{name}"]] for name in recipes]
    done = run([installed / "python", "-c", RUNS_ALL, json.dumps(jobs)], copied)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert f"FROM {installed.parent}" in done.stdout
    for name in recipes:
        assert list((copied / f"runs/{name}/model").glob("*.safetensors")), name
        summary = json.loads((copied / f"runs/{name}/summary.json").read_text())
        assert summary["eval_reward"] >= 0 if name in ("grpo", "ppo") else summary["eval_loss"] > 0
        assert name == "basic" or summary["steps"] == 2


@pytest.mark.slow
def test_the_name_of_a_copy_runs_it_and_a_launch_file_is_found(installed: Path, copied: Path, tmp_path: Path) -> None:
    """toolkit train, with the file of the package under its name; zero with the extra that it needs, and refused without it.
    Fails when: names are looked up in the source tree alone, or the extra doesn't name DeepSpeed."""
    pytest.importorskip("deepspeed")
    flags = [*TINY, *OF["zero"], "--output-dir", "runs/launched"]
    command = [installed / "toolkit", "train", "zero", "--processes", "1", *flags]
    without = run(command, copied)
    assert without.returncode == 2
    assert "pip install deepspeed" in without.stderr
    (ours,) = importlib.metadata.distributions(name="functional-training-toolkit", path=[str(next(installed.parent.glob("lib/python*/site-packages")))])
    asked = [text for text in map(Requirement, ours.requires or []) if text.marker and text.marker.evaluate({"extra": "deepspeed"})]
    extra = closure(text.name for text in asked) - closure(ours.requires or [])
    link_distributions(extra, tmp_path / "extra")
    done = run(command, copied, PYTHONPATH=str(tmp_path / "extra"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.startswith("starting: python zero.py ")
    script = "from toolkit.command_line.recipe_file import *; print(find_accelerate_config('zero2'), find_recipe('sft'))"
    below = copied / "below"
    below.mkdir()
    named = run([installed / "python", "-c", script], below).stdout.split()
    assert [Path(below, name).resolve() for name in named] == [
        next(installed.parent.glob("lib/python*/site-packages/toolkit/_recipes")) / name for name in ("launch/zero2.yaml", "sft.py")
    ]


def test_somebodys_own_package_of_recipes_is_not_taken_for_the_toolkits(installed: Path, tmp_path: Path) -> None:
    """Fails when: the folder next to the installed package is looked at."""
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
