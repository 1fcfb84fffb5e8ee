"""Rows held out by content: no leak, no move, and the same split from a file, a stream, or in another order."""

import hashlib
import random
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset

from toolkit.config import Refusal
from toolkit.data.sources import held_out
from toolkit.data.sources.held_out import batch_keys, first_key, row_keys, split_by_content, stream_by_content
from toolkit.system.console import warn_once

FRACTION = 0.1


def texts(count: int, seed: int = 0) -> list[dict]:
    letters = random.Random(seed)
    return [{"text": "".join(letters.choices("abcdefgh ", k=20)), "origin": f"file:{row}"} for row in range(count)]


def sides(rows: list[dict], fraction: float = FRACTION) -> tuple[list[dict], list[dict]]:
    dataset = Dataset.from_list(rows)
    train, held_out = split_by_content(dataset, fraction, frozenset({first_key(dataset, "rows")}), "rows")
    return train.to_list(), held_out.to_list()


def held_out_by_a_loop(rows: list[dict], fraction: float) -> list[dict]:
    """The rule, said again: the first row's text, and each text whose hash is in the lowest share."""
    found = []
    for row in rows:
        number = int(hashlib.blake2b(row["text"].strip().encode(), digest_size=8).hexdigest(), 16)
        if number < fraction * 2**64 or row["text"].strip() == rows[0]["text"].strip():
            found.append(row)
    return found


def test_held_out_rows_are_those_of_a_plain_loop_over_hashes() -> None:
    """Fails when: the hash takes the origin in, or the comparison is turned around."""
    rows = texts(3000)
    train, held_out = sides(rows)
    assert held_out == held_out_by_a_loop(rows, FRACTION)
    assert train == [row for row in rows if row not in held_out]
    assert abs(len(held_out) - 300) < 4 * (3000 * FRACTION * (1 - FRACTION)) ** 0.5  # four standard deviations


def test_the_keys_of_many_rows_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start hashes none of them; other rows, of as many columns and lines, have their own.

    Fails when: nothing is kept; the key of what is kept leaves out the rows; kept keys are used without their digest.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(held_out, "KEPT_ROWS", 1000)
    rows, others, hashed = texts(1500), texts(1500, seed=1), list[int]()
    hash_rows = held_out.row_keys
    monkeypatch.setattr(held_out, "row_keys", lambda given: hashed.append(len(given)) or hash_rows(given))
    expected = [(each[0], held_out_by_a_loop(each, FRACTION)) for each in (rows, others)]
    for each, (_, wanted) in zip((rows, others), expected, strict=True):
        assert sides(each)[1] == sides(each)[1] == wanted
    assert hashed == [1500, 1500]
    assert sides(texts(900))[1] == held_out_by_a_loop(texts(900), FRACTION)
    kept = sorted(tmp_path.glob("keys-*/keys.npy"))
    assert len(kept) == 2
    for path in kept:  # a flipped bit would move rows between the sides
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert sides(rows)[1] == expected[0][1]
    assert hashed == [1500, 1500, 900, 1500]


def test_the_sides_have_fingerprints_of_their_rows() -> None:
    """What is derived from them is found again, and not that of others. Fails when: the share is left out of the name."""
    rows = Dataset.from_list(texts(300))
    names = [part._fingerprint for share in (0.1, 0.1, 0.3) for part in split_by_content(rows, share, frozenset(), "rows")]
    assert names[:2] == names[2:4]
    assert len(set(names)) == 4


def test_no_row_changes_sides_as_a_file_grows() -> None:
    """From the smallest file on. Fails when: a file with no row in the share gives its lowest hash instead of its first row."""
    rows = texts(150)
    side: dict[str, bool] = {}
    for count in (*range(2, 40), 60, 90, 150):
        train, held_out = sides(rows[:count], 0.02)
        assert train
        assert held_out
        for row in train:
            assert side.setdefault(row["text"], False) is False
        for row in held_out:
            assert side.setdefault(row["text"], True) is True


