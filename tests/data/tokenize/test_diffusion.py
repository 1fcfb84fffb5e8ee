"""Answers that are filled up with end tokens, so that a model which writes all tokens at once learns where to end."""

import copy
from dataclasses import dataclass

import pytest
from datasets import Dataset

from toolkit.config import DataConfig, DiffusionConfig, Refusal
from toolkit.data.tokenize.tasks import tokenize_for_diffusion, tokenize_for_sft
from toolkit.models.diffusion import with_mask_token
from toolkit.models.tokenizer import train_tokenizer

ROWS = {"prompt": ["say one", "say some"], "completion": ["one", "one and then two and then three"]}


@dataclass(frozen=True)
class Config(DataConfig, DiffusionConfig):
    max_length: int = 64
    eval_fraction: float = 0.0


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["say one and then two and then three"] * 30, 300)


def rows(tokenizer, columns=ROWS, make=tokenize_for_diffusion, **settings):
    return list(make({"train": Dataset.from_dict(columns)}, tokenizer, Config(**settings))["train"])


def test_answers_have_one_length_and_what_fills_them_is_supervised(tokenizer) -> None:
    """Fails when: the prompt counts towards the length, what fills is not supervised, or the columns of lengths are the old ones."""
    plain, filled = rows(tokenizer, make=tokenize_for_sft), rows(tokenizer, answer_length=12)
    for before, after in zip(plain, filled, strict=True):
        assert after["input_ids"][: before["length"]] == before["input_ids"]
        assert set(after["input_ids"][before["length"] :]) <= {tokenizer.eos_token_id}
        assert sum(label != -100 for label in after["labels"]) == max(12, before["supervised_tokens"])
        assert after["labels"][-1] == tokenizer.eos_token_id
        assert after["length"] == len(after["input_ids"]) == len(after["labels"])
        assert after["supervised_tokens"] == sum(label != -100 for label in after["labels"])
    assert rows(tokenizer, answer_length=1)[0]["input_ids"] == plain[0]["input_ids"]


def test_only_as_far_as_the_longest_row_and_never_behind_a_cut(tokenizer) -> None:
    """Fails when: a row becomes longer than --max-length, or an answer that was cut off is said to end."""
    longest = max(row["length"] for row in rows(tokenizer, make=tokenize_for_sft))
    filled = rows(tokenizer, answer_length=40, max_length=longest + 3)
    assert {row["length"] for row in filled} == {longest + 3}
    short = rows(tokenizer, answer_length=40, max_length=longest - 2, overlong="truncate")
    assert short[1]["length"] == longest - 2
    assert short[1]["input_ids"][-1] != tokenizer.eos_token_id


def test_texts_stay_as_they_are(tokenizer) -> None:
    """Fails when: a text without a prompt is filled up like an answer."""
    texts = {"text": ["one and two"]}
    assert rows(tokenizer, texts)[0]["input_ids"] == rows(tokenizer, texts, make=tokenize_for_sft)[0]["input_ids"]


def test_a_text_that_holds_the_mask_token_is_refused_by_its_row(tokenizer) -> None:
    """It would be read as hidden, and never be found. Fails when: `read` returns at once, or names the row before."""
    masked = with_mask_token(copy.deepcopy(tokenizer))
    for columns in ({"text": ["one", "say <|mask|> and two", "two"]}, {"prompt": ["say", "say"], "completion": ["one", "<|mask|>"]}):
        columns["origin"] = [f"texts.txt:{line}" for line in range(1, 1 + len(next(iter(columns.values()))))]
        with pytest.raises(Refusal, match=r"texts\.txt:2: .*mask token"):
            rows(masked, columns)
        del columns["origin"]
        rows(tokenizer, columns)


def test_of_a_chat_the_last_answer_is_filled(tokenizer) -> None:
    """Fails when: an earlier turn is filled too, or all turns count as one answer."""
    said = [("user", "say one"), ("assistant", "one"), ("user", "say two"), ("assistant", "two")]
    chats = {"messages": [[{"role": role, "content": text} for role, text in said]]}
    before, after = rows(tokenizer, chats, make=tokenize_for_sft)[0], rows(tokenizer, chats, answer_length=9)[0]
    assert after["input_ids"][: before["length"]] == before["input_ids"]
    labels = after["labels"]
    last = max(i for i, label in enumerate(labels[: before["length"]]) if label == -100 and labels[i + 1 : before["length"]].count(-100) == 0)
    assert set(after["input_ids"][before["length"] :]) == {tokenizer.eos_token_id}
    assert sum(label != -100 for label in labels[last:]) > 0
