"""Masks of chats: those of plain loops over token ids, of transformers' own marks and of TRL's training templates."""

import importlib.util
import inspect
import textwrap
from pathlib import Path

import pytest
from tokenizers import processors

from toolkit.config import Refusal
from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.masks import mask_chat, mask_completion, read_chat_template, supervised_tokens, turn_end_ids
from toolkit.models.tokenizer import CHATML, train_tokenizer

TRL_TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

CHATML_BARE = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
CHATML_END_OUTSIDE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{% set content = message.content %}
{%- if message.role == 'assistant' %}{% generation %}{{ content }}{% endgeneration %}{% else %}{{ content }}{% endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN_WORDS = """\
{%- for message in messages %}{{ '### ' + message.role + ':\\n' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"""
# As mistralai/Mistral-7B-Instruct-v0.3 has it, without its tools.
MISTRAL_V3 = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set chat = messages[1:] %}
{%- else %}{% set chat = messages %}{% endif %}{{- bos_token }}
{%- for message in chat %}
{%- if message.role == 'user' and loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
{%- elif message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content | trim + '<|end|>' }}{% endif %}{% endfor %}"""
CHAT = [
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "Two is 2."},
    {"role": "user", "content": "And three?\n"},
    {"role": "assistant", "content": "  It is 3"},
    {"role": "user", "content": "Thanks."},
]


def trl_template(name):
    return (TRL_TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def make_tokenizer():
    """A small tokenizer with a template, and with the special tokens that the template writes."""
    special = [
        "<bos>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>",
        "<|user|>", "<|assistant|>", "<|system|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>",
        "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    ]  # fmt: skip

    def make(template, bos="<bos>"):
        tokenizer = train_tokenizer([inspect.getsource(textwrap)], 400)
        tokenizer.add_special_tokens({"extra_special_tokens": special})
        tokenizer.bos_token = bos
        tokenizer.chat_template = template
        return tokenizer

    return make


def mask_of(tokenizer, messages, first=0, **options):
    """Ids and whether each is supervised, by the code under test."""
    chat = mask_chat(read_chat_template(tokenizer), messages, options, first)
    return tokens_of(tokenizer, chat)


def tokens_of(tokenizer, chat):
    encoding = next(build_encoder(tokenizer).encode([chat.text], positions=True))
    mask = [False] * len(encoding.ids)
    for start, end in supervised_tokens(encoding, chat.spans, len(chat.text))[0]:
        mask[start:end] = [True] * (end - start)
    return encoding.ids, mask


def supervised_texts(tokenizer, ids, mask):
    """The supervised stretches as text."""
    stretches, before = [], False
    for token, is_supervised in zip(ids, mask, strict=True):
        if is_supervised:
            stretches = stretches if before else [*stretches, []]
            stretches[-1].append(token)
        before = is_supervised
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    "template", [CHATML_BARE, *(trl_template(name) for name in ("llama3", "gemma", "gemma3", "qwen2_5", "cohere"))]
)
def test_mask_without_marks_is_that_of_rendering_up_to_each_turn(make_tokenizer, template):
    """The reference renders and tokenizes each beginning of the chat. Fails when `_turn_start` renders without the prompt."""
    tokenizer = make_tokenizer(template)
    ids, mask = mask_of(tokenizer, CHAT)

    def ids_of(count, **options):
        return tokenizer.apply_chat_template(CHAT[:count], return_dict=False, **options)

    expected = [False] * len(ids)
    for i, message in enumerate(CHAT):
        if message["role"] == "assistant":
            start, end = len(ids_of(i, add_generation_prompt=True)), len(ids_of(i + 1))
            assert ids_of(i + 1) == ids[:end]
            expected[start:end] = [True] * (end - start)
    assert ids == ids_of(len(CHAT))
    assert mask == expected


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "gemma3", "qwen2_5", "qwen3", "phi3", "cohere", "gptoss"])
def test_mask_with_marks_is_transformers_own(make_tokenizer, template):
    """Fails when `_marked_spans` leaves out the last mark, or moves an end by one."""
    tokenizer = make_tokenizer(CHATML if template == "chatml" else trl_template(f"{template}_training"))
    reference = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = mask_of(tokenizer, CHAT)
    assert ids == reference["input_ids"]
    assert mask == [bool(bit) for bit in reference["assistant_masks"]]


@pytest.mark.parametrize("template", ["llama3", "gemma", "gemma3", "phi3", "cohere", "cohere2", "lfm2", "lfm2_v2"])
def test_a_models_own_template_gives_the_mask_of_trls_training_template(make_tokenizer, template):
    """TRL rewrites templates by hand so that they mark the assistant's turns; finding the turns must come to the same.

    Phi-3's writes an end of text after the last turn alone. Fails when `read_chat_template` takes the whole end of the
    chat for the closing of a turn.
    """
    chat = CHAT[:4]
    training = make_tokenizer(trl_template(f"{template}_training"))
    assert mask_of(make_tokenizer(trl_template(template)), chat) == mask_of(training, chat)


def test_a_template_that_rewrites_history_is_masked_where_the_turns_stand(make_tokenizer):
    """Qwen3 drops the thinking of earlier turns. Fails when `_turn_end` takes the rendered beginning without comparing."""
    tokenizer = make_tokenizer(trl_template("qwen3"))
    chat = [
        CHAT[0],
        {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo."},
        CHAT[2],
        {"role": "assistant", "content": "<think>\nTwo and one.\n</think>\n\nThree."},
    ]
    assert supervised_texts(tokenizer, *mask_of(tokenizer, chat)) == [
        "Two.<|im_end|>\n", "<think>\nTwo and one.\n</think>\n\nThree.<|im_end|>\n",
    ]  # fmt: skip
    assert mask_chat(read_chat_template(tokenizer), chat, {}).rewritten
    assert not mask_chat(read_chat_template(tokenizer), chat[2:], {}).rewritten


@pytest.mark.parametrize("turns", [2, 4])
def test_a_blank_that_the_model_must_write_is_supervised_also_where_the_prompt_is_written_otherwise(make_tokenizer, turns):
    """Mistral's template has a system message in the last user turn alone, so that no prompt is a prefix of the chat; what the
    assistant writes is what it writes without that message. Fails when: a turn begins where the text starts to depend on it."""
    tokenizer = make_tokenizer(MISTRAL_V3)
    system = [{"role": "system", "content": "Be short."}]
    expected = [" Two is 2.<|end|>", " It is 3<|end|>"][: turns // 2]
    for chat in (CHAT[:turns], system + CHAT[:turns]):
        rendered = mask_chat(read_chat_template(tokenizer), chat, {})
        assert [rendered.text[start:end] for start, end in rendered.spans] == expected
        ids, mask = mask_of(tokenizer, chat)
        assert supervised_texts(tokenizer, ids, mask) == expected


def test_a_template_that_takes_whole_chats_only_is_masked_all_the_same(make_tokenizer):
    """Fails when a beginning that can't be rendered is refused like a chat."""
    strict = "{% if messages | length < 4 %}{{ raise_exception('four at least') }}{% endif %}" + CHATML_BARE
    expected = mask_of(make_tokenizer(CHATML_BARE), CHAT)
    assert mask_of(make_tokenizer(strict), CHAT) == expected


