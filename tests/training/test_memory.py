"""When the longest micro-batch is tried before the first step, and when so much is free that it need not be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset

import toolkit as tk
from toolkit.training import memory

SIZES: dict[str, Any] = {"vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
OF_T5 = {"vocab_size": 500, "d_model": 32, "num_layers": 3, "num_heads": 4, "d_ff": 2000, "decoder_start_token_id": 0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama, eager": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="eager")),
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, attn_implementation="eager")),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**OF_T5)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16, num_key_value_heads=2)),
}


def held_for_backward(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes that a forward pass keeps for backward, and AdamW's moments and gradients."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**inputs)
    assert output.loss is not None
    return sum(each.nbytes() for at, each in storages.items() if at not in own) + sum(12 * p.numel() for p in model.parameters())


@pytest.mark.parametrize("length", [16, 200])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_more_than_a_step_keeps(name: str, length: int) -> None:
    """Fails when: layers, the feed-forward layer of a T5, attention weights or the logits are left out of it."""
    model = MODELS[name]()
    ids = torch.randint(1, 500, (4, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(4, dtype=torch.long) if name == "bert" else ids}
    held, estimate = held_for_backward(model, inputs), memory.most_needed(model, inputs)
    assert estimate is not None
    assert 1.0 < estimate / held < 12.0


def test_a_packed_row_counts_its_documents() -> None:
    """As many short texts one below the other. Fails when: each token is taken to see the whole row, or the longest document."""
    ids = torch.ones(4, 8, dtype=torch.long)
    bounds = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)
    packed = {"input_ids": ids.view(1, -1), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8}
    model = MODELS["llama"]()
    assert memory.most_needed(model, packed) == memory.most_needed(model, {"input_ids": ids})
    uneven = torch.tensor([0, 29, 30, 31, 32], dtype=torch.int32)
    more = memory.most_needed(model, {**packed, "cu_seq_lens_q": uneven, "cu_seq_lens_k": uneven, "max_length_q": 29})
    shape = model.config
    assert more - memory.most_needed(model, packed) == 16 * shape.num_hidden_layers * shape.num_attention_heads * (29**2 + 3 - 256)


@pytest.mark.parametrize(("free", "trials", "sparing"), [(10**12, 0, []), (10**6, 1, [True]), (None, 1, [True])])
def test_nothing_is_tried_where_far_more_is_free(
    free: int | None, trials: int, sparing: list[bool], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails when: every run is tried, or what is free counts as enough where it is unknown, for steps that spare no memory too."""
    kept = list[bool]()
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    monkeypatch.setattr(memory, "keep_freed_memory", lambda *, sparing: kept.append(sparing))
    called = fitted()
    assert (called, kept) == (trials, sparing)
    assert capfd.readouterr().out.count("spare it") == len(sparing)


@pytest.mark.parametrize(("times", "trials", "sparing"), [(0.9, 1, [True]), (1.1, 1, []), (3.9, 1, []), (4.1, 0, [])])
def test_memory_is_spared_where_not_even_once_as_much_is_free(
    times: float, trials: int, sparing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: it is spared wherever a micro-batch is tried, which takes time, or never."""
    kept = list[bool]()
    monkeypatch.setattr(memory, "most_needed", lambda *_: 10**9)
    monkeypatch.setattr(memory, "memory_held", lambda device: 10**9)
    monkeypatch.setattr(memory, "free_memory", lambda device: int(times * 2 * 10**9))
    monkeypatch.setattr(memory, "keep_freed_memory", lambda *, sparing: kept.append(sparing))
    assert (fitted(), kept) == (trials, sparing)


def test_ranks_that_gather_weights_spare_memory_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: they are said to begin with it."""
    kept = list[bool]()
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6)
    monkeypatch.setattr(memory, "keep_freed_memory", lambda *, sparing: kept.append(sparing))
    monkeypatch.setattr(memory, "engine_of", lambda _: SimpleNamespace(shards=True, shards_weights=lambda _: True))
    assert (fitted(), kept) == (0, [])


def fitted() -> int:
    """How often a loss was computed until a micro-batch was taken, which is the given one."""
    rows = Dataset.from_list([{"input_ids": list(range(1, 9)), "labels": list(range(1, 9)), "length": 8, "supervised_tokens": 7}] * 4)
    accelerator, model, called = Accelerator(cpu=True), MODELS["llama"](), []

    def loss_fn(*values: Any) -> Any:
        called.append(values)
        return tk.causal_lm_loss(*values)

    config = tk.DataConfig(per_device_train_batch_size=2)
    train, _ = tk.build_dataloaders({"train": rows}, tk.collate_padded, config, accelerator)
    assert tk.fit_micro_batch(accelerator, model, torch.optim.AdamW(model.parameters()), train, loss_fn, config) is train
    return len(called)


def test_a_model_that_says_nothing_of_its_size_is_tried() -> None:
    """Fails when: what is unknown counts as nothing."""
    assert memory.most_needed(torch.nn.Linear(2, 2), {"input_ids": torch.ones(2, 2)}) is None
    assert memory.most_needed(MODELS["llama"](), {"pixels": torch.ones(2, 2)}) is None
