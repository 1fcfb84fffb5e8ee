"""Tokenizers: trained ones are exact and reproducible, loaded ones fit for training, mistakes are refused with what to do."""

import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.config import ModelConfig, Refusal
from toolkit.data.tokenize.documents import tokenizer_digest
from toolkit.models.not_loadable import hub_problem
from toolkit.models.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [inspect.getsource(textwrap), inspect.getsource(json)]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello  you"}, {"role": "user", "content": "x"}]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def corpus(monkeypatch):
    """The embedded corpus, small."""
    import toolkit.data.sources.load

    monkeypatch.setattr(toolkit.data.sources.load, "load_splits", lambda name: {"train": {"text": TEXTS}})


def test_any_text_comes_back_unchanged():
    """Fails when: the byte alphabet (`initial_alphabet`) is left out, or a prefix space is added."""
    tokenizer = train_tokenizer(TEXTS, 400)
    for text in ("  def f():\n\treturn 'é'\r\n\n", "日本語 🙂 \x00\u200b", "<|im_start|>user\n", " "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_has_the_size_asked_for_or_what_the_text_gives():
    """Fails when special tokens are added after training."""
    assert len(train_tokenizer(TEXTS, 400)) == 400
    assert max(train_tokenizer(TEXTS, 400)(TEXTS[0])["input_ids"]) < 400
    assert 260 <= len(train_tokenizer(["a short text"], 4096)) < 280
    with pytest.raises(Refusal, match=r"--vocab-size 259 .*256 bytes and 4 "):
        train_tokenizer(TEXTS, 259)


def test_of_a_word_that_is_longer_than_any_tokens_are_made_of_pieces():
    """And of those around it as without it. Fails when: each merge goes over the whole word, minutes for millions of letters."""
    tokenizer = train_tokenizer([f"hello\n  you {'x' * 10_000}{'y' * 5_000} hello"], 400)
    assert {"hello", "xx", "yy"} <= tokenizer.vocab.keys()
    assert not [token for token in tokenizer.vocab if "xy" in token]


def test_special_tokens_are_single_distinct_and_known():
    """Fails when the pad token is the end of text."""
    tokenizer = train_tokenizer(TEXTS, 400)
    tokens = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer("".join(tokens))["input_ids"] == tokenizer.convert_tokens_to_ids(tokens) == [0, 1, 2, 3]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert tokenizer("text")["input_ids"] == tokenizer("text", add_special_tokens=False)["input_ids"]


def test_the_chat_template_is_chatml_and_marks_what_the_assistant_says():
    """Fails when the end of the turn is outside the marks."""
    tokenizer = train_tokenizer(TEXTS, 400)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello  you<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == text + "<|im_start|>assistant\n"
    marked = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mark in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(said) == "Hello  you<|im_end|>"


def test_an_encoder_gets_tokens_around_its_texts():
    """As BERT's: one before, one after each, types 0 and 1. Fails when: the post-processor is left out."""
    tokenizer = train_tokenizer(TEXTS, 400, encoder=True)
    pair = tokenizer("def", "return")
    assert tokenizer.decode(pair["input_ids"]) == "<|cls|>def<|sep|>return<|sep|>"
    first = len(tokenizer("def")["input_ids"])
    assert pair["token_type_ids"] == [0] * first + [1] * (len(pair["input_ids"]) - first)
    assert tokenizer.mask_token_id is not None


def test_a_word_has_the_same_uncased_tokens_wherever_it_is():
    """And each token knows its place in the text. Fails when: the normalizer or a pre-tokenizer of `uncased` is left out."""
    tokenizer = train_tokenizer(TEXTS, 600, encoder=True, uncased=True)
    texts = ["Decode the lines2.", "decodeTheLines2.", "decode_THELines_2 .", "(decode the\n  LINES) 2."]
    word = {name: tokenizer(name, add_special_tokens=False)["input_ids"] for name in ("decode", "the", "lines", "2")}
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        for name, tokens in word.items():
            place = next(i for i in range(len(ids)) if ids[i : i + len(tokens)] == tokens)
            start, end = encoded["offset_mapping"][place][0], encoded["offset_mapping"][place + len(tokens) - 1][1]
            assert text[start:end].lower() == name, text
    ids = tokenizer("HTTPServer: (one),\n\ttwo!")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "http server: (one), two!"


def test_the_same_texts_give_the_same_tokenizer_in_any_process():
    """With another hash seed and three threads, where this process has one. Fails when merges of equal counts are left to chance."""
    program = (
        "import inspect, textwrap, json\nfrom toolkit.data.tokenize.documents import tokenizer_digest\nfrom toolkit.models.tokenizer import "
        "train_tokenizer\nprint(tokenizer_digest(train_tokenizer([inspect.getsource(textwrap), inspect.getsource(json)], 600)))"
    )
    chance = {"PYTHONHASHSEED": "3", "RAYON_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **chance}, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == tokenizer_digest(train_tokenizer(TEXTS, 600))


def test_a_saved_tokenizer_is_the_same_when_loaded(tmp_path):
    """Fails when the template or a special token isn't saved."""
    for encoder in (False, True):
        tokenizer = train_tokenizer(TEXTS, 400, encoder=encoder)
        tokenizer.save_pretrained(tmp_path / str(encoder))
        loaded = load_tokenizer(ModelConfig(model=str(tmp_path / str(encoder))))
        assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)
        assert loaded.pad_token_id == tokenizer.pad_token_id


def test_a_built_in_shape_gets_a_tokenizer_trained_once_on_the_embedded_corpus(corpus, tmp_path, monkeypatch):
    """Fails when the cache's key leaves out the vocabulary's size or the kind of the model."""
    built = load_tokenizer(ModelConfig(model="tiny-llama", vocab_size=400))
    assert tokenizer_digest(built) == tokenizer_digest(train_tokenizer(TEXTS, 400))
    assert len(load_tokenizer(ModelConfig(model="tiny-llama", vocab_size=300))) == 300
    assert load_tokenizer(ModelConfig(model="tiny-bert", vocab_size=300)).cls_token == "<|cls|>"
    uncased = load_tokenizer(ModelConfig(model="small-bert-uncased", vocab_size=300))
    assert uncased("A")["input_ids"] == uncased("a")["input_ids"]
    monkeypatch.setattr("toolkit.models.tokenizer.train_tokenizer", lambda *args, **kwargs: pytest.fail("trained again"))
    assert tokenizer_digest(load_tokenizer(ModelConfig(model="tiny-qwen3", vocab_size=400))) == tokenizer_digest(built)
    assert len(list((tmp_path / "cache").glob("tokenizer-*.lock"))) == 4


def test_a_full_disk_refuses_a_trained_tokenizer(corpus, tmp_path, monkeypatch):
    """Fails when: the error of tokenizers, which is none of the operating system's, reaches the user as a traceback."""

    def full(tokenizer, folder):
        (folder / "tokenizer.json").symlink_to("/dev/full")
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(Refusal, match=rf"{tmp_path}/cache.*No space left"):
        load_tokenizer(ModelConfig(model="tiny-llama", vocab_size=400))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def _load_in_a_process(cache, results):
    import datasets

    import toolkit.data.sources.load

    datasets.config.HF_DATASETS_CACHE = cache
    toolkit.data.sources.load.load_splits = lambda name: {"train": {"text": TEXTS}}
    results.put(tokenizer_digest(load_tokenizer(ModelConfig(vocab_size=400))))


def test_two_processes_at_once_get_the_same_whole_tokenizer(tmp_path):
    """Fails when the files are written in place."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_load_in_a_process, args=(tmp_path / "cache", results)) for _ in range(2)]
    for process in processes:
        process.start()
    digests = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert digests == {tokenizer_digest(train_tokenizer(TEXTS, 400))}


@pytest.fixture
def saved(tmp_path):
    """A directory with a tokenizer that has no pad token."""
    tokenizer = train_tokenizer(TEXTS, 400)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    made.save_pretrained(tmp_path / "models" / "mine")
    return tmp_path / "models" / "mine"


def test_padding_uses_a_token_the_vocabulary_has(saved):
    """A reserved one, else the end of text; nothing is added, so that the embedding still fits. Fails when one is."""
    loaded = load_tokenizer(ModelConfig(model=str(saved)))
    assert loaded.pad_token == "<|pad|>"
    renamed = (saved / "tokenizer.json").read_text().replace("<|pad|>", "<|other|>")
    (saved / "tokenizer.json").write_text(renamed)
    loaded = load_tokenizer(ModelConfig(model=str(saved)))
    assert loaded.pad_token == loaded.eos_token == "<|endoftext|>"
    assert len(loaded) == 400


def test_a_chat_template_file_takes_the_place_of_the_tokenizers(saved, tmp_path):
    """Fails when the file is ignored."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}")
    loaded = load_tokenizer(ModelConfig(tokenizer=str(saved), chat_template=str(file)))
    assert loaded.apply_chat_template(CHAT, tokenize=False) == "Hi|Hello  you|x|"