def test_calls_of_tools_are_supervised_to_the_end_of_the_turn_and_their_results_are_not(make_tokenizer):
    """Fails when `_turn_end` takes the end of the content for the end of the turn."""
    tokenizer = make_tokenizer(trl_template("qwen3"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        CHAT[0],
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three."},
        CHAT[2],
        {"role": "assistant", "content": "Three."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
    ids, mask = mask_of(tokenizer, chat, tools=tools)
    assert ids == tokenizer.apply_chat_template(chat, tools=tools, return_dict=False)
    asked = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
    last = "<think>\n\n</think>\n\nThree.<|im_end|>\n"
    assert supervised_texts(tokenizer, ids, mask) == [asked, "Three.<|im_end|>\n", last]


def test_the_end_of_each_turn_is_supervised_also_where_the_marks_leave_it_out(make_tokenizer):
    """Fails when `_marked_spans` takes the marks as they are."""
    tokenizer = make_tokenizer(CHATML_END_OUTSIDE)
    assert supervised_texts(tokenizer, *mask_of(tokenizer, CHAT)) == ["Two is 2.<|im_end|>", "  It is 3<|im_end|>"]


def test_an_end_of_earlier_turns_that_differs_from_the_last_ones_is_known(make_tokenizer):
    """gpt-oss closes earlier turns with <|end|>, the last with <|return|>. Fails when: all three messages are not looked at."""
    tokenizer = make_tokenizer(trl_template("gptoss"))
    texts = supervised_texts(tokenizer, *mask_of(tokenizer, CHAT[:4]))
    assert [text[-12:] for text in texts] == ["Two is 2.<|end|>"[-12:], "It is 3<|return|>"[-12:]]
    assert turn_end_ids(tokenizer) == tokenizer.convert_tokens_to_ids(["<|return|>", "<|end|>", "<|endoftext|>"])


def test_only_messages_from_the_first_of_a_completion_are_supervised(make_tokenizer):
    """Fails when `mask_chat` ignores `first`, for either kind of template."""
    for template in (CHATML, CHATML_BARE):
        tokenizer = make_tokenizer(template)
        assert supervised_texts(tokenizer, *mask_of(tokenizer, CHAT, first=3))[0].startswith("  It is 3<|im_end|>")
        assert len(supervised_texts(tokenizer, *mask_of(tokenizer, CHAT, first=2))) == 1
        everything = mask_completion(read_chat_template(tokenizer), CHAT, {}, 3)
        expected = "  It is 3<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
        assert supervised_texts(tokenizer, *tokens_of(tokenizer, everything)) == [expected]


def test_all_bytes_of_a_last_character_are_supervised(make_tokenizer):
    """transformers 5.23 leaves out the last bytes of an emoji at the end of a mark. Fails when: the token after the span is left out."""
    tokenizer = make_tokenizer(CHATML_END_OUTSIDE.replace("<|im_end|>\\n", ""))
    chat = [CHAT[0], {"role": "assistant", "content": "Three 🙂"}, CHAT[0]]
    assert supervised_texts(tokenizer, *mask_of(tokenizer, chat)) == ["Three 🙂"]


def test_white_space_trimmed_off_token_positions_moves_no_mask(make_tokenizer):
    """Llama 3's post-processor trims. Fails when `build_encoder` keeps the post-processor."""
    chat = [CHAT[0], {"role": "assistant", "content": "\n\n  Two\n\n"}, CHAT[2], {"role": "assistant", "content": " 3 \n"}]
    tokenizer = make_tokenizer(CHATML_BARE)
    expected = mask_of(tokenizer, chat)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert mask_of(tokenizer, chat) == expected
    assert supervised_texts(tokenizer, *expected) == ["\n\n  Two\n\n<|im_end|>\n", " 3 \n<|im_end|>\n"]


def test_a_token_is_supervised_when_it_holds_a_character_of_the_span(make_tokenizer):
    """Against the bytes of each token, for every border of a text. Fails when a token over a border is left to the prompt."""
    encoder = build_encoder(make_tokenizer(CHATML))
    text = "def wrap(self,  text):\n\n    return 'é🙂' # wrap\n"
    encoding = next(encoder.encode([text], positions=True))
    pieces = [b"".join(encoder.tokenizer.backend_tokenizer.decode([token]).encode() for token in [one]) for one in encoding.ids]
    lengths = [len(piece) if b"\xef\xbf\xbd" not in piece else 1 for piece in pieces]  # a lone byte decodes to U+FFFD
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert ends[-1] == len(text.encode())
    merged = 0
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            ((first, after),), is_merged = supervised_tokens(encoding, [(start, end)], len(text))
            from_byte, to_byte = len(text[:start].encode()), len(text[:end].encode())
            held = [i for i in range(len(ends)) if ends[i] > from_byte and ends[i] - lengths[i] < to_byte]
            assert (first, after) == (held[0], held[-1] + 1)
            assert is_merged == (ends[first] - lengths[first] < from_byte)
            merged += is_merged
    assert merged


def test_what_a_template_says_against_a_chat_is_told(make_tokenizer):
    """Fails when the template's own message is lost."""
    tokenizer = make_tokenizer(trl_template("gemma"))
    with pytest.raises(Refusal, match="System role not supported"):
        mask_of(tokenizer, [{"role": "system", "content": "Be brief."}, *CHAT[:2]])
    with pytest.raises(Refusal, match="roles must alternate"):
        mask_of(tokenizer, [*CHAT[:2], CHAT[1]])


def test_a_turn_whose_end_cannot_be_told_is_refused(make_tokenizer):
    """A template that writes the chat backwards. Fails when `_turn_end` guesses."""
    backwards = "{% for message in messages[::-1] %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    tokenizer = make_tokenizer(backwards)
    with pytest.raises(Refusal, match=r"assistant message 2 ends.*--chat-template"):
        mask_of(tokenizer, [*CHAT[:2], {"role": "user", "content": "x"}])


def test_no_template_is_refused_with_what_to_do(make_tokenizer):
    """Fails when the missing template is left to transformers."""
    with pytest.raises(Refusal, match=r"no chat template.*--chat-template"):
        read_chat_template(make_tokenizer(None))


def test_turns_end_as_the_template_closes_them(make_tokenizer):
    """Fails when the special tokens of the next turn's beginning are taken for an end."""
    models = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>", "cohere": "<|END_OF_TURN_TOKEN|>"}
    closed = [(CHATML, ["<|im_end|>"]), (PLAIN_WORDS, []), *((trl_template(name), [end]) for name, end in models.items())]
    for template, ends in closed:
        tokenizer = make_tokenizer(template)
        assert turn_end_ids(tokenizer) == tokenizer.convert_tokens_to_ids([*ends, "<|endoftext|>"])
