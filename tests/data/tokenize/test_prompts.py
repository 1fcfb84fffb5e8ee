"""Prompts to sample completions for: their tokens, what reward functions get, what is refused by file and row."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.inspection import guess_task, inspect_splits
from toolkit.data.report import report_lines
from toolkit.training.step import to_device


@dataclass(frozen=True)
class Config(tk.DataConfig, tk.PromptConfig):
    per_device_train_batch_size: int = 2


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def splits(held_out: int = 0, **columns: list[Any]) -> DatasetDict:
    number = len(next(iter(columns.values())))
    data = Dataset.from_dict({**columns, "origin": [f"asked.jsonl:{n + 1}" for n in range(number)]})
    if not held_out:
        return DatasetDict(train=data)
    return DatasetDict(train=data.select(range(number - held_out)), validation=data.select(range(number - held_out, number)))


def with_bos(tokenizer: Any) -> Any:
    from tokenizers import processors

    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)])  # fmt: skip
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


SYSTEM = {"role": "system", "content": "Be short."}
ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {  # columns, and the prompt as reward functions get it
    "chats": ({"prompt": [[SYSTEM, user("2 + 2?")], [SYSTEM, user("3 + 3?")]]}, [[SYSTEM, user("2 + 2?")], [SYSTEM, user("3 + 3?")]]),
    "messages": ({"messages": [[user("a"), said("b"), user("c"), said("d")], [user("e")]]}, [[user("a"), said("b"), user("c")], [user("e")]]),
    "conversations": ({"conversations": [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]}, [[user("a")]]),
    "gsm8k": ({"question": ["Two and two?", "Three?"], "answer": ["2+2\n#### 4", "#### 3"]}, [[user("Two and two?")], [user("Three?")]]),
    "problem": ({"problem": ["Find x."], "solution": ["$1$"]}, [[user("Find x.")]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_chats_are_rendered_up_to_where_an_answer_begins(kind: str, tokenizer: Any) -> None:
    """Against the tokenizer's own `apply_chat_template`, which writes its special tokens alone.

    Fails when: the generation prompt is left out; the last answer stays; BOS is put before a rendered chat.
    """
    columns, prompts = ROWS[kind]
    found = tk.tokenize_for_prompts(splits(**columns), with_bos(tokenizer), Config())["train"]
    assert [json.loads(row)["prompt"] for row in found["row"]] == prompts
    for ids, prompt in zip(found["input_ids"], prompts, strict=True):
        assert ids == tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]


def test_a_prompt_that_is_text_is_plain_and_so_are_questions_without_a_template(tokenizer: Any) -> None:
    """Behind BOS, as in fine-tuning on prompt and completion. Fails when: a text prompt is made a user's message; BOS is missing."""
    tokenizer = with_bos(tokenizer)
    plain = tk.tokenize_for_prompts(splits(prompt=["2 + 2 =", " 3 +"], answer=[4, 5]), tokenizer, Config())
    assert plain["train"]["input_ids"][:] == [tokenizer(text)["input_ids"] for text in ("2 + 2 =", " 3 +")]
    assert "plain text" in plain.report.layout
    assert any("chat template" in note for note in plain.report.notes)
    tokenizer.chat_template = None
    asked = tk.tokenize_for_prompts(splits(question=["Two and two?"]), tokenizer, Config())["train"]
    assert asked["input_ids"][:] == [tokenizer("Two and two?")["input_ids"]]
    assert json.loads(asked["row"][0])["prompt"] == "Two and two?"


def test_reward_functions_get_every_column_as_the_data_have_it(tokenizer: Any) -> None:
    """Text, numbers, lists, objects and None; not what JSON can't hold, which the report names.

    Fails when: a column is left out; text is written in ASCII and not read back; pictures are refused with the whole data.
    """
    rows = [
        {"prompt": "a", "answer": "é\n\"x\" \u2028", "level": 3, "share": 0.1, "tests": ["x", "y"], "meta": {"of": 1}, "none": None},
        {"prompt": "b", "answer": "", "level": -1, "share": 1e300, "tests": [], "meta": {"of": 2}, "none": None},
    ]  # fmt: skip
    raw = splits(**{name: [row[name] for row in rows] for name in rows[0]}, picture=[b"\x89PNG", b""])
    found = tk.tokenize_for_prompts(raw, tokenizer, Config())
    origins = ["asked.jsonl:1", "asked.jsonl:2"]
    assert tk.collate_prompts(list(found["train"]))["rows"] == [{**row, "origin": at} for row, at in zip(rows, origins, strict=True)]
    assert "columns not read: picture" in found.report.notes
    assert "answer, level, share, tests, meta, none" in found.report.layout


def test_micro_batches_number_prompts_by_their_place_and_survive_workers_and_devices(tokenizer: Any) -> None:
    """Through the loader with a worker process, in its own order, and to a device.

    Fails when: prompts are numbered within their split, or in the order in which they are read; a row is lost on the way.
    """
    raw = splits(held_out=2, prompt=[f"What is {n}?" + "!" * n for n in range(9)], answer=list(range(9)))
    found = tk.tokenize_for_prompts(raw, tokenizer, Config())
    config = Config(dataloader_num_workers=1, gradient_accumulation_steps=2)
    train, evaluation = tk.build_dataloaders(found, tk.collate_prompts, config)
    batches = [batch.pin_memory() if torch.cuda.is_available() else batch for batch in train.batches()]
    read = [to_device(micro_batch, torch.device("cpu")) for batch in batches for micro_batch in batch.micro_batches]
    numbers = [number for micro_batch in read for number in micro_batch["prompt"]]
    assert sorted(set(numbers)) == list(range(7))
    assert numbers[:7] != list(range(7))
    for micro_batch in read:
        assert [row["answer"] for row in micro_batch["rows"]] == micro_batch["prompt"]
        assert tokenizer.batch_decode(micro_batch["prompt_ids"]) == [row["prompt"] for row in micro_batch["rows"]]
    held_out = [number for batch in evaluation for number in batch.micro_batches[0]["prompt"]]
    assert sorted(held_out) == [7, 8]


