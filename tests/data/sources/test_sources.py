"""Sources: the same rows from every format, refusals that name file and line, mixtures by share, and caches by content."""

import bz2
import csv
import gzip
import json
import lzma
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from toolkit.cache import arrow
from toolkit.config import DataConfig, Refusal, RunConfig
from toolkit.data.sources import load as sources
from toolkit.data.sources.hub_datasets import load_from_hub, parse_hub_name
from toolkit.data.sources.load import load_splits
from toolkit.data.sources.mixtures import as_mixture
from toolkit.data.tokenize.columns import read_options

pytestmark = pytest.mark.warm

ROWS: list[dict[str, Any]] = [{"text": f"row {number}, \"é\"\nand more", "label": number % 3} for number in range(40)]


@pytest.fixture(autouse=True)
def _own_cache_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def write(path: str, content: str | bytes | list[dict[str, Any]]) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def load(dataset: str, **settings: Any) -> datasets.DatasetDict:
    return load_splits(DataConfig(dataset=dataset, **settings))


def without_origin(rows: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "origin"} for row in rows]


# Formats


def write_format(ending: str) -> str:
    table, path = datasets.Dataset.from_list(ROWS), f"data/rows{ending}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path("data").mkdir(exist_ok=True)
    if ending in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"], delimiter="\t" if ending == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    elif ending == ".parquet":
        table.to_parquet(path)
    elif ending == ".arrow":
        table.save_to_disk("saved")
        os.replace(next(Path("saved").glob("*.arrow")), path)
    else:
        packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(Path(path).suffix, bytes)
        write(path, packed((json.dumps(ROWS) if ending == ".json" else lines).encode()))
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "ending", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz"]
)
def test_every_format_gives_the_same_rows(ending: str, streaming: bool) -> None:
    """Fails when: CSV columns of numbers stay text, or lines are cut elsewhere than at newlines."""
    rows = load(write_format(ending), eval_fraction=0.0, streaming=streaming)["train"]
    assert without_origin(rows) == ROWS
    origins = [row["origin"] for row in rows]
    last = 1 + 2 * len(ROWS) if ending in (".csv", ".tsv") else len(ROWS)  # of a CSV row, the line where it ends
    assert origins[-1] == f"data/rows{ending}:{last}"
    assert len(set(origins)) == len(ROWS)


def test_text_is_a_row_a_line_and_blank_lines_count_as_lines() -> None:
    """Fails when: a row is numbered by its place among the rows, or U+2028 ends a line."""
    rows = load(write("data/a.txt", "one\n\n  \ntwo\u2028still two\r\nnull\n"), eval_fraction=0.0)["train"]
    assert rows["text"][:] == ["one", "two\u2028still two", "null"]
    assert rows["origin"][:] == ["data/a.txt:1", "data/a.txt:4", "data/a.txt:5"]


def test_blank_lines_a_byte_order_mark_and_late_columns_are_accepted() -> None:
    """Also a column that first comes after many rows. Fails when: the schema of the first batch is kept."""
    rows = [{"text": f"t{number}"} for number in range(5000)]
    rows[4500] |= {"extra": [1.5], "deep": {"a": 1}}
    rows[4800] |= {"deep": {"b": "x"}}
    content = b"\xef\xbb\xbf\n" + "\n\n".join(map(json.dumps, rows)).encode()
    found = load(write("data/a.jsonl", content), eval_fraction=0.0)["train"]
    assert found["text"][:] == [row["text"] for row in rows]
    assert found[4500]["extra"] == [1.5]
    assert found[4500]["deep"] == {"a": 1, "b": None}
    assert found[4800]["deep"] == {"a": None, "b": "x"}
    assert (found[0]["extra"], found[0]["deep"], found[4500]["origin"]) == (None, None, "data/a.jsonl:9002")


