"""The two-pass step against one graph over the whole global batch and a plain double loop over texts."""

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from toolkit.config import DataConfig, Refusal
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate_groups import collate_text_groups
from toolkit.data.loading.loaders import build_dataloaders
from toolkit.data.loading.order import cut_step, hash_numbers, seed_micro_batch
from toolkit.losses.contrastive import ContrastiveLoss, Texts, cosent, cosine_regression, embedding_task, info_nce, matryoshka
from toolkit.models.pooling import embed_texts
from toolkit.training import memory
from toolkit.training.contrastive import cache_gradients, cached_gradient_loss, trial_loss
from toolkit.training.memory import fit_micro_batch
from toolkit.training.step import accumulate_gradients

pytestmark = pytest.mark.warm
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


def of_ranks(folder: Path, ranks: int, micro: int, count: int, way: str) -> list[dict[tuple[str, str], Any]]:
    """What each rank found of the same global batch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("contrastive_ranks.py"))
    processes = []
    for rank in range(ranks):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {**os.environ, **{k: str(v) for k, v in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, script, str(folder), str(micro), str(count), way]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True))
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "micro", "count", "way"),
    [(2, 13, 64, "plain"), (3, 13, 40, "plain"), (2, 13, 64, "checkpointing")],
)
def test_ranks_have_the_gradient_of_one_graph_over_the_global_batch(
    ranks: int, micro: int, count: int, way: str, tmp_path: Path
) -> None:
    """Under DDP, with dropout .1: 2 x 4 x 8; 13 + 13 + 13 + 13 + 12 on two ranks, where one gets a padding micro-batch; 3 ranks
    of which two get one; and with recomputed layers. Float64 to 1e-10, float32 to 2e-5 of each parameter's gradient.

    Fails when: the texts of a padding micro-batch are negatives; gradients are not added up over the ranks; a rank's share
    starts at another place of the gathered texts.
    """
    results = of_ranks(tmp_path, ranks, micro, count, way)
    for name in LOSSES:
        loss, gradient = in_one_graph(name, micro, 0.1, count)
        for result in results:
            for dtype, tolerance in (("torch.float64", 1e-10), ("torch.float32", 2e-5)):
                found = result[name, dtype]
                assert float(found["loss"]) == pytest.approx(loss, rel=tolerance)
                assert error({n: g.double() for n, g in found["gradients"].items()}, gradient) < tolerance, (name, dtype)


@pytest.mark.slow
def test_under_bf16_autocast_two_ranks_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    """2 x 4 x 8 against 1 x 8 x 8, both in bf16, dropout .1: the losses to 1e-5, the whole gradient to 1 %, since a row of it that
    differs in the last bit of float32 may be rounded to the next number of bf16.

    Fails when: the first pass runs outside of autocast, so that its embeddings are others.
    """
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one, two = of_ranks(tmp_path / "one", 1, 8, 64, "bf16")[0], of_ranks(tmp_path / "two", 2, 8, 64, "bf16")[0]
    for key, found in two.items():
        assert float(found["loss"]) == pytest.approx(float(one[key]["loss"]), rel=1e-5)
        ours, its = (torch.cat([each.flatten() for each in result["gradients"].values()]) for result in (found, one[key]))
        assert float((ours - its).norm() / its.norm()) < 1e-2


def test_the_controls_are_far_off() -> None:
    """What the exactness is worth: with other masks in the second pass, or negatives of the micro-batch alone, the gradient is
    wrong by tens of percent.

    Fails when: the comparison above is blind.
    """
    _, gradient = in_one_graph("two-way", 8, 0.1)
    batch = batch_of(documents(), 8)
    accelerator, model = Accelerator(cpu=True), encoder(torch.float64, 0.1)
    cached = cache_gradients(accelerator, model, batch, embed_texts, LOSSES["two-way"])
    cached.seeds = [seed + 1 for seed in cached.seeds]
    accumulate_gradients(accelerator, model, cached, cached_gradient_loss(embed_texts))
    assert error({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradient) > 0.2
    _, alone = in_two_passes("two-way", batch_of(documents()[:8], 8), torch.float64, 0.1)
    assert error(alone, gradient) > 0.2


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)], ids=lambda norm: type(norm).__name__)
def test_running_statistics_are_refused(norm: nn.Module) -> None:
    """Fails when: a model with batch normalization is embedded twice without a word, or one with another norm that keeps them."""
    model = nn.Sequential(nn.Linear(2, 2), norm)
    with pytest.raises(Refusal, match="running statistics"):
        cache_gradients(Accelerator(cpu=True), model, batch_of(documents()[:4], 2), embed_texts, info_nce)


@pytest.mark.parametrize(("size", "examples", "mend"), [(1, 64, "--global-batch-size 1:"), (8, 17, "--max-steps 2"), (8, 1, "Take another --global-batch-size")])
def test_a_global_batch_of_one_example_is_refused(size: int, examples: int, mend: str) -> None:
    """Also as the last one of a run. Fails when: only the size of whole batches is looked at."""
    rows = {"train": Dataset.from_dict({"text_tokens": [[1, 1]]})}
    with pytest.raises(Refusal, match=mend):
        embedding_task(rows, embed_texts, size, 32, examples)
    embedding_task(rows, embed_texts, 8, 32, 18)


def test_embeddings_cut_to_more_numbers_than_they_have_are_refused() -> None:
    """Fails when: the check of `matryoshka_dims` is taken out: a cut beyond the end cuts nothing, and says so nowhere."""
    rows = {"train": Dataset.from_dict({"text_tokens": [[1, 1]]})}
    with pytest.raises(Refusal, match=r"--matryoshka-dims 64: .* 32 numbers"):
        embedding_task(rows, embed_texts, 8, 32, matryoshka_dims=[64, 8])
    embedding_task(rows, embed_texts, 8, 32, matryoshka_dims=[32, 8])


def test_false_negatives_are_counted() -> None:
    """Three anchors, two of which have the same positive; the third one's negative is the first one's positive.

    Fails when: known pairs are those of the anchor's own row alone.
    """
    keys = torch.tensor([1, 2, 3]), torch.tensor([10, 10, 30, 10])
    vectors = torch.eye(4)
    texts = Texts(vectors[:3], vectors, *keys, torch.tensor([0, 1, 2, 2]))
    _, metrics = info_nce(texts, slice(0, 3))
    # anchor 0 loses document 1 and the negative, anchor 1 document 0 and the negative, anchor 2 nothing
    assert int(metrics["false_negatives"]) == 4


def test_a_micro_batch_that_does_not_fit_is_halved_and_the_gradient_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 examples a step with room for 32 texts: 8 at a time, and still the gradient of one graph over all 16.

    Fails when: fit_micro_batch tries the step's loss, which has no gradients of embeddings yet.
    """
    monkeypatch.setattr(memory, "is_free", lambda *_, times=1: times == 1)
    rows = Dataset.from_list([{**group, "length": len(group["input_ids"])} for group in documents(16)])
    config = DataConfig(per_device_train_batch_size=16, auto_find_batch_size=True, max_steps=1)
    accelerator, model = Accelerator(cpu=True), encoder(torch.float64, 0.0)
    train, _ = build_dataloaders({"train": rows}, collate_text_groups, config, accelerator)

    def embed(model: nn.Module, micro_batch: dict[str, Any]) -> torch.Tensor:
        if len(micro_batch["role"]) > 32:
            raise torch.OutOfMemoryError("out of memory")
        return embed_texts(model, micro_batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = fit_micro_batch(accelerator, model, optimizer, train, trial_loss(embed), config)
    assert train.micro_batch_size == 8
    batch = next(iter(train.batches()))
    cached = cache_gradients(accelerator, model, batch, embed, LOSSES["two-way"])
    metrics = accumulate_gradients(accelerator, model, cached, cached_gradient_loss(embed))
    loss, gradient = in_one_graph("two-way", 16, 0.0, 16)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-10)
    assert error({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradient) < 1e-10
