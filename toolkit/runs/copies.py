"""The toolkit's recipes, configs and launch files: which there are, and copies of them to edit.

A copy begins with a line about what it was copied from, of which version, with the hash of that text. The text itself
is kept next to the copy, in `.toolkit/originals/HASH.txt`: so what the user changed and what upstream changed can be
distinguished later, whatever version is installed then.
"""

import ast
import contextlib
import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import toolkit
from toolkit.config import Refusal
from toolkit.config.setting import nearest
from toolkit.system.console import as_typed

ORIGINALS = Path(".toolkit") / "originals"
KINDS = {"recipes": ".", "configs": "configs", "launch": "launch"}  # and the folders they lie in
_ORIGIN = re.compile(r"# Copied from (\S+) of toolkit (\S+), sha256 ([0-9a-f]{16});.*\n")
_HASH_DIGITS = 16


class Origin(NamedTuple):
    """What the first line of a copy holds: `name` is the path in the folder of recipes, as in launch/zero2.yaml."""

    name: str
    version: str
    hash: str


class Changes(NamedTuple):
    """Unified diffs, empty where nothing changed. `upstream` is None where that is missing any more."""

    origin: Origin
    yours: list[str]
    upstream: list[str] | None
    original_found: bool  # else `yours` is against what is installed, and holds what upstream changed as well


def recipes_folder() -> Path:
    """Where the toolkit's own recipes lie: in the installed package, or next to it in a source tree."""
    package = Path(toolkit.__file__).resolve().parent
    installed = package / "_recipes"
    # A folder `recipes` in site-packages would be somebody else's.
    return package.parent / "recipes" if not installed.is_dir() and (package.parent / "pyproject.toml").is_file() else installed


def own_files(kind: str) -> dict[str, Path]:
    """The toolkit's files of a kind (recipes, configs, launch) by name."""
    folder = recipes_folder() / KINDS[kind]
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py" if kind == "recipes" else "*.yaml"))}


def first_line(path: Path) -> str:
    """The description of a file in a line: a recipe the first of its docstring, a YAML the first sentence of its comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].strip()
    comment = takewhile(lambda line: line.startswith("# ") and not line.startswith("#  "), text.splitlines())
    return re.split(r"(?<=[.]) ", " ".join(line.removeprefix("# ") for line in comment))[0]


def find_own_file(written: str) -> Path:
    """One of the toolkit's files by name (sft, zero2, qwen3_0.6b_sft) or as it is in its folder (launch/zero2.yaml).

    Raises:
        Refusal: there is none; the message names the nearest.
    """
    found = {name: path for kind in KINDS for name, path in own_files(kind).items()}
    plain = re.sub(r"^(recipes/)?(configs/|launch/)?|\.(py|ya?ml)$", "", written)
    if plain in found:
        return found[plain]
    near = nearest(plain, found)
    meant = f"Did you mean {near}?" if near else f"There are {', '.join(found)}."
    raise Refusal(f"{written}: the toolkit has no recipe, config or launch file of that name. {meant}")


def make_copy(source: Path, target: Path) -> None:
    """Copy one of the toolkit's files, with its origin, and keep the text as it is now next to it.

    Raises:
        Refusal: the target is there already, or can't be written.
    """
    text = source.read_text(encoding="utf-8")
    name, digest = source.relative_to(recipes_folder()).as_posix(), text_hash(text)
    shown = f"`{as_typed('toolkit', 'diff', target.name)}` shows what has changed"
    original = target.parent / ORIGINALS / f"{digest}.txt"
    if target.exists():
        again = as_typed("toolkit", "copy", source.stem, "FILE")
        raise Refusal(f"{target}: is there already. Give the copy another name: {again}")
    try:
        original.parent.mkdir(parents=True, exist_ok=True)
        original.write_text(text, encoding="utf-8")
        with open(target, "x", encoding="utf-8") as file:
            file.write(f"# Copied from {name} of toolkit {toolkit.__version__}, sha256 {digest}; {shown}.\n{text}")
    except OSError as error:
        raise Refusal(f"{target}: can't be written: {error.filename}: {error.strerror}.") from error


def origin_of(text: str) -> Origin | None:
    """Where a copy comes from; None where the text is no copy. The line may have moved down a little."""
    lines = "".join(text.splitlines(keepends=True)[:20])
    found = _ORIGIN.search(lines)
    return Origin(*found.groups()) if found else None


def is_copy(path: Path) -> bool:
    """Whether a file was made by `make_copy`."""
    try:
        return path.is_file() and origin_of(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def changes_of(path: Path) -> Changes:
    """What the user changed in a copy, and what upstream changed since it was made.

    Raises:
        Refusal: the file can't be read, or is no copy, or neither its original nor what became of it is there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path}: can't be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}.") from error
    origin = origin_of(text)
    if origin is None:
        raise Refusal(
            f"{path}: is no copy of the toolkit's; the line '# Copied from ...' that `toolkit copy` writes is not in it."
        )
    installed = recipes_folder() / origin.name
    upstream = installed.read_text(encoding="utf-8") if installed.is_file() else None
    original = _original(path, origin, upstream)
    base = upstream if original is None else original
    if base is None:
        raise Refusal(
            f"{path}: {origin.name} is no longer in toolkit {toolkit.__version__}, and {_kept(path, origin)} is gone."
        )
    found = original is not None
    names = (origin.name, f"toolkit {origin.version if found else toolkit.__version__}")
    yours = _diff(base, _ORIGIN.sub("", text, count=1), " of ".join(names), str(path))
    if upstream is None or original is None:
        return Changes(origin, yours, None if upstream is None else [], found)
    return Changes(
        origin, yours, _diff(original, upstream, " of ".join(names), f"{origin.name} of toolkit {toolkit.__version__}"), True
    )


