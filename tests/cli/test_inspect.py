"""toolkit inspect: metrics are those of a plain loop, and every row that training would refuse is named.

Each test names the one-line change under which it was seen to fail.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.evaluated_tasks import EvaluationConfig
from toolkit.cli.main import app
from toolkit.command_line.refusals import print_refusal
from toolkit.config import Refusal
from toolkit.data.inspection import guess_task
from toolkit.data.loading.packing import pack_best_fit

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]


def chat(number: int, role: str = "user") -> dict[str, Any]:
    question = f"How many are {number} and {number + 1}?" + " please" * (number % 40)
    return {"messages": [{"role": role, "content": question}, {"role": "assistant", "content": f"{2 * number + 1}."}]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def inspect(*words: object) -> tuple[int, str]:
    """In this process: exit code and what it said."""
    done = CliRunner().invoke(app, ["inspect", *map(str, words)])
    if isinstance(done.exception, Refusal):
        return 2, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_every_bad_row_is_named_and_the_good_ones_are_counted(tmp_path: Path) -> None:
    """600 rows, bad ones at the borders of batches of 512 too. Fails when: reading stops at the first, rows are numbered within
    their batch, or a batch with a bad row is not counted."""
    rows = [chat(number) for number in range(600)]
    for number in (0, 41, 42, 43, 511, 512, 599):
        rows[number] = {"messages": []}
    rows[100] = chat(100, role="usr")
    rows[530]["messages"].pop()
    path = write(tmp_path / "chats.jsonl", rows)
    code, output = inspect(path, "--eval-fraction", "0", "--examples", "0")
    assert code == 1
    reported = output.partition("3 problems, in 9 rows:\n")[2]
    place = f"{path}:"
    assert [line.strip() for line in reported.splitlines() if place in line] == [
        f"{place}1, 42-44, 512-513, 600", f"{place}101", f"{place}531",
    ]  # fmt: skip
    assert "has the role 'usr'" in reported
    assert re.search(r"^  train +591 ", output, re.M)


@pytest.mark.parametrize("given", ["chats.jsonl", "./chats.jsonl", "{folder}/chats.jsonl", "../{name}/chats.jsonl", "more", "*.jsonl"])
def test_rows_are_named_by_a_path_that_can_be_opened(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `inspect` and where training refuses. Fails when: print_refusal, or _show, doesn't ask for the path that was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for path in (tmp_path / "chats.jsonl", tmp_path / "more/train.jsonl"):
        write(path, [chat(0), {"messages": []}, *map(chat, range(3))])
    dataset = given.format(folder=tmp_path, name=tmp_path.name)
    code, output = inspect(dataset, "--eval-fraction", "0")
    assert code == 1
    shown = set(re.findall(r"(\S+jsonl):\d", output))
    assert {Path(path).resolve() for path in shown} == {tmp_path / ("more/train.jsonl" if given == "more" else "chats.jsonl")}
    splits = tk.load_splits(tk.DataConfig(dataset=dataset, eval_fraction=0.0))
    with pytest.raises(Refusal) as refused:
        tk.tokenize_for_sft(splits, tk.load_tokenizer(tk.ModelConfig()), tk.DataConfig(eval_fraction=0.0))
    reported = io.StringIO()
    monkeypatch.setattr(sys, "stderr", reported)
    print_refusal(refused.value)
    assert Path(reported.getvalue().removeprefix("refused: ").partition(":2: ")[0]).exists()


def test_rows_bear_the_same_name_wherever_their_folder_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the data's fingerprint, by which a resume knows them. Fails when: the path that was given names the rows."""
    write(tmp_path / "chats.jsonl", [chat(0), chat(1)])
    monkeypatch.chdir(tmp_path)
    here, there = (tk.load_splits(tk.DataConfig(dataset=str(path), eval_fraction=0.0)) for path in ("chats.jsonl", tmp_path / "chats.jsonl"))
    assert here["train"]["origin"][:] == there["train"]["origin"][:] == [f"{tmp_path.name}/chats.jsonl:{n}" for n in (1, 2)]
    assert here["train"]._fingerprint == there["train"]._fingerprint


