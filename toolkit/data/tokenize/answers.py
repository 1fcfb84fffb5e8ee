"""Single answers that are marked desirable or undesirable, to tokens: a prompt and one answer to it.

They are tokenized, ended and cut as the answers of pairs are, so that a pair and the two rows that it makes have the same
tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.data.report import Piece
from toolkit.data.split_counts import ANSWER_CLASSES
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, describe, read_messages, rows_of, with_origin
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, join_documents
from toolkit.data.tokenize.format import Format
from toolkit.data.tokenize.masks import Message
from toolkit.data.tokenize.pair_cutting import cut_pairs
from toolkit.data.tokenize.pairs import (
    PairRows,
    PairText,
    answer_messages,
    chat_sides,
    preference_format,
    show_parts,
    split_sides,
)
from toolkit.data.tokenize.preferences import ANSWER, PARTS, PARTS_OF_AN_ANSWER, describe_preference, plan_unpaired

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WRITTEN = {"true": True, "false": False}  # as CSV, where all values are texts, has them
_SIDE = ("completion",)


def unpaired_format() -> Format:
    """How single answers are read, each marked desirable or undesirable, or made of a pair."""
    import pyarrow as pa

    as_pairs = preference_format()
    columns = {
        "prompt_tokens": pa.int32(), "completion_tokens": pa.int32(), "desirable": pa.bool_(), ANSWER: pa.int32(),
        "prompt_key": pa.int64(),
    }  # fmt: skip

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> AnswerRows:
        pairs = as_pairs.rows(plan, encoder, config)
        assert isinstance(pairs, PairRows)
        return AnswerRows(pairs)

    return Format(
        "unpaired", lambda splits, config: (plan_unpaired(splits, config), []), rows, lambda plan, tokenizer: columns,
        lambda plan, tokenizer: describe_preference(plan), _show, part_names=("prompt", "completion"),
        class_names=lambda plan: ANSWER_CLASSES, numbered=ANSWER, unsplit=as_pairs.unsplit,
    )  # fmt: skip


@dataclass(frozen=True)
class AnswerRows:
    """Reads batches of rows; `pairs` has the plan, the encoder and the template, and reads those rows that are pairs."""

    pairs: PairRows

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole answers, and counts of what is peculiar about them."""
        if self.pairs.plan.layout.endswith("answers"):
            documents, remarks = self._answers(batch, origins)
        else:
            whole, remarks = self.pairs.read(batch, origins)
            documents = _both_answers(whole)
        desirable = sum(documents.columns["desirable"])
        remarks.update({"class desirable": desirable, "class undesirable": len(documents) - desirable})
        return documents, remarks

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring over-long answers within `max_length`: their prompts give way first, as those of pairs."""
        columns = documents.columns
        as_pairs = {"prompt_tokens": columns["prompt_tokens"], "chosen_tokens": columns["completion_tokens"],
                    "rejected_tokens": [0] * len(documents)}  # fmt: skip
        rest = {name: values for name, values in columns.items() if name not in PARTS_OF_AN_ANSWER}
        bos = self.pairs.encoder.tokenizer.bos_token_id
        kept, cut = cut_pairs(replace(documents, columns=rest | as_pairs), self.pairs.max_length, self.pairs.overlong, bos)
        found = {name: values for name, values in kept.columns.items() if name not in PARTS}
        found |= {"prompt_tokens": kept.columns["prompt_tokens"], "completion_tokens": kept.columns["chosen_tokens"]}
        return replace(kept, columns=found | {"prompt_key": _prompt_keys(kept, found["prompt_tokens"])}), cut

    def _answers(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        texts, marks, remarks = list[PairText](), list[bool](), Counter[str]()
        for row, origin in zip(rows_of(batch), origins, strict=True):
            marks.append(_mark(row["label"], origin))
            texts.append(with_origin(origin, _text_answer if self.pairs.template is None else self._chat_answer, row, origin))
            remarks.update(texts[-1].remarks)
        encoder, template = self.pairs.encoder, self.pairs.template
        ids, spans, counts = list[list[int]](), list[list[tuple[int, int]]](), list[tuple[int, int]]()
        encodings = encoder.encode([side for text in texts for side in text.sides], positions=True)
        for text, origin, encoding in zip(texts, origins, encodings, strict=True):
            prompt, (answer,), is_merged = split_sides(text, [encoding], encoder, template, origin, _SIDE)
            remarks["merged"] += is_merged
            ids.append(prompt + answer)
            spans.append([(len(prompt), len(ids[-1]))])
            counts.append((len(prompt), len(answer)))
        columns: dict[str, list[Any]] = {name: [count[i] for count in counts] for i, name in enumerate(PARTS_OF_AN_ANSWER)}
        return join_documents(ids, spans, origins, columns | {"desirable": marks}), remarks

    def _chat_answer(self, row: dict[str, Any], origin: str) -> PairText:
        prompt, answer = row["prompt"], answer_messages(row["completion"], "completion", origin)
        if isinstance(prompt, str):
            check_texts([prompt], "prompt", [origin])
            prompt = [{"role": "user", "content": prompt}]
        messages: list[Message] = read_messages(
            [prompt] if isinstance(prompt, dict) else prompt, "prompt", origin, needs_assistant=False
        )
        for place, where in ((0, "begins"), (-1, "ends")):
            if answer[place]["role"] != "assistant":
                raise Refusal(
                    f"{origin}: completion {where} with a turn of the {answer[place]['role']}: what follows the prompt must be "
                    "the assistant's answer. Correct or remove the row."
                )
        assert self.pairs.template is not None
        return chat_sides(self.pairs.template, messages, (answer,), _SIDE, row, origin)


def _text_answer(row: dict[str, Any], origin: str) -> PairText:
    prompt, answer = row["prompt"], row["completion"]
    check_texts([answer], "completion", [origin])
    if not isinstance(prompt, str):
        raise Refusal(f"{origin}: prompt is {describe(prompt)}, and must be text. Correct or remove the row.")
    return PairText((prompt + answer,), len(prompt))


def _mark(label: Any, origin: str) -> bool:
    """Whether an answer is desirable."""
    mark = _WRITTEN.get(label.strip().lower()) if isinstance(label, str) else label
    if not isinstance(mark, bool):
        raise Refusal(
            f"{origin}: label is {describe(label)}, and must be true, for a desirable answer, or false. Correct or remove the "
            "row."
        )
    return mark


def _both_answers(pairs: Documents) -> Documents:
    """Of each pair the chosen answer, desirable, and then the rejected one, each behind the prompt."""
    ids, counts = list[list[int]](), list[tuple[int, int]]()
    for tokens, prompt, chosen in zip(
        pairs.lists(pairs.values), pairs.columns["prompt_tokens"], pairs.columns["chosen_tokens"], strict=True
    ):
        for answer in (tokens[prompt : prompt + chosen], tokens[prompt + chosen :]):
            ids.append(tokens[:prompt] + answer)
            counts.append((prompt, len(answer)))
    spans = [[(prompt, prompt + answer)] for prompt, answer in counts]
    columns: dict[str, list[Any]] = {name: [count[i] for count in counts] for i, name in enumerate(PARTS_OF_AN_ANSWER)}
    columns["desirable"] = [True, False] * len(pairs)
    return join_documents(ids, spans, [origin for origin in pairs.origins for _ in range(2)], columns)


def _prompt_keys(documents: Documents, prompt_tokens: list[int]) -> list[int]:
    keys = []
    for start, count in zip(documents.bounds[:-1].tolist(), prompt_tokens, strict=True):
        prompt = np.ascontiguousarray(documents.values[start : start + count])
        keys.append(int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little", signed=True))
    return keys


def weight_notes(counts: dict[str, int], desirable_weight: float, undesirable_weight: float) -> list[str]:
    """A hint where desirable answers together don't weigh as much as undesirable ones, or up to a third more.

    That is the range of KTO, arXiv:2402.01306, section 4.2: n_D λ_D / (n_U λ_U) between 1 and 4/3.
    """
    desirable, undesirable = counts["desirable"], counts["undesirable"]
    share = desirable * desirable_weight / (undesirable * undesirable_weight)
    if 1 <= round(share, 2) <= 1.34:
        return []
    flag = "desirable" if share < 1 else "undesirable"
    least = desirable_weight / share if share < 1 else undesirable_weight * share * 3 / 4
    return [
        f"with {desirable:,} desirable and {undesirable:,} undesirable answers the desirable ones weigh {share:.3g} times as "
        f"much; KTO's authors advise 1 to 1.33: --{flag}-weight {least:.3g} to {least * 4 / 3:.3g}"
    ]


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    return "desirable" if row["desirable"] else "undesirable", show_parts(row, PARTS_OF_AN_ANSWER, tokenizer)
