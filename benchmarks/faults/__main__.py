"""The faults of tests/faults with transformers' Trainer and TRL's SFTTrainer, each with its own documented means.

    python -m benchmarks.faults
    python -m benchmarks.faults --only F4 F9
    python -m benchmarks.faults --write docs/reliability.md

The model and the rows are those of tests/tiny_run.py. A checkpoint every 4 of 20 steps, save_total_limit=1 (2 where
damage is tried, so that an older one is there; save_strategy="no" at SIGTERM, so that the signal alone can lead to a save), and
resume_from_checkpoint=True when there is a checkpoint. What counts as survived is said for each fault. With
--write the peers' column of that file's table is filled, and what was seen is written below it.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import random
import re
import runpy
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .runs import PEERS, Bench, load_libraries
from .trials import FAULTS, Fault, Trial

BEGIN, END = "<!-- peers: written by python -m benchmarks.faults -->", "<!-- end of the peers -->"
LIBRARIES = ("transformers", "trl", "accelerate", "torch", "datasets", "safetensors")
TABLE = Path(__file__).resolve().parents[2] / "tests/faults/table.py"


@dataclass
class Line:
    """What became of the trials of a fault, by peer."""

    fault: Fault
    survived: dict[str, int] = field(default_factory=dict)
    seen: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """What was seen, and how often; said once where both peers did the same."""
        seen = {peer: "; ".join(f"{what} ({times})" for what, times in self.seen[peer].most_common()) for peer in PEERS}
        if len(set(seen.values())) == 1:
            return seen["Trainer"]
        return ". ".join(f"{PEERS[peer]}: {text}" for peer, text in seen.items())

    def cell(self, peer: str) -> str:
        return f"{self.survived[peer]} of {self.fault.trials}"


def try_fault(fault: Fault, bench: Bench, seed: str) -> Line:
    line = Line(fault)
    for peer in PEERS:
        chance = random.Random(f"{seed} {fault.what} {peer}")
        verdicts = [fault.attempt(Trial(bench, peer, number, fault.trials, chance)) for number in range(fault.trials)]
        line.survived[peer] = sum(survived for survived, _ in verdicts)
        line.seen[peer] = Counter(seen for _, seen in verdicts)
    return line


def table(lines: list[Line]) -> str:
    head = ["fault", "what is done", "survived means", "Trainer", "TRL", "what was seen"]
    rows = [[line.fault.fault, line.fault.what, line.fault.survived, *map(line.cell, PEERS), line.note] for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def write(path: Path, lines: list[Line], text: str) -> None:
    """Fill the peers' column of the table in that file, and put the text between marks of its own."""
    written: dict[str, Any] = runpy.run_path(str(TABLE))
    before, rest = path.read_text(encoding="utf-8").split(written["BEGIN"])
    old, after = rest.split(written["END"])
    rows = {(row[0], row[1]): row for row in written["read_rows"](old)}
    peers, date = written["HEAD"].index("peers"), written["HEAD"].index("date")
    for key, cell in cells(lines).items():
        row = rows.setdefault(key, [*key, *[""] * (len(written["HEAD"]) - 2)])
        row[peers] = cell
        row[date] = row[date] or today()
    ordered = sorted(rows.values(), key=lambda row: (int(row[0][1:]) if row[0][1:].isdigit() else 99, row[1]))
    note = old.split("\n|")[0].strip()
    made = "\n".join("| " + " | ".join(row) + " |" for row in (written["HEAD"], ["---"] * len(written["HEAD"]), *ordered))
    after = re.sub(f"\n*{re.escape(BEGIN)}.*?{re.escape(END)}", "", after, flags=re.DOTALL)
    whole = f"{before}{written['BEGIN']}\n{note}\n\n{made}\n{written['END']}\n\n{BEGIN}\n{text}\n{END}{after}"
    path.write_text(whole, encoding="utf-8")


def cells(lines: list[Line]) -> dict[tuple[str, str], str]:
    """The peers' cell of each row of the toolkit's table."""
    seen: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        _, _, option = line.fault.what.partition(", started again: with ")
        means = f"with {option}: " if option else ""
        if line.fault.fault in ("F5", "F6"):  # the toolkit's line asks for more
            means = "not silently wrong: "
        counts = ", ".join(f"{PEERS[peer]} {line.cell(peer)}" for peer in PEERS)
        if line.fault.fault == "F5":
            counts += "; went on to the right end: " + ", ".join(str(line.seen[peer]["exact all the same"]) for peer in PEERS)
        seen.setdefault((line.fault.fault, line.fault.row), []).append(means + counts)
    return {key: "; ".join(parts) for key, parts in seen.items()}


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="such as F4")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**6)), help="of the random moments")
    parser.add_argument("--write", type=Path, help="the file whose table is filled")
    arguments = parser.parse_args()
    if arguments.only and arguments.write:
        parser.error("--write wants all faults: leave out --only")
    load_libraries()
    began, lines = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for fault in FAULTS:
            if not arguments.only or fault.fault in arguments.only:
                lines.append(try_fault(fault, bench, arguments.seed))
                print(table(lines[-1:]).splitlines()[-1], flush=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    seen = (
        f"Peers, {today()}: `python -m benchmarks.faults --seed {arguments.seed}`, {time.monotonic() - began:.0f} s; Python "
        f"{platform.python_version()}, {versions}, {platform.system()}, {os.cpu_count()} cores, CPU only."
    )
    print(f"\n{seen}\n\n{table(lines)}")
    if arguments.write:
        write(arguments.write, lines, f"{seen}\n\n{table(lines)}")


if __name__ == "__main__":
    main()
