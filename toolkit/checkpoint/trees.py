"""Any nesting of dicts, lists, numbers and tensors, as named tensors and JSON: what a pickle would be needed for otherwise."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def flatten(tree: object, path: tuple[str, ...] = ()) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a tree by name, and a JSON skeleton of where they go."""
    if isinstance(tree, torch.Tensor):
        # a conjugate or negative view has the bytes of what it is a view of
        return {"/".join(path): tree.resolve_conj().resolve_neg()}, {"$tensor": "/".join(path)}
    if isinstance(tree, dict):
        # "/" in a key is written ~1, as in a JSON Pointer (RFC 6901): {"a/b": x} and {"a": {"b": x}} are two names
        named = [(key, str(key).replace("~", "~0").replace("/", "~1"), value) for key, value in tree.items()]
        flat = [(key, *flatten(value, (*path, name))) for key, name, value in named]
        # pairs, not an object: JSON would turn the integer keys of an optimizer's state into strings
        return {n: t for _, tensors, _ in flat for n, t in tensors.items()}, {"$dict": [[k, s] for k, _, s in flat]}
    if isinstance(tree, (list, tuple)):
        parts = [flatten(value, (*path, str(i))) for i, value in enumerate(tree)]
        kind = "$list" if isinstance(tree, list) else "$tuple"
        return {n: t for tensors, _ in parts for n, t in tensors.items()}, {kind: [s for _, s in parts]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {}, tree
    raise TypeError(f"cannot store {'/'.join(path)}: {type(tree).__name__}")


def unflatten(tensors: dict[str, torch.Tensor], skeleton: object) -> Any:
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


def only_tensors(tree: object, path: str) -> Any:
    """The same tree, of which a file brings back the same; `path` begins the messages.

    Raises:
        TypeError: a value that is neither a tensor nor a dictionary of them; a key that is neither text nor a whole number;
            two keys that are written alike (1 and "1"); a tensor that safetensors has no form for.
    """
    if isinstance(tree, dict):
        written: set[str] = set()
        for key, value in tree.items():
            if type(key) not in (str, int) or str(key) in written | {"__metadata__"}:
                raise TypeError(f"{path}: the key {key!r} can't be kept: take texts or whole numbers, each of them once")
            written.add(str(key))
            only_tensors(value, f"{path}[{key!r}]")
    elif not isinstance(tree, torch.Tensor):
        raise TypeError(f"{path} is of type {type(tree).__name__}, not a tensor; what JSON can hold goes into run.memory")
    elif tree.layout != torch.strided or tree.is_meta or not _is_storable(tree.dtype):
        raise TypeError(f"{path} is a tensor of {tree.dtype}, {tree.layout}, on {tree.device}: a file can't hold such a one")
    return tree


@functools.cache
def _is_storable(dtype: torch.dtype) -> bool:
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        save({"empty": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, SafetensorError):
        return False
    return True
