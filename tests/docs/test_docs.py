"""Every shell and Python block of README.md and docs/ is executed, or says directly above it why not.

    <!-- not run: REASON -->

What a block must print may stand there too: `<!-- shows: SOME WORDS || OTHERS -->`. The blocks of a page run one after another in one empty folder, in which `recipes/` and `.venv/` are as in a checkout. Recipes
train two steps of a tiny model: `as_a_reader.py` says how. Blocks of other languages, and indented ones in which no line begins
with a command, are not code to run.

Fails when: `toolkit copy sft` in docs/how-to/copy-a-recipe.md is written `toolkit cp sft`, or a marker is taken away.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(r"\s*<!-- not run: (.+) -->\s*")
SHOWS = re.compile(r"\s*<!-- shows: (.+) -->\s*")
FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
# The files of CONTRIBUTING.md's examples.
TO_BE_WRITTEN = ("toolkit/losses/focal.py", "tests/losses/test_focal.py", "toolkit/metrics/calibration.py", "recipes/focal.py")
SHELL, PYTHON = ("bash", "sh", "shell", "console", "zsh"), ("python", "py", "python3")
# An indented block, or one that names no language, is shell where a line begins with one of these.
COMMANDS = re.compile(
    r" *(\$ |sudo |\S*/bin/|(make|toolkit|python3?|accelerate|torchrun|mpirun|srun|sbatch|pip|pytest|hf|huggingface-cli|aws|wandb"
    r"|tensorboard|mlflow|trackio|git|cd|export|source|cat|sed|cp|mkdir|curl|apt-get|docker)( |$)|[A-Z_]+=\S+ \S)"
)


@dataclass(frozen=True)
class Block:
    """`reason`: why it is not run, from the marker above it; `shows`: what it must print, from there too."""

    page: str
    line: int
    language: str  # "shell", "python" or "" for anything else
    text: str
    reason: str | None
    shows: tuple[str, ...] = ()


def find_blocks(text: str, page: str = "page.md") -> list[Block]:
    """The blocks of a page, fenced and indented by four spaces or more, in their order."""
    lines = text.splitlines()
    blocks, start = [], 0
    while start < len(lines):
        fence = FENCE.fullmatch(lines[start])
        if fence:
            end = next((n for n in range(start + 1, len(lines)) if lines[n].strip() == fence[2]), len(lines))
            body, after, named = lines[start + 1 : end], end + 1, fence[3].strip().split(" ")[0].lower()
            indent = len(fence[1])
        elif lines[start].startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            end = next((n for n in range(start, len(lines)) if lines[n].strip() and not lines[n].startswith("    ")), len(lines))
            body, after, named = lines[start:end], end, ""
            indent = min(len(line) - len(line.lstrip()) for line in body if line.strip())
        else:
            start += 1
            continue
        above = next((lines[n] for n in range(start - 1, -1, -1) if lines[n].strip()), "")
        marker, shows = MARKER.fullmatch(above), SHOWS.fullmatch(above)
        code = "\n".join(line[indent:] for line in body).strip("\n") + "\n"
        blocks.append(Block(page, start + 1, _language(named, code), code, marker[1] if marker else None, tuple(shows[1].split(" || ")) if shows else ()))
        start = after
    return blocks


def _language(named: str, code: str) -> str:
    if named in SHELL:
        return "shell"
    if named in PYTHON:
        return "python"
    return "shell" if not named and any(COMMANDS.match(line) for line in code.splitlines()) else ""


BLOCKS = {str(page.relative_to(ROOT)): find_blocks(page.read_text(), str(page.relative_to(ROOT))) for page in PAGES}
TO_RUN = {page: [block for block in blocks if block.language and not block.reason] for page, blocks in BLOCKS.items()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="output goes to the shell through /proc, which is Linux's")
@pytest.mark.parametrize("page", [page for page, blocks in TO_RUN.items() if blocks])
def test_every_block_that_is_not_marked_runs(reader: Callable[..., Any], tmp_path: Path, page: str) -> None:
    """And prints what it is to show. Fails when: a function that a page calls is renamed, as `preference_loss` of the recipe that docs/how-to/preferences.md starts."""
    for block in TO_RUN[page]:
        (tmp_path / "block.py").write_text(block.text)
        shell = block.text if block.language == "shell" else "python block.py"
        done = reader(shell, tmp_path)
        print(f"$ {block.text}\n{done.stdout}")  # shown by pytest -rP
        assert done.returncode == 0, f"{page}:{block.line} ended with {done.returncode}; mend it or mark it\n{block.text}\n{done.stdout}"
        assert [words for words in block.shows if words not in done.stdout] == [], f"{page}:{block.line}\n{done.stdout}"


@pytest.mark.parametrize("page", BLOCKS)
def test_every_marker_stands_above_a_block_and_says_why(page: str) -> None:
    """Fails when: a marker is left behind after its block was removed, or says nothing."""
    reasons = [block.reason for block in BLOCKS[page] if block.reason and block.language]
    assert len(re.findall(r"<!-- not run", (ROOT / page).read_text())) == len(reasons)
    assert [reason for reason in reasons if len(reason.split()) < 3] == []


@pytest.mark.parametrize("page", BLOCKS)
def test_every_file_that_a_page_links_to_is_there(page: str) -> None:
    """Fails when: a page is renamed and another still links to it."""
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", [*BLOCKS, "CONTRIBUTING.md"])
def test_every_file_and_every_name_in_it_that_a_page_names_is_there(page: str) -> None:
    """As in `training/step.py: train_step`, below the root, toolkit/ or tests/. Fails when: a file or a test is renamed in the code alone."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:toolkit|tests|recipes|benchmarks)/[\w./]+|(?:\w+/)+\w+\.py)(?::\s+(\w[\w,\s]*))?`", text)
    missing = []
    for path, names in named:
        found = next((folder / path for folder in (ROOT, ROOT / "toolkit", ROOT / "tests") if (folder / path).exists()), None)
        if found is None:
            missing += [path] if path not in TO_BE_WRITTEN else []
        else:
            missing += [f"{path}: {name}" for name in re.findall(r"\w+", names) if not re.search(rf"\b{name}\b", found.read_text(encoding="utf-8"))]
    assert missing == []


