"""What a model of tags must beat: a dictionary that knows the most frequent tag of each word."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.data.tokenize.tags import Tags
from toolkit.data.tokenize.token_tags import tagged_words

if TYPE_CHECKING:
    from datasets import Dataset

Sentence = tuple[Sequence[str], Sequence[int]]


def tag_baselines(raw: Mapping[str, Dataset], tags: Tags) -> dict[str, float]:
    """Accuracy on the validation words of always saying the most frequent tag, and of saying each word's most frequent tag.

    Both are counted on the training split; a word that is not in it gets the most frequent tag of words that are in it once.
    Nothing to compare with (an empty dict) without a validation split, and for a stream.
    """
    if not all(hasattr(raw.get(name), "__len__") for name in ("train", "validation")):
        return {}
    return dictionary_baselines(list(tagged_words(raw["train"], tags.names)), list(tagged_words(raw["validation"], tags.names)))


def dictionary_baselines(train: Sequence[Sentence], held_out: Sequence[Sentence]) -> dict[str, float]:
    """The same of words and the numbers of their tags."""
    of_word: dict[str, Counter[int]] = defaultdict(Counter)
    of_all, of_rare = Counter[int](), Counter[int]()
    for words, tags in train:
        for word, tag in zip(words, tags, strict=True):
            of_word[word][tag] += 1
            of_all[tag] += 1
    for counts in of_word.values():
        if counts.total() == 1:
            of_rare.update(counts)
    usual = of_all.most_common(1)[0][0]
    unknown = of_rare.most_common(1)[0][0] if of_rare else usual
    known = {word: counts.most_common(1)[0][0] for word, counts in of_word.items()}
    pairs = [pair for words, tags in held_out for pair in zip(words, tags, strict=True)]
    return {
        "most frequent tag": sum(tag == usual for _, tag in pairs) / len(pairs),
        "dictionary": sum(tag == known.get(word, unknown) for word, tag in pairs) / len(pairs),
    }