def test_no_row_but_the_first_changes_sides_when_the_file_is_shuffled() -> None:
    """Fails when: a row's place enters its hash."""
    rows = texts(500)
    shuffled = random.Random(1).sample(rows, len(rows))
    first = {rows[0]["text"], shuffled[0]["text"]}
    before, after = ({row["text"] for row in sides(order)[1]} - first for order in (rows, shuffled))
    assert before == after


def test_a_column_that_appears_later_moves_no_row() -> None:
    """Its nulls, and the floats of a column of whole numbers. Fails when: _canonical keeps nulls, or 1.0 apart from 1."""
    early = [{"a": number, "b": {"d": f"b{number}"}} for number in range(300)]
    late = [*early, {"a": 0.5, "b": {"d": "b", "e": "new"}, "c": "new"}]
    grown = Dataset.from_list([{**row, "c": row.get("c")} for row in late])
    assert row_keys(Dataset.from_list(early)).tolist() == row_keys(grown)[:300].tolist()


@pytest.mark.parametrize(
    "siblings",
    [
        [{"text": "same", "label": 0}, {"text": "same\n", "label": 1}],
        [{"prompt": "same", "completion": "one"}, {"prompt": "same", "completion": "two"}],
        [{"prompt": "same", "chosen": "a", "rejected": "b"}, {"prompt": "same", "chosen": "c", "rejected": "d"}],
        [{"context": "same", "question": "who?"}, {"context": "same", "question": "when?"}],
        [{"source": "same", "target": "eins"}, {"source": "same", "target": "zwei"}],
        [{"tokens": ["same", "one"], "tags": [0, 1]}, {"tokens": ["same", "one"], "tags": [1, 1]}],
        [
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "same"}]},
            {"messages": [{"role": "user", "content": "same"}, {"role": "assistant", "content": "b"}]},
        ],
        [{"id": 1, "premise": "p", "hypothesis": "h", "label": 0}, {"id": 2, "premise": "p", "hypothesis": "h", "label": 1}],
        [{"a": "x", "origin": "f:1"}, {"a": "x", "origin": "f:2"}],
        [{"chosen": "3 + 4? It is 7", "rejected": "3 + 4? It is 8"}, {"chosen": "3 + 4? 7", "rejected": "3 + 4? Eight"}],
        [{"chosen": "Say hi.\nHi", "rejected": "Say hi.\nHello"}, {"chosen": "Say hi.\nMoin", "rejected": "Say hi.\nServus"}],
        [{"chosen": "Say it. No", "rejected": "Say it. Not"}, {"chosen": "Say it. Yes", "rejected": "Say it. You"}],
        [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "a", "input": "b", "output": "d"}],
        [{"chosen": "a b cd", "rejected": "a b ce"}, {"chosen": "a b f", "rejected": "a b g"}],
    ],
    ids=lambda siblings: "+".join(siblings[0]),
)
def test_rows_with_the_same_input_stay_on_one_side(siblings: list[dict]) -> None:
    """Fails when: batch_keys hashes all columns of every row."""
    one, two = (batch_keys({name: [value] for name, value in row.items()})[0] for row in siblings)
    assert one == two


@pytest.mark.parametrize(
    "different",
    [
        [{"prompt": "", "completion": "one"}, {"prompt": "", "completion": "two"}],
        [{"text": "one", "source": "web"}, {"text": "two", "source": "web"}],
        [{"text": "one", "context": "web"}, {"text": "two", "context": "web"}],
        [{"premise": "p", "hypothesis": "h"}, {"premise": "p", "hypothesis": "i"}],
        [{"input_ids": [1, 2]}, {"input_ids": [12]}],
        [{"chosen": "Sum.\n3 + 4\n7", "rejected": "Sum.\n3 + 4\n8"}, {"chosen": "Sum.\n3 + 5\n8", "rejected": "Sum.\n3 + 5\n9"}],
        [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "a", "input": "d", "output": "c"}],
        [{"chosen": "yes", "rejected": "no"}, {"chosen": "left", "rejected": "right"}],
    ],
    ids=lambda different: "+".join(different[0]),
)
def test_rows_with_different_inputs_are_told_apart(different: list[dict]) -> None:
    """Fails when: an empty prompt counts as an input, or a column called source does without a target."""
    one, two = (batch_keys({name: [value] for name, value in row.items()})[0] for row in different)
    assert one != two


