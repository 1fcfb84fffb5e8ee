"""Texts for an encoder: framed by its special tokens, cut so that each part is framed again, with word boundaries."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from toolkit.config import DataConfig, MaskedLMConfig, Refusal
from toolkit.data.tokenize.tasks import tokenize_for_masked_lm
from toolkit.models.tokenizer import train_tokenizer

TEXTS = ["one two, alpha beta", "unhappily re-read, twice", "one", "a longer text of several words, which is cut " * 3]


@dataclass(frozen=True)
class Config(DataConfig, MaskedLMConfig):
    max_length: int = 1024


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: no end-of-text token, [CLS] and [SEP], continuations marked by ##."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##happi", "##ly", "re", "-", "read", ",", "twice", "one", "two", "a", "of", "which"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
    )


def tokenized(tokenizer: Any, texts: list[str] | None = None, **settings: Any) -> list[dict[str, Any]]:
    texts = TEXTS if texts is None else texts
    raw = DatasetDict(train=Dataset.from_dict({"text": texts, "origin": [f"a.txt:{i + 1}" for i in range(len(texts))]}))
    return list(tokenize_for_masked_lm(raw, tokenizer, Config(**settings))["train"])


@pytest.mark.parametrize("encoder", ["byte-level", "word pieces"])
def test_a_text_is_what_the_tokenizer_itself_makes_of_it(encoder: str) -> None:
    """Also for a tokenizer without an end of text. Fails when: an end-of-text token is added, or [SEP] is left out."""
    tokenizer = word_piece() if encoder == "word pieces" else train_tokenizer(TEXTS, 300, encoder=True)
    assert [row["input_ids"] for row in tokenized(tokenizer)] == tokenizer(TEXTS)["input_ids"]


@pytest.mark.parametrize("words", [False, True])
def test_parts_of_a_long_text_are_framed_again_and_hold_all_of_it(words: bool) -> None:
    """Fails when: a part is cut without its special tokens, tokens are lost between parts, or word starts are cut elsewhere."""
    tokenizer = train_tokenizer(TEXTS, 300, encoder=True)
    whole = [ids[1:-1] for ids in tokenizer(TEXTS)["input_ids"]]
    rows = tokenized(tokenizer, max_length=16, overlong="split", whole_word_mask=words)
    assert max(row["length"] for row in rows) == 16
    for i, ids in enumerate(whole):
        parts = [row for row in rows if row["origin"] == f"a.txt:{i + 1}"]
        assert [token for row in parts for token in row["input_ids"][1:-1]] == ids
        assert all((row["input_ids"][0], row["input_ids"][-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id) for row in parts)
        if words:
            starts = [start for row in parts for start in row["word_starts"][1:-1]]
            of_tokenizer = tokenizer(TEXTS[i], add_special_tokens=False)[0].word_ids
            assert starts == [j == 0 or of_tokenizer[j] != of_tokenizer[j - 1] for j in range(len(ids))]
            assert not any(row["word_starts"][0] or row["word_starts"][-1] for row in parts)


def test_truncation_keeps_the_end_token_and_counts_what_is_lost() -> None:
    """Fails when: the cut takes the last special token, or the report counts special tokens as lost."""
    tokenizer = train_tokenizer(TEXTS, 300, encoder=True)
    raw = DatasetDict(train=Dataset.from_dict({"text": TEXTS}))
    found = tokenize_for_masked_lm(raw, tokenizer, Config(max_length=16))
    whole = tokenizer(TEXTS)["input_ids"]
    for row, ids in zip(found["train"], whole, strict=True):
        assert row["input_ids"] == (ids if len(ids) <= 16 else [*ids[:15], ids[-1]])
    counts = found.report.splits[0]
    assert counts.cut_tokens == sum(max(len(ids) - 16, 0) for ids in whole)
    assert counts.overlong == sum(len(ids) > 16 for ids in whole)


def test_words_of_pieces_are_those_of_the_pre_tokenizer() -> None:
    """Fails when: every token begins a word, or special tokens do."""
    (row,) = tokenized(word_piece(), ["unhappily re-read, twice"], whole_word_mask=True)
    #        [CLS]  un    ##happi ##ly   re    -     read  ,     twice [SEP]
    assert row["word_starts"] == [False, True, False, False, True, True, True, True, True, False]


@pytest.mark.parametrize("settings", [{}, {"overlong": "split", "max_length": 16}, {"whole_word_mask": True}])
def test_settings_that_decide_the_rows_are_part_of_the_cache_key(settings: dict[str, Any]) -> None:
    """Fails when: word starts are asked for and rows without them come from the cache."""
    tokenizer = train_tokenizer(TEXTS, 300, encoder=True)
    tokenized(tokenizer)
    assert ("word_starts" in tokenized(tokenizer, **settings)[0]) == bool(settings.get("whole_word_mask"))


def test_what_has_nothing_to_hide_or_no_words_is_refused_by_row() -> None:
    """Fails when: a row of special tokens is trained on, or token ids are taken to have words."""
    tokenizer = train_tokenizer(TEXTS, 300, encoder=True)
    with pytest.raises(Refusal, match=r"a\.txt:2: .*unknown tokens"):
        tokenized(tokenizer, ["text", "<|mask|>"])
    with pytest.raises(Refusal, match=r"a\.txt:2: text .*white space"):
        tokenized(tokenizer, ["text", "  "])
    ids = DatasetDict(train=Dataset.from_dict({"input_ids": [[5, 9, 9, 6]]}))
    with pytest.raises(Refusal, match="where words begin"):
        tokenize_for_masked_lm(ids, tokenizer, Config(whole_word_mask=True))
    with pytest.raises(Refusal, match="leaves no place"):
        tokenized(tokenizer, max_length=2)
    other = DatasetDict(train=Dataset.from_dict({"sentence": ["a"]}))
    with pytest.raises(Refusal, match="--rename-columns sentence=text"):
        tokenize_for_masked_lm(other, tokenizer, replace(Config()))
    without_words = word_piece()
    without_words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    with pytest.raises(Refusal, match="without looking for words"):
        tokenized(without_words, ["one two"], whole_word_mask=True)