def test_a_csv_field_stays_what_was_written() -> None:
    """Pandas would make nothing of "null" and 7 of "007". Fails when: number_columns takes leading zeros, or text columns."""
    path = write("data/a.csv", "text,zip,share,label\n12,007,0.5,\n34,100,2,1\n\n56,200,1e3,0\n")
    rows = load(path, eval_fraction=0.0)["train"]
    assert without_origin(rows) == [
        {"text": "12", "zip": "007", "share": 0.5, "label": None},
        {"text": "34", "zip": "100", "share": 2.0, "label": 1},
        {"text": "56", "zip": "200", "share": 1000.0, "label": 0},
    ]
    assert without_origin(load(write("data/b.csv", "text;label\nnull;a,b\n"), eval_fraction=0.0)["train"]) == [
        {"text": "null", "label": "a,b"}
    ]


def test_the_first_line_of_a_csv_may_be_excels_separator() -> None:
    """Fails when: it is taken for the header, or lines are counted from the one after it."""
    rows = load(write("data/a.csv", "SEP=;\r\ntext;label\r\na,b;x\r\n"), eval_fraction=0.0)["train"]
    assert rows[:] == {"text": ["a,b"], "label": ["x"], "origin": ["data/a.csv:3"]}
    with pytest.raises(Refusal, match=r"data/b\.csv:2: .*'text' .*twice"):
        load(write("data/b.csv", "sep=|\ntext|text\na|b\n"), eval_fraction=0.0)


def test_class_names_and_lists_survive_what_datasets_saved() -> None:
    """Fails when: the columns' features are inferred again."""
    tokens, label = datasets.Sequence(datasets.Value("string")), datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"tokens": tokens, "label": label})
    table = datasets.Dataset.from_list([{"tokens": ["a", "b"], "label": 1}] * 3, features=features)
    table.to_parquet("data.parquet")
    datasets.DatasetDict(train=table, validation=table.select([0])).save_to_disk("both")
    table.save_to_disk("alone")
    for dataset, counts in (("data.parquet", {"train": 3}), ("both", {"train": 3, "validation": 1}), ("alone", {"train": 3})):
        splits = load(dataset, eval_fraction=0.0)
        assert {name: len(rows) for name, rows in splits.items()} == counts
        assert splits["train"].features["label"] == features["label"]
        assert without_origin(splits["train"]) == table.to_list()
        assert splits["train"]["origin"][0].endswith(":1")


def test_tools_of_differing_types_are_kept_as_json() -> None:
    """Fails when: they go to Arrow as objects, whose types clash here."""
    tools = [[{"name": "f", "default": 1}], [{"name": "g", "default": "x"}]]
    path = write("data/a.jsonl", [{"messages": [], "tools": each} for each in tools])
    assert [json.loads(row) for row in load(path, eval_fraction=0.0)["train"]["tools"]] == tools


# Files, folders, patterns


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], {"train": 1, "validation": 1, "test": 1}),
        (["train-0-of-2.jsonl", "train-1-of-2.jsonl", "dev.jsonl", "README.md", ".x.jsonl"], {"train": 2, "validation": 1}),
        (["training/a.jsonl", "eval/b.jsonl", "dataset_info.json"], {"train": 1, "test": 1}),
        (["part1.jsonl", "sub/part2.json", "constraint.jsonl"], {"train": 3}),
    ],
)  # fmt: skip
def test_a_folder_s_files_go_to_the_split_that_their_names_tell(files: list[str], counts: dict[str, int]) -> None:
    """Fails when: a split's word inside another word counts, or the folder's own name does."""
    for number, name in enumerate(files):
        write(f"test/{name}", [{"text": f"{number}"}] if name.endswith(("l", "part2.json")) else "{}")
    found = sources._load("test", DataConfig())
    assert {split: len(rows) for split, rows in found.items()} == counts
    assert found["train"]["origin"][0].startswith("test/")


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("data/train.jsonk", r"Did you mean data/train\.jsonl"),
        ("nowhere/train.jsonl", "there is no folder nowhere"),
        ("data/*.parquet", "no file matches"),
        ("data/notes.md", r"unknown kind of file.*\.jsonl, .*\.parquet"),
        ("empty", "no data files .*empty"),
        ("unclear", "unclear/more.jsonl belongs to no split"),
        ("twice", "files of several formats"),
        ("a b", "not a local path"),
    ],
)
def test_what_cannot_be_found_is_refused_with_what_is_there(dataset: str, said: str) -> None:
    """Fails when: the case falls through to the Hub."""
    for path in ("data/train.jsonl", "unclear/train.jsonl", "unclear/more.jsonl", "twice/train.jsonl", "twice/train.csv"):
        write(path, [{"text": "a"}])
    write("data/notes.md", "text")
    Path("empty").mkdir()
    with pytest.raises(Refusal, match=said):
        load(dataset)


