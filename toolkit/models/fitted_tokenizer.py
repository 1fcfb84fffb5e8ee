"""Tokenizers changed for a task: a pad token that differs from the end of a text, a space before each word of a list.

transformers' decoders with a classification head read their score at the last token that is not the pad token
(`GenericForSequenceClassification`, transformers 5.23). Where texts end with the pad token, that is the one before the last.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from toolkit.data.tokenize.masks import turn_end_ids
from toolkit.models.compat import set_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NEW_PAD = "<|pad|>"


def pad_apart_from_end(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, padding with a token that ends neither a text nor a turn. Before `load_model`, which follows it.

    It keeps its pad token where that is such a one. Else it pads with another of its special tokens, the one that begins
    texts first of all (masks hide what padding is made of); and where it has none, with a new one, for which `load_model`
    enlarges the embedding if it must.
    """
    ends = turn_end_ids(tokenizer)
    if tokenizer.pad_token_id in ends:
        special = [tokenizer.bos_token, *tokenizer.all_special_tokens]
        texts_have = (None, tokenizer.unk_token)
        apart = [token for token in special if token not in texts_have and tokenizer.convert_tokens_to_ids(token) not in ends]
        tokenizer.add_special_tokens({"pad_token": apart[0] if apart else NEW_PAD})
    return tokenizer


def space_before_words(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer, by which a word of a list has the tokens that it has inside a text.

    Byte-level BPE (RoBERTa, GPT-2, ModernBERT) writes the space before a word into its first token. Words by themselves have
    none, so that a pretrained model would see each as the middle of a longer one. Here the tokenizer adds the space itself
    (`add_prefix_space`), and is saved so. Any other tokenizer is returned as it is.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    step: Any = state["pre_tokenizer"] or {}
    if step.get("type") != "ByteLevel" or step["add_prefix_space"]:
        # in a sequence another step has cut the word before: each piece of it would get a space
        return tokenizer
    from tokenizers import Tokenizer

    step["add_prefix_space"] = True
    changed: Any = copy.copy(tokenizer)
    set_backend(changed, Tokenizer.from_str(json.dumps(state)))
    changed.init_kwargs = {**tokenizer.init_kwargs, "add_prefix_space": True}
    if hasattr(tokenizer, "add_prefix_space"):
        changed.add_prefix_space = True
    return changed
