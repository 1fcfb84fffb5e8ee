"""Tagged words against transformers' own `is_split_into_words`, schemes of tags against plain loops, and what is refused."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, RobertaTokenizer

from toolkit.baselines.classes import tag_baselines
from toolkit.config import DataConfig, Refusal, TokenClassificationConfig
from toolkit.data.sources.load import load_splits
from toolkit.data.tokenize.documents import IGNORED
from toolkit.data.tokenize.spans import tag_words
from toolkit.data.tokenize.tags import continuations, find_tags, parts_of_tags, scheme_of
from toolkit.data.tokenize.tasks import tokenize_for_token_classification
from toolkit.models.fitted_tokenizer import space_before_words
from toolkit.models.tokenizer import train_tokenizer

TEXTS = ["Anna lives in New York , not in Zürich .", "don't unbelievable internationalization 3.14 (x_1)", "the cat sat"] * 20
SENTENCES = [
    (["Anna", "lives", "in", "New", "York"], ["B-PER", "O", "O", "B-LOC", "I-LOC"]),
    (["Zürich", "don't", "internationalization", "\u200b", "(", "[SEP]", "中文", "🙂"], ["B-LOC", "O", "O", "O", "O", "O", "B-PER", "I-PER"]),
    (["unbelievable"] * 9, ["B-PER", "I-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-LOC", "O", "O"]),
    (["x"], ["O"]),
]  # fmt: skip
NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]


@dataclass(frozen=True)
class Config(DataConfig, TokenClassificationConfig):
    max_length: int = 200


def wordpiece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[PAD]"]))
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


def metaspace() -> PreTrainedTokenizerFast:
    """The shape of XLM-R's: pieces begin with a mark for the space."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend.train_from_iterator(TEXTS, trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def roberta() -> RobertaTokenizer:
    trained = json.loads(train_tokenizer(TEXTS, 330).backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in trained["merges"]]
    added = {token: len(trained["vocab"]) + i for i, token in enumerate(["<s>", "</s>", "<unk>", "<pad>", "<mask>"])}
    return RobertaTokenizer(vocab={**trained["vocab"], **added}, merges=merges)


TOKENIZERS = {
    "wordpiece": wordpiece, "metaspace": metaspace, "byte-level": lambda: space_before_words(train_tokenizer(TEXTS, 330, encoder=True)),
    "roberta": lambda: space_before_words(roberta()), "byte-level decoder": lambda: space_before_words(train_tokenizer(TEXTS, 330)),
}  # fmt: skip


def rows(sentences: list[tuple[list[str], list[str]]] = SENTENCES) -> Dataset:
    return Dataset.from_list([{"tokens": words, "tags": tags, "origin": f"a.conll:{i}"} for i, (words, tags) in enumerate(sentences, 1)])


@pytest.mark.parametrize("label_all", [False, True])
@pytest.mark.parametrize("max_length", [200, 9])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_are_those_of_words_one_by_one_and_labels_are_at_their_first_or_all_sub_words(kind: str, max_length: int, label_all: bool) -> None:
    """The reference is the tokenizer's own `is_split_into_words` with a loop over `word_ids`, truncated by it too; what is cut off
    is counted. Fails when: words are joined before they are tokenized, the prefix shifts no label, a later sub-word takes the B-, or
    what is after the words is cut off."""
    tokenizer, data = TOKENIZERS[kind](), rows()
    config = Config(max_length=max_length, label_all_tokens=label_all)
    found = tokenize_for_token_classification({"train": data}, tokenizer, config)
    assert find_tags({"train": data}, config).names == NAMES
    lost, untokenized = 0, 0
    for (words, tags), row in zip(SENTENCES, found["train"], strict=True):
        whole = tokenizer(words, is_split_into_words=True)
        cut = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
        first, every, before = [], [], None
        for word in cut.word_ids():
            tag = IGNORED if word is None else NAMES.index(tags[word])
            first.append(IGNORED if word == before else tag)
            later = NAMES.index(tags[word].replace("B-", "I-")) if word is not None else IGNORED
            every.append(later if word == before and word is not None else tag)
            before = word
        assert row["input_ids"] == cut["input_ids"]
        assert row["labels"] == (every if label_all else first)
        assert row["length"] == len(cut["input_ids"])
        assert row["supervised_tokens"] == sum(label != IGNORED for label in row["labels"])
        if label_all:
            assert row["word_labels"] == first
        seen, there = ({word for word in each.word_ids() if word is not None} for each in (cut, whole))
        lost += len(there - seen)
        untokenized += len(words) - len(there)
    counted = found.report.splits[0].remarks
    assert counted == {name: n for name, n in (("cut_words", lost), ("untokenized_words", untokenized)) if n}
    assert (lost > 0) == (max_length == 9)


