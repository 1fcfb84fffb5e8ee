"""The noise of masked diffusion: which tokens of a document are hidden, and what each of them counts.

The noise of a training document is a function of (seed, epoch, example); that of an evaluation document of the seed and its
tokens. So a resumed run draws what it would have drawn, and every evaluation hides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DiffusionConfig
from toolkit.data.loading.batch import Document
from toolkit.data.loading.collate import IGNORED

if TYPE_CHECKING:
    from torch import nn

Noise = Callable[[Document, np.random.Generator, float], Document]


def build_noise(model: nn.Module, config: DiffusionConfig) -> Noise:
    """What hides tokens of a document, for `augment` and `augment_evaluation` of `build_dataloaders`: `hide_tokens`.

    `model`: of `load_diffusion_model`, whose config has what hides a token, and from which place it is predicted.
    """
    said: dict[str, Any] = model.config.diffusion  # type: ignore[assignment, union-attr]
    return partial(
        hide_tokens, mask_token_id=said["mask_token_id"], shift_logits=said["shift_logits"],
        annealing=config.attention_annealing,
    )  # fmt: skip


def hide_tokens(
    document: Document, random_numbers: np.random.Generator, progress: float, *, mask_token_id: int, shift_logits: bool = False,
    annealing: float = 0.0,
) -> Document:  # fmt: skip
    """The document with l of its L supervised tokens hidden, l drawn evenly from 1 to L; each hidden token counts L / l.

    Divided by L the expected sum of cross-entropies is the bound of the negative log-likelihood of LLaDA (Nie et al. 2025,
    arXiv:2502.09992, equation 6; it holds for answers with their prompts shown). Hiding each token with a probability t, drawn
    evenly, and counting it 1 / t (equation 3) has the same expectation: l is then even from 0 to L, and given l the mean of
    1 / t is (L + 1) / l. It has more variance, since a small t may count one token a thousand times.

    Args:
        document: `input_ids` `[length]`, and `labels` where not all tokens are supervised.
        shift_logits: a token is predicted at its left neighbor; the first one is never hidden then.
        annealing: share of the run in which attention goes from causal to both sides; `progress` is the run's, 0 to 1.

    Returns `input_ids`; `labels` `[length]` at the places that predict, -100 elsewhere; `token_weights`, what each of them
    counts; `supervised_tokens`, L; with `annealing` `seen_ahead`, the share of later tokens that each token sees, and
    `attention_seed`.
    """
    places = np.arange(len(document["input_ids"]))
    if "labels" in document:
        places = np.flatnonzero(np.asarray(document["labels"]) != IGNORED)
    supervised = places[places > 0] if shift_logits else places
    number = int(random_numbers.integers(1, len(supervised) + 1)) if len(supervised) else 0
    hidden = np.sort(random_numbers.permutation(supervised)[:number])
    ids = np.array(document["input_ids"], dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    labels[hidden - int(shift_logits)] = ids[hidden]
    ids[hidden] = mask_token_id
    noised = {
        **document, "input_ids": ids, "labels": labels, "supervised_tokens": len(supervised),
        "token_weights": np.full(number, len(supervised) / max(number, 1), dtype=np.float32),
    }  # fmt: skip
    if annealing:
        noised |= {"seen_ahead": min(1.0, progress / annealing), "attention_seed": int(random_numbers.integers(2**31))}
    return noised
