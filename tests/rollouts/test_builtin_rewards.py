"""Built-in rewards, each against values that were worked out by hand, or against another library."""

import json
import random
from fractions import Fraction
from typing import Any

import pytest

from tests.rollouts.rollouts_of import rollouts_of
from toolkit.config import Refusal
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.rollouts.builtin_rewards import check_json_schema, exact_match, length, number, read_number, regex
from toolkit.rollouts.rewards import load_rewards
from toolkit.rollouts.scoring import score_rollouts

NUMBERS = [  # a text, and the number that a person would take for its answer
    ("The answer is 42.", "42"), ("#### 1,234", "1234"), ("So 3 + 4 = 7\n#### 7", "7"), ("#### $1,234.50", "1234.5"),
    ("Thus \\boxed{42}", "42"), ("\\boxed{3} or rather \\boxed{\\frac{3}{4}}", "3/4"), ("\\boxed{-\\dfrac{1}{2}}", "-1/2"),
    ("\\boxed{\\text{about } 12}", "12"), ("we get 0.75", "3/4"), ("we get 3 / 4", "0.75"), ("it is -7", "-7"), ("it is −7", "-7"),
    ("5-3", "3"), ("x=-3", "-3"), ("2.50", "2.5"), ("1e3", "1000"), ("2.5e-1", "0.25"), (".5", "1/2"), ("50%", "50"), ("$5", "5"),
    ("1,2", "2"), ("1,000,000", "1000000"), ("12,34", "34"), ("no number", None), ("", None), ("version v2", None), ("7/0", None),
    ("\\boxed{", None), ("3.", "3"), ("10 apples and 20 pears", "20"), ("\\boxed{1{,}000}", "1000"), ("1e999999999", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), NUMBERS)
def test_the_number_of_an_answer_is_the_one_a_person_reads(text: str, wanted: str | None) -> None:
    """Fails when: commas are not taken out, \\frac is not read, or the first number counts instead of the last."""
    assert read_number(text) == (None if wanted is None else Fraction(wanted))


def test_any_way_to_write_a_number_is_that_number() -> None:
    """Against Python's own formatting. Fails when: a group of digits is cut at a comma."""
    draw = random.Random(0)
    for _ in range(500):
        value = draw.choice([draw.randint(-(10**9), 10**9), round(draw.uniform(-1e6, 1e6), 3)])
        for written in (f"{value}", f"{value:,}", f"so #### {value:,}", f"it is \\boxed{{{value}}}.", f"about 17: {value}"):
            assert read_number(written) == Fraction(str(value)), written


def test_number_and_exact_match_compare_with_the_column() -> None:
    """Fails when: a row without an answer counts as wrong, or white space counts."""
    assert number(["#### 4.0", "5", "none"], answer=["#### 4", "4", None]) == [1.0, 0.0, None]
    assert number([[{"role": "assistant", "content": "1/2"}]], column="gold", gold=[0.5]) == [1.0]
    assert exact_match([" Paris\n", "paris", "x"], answer=["Paris", "Paris", None]) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match="holds no number"):
        number(["1"], answer=["one"])
    with pytest.raises(Refusal, match="solution"):
        number(["1"], solution=["1"])


def test_regex_and_length() -> None:
    """Fails when: . stops at a line break, or the length counts below its limit."""
    assert regex(["<a>\nb</a>", "<a>"], compiled_from="<a>.*</a>") == [1.0, 0.0]
    assert regex(["abc", "abc", "abc"], pattern=["b", "^b", None]) == [1.0, 0.0, None]
    assert length([[0] * n for n in (0, 8, 10, 12, 16, 40)], tokens=8) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_a_pattern_that_never_ends_is_ended() -> None:
    """Catastrophic backtracking costs its time limit. Fails when: regex runs in the training process."""
    config = RewardFunctionsConfig(reward_funcs=["regex"], reward_pattern="(a+)+$", reward_timeout=0.5, on_reward_error="skip")
    rollouts = rollouts_of([({"prompt": "p"}, ["a" * 40 + "b"]), ({"prompt": "q"}, ["aaa"])])
    found = score_rollouts(rollouts, load_rewards(config), on_error="skip", say=lambda line: None)
    assert [each.rewards["regex"] for each in found] == [None, 1.0]


SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
}  # fmt: skip
JSON = [
    ('{"name": "Ada", "age": 36}', 1.0), ('Here it is:\n```json\n{"name": "Ada", "age": 36}\n```\n', 1.0), ('{"name": "", "age": 1}', 0.0),
    ('{"name": "Ada", "age": 3.5}', 0.0), ('{"name": "Ada", "age": NaN}', 0.0), ('{"name": "Ada"', 0.0), ("[" * 100_000, 0.0),
    ('{"name": "Ada", "age": 36, "more": 1}', 0.0), ("", 0.0), ('{"name": "Ada", "age": 36} and so on', 0.0),
]  # fmt: skip


def test_json_of_a_schema(tmp_path: Any) -> None:
    """Fails when: `is_valid` is not asked, NaN is read, or a schema of the row is not taken."""
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    config = RewardFunctionsConfig(reward_funcs=["json_schema"], reward_schema=str(tmp_path / "schema.json"))
    texts, wanted = zip(*JSON, strict=True)
    found = score_rollouts(rollouts_of([({"prompt": "p"}, texts)]), load_rewards(config))
    assert [each.rewards["json_schema"] for each in found] == list(wanted)
    rows = [({"prompt": "p", "schema": schema}, [text]) for schema, text in (({"type": "number"}, "3"), ({"type": "number"}, "NaN"), ('{"type": "string"}', "3"), (None, "3"))]
    found = score_rollouts(rollouts_of(rows), load_rewards(RewardFunctionsConfig(reward_funcs=["json_schema"])), say=lambda line: None)
    assert [each.rewards["json_schema"] for each in found] == [1.0, 0.0, 0.0, None]
    with pytest.raises(Refusal, match="here"):
        check_json_schema('{"type": 3}', "here")
