"""Models whose packed rows cannot be exact are refused, with the reason by name; the others pass."""

import pytest
import torch
import transformers

from toolkit.config import Refusal
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.models.attention.packable import PROVEN, check_no_contamination, check_packable

register_attention()
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def with_field(config, name, value):
    setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda t: t.MambaConfig(), "linear_attention"),
        (lambda t: t.Qwen3NextConfig(), "linear_attention"),
        (lambda t: t.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "conv"),
        (lambda t: t.RwkvConfig(), "recurrent layers"),
        (lambda t: t.RecurrentGemmaConfig(), "(linear_attention|recurrent)"),  # transformers 5.17 says the latter
        (lambda t: t.FalconH1Config(), "hybrid"),
        (lambda t: t.Llama4TextConfig(), "chunked_attention"),
        (lambda t: t.LlamaConfig(**GROUPED, rope_parameters=DYNAMIC), "rope_type dynamic"),
        (lambda t: with_field(t.Gemma3TextConfig(), "rope_parameters", {"full_attention": DYNAMIC}), "rope_type dynamic"),
        (
            lambda t: with_field(t.Phi3Config(), "rope_parameters", {"rope_type": "longrope", "short_factor": [1.0] * 48}),
            "rope_type longrope",
        ),
        (lambda t: t.MixtralConfig(output_router_logits=True), "auxiliary loss"),
        (lambda t: t.GptOssConfig(), "attention sinks"),
        (lambda t: t.T5Config(), "encoder and a decoder"),
        (lambda t: t.Gemma3Config(), "images"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(make, reason):
    """Fails when: the rule of its row in `check_packable` is taken out."""
    with pytest.raises(Refusal, match=f"--packing: model type .*{reason}.* --no-packing"):
        check_packable(make(transformers))


@pytest.mark.parametrize(
    ("config", "model", "reason"),
    [
        (transformers.BloomConfig, transformers.BloomForCausalLM, "not on transformers' attention interface"),
        (transformers.JambaConfig, transformers.JambaForCausalLM, "linear_attention"),
    ],
)
def test_a_class_off_the_attention_interface_is_refused(config, model, reason):
    """Fails when: _supports_attention_backend is not asked for."""
    with pytest.raises(Refusal, match=reason):
        check_packable(config(), model)


def test_windows_that_stay_in_the_mask_are_refused():
    """A class that no flash kernel supports need not hand its window on. Fails when `_supports_flash_attn` is not asked."""
    kept_to_itself = type("KeptToItself", (transformers.MistralForCausalLM,), {"_supports_flash_attn": False})
    config = transformers.MistralConfig(**GROUPED, sliding_window=7)
    check_packable(config, transformers.MistralForCausalLM)
    with pytest.raises(Refusal, match=r"\(KeptToItself\) .*sliding windows"):
        check_packable(config, kept_to_itself)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        lambda t: t.Qwen3Config(), lambda t: t.Gemma3TextConfig(), lambda t: t.Gemma2Config(), lambda t: t.MistralConfig(),
        lambda t: t.ModernBertConfig(), lambda t: t.BertConfig(), lambda t: t.MixtralConfig(), lambda t: t.Qwen3MoeConfig(),
    ],
)  # fmt: skip
def test_what_is_exact_is_not_refused(make):
    """Fails when: a model whose class is not known is refused."""
    check_packable(make(transformers))


def build(config, auto=transformers.AutoModelForCausalLM):
    config.initializer_range = 0.2
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation=DOCUMENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.LlamaConfig(**GROUPED),
        lambda t: t.Qwen3MoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
        lambda t: t.OlmoConfig(**GROUPED), lambda t: t.Phi3Config(**GROUPED), lambda t: t.Cohere2Config(**GROUPED),
        lambda t: t.SmolLM3Config(**GROUPED), lambda t: t.GPTNeoXConfig(**SIZES),
    ],
)  # fmt: skip
def test_models_without_contamination_pass_the_look(make, dtype):
    """Fails when the bounds do not reach the attention (cu_seq_lens_q taken out of `_packed_output`, positions with it)."""
    check_no_contamination(build(make(transformers)).to(dtype))


def test_positions_that_are_counted_over_the_row_are_seen():
    """RoBERTa counts from the padding index on, which restarting positions do not.

    Fails when: a document in a row is not compared with the same one alone.
    """
    roberta = transformers.RobertaConfig(**SIZES, max_position_embeddings=64)
    with pytest.raises(Refusal, match="'roberta' "):
        check_no_contamination(build(roberta, transformers.AutoModelForMaskedLM))


@pytest.mark.parametrize("shift", [1, -1], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_mixes_neighbors_is_seen(shift, dtype):
    """A whisper of a convolution in an otherwise exact model. Fails when only one of the two neighbors is changed."""
    model = build(transformers.LlamaConfig(**GROUPED)).to(dtype)
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + 0.05 * output.roll(shift, dims=1))
    with pytest.raises(Refusal, match="see each other"):
        check_no_contamination(model)


def test_the_look_leaves_no_trace():
    """Fails when: the mode is not restored, or the tokens are drawn from the global generator."""
    model = build(transformers.LlamaConfig(**GROUPED)).train()
    state = torch.random.get_rng_state()
    check_no_contamination(model)
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_called_proven_is_proven():
    """Each of these model types has its gradients compared in test_attention.py.

    Fails when: a model type is added to PROVEN alone.
    """
    with open(__file__.replace("test_packable", "test_attention")) as file:
        source = file.read()
    assert all(f'    "{name}": lambda' in source for name in PROVEN)
