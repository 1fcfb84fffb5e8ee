"""Second models that are only evaluated: the same numbers as autocast makes of them, with half the memory for linear layers."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import toolkit as tk
from toolkit.distributed.compat import forget_process_state
from toolkit.distributed.engines import engine_of
from toolkit.models import frozen, lora
from toolkit.preference.reference import _second_model

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def decoder(tied: bool) -> nn.Module:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0))


MODELS = {
    "decoder": lambda: decoder(False), "tied": lambda: decoder(True), "encoder": lambda: BertForSequenceClassification(BertConfig(**SIZES)), "t5": t5,
}  # fmt: skip


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(12).reshape(2, 6) + 1
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(**inputs).logits


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_held_in_half_precision_gives_the_bits_of_autocast(kind: str) -> None:
    """Fails when: a norm, a bias or a table is rounded too, or a linear layer stays in float32."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    for parameter in model.parameters():  # numbers that bfloat16 does not have, norms and biases too
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    expected = logits(model.eval())
    placed: Any = frozen.place_frozen(Accelerator(cpu=True, mixed_precision="bf16"), model.train(), torch.bfloat16)
    assert torch.equal(logits(placed), expected)
    assert not placed.training
    assert not any(parameter.requires_grad for parameter in placed.parameters())
    tables = {each.weight for each in placed.modules() if isinstance(each, nn.Embedding)}
    for layer in placed.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            is_held = isinstance(layer, nn.Linear) and name == "weight" and parameter not in tables
            assert parameter.dtype == (torch.bfloat16 if is_held else torch.float32), (layer, name)


def test_what_stays_in_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """In full precision, in bfloat16 already, with an adapter (DoRA takes norms of weights), and where the engine shards weights.

    Fails when: one of them is held in half precision all the same."""
    model = decoder(False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    types = [parameter.dtype for parameter in model.parameters()]

    def types_of(model: nn.Module, half: torch.dtype | None) -> list[torch.dtype]:
        return [parameter.dtype for parameter in frozen.place_frozen(accelerator, copy.deepcopy(model), half).parameters()]

    assert types_of(model, None) == types
    assert set(types_of(copy.deepcopy(model).bfloat16(), torch.float16)) == {torch.bfloat16}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
    assert set(types_of(adapted, torch.bfloat16)) == {torch.float32}
    sharding = SimpleNamespace(shards_weights=lambda _: True, place_frozen=engine_of(accelerator).place_frozen)
    monkeypatch.setattr(frozen, "engine_of", lambda _: sharding)
    assert types_of(model, torch.bfloat16) == types


@pytest.mark.parametrize("moves", [False, True])
def test_a_reference_that_is_drawn_toward_the_model_stays_in_float32(moves: bool) -> None:
    """Fails when: averages of weights are rounded to bfloat16."""
    model: Any = _second_model(Accelerator(cpu=True, mixed_precision="bf16"), lambda: decoder(False), moves)
    assert model.lm_head.weight.dtype == (torch.float32 if moves else torch.bfloat16)


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig):
    model: str = "tiny-llama"
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 2
    vocab_size: int | None = 300
    use_peft: bool = True


@pytest.mark.parametrize(("precision", "settings", "held"), [
    ("bf16", {}, True), ("no", {}, False), ("bf16", {"use_dora": True}, False),
])  # fmt: skip
def test_the_weights_below_an_adapter_are_held_in_half_precision_and_gradients_keep_their_bits(
    precision: str, settings: dict[str, Any], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the adapter's weights or a head that is trained whole are rounded; or a gradient is another one."""
    forget_process_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    tokens = torch.arange(12).reshape(2, 6) + 5

    def trained() -> tuple[Any, list[torch.Tensor]]:
        config = Config(**settings)
        tokenizer = tk.load_tokenizer(config)
        model: Any = accelerator.prepare(tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer), config, tokenizer))
        model(input_ids=tokens, labels=tokens).loss.backward()
        parts = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert {parameter.dtype for _, parameter in parts} == {torch.float32}
        return model, [parameter.grad for _, parameter in parts]

    model, gradients = trained()
    base = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer").weight
    assert base.dtype == (torch.bfloat16 if held else torch.float32)
    monkeypatch.setattr(lora, "hold_in_half", lambda *_: None)
    _, expected = trained()
    assert all(torch.equal(found, wanted) for found, wanted in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_an_engine_that_shards_gets_weights_of_one_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a shard would hold numbers of two types."""
    Accelerator(cpu=True, mixed_precision="bf16")
    config = Config()
    tokenizer = tk.load_tokenizer(config)
    monkeypatch.setattr(lora, "settled_kind", lambda: kind)
    model = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer), config, tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
