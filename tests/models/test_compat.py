"""Names of transformers, peft, torch and torchao that are not public, and that models need: each is where it was, and does what it did.

A failure here after an upgrade says which function of toolkit/models/compat.py needs another name.
"""

import copy

import jinja2
import pytest
import torch
from torch import nn

from toolkit.models import compat


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))


def test_names_of_transformers_models_are_where_they_were(llama) -> None:
    """Fails when: transformers renames a class attribute, so that every model would be refused, or none."""
    import transformers

    assert compat.class_for(transformers.AutoModelForCausalLM, llama.config) is type(llama)
    with pytest.raises(KeyError):
        compat.class_for(transformers.AutoModelForCausalLM, transformers.ViTConfig())
    assert compat.takes_attention_functions(type(llama))
    assert compat.takes_flash_attention(type(llama))
    assert compat.takes_sdpa(type(llama))
    assert not compat.is_stateful(type(llama))
    assert compat.is_stateful(transformers.MambaForCausalLM)
    assert compat.attention_of(llama.config) == "sdpa"
    llama.set_attn_implementation("eager")
    assert compat.attention_of(llama.config) == "eager"
    assert not compat.renames_old_weights(llama)


def test_a_commit_stays_out_of_the_files_of_a_model(llama, tmp_path) -> None:
    """Fails when: transformers writes `_commit_hash` into config.json, or drops it from a config."""
    assert compat.commit_of(llama.config) is None
    compat.set_commit(llama.config, "a" * 40)
    assert compat.commit_of(llama.config) == "a" * 40
    llama.config.to_json_file(tmp_path / "config.json")
    assert "aaaa" not in (tmp_path / "config.json").read_text()


def test_a_tokenizer_takes_another_backend() -> None:
    """Fails when: `_tokenizer` has another name, or set_backend sets one (as `_backend`) that encoding does not read."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    one, other = (Tokenizer(models.WordLevel({"a": number, "?": 0}, unk_token="?")) for number in (1, 2))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=one, unk_token="?")
    assert tokenizer("a")["input_ids"] == [1]
    compat.set_backend(tokenizer, other)
    assert tokenizer.backend_tokenizer is other
    assert tokenizer("a")["input_ids"] == [2]


def test_a_chat_template_is_compiled_as_it_will_be_rendered() -> None:
    """Fails when: the function has moved, or its environment lacks the extensions of chat templates."""
    compat.compile_template("{% generation %}{{ messages }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}")
    with pytest.raises(jinja2.TemplateSyntaxError):
        compat.compile_template("{% for %}")


def test_names_of_torch_are_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: torch moves one of them, or a compiled module no longer has its call under that name."""
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert not compat.finds_cpp_compiler()
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    assert compat.finds_cpp_compiler()
    layer = nn.Linear(2, 2)
    assert not compat.is_compiled(layer)
    layer.compile(backend="eager")
    assert compat.is_compiled(layer)
    scores = torch.randn(2, 3, requires_grad=True)
    weights = scores.softmax(-1)
    weights.backward(given := torch.randn(2, 3))
    torch.testing.assert_close(compat.softmax_backward(given, weights.detach()), scores.grad)


def test_documents_are_numbered_without_waiting_for_the_device(llama) -> None:
    """As transformers numbers them on a CPU. Fails when: masking_utils asks another function, or a model with another attention is
    changed as well."""
    from transformers import masking_utils

    from toolkit.models.attention.interface import DOCUMENTS, register_attention

    register_attention()
    config, positions = llama.config, torch.tensor([[0, 1, 2, 0, 1, 0]])
    on_device = torch.empty(1, 6, 8, device="meta")  # where a value that is asked for raises
    asked = {"config": config, "inputs_embeds": on_device, "attention_mask": None, "past_key_values": None, "position_ids": positions.to("meta")}
    with pytest.raises(RuntimeError):
        masking_utils.create_causal_mask(**asked)
    config._attn_implementation = DOCUMENTS
    assert masking_utils.create_causal_mask(**asked).shape == (1, 6)
    assert masking_utils.create_causal_mask(**asked | {"position_ids": positions}).tolist() == [[0, 0, 0, 1, 1, 2]]
    on_cpu = asked | {"inputs_embeds": torch.empty(1, 6, 8), "position_ids": positions}
    assert masking_utils.create_causal_mask(**on_cpu).tolist() == [[0, 0, 0, 1, 1, 2]]


def test_hooks_of_a_forward_pass_can_be_looked_at() -> None:
    """Those of a copy too, which has its own. Fails when: torch keeps them elsewhere (`_forward_hooks` is read)."""
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(hook := lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    assert compat.hooks_before(module) == compat.hooks_before(copy.deepcopy(module)) == [hook]
    for kind in ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook", "register_full_backward_hook"):
        module = nn.Linear(2, 2)
        assert not compat.has_hooks(module)
        getattr(module, kind)(lambda *_: None)
        assert compat.has_hooks(module)
    module = nn.Linear(2, 2)
    setattr(module, "forward", module.forward)  # noqa: B010, as accelerate does for its own hooks
    assert compat.has_hooks(module)




def test_a_linear_layer_of_float8_has_the_parameters_of_the_one_it_was() -> None:
    """Fails when: torchao's class is elsewhere, takes another kind of config, or copies what it is made from."""
    float8 = pytest.importorskip("torchao.float8", reason="make test-float8")
    layer = nn.Linear(16, 32)
    found = compat.linear_in_float8().from_float(layer, float8.Float8LinearConfig(emulate=True))
    assert isinstance(found, nn.Linear)
    assert found.weight is layer.weight
    assert found.bias is layer.bias
    assert found.config.emulate
