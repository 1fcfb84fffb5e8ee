"""plan, profile and find-learning-rate of a recipe that fails: not the exit code of a run that doesn't fit, or of one that was looked at."""

import functools
import importlib
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.config import Refusal
from toolkit.diagnostics.replacements import Replacements
from toolkit.runs import directory

ROOT = Path(__file__).parents[2]
BUILD = "    accelerator = tk.build_accelerator(config)\n"


@pytest.mark.parametrize("command", ["plan", "profile", "find-learning-rate"])
@pytest.mark.parametrize(("line", "said"), [("raise ValueError('mine')", "ValueError: mine"), ("raise SystemExit(0)", "SystemExit: 0")])
def test_a_recipe_that_ends_itself_is_refused_with_its_line(command: str, line: str, said: str, tmp_path: Path) -> None:
    """Fails when: the exit code of the recipe, or that of a traceback, is the command's."""
    text = (ROOT / "recipes" / "sft.py").read_text()
    number = text[: text.index(BUILD)].count("\n") + 1
    (tmp_path / "mine.py").write_text(text.replace(BUILD, f"    {line}\n"))
    done = CliRunner().invoke(app, [command, str(tmp_path / "mine.py")], prog_name="toolkit")
    assert isinstance(done.exception, Refusal), done.output
    assert str(done.exception).startswith(f"{tmp_path / 'mine.py'}:{number}: ")
    assert str(done.exception).endswith(said)


@pytest.mark.parametrize("command", ["plan", "profile", "find-learning-rate"])
def test_no_room_for_weights_is_needed_and_none_are_written(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a large model on a small disk. Fails when: the disk is asked for the room of a checkpoint, or the model is saved."""
    monkeypatch.setattr(directory, "check_disk_space", lambda *_: pytest.fail("asks for room"))
    monkeypatch.setattr(tk, "save_model", functools.wraps(tk.save_model)(lambda *_, **__: pytest.fail("saves")))
    few = ["--steps", "20"] if command == "find-learning-rate" else ["--steps", "3"] if command == "profile" else []
    words = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "200", "--use-cpu", "--max-length", "256"]
    done = CliRunner().invoke(app, [command, "sft", *words, *few], prog_name="toolkit")
    assert done.exit_code == 0, done.output + str(done.exception)


def test_a_file_imported_while_a_function_is_replaced_has_the_function_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: what a file has imported by name stays replaced, as `load_model` of toolkit.models.pooling did after a plan."""
    original = tk.load_model
    monkeypatch.delitem(sys.modules, "toolkit.models.pooling", raising=False)
    with Replacements() as replace:
        replace.public("load_model", lambda load, *_: None)
        pooling = importlib.import_module("toolkit.models.pooling")
        assert pooling.load_model is not original
    assert pooling.load_model is original
