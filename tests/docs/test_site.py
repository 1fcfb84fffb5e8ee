"""The documentation as a site: it builds with every link checked, loads nothing from elsewhere, and has every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a warning, such as of a link that leads nowhere, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    """Fails when: `font: false` is taken out of mkdocs.yml."""
    loaded = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(https?:|//)|<link\b[^>]*\bhref="?(?:https?:|//)|url\((?:https?:|//)""")
    assert [str(page) for page in site.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_every_public_name_has_its_docstring_in_the_reference_and_a_line_in_the_index(site: Path) -> None:
    """Fails when: a public function has no docstring, or the stub names another file than the one it is in."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html")}
    lines = dict(re.findall(r"<tr>\s*<td>.*?<code>(\w+)</code>.*?</td>\s*<td>(.*?)</td>", pages.pop("index"), flags=re.DOTALL))
    names = set(toolkit.__all__) - {"__version__"}
    assert {name for name in names if not lines.get(name)} == set()
    anchors = {name.split(".")[-1] for page in pages.values() for name in re.findall(r'id="(toolkit\.[\w.]+)"', page)}
    assert names - anchors == set()
