"""Tokenized documents against plain loops, transformers' own tokenizing and TRL's preparation of the same rows."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDatasetDict, List, Value
from tokenizers import processors

import toolkit.data.tokenize.prepare as tokenizing
from toolkit.config import ClassificationConfig, DataConfig, Refusal, SampleConfig
from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.data.tokenize.documents import Documents, cut_documents
from toolkit.data.tokenize.labels import label_names
from toolkit.data.tokenize.tasks import prepare, tokenize_for_classification, tokenize_for_lm, tokenize_for_sft
from toolkit.generation.samples import sample_prompts
from toolkit.models.tokenizer import CHATML, train_tokenizer

END = "<|endoftext|>"
CHATML_BARE = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


@dataclass(frozen=True)
class ClassifyConfig(DataConfig, ClassificationConfig):
    pass


def with_bos(tokenizer):
    """One that puts BOS first, as Llama's does."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def texts(count=40, longest=400):
    source = inspect.getsource(textwrap)
    random_numbers = np.random.default_rng(0)
    cuts = random_numbers.integers(0, len(source) - longest, size=count)
    lengths = random_numbers.integers(5, longest, size=count)
    return [source[cut : cut + lengths[i]].strip() + " é🙂"[: i % 4] for i, cut in enumerate(cuts)]


def pairs(count=40):
    ends = ["\n\n", " ", "", "\n    ", ":"]
    return [{"prompt": text + ends[i % 5], "completion": text[::-1].strip()} for i, text in enumerate(texts(count))]


def chats(count=20):
    parts = texts(4 * count, 60)
    turns = [(parts[4 * i : 4 * i + 2 + 2 * (i % 2)]) for i in range(count)]
    roles = ("user", "assistant", "user", "assistant")
    return [{"messages": [{"role": role, "content": text} for role, text in zip(roles, turn, strict=False)]} for turn in turns]


def splits_of(rows, **more):
    return DatasetDict(train=Dataset.from_list(rows), **{name: Dataset.from_list(other) for name, other in more.items()})


def test_documents_of_text_are_its_tokens_and_one_end(tokenizer):
    """Fails when `add_end` appends without looking, or `tokenize` reorders rows."""
    rows = [{"text": text} for text in [*texts(), "it ends itself" + END]]
    documents = tokenize_for_lm(splits_of(rows), tokenizer, DataConfig())["train"]
    expected = [tokenizer(row["text"].removesuffix(END))["input_ids"] + [tokenizer.eos_token_id] for row in rows]
    assert documents["input_ids"][:] == expected
    assert documents["length"][:] == [len(ids) for ids in expected]
    assert documents["supervised_tokens"][:] == [len(ids) - 1 for ids in expected]
    assert "labels" not in documents.column_names


def test_a_bos_stands_first_once_and_only_if_the_tokenizer_puts_it_there(tokenizer):
    """Fails when `add_start` adds what the text begins with already, or never adds it."""
    rows = [{"text": "a text"}, {"text": "<s>a text"}]
    plain = tokenizer("a text")["input_ids"]
    for layout in (tokenize_for_lm, tokenize_for_sft):
        assert layout(splits_of(rows[:1]), tokenizer, DataConfig())["train"][0]["input_ids"] == [*plain, tokenizer.eos_token_id]
    tokenizer = with_bos(tokenizer)
    expected = [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    assert tokenize_for_lm(splits_of(rows), tokenizer, DataConfig())["train"]["input_ids"][:] == [expected, expected]


def test_a_chat_has_the_bos_of_its_template_alone(tokenizer):
    """One where the template writes one, none where not, as when the model is asked. Fails when chats get a prefix."""
    tokenizer = with_bos(tokenizer)
    for template, count in (("{{ bos_token }}" + CHATML, 1), (CHATML, 0)):
        tokenizer.chat_template = template
        document = tokenize_for_sft(splits_of(chats(1)), tokenizer, DataConfig())["train"][0]
        assert document["input_ids"] == tokenizer.apply_chat_template(chats(1)[0]["messages"], return_dict=False)
        assert document["input_ids"].count(tokenizer.bos_token_id) == count


@pytest.mark.parametrize("begins_with_bos", [False, True])
def test_a_completion_is_supervised_from_the_first_token_that_holds_some_of_it(tokenizer, begins_with_bos):
    """The reference counts characters token by token. Fails when the span of `_prompts_and_completions` starts one later."""
    tokenizer = with_bos(tokenizer) if begins_with_bos else tokenizer
    rows = pairs()
    documents = tokenize_for_sft(splits_of(rows), tokenizer, DataConfig())["train"]
    for row, document in zip(rows, documents, strict=True):
        full = tokenizer(row["prompt"] + row["completion"], return_offsets_mapping=True)
        ids = full["input_ids"] + [tokenizer.eos_token_id]
        held = [end > len(row["prompt"]) and end > start for start, end in full["offset_mapping"]] + [True]
        assert document["input_ids"] == ids
        assert document["labels"] == [token if is_held else -100 for token, is_held in zip(ids, held, strict=True)]
        assert document["supervised_tokens"] == sum(held[1:])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["text", "prompt_completion", "messages", "prompted_chat"])
