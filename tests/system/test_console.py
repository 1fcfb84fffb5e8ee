"""What is printed commands no terminal and shows no password, whatever it quotes.

Each test names the one-line change under which it was seen to fail.
"""

import ast
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from toolkit.command_line.refusals import print_refusal
from toolkit.config import Refusal
from toolkit.system.console import first_line, printable, quoted, say, without_passwords
from toolkit.tracking.console import Progress

PACKAGE = Path(__file__).resolve().parents[2] / "toolkit"
SEQUENCES = {
    "color": "\x1b[31mred", "title": "\x1b]0;mine\x07", "clear": "\x1b[2J", "C1": "\x9b31m", "carriage return": "good\rbad",
    "backspace": "a\bb", "bidi": "a\u202eb", "isolate": "\u2066a", "line separator": "a\u2028b", "NUL": "a\0b", "DEL": "a\x7f",
    "hidden tags": "\U000e0041",
}  # fmt: skip
# Where text is written to a stream: the function itself, and numbers of the moving line.
WRITERS = {"system/console.py": {"write"}}


@pytest.mark.parametrize("kind", SEQUENCES)
def test_no_sequence_of_the_data_reaches_the_terminal(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a line, a refusal and a run's own message. Fails when: `printable` returns its text, or one of the three prints it raw."""
    text = SEQUENCES[kind]
    say(f"column {text}")
    say(text, error=True)
    print_refusal(Refusal(f"rows.jsonl:1: {text}"))
    Progress(10, 0, shown=True).say(f"  sample {text}")
    shown = "".join(capsys.readouterr())
    assert "\\" in shown
    assert not [sign for sign in shown if not sign.isprintable() and sign != "\n"]


@pytest.mark.parametrize("text", ["👩\u200d👩\u200d👧", "می\u200cخواهم", "नमस्ते", "e\u0301", "日本語\ttab\nline", "🏳️\u200d🌈"])
def test_text_of_any_language_is_shown_as_it_is(text: str) -> None:
    """Joined emoji and words too. Fails when: U+200D or U+200C is escaped, by `printable` or by a repr in a message."""
    assert printable(text) == text
    assert text.replace("\n", "\\n").replace("\t", "\\t") in quoted(text)


def test_a_line_of_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: a character beyond ASCII is escaped in Python's way."""
    value = {"text": "".join(SEQUENCES.values())}
    say(json.dumps(value, ensure_ascii=False))
    assert json.loads(capsys.readouterr().out) == value


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:secret@host/x.jsonl", "https://me:***@host/x.jsonl"),
        ("https://secret@host/x", "https://***@host/x"),
        ("http://me:se:c@ret/@host:8080/x", "http://me:***@host:8080/x"),
        ("https:/me:secret@host/x.jsonl", "https:/me:***@host/x.jsonl"),
        ("/here/https:/secret@host/x", "/here/https:/***@host/x"),
        ("https://host/x?token=secret&v=1", "https://host/x?token=***&v=1"),
        ("https:/host/x?v=1&X-Amz-Signature=secret", "https:/host/x?v=1&X-Amz-Signature=***"),
        ("https://host/x?page=2&monkey=3", "https://host/x?page=2&monkey=3"),
        ("C:/user@x", "C:/user@x"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("https://host:8080/name@main", "https://host:8080/name@main"),
        ("user/name:config@revision", "user/name:config@revision"),
    ],
)
def test_a_password_in_a_url_is_not_shown(url: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: `write` leaves `without_passwords` out, or its pattern takes a port or a revision for a password."""
    assert without_passwords(f"--dataset {url}, and more") == f"--dataset {shown}, and more"
    print_refusal(Refusal(url))
    assert capsys.readouterr().err == f"refused: {shown}\n"


def test_what_a_console_lacks_is_escaped() -> None:
    """Fails when: text is written without a look at the stream's encoding."""
    from toolkit.system.console import write

    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding="ascii")
    write("ü 日\n", console)
    assert raw.getvalue() == b"\\xfc \\u65e5\n"


def test_everything_is_printed_by_one_function() -> None:
    """Fails when: a file calls print, typer.echo or a stream's write."""
    found: dict[str, set[str]] = {}
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    for path in (path for path, text in texts.items() if re.search("print|echo|write", text)):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Call) and (name := _printing(node.func)):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
    assert found == WRITERS


def _printing(function: Any) -> str:
    """The name of a call that prints; empty for another."""
    if isinstance(function, ast.Name):
        return function.id if function.id in ("print", "pprint") else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = ast.unparse(function.value)
    known = {"typer": ("echo", "secho"), "sys.stderr": ("write",), "sys.stdout": ("write",), "stream": ("write",)}
    return function.attr if function.attr in known.get(owner, ()) else ""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("Error(s) in loading state_dict:\n\tsize mismatch for x\nmore"), "size mismatch for x"),
        (ValueError("\nall:"), "all:"),
        (MemoryError(), "MemoryError"),
        (ValueError("x" * 999), "x" * 300),
    ],
)
def test_an_error_without_a_message_has_a_first_line_too(error: Exception, shown: str) -> None:
    """Fails when: the first of no lines is taken, a line that only announces others counts, or a line of any length."""
    assert first_line(error) == shown
