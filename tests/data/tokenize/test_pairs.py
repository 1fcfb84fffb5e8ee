"""Tokenized preferences against plain loops over transformers' own tokenizing of each side."""

import inspect
import io
import math
import re
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict
from tokenizers import processors

from toolkit.baselines.preference import preference_baselines, shared_tokens_accuracy
from toolkit.config import DataConfig, Refusal
from toolkit.data.report import print_data_report
from toolkit.data.sources.load import load_splits
from toolkit.data.tokenize.tasks import prepare, tokenize_for_preference
from toolkit.models.tokenizer import CHATML

END, TURN_END = "<|endoftext|>", "<|im_end|>"
CHATML_BARE = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
PARTS = ("prompt_tokens", "chosen_tokens", "rejected_tokens")


@pytest.fixture(scope="module")
def corpus():
    return load_splits(DataConfig(dataset="stdlib:dpo"))


def with_bos(tokenizer):
    """One that puts BOS first, as Llama's does."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def texts(count, longest, seed=0):
    source = inspect.getsource(textwrap)
    numbers = np.random.default_rng(seed)
    ends = [
        (cut, cut + length) for cut, length in numbers.integers(5, [len(source) - longest, longest], size=(count, 2)).tolist()
    ]
    return [(source[start:end].strip() or "nothing") + " é🙂"[: i % 4] for i, (start, end) in enumerate(ends)]


def text_rows(count=40, longest=120):
    """Prompts that end on all sorts of places, and answers that begin alike or not."""
    ends = ["\n\n", " ", "", "\n    ", ":"]
    starts = ["", " ", "self", "    "]
    parts = zip(*(texts(count, longest, seed) for seed in range(3)), strict=True)
    return [
        {"prompt": prompt + ends[i % 5], "chosen": starts[i % 4] + better, "rejected": starts[i // 4 % 4] + worse}
        for i, (prompt, better, worse) in enumerate(parts)
    ]


def chat_rows(count=20):
    rows = text_rows(count, 60)
    say = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    chats = [{name: [{"role": say[name], "content": text}] for name, text in row.items()} for row in rows]
    for row, other in zip(chats[::2], chats[1::2], strict=True):
        row["prompt"] = other["prompt"] + other["chosen"] + row["prompt"]
    return chats


def splits_of(rows, **more):
    splits = DatasetDict()
    for name, given in {"train": rows, **more}.items():
        splits[name] = Dataset.from_list([{"origin": f"{name}.jsonl:{i + 1}", **row} for i, row in enumerate(given)])
    return splits


def tokenized(rows, tokenizer, **settings):
    return tokenize_for_preference(splits_of(rows), tokenizer, DataConfig(**settings))["train"].to_list()


def parts_of(row):
    """Ids of the prompt and of each answer."""
    ends = np.cumsum([row[name] for name in PARTS]).tolist()
    return tuple(row["input_ids"][start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))


def plain_parts(tokenizer, chosen, rejected, prompt, least=0, **how):
    """The same of two texts whose first `prompt` characters are the prompt, token by token."""
    sides = [tokenizer(side, return_offsets_mapping=True, **how) for side in (chosen, rejected)]
    ids = [side["input_ids"] for side in sides]
    count = 0
    while count < min(map(len, ids)) - least and ids[0][count] == ids[1][count]:
        if max(side["offset_mapping"][count][1] for side in sides) > prompt:
            break
        count += 1
    end = [] if how else [tokenizer.eos_token_id]
    return ids[0][:count], *(side[count:] + end for side in ids)


def plain_chat(tokenizer, prompt, chosen, rejected, **options):
    asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **options)
    texts = [tokenizer.apply_chat_template(prompt + answer, tokenize=False, **options) for answer in (chosen, rejected)]
    assert all(text.startswith(asked) and text.endswith(TURN_END + "\n") for text in texts)
    parts = plain_parts(tokenizer, *(text[:-1] for text in texts), len(asked), add_special_tokens=False)
    whole = tokenizer.apply_chat_template(prompt + chosen, return_dict=False, **options)
    assert parts[0] + parts[1] == whole[:-1]
    return parts


# ---------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("begins_with_bos", [False, True])
def test_each_side_of_texts_is_the_prompt_and_answer_as_the_tokenizer_writes_them(tokenizer, begins_with_bos):
    """No token is split, and one that joins prompt and answer is the answer's. Fails when: `_prompt_tokens` takes the prompt's
    tokens from one side alone (`within[0]` for `min(within)` and no look for a difference)."""
    tokenizer = with_bos(tokenizer) if begins_with_bos else tokenizer
    rows = text_rows()
    made = tokenized(rows, tokenizer)
    joined = 0
    for row, found in zip(rows, made, strict=True):
        sides = [row["prompt"] + row[name] for name in ("chosen", "rejected")]
        expected = plain_parts(tokenizer, *sides, len(row["prompt"]))
        assert parts_of(found) == expected
        assert all(expected)
        joined += tokenizer.decode(expected[0], skip_special_tokens=True) != row["prompt"]
    assert 0 < joined < len(rows)
    assert [row["pair"] for row in made] == list(range(len(rows)))
    assert [row["length"] for row in made] == [sum(row[name] for name in PARTS) for row in made]
    assert all(row["length"] == len(row["input_ids"]) for row in made)
    assert [row["supervised_tokens"] for row in made] == [row["chosen_tokens"] + row["rejected_tokens"] for row in made]
    assert [row["origin"] for row in made] == [f"train.jsonl:{i + 1}" for i in range(len(rows))]
    assert "labels" not in made[0]
    assert "margin" not in made[0]


@pytest.mark.parametrize("begins_with_bos", [False, True])
def test_a_bos_stands_first_once_also_where_the_prompt_has_it(tokenizer, begins_with_bos):
    """Fails when: `_documents` puts the encoder's prefix before each side without `add_start`'s look."""
    tokenizer = with_bos(tokenizer)
    row = text_rows(1)[0]
    (found,) = tokenized([{**row, "prompt": "<s>" * begins_with_bos + row["prompt"]}], tokenizer)
    assert found["input_ids"].count(tokenizer.bos_token_id) == 1
    assert found["input_ids"][0] == tokenizer.bos_token_id


def test_an_empty_prompt_is_bos_alone(tokenizer):
    """Fails when: an empty prompt is refused before its tokens are counted."""
    (found,) = tokenized([{"prompt": "", "chosen": "Two.", "rejected": "One."}], with_bos(tokenizer))
    assert parts_of(found)[0] == [tokenizer.bos_token_id]


@pytest.mark.parametrize("begins_with_bos", [False, True])
def test_an_implicit_prompt_of_texts_never_splits_a_token(tokenizer, begins_with_bos):
    """Also where the texts differ in the middle of a word, or in the second byte of a character. Fails when: the prompt goes
    up to where characters differ in one side's tokens, or when an answer that the other one begins with is left no token
    (the `min` for implicit prompts)."""
    tokenizer = with_bos(tokenizer) if begins_with_bos else tokenizer
    rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in text_rows()]
    rows += [
        {"chosen": "def wrap(self, text)", "rejected": "def wraps(self, texts)"},
        {"chosen": "smile 🙂 now", "rejected": "smile 🙃 now"},
        {"chosen": "the width", "rejected": "the width of a line"},
        {"chosen": "the width of a line", "rejected": "the width"},
    ]
    for row, found in zip(rows, tokenized(rows, tokenizer), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(row["chosen"], row["rejected"], strict=False)) if a != b), 10**9)
        expected = plain_parts(tokenizer, row["chosen"], row["rejected"], same, least=1)
        assert parts_of(found) == expected
        whole = tokenizer(row["chosen"])["input_ids"] + [tokenizer.eos_token_id]
        assert parts_of(found)[0] + parts_of(found)[1] == whole
        assert min(found["chosen_tokens"], found["rejected_tokens"]) >= 2


@pytest.mark.parametrize("template", [CHATML, CHATML_BARE])
def test_chats_are_rendered_with_a_generation_prompt_and_answers_up_to_the_end_of_their_turn(tokenizer, template):
    """Fails when: `_until_end` leaves the line break that the template writes after the last turn."""
    tokenizer.chat_template = template
    rows = chat_rows()
    made = tokenized(rows, tokenizer)
    for row, found in zip(rows, made, strict=True):
        assert parts_of(found) == plain_chat(tokenizer, row["prompt"], row["chosen"], row["rejected"])
        for answer in parts_of(found)[1:]:
            assert [tokenizer.decode(token) for token in answer].count(TURN_END) == 1
            assert tokenizer.decode(answer[-1]) == TURN_END


def test_a_template_without_an_end_of_turn_gets_the_end_of_text(tokenizer):
    """Fails when: `_ended` closes texts only."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant:\n{% endif %}"
    row = chat_rows(2)[1]
    _, *answers = parts_of(tokenized([row], tokenizer)[0])
    for answer, name in zip(answers, ("chosen", "rejected"), strict=True):
        assert tokenizer.decode(answer) == row[name][0]["content"] + "\n" + END


