"""Groups of texts against transformers' own tokenizing, and what of them is refused, by file and row."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

import toolkit as tk
from toolkit.config import DataConfig, Refusal
from toolkit.data.inspection import guess_task, inspect_splits
from toolkit.data.tokenize.text_groups import text_key

QUERIES = ["red boat", "the green house by the sea", "old tree"]
POSITIVES = ["a boat that is red", "house", "a tree, old as the hills"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tk.train_tokenizer(QUERIES + POSITIVES, vocab_size=320, encoder=True)


def splits(**columns: list[Any]) -> DatasetDict:
    count = len(next(iter(columns.values())))
    return DatasetDict(train=Dataset.from_dict({**columns, "origin": [f"made.jsonl:{n + 1}" for n in range(count)]}))


def texts_of(row: dict[str, Any]) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.array(row["input_ids"]), np.cumsum(row["text_tokens"])[:-1])]


@pytest.mark.parametrize("max_length", [64, 12])
def test_each_text_is_tokenized_as_transformers_does_alone(tokenizer: Any, max_length: int) -> None:
    """Anchor, positive and ragged negatives, with prompts; truncated, each keeps its last special token.

    Fails when: the prompt of documents is put before queries; truncation cuts the tokens around the text.
    """
    data = splits(query=QUERIES, positive=POSITIVES, negatives=[["no boat"], [], ["a bush", "a shrub"]])
    found = tk.tokenize_for_embedding(
        data, tokenizer, DataConfig(max_length=max_length), query_prompt="query: ", document_prompt="passage: "
    )["train"]
    for row, given in zip(found, data["train"], strict=True):
        texts = ["query: " + given["query"], *("passage: " + text for text in (given["positive"], *given["negatives"]))]
        assert texts_of(row) == [tokenizer(text, truncation=True, max_length=max_length)["input_ids"] for text in texts]
        assert row["text_keys"] == [text_key(text) for text in (given["query"], given["positive"], *given["negatives"])]
    batch = tk.collate_text_groups(list(found), pad_token_id=tokenizer.pad_token_id)
    assert batch["role"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch["example"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    for ids, mask, text in zip(batch["input_ids"], batch["attention_mask"], [t for row in found for t in texts_of(row)], strict=True):
        assert ids[mask.bool()].tolist() == text


def test_columns_of_negatives_make_the_same_rows_as_a_list(tokenizer: Any) -> None:
    """`negative_2` before `negative_10`, and a missing one is none. Fails when: columns are sorted as texts."""
    listed = splits(anchor=QUERIES[:2], positive=POSITIVES[:2], negatives=[["one", "two", "ten"], ["one", "ten"]])
    apart = splits(
        anchor=QUERIES[:2], positive=POSITIVES[:2], negative_1=["one"] * 2, negative_10=["ten"] * 2, negative_2=["two", None]
    )
    rows = [tk.tokenize_for_embedding(data, tokenizer, DataConfig(max_length=64))["train"]["text_keys"][:] for data in (listed, apart)]
    assert rows[0] == rows[1]


def test_scores_are_divided_by_their_scale_and_both_sentences_are_queries(tokenizer: Any) -> None:
    """Fails when: the score is kept as it is; the second sentence gets the document's prompt."""
    data = splits(sentence1=QUERIES, sentence2=POSITIVES, score=[5, 0, 2.5])
    found = tk.tokenize_for_embedding(data, tokenizer, DataConfig(max_length=64), query_prompt="q: ", score_scale=5.0)["train"]
    assert found["score"][:] == [1.0, 0.0, 0.5]
    assert texts_of(found[0]) == [tokenizer("q: " + text)["input_ids"] for text in (QUERIES[0], POSITIVES[0])]


