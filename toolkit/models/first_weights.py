"""The first weights of the built-in encoders in lower case, in which a text is the words it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedModel

PLACE_SCALE = 0.1  # of positions and segments, next to words


def begin_with_words(model: PreTrainedModel) -> None:
    """Scale the random positions and segments of a BERT down, in place, so that its mean state depends on words above all.

    With the usual weights a word is a third of what is added up for a token, and texts with the same words at other places are
    far apart until training has found out that places hardly matter.
    """
    bert = cast("BertModel", model.base_model)
    with torch.no_grad():
        for table in (bert.embeddings.position_embeddings, bert.embeddings.token_type_embeddings):
            table.weight *= PLACE_SCALE
