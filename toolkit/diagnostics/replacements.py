"""Functions that are replaced for a while by wrappers of them, and come back."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import toolkit as tk


class Replacements(contextlib.ExitStack):
    """Left, everything is as it was."""

    def public(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a public function of the toolkit, in the package and in the file it is in.

        `wrapper` is called with the function and with what that was called with.
        """
        original = getattr(tk, name)
        for owner in (tk, sys.modules[original.__module__]):
            self.attribute(owner, name, wrapper)

    def attribute(self, owner: object, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace an attribute of a module or a class."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*values: object, **named: object) -> Any:
            return wrapper(original, *values, **named)

        setattr(owner, name, wrapped)
        self.callback(_put_back, name, wrapped, original)
        self.callback(setattr, owner, name, original)


def _put_back(name: str, wrapped: object, original: object) -> None:
    """In the package's files that were imported meanwhile, and took the replacement for the function."""
    for module in [module for file, module in sys.modules.items() if file.startswith("toolkit.")]:
        if vars(module).get(name) is wrapped:
            setattr(module, name, original)
