"""Rewards that are built in: an exact answer, a number, a pattern, JSON of a schema, a length. Code is in `python_reward`.

Each takes what TRL's reward functions take and returns a value for each completion, or None where the row has nothing to
compare with.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.rollouts.python_reward import text_of
from toolkit.system.console import first_line

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Completions = list[Any]  # texts, or lists of messages
Values = list[float | None]


def exact_match(completions: Completions, *, column: str = "answer", **columns: list[Any]) -> Values:
    """1 where a completion is the row's answer, but for white space around both; else 0."""
    answers = _column(columns, column)
    return [
        None if answer is None else float(text_of(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, answers, strict=True)
    ]


def number(completions: Completions, *, column: str = "answer", **columns: list[Any]) -> Values:
    """1 where the number that a completion ends with is the row's, as `read_number` finds both; else 0."""
    answers = _column(columns, column)
    values: Values = []
    for completion, answer in zip(completions, answers, strict=True):
        right = None if answer is None else read_number(str(answer))
        if answer is not None and right is None:
            raise ValueError(f"the column {column} holds no number: {str(answer)[:80]!r}")
        values.append(None if right is None else float(read_number(text_of(completion)) == right))
    return values


def read_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer, exactly; None where it holds none.

    It is what is in the last \\boxed{}, else what follows the last ####, else the last number of the text. 1,234.50, 3/4,
    \\frac{3}{4}, -7, 2.5e3, $5 and 50% (which is 50) are read; 0.75 and 3/4 are the same.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        text = boxed
    elif "####" in text:
        text = text.rpartition("####")[2]
    text = _LATEX_FRACTION.sub(r"\1\2/\3", text.replace("\\!", "").replace("{,}", ",").replace("−", "-"))
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    above, below = found[-1]["above"].replace(",", ""), found[-1]["below"]
    if _exponent(above) > 1000:  # a fraction of so many digits would take long to compute with
        return None
    value = Fraction(above)
    if below is None:
        return value
    divisor = Fraction(below.replace(",", ""))
    return value / divisor if divisor else None


def regex(
    completions: Completions, *, compiled_from: str | None = None, column: str = "pattern", **columns: list[Any]
) -> Values:
    """1 where the pattern, or that of the row, is found in a completion; . matches line breaks. Else 0."""
    count = len(completions)
    patterns = [compiled_from] * count if compiled_from is not None else _column(columns, column)
    return [
        None if pattern is None else float(re.search(pattern, text_of(completion), re.DOTALL) is not None)
        for completion, pattern in zip(completions, patterns, strict=True)
    ]


def json_schema(
    completions: Completions, *, schema_text: str | None = None, column: str = "schema", **columns: list[Any]
) -> Values:
    """1 where a completion, or the last block between its fences, is JSON of the schema, or of the row's; else 0.

    A row's schema is an object, or its text. References to other places are not followed.
    """
    from toolkit.rollouts.python_reward import code_of

    count = len(completions)
    schemas = [schema_text] * count if schema_text is not None else _column(columns, column)
    values: Values = []
    for completion, schema in zip(completions, schemas, strict=True):
        if schema is None:
            values.append(None)
            continue
        validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
        try:
            found = json.loads(code_of(text_of(completion)), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            values.append(0.0)
        else:
            values.append(float(validator.is_valid(found)))
    return values


def length(completion_ids: list[list[int]], *, tokens: int) -> Values:
    """0 for a completion of up to `tokens` tokens; from there it falls in a line to -1 at twice as many, and stays there."""
    return [-min(1.0, max(0, len(ids) - tokens) / tokens) for ids in completion_ids]


def check_json_schema(schema_text: str, where: str) -> None:
    """Refuse what is no JSON schema.

    Raises:
        Refusal: also where jsonschema is not installed.
    """
    jsonschema_installed()
    from jsonschema.exceptions import SchemaError

    try:
        _validator(schema_text)
    except (ValueError, SchemaError) as error:
        raise Refusal(f"{where}: is no JSON schema: {first_line(error)}") from error


def jsonschema_installed() -> None:
    """Refuse the reward json_schema where its library is missing."""
    try:
        import jsonschema  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise Refusal(
            "--reward-funcs json_schema: needs jsonschema. Install it: pip install 'functional-training-toolkit[json-schema]'"
        ) from error


def check_pattern(pattern: str) -> None:
    """Refuse what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise Refusal(f"--reward-pattern {pattern}: is no regular expression: {error}") from error


def read_schema(path: str) -> str:
    """The text of a file with a JSON schema."""
    where = f"--reward-schema {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{where}: can't be read: {error}") from error
    check_json_schema(text, where)
    return text


def _column(columns: dict[str, list[Any]], name: str) -> list[Any]:
    if name not in columns:
        rows = ", ".join(columns) or "no further column"
        raise Refusal(f"compares with the column {name}; the rows have {rows}")
    return columns[name]


def _no_constant(name: str) -> float:
    """NaN and Infinity, which Python reads, are no JSON."""
    raise ValueError(name)


@functools.lru_cache(maxsize=1024)
def _validator(schema_text: str) -> Validator:
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(schema_text)
    kind = validator_for(schema)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"(?P<above>(?<![\w.])-?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)(?:\s*/\s*(?P<below>{_DIGITS}))?")
_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")


def _exponent(written: str) -> int:
    digits, _, exponent = written.lower().partition("e")
    return max(len(digits), abs(int(exponent or 0)))


def _last_boxed(text: str) -> str | None:
    """What is in the last \\boxed{ } of a text, with the braces in it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return text[begin:]


BUILT_IN: dict[str, Callable[..., Values]] = {
    "exact_match": exact_match, "number": number, "regex": regex, "json_schema": json_schema, "length": length,
}  # fmt: skip
