"""plan, profile and find-learning-rate of a recipe that fails: not the exit code of a run that doesn't fit, or of one that was looked at."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolkit.cli.main import app
from toolkit.config import Refusal

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
