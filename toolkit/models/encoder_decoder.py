"""What differs between families of encoder-decoders: what the decoder reads first, in training and in generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import Refusal
from toolkit.data.tokenize.seq2seq import has_languages, tokens_around

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def decoder_start(model: nn.Module) -> int | None:
    """The token that the decoder's input begins with in training; None: each target's own last one (mBART).

    Seen in what the model itself makes of two targets: T5, Pegasus and Marian begin with padding, BART with the end of text.

    Raises:
        Refusal: the model's config does not have how it reads a target, or reads it otherwise than shifted by one.
    """
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    settings: Any = model.config
    try:
        if prepare is None:  # NLLB and M2M100 (transformers 5.23), which shift behind the token that their config names
            return int(settings.decoder_start_token_id)
        first, second = prepare(torch.tensor([[5, 6, 7], [8, 9, 10]])).tolist()
    except (ValueError, TypeError) as error:
        raise Refusal(
            f"{type(model).__name__}: its config names no decoder_start_token_id, so that no target can begin. Set it in "
            "config.json."
        ) from error
    if first[1:] != [5, 6] or second[1:] != [8, 9]:
        raise Refusal(f"{type(model).__name__}: its decoder reads {first} for the target [5, 6, 7], not that shifted by one.")
    if (first[0], second[0]) == (7, 10):
        return None
    return int(first[0])


def set_target_language(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make generation begin in the language that the tokenizer's targets have; nothing for a tokenizer without languages.

    Where the language is the target's first token (mBART-50, NLLB, M2M100), that is forced; where it is the last (mBART-25),
    the decoder begins with it. It is in the generation_config, and so in the model directory.
    """
    if not has_languages(tokenizer):
        return
    before, after = tokens_around(tokenizer, target=True)
    settings: Any = model.generation_config
    if before:
        settings.forced_bos_token_id = before[0]
    elif after[-1:] != [tokenizer.eos_token_id]:
        settings.decoder_start_token_id = after[-1]
