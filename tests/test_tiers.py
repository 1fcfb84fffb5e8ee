"""Two tiers: what isn't marked slow is `make test`, and has a test of each promise and of each recipe; the rest is `make test-slow`."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
SECTION = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## What it promises")[1].split("\n## ")[0]
PROMISES = {text.split(".")[0]: text for text in re.findall(r"^\*\*(\d+\. .*?)(?=^\*\*\d|\Z)", SECTION, re.MULTILINE | re.DOTALL)}


def is_slow(node: ast.stmt) -> bool:
    """Whether a test, or a file by its `pytestmark`, is marked slow as a whole; a single case of a test does not count."""
    marks = node.decorator_list if isinstance(node, ast.FunctionDef) else [node.value] if isinstance(node, ast.Assign) else []
    return any("mark.slow" in ast.unparse(mark) and "param" not in ast.unparse(mark) for mark in marks)


def in_file(path: Path) -> dict[str, bool]:
    """The tests of a file, and whether each is in the fast tier."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    whole = any(is_slow(node) for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark")
    return {each.name: not (whole or is_slow(each)) for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}


def named(text: str) -> list[tuple[str, bool]]:
    """What a promise names: each test, or a file or a folder for all of its own, and whether it has one in the fast tier."""
    found = []
    for words in re.findall(r"`([^`]+)`", text.partition("- Tests:")[2]):
        path, _, names = re.sub(r"\s+", " ", words).partition(": ")
        if path.startswith("test_") and not path.endswith(".py"):  # of the file named before
            path, names = found[-1][0].split("::")[0], path
        place = TESTS / path.removeprefix("tests/")
        files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        if not re.search(r"\btest_\w+\.py|/$", path):
            continue
        assert all(file.is_file() for file in files), f"docs/design.md names {path}"
        tests = {name: fast for file in files for name, fast in in_file(file).items()}
        for name in names.split(", ") if names else [""]:
            assert not name or name in tests, f"docs/design.md names {name} of {path}"
            found.append((f"{path}::{name}", tests[name] if name else any(tests.values())))
    return found


@pytest.mark.parametrize("number", [str(n) for n in range(1, 8)])
def test_every_promise_has_a_test_in_the_fast_tier(number: str) -> None:
    """Fails when: a test that the design page names is renamed, or the last one of a promise in the fast tier is marked slow."""
    tests = named(PROMISES[number])
    assert any(fast for _, fast in tests), f"promise {number}: all of {[name for name, _ in tests]} are slow"


def test_every_recipe_runs_in_the_fast_tier() -> None:
    """Fails when: a recipe is left out of RECIPES in tests/recipes/test_promises.py, or a test there of all recipes is marked slow."""
    path = TESTS / "recipes/test_promises.py"
    recipes = {recipe.stem for recipe in (ROOT / "recipes").glob("*.py")}
    assert in_file(path)["test_two_runs_of_basic_give_bit_identical_weights_and_write_what_they_promise"]
    assert in_file(path)["test_a_run_ended_by_sigterm_continues_to_the_same_bits"]
    assert in_file(TESTS / "recipes/test_zero.py")["test_a_group_of_one_rank_trains_as_accelerated_does"]
    text = path.read_text(encoding="utf-8")
    for own in ("grpo", "ppo"):
        assert in_file(TESTS / f"recipes/test_{own}.py")["test_a_run_ended_by_sigterm_continues_to_the_same_bits"]
    assert {name for name in recipes if f'"{name}"' not in text} <= {"zero", "grpo", "ppo"}  # each has a file of its own


def test_every_test_names_a_change_under_which_it_fails() -> None:
    """In its docstring, or in that of its file for all of its tests. Fails when: a test is added without one."""
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_all = "Fails when" in (ast.get_docstring(tree) or "")
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        silent = [test.name for test in tests if not (of_all or "Fails when" in (ast.get_docstring(test) or ""))]
        assert silent == [], path


def test_no_test_is_in_no_tier() -> None:
    """Fails when: `make test` and `make test-slow` leave out a marker between them."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r'-m "?(not slow|slow)"?', makefile) == ["not slow", "slow"]
    assert "make --keep-going test-all" in (ROOT / ".ci/run").read_text(encoding="utf-8")
