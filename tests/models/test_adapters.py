"""add_adapter: what it trains, from which weights, on which modules; and the directory that is written of it."""

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.func import functional_call

import toolkit as tk
from toolkit.config import Refusal
from toolkit.models.lora import target_modules
from toolkit.models.without_weights import without_weights
from toolkit.optim.parameter_groups import parameter_groups

CAUSAL, CLASSES = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
INITIALIZATIONS = ["true", "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"]
IDS = torch.arange(24).reshape(2, 12) * 7 % 290


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    use_peft: bool = True
    lora_r: int = 4
    lora_alpha: float = 8.0
    vocab_size: int | None = 300
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 2
    intermediate_size: int | None = 48


def base_directory(folder: Path, **settings: Any) -> Path:
    """A small model as someone else published it, with a tokenizer."""
    tokenizer = tk.train_tokenizer(["one two three four"] * 9, 300)
    model = tk.load_model(CAUSAL, dataclasses.replace(Config(), use_peft=False, seed=9, **settings), tokenizer)
    model.resize_token_embeddings(300)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder / "base"


def on_directory(folder: Path, **settings: Any) -> Config:
    """Settings for a model of a directory, which has a shape of its own."""
    shape = {"vocab_size": None, "hidden_size": None, "num_hidden_layers": None, "intermediate_size": None}
    return Config(model=str(folder), **shape, **settings)


def load(config: Config, tokenizer: Any = None) -> Any:
    return tk.add_adapter(tk.load_model(CAUSAL, config, tokenizer), config, tokenizer)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model.eval()(input_ids=ids).logits


