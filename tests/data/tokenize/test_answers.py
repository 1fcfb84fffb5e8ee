"""Single answers that are marked desirable or not, against pairs and against transformers' own tokenizing of each text."""

import io
import re
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

import toolkit as tk
from toolkit.data.inspection import guess_task, inspect_splits
from toolkit.data.loading.mismatched import rows_of_other_prompts
from toolkit.data.report import print_data_report
from toolkit.data.sources.load import load_splits
from toolkit.data.tokenize.tasks import prepare

TURN_END = "<|im_end|>"
QUESTIONS = ["Is it?\n", "What does it return? ", "Say why:\n\n", "And then\n    "]
ANSWERS = ["Yes.", "The width of a line é🙂, in columns.", "No, never; it is the other way round.", "self", "Two."]


def text_rows(count: int = 20) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}. " + QUESTIONS[i % 4], "completion": f"{ANSWERS[i % 5]} {i}", "label": i % 3 > 0} for i in range(count)
    ]


def chat_rows(count: int = 20) -> list[dict[str, Any]]:
    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return [
        {"prompt": said("user", row["prompt"]), "completion": said("assistant", row["completion"]), "label": row["label"]}
        for row in text_rows(count)
    ]


def pair_rows(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}. " + QUESTIONS[i % 4], "chosen": f"{ANSWERS[i % 5]} {i}", "rejected": f"{ANSWERS[(i + 1) % 5]} {i}, or not"}
        for i in range(count)
    ]


def splits_of(rows: list[dict[str, Any]], **more: list[dict[str, Any]]) -> DatasetDict:
    splits = DatasetDict()
    for name, given in {"train": rows, **more}.items():
        splits[name] = Dataset.from_list([{"origin": f"{name}.jsonl:{i + 1}", **row} for i, row in enumerate(given)])
    return splits


