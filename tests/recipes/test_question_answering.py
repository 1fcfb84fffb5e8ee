"""recipes/question_answering.py as users run it: SQuAD 2.0's JSON, windows, samples, an adapter; and what evaluate and inspect make of it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk

pytestmark = pytest.mark.warm

SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "40", "--doc-stride", "8", "--max-steps", "3", "--eval-strategy",
    "steps", "--eval-steps", "3", "--num-samples", "2", "--n-best-size", "4", "--per-device-eval-batch-size", "5",
]  # fmt: skip


def squad(paragraphs: int) -> dict[str, Any]:
    """Two questions about each paragraph, one of them without an answer; contexts of several windows."""
    made = []
    for i in range(paragraphs):
        context = f"In {1800 + i} Ada wrote note number {i}. " + "Nobody knows what else was said then. " * (i % 4)
        asked = [
            {"id": f"{i}a", "question": "When did Ada write?", "answers": [{"text": str(1800 + i), "answer_start": 3}], "is_impossible": False},
            {"id": f"{i}b", "question": "When did Bob read?", "answers": [], "is_impossible": True},
        ]
        made.append({"context": context, "qas": asked})
    return {"version": "v2.0", "data": [{"title": "Notes", "paragraphs": made}]}


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    (tmp_path / "notes").mkdir()
    for split, count in (("train", 20), ("validation", 7)):
        (tmp_path / f"notes/{split}.json").write_text(json.dumps(squad(count)))
    return ["--dataset", "notes"]


def toolkit(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "toolkit", *words], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_squad_2_trains_evaluates_and_shows_its_best_answers(run_recipe: Any, tmp_path: Path, data: list[str]) -> None:
    """All metrics of SQuAD 2.0 are logged; each sample has four answers and no answer among its n best; `toolkit evaluate` finds the same
    metrics on the rows that the run held out, with another batch size.

    Fails when: evaluate reads windows of another stride than the run's, or samples are written without their n best.
    """
    run = run_recipe("question_answering", *SMALL, *data)
    assert run.code == 0, run.out + run.err
    assert re.search(r"\d questions have no answer", run.out)
    names = {"loss", "exact_match", "f1", *(f"{kind}_{name}" for kind in ("HasAns", "NoAns", "best") for name in ("exact", "f1"))}
    names |= {"best_exact_thresh", "best_f1_thresh"}
    assert names <= {name.removeprefix("eval_") for name in run.metrics[-1]}
    samples = [json.loads(line) for line in (run.output_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        texts = [answer["text"] for answer in sample["n_best"]]
        assert len(texts) == 5
        assert "" in texts
        assert sample["text"] == texts[0]
        assert sum(answer["probability"] for answer in sample["n_best"]) == pytest.approx(1)
    assert "question-answering" in (run.output_dir / "model/README.md").read_text()
    code, output = toolkit(tmp_path, "evaluate", "out", "--per-device-eval-batch-size", "2", "--json", "--device", "cpu")
    assert code == 0, output
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["task"] == "question_answering"
    assert found["metrics"] == pytest.approx({name: run.summary[f"eval_{name}"] for name in found["metrics"]}, rel=1e-5)
    assert names == set(found["metrics"])


def test_a_run_is_evaluated_on_other_data_in_its_own_windows(run_recipe: Any, tmp_path: Path, data: list[str]) -> None:
    """The held-out file by another name, as the test set is that a user has: the metrics are those that the run logged.

    Fails when: `_settings_of_task` is empty, so that contexts are read whole.
    """
    run = run_recipe("question_answering", *SMALL, *data)
    assert run.code == 0, run.out + run.err
    (tmp_path / "other.json").write_bytes((tmp_path / "notes/validation.json").read_bytes())
    code, output = toolkit(tmp_path, "evaluate", "out", "--dataset", "other.json", "--json", "--device", "cpu")
    assert code == 0, output
    record = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert record["rows"] == 14  # questions, not windows
    found = record["metrics"]
    assert found == pytest.approx({name: run.summary[f"eval_{name}"] for name in found}, rel=1e-5)


def test_a_model_with_another_number_of_labels_gets_a_head_of_two(run_recipe: Any, tmp_path: Path, data: list[str]) -> None:
    """A tagger's config has as many labels as there are tags. Fails when: the recipe leaves `num_labels` to the config."""
    config = tk.ModelConfig(model="tiny-bert", hidden_size=32, num_hidden_layers=1)
    tokenizer = tk.load_tokenizer(config)
    tagger = tk.load_model("AutoModelForTokenClassification", config, tokenizer, num_labels=5)
    tk.save_model(None, tagger, tokenizer, tmp_path / "tagger")
    run = run_recipe("question_answering", *SMALL[4:], *data, "--model", "tagger/model")
    assert run.code == 0, run.out + run.err
    assert run.weights()["qa_outputs.weight"].shape == (2, 32)


