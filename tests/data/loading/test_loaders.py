"""Batches and their totals, against plain loops over the dataset."""

import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset

from toolkit.config import DataConfig, Refusal
from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.data.loading.collate_groups import collate_lists, collate_text_groups
from toolkit.data.loading.collate_pairs import collate_answers, collate_pairs, collate_scored_pairs
from toolkit.data.loading.loaders import build_dataloaders
from toolkit.system.console import warn_once


class Rank:
    """What a loader asks of an accelerator."""

    def __init__(self, process_index: int, num_processes: int) -> None:
        self.process_index, self.num_processes, self.device = process_index, num_processes, torch.device("cpu")


def token_dataset(rows: int = 23, labels: bool = True, seed: int = 0) -> Dataset:
    random_numbers = np.random.default_rng(seed)
    columns: dict[str, list] = {"input_ids": [], "labels": [], "length": [], "supervised_tokens": [], "origin": []}
    for i in range(rows):
        ids = random_numbers.integers(1, 50, size=int(random_numbers.integers(2, 12))).tolist()
        row = [token if random_numbers.random() < 0.6 else -100 for token in ids] if labels else ids
        columns["input_ids"].append(ids)
        columns["labels"].append(row)
        columns["length"].append(len(ids))
        columns["supervised_tokens"].append(sum(label != -100 for label in row[1:]))
        columns["origin"].append(f"rows.jsonl:{i + 1}")
    if not labels:
        del columns["labels"]
    return Dataset.from_dict(columns)


def supervised(micro_batch: dict) -> int:
    return int((micro_batch["labels"] != -100).sum())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_totals_are_the_supervised_tokens_of_the_global_batch(packing: bool, strategy: str, labels: bool, world_size: int) -> None:
    """The loader's totals come from the index; here they are counted in the tensors of all ranks.

    Fails when: a piece of a cut document counts its first token, or a padding micro-batch is counted.
    """
    splits = DatasetDict(train=token_dataset(labels=labels))
    config = DataConfig(
        packing=packing, packing_strategy=strategy, max_length=16, per_device_train_batch_size=2, global_batch_size=7, num_train_epochs=2.0
    )
    collate = collate_packed if packing else collate_padded
    ranks = [list(build_dataloaders(splits, collate, config, Rank(r, world_size))[0].batches()) for r in range(world_size)]
    for batches in zip(*ranks, strict=True):
        counted = sum(supervised(m) for b in batches for m, real in zip(b.micro_batches, b.real, strict=True) if real)
        assert {b.totals["tokens"] for b in batches} == {counted}
        assert {b.totals["examples"] for b in batches} == {len(batches[0].examples)}


@pytest.mark.parametrize(
    "collate", [collate_padded, collate_pairs, collate_scored_pairs, collate_answers, collate_lists, collate_text_groups]
)
def test_packing_is_refused_where_rows_are_not_joined(collate: Callable[..., Any]) -> None:
    """Fails when: a collate function is left out of `_UNPACKED`; documents longer than a row ended in a traceback."""
    for each in (collate, partial(collate, pad_token_id=0)):
        with pytest.raises(Refusal, match="--packing"):
            build_dataloaders(DatasetDict(train=token_dataset()), each, DataConfig(packing=True, max_length=4))


def test_packed_rows_hold_every_token_of_an_epoch_once() -> None:
    """Fails when: a document is left out of the packing or cut at the wrong place."""
    dataset = token_dataset(rows=40)
    expected = sorted(token for row in dataset["input_ids"] for token in row)
    for strategy in ("bfd", "wrapped"):
        config = DataConfig(packing=True, packing_strategy=strategy, max_length=16, per_device_train_batch_size=1)
        train, _ = build_dataloaders(DatasetDict(train=dataset), collate_packed, config)
        seen = [t for batch in train.batches() for m in batch.micro_batches for t in m["input_ids"].flatten().tolist()]
        assert sorted(seen) == expected


