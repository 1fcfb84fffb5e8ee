"""Several processes that tokenize write what one writes."""

import contextlib
import hashlib
import inspect
import os
import random
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset, DatasetDict

from toolkit.config import ClassificationConfig, DataConfig, Refusal
from toolkit.config.reading import forget_reads, settings_read
from toolkit.data.tokenize import prepare as preparing
from toolkit.data.tokenize.pieces import read_in_order
from toolkit.data.tokenize.tasks import prepare
from toolkit.models.tokenizer import train_tokenizer

SOURCE = inspect.getsource(textwrap)


@dataclass(frozen=True)
class Classification(DataConfig, ClassificationConfig):
    """The settings of a recipe for texts with a label."""


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SOURCE], 400)


def texts(count, seed):
    draw, words = random.Random(seed), SOURCE.split()
    starts = [draw.randrange(len(words) - 60) for _ in range(count)]
    return [" ".join(words[start : start + draw.randrange(4, 60)]) for start in starts]


def rows_for(task):
    """60 rows and 23, ragged, one of them twice, one in both splits."""
    found = {}
    for split, count in (("train", 60), ("validation", 23)):
        given = [*texts(count - 2, count), *texts(1, 0), *texts(1, 0)]
        makers = {
            "lm": lambda i, text: {"text": text},
            "sft": lambda i, text: {"prompt": text[: len(text) // 2] + "?", "completion": text[len(text) // 2 :] + "."},
            "preference": lambda i, text: {"prompt": f"{text[:9]}?\n", "chosen": text, "rejected": f"no {text[:5]}"},
            "unpaired": lambda i, text: {"prompt": f"{text[:9]}?\n", "completion": text, "label": i % 3 > 0},
            "classification": lambda i, text: {"text": text, "label": "abc"[i % 3]},
        }
        found[split] = Dataset.from_list([{"origin": f"{split}:{i}", **makers[task](i, text)} for i, text in enumerate(given)])
    return DatasetDict(found)


def written(tokenizer, task, processes, cache, monkeypatch, **more):
    """Bytes of all files of the cache, by name, and what was counted."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(preparing, "BATCH_ROWS", 7)
    settings = Classification if task == "classification" else DataConfig
    config = settings(max_length=48, preprocessing_num_workers=processes, **more)
    found = prepare(task, rows_for(task), tokenizer, config)
    files = {str(path.relative_to(cache)): hashlib.sha256(path.read_bytes()).hexdigest() for path in cache.rglob("*") if path.is_file()}
    return {name: digest for name, digest in files.items() if not name.endswith(".lock")}, found.report.splits


@pytest.mark.parametrize("task", ["lm", "sft", "preference", "unpaired", "classification"])
def test_any_number_of_processes_writes_the_same_bytes_under_the_same_name(tokenizer, task, tmp_path, monkeypatch):
    """Fails when: results come in the order in which they are ready, the number is part of the cache's key, or each process hashes
    rows its own way (duplicates are counted by hashes)."""
    before = torch.get_rng_state()
    one = written(tokenizer, task, None, tmp_path / "one", monkeypatch)
    for processes in (2, 5):
        assert written(tokenizer, task, processes, tmp_path / str(processes), monkeypatch) == one
    assert len(one[0]) == 4
    assert one[1][0].remarks["duplicates"] == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert "TOKENIZERS_PARALLELISM" not in os.environ or os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("processes", [1, 3])
def test_the_first_bad_row_is_named_whoever_reads_it(tokenizer, processes, tmp_path, monkeypatch):
    """Fails when: a worker's own error, with its traceback, takes the place of the refusal, or a later batch is faster."""
    monkeypatch.setattr(preparing, "BATCH_ROWS", 4)
    rows = [{"origin": f"rows:{i}", "prompt": "a", "completion": None if i in (17, 30) else "b"} for i in range(40)]
    splits, config = DatasetDict(train=Dataset.from_list(rows)), DataConfig(preprocessing_num_workers=processes)
    with pytest.raises(Refusal) as refusal:
        prepare("sft", splits, tokenizer, config)
    assert "rows:17" in str(refusal.value)
    assert "Traceback" not in str(refusal.value)
    assert not [entry for entry in tmp_path.glob("cache/tokenized-*") if entry.suffix != ".lock"]


def test_the_rows_are_read_by_other_processes():
    """Fails when: `processes` starts none, or more than there are batches."""

    class Rows(list):
        def __getitem__(self, place):
            return {"a": list.__getitem__(self, place)}

    rows = Rows(range(10))
    for processes, expected in ((1, {os.getpid()}), (4, None), (99, None)):
        read = list(read_in_order(rows, lambda batch, at: ((os.getpid(), at), sum(batch["a"])), 3, processes))
        assert [(at, total, number) for (_, at), total, number in read] == [(0, 3, 3), (3, 12, 3), (6, 21, 3), (9, 9, 1)]
        found = {process for (process, _), *_ in read}
        assert found == expected if expected else (os.getpid() not in found and 2 <= len(found) <= 4)


KILLED = """import os, signal, sys
from toolkit.data.tokenize.pieces import read_in_order
results = read_in_order(iter([(at, {"text": ["a"]}) for at in range(40)]), lambda batch, at: (bytes(2**20), at), 1, 2)
next(results)
os.kill(os.getpid(), signal.SIGKILL)"""


@pytest.mark.skipif(sys.platform != "linux", reason="others have no prctl")
def test_no_process_that_tokenizes_outlives_the_one_that_started_it():
    """Each has more to hand over than a pipe holds. Fails when: _begin_worker in pieces.py leaves out die_with_its_parent."""
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, start_new_session=True)
    try:
        process.communicate(timeout=40)  # to the end of all who have its standard output
        assert process.returncode == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("task", ["lm", "sft", "preference", "unpaired", "classification"])
def test_examples_shorter_than_min_length_are_left_out_and_counted(tokenizer, task, tmp_path, monkeypatch):
    """Against the rows of a run without the setting, one by one. Fails when: the shortest that may stay is left out, lengths are those
    after cutting, or the setting is not part of the cache's key."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    settings = Classification if task == "classification" else DataConfig
    whole = prepare(task, rows_for(task), tokenizer, settings(max_length=400))
    names = [name for name in ("pair", "answer") if name in whole["train"].column_names]

    def rows_of(split):
        return [{key: value for key, value in row.items() if key not in names} for row in split]

    def length(row):
        if task == "preference":
            return row["prompt_tokens"] + max(row["chosen_tokens"], row["rejected_tokens"])
        return row["length"]

    least = sorted(map(length, whole["train"]))[20]
    found = prepare(task, rows_for(task), tokenizer, settings(max_length=400, min_length=least))
    for split, counts in zip(("train", "validation"), found.report.splits, strict=True):
        kept = [row for row in rows_of(whole[split]) if length(row) >= least]
        assert rows_of(found[split]) == kept
        assert counts.remarks["short"] == len(whole[split]) - len(kept) > 0
    with pytest.raises(Refusal, match=r"examples .*--min-length"):
        prepare(task, rows_for(task), tokenizer, settings(max_length=400, min_length=400))


def test_the_settings_that_are_read_do_not_depend_on_what_is_cached(tokenizer, own_cache):
    """What a run did not read is said to be without effect. Fails when: a setting is read where the cache is built, and there alone."""
    read = []
    for _ in ("built", "found"):
        forget_reads(config := DataConfig(max_length=48, preprocessing_num_workers=1))
        prepare("sft", rows_for("sft"), tokenizer, config)
        read.append(settings_read(config))
    assert read[0] == read[1]
    assert "preprocessing_num_workers" in read[1]
