"""The rows that a run was trained on, found again from what it wrote down: which of others are among them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.data.sources.held_out import row_keys

if TYPE_CHECKING:
    from datasets import Dataset


def config_of_run(model: str) -> Path | None:
    """The config.yaml of the run whose output directory, or whose model/ in it, `model` is; None where it is no run's."""
    directory = Path(os.path.expanduser(model))
    found = [place / "config.yaml" for place in (directory, directory.parent) if (place / "run.json").is_file()]
    return next((path for path in found if path.is_file()), None)


def dataset_of_run(config_file: Path, dataset: str) -> str:
    """A run's dataset as it is found from here: a path that was relative to the directory in which the run was started."""
    if Path(os.path.expanduser(dataset)).exists():
        return dataset
    try:
        card = json.loads((config_file.parent / "run.json").read_text(encoding="utf-8"))
        begun_in = Path(card["started"]["directory"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return dataset
    return str(begun_in / dataset) if (begun_in / dataset).exists() else dataset


def is_same_dataset(one: str, other: str) -> bool:
    """Whether two names mean one source, such as two paths of one file."""
    paths = [Path(os.path.expanduser(name)) for name in (one, other)]
    return one == other or (all(path.exists() for path in paths) and paths[0].resolve() == paths[1].resolve())


def count_trained_on(rows: Dataset, config: DataConfig) -> int | None:
    """How many rows have an input (a prompt, a first turn, a text) that a run with these settings was trained on.

    None where the rows of the run can't be read any more, or are a stream.
    """
    from toolkit.data.sources.load import load_splits

    if config.streaming:
        return None
    try:
        train = load_splits(config)["train"]
    except Refusal:
        return None
    return int(np.isin(row_keys(rows), row_keys(train)).sum())
