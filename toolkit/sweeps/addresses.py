"""The address of a trial: a digest of what determines its result. Equal addresses need no second training."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.config import Refusal, Settings
from toolkit.config.reading import values_of
from toolkit.runs.copies import text_hash
from toolkit.sweeps.journal import JOURNAL, JournalFile, Outcome, Plan, read_journal
from toolkit.sweeps.outcomes import trial_folder
from toolkit.sweeps.results import result_of
from toolkit.sweeps.space import read_space
from toolkit.system.digests import code_digest
from toolkit.system.environment import package_version

_toolkit = cache(code_digest)  # of each trial of a sweep
_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "peft", "numpy", "deepspeed")


# What is saved, shown and sent where, and changes no value of a trial. All else counts, also what a resume may change.
_NOT_OF_THE_RESULT = frozenset((
    "output_dir", "overwrite_output_dir", "resume", "resume_from", "allow_change", "stop_at_step", "stop_deadline", "run_name",
    "report_to", "logging_strategy", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "save_best_limit",
    "save_error", "async_save", "hang_timeout", "preprocessing_num_workers", "dataloader_num_workers", "num_samples",
    "sample_max_new_tokens", "sample_temperature", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_revision",
))  # fmt: skip


def recipe_digest(recipe: Path) -> str:
    """The digest of a recipe's file, and of the Python files next to it that it imports."""
    texts = [_text(file) for file in [recipe, *_imported(recipe)]]
    return text_hash(texts[0] if len(texts) == 1 else "\0".join(texts))


def _imported(recipe: Path) -> list[Path]:
    """The files next to a recipe, or in a package there, that it or one of them imports, anywhere in it; in a fixed order."""
    found: set[Path] = set()
    todo = [recipe]
    while todo:
        file = todo.pop()
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # no Python, which may be imported by nothing that runs
            continue
        for node in ast.walk(tree):
            names: list[str] = []
            place = recipe.parent
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                place = file.parents[node.level - 1] if node.level else place
                names = [node.module or "", *(f"{node.module or ''}.{each.name}".strip(".") for each in node.names)]
            for name in names:
                parts = name.split(".") if name else []
                paths = [place.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
                paths.append(place.joinpath(*parts).with_suffix(".py"))
                new = {path for path in paths if path.is_file() and path != recipe} - found
                found |= new
                todo += new
    return sorted(found)


def _text(file: Path) -> str:
    """The text of a file; bytes that are not UTF-8 as their numbers."""
    return file.read_text(encoding="utf-8", errors="backslashreplace")


def address_of(config: Settings, plan: Plan) -> str:
    """The digest of all settings but those that change no value, unless they are searched, of the files that they name, of the
    recipe's and the toolkit's code, and of the versions, processes and threads.

    A file is known by its size and the time of its last change, a dataset of the Hub by its name and revision.
    """
    without = _NOT_OF_THE_RESULT - {dimension.name for dimension in read_space(plan.search)}
    settings = {name: value for name, value in values_of(config).items() if name not in without}
    files = {name: stamp for name, value in settings.items() if (stamp := _stamp(value))}
    world = {
        "packages": [package_version(package) for package in _PACKAGES], "python": platform.python_version(),
        "machine": platform.machine(), "threads": os.environ.get("OMP_NUM_THREADS"), "parallel": plan.parallel,
        "placement": plan.placement, "placed": [_stamp(word) for word in plan.placement],
    }  # fmt: skip
    judged = [plan.recipe_digest, _toolkit(), [[each.metric, each.maximize] for each in plan.objectives], plan.constraints]
    content = json.dumps([settings, files, world, judged], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def found_elsewhere(folder: Path, address: str, until: int | None) -> Outcome | None:
    """The outcome of the same trial in another sweep next to this one; `same_as` is its run directory."""
    for journal in sorted(folder.parent.glob(f"*/{JOURNAL}")):
        if journal.parent.samefile(folder):
            continue
        try:
            plan, jobs = read_journal(JournalFile(journal.parent))
        except (Refusal, OSError):
            continue
        for job in jobs if plan else []:
            outcome = job.outcome
            is_same = job.address == address and job.until == until
            if plan and is_same and outcome and not outcome.pruned and result_of(job, plan).values:
                same = outcome.same_as
                trial = jobs[same].trial if isinstance(same, int) else job.trial
                run = same if isinstance(same, str) else str(trial_folder(journal.parent, trial))
                return replace(outcome, seconds=0.0, same_as=run)
    return None


def _stamp(value: Any) -> Any:
    """Size and time of change of each file at the paths that a setting's value may mean; nothing where there are none."""
    if isinstance(value, list | tuple):
        return [stamp for each in value for stamp in _stamp(each)]
    files: list[Path] = []
    for place in _places(value) if isinstance(value, str) else []:
        path = Path(place)
        files += [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    files = [file for file in files if file.parent.name != "__pycache__"]  # which importing a package writes
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _places(value: str) -> list[str]:
    """Paths that a text may mean and that are there: itself, or the parts of a mixture, the file of `file.py:function`, that of
    `module:function`."""
    parts = [os.path.expanduser(part) for part in [value, *value.split(",")]]
    heads = [part.rpartition(":")[0] for part in parts]
    modules = [f"{head.replace('.', os.sep)}.py" for head in heads]
    return sorted({each for each in (*parts, *heads, *modules) if each and os.path.exists(each)})
