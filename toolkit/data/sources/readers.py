"""Readers of text files: each yields (line number, row) and names the line that it can't read.

The standard library's parsers, because then a row's line stays known, a field stays what was written (pandas' reader turns
the text "null" of a CSV into nothing), and an error can name the place.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import itertools
import json
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import parse_json
from toolkit.data.sources.remote import is_url, open_url
from toolkit.data.sources.squad import is_squad, squad_rows
from toolkit.data.sources.stream_state import Place, go_to, is_by_line
from toolkit.system.console import quoted

Row = dict[str, Any]

COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# columns of a CSV that are text even where each field happens to be a number
ALWAYS_TEXT = frozenset({"text", "prompt", "completion", "chosen", "rejected", "question", "context", "source", "target"})


def read_rows(
    path: str, ending: str, sample_by: str = "line", place: Place | None = None
) -> Iterator[tuple[int, Row]]:
    """Rows of a text file with their line numbers (in a JSON list: their places). `sample_by`: what a row of a .txt file is.

    `place`, of a file that `is_by_line`: where to begin. It is moved behind each row before that is given out.

    Raises:
        Refusal: a line that can't be read, or a file without rows.
    """
    if place is not None and is_by_line(ending, sample_by):
        rows = (_read_txt if ending == ".txt" else _read_jsonl)(path, place)
        if place.offset:
            yield from rows
            return
    else:
        rows = _TXT_READERS[sample_by](path) if ending == ".txt" else TEXT_READERS[ending](path)
    first = next(rows, None)
    if first is None:
        blank = "" if next(_lines(path), None) is None else " but for white space or a header"
        raise Refusal(f"{path} has no rows: the file is empty{blank}.")
    yield first
    yield from rows


def number_columns(rows: Iterable[Row]) -> dict[str, type]:
    """The columns of a CSV in which every field that isn't empty is a number: int, or float where one has a fraction."""
    types: dict[str, type | None] = {}
    filled: set[str] = set()
    for row in rows:
        for name, value in row.items():
            known = types.setdefault(name, None if name in ALWAYS_TEXT else int)
            if known and value:
                filled.add(name)
                if not _INTEGER.fullmatch(value):
                    types[name] = float if _NUMBER.fullmatch(value) else None
    return {name: known for name, known in types.items() if known and name in filled}


def with_numbers(row: Row, types: dict[str, type]) -> Row:
    """The row with the fields of those columns as numbers, empty ones as None."""
    return {name: (types[name](value) if value else None) if name in types else value for name, value in row.items()}


def first_double(names: Iterable[str]) -> str | None:
    """The first name that comes twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def what_is(value: object) -> str:
    """The kind of a JSON value, for a message."""
    kinds = {str: "a string", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null" if value is None else type(value).__name__)


def _read_jsonl(path: str, place: Place | None = None) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(path, place):
        if line.strip():
            yield number, read_json_line(line, f"{path}:{number}")


def read_json_line(line: str, where: str) -> Row:
    """The row of a line that isn't blank; refused where it is no JSON object."""
    return _an_object(parse_json(line.strip(), where), f"{where}:")


def unreadable_lines(path: str) -> list[str]:
    """What is wrong with each line of a file of JSON lines that can't be read; the messages name file and line."""
    wrong = []
    for number, line in _lines(path):
        try:
            if line.strip():
                read_json_line(line, f"{path}:{number}")
        except Refusal as refusal:
            wrong.append(str(refusal))
    return wrong