def test_every_row_that_fits_no_column_is_named(tmp_path: Path) -> None:
    """A column of two kinds of value, and a list of two kinds. Fails when: inspect ends with the loader's refusal, which names one."""
    rows: list[Any] = [chat(number) for number in range(40)]
    for number in (4, 7, 30):
        rows[number] = {"messages": "hello"}
    code, output = inspect(write(tmp_path / "mixed.jsonl", rows), "--eval-fraction", "0")
    assert code == 1
    assert re.findall(r"'messages' .*string.* list .*\b37 rows\n.*mixed\.jsonl:(.*)", output) == ["5, 8, 31"]
    rows = [{"text": f"a {number}", "tags": ["x"] if number not in (20, 25) else [1]} for number in range(40)]
    code, output = inspect(write(tmp_path / "inside.jsonl", rows), "--eval-fraction", "0")
    assert code == 1
    assert re.findall(r"'tags' doesn't fit.*\n.*inside\.jsonl:(.*)", output) == ["21, 26"]


def test_what_is_refused_is_what_training_refuses(tmp_path: Path) -> None:
    """Row by row, with the same words. Fails when: the checks are another's than the preflight's."""
    rows = [chat(1), {"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "assistant", "content": " "}]}]
    config = tk.DataConfig(eval_fraction=0.0)
    tokenizer = tk.load_tokenizer(tk.ModelConfig())
    path = write(tmp_path / "all.jsonl", rows)
    _, output = inspect(path, "--eval-fraction", "0", "--examples", "0")
    for number in (1, 2):
        alone = write(tmp_path / f"alone-{number}.jsonl", [rows[number]])
        splits = tk.load_splits(tk.DataConfig(dataset=str(alone), eval_fraction=0.0))
        with pytest.raises(Refusal) as refused:
            tk.tokenize_for_sft(splits, tokenizer, config)
        assert str(refused.value).partition("jsonl:1: ")[2].partition(" `toolkit inspect`")[0] in output


def test_lengths_supervised_share_and_packing_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Fails when: the histogram counts what is left after cutting, or the fill is that of padded rows."""
    rows = [chat(number) for number in range(200)]
    path = write(tmp_path / "chats.jsonl", rows)
    code, output = inspect(path, "--eval-fraction", "0", "--max-length", "64", "--overlong", "drop")
    assert code == 0
    assert output.rstrip().endswith("No problems: training would start.")
    tokenizer = tk.load_tokenizer(tk.ModelConfig())
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    lengths = np.array([len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts])
    kept = lengths[lengths <= 64]
    assert 0 < len(kept) < 200
    answers = sum(len(tokenizer(f"{2 * number + 1}.<|im_end|>")["input_ids"]) for number in range(200) if lengths[number] <= 64)
    bars = [
        tuple(int(number.replace(",", "")) for number in found)
        for found in re.findall(r"^ +([\d,]+) - ([\d,]+)  [█# ]*  +([\d,]+)$", output, re.M)
    ]
    assert sum(count for *_, count in bars) == 200
    assert all(count == ((lengths >= low) & (lengths <= high)).sum() for low, high, count in bars)
    rows_needed = len(pack_best_fit(kept, 64))
    assert f"{rows_needed} rows of 64 tokens, {kept.sum() / (rows_needed * 64):.1%} full" in output
    assert f"  {answers / kept.sum():.1%}  " in output
    assert f"longer than --max-length 64: {200 - len(kept)} of 200" in output


def test_supervised_text_is_marked_and_colored_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the prompt is marked, or colors go into a file."""
    path = write(tmp_path / "chats.jsonl", [chat(1), chat(2)])
    _, output = inspect(path, "--eval-fraction", "0", "--examples", "1")
    assert "[[3.<|im_end|>]]" in output
    assert "\x1b" not in output

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("toolkit.data.report.marks_for", lambda stream: ("\x1b[4;32m", "\x1b[0m"))
    assert "\x1b[4;32m3.<|im_end|>\x1b[0m" in inspect(path, "--eval-fraction", "0", "--examples", "1")[1]


def test_all_lines_that_are_no_json_are_named(tmp_path: Path) -> None:
    """Fails when: the reader's first refusal is all that is shown, or that of a row without columns is cut behind its `{"text":`."""
    rows: list[Any] = [chat(number) for number in range(9)]
    rows[3], rows[7] = '{"messages": ', "[1, 2]"
    code, output = inspect(write(tmp_path / "broken.jsonl", rows))
    assert code == 1
    assert re.findall(r"broken\.jsonl:(\d+)$", output, re.M) == ["4", "8"]
    assert "2 problems, in 2 rows" in output


def test_lines_that_cannot_be_read_for_one_reason_are_one_problem(tmp_path: Path) -> None:
    """Spans as lists, as doccano writes them. Fails when: each row has a line of its own, or lists inside lists are not looked into."""
    rows = [{"text": f"Ada {number} came.", "label": [[0, 3, "PER"], [4, 5, "NUM" if number else "ORG"]]} for number in range(9)]
    code, output = inspect(write(tmp_path / "spans.jsonl", rows), "--rename-columns", "label=spans")
    assert code == 1
    assert "1 problem, in 9 rows" in output
    assert "spans.jsonl:1-9" in output
    assert "a number, a string" in output


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        (["messages"], "sft"), (["prompt", "completion"], "sft"), (["text"], "lm"), (["text", "label"], "classification"),
        (["chosen", "rejected"], "preference"), (["prompt", "responses", "scores"], "preference"), (["input_ids"], "lm"),
        (["input_ids", "labels"], "sft"), (["text", "labels"], "classification"),
        (["instruction", "input", "output"], "sft"), (["instruction", "output", "text"], "lm"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)  # fmt: skip
def test_the_task_is_told_by_the_columns(columns: list[str], task: str) -> None:
    """Fails when: the labels of tokens are taken for classes."""
    assert guess_task(columns) == task


@pytest.mark.parametrize(
    ("columns", "recipe", "renames"),
    [
        (["review", "sentiment"], "accelerated", "review=text,sentiment=label"), (["question", "answer"], "sft", "question=prompt,answer=completion"),
        (["query", "winner", "loser"], "dpo", "winner=chosen,loser=rejected"), (["dialog"], "sft", "dialog=messages"), (["review", "stars"], "accelerated", "review=text,stars=label"), (["article"], "pretrain", "article=text"),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_columns_of_other_names_are_guessed_as_training_guesses_them(columns: list[str], recipe: str, renames: str, tmp_path: Path) -> None:
    """Fails when: the refusal names what is known and no columns."""
    path = write(tmp_path / "rows.jsonl", [dict.fromkeys(columns, f"words {number}") for number in range(40)])
    code, output = inspect(path)
    assert code == 2
    assert f"--rename-columns {renames}" in output
    tasks = {"accelerated": tk.tokenize_for_classification, "sft": tk.tokenize_for_sft, "dpo": tk.tokenize_for_preference, "pretrain": tk.tokenize_for_sft}
    with pytest.raises(Refusal, match=f"--rename-columns {renames}"):
        tasks[recipe](tk.load_splits(str(path)), tk.train_tokenizer(["a"], 300), EvaluationConfig())


def test_rows_without_a_label_are_named_before_the_classes_are_looked_for(tmp_path: Path) -> None:
    """Fails when: the first of them ends the inspection."""
    rows = [{"text": f"text {number}", "label": ["a", "b"][number % 2]} for number in range(40)]
    rows[5]["label"], rows[9]["label"], rows[20]["text"] = None, "", " "
    code, output = inspect(write(tmp_path / "rows.jsonl", rows), "--eval-fraction", "0", "--examples", "0")
    assert code == 1
    assert re.findall(r"rows\.jsonl:(\d+)$", output, re.M) == ["6", "10", "21"]
    assert "classes: a 51.4%, b 48.6%" in output


def test_a_whole_split_can_be_the_problem(tmp_path: Path) -> None:
    """Fails when: what only the sums tell ends with 2, or with 0."""
    path = write(tmp_path / "long.jsonl", [{"prompt": "x " * 400, "completion": "y"}] * 3)
    code, output = inspect(path, "--eval-fraction", "0", "--max-length", "16")
    assert code == 1
    assert "train: Nothing is left" in output


NOTHING_TO_COMPARE: list[tuple[dict[str, Any], str, str]] = [
    ({"query": "a", "documents": ["b", "c"], "labels": [1, 1]}, "--ranking-loss", "bce"),
    ({"sentence1": "a", "sentence2": "b", "score": 0.5}, "--embedding-loss", "cosine"),
]


@pytest.mark.parametrize(("row", "flag", "loss"), NOTHING_TO_COMPARE)
def test_a_split_in_which_nothing_can_be_compared_is_a_problem(row: dict[str, Any], flag: str, loss: str, tmp_path: Path) -> None:
    """As it is to training. Fails when: inspect_splits doesn't call check_compared, or the flag is taken out of inspect."""
    path = write(tmp_path / "rows.jsonl", [row] * 4)
    code, output = inspect(path, "--eval-fraction", "0", "--examples", "0")
    assert code == 1
    assert f"{flag} {loss}" in output
    code, output = inspect(path, "--eval-fraction", "0", "--examples", "0", flag, loss)
    assert code == 0, output
    one = row | ({"score": 0.25} if "score" in row else {"labels": [1, 0]})
    assert inspect(write(tmp_path / "two.jsonl", [row, one]), "--eval-fraction", "0", "--examples", "0")[0] == 0


def test_labels_that_the_recipe_of_rerankers_takes_are_no_problem(tmp_path: Path) -> None:
    """Fails when: the loss that inspect supposes is not that of recipes/reranker.py."""
    path = write(tmp_path / "rows.jsonl", [{"query": "a", "documents": ["b", "c"], "labels": [300, 2]}] * 4)
    assert inspect(path, "--eval-fraction", "0", "--examples", "0")[0] == 0


def test_a_recipes_yaml_says_what_is_inspected(tmp_path: Path) -> None:
    """Settings of training in it are left alone. Fails when: an unknown key is refused, or a flag loses against the file."""
    write(tmp_path / "chats.jsonl", [chat(number) for number in range(30)])
    (tmp_path / "run.yaml").write_text(f"dataset: {tmp_path / 'chats.jsonl'}\nmax_length: 40\nlearning_rate: 0.1\neval_fraction: 0\n")
    assert "longer than --max-length 40" in inspect("--config", tmp_path / "run.yaml")[1]
    assert "longer than --max-length 50" in inspect("--config", tmp_path / "run.yaml", "--max-length", "50")[1]


@pytest.mark.parametrize("kind", ["missing", "empty", "columns", "folder"])
def test_what_cannot_be_read_ends_with_2_and_one_message(tmp_path: Path, kind: str) -> None:
    """In a process of its own. Fails when: an exception keeps its traceback, or the code is that of problems."""
    paths = {
        "missing": tmp_path / "nowhere.jsonl", "empty": write(tmp_path / "empty.jsonl", []),
        "columns": write(tmp_path / "columns.jsonl", [{"sentence": "x", "mood": 1}]), "folder": tmp_path / "folder",
    }  # fmt: skip
    (tmp_path / "folder").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "inspect", str(paths[kind]), "--eval-fraction", "0"], capture_output=True, text=True,
        cwd=ROOT, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("refused: ")
    assert "Traceback" not in done.stderr


def test_nothing_more_is_said_of_rows_that_were_all_refused(tmp_path: Path) -> None:
    """Fails when: a split of which no row was read is summed up, or refused labels count as marks that are missing."""
    rows: list[dict[str, Any]] = [{"prompt": f"q {n}", "completion": f" a {n}", "label": n % 2} for n in range(40)]
    code, output = inspect(write(tmp_path / "kto.jsonl", rows), "--task", "unpaired", "--examples", "0")
    assert code == 1
    assert re.search(r"label .*\bnumber [01]\b.*\btrue\b", output)
    assert "1 problem, in 40 rows:" in output
    assert "in each row" not in output
    assert "too few" not in output
    rows = [{**row, "label": "true" if row["label"] else "bad"} for row in rows]
    code, output = inspect(write(tmp_path / "kto.jsonl", rows), "--eval-fraction", "0", "--examples", "0")
    assert code == 1
    assert "1 problem, in 20 rows:" in output
    assert "in each row" not in output
    rows = [{**row, "label": True} for row in rows]
    code, output = inspect(write(tmp_path / "kto.jsonl", rows), "--eval-fraction", "0", "--examples", "0")
    assert code == 1
    assert re.search(r"label .*\btrue in each row", output)


def test_calls_of_tools_that_are_not_there_are_counted_and_named(tmp_path: Path) -> None:
    """Fails when: only the rows' form is looked at, a chat without tools is counted, or the count is one of a batch."""
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}}

    def chat_with(name: str, result: str, tools: list[Any], number: int) -> dict[str, Any]:
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps({"a": number})}}
        return {
            "messages": [
                {"role": "user", "content": f"How much is {number} + 1?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": result, "content": str(number + 1)},
                {"role": "assistant", "content": f"{number + 1}."},
            ],
            "tools": tools,
        }

    kinds = {3: ("addd", "call_1", [tool]), 7: ("sub", "call_1", [tool]), 9: ("add", "call_2", [tool]), 11: ("free", "call_1", [])}
    rows = [chat_with(*kinds.get(number, ("add", "call_1", [tool])), number) for number in range(20)]
    path = write(tmp_path / "chats.jsonl", rows)
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    code, output = inspect(path, "--eval-fraction", "0", "--examples", "0", "--chat-template", template)
    assert code == 0, output
    assert re.search(rf"train: WARNING: 2 chats .*function.*tools: .*{path}:4\b", output)
    assert re.search(rf"train: WARNING: 1 chat .*tool_call_id.*{path}:10\b", output)


