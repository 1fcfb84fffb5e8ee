"""Lists of documents: read from three layouts, framed and cut as the tokenizer does, gathered, counted, and refused by row."""

import dataclasses
import inspect
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.inspection import guess_task, inspect_splits
from toolkit.data.loading.collate_groups import collate_lists

WORDS = inspect.getsource(textwrap).split()


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.RankingConfig):
    dataset: str = "made here"
    eval_fraction: float = 0.0


def text(start: int, words: int) -> str:
    return " ".join(WORDS[start : start + words])


LISTS = [
    {"query": text(0, 4), "documents": [text(5, 3), text(9, 30), text(2, 1)], "labels": [0, 2, 0]},
    {"query": text(50, 7), "documents": [text(55, 12), text(70, 6)], "labels": [1, 0]},
    {"query": text(90, 2), "documents": [text(95, 5)], "labels": [1]},
    {"query": text(120, 3), "documents": [text(130, 4), text(140, 4)], "labels": [0, 0]},
]


def splits_of(rows: list[dict[str, Any]]) -> dict[str, Dataset]:
    return {"train": Dataset.from_list([{**row, "origin": f"judged.jsonl:{i + 1}"} for i, row in enumerate(rows)])}


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "judged.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("longest", [64, 512])
def test_documents_are_framed_and_truncated_as_the_tokenizer_does_it(encoder: Any, longest: int) -> None:
    """Fails when: the query is taken for the second text, or truncation takes the closing token."""
    found = tk.tokenize_for_ranking(splits_of(LISTS), encoder, Config(max_length=longest))["train"]
    for row, given in zip(found, LISTS, strict=True):
        pairs = [encoder(given["query"], document, truncation="only_second", max_length=longest) for document in given["documents"]]
        assert row["input_ids"] == [token for pair in pairs for token in pair["input_ids"]]
        assert row["token_type_ids"] == [kind for pair in pairs for kind in pair["token_type_ids"]]
        assert row["document_tokens"] == [len(pair["input_ids"]) for pair in pairs]
        assert row["length"] == sum(row["document_tokens"])
        assert row["labels"] == given["labels"]
        assert row["documents"] == len(pairs)
        assert row["comparisons"] == sum(a > b for a in given["labels"] for b in given["labels"])
        assert row["query_tokens"] == len(encoder(given["query"], add_special_tokens=False)["input_ids"])


def test_a_query_that_takes_more_than_half_of_the_room_is_cut_too_and_counted(encoder: Any) -> None:
    """As sentence-transformers truncates (longest_first). Fails when: `join` gets the two texts the other way round."""
    rows = [{"query": text(0, 40), "documents": [text(50, 60), text(3, 1)], "labels": [1, 0]}]
    tokenized = tk.tokenize_for_ranking(splits_of(rows), encoder, Config(max_length=41))
    row = tokenized["train"][0]
    pairs = [encoder(rows[0]["query"], document, truncation="longest_first", max_length=41) for document in rows[0]["documents"]]
    assert row["input_ids"] == [token for pair in pairs for token in pair["input_ids"]]
    assert tokenized.report.splits[0].remarks["cut_queries"] == 1
    assert tokenized.report.splits[0].overlong == 1


def test_three_layouts_of_one_content_give_one_tokenized_dataset(encoder: Any) -> None:
    """Rows of one document need not be next to each other. Fails when: a query's later rows start another list; anchors are none."""
    contrasts = [
        {"query": text(0, 4), "positive": text(5, 3), "negative_1": text(9, 9), "negative_2": text(20, 4)},
        {"query": text(50, 7), "positive": text(55, 12), "negative_1": text(70, 6), "negative_2": text(80, 2)},
    ]
    documents = [[row["positive"], row["negative_1"], row["negative_2"]] for row in contrasts]
    lists = [{"query": row["query"], "documents": of, "scores": [1.0, 0.0, 0.0]} for row, of in zip(contrasts, documents, strict=True)]
    of_lists = [{"query": row["query"], "positive": [of[0]], "negatives": of[1:]} for row, of in zip(contrasts, documents, strict=True)]
    single = [
        {"query": contrasts[i]["query"], "document": documents[i][j], "label": str(int(j == 0))} for j in range(3) for i in range(2)
    ]
    columns = ("input_ids", "token_type_ids", "document_tokens", "labels", "documents", "comparisons", "query_tokens")
    anchors = [{"anchor": row.pop("query"), **row} for row in map(dict, of_lists)]
    layouts = (lists, of_lists, contrasts, single, anchors)
    read = [tk.tokenize_for_ranking(splits_of(rows), encoder, Config())["train"] for rows in layouts]
    for other in read[1:]:
        assert [[row[name] for name in columns] for row in other] == [[row[name] for name in columns] for row in read[0]]
    assert read[3]["origin"][:] == ["judged.jsonl:1", "judged.jsonl:2"]


