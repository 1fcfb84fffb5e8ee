"""Rows that a model writes for another one: what it was asked, what is written, and that a kill loses and doubles none."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.sources.load import load_splits, writers_of_sources
from toolkit.generation import written_rows
from toolkit.generation.answers import Sampling, sampling_settings
from toolkit.generation.written_rows import asked_of, write_rows

CHAT = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": [*CHAT, {"role": "assistant", "content": "five"}]}, {"messages": CHAT}],
    "prompt of messages": [{"prompt": CHAT[:1], "completion": CHAT[1:2]}],
    "prompt": [{"prompt": "one two three", "completion": "x"}, {"prompt": "six"}],
    "alpaca": [{"instruction": "one two", "input": "six", "output": "x"}, {"instruction": "three"}],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tk.train_tokenizer(["one two three four five six seven"] * 9, 300)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Any:
    made = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(hidden_size=32, num_hidden_layers=1, vocab_size=300, seed=5), tokenizer)
    for parameter in made.parameters():
        parameter.data *= 4
    return made.eval()


def written(model: Any, tokenizer: Any, rows: list[dict[str, Any]], output: Path, raw: bool = False, **changes: Any) -> Any:
    settings = sampling_settings(model, tokenizer, Sampling(temperature=1.0), 5)
    values = {"settings": settings, "seed": 3, "writer": "org/teacher@abc", "made_of": {"files": ["abc"]}, **changes}
    return write_rows(model, tokenizer, asked_of(rows, tokenizer, raw=raw), output, **values)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_reads_the_prompts_that_its_teacher_answered(model: Any, tokenizer: Any, tmp_path: Path, layout: str, raw: bool) -> None:
    """Fails when: a prompt is asked as a chat and written as a text, or an earlier answer of a chat is supervised."""
    written(model, tokenizer, LAYOUTS[layout], tmp_path / "rows.jsonl", raw)
    rows = load_splits(tk.DataConfig(dataset=str(tmp_path / "rows.jsonl"), eval_fraction=0.0))
    splits = tk.tokenize_for_sft(rows, tokenizer, tk.DataConfig(max_length=256))
    asked = asked_of(LAYOUTS[layout], tokenizer, raw=raw)
    assert len(splits["train"]) == len(asked)
    if layout == "messages":
        assert [[turn["content"] for turn in each.row["prompt"]] for each in asked] == [["one two", "three", "four"]] * 2
    for row, each in zip(splits["train"], asked, strict=True):
        prompt = tokenizer(each.text)["input_ids"]
        assert row["input_ids"][: len(prompt)] == prompt
        assert set(row["labels"][: len(prompt)]) == {-100}
        assert row["labels"][len(prompt)] != -100
    assert writers_of_sources(str(tmp_path / "rows.jsonl")) == ["org/teacher@abc"]


def test_killed_at_any_moment_and_started_again_it_writes_the_same_rows(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each answer is kept, and in the middle of its line. Fails when: a random number depends on what else is asked, a row is
    asked twice, or a cut line is taken for an answer."""
    rows = [{"prompt": " ".join(["one", "two", "three"][: 1 + i % 3] * (1 + i % 2))} for i in range(7)]
    written(model, tokenizer, rows, tmp_path / "whole.jsonl")
    whole, original = (tmp_path / "whole.jsonl").read_bytes(), written_rows.sealed_line
    assert len({json.loads(line)["completion"][0]["content"] for line in whole.splitlines()}) > 4
    for kill in range(2, 9):  # the header is written first, then with it what is known
        output, sealed = tmp_path / f"{kill}.jsonl", []

        def dies(record: Any, kill: int = kill, sealed: list[str] = sealed, output: Path = output) -> str:
            sealed.append(original(record))
            if len(sealed) == kill:
                with open(f"{output}.part", "a") as file:
                    file.write(sealed[-1][: len(sealed[-1]) // 2])
                raise KeyboardInterrupt
            return sealed[-1]

        monkeypatch.setattr(written_rows, "sealed_line", dies)
        with pytest.raises(KeyboardInterrupt):
            written(model, tokenizer, rows, output)
        monkeypatch.setattr(written_rows, "sealed_line", original)
        assert not output.exists()
        found = written(model, tokenizer, rows, output)
        assert (found.rows, found.known) == (7, kill - 2)
        assert output.read_bytes() == whole
        assert not Path(f"{output}.part").exists()


@pytest.mark.parametrize(("name", "known"), [("sealed_line", 3), ("write_atomically", 5)])
def test_a_full_disk_is_refused_and_the_next_start_goes_on(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, known: int
) -> None:
    """While answers are appended, and when all are. Fails when: one of both is without `_kept_when_full`, or what was kept is removed."""
    rows, output = [{"prompt": f"one {'two ' * i}"} for i in range(5)], tmp_path / "rows.jsonl"

    original, answered = getattr(written_rows, name), []

    def full(*given: Any) -> Any:
        answered.extend([1] if name == "sealed_line" else [])
        if len(answered) == known + 2 or given[0] == output:  # the header comes before
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*given)

    with monkeypatch.context() as patched:
        patched.setattr(written_rows, name, full)
        with pytest.raises(Refusal, match="No space left") as refused:
            written(model, tokenizer, rows, output)
    assert f"{output}.part" in str(refused.value)
    found = written(model, tokenizer, rows, output)
    assert (found.rows, found.known) == (5, known)


def test_a_part_of_something_else_and_a_file_that_is_there_are_refused_and_damage_is_written_again(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: a part is continued by another model, seed or settings, or a changed byte of it is believed."""
    output, rows = tmp_path / "rows.jsonl", [{"prompt": f"one {'two ' * i}"} for i in range(4)]

    def stops(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(written_rows, "write_atomically", lambda path, content: stops() if path == output else path.write_text(content))
    with pytest.raises(KeyboardInterrupt):
        written(model, tokenizer, rows, output)
    monkeypatch.undo()
    part = Path(f"{output}.part")
    lines = part.read_text()
    for changes in ({"seed": 4}, {"made_of": {"files": ["other"]}}, {"settings": tk.SamplingSettings(max_new_tokens=4)}):
        with pytest.raises(Refusal, match="was begun with another"):
            written(model, tokenizer, rows, output, **changes)
    with pytest.raises(Refusal, match="was begun with another prompts"):
        written(model, tokenizer, rows[:3], output)
    assert part.read_text() == lines
    part.write_text(lines.replace('"truncated": true', '"truncated": false', 1))
    assert written(model, tokenizer, rows, output).known == 3
    with pytest.raises(Refusal, match="is there already"):
        written(model, tokenizer, rows, output)


@pytest.mark.parametrize(
    ("row", "words"),
    [({"text": "one two"}, "holds no prompt, only text"), ({"messages": CHAT[1:2]}, "no prompt comes before"), ({"prompt": " "}, "holds no prompt"),
     ({"prompt": None, "answer": "x"}, "only prompt, answer"), ({"messages": [{"role": "user"}]}, "row 1")],
)  # fmt: skip
def test_a_row_that_asks_nothing_is_refused_by_its_number(tokenizer: Any, row: dict[str, Any], words: str) -> None:
    """Fails when: such a row is answered as an empty prompt."""
    with pytest.raises(Refusal, match=words):
        asked_of([{"prompt": "one"}, row], tokenizer)


def test_a_prompt_that_fills_the_models_positions_is_refused_by_its_origin(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Fails when: its answer is empty, and so nothing that a student could learn."""
    rows = Dataset.from_list([{"prompt": "one " * 5000, "origin": "a.jsonl:1"}])
    with pytest.raises(Refusal, match=r"a.jsonl:1: the prompt has 10,000 tokens"):
        written(model, tokenizer, list(rows), tmp_path / "rows.jsonl", raw=True)
