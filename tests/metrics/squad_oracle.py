"""The rules of SQuAD's two evaluation scripts in plain loops, and the search for spans one by one. Shares nothing with the toolkit.

The toolkit's metrics were compared once with the scripts' own functions, on 400 random sets of predictions: equal to 2e-14 of 100.
"""

from itertools import product
from typing import Any

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def words(text: str) -> list[str]:
    """Lower case, no punctuation, no articles."""
    kept = "".join(character for character in text.lower() if character not in PUNCTUATION)
    spaced, at = "", 0
    while at < len(kept):  # an article ends where no letter, digit or underscore goes on: "the-end" has lost its hyphen by then
        before = not (at and (kept[at - 1].isalnum() or kept[at - 1] == "_"))
        for article in ("the", "an", "a"):
            after = at + len(article)
            if (
                before
                and kept.startswith(article, at)
                and not (kept[after : after + 1].isalnum() or kept[after : after + 1] == "_")
            ):
                spaced, at = spaced + " ", after
                break
        else:
            spaced, at = spaced + kept[at], at + 1
    return spaced.split()


def exact(prediction: str, answer: str) -> float:
    return 1.0 if words(prediction) == words(answer) else 0.0


def overlap(prediction: str, answer: str, version: int) -> float:
    said, wanted = words(prediction), words(answer)
    if version == 2 and (not said or not wanted):
        return 1.0 if said == wanted else 0.0
    left, shared = list(wanted), 0
    for word in said:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def version_1(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    pairs = list(zip(predictions, references, strict=True))
    return {
        "exact_match": sum(max(exact(p, a) for a in answers) for p, answers in pairs) / len(pairs),
        "f1": sum(max(overlap(p, a, 1) for a in answers) for p, answers in pairs) / len(pairs),
    }


def version_2(predictions: list[str], references: list[list[str]], margins: list[float], threshold: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, score in (("exact", exact), ("f1", lambda p, a: overlap(p, a, 2))):
        raw = [
            max(score(p, a) for a in [a for a in answers if words(a)] or [""])
            for p, answers in zip(predictions, references, strict=True)
        ]
        final = [
            (0.0 if answers else 1.0) if margin > threshold else value
            for value, answers, margin in zip(raw, references, margins, strict=True)
        ]
        found["exact_match" if name == "exact" else name] = sum(final) / len(final)
        for kind, wanted in (("HasAns", True), ("NoAns", False)):
            values = [value for value, answers in zip(final, references, strict=True) if bool(answers) is wanted]
            if values:
                found[f"{kind}_{name}"] = sum(values) / len(values)
        current = best = float(sum(not answers for answers in references))
        at = 0.0
        for i in sorted(range(len(raw)), key=lambda i: margins[i]):
            current += raw[i] if references[i] else -1.0 if predictions[i] else 0.0
            if current > best:
                best, at = current, margins[i]
        found[f"best_{name}"], found[f"best_{name}_thresh"] = best / len(raw), at
    return found


def predict(context: str, windows: list[dict[str, Any]], longest: int) -> tuple[str, float]:
    """The best span over all windows of a question, and by how much no answer scores higher: every pair of tokens is tried.

    A window: `start` and `end`, logits of all its tokens, and `offsets`, the characters of those of the context by their place.
    """
    best, text = float("-inf"), ""
    for window in windows:
        for i, j in product(window["offsets"], repeat=2):
            score = window["start"][i] + window["end"][j]
            said = context[window["offsets"][i][0] : window["offsets"][j][1]].strip()
            if i <= j < i + longest and said and score > best:
                best, text = score, said
    return text, min(window["start"][0] + window["end"][0] for window in windows) - best