@pytest.mark.parametrize(
    ("row", "loss", "said"),
    [
        ({"documents": []}, "lambda", "documents is an empty list"),
        ({"labels": [1]}, "lambda", "labels .*1 numbers, .*documents .*2"),
        ({"labels": [1, None]}, "lambda", "labels .*null.*number"),
        ({"labels": [3, 0]}, "bce", "the label 3 of document 1 .*--ranking-loss bce .* 0 to 1"),
        ({"labels": [0, 31]}, "lambda", "the label 31 of document 2 .*--ranking-loss lambda"),
        ({"documents": ["a", " "]}, "bce", "documents .*white space"),
        ({"query": ""}, "bce", "query is empty"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_its_row(encoder: Any, row: dict[str, Any], loss: str, said: str) -> None:
    """Fails when: the range of a loss is not looked up, or the origin of the list is taken from its batch's first row."""
    good = {"query": "a", "documents": ["b", "c"], "labels": [1, 0]}
    with pytest.raises(Refusal, match=rf"^judged\.jsonl:2: {said}"):
        tk.tokenize_for_ranking(splits_of([good, good | row]), encoder, Config(ranking_loss=loss))


def test_a_row_of_one_document_is_refused_by_its_own_line_after_it_was_gathered(encoder: Any, tmp_path: Path) -> None:
    """Fails when: a gathered list has the origin of its first row alone."""
    rows = [{"query": "a", "document": f"d{i}", "label": label} for i, label in enumerate((1, 0, 0.5, 2))]
    config = Config(dataset=written(tmp_path, rows), ranking_loss="bce")
    with pytest.raises(Refusal, match=r"judged\.jsonl:4: .*label 2 .*document 4"):
        tk.tokenize_for_ranking(tk.load_splits(config), encoder, config)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"question": ["a"], "passage": ["b"], "label": [1]}, "--rename-columns question=query,passage=document"),
        ({"query": ["a"], "positive": ["b"]}, "query (or anchor), positive and negative"),
    ],
)
def test_other_columns_are_refused_with_what_to_type(encoder: Any, columns: dict[str, list[Any]], said: str) -> None:
    """Fails when: query and document are in no layout that renames are looked for in."""
    with pytest.raises(Refusal) as refused:
        tk.tokenize_for_ranking({"train": Dataset.from_dict(columns)}, encoder, Config())
    assert said in str(refused.value)


def test_lists_in_which_nothing_is_relevant_or_can_be_compared_are_kept_counted_and_refused_when_all_are_so(encoder: Any) -> None:
    """Fails when: same_label is counted for bce too, or a data set without a comparison trains a loss that compares."""
    report = tk.tokenize_for_ranking(splits_of(LISTS), encoder, Config()).report.splits[0]
    assert (report.examples, report.remarks) == (4, {"no_relevant": 1, "same_label": 2})
    of_bce = tk.tokenize_for_ranking(splits_of(LISTS[1:]), encoder, Config(ranking_loss="bce")).report.splits[0]
    assert of_bce.remarks == {"no_relevant": 1}
    with pytest.raises(Refusal, match="--ranking-loss bce"):
        tk.tokenize_for_ranking(splits_of(LISTS[2:]), encoder, Config())
    assert len(tk.tokenize_for_ranking(splits_of(LISTS[2:]), encoder, Config(ranking_loss="bce"))["train"]) == 2


