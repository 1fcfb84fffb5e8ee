"""Tokenizers: from the Hub, from a directory, or trained here on any texts."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.config import ModelConfig, Refusal
from toolkit.config.conditions import is_built_in
from toolkit.config.json_and_yaml import read_text_file
from toolkit.models.compat import compile_template
from toolkit.models.not_loadable import OFFLINE, broken_file, hub_problem
from toolkit.models.shapes import check_config_files
from toolkit.system.console import as_typed, first_line
from toolkit.system.files import naming
from toolkit.system.imports import imported_to_stay
from toolkit.system.network import stay_offline_without_network

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_VOCAB_SIZE = 4096
_LONG_WORD, _PIECES = re.compile(r"\S{10001}"), re.compile(r"\s*\S{1,10000}|\s+\Z")
UNCASED = "-uncased"  # the names of built-in shapes end so whose tokenizer has words in lower case, as BERT's do
END_OF_TEXT, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
ENCODER_TOKENS = {"cls_token": "<|cls|>", "sep_token": "<|sep|>", "mask_token": "<|mask|>"}

# ChatML, with tools and their calls as Qwen's and Hermes' templates write them. The marks show what the assistant wrote; the
# end of its turn is part of that, the line break after it is not.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nCall one with its name and arguments as JSON:\\n' }}
    {{- '<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' %}
            {%- generation %}
                {{- message.content or '' }}
                {%- for call in message.tool_calls or [] %}
                    {%- set function = call.function or call %}
                    {{- '\\n' if message.content or not loop.first else '' }}
                    {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
                    {{- function.arguments if function.arguments is string else function.arguments | tojson }}
                    {{- '}\\n</tool_call>' }}
                {%- endfor %}
                {{- '<|im_end|>' }}
            {%- endgeneration %}
        {%- else %}
            {{- message.content + '<|im_end|>' }}
        {%- endif %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_TRAINING_VERSION = 2  # raise it when train_tokenizer makes another tokenizer from the same texts
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_UNUSED_TOKENS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|pad_token|>")


@imported_to_stay()
def load_tokenizer(config: ModelConfig | str, *, is_fast: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer of `config.tokenizer`, else the model's own; for a built-in shape one trained on the embedded corpus.

    It always has a pad token, never a new one, which would not fit the embedding. Where that is the end-of-text token
    nothing is lost: masks go by position, never by id.

    Args:
        config: a ModelConfig, or a model's name.
        is_fast: refuse one without a fast version, which masks need; sources and targets are encoded by any.

    Raises:
        Refusal: an unknown or unreachable name, a directory without a tokenizer, a tokenizer or chat template that can't
            be used, settings that contradict each other.
    """
    config = ModelConfig(model=config) if isinstance(config, str) else config
    if config.tokenizer is None and is_built_in(config.model):
        encoder, uncased = "-bert" in config.model, config.model.endswith(UNCASED)
        tokenizer = _embedded_tokenizer(config.vocab_size or DEFAULT_VOCAB_SIZE, encoder, uncased)
    else:
        if config.vocab_size is not None:
            name = config.tokenizer or config.model
            raise Refusal(f"--vocab-size {config.vocab_size} has no effect: the tokenizer of {name} has its own. Remove it.")
        tokenizer = _pretrained_tokenizer(config, is_fast)
    if config.chat_template is not None:
        tokenizer.chat_template = _read_chat_template(config.chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _token_to_pad_with(tokenizer)
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE, *, encoder: bool = False, uncased: bool = False
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE: any text can be encoded and comes back unchanged. The same texts give the same tokenizer.

    It has an end-of-text token, a pad token of its own and a ChatML chat template with its tokens. With `encoder` also
    what a BERT needs: a token before the text, one after each text of a pair, a mask token. From little text it has fewer
    than `vocab_size` entries: build the model with `len(tokenizer)`.

    With `uncased` a word has the same tokens wherever it is: `readHeader`, `read_header` and "Read the header." share read
    and header. Case and white space are lost: what comes back is words in lower case with one space between them.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, PAD, TURN_START, TURN_END, *(ENCODER_TOKENS.values() if encoder else ())]
    if vocab_size < 256 + len(special):
        raise Refusal(f"--vocab-size {vocab_size} is too small: 256 bytes and {len(special)} special tokens need places.")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if uncased:
        backend.normalizer = normalizers.Sequence([
            normalizers.Replace(Regex(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"), " "), normalizers.Lowercase(),
        ])  # fmt: skip
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(use_regex=False),
        ])  # fmt: skip
        backend.decoder = decoders.Sequence(
            [decoders.ByteLevel(), decoders.Replace(Regex(r"^ |(?<=[(\[{]) | (?=[.,;:!?)\]}'])"), "")]
        )
    backend.train_from_iterator(_with_cut_words(texts), trainer)
    options: dict[str, Any] = {"eos_token": END_OF_TEXT, "pad_token": PAD, "extra_special_tokens": [TURN_START, TURN_END]}
    if encoder:
        options |= {**ENCODER_TOKENS, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        first, after = ENCODER_TOKENS["cls_token"], ENCODER_TOKENS["sep_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {after}", pair=f"{first} $A {after} $B:1 {after}:1",
            special_tokens=[(token, backend.token_to_id(token)) for token in (first, after)],
        )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)
    tokenizer.chat_template = CHATML
    return tokenizer