def test_options_of_a_row_reach_the_template(tokenizer):
    """Fails when: `_chat_pair` renders the prompt, or the answers, without them."""
    tokenizer.chat_template = "{{ mood }}{{ tools | length if tools else 0 }} " + CHATML
    row = {**chat_rows(2)[1], "chat_template_kwargs": {"mood": "merry"}, "tools": '[{"type": "function"}]'}
    prepared = prepare("preference", splits_of([row]), tokenizer, DataConfig())
    found = prepared["train"][0]
    options = {"mood": "merry", "tools": [{"type": "function"}]}
    assert parts_of(found) == plain_chat(tokenizer, row["prompt"], row["chosen"], row["rejected"], **options)
    assert tokenizer.decode(found["input_ids"]).startswith("merry1")
    assert prepared.report.splits[0].remarks == {}


ARRANGED = {
    "implicit": lambda row: {side: row["prompt"] + row[side] for side in ("chosen", "rejected")},
    "repeated": lambda row: {"prompt": row["prompt"], **{side: row["prompt"] + row[side] for side in ("chosen", "rejected")}},
    "prompt as text, in the chats": lambda row: {
        "prompt": row["prompt"][-1]["content"], **{side: row["prompt"] + row[side] for side in ("chosen", "rejected")}
    },
    "answers as texts": lambda row: {**row, **{side: row[side][0]["content"] for side in ("chosen", "rejected")}},
    "answers as one message": lambda row: {**row, **{side: row[side][0] for side in ("chosen", "rejected")}},
    "sharegpt": lambda row: {
        side: [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in row["prompt"] + row[side]]
        for side in ("chosen", "rejected")
    },
    "scored": lambda row: {
        "prompt": row["prompt"], "responses": [row["rejected"], row["chosen"]], "scores": [1, 3]
    },
    "ranked texts": lambda row: {
        "prompt": row["prompt"], "answers": [row[side][0]["content"] for side in ("rejected", "chosen")], "ranking": [2, 1]
    },
}  # fmt: skip