def test_a_packed_row_says_where_its_documents_begin() -> None:
    """Fails when: the first token of a document keeps a label."""
    documents = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, -100]}]
    row = collate_packed([{k: np.array(v) for k, v in d.items()} for d in documents])
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert row["labels"].tolist() == [[-100, 6, 7, -100, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert row["max_length_q"] == 3
    assert "attention_mask" not in row


def test_padding_is_told_by_the_mask_and_never_by_the_id() -> None:
    """A token that equals the pad id is supervised. Fails when: labels equal to pad_token_id are masked."""
    rows = collate_padded([{"input_ids": [4, 2], "supervised_tokens": 1}, {"input_ids": [4, 5, 2], "supervised_tokens": 2}], pad_token_id=2)
    assert rows["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert rows["labels"].tolist() == [[-100, 2, -100], [-100, 5, 2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing_and_the_global_random_state_is_left_alone(workers: int) -> None:
    """Fails when: the DataLoader gets no generator of its own."""
    splits = DatasetDict(train=token_dataset())
    config = DataConfig(per_device_train_batch_size=3, dataloader_num_workers=workers)
    before = torch.random.get_rng_state()
    batches = list(build_dataloaders(splits, collate_padded, config)[0].batches(6))
    assert torch.equal(before, torch.random.get_rng_state())
    plain = list(build_dataloaders(splits, collate_padded, DataConfig(per_device_train_batch_size=3))[0].batches())[2:]
    assert [b.examples for b in batches] == [b.examples for b in plain]
    assert [b.seeds for b in batches] == [b.seeds for b in plain]
    for ours, theirs in zip(batches, plain, strict=True):
        assert torch.equal(ours.micro_batches[0]["input_ids"], theirs.micro_batches[0]["input_ids"])


def test_augmentation_is_a_function_of_seed_epoch_and_example() -> None:
    """The same whatever ran before and on any rank; another epoch, another draw. Fails when: the generator is shared."""

    def replace_first(document: dict, random_numbers: np.random.Generator, progress: float) -> dict:
        return {**document, "input_ids": np.append(random_numbers.integers(100, 10**6), document["input_ids"][1:])}

    splits = DatasetDict(train=token_dataset(rows=12))

    def first_tokens(position: int, world_size: int) -> dict[tuple[int, int], int]:
        seen = {}
        for rank in range(world_size):
            config = DataConfig(per_device_train_batch_size=2, global_batch_size=4, num_train_epochs=2.0)
            train, _ = build_dataloaders(splits, collate_padded, config, Rank(rank, world_size), augment=replace_first)
            for batch in train.batches(position):
                for micro_batch, indices, real in zip(batch.micro_batches, batch.indices, batch.real, strict=True):
                    for row, index in zip(micro_batch["input_ids"], indices, strict=True):
                        if real:
                            where = batch.position + batch.examples.index(index)
                            seen[where, index] = int(row[0])
        return seen

    whole = first_tokens(0, 1)
    assert first_tokens(0, 2) == whole
    assert first_tokens(8, 1).items() <= whole.items()
    assert len(set(whole.values())) == 24


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_read_alike_by_every_rank_and_continued_where_it_was(packing: bool) -> None:
    """Against the stream of one rank read from the start. Fails when: ranks take rows by their own count."""
    rows = token_dataset(rows=30)
    stream = {"train": IterableDataset.from_generator(lambda: iter(rows))}
    collate = collate_packed if packing else collate_padded
    config = DataConfig(packing=packing, max_length=16, streaming=True, max_steps=9, per_device_train_batch_size=2, global_batch_size=6)

    def examples(world_size: int, position: int = 0) -> list[list[list[int]]]:
        ranks = [build_dataloaders(stream, collate, config, Rank(r, world_size))[0].batches(position) for r in range(world_size)]
        steps = []
        for batches in zip(*ranks, strict=True):
            pieces = [b.micro_batches[i] for i in range(len(batches[0].micro_batches)) for b in batches if b.real[i]]
            steps.append(sorted(m["input_ids"][m.get("attention_mask", torch.ones_like(m["input_ids"])) == 1].tolist() for m in pieces))
            assert batches[0].totals["tokens"] == sum(supervised(m) for m in pieces)
        return steps

    assert examples(1) == examples(2) == examples(3)
    assert examples(1)[4:] == examples(2, position=24)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tag_of_the_first_token_counts_in_the_totals(stream: bool) -> None:
    """Tokenizers such as Qwen's put nothing before a text. Fails when: a stream counts as a language model does."""
    rows = [{"input_ids": [5, 6, 7], "labels": [1, -100, 2]}, {"input_ids": [5, 6], "labels": [0, 1]}] * 3
    rows = [{**row, "length": len(row["input_ids"]), "supervised_tokens": 2} for row in rows]
    train = {"train": IterableDataset.from_generator(lambda: iter(rows)) if stream else Dataset.from_list(rows)}
    config = DataConfig(streaming=stream, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    for batch in build_dataloaders(train, partial(collate_padded, aligned=True), config)[0]:
        assert batch.totals["tokens"] == sum(supervised(micro_batch) for micro_batch in batch.micro_batches) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_over_a_loader_has_the_batches_of_the_run(stream: bool) -> None:
    """For scripts without a Run. Fails when: a loader is no iterable, ends after an epoch, or has that as its length."""
    rows = token_dataset()
    config = DataConfig(per_device_train_batch_size=2, max_steps=20, streaming=stream)
    source = IterableDataset.from_generator(lambda: iter(rows)) if stream else rows
    train, _ = build_dataloaders({"train": source}, collate_padded, config, Rank(0, 1))
    assert [batch.examples for batch in train] == [batch.examples for batch in train.batches()]
    assert len(list(train)) == train.num_steps == len(train) == 20


def test_what_a_notebook_shows_of_a_loader_is_a_line() -> None:
    """Fails when: a `__repr__` is removed: a dataclass shows its rows and tensors."""
    rows = token_dataset()
    train, evaluation = build_dataloaders({"train": rows, "validation": rows}, collate_padded, DataConfig(max_steps=3))
    stream, _ = build_dataloaders({"train": rows.to_iterable_dataset()}, collate_padded, DataConfig(streaming=True, max_steps=3))
    for shown, part in ((train, "3 steps of"), (evaluation, "of 23"), (stream, "3 steps of"), (next(iter(train)), "position 0")):
        assert part in repr(shown)
        assert len(repr(shown)) < 120


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_of_a_stream_are_pinned_where_the_device_is_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a DataLoader pins those of other data. Fails when: `pin_memory` does not reach the stream's loader."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    stream = {"train": IterableDataset.from_generator(lambda: iter(token_dataset()))}
    rank = Rank(0, 1)
    rank.device = torch.device(device)
    train, _ = build_dataloaders(stream, collate_padded, DataConfig(streaming=True, max_steps=2, per_device_train_batch_size=2), rank)
    tensors = [value for batch in train for micro_batch in batch.micro_batches for value in micro_batch.values() if isinstance(value, torch.Tensor)]
    assert len(pinned) == (len(tensors) if device == "cuda" else 0)


def test_an_endless_stream_needs_an_end() -> None:
    """Fails when: nobody asks for max_steps."""
    stream = {"train": IterableDataset.from_generator(lambda: iter(token_dataset()))}
    with pytest.raises(Refusal, match="--max-steps"):
        build_dataloaders(stream, collate_padded, DataConfig())


def test_evaluation_reads_every_example_once_for_any_world_size() -> None:
    """Fails when: a padding micro-batch counts, or a remainder is dropped."""
    splits = DatasetDict(train=token_dataset(), validation=token_dataset(rows=7, seed=1))
    for world_size in (1, 2, 3, 8):
        loaders = [build_dataloaders(splits, collate_padded, DataConfig(per_device_eval_batch_size=2), Rank(r, world_size))[1] for r in range(world_size)]
        batches = [list(loader) for loader in loaders]
        assert len({len(b) for b in batches}) == 1
        seen = [i for rank in batches for b in rank if b.real[0] for i in b.indices[0]]
        assert sorted(seen) == list(range(7))


def easy_first(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """By number in the first epoch; then the last example twice in place of the first."""
    return np.arange(num_examples) if epoch == 0 else np.array([num_examples - 1, *range(1, num_examples)])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_order_of_ones_own_is_that_of_the_steps_from_any_position(world_size: int) -> None:
    """Fails when: it is asked once for all epochs, or the loader goes by `epoch_order`."""
    splits, config = DatasetDict(train=token_dataset()), DataConfig(per_device_train_batch_size=2, global_batch_size=5, num_train_epochs=2.0)
    loaders = [build_dataloaders(splits, collate_padded, config, Rank(r, world_size), order=easy_first)[0] for r in range(world_size)]
    read = [example for batch in loaders[0].batches() for example in batch.examples]
    assert read == [*range(23), 22, *range(1, 23)]
    assert [batch.examples for batch in loaders[-1].batches(35)] == [read[35:40], read[40:45], read[45:]]
    of_ranks = [[i for batch in loader.batches() for i, real in zip(batch.indices, batch.real, strict=True) if real] for loader in loaders]
    assert sorted(example for rank in of_ranks for indices in rank for example in indices) == sorted(read)


def test_another_order_is_other_training_data_for_a_resume() -> None:
    """Fails when: the fingerprint is of the rows alone, or the order's has chance in it."""
    splits = DatasetDict(train=token_dataset())
    config = DataConfig(per_device_train_batch_size=2)
    fingerprints = [
        build_dataloaders(splits, collate_padded, config, order=order)[0].fingerprint
        for order in (None, easy_first, easy_first, lambda n, seed, epoch: np.arange(n)[::-1])
    ]
    assert fingerprints[1] == fingerprints[2]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize("found", [np.arange(22), np.arange(23) + 1, np.arange(23) - 1, np.arange(23.0), [[0] * 23], None])
def test_an_order_that_names_no_examples_is_refused(found: object) -> None:
    """Fails when: its numbers are taken as they are."""
    with pytest.raises(Refusal, match="from 0 to 22"):
        build_dataloaders(DatasetDict(train=token_dataset()), collate_padded, DataConfig(), order=lambda n, seed, epoch: found)


@pytest.mark.parametrize("setting", ["packing", "group_by_length", "streaming"])
def test_an_order_is_refused_where_something_else_decides_on_it(setting: str) -> None:
    """Fails when: one of the two is passed over."""
    train = token_dataset()
    streamed = setting == "streaming"
    config = DataConfig(max_steps=2) if streamed else DataConfig(**{setting: True})
    splits = {"train": train.to_iterable_dataset() if streamed else train}
    with pytest.raises(Refusal, match=setting.replace("_", "-")):
        build_dataloaders(splits, collate_packed, config, order=easy_first)


@pytest.mark.parametrize(
    ("settings", "times"),
    [({"global_batch_size": 46, "max_steps": 1}, "2.0 times over the 23"), ({"global_batch_size": 23, "max_steps": 1}, ""),
     ({"global_batch_size": 10**6, "num_train_epochs": 1.0}, ""), ({"gradient_accumulation_steps": 10, "num_train_epochs": 1.5}, "1.5 times"),
     ({"packing": True, "max_length": 4096, "global_batch_size": 2, "max_steps": 1}, "2 packed rows goes 2.0 times over the 1 ")],
)  # fmt: skip
def test_a_step_that_has_examples_twice_says_so(settings: dict, times: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: the end of the run, which a step does not go beyond, is not looked at, each rank says it, or packed rows are called examples."""
    warn_once.cache_clear()
    splits, collate = {"train": token_dataset()}, collate_packed if "packing" in settings else collate_padded
    build_dataloaders(splits, collate, DataConfig(**settings), Rank(1, 2))
    assert capsys.readouterr().err == ""
    build_dataloaders(splits, collate, DataConfig(**settings))
    said = capsys.readouterr().err
    assert (times in said, "--global-batch-size" in said) == (True, bool(times))


@pytest.mark.parametrize(
    ("settings", "times"),
    [({"global_batch_size": 46, "max_steps": 1}, "2.0 times over the 23"), ({"global_batch_size": 23, "max_steps": 4}, "")],
)
def test_a_step_that_has_examples_of_a_stream_twice_says_so(settings: dict, times: str, capsys: pytest.CaptureFixture[str]) -> None:
    """When the stream has ended once, each rank but the first in silence. Fails when: nothing is said, or each rank says it."""
    warn_once.cache_clear()
    for rank, expected in ((Rank(1, 2), ""), (None, times)):
        stream = {"train": token_dataset().to_iterable_dataset()}
        train, _ = build_dataloaders(stream, collate_padded, DataConfig(streaming=True, **settings), rank)
        assert sum(batch.size for batch in train) == settings["global_batch_size"] * settings["max_steps"]
        said = capsys.readouterr().err
        assert (expected in said, "--global-batch-size" in said) == (True, bool(expected))


def test_a_step_of_a_stream_that_memory_cannot_hold_is_refused_once_the_stream_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 23 examples, which other ranks read as well. Fails when: nothing is refused, or the ranks are taken to share them."""
    monkeypatch.setattr("toolkit.data.loading.step_size.free_memory", lambda device: 10**8)
    stream = {"train": token_dataset().to_iterable_dataset()}
    config = DataConfig(streaming=True, max_steps=1, global_batch_size=200_000)
    train, _ = build_dataloaders(stream, collate_padded, config, Rank(0, 64))
    with pytest.raises(Refusal, match="--global-batch-size: the 200,000 examples"):
        next(iter(train))


def test_a_step_that_memory_cannot_hold_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 23 examples, for which 1 MB is enough. Fails when: nothing is refused, or of several ranks each is taken to read all."""
    monkeypatch.setattr("toolkit.data.loading.step_size.free_memory", lambda device: 10**6)
    config = DataConfig(global_batch_size=10_000, max_steps=1)
    build_dataloaders({"train": token_dataset()}, collate_padded, DataConfig(global_batch_size=23, max_steps=1))
    build_dataloaders({"train": token_dataset()}, collate_padded, config, Rank(0, 64))
    with pytest.raises(Refusal, match="--global-batch-size: the 10,000 examples"):
        build_dataloaders({"train": token_dataset()}, collate_padded, config)


def test_what_is_no_tokenized_split_is_refused() -> None:
    """One dataset alone, rows in a list, rows of text. Fails when: the error is that of the first line that reads them."""
    train = token_dataset()
    for splits, named in (
        (train, "'train'"), ({"train": list(train)}, "Dataset.from_list"), ({"train": train.remove_columns("length")}, "length"),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=named):
            build_dataloaders(splits, collate_padded, DataConfig())  # type: ignore[arg-type]


def test_loader_processes_may_open_as_many_files_as_the_system_permits_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the limit is left as it was, or too low a one is not refused."""
    limits = (64, 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        limits = wanted

    monkeypatch.setattr(resource, "setrlimit", set_limits)
    splits = {"train": Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2], "length": 2, "supervised_tokens": 1}] * 4)}
    for workers, wanted in ((0, (64, 1000)), (2, (1000, 1000))):
        build_dataloaders(splits, collate_padded, DataConfig(dataloader_num_workers=workers))
        assert limits == wanted
    limits = (40, 40)
    with pytest.raises(Refusal, match="--dataloader-num-workers"):
        build_dataloaders(splits, collate_padded, DataConfig(dataloader_num_workers=2))