def _with_cut_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, where a word is longer than any of a language (base64, DNA) in pieces: each token that is made goes over whole
    words again, which took minutes of one word of 500,000 letters (tokenizers 0.23)."""
    for text in texts:
        yield from _PIECES.findall(text) if _LONG_WORD.search(text) else [text]


def _embedded_tokenizer(vocab_size: int, encoder: bool, uncased: bool) -> PreTrainedTokenizerFast:
    """Trained on the training split of the embedded corpus; kept on disk, as that takes seconds."""
    from transformers import PreTrainedTokenizerFast

    from toolkit.cache.arrow import cache_folder
    from toolkit.data.sources.load import load_splits

    texts = load_splits("stdlib:pretrain")["train"]["text"][:]
    content = hashlib.sha256(f"{_TRAINING_VERSION}:{vocab_size}:{encoder}{':uncased' * uncased}".encode())
    for text in texts:
        content.update(text.encode() + b"\0")

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer(texts, vocab_size, encoder=encoder, uncased=uncased)
        with naming(folder):
            tokenizer.save_pretrained(folder)

    return PreTrainedTokenizerFast.from_pretrained(cache_folder(f"tokenizer-{content.hexdigest()[:20]}", build))


def _pretrained_tokenizer(config: ModelConfig, is_fast: bool) -> PreTrainedTokenizerFast:
    name = config.tokenizer or config.model
    setting = "--tokenizer" if config.tokenizer else "--model"
    is_directory = Path(os.path.expanduser(name)).is_dir()
    if is_directory:
        name = str(Path(os.path.expanduser(name)))
        if not any(Path(name, file).exists() for file in _TOKENIZER_FILES):
            of_run = Path(name, "model")
            if any((of_run / file).exists() for file in ("config.json", "adapter_config.json")):
                raise Refusal(f"{setting} {name}: is a run's output directory. Did you mean {setting} {of_run}?")
            if (Path(name) / "checkpoints").is_dir() or Path(name).parent.name == "checkpoints":
                made_by = as_typed("toolkit", "export", name)
                raise Refusal(f"{setting} {name}: is no model directory. One of its checkpoint is made by: {made_by}")
            raise Refusal(
                f"{setting} {name}: the directory holds no tokenizer (none of {', '.join(_TOKENIZER_FILES[:4])} ...). "
                "Save it there with tokenizer.save_pretrained(...), or name another with --tokenizer"
            )
        check_config_files(Path(name), f"{setting} {name}")  # transformers reads config.json for a tokenizer too
    elif _is_path(name):
        raise Refusal(f"{setting} {name}: there is no such directory.{_suggest(name)}")
    revision = None if config.tokenizer or is_directory else config.model_revision
    if config.trust_remote_code and not is_directory and revision is None:
        raise Refusal(
            f"--trust-remote-code runs code of {name} from the Hub and needs one fixed version of it. "
            + ("Download it and give the directory to --tokenizer." if config.tokenizer else "Pin it: --model-revision COMMIT")
        )
    from transformers import AutoTokenizer

    if not is_directory:
        stay_offline_without_network()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever a file or the Hub can do wrong; the cause stays attached
        what = f"its tokenizer can't be loaded: {broken_file(name)}{type(error).__name__}: {first_line(error)}"
        reason = hub_problem(error, name, revision) or what
        if config.tokenizer:  # a built-in shape is no tokenizer
            reason = reason.replace(OFFLINE, "or give a directory")
        raise Refusal(f"{setting} {name}: {reason}{'' if is_directory else _suggest(name)}") from error
    if is_fast and getattr(tokenizer, "backend_tokenizer", None) is None:
        raise Refusal(
            f"{setting} {name}: its tokenizer ({type(tokenizer).__name__}) has no fast version (tokenizer.json), which the "
            "supervised masks need. Name another with --tokenizer"
        )
    return cast("PreTrainedTokenizerFast", tokenizer)


def tokenizer_commit(tokenizer: str | None, model: str | None, model_revision: str | None) -> str | None:
    """For a run card: the commit on the Hub of the tokenizer that `load_tokenizer` reads for these settings, or None."""
    name = tokenizer or model
    if not name or is_built_in(name) or Path(os.path.expanduser(name)).is_dir():
        return None
    with contextlib.suppress(ValueError):  # no name of the Hub's: the recipe reads another tokenizer
        return commit_in_cache(name, None if tokenizer else model_revision, _TOKENIZER_FILES)
    return None


def commit_in_cache(name: str, revision: str | None, files: Sequence[str]) -> str | None:
    """The commit of what was just read from the Hub, by the folder of its cache in which one of the files lies.

    transformers keeps it no longer: configs have lost their `_commit_hash` (5.23).
    """
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent.name
    return None


def _is_path(name: str) -> bool:
    return name[0] in "./~\\" or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _suggest(name: str, is_wanted: Callable[[Path], bool] = Path.is_dir) -> str:
    """What is spelled much like a missing directory, or file, and is next to it."""
    path = Path(os.path.expanduser(name))
    if not path.parent.is_dir():
        nearest = next((parent for parent in path.parents if parent.is_dir()), None)
        return f" {path.parent} does not exist either; {nearest} does." if nearest and str(nearest) != "." else ""
    there = sorted(entry.name for entry in path.parent.iterdir() if is_wanted(entry))
    close = difflib.get_close_matches(path.name, there, n=3, cutoff=0.6)
    return f" Did you mean: {', '.join(str(path.parent / entry) for entry in close)}" if close else ""


def _read_chat_template(file: str) -> str:
    import jinja2

    if not Path(os.path.expanduser(file)).exists():
        raise Refusal(f"--chat-template {file}: can't be read: No such file or directory.{_suggest(file, Path.is_file)}")
    template = read_text_file(file, f"--chat-template {file}")
    if "messages" not in template:
        raise Refusal(f"--chat-template {file}: a chat template goes through `messages`, which this file never mentions.")
    try:
        compile_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise Refusal(f"--chat-template {file}:{error.lineno}: not valid Jinja: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, OverflowError, MemoryError) as error:  # of its Python
        raise Refusal(f"--chat-template {file}: can't be compiled: {type(error).__name__}: {error}") from error
    return template


def _token_to_pad_with(tokenizer: PreTrainedTokenizerFast) -> str:
    """A token the vocabulary already has: one reserved for padding, else the end of text, else the unknown token."""
    vocabulary = tokenizer.get_vocab()
    reserved = next((token for token in _UNUSED_TOKENS if token in vocabulary), None)
    token = reserved or tokenizer.eos_token or tokenizer.unk_token
    if token is None:
        raise Refusal("The tokenizer has no token to pad with (no pad, eos or unk token). Set one in tokenizer_config.json")
    return token
