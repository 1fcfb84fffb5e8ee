"""Prompts with one or several answers each, laid out for one forward pass in one of three ways with the same numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def lay_out(
    prompts: list[np.ndarray], answers: list[np.ndarray], prompt_of: np.ndarray, layout: str, pad_token_id: int = 0
) -> dict[str, Any]:
    """The tensors of a micro-batch of answers; `prompt_of` `[answers]` is the number of each one's prompt.

    `shared`: one row `[1, tokens]` of a prompt, its answers, the next prompt, its answers ... Each prompt is encoded once:
    by `shared_keys` attention lets its later answers follow it too, and `position_ids` that they begin where it ends.
    `packed`: one row of prompt, answer, prompt, answer ..., each two a document, answers of one prompt one behind the other.
    `padded`: rows `[answers, longest]` in the order of the answers.

    For the loss, where `A` is the number of answer tokens: `answer_positions` `[A]`, the flat index of the position that
    predicts each; `answer_tokens` `[A]`; `answer_slots` `[A]`, their places in a table `[answers, longest_answer]`; `answers`,
    how many.
    """
    asked, own = (np.array([len(part) for part in parts]) for parts in (prompts, answers))
    inputs, before, first = {"shared": _shared, "packed": _packed, "padded": _padded}[layout](
        prompts, answers, prompt_of, asked, own, pad_token_id
    )
    longest, place = int(own.max()), places_within(own)
    positions = np.repeat(first, own) + place - 1
    positions[place == 0] = before
    return {
        **inputs,
        "answer_positions": torch.from_numpy(positions),
        "answer_tokens": torch.from_numpy(np.concatenate(answers)),
        "answer_slots": torch.from_numpy(np.repeat(np.arange(len(answers)) * longest, own) + place),
        "longest_answer": longest,
        "answers": len(answers),
    }


# What goes to the model; and for each answer the flat index of its prompt's last token, and of its own first.
_Laid = tuple[dict[str, Any], np.ndarray, np.ndarray]


def _shared(
    prompts: list[np.ndarray], answers: list[np.ndarray], prompt_of: np.ndarray, asked: np.ndarray, own: np.ndarray, _: int
) -> _Laid:
    row, positions, keys = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    new, seen = list[int](), list[int]()  # tokens of each document: its own, and those that it follows as well
    before, first = np.zeros_like(own), np.zeros_like(own)
    start, prompt, of_prompt = 0, -1, np.arange(0)  # where the next part begins; of the prompt its number and its places
    for number in np.argsort(prompt_of, kind="stable"):
        begins = prompt_of[number] != prompt
        if begins:
            prompt = prompt_of[number]
            of_prompt = np.arange(start, start + asked[prompt])
            row.append(prompts[prompt])
            positions.append(np.arange(asked[prompt]))
            start += asked[prompt]
        row.append(answers[number])
        positions.append(np.arange(asked[prompt], asked[prompt] + own[number]))
        keys += [of_prompt, np.arange(start, start + own[number])]
        new.append(own[number] + (asked[prompt] if begins else 0))
        seen.append(own[number] + asked[prompt])
        before[number], first[number] = of_prompt[-1], start
        start += own[number]
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate(row))[None],
        "position_ids": torch.from_numpy(np.concatenate(positions))[None],
        **bounds_of_documents(np.array(new), np.array(seen)),
        "shared_keys": torch.from_numpy(np.concatenate(keys)),
    }
    return inputs, before, first


def _packed(
    prompts: list[np.ndarray], answers: list[np.ndarray], prompt_of: np.ndarray, asked: np.ndarray, own: np.ndarray, _: int
) -> _Laid:
    order = np.argsort(prompt_of, kind="stable")
    lengths = (asked[prompt_of] + own)[order]
    first = np.empty_like(own)
    first[order] = np.cumsum(lengths) - lengths + asked[prompt_of][order]
    row = [part for number in order for part in (prompts[prompt_of[number]], answers[number])]
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate(row))[None],
        "position_ids": torch.from_numpy(places_within(lengths))[None],
        **bounds_of_documents(lengths, lengths),
    }
    return inputs, first - 1, first


def _padded(
    prompts: list[np.ndarray], answers: list[np.ndarray], prompt_of: np.ndarray, asked: np.ndarray, own: np.ndarray,
    pad_token_id: int,
) -> _Laid:  # fmt: skip
    sequences = [np.concatenate([prompts[prompt], answer]) for prompt, answer in zip(prompt_of, answers, strict=True)]
    inputs = padded_inputs(sequences, pad_token_id)
    first = np.arange(len(sequences)) * inputs["input_ids"].shape[1] + asked[prompt_of]
    return inputs, first - 1, first


def padded(rows: Sequence[Any], fill: int) -> torch.Tensor:
    """Rows of whole numbers, filled up on the right to the longest, int64 `[rows, longest]`."""
    table = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(table)


def padded_inputs(rows: Sequence[Any], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Token ids in padded rows, and the mask that marks the padding, which no id does."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    return {"input_ids": padded(rows, pad_token_id), "attention_mask": torch.from_numpy(mask.astype(np.int64))}


def bounds_of_documents(new: np.ndarray, seen: np.ndarray) -> dict[str, Any]:
    """The bounds of documents under the names that transformers' attention takes them by: of their own tokens, and of all that
    these see."""
    longest = int(seen.max())
    return {
        "cu_seq_lens_q": bounds_of(new), "cu_seq_lens_k": bounds_of(seen), "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def without_padding(lengths: np.ndarray) -> dict[str, Any]:
    """What a model's body needs to compute padded rows `[rows, longest]` of these lengths without their padding.

    `token_places` `[tokens]`, the flat index of each token in the rows; `position_ids` `[1, tokens]`; and the bounds of the
    rows' tokens, one behind the other. A model that `choose_row_layout` has prepared takes them next to its padded rows.
    """
    within = places_within(lengths)
    return {
        "token_places": torch.from_numpy(np.repeat(np.arange(len(lengths)) * lengths.max(), lengths) + within),
        "position_ids": torch.from_numpy(within)[None],
        **bounds_of_documents(lengths, lengths),
    }


def bounds_of(lengths: np.ndarray) -> torch.Tensor:
    """0 and the end of each run, int32 `[runs + 1]`."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def places_within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... within each run."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
