"""Masks for masked language modeling: what is hidden, how often, and that nothing but (seed, epoch, example, place) decides it."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset

from toolkit.config import DataConfig, MaskedLMConfig, Refusal
from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.data.loading.loaders import build_dataloaders
from toolkit.data.loading.token_masks import build_masks, mask_tokens, special_ids
from toolkit.models.tokenizer import train_tokenizer

VOCABULARY, MASK = 60, 3
IS_SPECIAL = np.arange(VOCABULARY) < 5  # pad, start, end, mask, end of text
PACKED, PADDED = partial(collate_packed, aligned=True), partial(collate_padded, aligned=True)


def masked(document: dict[str, Any], seed: int = 0, progress: float = 0.0, **changes: Any) -> dict[str, Any]:
    values = {
        "is_special": IS_SPECIAL, "mask_token_id": MASK, "probability": 0.3, "probability_end": 0.3, "mask_replace_prob": 0.8,
        "random_replace_prob": 0.1, **changes,
    }  # fmt: skip
    return mask_tokens(document, np.random.default_rng(seed), progress, **values)


def sentence(length: int, seed: int = 0, words: bool = False) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    ids = np.concatenate([[1], numbers.integers(5, VOCABULARY, length - 2), [2]])
    starts = {"word_starts": numbers.random(length) < 0.5} if words else {}
    return {"input_ids": ids, "length": length, "supervised_tokens": length - 1, **starts}


def chosen(document: dict[str, Any]) -> np.ndarray:
    return np.flatnonzero(document["labels"] != -100)


def test_labels_are_the_hidden_tokens_and_all_others_are_as_they_were() -> None:
    """Fails when: labels are read after tokens were replaced, or the document's own array is written into."""
    document = sentence(50)
    before = document["input_ids"].copy()
    found = masked(document)
    assert (document["input_ids"] == before).all()
    at = chosen(found)
    assert (found["labels"][at] == before[at]).all()
    others = np.setdiff1d(np.arange(50), at)
    assert (found["input_ids"][others] == before[others]).all()
    assert found["supervised_tokens"] == len(at) > 0


@pytest.mark.parametrize("words", [False, True])
def test_the_expected_share_is_the_one_asked_for_and_special_tokens_are_never_touched(words: bool) -> None:
    """Over 4,000 draws of a document with 38 tokens: 11.4 hidden, within four standard errors.

    Fails when: the number is rounded down, or a special token is among those that may be chosen.
    """
    document = sentence(40, words=words)
    document["input_ids"][17] = 4
    counts = [len(chosen(masked(document, seed))) for seed in range(4000)]
    at = Counter(place for seed in range(4000) for place in chosen(masked(document, seed)).tolist())
    wanted = 0.3 * 37
    assert abs(np.mean(counts) - wanted) < 4 * np.std(counts) / np.sqrt(4000) + 1e-9, np.mean(counts)
    assert not {0, 17, 39} & set(at)
    assert len(at) == 37
    if not words:
        assert set(counts) == {11, 12}


def test_what_replaces_a_token_has_the_shares_that_were_asked_for() -> None:
    """Fails when: random tokens are drawn from special ones too, or the shares are exchanged."""
    document = sentence(40)
    kinds: Counter[str] = Counter()
    drawn = set()
    for seed in range(4000):
        found = masked(document, seed, mask_replace_prob=0.6, random_replace_prob=0.3)
        at = chosen(found)
        now, was = found["input_ids"][at], document["input_ids"][at]
        kinds.update({"mask": int((now == MASK).sum()), "kept": int((now == was).sum()), "all": len(at)})
        drawn |= set(now[(now != MASK) & (now != was)].tolist())
    assert drawn == set(range(5, VOCABULARY))
    random_but_same = 0.3 / (VOCABULARY - 5)
    for kind, share in (("mask", 0.6), ("kept", 0.1 + random_but_same)):
        assert kinds[kind] / kinds["all"] == pytest.approx(share, abs=4 * np.sqrt(0.25 / kinds["all"]))


def test_whole_words_are_hidden_whole() -> None:
    """Fails when: tokens are taken one by one in spite of `word_starts`."""
    for seed in range(300):
        document = sentence(30, seed, words=True)
        document["input_ids"][12], document["word_starts"][13] = 2, False
        hidden = set(chosen(masked(document, seed)).tolist())
        word: list[int] = []
        for place in range(30):
            special = IS_SPECIAL[document["input_ids"][place]]
            if special or document["word_starts"][place]:
                assert not word or set(word) <= hidden or not set(word) & hidden, (seed, word)
                word = []
            word += [] if special else [place]


def test_a_special_token_ends_a_word() -> None:
    """Fails when: what is before and what is behind one is hidden together."""
    document = {"input_ids": np.array([7, 2, 8]), "word_starts": np.array([True, False, False])}
    assert {tuple(chosen(masked(document, seed))) for seed in range(20)} == {(0,), (2,)}


def test_one_token_is_hidden_of_the_shortest_document_and_none_where_all_are_special() -> None:
    """Fails when: a share below one token hides none."""
    assert {len(chosen(masked(sentence(4), seed, probability=0.01, probability_end=0.01))) for seed in range(50)} == {1}
    assert masked({"input_ids": np.array([1, 2])})["supervised_tokens"] == 0


