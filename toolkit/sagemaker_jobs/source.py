"""The folder that a job's code comes in: the toolkit, one recipe, what it includes, what the container installs."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import toolkit
from toolkit.config import Refusal
from toolkit.sagemaker_jobs.job import Job

ENTRY = "start.py"
_TAKEN = {ENTRY, "toolkit", "recipes", "launch", "requirements.txt", "setup.py"}
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "_recipes", ".*")


def make_source(folder: Path, job: Job, packages: Sequence[str] = ()) -> None:
    """Fill an empty folder with what the container runs.

    Nothing else of the working directory goes along, neither dot files nor what is not asked for. `packages` are added to
    requirements.txt.

    Raises:
        Refusal: an included file isn't there, or bears a name that is taken.
    """
    package = Path(toolkit.__file__).resolve().parent
    shutil.copytree(package, folder / "toolkit", ignore=_LEFT_OUT)
    (folder / "recipes").mkdir()
    shutil.copy(job.recipe, recipe_in(folder, job))
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


def recipe_in(folder: Path, job: Job) -> Path:
    return folder / "recipes" / job.recipe.name
