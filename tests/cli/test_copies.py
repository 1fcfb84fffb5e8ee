"""toolkit recipes, copy and diff: copies remember where they come from, and what is whose can be reported apart.

Each test names the one-line change under which it was seen to fail.
"""

import difflib
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from toolkit.cli.main import app
from toolkit.command_line.recipe_file import find_recipe
from toolkit.config import Refusal
from toolkit.runs import copies

ROOT = Path(__file__).resolve().parents[2]


def toolkit(*words: object) -> str:
    """In this process; what it said."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, Refusal):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def upstream(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toolkit's recipes, which may change."""
    place = tmp_path_factory.mktemp("package") / "recipes"
    shutil.copytree(ROOT / "recipes", place, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("toolkit.runs.copies", "toolkit.cli.recipes", "toolkit.command_line.recipe_file"):
        monkeypatch.setattr(f"{module}.recipes_folder", lambda: place)
    return place


def test_everything_that_can_be_copied_is_listed_with_its_own_words(folder: Path) -> None:
    """Fails when: a kind is left out, or a comment's second line is lost."""
    listed = toolkit("recipes")
    for path in [*(ROOT / "recipes").glob("*.py"), *(ROOT / "recipes").glob("*/*.yaml")]:
        found = re.search(rf"^  {re.escape(path.stem)} +(.+)$", listed, re.M)
        assert found, path
        text = " ".join(line.lstrip('#" ') for line in path.read_text().splitlines()[:6])
        assert text.startswith(found[1]), path
        assert found[1].endswith("."), path
    assert f"in {ROOT / 'recipes'}" in listed


@pytest.mark.parametrize("name", ["sft", "sft.py", "zero2", "launch/zero2.yaml", "qwen3_0.6b_sft", "recipes/configs/qwen3_4b_lora.yaml"])
def test_a_copy_is_the_file_below_a_line_that_says_where_it_comes_from(folder: Path, name: str) -> None:
    """Fails when: the text is changed on the way, or the line would not be found again."""
    toolkit("copy", name, "mine.txt")
    first, _, rest = (folder / "mine.txt").read_text().partition("\n")
    origin = copies.origin_of(first + "\n")
    assert origin is not None
    assert rest == (ROOT / "recipes" / origin.name).read_text()
    assert origin.hash == copies.text_hash(rest)
    assert copies.changes_of(folder / "mine.txt") == copies.Changes(origin, [], [], True)


def test_nothing_is_overwritten(folder: Path) -> None:
    """Fails when: the file is opened with "w"."""
    toolkit("copy", "sft")
    (folder / "sft.py").write_text("mine")
    with pytest.raises(Refusal, match=r"sft\.py: is there already"):
        toolkit("copy", "sft")
    assert (folder / "sft.py").read_text() == "mine"
    toolkit("copy", "sft", "below/")
    assert (folder / "below/sft.py").is_file()


def changed(lines: list[str]) -> list[str]:
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def test_what_the_user_changed_and_what_upstream_changed_are_told_apart(folder: Path, upstream: Path) -> None:
    """Against difflib of the three texts. Fails when: the copy is compared with what is installed now."""
    toolkit("copy", "sft", "mine.py")
    before, mine = (upstream / "sft.py").read_text(), (folder / "mine.py").read_text()
    after = before.replace("learning_rate: float = 1e-3", "learning_rate: float = 5e-4")
    edited = mine.replace("num_train_epochs: float = 2.0", "num_train_epochs: float = 9.0")
    assert before != after
    assert mine != edited
    (upstream / "sft.py").write_text(after)
    (folder / "mine.py").write_text(edited)
    found = copies.changes_of(folder / "mine.py")
    assert changed(found.yours) == ["-    num_train_epochs: float = 2.0", "+    num_train_epochs: float = 9.0"]
    assert found.upstream is not None
    assert changed(found.upstream) == changed(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")))
    reported = toolkit("diff", "mine.py")
    assert reported.index("You changed in mine.py:") < reported.index("epochs: float = 9.0") < reported.index("Upstream changed in sft.py")
    assert reported.index("Upstream changed in sft.py") < reported.index("+    learning_rate: float = 5e-4")


def test_the_original_is_found_from_a_folder_below_and_under_another_name(folder: Path, upstream: Path) -> None:
    """Fails when: it is looked for next to the file alone, or by the file's name."""
    toolkit("copy", "sft")
    (folder / "deep/er").mkdir(parents=True)
    (folder / "sft.py").rename(folder / "deep/er/other.py")
    (upstream / "sft.py").write_text((upstream / "sft.py").read_text() + "# new\n")
    found = copies.changes_of(folder / "deep/er/other.py")
    assert found.yours == []
    assert changed(found.upstream or []) == ["+# new"]


def test_without_the_original_the_difference_is_said_to_hold_both(folder: Path, upstream: Path) -> None:
    """As long as upstream is what it was nothing is missed. Fails when: what is installed passes for what was copied."""
    toolkit("copy", "sft")
    shutil.rmtree(folder / ".toolkit")
    (folder / "sft.py").write_text((folder / "sft.py").read_text() + "# mine\n")
    assert changed(copies.changes_of(folder / "sft.py").yours) == ["+# mine"]
    (upstream / "sft.py").write_text((upstream / "sft.py").read_text() + "# new\n")
    reported = toolkit("diff", "sft.py")
    assert "your changes and upstream's together" in reported
    assert "-# new" in reported
    assert "+# mine" in reported
    (upstream / "sft.py").unlink()
    with pytest.raises(Refusal, match="is no longer in toolkit"):
        toolkit("diff", "sft.py")


def test_a_file_that_was_not_copied_has_nothing_to_compare(folder: Path) -> None:
    """Fails when: any file is compared with the recipe of its name."""
    (folder / "sft.py").write_text("print()\n")
    with pytest.raises(Refusal, match=r"sft\.py: .*# Copied from .*`toolkit copy`"):
        toolkit("diff", "sft.py")


def test_a_folder_in_place_of_a_recipe_is_named_as_one(folder: Path) -> None:
    """As in `toolkit verify-resume runs/sft`. Fails when: it is said that there is no such file."""
    with pytest.raises(typer.BadParameter, match=f"{folder}: is a folder"):
        find_recipe(str(folder))


def test_a_name_means_the_copy_in_this_folder_and_no_other_file(folder: Path) -> None:
    """Fails when: who edits a copy and types its name runs the toolkit's own; or any script of that name is run."""
    (folder / "reward.py").write_text("print('something else')\n")
    toolkit("copy", "sft")
    assert find_recipe("sft") == "sft.py"
    assert Path(find_recipe("reward")).resolve() == ROOT / "recipes/reward.py"
    assert toolkit("recipes").startswith("Your recipes\n  sft  Supervised")


def test_lines_that_use_a_changed_public_name_are_listed_with_what_to_write(folder: Path) -> None:
    """Fails when: `renamed_names` skips rows with arguments, or lists a line that the installed recipe has."""
    toolkit("copy", "sft", "mine.py")
    assert "Names that have changed" not in toolkit("diff", "mine.py")
    old = ["stop = tk.stopped_improving(values, config)", "groups = tk.OptimConfig(label_smoothing_factor=0.1)", "done = tk.unrelated(values)"]
    lines = len((folder / "mine.py").read_text().splitlines())
    with open(folder / "mine.py", "a") as file:
        file.write("\n".join(old) + "\n")
    shown = toolkit("diff", "mine.py").partition("Names that have changed")[2]
    assert re.findall(r"^  (\d+): (.*)$", shown, re.M) == [(str(lines + 1), old[0]), (str(lines + 2), old[1])]
    assert "config.early_stopping_patience" in shown
    assert "toolkit.config.LossConfig" in shown


def test_renamed_parameters_and_metrics_are_listed_too(folder: Path) -> None:
    """Fails when: rows like `Metrics(finalise=...)` are skipped, or KTO's `kl` is taken for the metric of DPO that had its name."""
    old = ["tk.Metrics(update=update, finalise=finalise)", "text_baselines(tokenised=splits, tokenizer=tokenizer)", 'last = event["eval_kl"]']
    for recipe, lines in (("dpo", old), ("kto", old[:2])):
        toolkit("copy", recipe)
        with open(folder / f"{recipe}.py", "a") as file:
            file.write("\n".join([*old, 'finalise = event["kl_penalty"]']) + "\n")
        shown = toolkit("diff", f"{recipe}.py").partition("Names that have changed")[2]
        assert re.findall(r"^  \d+: (.*)$", shown, re.M) == lines


def test_the_changelog_has_every_changed_public_name_and_no_other() -> None:
    """Fails when: a row of toolkit/runs/renamed.md is not in CHANGELOG.md, or one of the table there is not in renamed.md."""
    rows = (ROOT / "toolkit/runs/renamed.md").read_text().splitlines()
    table = (ROOT / "CHANGELOG.md").read_text().partition("  | before | now |\n")
    assert rows == [line.strip() for line in (table[1] + table[2]).partition("\n\n")[0].splitlines()]
    assert all(len(row.strip("| ").split(" | ", 1)) == 2 for row in rows)