@pytest.mark.parametrize("arranged", ARRANGED)
def test_every_arrangement_of_a_chat_gives_the_same_tokens(tokenizer, arranged):
    """Fails when: `_prompt_and_answers` doesn't take a repeated prompt off, prompts with the text source the chats, or counts
    one message less as common (`most - 1`)."""
    rows = chat_rows()
    expected = [parts_of(row) for row in tokenized(rows, tokenizer)]
    found = tokenized([ARRANGED[arranged](row) for row in rows], tokenizer)
    assert [parts_of(row) for row in found] == expected


def test_a_prompt_as_text_is_what_the_user_says_where_the_chats_are_answers_only(tokenizer):
    """Fails when: the text is left out."""
    rows = [row for row in chat_rows() if len(row["prompt"]) == 1]
    expected = [parts_of(row) for row in tokenized(rows, tokenizer)]
    found = tokenized([{**row, "prompt": row["prompt"][0]["content"]} for row in rows], tokenizer)
    assert [parts_of(row) for row in found] == expected


def test_the_common_messages_are_the_prompt_where_answers_have_several_turns(tokenizer):
    """Fails when: the first message alone is taken for the prompt."""
    question, first, second = (
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"},
    )
    ends = [{"role": "assistant", "content": text} for text in ("d", "e")]
    rows = [{name: [question, first, second, end] for name, end in zip(("chosen", "rejected"), ends, strict=True)}]
    expected = plain_chat(tokenizer, [question, first, second], ends[:1], ends[1:])
    assert parts_of(tokenized(rows, tokenizer)[0]) == expected


def test_a_prompt_that_the_template_writes_otherwise_ends_where_the_answers_begin(tokenizer):
    """A template that prompts with more than it writes in the end. Fails when: the generation prompt is taken for a prefix of
    the chat (`at = len(asked)` for all), so that the answers lose their beginning."""
    tokenizer.chat_template = CHATML_BARE.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    row = chat_rows(2)[1]
    prepared = prepare("preference", splits_of([row]), tokenizer, DataConfig())
    prompt, *answers = parts_of(prepared["train"][0])
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    for answer, name in zip(answers, ("chosen", "rejected"), strict=True):
        assert tokenizer.decode(answer) == row[name][0]["content"] + TURN_END
    assert prepared.report.splits[0].remarks == {"rewritten_prompts": 1}


# ------------------------------------------------------------------------------------------------------ scores and ranks


def plain_extremes(row, numbers, sign):
    """The best and the worst answer, in a loop; None where no two differ."""
    best = worst = None
    for i, number in enumerate(numbers):
        if number is None:
            continue
        best = i if best is None or sign * number > sign * numbers[best] else best
        worst = i if worst is None or sign * number < sign * numbers[worst] else worst
    return None if best is None or numbers[best] == numbers[worst] else (best, worst)


@pytest.mark.parametrize("source", ["scores", "ranks", "in the answers", "ranks in the answers"])
def test_the_best_answer_of_a_list_is_paired_with_the_worst_and_ties_are_counted(tokenizer, source):
    """Fails when: the second best is taken, ranks are read as scores, or a tie makes a pair."""
    numbers = np.random.default_rng(1).integers(1, 4, size=(30, 4)).tolist()
    numbers[3], numbers[4], numbers[5] = [2, 2, 2, 2], [None, 3, None, None], [None, 1, 3, None]
    answers = np.array(texts(120, 40, seed=5)).reshape(30, 4).tolist()
    plain = [{"prompt": f"Question {i}:\n", "number": number} for i, number in enumerate(numbers)]
    if "in the answers" in source:
        key = "rank" if "ranks" in source else "overall_score"
        rows = [{"prompt": row["prompt"], "completions": [{"response": text, key: number, "model": "x"} for text, number in
                 zip(given, row["number"], strict=True)]} for row, given in zip(plain, answers, strict=True)]  # fmt: skip
    else:
        rows = [
            {"prompt": row["prompt"], "responses": given, source: row["number"]}
            for row, given in zip(plain, answers, strict=True)
        ]
    prepared = prepare("preference", splits_of(rows), tokenizer, DataConfig())
    expected, ties = [], 0
    sign = -1 if "ranks" in source else 1
    for row, given in zip(plain, answers, strict=True):
        ends = plain_extremes(given, row["number"], sign)
        if ends is None or given[ends[0]] == given[ends[1]]:
            ties += 1
            continue
        sides = [row["prompt"] + given[end] for end in ends]
        expected.append((plain_parts(tokenizer, *sides, len(row["prompt"])), row["number"][ends[0]] - row["number"][ends[1]]))
    found = prepared["train"].to_list()
    assert [parts_of(row) for row in found] == [parts for parts, _ in expected]
    assert [row["pair"] for row in found] == list(range(len(expected)))
    if "ranks" in source:
        assert "margin" not in found[0]
    else:
        assert [row["margin"] for row in found] == [margin for _, margin in expected]
    assert prepared.report.splits[0].remarks == {"ties": ties - 1, "undecided": 1, "unscored": 5}  # of row 4 one has a score
    assert ties >= 2



