"""Preferences to tokenized pairs: a prompt, the better answer to it and the worse one.

Each side is tokenized whole, prompt and answer as one text, so that its tokens are those the model would see. The prompt's
tokens are the longest beginning that both sides have in common and that holds no character of an answer. So no token is
ever split: one that joins the end of the prompt with the start of an answer belongs to that answer, and so do tokens at
the prompt's end that are others in each side for what follows them. An implicit prompt of texts goes up to where the texts
begin to differ, cut back by the same rule, and it leaves each answer a token of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.data.report import Piece, part_pieces
from toolkit.data.tokenize.columns import Batch, Plan, check_texts, describe, read_messages, read_options, rows_of, with_origin
from toolkit.data.tokenize.documents import Cut, Documents, Encoder, join_documents
from toolkit.data.tokenize.format import Format
from toolkit.data.tokenize.masks import (
    ChatTemplate,
    Message,
    check_rendered,
    common_prefix,
    read_chat_template,
    supervised_tokens,
    turn_start,
)
from toolkit.data.tokenize.pair_cutting import cut_pairs, has_one_answer
from toolkit.data.tokenize.preferences import PAIR, PARTS, Preference, describe_preference, plan_preference, read_preferences
from toolkit.data.tokenize.tool_calls import odd_tool_turns
from toolkit.system.console import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")


def preference_format(pairs_per_prompt: str = "best_worst", max_pairs_per_prompt: int = 10) -> Format:
    """How pairs of a better and a worse answer are read; of lists of answers these settings define which pairs they make."""
    import pyarrow as pa

    def rows(plan: Plan, encoder: Encoder, config: DataConfig) -> PairRows:
        template = read_chat_template(encoder.tokenizer) if plan.layout.startswith("chat") else None
        of_lists = (pairs_per_prompt, max_pairs_per_prompt)
        return PairRows(plan, encoder, template, config.max_length, config.overlong, *of_lists)

    def columns(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> dict[str, pa.DataType]:
        fields = {name: pa.int32() for name in (*PARTS, PAIR)}
        return fields | ({"margin": pa.float32()} if plan.margin else {})

    return Format(
        "preference", lambda splits, config: (plan_preference(splits, config, pairs_per_prompt), []), rows, columns,
        lambda plan, tokenizer: describe_preference(plan, pairs_per_prompt), _show,
        part_names=("prompt", "chosen", "rejected"), settings=(pairs_per_prompt, max_pairs_per_prompt), numbered=PAIR,
        unsplit="what is judged is a whole answer",
    )  # fmt: skip


@dataclass(frozen=True)
class PairText:
    """A prompt with each of its answers, one or the two of a pair, as text: the first `prompt` characters are the prompt."""

    sides: tuple[str, ...]  # of a pair: with chosen, with rejected
    prompt: int
    is_implicit: bool = False  # the prompt is what both texts begin with
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairRows:
    """Reads batches of rows: all that it needs next to them."""

    plan: Plan
    encoder: Encoder
    template: ChatTemplate | None  # for chats
    max_length: int
    overlong: str
    pairs_per_prompt: str = "best_worst"
    most_pairs: int = 10  # of one list

    def read(self, batch: Batch, origins: list[str]) -> tuple[Documents, Counter[str]]:
        """Whole pairs, and counts of what is peculiar about them. Rows that prefer no answer are left out and counted."""
        texts, kept, margins, remarks = list[PairText](), list[str](), list[float | None](), Counter[str]()
        for row, origin in zip(rows_of(batch), origins, strict=True):
            preferences, left_out = read_preferences(row, self.plan, origin, self.pairs_per_prompt)
            remarks.update(left_out)
            remarks["undecided" if any(left_out.values()) else "ties"] += not preferences
            remarks["capped"] += len(preferences) > self.most_pairs
            read = _text_pair if self.template is None else self._chat_pair
            for preference in preferences[: self.most_pairs]:
                texts.append(with_origin(origin, read, preference, row, origin))
                remarks.update(texts[-1].remarks)
                remarks["not_higher"] += preference.margin is not None and preference.margin <= 0
                kept.append(origin)
                margins.append(preference.margin)
        documents = self._documents(texts, kept, remarks)
        if self.plan.margin:
            documents.columns["margin"] = margins
        is_same = np.array([has_one_answer(documents, row) for row in range(len(documents))], dtype=bool)
        remarks["same_answers"] += int(is_same.sum())
        return documents.take(np.flatnonzero(~is_same)) if is_same.any() else documents, remarks

    def cut(self, documents: Documents) -> tuple[Documents, Cut]:
        """Bring over-long pairs within `max_length`."""
        return cut_pairs(documents, self.max_length, self.overlong, self.encoder.tokenizer.bos_token_id)

    def _documents(self, texts: list[PairText], origins: list[str], remarks: Counter[str]) -> Documents:
        """Tokenize texts at once. What a document holds next to its tokens: how many are the prompt's and each answer's."""
        encodings = self.encoder.encode([side for text in texts for side in text.sides], positions=True)
        ids, spans, counts = list[list[int]](), list[list[tuple[int, int]]](), list[tuple[int, int, int]]()
        for text, origin, *both in zip(texts, origins, encodings, encodings, strict=True):
            prompt, (better, worse), is_merged = split_sides(text, both, self.encoder, self.template, origin, SIDES)
            remarks["merged"] += is_merged
            ids.append(prompt + better + worse)
            spans.append([(len(prompt), len(ids[-1]))])
            counts.append((len(prompt), len(better), len(worse)))
        columns: dict[str, list[Any]] = {name: [count[i] for count in counts] for i, name in enumerate(PARTS)}
        documents = join_documents(ids, spans, origins, columns)
        documents.whole[:] = [prompt + max(answers) for prompt, *answers in counts]  # what --max-length is about
        return documents

    def _chat_pair(self, preference: Preference, row: dict[str, Any], origin: str) -> PairText:
        """Rendered by the template: the prompt with its generation prompt, then each answer up to the end of its turn."""
        assert self.template is not None
        return chat_sides(self.template, *_prompt_and_answers(preference, origin), SIDES, row, origin)


def chat_sides(
    template: ChatTemplate, prompt: list[Message], answers: tuple[list[Message], ...], names: tuple[str, ...],
    row: dict[str, Any], origin: str,
) -> PairText:  # fmt: skip
    """A prompt with each of its answers, rendered by the template; `names` of the answers, for messages."""
    options = read_options(row, origin)
    texts = []
    for answer, name in zip(answers, names, strict=True):
        whole = template.render(prompt + answer, options)
        check_rendered(template, prompt + answer, options, whole)
        texts.append(_until_end(template, whole, name, origin))
    asked = template.render(prompt, options, add_generation_prompt=True)
    remarks = ["turns"] * any(message["role"] != "assistant" for answer in answers for message in answer)
    at = len(asked)
    if not all(text.startswith(asked) for text in texts):
        remarks.append("rewritten_prompts")
        starts = [turn_start(template, prompt + answer, options, len(prompt), text)
                  for answer, text in zip(answers, texts, strict=True)]  # fmt: skip
        at = min(*starts, *(common_prefix(texts[0], text) for text in texts))
    odd = {what for answer in answers for what in odd_tool_turns(prompt + answer, options)}
    return PairText(tuple(texts), at, remarks=(*remarks, *(f"{what} at {origin}" for what in sorted(odd))))


def split_sides(
    text: PairText, encodings: list[Encoding], encoder: Encoder, template: ChatTemplate | None, origin: str,
    names: tuple[str, ...],
) -> tuple[list[int], list[list[int]], bool]:  # fmt: skip
    """Ids of the prompt and of each answer, which ends; and whether a token joins the prompt's end with an answer's start."""
    sides = [side.ids if template else encoder.add_start(side.ids) for side in encodings]
    prompt, is_merged = _prompt_tokens(text, encodings, sides, origin)
    answers = [_ended(encoder, template, side, origin, name)[prompt:] for side, name in zip(sides, names, strict=True)]
    for name, answer in zip(names, answers, strict=True):
        if answer[0] == encoder.tokenizer.bos_token_id:
            raise Refusal(f"{origin}: {name} begins with BOS (token {answer[0]}), within the text. Take it out of the text.")
    return sides[0][:prompt], answers, is_merged


def _ended(encoder: Encoder, template: ChatTemplate | None, side: list[int], origin: str, name: str) -> list[int]:
    """With an end, so that the model learns to stop; once."""
    end = encoder.end
    if template is None:
        side = encoder.add_end(side)
    elif not template.turn_ends and end is not None and side[-1:] != [end]:
        side = [*side, end]
    if side[-2:] == [side[-1]] * 2:
        shown = encoder.tokenizer.decode(side[-1:])
        raise Refusal(f"{origin}: {name} ends with {quoted(shown)} (token {side[-1]}) twice. Take it out of the text.")
    return side


def _text_pair(preference: Preference, row: dict[str, Any], origin: str) -> PairText:
    prompt, chosen, rejected = preference.prompt, preference.chosen, preference.rejected
    for name, answer in zip(SIDES, (chosen, rejected), strict=True):
        check_texts([answer], name, [origin])
    if prompt is None and "prompt" not in row:
        return PairText((chosen, rejected), common_prefix(chosen, rejected), is_implicit=True)
    if not isinstance(prompt, str):
        raise Refusal(f"{origin}: prompt is {describe(prompt)}, and must be text. Correct or remove the row.")
    return PairText((prompt + chosen, prompt + rejected), len(prompt))


def _prompt_and_answers(preference: Preference, origin: str) -> tuple[list[Message], tuple[list[Message], list[Message]]]:
    """Messages of the prompt and of each answer. Answers that begin with their prompt are taken without it."""
    chosen, rejected = (
        answer_messages(answer, name, origin)
        for answer, name in zip((preference.chosen, preference.rejected), SIDES, strict=True)
    )  # fmt: skip
    given = [preference.prompt] if isinstance(preference.prompt, dict) else preference.prompt
    if isinstance(given, str) and chosen[0]["role"] == "assistant":
        given = [{"role": "user", "content": given}]
    if isinstance(given, list):
        prompt = read_messages(given, "prompt", origin, needs_assistant=False)
        count = len(prompt)
        if not (chosen[:count] == rejected[:count] == prompt and count < min(len(chosen), len(rejected))):
            chosen, rejected = prompt + chosen, prompt + rejected
    else:
        most = min(len(chosen), len(rejected)) - 1
        count = next((i for i in range(most) if chosen[i] != rejected[i]), most)
        if count == 0:
            raise Refusal(f"{origin}: chosen and rejected begin with no message in common: there is no prompt. Give one.")
    for messages, name in ((chosen, "chosen"), (rejected, "rejected")):
        for place, where in ((count, "begins"), (-1, "ends")):
            if messages[place]["role"] != "assistant":
                raise Refusal(
                    f"{origin}: {name} {where} with a turn of the {messages[place]['role']}: what follows the prompt must be "
                    "the assistant's answer. Correct or remove the row."
                )
    return chosen[:count], (chosen[count:], rejected[count:])


def answer_messages(answer: object, name: str, origin: str) -> list[Message]:
    """An answer as messages; a text is the assistant's."""
    if isinstance(answer, str):
        check_texts([answer], name, [origin])
        return [{"role": "assistant", "content": answer}]
    return read_messages([answer] if isinstance(answer, dict) else answer, name, origin)