def trained(model: Any, steps: int = 4) -> Any:
    """A few steps of AdamW, so that nothing is where it began."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return model


def adapted_modules(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.get_base_model().named_modules() if hasattr(module, "lora_A")}


# ------------------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("initialization", INITIALIZATIONS)
def test_an_adapter_begins_as_the_model_it_is_on(initialization: str) -> None:
    """Exactly, where B is zero; else to rounding. Fails when: the residual is not taken out of the frozen weights, or B is drawn."""
    config = Config(init_lora_weights=initialization)
    before, after = logits(tk.load_model(CAUSAL, config)), logits(load(config))
    if initialization in ("true", "gaussian"):
        assert torch.equal(before, after)
    else:
        assert torch.allclose(before, after, rtol=0, atol=1e-5)


VARIANTS: list[dict[str, Any]] = [
    {"init_lora_weights": "true"}, {"init_lora_weights": "gaussian", "use_rslora": True}, {"init_lora_weights": "pissa"},
    {"init_lora_weights": "olora", "use_rslora": True}, {"init_lora_weights": "pissa_niter_4"}, {"use_dora": True},
    {"init_lora_weights": "orthogonal", "use_rslora": True},
    {"use_dora": True, "use_rslora": True},
    {"lora_rank_pattern": ["q_proj=2", r"layers\.1\.mlp\.down_proj=6"], "lora_alpha_pattern": ["down_proj=3"]},
    {"lora_target_modules": [r".*\.0\..*(q|o)_proj"]}, {"lora_target_modules": ["v_proj", "gate_proj"], "lora_layers_to_transform": [1]},
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_are_those_of_the_formula(variant: dict[str, Any]) -> None:
    """Of a model with the weights W + s B A, for DoRA m (W + s B A) / |W + s B A|: written out, in float64, to 1e-10.

    DoRA's norm takes no gradient (https://arxiv.org/abs/2402.09353, section 4.3); each row of a weight makes one output.

    Fails when: alpha is not divided by the rank of a pattern, or rsLoRA's root is left out.
    """
    config = Config(**variant)
    model, plain = load(config).double(), tk.load_model(CAUSAL, config).double()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data += 0.1 * torch.rand_like(parameter)
    leaves, weights, real = {}, {}, []
    for name, module in adapted_modules(model).items():
        rank = 2 if "q_proj" in name and config.lora_rank_pattern else 6 if name == "model.layers.1.mlp.down_proj" and config.lora_rank_pattern else 4
        alpha = 3 if "down_proj" in name and config.lora_alpha_pattern else 8
        a, b = (getattr(module, part)["default"].weight for part in ("lora_A", "lora_B"))
        assert a.shape[0] == b.shape[1] == rank
        leaves[name] = [a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()]
        real.append([a, b])
        scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        weight = module.base_layer.weight.detach() + scale * leaves[name][1] @ leaves[name][0]
        if config.use_dora:
            magnitude = module.lora_magnitude_vector["default"].weight
            leaves[name].append(magnitude.detach().clone().requires_grad_())
            real[-1].append(magnitude)
            weight = leaves[name][2][:, None] * weight / weight.detach().norm(dim=1, keepdim=True)
        weights[f"{name}.weight"] = weight
    embedding = model.get_input_embeddings().weight.detach()
    functional_call(plain, {**weights, "model.embed_tokens.weight": embedding}, (), {"input_ids": IDS, "labels": IDS}).loss.backward()
    model(input_ids=IDS, labels=IDS).loss.backward()
    for expected, found in zip(leaves.values(), real, strict=True):
        for leaf, parameter in zip(expected, found, strict=True):
            assert leaf.grad is not None
            assert float(leaf.grad.norm()) > 0
            assert torch.allclose(parameter.grad, leaf.grad, rtol=1e-10, atol=1e-10 * float(leaf.grad.abs().max()))


def test_a_recomputed_model_and_a_packed_row_give_an_adapter_the_same_gradients(tmp_path: Path) -> None:
    """Fails when: peft keeps the bounds of the documents from the attention, or a recomputed layer cuts the adapter off."""
    lengths, base = [10, 1, 13], base_directory(tmp_path)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    row = {
        "input_ids": IDS.reshape(1, -1), "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "use_cache": False, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 13, "max_length_k": 13,
    }  # fmt: skip

    def gradients(documents: list[dict[str, Any]], *, recomputed: bool = False, packed: bool = False) -> torch.Tensor:
        config = on_directory(base, gradient_checkpointing=recomputed, init_lora_weights="olora")
        model = tk.add_adapter(tk.load_model(CAUSAL, config, packed=packed), config)
        for document in documents:
            model.train()(**document).logits.log_softmax(-1)[..., ::7].sum().backward()
        return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.requires_grad])

    alone = gradients([{"input_ids": document[None]} for document in IDS.flatten().split(lengths)])
    assert float(alone.norm()) > 1
    for found in (gradients([row], packed=True), gradients([row], packed=True, recomputed=True)):
        assert float((found - alone).norm() / alone.norm()) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_single_tokens_learn_what_the_whole_embedding_would(tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Their rows' gradient is that of the embedding (and of a head next to it), with the head at supervised positions only.

    Fails when: the head's share is left out of a tied row's gradient, or a head of its own keeps its old rows.
    """
    base = base_directory(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    if not tied:
        torch.manual_seed(0)
        plain.config.tie_word_embeddings = False
        plain.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn_like(plain.lm_head.weight))
        plain.save_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokens = [0, 7, 63]
    config = on_directory(base, lora_trainable_tokens=tokenizer.convert_ids_to_tokens(tokens))
    model = load(config, tokenizer)
    labels = torch.where(torch.arange(24).reshape(2, 12) % 3 > 0, IDS, -100)
    loss, _ = tk.causal_lm_loss(model.train(), {"input_ids": IDS, "labels": labels}, {"tokens": 16.0})
    loss.backward()
    expected = plain.train()(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    (-expected[wanted >= 0].gather(1, wanted[wanted >= 0][:, None]).sum() / 16).backward()
    found = {name: p.grad for name, p in model.named_parameters() if "trainable_tokens" in name and p.grad is not None}
    assert len(found) == (1 if tied else 2)
    for name, gradient in found.items():
        weight = plain.lm_head.weight if "lm_head" in name else plain.get_input_embeddings().weight
        assert float((gradient - weight.grad[tokens]).norm() / weight.grad[tokens].norm()) < 1e-5, name
    assert caplog.text.count("held in memory") == 0, "the head was applied as a whole"


def test_the_chat_templates_tokens_learn_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: template means all added tokens, or the directory has not the rows."""
    base = base_directory(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|unused|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    config = on_directory(base, lora_trainable_tokens=["template"], output_dir=str(tmp_path / "run"))
    model = trained(load(config, tokenizer))
    assert "<|im_start|>, <|im_end|>" in capsys.readouterr().out
    tk.save_model(None, model, tokenizer, config.output_dir)
    read = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/model")
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "a", "b"])])
    torch.testing.assert_close(logits(read, ids), logits(model, ids), rtol=0, atol=1e-6)
    saved = load_file(tmp_path / "run/model/adapter_model.safetensors")
    assert [tuple(t.shape) for name, t in saved.items() if "lora" not in name] == [(2, 32)]


def test_dropout_is_on_the_adapter_alone_and_off_in_evaluation() -> None:
    """Fails when: --lora-dropout does not reach peft."""
    model = load(Config(lora_dropout=0.5, init_lora_weights="olora"))
    assert torch.equal(logits(model), logits(model))
    with torch.no_grad():
        assert not torch.equal(model.train()(input_ids=IDS).logits, model(input_ids=IDS).logits)


# ------------------------------------------------------------------------------------------------------------- what is trained


def test_without_use_peft_the_model_is_left_alone() -> None:
    """Fails when: the setting is not read."""
    config = Config(use_peft=False)
    model = tk.load_model(CAUSAL, config)
    assert tk.add_adapter(model, config) is model
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_first_weights_are_a_function_of_the_seed_alone() -> None:
    """Fails when: the generator is not seeded, or is left changed."""
    first = load(Config(seed=3))
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again, other = load(Config(seed=3)), load(Config(seed=4))
    assert torch.equal(before, torch.random.get_rng_state())
    names = [name for name, _ in first.named_parameters() if ".lora_A." in name]
    a, b, c = ([dict(model.named_parameters())[name] for name in names] for model in (first, again, other))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize(("auto", "shape"), [(CAUSAL, "tiny-llama"), (CAUSAL, "tiny-gemma3"), (CLASSES, "tiny-llama")])
def test_all_linear_is_what_peft_means_by_it(auto: str, shape: str) -> None:
    """Fails when: the head is adapted, or a layer is left out."""
    config = Config(model=shape)
    model = tk.load_model(auto, config)
    peer = get_peft_model(tk.load_model(auto, config), LoraConfig(target_modules="all-linear", task_type={CAUSAL: "CAUSAL_LM"}.get(auto, "SEQ_CLS")))
    assert set(target_modules(model, config)) == set(peer.peft_config["default"].target_modules)


def test_the_trained_share_is_said_and_is_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by hand: (in + out) x rank of each layer. Fails when: frozen weights are trained, or an embedding that was there."""
    model = load(on_directory(base_directory(tmp_path)))
    # q and o 32 x 32, k and v 32 x 16, three of 32 x 48; two layers
    expected = 2 * 4 * (2 * 64 + 2 * 48 + 3 * 80)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected
    total = sum(p.numel() for p in model.parameters())
    assert f"trains {expected:,} of {total:,} parameters ({100 * expected / total:.1f} %)" in capsys.readouterr().out


def test_weights_that_nobody_trained_are_trained_with_the_adapter(tmp_path: Path) -> None:
    """The embedding of a built-in shape, tied to its head, and the new head of a classifier. Fails when: either is frozen."""
    model = trained(load(Config()))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not torch.equal(model.get_input_embeddings().weight, tk.load_model(CAUSAL, Config()).get_input_embeddings().weight)
    config = on_directory(base_directory(tmp_path))
    classifier = tk.add_adapter(tk.load_model(CLASSES, config, num_labels=3), config)
    names = [name for name, p in classifier.named_parameters() if p.requires_grad and ".lora_" not in name]
    assert [name.split(".")[2] for name in names] == ["score"]


def test_loraplus_gives_b_its_own_rate() -> None:
    """https://arxiv.org/abs/2402.12354. Fails when: A or the embedding get the rate of B, or the ratio multiplies twice."""
    config = Config(loraplus_lr_ratio=16.0, learning_rate=1e-3, lr_patterns=["layers.0=0.5"])
    rates = {name: group["lr"] for group in parameter_groups(load(config), config, config.loraplus_lr_ratio) for name, _ in group["params"]}
    for name, rate in rates.items():
        assert rate == pytest.approx(1e-3 * (16 if "lora_B" in name else 1) * (0.5 if "layers.0" in name else 1)), name
    assert len({round(rate, 9) for rate in rates.values()}) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_target_modules": ["q_porj", "v_proj"]}, ["q_porj", "q_proj"]),
        ({"lora_target_modules": [".*nothing.*"]}, ["matches none", "down_proj"]),
        ({"lora_target_modules": ["("]}, ["neither a name nor"]),
        ({"lora_target_modules": ["self_attn"]}, ["self_attn", "q_proj"]),
        ({"lora_target_modules": ["lm_head", "q_proj"]}, ["shares its weights", "--lora-modules-to-save lm_head"]),
        ({"lora_modules_to_save": ["embed_token"]}, ["embed_token", "embed_tokens"]),
        ({"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["q_proj"]}, ["trained whole already"]),
        ({"lora_rank_pattern": ["qproj=2"]}, ["--lora-rank-pattern", "q_proj"]),
        ({"lora_layers_to_transform": [0, 2]}, ["--lora-layers-to-transform 2", "0 to 1"]),
        ({"lora_r": 17, "init_lora_weights": "pissa"}, ["--lora-r 16", "k_proj"]),
        ({"lora_target_modules": ["embed_tokens"], "init_lora_weights": "olora"}, ["embed_tokens"]),
        ({"lora_target_modules": ["embed_tokens"], "init_lora_weights": "orthogonal"}, ["embed_tokens"]),
        ({"lora_rank_pattern": ["q_proj=3"], "init_lora_weights": "orthogonal"}, ["q_proj is 3", "an even one"]),
    ],
    ids=str,
)
def test_what_the_model_does_not_have_is_refused_with_what_is_near(settings: dict[str, Any], words: list[str]) -> None:
    """Fails when: a name that matches nothing is let through next to one that does."""
    with pytest.raises(Refusal) as refusal:
        load(Config(**settings))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Fails when: an unknown token trains the row of another, or a whole embedding is cut down to single rows."""
    base = base_directory(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    with pytest.raises(Refusal, match=r" <\|im_strat\|>: .*: <\|im_start\|>"):
        load(on_directory(base, lora_trainable_tokens=["<|im_strat|>"]), tokenizer)
    whole = on_directory(base, lora_trainable_tokens=["<|im_start|>"], lora_modules_to_save=["embed_tokens"])
    with pytest.raises(Refusal, match="the embedding is trained whole"):
        load(whole, tokenizer)


def test_a_model_without_linear_layers_is_refused() -> None:
    """Fails when: an adapter of nothing is made."""
    with pytest.raises(Refusal, match="no linear layer"):
        tk.add_adapter(torch.nn.Sequential(torch.nn.Conv1d(3, 3, 1)), Config())


def test_four_bits_are_refused_where_they_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the model is loaded in full precision without a word."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = on_directory(base_directory(tmp_path), load_in_4bit=True)
    with pytest.raises(Refusal, match="pip install bitsandbytes"):
        tk.load_model(CAUSAL, config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("toolkit.models.load._device", lambda config: "mps")
    with pytest.raises(Refusal, match=r"--load-in-4bit: .*CUDA.*MPS"):
        tk.load_model(CAUSAL, config)


def test_weights_in_4_bits_take_a_gradient_through_them_after_an_evaluation_too(tmp_path: Path) -> None:
    """The gradient of the adapter is that on the weights which the 4 bits mean.

    Fails when: keep_gradients does nothing, on a CPU with AVX-512 for bfloat16: bitsandbytes 0.50 has changed the layout by then.
    """
    config = on_directory(base_directory(tmp_path), load_in_4bit=True, seed=4)
    model = load(config)
    frozen = {name: parameter for name, parameter in model.named_parameters() if parameter.dtype == torch.uint8}
    assert len(frozen) == 2 * 7
    logits(model)

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.randn_like(parameter)
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    found = gradients(model)
    plain = tk.add_adapter(tk.load_model(CAUSAL, config).dequantize(torch.float32), dataclasses.replace(config, load_in_4bit=False))
    expected = gradients(plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


@pytest.mark.parametrize("nested", [False, True])
def test_weights_in_4_bits_without_weights_have_the_sizes_of_real_ones(tmp_path: Path, nested: bool) -> None:
    """Parameters, and what lies next to those in 4 bits. Fails when: a byte holds one number, or the head is packed too."""
    config = on_directory(base_directory(tmp_path), load_in_4bit=True, bnb_4bit_use_double_quant=nested)
    real = tk.load_model(CAUSAL, config)
    with without_weights():
        planned = tk.load_model(CAUSAL, config)
    sizes = [{name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (planned, real)]
    assert sizes[0] == sizes[1]
    for name, layer in real.named_modules():
        if state := getattr(getattr(layer, "weight", None), "quant_state", None):
            statistics = [state.absmax, state.state2.absmax] if nested else [state.absmax]
            found = dict(planned.get_submodule(name).named_buffers())
            assert [(b.shape, b.dtype) for b in found.values()] == [(each.shape, each.dtype) for each in statistics]
            assert planned.get_submodule(name).weight.quant_state.shape == state.shape


# ------------------------------------------------------------------------------------------------------- what is written, and read


@pytest.mark.parametrize(
    "settings",
    [
        *({"init_lora_weights": each} for each in INITIALIZATIONS), {"use_dora": True}, {"use_rslora": True},
        {"init_lora_weights": "pissa", "use_dora": True},
        {"init_lora_weights": "pissa", "use_rslora": True, "lora_rank_pattern": ["q_proj=2"], "lora_alpha_pattern": ["v_proj=4"]},
    ],
    ids=str,
)  # fmt: skip
def test_the_directory_of_an_adapter_goes_on_the_published_base(tmp_path: Path, settings: dict[str, Any]) -> None:
    """peft reads it by itself, on the base as it is in its files, and the logits are those of the trained model.

    Fails when: an adapter of the residual is written as it is (pissa, olora), or its scale changes with its rank.
    """
    config = on_directory(base_directory(tmp_path), output_dir=str(tmp_path / "run"), **settings)
    tokenizer = tk.load_tokenizer(config)
    model = trained(load(config, tokenizer))
    tk.save_model(None, model, tokenizer, config.output_dir)
    assert {path.name for path in (tmp_path / "run/model").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not (tmp_path / "run/model/base").exists()
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert float((logits(found) - logits(model)).abs().max()) < 1e-5
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert float((logits(base) - logits(model)).abs().max()) > 1e-2


@pytest.mark.parametrize("initialization", ["true", "pissa"])
def test_a_base_that_was_made_here_is_written_beside_its_adapter(tmp_path: Path, initialization: str) -> None:
    """Both from files alone; the base is bit for bit the one of the seed, but for the rounding of a residual.

    Fails when: the trained embedding is written into the base, or what PiSSA took out is not put back.
    """
    config = Config(output_dir=str(tmp_path / "run"), init_lora_weights=initialization)
    tokenizer = tk.train_tokenizer(["one two three four"] * 9, 300)
    model = trained(load(config, tokenizer))
    tk.save_model(None, model, tokenizer, config.output_dir)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model/base")
    fresh = tk.load_model(CAUSAL, config, tokenizer)
    ids = IDS % len(tokenizer)
    assert float((logits(base, ids) - logits(fresh, ids)).abs().max()) <= (0.0 if initialization == "true" else 1e-5)
    found = PeftModel.from_pretrained(base, tmp_path / "run/model")
    assert float((logits(found, ids) - logits(model, ids)).abs().max()) < 1e-5


def test_the_same_adapter_is_written_as_the_same_file(tmp_path: Path) -> None:
    """Fails when: names that peft keeps in a set are written in the order of the process."""
    config = Config(output_dir=str(tmp_path / "run"))
    tokenizer = tk.train_tokenizer(["one two three four"] * 9, 300)
    tk.save_model(None, load(config, tokenizer), tokenizer, config.output_dir)
    settings = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert len(settings["target_modules"]) >= 7
    assert settings["target_modules"] == sorted(settings["target_modules"])


@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_survive(tmp_path: Path, tied: bool) -> None:
    """An embedding that was enlarged is trained and written with its head, tied as it was.

    Fails when: it is frozen (and so not written), or the head of a tied one stays behind.
    """
    base = base_directory(tmp_path)
    if not tied:
        settings = transformers.AutoConfig.from_pretrained(base)
        settings.tie_word_embeddings = False
        transformers.LlamaForCausalLM(settings).save_pretrained(base)
    config = on_directory(base, output_dir=str(tmp_path / "run"))
    tokenizer = tk.load_tokenizer(config)
    tokenizer.add_tokens([f"<new{i}>" for i in range(303 - len(tokenizer))])
    model = load(config, tokenizer)
    assert model.get_input_embeddings().num_embeddings == 303
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    before = model.get_input_embeddings().weight.detach().clone()
    trained(model)
    assert not torch.equal(before, model.get_input_embeddings().weight)
    tk.save_model(None, model, tokenizer, config.output_dir)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/model")
    ids = torch.cat([IDS, torch.full((2, 1), 302)], dim=1)
    assert float((logits(found, ids) - logits(model, ids)).abs().max()) < 1e-5


def test_an_adapter_is_trained_further(tmp_path: Path) -> None:
    """`--model` names its directory: the same logits, and its own A and B learn. A recipe without adapters says what to type.

    Fails when: the adapter is loaded for inference, or a fresh one is put in its place.
    """
    config = on_directory(base_directory(tmp_path), output_dir=str(tmp_path / "run"), init_lora_weights="pissa")
    tokenizer = tk.load_tokenizer(config)
    model = trained(load(config, tokenizer))
    tk.save_model(None, model, tokenizer, config.output_dir)
    again = on_directory(tmp_path / "run/model", output_dir=str(tmp_path / "again"))
    further = load(again, tk.load_tokenizer(again))
    expected = logits(model)
    assert float((logits(further) - expected).abs().max()) < 1e-5
    assert {name.split(".lora_")[1][0] for name, p in further.named_parameters() if p.requires_grad} == {"A", "B"}
    tk.save_model(None, trained(further), tokenizer, again.output_dir)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "again/model")
    assert float((logits(found) - logits(further)).abs().max()) < 1e-5
    assert float((logits(found) - expected).abs().max()) > 1e-2
    with pytest.raises(Refusal, match=re.escape(f"toolkit merge {tmp_path / 'run/model'} --into DIR")):
        tk.load_model(CAUSAL, dataclasses.replace(again, use_peft=False))


def test_a_base_that_is_gone_is_told(tmp_path: Path) -> None:
    """Fails when: transformers is left to look for the path on the Hub."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "nowhere")}))
    with pytest.raises(Refusal, match=r"nowhere, which is gone"):
        load(on_directory(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(Refusal, match="is empty"):
        load(on_directory(tmp_path))


def test_only_what_was_trained_is_written(tmp_path: Path) -> None:
    """Fails when: frozen weights get into the file."""
    config = on_directory(base_directory(tmp_path), output_dir=str(tmp_path / "run"))
    model = load(config)
    tk.save_model(None, model, tk.load_tokenizer(config), config.output_dir)
    written = load_file(tmp_path / "run/model/adapter_model.safetensors")
    assert sum(t.numel() for t in written.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
