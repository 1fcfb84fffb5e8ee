"""The embedded corpus: the running interpreter's own standard library, read where it runs.

Nothing is shipped, downloaded or imported; the modules are only parsed. Left out are tests, graphical programs, generated
tables and what not every distribution of Python has, so that the text is of like size (not identical) on every version.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Refusal

if TYPE_CHECKING:
    from datasets import DatasetDict

SPLITS = ("train", "validation", "test")
VALIDATION_PERCENT, TEST_PERCENT = 5, 10

_NOT_A_LIBRARY = {"__pycache__", "site-packages", "dist-packages"}
_SKIPPED_ANYWHERE = {"test", "tests", "idle_test", "_bundled"}
_SKIPPED_AT_THE_TOP = {
    "idlelib",
    "lib2to3",
    "distutils",
    "tkinter",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "ensurepip",
    "lib-dynload",
    "__phello__",
    "_pyrepl",
    "msilib",
}
_SKIPPED_FILES = {"turtle.py", "__hello__.py", "this.py", "antigravity.py", "stringprep.py", "html/entities.py"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "sre_", "__phello__")
_OUR_SOURCES = ("stdlib.py", "tasks.py", "annotations.py", "near_duplicates.py")


@dataclass(frozen=True)
class CorpusFacts:
    """What the corpus of this interpreter is: two runs with the same digest read the same text."""

    python: str
    digest: str
    files: int
    bytes: int

    def __str__(self) -> str:
        size = f"{self.files} files, {self.bytes / 1e6:.1f} MB"
        return f"standard library of Python {self.python}, {size}, digest {self.digest[:8]}"


@dataclass(frozen=True)
class Function:
    """A function or method of the standard library, at module or class level."""

    module: str
    outermost: str  # the class or function at module level that it is, or belongs to
    qualname: str
    source: str  # dedented, with the docstring
    code: str  # the same without its docstring; empty where the two can't be distinguished by lines
    docstring: str


def load_corpus(task: str) -> DatasetDict:
    """The task's rows in train, validation and test; made on the first call and read from a cache after it.

    Raises:
        Refusal: an unknown task, or an interpreter without the sources of its library.
    """
    from toolkit.cache.arrow import cached_splits
    from toolkit.demo_corpus import tasks as corpus_tasks

    if task not in corpus_tasks.TASKS:
        raise Refusal(f"stdlib:{task} is not in the embedded corpus. {_nearest(task, tuple(corpus_tasks.TASKS))}")
    splits = cached_splits(f"stdlib-{task}-{_cache_key()}", lambda folder: corpus_tasks.write_task(task, folder))
    for rows in splits.values():
        rows.info.description = describe_corpus(task)
    return splits


def describe_corpus(task: str) -> str:
    """One line about which text a run on `stdlib:<task>` reads."""
    return f"stdlib:{task}: {corpus_facts()}"


@cache
def corpus_facts() -> CorpusFacts:
    """Version of the interpreter, digest over names and contents of the files, their number and size."""
    root, digest, size = stdlib_root(), hashlib.blake2b(digest_size=16), 0
    names = stdlib_files()
    for name in names:
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
        size += len(content)
    version = ".".join(map(str, sys.version_info[:3]))
    return CorpusFacts(version, digest.hexdigest(), len(names), size)


def split_of(key: str) -> str:
    """The split of everything that shares `key` (a module, or its outermost class): a pure function of the name."""
    percent = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if percent < TEST_PERCENT:
        return "test"
    return "validation" if percent < TEST_PERCENT + VALIDATION_PERCENT else "train"


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[str]:
    """Paths of the corpus under the library's root, with forward slashes, sorted.

    Raises:
        Refusal: the interpreter has no sources (a zipped or a stripped library).
    """
    root, found = stdlib_root(), []
    for folder, folders, files in os.walk(root):
        inside = Path(folder).relative_to(root).as_posix()
        skipped = _NOT_A_LIBRARY | _SKIPPED_ANYWHERE | (_SKIPPED_AT_THE_TOP if inside == "." else set())
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("config-"))
        for name in files:
            path = name if inside == "." else f"{inside}/{name}"
            if name.endswith(".py") and path not in _SKIPPED_FILES and not name.startswith(_SKIPPED_PREFIXES):
                found.append(path)
    if len(found) < 100:
        raise Refusal(
            f"stdlib: the sources of Python's standard library are not in {root} ({len(found)} files found): this interpreter "
            "has them zipped or left out. Use a regular build of Python, or name your own data: --dataset FILE"
        )
    return sorted(found)


def read_modules() -> Iterator[tuple[str, str]]:
    """Name and text of each module; a file that isn't valid Python in its declared encoding is passed over."""
    root = stdlib_root()
    for path in stdlib_files():
        try:
            with tokenize.open(str(root / path)) as file:  # honors the coding cookie
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), text


def read_functions() -> list[Function]:
    """All functions and methods of the corpus; parsed once for this library and this code, then read from the cache."""
    from toolkit.cache.arrow import cache_folder

    def parse_all(folder: Path) -> None:
        functions = [vars(function) for module, text in read_modules() for function in parse_functions(module, text)]
        (folder / "functions.json").write_text(json.dumps(functions), encoding="utf-8")

    folder = cache_folder(f"stdlib-functions-{_cache_key()}", parse_all)
    return [Function(**function) for function in json.loads((folder / "functions.json").read_text(encoding="utf-8"))]


def parse_functions(module: str, text: str) -> Iterator[Function]:
    """The functions of one module at module or class level (one inside another function is part of that one's text)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
    lines = text.split("\n")

    def walk(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                qualname = prefix + child.name
                source, code = _source_and_code(lines, child)
                yield Function(module, qualname.split(".")[0], qualname, source, code, ast.get_docstring(child) or "")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                yield from walk(child, prefix)

    yield from walk(tree, "")


def _source_and_code(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str]:
    """The function's lines, and the same without the docstring; by lines, so that comments stay."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    end = node.end_lineno or node.lineno
    source = _dedented(lines[start:end])
    if ast.get_docstring(node, clean=False) is None:
        return source, source
    docstring, first_line = node.body[0], node.body[0].lineno
    last_line = docstring.end_lineno or first_line
    alone = lines[first_line - 1].lstrip().startswith(("'", '"', "r", "R", "u")) and (
        len(node.body) == 1 or node.body[1].lineno > last_line
    )
    if first_line == node.lineno or not alone:
        return source, ""
    rest = lines[start : first_line - 1] + lines[last_line:end]
    if len(node.body) == 1:
        rest.append(" " * docstring.col_offset + "pass")
    return source, _dedented(rest)


def _dedented(lines: list[str]) -> str:
    """Without the first line's indentation; lines of a string that have less of it stay (textwrap would then do nothing)."""
    indentation = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "\n".join(line.removeprefix(indentation) for line in lines)


@cache
def _cache_key() -> str:
    """Names the interpreter (which parses), the text, and the code that makes rows of it."""
    digest = hashlib.blake2b(str(corpus_facts()).encode() + corpus_facts().digest.encode(), digest_size=8)
    for name in _OUR_SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def _nearest(name: str, names: tuple[str, ...]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"Did you mean stdlib:{near[0]}? " if near else ""
    return f"{guess}It has {', '.join(f'stdlib:{each}' for each in names)}."