def plain_couples(numbers, given, sign, which):
    """All couples of a better and a worse answer with their lead, in a loop; only those with the first best one where asked."""
    scored = [(sign * number, i) for i, number in enumerate(numbers) if number is not None]
    first_best = next((i for number, i in scored if number == max(scored)[0]), None)
    return [
        (better - worse, i, j)
        for better, i in scored
        for worse, j in scored
        if better > worse and given[i] != given[j] and (which == "all" or i == first_best)
    ]


@pytest.mark.parametrize("source", ["scores", "ranks"])
@pytest.mark.parametrize(("which", "most"), [("best_others", 10), ("best_others", 2), ("all", 10), ("all", 3)])
def test_a_list_makes_the_pairs_that_are_asked_for_those_furthest_apart_first(tokenizer, which, most, source):
    """Fails when: equal scores make a pair, ranks are read as scores, the cap keeps the first in the list, or a row's pairs are one
    example."""
    numbers = np.random.default_rng(2).integers(1, 5, size=(12, 4)).tolist()
    numbers[3], numbers[4] = [2, 2, 2, 2], [None, 3, None, 1]
    answers = np.array(texts(48, 40, seed=6)).reshape(12, 4).tolist()
    rows = [{"prompt": f"Question {i}:\n", "responses": answers[i], source: numbers[i]} for i in range(12)]
    prepared = tokenize_for_preference(
        splits_of(rows), tokenizer, DataConfig(), pairs_per_prompt=which, max_pairs_per_prompt=most
    )
    found = prepared["train"].to_list()
    assert [row["pair"] for row in found] == list(range(len(found)))
    capped = 0
    for i, row in enumerate(rows):
        couples = plain_couples(numbers[i], answers[i], 1 if source == "scores" else -1, which)
        mine = [made for made in found if made["origin"] == f"train.jsonl:{i + 1}"]
        assert len(mine) == min(len(couples), most)
        capped += len(couples) > most
        sides = {
            tuple(map(tuple, plain_parts(tokenizer, row["prompt"] + answers[i][a], row["prompt"] + answers[i][b], len(row["prompt"])))): lead
            for lead, a, b in couples
        }
        leads = [sides[tuple(map(tuple, parts_of(made)))] for made in mine]
        assert leads == sorted((lead for lead, *_ in couples), reverse=True)[:most]
        if source == "scores":
            assert [made["margin"] for made in mine] == leads
    assert prepared.report.splits[0].remarks == {"ties": 1, "unscored": 2} | ({"capped": capped} if capped else {})
    assert (capped > 0) is (most < 5)
    best, words = {"scores": "highest", "ranks": "lowest"}[source], {"best_others": "the best with each", "all": "each with each"}[which]
    assert re.match(rf"pairs of text: .*responses {words} .*{source} \(the {best}", prepared.report.layout)


def test_more_pairs_of_rows_that_are_pairs_are_refused(tokenizer):
    """Fails when: the setting is ignored where there are no lists."""
    with pytest.raises(Refusal, match="--pairs-per-prompt all"):
        tokenize_for_preference(splits_of([GOOD]), tokenizer, DataConfig(), pairs_per_prompt="all")


def test_other_pairs_of_the_same_lists_are_tokenized_anew(tokenizer):
    """And an answer that is there twice counts once. Fails when: the setting is left out of the cache's key."""
    rows = [{"prompt": "Is it?\n", "responses": ["a", "b", "c", "c"], "scores": [1, 2, 3, 3]}]
    counts = [len(tokenize_for_preference(splits_of(rows), tokenizer, DataConfig(), pairs_per_prompt=which)["train"])
              for which in ("best_worst", "best_others", "all")]  # fmt: skip
    assert counts == [1, 2, 3]


