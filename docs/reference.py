"""The pages of the site that are not in this folder: the API reference, made from the docstrings, and two files of the root.

The reference has a page for each room of the package with the public names in it, as `toolkit/__init__.pyi` lists them, and an
index with one line for each name. The package is read, not imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FROM_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def public_names() -> dict[str, dict[str, Path]]:
    """Room -> its public names, each with the file it is in."""
    rooms: dict[str, dict[str, Path]] = {}
    for node in ast.parse((ROOT / "toolkit/__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            path = ROOT / "toolkit" / (node.module.replace(".", "/") + ".py")
            path = path if path.exists() else path.with_suffix("") / "__init__.py"
            rooms.setdefault(node.module.split(".")[0], {}).update({alias.name: path for alias in node.names})
    return rooms


def first_line(name: str, path: Path) -> str:
    """The first paragraph of the docstring of a function, a class or a value, on one line; with "" as the name, of the file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    text = ""
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            text = ast.get_docstring(node) or ""
            text = f"Settings: {text}." if name.endswith("Config") else text
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            text = _text(following)
    return " ".join((text if name else _text(body[0])).split("\n\n")[0].split())


def _text(node: ast.stmt | None) -> str:
    return str(node.value.value) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""


def pages() -> Iterator[tuple[str, str]]:
    """(address, Markdown) of each page of the reference, its index first."""
    rooms = public_names()
    index = ["# API reference", "", "`import toolkit as tk` gives every name below as `tk.NAME`.", ""]
    for room, names in rooms.items():
        about = first_line("", ROOT / "toolkit" / room / "__init__.py")
        index += [f"## [{room}]({room}.md)", "", about, "", "| name | what it is |", "| --- | --- |"]
        page = [f"# {room}", "", about, ""]
        for name, path in names.items():
            address = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            line = first_line(name, path).replace("|", "\\|")
            index.append(f"| [`{name}`][{address}.{name}] | {line} |")
            page += [f"::: {address}.{name}", ""]
        index.append("")
        yield f"reference/{room}.md", "\n".join(page)
    yield "reference/index.md", "\n".join(index)


def on_config(config: Any) -> Any:
    """The reference's pages in the navigation."""
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = ["reference/index.md", *({room: f"reference/{room}.md"} for room in public_names())]
    return config


def on_files(files: Files, config: Any) -> Files:
    for address, text in pages():
        files.append(File.generated(config, address, content=text))
    for name, address in FROM_THE_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file of the root is one to its page."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)*(CONTRIBUTING|CHANGELOG)\.md", lambda found: f"]({up}{found[1].lower()}.md", markdown)


class SettingsTable(griffe.Extension):
    """The settings of a group as one table, of their names, types, defaults and help texts, in place of an attribute each."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        rows = []
        for name, attribute in list(cls.attributes.items()):
            call = attribute.value
            if isinstance(call, griffe.ExprCall) and str(call.function) == "setting":
                default, text = (ast.literal_eval(str(argument)) for argument in call.arguments[:2])
                text = str(text).replace("|", "\\|")
                rows.append(f"| `{name}` | `{attribute.annotation}` | `{default!r}` | {text} |")
                cls.del_member(name)
        if rows:
            title = cls.docstring.value if cls.docstring else ""
            table = "\n".join(["| setting | type | default | what it does |", "| --- | --- | --- | --- |", *rows])
            cls.docstring = griffe.Docstring(f"Settings: {title}.\n\n{table}", parent=cls)
