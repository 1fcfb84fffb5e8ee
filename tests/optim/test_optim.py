"""Optimizers and parameter groups, on a tiny Llama and a tiny BERT, against torch's own optimizers called plainly."""

import contextlib
import copy
import importlib.util
import itertools
import json
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    ElectraConfig,
    ElectraForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.optimization import Adafactor

from toolkit.config import OptimConfig, Refusal
from toolkit.optim import muon
from toolkit.optim.muon import muon_step, orthogonalized
from toolkit.optim.optimizers import build_optimizer
from toolkit.optim.parameter_groups import parameter_groups
from toolkit.training.memory import _fits


def tiny_llama(tied: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, tie_word_embeddings=tied, attention_bias=True,
    )
    return LlamaForCausalLM(config)


def tiny_bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, num_labels=3,
    )
    return BertForSequenceClassification(config)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    """The same gradients for any copy of the model: a pure function of the parameter's name and the step."""
    for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(2)) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        model.zero_grad(set_to_none=True)


def split_by_decay(model: torch.nn.Module) -> tuple[list, list]:
    """By the words of the setting's help: all but norms and biases decays. Spelled out for the two tiny models."""
    decay, rest = [], []
    for name, parameter in sorted(model.named_parameters()):
        (rest if "norm" in name.lower() or name.endswith("bias") else decay).append(parameter)
    return decay, rest


def plain_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    decay, rest = split_by_decay(model)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


RATE, DECAY = 0.01, 0.1
ADAM = {"lr": RATE, "betas": (0.8, 0.95), "eps": 1e-6}
ADAM_SETTINGS = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
REFERENCES = {
    "adamw_torch": (ADAM_SETTINGS, lambda groups: torch.optim.AdamW(groups, fused=True, **ADAM)),
    "adamw_torch_fused": (ADAM_SETTINGS, lambda groups: torch.optim.AdamW(groups, fused=True, **ADAM)),
    "sgd": ({"momentum": 0.7}, lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.7)),
    "adafactor": ({}, lambda groups: Adafactor(groups, lr=RATE, scale_parameter=False, relative_step=False)),
    "nadam": (ADAM_SETTINGS, lambda groups: torch.optim.NAdam(groups, decoupled_weight_decay=True, **ADAM)),
    "radam": (ADAM_SETTINGS, lambda groups: torch.optim.RAdam(groups, decoupled_weight_decay=True, **ADAM)),
    "rmsprop": ({"momentum": 0.7}, lambda groups: torch.optim.RMSprop(groups, lr=RATE, momentum=0.7)),
    "adagrad": ({}, lambda groups: torch.optim.Adagrad(groups, lr=RATE)),
}
ON_EVERY_MACHINE = [*REFERENCES, "muon"]


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_bert])
@pytest.mark.parametrize("optim", REFERENCES)
def test_two_steps_are_those_of_torchs_optimizer_called_plainly(optim, make_model):
    """Fails when: any of betas, eps, momentum or the decay of a group does not reach the optimizer."""
    settings, reference = REFERENCES[optim]
    model, plain_model = make_model(), make_model()
    config = OptimConfig(optim=optim, learning_rate=RATE, weight_decay=DECAY, **settings)
    optimizer, _ = build_optimizer(model, config, 10)
    train_steps(model, optimizer)
    train_steps(plain_model, reference(plain_groups(plain_model, DECAY)))
    for (name, ours), theirs in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_adamw_is_the_published_formula():
    """Fails when: the decay is added to the gradient (coupled). Algorithm 2 of https://arxiv.org/abs/1711.05101, in float64."""
    model = tiny_llama().double()
    config = OptimConfig(learning_rate=RATE, weight_decay=DECAY, **ADAM_SETTINGS)
    decaying = {id(parameter) for parameter in split_by_decay(model)[0]}
    expected, first, second = {}, {}, {}
    for name, parameter in model.named_parameters():
        expected[name] = parameter.detach().clone()
        first[name], second[name] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    optimizer, _ = build_optimizer(model, config, 10)
    for step in range(3):
        give_gradients(model, step)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            corrected = second[name] / (1 - 0.95 ** (step + 1))
            update = first[name] / (1 - 0.8 ** (step + 1)) / (corrected.sqrt() + 1e-6)
            decay = DECAY if id(parameter) in decaying else 0.0
            expected[name] = expected[name] - RATE * decay * expected[name] - RATE * update
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("make_model", "matrices"), [(tiny_llama, 2 * 7), (tiny_bert, 2 * 6)])
def test_muon_is_torchs_muon_on_layer_matrices_and_torchs_adamw_on_the_rest(make_model, matrices):
    """Fails when: embeddings, pooler or classifier fall to Muon, or adjust_lr_fn is left out."""
    model, plain_model = make_model(), make_model()
    config = OptimConfig(optim="muon", learning_rate=RATE, weight_decay=DECAY, momentum=0.9, **ADAM_SETTINGS)
    optimizer, _ = build_optimizer(model, config, 10)
    train_steps(model, optimizer, range(3))

    hidden = [p for n, p in plain_model.named_parameters() if p.ndim == 2 and (".layers." in n or ".layer." in n)]
    assert len(hidden) == matrices
    muon = torch.optim.Muon(hidden, lr=RATE, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    taken = {id(parameter) for parameter in hidden}
    groups = [
        group | {"params": [parameter for parameter in group["params"] if id(parameter) not in taken]}
        for group in plain_groups(plain_model, DECAY)
    ]
    adamw = torch.optim.AdamW(groups, fused=True, **ADAM)
    for step in range(3):
        give_gradients(plain_model, step)
        muon.step()
        adamw.step()
    start = dict(make_model().named_parameters())
    for (name, ours), theirs in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        if id(theirs) in taken:  # torch's Muon rounds to bfloat16 inside
            assert (ours - theirs).norm() < 0.05 * (theirs - start[name]).norm(), name
        else:
            assert torch.equal(ours, theirs), name


def test_groups_of_muon_have_the_keys_that_earlier_checkpoints_hold():
    """A resume compares them. Fails when: a key of torch.optim.Muon's groups, or one of ours, is left out of MuonWithAdamW's."""
    optimizer, _ = build_optimizer(tiny_llama(), OptimConfig(optim="muon"), 1)
    keys = {group["rule"]: set(group) for group in optimizer.param_groups}
    (plain,) = torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="match_rms_adamw").param_groups
    assert keys["muon"] >= set(plain)
    assert keys["muon"] - set(plain) == set(keys["adamw"]) - set(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).param_groups[0])