@pytest.mark.parametrize("which", ["best_worst", "best_others", "all"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["texts", "chats"])
def test_an_answer_with_two_scores_or_none_is_left_out_of_its_list_and_counted(tokenizer, which, is_chat):
    """The pairs are those of the list without it. Fails when: its best or its worst place makes a pair, or hides one; or one
    without a score isn't counted."""
    lists = [
        (["a", "b", "a", "c", "d"], [5, 3, 1, 2, 4]),  # a is the best and the worst
        (["a", "b", "a"], [5, 3, 1]),  # b alone is left
        (["b", "c", "b", "d", "e", "f"], [3, 2, 3, 1, math.nan, None]),  # the same score twice is no contradiction
        (["b", "c"], [1, 1]),
    ]
    without = [(["b", "c", "d"], [3, 2, 4]), None, (["b", "c", "d"], [3, 2, 1]), None]

    def rows_of(given):
        said = [[{"role": "assistant", "content": word} for word in answers] for answers, _ in given]
        prompt = [{"role": "user", "content": "Is it?"}] if is_chat else "Is it?\n"
        return [{"prompt": prompt, "responses": [[turn] for turn in turns] if is_chat else answers, "scores": scores}
                for turns, (answers, scores) in zip(said, given, strict=True)]  # fmt: skip

    found, plain = (
        tokenize_for_preference(splits_of(rows_of(given)), tokenizer, DataConfig(), pairs_per_prompt=which)
        for given in (lists, [each for each in without if each])
    )
    made, expected = (each["train"].to_list() for each in (found, plain))
    assert [(parts_of(row), row["margin"]) for row in made] == [(parts_of(row), row["margin"]) for row in expected]
    assert {row["origin"] for row in made} == {"train.jsonl:1", "train.jsonl:3"}
    twice = {"duplicates": 1} if which == "all" else {}  # the pair of b and c
    assert found.report.splits[0].remarks == {"ties": 1, "contradicted": 2, "unscored": 2, "undecided": 1} | twice


@pytest.mark.parametrize("columns", [("score_chosen", "score_rejected"), ("chosen-rating", "rejected-rating"), ("margin",)])
def test_a_margin_is_the_difference_of_the_scores(tokenizer, columns):
    """Fails when: the two are swapped, or `not_higher` leaves out a margin of zero."""
    scores = [(3.5, 1.0), (2.0, 2.0), (1.0, 4.0)]
    rows = [
        {**row, **dict(zip(columns, score if len(columns) == 2 else [score[0] - score[1]], strict=True))}
        for row, score in zip(text_rows(3), scores, strict=True)
    ]
    prepared = prepare("preference", splits_of(rows), tokenizer, DataConfig())
    assert prepared["train"]["margin"][:] == [2.5, 0.0, -3.0]
    assert prepared.report.splits[0].remarks == {"not_higher": 2}


# ------------------------------------------------------------------------------------------------------------- truncation


def plain_cut(prompt, chosen, rejected, most, bos):
    longest = max(len(chosen), len(rejected))
    if len(prompt) + longest > most:
        kept = min(len(prompt), max(most - longest, most // 2))
        if kept < len(prompt):
            prompt = [bos, *prompt[len(prompt) - kept + 1 :]] if prompt[0] == bos else prompt[len(prompt) - kept :]
        chosen, rejected = chosen[: most - kept], rejected[: most - kept]
    return prompt, chosen, rejected


@pytest.mark.parametrize("most", [2, 5, 24, 61])
@pytest.mark.parametrize("begins_with_bos", [False, True])
def test_truncation_takes_the_same_from_both_sides_and_is_counted(tokenizer, begins_with_bos, most):
    """Fails when: the two answers get room of their own, the prompt is cut on the right, a BOS goes with it, or a pair that
    truncation made the same stays."""
    tokenizer = with_bos(tokenizer) if begins_with_bos else tokenizer
    rows = text_rows()
    rows += [{"prompt": "x = ", "chosen": "a " * 99 + tail, "rejected": "a " * 99 + "b"} for tail in ("c", "d")]
    rows += [{"prompt": "x = 3\n", "chosen": f"no {i}", "rejected": "yes"} for i in range(3)]  # one pair ends within any room
    whole = [parts_of(row) for row in tokenized(rows, tokenizer, max_length=4096)]
    cut = [plain_cut(*parts, most, tokenizer.bos_token_id) for parts in whole]
    if most == 2:
        with pytest.raises(Refusal, match="--max-length 2"):
            prepare("preference", splits_of(rows), tokenizer, DataConfig(max_length=most))
        return
    prepared = prepare("preference", splits_of(rows), tokenizer, DataConfig(max_length=most))
    left = [parts for parts in cut if parts[1] != parts[2]]
    found = prepared["train"].to_list()
    assert [parts_of(row) for row in found] == left
    assert all(len(prompt) + max(len(chosen), len(rejected)) <= most for prompt, chosen, rejected in left)
    counts = prepared.report.splits[0]
    lengths = [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in whole]
    assert counts.overlong == sum(length > most for length in lengths) > 0
    assert counts.longest == max(lengths)
    assert counts.tokens == sum(len(part) for parts in left for part in parts)
    assert counts.tokens + counts.cut_tokens == sum(len(part) for parts in whole for part in parts)
    assert counts.supervised_tokens == sum(len(chosen) + len(rejected) for _, chosen, rejected in left)
    assert counts.remarks["identical"] == len(cut) - len(left) >= 2
    assert counts.remarks["clipped"] == sum(len(a[0]) < len(b[0]) for a, b in zip(cut, whole, strict=True))
    assert [row["pair"] for row in found] == list(range(len(found)))


def test_overlong_pairs_are_dropped_or_refused_by_row_when_asked(tokenizer):
    """Fails when: a pair is measured by all its tokens and not by the prompt with its longer answer."""
    rows = text_rows()
    whole = [parts_of(row) for row in tokenized(rows, tokenizer)]
    lengths = [len(prompt) + max(len(chosen), len(rejected)) for prompt, chosen, rejected in whole]
    most = sorted(lengths)[len(rows) // 2]
    found = tokenized(rows, tokenizer, max_length=most, overlong="drop")
    assert [parts_of(row) for row in found] == [parts for parts, length in zip(whole, lengths, strict=True) if length <= most]
    assert len(tokenized(rows, tokenizer, max_length=max(lengths), overlong="refuse")) == len(rows)
    worst = lengths.index(max(lengths))
    with pytest.raises(Refusal, match=rf"train\.jsonl:{worst + 1}: {max(lengths)} tokens .*longer answer"):
        tokenized(rows, tokenizer, max_length=max(lengths) - 1, overlong="refuse")


# --------------------------------------------------------------------------------------------------------------- refusals

USER, YES, NO = (
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "assistant", "content": "No."},
)
GOOD = {"prompt": "Is it?\n", "chosen": "Yes.", "rejected": "No."}
CHAT = {"prompt": [USER], "chosen": [YES], "rejected": [NO]}
LIST = {"prompt": "Is it?\n", "responses": ["Yes.", "No."], "scores": [2.0, 1.0]}
REFUSED = {
    "columns": ([{"a": "x"}], {}, r"train .*columns a\. .*chosen and rejected"),
    "misspelled": ([{"prompt": "x", "chosen": "a", "rejectd": "b"}], {}, r"Did you mean: --rename-columns rejectd=rejected"),
    "other names": ([{"preferred": "a", "dispreferred": "b"}], {}, r"--rename-columns preferred=chosen,dispreferred=rejected"),
    "list's prompt": ([{"instruction": "a", "completions": ["b", "c"]}], {}, r"--rename-columns instruction=prompt$"),
    "no scores": ([{"prompt": "a", "responses": ["b", "c"]}], {}, r"train .*ranks.*scores"),
    "identical only": ([{**GOOD, "rejected": "Yes."}], {}, r"train .*pair: in all 1"),
    "empty chosen": ([GOOD, {**GOOD, "chosen": ""}], {}, r"train.jsonl:2: chosen is empty"),
    "blank rejected": ([GOOD, {**GOOD, "rejected": " \n"}], {}, r"train.jsonl:2: rejected .*white space"),
    "null rejected": ([GOOD, {**GOOD, "rejected": None}], {}, r"train.jsonl:2: rejected is missing \(null\)"),
    "empty answer": ([CHAT, {**CHAT, "chosen": [{**YES, "content": ""}]}], {}, r"train.jsonl:2: message 1 of chosen "),
    "empty chat": ([CHAT, {**CHAT, "chosen": []}], {}, r"train.jsonl:2: chosen is an empty list"),
    "null prompt": ([GOOD, {**GOOD, "prompt": None}], {}, r"train.jsonl:2: prompt .*null"),
    "no prompt": ([{**GOOD, "prompt": ""}], {}, r"train.jsonl:1: .*prompt is empty.*BOS"),
    "joined prompt": ([{"prompt": "sel", "chosen": "f", "rejected": "fie"}], {}, r"train.jsonl:1: .*joined .*one"),
    "nothing in common": ([{"chosen": "Yes.", "rejected": "No."}], {}, r"train.jsonl:1: chosen and rejected .*nothing"),
    "no common message": ([{"chosen": [USER, YES], "rejected": [{**USER, "content": "?"}, NO]}], {}, r"jsonl:1: .*no message in common"),
    "another question": ([{**CHAT, "rejected": [USER, NO]}], {}, r"train.jsonl:1: rejected begins .*user"),
    "a question": ([{**CHAT, "rejected": [NO, USER]}], {}, r"train.jsonl:1: rejected ends .*user"),
    "role": ([{**CHAT, "rejected": [{**NO, "role": "assistent"}]}], {}, r"train.jsonl:1: .*Did you mean 'assistant'"),
    "two ends": ([{**GOOD, "chosen": "Yes." + 2 * END}], {}, r"train.jsonl:1: chosen ends with '<\|endoftext\|>' \(token \d+\) twice"),
    "two turn ends": ([{**CHAT, "rejected": [{**NO, "content": "No." + TURN_END}]}], {}, r"train.jsonl:1: rejected ends .* twice"),
    "score": ([{**GOOD, "score_chosen": 1.0, "score_rejected": None}], {}, r"train.jsonl:1: score_rejected is missing.*old=unused"),
    "nan": ([{**GOOD, "margin": float("nan")}], {}, r"train.jsonl:1: margin .*nan, .*finite"),
    "one score": ([LIST, {**LIST, "scores": [1.0]}], {}, r"train.jsonl:2: scores .*list of 1, .*2"),
    "score as text": ([{**LIST, "scores": ["2", "x"]}], {}, r"train.jsonl:1: scores is the text '2'"),
    "no list": ([{**LIST, "responses": "Yes."}], {}, r"train.jsonl:1: responses .*'Yes\.', .*list"),
    "no text": ([{**LIST, "responses": [{"a": "x"}, {"a": "y"}]}], {}, r"train.jsonl:1: chosen .*object with a, .*text"),
    "two scores": ([{**LIST, "responses": ["a", "b", "a"], "scores": [5, 3, 1]}], {}, r"pair: in all 1 .*1 are left out"),
    "ties only": ([{**LIST, "scores": [1.0, 1.0]}], {}, r"train .*pair: in all 1"),
    "all the same": ([{**GOOD, "chosen": "a b c d e f", "rejected": "a b c d e g"}], {"max_length": 6}, r"Nothing is left .*train"),
    "all dropped": ([GOOD], {"max_length": 4, "overlong": "drop"}, r"Nothing is left .*train .*longest"),
    "ends cut off": ([GOOD], {"max_length": 4}, r"No end .*raise it"),
    "split": ([GOOD], {"overlong": "split"}, r"--overlong split: .*whole answer"),
    "completion loss": ([GOOD], {"completion_only_loss": True}, r"--completion-only-loss .*no effect"),
    "assistant loss": ([CHAT], {"assistant_only_loss": False}, r"--assistant-only-loss .*no effect"),
    "wrapped": ([GOOD], {"packing": True, "packing_strategy": "wrapped"}, r"--packing-strategy wrapped would cut pairs"),
}  # fmt: skip


@pytest.mark.parametrize("good", [{**GOOD, "margin": 1.0}, CHAT, {"chosen": "a b", "rejected": "a c"}])
def test_pairs_of_identical_answers_are_left_out_and_counted(tokenizer, good):
    """Fails when: they stay, or the margins of the others move to another row."""
    same = {**good, "rejected": good["chosen"]} | ({"margin": 2.0} if "margin" in good else {})
    prepared = prepare("preference", splits_of([same, good, same]), tokenizer, DataConfig())
    alone = prepare("preference", splits_of([good]), tokenizer, DataConfig())
    found, expected = ([row | {"origin": ""} for row in each["train"].to_list()] for each in (prepared, alone))
    assert found == expected
    assert prepared.report.splits[0].remarks == {"same_answers": 2}


@pytest.mark.parametrize("case", REFUSED)
def test_preferences_that_training_must_not_start_with_are_refused_by_row(tokenizer, tmp_path, case):
    """Fails when: the case's check is taken out. Nothing stays behind in the cache."""
    rows, settings, message = REFUSED[case]
    with pytest.raises(Refusal, match=message) as refusal:
        prepare("preference", splits_of(rows), tokenizer, DataConfig(**settings))
    assert len(str(refusal.value)) < 600
    assert not [entry for entry in tmp_path.glob("cache/tokenized-*") if entry.suffix != ".lock"]


def test_an_answer_that_never_ends_is_refused_by_row(tokenizer):
    """Fails when: `_until_end` takes any text."""
    tokenizer.chat_template = CHATML_BARE.replace("'<|im_end|>'", "('' if message.content == 'No.' else '<|im_end|>')")
    with pytest.raises(Refusal, match=r"train.jsonl:1: rejected .*<\|im_end\|>"):
        prepare("preference", splits_of([CHAT]), tokenizer, DataConfig())


def test_a_bos_that_is_doubled_or_stands_within_is_refused_by_row(tokenizer):
    """Fails when: the answers' first token isn't looked at, or `check_tokens` is left out for pairs."""
    tokenizer = with_bos(tokenizer)
    with pytest.raises(Refusal, match=r"train.jsonl:2: .*BOS \(token \d+\) twice"):
        prepare("preference", splits_of([GOOD, {**GOOD, "prompt": "<s><s>Is it?\n"}]), tokenizer, DataConfig())
    with pytest.raises(Refusal, match=r"train\.jsonl:2: rejected .*BOS"):
        prepare("preference", splits_of([GOOD, {**GOOD, "rejected": "<s>No."}]), tokenizer, DataConfig())


def test_a_stream_is_refused(tokenizer):
    """Fails when: `plan_preference` doesn't look at what it is given."""
    stream = IterableDatasetDict(train=Dataset.from_list([GOOD]).to_iterable_dataset())
    with pytest.raises(Refusal, match=r"stream.*--streaming"):
        tokenize_for_preference(stream, tokenizer, DataConfig())


# -------------------------------------------------------------------------------------------------------------- preflight


def test_the_preflight_names_the_parts_of_its_example_and_what_is_peculiar(tokenizer):
    """Fails when: chosen and rejected are swapped in `part_pieces`, or a count of REMARKS isn't printed."""
    more = {"role": "user", "content": "Sure?"}
    rows = [{**CHAT, "rejected": [NO, more, YES], "margin": 0.0}]
    preflight = prepare("preference", splits_of(rows), tokenizer, DataConfig()).report
    stream = io.StringIO()
    print_data_report(preflight, stream)
    shown = stream.getvalue()
    assert "Data: pairs of chats: chosen and rejected; both answers supervised\n" in shown
    assert shown.endswith(
        "Example train.jsonl:1:\n  prompt\n  | <|im_start|>user\n  | Is it?<|im_end|>\n  | <|im_start|>assistant\n  | \n"
        "  chosen\n  | Yes.<|im_end|>\n"
        "  rejected\n  | No.<|im_end|>\n  | <|im_start|>user\n  | Sure?<|im_end|>\n  | <|im_start|>assistant\n  | Yes.<|im_end|>\n"
    )
    assert "train: 1 pair has turns" in shown
    assert "train: 1 pair has a chosen answer" in shown
    assert "median, 95 % and longest" in shown
    for key, by in (("rating", r"scores .*\(the highest"), ("rank", r"ranks .*\(the lowest")):
        rows = [{"prompt": "Is it?\n", "answers": [{"text": "Yes.", key: 1}, {"text": "No.", key: 2}]}]
        layout = prepare("preference", splits_of(rows), tokenizer, DataConfig()).report.layout
        assert re.match(f"pairs of text: .*answers .*best .*worst .*{by}", layout)


def test_counts_and_rows_are_the_same_from_the_cache(tokenizer):
    """Fails when: the counts of pairs are not kept in counts.json."""
    rows = [*text_rows(), {"prompt": "x = ", "chosen": "a " * 99 + "c", "rejected": "a " * 99 + "b"}]
    outputs = []
    for _ in range(2):
        found = tokenize_for_preference(splits_of(rows), tokenizer, DataConfig(max_length=40))
        outputs.append((found["train"].to_list(), found["train"]._fingerprint, found.report))
    assert outputs[0] == outputs[1]
    assert outputs[0][2].splits[0].remarks["identical"] == 1


def test_pairs_are_numbered_through_all_batches_and_splits(tokenizer):
    """Fails when: the number restarts with a batch or a split, or counts rows that make no pair."""
    rows = [{"prompt": f"Question {i}\n", "responses": ["a", "b"], "scores": [1, 1 if i < 600 else i % 3]} for i in range(1500)]
    splits = tokenize_for_preference(splits_of(rows, validation=[GOOD, GOOD]), tokenizer, DataConfig())
    found = splits["train"]
    assert found["pair"][:] == list(range(600))
    assert splits["validation"]["pair"][:] == [600, 601]
    assert found["origin"][-1] == "train.jsonl:1500"


def test_baselines_are_the_accuracy_of_taking_the_longer_or_the_shorter_answer(tokenizer):
    """Fails when: ties count whole, or lengths are of the training split."""
    held_out = [
        {"prompt": "x = ", "chosen": chosen, "rejected": rejected}
        for chosen, rejected in (("a b c", "a"), ("a", "a b c"), ("b", "a b c"), ("a", "b"))
    ]
    splits = tokenize_for_preference(splits_of([GOOD], validation=held_out), tokenizer, DataConfig())
    found = preference_baselines(splits)
    assert (found["longer answer"], found["shorter answer"]) == (1.5 / 4, 2.5 / 4)
    assert preference_baselines({"train": splits["train"]}) == {}


def test_shared_tokens_are_weighed_by_how_rare_they_are():
    """N = 3 prompts; token 1 is in all of them: log(4/4) = 0; token 2 in one: log(4/2); token 9 in none: log(4/1).

    Fails when: every shared token counts the same, a repeated one counts twice, or a tie counts whole.
    """
    prompts = [[1, 2], [1, 3], [1, 3, 3]]
    pairs = [
        ([1, 2], [2], [1, 1, 1]),  # log 2 against 0
        ([1, 9, 2], [2, 2, 2], [9]),  # log 2 against log 4
        ([1, 2], [5], [1]),  # 0 against 0
    ]
    assert shared_tokens_accuracy(prompts, pairs) == pytest.approx((1 + 0 + 0.5) / 3)


def test_the_embedded_corpus_makes_pairs_that_length_does_not_tell_apart(corpus, tokenizer):
    """Fails when: `read_preference` hands over rejected as chosen."""
    raw = DatasetDict(train=corpus["train"].select(range(200)), validation=corpus["validation"])
    splits = tokenize_for_preference(raw, tokenizer, DataConfig())
    assert len(splits["train"]) == 200
    assert len(splits["validation"]) == len(raw["validation"])
    for row, found in zip(raw["validation"].select(range(20)), splits["validation"], strict=False):
        assert parts_of(found) == plain_chat(tokenizer, row["prompt"], row["chosen"], row["rejected"])
    lengths = [value for name, value in preference_baselines(splits).items() if name in ("longer answer", "shorter answer")]
    assert len(lengths) == 2
    assert all(abs(value - 0.5) < 0.1 for value in lengths)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["text", "chat", "implicit chat"])
def test_tokens_are_trls(tokenizer, layout):
    """TRL 1.16's own preparation of the rows, less the line break after the last turn that it trains on. Prompts end on a line
    break, so that no token joins them with an answer: there TRL may take more from the prompt. Fails when: the generation
    prompt is left out of the prompt."""
    from trl.trainer.dpo_trainer import DPOTrainer

    tokenizer.chat_template = CHATML_BARE
    rows = [{**row, "prompt": row["prompt"].rstrip() + "\n", "chosen": "x" + row["chosen"], "rejected": "y" + row["rejected"]}
            for row in text_rows()]  # fmt: skip
    if layout != "text":
        rows = [
            {"prompt": [USER], **{side: [{**YES, "content": row[side]}] for side in ("chosen", "rejected")}} for row in rows
        ]
    if layout == "implicit chat":
        rows = [ARRANGED["implicit"](row) for row in rows]
    args = SimpleNamespace(dataset_num_proc=None, max_length=4096, truncation_mode="keep_start")
    reference = DPOTrainer._prepare_dataset(
        SimpleNamespace(_tokenizer=tokenizer), Dataset.from_list(rows), tokenizer, args, "train"
    )
    for row, found in zip(reference, tokenized(rows, tokenizer), strict=True):
        end = -1 if layout != "text" else None
        prompt, chosen, rejected = parts_of(found)
        assert (prompt, chosen, rejected) == (row["prompt_ids"], row["chosen_ids"][:end], row["rejected_ids"][:end])
