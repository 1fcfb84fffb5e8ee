"""SQuAD's own JSON: articles of paragraphs of questions, as rows of question, context and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.config import Refusal


def is_squad(whole: object) -> bool:
    """Whether a JSON value is one object with a list of articles, `{"data": [{"paragraphs": [...]}]}`."""
    articles = whole.get("data") if isinstance(whole, dict) else None
    return isinstance(articles, list) and bool(articles) and isinstance(articles[0], dict) and "paragraphs" in articles[0]


def squad_rows(whole: dict[str, Any], path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """A row a question, with its number in the file, in the columns that the Hub's `squad` and `squad_v2` have.

    Raises:
        Refusal: a part that is not as SQuAD's files have it.
    """
    number = 0
    for article in _objects(whole["data"], path, "data", ("paragraphs",)):
        for paragraph in _objects(article["paragraphs"], path, "paragraphs", ("context", "qas")):
            for question in _objects(paragraph["qas"], path, "qas", ("question",)):
                number += 1
                answers = _objects(question.get("answers") or [], path, "answers", ("text", "answer_start"))
                row = {"id": str(question.get("id", "")), "title": str(article.get("title", ""))}
                lists = {name: [answer[name] for answer in answers] for name in ("text", "answer_start")}
                yield number, {**row, "context": paragraph["context"], "question": question["question"], "answers": lists}


def _objects(values: Any, path: str, name: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """A list of objects that have all of the keys."""
    if not isinstance(values, list):
        raise Refusal(f"{path}: {name} is no list. SQuAD's JSON is data > paragraphs > qas > answers, each a list of objects.")
    for place, value in enumerate(values, 1):
        missing = [key for key in keys if key not in value] if isinstance(value, dict) else list(keys)
        if missing:
            raise Refusal(f"{path}: object {place} of a list {name} has no {' and no '.join(missing)}. Correct or remove it.")
    return values
