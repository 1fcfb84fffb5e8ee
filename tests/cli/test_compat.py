"""What is used of Typer, and is not public, is as it was."""

import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from toolkit.cli.compat import set_classes, without_pydantic
from toolkit.cli.lazy import Command, Group

app = typer.Typer(add_completion=False)
seen: list[Any] = []


@app.command("take")
def take(
    folder: Path, names: Annotated[list[str], typer.Option("--name")], out: Path | None = None, text: str = "a", count: int = 1
) -> None:
    seen.append((folder, names, out, text, count))


@app.command("other")
def other() -> None: ...


@pytest.mark.parametrize("given", [[], ["--text", "b", "--out", "y"], ["--name", "n", "--name", "m", "--count", "3"]])
def test_what_is_taken_without_pydantic_is_what_typer_makes_of_it(given: list[str], tmp_path: Path) -> None:
    """Fails when: a list of one name is taken as a text."""
    words = ["take", str(tmp_path), "--name", "first", *given]
    typer.main.get_command(app)(words, standalone_mode=False)
    plain = seen.pop()
    built = typer.main.get_command(app)
    for parameter in built.commands["take"].params:
        without_pydantic(parameter)
    built(words, standalone_mode=False)
    assert seen.pop() == plain


def test_a_value_goes_through_the_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: Typer converts a parameter in another function, or keeps its type elsewhere, so that nothing is replaced."""
    parameters = {each.name: without_pydantic(each) for each in typer.main.get_command(app).commands["take"].params}
    assert {name for name, each in parameters.items() if "process_value" in vars(each)} == {"folder", "names", "out", "text", "count"}
    monkeypatch.setattr(type(parameters["text"]), "process_value", lambda *_: pytest.fail("Typer's own"))
    monkeypatch.setitem(sys.modules, "pydantic", None)
    context = typer.Context(typer.main.get_command(app))
    for name, text, value in (("text", "b", "b"), ("names", ["n"], ["n"]), ("out", "no/such", Path("no/such")), ("count", None, None)):
        assert parameters[name].process_value(context, text) == value


def test_an_app_and_its_commands_are_of_our_classes() -> None:
    """Fails when: Typer keeps the class of a group, or the commands of an app before it is built, elsewhere."""
    set_classes(app, Group, Command)
    built = typer.main.get_command(app)
    assert isinstance(built, Group)
    assert {name for name, command in built.commands.items() if isinstance(command, Command)} == {"take", "other"}
