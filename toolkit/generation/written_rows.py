"""Rows whose answers a model writes, for another one to learn from (sequence-level distillation).

Kim and Rush 2016, arXiv:1606.07947: the teacher's own texts take the place of the data's answers. What is written follows from
the weights, the prompt, its place in the data set and the seed, so a killed run is continued to the same rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.sources.load import WRITER
from toolkit.data.tokenize.columns import alpaca_messages, alpaca_prompt, read_messages, read_options
from toolkit.data.tokenize.documents import build_encoder
from toolkit.data.tokenize.masks import read_chat_template
from toolkit.generation.answers import chat_prompt
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import Completion, sample_groups
from toolkit.models.shapes import positions_of
from toolkit.system.files import make_folder, remove, waiting_lock, write_atomically
from toolkit.system.json_lines import intact_records, plain_json, read_lines, sealed_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OF_TEMPLATES = ("tools", "chat_template_kwargs")  # columns that a chat template reads next to the messages


@dataclass(frozen=True)
class Asked:
    """A row's prompt: as the model reads it, and as the row holds it, a text or messages, with what their template reads."""

    origin: str
    text: str
    row: dict[str, Any]

    def answered(self, text: str) -> dict[str, Any]:
        """The row with an answer, which alone is supervised, in a layout that recipes/sft.py reads."""
        is_text = isinstance(self.row["prompt"], str)
        return {**self.row, "completion": text if is_text else [{"role": "assistant", "content": text}]}


class Written(NamedTuple):
    """How many rows a file has, how many of them an earlier start had written, and how many answers ran into their limit."""

    rows: int
    known: int
    truncated: int


def asked_of(
    rows: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False, system: str | None = None
) -> list[Asked]:
    """The prompt of each row: its messages without an answer at their end, its prompt, or Alpaca's instruction.

    A prompt that is a text becomes a user's turn, behind `system`, where the model has a chat template and `raw` is not
    requested. Answers that the rows have are left out.

    Raises:
        Refusal: a row without a prompt, or a chat for a tokenizer without a template.
    """
    found = []
    for number, row in enumerate(rows):
        origin = row.get("origin") or f"row {number}"
        found.append(_asked(dict(row), str(origin), tokenizer, raw or not tokenizer.chat_template, system))
    return found


def _asked(row: dict[str, Any], origin: str, tokenizer: PreTrainedTokenizerBase, raw: bool, system: str | None) -> Asked:
    messages, prompt = row.get("messages") or row.get("conversations"), row.get("prompt")
    if not messages and isinstance(prompt, list):
        messages = prompt
    if not messages and prompt is None and isinstance(row.get("instruction"), str):
        prompt = alpaca_prompt(row)
        messages = None if raw else alpaca_messages({**row, "output": "?"}, origin)[0]
    if messages:
        if not tokenizer.chat_template:
            raise Refusal(f"{origin}: is a chat, and the tokenizer has no chat template. Give one: --chat-template FILE")
        if system:
            raise Refusal(f"{origin}: is a chat, into which --system is not written. Put a system message into the row.")
        messages = read_messages(messages, "messages", origin, needs_assistant=False)
        before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not before:
            raise Refusal(f"{origin}: begins with the assistant's answer: no prompt comes before it. Remove the row.")
        text = read_chat_template(tokenizer).render(before, read_options(row, origin), add_generation_prompt=True)
        return Asked(origin, text, {"prompt": before, **{name: row[name] for name in _OF_TEMPLATES if row.get(name)}})
    if not isinstance(prompt, str) or not prompt.strip():
        columns = ", ".join(name for name in row if name != "origin")
        raise Refusal(f"{origin}: holds no prompt, only {columns}. Rows have messages or a prompt: --rename-columns OLD=prompt")
    if raw:
        return Asked(origin, prompt, {"prompt": prompt})
    turns_of_text = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    return Asked(origin, chat_prompt(turns_of_text, tokenizer), {"prompt": turns_of_text})