def test_the_rate_goes_in_a_line_over_the_run() -> None:
    """Fails when: progress is not read, or is read the other way round."""
    document = sentence(1002)
    for progress, share in ((0.0, 0.4), (0.5, 0.3), (1.0, 0.2)):
        assert len(chosen(masked(document, 1, progress, probability=0.4, probability_end=0.2))) == round(1000 * share)


def splits_of(rows: int = 23) -> DatasetDict:
    documents = [sentence(3 + (7 * i) % 12, i) for i in range(rows)]
    train = Dataset.from_list([{**d, "input_ids": d["input_ids"].tolist()} for d in documents])
    return DatasetDict(train=train, validation=train.select(range(11)))


class Rank:
    def __init__(self, process_index: int, num_processes: int) -> None:
        self.process_index, self.num_processes, self.device = process_index, num_processes, torch.device("cpu")


MASKS = partial(
    mask_tokens, is_special=IS_SPECIAL, mask_token_id=MASK, probability=0.4, probability_end=0.1, mask_replace_prob=0.8,
    random_replace_prob=0.1,
)  # fmt: skip


@pytest.mark.parametrize("packing", [None, "bfd", "wrapped"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_totals_count_the_masks_of_the_global_batch(packing: str | None, world_size: int) -> None:
    """Of all ranks, against the labels in their tensors, on batches that straddle epochs.

    Fails when: totals come from the index, which knows documents before they are masked.
    """
    config = DataConfig(
        packing=bool(packing), packing_strategy=packing or "bfd", max_length=16, per_device_train_batch_size=2,
        global_batch_size=7, num_train_epochs=2.0,
    )  # fmt: skip
    collate = PACKED if packing else PADDED
    ranks = [
        list(build_dataloaders(splits_of(), collate, config, Rank(rank, world_size), augment=MASKS)[0].batches())
        for rank in range(world_size)
    ]
    for batches in zip(*ranks, strict=True):
        counted = sum(
            int((m["labels"] != -100).sum())
            for b in batches
            for m, real in zip(b.micro_batches, b.real, strict=True)
            if real
        )  # fmt: skip
        assert {b.totals["tokens"] for b in batches} == {counted}


@pytest.mark.parametrize("streaming", [False, True])
def test_masks_are_a_function_of_seed_epoch_example_and_place_in_the_run(streaming: bool) -> None:
    """Begun at any position, on any ranks and cut otherwise, the same tokens are hidden; another seed hides others.

    Fails when: a generator is shared between examples, or the rate follows the step and not the example's own position.
    """
    splits: Any = splits_of()
    if streaming:
        rows = splits["train"]
        splits = {"train": IterableDataset.from_generator(lambda: iter(rows))}

    def hidden(position: int, world_size: int, micro: int, size: int, seed: int = 42) -> dict[int, list[int]]:
        found = {}
        for rank in range(world_size):
            config = DataConfig(
                per_device_train_batch_size=micro, global_batch_size=size, max_steps=48 // size, streaming=streaming, seed=seed
            )
            train, _ = build_dataloaders(splits, PADDED, config, Rank(rank, world_size), augment=MASKS)
            for batch in train.batches(position):
                for m, indices, real in zip(batch.micro_batches, batch.indices, batch.real, strict=True):
                    for labels, tokens, index in zip(m["labels"], m["input_ids"], indices, strict=True):
                        if real:
                            place = batch.position + batch.examples.index(index)
                            found[place] = [*labels[labels != -100].tolist(), -1, *tokens[tokens > 0].tolist()]
        return found

    whole = hidden(0, 1, 2, 4)
    assert len(whole) == 48
    assert hidden(0, 2, 1, 8) == whole
    assert hidden(0, 3, 2, 4) == whole
    assert hidden(16, 1, 4, 4) == {place: row for place, row in whole.items() if place >= 16}
    assert hidden(0, 1, 2, 4, seed=7) != whole


def test_an_evaluation_hides_the_same_tokens_each_time_packed_padded_and_in_any_batch() -> None:
    """Fails when: the generator of an evaluation depends on the example's number, the row it is packed in, or the run so far."""

    def hidden(packing: bool, size: int, seed: int = 42) -> Counter[tuple[int, ...]]:
        config = DataConfig(packing=packing, max_length=32, per_device_eval_batch_size=size, seed=seed)
        collate = PACKED if packing else PADDED
        found: Counter[tuple[int, ...]] = Counter()
        for rank in range(2):
            loader = build_dataloaders(splits_of(), collate, config, Rank(rank, 2), augment_evaluation=MASKS)[1]
            assert loader is not None
            for batch in loader:
                if batch.real[0]:
                    labels = batch.micro_batches[0]["labels"]
                    found.update((int(label),) for label in labels[labels != -100])
        return found

    once = hidden(False, 1)
    assert hidden(False, 3) == once == hidden(True, 2)
    assert hidden(False, 1, seed=1) != once


def test_a_tokenizer_without_a_mask_is_refused_and_special_tokens_are_those_it_names() -> None:
    """Fails when: tokens that were added as special are left out, or a missing mask is taken for token 0."""
    encoder = train_tokenizer(["some text, more text"], 300, encoder=True)
    encoder.add_tokens(["<|mine|>"], special_tokens=True)
    names = encoder.convert_ids_to_tokens(special_ids(encoder))
    assert {"<|cls|>", "<|sep|>", "<|mask|>", "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mine|>"} == set(names)
    decoder = train_tokenizer(["some text, more text"], 300)
    with pytest.raises(Refusal, match="no mask token"):
        build_masks(decoder, MaskedLMConfig())
