"""What the tests of tokenizing share: a cache of their own, and a small tokenizer with a template, trained once."""

import inspect
import textwrap

import pytest


@pytest.fixture(autouse=True)
def apart(own_cache, monkeypatch):
    """Each test is the only rank, with a cache of its own."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture(scope="session")
def trained():
    from toolkit.models.tokenizer import train_tokenizer

    return train_tokenizer([inspect.getsource(textwrap)], 500)


@pytest.fixture(scope="session")
def encoder():
    """An encoder's tokenizer, which nothing changes."""
    from toolkit.models.tokenizer import train_tokenizer

    return train_tokenizer([inspect.getsource(textwrap)], 500, encoder=True)


@pytest.fixture
def tokenizer(trained):
    """A copy that a test may change."""
    made = type(trained)(
        tokenizer_object=type(trained.backend_tokenizer).from_str(trained.backend_tokenizer.to_str()),
        eos_token="<|endoftext|>", pad_token="<|pad|>", extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    made.chat_template = trained.chat_template
    return made
