"""Lines of JSON, read in blocks: the same records as of each line by itself."""

import json
from pathlib import Path

import pytest

from toolkit.system import json_lines
from toolkit.system.json_lines import parse_object, read_blocks, read_lines

INTACT = '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n'
DAMAGED = {
    "cut off": INTACT + '{"step": 3, "lo',
    "two on a line": INTACT + '{"step": 3}, {"step": 4}\n',
    "one on two lines": INTACT + '{"step": 3\n"loss": 1.0}\n',
    "both of these": INTACT + '{"step": 3\n"loss": 1.0}\n{"step": 4}, {"step": 5}\n',
    "one object once they are joined": INTACT + '{"note": "x\n{y"}\n',
    "that, and a number too many": INTACT + '{"note": "x\n{y"},5\n',
    "a comma too many": INTACT + '{"step": 3},\n',
    "no objects": INTACT + "[1]\n5\n\n",
    "a line's end inside a text": INTACT + '{"note": "\u2028"}\n',
    "braces and brackets in a text": INTACT + '{"note": "{[]}"}\n{"step": 3}\n',
    "lists and objects": INTACT + '{"rows": [{"a": 1}, [2]]}\n',
    "too deep": INTACT + '{"a":' * 70 + "1" + "}" * 70 + "\n",
    "a number of too many digits": INTACT + '{"step": ' + "1" * 5000 + "}\n",
    "ends of lines of Windows": INTACT.replace("\n", "\r\n"),
    "nothing": "",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_in_blocks_holds_the_records_of_each_line_by_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the number of records or their types are not checked, or a block may end inside a line."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(DAMAGED[name].encode())
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if (record := parse_object(line)) is not None]
    for size in (1, 30, 1 << 20):
        monkeypatch.setattr(json_lines, "_BLOCK", size)
        blocks = list(read_blocks(path))
        assert [record for found, _ in blocks for record in found] == records == read_lines(path)
        assert sum(damaged for _, damaged in blocks) == sum(bool(line.strip()) for line in lines) - len(records)


def test_records_of_numbers_are_parsed_a_block_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: each line is parsed by itself, as is one of a block that holds none."""
    path, parsed = tmp_path / "metrics.jsonl", []
    path.write_text("".join(json.dumps({"step": step, "loss": 1.5}) + "\n" for step in range(1000)))
    monkeypatch.setattr(json_lines, "parse_object", lambda line: parsed.append(line))
    assert [record["step"] for record in read_lines(path)] == list(range(1000))
    assert not parsed
