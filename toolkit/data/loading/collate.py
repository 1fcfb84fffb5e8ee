"""From tokenized documents to one micro-batch: packed into one row, or padded; sources with targets, windows, prompts."""

import json
from typing import Any

import numpy as np
import torch

from toolkit.data.loading.batch import Document, MicroBatch
from toolkit.data.loading.layouts import without_padding

IGNORED = -100  # a label that counts nowhere, as everywhere in transformers


def _labels_of(document: dict[str, Any], aligned: bool) -> np.ndarray:
    """Labels, one a token. Unless they are aligned the first token has none: nothing comes before it to predict it from."""
    labels = np.array(document["labels"] if "labels" in document else document["input_ids"], dtype=np.int64)
    if not aligned:
        labels[0] = IGNORED
    return labels


def collate_packed(documents: list[Document], *, aligned: bool = False) -> MicroBatch:
    """Put documents one behind the other in a single row without padding.

    Returns `input_ids`, `labels` and `position_ids` `[1, tokens]`, and the documents' bounds under the names that
    transformers' attention takes them by: `cu_seq_lens_q` and `cu_seq_lens_k` int32 `[documents + 1]`, `max_length_q`
    and `max_length_k` integers. There is no attention mask: the bounds say who attends to whom. `supervised_positions`
    are the flat indices of the positions that predict a supervised label, found here so that no device has to be waited for:
    those before the labels or, where these are `aligned` (tags, masked tokens), their own.
    """
    lengths = np.array([len(document["input_ids"]) for document in documents])
    ends = np.cumsum(lengths)
    bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    longest = int(lengths.max())
    row = {
        "input_ids": np.concatenate([document["input_ids"] for document in documents]).astype(np.int64),
        "labels": np.concatenate([document.get("labels", document["input_ids"]) for document in documents]).astype(np.int64),
        "position_ids": np.arange(ends[-1]) - np.repeat(ends - lengths, lengths),
    }
    if not aligned:
        row["labels"][ends - lengths] = IGNORED  # of each document's first token: nothing comes before it to predict it from
    return {
        **{name: torch.from_numpy(values)[None] for name, values in row.items()},
        **_of_noise(documents),
        "supervised_positions": _supervised_positions(row["labels"][None], aligned),
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def collate_padded(
    documents: list[Document], pad_token_id: int = 0, *, aligned: bool = False, layout: str = "padded"
) -> MicroBatch:
    """Put one example in each row, padded on the right to the longest.

    Returns `input_ids` and `attention_mask` `[examples, longest]` and `labels`: for token labels of the same shape, with
    -100 on the padding (and `supervised_positions`; `aligned` as in `collate_packed`), for labels of whole examples
    `[examples]` or `[examples, classes]`. `token_type_ids`, `word_labels` and `weight` are there when the rows have
    them; so are, here and in packed rows, `token_weights` `[P]` of the supervised positions. The
    attention mask marks padding, never the id: a pad id that is also an end of text is supervised where the text ends.

    In the layout `packed` there is also what `without_padding` says: the model's body computes no padding (see
    `choose_row_layout`), and all else stays as it is.
    """
    lengths = [len(document["input_ids"]) for document in documents]
    shape = (len(documents), max(lengths))
    tokens, mask = np.full(shape, pad_token_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for i, document in enumerate(documents):
        tokens[i, : lengths[i]] = document["input_ids"]
        mask[i, : lengths[i]] = 1
    batch = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}
    if "token_type_ids" in documents[0]:
        kinds = np.zeros(shape, dtype=np.int64)
        for i, document in enumerate(documents):
            kinds[i, : lengths[i]] = document["token_type_ids"]
        batch["token_type_ids"] = torch.from_numpy(kinds)
    if "labels" not in documents[0] or "supervised_tokens" in documents[0]:  # labels are tokens, and not of whole examples
        labels = _token_labels(documents, shape, aligned)
        batch.update(labels=torch.from_numpy(labels), supervised_positions=_supervised_positions(labels, aligned))
    else:
        batch["labels"] = _example_labels(documents)
    if "word_labels" in documents[0]:  # of the first sub-word of each word, where others have labels too
        of_words = np.full(shape, IGNORED, dtype=np.int64)
        for i, document in enumerate(documents):
            of_words[i, : lengths[i]] = document["word_labels"]
        batch["word_labels"] = torch.from_numpy(of_words)
    batch |= _of_noise(documents)
    if "weight" in documents[0]:
        batch["weight"] = torch.tensor([float(document["weight"]) for document in documents])
    return batch | (without_padding(np.array(lengths)) if layout == "packed" else {})


def _of_noise(documents: list[Document]) -> dict[str, Any]:
    """What the noise of masked diffusion says: the weight of each label `[P]`, and how far each document sees ahead."""
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


def _token_labels(documents: list[Document], shape: tuple[int, int], aligned: bool) -> np.ndarray:
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for i, document in enumerate(documents):
        labels[i, : len(document["input_ids"])] = _labels_of(document, aligned)
    return labels


def _example_labels(documents: list[Document]) -> torch.Tensor:
    labels = np.stack([np.asarray(document["labels"]) for document in documents])
    return torch.from_numpy(labels.astype(np.int64) if labels.dtype.kind in "iub" else labels.astype(np.float32))


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
    labels = _filled(targets, IGNORED)
    first = [target[-1] if decoder_start_token_id is None else decoder_start_token_id for target in targets]
    shifted = [np.append(start, target[:-1]) for start, target in zip(first, targets, strict=True)]
    return {
        "input_ids": torch.from_numpy(_filled(sources, pad_token_id)),
        "attention_mask": torch.from_numpy(_filled([np.ones_like(source) for source in sources], 0)),
        "decoder_input_ids": torch.from_numpy(_filled(shifted, pad_token_id)),
        "labels": torch.from_numpy(labels),
        "supervised_positions": torch.from_numpy(np.flatnonzero(labels != IGNORED)),
    }


def _filled(rows: list[np.ndarray], fill: int) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def collate_windows(windows: list[Document], pad_token_id: int = 0) -> MicroBatch:
    """Put one window in each row, padded on the right to the longest.

    Returns `input_ids`, `attention_mask` and, where the rows have them, `token_type_ids` `[windows, longest]`;
    `start_positions` and `end_positions` `[windows]`, 0 where a window doesn't hold the answer; `window`, its number within
    its question; and `char_starts` and `char_ends` `[windows, longest]`: of each token of the context its characters there,
    -1 elsewhere.
    """
    lengths = [len(window["input_ids"]) for window in windows]

    def padded(values: list[Any], fill: int, starts: list[int]) -> torch.Tensor:
        rows = np.full((len(windows), max(lengths)), fill, dtype=np.int64)
        for i, (row, start) in enumerate(zip(values, starts, strict=True)):
            rows[i, start : start + len(row)] = row
        return torch.from_numpy(rows)

    def column(name: str) -> list[Any]:
        return [window[name] for window in windows]

    first = [0] * len(windows)
    contexts = [int(start) for start in column("context_start")]
    batch = {
        "input_ids": padded(column("input_ids"), pad_token_id, first),
        "attention_mask": padded([[1] * length for length in lengths], 0, first),
    }
    batch |= {name: padded(column(name), -1, contexts) for name in ("char_starts", "char_ends")}
    for name in ("start_positions", "end_positions", "window"):
        batch[name] = torch.tensor([int(value) for value in column(name)])
    if "token_type_ids" in windows[0]:
        batch["token_type_ids"] = padded(column("token_type_ids"), 0, first)
    return batch