@pytest.mark.parametrize("at_once", [1, 2, 3, 4], ids="{} matrices".format)
@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (64, 64), (96, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon_in_groups_gives_the_bits_of_all_matrices_at_once(at_once, shape, dtype, monkeypatch):
    """Three steps. Fails when: a group's matrices meet another group's updates, or the last, smaller group is left out."""

    def matrices():
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(*shape, generator=generator).to(dtype) for _ in range(7)]
        return [torch.nn.Parameter(matrix) for matrix in made]

    def stepped():
        parameters, state = matrices(), defaultdict(dict)
        for step in range(3):
            for number, parameter in enumerate(parameters):
                noise = torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + number))
                parameter.grad = noise.to(dtype)
            with torch.no_grad():
                muon_step(parameters, state, RATE, 0.95, DECAY)
        return parameters

    whole = stepped()
    monkeypatch.setattr(muon, "AT_ONCE", at_once * shape[0] * shape[1])
    assert all(torch.equal(*pair) for pair in zip(stepped(), whole, strict=True))


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (128, 128)])
def test_memory_of_muons_step_is_bounded_and_no_more_than_is_reserved(shape, monkeypatch):
    """The highest sum of what torch's allocator gave out, against the formula: at most that, and at least half of it.

    Fails when: all matrices of a shape are stacked at once, or the iteration keeps a product too many.
    """
    parameters, state = [torch.nn.Parameter(torch.randn(*shape)) for _ in range(12)], defaultdict(dict)
    for parameter in parameters:
        parameter.grad = torch.randn(*shape)
    monkeypatch.setattr(muon, "AT_ONCE", 4 * shape[0] * shape[1])
    with torch.no_grad():
        muon_step(parameters, state, RATE, 0.95, DECAY)  # makes the momentum, which stays
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            muon_step(parameters, state, RATE, 0.95, DECAY)
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    highest, reserved = max(itertools.accumulate(changes)), muon.workspace(parameters)
    assert reserved / 2 < highest <= reserved
    monkeypatch.undo()
    assert muon.workspace(parameters) == 3 * reserved  # all twelve at once


