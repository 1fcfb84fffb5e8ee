"""Sources and their targets to documents: columns of texts, or translations, encoded as the tokenizer's family does it."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal, Seq2SeqConfig
from toolkit.data.report import Piece, part_pieces
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, columns_of, describe
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, around, check_room, join_documents
from toolkit.data.tokenize.format import Format, Splits
from toolkit.system.console import first_of

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

TRANSLATION = "translation"
PAIRS = (
    ("source", "target"), ("document", "summary"), ("article", "highlights"), ("dialogue", "summary"), ("text", "summary"),
    ("input_text", "target_text"),
)  # fmt: skip


def seq2seq_format(config: DataConfig) -> Format:
    """How rows of sources and targets are read, by the settings of Seq2SeqConfig."""
    if not isinstance(config, Seq2SeqConfig):
        raise TypeError("sources and targets need the settings of Seq2SeqConfig next to those of DataConfig")
    texts = config

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> SourcesAndTargets:
        tokenizer = encoder.tokenizer
        if plan.layout != TRANSLATION and not has_languages(tokenizer):
            _check_languages_unused(config.given or (), plan)
        set_languages(tokenizer, texts.source_lang, texts.target_lang)
        around = (tokens_around(tokenizer, target=False), tokens_around(tokenizer, target=True))
        limits = (config.max_length, texts.max_target_length)
        prefix = len(tokenizer(texts.source_prefix or "", add_special_tokens=False)["input_ids"])
        own = [sum(map(len, both)) for both in around]
        check_room(config.max_length, own[0] + prefix)
        check_room(texts.max_target_length, own[1], flag="--max-target-length")
        keys = _language_keys(texts) if plan.layout == TRANSLATION else None
        return SourcesAndTargets(plan.columns, keys, texts.source_prefix or "", tokenizer, around, limits, config.overlong)

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"source_tokens": pa.int32(), "target": pa.string()}

    return Format(
        "seq2seq", lambda splits, config: (plan_seq2seq(splits, config, texts), []), rows, columns,
        lambda plan, tokenizer: _describe(plan, texts), _show, part_names=("source", "target"),
        settings=(texts.max_target_length, texts.source_prefix, texts.source_lang, texts.target_lang),
        unsplit="a target belongs to the whole of its source",
    )  # fmt: skip


def plan_seq2seq(splits: Splits, config: DataConfig, texts: Seq2SeqConfig) -> dict[str, Plan]:
    """Which columns of each split are source and target.

    Raises:
        Refusal: columns that are none of PAIRS and no translation, or settings that these rows can't have.
    """
    if config.packing:
        raise Refusal(
            "--packing: sources and targets are padded, each in a row of its own. Remove it; --group-by-length saves padding."
        )
    return {name: _plan(columns_of(split, name), name, texts) for name, split in splits.items()}


def _plan(present: list[str], split: str, texts: Seq2SeqConfig) -> Plan:
    origin = ("origin",) if "origin" in present else ()
    for pair in PAIRS:
        if set(pair) <= set(present):
            return Plan("source_target", "completion", (*pair, *origin))
    if TRANSLATION in present:
        if texts.source_lang is None or texts.target_lang is None:
            raise Refusal(
                "The column translation holds a text for each language: choose with --source-lang and --target-lang, such "
                "as --source-lang en --target-lang de."
            )
        return Plan(TRANSLATION, "completion", (TRANSLATION, *origin))
    shown = ", ".join(name for name in present if name != "origin") or "(none)"
    known = "; ".join(" and ".join(pair) for pair in PAIRS)
    raise Refusal(
        f"The {split} split has the columns {shown}. What can be trained on here: {known}; translation. Rename with "
        "--rename-columns old=source,other=target"
    )


def _language_keys(texts: Seq2SeqConfig) -> tuple[list[str], list[str]]:
    """Under which keys of a translation the source and the target may be: en_XX, or en."""
    names = (texts.source_lang or "", texts.target_lang or "")
    return tuple([name, name.partition("_")[0]] for name in names)  # type: ignore[return-value]  # two of them


def _check_languages_unused(given: Sequence[str], plan: Plan) -> None:
    """Refuse languages that were given where neither the rows nor the tokenizer has any."""
    flags = ["--" + name.replace("_", "-") for name in ("source_lang", "target_lang") if name in given]
    if flags:
        raise Refusal(
            f"{' and '.join(flags)}: without effect. Rows of {plan.columns[0]} and {plan.columns[1]} name no languages, and "
            "the tokenizer has none. Remove it; what a T5 should do is set with --source-prefix."
        )


@dataclass(frozen=True)
class SourcesAndTargets:
    """Reads batches of rows: all that it needs next to them.

    A document is the source's tokens and then the target's, of which the target's are supervised: `source_tokens` is where
    one ends. `target` is the target's text as it is in the data, with which a generated one is compared.
    """

    columns: Sequence[str]
    keys: tuple[list[str], list[str]] | None  # of a translation's languages
    source_prefix: str
    tokenizer: PreTrainedTokenizerBase
    around: tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]  # tokens before and after a source, a target
    limits: tuple[int, int]
    overlong: str

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole documents."""
        sources, targets = self._texts(batch, origins)
        if not origins:
            return join_documents([], [], [], {"source_tokens": [], "target": []}), Counter()
        (before, after), (begin, end) = self.around
        inputs = [self.source_prefix + source for source in sources]
        read = self.tokenizer(inputs, add_special_tokens=False, verbose=False)["input_ids"]
        written = self.tokenizer(text_target=targets, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [[*before, *a, *after, *begin, *b, *end] for a, b in zip(read, written, strict=True)]
        cuts = [len(before) + len(a) + len(after) for a in read]
        spans = [[(cut, len(row))] for cut, row in zip(cuts, ids, strict=True)]
        return join_documents(ids, spans, origins, {"source_tokens": cuts, "target": targets}), Counter()

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring sources and targets within their limits, each with the tokens around it; or drop or refuse the row."""
        sources = np.array(documents.columns["source_tokens"], dtype=np.int64)
        sizes = np.stack([sources, documents.lengths - sources])
        over = (sizes > np.array(self.limits)[:, None]).any(0)
        if not over.any():
            return documents, Cut()
        count = int(over.sum())
        if self.overlong == "refuse":
            row = int(np.argmax(over))
            raise Refusal(
                f"{documents.origins[row]}: a source of {sizes[0, row]:,} tokens, a target of {sizes[1, row]:,}; --max-length "
                f"is {self.limits[0]}, --max-target-length {self.limits[1]}. Shorten the row, raise them, or choose --overlong "
                "truncate or drop."
            )
        if self.overlong == "drop":
            kept = documents.take(np.flatnonzero(~over))
            return kept, Cut(count, tokens=len(documents.values) - len(kept.values))
        is_kept = np.ones(len(documents.values), dtype=bool)
        for row in np.flatnonzero(over).tolist():
            start = int(documents.bounds[row])
            for size, limit, (_, after) in zip(sizes[:, row].tolist(), self.limits, self.around, strict=True):
                if size > limit:
                    is_kept[start + limit - len(after) : start + size - len(after)] = False
                start += size
        lengths = np.minimum(sizes, np.array(self.limits)[:, None])
        labels = None if documents.labels is None else documents.labels[is_kept]
        shortened = replace(
            documents, values=documents.values[is_kept], labels=labels, bounds=np.concatenate([[0], np.cumsum(lengths.sum(0))]),
            columns={**documents.columns, "source_tokens": lengths[0].tolist()},
        )  # fmt: skip
        return shortened, Cut(count, tokens=int((~is_kept).sum()))

    def _texts(self, batch: Batch, origins: list[str]) -> tuple[list[str], list[str]]:
        if self.keys is None:
            for column in self.columns[:2]:
                check_texts(batch[column], column, origins)
            return batch[self.columns[0]], batch[self.columns[1]]
        found: tuple[list[str], list[str]] = ([], [])
        for value, origin in zip(batch[TRANSLATION], origins, strict=True):
            if not isinstance(value, dict):
                raise Refusal(
                    f"{origin}: translation is {describe(value)}, and must be an object with a text for each language."
                )
            read = set[str]()
            for texts, flag, names in zip(found, ("--source-lang", "--target-lang"), self.keys, strict=True):
                key = next((name for name in names if name in value), None)
                if key is None:
                    raise Refusal(f"{origin}: translation has {', '.join(value)}, and not {names[0]} ({flag}).")
                check_texts([value[key]], f"translation.{key}", [origin])
                texts.append(value[key])
                read.add(key)
            if len(read) == 1:
                both = "--source-lang and --target-lang are both"
                raise Refusal(f"{origin}: {both} translation.{key}. It has {', '.join(value)}.")
        return found


def _describe(plan: Plan, texts: Seq2SeqConfig) -> str:
    if plan.layout == TRANSLATION:
        return f"translations from {texts.source_lang} to {texts.target_lang}"
    return f"{plan.columns[0]} to {plan.columns[1]}" + (f", each behind {texts.source_prefix!r}" if texts.source_prefix else "")


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    cut = row["source_tokens"]
    return "", part_pieces([row["input_ids"][:cut], row["input_ids"][cut:]], lambda ids: str(tokenizer.decode(ids)))


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

    before, after = around(ids(add_special_tokens=False), ids())
    end = tokenizer.eos_token_id
    if target and end is not None and end not in after:
        after = [*after, end]
    return before, after
