"""load_model: dimensions, weights as a function of the seed, fit to the tokenizer, recomputation and compilation, refusals."""

import copy
import json
import re
import socket
from dataclasses import dataclass

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from toolkit.config import DataConfig, ModelConfig, Refusal
from toolkit.models.load import load_model
from toolkit.models.shapes import built_in_config, check_context
from toolkit.models.tokenizer import load_tokenizer

CAUSAL, CLASSES = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 300}
DECODERS = ["tiny-llama", "tiny-qwen3", "tiny-gemma3"]


class Words:
    """As much of a tokenizer as load_model reads."""

    def __init__(self, size, pad=1):
        self.size, self.bos_token_id, self.eos_token_id, self.pad_token_id = size, None, 0, pad

    def __len__(self):
        return self.size


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def row(lengths=(30, 1, 14)):
    lengths = list(lengths)
    tokens = torch.randint(3, 300, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return {
        "input_ids": tokens, "position_ids": torch.cat([torch.arange(length) for length in lengths])[None], "use_cache": False,
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def gradient(model, batch):
    model.zero_grad()
    torch.manual_seed(1)  # what dropout draws
    torch.log_softmax(model(**batch).logits.float(), dim=-1)[..., ::7].sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def saved(tmp_path, config=None, auto=CAUSAL, **head):
    """A small model's directory, as someone else could have made it."""
    load_model(auto, config or ModelConfig(**SMALL), **head).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


# -------------------------------------------------------------------------------------------------------------- built-in shapes


def test_a_model_and_its_tokenizer_are_loaded_by_a_name_alone() -> None:
    """As `load_splits` reads a data set. Fails when: either takes settings alone."""
    tokenizer = load_tokenizer("tiny-llama")
    assert tokenizer.vocab_size == load_tokenizer(ModelConfig(model="tiny-llama")).vocab_size
    assert load_model("AutoModelForCausalLM", "tiny-llama", tokenizer).config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("auto_class", ["tiny-llama", transformers.AutoModelForCausalLM])
def test_another_thing_than_the_name_of_a_class_is_refused(auto_class) -> None:
    """Fails when: transformers is asked for any attribute."""
    with pytest.raises(Refusal, match=r"auto_class.*AutoModelForCausalLM"):
        load_model(auto_class, ModelConfig())


@pytest.mark.parametrize("name", [*DECODERS, "tiny-bert"])
def test_every_dimension_setting_is_in_the_weights(name):
    """Counted by hand from the architecture's papers. Fails when a setting is not handed on."""
    width, layers, heads, kv_heads, inner, context, words = 48, 3, 6, 3, 80, 64, 310
    kv = {} if name == "tiny-bert" else {"num_key_value_heads": kv_heads}
    config = ModelConfig(
        model=name, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        max_position_embeddings=context, hidden_act="relu", **kv,
    )  # fmt: skip
    model = load_model(CLASSES if name == "tiny-bert" else CAUSAL, config, Words(words))
    head_dim = width // heads
    projections = 2 * width * width + 2 * width * kv_heads * head_dim + 3 * width * inner
    per_layer = {
        "tiny-llama": projections + 2 * width, "tiny-qwen3": projections + 2 * width + 2 * head_dim,
        "tiny-gemma3": projections + 4 * width + 2 * head_dim,
        "tiny-bert": 4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width,
    }[name]  # fmt: skip
    around = words * width + width  # tied embedding, last norm
    if name == "tiny-bert":  # learned positions, two segments, a norm; pooler, two classes
        around = (words + context + 2) * width + 2 * width + width * (width + 1) + 2 * (width + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == layers * per_layer + around
    assert model.config.max_position_embeddings == context
    assert any(isinstance(module, torch.nn.ReLU) for module in model.modules())


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_tied_and_know_the_special_tokens(name):
    """Fails when: a shape does not tie its head to its embedding."""
    model = load_model(CAUSAL, ModelConfig(model=name, **SMALL), Words(305, pad=4))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.config.eos_token_id, model.config.pad_token_id) == (0, 4)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("size", "width", "layers", "heads", "weights_of_a_layer"),
    [("small", 256, 4, 4, 4 * 256**2 - 256**2 + 3 * 256 * 768), ("medium", 768, 12, 12, 12 * 768**2), ("large", 1024, 24, 16, 4 * 1024**2 + 3 * 1024 * 2816)],
)
def test_named_shapes_have_their_dimensions(family, size, width, layers, heads, weights_of_a_layer):
    """medium has as many weights in a layer as GPT-2 small. Fails when a number of the table changes, or a family lacks a size."""
    from transformers import AutoModelForCausalLM

    config = built_in_config(ModelConfig(model=f"{size}-{family}", vocab_size=300))
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (width, layers, heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = [p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    assert sum(matrices) == layers * weights_of_a_layer
    with pytest.raises(Refusal, match=f"Did you mean {size}-{family}"):
        built_in_config(ModelConfig(model=f"{size}-{family}s"))


def test_gemma_shape_has_local_and_global_layers():
    """Fails when: the last layer is local too."""
    config = built_in_config(ModelConfig(model="tiny-gemma3", num_hidden_layers=6))
    assert [kind.split("_")[0] for kind in config.layer_types] == ["sliding"] * 3 + ["full", "sliding", "full"]


def test_initial_weights_are_a_function_of_the_seed_alone():
    """Fails when the generator is not seeded, or is left changed."""
    first = load_model(CAUSAL, ModelConfig(**SMALL, seed=3))
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again, other = load_model(CAUSAL, ModelConfig(**SMALL, seed=3)), load_model(CAUSAL, ModelConfig(**SMALL, seed=4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_dtype_only_rounds_the_weights():
    """Fails when: a built-in shape stays in float32."""
    exact, rounded = (load_model(CAUSAL, ModelConfig(**SMALL, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(weights(exact).bfloat16(), weights(rounded))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "not a multiple of --num-attention-heads 3.*--hidden-size 102"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple of --num-key-value-heads 3"),
        ({"hidden_size": 36, "num_attention_heads": 4}, "even width"),
        ({"hidden_act": "silo"}, "--hidden-act silo: .*silu"),
        ({"model": "tiny-lama"}, "Did you mean tiny-llama"),
        ({"model": "tiny-bert", "num_key_value_heads": 2}, "tiny-bert has no such dimension"),
        ({"model": "tiny-bert"}, "bidirectional"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_what_fits(settings, message):
    """Fails when: a width that heads do not divide is let through."""
    with pytest.raises(Refusal, match=message):
        load_model(CAUSAL, ModelConfig(**settings))


def test_dropout_reaches_every_layer_that_has_it():
    """Fails when a field of the config is left out: BERT's two, and the head's."""
    model = load_model(CLASSES, ModelConfig(model="tiny-bert", **SMALL, dropout=0.3))
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.3}
    assert load_model(CAUSAL, ModelConfig(**SMALL, dropout=0.3)).model.layers[0].self_attn.attention_dropout == 0.3


def test_attention_has_a_dropout_of_its_own():
    """Fails when --attention-dropout sets every field, or --dropout is put into force after it."""
    model = load_model(CLASSES, ModelConfig(model="tiny-bert", **SMALL, dropout=0.3, attention_dropout=0.1))
    attention = model.bert.encoder.layer[0].attention
    assert (attention.self.dropout.p, attention.output.dropout.p, model.dropout.p) == (0.1, 0.3, 0.3)
    model = load_model(CLASSES, ModelConfig(model="tiny-bert", **SMALL, attention_dropout=0.2))
    attention = model.bert.encoder.layer[0].attention
    assert (attention.self.dropout.p, attention.output.dropout.p) == (0.2, 0.1)  # the other one is the model's own
    assert model.config.attention_probs_dropout_prob == 0.2


def test_an_attention_dropout_that_a_model_does_not_have_is_refused(tmp_path):
    """Bloom's is one; Mamba has none. Fails when a setting without a field to go to is passed over."""
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"--attention-dropout 0\.1: .*'mamba'"):
        load_model(CAUSAL, ModelConfig(model=str(tmp_path), attention_dropout=0.1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_backend_is_the_one_that_compiles(monkeypatch, backend):
    """Fails when the setting does not reach torch.compile, with recomputation or without."""
    asked = []
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: asked.append(kwargs["backend"]) or compile_it(*args, **kwargs))
    for recomputed in (False, True):
        load_model(CAUSAL, ModelConfig(**SMALL, torch_compile=True, torch_compile_backend=backend, gradient_checkpointing=recomputed))
    assert asked == [backend] * 4

def test_the_same_words_in_another_order_are_near_before_any_training():
    """Mean states of the encoder in lower case. Fails when: positions keep their scale."""
    model = load_model("AutoModel", ModelConfig(model="small-bert-uncased"), Words(400)).eval()
    words = torch.arange(10, 70)
    with torch.no_grad():
        states = model(input_ids=torch.stack([words, words.flip(0), words + 60])).last_hidden_state.mean(1)
    same, other = torch.nn.functional.cosine_similarity(states[:1], states[1:])
    assert same > 0.99 > 0.5 > other


def test_equal_words_of_two_texts_attend_to_each_other_before_any_training():
    """In the first layer of the encoder in lower case, in each head, more than to any other word. The weights of attention.

    Fails when: keys are not the queries, or positions and segments keep their scale.
    """
    model = load_model("AutoModel", ModelConfig(model="tiny-bert-uncased", attn_implementation="eager"), Words(400)).eval()
    ids = torch.tensor([[*range(10, 30), *range(29, 9, -1)]])
    kinds = torch.tensor([[0] * 20 + [1] * 20])
    with torch.no_grad():
        weights = model(input_ids=ids, token_type_ids=kinds, output_attentions=True).attentions[0][0]
    across = weights[:, :20, 20:]  # from each word of the first text to those of the second, which is the first reversed
    assert torch.equal(across.argmax(-1), torch.arange(19, -1, -1).expand(2, 20))


def test_examples_longer_than_the_context_are_refused():
    """Fails when: the positions before and at the padding index are counted too."""
    config = built_in_config(ModelConfig(max_position_embeddings=64))
    check_context(config, 64)
    with pytest.raises(Refusal, match=r"--max-length 65: .*64 positions"):
        check_context(config, 65)
    roberta = transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1)  # counts from 2 on
    check_context(roberta, 512)
    with pytest.raises(Refusal, match="512 positions"):
        check_context(roberta, 513)


def test_a_recipes_length_is_checked_when_the_model_is_loaded():
    """Fails when: load_model does not call check_context, or it says of a length that was given, or of none, that it's the default."""

    @dataclass(frozen=True)
    class Config(ModelConfig, DataConfig):
        max_length: int = 2048

    with pytest.raises(Refusal, match=r"--max-length 2048 \(the default\): the model has 1024"):
        load_model(CAUSAL, Config())
    with pytest.raises(Refusal, match="--max-length 4096: the model has 1024"):
        load_model(CAUSAL, Config(max_length=4096))


# -------------------------------------------------------------------------------------------------- recomputation, compilation


@pytest.mark.parametrize("name", DECODERS)
def test_recomputed_activations_give_the_identical_gradient(name):
    """With dropout, on a packed row. Fails when checkpointing is off (one pass through each layer) or drops the bounds."""
    settings = {"model": name, **SMALL, "dropout": 0.2}
    kept = load_model(CAUSAL, ModelConfig(**settings), packed=True)
    recomputed = load_model(CAUSAL, ModelConfig(**settings, gradient_checkpointing=True), packed=True)
    passes = []
    recomputed.model.layers[0].input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    assert torch.equal(gradient(kept, row()), gradient(recomputed, row()))
    assert len(passes) == 2


@pytest.mark.slow
def test_compiled_and_recomputed_layers_give_the_same_gradient(monkeypatch):
    """Captured and differentiated by torch.compile, run without inductor, whose C++ would take a minute.

    Fails when the layers are not compiled, or are given up: what dynamo captured is counted (with transformers' own
    checkpointing around a compiled layer it is nothing).
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    settings = {**SMALL, "num_hidden_layers": 1}
    plain = load_model(CAUSAL, ModelConfig(**settings), packed=True)
    compiled = load_model(CAUSAL, ModelConfig(**settings, torch_compile=True, gradient_checkpointing=True, torch_compile_backend="aot_eager"), packed=True)
    passes = []
    compiled.model.layers[0].input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    copied = copy.deepcopy(compiled)
    for model, lengths in ((compiled, [30, 1, 14]), (compiled, [9, 50]), (copied, [9, 50])):
        found, expected = gradient(model, row(lengths)), gradient(plain, row(lengths))
        assert (found - expected).norm() < 1e-5 * expected.norm()
    assert counters["stats"]["unique_graphs"] > 0
    if torch.__version__ >= "2.13":  # with 2.11 the copied model's layer is not seen by the hook; its gradient is the same
        assert len(passes) == 2 * 3


@pytest.mark.parametrize("name", [*DECODERS, "tiny-bert"])
def test_each_layer_is_compiled_by_itself(monkeypatch, name):
    """Fails when: the model is compiled as a whole."""
    monkeypatch.setattr("toolkit.models.load.check_compiler", lambda *_: None)
    model = load_model(CLASSES, ModelConfig(model=name, **SMALL, torch_compile=True))
    layers = model.bert.encoder.layer if name == "tiny-bert" else model.model.layers
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == len(layers)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("torch._inductor.config.cpp.cxx", (None, "/nowhere/g++"), r"none was found\. Install g\+\+"),
        ("torch.__file__", "/my clone/torch/__init__.py", "space .*'/my clone/torch"),
    ],
    ids=["no compiler", "a space"],
)
def test_what_cannot_be_compiled_on_a_cpu_is_refused_before_the_first_step(monkeypatch, name, value, message):
    """Fails when inductor finds it out, in a traceback of the first step, and when a GPU is refused too, which needs neither."""
    if name == "torch.__file__":
        monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(name, value)
    with pytest.raises(Refusal, match=message):
        load_model(CAUSAL, ModelConfig(**SMALL, torch_compile=True))
    monkeypatch.setattr("toolkit.models.load._device", lambda config: "cuda")
    load_model(CAUSAL, ModelConfig(**SMALL, torch_compile=True))


# ---------------------------------------------------------------------------------------------------- directories and the Hub


def test_a_saved_model_comes_back_with_its_weights(tmp_path):
    """Fails when: the model stays in evaluation mode, as from_pretrained returns it."""
    model = load_model(CAUSAL, ModelConfig(**SMALL, seed=5))
    model.save_pretrained(tmp_path)
    config = ModelConfig(model=str(tmp_path))
    loaded = load_model(CAUSAL, config, packed=True)
    assert torch.equal(weights(model), weights(loaded))
    assert loaded.training


def test_a_larger_tokenizer_enlarges_the_embedding_and_says_so(tmp_path, capsys):
    """Fails when: _fit_to_tokenizer is not called."""
    directory = saved(tmp_path)
    model = load_model(CAUSAL, ModelConfig(model=str(directory)), Words(333))
    assert model.get_input_embeddings().weight.shape == (333, 32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight[:300], before)
    assert "333 tokens, the model 300" in capsys.readouterr().out


def test_an_end_of_text_that_pads_is_still_learned(tmp_path):
    """torch gives the padding index no gradient. Fails when `padding_idx` is left as the saved config has it."""
    directory = saved(tmp_path, ModelConfig(**SMALL))
    settings = json.loads((directory / "config.json").read_text()) | {"pad_token_id": 2, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(settings))
    model = load_model(CAUSAL, ModelConfig(model=str(directory)), Words(300, pad=2))
    model(input_ids=torch.tensor([[5, 2, 7]])).logits[..., 9].sum().backward()
    assert model.get_input_embeddings().weight.grad[2].any()


def test_a_new_head_is_said_and_a_function_of_the_seed(tmp_path, capsys):
    """A model with two classes taken for seven. Fails when the head is made outside the seeded generator."""
    directory = str(saved(tmp_path, ModelConfig(model="tiny-bert", **SMALL), CLASSES, num_labels=2))
    heads = []
    for seed in (1, 1, 2):
        model = load_model(CLASSES, ModelConfig(model=directory, seed=seed), num_labels=7, problem_type="regression")
        heads.append(model.classifier.weight.detach())
    assert (model.config.num_labels, model.config.problem_type, heads[0].shape) == (7, "regression", (7, 32))
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert re.search(r"\(seed 1\) .*head: classifier\.bias", capsys.readouterr().out)


def test_weights_missing_from_the_body_are_warned_of_and_misshapen_ones_refused(tmp_path, capsys):
    """Fails when: what from_pretrained reports as missing or mismatched is passed over."""
    directory = saved(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(rest, directory / "model.safetensors", {"format": "pt"})
    load_model(CAUSAL, ModelConfig(model=str(directory)))
    assert re.search(rf"WARNING: {directory} .*\b1 tensors .*random.*: {name}", capsys.readouterr().out)
    save_file({**tensors, name: tensors[name][:9].contiguous()}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refusal, match=f"do not have the shapes .*{name}"):
        load_model(CAUSAL, ModelConfig(model=str(directory)))


def broken(tmp_path, what):
    """A model directory in which one thing is wrong."""
    directory = saved(tmp_path)
    config = directory / "config.json"
    if what == "no config":
        config.unlink()
    elif what == "truncated config":
        config.write_text(config.read_text()[:40])
    elif what == "unknown type":
        config.write_text('{"model_type": "wat"}')
    elif what == "a digit too many":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2**70}))
    elif what == "pickled":
        torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
    elif what == "no weights":
        (directory / "model.safetensors").unlink()
    elif what == "truncated weights":
        (directory / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:5000])
    return str(directory)


@pytest.mark.parametrize("what", ["no config", "truncated config", "unknown type", "a digit too many", "pickled", "no weights", "truncated weights"])
def test_a_broken_directory_is_refused_in_one_message_that_names_it(tmp_path, what):
    """Fails when: the whole error is shown, not its first line, MOST_LAYERS is not asked for (it makes layers until it is killed), a
    directory without weights is said to hold pickled ones, or a truncated file is not named."""
    directory = broken(tmp_path, what)
    with pytest.raises(Refusal) as refused:
        load_model(CAUSAL, ModelConfig(model=directory))
    assert str(refused.value).startswith(f"--model {directory}: ")
    assert "\n" not in str(refused.value)
    assert what != "pickled" or "not in safetensors" in str(refused.value)
    assert what != "no weights" or "weights are missing" in str(refused.value)
    assert what != "truncated weights" or ": model.safetensors: " in str(refused.value)


@pytest.mark.parametrize(
    ("auto", "settings", "message"),
    [
        (CAUSAL, {"hidden_size": 64}, "--hidden-size 64: .*built-in"),
        (CAUSAL, {"model_revision": "main"}, "--model-revision main: .*directory"),
        (CAUSAL, {"attn_implementation": "flash_attention_2"}, "--attn-implementation flash_attention_2: needs"),
        ("AutoModelForSeq2SeqLM", {}, "model type 'llama' is no encoder-decoder"),
    ],
)
def test_settings_that_a_loaded_model_cannot_have_are_refused(tmp_path, auto, settings, message):
    """Fails when: sizes that are for built-in shapes are passed over."""
    directory = saved(tmp_path)
    with pytest.raises(Refusal, match=message):
        load_model(auto, ModelConfig(model=str(directory), **settings))


def test_remote_code_needs_a_pinned_commit():
    """Fails when: a branch counts as a commit."""
    for revision in (None, "main"):
        with pytest.raises(Refusal, match="pin the commit"):
            load_model(CAUSAL, ModelConfig(model="someone/model", trust_remote_code=True, model_revision=revision))


def test_an_unreachable_model_is_refused_without_a_traceback(monkeypatch):
    """Fails when: the Hub's error is raised as it is."""
    def no_network(*_args, **_kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(Refusal, match=r"--model someone/no-such-model: .*Hub"):
        load_model(CAUSAL, ModelConfig(model="someone/no-such-model"))


def test_packing_is_refused_for_a_model_that_cannot_before_its_weights_are_read(tmp_path):
    """Fails when: `choose_attention` does not ask `check_packable`."""
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"--packing: .*'mamba' .*linear_attention"):
        load_model(CAUSAL, ModelConfig(model=str(tmp_path)), packed=True)


def test_an_encoder_decoder_whose_texts_have_no_end_is_refused_as_a_classifier():
    """transformers' T5 and BART look for it in the forward pass. Fails when: `_check_ends` returns at once."""
    from toolkit.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["a b c"] * 9, 300)
    with pytest.raises(Refusal, match=r"--model tiny-t5: .*end-of-text"):
        load_model(CLASSES, ModelConfig(model="tiny-t5"), tokenizer, num_labels=2)


def test_a_tie_that_the_files_contradict_is_said_and_not_made_later(tmp_path, capsys):
    """Fails when: a larger vocabulary ties the head to the embedding after all, or what is saved says that they are tied."""
    original = load_model(CAUSAL, ModelConfig(model="tiny-llama", **SMALL))
    original.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(written))
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(CAUSAL, ModelConfig(model=str(tmp_path)))
    assert "lm_head.weight" in capsys.readouterr().out
    model.resize_token_embeddings(400)
    assert torch.equal(model.get_output_embeddings().weight[:300], head)
    assert model.config.tie_word_embeddings is False