TURNS = {  # what is before the user's words, before the assistant's, and behind all of it
    "hh-rlhf": ("\n\nHuman: ", "\n\nAssistant:", ""),
    "alpaca": ("Below is an instruction.\n\n### Instruction:\n", "\n\n### Response:\n", ""),
    "chatml": ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"),
    "phi-3": ("<|user|>\n", "<|end|>\n<|assistant|>\n", "<|end|>\n"),
    "vicuna": ("A chat. USER: ", " ASSISTANT: ", "</s>"),
    "llama-2": ("<s>[INST] ", " [/INST] ", " </s>"),
    "gemma": ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
    "questions": ("Q: ", "\nA: ", ""),
    "lines": ("", "\n", ""),
    "one line": ("", "? ", ""),
}


@pytest.mark.parametrize("written", TURNS)
def test_no_prompt_that_two_texts_begin_with_is_on_both_sides(written: str) -> None:
    """60 prompts with ten pairs each, whose answers begin alike in different ways; some of the dialogues have several turns.

    Fails when: the key is a hash of `chosen`, or of all that both texts begin with.
    """
    words = random.Random(3)
    user, assistant, end = TURNS[written]
    has_turns = written not in ("lines", "one line")
    rows, prompts, firsts = list[dict](), list[str](), list[str]()

    def some(number: int) -> str:
        return " ".join(words.choices(["how", "why", "bread", "bike", "code", "dog", "garden", "money", "plan", "trip", "write", "fix"], k=number))

    for _ in range(60):
        prompt = first = user + some(6)
        for _ in range(words.choice((0, 0, 1, 2)) if has_turns else 0):
            prompt += f"{assistant}{some(5)}.{end}{user}{some(4)}"
        prompt += assistant
        for _ in range(10):
            alike = words.choice(("", "I ", "I think ", *(("Sure! Here:\n1. ", f"{some(3)}.\n\n{some(3)} ") if has_turns else ())))
            better, worse = words.choice((("go", "stay"), ("red", "rot"), ("1", "12")))
            rows.append({"chosen": f"{prompt}{alike}{better} {some(4)}{end}", "rejected": f"{prompt}{alike}{worse} {some(3)}{end}"})
            prompts.append(prompt)
            firsts.append(first)
    dataset = Dataset.from_list([{**row, "id": number} for number, row in enumerate(rows)])
    for part in (split_by_content, stream_by_content):
        shown = dataset if part is split_by_content else dataset.to_iterable_dataset()
        name = ("rows",) if part is split_by_content else ()
        train, held_out = part(shown, FRACTION, frozenset({first_key(dataset, "rows")}), *name)
        on_each = [{prompts[row["id"]] for row in side} for side in (train, held_out)]
        assert not on_each[0] & on_each[1]
        assert len(on_each[0] | on_each[1]) == len(set(prompts))
        assert all(on_each)
    assert len(np.unique(row_keys(dataset.remove_columns("id")))) == len(set(firsts))


