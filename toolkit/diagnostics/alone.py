"""Whether an example has together with others the gradient that it has alone: packed rows, and rows with padding."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import Batch, Document

if TYPE_CHECKING:
    from toolkit.diagnostics.records import MadeBatch
    from toolkit.diagnostics.watch import Watch

LossOf = Callable[[Any], torch.Tensor]


def compare_alone(watch: Watch, model: nn.Module, batch: Batch, loss_fn: Callable[..., Any]) -> None:
    """Compare the gradients of a step's micro-batches with those of their documents one by one, and note the errors.

    A micro-batch is left alone when something was added to it after it was collated: a single document lacks that.
    """
    record = watch.record

    def loss_of(tensors: dict[str, Any]) -> torch.Tensor:
        return loss_fn(model, dict(tensors), batch.totals)[0]  # a copy, as in a step: a loss function may take something out

    for tensors in batch.micro_batches:
        made = record.made_batches.get(id(tensors))
        if made is None or len(made.documents) < 2 or made.collate(made.documents).keys() != tensors.keys():
            continue
        parameters = [p for p in model.parameters() if p.requires_grad]
        seen = len(record.forwards)
        with torch.random.fork_rng(devices=[]):
            error = gradient_error(loss_of, made, parameters)
            if "document_tokens" in made.documents[0]:
                with contextlib.suppress(Exception):  # a recipe may be of lists of one length
                    lists = [_without_one(each) for each in made.documents[::2]] + made.documents[1::2]
                    uneven = dataclasses.replace(made, tensors=made.collate(lists), documents=lists)
                    record.uneven.append((gradient_error(loss_of, uneven, parameters), watch.place_of(loss_fn)))
        del record.forwards[seen:]
        record.alone.append((error, len(made.documents), watch.place_of(loss_fn)))


def _without_one(document: Document) -> Document:
    """A list of documents, or of choices, without the last one of its lowest label."""
    labels, sizes = np.asarray(document["labels"]), np.asarray(document["document_tokens"])
    place = len(labels) - 1 - int(labels[::-1].argmin())
    tokens = slice(sizes[:place].sum(), sizes[: place + 1].sum())
    kept: Document = {n: np.delete(document[n], tokens) for n in ("input_ids", "token_type_ids") if n in document}
    return {**document, **kept, "labels": np.delete(labels, place), "document_tokens": np.delete(sizes, place)}


def gradient_error(loss_of: LossOf, made: MadeBatch, parameters: list[nn.Parameter]) -> float:
    """The relative distance of the gradient of a micro-batch from the sum of its documents' own ones."""
    together = gradient_of(loss_of, [made.tensors], parameters)
    apart = gradient_of(loss_of, [made.collate([document]) for document in made.documents], parameters)
    return float((together - apart).norm() / apart.norm().clamp_min(1e-30))


def gradient_of(loss_of: LossOf, micro_batches: Sequence[Any], parameters: list[nn.Parameter]) -> torch.Tensor:
    """The gradient of the sum of the losses, one vector in float64; gradients that are there stay as they are."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        for tensors in micro_batches:
            loss_of(tensors).backward()
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in parameters])
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
