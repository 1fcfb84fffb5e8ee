"""The table of docs/reliability.md: lines that were tried now replace those of before; lines of peers stay as they are."""

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: written by make chaos -->", "<!-- end of the table -->"
HEAD = ["fault", "what is done", "survived", "of", "peers", "measured", "date"]
LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "datasets")


def write_table(path: Path, lines: list[Any]) -> None:
    """Put the lines between the marks of the file."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    rows = {(row[0], row[1]): row for row in read_rows(old)}
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    for (fault, what), (survived, tried, measured) in merged(lines).items():
        peers = rows.get((fault, what), [""] * len(HEAD))[4]
        rows[fault, what] = [fault, what, str(survived), str(tried), peers, measured, today]
    ordered = sorted(rows.values(), key=lambda row: (int(row[0][1:]) if row[0][1:].isdigit() else 99, row[1]))
    table = ["| " + " | ".join(row) + " |" for row in (HEAD, ["---"] * len(HEAD), *ordered)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    note = f"Last run: {today}, Python {platform.python_version()}, {versions}, {platform.system()}, {os.cpu_count()} cores, CPU only."
    path.write_text(f"{before}{BEGIN}\n{note}\n\n" + "\n".join(table) + f"\n{END}{after}", encoding="utf-8")


def merged(lines: list[Any]) -> dict[tuple[str, str], tuple[int, int, str]]:
    """Survived, tried and measured by fault and deed: cases of one deed count together."""
    sums: dict[tuple[str, str], tuple[int, int, str]] = {}
    for line in lines:
        survived, tried, measured = sums.get((line.fault, line.what), (0, 0, ""))
        sums[line.fault, line.what] = survived + line.tried - len(line.failures), tried + line.tried, line.measured or measured
    return sums


def read_rows(text: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows[2:] if len(row) == len(HEAD)]