BROKEN = {
    "empty.jsonl": (b"", "data/empty.jsonl has no rows: .*empty"),
    "blank.jsonl": (b"\n \n", "data/blank.jsonl has no rows"),
    "header.csv": (b"text,label\n", "data/header.csv has no rows"),
    "empty.txt": (b"", "data/empty.txt has no rows"),
    "empty.json": (b"[]", "data/empty.json has no rows"),
    "cut.jsonl": (b'{"text": "a"}\n\n{"text": "b\n', "data/cut.jsonl:3: .*JSON .*column 10"),
    "cut.json": (b'[{"text": "a"},\n{"text": "b"', "data/cut.json:2: is not JSON"),
    "cut.csv": (b'text,label\na,1\n"b,2\n', r"data/cut.csv:3: not valid CSV \(unexpected end of data\)\.$"),
    "quote.csv": (b'text,label\n"a\nb",1\n"c,2\nd,3\ne,4\n', "data/quote.csv:6: not valid CSV .*begins in line 4"),
    "behind.csv": (b'text,label\n"a\nb" c,1\n', r"data/behind.csv:3: not valid CSV \(.*\) in the row that begins in line 2\.$"),
    "cut.parquet": (b"PAR1....", "data/cut.parquet can't be read"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 99)[:-20], "data/cut.jsonl.gz is damaged"),
    "bit.jsonl.gz": (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20, "data/bit.jsonl.gz is damaged"),  # no valid block of deflate
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', "data/latin.jsonl:2: .*UTF-8 .*0xe9 .*11"),
    "latin.csv": (b"text\na\n\xe9\n", "data/latin.csv:3: not UTF-8"),
    "latin.txt": (b"a\n\xe9\n", "data/latin.txt:2: not UTF-8"),
    "wide.txt": ("text".encode("utf-16"), "data/wide.txt is UTF-16"),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', "data/list.jsonl:2: is a list"),
    "list.json": (b'[{"text": "a"}, "b"]', "data/list.json: row 2 is a string"),
    "wrapped.json": (b'{"version": 1,\n"data": [{"text": "a"}]}', "one object.*|is an object.*under 'data'"),
    "ragged.csv": (b'text,label\n"a\nb",1\nc,2,3\n', "data/ragged.csv:4: 3 fields, .*header .*2"),
    "twice.csv": (b"text,text\na,b\n", "data/twice.csv:1: .*'text' .*twice"),
    "odd.jsonl": (b'{"text": "a"}\n' * 16 + b'{"text": 7}\n', "data/odd.jsonl:17: 'text' .*number, .*string in 16"),
    "nested.jsonl": (b'{"text": ["a"]}\n' + b'{"text": "a"}\n' * 3, "data/nested.jsonl:1: 'text' .*list, .*string in 3"),
    "late.jsonl": (b'{"text": "a"}\n' * 5000 + b'{"text": {}}\n', "data/late.jsonl:5001: 'text' is an object"),
    "inside.jsonl": (b'{"a": [{"b": 1}]}\n{"a": [{"b": "x"}]}\n', "data/inside.jsonl:2: 'a' doesn't fit"),
    "half.jsonl": (b'{"text": "a"}\n{"text": "\\ud800"}\n', "data/half.jsonl:2: .*ud800"),
    "huge.jsonl": (b'{"n": 1}\n{"n": 99999999999999999999}\n', "data/huge.jsonl:2: 'n' .*64 bits"),
    "huge_inside.jsonl": (b'{"n": [1.5, 2]}\n{"n": [1.5, 99999999999999999999]}\n', "data/huge_inside.jsonl:2: 'n' .*64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_refused_with_file_and_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Fails when: the parser's own error is let through, a CSV names its last line alone, or the cache's folder is made before it is filled."""
    content, said = BROKEN[name]
    with pytest.raises(Refusal, match=said):
        load(write(f"data/{name}", content))
    assert [path.name for path in Path().iterdir()] == ["data"]
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


NOT_UTF8 = pa.Array.from_buffers(pa.string(), 3, [None, pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffb")])
UNREADABLE = {
    "bytes": (pa.table({"text": NOT_UTF8}), r"data/rows\.arrow:2: 'text' .*UTF-8"),
    "inside": (pa.table({"m": pa.ListArray.from_arrays([0, 1, 3], NOT_UTF8)}), r"data/rows\.arrow:2: 'm' .*UTF-8"),
    "twice": (pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), r"data/rows\.arrow: .*'text' .*twice"),
    "map": (pa.table({"text": ["a"], "m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))}), r"data/rows\.arrow: .*'m' .*map<"),
}  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", UNREADABLE)
def test_columns_that_datasets_cannot_hold_are_refused_by_row_or_name(name: str, streaming: bool) -> None:
    """Fails when: _check_texts() is left out, or the error of Python, of pyarrow or of datasets is let through."""
    table, said = UNREADABLE[name]
    Path("data").mkdir()
    with pa.OSFile("data/rows.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(Refusal, match=said):
        list(load("data/rows.arrow", eval_fraction=0.0, streaming=streaming)["train"])


# Splits and columns


def test_a_small_file_has_one_row_held_out_and_says_so() -> None:
    """Fails when: the share alone decides."""
    splits = load(write("data/a.jsonl", [{"text": f"row {number}"} for number in range(20)]))
    assert len(splits["validation"]) >= 1
    assert len(splits["train"]) + len(splits["validation"]) == 20
    assert re.search(r"validation .*hash .*\(--eval-fraction ", splits["train"].info.description)


def test_a_file_of_one_row_is_trained_on_where_nothing_is_evaluated() -> None:
    """Otherwise it is refused, as nothing would be left to train on. Fails when: `is_needed` is left out."""

    @dataclass(frozen=True)
    class Config(DataConfig, RunConfig):
        pass

    write("one.jsonl", [{"text": "a"}])
    for share in (0.05, 0.5):
        splits = load_splits(Config(dataset="one.jsonl", eval_strategy="no", eval_fraction=share))
        assert {name: rows["text"][:] for name, rows in splits.items()} == {"train": ["a"]}
    with pytest.raises(Refusal, match=r"one\.jsonl has 1 row"):
        load_splits(Config(dataset="one.jsonl"))


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, {"train": 5, "validation": 2, "test": 3}),
        ({"eval_split": "test"}, {"train": 5, "validation": 3}),
        ({"train_split": "test", "eval_split": "train"}, {"train": 3, "validation": 5}),
        ({"max_train_examples": 4, "max_eval_examples": 1}, {"train": 4, "validation": 1, "test": 1}),
    ],
)
def test_splits_are_chosen_by_name_and_cut_after_that(settings: dict[str, Any], counts: dict[str, int]) -> None:
    """Fails when: a test split that is evaluated on is tested on too, or the first rows are counted before the split."""
    for split, count in (("train", 5), ("validation", 2), ("test", 3)):
        write(f"data/{split}.jsonl", [{"text": f"{split} {number}"} for number in range(count)])
    splits = load("data", **settings)
    assert {name: len(rows) for name, rows in splits.items()} == counts
    assert splits["train"][0]["text"] == f"{settings.get('train_split', 'train')} 0"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_split": "training"}, "--train-split training: .*: train"),
        ({"eval_split": "dev"}, "--eval-split dev: .*: train"),
        ({"eval_split": "train"}, "would measure memory"),
        ({"rename_columns": ["txt=text"]}, "no column 'txt'. It has: a, b"),
        ({"rename_columns": ["a=b"]}, "has a column 'b' already"),
        ({"rename_columns": ["a"]}, "should be old=new"),
        ({"rename_columns": ["a=text", "a=prompt"]}, "'a' is there twice"),
        ({"rename_columns": ["a=text", "b=text"]}, "can't both be called 'text'"),
        ({"streaming": True}, "--max-eval-examples 500"),
    ],
)
def test_settings_that_do_not_fit_the_source_are_refused(settings: dict[str, Any], said: str) -> None:
    """Fails when: the check is left out."""
    write("data/a.jsonl", [{"a": str(number), "b": "x"} for number in range(9)])
    with pytest.raises(Refusal, match=said):
        load("data/a.jsonl", **settings)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "renames"),
    [
        ({"completion": "p", "prompt": "c"}, ["completion=prompt", " prompt = completion"]),
        ({"prompt": "p", " answer": "c"}, ["answer=completion"]),
    ],
    ids=["swapped", "a blank in the header"],
)
def test_columns_are_renamed_before_anything_else(row: dict[str, str], renames: list[str], streaming: bool) -> None:
    """Two that swap, and one with a blank as a header "prompt, answer" makes it.

    Fails when: renames are applied one after the other, or only the exact name is looked for."""
    write("data/a.jsonl", [row])
    rows = load("data/a.jsonl", rename_columns=renames, eval_fraction=0.0, streaming=streaming)
    assert without_origin(rows["train"]) == [{"prompt": "p", "completion": "c"}]


