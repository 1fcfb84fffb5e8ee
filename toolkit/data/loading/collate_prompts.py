"""From prompts to one micro-batch of them: what completions are sampled for, and what reward functions get."""

import json
from typing import Any

from toolkit.data.loading.batch import Document, MicroBatch


def collate_prompts(documents: list[Document]) -> MicroBatch:
    """Put prompts into one micro-batch, without padding and without tensors.

    Returns `prompt_ids`, a list of token ids for each prompt; `rows`, its columns as the data have them, with `prompt` as it
    was given, text or messages; `prompt`, the number of each through all splits, where the documents have one (not those of a
    stream).
    """
    batch: dict[str, Any] = {
        "prompt_ids": [[int(token) for token in document["input_ids"]] for document in documents],
        "rows": [json.loads(str(document["row"])) for document in documents],
    }
    if "prompt" in documents[0]:
        batch["prompt"] = [int(document["prompt"]) for document in documents]
    return batch
