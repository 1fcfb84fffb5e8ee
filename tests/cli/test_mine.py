"""toolkit mine: what is found is what a plain search finds, and never a positive."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.data.hard_negatives import hard_negatives
from toolkit.models.sentence_files import EmbeddingStyle

ROWS = [{"query": f"where is {word}", "positive": f"here is {word} of it"} for word in ("red", "green", "old", "new", "small", "large")]


def by_search(anchors: np.ndarray, documents: np.ndarray, positives: set[tuple[int, int]], count: int, margin: float, skip: int) -> list[list[int]]:
    """One cosine after another."""
    found = []
    for i, anchor in enumerate(anchors):
        cosines = [float(anchor @ each / np.linalg.norm(anchor) / np.linalg.norm(each)) for each in documents]
        least = min(cosines[j] for a, j in positives if a == i)
        allowed = [j for j in range(len(documents)) if (i, j) not in positives and cosines[j] <= least - margin]
        found.append(sorted(allowed, key=lambda j: -cosines[j])[skip : skip + count])
    return found


@pytest.mark.parametrize("block", [None, 1, 7])
@pytest.mark.parametrize(("margin", "skip"), [(0.0, 0), (0.2, 2)])
def test_negatives_are_those_of_a_plain_search_for_any_block(block: int | None, margin: float, skip: int) -> None:
    """Fails when: other positives of the anchor are taken; the margin is added; what is skipped is counted among the N."""
    generator = np.random.default_rng(0)
    anchors, documents = generator.normal(size=(23, 6)), generator.normal(size=(41, 6))
    positives = {(i, int(j)) for i in range(23) for j in generator.integers(0, 41, 2)}
    found = hard_negatives(anchors, documents, np.array(sorted(positives)), 5, margin=margin, skip=skip, block=block)
    assert found == by_search(anchors, documents, positives, 5, margin, skip)
    assert any(len(each) < 5 for each in found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tk.train_tokenizer([text for row in ROWS for text in row.values()], vocab_size=320, encoder=True)
    encoder = tk.load_encoder(tk.ModelConfig(model="tiny-bert", hidden_size=32, num_hidden_layers=1), tokenizer)
    files = tk.sentence_files(encoder, EmbeddingStyle("mean", "q: ", "d: "), 32)
    return tk.save_model(None, encoder, tokenizer, tmp_path_factory.mktemp("run"), files=files)


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 2 if isinstance(result.exception, tk.Refusal) else 1, str(result.exception)
    return result.exit_code, result.output


def test_the_file_holds_each_row_with_the_nearest_wrong_documents(model: Path, tmp_path: Path) -> None:
    """As the vectors of the model and its prompts say; training reads the file.

    Fails when: documents are embedded with the queries' prompt; a row's own negatives are lost.
    """
    rows = [ROWS[0] | {"negatives": ["a green one"]}, *ROWS[1:]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    into = tmp_path / "mined.jsonl"
    code, output = run("mine", model, "--dataset", tmp_path / "rows.jsonl", "--into", into, "--negatives", 3, "--device", "cpu")
    assert code == 0, output
    mined = [json.loads(line) for line in into.read_text().splitlines()]
    assert [row["query"] for row in mined] == [row["query"] for row in rows]
    assert mined[0]["negatives"][0] == "a green one"
    tokenizer = tk.load_tokenizer(tk.ModelConfig(model=str(model)))
    encoder = tk.load_encoder(tk.ModelConfig(model=str(model)), tokenizer).eval()

    def vectors(texts: list[str]) -> np.ndarray:
        inputs = [tokenizer(text, return_tensors="pt") for text in texts]
        with torch.no_grad():
            found = [encoder(**each).last_hidden_state.mean(1)[0] for each in ({k: v for k, v in i.items() if k in ("input_ids", "attention_mask")} for i in inputs)]
        return torch.stack(found).numpy()

    documents = list(dict.fromkeys(text for row in rows for text in (row["positive"], *row.get("negatives", []))))
    positives = {(i, documents.index(row["positive"])) for i, row in enumerate(rows)}
    wanted = by_search(
        vectors(["q: " + row["query"] for row in rows]), vectors(["d: " + text for text in documents]), positives, 3, 0.0, 0
    )
    for row, given, numbers in zip(mined, rows, wanted, strict=True):
        own = given.get("negatives", [])
        assert row["negatives"] == own + [documents[number] for number in numbers if documents[number] not in own]
    assert run("mine", model, "--dataset", tmp_path / "rows.jsonl", "--into", into)[0] == 2


def test_what_is_mined_is_for_embeddings_and_for_rerankers(model: Path, tmp_path: Path) -> None:
    """Rows of anchors, into a folder that is not there yet; with a margin of 2 nothing is a negative.

    Fails when: the folder is not made; a list of negatives that is empty is refused.
    """
    rows = [{"anchor": row["query"], "positive": row["positive"]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tk.load_tokenizer(tk.ModelConfig(model=str(model)))
    for margin, number in ((0, 3), (2, 0)):
        into = tmp_path / f"mined/{margin}.jsonl"
        words = ("--dataset", tmp_path / "rows.jsonl", "--negatives", 3, "--margin", margin, "--device", "cpu")
        assert run("mine", model, *words, "--into", into)[0] == 0
        raw = tk.load_splits(tk.DataConfig(dataset=str(into), eval_fraction=0.0))
        lists = tk.tokenize_for_ranking(raw, tokenizer, tk.DataConfig(dataset=str(into)))["train"]
        assert max(lists["documents"][:]) == 1 + number
        assert len(tk.tokenize_for_embedding(raw, tokenizer, tk.DataConfig(dataset=str(into)))["train"]) == len(ROWS)
    (tmp_path / "file").write_text("")
    assert run("mine", model, *words, "--into", tmp_path / "file/mined.jsonl")[0] == 2


def test_evaluate_knows_the_model_and_its_rows(model: Path, tmp_path: Path) -> None:
    """Recall among six documents is 1 at ten, and mrr is that of a plain search.

    Fails when: `embedding` is no task of a model without a head.
    """
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = [
        run("evaluate", model, "--dataset", tmp_path / "rows.jsonl", "--json", "--device", "cpu", "--per-device-eval-batch-size", size)
        for size in (1, 4)
    ]
    assert [code for code, _ in found] == [0, 0], found
    records = [json.loads(output[output.index('{"model"') :].splitlines()[0]) for _, output in found]
    assert {record["task"] for record in records} == {"embedding"}
    assert records[0]["metrics"]["recall_at_10"] == 1.0
    assert records[0]["metrics"] == pytest.approx(records[1]["metrics"], rel=1e-5)


def test_scores_of_other_data_are_divided_by_what_evaluate_is_given(model: Path, tmp_path: Path) -> None:
    """Fails when: `score_scale` is no option of evaluate: a run's own is not read for other data, and the refusal names it."""
    rows = [{"sentence1": row["query"], "sentence2": row["positive"], "score": number} for number, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("evaluate", model, "--dataset", tmp_path / "rows.jsonl", "--device", "cpu")
    code, output = run(*words)
    assert (code, "--score-scale" in output) == (2, True), output
    code, output = run(*words, "--score-scale", "5")
    assert (code, "spearman" in output) == (0, True), output