def test_a_stream_has_the_splits_of_the_file() -> None:
    """Fails when: a stream holds out other rows, or `max_eval_examples` is not applied to it."""
    path = write("data/a.jsonl", [{"text": f"row {number}"} for number in range(300)])
    table, stream = load(path), load(path, streaming=True, max_eval_examples=4)
    assert isinstance(stream, datasets.IterableDatasetDict)
    assert list(stream["train"]) == table["train"].to_list()
    assert list(stream["validation"]) == table["validation"].to_list()[:4]


# Mixtures


def counts_by_source(rows: Any) -> Counter:
    return Counter(row["text"].split()[0] for row in rows)


def two_sources(a: int = 300, b: int = 200) -> None:
    write("a.jsonl", [{"text": f"a {number}", "only_a": 1} for number in range(a)])
    write("b.jsonl", [{"text": f"b {number}", "url": "x"} for number in range(b)])


def test_a_mixture_draws_its_shares_and_no_row_twice_while_there_are_enough() -> None:
    """Also in each beginning of it. Fails when: rows of one source are after those of the other, or are drawn with return."""
    two_sources()
    rows = load("a.jsonl:0.7,b.jsonl:0.3", eval_fraction=0.0, max_train_examples=200)["train"]
    assert counts_by_source(rows) == {"a": 140, "b": 60}
    assert len(set(rows["text"])) == 200
    for beginning in (10, 50, 100):
        assert abs(counts_by_source(rows.select(range(beginning)))["a"] - 0.7 * beginning) <= 1
    assert sorted(rows.column_names) == ["origin", "text"]
    assert sorted(rows["text"])[0] != "a 0" or sorted(rows["text"])[1] != "a 1"  # not simply the first rows


