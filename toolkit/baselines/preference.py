"""What a model of preferences must beat: the length of an answer, and what it shares with its prompt.

Nothing to compare with (an empty dict) without a validation split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.metrics.classes import area_under_curve

if TYPE_CHECKING:
    from datasets import Dataset

COUNTED_PROMPTS = 20_000  # of the training split, for how rare a token is
Splits = Mapping[str, "Dataset"]


def preference_baselines(tokenized: Splits) -> dict[str, float]:
    """Accuracy on the validation pairs of taking one answer of the two for the chosen one, without a model.

    The longer one, the shorter one (in tokens), and the one that shares more with its prompt, rare tokens counting more (rare
    among the first 20,000 training prompts). A pair of like answers counts half. Nothing to compare with (an empty dict)
    without a validation split.
    """
    if "validation" not in tokenized:
        return {}
    held_out = tokenized["validation"]
    chosen, rejected = (np.asarray(held_out[f"{side}_tokens"][:]) for side in ("chosen", "rejected"))
    longer = float(np.mean((chosen > rejected) + 0.5 * (chosen == rejected)))
    pairs = [_prompt_and_answers(row) for row in held_out]
    overlap = shared_tokens_accuracy(_counted_prompts(tokenized), pairs)
    return {"longer answer": longer, "shorter answer": 1 - longer, "answer that shares more with the prompt": overlap}


def unpaired_baselines(tokenized: Splits) -> dict[str, float]:
    """Area under the curve on the validation answers of scores that take no model; 0.5 is chance.

    The length of an answer, and what it shares with its prompt, rare tokens counting more (rare among the first 20,000
    training prompts).
    """
    if "validation" not in tokenized:
        return {}
    held_out = tokenized["validation"]
    answers = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in held_out]
    desirable = np.asarray(held_out["desirable"][:], dtype=bool)
    lengths = np.asarray(held_out["completion_tokens"][:], dtype=np.float64)
    shared = np.asarray(shared_tokens(_counted_prompts(tokenized), answers))
    return {
        "chance": 0.5,
        "longer answer": area_under_curve(lengths, desirable),
        "answer that shares more with the prompt": area_under_curve(shared, desirable),
    }


def _counted_prompts(tokenized: Splits) -> list[list[int]]:
    train = tokenized["train"]
    return [row["input_ids"][: row["prompt_tokens"]] for row in train.select(range(min(len(train), COUNTED_PROMPTS)))]


def _prompt_and_answers(row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    ids, prompt, end = row["input_ids"], row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    return ids[:prompt], ids[prompt:end], ids[end:]


def shared_tokens_accuracy(prompts: Sequence[Sequence[int]], pairs: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of pairs whose chosen answer has more in common with its prompt: the sum of log(N / n) over distinct tokens.

    N: of `prompts`, those that are counted over; n: those with the token (both one more, so that an unknown token counts too).
    `pairs`: token ids of prompt, chosen and rejected answer. A pair of like sums counts half.
    """
    chosen, rejected = (shared_tokens(prompts, [(pair[0], pair[side]) for pair in pairs]) for side in (1, 2))
    return float(np.mean([(a > b) + 0.5 * (a == b) for a, b in zip(chosen, rejected, strict=True)]))


def shared_tokens(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """How much each answer has in common with its prompt, as above; `answers`: token ids of prompt and answer."""
    seen_in = Counter(token for prompt in prompts for token in set(prompt))
    return [
        math.fsum(math.log((len(prompts) + 1) / (seen_in[token] + 1)) for token in set(prompt) & set(answer))
        for prompt, answer in answers
    ]