def test_tokens_and_labels_are_trls(tokenizer, layout):
    """TRL 1.16's own preparation of the rows. Fails when the end of a completion is left unsupervised."""
    from trl import SFTTrainer

    # prompts end on a line break, so that no token joins prompt and completion: there we supervise only what holds some
    whole = [{"prompt": row["prompt"].rstrip() + "\n", "completion": "x" + row["completion"]} for row in pairs()]
    asked = [{"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]} for chat in chats()]
    plain = [{"text": text} for text in texts()]
    rows = {"text": plain, "prompt_completion": whole, "messages": chats(), "prompted_chat": asked}[layout]
    args = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=layout == "messages", max_length=96,
        truncation_mode="keep_start", shuffle_dataset=False,
    )  # fmt: skip
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True, _is_vision_dataset=False)
    reference = SFTTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, False, None, "train")
    if layout == "prompted_chat":  # TRL supervises the line break after the last turn here, the template's marks don't
        tokenizer.chat_template = CHATML_BARE
    documents = tokenize_for_sft(splits_of(rows), tokenizer, DataConfig(max_length=96))["train"]
    assert documents["input_ids"][:] == reference["input_ids"][:]
    labels = documents["labels"][:] if "labels" in documents.column_names else documents["input_ids"][:]
    assert labels == reference["labels"][:]


def test_settings_widen_what_is_supervised(tokenizer):
    """Fails when `_supervise` ignores a setting."""
    row = chats(4)[3]["messages"]
    prompted = splits_of([{"prompt": row[:2], "completion": row[2:]}])
    text = tokenizer.apply_chat_template(row, tokenize=False)

    def supervised(splits, **settings):
        document = tokenize_for_sft(splits, tokenizer, DataConfig(**settings))["train"][0]
        labels = document.get("labels", document["input_ids"])
        return tokenizer.decode([label for label in labels if label != -100])

    first, last = (f"{message['content']}<|im_end|>" for message in (row[1], row[3]))
    second_question = text[text.index(row[2]["content"]) - len("<|im_start|>user\n") :]
    assert supervised(prompted) == last
    assert supervised(prompted, assistant_only_loss=False) == second_question
    assert supervised(prompted, completion_only_loss=False, assistant_only_loss=True) == first + last
    assert supervised(prompted, completion_only_loss=False) == text
    chat = splits_of([{"messages": row}])
    assert supervised(chat) == first + last
    assert supervised(chat, assistant_only_loss=False) == text
    pair = pairs(1)[0]
    assert supervised(splits_of([pair]), completion_only_loss=False) == pair["prompt"] + pair["completion"] + END


def test_no_token_is_masked_because_it_is_the_pad_token(tokenizer):
    """Fails when labels are set to -100 by id."""
    tokenizer.pad_token = END
    document = tokenize_for_sft(splits_of(pairs(1)), tokenizer, DataConfig())["train"][0]
    assert document["labels"][-1] == tokenizer.eos_token_id == tokenizer.pad_token_id


