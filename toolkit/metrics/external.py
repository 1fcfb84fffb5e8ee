"""Metrics that are not built in: modules of `evaluate`, by name or path, and a user's own functions."""

import contextlib
import difflib
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.config import Refusal

External = Callable[[np.ndarray, np.ndarray], dict[str, Any]]


def load_metric(name: Any, known: Collection[str], trial: tuple[list[Any], list[Any]]) -> External:
    """A function `(predictions, references) -> figures` for a module of `evaluate`, or the user's own function as it is.

    `name`: a Hub name ("rouge", "owner/space"), the path of a metric script, an `evaluate` module or combination, or a
    function. Each module is tried on the `trial` pair at once, so that it fails before training rather than after. (A
    function of the user's is not: two examples may be too few for it.)

    Raises:
        Refusal: no such metric, or one that takes other inputs than predictions and references.
    """
    if callable(name) and not hasattr(name, "compute"):
        return name
    module = name if hasattr(name, "compute") else _load(str(name), known)

    def compute(predictions: Any, references: Any) -> dict[str, Any]:
        as_lists = [values.tolist() if hasattr(values, "tolist") else values for values in (predictions, references)]
        return module.compute(predictions=as_lists[0], references=as_lists[1])

    title = str(name) if isinstance(name, str) else getattr(name, "name", type(name).__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about figures that two examples leave undefined
        try:
            compute(*trial)
        except Exception as error:
            raise Refusal(
                f"--metrics {title}: the module was found but cannot take this task's predictions, such as {trial[0]}: "
                f"{type(error).__name__}: {error}. In a copy of the recipe, pass a function f(predictions, references) -> dict "
                "that calls it as it needs."
            ) from error
    return compute


def _load(name: str, known: Collection[str]) -> Any:
    from evaluate import load

    local = Path(name).exists()
    try:
        # in memory: no cache file, and so no lock between processes
        return load(name, keep_in_memory=True)
    except Exception as error:
        if local or name.endswith(".py"):
            reason = f"{type(error).__name__}: {error}"
            raise Refusal(f"--metrics {name}: not a metric script that evaluate can load: {reason}") from error
        near = difflib.get_close_matches(name, known, n=3)
        raise Refusal(
            f"--metrics {name}: neither built in nor found by evaluate"
            + (f". Did you mean {' or '.join(near)}?" if near else ".")
            + f" Built in here: {', '.join(sorted(known))}. A metric of the Hub needs the network the first time; "
            "one of your own is given as --metrics path/to/script.py."
        ) from error


def flat_figures(name: str, result: Any, taken: Collection[str]) -> dict[str, float]:
    """A metric's result as numbers by name: an array becomes key_0, key_1 ...; a key that is taken gets the metric's name."""
    figures: dict[str, float] = {}
    for key, value in (result if isinstance(result, dict) else {name: result}).items():
        key = f"{name}_{key}" if key in taken else key
        values = np.asarray(value)
        if values.ndim == 0:
            with contextlib.suppress(TypeError, ValueError):  # a note in words is no figure
                figures[key] = float(values)
        else:
            figures.update({f"{key}_{i}": float(part) for i, part in enumerate(values.ravel())})
    return figures