def refusal_of(**settings):
    with pytest.raises(Refusal) as refusal:
        load_tokenizer(ModelConfig(**settings))
    return str(refusal.value)


def test_mistyped_and_empty_directories_are_told_with_what_is_there(saved, tmp_path):
    """Fails when the name is sent to the Hub, or a tokenizer is made up from a model's config."""
    assert f"Did you mean: {saved}" in refusal_of(model=str(saved.parent / "mien"))
    assert f"{tmp_path} does" in refusal_of(tokenizer=str(tmp_path / "no" / "such" / "place"))
    model = tmp_path / "model-only"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    message = refusal_of(model=str(model))
    assert f"--model {model}: the directory holds no tokenizer" in message
    assert "--tokenizer" in message
    for broken in ("{", "[" * 100_000):  # the second is nested deeper than Python reads
        (model / "tokenizer.json").write_text(broken)
        assert re.match(rf"--tokenizer {model}: .*: tokenizer\.json: ", refusal_of(tokenizer=str(model)))
    run = tmp_path / "run"
    run.mkdir()
    model.rename(run / "model")
    assert re.fullmatch(rf"--model {run}: .*--model {run}/model\?", refusal_of(model=str(run)))


def test_a_name_that_needs_an_unreachable_hub_is_told_with_what_to_do(monkeypatch):
    """Fails when transformers' own error comes through."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refusal_of(model="nobody-there/nothing")
    assert message.startswith("--model nobody-there/nothing: ")
    assert "HF_HUB_OFFLINE" in message
    assert "--model tiny-llama" in message


def test_the_hubs_answers_are_told_with_what_to_do():
    """Through transformers' wrapping. Fails when only the outer error is looked at."""
    answers = {"GatedRepoError": "hf auth login", "RepositoryNotFoundError": "no such repo", "RevisionNotFoundError": "'v9'"}
    for name, hint in answers.items():
        outer = OSError("can't load it")
        outer.__cause__ = type(name, (Exception,), {})("403")
        assert hint in hub_problem(outer, "a/b", "v9")
    assert hub_problem(ValueError("something else"), "a/b", None) is None


