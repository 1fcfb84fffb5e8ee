"""Sources and targets to tokens, against each family's own tokenizer; what is refused, by file and row."""

from dataclasses import dataclass
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import (
    BartTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PegasusTokenizer,
    PreTrainedTokenizer,
    T5Tokenizer,
)

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.inspection import guess_task
from toolkit.data.tokenize.seq2seq import language_codes

LETTERS = [(letter, -float(number)) for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz.", 2)]
SOURCES = ["the cat sat on the mat.", "dogs run", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
TARGETS = ["a cat sat.", "dogs", "all the letters there are, and more"]
START = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]


@dataclass(frozen=True)
class Config(tk.DataConfig, tk.Seq2SeqConfig):
    max_length: int = 32
    max_target_length: int = 16


def bart() -> Any:
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġ", *"abcdefghijklmnopqrstuvwxyz."]
    return BartTokenizer(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[])


class WordTokenizer(PreTrainedTokenizer):
    """In Python, with vocabularies of its own for sources and for targets, as Marian's is."""

    def __init__(self, **settings: Any) -> None:
        words = sorted({word for text in (*SOURCES, *TARGETS) for word in text.split()} | {"do:"})
        self.words = [{token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", *some])} for some in (words, words[::-1])]
        self.current = self.words[0]
        super().__init__(pad_token="<pad>", eos_token="</s>", unk_token="<unk>", **settings)

    def _switch_to_input_mode(self) -> None:
        self.current = self.words[0]

    def _switch_to_target_mode(self) -> None:
        self.current = self.words[1]

    @property
    def vocab_size(self) -> int:
        return len(self.words[0])

    def get_vocab(self) -> dict[str, int]:
        return dict(self.words[0])

    def _tokenize(self, text: str, **settings: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.current.get(token, 2)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.words[0])[index]

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        return [*token_ids_0, 1]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()


LANGUAGES = {"source_lang": "en_XX", "target_lang": "ro_RO"}
# A tokenizer of the family, the settings that it needs, and the ids it must put around a target.
FAMILIES: dict[str, tuple[Any, dict[str, str]]] = {
    "t5": (lambda: T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *LETTERS]), {}),
    "bart": (bart, {}),
    "pegasus": (lambda: PegasusTokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *LETTERS]), {}),
    "python": (WordTokenizer, {}),
    "mbart": (lambda: MBartTokenizer(vocab=[*START, *LETTERS]), LANGUAGES),
    "mbart50": (lambda: MBart50Tokenizer(vocab=[*START, *LETTERS]), LANGUAGES),
    "nllb": (lambda: NllbTokenizer(vocab={token: n for n, (token, _) in enumerate([*START, *LETTERS])}, merges=[]), {"source_lang": "eng_Latn", "target_lang": "ron_Latn"}),
}  # fmt: skip

def splits(rows: dict[str, list[Any]]) -> DatasetDict:
    number = len(next(iter(rows.values())))
    return DatasetDict(train=Dataset.from_dict({**rows, "origin": [f"pairs.jsonl:{n + 1}" for n in range(number)]}))


@pytest.mark.parametrize("family", FAMILIES)
def test_sources_and_targets_are_encoded_and_cut_as_the_familys_own_tokenizer_does(family: str) -> None:
    """Long ones keep what the tokenizer puts at their end: a language, an end of text.

    Fails when: a target is encoded as a source; the end of a text that is cut is cut off; a language is not set.
    """
    make, languages = FAMILIES[family]
    config = Config(max_length=12, max_target_length=8, source_prefix="do: ", **languages)
    found = tk.tokenize_for_seq2seq(splits({"source": SOURCES, "target": TARGETS}), make(), config)["train"]
    reference = make()
    if languages:
        reference.src_lang, reference.tgt_lang = languages["source_lang"], languages["target_lang"]
    for row, source, target in zip(found, SOURCES, TARGETS, strict=True):
        cut = row["source_tokens"]
        assert row["input_ids"][:cut] == reference("do: " + source, truncation=True, max_length=12)["input_ids"]
        assert row["input_ids"][cut:] == reference(text_target=target, truncation=True, max_length=8)["input_ids"]
        assert row["supervised_tokens"] == len(row["input_ids"]) - cut
        assert row["target"] == target
    if languages:
        code = reference.convert_tokens_to_ids(languages["target_lang"])
        assert code in found[0]["input_ids"][found[0]["source_tokens"] :]
        assert code != reference.unk_token_id


def test_a_target_ends_where_the_tokenizer_ends_nothing(tokenizer: Any) -> None:
    """Fails when: the end of text is left to the tokenizer, which this one doesn't write."""
    found = tk.tokenize_for_seq2seq(splits({"source": SOURCES, "target": TARGETS}), tokenizer, Config())["train"]
    for row, source, target in zip(found, SOURCES, TARGETS, strict=True):
        wanted = [*tokenizer(target)["input_ids"][:15], tokenizer.eos_token_id]
        assert row["input_ids"][: row["source_tokens"]] == tokenizer(source)["input_ids"][:32]
        assert row["input_ids"][row["source_tokens"] :] == wanted