def test_a_run_in_place_of_data_is_refused_with_what_to_type(tmp_path: Path) -> None:
    """Fails when: the files of its model are read as rows."""
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    (tmp_path / "run/run.json").write_text("{}")
    code, output = inspect(tmp_path / "run")
    assert code == 2
    assert output.startswith(f"{tmp_path}/run: ")
    assert f"toolkit inspect --config {tmp_path}/run/config.yaml" in output


@pytest.mark.parametrize(
    ("row", "good", "flag", "value"),
    [
        ({"sentence1": "a", "sentence2": "b", "score": 4.5}, {"score": 0.5}, "--score-scale", "5"),
        ({"tokens": ["Ada", "ran"], "tags": ["B-PER", "X"]}, {"tags": ["B-PER", "O"]}, "--tag-scheme", "plain"),
    ],
)  # fmt: skip
def test_the_flag_that_a_problem_names_can_be_typed(
    row: dict[str, Any], good: dict[str, Any], flag: str, value: str, tmp_path: Path,
) -> None:  # fmt: skip
    """Fails when: the flag's option is taken out of inspect."""
    path = write(tmp_path / "rows.jsonl", [row | good, row] * 4)
    code, output = inspect(path, "--eval-fraction", "0", "--examples", "0")
    assert code in (1, 2)
    assert flag in output
    code, output = inspect(path, "--eval-fraction", "0", "--examples", "0", flag, value)
    assert code == 0, output