def test_a_chat_template_that_cannot_be_used_is_told_by_file_and_line(saved, tmp_path):
    """Fails when the file is read but not compiled."""
    file = tmp_path / "chat.jinja"
    assert re.match(rf"--chat-template {file}: .*No such file", refusal_of(model=str(saved), chat_template=str(file)))
    (tmp_path / "chat2.jinja").write_text("x")
    assert f"Did you mean: {tmp_path / 'chat2.jinja'}" in refusal_of(model=str(saved), chat_template=str(file))
    file.write_text("line\n{% for m in messages %}{{ m.content }}\n{% endfro %}")
    assert f"--chat-template {file}:3: not valid Jinja" in refusal_of(model=str(saved), chat_template=str(file))
    file.write_text("Hello")
    assert "goes through `messages`" in refusal_of(model=str(saved), chat_template=str(file))
    file.write_bytes(b"messages \xff")
    assert "byte 9 is not UTF-8" in refusal_of(model=str(saved), chat_template=str(file))


def test_settings_without_effect_or_unsafe_are_refused(saved):
    """Fails when --vocab-size is ignored, or code from the Hub runs unpinned."""
    assert "--vocab-size 500 has no effect" in refusal_of(model=str(saved), vocab_size=500)
    assert "Pin it: --model-revision COMMIT" in refusal_of(model="someone/model", trust_remote_code=True)
    assert "give the directory to --tokenizer" in refusal_of(tokenizer="someone/model", trust_remote_code=True)


def test_remote_code_and_revision_pass_only_as_set(monkeypatch):
    """Fails when trust_remote_code is anything but the setting, or the model's revision goes to another tokenizer."""
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options))
        return train_tokenizer(["a"], 300)

    monkeypatch.setattr("transformers.AutoTokenizer", SimpleNamespace(from_pretrained=from_pretrained))
    load_tokenizer(ModelConfig(model="a/b", model_revision="abc", trust_remote_code=True))
    load_tokenizer(ModelConfig(model="a/b", model_revision="abc"))
    load_tokenizer(ModelConfig(model="a/b", model_revision="abc", tokenizer="c/d"))
    assert asked == [
        ("a/b", {"revision": "abc", "trust_remote_code": True}),
        ("a/b", {"revision": "abc", "trust_remote_code": False}),
        ("c/d", {"revision": None, "trust_remote_code": False}),
    ]


def test_a_digest_is_of_content_alone():
    """Fails when the state that use leaves behind (padding, truncation) is part of it."""
    tokenizer = train_tokenizer(TEXTS, 400)
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.chat_template += " "
    assert tokenizer_digest(tokenizer) != before
