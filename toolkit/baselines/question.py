"""What a model that answers questions must beat: whole sentences of the context, chosen without a model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit.data.tokenize.question_answering import reference_answers
from toolkit.metrics.question_answering import squad_metrics

if TYPE_CHECKING:
    from datasets import Dataset

_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"\w+")


def question_baselines(raw: Mapping[str, Dataset]) -> dict[str, float]:
    """F1 on the validation rows of answering with the context's first sentence, and with the one most like the question.

    Most like: the sum of log(N / n) over the words that both have, N of the contexts, n of them with the word; of equal ones
    the first. A line is a sentence too. Nothing (an empty dict) without a validation split, and for a stream.
    """
    split = raw.get("validation")
    if split is None or not hasattr(split, "__len__"):
        return {}
    references = reference_answers(raw)
    answers = [texts for _, texts in references]
    contexts = [_sentences(context) for context, _ in references]
    seen_in = Counter(word for sentences in contexts for word in set().union(*map(_words, sentences)))

    def likeness(question: set[str], sentence: str) -> float:
        return math.fsum(math.log((len(contexts) + 1) / seen_in[word]) for word in question & _words(sentence))

    closest = []
    for question, sentences in zip(split["question"], contexts, strict=True):
        asked = _words(question)
        closest.append(max(sentences, key=lambda sentence: likeness(asked, sentence)))
    found = {"first sentence": [sentences[0] for sentences in contexts], "sentence most like the question": closest}
    always = [-math.inf] * len(answers)  # they never predict that there is no answer
    return {name: squad_metrics(predictions, answers, always)["f1"] for name, predictions in found.items()}


def _sentences(context: str) -> list[str]:
    return [sentence for sentence in _SENTENCE_ENDS.split(context) if sentence.strip()]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
