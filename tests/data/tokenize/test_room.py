"""A --max-length that leaves no token of a text: every example would be the same, and the run would learn nothing from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

import toolkit as tk
from toolkit.config import Refusal


@dataclass(frozen=True)
class Config(tk.DataConfig, tk.ClassificationConfig, tk.TokenClassificationConfig, tk.Seq2SeqConfig, tk.EmbeddingConfig, tk.RankingConfig):
    max_length: int = 64


LISTS = {"query": ["red", "old"], "documents": [["boat", "tree"]] * 2, "labels": [[1, 0]] * 2}
# what tokenizes, its columns, and how many tokens are put around a text or a pair of them, next to one of each text
TASKS: dict[str, tuple[Callable[..., Any], dict[str, list[Any]], int]] = {
    "a text": (tk.tokenize_for_classification, {"text": ["red boat", "old tree"], "label": ["a", "b"]}, 3),
    "two texts": (tk.tokenize_for_classification, {"text": ["red", "old"], "text_pair": ["a", "b"], "label": ["a", "b"]}, 5),
    "words": (tk.tokenize_for_token_classification, {"tokens": [["red", "boat"]] * 2, "tags": [["X", "Y"]] * 2}, 3),
    "lists": (tk.tokenize_for_ranking, LISTS, 5),
    "choices": (tk.tokenize_for_multiple_choice, {"question": ["red?", "old?"], "choices": [["a", "b"]] * 2, "answer": [0, 1]}, 5),
    "embeddings": (tk.tokenize_for_embedding, {"anchor": ["red", "old"], "positive": ["boat", "tree"]}, 3),
    "sources": (tk.tokenize_for_seq2seq, {"source": ["red", "old"], "target": ["boat", "tree"]}, 3),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_length_without_room_for_a_text_is_refused(task: str) -> None:
    """Fails when: `check_room` is left out of the task's `rows`, or `own + texts` is `own`."""
    tokenize, columns, least = TASKS[task]
    tokenizer = tk.train_tokenizer(["a red boat", "an old tree"] * 9, vocab_size=300, encoder=True)
    data = DatasetDict(train=Dataset.from_dict({**columns, "origin": ["x.jsonl:1", "x.jsonl:2"]}))
    tokenize(data, tokenizer, Config(max_length=least))
    with pytest.raises(Refusal, match=rf"--max-length {least - 1}: leaves no room .* at least {least}\."):
        tokenize(data, tokenizer, Config(max_length=least - 1))


def test_a_prefix_as_long_as_the_limit_is_refused() -> None:
    """Fails when: the prefix's tokens are not added to those around a source, or a prompt's to those around an embedded text."""
    tokenizer = tk.train_tokenizer(["a red boat", "an old tree"] * 9, vocab_size=300, encoder=True)
    data = DatasetDict(train=Dataset.from_dict(TASKS["sources"][1]))
    with pytest.raises(Refusal, match=r"--max-length 64: leaves no room"):
        tk.tokenize_for_seq2seq(data, tokenizer, Config(source_prefix="x " * 99))
    data = DatasetDict(train=Dataset.from_dict(TASKS["embeddings"][1]))
    with pytest.raises(Refusal, match=r"--max-length 64: leaves no room"):
        tk.tokenize_for_embedding(data, tokenizer, Config(), query_prompt="x " * 99)
