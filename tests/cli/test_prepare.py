"""toolkit prepare: what is written are the rows that recipes make of the text, for one vocabulary, whole or not at all."""

import gzip
import io
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.data import shards
from toolkit.data.loading import streams
from toolkit.data.loading.streams import StreamLoader
from toolkit.data.sources import remote
from toolkit.data.tokenize import prepare as preparing
from toolkit.data.tokenize.pieces import Pieces
from toolkit.data.tokenize.vocabulary import TOKENIZED_WITH, check_marks, vocabulary_mark

pytestmark = pytest.mark.warm

WORDS = ["the", "old", "red", "house", "by", "a", "small", "green", "river", "under", "tall", "new", "trees", "where", "birds", "sing"]
MAKE = {
    "lm": lambda i, text: {"text": text},
    "sft": lambda i, text: {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": text}]},
    "text": lambda i, text: {"prompt": f"{i}: ", "completion": text},
}
TOKENIZE = {"lm": tk.tokenize_for_lm, "sft": tk.tokenize_for_sft, "text": tk.tokenize_for_sft}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of different vocabularies."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, size in (("one", 300), ("two", 290)):
        tk.train_tokenizer([" ".join(WORDS)] * 3, size).save_pretrained(folder / name)
    return folder / "one", folder / "two"


def write_rows(path: Path, task: str, rows: int = 90) -> Path:
    draw = random.Random(0)
    texts = (f"{i} " + " ".join(draw.choices(WORDS, k=draw.randrange(2, 30))) for i in range(rows))
    path.write_text("".join(json.dumps(MAKE[task](i, text)) + "\n" for i, text in enumerate(texts)))
    return path


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, tk.Refusal), result.exception
        return 2, str(result.exception)
    return result.exit_code, result.output