@pytest.mark.parametrize("page", ["docs/design.md", "README.md"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    """Fails when: a test is renamed in the code alone."""
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"\btest_\w{20,}", (ROOT / page).read_text(encoding="utf-8")) if f"def {name}(" not in written] == []


def test_the_index_names_every_page() -> None:
    """Fails when: a page is added under docs/ and not to docs/README.md."""
    index = (ROOT / "docs/README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


@pytest.mark.skipif(os.name != "posix", reason="the script is for a shell")
def test_what_stands_for_python_runs_in_a_folder_with_a_space(client_script: Callable[[Path, str], str], tmp_path: Path) -> None:
    """Fails when: its first line names the Python."""
    programs = tmp_path / ("a clone, " + "far " * 30 + "down")
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    (tmp_path / "python").write_text(client_script(programs, "no socket"))
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run([tmp_path / "python", "-S", "-c", "print('it runs')"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("it runs\n", "")


def test_blocks_are_found_however_they_are_written() -> None:
    """Fails when: indented blocks are passed over, or a marker counts for more than the block below it."""
    page = (
        "# A page\n\n```bash\necho 1\n```\n\n<!-- not run: it needs a GPU -->\n```sh\necho 2\n```\n\n```yaml\na: 1\n```\n\n"
        "    toolkit recipes\n\n    make demo\n\n<!-- not run: it needs the Hub -->\n\n    pip install x\n\n"
        "    loss 0.5\n\n- A list\n  continues\n\n      python recipes/sft.py \\\n        --help\n\n```\nsrun x\n```\n\n~~~python\n1\n~~~\n"
    )
    found = [(block.language, block.text, block.reason) for block in find_blocks(page) if block.language]
    assert found == [
        ("shell", "echo 1\n", None),
        ("shell", "echo 2\n", "it needs a GPU"),
        ("shell", "toolkit recipes\n\nmake demo\n", None),
        ("shell", "pip install x\n\nloss 0.5\n", "it needs the Hub"),
        ("shell", "python recipes/sft.py \\\n  --help\n", None),
        ("shell", "srun x\n", None),
        ("python", "1\n", None),
    ]