@pytest.mark.parametrize("kind", ["byte-level", "roberta"])
def test_a_word_of_a_byte_level_tokenizer_has_its_tokens_inside_a_text_and_keeps_them_when_saved(kind: str, tmp_path: Path) -> None:
    """Fails when: `add_prefix_space` is left off, or is set on the tokenizer in memory alone."""
    plain = train_tokenizer(TEXTS, 330, encoder=True) if kind == "byte-level" else roberta()
    spaced = space_before_words(plain)
    words = ["the", "cat", "lives", "in", "York"]
    inside = plain(" " + " ".join(words), add_special_tokens=False).input_ids
    assert spaced(words, is_split_into_words=True, add_special_tokens=False).input_ids == inside
    assert plain("cat", add_special_tokens=False).input_ids != spaced("cat", add_special_tokens=False).input_ids
    spaced.save_pretrained(tmp_path)
    again = type(spaced).from_pretrained(tmp_path)
    assert again(words, is_split_into_words=True).input_ids == spaced(words, is_split_into_words=True).input_ids
    assert space_before_words(spaced) is spaced
    other = wordpiece()
    assert space_before_words(other) is other


def broken_by_a_loop(tags: list[str], scheme: str) -> list[bool]:
    """Whether each tag breaks its scheme, by reading it from left to right."""
    wrong = []
    for i, tag in enumerate(tags):
        before, after = (tags[i - 1] if i else "O"), (tags[i + 1] if i + 1 < len(tags) else "O")
        follows = before[0] in "BI" and before[2:] == tag[2:]
        if scheme == "iob2":
            wrong.append(tag[0] == "I" and not follows)
        elif scheme == "iob1":
            wrong.append(tag[0] == "B" and not follows)
        else:
            dangles = tag[0] in "BI" and i + 1 == len(tags)
            cuts_off = before[0] in "BI" and not (tag[0] in "IE" and follows)
            wrong.append((tag[0] in "IE" and not follows) or cuts_off or dangles)
            assert after
    return wrong


@pytest.mark.parametrize(("scheme", "prefixes"), [("iob1", "BI"), ("iob2", "BI"), ("iobes", "BIES")])
def test_tags_that_break_their_scheme_are_found(scheme: str, prefixes: str) -> None:
    """Fails when: a tag is compared with the last one of the sentence before, or types are not compared."""
    names, numbers = ["O", *(f"{prefix}-{kind}" for kind in "XY" for prefix in prefixes)], random.Random(0)
    sentences = [[numbers.choice(names) for _ in range(numbers.randrange(1, 9))] for _ in range(300)]
    import numpy as np

    parts = parts_of_tags(names)
    assert parts is not None
    found = parts.breaches([np.array([names.index(tag) for tag in sentence]) for sentence in sentences], scheme)
    assert found.tolist() == [each for sentence in sentences for each in broken_by_a_loop(sentence, scheme)]


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        ([["B-X", "I-X"], ["O", "B-Y"]], "iob2"), ([["I-X", "I-X", "O"], ["I-X", "B-X", "I-Y"]], "iob1"), ([["I-X", "B-Y"]], "iob2"),
        ([["B-X", "E-X", "S-Y"]], "iobes"), ([["U-X", "B-X", "L-X"]], "iobes"), ([["NOUN", "VERB"]], "plain"), ([["B", "I", "O"]], "iob2"),
    ],
)  # fmt: skip
def test_the_scheme_is_found_in_the_tags(sentences: list[list[str]], scheme: str) -> None:
    """Fails when: iob1 is never looked for."""
    import numpy as np

    names = sorted({tag for sentence in sentences for tag in sentence})
    assert scheme_of(names, [[np.array([names.index(tag) for tag in sentence]) for sentence in sentences]]) == scheme