def test_a_mixture_without_a_limit_shows_every_row_and_repeats_the_scarce_source_evenly() -> None:
    """Fails when: the total is the smallest source's, or a pass over a source is not a permutation."""
    two_sources(300, 20)
    rows = load("a.jsonl:3,b.jsonl:1", eval_fraction=0.0)["train"]
    seen = Counter(rows["text"])
    assert counts_by_source(rows) == {"a": 300, "b": 100}
    assert {seen[f"a {number}"] for number in range(300)} == {1}
    assert {seen[f"b {number}"] for number in range(20)} == {5}
    assert "20 rows of b.jsonl 5 times" in rows.info.description


def test_a_mixture_is_a_pure_function_of_the_seed() -> None:
    """Fails when: a library's global generator draws the rows."""
    two_sources()
    one, again, other = (
        load("a.jsonl:0.7,b.jsonl:0.3", max_train_examples=50, seed=seed)["train"] for seed in (1, 1, 2)
    )  # fmt: skip
    assert one.to_list() == again.to_list()
    assert one._fingerprint == again._fingerprint
    assert set(one["text"]) != set(other["text"])


def test_no_text_of_a_mixture_is_trained_on_and_held_out() -> None:
    """The first row of one file may be any row of another. Fails when: each source forces its own first row only."""
    rows = [{"text": f"row {number}"} for number in range(200)]
    write("a.jsonl", rows)
    write("b.jsonl", rows[::-1])
    splits = load("a.jsonl:0.5,b.jsonl:0.5")
    assert not set(splits["train"]["text"]) & set(splits["validation"]["text"])
    held_out = Counter(splits["validation"]["text"])
    assert set(held_out.values()) == {2}  # all of each source, unweighted
    assert {"row 0", "row 199"} <= set(held_out)