def _read_json(path: str) -> Iterator[tuple[int, Row]]:
    """A list of objects; or, as many tools write under this ending, an object a line; or SQuAD's articles."""
    first = next((line for _, line in _lines(path) if line.strip()), "")
    if not first:
        return
    is_line = first.lstrip().startswith("{") and _is_json(first)
    if is_line and not ('"paragraphs"' in first and is_squad(parse_json(first.strip(), path))):
        yield from _read_jsonl(path)
        return
    whole = parse_json("".join(line for _, line in _lines(path)), path, is_file=True)
    if is_squad(whole):
        yield from squad_rows(whole, path)
        return
    if not isinstance(whole, list):
        inside = [name for name, value in whole.items() if isinstance(value, list)] if isinstance(whole, dict) else []
        hint = f" If the rows are under {quoted(inside[0])}, save that list alone." if inside else ""
        raise Refusal(f"{path} is {what_is(whole)}; it should be a list of objects, or have one object a line.{hint}")
    for number, row in enumerate(whole, 1):
        yield number, _an_object(row, f"{path}: row {number}")


def _read_csv(path: str) -> Iterator[tuple[int, Row]]:
    """Fields as text under the header's names. A row is numbered by the line where it ends."""
    csv.field_size_limit(2**31 - 1 if sys.maxsize > 2**31 else sys.maxsize)  # a field may hold a document
    lines = (line for _, line in _lines(path))
    first = next(lines, "")
    declared = re.fullmatch(r"sep=(.)\s*", first, re.IGNORECASE)  # a first line of Excel's, before the header
    if declared:
        separator = declared[1]
    elif ".tsv" in Path(path).suffixes:
        separator = "\t"
    else:
        separator = next((each for each in "\t;|" if each in first and "," not in first), ",")
    reader = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
    begins = 1
    try:
        if declared:
            next(reader)
        header = [name.strip() or f"column_{place}" for place, name in enumerate(next(reader, []), 1)]
        if twice := first_double(header):
            raise Refusal(f"{path}:{reader.line_num}: the column {quoted(twice)} is twice in the header.")
        begins = reader.line_num + 1
        for fields in reader:
            if fields and len(fields) != len(header):
                raise Refusal(
                    f"{path}:{reader.line_num}: {len(fields)} fields, but the header has {len(header)} ({', '.join(header)}). "
                    f"A field with {separator!r} or a line break in it goes in double quotes."
                )
            if fields:
                yield reader.line_num, dict(zip(header, fields, strict=True))
            begins = reader.line_num + 1
    except csv.Error as error:
        row = f" in the row that begins in line {begins}" if begins < reader.line_num else ""
        row += ": a double quote in it has no other" if row and "unexpected end" in str(error) else ""
        raise Refusal(f"{path}:{reader.line_num}: not valid CSV ({error}){row}.") from None


def _read_txt(path: str, place: Place | None = None) -> Iterator[tuple[int, Row]]:
    """A row a line, as datasets reads text; blank ones left out."""
    for number, line in _lines(path, place):
        if line.strip():
            yield number, {"text": line.rstrip("\r\n")}


def _read_paragraphs(path: str) -> Iterator[tuple[int, Row]]:
    """A row a paragraph; it is numbered by its first line."""
    for is_blank, lines in itertools.groupby(_lines(path), key=lambda numbered: not numbered[1].strip()):
        if not is_blank:
            numbers, texts = zip(*lines, strict=True)
            yield numbers[0], {"text": "".join(texts).rstrip("\r\n")}


def _read_conll(path: str) -> Iterator[tuple[int, Row]]:
    """A row a sentence, numbered by its first line: `tokens`, the first column, and `tags`, the last; those between by number.

    Columns are parted by tabs, else by spaces; a blank line ends a sentence. Lines of -DOCSTART-, and `# id` before a sentence
    (MultiCoNER's), are no words.
    """
    separator, width, begins = " ", 0, 0
    words: list[list[str]] = []
    for number, line in itertools.chain(_lines(path), [(0, "")]):
        line = line.rstrip("\r\n")
        if not line.strip():
            if words:
                columns = [list(column) for column in zip(*words, strict=True)]
                between = {f"column_{place}": column for place, column in enumerate(columns[1:-1], 2)}
                yield begins, {"tokens": columns[0], "tags": columns[-1], **between}
            words = []
            continue
        if line.startswith("-DOCSTART-") or (not words and line.startswith("# id ")):
            continue
        separator = separator if width else "\t" if "\t" in line else " "
        fields = line.split("\t") if separator == "\t" else [field for field in line.split(" ") if field]
        width, begins = width or len(fields), begins if words else number
        if len(fields) != width or width < 2:
            there = f"the lines before it have {width}" if width != len(fields) else "a line is a word and its tag"
            columns_found = f"{len(fields)} column{'s' if len(fields) != 1 else ''}"
            raise Refusal(
                f"{path}:{number}: {columns_found}, and {there}. Columns are parted by "
                f"{'tabs' if separator == chr(9) else 'spaces'}, sentences by blank lines: correct the line."
            )
        words.append(fields)


