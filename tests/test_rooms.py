"""Every file is in a room, and rooms import each other one way only: the table of docs/design.md, held against the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
def public_names() -> dict[str, str]:
    """Name of `tk` -> the file it is in, which is loaded when the name is first used."""
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    return {alias.name: node.module or "" for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}


@cache
def edges() -> list[tuple[str, str, str]]:
    """(room, room it imports, where): what its files import, at their top or inside functions, and what they name to be imported."""
    return [edge for name, path in MODULES.items() for edge in _edges_from(name, path)]


def _edges_from(name: str, path: Path) -> Iterator[tuple[str, str, str]]:
    if "." in name or (PACKAGE / name).is_dir():
        room, tree = name.split(".")[0], ast.parse(path.read_text(encoding="utf-8"))
        package = {alias.asname or "toolkit" for node in ast.walk(tree) if isinstance(node, ast.Import)
                   for alias in node.names if alias.name == "toolkit"}  # fmt: skip
        for node in ast.walk(tree):
            for target in (*_imported(node), *_named(node), *_looked_up(node, package)):
                if target.split(".")[0] != room:
                    yield room, target.split(".")[0], f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def _imported(node: ast.AST) -> list[str]:
    """What an import statement loads, below `toolkit`."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toolkit."):
        return [f"{node.module}.{alias.name}"[8:] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "toolkit":
        return [public_names().get(alias.name, alias.name) for alias in node.names if not alias.name.startswith("__")]
    if isinstance(node, ast.Import):
        return [alias.name[8:] for alias in node.names if alias.name.startswith("toolkit.")]
    return []


def _named(node: ast.AST) -> list[str]:
    """A text that is a module of the package ("toolkit.room.file", also with ":name"), or begins one in an f-string.

    It is imported by whoever it is handed to: import_module, a table of commands, `python -m`.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        module = node.value.partition(":")[0].removeprefix("toolkit.")
        return [module] if module and node.value.startswith("toolkit.") and module in MODULES else []
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        begin = str(node.values[0].value)
        assert begin != "toolkit.", f"line {node.lineno}: which room is imported can't be read"
        return [begin.partition(":")[0][8:]] if begin.startswith("toolkit.") else []
    return []


def _looked_up(node: ast.AST, package: set[str]) -> list[str]:
    """Public names that are looked up in the package: `tk.name`, `replace.public("name", ...)`, the keys of a table of them."""
    found: list[ast.expr | str] = []
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in package:
        found = [node.attr]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "public" and node.args:
        found = [node.args[0]]
    elif isinstance(node, ast.Dict) and len(node.keys) > 2:
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        found = [str(key) for key in keys] if all(key in public_names() for key in keys) else []
    names = [each.value if isinstance(each, ast.Constant) else each for each in found]
    return [public_names()[name] for name in names if isinstance(name, str) and name in public_names()]


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
    """Fails when: `from toolkit.training.run import Run` is put into a file of losses/, at its top or inside a function; or
    `import_module("toolkit.training.run")`, `import_module(f"toolkit.training.{name}")` or `tk.open_run` of `import toolkit as tk`."""
    may = table() | {"": {"system"}}  # the package's own `__init__.py`
    assert [f"{where}: {room} -> {target}" for room, target, where in edges() if target not in may[room]] == []


def test_only_the_reader_of_sources_imports_the_demo_corpus() -> None:
    """It is a source among others. Fails when: a file of training/ imports toolkit.demo_corpus.stdlib in a function."""
    places = {where.rpartition(":")[0] for _, target, where in edges() if target == "demo_corpus"}
    assert places == {"toolkit/data/sources/load.py"}


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


def test_every_file_says_its_idea_first() -> None:
    """Fails when: a file has no docstring."""
    assert [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []
