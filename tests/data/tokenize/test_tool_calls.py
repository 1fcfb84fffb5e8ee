"""Calls of tools: in OpenAI's format, through every template that TRL ships, none lost, each supervised, no result of one."""

import importlib.util
import inspect
import json
import textwrap
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.sources.load import load_splits
from toolkit.data.tokenize.columns import read_messages, read_options
from toolkit.data.tokenize.masks import mask_chat, read_chat_template
from toolkit.models.tokenizer import CHATML, train_tokenizer

TRL_TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
# What has no place for tools: the template refuses the chat, or leaves a part of it out.
WITHOUT_TOOLS = (
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5",
    "qwen2_5_vl",
)  # fmt: skip
OF_PICTURES = ("idefics3", "llava_next", "smolvlm")  # these take no text as a content
PROPERTIES = {"zqplace": {"type": "string", "description": "Where."}, "zqdays": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["zqplace"]}
TOOLS = [{"type": "function", "function": {"name": "zqweather", "description": "zqforecast", "parameters": PARAMETERS}}]
ARGUMENTS = {"zqplace": "zqParis", "zqdays": 3}
SCHEMA = json.dumps(TOOLS)


def called(arguments: object = json.dumps(ARGUMENTS), **content: object) -> list[dict]:
    """A chat in OpenAI's format: the arguments are JSON text, and there is no content next to a call."""
    call = {"id": "call00001", "type": "function", "function": {"name": "zqweather", "arguments": arguments}}
    return [
        {"role": "user", "content": "zqquestion"},
        {"role": "assistant", **({"content": None} | content), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "zqresult"},
        {"role": "assistant", "content": "zqanswer", "refusal": None},
        {"role": "user", "content": "zqthanks"},
        {"role": "assistant", "content": "zqwelcome"},
    ]


@pytest.fixture(scope="module")
def make_tokenizer():
    trained = train_tokenizer([inspect.getsource(textwrap)], 400)
    trained.bos_token = trained.eos_token

    def make(template: str):
        trained.chat_template = template
        return trained

    return make


def tokenized(tokenizer, rows: list[dict], **settings) -> list[dict]:
    raw = DatasetDict(train=Dataset.from_list([{"origin": f"chats.jsonl:{i + 1}", **row} for i, row in enumerate(rows)]))
    return list(tk.tokenize_for_sft(raw, tokenizer, tk.DataConfig(max_length=4096, **settings))["train"])


def written(tokenizer, row: dict) -> tuple[str, str]:
    """All of a tokenized row as text, and what of it is supervised."""
    supervised = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    return tokenizer.decode(row["input_ids"]), tokenizer.decode(supervised)


NAMES = sorted(path.stem for path in TRL_TEMPLATES.glob("*.jinja") if not path.stem.startswith(OF_PICTURES))


@pytest.mark.parametrize("name", ["", *NAMES])
def test_a_call_is_supervised_through_every_template_or_its_row_is_refused(make_tokenizer, name: str) -> None:
    """Whole and once, with arguments that are no JSON within JSON; the tools and the result are there and not supervised.

    Fails when: check_tools is not asked, calls are handed to templates as JSON text, or a null content stays away.
    """
    tokenizer = make_tokenizer((TRL_TEMPLATES / f"{name}.jinja").read_text() if name else CHATML)
    row = {"messages": called(), "tools": SCHEMA}
    if name.removesuffix("_training") in WITHOUT_TOOLS:
        with pytest.raises(Refusal, match=r"^chats\.jsonl:2: .*chat template .*(--chat-template|can't render)"):
            tokenized(tokenizer, [{"messages": called()[-2:], "tools": None}, row])
        return
    whole, supervised = written(tokenizer, tokenized(tokenizer, [row])[0])
    for part in ("zqforecast", "zqquestion", "zqresult", "zqthanks"):
        assert part in whole
        assert part not in supervised
    for part in ("zqweather", "zqplace", "zqParis", "zqdays", "3", "zqanswer", "zqwelcome"):
        assert part in supervised
    assert supervised.count("zqParis") == whole.count("zqParis") == 1
    assert not any(quoted in whole for quoted in ('\\"', "{'zq", "None"))


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6", "qwen3_instruct_2507", "qwen3_vl", "lfm2_v2", "nemotron_3_nano", "gptoss", "deepseekv3"]
)  # fmt: skip
def test_the_mask_of_calls_is_that_of_trls_training_template(make_tokenizer, name: str) -> None:
    """Each turn ends where TRL's does, and begins behind what a model is prompted with. Its own marks are the reference.

    Fails when: `_turn_end` looks for the end of a content that a call does not have.
    """
    tools = {} if name == "deepseekv3" else {"tools": SCHEMA}  # it has no place for them
    texts = {}
    for kind in (name, f"{name}_training"):
        template = read_chat_template(make_tokenizer((TRL_TEMPLATES / f"{kind}.jinja").read_text()))
        chat = mask_chat(template, read_messages(called(), "messages", "row"), read_options(tools, "row"))
        texts[kind] = [chat.text[start:end].strip() for start, end in chat.spans]
    ours, theirs = texts.values()
    assert len(ours) == len(theirs) == 3
    for mine, reference in zip(ours, theirs, strict=True):
        # gpt-oss: what ends an earlier turn is known by the tokenizer's special tokens, which this one lacks
        assert reference.endswith(mine) or reference.removesuffix("<|end|>").endswith(mine)
        assert "zq" not in reference.removesuffix("<|end|>").removesuffix(mine)


def test_the_built_in_template_writes_tools_and_calls(make_tokenizer) -> None:
    """As Qwen's do: a schema a line, a call as JSON within marks. Fails when: CHATML leaves out the tools, or the calls."""
    tokenizer = make_tokenizer(CHATML)
    two = called(content="Let me see.")
    two[1]["tool_calls"] *= 2
    rows = [{"messages": [{"role": "system", "content": "Be kind."}, *two], "tools": SCHEMA}]
    whole, supervised = written(tokenizer, tokenized(tokenizer, rows)[0])
    call = '<tool_call>\n{"name": "zqweather", "arguments": {"zqplace": "zqParis", "zqdays": 3}}\n</tool_call>'
    system, _, rest = whole.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in system
    assert rest == (
        f"<|im_start|>user\nzqquestion<|im_end|>\n<|im_start|>assistant\nLet me see.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>tool\nzqresult<|im_end|>\n<|im_start|>assistant\nzqanswer<|im_end|>\n"
        "<|im_start|>user\nzqthanks<|im_end|>\n<|im_start|>assistant\nzqwelcome<|im_end|>\n"
    )
    assert supervised == f"Let me see.\n{call}\n{call}<|im_end|>zqanswer<|im_end|>zqwelcome<|im_end|>"
    plain = written(tokenizer, tokenized(tokenizer, [{"messages": called()[-2:]}])[0])
    assert plain == ("<|im_start|>user\nzqthanks<|im_end|>\n<|im_start|>assistant\nzqwelcome<|im_end|>\n", "zqwelcome<|im_end|>")


@pytest.mark.parametrize("name", ["", "qwen2_5", "llama3_1", "deepseekv3_training", "qwen3_5_think_training"])
def test_a_call_has_the_same_tokens_however_it_was_written(make_tokenizer, name: str) -> None:
    """Its content null, empty or absent, its arguments JSON text or an object, or as the older `function_call`.

    Fails when: JSON text is not read, or an absent content stays absent.
    """
    tokenizer = make_tokenizer((TRL_TEMPLATES / f"{name}.jinja").read_text() if name else CHATML)
    absent, older = called(), called()
    del absent[1]["content"]
    older[1]["function_call"] = older[1].pop("tool_calls")[0]["function"]
    chats = [called(), called(content=""), absent, called(ARGUMENTS), *([older] if not name else [])]
    tokens = [tokenized(tokenizer, [{"messages": chat}])[0]["input_ids"] for chat in chats]
    assert all(row == tokens[0] for row in tokens)


def test_arguments_of_a_file_keep_their_nulls_and_types(make_tokenizer, tmp_path: Path) -> None:
    """Objects of any keys and types are in one file. Fails when: arguments become a column with one type for each key."""
    arguments = [{"zqat": 1, "none": None}, {"zqat": "one", "other": [1, "a"]}, {}, {"zqat": {"x": None}}]
    as_object, as_text = tmp_path / "objects.jsonl", tmp_path / "texts.jsonl"
    as_object.write_text("".join(json.dumps({"messages": called(each), "tools": TOOLS}) + "\n" for each in arguments))
    as_text.write_text("".join(json.dumps({"messages": called(json.dumps(each)), "tools": SCHEMA}) + "\n" for each in arguments))
    tokenizer = make_tokenizer(CHATML)
    found = []
    for file in (as_object, as_text):
        config = tk.DataConfig(dataset=str(file), eval_fraction=0.0, max_length=4096)
        found.append([row["input_ids"] for row in tk.tokenize_for_sft(load_splits(config), tokenizer, config)["train"]])
    assert found[0] == found[1]
    for ids, each in zip(found[0], arguments, strict=True):
        assert f'"arguments": {json.dumps(each)}' in tokenizer.decode(ids)


CALL_OUTSIDE = CHATML.replace("{%- endgeneration %}", "").replace("{{- message.content or '' }}", "{{- message.content or '' }}{%- endgeneration %}")
OLD = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
NO_RESULTS = CHATML.replace("{%- for message in messages %}", "{%- for message in messages if message.role != 'tool' %}")
NO_JSON, NO_NAME, NO_OBJECT = called('{"place": '), called(), called("[1]")
NO_NAME[1]["tool_calls"][0]["function"] = {"name": None, "arguments": "{}"}
NAMELESS = CHATML.replace("(function.name | tojson)", "'x'")
NO_SYSTEM = CHATML.replace("{%- for message in messages %}", "{%- for message in messages if message.role != 'system' %}")
ORDERED = [{"role": "system", "content": "zqorder"}, *called()[-2:]]
THOUGHT = [{"role": "user", "content": "zqquestion"}, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (OLD, {"messages": called()[-2:], "tools": SCHEMA}, "does not write the tools .*--rename-columns tools=unused"),
        (OLD, {"messages": called()}, r"not write a call .*\(message 2\)"),
        (OLD, {"prompt": called()[:1], "completion": called()[1:2]}, r"not write a call .*\(message 2\)"),
        (NO_RESULTS, {"messages": called()}, r"not write the result .*\(message 3\)"),
        (CALL_OUTSIDE, {"messages": called()}, r"generation marks .* a call .*\(message 2\)"),
        (OLD, {"messages": THOUGHT}, r"not write the reasoning.*\(message 2\)"),
        (CHATML, {"messages": NO_JSON}, r"message 2 of messages: call 1: .*zqweather: .*JSON"),
        (CHATML, {"messages": called('{"a": 1, "a": 2}')}, r"call 1: .*zqweather: a is twice"),
        (CHATML, {"messages": called('{"a": NaN}')}, r"call 1: .*zqweather: holds NaN"),
        (CHATML, {"messages": called('{"a": -Infinity}')}, r"call 1: .*zqweather: holds -Infinity"),
        (CHATML, {"messages": called('{"a": "\\ud800"}')}, r"call 1: .*zqweather: holds .ud800"),
        (CHATML, {"messages": called("[" * 100_000)}, r"call 1: .*zqweather: .* nested more than"),
        (CHATML, {"messages": called('{"a":' * 100 + "1" + "}" * 100)}, r"call 1: .*zqweather: .* nested more than"),
        (NAMELESS, {"messages": called()}, r"not write the name .*\(message 2\)"),
        (NO_SYSTEM, {"messages": ORDERED}, r"not write the system message \(message 1\)"),
        (CHATML, {"messages": NO_OBJECT}, r"call 1: .*zqweather are a list"),
        (CHATML, {"messages": NO_NAME}, r"message 2 of messages: call 1 names no function"),
        (CHATML, {"messages": called()[-2:], "tools": '["zqweather"]'}, r"tools .*list of 1, .*objects"),
    ],
)
def test_what_would_be_lost_is_refused_by_row(make_tokenizer, template: str, row: dict, message: str) -> None:
    """Fails when: the check named in the message is left out."""
    with pytest.raises(Refusal, match=f"(?s)^chats.jsonl:1: .*{message}"):
        tokenized(make_tokenizer(template), [row])


def test_calls_are_answers_of_pairs_and_single_answers(make_tokenizer) -> None:
    """Fails when: chats of pairs are not checked, or their calls are handed on as they are."""
    prompt, call, other = called()[:1], called()[1:2], called(json.dumps({"zqplace": "zqRome"}), content="")[1:2]
    tokenizer = make_tokenizer((TRL_TEMPLATES / "qwen2_5.jinja").read_text())
    config = tk.DataConfig(max_length=4096)
    pairs = DatasetDict(train=Dataset.from_list([{"prompt": prompt, "chosen": call, "rejected": other, "tools": SCHEMA}]))
    (row,) = tk.tokenize_for_preference(pairs, tokenizer, config)["train"]
    cut = row["prompt_tokens"] + row["chosen_tokens"]
    chosen, rejected = (tokenizer.decode(row["input_ids"][part]) for part in (slice(row["prompt_tokens"], cut), slice(cut, None)))
    assert '"arguments": {"zqplace": "zqParis", "zqdays": 3}}' in chosen
    assert '"arguments": {"zqplace": "zqRome"}}' in rejected
    with pytest.raises(Refusal, match="does not write"):
        tk.tokenize_for_preference(pairs, make_tokenizer(OLD), config)
    answers = DatasetDict(train=Dataset.from_list([{"prompt": prompt, "completion": call, "label": kind} for kind in (True, False)]))
    with pytest.raises(Refusal, match=r"^row 0 .*call of a tool"):
        tk.tokenize_for_unpaired(answers, make_tokenizer(OLD), config)


def test_a_sampled_prompt_is_what_training_reads_and_its_reference_the_call(make_tokenizer) -> None:
    """As files have them, tools and arguments are JSON text. Fails when: they reach the template as they are."""
    tokenizer = make_tokenizer(CHATML)
    whole = tokenizer.decode(tokenized(tokenizer, [{"messages": called()[:4], "tools": SCHEMA}])[0]["input_ids"])
    splits = DatasetDict(validation=Dataset.from_list([{"messages": called()[:4], "tools": SCHEMA}]))
    (prompt,) = tk.sample_prompts(splits, tokenizer, tk.SampleConfig())
    assert prompt == {"prompt": whole.removesuffix("zqanswer<|im_end|>\n"), "reference": "zqanswer"}
    splits = DatasetDict(validation=Dataset.from_list([{"messages": called()[:2], "tools": SCHEMA}]))
    (prompt,) = tk.sample_prompts(splits, tokenizer, tk.SampleConfig(sample_max_new_tokens=400))
    assert json.loads(prompt["reference"]) == {"name": "zqweather", "arguments": ARGUMENTS}


def test_a_content_in_parts_is_its_text_and_other_parts_are_refused_by_row() -> None:
    """As multimodal chats have it. Fails when: the list reaches the template, which writes it as Python does, or nothing."""
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "much?", "image_url": None}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"text": "4."}]}]
    assert [message["content"] for message in read_messages(chat, "messages", "a.jsonl:1")] == ["How much?", "4."]
    wrong = {"of type 'image_url'": {"type": "image_url", "image_url": {"url": "x"}}, "the number 5": 5, "of type 'text'": {"type": "text"}}
    for said, part in wrong.items():
        with pytest.raises(Refusal, match=f"a.jsonl:1: message 1 of messages: content .*{said}"):
            read_messages([{"role": "user", "content": [*parts, part]}, chat[1]], "messages", "a.jsonl:1")
    with pytest.raises(Refusal, match=r"a\.jsonl:1: message 2 .*assistant.*nothing"):
        read_messages([chat[0], {"role": "assistant", "content": [{"type": "text", "text": " "}]}], "messages", "a.jsonl:1")
