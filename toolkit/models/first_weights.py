"""The first weights of the built-in encoders in lower case, in which a text is the words it has, and equal words meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedModel

PLACE_SCALE = 0.1  # of positions and segments, next to words


def begin_with_words(model: PreTrainedModel) -> None:
    """Change the random weights of a BERT in place, so that words count most, and equal words attend to each other.

    Positions and segments are scaled down: with the usual weights a word is a third of what is added up for a token, and texts
    with the same words at other places are far apart until training has found out that places hardly matter. Where a second
    layer can read what the first has found, the first layer's keys are its queries, so that the logits of attention are
    largest between tokens of the same word: the mimetic initialization of Trockman and Kolter
    (https://arxiv.org/abs/2305.09828), for one layer. A pretrained encoder has learned that.
    """
    bert = cast("BertModel", model.base_model)
    with torch.no_grad():
        for table in (bert.embeddings.position_embeddings, bert.embeddings.token_type_embeddings):
            table.weight *= PLACE_SCALE
        if len(bert.encoder.layer) > 1:
            first = bert.encoder.layer[0].attention.self
            first.key.weight.copy_(first.query.weight)
