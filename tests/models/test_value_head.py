"""The value head: values of a model that changes its logits too, trained with an adapter, and not in the model directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

import toolkit as tk
from toolkit.models.added_heads import is_of_added_head

FEW = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}


def tiny(tmp_path: Path, **settings: Any) -> tuple[Any, Any]:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Config(tk.ModelConfig, tk.AdapterConfig):
        pass

    config = Config(**FEW, **settings)
    tokenizer = tk.load_tokenizer(config)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=None)
    return tk.add_value_head(tk.add_adapter(model, config, tokenizer)), tokenizer


def test_values_are_of_the_head_s_input_where_logits_are_changed_behind_it() -> None:
    """A model with soft-capped logits, padded rows; 1e-6. Fails when: `see` takes rows of the whole batch and not the kept columns."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=90, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, final_logit_softcapping=2.0, attn_implementation="eager",
    )  # fmt: skip
    model: Any = tk.add_value_head(Gemma2ForCausalLM(config))
    torch.nn.init.normal_(model.value_head.weight)
    rollouts = [tk.Rollout(i, 0, list(range(3, 5 + 2 * i)), [7, 8, 9, 10][: 4 - i], [-1.0] * (4 - i), False, {}, "") for i in range(3)]
    batch = tk.collate_rollouts(rollouts, [0.0] * 3, layout="padded")
    logps, _, values = tk.logps_and_values(model, batch)
    for row, each in enumerate(rollouts):
        ids = torch.tensor([each.prompt_ids + each.completion_ids])
        hidden = model.model(ids).last_hidden_state[0, len(each.prompt_ids) - 1 : -1]
        own = model(ids).logits[0, len(each.prompt_ids) - 1 : -1].log_softmax(-1)
        length = len(each.completion_ids)
        torch.testing.assert_close(values[row, :length], hidden @ model.value_head.weight[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logps[row, :length], own[range(length), each.completion_ids], atol=1e-5, rtol=1e-5)
        assert not values[row, length:].any()


@pytest.mark.parametrize("adapter", [False, True])
def test_the_model_directory_is_a_clean_language_model(tmp_path: Path, adapter: bool) -> None:
    """It opens in transformers with nothing unexpected, and equal logits. Fails when: `write_model` leaves the head in the state, or
    the head has no gradient with an adapter."""
    model, tokenizer = tiny(tmp_path, use_peft=adapter)
    ids = torch.tensor([[5, 6, 7]])
    (model(ids).logits.square().sum() + model.value_head(torch.ones(1, 32)).sum()).backward()
    assert model.value_head.weight.grad is not None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if is_of_added_head(name)] == ["value_head.weight"]
    assert not model.value_head.weight.any()
    torch.nn.init.normal_(model.value_head.weight)
    directory = tk.save_model(None, model, tokenizer, tmp_path)
    assert not [path for path in directory.rglob("*") if path.is_file() and b"value_head." in path.read_bytes()]
    if not adapter:
        opened, found = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
        assert torch.equal(opened(ids).logits, model.eval()(ids).logits)
        assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert "value_head.weight" in model.state_dict()  # the live model keeps it


def test_a_head_of_a_model_without_an_output_head_is_refused() -> None:
    """Fails when: the check is left out."""
    from transformers import GPT2Config, GPT2Model

    model: Any = GPT2Model(GPT2Config(vocab_size=90, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(tk.Refusal, match="no output head"):
        tk.add_value_head(model)
    with pytest.raises(ValueError, match="add_value_head"):
        tk.logps_and_values(model, {})