@pytest.mark.parametrize(
    ("ending", "is_told"),
    [("\nTL;DR:", True), ("?\n", True), ("? ", True), ("\n\nAssistant:", True), (". ", False), ("\n", False)],
)
def test_a_prompt_whose_answers_open_alike_is_on_one_side_or_a_line_says_so(ending: str, is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """200 prompts with ten pairs each, of tables and streams.

    Fails when: the prompt ends at the last line or question that both texts share, or nothing is said where no border holds.
    """
    words = random.Random(5)
    rows = []
    for number in range(200):
        prompt = f"POST {number} {words.random()}" + ending
        for _ in range(10):
            alike = words.choice(("Sure! ", "Of course. ", "Here is one:\n", ""))
            rows.append({"chosen": f"{prompt}{alike}red {words.random()}", "rejected": f"{prompt}{alike}blue", "id": number})
    dataset = Dataset.from_list(rows)
    for streams, count in ((False, "2,000 pairs"), (True, "the first 100 pairs")):
        warn_once.cache_clear()
        always = frozenset({first_key(dataset, "rows")})
        split = stream_by_content(dataset.to_iterable_dataset(), FRACTION, always) if streams else split_by_content(dataset, FRACTION, always, "rows")
        train, held_out = ({row["id"] for row in side} for side in split)
        said = capsys.readouterr().err
        assert bool(train & held_out) != is_told
        assert (count in said and "prompt, chosen, rejected" in said) == (not is_told)


def test_rows_whose_prompt_is_said_keep_the_side_they_had() -> None:
    """Lists of answers, single answers and chats too. Fails when: the beginning of the answers counts next to a prompt too."""
    text = "Sum.\n\nHuman: 3 + 4?\n\nAssistant: Say."
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}]
    rows = [
        {"prompt": text, "chosen": "It is 7", "rejected": "It is 8"}, {"prompt": f"{text}\n", "responses": ["7", "8"], "scores": [1, 0]},
        {"prompt": text, "completion": "7", "label": True}, {"chosen": turns, "rejected": [turns[0], {**turns[1], "content": "8"}]},
        {"prompt": text, "completion": "7"}, {"messages": turns}, {"text": text},
    ]  # fmt: skip
    expected = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    assert {int(batch_keys({name: [value] for name, value in row.items()})[0]) for row in rows} == {expected}


def test_a_stream_is_split_like_the_table_it_was() -> None:
    """Fails when: stream_by_content keeps `held_out` the wrong way round."""
    rows = [{"messages": [{"role": "user", "content": row["text"]}], "extra": None} for row in texts(400)]
    dataset = Dataset.from_list(rows)
    always = frozenset({first_key(dataset, "rows")})
    table = split_by_content(dataset, FRACTION, always, "rows")
    stream = stream_by_content(dataset.to_iterable_dataset(num_shards=3), FRACTION, always)
    for expected, found in zip(table, stream, strict=True):
        assert list(found) == expected.to_list()
    assert first_key(stream[0], "rows") not in always


@pytest.mark.parametrize("rows", [[{"text": "a"}], [{"text": "a"}, {"text": "a "}]])
def test_what_can_only_be_held_out_whole_is_refused(rows: list[dict]) -> None:
    """Fails when: the check of an empty training side is left out."""
    with pytest.raises(Refusal, match="--eval-fraction 0"):
        sides(rows)


def test_keys_do_not_depend_on_batches_or_on_an_indices_mapping() -> None:
    """Fails when: row_keys reads the Arrow table under a selection."""
    dataset = Dataset.from_list(texts(50))
    keys = row_keys(dataset)
    some = [7, 3, 41, 3]
    assert np.array_equal(row_keys(dataset.select(some)), keys[some])
    assert np.array_equal(np.concatenate([row_keys(dataset.select([place])) for place in range(50)]), keys)


def test_an_unreadable_stream_is_refused_and_not_shown_as_a_traceback() -> None:
    """Fails when: first_key lets the reader's error through."""

    def broken() -> object:
        raise ValueError("JSON parse error in row 0")
        yield {}

    with pytest.raises(Refusal, match=r"mine .*: JSON parse error"):
        first_key(datasets.IterableDataset.from_generator(broken), "mine")