def test_lists_in_which_a_document_has_two_labels_are_counted(encoder: Any) -> None:
    """As when a negative is the positive. Fails when: nobody looks, or a document that is there twice with one label counts."""
    same, other = text(5, 3), text(9, 3)
    lists = [
        {"query": text(20 + 4 * i, 4), "documents": [same, other, same], "labels": labels}
        for i, labels in enumerate([[1, 0, 0], [1, 0, 1], [0, 1, 0.5]])
    ]  # fmt: skip
    found = tk.tokenize_for_ranking(splits_of(lists), encoder, Config())
    assert (len(found["train"]), found.report.splits[0].remarks) == (3, {"two_labels": 2})
    pairs = [{"query": text(0, 4), "positive": same, "negative": negative} for negative in (other, same)]
    assert tk.tokenize_for_ranking(splits_of(pairs), encoder, Config()).report.splits[0].remarks == {"two_labels": 1}


@pytest.mark.parametrize("overlong", ["drop", "refuse"])
def test_a_list_with_an_overlong_document_is_dropped_or_refused_whole(encoder: Any, overlong: str) -> None:
    """Fails when: drop takes the document alone."""
    config = Config(max_length=64, overlong=overlong)
    if overlong == "refuse":
        with pytest.raises(Refusal, match=r"judged\.jsonl:1: \d+ tokens"):
            tk.tokenize_for_ranking(splits_of(LISTS), encoder, config)
        return
    kept = tk.tokenize_for_ranking(splits_of(LISTS), encoder, config)
    assert set(kept["train"]["origin"]) == {f"judged.jsonl:{i}" for i in (2, 3, 4)}
    assert kept.report.splits[0].overlong == 4 - len(kept["train"])


def test_totals_of_a_global_batch_are_its_documents_and_comparisons_and_lists_stay_whole(encoder: Any) -> None:
    """Fails when: `documents` is no unit of the loader."""
    splits = tk.tokenize_for_ranking(splits_of(LISTS * 2), encoder, Config())
    config = Config(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    train, _ = tk.build_dataloaders(splits, collate_lists, dataclasses.replace(config, num_train_epochs=1.0))
    documents = 0
    for batch in train.batches():
        assert batch.totals["documents"] == sum(int(m["documents"].sum()) for m in batch.micro_batches)
        assert batch.totals["comparisons"] == sum(splits["train"][i]["comparisons"] for i in batch.examples)
        for micro_batch in batch.micro_batches:
            assert len(micro_batch["input_ids"]) == len(micro_batch["labels"]) == int(micro_batch["documents"].sum())
            assert micro_batch["most_documents"] == int(micro_batch["documents"].max())
        documents += batch.totals["documents"]
    assert documents == 2 * sum(len(row["documents"]) for row in LISTS)


def test_collated_rows_hold_each_document_and_nothing_of_its_neighbors(encoder: Any) -> None:
    """Fails when: padding takes the place of a document's last token."""
    rows = list(tk.tokenize_for_ranking(splits_of(LISTS), encoder, Config())["train"])
    batch = collate_lists(rows, pad_token_id=7)
    flat = np.concatenate([row["input_ids"] for row in rows])
    assert np.array_equal(batch["input_ids"][batch["attention_mask"].bool()].numpy(), flat)
    assert set(batch["input_ids"][~batch["attention_mask"].bool()].tolist()) == {7}
    assert batch["attention_mask"].sum(1).tolist() == [n for row in rows for n in row["document_tokens"]]


def test_documents_of_one_query_are_held_out_together(tmp_path: Path) -> None:
    """Fails when: the input of a row of query and document is not its query."""
    rows = [{"query": f"q{i % 40}", "document": f"d{i}", "label": i % 2} for i in range(200)]
    splits = tk.load_splits(Config(dataset=written(tmp_path, rows), eval_fraction=0.2))
    assert splits["validation"].num_rows > 0
    assert not set(splits["train"]["query"]) & set(splits["validation"]["query"])


def test_inspect_names_every_bad_list_and_knows_the_task(encoder: Any) -> None:
    """Fails when: rows of one document are taken for classification."""
    assert guess_task(["query", "document", "label"]) == guess_task(["query", "documents", "labels"]) == "ranking"
    bad = {"query": "a", "documents": ["b"], "labels": [1, 0]}
    found = inspect_splits("ranking", splits_of([LISTS[0], bad, LISTS[1], bad | {"documents": []}]), encoder, Config())
    assert [problem.origin for problem in found.problems] == ["judged.jsonl:2", "judged.jsonl:4"]
    assert found.report.splits[0].examples == 2