def _read_document(path: str) -> Iterator[tuple[int, Row]]:
    """The whole file as one row."""
    text = "".join(line for _, line in _lines(path))
    if text.strip():
        yield 1, {"text": text}


def _lines(path: str, place: Place | None = None) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, cut at newlines only: a text may hold other separators, such as U+2028.

    `place`: where to begin; it is moved along.
    """
    place = place or Place()
    utf8 = f"{Path(path).with_suffix('')}-utf8{Path(path).suffix}"
    try:
        with contextlib.ExitStack() as opened:
            file: Any = opened.enter_context(open_url(path) if is_url(path) else open(path, "rb"))  # noqa: SIM115
            if decompress := COMPRESSIONS.get(Path(path).suffix.lower()):
                file = opened.enter_context(decompress(file))
            if place.offset:
                go_to(file, place.offset)
            for number, line in enumerate(file, place.line + 1):
                place.offset, place.line = place.offset + len(line), number
                if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise Refusal(f"{path} is UTF-16. Make it UTF-8: iconv -f UTF-16 -t UTF-8 {path} > {utf8}")
                if number == 1 and (found := _other_format(line)):
                    raise Refusal(f"{path} is no text: its content is {found[0]}. {found[1].format(path=path)}")
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise Refusal(
                        f"{path}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x} in place {error.start + 1} of the "
                        f"line). If the file is Latin-1: iconv -f LATIN1 -t UTF-8 {path} > {utf8}"
                    ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise Refusal(f"{path} is damaged or cut short: {error}") from None
    except OSError as error:
        raise Refusal(f"{path} can't be read: {error.strerror or error}") from None


def _an_object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise Refusal(f'{place} is {what_is(row)}; a row should be an object such as {{"text": "..."}}.')
    return row


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    except (RecursionError, ValueError):  # it is, and is refused where it is read
        return True
    return True


def _other_format(first: bytes) -> tuple[str, str] | None:
    """What a file is by its first bytes, and what to do, where that is no text."""
    return next((found for magic, found in _MAGIC.items() if first.startswith(magic)), None)


# The first bytes of formats that are found under the names of others.
_NAMED_BY_ENDING = "Give it that ending: mv {{path}} {{path}}{}"
_MAGIC = {
    b"\x1f\x8b": ("compressed by gzip", _NAMED_BY_ENDING.format(".gz")),
    b"BZh": ("compressed by bzip2", _NAMED_BY_ENDING.format(".bz2")),
    b"\xfd7zXZ\0": ("compressed by xz", _NAMED_BY_ENDING.format(".xz")),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "Decompress it: zstd -d {path}"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "Unpack it, or save the sheet as CSV."),
    b"PAR1": ("Parquet", "Give it that ending: .parquet"),
    b"ARROW1": ("Arrow", "Give it that ending: .arrow"),
    b"%PDF-": ("PDF", "Extract its text first."),
    b"SQLite format 3": ("a SQLite database", "Export the table as CSV."),
}
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # not 007, which is a name; not what 64 bits can't hold
_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")

TEXT_READERS: dict[str, Callable[[str], Iterator[tuple[int, Row]]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_txt,
    ".conll": _read_conll,
    ".bio": _read_conll,
    ".iob": _read_conll,
}
_TXT_READERS = {"line": _read_txt, "paragraph": _read_paragraphs, "document": _read_document}