@pytest.mark.parametrize(
    "rows",
    [
        {"document": SOURCES, "summary": TARGETS},
        {"article": SOURCES, "highlights": TARGETS, "id": [1, 2, 3]},
        {"dialogue": SOURCES, "summary": TARGETS},
        {"translation": [{"en": a, "ro": b, "de": "x"} for a, b in zip(SOURCES, TARGETS, strict=True)]},
    ],
    ids=lambda rows: next(iter(rows)),
)
def test_the_usual_columns_are_read_alike(rows: dict[str, list[Any]], tokenizer: Any) -> None:
    """Fails when: source and target change places; a language's key is not found by the code before its underscore."""
    config = Config(source_lang="en_XX", target_lang="ro_RO")
    wanted = tk.tokenize_for_seq2seq(splits({"source": SOURCES, "target": TARGETS}), tokenizer, config)["train"]
    found = tk.tokenize_for_seq2seq(splits(rows), tokenizer, config)["train"]
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in wanted]
    assert [row["target"] for row in found] == TARGETS
    assert guess_task([*rows, "origin"]) == "seq2seq"


def test_what_is_too_long_is_counted_dropped_or_refused(tokenizer: Any) -> None:
    """Fails when: a row is kept whose target alone is too long; what is cut off is not counted."""
    rows = splits({"source": ["a b", "c d", "e " * 40], "target": ["x", "y " * 40, "z"]})
    lengths = [[len(tokenizer(row[name])["input_ids"]) for name in ("source", "target")] for row in rows["train"]]
    over = [max(source - 32, 0) + max(target + 1 - 16, 0) for source, target in lengths]
    report = tk.tokenize_for_seq2seq(rows, tokenizer, Config()).report.splits[0]
    assert (report.overlong, report.cut_tokens, report.examples) == (2, sum(over), 3)
    dropped = tk.tokenize_for_seq2seq(rows, tokenizer, Config(overlong="drop"))
    assert [row["origin"] for row in dropped["train"]] == ["pairs.jsonl:1"]
    assert dropped.report.splits[0].overlong == 2
    with pytest.raises(Refusal, match=r"pairs\.jsonl:2: .*source .*\d+ .*target .*\d+;"):
        tk.tokenize_for_seq2seq(rows, tokenizer, Config(overlong="refuse"))


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ({"source": ["a", " "], "target": ["b", "c"]}, {}, "pairs.jsonl:2: source is nothing but white space"),
        ({"source": ["a", "b"], "target": ["", "c"]}, {}, "pairs.jsonl:1: target is empty"),
        ({"source": ["a", "b"], "target": ["c", None]}, {}, "pairs.jsonl:2: target is missing"),
        ({"translation": [{"en": "a", "ro": "b"}, {"en": "a", "ro": ""}]}, {"source_lang": "en", "target_lang": "ro"}, "pairs.jsonl:2: translation.ro is empty"),
        ({"translation": [{"en": "a", "ro": "b"}]}, {"source_lang": "en", "target_lang": "fr"}, "pairs.jsonl:1: translation has en, ro, and not fr"),
        ({"translation": [{"en": "a", "ro": "b"}]}, {"source_lang": "en_XX", "target_lang": "en_GB"}, "pairs.jsonl:1: --source-lang and --target-lang are both translation.en"),
        ({"translation": [{"en": "a", "ro": "b"}]}, {}, "--source-lang en --target-lang de"),
        ({"question": ["a"], "answer": ["b"]}, {}, "question, answer"),
        ({"source": ["a"], "target": ["b"]}, {"packing": True}, "--packing"),
        ({"source": ["a"], "target": ["b"]}, {"overlong": "split"}, "--overlong split"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_on_are_refused(rows: dict[str, list[Any]], settings: dict[str, Any], words: str, tokenizer: Any) -> None:
    """Fails when: an empty target is encoded as its end alone; a missing language is read as no text, or one text as source and target."""
    with pytest.raises(Refusal, match=words.replace(".", r"\.")):
        tk.tokenize_for_seq2seq(splits(rows), tokenizer, Config(**settings))


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("mbart", {"source_lang": "en_XX", "target_lang": "ro_RX"}, "--target-lang ro_RX: .* Did you mean ro_RO"),
        ("nllb", {"source_lang": "en", "target_lang": "ron_Latn"}, "--source-lang en: the tokenizer"),
        ("mbart50", {"source_lang": "en_XX"}, "--target-lang: the tokenizer .* needs a language"),
    ],
)
def test_a_language_that_the_tokenizer_lacks_is_refused(family: str, settings: dict[str, Any], words: str) -> None:
    """Fails when: the code goes to the tokenizer unseen, which would make it the unknown token."""
    tokenizer = FAMILIES[family][0]()
    assert len(language_codes(tokenizer)) > 20
    with pytest.raises(Refusal, match=words):
        tk.tokenize_for_seq2seq(splits({"source": ["a"], "target": ["b"]}), tokenizer, Config(**settings))


def test_languages_that_nothing_has_are_refused_where_they_were_typed(tokenizer: Any) -> None:
    """Fails when: `_check_languages_unused` is not called, and a T5 translates without a word about what it was not told."""
    rows = splits({"source": ["a"], "target": ["b"]})
    typed = Config(source_lang="en", target_lang="de", given=("source_lang", "target_lang"))
    with pytest.raises(Refusal, match=r"--source-lang and --target-lang: .*--source-prefix"):
        tk.tokenize_for_seq2seq(rows, tokenizer, typed)
    translations = splits({"translation": [{"en": "a", "de": "b"}]})
    assert len(tk.tokenize_for_seq2seq(translations, tokenizer, typed)["train"]) == 1