def test_a_stream_gives_the_same_prompts(tokenizer: Any) -> None:
    """Fails when: rows of a stream are tokenized otherwise."""
    raw = splits(prompt=["a", "b c"], answer=[1, 2])
    config = Config(streaming=True, max_steps=1, per_device_train_batch_size=2)
    streams = {"train": raw["train"].to_iterable_dataset()}
    found = list(tk.tokenize_for_prompts(streams, tokenizer, config)["train"])
    whole = list(tk.tokenize_for_prompts(raw, tokenizer, Config())["train"])
    assert [{**row, "prompt": number} for number, row in enumerate(found)] == whole
    train, _ = tk.build_dataloaders(tk.tokenize_for_prompts(streams, tokenizer, config), tk.collate_prompts, config)
    assert set(next(iter(train.batches())).micro_batches[0]) == {"prompt_ids", "rows"}


def test_over_long_prompts_are_dropped_and_counted_or_refused_and_never_cut(tokenizer: Any) -> None:
    """Fails when: the longest length is that of --max-length; a prompt is truncated; none is left and nothing is said."""
    lengths = [3, 40, 5, 60]
    raw = splits(prompt=["a b" * length for length in lengths])
    sizes = [len(tokenizer("a b" * length)["input_ids"]) for length in lengths]
    config = {"max_length": 2, "max_prompt_length": sizes[2]}
    found = tk.tokenize_for_prompts(raw, tokenizer, Config(**config))
    assert found["train"]["length"][:] == [sizes[0], sizes[2]]
    assert found["train"]["prompt"][:] == [0, 1]
    counts = found.report.splits[0]
    assert (counts.overlong, counts.cut_tokens) == (2, sizes[1] + sizes[3])
    assert any(f"2 longer than {sizes[2]} tokens, dropped" in line for line in report_lines(found.report, ("[[", "]]")))
    with pytest.raises(Refusal, match=rf"^asked\.jsonl:4: .*{sizes[3]} tokens.*--max-prompt-length {sizes[2]}"):
        tk.tokenize_for_prompts(raw, tokenizer, Config(overlong_prompts="refuse", **config))
    with pytest.raises(Refusal, match="--max-prompt-length 1,"):
        tk.tokenize_for_prompts(raw, tokenizer, Config(max_prompt_length=1))


BAD: dict[str, tuple[dict[str, list[Any]], str]] = {
    "no prompt": ({"prompt": ["a", None]}, "asked.jsonl:2: prompt is missing"),
    "none at all": ({"prompt": [None]}, "asked.jsonl:1: prompt is missing"),
    "empty": ({"prompt": ["a", ""]}, "asked.jsonl:2: prompt is empty"),
    "white space": ({"question": ["a", " \n"]}, "asked.jsonl:2: question is nothing"),
    "a number": ({"problem": [1, 2]}, "asked.jsonl:1: problem is the number 1"),
    "no messages": ({"prompt": [[user("a")], []]}, "asked.jsonl:2: prompt is an empty list"),
    "an empty message": ({"prompt": [[user("a")], [user(" ")]]}, "asked.jsonl:2: message 1 of prompt "),
    "only an answer": ({"messages": [[user("a")], [said("b")]]}, "asked.jsonl:2: messages begins with"),
    "ends with an answer": ({"prompt": [[user("a")], [user("a"), said("b")]]}, "asked.jsonl:2: prompt ends with"),
    "a role": ({"prompt": [[{"role": "usr", "content": "a"}]]}, "asked.jsonl:1: message 1 of prompt has the role"),
    "other columns": ({"query": ["a"]}, "--rename-columns query=prompt"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_prompt_is_refused_by_file_and_row(kind: str, tokenizer: Any) -> None:
    """Fails when: an empty message is rendered; a prompt ends with an answer that is then continued."""
    columns, words = BAD[kind]
    with pytest.raises(Refusal) as refused:
        tk.tokenize_for_prompts(splits(**columns), tokenizer, Config())
    assert words in str(refused.value)


def test_packing_and_messages_without_a_template_are_refused(tokenizer: Any) -> None:
    """Fails when: prompts are packed."""
    with pytest.raises(Refusal, match="--packing"):
        tk.tokenize_for_prompts(splits(prompt=["a"]), tokenizer, Config(packing=True))
    tokenizer.chat_template = None
    with pytest.raises(Refusal, match="no chat template"):
        tk.tokenize_for_prompts(splits(prompt=[[user("a")]]), tokenizer, Config())


def test_inspection_knows_prompts_and_names_every_bad_one(tokenizer: Any) -> None:
    """Fails when: rows with a prompt alone are unknown, or taken from fine-tuning; only the first problem is found."""
    assert guess_task(["prompt"]) == guess_task(["prompt", "answer"]) == guess_task(["problem", "solution"]) == "prompts"
    assert guess_task(["prompt", "completion"]) == "sft"
    found = inspect_splits("prompts", splits(prompt=["a", "", "b", None, "c " * 99], answer=[1] * 5), tokenizer, Config(max_prompt_length=50))
    assert [problem.origin for problem in found.problems] == ["asked.jsonl:2", "asked.jsonl:4"]
    assert (found.report.max_length, found.report.length_flag, found.report.overlong) == (50, "--max-prompt-length", "drop")
    assert found.examples[0] == ("asked.jsonl:1", [("a", True)])
