"""Tokenizing that was killed goes on where it was, from pieces that are as they were written, to the same bytes."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from toolkit.config import DataConfig
from toolkit.data.tokenize import prepare as preparing
from toolkit.data.tokenize.pieces import Pieces
from toolkit.data.tokenize.prepare import Reader
from toolkit.data.tokenize.tasks import prepare
from toolkit.models.tokenizer import train_tokenizer

WORDS = ["the", "old", "red", "house", "by", "a", "small", "green", "river", "under", "tall", "new", "trees", "where", "birds", "sing"]
BATCH = 7
MAKE: dict[str, Callable[[str], dict[str, Any]]] = {
    "lm": lambda text: {"text": text},
    "sft": lambda text: {"prompt": text[:9] + "?", "completion": text[9:] + "."},
    "preference": lambda text: {"prompt": f"{text[:9]}?\n", "chosen": text, "rejected": f"no {text[:5]}"},
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([" ".join(WORDS)] * 3, 290)


def rows_for(task: str) -> DatasetDict:
    """60 rows and 23, ragged, some of them several times."""
    draw, splits = random.Random(0), DatasetDict()
    for split, count in (("train", 60), ("validation", 23)):
        texts = [" ".join(draw.choices(WORDS, k=draw.randrange(2, 30))) for _ in range(count)]
        texts[40:42] = texts[:2]
        splits[split] = Dataset.from_list([{"origin": f"{split}:{i}", **MAKE[task](text)} for i, text in enumerate(texts)])
    return splits


def written(tokenizer: PreTrainedTokenizerFast, task: str, cache: Path, processes: int = 1) -> tuple[dict[str, bytes], Any]:
    """Bytes of all files of the cache, and what was counted."""
    config = DataConfig(max_length=48, preprocessing_num_workers=processes)
    report = prepare(task, rows_for(task), tokenizer, config).report
    files = (path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}, report.splits


def kill_in(tokenizer: PreTrainedTokenizerFast, task: str, cache: Path, piece: int) -> tuple[Path, Path]:
    """A process that ends by SIGKILL once it has written so many pieces; the file and the journal of the last one."""
    if (child := os.fork()) == 0:
        append, left = Pieces.append, [piece]

        def append_and_count(self: Pieces, *given: Any) -> None:
            append(self, *given)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        Pieces.append = append_and_count  # type: ignore[method-assign]
        written(tokenizer, task, cache)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    journal = max(cache.glob("*-journal/*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return next(cache.glob(f"*.incomplete-kept/{journal.stem}.arrow")), journal


@pytest.fixture
def batches_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first row of each batch that is tokenized."""
    monkeypatch.setattr(preparing, "BATCH_ROWS", BATCH)
    read, found = Reader.read, list[int]()

    def read_and_note(self: Reader, batch: Any, at: int) -> Any:
        found.append(at)
        return read(self, batch, at)

    monkeypatch.setattr(Reader, "read", read_and_note)
    return found


@pytest.mark.parametrize("task", MAKE)
def test_killed_after_any_piece_it_goes_on_with_the_next_one_and_ends_with_the_same_bytes(
    task: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, batches_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either split, also twice, and by another number of processes. Fails when: pairs are numbered from 0 after a kill; the
    hashes of rows differ between programs; what a killed process left is removed; the journal becomes a part of the folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "whole")
    whole = written(tokenizer, task, tmp_path / "whole")
    for first, second in ((1, 4), (6, None), (9, 1), (10, None), (13, None)):
        cache = tmp_path / str(first)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        kill_in(tokenizer, task, cache, first)
        if second is not None:
            kill_in(tokenizer, task, cache, second)
        batches_read.clear()
        processes = 1 if first % 3 else 2
        assert written(tokenizer, task, cache, processes) == whole
        if processes == 1:
            assert len(batches_read) == 9 + 4 - first - (second or 0)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "half of a piece": lambda file, journal: os.truncate(file, file.stat().st_size - 30),
    "half of a line": lambda file, journal: os.truncate(journal, journal.stat().st_size - 30),
    "a piece without its line": lambda file, journal: journal.write_bytes(b"".join(journal.open("rb").readlines()[:-1])),
    "no file": lambda file, journal: file.unlink(),
    "the first bytes": lambda file, journal: flip(file, 20),
    **{f"a bit of the file, {draw}": lambda file, journal, draw=draw: flip(file, draw) for draw in (0.3, 0.5, 0.9)},
    **{f"a bit of the journal, {draw}": lambda file, journal, draw=draw: flip(journal, draw) for draw in (0.3, 0.5, 0.9)},
}


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where if where >= 1 else where * len(content))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_piece_that_is_not_as_it_was_written_is_tokenized_again(
    damage: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, batches_read: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And so are those behind it; what a kill can't have done is said. Fails when: the CRC of a piece, or of a line, is not compared."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "whole")
    whole = written(tokenizer, "sft", tmp_path / "whole")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file, journal = kill_in(tokenizer, "sft", tmp_path / "cache", 6)
    DAMAGES[damage](file, journal)
    batches_read.clear()
    capsys.readouterr()
    assert written(tokenizer, "sft", tmp_path / "cache") == whole
    assert len(batches_read) > 9 + 4 - 6
    if damage.startswith("a bit"):
        assert "damaged" in capsys.readouterr().err
        assert len(batches_read) < 9 + 4