@pytest.mark.parametrize("optim", ["muon", "adamw_torch"])
def test_the_trial_of_a_micro_batch_reserves_what_the_optimizer_will_need(optim, monkeypatch):
    """Muon has one moment of a matrix, Adam two of everything, and Muon's step a workspace once the activations are gone.

    Fails when: Muon's matrices get two moments, the workspace is left out, or it is asked for while the loss is alive.
    """
    model, asked = tiny_llama(), []
    optimizer, _ = build_optimizer(model, OptimConfig(optim=optim), 10)
    hidden = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n) if optim == "muon" else 0
    train = SimpleNamespace(longest_micro_batch=lambda: {"input_ids": torch.ones(1, 5, dtype=torch.long)})
    alive = []

    def loss_fn(plain, micro_batch, totals):
        loss = plain(**micro_batch).logits.square().sum()
        alive.append(weakref.ref(loss))
        return loss, {}

    def reserve(matrices):
        asked.append((sum(matrix.numel() for matrix in matrices), alive[-1]() is not None))
        return 1 << 60 if len(asked) > 1 else 0

    reserved, empty_like = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda p: reserved.append(p.numel()) or empty_like(p))
    monkeypatch.setattr("toolkit.training.memory.workspace", reserve)
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
    fits = [_fits(accelerator, model, optimizer, train, loss_fn, {}) for _ in range(2)]
    assert fits == [True, False]
    assert asked == [(hidden, False)] * 2
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert sum(reserved) == 2 * (2 * everything - hidden)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 6, 6)])
def test_orthogonalized_is_the_newton_schulz_iteration_of_each_matrix(shape):
    """Reference: a plain loop in float64 for one matrix at a time. Fails when: matrices of a stack share their norm."""
    matrices = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrices[0] *= 100
    for matrix, ours in zip(matrices, orthogonalized(matrices), strict=True):
        x = matrix / matrix.norm()
        x = x.T if shape[1] > shape[2] else x
        for _ in range(5):
            x = 3.4445 * x - 4.775 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        torch.testing.assert_close(ours, x.T if shape[1] > shape[2] else x, rtol=1e-12, atol=1e-12)
        singular = torch.linalg.svdvals(ours)
        assert singular.max() < 1.3
        assert singular.median() > 0.6


