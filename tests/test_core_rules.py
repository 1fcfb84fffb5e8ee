"""Rules of the core that docs/design.md and CONTRIBUTING.md state, held against every file of the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "toolkit"
FILES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
# Of Python's library, and of named tuples, where an underscore does not mean private.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_getframe"}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for name, text in FILES.items():
        yield from ((name, node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))


def private_names(text: str) -> Iterator[tuple[int, str]]:
    """Names with an underscore that a file takes from elsewhere: those of objects, of modules, and whole private modules."""
    tree = ast.parse(text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr) and node.attr not in own | PUBLIC:
            yield node.lineno, node.attr
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("toolkit"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if re.match("_(?!_)", name))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr") and isinstance(node.args[1], ast.Constant):
            yield from [(node.lineno, word) for word in [str(node.args[1].value)] if re.match("_(?!_)", word)]


def test_private_names_of_others_are_in_the_compat_file_of_a_room() -> None:
    """Fails when: `torch.optim.Optimizer._cuda_graph_capture_health_check` is called in optim/muon.py."""
    found = [f"{name}:{line}: {word}" for name, text in FILES.items() if not name.endswith("compat.py") for line, word in private_names(text)]
    assert found == []


def test_no_public_function_takes_any_config_or_any_run() -> None:
    """Fails when: losses/preference.py takes `config: Any`."""
    found = [
        f"{name}:{function.lineno}: {function.name}" for name, function in functions() if not function.name.startswith("_")
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if argument.arg in ("config", "run") and argument.annotation is not None and ast.unparse(argument.annotation) == "Any"
    ]
    assert found == []


def test_losses_metrics_and_the_optimizers_step_take_values() -> None:
    """Fails when: a loss takes a group of settings, as `config: PreferenceConfig`."""
    found = [
        f"{name}:{function.lineno}: {function.name}" for name, function in functions() if name.startswith(("losses/", "metrics/", "optim/muon"))
        for argument in function.args.args if "Config" in ast.unparse(argument.annotation or ast.Constant(""))
        and "Pretrained" not in ast.unparse(argument.annotation or ast.Constant(""))
    ]
    assert found == []


def test_the_run_stays_below_300_lines() -> None:
    """Fails when: what `is_due` decides is written into `Run.due` again, with twenty lines of its own."""
    run = next(node for node in ast.parse(FILES["training/run.py"]).body if isinstance(node, ast.ClassDef) and node.name == "Run")
    assert run.end_lineno - run.decorator_list[0].lineno + 1 <= 300


def test_private_names_were_seen_in_the_tested_versions_and_libraries_below_1_are_capped_at_a_minor() -> None:
    """Fails when: constraints.txt has torch 2.14 and a compat.py was seen in 2.13, or pyproject.toml has typer below 1."""
    root = PACKAGE.parent
    tested = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.M))
    caps = dict(re.findall(r'"([\w-]+)>=[\d.]+,<([\d.]+)"', (root / "pyproject.toml").read_text()))
    seen = set()
    for name, text in FILES.items():
        if name.endswith("compat.py"):
            docstring = ast.get_docstring(ast.parse(text)) or ""
            found = set(re.findall(r"(torch|transformers|accelerate|deepspeed|datasets|typer) (\d+\.\d+)", docstring.lower()))
            assert found, name
            seen |= found
    for library, version in seen:
        major, minor = map(int, version.split("."))
        assert tested[library] == version
        assert caps[library] == (f"{major + 1}" if major else f"0.{minor + 1}"), library
