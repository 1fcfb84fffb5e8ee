"""The two-pass step against one graph over the whole global batch and a plain double loop over texts."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate_texts import collate_text_groups
from toolkit.data.loading.order import cut_step, hash_numbers, seed_micro_batch
from toolkit.losses.contrastive import ContrastiveLoss, cosent, cosine_regression, info_nce, matryoshka
from toolkit.models.pooling import embed_texts
from toolkit.training.contrastive import cache_gradients, cached_gradient_loss
from toolkit.training.step import accumulate_gradients

EXAMPLES, VOCABULARY = 64, 90
LOSSES: dict[str, ContrastiveLoss] = {
    "one way": info_nce,
    "two-way": partial(info_nce, two_way=True),
    "two-way, margin": partial(info_nce, two_way=True, false_negative_margin=0.02),
    "matryoshka": matryoshka(partial(info_nce, two_way=True), [32, 8]),
    "cosent": cosent,
    "cosine": cosine_regression,
}


def documents(count: int = EXAMPLES) -> list[dict[str, Any]]:
    """Groups of 2 to 4 ragged texts out of few, so that positives repeat and are the negatives of others."""
    generator = np.random.default_rng(0)
    pool = [generator.integers(1, VOCABULARY, generator.integers(2, 11)).tolist() for _ in range(count)]
    groups = []
    for _ in range(count):
        texts = generator.choice(count, 2 + generator.integers(0, 3), replace=False).tolist()
        ids = [pool[text] for text in texts]
        groups.append({
            "input_ids": [token for text in ids for token in text], "text_tokens": list(map(len, ids)), "text_keys": texts,
            "score": float(generator.integers(0, 5)) / 4,
        })  # fmt: skip
    return groups


def encoder(dtype: torch.dtype, dropout: float) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    shape = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, initializer_range=0.2,
    )  # fmt: skip
    return BertModel(shape, add_pooling_layer=False).to(dtype).train()


def batch_of(groups: list[dict[str, Any]], micro: int, rank: int = 0, ranks: int = 1) -> Batch:
    plan = cut_step([(0, i) for i in range(len(groups))], 0, micro, rank, ranks)
    return Batch(
        [collate_text_groups([groups[i] for _, i in piece]) for piece, _ in plan.pieces],
        {"examples": float(len(groups))},
        [real for _, real in plan.pieces],
        [hash_numbers(0, piece[0]) for piece, _ in plan.pieces],
    )


def plain_loss(name: str, vectors: list[list[torch.Tensor]], groups: list[dict[str, Any]]) -> torch.Tensor:
    """The mean over examples by its definition, one anchor and one candidate after another. `vectors` of each group's texts."""
    if name == "matryoshka":
        return (plain_loss("two-way", vectors, groups) + plain_loss("two-way", [[v[:8] for v in g] for g in vectors], groups)) / 2
    flat = torch.stack([vector for group in vectors for vector in group])
    cosines = (flat / flat.norm(dim=1, keepdim=True)) @ (flat / flat.norm(dim=1, keepdim=True)).T
    every = [(e, r, key) for e, group in enumerate(groups) for r, key in enumerate(group["text_keys"])]
    place = {(e, r): number for number, (e, r, _) in enumerate(every)}
    own = torch.stack([cosines[place[e, 0], place[e, 1]] for e in range(len(groups))])
    scores = [group["score"] for group in groups]
    if name == "cosine":
        return torch.stack([(cos - score) ** 2 for cos, score in zip(own, scores, strict=True)]).mean()
    if name == "cosent":
        couples = [(i, j) for i in range(len(own)) for j in range(len(own)) if scores[i] > scores[j]]
        return torch.log(1 + sum(torch.exp((own[j] - own[i]) / 0.05) for i, j in couples))
    known = {tuple(group["text_keys"][:2]) for group in groups}
    values = cosines.tolist()

    def one(i: int, role: int) -> torch.Tensor:
        """From the anchor (role 0) to all documents, or from the positive (role 1) to all anchors."""
        candidates = [place[i, 1 - role]]
        for number, (e, r, key) in enumerate(every):
            pair = (groups[i]["text_keys"][0], key) if role == 0 else (key, groups[i]["text_keys"][1])
            if (r == 0) == (role == 0) or (e == i and r < 2) or pair in known or pair[0] == pair[1]:
                continue
            if "margin" in name and e != i and values[place[i, role]][number] > values[place[i, 0]][place[i, 1]] + 0.02:
                continue
            candidates.append(number)
        chosen = cosines[place[i, role], candidates] / 0.05
        return chosen.logsumexp(0) - chosen[0]

    losses = [one(i, 0) if name == "one way" else (one(i, 0) + one(i, 1)) / 2 for i in range(len(groups))]
    return torch.stack(losses).mean()


@functools.cache
def in_one_graph(name: str, micro: int, dropout: float, count: int = EXAMPLES) -> tuple[float, dict]:
    """The reference, float64: every text embedded with a graph (in the micro-batches whose dropout it is), one backward."""
    groups = documents(count)
    model, batch = encoder(torch.float64, dropout), batch_of(groups, micro)
    rows = []
    for micro_batch, seed in zip(batch.micro_batches, batch.seeds, strict=True):
        seed_micro_batch(seed)
        rows.append(model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]).last_hidden_state)
    vectors = []
    for states, micro_batch in zip(rows, batch.micro_batches, strict=True):
        texts = [state[mask.bool()].mean(0) for state, mask in zip(states, micro_batch["attention_mask"], strict=True)]
        for example in range(int(micro_batch["example"][-1]) + 1):
            vectors.append([text for text, e in zip(texts, micro_batch["example"].tolist(), strict=True) if e == example])
    loss = plain_loss(name, vectors, groups)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def in_two_passes(
    name: str, batch: Batch, dtype: torch.dtype, dropout: float, prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    accelerator: Accelerator | None = None, **more: Any,
) -> tuple[dict[str, torch.Tensor], dict]:  # fmt: skip
    accelerator = accelerator or Accelerator(cpu=True)
    model = encoder(dtype, dropout)
    outer = prepare(model)
    cached = cache_gradients(accelerator, outer, batch, embed_texts, LOSSES[name], **more)
    metrics = accumulate_gradients(accelerator, outer, cached, cached_gradient_loss(embed_texts))
    return metrics, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of the worst parameter, relative; what is zero but for rounding (a key's bias) is measured by the whole."""
    whole = max(float(each.norm()) for each in wanted.values())
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each).norm()) / max(float(each.norm()), 1e-3 * whole) for name, each in wanted.items())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("micro", [64, 8, 30])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_one_graph_over_the_global_batch_for_every_split(
    name: str, micro: int, dtype: torch.dtype, tolerance: float
) -> None:
    """1 x 64, 8 x 8, 30 + 30 + 4 with dropout .1, in blocks of 7 anchors; loss and worst parameter's gradient.

    Fails when: the second pass is seeded differently (seed + 1); the first one is in evaluation mode; the known pairs of
    other examples are no longer left out; a block's loss is divided by its own size.
    """
    loss, gradient = in_one_graph(name, micro, 0.1)
    metrics, found = in_two_passes(name, batch_of(documents(), micro), dtype, 0.1, block=7)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=tolerance)
    assert error({n: g.double() for n, g in found.items()}, gradient) < (tolerance if dtype == torch.float64 else 2e-5)
