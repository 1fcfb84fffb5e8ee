"""From tokenized documents to one micro-batch: packed into one row, or padded; sources with targets, windows, prompts."""

import json
from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.layouts import bounds_of_documents, padded, padded_inputs, places_within, without_padding

IGNORED = -100  # a label that counts nowhere, as everywhere in transformers


def collate_packed(documents: list[Document], *, aligned: bool = False) -> MicroBatch:
    """Put documents one behind the other in a single row without padding.

    Returns `input_ids`, `labels` and `position_ids` `[1, tokens]`, and the documents' bounds under the names that
    transformers' attention takes them by: `cu_seq_lens_q` and `cu_seq_lens_k` int32 `[documents + 1]`, `max_length_q`
    and `max_length_k` integers. There is no attention mask: the bounds define who attends to whom. `supervised_positions`
    are the flat indices of the positions that predict a supervised label, found here so that no device has to be waited for:
    those before the labels or, where these are `aligned` (tags, masked tokens), their own.
    """
    lengths = np.array([len(document["input_ids"]) for document in documents])
    row = {
        "input_ids": np.concatenate([document["input_ids"] for document in documents]).astype(np.int64),
        "labels": np.concatenate([document.get("labels", document["input_ids"]) for document in documents]).astype(np.int64),
        "position_ids": places_within(lengths),
    }
    if not aligned:
        row["labels"][row["position_ids"] == 0] = IGNORED  # nothing comes before a document's first token to predict it from
    return {
        **{name: torch.from_numpy(values)[None] for name, values in row.items()},
        **_of_noise(documents),
        "supervised_positions": _supervised_positions(row["labels"][None], aligned),
        **bounds_of_documents(lengths, lengths),
    }


def collate_padded(
    documents: list[Document], pad_token_id: int = 0, *, aligned: bool = False, layout: str = "padded"
) -> MicroBatch:
    """Put one example in each row, padded on the right to the longest.

    Returns `input_ids` and `attention_mask` `[examples, longest]` and `labels`: for token labels of the same shape, with
    -100 on the padding (and `supervised_positions`; `aligned` as in `collate_packed`), for labels of whole examples
    `[examples]` or `[examples, classes]`. `token_type_ids`, `word_labels` and `weight` are there when the rows have
    them; so are, here and in packed rows, `token_weights` `[P]` of the supervised positions. The
    attention mask marks padding, never the id: a pad id that is also an end of text is supervised where the text ends.

    In the layout `packed` there are also the keys of `without_padding`: the model's body computes no padding (see
    `choose_row_layout`), and all else stays as it is.
    """
    batch: dict[str, Any] = padded_inputs([document["input_ids"] for document in documents], pad_token_id)
    if "token_type_ids" in documents[0]:
        batch["token_type_ids"] = padded([document["token_type_ids"] for document in documents], 0)
    if "labels" not in documents[0] or "supervised_tokens" in documents[0]:  # labels are tokens, and not of whole examples
        labels = padded([document.get("labels", document["input_ids"]) for document in documents], IGNORED)
        if not aligned:
            labels[:, 0] = IGNORED  # nothing comes before the first token to predict it from
        batch |= {"labels": labels, "supervised_positions": _supervised_positions(labels.numpy(), aligned)}
    else:
        of_examples = np.stack([np.asarray(document["labels"]) for document in documents])
        batch["labels"] = torch.from_numpy(of_examples.astype(np.int64 if of_examples.dtype.kind in "iub" else np.float32))
    if "word_labels" in documents[0]:  # of the first sub-word of each word, where others have labels too
        batch["word_labels"] = padded([document["word_labels"] for document in documents], IGNORED)
    batch |= _of_noise(documents)
    if "weight" in documents[0]:
        batch["weight"] = torch.tensor([float(document["weight"]) for document in documents])
    return batch | (without_padding(batch["attention_mask"].numpy().sum(1)) if layout == "packed" else {})