def tokenized(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[dict[str, Any]]:
    return tk.tokenize_for_unpaired(splits_of(rows), tokenizer, tk.DataConfig(**settings))["train"].to_list()


def parts_of(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    assert len(row["input_ids"]) == row["prompt_tokens"] + row["completion_tokens"] == row["length"]
    return row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]


def shown(rows: list[dict[str, Any]], tokenizer: Any, config: Any = None) -> str:
    stream = io.StringIO()
    print_data_report(prepare("unpaired", splits_of(rows), tokenizer, config or tk.DataConfig()).report, stream)
    return stream.getvalue()


# ---------------------------------------------------------------------------------------------------------------- layouts


def test_a_text_is_the_prompt_and_answer_as_the_tokenizer_writes_them(tokenizer):
    """Fails when: `split_sides` is given the prompt's characters alone, or an answer doesn't end."""
    rows = text_rows()
    made = tokenized(rows, tokenizer)
    for i, (row, found) in enumerate(zip(rows, made, strict=True)):
        whole = tokenizer(row["prompt"] + row["completion"], return_offsets_mapping=True)
        prompt, answer = parts_of(found)
        assert prompt + answer == [*whole["input_ids"], tokenizer.eos_token_id]
        # a token that holds a character of the answer is the answer's
        assert len(prompt) == sum(end <= len(row["prompt"]) for _, end in whole["offset_mapping"])
        assert found["desirable"] is row["label"]
        assert (found["answer"], found["origin"]) == (i, f"train.jsonl:{i + 1}")
        assert found["supervised_tokens"] == len(answer)


def test_a_chat_is_rendered_up_to_the_end_of_the_answers_turn(tokenizer):
    """Fails when: the line break after the last turn stays, or the generation prompt counts as the answer's."""
    rows = chat_rows()
    for row, found in zip(rows, tokenized(rows, tokenizer), strict=True):
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
        prompt, answer = parts_of(found)
        assert prompt == tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert prompt + answer == whole[: len(whole) - whole[::-1].index(tokenizer.convert_tokens_to_ids(TURN_END))]


@pytest.mark.parametrize("max_length", [512, 24])
def test_a_pair_makes_a_desirable_and_an_undesirable_answer_with_the_tokens_of_the_pair(tokenizer, max_length):
    """Of pairs that are not cut; what is cut is cut by itself. Fails when: `_both_answers` marks the rejected one desirable."""
    rows = pair_rows()
    made = tokenized(rows, tokenizer, max_length=max_length)
    pairs = tk.tokenize_for_preference(splits_of(rows), tokenizer, tk.DataConfig())["train"].to_list()
    assert [row["desirable"] for row in made] == [True, False] * len(pairs)
    assert [row["answer"] for row in made] == list(range(len(made)))
    cut = 0
    for pair, good, bad in zip(pairs, made[::2], made[1::2], strict=True):
        prompt = pair["input_ids"][: pair["prompt_tokens"]]
        chosen = pair["input_ids"][pair["prompt_tokens"] :][: pair["chosen_tokens"]]
        rejected = pair["input_ids"][pair["prompt_tokens"] + pair["chosen_tokens"] :]
        for row, answer in ((good, chosen), (bad, rejected)):
            assert row["origin"] == pair["origin"]
            found = parts_of(row)
            # the answer comes first; then as much of the prompt's end as there is room for, and half of all at least
            kept = min(len(prompt), max(max_length - len(answer), max_length // 2))
            assert found == (prompt[len(prompt) - kept :], answer[: max_length - kept])
            cut += len(prompt) + len(answer) > max_length
    assert cut == 0 if max_length == 512 else cut > 3


def test_the_embedded_pairs_make_twice_as_many_answers_each_prompt_on_one_side(tokenizer):
    """Fails when: a held-out prompt's other answer is trained on."""
    raw = load_splits("stdlib:dpo")
    raw = DatasetDict(train=raw["train"].select(range(30)), validation=raw["validation"].select(range(10)))
    made = tk.tokenize_for_unpaired(raw, tokenizer, tk.DataConfig())
    assert {name: len(split) for name, split in made.items()} == {"train": 60, "validation": 20}
    assert made["validation"]["answer"][:] == list(range(60, 80))
    keys = {name: set(split["prompt_key"][:]) for name, split in made.items()}
    assert (len(keys["train"]), len(keys["validation"])) == (30, 10)
    assert not keys["train"] & keys["validation"]


def test_a_label_of_a_csv_file_is_read(tokenizer, tmp_path):
    """There all values are texts. Fails when: only booleans are taken."""
    (tmp_path / "rows.csv").write_text("prompt,completion,label\nIs it?,Yes.,true\nIs it not?,No.,False\n")
    splits = load_splits(tk.DataConfig(dataset=str(tmp_path / "rows.csv"), eval_fraction=0.0))
    assert tk.tokenize_for_unpaired(splits, tokenizer, tk.DataConfig())["train"]["desirable"][:] == [True, False]


# -------------------------------------------------------------------------------------------------------------- preflight

GOOD = {"prompt": "Is it?\n", "completion": "Yes.", "label": True}
BAD = {**GOOD, "completion": "No.", "label": False}
REFUSED = {
    "number": ([{**GOOD, "label": 1}, {**BAD, "label": 0}], r"train.jsonl:1: label .*number 1, .*true, .*false"),
    "text": ([{**GOOD, "label": "good"}, {**BAD, "label": "bad"}], r"train.jsonl:1: label .*'good', .*true"),
    "missing": ([GOOD, {**BAD, "label": None}], r"train.jsonl:2: label .*null.*true"),
    "empty answer": ([GOOD, {**BAD, "completion": " "}], r"train.jsonl:2: completion .*white space"),
    "no prompt": ([GOOD, {**BAD, "prompt": None}], r"train.jsonl:2: prompt .*null"),
    "empty prompt": ([GOOD, {**BAD, "prompt": ""}], r"train.jsonl:2: .*prompt is empty.*no token"),
    "all desirable": ([GOOD, GOOD], r"label is true .*train.* undesirable.*recipes/sft\.py"),
    "all undesirable": ([BAD, BAD], r"label is false .*train.* desirable\.$"),
    "columns": ([{"question": "a", "answer": "b"}], r"train .*question, answer.*prompt, completion and label"),
    "user answers": (
        [{**row, "completion": [*row["completion"], {"role": "user", "content": "Hm."}]} for row in chat_rows(2)],
        r"train.jsonl:1: completion ends .*user",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_answers_that_training_must_not_start_with_are_refused_by_row(tokenizer, case):
    """Fails when: the check is taken out."""
    rows, message = REFUSED[case]
    with pytest.raises(tk.Refusal, match=message):
        tokenized(rows, tokenizer)


def test_counts_of_both_kinds_and_of_contradictions_are_shown(tokenizer):
    """Fails when: the same answer under both labels goes unsaid."""
    rows = [*text_rows(20), {**GOOD}, {**GOOD, "label": False}]
    labels = [row["label"] for row in rows]
    text = shown(rows, tokenizer)
    assert f"classes: desirable {np.mean(labels):.1%}, undesirable {1 - np.mean(labels):.1%}" in text
    assert re.search(r"train: 1 answer .* desirable .* undesirable", text)
    assert "text: prompt, completion and label" in text
    assert "train.jsonl:1, undesirable:\n  prompt\n" in text
    assert "each made into a desirable answer" in shown(pair_rows(), tokenizer)


@pytest.mark.parametrize(("desirable", "weights", "hint"), [
    (10, {}, None), (11, {}, None), (12, {"desirable_weight": 0.7}, None), (12, {"desirable_weight": 0.6}, "--desirable-weight 0.667 to 0.889"), (4, {}, "--desirable-weight 4 to 5.33"),
    (16, {}, "--undesirable-weight 3 to 4"), (4, {"desirable_weight": 5.0}, None), (16, {"undesirable_weight": 3.5}, None),
    (4, {"undesirable_weight": 0.5}, "--desirable-weight 2 to 2.67"),
], ids=str)  # fmt: skip
def test_weights_out_of_the_papers_range_are_hinted_at(tokenizer, desirable: int, weights: dict[str, float], hint: str | None) -> None:
    """n_D w_D / (n_U w_U) must be 1 to 4/3. Fails when: the two weights are swapped, or a fraction is turned over."""
    rows = [{**row, "label": i < desirable} for i, row in enumerate(text_rows(20))]
    stream = io.StringIO()
    tk.print_data_report(tk.tokenize_for_unpaired(splits_of(rows), tokenizer, tk.DataConfig(), **weights).report, stream)
    text = stream.getvalue()
    assert (f"KTO's authors advise 1 to 1.33: {hint}\n" in text) if hint else ("authors" not in text)


def test_inspect_knows_such_rows_and_names_each_wrong_one(tokenizer):
    """Fails when: the columns are taken for those of fine-tuning, which would train on bad answers."""
    rows = [*text_rows(8), {**GOOD, "label": "up"}, {**GOOD, "completion": ""}]
    assert guess_task(list(rows[0])) == "unpaired"
    found = inspect_splits("unpaired", splits_of([{**row, "label": str(row["label"])} for row in rows]), tokenizer, tk.DataConfig())
    assert [problem.origin for problem in found.problems] == ["train.jsonl:9", "train.jsonl:10"]


# ------------------------------------------------------------------------------------------------------------- mismatched


def test_each_answer_meets_another_prompt_and_is_taken_once_where_prompts_differ() -> None:
    """Fails when: the neighbor in the order is taken whatever its prompt."""
    keys = np.random.default_rng(0).integers(0, 9, 200)
    found = rows_of_other_prompts(keys)
    assert found is not None
    assert (keys[found] != keys).all()
    unique = rows_of_other_prompts(np.arange(50))
    assert unique is not None
    assert sorted(unique) == list(range(50))
    assert (np.abs(unique - np.arange(50)) > 1).mean() > 0.8  # mixed: rows that are together are often alike
    two = rows_of_other_prompts(np.array([3, 3, 3, 8]))
    assert two is not None
    assert two.tolist() == [3, 3, 3, two[3]]
    assert rows_of_other_prompts(np.array([5, 5])) is None


def test_a_mismatched_answer_is_that_of_its_row_cut_to_the_room_there_is(tokenizer):
    """Fails when: it is cut at its own prompt's room, or read with its prompt."""
    config = tk.DataConfig(max_length=24, num_train_epochs=1)
    splits = tk.mismatch_answers(tk.tokenize_for_unpaired(splits_of(pair_rows()), tokenizer, config), 24)
    train, _ = tk.build_dataloaders(splits, list, config)
    rows, cut = splits["train"].to_list(), 0
    for i, (row, document) in enumerate(zip(rows, train.rows.documents(list(range(len(rows)))), strict=True)):
        other = rows[row["mismatched_row"]]
        assert parts_of(other)[0] != parts_of(row)[0], i
        room = 24 - row["prompt_tokens"]
        assert document["mismatched"].tolist() == parts_of(other)[1][:room]
        cut += other["completion_tokens"] > room
    assert 0 < cut < len(rows)


def test_a_split_of_one_prompt_is_refused_and_what_needs_no_mismatch_named(tokenizer):
    """Fails when: an answer is put behind its own prompt."""
    config = tk.DataConfig()
    splits = tk.tokenize_for_unpaired(splits_of([GOOD, BAD]), tokenizer, config)
    with pytest.raises(tk.Refusal, match=r"train split .*--loss-type apo_zero_unpaired"):
        tk.mismatch_answers(splits, config.max_length)