@pytest.mark.parametrize("renames", ["{body: text}", "[body=text]"])
def test_a_mixture_from_yaml_renames_within_a_source(renames: str) -> None:
    """Fails when: renames of one entry reach another."""
    write("a.jsonl", [{"text": "a 1"}, {"text": "a 2"}])
    write("b.jsonl", [{"body": "b 1"}, {"body": "b 2"}])
    entries = f"- {{dataset: a.jsonl, weight: 1}}\n- {{dataset: b.jsonl, weight: 1, rename_columns: {renames}}}\n"
    rows = load(write("mix.yaml", entries), eval_fraction=0.0)["train"]
    assert sorted(rows["text"]) == ["a 1", "a 2", "b 1", "b 2"]
    assert sorted(rows["origin"]) == ["work/a.jsonl:1", "work/a.jsonl:2", "work/b.jsonl:1", "work/b.jsonl:2"]


def test_a_mixture_of_streams_draws_its_shares() -> None:
    """Fails when: weights are not handed on."""
    two_sources(400, 400)
    rows = load("a.jsonl:0.8,b.jsonl:0.2", eval_fraction=0.0, streaming=True, max_train_examples=300)["train"]
    found = counts_by_source(rows)
    assert found.total() == 300
    assert abs(found["a"] - 240) < 4 * (300 * 0.8 * 0.2) ** 0.5


