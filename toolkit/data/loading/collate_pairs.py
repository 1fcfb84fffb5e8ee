"""From tokenized preference pairs to the tensors of one micro-batch, in one of three layouts with the same numbers."""

from typing import Any

import numpy as np
import torch

PAIR_LAYOUTS = ("shared", "packed", "padded")
# What of such a micro-batch is for the loss, and not for the model's forward.
NOT_FOR_THE_MODEL = (
    "answer_positions", "answer_tokens", "answer_slots", "longest_answer", "answers", "chosen_tokens", "rejected_tokens",
    "pair", "margin", "desirable", "answer",
)  # fmt: skip


def collate_pairs(documents: list[dict[str, Any]], *, layout: str = "packed", pad_token_id: int = 0) -> dict[str, Any]:
    """Prompts with their chosen and rejected answers.

    `shared`: one row `[1, tokens]` of prompt, chosen, rejected, prompt, chosen, rejected ... Each prompt is encoded once:
    `shared_keys` tells attention that the rejected answer follows it too, and `position_ids` that it begins where the prompt
    ends. `packed`: one row of prompt, chosen, prompt, rejected ..., each pair of them a document. `padded`: rows
    `[2 * pairs, longest]`, all chosen answers and then all rejected ones, each after its prompt.

    For the loss, where `A` is the number of answer tokens: `answer_positions` `[A]`, the flat index of the position that
    predicts each; `answer_tokens` `[A]`; `answer_slots` `[A]`, their places in a table `[answers, longest_answer]` of first
    the chosen and then the rejected answers, `answers` in all; `chosen_tokens` and `rejected_tokens` `[pairs]`, float; `pair`
    `[pairs]`, the number of each, through all splits; `margin` `[pairs]` where the rows have one.

    Each document has `input_ids` (prompt, chosen and rejected, one behind the other), `prompt_tokens`, `chosen_tokens`,
    `rejected_tokens` and `pair`.
    """
    sizes = np.array([[document[f"{part}_tokens"] for part in ("prompt", "chosen", "rejected")] for document in documents])
    tokens = [np.asarray(document["input_ids"], dtype=np.int64) for document in documents]
    parts = [np.split(row, np.cumsum(size)[:-1]) for row, size in zip(tokens, sizes, strict=True)]
    inputs, first_positions = {"shared": _shared, "packed": _packed, "padded": _padded}[layout](parts, sizes, pad_token_id)
    answers = [chosen for _, chosen, _ in parts] + [rejected for *_, rejected in parts]
    batch = {
        **inputs,
        **locate_answers(answers, *first_positions),
        "chosen_tokens": torch.from_numpy(sizes[:, 1].astype(np.float32)),
        "rejected_tokens": torch.from_numpy(sizes[:, 2].astype(np.float32)),
        "pair": torch.tensor([int(document["pair"]) for document in documents]),
    }
    if "margin" in documents[0]:
        batch["margin"] = torch.tensor([float(document["margin"]) for document in documents])
    return batch


_Parts = list[list[np.ndarray]]
# What goes to the model; and for each answer the flat index of its prompt's last token, and of its own first.
_Laid = tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]


def _shared(parts: _Parts, sizes: np.ndarray, pad_token_id: int) -> _Laid:
    starts = np.concatenate([[0], np.cumsum(sizes.sum(1))[:-1]])
    prompts, chosen, rejected = sizes.T
    # documents in the order of the row: the prompt with its chosen answer, then the rejected one
    own = np.stack([prompts + chosen, rejected], axis=1).reshape(-1)
    seen = np.stack([prompts + chosen, prompts + rejected], axis=1).reshape(-1)
    keys = [
        start + np.concatenate([np.arange(p + c), np.arange(p), np.arange(p + c, p + c + r)])
        for start, (p, c, r) in zip(starts, sizes, strict=True)
    ]
    positions = [np.concatenate([np.arange(p + c), np.arange(p, p + r)]) for p, c, r in sizes]
    longest = int(seen.max())
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate([part for pair in parts for part in pair]))[None],
        "position_ids": torch.from_numpy(np.concatenate(positions))[None],
        "cu_seq_lens_q": bounds_of(own), "cu_seq_lens_k": bounds_of(seen), "max_length_q": longest, "max_length_k": longest,
        "shared_keys": torch.from_numpy(np.concatenate(keys)),
    }  # fmt: skip
    ends = starts + prompts
    return inputs, (np.tile(ends - 1, 2), np.concatenate([ends, ends + chosen]))


def _packed(parts: _Parts, sizes: np.ndarray, pad_token_id: int) -> _Laid:
    prompts, chosen, rejected = sizes.T
    lengths = np.stack([prompts + chosen, prompts + rejected], axis=1)
    ends = np.cumsum(lengths.reshape(-1)).reshape(-1, 2) - lengths + prompts[:, None]  # of each prompt
    bounds, longest = bounds_of(lengths.reshape(-1)), int(lengths.max())
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate([part for p, c, r in parts for part in (p, c, p, r)]))[None],
        "position_ids": torch.from_numpy(places_within(lengths.reshape(-1)))[None],
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip
    first = ends.T.reshape(-1)
    return inputs, (first - 1, first)


def _padded(parts: _Parts, sizes: np.ndarray, pad_token_id: int) -> _Laid:
    sequences = [np.concatenate([p, c]) for p, c, _ in parts] + [np.concatenate([p, r]) for p, _, r in parts]
    longest = max(map(len, sequences))
    tokens, mask = (np.full((len(sequences), longest), fill, dtype=np.int64) for fill in (pad_token_id, 0))
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    first = np.arange(len(sequences)) * longest + np.tile(sizes[:, 0], 2)
    return {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}, (first - 1, first)


def locate_answers(answers: list[np.ndarray], before: np.ndarray, first: np.ndarray) -> dict[str, Any]:
    """What the loss needs to find answers in a micro-batch, as `collate_pairs` says.

    `before` and `first` `[answers]`: flat indices of the last token of each one's prompt, which may lie elsewhere in the row,
    and of its own first token.
    """
    lengths = np.array([len(answer) for answer in answers])
    longest, place = int(lengths.max()), places_within(lengths)
    positions = np.repeat(first, lengths) + place - 1
    positions[place == 0] = before
    return {
        "answer_positions": torch.from_numpy(positions),
        "answer_tokens": torch.from_numpy(np.concatenate(answers)),
        "answer_slots": torch.from_numpy(np.repeat(np.arange(len(answers)) * longest, lengths) + place),
        "longest_answer": longest,
        "answers": len(answers),
    }


def bounds_of(lengths: np.ndarray) -> torch.Tensor:
    """0 and the end of each run, int32 `[runs + 1]`."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def places_within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... within each run."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
