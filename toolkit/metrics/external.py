"""Metrics that are not built in: modules of `evaluate`, by name or path, and a user's own functions."""

import contextlib
import difflib
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from toolkit.config import Refusal

External = Callable[[np.ndarray, np.ndarray], dict[str, Any]]


class Module(Protocol):
    """A metric or a combination of metrics of `evaluate`."""

    name: str

    def compute(self, *, predictions: list[Any], references: list[Any]) -> dict[str, Any] | None: ...


MetricName = str | Module | External


def names_of(names: Iterable[MetricName] | MetricName | None) -> list[MetricName]:
    """The names as a list; one may be given without it, a function or a module too. None: no name."""
    if isinstance(names, str) or callable(names) or hasattr(names, "compute"):
        return [cast("MetricName", names)]
    return list(names or ())


def load_metric(name: MetricName, known: Collection[str], trial: tuple[list[Any], list[Any]]) -> External:
    """A function `(predictions, references) -> metrics` for a module of `evaluate`, or the user's own function as it is.

    `name`: a Hub name ("rouge", "owner/space"), the path of a metric script, an `evaluate` module or combination, or a
    function. Each module is tried on the `trial` pair at once, so that it fails before training rather than after. (A
    function of the user's is not: two examples may be too few for it.)

    Raises:
        Refusal: no such metric, or one that takes other inputs than predictions and references.
    """
    if not isinstance(name, str) and not hasattr(name, "compute"):
        return name
    module = _load(name, known) if isinstance(name, str) else name

    def compute(predictions: np.ndarray | list[Any], references: np.ndarray | list[Any]) -> dict[str, Any]:
        as_lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in (predictions, references)]
        return module.compute(predictions=as_lists[0], references=as_lists[1]) or {}

    title = name if isinstance(name, str) else title_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metrics that two examples leave undefined
        try:
            compute(*trial)
        except Exception as error:
            raise Refusal(
                f"--metrics {title}: the module was found but cannot take this task's predictions, such as {trial[0]}: "
                f"{type(error).__name__}: {error}. In a copy of the recipe, pass a function f(predictions, references) -> dict "
                "that calls it as it needs."
            ) from error
    return compute


def title_of(name: MetricName) -> str:
    """What a metric is called: the file's name of a path, the module's or the function's own name."""
    if isinstance(name, str):
        return Path(name).stem
    return getattr(name, "name", getattr(name, "__name__", type(name).__name__))


def _load(name: str, known: Collection[str]) -> Module:
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


def flat_metrics(name: str, result: object, taken: Collection[str]) -> dict[str, float]:
    """A metric's result as numbers by name: an array becomes key_0, key_1 ...; a key that is taken gets the metric's name."""
    metrics: dict[str, float] = {}
    for key, value in (result if isinstance(result, dict) else {name: result}).items():
        key = f"{name}_{key}" if key in taken else key
        values = np.asarray(value)
        if values.ndim == 0:
            with contextlib.suppress(TypeError, ValueError):  # a note in words is no metric
                metrics[key] = float(values)
        else:
            metrics.update({f"{key}_{i}": float(part) for i, part in enumerate(values.ravel())})
    return metrics