def test_objects_with_different_keys_mix_and_different_classes_do_not() -> None:
    """Fails when: features must be equal, or label names are ignored."""
    write("a.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    write("b.jsonl", [{"messages": [{"role": "user", "content": "b", "name": "n"}]}])
    rows = load("a.jsonl:1,b.jsonl:1", eval_fraction=0.0)["train"]
    assert sorted(row["messages"][0]["content"] for row in rows) == ["a", "b"]
    for name, labels in (("c", ["no", "yes"]), ("d", ["yes", "no"])):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=labels)})
        datasets.Dataset.from_list([{"text": "t", "label": 1}], features=features).to_parquet(f"{name}.parquet")
    with pytest.raises(Refusal, match="the column 'label' is ClassLabel"):
        load("c.parquet:1,d.parquet:1", eval_fraction=0.0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_chat_of_a_mixture_keeps_its_tools_where_other_sources_have_none(streaming: bool) -> None:
    """Fails when: a column of tools that not all sources have is left out."""
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    chat = [{"role": "user", "content": "Time?"}, {"role": "assistant", "content": "Noon."}]
    write("a.jsonl", [{"messages": chat}] * 3)
    write("b.jsonl", [{"messages": chat, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}] * 3)
    rows = list(load("a.jsonl:1,b.jsonl:1", eval_fraction=0.0, streaming=streaming)["train"])
    found = [row["tools"] and json.loads(row["tools"])[0]["function"]["name"] for row in rows]
    assert sorted(set(found), key=str) == [None, "clock"] if streaming else sorted(found, key=str) == [None] * 3 + ["clock"] * 3
    options = [read_options(row, "") for row in rows]
    assert all(("tools" in each) == ("enable_thinking" in each) for each in options)


@pytest.mark.parametrize(
    ("first", "second", "missing"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, {"chosen": "pa", "rejected": "pb"}, "prompt"),
        ({"text": "a", "text_pair": "b", "label": 1}, {"text": "a", "label": 1}, "text_pair"),
    ],
)
def test_a_mixture_never_drops_a_part_of_the_input(first: dict, second: dict, missing: str) -> None:
    """Fails when: prompts and second texts are no part of what tells kinds of data apart."""
    write("a.jsonl", [first, first])
    write("b.jsonl", [second, second])
    with pytest.raises(Refusal, match=f"same kind of data(.|\n)*{missing}"):
        load("a.jsonl:1,b.jsonl:1", eval_fraction=0.0)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("a.jsonl:0.7,b.jsonl", "'b.jsonl' .*weight above 0"),
        ("a.jsonl:0.7,b.jsonl:0", "'b.jsonl:0' .*weight above 0"),
        ("a.jsonl:0.7,b.jsonl:nan", "'b.jsonl:nan' .*weight above 0"),
        ("a.jsonl:0.7,c.jsonl:0.3", "a.jsonl .*text .*c.jsonl .*completion, prompt"),
        ("empty.yaml", "holds no list of sources"),
        ("typo.yaml", "entry 1 has the key 'wieght'"),
        ("weight.yaml", "entry 1: weight is None"),
        ("missing.yaml", "no such file"),
    ],
)
def test_a_mixture_that_is_not_clear_is_refused(dataset: str, said: str) -> None:
    """Fails when: a missing weight counts as 1."""
    two_sources()
    write("c.jsonl", [{"prompt": "p", "completion": "c"}])
    write("empty.yaml", "")
    write("typo.yaml", "- {dataset: a.jsonl, wieght: 1}")
    write("weight.yaml", "- {dataset: a.jsonl}")
    with pytest.raises(Refusal, match=said):
        load(dataset)


@pytest.mark.parametrize("dataset", ["org/name:20240101", "stdlib:sft", r"C:\data\a.jsonl", "a,b.jsonl", "org/name:main@v1.0"])
def test_a_single_source_is_not_read_as_a_mixture(dataset: str) -> None:
    """Fails when: a number after a colon alone makes a mixture."""
    write("a,b.jsonl", [{"text": "x"}])
    assert as_mixture(dataset) is None


# Caches


def test_the_fingerprint_names_the_content_and_not_the_file_s_place_or_time(tmp_path: Path) -> None:
    """Fails when: the modification time or the whole path enters the key."""
    path = write("data/a.jsonl", ROWS)
    first = load(path)
    os.utime(path, (1, 1))
    elsewhere = write(str(tmp_path / "elsewhere" / "data" / "a.jsonl"), ROWS)
    for same in (load(path), load(elsewhere), load("data/a*.jsonl")):
        assert [rows._fingerprint for rows in same.values()] == [rows._fingerprint for rows in first.values()]
    write(path, [*ROWS[:-1], {"text": "changed", "label": 0}])
    assert load(path)["train"]._fingerprint != first["train"]._fingerprint
    assert "changed" in load(path)["train"]["text"][:] + load(path)["validation"]["text"][:]


def test_the_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    """So what was tokenized is found again. Fails when: the fingerprint is left to datasets: it takes a time in."""
    path = write("data/a.jsonl", ROWS)
    program = "import sys, toolkit as tk; print(tk.load_splits(sys.argv[1])['train']._fingerprint)"
    root = str(Path(sources.__file__).parents[3])
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "other"), "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split()[-1] == load(path)["train"]._fingerprint


def build_slowly(key: str, log: str) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        (folder / "part").write_text("half")
        multiprocessing.Event().wait(0.2)
        (folder / "part").write_text("whole")

    assert (arrow.cache_folder(key, build) / "part").read_text() == "whole"


