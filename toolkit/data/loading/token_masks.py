"""Masks for masked language modeling: which tokens of a document are to be predicted, and what is put in their place.

The masks of a training document are a function of (seed, epoch, example) and of the example's place in the run; those of an
evaluation document of the seed and its tokens. So a resumed run draws what it would have drawn, and every evaluation hides the
same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from toolkit.config import MaskedLMConfig, Refusal
from toolkit.data.loading.batch import Document
from toolkit.data.loading.collate import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase



def build_masks(
    tokenizer: PreTrainedTokenizerBase, config: MaskedLMConfig
) -> Callable[[Document, np.random.Generator, float], Document]:
    """What masks a document, for `augment` and `augment_evaluation` of `build_dataloaders`: `mask_tokens` with its values.

    Raises:
        Refusal: the tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        raise Refusal(
            "The tokenizer has no mask token, so its model was not made to fill gaps. Name an encoder, such as --model "
            "answerdotai/ModernBERT-base or tiny-bert; a tokenizer of your own names it as mask_token in tokenizer_config.json."
        )
    is_special = np.zeros(len(tokenizer), dtype=bool)
    is_special[special_ids(tokenizer)] = True
    end = config.mlm_probability if config.mlm_probability_end is None else config.mlm_probability_end
    return partial(
        mask_tokens, is_special=is_special, mask_token_id=tokenizer.mask_token_id, probability=config.mlm_probability,
        probability_end=end, mask_replace_prob=config.mask_replace_prob, random_replace_prob=config.random_replace_prob,
    )  # fmt: skip


def special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that no text is made of: never masked, never put in the place of a token."""
    named = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(id for id in named | set(tokenizer.all_special_ids) if id < len(tokenizer))


def mask_tokens(
    document: Document, random_numbers: np.random.Generator, progress: float, *, is_special: np.ndarray, mask_token_id: int,
    probability: float, probability_end: float, mask_replace_prob: float, random_replace_prob: float,
) -> Document:  # fmt: skip
    """The document with some tokens hidden, and `labels`, aligned: the hidden tokens, -100 elsewhere.

    The share of tokens that are chosen goes from `probability` to `probability_end` in a line, by `progress` (0 to 1). Tokens,
    or with a column `word_starts` (true where a token begins a word) whole words, are taken in a random order until the share
    is reached; the one that would exceed it is taken with the probability that makes the expected number exactly the share's.
    At least one is taken. Special tokens are never chosen.

    A chosen token is replaced by the mask with `mask_replace_prob`, by a random token that is not special with
    `random_replace_prob`, and else kept (Devlin et al., arXiv:1810.04805, section 3.1: .8, .1, .1).

    Args:
        document: `input_ids` `[length]`, and `word_starts` `[length]` for whole words.
        is_special: by token id, `[vocabulary]`.

    Returns `input_ids`, `labels`, and `supervised_tokens`, their number, in place of the document's own.
    """
    ids = np.array(document["input_ids"], dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    allowed = np.flatnonzero(~is_special[ids])
    chosen = allowed[:0]
    if len(allowed):
        share = probability + (probability_end - probability) * progress
        chosen = allowed[_choose(_words(document, allowed), len(allowed), share, random_numbers)]
        labels[chosen] = ids[chosen]
        kind = random_numbers.random(len(chosen))
        ids[chosen[kind < mask_replace_prob]] = mask_token_id
        at_random = chosen[(kind >= mask_replace_prob) & (kind < mask_replace_prob + random_replace_prob)]
        drawn = random_numbers.integers(len(is_special), size=len(at_random))
        while (again := is_special[drawn]).any():
            drawn[again] = random_numbers.integers(len(is_special), size=int(again.sum()))
        ids[at_random] = drawn
    return {**document, "input_ids": ids, "labels": labels, "supervised_tokens": len(chosen)}


def _words(document: Document, allowed: np.ndarray) -> np.ndarray:
    """Where each word begins in `allowed` `[words]`; every token is one without `word_starts`."""
    if "word_starts" not in document:
        return np.arange(len(allowed))
    starts = np.asarray(document["word_starts"], dtype=bool)[allowed]
    starts[0] = True  # what is left of a word that a cut goes through
    starts[1:] |= np.diff(allowed) > 1  # a special token ends a word
    return np.flatnonzero(starts)


def _choose(starts: np.ndarray, count: int, share: float, random_numbers: np.random.Generator) -> np.ndarray:
    """Places of the chosen tokens among `count`, whose words begin at `starts`."""
    sizes = np.diff(np.append(starts, count))
    order = random_numbers.permutation(len(sizes))
    ends, wanted = np.cumsum(sizes[order]), share * count
    taken = int(np.searchsorted(ends, wanted, side="right"))  # words that fit
    if taken < len(order):
        last = order[taken]
        taken += bool(random_numbers.random() * sizes[last] < wanted - (ends[taken] - sizes[last]))
    words = order[: max(taken, 1)]
    is_chosen = np.zeros(len(sizes), dtype=bool)
    is_chosen[words] = True
    return np.flatnonzero(np.repeat(is_chosen, sizes))
