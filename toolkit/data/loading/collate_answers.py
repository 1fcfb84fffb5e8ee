"""From single answers to the tensors of one micro-batch: their own prompts before them, and perhaps others."""

from typing import Any

import numpy as np
import torch

from toolkit.data.loading.collate_pairs import bounds_of, locate_answers, places_within

ANSWER_LAYOUTS = ("packed", "padded")
MISMATCHED = "mismatched_"  # what the names of all that is about mismatched answers begin with


def collate_answers(documents: list[dict[str, Any]], *, layout: str = "packed", pad_token_id: int = 0) -> dict[str, Any]:
    """Prompts, each with one answer.

    `packed`: one row `[1, tokens]` of prompt, answer, prompt, answer ..., each pair of them a document. `padded`: rows
    `[answers, longest]`. Next to what the model is given: `answer_positions`, `answer_tokens`, `answer_slots` and
    `longest_answer`, as in `collate_pairs`; `answers`, how many; `desirable` `[answers]`, bool; `answer` `[answers]`, the
    number of each, through all splits.

    Where documents have `mismatched`, an answer to another prompt, the same of each prompt with that one, under names that
    begin with `mismatched_`; see `mismatched_of`.

    Each document has `input_ids` (prompt and answer), `prompt_tokens`, `desirable` and `answer`.
    """
    tokens = [np.asarray(document["input_ids"], dtype=np.int64) for document in documents]
    prompts = [row[: document["prompt_tokens"]] for row, document in zip(tokens, documents, strict=True)]
    answers = [row[document["prompt_tokens"] :] for row, document in zip(tokens, documents, strict=True)]
    batch = {
        **_laid(prompts, answers, layout, pad_token_id),
        "desirable": torch.tensor([bool(document["desirable"]) for document in documents]),
        "answer": torch.tensor([int(document["answer"]) for document in documents]),
    }
    if "mismatched" in documents[0]:
        others = [np.asarray(document["mismatched"], dtype=np.int64) for document in documents]
        batch |= {MISMATCHED + name: value for name, value in _laid(prompts, others, layout, pad_token_id).items()}
    return batch


def mismatched_of(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """The prompts of a micro-batch with their mismatched answers, as `collate_answers` gives them with their own."""
    return {name.removeprefix(MISMATCHED): value for name, value in micro_batch.items() if name.startswith(MISMATCHED)}


def _laid(prompts: list[np.ndarray], answers: list[np.ndarray], layout: str, pad_token_id: int) -> dict[str, Any]:
    sequences = [np.concatenate([prompt, answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    lengths, asked = np.array([len(row) for row in sequences]), np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    if layout == "packed":
        starts, bounds = np.cumsum(lengths) - lengths, bounds_of(lengths)
        inputs = {
            "input_ids": torch.from_numpy(np.concatenate(sequences))[None],
            "position_ids": torch.from_numpy(places_within(lengths))[None],
            "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip
    else:
        starts = np.arange(len(sequences)) * longest
        rows, mask = (np.full((len(sequences), longest), fill, dtype=np.int64) for fill in (pad_token_id, 0))
        for number, sequence in enumerate(sequences):
            rows[number, : len(sequence)], mask[number, : len(sequence)] = sequence, 1
        inputs = {"input_ids": torch.from_numpy(rows), "attention_mask": torch.from_numpy(mask)}
    first = starts + asked
    return {**inputs, **locate_answers(answers, first - 1, first)}
