"""Promise 1 on real models: one gradient, however the global batch is cut, packed or padded."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict

import toolkit as tk

VOCABULARY = 97


class FakeTokenizer:
    """What load_model asks of a tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = None, 1, 0
    special_tokens_map: dict = {}  # noqa: RUF012

    def __len__(self) -> int:
        return VOCABULARY


def documents(count: int = 8) -> DatasetDict:
    """Ragged documents, some tokens unsupervised."""
    random_numbers = np.random.default_rng(4)
    ids = [random_numbers.integers(2, VOCABULARY, size=int(n)).tolist() for n in (5, 31, 12, 2, 23, 17, 9, 28)[:count]]
    labels = [[token if random_numbers.random() < 0.5 or i == 1 else -100 for i, token in enumerate(row)] for row in ids]
    return DatasetDict(
        train=Dataset.from_dict({
            "input_ids": ids, "labels": labels, "length": [len(row) for row in ids],
            "supervised_tokens": [sum(label != -100 for label in row[1:]) for row in labels],
        })
    )  # fmt: skip


def gradient(
    model_name: str, dtype: torch.dtype, packing: bool, micro: int, checkpointing: bool = False, dropout: float | None = None
) -> tuple[torch.Tensor, float]:
    """The gradient of one step over all documents, before clipping, and its loss."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model_config = tk.ModelConfig(
        model=model_name, hidden_size=32, num_hidden_layers=2, intermediate_size=48, gradient_checkpointing=checkpointing,
        dropout=dropout,
    )
    model = tk.load_model("AutoModelForCausalLM", model_config, FakeTokenizer(), packed=packing).to(dtype)
    config = tk.DataConfig(packing=packing, max_length=40, per_device_train_batch_size=micro, global_batch_size=8, max_steps=1)
    train, _ = tk.build_dataloaders(documents(), tk.collate_packed if packing else tk.collate_padded, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept: dict[str, torch.Tensor] = {}
    optimizer.step = lambda: kept.update({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[method-assign]
    batch = next(train.batches())
    if packing:  # fewer rows than documents: one step takes an epoch of them
        config = tk.DataConfig(packing=True, max_length=40, per_device_train_batch_size=micro, global_batch_size=train.epoch_size, max_steps=1)
        batch = next(tk.build_dataloaders(documents(), tk.collate_packed, config)[0].batches())
    metrics = tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, [0.0], max_grad_norm=0.0)
    return torch.cat([kept[name].flatten().double() for name in sorted(kept)]), metrics["loss"].item()


@pytest.mark.parametrize(
    ("model_name", "dtype", "tolerance"),
    [
        ("tiny-llama", torch.float64, 1e-10),
        ("tiny-llama", torch.float32, 1e-5),
        ("tiny-qwen3", torch.float64, 1e-10),
        ("tiny-qwen3", torch.float32, 1e-5),
        ("tiny-gemma3", torch.float64, 1e-8),  # transformers' Gemma norm rounds to float32 inside
        ("tiny-gemma3", torch.float32, 1e-5),
    ],
)
def test_every_split_of_the_global_batch_packed_or_padded_has_one_gradient(model_name: str, dtype: torch.dtype, tolerance: float) -> None:
    """1x8, 2x4, 8x1 and packed rows, one or all in a micro-batch. Reference: padded, one example at a time.

    Fails when: a loss is divided by its own count, or documents of a row see each other.
    """
    reference, loss = gradient(model_name, dtype, packing=False, micro=1)
    for packing, micro in ((False, 4), (False, 8), (True, 1), (True, 8)):
        other, other_loss = gradient(model_name, dtype, packing, micro)
        error = ((other - reference).norm() / reference.norm()).item()
        assert error < tolerance, (packing, micro, error)
        assert other_loss == pytest.approx(loss, rel=tolerance)


def test_recomputing_activations_changes_nothing() -> None:
    """With dropout, whose masks are those of the first time. Fails when: `preserve_rng_state` is False in `_recomputation`."""
    plain, _ = gradient("tiny-llama", torch.float32, packing=True, micro=1, dropout=0.2)
    recomputed, _ = gradient("tiny-llama", torch.float32, packing=True, micro=1, checkpointing=True, dropout=0.2)
    assert torch.equal(plain, recomputed)
    without, _ = gradient("tiny-llama", torch.float32, packing=True, micro=1)
    assert not torch.allclose(plain, without)