def test_processes_that_start_together_build_a_cache_once() -> None:
    """Fails when: the lock is left out, or the folder gets its name before it is whole."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_slowly, args=("key", "log")) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert Path("log").read_text() == "built\n"


def test_a_cache_whose_making_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    """After a kill and after an error. Fails when: a failed build is kept, or the remains of a killed one are."""
    remains = tmp_path / "cache" / "key.incomplete-1"
    remains.mkdir(parents=True)
    with pytest.raises(ZeroDivisionError):
        arrow.cache_folder("key", lambda folder: (folder / "part").write_text(str(1 / 0)))
    build_slowly("key", "log")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key", "key.lock"]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the error of the system is let through."""
    path = write("data/a.jsonl", ROWS)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(path) / "cache")  # below a file
    with pytest.raises(Refusal, match="export HF_DATASETS_CACHE="):
        load(path)


# The Hub


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        ("squad", ("squad", None, None)),
        ("org/name", ("org/name", None, None)),
        ("org/name:config", ("org/name", "config", None)),
        ("org/name@v1.0", ("org/name", None, "v1.0")),
        ("org/na.me-1:20240101.en@refs/convert/parquet", ("org/na.me-1", "20240101.en", "refs/convert/parquet")),
    ],
)
def test_a_hub_name_has_a_configuration_and_a_revision(dataset: str, parts: tuple[str | None, ...]) -> None:
    """Fails when: the revision is looked for behind the last colon."""
    assert parse_hub_name(dataset) == parts


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Couldn't reach 'o/n' on the Hub"), "Hub can't be reached .*HF_HUB_OFFLINE=1"),
        (FileNotFoundError("Couldn't find 'o/n' on the Hugging Face Hub either"), "Hub can't be reached"),
        (datasets.exceptions.DatasetNotFoundError("Dataset 'o/n' doesn't exist on the Hub"), "not on the Hub .*login"),
        (datasets.exceptions.DatasetNotFoundError("Dataset 'o/n' is a gated dataset on the Hub."), "gated.*hf auth login"),
        (datasets.exceptions.DataFilesNotFoundError("No (supported) data files"), "no data files"),
        (ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']"), r"Write o/n:NAME with one of \['a', 'b'\]"),
        (RuntimeError("Dataset scripts are no longer supported"), "code .*is not run"),
        (datasets.exceptions.DatasetGenerationError("An error occurred"), "the data can't be read"),
    ],
)  # fmt: skip
def test_what_the_hub_answers_is_refused_by_name(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: that error is let through."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(Refusal, match=rf"(?s)--dataset o/n.*{said}"):
        load_from_hub("o/n", streaming=False)


def test_without_a_network_the_refusal_says_what_was_asked_and_what_works(tmp_path: Path) -> None:
    """The real client. Fails when: OfflineModeIsEnabled is not among the errors that are understood."""
    program = "from toolkit.data.sources.load import load_splits as load; load('someone/something:config@v1')"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(sources.__file__).parents[3]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    last = done.stderr.strip().splitlines()[-1]
    assert "Refusal: --dataset someone/something:config@v1" in last
    assert "can't be reached" in last
    assert "HF_HUB_OFFLINE=1" in last
    assert "stdlib:sft" in last
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_file_is_read_by_line_by_paragraph_or_whole(tmp_path: Path, streaming: bool) -> None:
    """Each row numbered by its first line. Fails when: the cache's key leaves out sample_by, or a stream reads lines."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    (folder / "b.txt").write_text("\nfour\n")
    expected = {
        "line": [("one", "a.txt:1"), ("two", "a.txt:2"), ("three", "a.txt:5"), ("four", "b.txt:2")],
        "paragraph": [("one\ntwo", "a.txt:1"), ("three", "a.txt:5"), ("four", "b.txt:2")],
        "document": [("one\ntwo\n\n\nthree\n", "a.txt:1"), ("\nfour\n", "b.txt:1")],
    }
    for sample_by, rows in expected.items():
        config = DataConfig(dataset=str(folder), sample_by=sample_by, eval_fraction=0.0, streaming=streaming)
        found = load_splits(config)["train"]
        assert [(row["text"], Path(row["origin"]).name) for row in found] == rows
