"""Any nesting of dicts, lists, numbers and tensors, as named tensors and JSON: what a pickle would be needed for otherwise."""

from collections.abc import Callable
from typing import Any

import torch


def flatten(tree: Any, path: tuple[str, ...] = ()) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a tree by name, and a JSON skeleton that says where they go."""
    if isinstance(tree, torch.Tensor):
        return {"/".join(path): tree}, {"$tensor": "/".join(path)}
    if isinstance(tree, dict):
        flat = [(key, *flatten(value, (*path, str(key)))) for key, value in tree.items()]
        # pairs, not an object: JSON would turn the integer keys of an optimiser's state into strings
        return {n: t for _, tensors, _ in flat for n, t in tensors.items()}, {"$dict": [[k, s] for k, _, s in flat]}
    if isinstance(tree, (list, tuple)):
        parts = [flatten(value, (*path, str(i))) for i, value in enumerate(tree)]
        kind = "$list" if isinstance(tree, list) else "$tuple"
        return {n: t for tensors, _ in parts for n, t in tensors.items()}, {kind: [s for _, s in parts]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {}, tree
    raise TypeError(f"cannot store {'/'.join(path)}: {type(tree).__name__}")


def unflatten(tensors: dict[str, torch.Tensor], skeleton: Any) -> Any:
    """The inverse of `flatten`."""
    if not isinstance(skeleton, dict):
        return skeleton
    (kind, value), *_ = skeleton.items()
    build: dict[str, Callable[[Any], Any]] = {
        "$tensor": lambda name: tensors[name],
        "$dict": lambda pairs: {key: unflatten(tensors, part) for key, part in pairs},
        "$list": lambda parts: [unflatten(tensors, part) for part in parts],
        "$tuple": lambda parts: tuple(unflatten(tensors, part) for part in parts),
    }
    return build[kind](value)
