"""From preference pairs, or single answers, with their prompts to the tensors of one micro-batch."""


import numpy as np
import torch

from toolkit.data.loading.batch import MISMATCHED, Document, MicroBatch, model_inputs
from toolkit.data.loading.layouts import lay_out, without_padding


def collate_pairs(documents: list[Document], *, layout: str = "packed", pad_token_id: int = 0) -> MicroBatch:
    """Prompts with their chosen and rejected answers, in a layout of `lay_out`: first the chosen and then the rejected ones.

    For the loss, next to the keys of `lay_out`: `chosen_tokens` and `rejected_tokens` `[pairs]`, float; `pair` `[pairs]`, the
    number of each, through all splits; `margin` `[pairs]` where the rows have one.

    Each document has `input_ids` (prompt, chosen and rejected, one behind the other), `prompt_tokens`, `chosen_tokens`,
    `rejected_tokens` and `pair`.
    """
    sizes = np.array([[document[f"{part}_tokens"] for part in ("prompt", "chosen", "rejected")] for document in documents])
    tokens = [np.asarray(document["input_ids"], dtype=np.int64) for document in documents]
    prompts, chosen, rejected = zip(
        *(np.split(row, np.cumsum(size)[:-1]) for row, size in zip(tokens, sizes, strict=True)), strict=True
    )
    batch = {
        **lay_out(list(prompts), [*chosen, *rejected], np.tile(np.arange(len(prompts)), 2), layout, pad_token_id),
        "chosen_tokens": torch.from_numpy(sizes[:, 1].astype(np.float32)),
        "rejected_tokens": torch.from_numpy(sizes[:, 2].astype(np.float32)),
        "pair": torch.tensor([int(document["pair"]) for document in documents]),
    }
    if "margin" in documents[0]:
        batch["margin"] = torch.tensor([float(document["margin"]) for document in documents])
    return batch


def collate_scored_pairs(documents: list[Document], *, layout: str = "padded", pad_token_id: int = 0) -> MicroBatch:
    """The same pairs for a model that gives each answer a score: padded rows `[2 pairs, longest]`, the chosen ones first.

    In the layouts `shared` and `packed` the rows come with what the model's body needs to compute them without padding, or a
    prompt once for both answers (`without_padding`; see `choose_scored_pair_layout`).
    """
    batch = collate_pairs(documents, layout="padded", pad_token_id=pad_token_id)
    if layout == "padded":
        return batch
    longest, pairs = batch["input_ids"].shape[1], len(documents)
    prompts, chosen, rejected = (
        np.array([document[f"{part}_tokens"] for document in documents]) for part in ("prompt", "chosen", "rejected")
    )
    prompt_of, own = np.tile(np.arange(pairs), 2), np.concatenate([chosen, rejected])
    if layout == "packed":
        return batch | without_padding(prompts[prompt_of] + own)
    # Laid out are places in the padded rows, in place of tokens; those of a prompt are in the row of its chosen answer.
    asked = [row * longest + np.arange(size) for row, size in enumerate(prompts)]
    answers = [row * longest + prompts[row % pairs] + np.arange(size) for row, size in enumerate(own)]
    row = model_inputs(lay_out(asked, answers, prompt_of, layout))
    return batch | {"token_places": row.pop("input_ids")[0], **row}


def collate_answers(documents: list[Document], *, layout: str = "packed", pad_token_id: int = 0) -> MicroBatch:
    """Prompts, each with one answer.

    In a layout of `lay_out`, packed or padded. For the loss, next to its keys: `desirable` `[answers]`, bool; `answer`
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


def mismatched_of(micro_batch: MicroBatch) -> MicroBatch:
    """The prompts of a micro-batch with their mismatched answers, as `collate_answers` gives them with their own."""
    return {name.removeprefix(MISMATCHED): value for name, value in micro_batch.items() if name.startswith(MISMATCHED)}