def tokenized(task: str, dataset: Any, tokenizer: Path, **settings: Any) -> dict[str, list[tuple[Any, ...]]]:
    config = tk.DataConfig(dataset=str(dataset), max_length=1000, eval_fraction=settings.pop("eval_fraction", 0.2), **settings)
    found = TOKENIZE[task](tk.load_splits(config), tk.load_tokenizer(tk.ModelConfig(model=str(tokenizer))), config)
    return {name: list(map(key, rows)) for name, rows in found.items()}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row["input_ids"]), tuple(row.get("labels") or ()), row["supervised_tokens"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("task", ["lm", "sft", "text"])
def test_the_rows_are_those_that_training_makes_of_the_text(
    task: str, tokenizers: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each split, with their labels, in another order; streamed they come as they are in the files.

    Fails when: the last row of a row group is left out; labels are left out; rows are written in their own order; the held-out
    rows are not written as a split.
    """
    monkeypatch.setattr(shards, "GROUP_ROWS", 7)
    rows, out = write_rows(tmp_path / "rows.jsonl", task), tmp_path / "out"
    code, output = run(rows, out, "--model", tokenizers[0], "--num-shards", 4, "--eval-fraction", 0.2)
    assert code == 0, output
    assert sorted(contents(out)) == [f"train-0000{i}-of-00004.parquet" for i in range(4)] + [
        "validation-00000-of-00001.parquet"
    ]
    of_text, prepared = tokenized(task, rows, tokenizers[0]), tokenized(task, out, tokenizers[0], eval_fraction=0.05)
    assert {name: Counter(each) for name, each in prepared.items()} == {name: Counter(each) for name, each in of_text.items()}
    assert prepared["train"] != of_text["train"]
    assert tokenized(task, out, tokenizers[0], eval_fraction=0.05, streaming=True) == prepared


def test_another_vocabulary_is_refused_and_both_are_named(tokenizers: tuple[Path, Path], tmp_path: Path) -> None:
    """Streamed or not; another chat template is no other vocabulary.

    Fails when: rows of a stream are not checked; the digest is of the chat template too.
    """
    out, (one, two) = tmp_path / "out", tokenizers
    assert run(write_rows(tmp_path / "rows.jsonl", "lm"), out, "--tokenizer", one)[0] == 0
    for streaming in (False, True):
        with pytest.raises(tk.Refusal) as refusal:
            tokenized("lm", out, two, streaming=streaming, eval_fraction=0.05)
        for tokenizer in tokenizers:
            assert vocabulary_mark(tk.load_tokenizer(tk.ModelConfig(model=str(tokenizer)))) in str(refusal.value)
        assert "out/" in str(refusal.value)
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    other = tk.load_tokenizer(tk.ModelConfig(model=str(one), chat_template=str(tmp_path / "plain.jinja")))
    assert vocabulary_mark(other) == vocabulary_mark(tk.load_tokenizer(tk.ModelConfig(model=str(one))))


def test_a_row_of_another_vocabulary_in_the_middle_is_named() -> None:
    """As a mixture has it, whose other rows have no mark. Fails when: the first row speaks for its batch."""
    check_marks([None, "a 1", "b 1"], "a 1", ["r:1", "r:2", "r:3"])
    with pytest.raises(tk.Refusal, match=r"^r:3: "):
        check_marks([None, "a 1", "a 2"], "a 1", ["r:1", "r:2", "r:3"])


def test_killed_in_the_middle_nothing_is_there_and_the_next_start_writes_the_same_files(
    tokenizers: tuple[Path, Path], tmp_path: Path
) -> None:
    """SIGKILL at each row group in turn. Fails when: files get their names one by one; what a killed process left is kept."""
    rows, words = write_rows(tmp_path / "rows.jsonl", "sft"), ("--model", tokenizers[0], "--num-shards", 3, "--seed", 5)
    assert run(rows, tmp_path / "whole", *words)[0] == 0
    whole, write = contents(tmp_path / "whole"), shards._marked
    for fatal in range(1, 5):
        out = tmp_path / f"out{fatal}"
        if (child := os.fork()) == 0:
            calls = count(1)

            def until_killed(*each: Any, calls: Iterator[int] = calls, fatal: int = fatal) -> Any:
                return write(*each) if next(calls) < fatal else os.kill(os.getpid(), signal.SIGKILL)

            shards._marked = until_killed
            run(rows, out, *words)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert not out.exists()
        assert run(rows, out, *words)[0] == 0
        assert contents(out) == whole
        assert not list(tmp_path.glob(".*"))
    assert run(rows, tmp_path / "other", *words[:-1], 6)[0] == 0
    assert contents(tmp_path / "other").keys() == whole.keys()
    assert contents(tmp_path / "other") != whole


def test_a_folder_that_holds_something_is_refused_and_left_as_it_is(tokenizers: tuple[Path, Path], tmp_path: Path) -> None:
    """Fails when: nobody asks, neither before the work nor when the files are written."""
    out, rows = tmp_path / "out", write_rows(tmp_path / "rows.jsonl", "lm")
    out.mkdir()
    (out / "train.jsonl").write_text("mine")
    code, output = run(rows, out, "--model", tokenizers[0])
    assert (code, contents(out)) == (2, {"train.jsonl": b"mine"})
    assert "train.jsonl" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--model"),
        (("--model", "tiny-llama"), "--tokenizer"),
        (("--tokenizer", "ONE", "--overlong", "drop"), "--overlong"),
        (("--tokenizer", "ONE", "--num-shards", "900"), "--num-shards 900"),
        (("--tokenizer", "ONE", "--task", "dpo"), "--task"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: tuple[str, ...], said: str, tokenizers: tuple[Path, Path], tmp_path: Path
) -> None:
    """And nothing is written. Fails when: one of them is not asked for."""
    words = tuple(str(tokenizers[0]) if word == "ONE" else word for word in words)
    code, output = run(write_rows(tmp_path / "rows.jsonl", "lm"), tmp_path / "out", *words)
    assert code == 2
    assert said in output
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_by_url_every_rank_reads_its_part_of_the_same_order_and_goes_on_where_it_was(
    tokenizers: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store in memory, a stream over three files, two ranks against one, continued in the middle.

    Fails when: the files of a URL come in another order; the source's state is not given back to it.
    """
    monkeypatch.setattr(streams, "STREAM_BUFFER", 16)
    out = tmp_path / "out"
    assert run(write_rows(tmp_path / "rows.jsonl", "lm"), out, "--model", tokenizers[0], "--num-shards", 3)[0] == 0
    store = fsspec.filesystem("memory")
    for name, content in contents(out).items():
        store.pipe(f"/prepared/{name}", content)
    remote.files_at.cache_clear()
    tokenizer = tk.load_tokenizer(tk.ModelConfig(model=str(tokenizers[0])))

    def loader(dataset: str, rank: int = 0, ranks: int = 1) -> StreamLoader:
        config = tk.DataConfig(dataset=dataset, streaming=True)
        train = tk.tokenize_for_lm(tk.load_splits(config), tokenizer, config)["train"]
        return StreamLoader(
            train, lambda documents: {"ids": [d["input_ids"] for d in documents]}, 1, 2, 8, 200, "", None, rank, ranks
        )

    def read(batches: Iterable[Any]) -> list[list[Any]]:
        return [[ids for part in batch.micro_batches for ids in part["ids"]] for batch in batches]

    whole = read(loader(str(out)).batches())
    assert read(loader("memory://prepared").batches()) == whole
    parts = [read(loader("memory://prepared", rank, 2).batches()) for rank in (0, 1)]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(step) for step in whole]
    first = loader("memory://prepared")
    for batch in first.batches():
        if batch.position + batch.size == 104:
            break
    again = loader("memory://prepared")
    again.restore(json.loads(json.dumps(first.state())), 104)
    assert read(again.batches(104)) == whole[13:]
    store.rm("/prepared", recursive=True)


@pytest.mark.parametrize("source", ["jsonl", "gz", "parquet", "url"])
def test_streamed_the_files_are_those_of_the_whole_data(
    source: str, tokenizers: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files, with held-out rows, by one process and by two, also when it was killed: byte by byte.

    Fails when: the held-out rows are only those of the beginning; a stream begins at its first row after a kill.
    """
    monkeypatch.setattr(preparing, "BATCH_ROWS", 16)
    data = tmp_path / "data"
    data.mkdir()
    lines = write_rows(tmp_path / "rows.jsonl", "sft", 300).read_text().splitlines(keepends=True)
    for number, part in enumerate((lines[:110], lines[110:])):
        if source == "gz":
            (data / f"{number}.jsonl.gz").write_bytes(gzip.compress("".join(part).encode()))
        elif source == "parquet":
            parquet.write_table(pa.Table.from_pylist(list(map(json.loads, part))), data / f"{number}.parquet", row_group_size=40)
        else:
            (data / f"{number}.jsonl").write_text("".join(part))
    dataset = str(data)
    if source == "url":
        store = fsspec.filesystem("memory")
        for name, content in contents(data).items():
            store.pipe(f"/streamed/{name}", content)
        dataset = "memory://streamed"
        remote.files_at.cache_clear()
    words = ("--model", tokenizers[0], "--num-shards", 3, "--eval-fraction", 0.2)
    assert run(dataset, tmp_path / "whole", *words)[0] == 0
    whole = contents(tmp_path / "whole")
    assert len(whole) == 4
    for processes in (1, 2):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / f"cache{processes}")
        streamed = (dataset, tmp_path / f"out{processes}", *words, "--streaming", "--preprocessing-num-workers", processes)
        if (child := os.fork()) == 0:
            append, calls = Pieces.append, count(1)

            def until_killed(*each: Any, calls: Iterator[int] = calls, append: Any = append) -> None:
                append(*each)
                if next(calls) == 9:
                    os.kill(os.getpid(), signal.SIGKILL)

            Pieces.append = until_killed  # type: ignore[method-assign]
            run(*streamed)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        code, output = run(*streamed)
        assert code == 0, output
        assert contents(tmp_path / f"out{processes}") == whole
        assert not list((tmp_path / f"cache{processes}").glob("files-*"))


def flipped_unnoticed(content: bytes) -> bytes:
    """With one bit changed so that a reader that compares no checksum gets other tokens, all of the vocabulary."""
    right = parquet.read_table(io.BytesIO(content), columns=["input_ids"])["input_ids"].to_pylist()
    for at in range(100, len(content)):
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        try:
            found = parquet.read_table(io.BytesIO(changed), columns=["input_ids"])["input_ids"].to_pylist()
        except (OSError, pa.ArrowException):
            continue
        if found != right and all(ids and min(ids) >= 0 and max(ids) < 300 for ids in found):
            return changed
    raise AssertionError


@pytest.mark.parametrize("where", ["folder", "url"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_file_that_is_missing_or_damaged_is_named(
    damage: str, streaming: bool, where: str, tokenizers: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nobody trains on what is left of it, or on other tokens. A pattern may name a part of the files.

    Fails when: the numbers in the files' names are not counted; pages have no checksums, or nobody compares them.
    """
    out, name = tmp_path / "out", "train-00001-of-00003.parquet"
    rows = write_rows(tmp_path / "rows.jsonl", "lm", 3000)
    assert run(rows, out, "--model", tokenizers[0], "--num-shards", 3, "--eval-fraction", 0)[0] == 0
    content = (out / name).read_bytes()
    (out / name).unlink()
    if damage != "missing":
        (out / name).write_bytes(content[: len(content) // 2] if damage == "cut" else flipped_unnoticed(content))
    dataset = str(out) if where == "folder" else f"memory://{damage}-{streaming}"
    if where == "url":
        store = fsspec.filesystem("memory")
        for file, each in contents(out).items():
            store.pipe(f"/{damage}-{streaming}/{file}", each)
    remote.files_at.cache_clear()
    with pytest.raises(tk.Refusal, match=name):
        tokenized("lm", dataset, tokenizers[0], eval_fraction=0.0, streaming=streaming)
    if damage == "missing":
        found = tokenized("lm", f"{dataset}/*.parquet", tokenizers[0], eval_fraction=0.0, streaming=streaming)
        assert len(found["train"]) == 2000


def test_the_mark_takes_no_place(tokenizers: tuple[Path, Path], tmp_path: Path) -> None:
    """It is one text for all rows of a file. Fails when: columns are not encoded by a dictionary."""
    assert run(write_rows(tmp_path / "rows.jsonl", "lm"), tmp_path / "out", "--model", tokenizers[0])[0] == 0
    group = parquet.ParquetFile(next((tmp_path / "out").glob("train*"))).metadata.row_group(0)
    column = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == TOKENIZED_WITH)
    assert column.total_uncompressed_size < 200
