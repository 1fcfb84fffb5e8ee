"""Checks of what the model is shown: tokens, padding, ids, splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from toolkit.data.loading.batch import MISMATCHED
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.diagnostics.records import Forward, MadeBatch, Record

IGNORED = -100
HIDDEN = ("masked_lm", "diffusion")  # tasks
_LEAK = 0.05  # share of held-out examples that are training examples word for word, above which it is no chance


def check_tokens(record: Record) -> Outcome:
    """Each token id is in a micro-batch as often as in its rows; a prompt may be there twice, and so may an id of padding."""
    if record.task in HIDDEN:
        return skipped("tokens are hidden on purpose")
    made = [each for each in record.made_batches.values() if each.kind == "train" and "input_ids" in each.documents[0]]
    shown = [(each, ids) for each in made if (ids := _ids_in(each))]
    if not shown:
        return skipped("no micro-batch with tokens of rows")
    total = lost = 0
    where = ""
    for each, ids in shown:
        of_rows = Counter(int(token) for document in each.documents for token in document["input_ids"])
        total, lost = total + of_rows.total(), lost + (of_rows - ids).total()
        where = where or each.where
    note = f"{total - lost:,} of {total:,} tokens of the rows"
    if not lost:
        return found(note)
    what = f"{lost:,} of {total:,} tokens of the tokenized rows are not in the micro-batches."
    change = (
        "Let the collate function leave rows as long as they are: --max-length cuts them before. What changes tokens on "
        "purpose is the augment= of tk.build_dataloaders."
    )
    return found(note, Finding("tokens", what, change, where))


def _ids_in(made: MadeBatch) -> Counter[int]:
    """How often each token id is in a micro-batch, outside of padding that is masked."""
    tensors, ids = made.tensors, Counter[int]()
    for name, values in tensors.items():
        if name.endswith("input_ids") and not name.startswith(("decoder_", MISMATCHED)) and isinstance(values, torch.Tensor):
            mask = tensors.get(name.replace("input_ids", "attention_mask"))
            is_masked = isinstance(mask, torch.Tensor) and mask.shape == values.shape
            ids.update((values[mask != 0] if is_masked else values.flatten()).tolist())
    if "source_tokens" in made.documents[0] and isinstance(tensors.get("labels"), torch.Tensor):  # the rest are targets
        ids.update(tensors["labels"].flatten().tolist())
    return ids


def check_padding(record: Record) -> Outcome:
    """Padding is on the right, has no label, and the model gets an attention mask; packed documents have their bounds."""
    made = {
        id(each): each
        for each in record.made_batches.values()
        if each.kind == "train" and _is_2d(each.tensors.get("input_ids"))
    }
    masked = [each for each in made.values() if _is_2d(each.tensors.get("attention_mask"))]
    findings: list[Finding | None] = []
    left = next((each for each in masked if bool((each.tensors["attention_mask"][:, 0] == 0).any())), None)
    if left is not None and "position_ids" not in left.tensors:
        findings.append(Finding(
            "padding", "Rows are padded on the left, and positions count the padding.",
            "Pad on the right, as tk.collate_padded does: tokenizer.padding_side = \"right\".", left.where,
        ))  # fmt: skip
    labeled = [
        each
        for each in masked
        if _is_2d(each.tensors.get("labels")) and each.tensors["labels"].shape == each.tensors["attention_mask"].shape
    ]
    wrong = sum(int(((each.tensors["labels"] != IGNORED) & (each.tensors["attention_mask"] == 0)).sum()) for each in labeled)
    if wrong:
        findings.append(Finding(
            "padding", f"{wrong:,} tokens of padding are supervised.", "Set labels[attention_mask == 0] = -100.",
            labeled[0].where,
        ))  # fmt: skip
    padded = packed = 0
    for forward in record.of_model("train"):
        each = micro_batch_of(forward, made.values())
        if each is None:
            continue
        mask = each.tensors.get("attention_mask")
        several = each.tensors["input_ids"].shape[0] == 1 and len(each.documents) > 1 and "labels" in each.tensors
        has_padding = isinstance(mask, torch.Tensor) and bool((mask == 0).any())
        padded, packed = padded + has_padding, packed + several
        sees_padding = has_padding and (
            left is not None or record.auto_class != "AutoModelForCausalLM"
        )  # else nobody looks right
        if forward.is_masked is False and (sees_padding or several):
            what = "Padding is seen by the other tokens" if has_padding else "Documents of a packed row see each other"
            change = (
                'Pass attention_mask=micro_batch["attention_mask"] to the model.'
                if has_padding
                else "Pass the bounds that tk.collate_packed makes (cu_seq_lens_q ...) to the model."
            )
            findings.append(Finding("padding", f"{what}: the model gets no mask.", change, forward.where))
            break
    if not made:
        return skipped("no micro-batch with rows of tokens")
    if not (padded or packed or any(findings)):
        return skipped("no forward pass with padding, or with several documents in a row")
    return found(f"{padded} padded and {packed} packed micro-batches", *findings)


def check_tokenizer(record: Record) -> Outcome:
    """Every id is a row of the embedding, and special tokens are those of the model's config."""
    model: Any = record.model
    if model is None or record.tokenizer is None or not hasattr(model, "get_input_embeddings"):
        return skipped("no model with a tokenizer was seen")
    tokenizer = record.tokenizer
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None:
        return skipped("the model's embedding was not seen")
    findings: list[Finding | None] = []
    if len(tokenizer) > weight.shape[0]:
        what = f"The tokenizer has {len(tokenizer):,} tokens, and the model's embedding {weight.shape[0]:,} rows."
        findings.append(Finding("tokenizer", what, "Pass the tokenizer to tk.load_model, which enlarges the embedding."))
    config = model.config.get_text_config()
    changes = {
        "pad_token_id": "Pass the tokenizer to tk.load_model, which sets it.",
        "eos_token_id": "Name the model's own tokenizer with --tokenizer, or set model.config.eos_token_id.",
    }
    for name, change in changes.items():
        of_model, of_tokenizer = getattr(config, name, None), getattr(tokenizer, name, None)
        known = of_model if isinstance(of_model, list) else [of_model]
        if of_model is not None and of_tokenizer is not None and of_tokenizer not in known:
            what = f"{name} is {of_tokenizer} in the tokenizer and {of_model} in the model's config."
            findings.append(Finding("tokenizer", what, change))
    return found(f"{len(tokenizer):,} tokens, {weight.shape[0]:,} rows of the embedding", *findings)