@pytest.mark.parametrize(("units", "precision", "dtype", "error"), [
    (True, "bf16", torch.float32, 2e-2), (True, "bf16", torch.bfloat16, 2e-2), (False, "bf16", torch.float32, 1e-5),
    (True, "no", torch.float32, 1e-5), (True, None, torch.float32, 1e-5), (True, "bf16", torch.float64, 1e-12),
])  # fmt: skip
def test_a_run_in_bfloat16_orthogonalizes_in_it_where_there_are_units(units, precision, dtype, error, monkeypatch):
    """But for float64. The error is relative, of the whole matrix.

    Fails when: the device isn't asked, --no-bf16 doesn't reach it, or float64 is rounded.
    """
    monkeypatch.setattr("toolkit.system.devices.multiplies_bf16", lambda _: units)
    monkeypatch.setattr("toolkit.optim.muon.settled_precision", lambda: precision)
    matrices = torch.randn(3, 48, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, ours = orthogonalized(matrices.double()), orthogonalized(matrices)
    in_half = error == 2e-2
    assert ours.dtype == (torch.bfloat16 if in_half else dtype)
    assert (ours - exact).norm() <= error * exact.norm()
    if in_half:
        assert (ours - exact).norm() > 1e-4 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", ON_EVERY_MACHINE)
def test_state_saved_and_loaded_continues_bit_for_bit(optim, dtype, tmp_path):
    """Fails when: MuonWithAdamW keeps its own optimizers' state, or without _loading_saved_types (NAdam, Adafactor; bfloat16)."""
    from safetensors.torch import load_file, save_file

    config = OptimConfig(optim=optim, learning_rate=RATE, weight_decay=DECAY)
    model = tiny_llama().to(dtype)
    optimizer, _ = build_optimizer(model, config, 10)
    train_steps(model, optimizer)
    state = optimizer.state_dict()

    # Through a file of plain tensors and a JSON text, as a checkpoint without pickle stores it.
    values = {f"{i}/{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    tensors = {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, tmp_path / "optimizer.safetensors")
    groups = json.loads(json.dumps(state["param_groups"]))
    stored: dict = {"state": {}, "param_groups": groups}
    numbers = json.loads(json.dumps({path: value for path, value in values.items() if path not in tensors}))
    assert {path.split("/")[1] for path in numbers} <= {"step"}  # transformers' Adafactor counts with an integer
    for path, value in [*load_file(tmp_path / "optimizer.safetensors").items(), *numbers.items()]:
        index, key = path.split("/")
        stored["state"].setdefault(int(index), {})[key] = value

    resumed_model = copy.deepcopy(model)
    resumed, _ = build_optimizer(resumed_model, config, 10)
    resumed.load_state_dict(stored)
    assert [group["param_names"] for group in resumed.param_groups] == [g["param_names"] for g in optimizer.param_groups]
    train_steps(model, optimizer, range(2, 5))
    train_steps(resumed_model, resumed, range(2, 5))
    for (name, ours), theirs in zip(model.named_parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    state, resumed_state = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert state.keys() == resumed_state.keys()
    for index, before in state.items():
        after = resumed_state[index]
        assert before.keys() == after.keys()
        for key, value in before.items():
            is_tensor = isinstance(value, torch.Tensor)
            assert torch.equal(value, after[key]) and value.dtype == after[key].dtype if is_tensor else value == after[key]


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_prepared_optimizer_takes_the_rates_written_into_its_groups(optim):
    """Fails when: MuonWithAdamW steps groups other than the ones it shows: the rate 0 would not hold the weights still."""
    from accelerate import Accelerator

    model = tiny_llama()
    config = OptimConfig(optim=optim, learning_rate=RATE, warmup_steps=4, layer_lr_decay=0.5)
    optimizer, schedule = build_optimizer(model, config, 10)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    for group, rate in zip(optimizer.param_groups, schedule(0.0), strict=True):
        group["lr"] = rate
    train_steps(model, optimizer, range(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for group, rate in zip(optimizer.param_groups, schedule(0.4), strict=True):
        group["lr"] = rate
    assert max(group["lr"] for group in optimizer.param_groups) == RATE
    train_steps(model, optimizer, range(1, 2))
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("optim", "momentum"), [("sgd", 0.0), ("rmsprop", 0.0), ("muon", 0.95)])
def test_momentum_that_nobody_gave_is_trainers_zero_and_muons_own(optim, momentum):
    """Fails when: one default serves all: sgd with .95 takes steps 20 times those of the same YAML in Trainer."""
    optimizer, _ = build_optimizer(tiny_llama(), OptimConfig(optim=optim), 10)
    assert {group["momentum"] for group in optimizer.param_groups if "momentum" in group} == {momentum}


def names_in(groups: list[dict], **wanted: float) -> set[str]:
    return {name for group in groups for name, _ in group["params"] if all(group[k] == v for k, v in wanted.items())}


def test_decay_reaches_matrices_and_embeddings_and_spares_norms_and_biases():
    """Fails when: _is_norm or the test on dimensions is dropped."""
    groups = parameter_groups(tiny_llama(), OptimConfig(weight_decay=0.1))
    assert {group["name"]: group["weight_decay"] for group in groups} == {"decay": 0.1, "no decay": 0.0}
    spared = names_in(groups, weight_decay=0.0)
    assert {name.rsplit(".", 2)[-2] for name in spared} == {
        "norm", "input_layernorm", "post_attention_layernorm", "q_proj", "k_proj", "v_proj", "o_proj",
    }
    assert all(name.endswith("bias") or "norm" in name for name in spared)
    assert "model.embed_tokens.weight" in names_in(groups, weight_decay=0.1)

    groups = parameter_groups(tiny_bert(), OptimConfig(weight_decay=0.1))
    assert names_in(groups, weight_decay=0.1) == {
        name for name, parameter in tiny_bert().named_parameters() if parameter.ndim == 2
    }


def test_matrix_inside_a_norm_does_not_decay():
    """Fails when: the module's type is not asked: its shape alone looks like a weight matrix."""
    model = torch.nn.ModuleDict({"scale": torch.nn.LayerNorm([4, 4]), "out": torch.nn.Linear(4, 4, bias=False)})
    groups = parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert names_in(groups, weight_decay=0.1) == {"out.weight"}


def test_table_of_biases_does_not_decay():
    """Fails when: only the end of a name says that it is a bias. The reference is Trainer's own choice of names."""
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
    model = T5ForConditionalGeneration(T5Config(**shape))
    groups = parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert names_in(groups, weight_decay=0.1) == {
        name for name in Trainer.get_decay_parameter_names(None, model) if name in dict(model.named_parameters())
    }
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in names_in(groups, weight_decay=0.0)


def test_muon_is_given_weights_alone_and_no_tables_of_other_numbers():
    """Fails when: two dimensions are enough for a matrix: XLNet's biases of heads and Mamba's log decay rates have them too."""
    xlnet = XLNetLMHeadModel(XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=32, vocab_size=50))
    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4))
    for model, weights in (
        (xlnet, {"ff.layer_1.weight", "ff.layer_2.weight"}),
        (mamba, {f"mixer.{name}_proj.weight" for name in ("in", "x", "dt", "out")}),
    ):
        groups = parameter_groups(model, OptimConfig(optim="muon", weight_decay=0.1))
        names = {name for group in groups if group["rule"] == "muon" for name, _ in group["params"]}
        assert {name.partition(".0.")[2] for name in names if ".0." in name} == weights
        assert not [name for name in names if "bias" in name or "A_log" in name]


def test_every_trainable_parameter_is_in_one_group_once_in_the_order_of_names():
    """Fails when: frozen parameters are kept, or the sort is dropped."""
    for tied in (True, False):
        model = tiny_llama(tied)
        model.model.layers[0].requires_grad_(False)
        groups = parameter_groups(model, OptimConfig(optim="muon", layer_lr_decay=0.9))
        names = [name for group in groups for name, _ in group["params"]]
        expected = {name for name, _ in model.named_parameters() if ".layers.0." not in name}
        assert sorted(names) == sorted(expected)
        assert ("lm_head.weight" in expected) is (not tied)
        for group in groups:
            members = [name for name, _ in group["params"]]
            assert members == sorted(members)
        assert [g["params"][0][0] for g in groups] == sorted(g["params"][0][0] for g in groups)


def test_layer_decay_is_one_at_the_head_and_falls_to_the_embeddings():
    """Fails when: the layers are counted from the bottom."""
    for model, head, embeddings, layer in (
        (tiny_llama(tied=False), "lm_head.weight", "model.embed_tokens.weight", "model.layers.{}.mlp.up_proj.weight"),
        (
            tiny_bert(), "classifier.weight", "bert.embeddings.LayerNorm.weight",
            "bert.encoder.layer.{}.attention.self.query.weight",
        ),
    ):
        groups = parameter_groups(model, OptimConfig(learning_rate=1.0, layer_lr_decay=0.5))
        rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
        assert rates[head] == 1.0
        assert [rates[layer.format(number)] for number in (1, 0)] == [0.5, 0.25]
        assert rates[embeddings] == 0.125
    assert "decay, rate x 0.125" in {group["name"] for group in groups}


def test_what_belongs_to_the_embeddings_has_their_depth():
    """Fails when: only a module called embeddings counts. ELECTRA's own code has its projection at depth 0 too."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50, "hidden_size": 16}
    electra = ElectraForSequenceClassification(ElectraConfig(**shape, intermediate_size=32, embedding_size=8))
    bloom = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=50))
    for model, name in (
        (electra, "electra.embeddings_project.weight"), (bloom, "transformer.word_embeddings_layernorm.weight"),
    ):
        groups = parameter_groups(model, OptimConfig(learning_rate=1.0, layer_lr_decay=0.5))
        rates = {name: group["lr"] for group in groups for name, _ in group["params"]}
        assert rates[name] == 0.125


def test_first_pattern_found_in_a_name_sets_its_rate():
    """Fails when: a later pattern overwrites an earlier one."""
    config = OptimConfig(learning_rate=1.0, lr_patterns=[r"layers\.0\..*q_proj=0.5", "q_proj=3", "norm=1e-1"])
    rates = {n: g["lr"] for g in parameter_groups(tiny_llama(), config) for n, _ in g["params"]}
    assert rates["model.layers.0.self_attn.q_proj.weight"] == 0.5
    assert rates["model.layers.1.self_attn.q_proj.weight"] == 3.0
    assert rates["model.norm.weight"] == pytest.approx(0.1)
    assert rates["model.layers.0.mlp.up_proj.weight"] == 1.0


def test_schedule_scales_each_group_by_its_own_rate():
    """Fails when: all groups get the rate of the first."""
    optimizer, schedule = build_optimizer(tiny_llama(), OptimConfig(learning_rate=1.0, lr_patterns=["norm=0.5"]), 10)
    assert sorted({rate / 0.5 for rate in schedule(0.5)}) == pytest.approx([0.5, 1.0])
    assert [group["lr"] for group in optimizer.param_groups] == schedule(0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_patterns": ["(=2"]}, "expected regex=factor"),
        ({"lr_patterns": ["q_proj"]}, "expected regex=factor"),
        ({"lr_patterns": ["q_proj=-1"]}, "factor of 0 or more"),
        ({"lr_patterns": ["qproj=2"]}, "matches no trainable parameter"),
        ({"lr_patterns": ["q_proj=2", "layers.0.self_attn.q_proj=3"]}, "earlier patterns match all"),
    ],
)
def test_setting_that_cannot_mean_what_was_meant_is_refused(settings, words):
    """Fails when: a pattern that matches nothing is let through."""
    with pytest.raises(Refusal, match=words):
        build_optimizer(tiny_llama(), OptimConfig(**settings), 10)


def test_model_that_cannot_be_trained_as_asked_is_refused():
    """Fails when: a model without a trainable parameter is let through."""
    with pytest.raises(Refusal, match="no trainable parameter"):
        build_optimizer(tiny_llama().requires_grad_(False), OptimConfig(), 10)
    flat = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(Refusal, match=r"--optim muon .* adamw_torch"):
        build_optimizer(flat, OptimConfig(optim="muon"), 10)
    with pytest.raises(Refusal, match=r"--layer-lr-decay 0.5 needs layers"):
        build_optimizer(flat, OptimConfig(layer_lr_decay=0.5), 10)
    with pytest.raises(Refusal, match="no fused AdamW for meta"):
        build_optimizer(flat.to("meta"), OptimConfig(optim="adamw_torch_fused"), 10)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_32bit", "lion_8bit"])
def test_bitsandbytes_optimizer_trains_or_says_what_is_missing(optim):
    """Fails when: a machine without CUDA is let through."""
    config = OptimConfig(optim=optim, learning_rate=RATE, weight_decay=DECAY)
    if importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        with pytest.raises(Refusal, match=rf"--optim {optim} needs .* Use --optim adamw_torch"):
            build_optimizer(tiny_llama(), config, 10)
        return
    import bitsandbytes

    model, plain_model = tiny_llama().cuda(), tiny_llama().cuda()
    optimizer, _ = build_optimizer(model, config, 10)
    bits = 32 if optim.endswith("32bit") else 8
    rule = bitsandbytes.optim.Lion if optim.startswith("lion") else bitsandbytes.optim.AdamW
    reference = rule(plain_groups(plain_model, DECAY), lr=RATE, betas=(0.9, 0.999), optim_bits=bits)
    for step in range(2):
        for trained in (model, plain_model):
            for index, (_, parameter) in enumerate(sorted(trained.named_parameters())):
                generator = torch.Generator().manual_seed(1000 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator).cuda()
        optimizer.step()
        reference.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
