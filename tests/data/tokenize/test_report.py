"""The preflight: its counts against plain loops, its refusals by row, and what it prints."""

import inspect
import io
import json
import re
import textwrap
from dataclasses import field, make_dataclass
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict

import toolkit.data.tokenize.prepare as tokenizing
from toolkit.config import ClassificationConfig, DataConfig, Refusal
from toolkit.data import split_counts
from toolkit.data.report import DataReport, example_pieces, print_data_report, report_lines
from toolkit.data.sources.load import load_splits
from toolkit.data.split_counts import SplitCounts
from toolkit.data.tokenize.classification import classification_format
from toolkit.data.tokenize.documents import IGNORED
from toolkit.data.tokenize.tasks import prepare, tokenize_for_lm, tokenize_for_sft
from toolkit.models.tokenizer import train_tokenizer

CHAT = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "Two is 2."}]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def splits_of(rows, **more):
    splits = DatasetDict()
    for name, given in {"train": rows, **more}.items():
        splits[name] = Dataset.from_list([{"origin": f"{name}.jsonl:{i + 1}", **row} for i, row in enumerate(given)])
    return splits


def pairs(count=50):
    source = inspect.getsource(textwrap)
    starts = range(0, 90 * count, 90)
    return [{"prompt": source[at : at + at // 18 + 9], "completion": source[at : at + 90 - at // 90]} for at in starts]


def printed(preflight, stream=None):
    stream = stream or io.StringIO()
    print_data_report(preflight, stream)
    return stream.getvalue()


def test_counts_are_those_of_a_plain_loop(tokenizer):
    """Fails when lengths are taken after cutting, the first token of a document is counted as supervised, or a report has no
    `__repr__` of its own."""
    rows = [*pairs(), pairs()[3], pairs()[3]]
    lengths = sorted(len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in rows)
    held_out = [*pairs(5), {"prompt": "of its", "completion": "own"}]
    prepared = prepare("sft", splits_of(rows, validation=held_out), tokenizer, DataConfig(max_length=60))
    counts, validation = prepared.report.splits
    assert f"train {counts.examples} examples, validation {validation.examples} examples" in repr(prepared.report)
    left = prepared["train"].to_list()
    assert counts.examples == len(left)
    assert counts.tokens == sum(len(row["input_ids"]) for row in left)
    assert counts.supervised_tokens == sum(label != -100 for row in left for label in row["labels"][1:])
    assert (counts.median, counts.longest) == (lengths[(len(lengths) - 1) // 2], lengths[-1])
    assert counts.percentile_95 == lengths[int(np.ceil(0.95 * len(lengths))) - 1]
    assert counts.overlong == sum(length > 60 for length in lengths)
    assert counts.tokens + counts.cut_tokens == sum(lengths)
    assert counts.remarks["duplicates"] == 2
    assert (validation.name, validation.examples) == ("validation", 6)
    assert validation.remarks == {"also_in_train": 5}
    assert "also_in_train" not in counts.remarks


def test_tokens_that_join_prompt_and_completion_are_counted(tokenizer):
    """Fails when `supervised_tokens` doesn't compare the first token's start with the span's."""
    rows = [{"prompt": "def f(self", "completion": "): return x"}, {"prompt": "x\n    ", "completion": "    return x"}]
    rows += [{"prompt": "a sente", "completion": "nce"}, {"prompt": "a sentence ", "completion": "of words"}]
    joined = 0
    for row in rows:
        ends = {end for _, end in tokenizer(row["prompt"] + row["completion"], return_offsets_mapping=True)["offset_mapping"]}
        joined += len(row["prompt"]) not in ends
    assert 0 < joined < len(rows)
    counts = prepare("sft", splits_of(rows), tokenizer, DataConfig()).report.splits[0]
    assert counts.remarks["merged"] == joined


def test_tokenizing_prints_nothing_and_its_report_is_the_same_from_the_cache(tokenizer, capsys):
    """Fails when only the run that tokenizes counts, or tokenizing prints the report itself."""
    reports = [tokenize_for_sft(splits_of(pairs()), tokenizer, DataConfig(max_length=60)).report for _ in range(2)]
    assert reports[0] == reports[1]
    assert capsys.readouterr().out == ""
    print_data_report(reports[0])
    assert "longer than 60 tokens, truncated" in capsys.readouterr().out


def test_a_cache_of_a_version_that_counts_more_is_left_alone(tokenizer, own_cache, monkeypatch):
    """Fails when: the key of a cache does not hold what is counted."""
    rows = splits_of([{"text": "one two three"}])
    with monkeypatch.context() as newer:
        counts = make_dataclass("SplitCounts", [("rare", int, field(default=3))], bases=(SplitCounts,), frozen=True)
        for module in (split_counts, tokenizing):
            newer.setattr(module, "SplitCounts", counts)
        assert prepare("lm", rows, tokenizer, DataConfig()).report.splits[0].rare == 3
    assert prepare("lm", rows, tokenizer, DataConfig()).report.splits[0].examples == 1


def test_only_the_main_process_prints(tokenizer, capsys, monkeypatch):
    """Fails when: RANK is not looked at."""
    monkeypatch.setenv("RANK", "1")
    print_data_report(tokenize_for_lm(splits_of([{"text": "some text"}]), tokenizer, DataConfig()).report)
    assert capsys.readouterr().out == ""


def test_the_example_shows_what_is_supervised(tokenizer):
    """In brackets in a file, underlined on a terminal. Fails when a piece's mark is that of its neighbor."""
    preflight = prepare("sft", splits_of([{"messages": CHAT}]), tokenizer, DataConfig()).report
    shown = "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\n{}Two is 2.<|im_end|>{}\n"
    indented = "\n".join("  | " + line for line in shown.split("\n"))
    assert printed(preflight).endswith(indented.format("[[", "]]") + "\n")
    assert printed(preflight, Terminal()).endswith(indented.format("\x1b[4;32m", "\x1b[0m") + "\n")
    assert re.search(r"Example train\.jsonl:1, .*\[\[ .*\]\]:\n", printed(preflight))


def test_pieces_of_an_example_join_to_its_text_and_carry_its_marks(tokenizer):
    """Fails when pieces are decoded one by one by a tokenizer that drops a leading space."""
    text = "Some words of a text, and more of it."
    ids = tokenizer(text)["input_ids"]
    labels = [token if 4 <= i < 9 or i > 12 else -100 for i, token in enumerate(ids)]

    def decode(tokens):  # as sentencepiece's
        return tokenizer.decode(tokens).lstrip()

    pieces = example_pieces(ids, labels, decode)
    assert "".join(piece for piece, _ in pieces) == text
    assert [mark for _, mark in pieces] == [False, True, False, True]
    assert pieces[1][0] == tokenizer.decode(ids[:9])[len(tokenizer.decode(ids[:4])) :]


def test_an_example_fits_the_screen_and_commands_no_terminal(tokenizer):
    """Fails when the middle isn't left out, or control characters are printed as they are."""
    rows = [{"prompt": "\x1b[2J" + "long " * 2000, "completion": "words " * 2000}]
    preflight = prepare("sft", splits_of(rows), tokenizer, DataConfig(max_length=8192)).report
    text = printed(preflight)
    assert len(text) < 2500
    assert "characters ..." in text
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_rewritten_history_is_told(tokenizer):
    """Fails when `rewritten` is not counted."""
    own = train_tokenizer([inspect.getsource(textwrap)], 500)
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thinking = [CHAT[0], {"role": "assistant", "content": "<think>1 + 1</think>Two."}]
    preflight = prepare("sft", splits_of([{"messages": thinking + CHAT}, {"messages": thinking}]), own, DataConfig()).report
    assert preflight.splits[0].remarks["rewritten"] == 1
    assert "train: 1 chat has earlier turns" in printed(preflight)


def test_the_first_rows_of_a_stream_are_counted_and_all_are_checked_as_they_come(tokenizer):
    """Fails when the whole stream is read first, when nothing of it is, or when a later row goes unchecked."""
    rows = Dataset.from_list([{"text": f"text number {i}" if i != 600 else ""} for i in range(1000)])
    prepared = prepare("lm", IterableDatasetDict(train=rows.to_iterable_dataset()), tokenizer, DataConfig())
    assert prepared.report.splits[0].examples == prepared.report.first_rows == 256
    assert "the first 256 rows of a stream" in printed(prepared.report)
    assert tokenizer.decode(next(iter(prepared["train"]))["input_ids"]) == "text number 0<|endoftext|>"
    with pytest.raises(Refusal, match=r"row 600 .*train.*: text"):
        list(prepared["train"])


GOOD_PAIR = {"prompt": "What is two?\n", "completion": "Two."}
REFUSED = {
    "no columns": ("sft", [{"a": "x"}], {}, r"train .*columns a\. .*prompt and completion; .*messages"),
    "other names": (
        "sft", [{"question": "a", "input": "", "output": "b"}], {},
        r"--rename-columns question=prompt,output=completion",
    ),
    "misspelled": ("sft", [{"promt": "a", "completion": "b"}], {}, r"Did you mean: --rename-columns promt=prompt"),
    "preferences": ("sft", [{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, r"--rename-columns chosen=completion"),
    "other text": ("lm", [{"content": "a"}], {}, r"--rename-columns content=text"),
    "two layouts": ("sft", [{**GOOD_PAIR, "messages": CHAT}], {}, r"messages .*prompt and completion.*messages=unused"),
    "empty object": ("lm", [{"text": {}}], {}, r"train.jsonl:1: text .*empty object"),
    "a large object": (
        "lm", [{"text": {"k" * 3000 + str(i): 1 for i in range(30)}}], {}, r"jsonl:1: text .*object with (k{40}\.\.\., ){3}27 more",
    ),
    "empty text": ("lm", [{"text": "a"}, {"text": ""}], {}, r"train.jsonl:2: text is empty"),
    "white space": ("lm", [{"text": "a"}, {"text": " \n"}], {}, r"train.jsonl:2: text .*white space"),
    "null text": ("lm", [{"text": "a"}, {"text": None}], {}, r"train.jsonl:2: text .*null"),
    "number": ("lm", [{"text": 7}], {}, r"train.jsonl:1: text .*number 7"),
    "list": ("lm", [{"text": ["a", "b"]}], {}, r"train.jsonl:1: text .*list of 2"),
    "empty prompt": ("sft", [GOOD_PAIR, {"prompt": "", "completion": "x"}], {}, r"train.jsonl:2: prompt is empty"),
    "empty completion": ("sft", [GOOD_PAIR, {"prompt": "x", "completion": ""}], {}, r"train.jsonl:2: completion is empty"),
    "no assistant": ("sft", [{"messages": CHAT[:1]}], {}, r"train.jsonl:1: .*no assistant turn \(.*user\)"),
    "empty assistant": (
        "sft", [{"messages": [CHAT[0], {**CHAT[1], "content": " "}]}], {},
        r"1: message 2 of messages .*assistant",
    ),
    "empty chat": ("sft", [{"messages": CHAT}, {"messages": []}], {}, r"train.jsonl:2: messages is an empty list"),
    "chat as text": ("sft", [{"messages": "hello"}], {}, r"train.jsonl:1: messages .*'hello', .*list"),
    "role": ("sft", [{"messages": [{**CHAT[0], "role": "usr"}, CHAT[1]]}], {}, r"has the role 'usr'.*Did you mean 'user'"),
    "sharegpt role": (
        "sft", [{"messages": [{**CHAT[0], "role": "human"}, CHAT[1]]}], {},
        r"'human', .*'user'",
    ),
    "no role": ("sft", [{"messages": [{"text": "x"}]}], {}, r"message 1 of messages has no role"),
    "content": ("sft", [{"messages": [{"role": "user", "content": 1}]}], {}, r"1 of messages: content .*number 1"),
    "tools": ("sft", [{"messages": CHAT, "tools": "[{]"}], {}, r"train.jsonl:1: tools: not valid JSON"),
    "unsupervised": ("sft", [{"input_ids": [5, 6], "labels": [-100, -100]}], {}, r"train.jsonl:1: no token is supervised"),
    "first token alone": ("sft", [{"input_ids": [5, 6], "labels": [5, -100]}], {}, r"train.jsonl:1: no token is supervised"),
    "one token": ("lm", [{"input_ids": [5]}], {}, r"train.jsonl:1: a single token"),
    "no tokens": ("lm", [{"input_ids": [5, 6]}, {"input_ids": []}], {}, r"train.jsonl:2: no tokens at all"),
    "id too large": (
        "lm", [{"input_ids": [5, 6]}, {"input_ids": [5, 900, 7]}], {},
        r"jsonl:2: token id 900 .*vocabulary of 500.*--tokenizer",
    ),
    "negative id": ("lm", [{"input_ids": [5, -1]}], {}, r"train.jsonl:1: token id -1"),
    "label": ("sft", [{"input_ids": [5, 6], "labels": [-100, 900]}], {}, r"train.jsonl:1: label 900 is out of range"),
    "label length": ("sft", [{"input_ids": [5, 6], "labels": [5]}], {}, r"train.jsonl:1: labels has 1 entries for 2"),
    "mask with a hole": (
        "lm", [{"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}], {},
        r"train.jsonl:1: attention_mask has zeros",
    ),
    "text as ids": (
        "lm", [{"input_ids": ["a"]}], {},
        r"train.jsonl:1: input_ids .*list of 1, .*integers",
    ),
    "end masked": (
        "sft", [{"input_ids": [5, 6, 0], "labels": [-100, 6, -100]}], {},
        r"No end .*train.jsonl:1",
    ),
    "ends cut off": ("sft", [GOOD_PAIR], {"max_length": 11}, r"cut off by --max-length 11"),
    "too long": (
        "lm", [{"text": "a"}, {"text": "a b " * 99}], {"max_length": 20, "overlong": "refuse"},
        r"jsonl:2: \d+ tokens, more than",
    ),
    "all dropped": (
        "lm", [{"text": "a b " * 99}], {"max_length": 20, "overlong": "drop"},
        r"Nothing is left .*train .*longest",
    ),
    "prompts too long": (
        "sft", [{"prompt": "a b " * 99, "completion": "x"}], {"max_length": 20},
        r"Nothing is left.*1 have no supervised",
    ),
    "idle completion setting": (
        "sft", [{"text": "a"}], {"completion_only_loss": True},
        r"--completion-only-loss has no effect",
    ),
    "idle assistant setting": ("sft", [GOOD_PAIR], {"assistant_only_loss": True}, r"--assistant-only-loss has no effect"),
    "idle setting": ("lm", [{"text": "a"}], {"assistant_only_loss": True}, r"language modeling supervises every token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_training_must_not_start_with_are_refused_by_row(tokenizer, tmp_path, case):
    """Fails when: the check of its case is taken out. Nothing stays behind in the cache."""
    task, rows, settings, message = REFUSED[case]
    with pytest.raises(Refusal, match=message) as refusal:
        prepare(task, splits_of(rows), tokenizer, DataConfig(**settings))
    assert len(str(refusal.value)) < 600
    assert not [entry for entry in tmp_path.glob("cache/tokenized-*") if entry.suffix != ".lock"]


def test_rows_without_an_origin_are_named_by_number_and_split(tokenizer):
    """Fails when the number restarts with each batch."""
    rows = [{"text": "a"}] * 700 + [{"text": ""}]
    splits = DatasetDict(train=Dataset.from_list([{"text": "a"}]), validation=Dataset.from_list(rows))
    with pytest.raises(Refusal, match=r"row 700 .*validation.*: text"):
        prepare("lm", splits, tokenizer, DataConfig())


def test_a_doubled_bos_is_refused_by_row():
    """Fails when: the second token is not compared."""
    own = train_tokenizer([inspect.getsource(textwrap)], 500)
    own.add_special_tokens({"bos_token": "<s>"})
    own.chat_template = "{{ bos_token }}" + own.chat_template
    with pytest.raises(Refusal, match=r"train.jsonl:2: .*BOS \(token 500\) twice"):
        prepare("lm", splits_of([{"text": "<s>a<s>"}, {"text": "<s><s>b"}]), own, DataConfig())
    own.chat_template = "{{ bos_token }}" + own.chat_template
    with pytest.raises(Refusal, match=r"train.jsonl:1: .*BOS .*--chat-template"):
        prepare("sft", splits_of([{"messages": CHAT}]), own, DataConfig())


def test_a_template_that_marks_the_whole_chat_is_refused():
    """All tokens supervised: the mask has no effect. Fails when only empty masks are looked for."""
    own = train_tokenizer([inspect.getsource(textwrap)], 500)
    own.chat_template = "{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}"
    with pytest.raises(Refusal, match=r"train.jsonl:1: .*--no-assistant-only-loss"):
        prepare("sft", splits_of([{"messages": CHAT}]), own, DataConfig())


def test_a_prompt_that_is_joined_with_its_answer_in_one_token_is_a_prompt():
    """Prompt and completion of a letter each. Fails when: supervised tokens are counted, in place of characters."""
    own = train_tokenizer(["ab cd ef gh"] * 99, 300)
    rows = [{"prompt": a, "completion": b} for a, b in ("ab", "cd", "ef", "gh")]
    prepared = prepare("sft", splits_of(rows), own, DataConfig())
    labels = [row["labels"] for row in prepared["train"]]
    assert all(IGNORED not in row for row in labels), "each row is one token of both letters, and the end"
    assert "train: 4 have a token that joins" in printed(prepared.report)
    assert prepared.report.splits[0].supervised_tokens == 4, "the ends: nothing comes before the first tokens"


@pytest.mark.parametrize(("count", "said"), [(1, "1 row is too few"), (2, "2 rows are too few")])
def test_a_count_of_one_is_told_in_the_singular(tokenizer, count, said):
    """Fails when: `_counted` takes the plural always."""
    train = [{"prompt": f"{number} b", "completion": "c"} for number in range(30)]
    shown = printed(prepare("sft", splits_of(train, validation=train[:count]), tokenizer, DataConfig()).report)
    assert f"validation: {said}" in shown
    assert f"validation: {'1 is' if count == 1 else '2 are'} in train too" in shown


@pytest.mark.parametrize(("streaming", "said"), [(False, ["40 of 40 rows of {a}", "3 rows of {b} 13.3 times"]), (True, ["0.5 of {a}", "0.5 of {b}"])])
def test_how_often_each_source_of_a_mixture_is_read_is_told(tokenizer, tmp_path, own_cache, streaming, said):
    """Fails when: plan_splits in tasks.py leaves out what a mixture drew, or looks for one of rows or of streams alone."""
    names = {"a": str(tmp_path / "a.jsonl"), "b": str(tmp_path / "b.jsonl")}
    for (letter, name), count in zip(names.items(), (40, 3), strict=True):
        Path(name).write_text("".join(json.dumps({"text": f"{letter} {number}"}) + "\n" for number in range(count)))
    config = DataConfig(dataset=f"{names['a']}:1,{names['b']}:1", eval_fraction=0.0, streaming=streaming)
    (note,) = (note for note in tokenize_for_lm(load_splits(config), tokenizer, config).report.notes if "mixture" in note)
    assert [each.format(**names) in note for each in said] == [True] * len(said), note


def test_a_refused_row_says_how_to_see_all_of_them(tokenizer):
    """Fails when: someone with a hundred such rows finds them one start at a time."""
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}]
    with pytest.raises(Refusal, match=r"train.jsonl:2: .*toolkit inspect"):
        prepare("sft", splits_of(rows), tokenizer, DataConfig())


def test_a_few_long_documents_are_many_rows(tokenizer):
    """19 documents of 40 tokens, cut into rows of 16 or truncated to one. Fails when: documents are counted alone, or tokens that are cut off."""
    rows = [{"text": " ".join(f"word{number}{place}" for place in range(20))} for number in range(19)]
    wrapped = DataConfig(max_length=16, packing=True, packing_strategy="wrapped")
    assert "too few" not in printed(prepare("lm", splits_of(rows, validation=rows), tokenizer, wrapped).report)
    assert "19 rows are too few" in printed(prepare("lm", splits_of(rows, validation=rows), tokenizer, DataConfig(max_length=16)).report)


def test_what_may_surprise_is_noted(tokenizer):
    """Fails when a note is dropped."""
    own = train_tokenizer([inspect.getsource(textwrap)], 500)
    own.model_max_length = 32
    notes = prepare("sft", splits_of([{**GOOD_PAIR, "id": 3, "source": "x"}]), own, DataConfig(max_length=64)).report.notes
    assert "columns not read: id, source" in notes
    assert any(re.search(r"--max-length 64 .*\b32\b", note) for note in notes)


@pytest.mark.parametrize(("held_out", "lacking"), [("aab", ["c", "d"]), ("abcd", [])])
def test_classes_that_the_evaluation_rows_lack_are_named(tokenizer, held_out, lacking):
    """Fails when: nobody compares the splits, or what train has is not what counts."""
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate("aabbccdd")]
    validation = [{"text": f"other {number}", "label": label} for number, label in enumerate(held_out)]
    config = make_dataclass("Config", [], bases=(DataConfig, ClassificationConfig), frozen=True)()
    form = classification_format(config, ["a", "b", "c", "d", "nowhere"])
    shown = printed(prepare(form, splits_of(rows, validation=validation), tokenizer, config).report)
    named = [line.rpartition(": ")[2] for line in shown.splitlines() if "lacks" in line]
    assert named == [", ".join(lacking)] * bool(lacking)


def test_an_empty_training_split_is_refused(tokenizer):
    """Fails when it is left out like an empty evaluation split."""
    splits = splits_of([GOOD_PAIR], validation=[GOOD_PAIR])
    splits["train"] = splits["train"].select([])
    with pytest.raises(Refusal, match="train split has no rows"):
        prepare("sft", splits, tokenizer, DataConfig())


def test_a_class_with_white_space_around_it_or_a_line_break_in_it_is_shown_as_such():
    """Fails when: a name is shown as it is, or the space that a CSV has behind its comma is a class's without a remark."""
    counts = {" 0": 30, "1": 30, "a\nb": 4}
    split = SplitCounts("train", 64, 200, None, 3, 3, 3, 0, 0, 0, counts)
    lines = report_lines(DataReport("text, labeled", 128, "truncate", [split], []), ("", ""))
    classes, remark = (line for line in lines if "class" in line)
    assert classes.endswith("classes: ' 0' 46.9%, 1 46.9%, 'a\\nb' 6.2%")
    assert "WARNING" in remark
    assert remark.endswith(": ' 0'")
