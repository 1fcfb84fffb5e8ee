"""A pad token that differs from the end of a text.

transformers' decoders with a classification head read their score at the last token that is not the pad token
(`GenericForSequenceClassification`, transformers 5.23). Where texts end with the pad token, that is the one before the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.data.tokenize.masks import turn_end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEW_PAD = "<|pad|>"


def pad_apart_from_end(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, padding with a token that ends neither a text nor a turn. Before `load_model`, which follows it.

    It keeps its pad token where that is such a one. Else it pads with another of its special tokens, the one that begins
    texts first of all (masks hide what padding is made of); and where it has none, with a new one, for which `load_model`
    enlarges the embedding if it must.
    """
    try:
        ends = turn_end_ids(tokenizer)
    except Refusal:  # a chat template that can't render a plain chat; for chats that is refused where they are read
        ends = [tokenizer.eos_token_id]
    if tokenizer.pad_token_id in ends:
        special = [tokenizer.bos_token, *tokenizer.all_special_tokens]
        texts_have = (None, tokenizer.unk_token)
        apart = [token for token in special if token not in texts_have and tokenizer.convert_tokens_to_ids(token) not in ends]
        tokenizer.add_special_tokens({"pad_token": apart[0] if apart else NEW_PAD})
    return tokenizer