@pytest.mark.slow
def test_two_ranks_train_and_evaluate_as_one_process(tiny: Any, tmp_path: Path, data: list[str]) -> None:
    """Global batches of 12 windows, 3 x 4 on one process and 4 + 4 + 4 over two ranks; 21 windows to evaluate in fives. Losses and norms
    to 1e-5, every metric of SQuAD 2.0 alike to 6 digits.

    Fails when: windows are joined in the order in which the ranks gathered them.
    """
    flags = [*SMALL, "--dataset", str(tmp_path / "notes"), "--global-batch-size", "12", "--per-device-train-batch-size", "4", "--dropout", "0"]
    flags += ["--logging-steps", "1", "--learning-rate", "1e-3", "--use-cpu"]
    script = str(Path(__file__).resolve().parents[2] / "recipes/question_answering.py")
    one = tiny(*flags, script=script, output_dir="one")
    assert one.code == 0, one.out[-3000:]
    ranks = tiny.ranks(2, *flags, script=script, output_dir="two")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out[-3000:]
    for name in ("loss", "grad_norm"):
        found, expected = ([event[name] for event in run.metrics if name in event] for run in (ranks[0], one))
        assert len(expected) == 3
        assert found == pytest.approx(expected, rel=1e-5)
    found, expected = ({name: value for name, value in run.metrics[-1].items() if name.startswith("eval_")} for run in (ranks[0], one))
    assert len(expected) == 11
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_an_adapter_trains_and_merges_to_the_model_it_was(run_recipe: Any, tmp_path: Path, data: list[str]) -> None:
    """The head is trained whole. `toolkit evaluate` takes another threshold than the run's.

    Fails when: merge looks for `logits` in what a model of spans returns, a trained head gets an update next to being trained whole.
    """
    base = run_recipe("question_answering", *SMALL, *data, output_dir="base")
    assert base.code == 0, base.out + base.err
    shape = SMALL[4:]
    run = run_recipe("question_answering", *shape, *data, "--model", "base/model", "--use-peft", "--lora-r", "2")
    assert run.code == 0, run.out + run.err
    words = ["evaluate", "out", "--json", "--device", "cpu", "--null-score-diff-threshold", "1e6"]
    code, output = toolkit(tmp_path, *words)
    assert code == 0, output
    adapted = json.loads(next(line for line in output.splitlines() if line.startswith("{")))["metrics"]
    assert adapted["loss"] == pytest.approx(run.summary["eval_loss"], rel=1e-5)
    assert adapted["NoAns_exact"] == 0  # above no threshold of a million
    assert adapted["best_exact"] == pytest.approx(run.summary["eval_best_exact"])
    code, output = toolkit(tmp_path, "merge", "out/model", "--into", "merged")
    assert code == 0, output
    assert (tmp_path / "merged/config.json").exists()


def test_inspect_names_every_row_that_training_would_refuse(tmp_path: Path) -> None:
    """Fails when: inspect takes the columns for another task, or stops at the first row."""
    rows = [
        {"question": "Who?", "context": "Ada and Bob.", "answers": {"text": ["Bob"], "answer_start": [8]}},
        {"question": "Who?", "context": "Ada and Bob.", "answers": {"text": ["Bob"], "answer_start": [7]}},
        {"question": "", "context": "Ada and Bob.", "answers": {"text": ["Bob"], "answer_start": [8]}},
        {"question": "Who?", "context": "Ada and Bob.", "answers": {"text": [], "answer_start": []}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = toolkit(tmp_path, "inspect", "rows.jsonl", "--eval-fraction", "0")
    assert code == 1, output
    assert "Task: question_answering" in output
    for said in ("2 problems, in 2 rows", "rows.jsonl:2", "it is at 8", "rows.jsonl:3", "question is empty", "1 question has no answer"):
        assert said in output
