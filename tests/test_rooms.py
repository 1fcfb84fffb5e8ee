"""Every file is in a room, and rooms import each other one way only: the table of docs/design.md, held against the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "toolkit"
ROOT_FILES = {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def table() -> dict[str, set[str]]:
    """Room -> the rooms it may import, in the order of docs/design.md: a room imports only rooms above its own line."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("<!-- rooms -->")[1].split("<!-- end of rooms -->")[0]
    rows = re.findall(r"^\| `(\w+)/` \| [^|]+ \| ([^|]*) \|$", text, flags=re.MULTILINE)
    return {room: set(re.findall(r"\w+", may)) for room, may in rows}


def modules() -> dict[str, Path]:
    """Dotted name below `toolkit` -> file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def edges() -> list[tuple[str, str, str]]:
    """(room, room it imports, where): imports at the top of files and inside functions."""
    return [edge for name, path in MODULES.items() for edge in _edges_from(name, path)]


def _edges_from(name: str, path: Path) -> Iterator[tuple[str, str, str]]:
    if "." in name:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toolkit."):
                targets = [f"{node.module}.{alias.name}"[8:] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "toolkit":
                targets = [alias.name for alias in node.names if alias.name in MODULES]
            elif isinstance(node, ast.Import):
                targets = [alias.name[8:] for alias in node.names if alias.name.startswith("toolkit.")]
            for target in targets:
                if target.split(".")[0] != name.split(".")[0]:
                    yield name.split(".")[0], target.split(".")[0], f"{path.relative_to(ROOT)}:{node.lineno}"


def test_the_root_of_the_package_holds_folders_and_three_files() -> None:
    """Fails when: a file is added to the root of toolkit/."""
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} <= ROOT_FILES


def test_every_folder_is_a_room_of_the_table_and_says_its_idea() -> None:
    """Fails when: a folder is added without a line in docs/design.md, or without a docstring in its __init__.py."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "_recipes" and any(path.rglob("*.py"))}
    assert folders == set(table())
    for folder in folders:
        assert ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))), folder


def test_rooms_import_only_what_the_table_says() -> None:
    """Fails when: `from toolkit.training.run import Run` is put into a file of losses/, at its top or inside a function."""
    may = table()
    assert [f"{where}: {room} -> {target}" for room, target, where in edges() if target not in may[room]] == []


def test_no_room_imports_the_demo_corpus() -> None:
    """It is a source among others, found by its name. Fails when: load.py imports toolkit.demo_corpus.stdlib in a function."""
    assert [where for _, target, where in edges() if target == "demo_corpus"] == []


def test_the_table_is_what_the_code_imports() -> None:
    """Fails when: a room that is no longer imported stays in the table."""
    used: dict[str, set[str]] = {}
    for room, target, _ in edges():
        used.setdefault(room, set()).add(target)
    assert {room: sorted(may) for room, may in table().items()} == {room: sorted(used.get(room, ())) for room in table()}


def test_imports_point_one_way() -> None:
    """Fails when: two rooms may import each other, or a room one below its own line."""
    above: set[str] = set()
    for room, may in table().items():
        assert may <= above, f"{room} imports {may - above}, below it in the table"
        above.add(room)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_file_says_its_idea_first(name: str) -> None:
    """Fails when: a file has no docstring."""
    assert ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8")))