def _until_end(template: ChatTemplate, text: str, name: str, origin: str) -> str:
    """Without the white space that a template writes after the end of the last turn: the model stops before it."""
    if not template.turn_ends:
        return text
    ended = text.rstrip()
    if not any(token.special and ended.endswith(token.content) for token in template.tokenizer.added_tokens_decoder.values()):
        raise Refusal(
            f"{origin}: {name} never ends: the chat template writes no {' or '.join(template.turn_ends)} after it, and the "
            "model would never learn to stop. Correct the row or the template (--chat-template FILE)."
        )
    return ended


def _prompt_tokens(text: PairText, encodings: list[Encoding], sides: list[list[int]], origin: str) -> tuple[int, bool]:
    """How many tokens are the prompt's, and whether a token joins its end with the start of an answer."""
    within, is_joined = [], False
    for encoding, side, whole in zip(encodings, sides, text.sides, strict=True):
        spans, joins = supervised_tokens(encoding, [(text.prompt, len(whole))], len(whole))
        first = spans[0][0] if spans else len(encoding)
        if text.is_implicit:
            first = min(first, len(encoding) - 1)
        elif not spans:
            raise Refusal(f"{origin}: an answer has no token of its own. Fill it in, or remove the row.")
        within.append(first + len(side) - len(encoding))
        is_joined |= joins and not text.is_implicit
    prompt = min(within)
    for side in sides[1:]:
        if side[:prompt] != sides[0][:prompt]:
            prompt = next(i for i in range(prompt) if side[i] != sides[0][i])
    if prompt <= 0:
        joined = "the prompt is empty, or joined with an answer in one token"
        what = "chosen and rejected begin with nothing in common" if text.is_implicit else joined
        left = "no token is left for the prompt, as the tokenizer puts no BOS first"
        raise Refusal(f"{origin}: {what}: {left}. Give the row a prompt, or remove it.")
    return prompt, is_joined


def _show(row: dict[str, Any], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Piece]]:
    return "", show_parts(row, PARTS, tokenizer)


def show_parts(row: dict[str, Any], parts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The text of each part of a tokenized row; `parts`: the columns that hold how many tokens each has."""
    bounds = list(accumulate((row[name] for name in parts), initial=0))
    pieces = [row["input_ids"][start:end] for start, end in pairwise(bounds)]
    return part_pieces(pieces, lambda ids: str(tokenizer.decode(ids)))