def write_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked], output: Path, *,
    settings: SamplingSettings, seed: int, writer: str, made_of: Mapping[str, Any],
) -> Written:  # fmt: skip
    """Let the model answer each prompt and write the rows to `output`, in their order, each with its `generated_by`.

    Each answer is appended to `output`.part as soon as it is whole. A start that finds one goes on behind it: no row twice,
    none lost; what a kill has cut or a disk has changed is written again.

    Args:
        writer: the model's name, for others to read.
        made_of: what distinguishes this model from another one.

    Raises:
        Refusal: a prompt without room for an answer; a .part of another model, of other rows or settings; `output` is there.
    """
    part = output.with_name(output.name + ".part")
    ids, longest = _token_ids(model, tokenizer, asked)
    prompts = hashlib.sha256(json.dumps([[each.text, each.row] for each in asked], default=str).encode()).hexdigest()
    header = plain_json({"writer": writer, "model": made_of, "seed": seed, "settings": vars(settings), "prompts": prompts})
    make_folder(output.parent)
    lock = output.with_name(f".{output.name}.lock")
    with waiting_lock(lock, f"writes {output}"):
        if output.exists():
            remove(part)  # of a start that was killed when all was written
            raise Refusal(f"--output {output}: is there already. Name another, or add --overwrite.")
        found = _known(part, header)
        missing, known = [number for number in range(len(asked)) if number not in found], len(found)
        keys = np.array([[completion_key(seed, 0, number, 0)] for number in missing], dtype=np.uint64).reshape(-1, 1)
        limits = [min(settings.max_new_tokens, longest - len(ids[number])) for number in missing]
        with _kept_when_full(output, part), _appended(part, header, found) as file, torch.no_grad():

            def keep(place: int, group: list[Completion]) -> None:
                text = str(tokenizer.decode(group[0].tokens, skip_special_tokens=True))
                found[missing[place]] = {"number": missing[place], "text": text, "truncated": group[0].truncated}
                file.write(sealed_line(found[missing[place]]))
                file.flush()

            sample_groups(model, [ids[number] for number in missing], keys, settings, tokenizer, on_group=keep, limits=limits)
            os.fsync(file.fileno())
        rows = [{**each.answered(found[number]["text"]), WRITER: writer} for number, each in enumerate(asked)]
        with _kept_when_full(output, part):
            write_atomically(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        remove(part)
        remove(lock)  # who waits for it finds the file
    return Written(len(rows), known, sum(each["truncated"] for each in found.values()))


@contextlib.contextmanager
def _kept_when_full(output: Path, part: Path) -> Iterator[None]:
    """An error of the disk as a refusal that says where the answers so far are."""
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"--output {output}: {error.strerror or error}. The answers so far are in {part}: make room, and the same command "
            "goes on behind them."
        ) from error


def _token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked]
) -> tuple[list[list[int]], int]:
    """The tokens of each prompt, and how many a prompt and its answer may have."""
    longest = positions_of(model.config) or 1 << 20
    encoder = build_encoder(tokenizer)
    ids = [encoder.add_start(encoding.ids) for encoding in encoder.encode([each.text for each in asked])]
    for each, tokens in zip(asked, ids, strict=True):
        if not 0 < len(tokens) < longest:
            raise Refusal(
                f"{each.origin}: the prompt has {len(tokens):,} tokens, and the model {longest:,} positions. Remove the row."
            )
    return ids, longest


def _known(part: Path, header: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What an earlier start has written, by the rows' numbers."""
    records = list(intact_records(read_lines(part)))
    if not part.exists() or not records:
        return {}
    if records[0] != header:
        other = [name for name in header if records[0].get(name) != header[name]]
        raise Refusal(f"{part}: was begun with another {' and another '.join(other)}. Remove it, or name another --output.")
    return {record["number"]: record for record in records[1:]}


def _appended(part: Path, header: Mapping[str, Any], found: Mapping[int, Mapping[str, Any]]) -> IO[str]:
    """The file to append to, without what a kill has cut."""
    write_atomically(part, "".join(map(sealed_line, (header, *found.values()))))
    return open(part, "a", encoding="utf-8")