def _of_noise(documents: list[Document]) -> dict[str, Any]:
    """What the loss needs of masked diffusion's noise: the weight of each label `[P]`, and how far each document sees ahead."""
    found: dict[str, Any] = {}
    if "token_weights" in documents[0]:
        found["token_weights"] = torch.from_numpy(np.concatenate([document["token_weights"] for document in documents]))
    if "seen_ahead" in documents[0]:
        found["seen_ahead"] = [document["seen_ahead"] for document in documents]
        found["attention_seeds"] = [document["attention_seed"] for document in documents]
    return found


def _supervised_positions(labels: np.ndarray, aligned: bool) -> torch.Tensor:
    """Flat indices of the positions whose next label, or aligned one, counts; `labels` `[rows, length]`."""
    if aligned:
        return torch.from_numpy(np.flatnonzero(labels != IGNORED))
    following = np.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    return torch.from_numpy(np.flatnonzero(following != IGNORED))


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


def collate_seq2seq(
    documents: list[Document], *, pad_token_id: int, decoder_start_token_id: int | None
) -> MicroBatch:
    """Put one example in each row, padded on the right to the longest source and the longest target.

    Returns `input_ids` and `attention_mask` `[examples, source]`; `decoder_input_ids`, the target behind the start token, and
    `labels`, the target itself, -100 on padding, `[examples, target]`; `supervised_positions`, the flat indices of labels that
    count. The decoder needs no mask of its own: it is causal, and padding comes last.

    Each document has `input_ids`, source and target one behind the other, and `source_tokens`, how many are the source's.

    Args:
        decoder_start_token_id: what `decoder_start` found of the model; None: each target's own last token (mBART).
    """
    cuts = [int(document["source_tokens"]) for document in documents]
    tokens = [np.asarray(document["input_ids"], dtype=np.int64) for document in documents]
    sources = [row[:cut] for row, cut in zip(tokens, cuts, strict=True)]
    targets = [row[cut:] for row, cut in zip(tokens, cuts, strict=True)]
    first = [target[-1] if decoder_start_token_id is None else decoder_start_token_id for target in targets]
    shifted = [np.append(start, target[:-1]) for start, target in zip(first, targets, strict=True)]
    labels = padded(targets, IGNORED)
    return {
        **padded_inputs(sources, pad_token_id),
        "decoder_input_ids": padded(shifted, pad_token_id),
        "labels": labels,
        "supervised_positions": _supervised_positions(labels.numpy(), aligned=True),
    }


def collate_windows(windows: list[Document], pad_token_id: int = 0, *, layout: str = "padded") -> MicroBatch:
    """Put one window in each row, padded on the right to the longest.

    Returns `input_ids`, `attention_mask` and, where the rows have them, `token_type_ids` `[windows, longest]`;
    `start_positions` and `end_positions` `[windows]`, 0 where a window doesn't hold the answer; `window`, its number within
    its question; and `char_starts` and `char_ends` `[windows, longest]`: of each token of the context its characters there,
    -1 elsewhere. In the layout `packed` also what `collate_padded` has there.
    """
    batch: dict[str, Any] = padded_inputs([window["input_ids"] for window in windows], pad_token_id)
    for name in ("char_starts", "char_ends"):
        batch[name] = torch.full_like(batch["input_ids"], -1)
        for row, window in zip(batch[name], windows, strict=True):
            start = int(window["context_start"])
            row[start : start + len(window[name])] = torch.as_tensor(window[name])
    for name in ("start_positions", "end_positions", "window"):
        batch[name] = torch.tensor([int(window[name]) for window in windows])
    if "token_type_ids" in windows[0]:
        batch["token_type_ids"] = padded([window["token_type_ids"] for window in windows], 0)
    return batch | (without_padding(batch["attention_mask"].numpy().sum(1)) if layout == "packed" else {})