def test_a_later_sub_word_of_an_entity_s_first_word_is_inside() -> None:
    """Fails when: an I- that does not exist is taken."""
    assert continuations(["O", "B-X", "I-X", "B-Y", "S-X"]).tolist() == [0, 2, 2, 3, 4]
    assert continuations(["B_X", "NOUN"]).tolist() == [0, 1]


def test_spans_over_a_text_become_tags_of_its_words() -> None:
    """Fails when: `start <` is `start <=`, or the tags of two neighboring spans are one entity."""
    text = "Anna Maria met Bob-Smith in New York."
    spans = [(0, 10, "PER"), (15, 18, "PER"), (19, 24, "PER"), (28, 37, "LOC")]
    words, tags, cut = tag_words(text, spans, "row 1")
    assert words == ["Anna", "Maria", "met", "Bob", "-", "Smith", "in", "New", "York", "."]
    assert tags == ["B-PER", "I-PER", "O", "B-PER", "O", "B-PER", "O", "B-LOC", "I-LOC", "I-LOC"]
    assert cut == 0
    assert tag_words(text, [(1, 7, "X")], "row 1")[1:] == (["B-X", "I-X", *["O"] * 8], 1)


def test_spans_of_a_file_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the spans' column is not among those that are read."""
    monkeypatch.chdir(tmp_path)
    made = [{"text": "Anna is in York", "spans": [{"start": 0, "end": 4, "label": "PER"}, {"start": 11, "end": 15, "label": "LOC"}]}, {"text": "nobody", "spans": []}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    splits = load_splits(DataConfig(dataset="rows.jsonl", eval_fraction=0.0))
    found = tokenize_for_token_classification(splits, wordpiece(), Config())["train"]
    assert [NAMES[label] for label in found[0]["labels"] if label != IGNORED] == ["B-PER", "O", "O", "B-LOC"]
    assert found[1]["supervised_tokens"] == 1


def test_a_conll_file_is_a_row_a_sentence_with_the_first_and_the_last_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: -DOCSTART- is a word, the last sentence without a blank line is lost, or a tab's field is cut at its spaces."""
    monkeypatch.chdir(tmp_path)
    Path("a.conll").write_text("-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\r\nrejects VBZ I-VP O\n\n\n# id 7\nNew\u00a0York NNP I-NP B-LOC")
    splits = load_splits(DataConfig(dataset="a.conll", eval_fraction=0.0))["train"]
    assert splits["tokens"][:] == [["EU", "rejects"], ["New\u00a0York"]]
    assert splits["tags"][:] == [["B-ORG", "O"], ["B-LOC"]]
    assert splits["column_3"][:] == [["I-NP", "I-VP"], ["I-NP"]]
    assert splits["origin"][:] == [f"{tmp_path.name}/a.conll:3", f"{tmp_path.name}/a.conll:8"]
    Path("b.bio").write_text("New York\tB-LOC\n#\tO\n\nx\tO\n")
    assert load_splits(DataConfig(dataset="b.bio", eval_fraction=0.0))["train"]["tokens"][:] == [["New York", "#"], ["x"]]
    swapped = load_splits(DataConfig(dataset="a.conll", eval_fraction=0.0, rename_columns=["column_2=tags", "tags=column_2"]))["train"]
    assert swapped["tags"][:] == [["NNP", "VBZ"], ["NNP"]]


def test_declared_classes_keep_their_order_and_a_split_without_names_is_read_by_them() -> None:
    """Fails when: the numbers of a ClassLabel are taken for names."""
    features = Features({"words": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "I-X", "B-X"]))})
    data = Dataset.from_dict({"words": [["a", "b"]], "ner_tags": [[2, 1]]}, features=features)
    tags = find_tags({"train": data}, Config())
    assert (tags.names, tags.scheme) == (["O", "I-X", "B-X"], "iob2")
    assert tags.settings["label2id"] == {"O": 0, "I-X": 1, "B-X": 2}
    found = tokenize_for_token_classification({"train": data}, wordpiece(), Config())["train"]
    assert [label for label in found[0]["labels"] if label != IGNORED] == [2, 1]


