"""A tokenizer for texts that come as lists of words."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from toolkit.models.compat import set_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