BAD = {
    "a score beyond its range": ({"sentence1": QUERIES, "sentence2": POSITIVES, "score": [0.1, 4.0, 0.2]}, "made.jsonl:2: score is 4"),
    "a score that is no number": ({"sentence1": QUERIES, "sentence2": POSITIVES, "score": [0.1, None, 0.2]}, "made.jsonl:2: score"),
    "an empty positive": ({"anchor": QUERIES, "positive": ["a", "b", " "]}, "made.jsonl:3: positive"),
    "an empty negative": ({"anchor": QUERIES, "positive": POSITIVES, "negatives": [["a"], ["b", ""], ["c"]]}, "made.jsonl:2: negatives"),
    "a negative that is the positive": (
        {"query": QUERIES, "positive": POSITIVES, "negative": ["a", "b", POSITIVES[2] + " "]}, "made.jsonl:3: a negative",
    ),
    "other columns": ({"question": QUERIES, "passage": POSITIVES}, "anchor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_refused_by_row(tokenizer: Any, case: str) -> None:
    """Fails when: the check of that case is taken out."""
    columns, said = BAD[case]
    with pytest.raises(Refusal, match=said):
        tk.tokenize_for_embedding(splits(**columns), tokenizer, DataConfig(max_length=64))


def test_long_texts_are_truncated_dropped_or_refused(tokenizer: Any) -> None:
    """A row is as long as its longest text. Fails when: the sum of a row's texts is compared with --max-length."""
    data = splits(anchor=["a b", "c"], positive=["a b c " * 20, "d"])
    longest = len(tokenizer("a b c " * 20)["input_ids"])
    for overlong, kept in (("truncate", 2), ("drop", 1)):
        found = tk.tokenize_for_embedding(data, tokenizer, DataConfig(max_length=longest - 1, overlong=overlong))["train"]
        assert len(found) == kept
        assert len(tk.tokenize_for_embedding(data, tokenizer, DataConfig(max_length=longest, overlong=overlong))["train"]) == 2
    with pytest.raises(Refusal, match=r"made\.jsonl:1"):
        tk.tokenize_for_embedding(data, tokenizer, DataConfig(max_length=longest - 1, overlong="refuse"))
    with pytest.raises(Refusal, match="--overlong split"):
        tk.tokenize_for_embedding(data, tokenizer, DataConfig(max_length=64, overlong="split"))


def test_inspect_knows_the_task_and_names_every_bad_row(tokenizer: Any) -> None:
    """Fails when: guess_task does not know the columns; only the first problem is found."""
    assert guess_task(["anchor", "positive", "negative"]) == guess_task(["query", "positive"]) == "embedding"
    assert guess_task(["sentence1", "sentence2", "score"]) == "embedding"
    data = splits(anchor=["a", "", "c"], positive=["x", "y", " "])
    found = inspect_splits("embedding", data, tokenizer, DataConfig(max_length=64))
    assert [problem.origin for problem in found.problems] == ["made.jsonl:2", "made.jsonl:3"]
    assert [name for name, _ in found.examples[0][1]] != []


@dataclass(frozen=True)
class Config(tk.DataConfig, tk.EmbeddingConfig):
    max_length: int = 64


ALIKE: dict[str, tuple[dict[str, list[Any]], dict[str, str], str]] = {
    "one row": ({"anchor": QUERIES[:1], "positive": POSITIVES[:1]}, {}, "one positive text and no negatives"),
    "one positive": ({"anchor": QUERIES, "positive": POSITIVES[:1] * 3}, {}, "one positive text and no negatives"),
    "a negative": ({"anchor": QUERIES, "positive": POSITIVES[:1] * 3, "negative": [None, None, "no"]}, {}, ""),
    "equal scores": ({"sentence1": QUERIES, "sentence2": POSITIVES, "score": [1.0] * 3}, {}, "--embedding-loss cosine"),
    "equal scores, cosine": ({"sentence1": QUERIES, "sentence2": POSITIVES, "score": [1.0] * 3}, {"embedding_loss": "cosine"}, ""),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_split_in_which_nothing_can_be_compared_is_refused(tokenizer: Any, case: str) -> None:
    """Its loss is 0 at each step. Fails when: `check_comparable` returns at once, or counts texts alone."""
    columns, settings, said = ALIKE[case]
    with pytest.raises(Refusal, match=said) if said else nullcontext():
        tk.tokenize_for_embedding(splits(**columns), tokenizer, Config(**settings))
