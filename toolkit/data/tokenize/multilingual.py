"""Languages of a multilingual tokenizer, and the tokens that one puts around sources and targets."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from toolkit.config import Refusal
from toolkit.system.console import first_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+")  # en_XX, eng_Latn


def has_languages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether texts are encoded by language (mBART, NLLB, M2M100)."""
    return hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")


def set_languages(tokenizer: PreTrainedTokenizerBase, source_lang: str | None, target_lang: str | None) -> None:
    """Make the tokenizer encode sources and targets with the tokens of their languages; nothing for one without languages.

    Raises:
        Refusal: a language is missing, or none that the tokenizer has.
    """
    if not has_languages(tokenizer):
        return
    known = language_codes(tokenizer)
    for name, code in (("source_lang", source_lang), ("target_lang", target_lang)):
        flag = "--" + name.replace("_", "-")
        if code is None:
            raise Refusal(f"{flag}: the tokenizer ({type(tokenizer).__name__}) needs a language, one of: {first_of(known)}.")
        if code not in known:
            close = difflib.get_close_matches(code, known, n=3)
            meant = f" Did you mean {' or '.join(close)}?" if close else f" It has: {first_of(known)}."
            raise Refusal(f"{flag} {code}: the tokenizer ({type(tokenizer).__name__}) has no such language.{meant}")
    multilingual: Any = tokenizer
    multilingual.src_lang, multilingual.tgt_lang = source_lang, target_lang


def language_codes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The codes of a multilingual tokenizer's languages."""
    if names := getattr(tokenizer, "lang_code_to_token", None):  # M2M100
        return sorted(names)
    special = set(map(str, tokenizer.all_special_tokens)) | set(map(str, tokenizer.get_added_vocab()))
    return sorted(token for token in special if _CODE.fullmatch(token))


def tokens_around(tokenizer: PreTrainedTokenizerBase, *, target: bool) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a source, or a target; a target always ends with an end of text."""

    def ids(**settings: Any) -> list[int]:
        return list((tokenizer(text_target="a", **settings) if target else tokenizer("a", **settings))["input_ids"])

    bare, full = ids(add_special_tokens=False), ids()
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    before, after = full[:at], full[at + len(bare) :]
    end = tokenizer.eos_token_id
    if target and end is not None and end not in after:
        after = [*after, end]
    return before, after
