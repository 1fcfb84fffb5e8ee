"""A loss over the embeddings of the whole global batch, in two passes: the exact gradient at the memory of one micro-batch.

The first pass embeds all texts without a graph, gathers them from all ranks, and finds the loss and its gradient for each
embedding. The second is an ordinary `train_step`: each micro-batch is embedded again, now with a graph, and hands its rows of
that gradient on to the weights. GradCache, arXiv:2101.06983. Random numbers are seeded anew before each forward pass, so that
both drop the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch, MicroBatch, precise
from toolkit.data.loading.order import seed_micro_batch
from toolkit.losses.contrastive import ContrastiveLoss, Texts
from toolkit.metrics.embedding import Embed
from toolkit.training.step import LossFn, sum_over_ranks, to_device

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

MOST_SCORES = 2**24  # that are held at once
_CUT = 2**32  # more than a micro-batch has examples


def cache_gradients(
    accelerator: Accelerator, model: nn.Module, batch: Batch, embed: Embed, loss: ContrastiveLoss, *, block: int | None = None
) -> Batch:
    """The first pass: the batch, with what `cached_gradient_loss` needs in each micro-batch. A collective.

    A micro-batch gets `embedding_gradients` `[texts, d]`, the gradient of the global batch's mean loss for its embeddings, and
    `loss_parts`, its shares of that loss and of the loss's metrics; all shares add up to the means over the global batch.

    Args:
        embed: embeds the texts of a micro-batch of `collate_text_groups`, `[texts, d]`.
        loss: the sum over some examples of the global batch, as in `toolkit.losses.contrastive`.
        block: examples whose scores are held at once; blocks are shared among the ranks. It changes memory alone.

    Raises:
        Refusal: a model that keeps running statistics of its inputs, which would see them twice.
    """
    _check_replayable(model)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    embeddings, about = list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():  # in training mode: with the dropout of the second pass
        for number, (micro_batch, seed) in enumerate(zip(batch.micro_batches, batch.seeds, strict=True)):
            micro_batch = to_device(micro_batch, accelerator.device)
            seed_micro_batch(seed)
            vectors = precise(embed(model, micro_batch))
            kept = len(vectors) if batch.real[number] else 0  # padding is embedded too: engines communicate in forward
            place = (number * ranks + rank) * _CUT + micro_batch["example"]  # in the order of the global batch
            about.append(torch.stack([micro_batch["role"], place, micro_batch["text_key"]], 1)[:kept])
            embeddings.append(torch.cat([vectors, micro_batch["score"][:, None].to(vectors.dtype)], 1)[:kept])
    sizes = [len(each) for each in embeddings]
    every_embedding, counts = _of_all_ranks(accelerator, torch.cat(embeddings))
    every_role, every_place, every_key = _of_all_ranks(accelerator, torch.cat(about))[0].unbind(1)
    order = torch.argsort(every_place, stable=True)
    order = order[torch.argsort(every_role[order], stable=True)]
    anchors = int(batch.totals["examples"])  # one an example; counting their roles would wait for the device
    texts, leaf = _texts(every_embedding[order], anchors, every_place[order], every_key[order])
    fitting = max(1, min(MOST_SCORES // len(texts.documents), -(-len(texts) // ranks)))
    sums = _backward(accelerator, texts, loss, block or fitting)
    gradients = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if ranks > 1:
        torch.distributed.all_reduce(gradients)
    mine = torch.empty_like(gradients).index_copy_(0, order, gradients)[sum(counts[:rank]) :]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    micro_batches = [
        {**micro_batch, **_share(micro_batch, mine[start : start + size], sums, size / len(order))}
        for micro_batch, start, size in zip(batch.micro_batches, starts, sizes, strict=True)
    ]
    return replace(batch, micro_batches=micro_batches)


def cached_gradient_loss(embed: Embed) -> LossFn:
    """The second pass: a loss function for `train_step` on what `cache_gradients` returned, with the same `embed`.

    Its value and metrics are the micro-batch's shares, its gradient is that of the global batch's mean loss.
    """

    def loss_fn(
        model: nn.Module, micro_batch: MicroBatch, totals: dict[str, float]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        gradients = micro_batch["embedding_gradients"]
        pulled = (precise(embed(model, micro_batch)) * gradients).sum()
        parts = {name.removeprefix("part_"): value for name, value in micro_batch.items() if name.startswith("part_")}
        return pulled + (parts.pop("loss") - pulled).detach(), parts

    return loss_fn


def trial_loss(embed: Embed) -> LossFn:
    """A loss function that takes the time and memory of the second pass, for `fit_micro_batch`."""
    return lambda model, micro_batch, totals: (precise(embed(model, micro_batch)).sum(), {})


def _share(micro_batch: MicroBatch, gradients: torch.Tensor, sums: dict[str, torch.Tensor], part: float) -> dict[str, Any]:
    """Of a padding micro-batch: gradients of zero, as its texts have none."""
    missing = len(micro_batch["role"]) - len(gradients)
    padded = functional.pad(gradients, (0, 0, 0, missing))
    return {"embedding_gradients": padded, **{f"part_{name}": value * part for name, value in sums.items()}}


def _texts(embeddings: torch.Tensor, count: int, place: torch.Tensor, key: torch.Tensor) -> tuple[Texts, torch.Tensor]:
    """Texts in the order of their roles (`count` anchors, positives, negatives), and the leaf that gets the gradients."""
    leaf = embeddings[:, :-1].clone().requires_grad_()
    owners = torch.searchsorted(place[:count].contiguous(), place[count:].contiguous())
    texts = Texts(leaf[:count], leaf[count:], key[:count], key[count:], owners, embeddings[:count, -1])
    return texts, leaf


def _backward(accelerator: Accelerator, texts: Texts, loss: ContrastiveLoss, block: int) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss, of this rank's blocks, and the means of loss and metrics over the global batch."""
    count, sums = len(texts), dict[str, torch.Tensor]()
    blocks = [slice(start, min(start + block, count)) for start in range(0, count, block)]
    mine = blocks[accelerator.process_index :: accelerator.num_processes] or [slice(count, count)]  # of no example
    for rows in mine:
        value, metrics = loss(texts, rows)
        (value / count).backward()
        for name, part in {"loss": value.detach(), **metrics}.items():
            sums[name] = sums.get(name, 0.0) + part.to(texts.anchors.dtype) / count
    return sum_over_ranks(accelerator, sums)


def _of_all_ranks(accelerator: Accelerator, rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Rows of all ranks, one behind the other, and how many are of each."""
    ranks = accelerator.num_processes
    if ranks == 1:
        return rows, [len(rows)]
    count = torch.tensor([len(rows)], device=rows.device)
    every_count = [torch.empty_like(count) for _ in range(ranks)]
    torch.distributed.all_gather(every_count, count)
    counts = [int(each) for each in every_count]
    padded = functional.pad(rows, (0, 0, 0, max(counts) - len(rows)))
    everyone = [torch.empty_like(padded) for _ in range(ranks)]
    torch.distributed.all_gather(everyone, padded)
    return torch.cat([each[:size] for each, size in zip(everyone, counts, strict=True)]), counts


def _check_replayable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):  # of batch norms and instance norms
            raise Refusal(f"The model keeps running statistics in {name}, which two passes would update twice: name another.")
