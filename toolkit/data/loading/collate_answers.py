"""From single answers to the tensors of one micro-batch: their own prompts before them, and perhaps others."""

from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.layouts import lay_out

MISMATCHED = "mismatched_"  # what the names of all that is about mismatched answers begin with


def collate_answers(documents: list[Document], *, layout: str = "packed", pad_token_id: int = 0) -> MicroBatch:
    """Prompts, each with one answer.

    In a layout of `lay_out`, packed or padded. For the loss, next to what that says: `desirable` `[answers]`, bool; `answer`
    `[answers]`, the number of each, through all splits.

    Where documents have `mismatched`, an answer to another prompt, the same of each prompt with that one, under names that
    begin with `mismatched_`; see `mismatched_of`.

    Each document has `input_ids` (prompt and answer), `prompt_tokens`, `desirable` and `answer`.
    """
    tokens = [np.asarray(document["input_ids"], dtype=np.int64) for document in documents]
    prompts = [row[: document["prompt_tokens"]] for row, document in zip(tokens, documents, strict=True)]
    answers = [row[document["prompt_tokens"] :] for row, document in zip(tokens, documents, strict=True)]
    own = np.arange(len(prompts))
    batch = {
        **lay_out(prompts, answers, own, layout, pad_token_id),
        "desirable": torch.tensor([bool(document["desirable"]) for document in documents]),
        "answer": torch.tensor([int(document["answer"]) for document in documents]),
    }
    if "mismatched" in documents[0]:
        others = [np.asarray(document["mismatched"], dtype=np.int64) for document in documents]
        batch |= {MISMATCHED + name: value for name, value in lay_out(prompts, others, own, layout, pad_token_id).items()}
    return batch


def mismatched_of(micro_batch: MicroBatch) -> dict[str, Any]:
    """The prompts of a micro-batch with their mismatched answers, as `collate_answers` gives them with their own."""
    return {name.removeprefix(MISMATCHED): value for name, value in micro_batch.items() if name.startswith(MISMATCHED)}