def check_leak(record: Record) -> Outcome:
    """Held-out documents are not training documents word for word."""
    if "train" not in record.splits or "validation" not in record.splits:
        return skipped("no held-out split")
    train, held_out = ({_key(row) for row in _rows(record.splits[name])} for name in ("train", "validation"))
    if not held_out or not train:
        return skipped("the splits have no token ids")
    shared = len(train & held_out)
    note = f"{shared} of {len(held_out)} held-out examples are among {len(train)} for training"
    if record.samples_policy or shared <= _LEAK * len(held_out):
        return found(note)
    what = f"{shared} of {len(held_out)} held-out examples are among the first {len(train)} training examples, word for word."
    change = "Hold out other rows (--eval-split, --eval-fraction), and remove duplicates first."
    return found(note, Finding("leak", what, change))


def _rows(split: Any) -> Iterator[dict[str, Any]]:
    if hasattr(split, "__len__") and "input_ids" in (getattr(split, "column_names", None) or []):
        yield from split.select_columns(["input_ids"])


def _key(row: dict[str, Any]) -> str:
    return str(row["input_ids"])


def rows_of(made: MadeBatch, name: str = "labels") -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """The labels of each document, or what else there is for each token, as long as it is, and the document."""
    values, start = made.tensors[name], 0
    packed = values.shape[0] == 1 and len(made.documents) > 1
    for number, document in enumerate(made.documents):
        length = len(document["input_ids"])
        yield (values[0, start : start + length] if packed else values[number, :length]), document
        start += length


def are_in_place(made: MadeBatch) -> list[bool]:
    """Of each document, whether its tokens are where its row has them: a collate function may put others before them."""
    return [ids.tolist() == list(document["input_ids"]) for ids, document in rows_of(made, "input_ids")]


def with_token_labels(record: Record) -> list[MadeBatch]:
    return [each for each in record.made_batches.values() if has_token_labels(each)]


def has_token_labels(made: MadeBatch) -> bool:
    """Whether there is a label for each token."""
    ids, labels = made.tensors.get("input_ids"), made.tensors.get("labels")
    if not isinstance(ids, torch.Tensor) or not isinstance(labels, torch.Tensor) or ids.dim() != 2:
        return False
    return ids.shape == labels.shape and all("input_ids" in document for document in made.documents)


def _is_2d(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 2


def micro_batch_of(forward: Forward, made: Iterable[MadeBatch]) -> MadeBatch | None:
    """The micro-batch whose ids a forward pass got; None where these are new, or a part (two tokens try a head)."""
    ids = forward.input_ids
    same = (each for each in made if each.tensors["input_ids"].data_ptr() == ids.data_ptr())
    return next((each for each in same if each.tensors["input_ids"].shape == ids.shape), None)