class Renamed(NamedTuple):
    """A line of a copy that uses a public name which has changed, and the row of `renamed.md` about it."""

    number: int
    line: str
    before: str
    now: str


def renamed_names(path: Path) -> list[Renamed]:
    """The lines of a copy that use a public name in its old form; a line that the installed recipe has too is up to date."""
    rows = Path(__file__).with_name("renamed.md").read_text(encoding="utf-8").splitlines()[2:]
    text = path.read_text(encoding="utf-8")
    origin = origin_of(text)
    patterns = []
    for before, now in ([cell.strip() for cell in row.strip("| ").split(" | ", 1)] for row in rows):
        for old in re.findall(r"`([a-z]\w*(?:\.\w+)+\*?)", before):
            parts = [re.escape(part).replace(r"\*", r"\w*") for part in old.split(".")]
            is_field = len(parts) == 3 and parts[0] == "tk"  # of a group of settings
            pattern = rf"\b{parts[0]}\.{parts[1]}\(.*\b{parts[2]}\b" if is_field else rf"\b{'[.]'.join(parts)}\b"
            patterns.append((re.compile(pattern), before, now))
        for called, parameter in re.findall(r"`(\w+)\((\w+)=\.\.\.\)`", before):
            patterns.append((re.compile(rf"\b{called}\(.*\b{parameter}="), before, now))
        metric = re.fullmatch(r"metric `(\w+)` of (\w+)", before)  # another method may have one of that name
        if metric and origin and origin.name == f"{metric[2].lower()}.py":
            patterns.append((re.compile(rf"""["'](?:eval_)?{metric[1]}["']"""), before, now))
    installed = recipes_folder() / origin.name if origin else path
    current = set(installed.read_text(encoding="utf-8").splitlines()) if origin and installed.is_file() else set()
    return [
        Renamed(number, line.strip(), before, now)
        for number, line in enumerate(text.splitlines(), start=1)
        if line not in current
        for pattern, before, now in patterns
        if pattern.search(line)
    ]


def changed_lines(diff: Sequence[str]) -> int:
    """The number of lines that a unified diff changes; one that is replaced by another counts once."""
    blocks = (list(block) for is_change, block in groupby(diff, key=_is_change) if is_change)
    return sum(max(sum(line.startswith(sign) for line in block) for sign in "+-") for block in blocks)


def _is_change(line: str) -> bool:
    return line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))


def edited_copy(path: Path) -> tuple[str, int] | None:
    """Which of the toolkit's recipes a script was copied from, and how many lines were changed since; None for any other.

    A script that has the name of one, without the line that `toolkit copy` writes, is compared with that one.
    """
    if not path.is_file() or path.resolve().parent == recipes_folder().resolve():
        return None
    with contextlib.suppress(Refusal):
        found = changes_of(path)
        return found.origin.name, changed_lines(found.yours)
    own = own_files("recipes").get(path.stem)
    if own is None or is_copy(path):
        return None
    text, original = (each.read_text(encoding="utf-8", errors="replace") for each in (path, own))
    return own.name, changed_lines(_diff(original, text, own.name, str(path)))


def copy_in_words(recipe: Mapping[str, Any]) -> str:
    """An edited copy of sft.py, 12 lines changed."""
    lines = recipe["lines_changed"]
    edited = f"an edited copy of {recipe['copied_from']}, {lines} line{'s' * (lines != 1)} changed"
    return edited if lines else f"a copy of {recipe['copied_from']}"


def text_hash(text: str) -> str:
    """The beginning of a text's SHA-256, as it is in the first line of copies."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def _original(path: Path, origin: Origin, upstream: str | None) -> str | None:
    """The text that was copied: what is installed where that is still the same, else from next to the copy or above it."""
    if upstream is not None and text_hash(upstream) == origin.hash:
        return upstream
    for folder in path.resolve().parents:
        kept = folder / ORIGINALS / f"{origin.hash}.txt"
        if kept.is_file():
            text = kept.read_text(encoding="utf-8")
            if text_hash(text) == origin.hash:
                return text
    return None


def _kept(path: Path, origin: Origin) -> Path:
    return path.parent / ORIGINALS / f"{origin.hash}.txt"


def _diff(old: str, new: str, old_name: str, new_name: str) -> list[str]:
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm=""))
