"""Causal architectures whose tokens are to see both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.config import Refusal
from toolkit.models.attention.packable import layers_from_the_left
from toolkit.system.console import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_bidirectional(model: PreTrainedModel) -> None:
    """Let the attention of a model see both sides, whose config has `is_causal` false.

    transformers (5.23) makes its masks by that setting. Where there is nothing to mask it makes none, and its attention
    functions ask each layer, which stays causal: these are set here.
    """
    for module in model.modules():
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False  # type: ignore[assignment]  # of an attention layer


@torch.no_grad()
def check_bidirectional(model: PreTrainedModel, name: str) -> None:
    """Refuse a model some of whose layers are known to read from left to right, as of hybrids, and one whose first token can't
    tell that its last one has changed, alone and next to padding.

    The latter catches what no list knows: recurrent layers, convolutions, masks that a model makes in its own way.
    """

    def refuse(why: str) -> Refusal:
        return Refusal(f"--model {name}: {type(model).__name__} {why}. Name another, such as a Llama, Qwen or ModernBERT.")

    if layers := layers_from_the_left(model.config, type(model)):
        raise refuse(f"has {layers}, which look to the left only and can't be made to look to both sides")
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    tokens = torch.randint(0, vocabulary, (1, 9), generator=torch.Generator().manual_seed(0)).to(device)
    was_training = model.training
    model.eval()
    try:
        for real in (9, 8):  # without padding, and before one token of it
            other, mask = tokens.clone(), torch.ones_like(tokens)
            other[0, real - 1] = (other[0, real - 1] + 1) % vocabulary
            mask[0, real:] = 0
            first, changed = (model(input_ids=ids, attention_mask=mask, use_cache=False)[0][0, 0] for ids in (tokens, other))
            if torch.equal(first, changed):
                raise refuse("looks to the left only, and can't be made to look to both sides")
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # a mask that it does not make
        raise refuse(f"can't be made to look to both sides: its forward pass ends in {first_line(error)}") from error
    finally:
        model.train(was_training)