def test_the_dictionary_says_the_most_frequent_tag_of_a_word() -> None:
    """By a plain loop. Fails when: the tags are counted on the validation split."""
    numbers = random.Random(1)
    made = [([numbers.choice("abcdefgh") for _ in range(7)], [numbers.choice(["O", "B-LOC", "B-PER"]) for _ in range(7)]) for _ in range(30)]
    train, held_out = made[:20], [*made[20:], (["new"], ["O"])]
    splits = DatasetDict(train=rows(train), validation=rows(held_out))
    tags = find_tags(splits, Config())
    pairs = [pair for words, of_words in train for pair in zip(words, of_words, strict=True)]
    usual = {word: Counter(tag for other, tag in pairs if other == word).most_common(1)[0][0] for word in "abcdefgh"}
    most = Counter(tag for _, tag in pairs).most_common(1)[0][0]
    asked = [pair for words, of_words in held_out for pair in zip(words, of_words, strict=True)]
    found = tag_baselines(splits, tags)
    assert found["dictionary"] == sum(usual.get(word, most) == tag for word, tag in asked) / len(asked)
    assert found["most frequent tag"] == sum(most == tag for _, tag in asked) / len(asked)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tokens": ["a", "b"], "tags": ["O"]}, {}, r"x.jsonl:2: 2 words and 1 tags"),
    ({"tokens": [], "tags": []}, {}, r"x.jsonl:2: tokens is an empty list"),
    ({"tokens": ["a", " "], "tags": ["O", "O"]}, {}, r"x.jsonl:2: word 2 of tokens .*white space"),
    ({"tokens": ["a", None], "tags": ["O", "O"]}, {}, r"x.jsonl:2: word 2 of tokens is missing"),
    ({"tokens": ["a"], "tags": [None]}, {}, r"x.jsonl:2: tags .*missing"),
    ({"tokens": ["a", "b"], "tags": ["O", "I-LOC"]}, {"tag_scheme": "iob2"}, r"x.jsonl:2: word 2, 'b', .*'I-LOC' after O"),
    ({"tokens": ["a", "b"], "tags": ["O", "I-LOC"]}, {"strict_entities": True}, r"breaks IOB2"),
    ({"tokens": ["a"], "tags": ["O"]}, {"tag_scheme": "iobes"}, r"--tag-scheme iobes: .*IOB2"),
    ({"tokens": ["a"], "tags": ["O"]}, {"overlong": "split"}, r"--overlong split"),
    ({"text": "abc", "spans": [{"start": 1, "end": 4, "label": "X"}]}, {}, r"x.jsonl:2: span 1 of spans, 1 to 4, .*text of 3"),
    ({"text": "a b c", "spans": [{"start": 0, "end": 3, "label": "X"}, {"start": 2, "end": 5, "label": "Y"}]}, {}, r"x.jsonl:2: the spans .* overlap"),
    ({"text": "abcd", "spans": [{"start": 0, "end": 2, "label": "X"}, {"start": 2, "end": 4, "label": "Y"}]}, {}, r"x.jsonl:2: .*'abcd' .*two spans"),
    ({"text": "a  b", "spans": [{"start": 1, "end": 3, "label": "X"}]}, {}, r"x.jsonl:2: .*span 1 to 3 \(X\) .*no word"),
    ({"text": "a b", "spans": None}, {}, r"x.jsonl:2: spans is missing"),
    ({"text": "", "spans": []}, {}, r"x.jsonl:2: text is empty"),
    ({"text": "a b", "spans": [{"start": 0.5, "end": 1, "label": "X"}]}, {}, r"x.jsonl:2: span 1 of spans: .*start .*0\.5"),
    ({"text": "a b", "spans": [{"start": 0, "end": 1, "label": None}]}, {}, r"x.jsonl:2: span 1 of spans: .*label .*missing"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_cannot_be_trained_on_is_refused_by_file_and_row(number: int) -> None:
    """Fails when: the check is taken out."""
    bad, settings, said = BAD[number]
    good = {"tokens": ["York", "is"], "tags": ["B-LOC", "O"]} if "tokens" in bad else {"text": "York", "spans": [{"start": 0, "end": 4, "label": "X"}]}
    more = {"tokens": ["New", "York"], "tags": ["B-LOC", "I-LOC"]} if "tokens" in bad else good
    data = Dataset.from_list([{**row, "origin": f"x.jsonl:{i}"} for i, row in enumerate([good, bad, more], 1)])
    with pytest.raises(Refusal, match=said):
        tokenize_for_token_classification({"train": data}, wordpiece(), Config(**settings))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"tokens": [], "tags": []}] * 3, r"no tags: tags .*empty list"),
        ([{"text": "Ada", "spans": []}] * 3, r"no tags: spans .*empty list"),
        ([{"text": "Ada", "spans": {"start": 0, "end": 3, "label": "X"}}] * 3, r"x.jsonl:1: spans .*object .*start, end, label"),
        ([{"text": "Ada", "spans": [{"start": 0, "end": 3, "label": ["X"]}]}] * 3, r"x.jsonl:1: span 1 of spans: .*label .*list"),
        ([{"tokens": ["a"], "tags": [["X"]]}] * 3, r"x.jsonl:1: tags .*list of 1"),
        ([{"tokens": ["a", "b"], "tags": [1, 2]}, {"tokens": ["a"], "tags": [0.5]}], r"x.jsonl:2: tags .*number 0\.5"),
        ([{"tokens": ["a", "b"], "tags": ["O", "B-X"]}, {"tokens": ["a"], "tags": ["O", 3]}], r"x.jsonl:2: 'tags' .*a number, a string"),
    ],
)  # fmt: skip
def test_columns_that_hold_no_tags_at_all_are_refused(rows: list[dict[str, Any]], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: `if not found` is taken out of `_names_in`, or `as_whole` returns its value as it is: then row 1 has the blame."""
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(dataset="x.jsonl", eval_fraction=0.0)
    with pytest.raises(Refusal, match=said):
        find_tags(load_splits(config), config)


def test_a_tag_that_training_does_not_have_is_refused_in_the_validation_split() -> None:
    """Fails when: the tags of all splits are put together."""
    with pytest.raises(Refusal, match=r"a\.conll:1: word 1, 'x': .*'B-NEW'"):
        tokenize_for_token_classification(DatasetDict(train=rows(), validation=rows([(["x"], ["B-NEW"])])), wordpiece(), Config())


@pytest.mark.parametrize(
    ("content", "said"),
    [("a O\nb\n", r"a.conll:2: 1 column, .*2"), ("a\nb\n", r"a.conll:1: 1 column"), ("a\tO\nb c\n", r"a.conll:2: 1 column")],
)
def test_a_line_of_another_number_of_columns_is_refused(content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the widths are not compared."""
    monkeypatch.chdir(tmp_path)
    Path("a.conll").write_text(content)
    with pytest.raises(Refusal, match=said):
        load_splits(DataConfig(dataset="a.conll", eval_fraction=0.0))


def slipped(tag: str) -> dict[str, Dataset]:
    rows = {"tokens": [["Ada", "came"], ["Bob", "sat"]], "tags": [["B-PER", "O"], [tag, "O"]], "origin": ["n.conll:1", "n.conll:4"]}
    return {"train": Dataset.from_dict(rows)}


@pytest.mark.parametrize("tag", ["B_PER", "Q-", "PER"])
def test_a_tag_without_a_prefix_among_others_with_one_is_refused_with_its_row(tag: str) -> None:
    """One slip would make the metrics those of single words. Fails when: `tags_of_no_scheme` finds none."""
    with pytest.raises(Refusal, match=rf"n\.conll:4: tags has the tag '{tag}'"):
        find_tags(slipped(tag), Config())
    assert find_tags(slipped(tag), Config(tag_scheme="plain")).scheme == "plain"


def test_a_span_that_is_none_is_refused_with_its_row(tmp_path: Path) -> None:
    """Fails when: labels are read of spans that are null, which was an AttributeError."""
    rows = [{"text": "Ada came", "spans": [{"start": 0, "end": 3, "label": "PER"}]}, {"text": "Bob sat", "spans": [None]}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(dataset=str(tmp_path / "s.jsonl"), eval_fraction=0.0)
    with pytest.raises(Refusal, match=r"s\.jsonl:2: span 1 of spans"):
        find_tags(load_splits(config), config)