def test_a_chat_template_without_an_end_gets_the_end_of_text_supervised(tokenizer):
    """Fails when only texts are closed."""
    words = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    words += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    marks = "{% for m in messages %}### {{ m.role }}:\n{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    for template in (words, marks):
        tokenizer.chat_template = template
        document = tokenize_for_sft(splits_of(chats(1)), tokenizer, DataConfig())["train"][0]
        assert document["labels"][-1] == document["input_ids"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("has_template", [True, False])
def test_alpacas_columns_are_a_prompt_and_its_completion(tokenizer, has_template):
    """As messages where there is a chat template, else in the words of Alpaca's authors.

    Fails when: the input is left out, the prompt is supervised, or rows without an input get a heading for it.
    """
    rows = [
        {"instruction": "Add them.", "input": "1 and 2", "output": "3", "system": None}, {"instruction": "Say hi.", "input": "", "output": "hi", "system": None},
        {"instruction": "Say ho.", "input": None, "output": "ho", "system": "Be kind."},
    ]  # fmt: skip
    asked = ["Add them.\n1 and 2", "Say hi.", "Say ho."]
    if has_template:
        expected = [
            {"prompt": [*([{"role": "system", "content": row["system"]}] if row["system"] else []), {"role": "user", "content": text}],
             "completion": [{"role": "assistant", "content": row["output"]}]}
            for row, text in zip(rows, asked, strict=True)
        ]  # fmt: skip
    else:
        tokenizer.chat_template = None
        below, end = "Below is an instruction that describes a task", "Write a response that appropriately completes the request."
        heads = [
            f"{below}, paired with an input that provides further context. {end}\n\n### Instruction:\nAdd them.\n\n### Input:\n1 and 2\n\n",
            f"{below}. {end}\n\n### Instruction:\nSay hi.\n\n", "Be kind.\n\n### Instruction:\nSay ho.\n\n",
        ]  # fmt: skip
        expected = [{"prompt": f"{head}### Response:\n", "completion": row["output"]} for head, row in zip(heads, rows, strict=True)]
    found, same = (
        list(tokenize_for_sft(DatasetDict(train=Dataset.from_list(each)), tokenizer, DataConfig())["train"]) for each in (rows, expected)
    )
    assert [(row["input_ids"], row["labels"]) for row in found] == [(row["input_ids"], row["labels"]) for row in same]
    (sample,) = sample_prompts(DatasetDict(validation=Dataset.from_list(rows[:1])), tokenizer, SampleConfig())
    assert tokenizer.decode(found[0]["input_ids"]).startswith(sample["prompt"])
    assert sample["reference"] == "3"
    with pytest.raises(Refusal, match=r"row 1 .*train.*: output"):
        tokenize_for_sft(DatasetDict(train=Dataset.from_list([rows[0], {**rows[1], "output": ""}])), tokenizer, DataConfig())
    whole = tokenize_for_sft(DatasetDict(train=Dataset.from_list(rows)), tokenizer, DataConfig(completion_only_loss=False))["train"]
    assert "labels" not in whole.column_names


@pytest.mark.parametrize(("row", "is_said"), [({"prompt": "a b", "completion": "c d"}, True), ({"instruction": "a", "output": "b"}, False)])
def test_plain_prompts_beside_a_chat_template_are_noted(tokenizer, row, is_said):
    """Fails when: nothing is said of prompts that a chat model never sees so."""
    for template in (CHATML, None):
        tokenizer.chat_template = template
        notes = tokenize_for_sft(DatasetDict(train=Dataset.from_list([row])), tokenizer, DataConfig()).report.notes
        assert any("without the tokenizer's chat template" in note for note in notes) == (is_said and template is not None)


def test_sharegpt_conversations_are_read_as_messages(tokenizer):
    """Fails when `from` is not translated."""
    roles = {"user": "human", "assistant": "gpt"}
    turns = [[{"from": roles[turn["role"]], "value": turn["content"]} for turn in chat["messages"]] for chat in chats()]
    rows = [{"conversations": conversation} for conversation in turns]
    expected = tokenize_for_sft(splits_of(chats()), tokenizer, DataConfig())["train"]
    assert tokenize_for_sft(splits_of(rows), tokenizer, DataConfig())["train"].to_list() == expected.to_list()


def plain_cut(ids, labels, most, overlong):
    """The same in a loop: what is left of one document."""
    if len(ids) <= most:
        return [(ids, labels)]
    if overlong == "drop":
        return []
    starts = range(0, len(ids), most) if overlong == "split" else [0]
    pieces = [(ids[start : start + most], labels[start : start + most]) for start in starts]
    return [piece for piece in pieces if any(label != -100 for label in piece[1][1:])]


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
@pytest.mark.parametrize("layout", ["text", "prompt_completion"])
def test_overlong_documents_are_cut_as_in_a_plain_loop_and_counted(tokenizer, overlong, layout):
    """Fails when pieces overlap, when rows without a supervised token stay, or a count is off by one."""
    rows = [{"text": text} for text in texts()] if layout == "text" else pairs()
    rows = [{**row, "origin": f"rows.jsonl:{i}"} for i, row in enumerate(rows)]
    whole = tokenize_for_sft(splits_of(rows), tokenizer, DataConfig(max_length=4096))["train"].to_list()
    prepared = prepare("sft", splits_of(rows), tokenizer, DataConfig(max_length=31, overlong=overlong))
    expected, cut_tokens, unsupervised = [], 0, 0
    for row in whole:
        kept = plain_cut(row["input_ids"], row.get("labels", row["input_ids"]), 31, overlong)
        expected += [(ids, labels, row["origin"]) for ids, labels in kept]
        cut_tokens += row["length"] - sum(len(ids) for ids, _ in kept)
        pieces = 1 if overlong == "truncate" or row["length"] <= 31 else 0 if overlong == "drop" else -(-row["length"] // 31)
        unsupervised += pieces - len(kept)
    found = prepared["train"].to_list()
    assert [(row["input_ids"], row.get("labels", row["input_ids"]), row["origin"]) for row in found] == expected
    assert [row["length"] for row in found] == [len(ids) for ids, _, _ in expected]
    assert [row["supervised_tokens"] for row in found] == [sum(x != -100 for x in labels[1:]) for _, labels, _ in expected]
    counts = prepared.report.splits[0]
    assert counts.overlong == sum(row["length"] > 31 for row in whole)
    assert (counts.cut_tokens, counts.unsupervised) == (cut_tokens, unsupervised)


def test_wrapped_packing_keeps_documents_whole(tokenizer):
    """Packing cuts them itself. Fails when `is_wrapped` is left out of the reader."""
    config = DataConfig(max_length=16, packing=True, packing_strategy="wrapped")
    documents = tokenize_for_lm(splits_of([{"text": texts(1)[0] * 5}]), tokenizer, config)["train"]
    assert documents[0]["length"] > 16


def test_tokenized_rows_pass_without_their_padding(tokenizer):
    """Fails when the attention mask is ignored, or applied to the ids alone."""
    rows = [
        {"input_ids": [0, 0, 300, 301, 302], "labels": [-100, -100, -100, 301, 302], "attention_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [300, 301, 302, 0, 0], "labels": [-100, 301, 302, -100, -100], "attention_mask": [1, 1, 1, 0, 0]},
    ]
    documents = tokenize_for_sft(splits_of(rows), tokenizer, DataConfig())["train"]
    assert documents["input_ids"][:] == [[300, 301, 302]] * 2
    assert documents["labels"][:] == [[-100, 301, 302]] * 2
    unmasked = [{"input_ids": row["input_ids"][2:5]} for row in rows[:1]]
    for tokenize in (tokenize_for_sft, tokenize_for_lm):
        documents = tokenize(splits_of(unmasked), tokenizer, DataConfig())["train"]
        assert documents[0] == {"input_ids": [300, 301, 302], "supervised_tokens": 2, "length": 3}
    trl = [{"input_ids": [300, 301, 302], "completion_mask": [0, 1, 1]}]
    assert tokenize_for_sft(splits_of(trl), tokenizer, DataConfig())["train"][0]["labels"] == [-100, 301, 302]


def test_a_stream_gives_the_rows_of_the_map_style_dataset(tokenizer):
    """Fails when `_stream_batch` leaves out the labels, or columns of the source stay."""
    for rows in (pairs(), chats(), [{"text": text} for text in texts()]):
        rows = [{**row, "origin": f"r:{i}", "other": i} for i, row in enumerate(rows)]
        config = DataConfig(max_length=64, overlong="split")
        expected = tokenize_for_sft(splits_of(rows), tokenizer, config)["train"].to_list()
        stream = IterableDatasetDict(train=Dataset.from_list(rows).to_iterable_dataset())
        assert list(tokenize_for_sft(stream, tokenizer, config)["train"]) == expected


def test_rows_are_tokenized_once_for_the_same_content(tokenizer, monkeypatch):
    """Using the tokenizer changes its state and its pickle, not its content. Fails when the key takes in its padding."""
    built = []
    build = tokenizing._write
    monkeypatch.setattr(tokenizing, "_write", lambda *args, **kwargs: (built.append(1), build(*args, **kwargs)))

    def rows_built(rows, tokenizer, **settings):
        built.clear()
        tokenize_for_sft(splits_of(rows), tokenizer, DataConfig(**settings))
        return len(built)

    assert rows_built(chats(), tokenizer) == 1
    tokenizer(["a", "b b b"], padding=True, truncation=True, max_length=2)
    assert rows_built(chats(), tokenizer) == 0
    assert rows_built(chats(), tokenizer, seed=7, per_device_train_batch_size=2) == 0
    assert rows_built(chats(), tokenizer, max_length=64) == 1
    assert rows_built(chats(), tokenizer, assistant_only_loss=False) == 1
    assert rows_built(chats()[1:], tokenizer) == 1
    tokenizer.chat_template = CHATML_BARE
    assert rows_built(chats(), tokenizer) == 1
    assert rows_built(chats(), with_bos(tokenizer)) == 1


@pytest.mark.slow
def test_another_process_finds_what_one_has_tokenized(tokenizer, tmp_path):
    """Fails when the key holds anything that differs between processes, such as a hash of a string."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.json").write_text(json.dumps(pairs()))
    program = textwrap.dedent("""
        import json, sys
        from datasets import Dataset, DatasetDict
        from transformers import AutoTokenizer
        from toolkit.config import DataConfig
        from toolkit.data.tokenize.tasks import tokenize_for_sft
        tokenizer = AutoTokenizer.from_pretrained("tokenizer")
        splits = DatasetDict(train=Dataset.from_list(json.load(open("rows.json"))))
        print("KEY", tokenize_for_sft(splits, tokenizer, DataConfig())["train"]._fingerprint)
    """)
    own = tokenize_for_sft(splits_of(json.loads((tmp_path / "rows.json").read_text())), tokenizer, DataConfig())["train"]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "RANK": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["KEY", own._fingerprint]
    assert len(list((tmp_path / "cache").glob("tokenized-*.lock"))) == 1


def test_an_evaluation_split_without_rows_is_left_out_and_said(tokenizer):
    """Fails when the split stays, or goes without a word."""
    splits = splits_of(pairs())
    splits["validation"] = splits["train"].select([])
    prepared = prepare("sft", splits, tokenizer, DataConfig())
    assert list(prepared) == ["train"]
    assert any("validation" in note for note in prepared.report.notes)


# ------------------------------------------------------------------------------------------------------- classification


def labeled(labels, count=30):
    return [{"text": text, "label": labels[i % len(labels)], "origin": f"r:{i}"} for i, text in enumerate(texts(count))]


@pytest.fixture(scope="module")
def encoder_tokenizer():
    return train_tokenizer([inspect.getsource(textwrap)], 500, encoder=True)


@pytest.mark.parametrize("has_pairs", [False, True])
def test_texts_and_pairs_are_tokenized_and_truncated_as_the_tokenizer_does(encoder_tokenizer, has_pairs):
    """Fails when truncation takes the closing token, or the shorter text of a pair. Where both are of a length, one may be
    shorter by a token, so the texts differ."""
    rows = [{**row, **({"text_pair": row["text"][: 3 + 7 * i]} if has_pairs else {})} for i, row in enumerate(labeled([0, 1]))]
    documents = tokenize_for_classification(splits_of(rows), encoder_tokenizer, ClassifyConfig(max_length=48))["train"]
    for row, document in zip(rows, documents, strict=True):
        expected = encoder_tokenizer(row["text"], row.get("text_pair"), truncation=True, max_length=48)
        if has_pairs and len(document["input_ids"]) == 48:
            whole = encoder_tokenizer(row["text"], row["text_pair"])["input_ids"]
            assert len(whole) >= 48
            assert document["input_ids"].count(encoder_tokenizer.sep_token_id) == 2
            kinds = np.bincount(document["token_type_ids"])
            reference = np.bincount(expected["token_type_ids"])
            assert np.abs(kinds - reference).max() <= 1
        else:
            assert document["input_ids"] == expected["input_ids"]
            assert document.get("token_type_ids", []) == (expected["token_type_ids"] if has_pairs else [])
        assert document["length"] == len(document["input_ids"])
        assert document["labels"] == row["label"]
        assert document["origin"] == row["origin"]


def test_classes_are_numbered_by_the_sorted_labels_of_the_training_split(encoder_tokenizer):
    """Fails when classes are numbered in the order of appearance, or by each split on its own."""
    splits = splits_of(labeled(["pos", "neg", "even"]), validation=labeled(["pos"]))
    documents = tokenize_for_classification(splits, encoder_tokenizer, ClassifyConfig())
    assert label_names(splits) == ["even", "neg", "pos"]
    assert documents["train"]["labels"][:6] == [2, 1, 0, 2, 1, 0]
    assert set(documents["validation"]["labels"]) == {2}
    sparse = splits_of(labeled([10, 2]))
    assert label_names(sparse) == ["2", "10"]
    assert tokenize_for_classification(sparse, encoder_tokenizer, ClassifyConfig())["train"]["labels"][:3] == [1, 0, 1]


def test_declared_classes_keep_their_numbers(encoder_tokenizer):
    """A class that train lacks still counts, and a split that declares another order is put right. Fails when it isn't."""
    features = {"text": Value("string"), "label": ClassLabel(names=["c", "a", "b"]), "origin": Value("string")}
    turned = Features({**features, "label": ClassLabel(names=["a", "b", "c"])})
    splits = DatasetDict(
        train=Dataset.from_list(labeled([2, 0]), features=Features(features)),
        validation=Dataset.from_list(labeled([0, 2]), features=turned),
    )
    documents = tokenize_for_classification(splits, encoder_tokenizer, ClassifyConfig(class_weights=[0.5, 1.0, 2.0]))
    assert label_names(splits) == ["c", "a", "b"]
    assert documents["train"]["labels"][:2] == [2, 0]
    assert documents["train"]["weight"][:2] == [2.0, 0.5]
    assert documents["validation"]["labels"][:2] == [1, 0]


def test_several_labels_and_numbers_become_what_the_loss_takes(encoder_tokenizer):
    """Fails when a list of classes is read as a multi-hot vector, or the reverse."""
    several, hot, numbers = labeled([["b", "a"], [], ["c"]]), labeled([[1, 0, 1], [0, 0, 0]]), labeled([0.5, 2])
    config = ClassifyConfig(problem_type="multi_label")
    documents = tokenize_for_classification(splits_of(several), encoder_tokenizer, config)["train"]
    assert documents["labels"][:3] == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    documents = tokenize_for_classification(splits_of(hot), encoder_tokenizer, config)["train"]
    assert documents["labels"][:2] == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert documents.features["labels"] == List(Value("float32"))
    regression = tokenize_for_classification(splits_of(numbers), encoder_tokenizer, replace(config, problem_type="regression"))
    assert regression["train"]["labels"][:2] == [0.5, 2.0]


def test_a_test_split_with_withheld_labels_is_left_out_and_said(encoder_tokenizer):
    """Fails when its -1 is refused, or taken for the last class."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"]), "origin": Value("string")})
    splits = DatasetDict(
        train=Dataset.from_list(labeled([0, 1]), features=features), test=Dataset.from_list(labeled([-1]), features=features)
    )
    prepared = prepare("classification", splits, encoder_tokenizer, ClassifyConfig())
    assert list(prepared) == ["train"]
    assert any(note.startswith("test: left out") for note in prepared.report.notes)


REFUSED_LABELS = {
    "missing": (["a", "b", None], {}, r"r:2: the label is missing"),
    "fraction": ([0.5, 1.5], {}, r"r:0: .*number 0\.5.*--problem-type regression"),
    "whole number with a point": ([1.0, 0.0], {}, r"r:0: .*number 1\.0.* 1,.*--problem-type regression"),
    "list": ([["a"], ["b"]], {}, r"r:0: .*list of 1.*multi_label"),
    "text for a number": (["a", "b"], {"problem_type": "regression"}, r"r:0: .*'a'.*finite number"),
    "not a number": ([1.0, float("nan")], {"problem_type": "regression"}, r"r:1: .*finite number"),
    "not in float32": ([1.0, 1e300], {"problem_type": "regression"}, r"r:1: .*1e\+300.*finite number"),
    "class for several": (["a", "b"], {"problem_type": "multi_label"}, r"r:0: .*list of classes"),
    "one class": (["a"], {}, r"All labels .*train .*'a'"),
    "too few weights": (["a", "b"], {"class_weights": [1.0]}, r"--class-weights .*1 weights; .*2 classes: a, b"),
    "weights of numbers": ([0.5, 1.0], {"class_weights": [1.0], "problem_type": "regression"}, r"no effect"),
    "split": (["a", "b"], {"overlong": "split"}, r"--overlong split.*truncate, drop or refuse"),
}


@pytest.mark.parametrize("case", REFUSED_LABELS)
def test_labels_that_do_not_fit_are_refused_with_the_row(encoder_tokenizer, case):
    """Fails when: the check of its case is taken out."""
    labels, settings, message = REFUSED_LABELS[case]
    with pytest.raises(Refusal, match=message):
        tokenize_for_classification(splits_of(labeled(labels)), encoder_tokenizer, ClassifyConfig(**settings))


def test_labels_out_of_range_or_unknown_to_train_are_refused_with_the_row(encoder_tokenizer):
    """Fails when an unknown class gets a new number, or -1 counts from the end."""
    splits = splits_of(labeled(["pos", "neg"]), validation=labeled(["pos", "posi"]))
    with pytest.raises(Refusal, match=r"r:1: .*'posi' .*: neg, pos.*'pos'"):
        tokenize_for_classification(splits, encoder_tokenizer, ClassifyConfig())
    features = Features({"text": Value("string"), "label": ClassLabel(names=["a", "b"]), "origin": Value("string")})
    splits = DatasetDict(train=Dataset.from_list(labeled([0, 1, -1]), features=features))
    with pytest.raises(Refusal, match=r"r:2: label -1 .*2 classes, 0 to 1"):
        tokenize_for_classification(splits, encoder_tokenizer, ClassifyConfig())


def test_aligned_labels_keep_that_of_the_first_token_and_are_counted_where_they_are() -> None:
    """Tags and masked tokens are labels of the tokens themselves.

    Fails when: the first label is left out, or positions are those that predict the next token.
    """
    values, labels = np.arange(7, dtype=np.int32), np.array([1, -100, 2, -100, 3, -100, 4], dtype=np.int32)
    documents = Documents(values, np.array([0, 3, 7]), labels, ["a", "b"], np.array([3, 4]), aligned=True)
    assert documents.supervised().tolist() == [2, 2]
    assert documents.take(np.array([1])).supervised().tolist() == [2]
    cut, _ = cut_documents(documents, 2, "truncate")
    assert cut.supervised().tolist() == [1, 1]
    assert replace(documents, aligned=False).supervised().tolist() == [1, 2]
    rows = [
        {"input_ids": [0, 1, 2], "labels": [1, -100, 2], "supervised_tokens": 2},
        {"input_ids": [3, 4, 5, 6], "labels": [-100, 3, -100, 4], "supervised_tokens": 2},
    ]
    padded, packed = collate_padded(rows, pad_token_id=9, aligned=True), collate_packed(rows, aligned=True)
    assert padded["labels"].tolist() == [[1, -100, 2, -100], [-100, 3, -100, 4]]
    assert padded["supervised_positions"].tolist() == [0, 2, 5, 7]
    assert packed["labels"].tolist() == [[1, -100, 2, -100, 3, -100, 4]]
    assert packed["supervised_positions"].tolist() == [0, 2, 4, 6]
