"""Preference pairs in one row with a shared prompt, in one row without, and padded: one log-probability, one gradient."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.loading.collate_pairs import collate_pairs
from toolkit.losses import chunked
from toolkit.losses.answer_logps import answer_token_logps, pair_logps
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.models.attention.kernels import Rules, flex_kernel, loop_kernel, varlen_kernel
from toolkit.preference.pair_layouts import choose_answer_layout, choose_pair_layout

VOCABULARY = 97
SIZES = [(5, 7, 3), (1, 1, 9), (12, 4, 4), (3, 10, 1)]  # tokens of prompt, chosen and rejected; some beyond the windows below
_BODY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_BODY, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_BODY, head_dim=8),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**_BODY, **_WINDOWS),
    "gemma2": lambda: transformers.Gemma2Config(**_BODY, **_WINDOWS, attn_logit_softcapping=1.0),
    "mistral": lambda: transformers.MistralConfig(**_BODY, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, config: Any = None) -> Any:
    register_attention()
    config = config or CONFIGS[name]()
    config.initializer_range = 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=DOCUMENTS, dtype=torch.float32)
    return (_without_rounding(model.to(dtype)) if dtype == torch.float64 else model).train()


def _without_rounding(model: Any) -> Any:
    """transformers' norms round to float32 inside: in their place the formula in the type of its input."""

    def norm(module: Any, plus_one: bool, hidden: torch.Tensor) -> torch.Tensor:
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        scaled = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon)
        return scaled * (module.weight + 1 if plus_one else module.weight)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module, "Gemma" in type(module).__name__)
    return model


def pairs(sizes: list[tuple[int, int, int]] = SIZES) -> list[dict[str, Any]]:
    random_numbers = np.random.default_rng(0)
    return [
        {"input_ids": random_numbers.integers(3, VOCABULARY, p + c + r), "prompt_tokens": p, "chosen_tokens": c, "rejected_tokens": r, "pair": i}
        for i, (p, c, r) in enumerate(sizes)
    ]


def plain_logps(model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The definition: each answer behind its own prompt, alone in a forward pass, with all logits. Chosen ones first."""
    found = {}
    for row in rows:
        ids, prompt, chosen = torch.as_tensor(row["input_ids"]), row["prompt_tokens"], row["chosen_tokens"]
        for side, answer in ((0, ids[prompt : prompt + chosen]), (1, ids[prompt + chosen :])):
            logits = model(input_ids=torch.cat([ids[:prompt], answer])[None], use_cache=False).logits[0]
            found[side, row["pair"]] = logits.log_softmax(-1)[prompt - 1 : -1].gather(1, answer[:, None]).sum()
    return torch.stack([found[key] for key in sorted(found)])


def values_and_gradient(model: Any, logps: Any) -> list[torch.Tensor]:
    """Log-probabilities, and the gradient of a function of them that treats each answer otherwise."""
    model.zero_grad()
    found = logps()
    weights = torch.linspace(-1, 2, len(found), dtype=found.dtype)
    (torch.sin(found) * weights + 0.01 * found.square()).sum().backward()
    return [found.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def in_layout(model: Any, layout: str, rows: list[dict[str, Any]] | None = None) -> list[torch.Tensor]:
    batch = collate_pairs(rows or pairs(), layout=layout)
    return values_and_gradient(model, lambda: torch.cat(pair_logps(model, batch)[:2]))


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_every_layout_has_the_logps_and_the_gradient_of_each_answer_alone(layout: str, name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Sliding windows, soft-capping, grouped heads and learned positions included.

    Fails when: the rejected answer's positions continue after the chosen one; its keys have the chosen answer among them; a window
    is counted in places of the row; the first token of a rejected answer is predicted by the chosen answer's last.
    """
    model = build(name, dtype)
    plain = values_and_gradient(model, lambda: plain_logps(model, pairs()))
    assert error(in_layout(model, layout), plain) < tolerance


def test_recomputed_layers_and_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a chunk's gradient goes to the first chunk's rows; recomputed layers lose the shared keys."""
    model = build("llama", torch.float64)
    plain = in_layout(model, "shared")
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda vocabulary, device: 7)
    assert error(in_layout(model, "shared"), plain) < 1e-12
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert error(in_layout(model, "shared"), plain) < 1e-12


def test_an_adapter_trains_on_shared_prompts_as_on_padded_rows() -> None:
    """Fails when: peft's forward drops the bounds."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("qwen3", torch.float64), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model = model.double()
    assert error(in_layout(model, "shared"), in_layout(model, "padded")) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_compiled_layers_give_a_pair_its_loss_and_its_gradient(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the settings, on two micro-batches of other shapes. Captured and differentiated by torch.compile, run without inductor,
    whose C++ would take a minute.

    Fails when: the layers are not compiled (what dynamo captured is counted), or a graph keeps the first micro-batch's bounds.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 260,
             "torch_compile_backend": "aot_eager"}  # fmt: skip
    tokens: Any = type("Tokens", (), {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "__len__": lambda self: 260})()
    plain, compiled = (
        tk.load_model("AutoModelForCausalLM", tk.ModelConfig(**shape, torch_compile=compiles), tokens, packed=None) for compiles in (False, True)
    )
    reference = torch.linspace(-9, 3, 8)
    for rows in (pairs(), pairs([(4, 6, 2), (9, 1, 3)])):
        found = []
        for model in (plain, compiled):
            model.zero_grad()
            batch = collate_pairs(rows, layout=layout)
            logps = pair_logps(model, batch)
            before = logps._replace(chosen=reference[: len(rows)], rejected=reference[4 : 4 + len(rows)])
            loss, _ = tk.preference_loss(logps, before, {"pairs": float(len(rows))})
            loss.backward()
            found.append([loss.detach()[None], torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])])
        assert error(found[1], found[0]) < 1e-5
    assert counters["stats"]["unique_graphs"] > 0


def test_the_head_sees_answer_positions_only() -> None:
    """Fails when: logits of the whole row are made."""
    model, rows = build("llama"), []
    original = model.lm_head.forward
    pair_logps(model, collate_pairs(pairs(), layout="shared"))  # what is found out once about a model
    model.lm_head.forward = lambda hidden: rows.append(hidden.shape[0]) or original(hidden)
    pair_logps(model, collate_pairs(pairs(), layout="shared"))
    assert rows == [sum(chosen + rejected for _, chosen, rejected in SIZES)]


def test_token_logps_lie_where_their_answer_is() -> None:
    """Fails when: slots are counted in the row, not in the answer."""
    model = build("llama")
    table = answer_token_logps(model, collate_pairs(pairs(), layout="shared"))
    lengths = [chosen for _, chosen, _ in SIZES] + [rejected for *_, rejected in SIZES]
    assert table.shape == (8, 10)
    assert [(row != 0).sum().item() for row in table] == lengths
    assert all((row[length:] == 0).all() for row, length in zip(table, lengths, strict=True))


RULES = [Rules(True, window, None, softcap, 0.0, longest=24) for window in (None, 5) for softcap in (None, 2.0)]
OWN, SEEN = [12, 3, 2, 9, 300], [12, 8, 10, 9, 310]  # queries and keys of each document


def kernel_inputs(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, sum(lengths), 16, generator=generator, dtype=torch.float64).to(device, dtype)
        for heads, lengths in ((4, OWN), (2, SEEN), (2, SEEN))
    ]
    own, seen = (torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device) for lengths in (OWN, SEEN))
    return states, own, seen


def plain_attention(states: list[torch.Tensor], rules: Rules) -> torch.Tensor:
    """One document and one head at a time: the queries are the last of the keys' places."""
    outputs = []
    for q, k, v in zip(states[0][0].split(OWN, 1), states[1][0].split(SEEN, 1), states[2][0].split(SEEN, 1), strict=True):
        behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        hidden = (behind < 0) | (behind >= (rules.window or 10**9))
        heads = []
        for head in range(4):
            scores = q[head] @ k[head // 2].T / 4
            scores = scores if rules.softcap is None else torch.tanh(scores / rules.softcap) * rules.softcap
            heads.append(scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1) @ v[head // 2])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("kernel", [loop_kernel, flex_kernel])
def test_a_kernel_aligns_queries_to_the_last_keys(kernel: Any, rules: Rules) -> None:
    """Fails when: a query's place is counted from the first key."""
    states, own, seen = kernel_inputs()
    found = kernel(*states, own, rules, seen)
    assert torch.allclose(found, plain_attention(states, rules), rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rules", RULES[:3:2], ids=str)
def test_the_varlen_kernel_aligns_queries_to_the_last_keys(rules: Rules) -> None:
    """Fails when (by reading it, not run): the keys get the queries' bounds (`key_bounds = bounds`)."""
    states, own, seen = kernel_inputs("cuda", torch.bfloat16)
    found = varlen_kernel(*states, own, rules._replace(longest=max(SEEN)), seen)
    expected = plain_attention([state.double() for state in states], rules)
    assert ((found.double() - expected).norm() / expected.norm()).item() < 1e-2


def chosen_layout(model: Any, capsys: pytest.CaptureFixture[str], asked: str = "auto") -> tuple[str, str]:
    layout = choose_pair_layout(model, asked)
    return layout, capsys.readouterr().out.strip()


def test_the_fastest_exact_layout_is_taken_and_another_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: dropout in an adapter, or a rotary embedding that depends on the row, is overlooked."""
    from peft import LoraConfig, get_peft_model

    assert chosen_layout(build("llama"), capsys) == ("shared", "")
    adapted = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1))
    layout, said = chosen_layout(adapted, capsys)
    assert layout == "packed"
    assert re.fullmatch(r"pairs are packed: .*dropout of 0\.1 .*", said)
    dropping = transformers.LlamaConfig(**_BODY, attention_dropout=0.2)
    assert chosen_layout(build("llama", config=dropping), capsys)[0] == "packed"
    dynamic = transformers.LlamaConfig(**_BODY, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model = transformers.AutoModelForCausalLM.from_config(dynamic)  # load_model gives it no attention for packed rows
    layout, said = chosen_layout(model, capsys)
    assert layout == "padded"
    assert "rotary frequencies" in said
    assert chosen_layout(build("llama"), capsys, "padded") == ("padded", "")


def test_dropout_that_a_model_calls_as_a_function_is_found_in_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: only modules are looked at, or the rate of a head that the model hasn't counts."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    dropping, kept = (transformers.OPTConfig(**sizes, max_position_embeddings=256, dropout=rate) for rate in (0.1, 0.0))
    layout, said = chosen_layout(build("opt", config=dropping), capsys)
    assert layout == "packed"
    assert "a dropout of 0.1" in said
    assert chosen_layout(build("opt", config=kept), capsys) == ("shared", "")
    neox = transformers.GPTNeoXConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    assert neox.classifier_dropout == 0.1
    assert "dropout" not in chosen_layout(build("neox", config=neox), capsys)[1]


def test_a_layout_that_would_not_be_exact_is_refused_when_asked_for() -> None:
    """Fails when: the setting wins over the check."""
    config = transformers.LlamaConfig(**_BODY, attention_dropout=0.2)
    with pytest.raises(Refusal, match=r"--pair-layout shared: .*dropout of 0\.2 .*--pair-layout auto"):
        choose_pair_layout(build("llama", config=config), "shared")
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="sdpa")
    with pytest.raises(Refusal, match="--pair-layout packed: attention 'sdpa'"):
        choose_pair_layout(model, "packed")


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
WINDOW_IN_THE_MASK_ALONE = {  # transformers (5.23) does not hand their window to the attention function
    "phimoe": lambda: transformers.PhimoeConfig(**_BODY, num_local_experts=4, sliding_window=6),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_BODY, **_EXPERTS, use_sliding_window=True, sliding_window=6, max_window_layers=1),
}


def saved(name: str, directory: Any) -> str:
    config = WINDOW_IN_THE_MASK_ALONE[name]()
    config.initializer_range = 0.2
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("name", WINDOW_IN_THE_MASK_ALONE)
def test_a_model_that_only_the_forward_pass_shows_unfit_for_packed_rows_trains_on_padded_ones(name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaded as the recipes of pairs and answers do. The gradient is that of each answer alone, in transformers' own attention.

    Fails when: `_attend` raises a plain Refusal; `load_model` keeps the attention for packed rows, which refuses every row without padding.
    """
    directory = saved(name, tmp_path)
    for asked in ("auto", "padded"):
        model = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model=directory), packed=None)
        assert "its rows are padded" in capsys.readouterr().out
        assert chosen_layout(model, capsys, asked)[0] == "padded"
    assert choose_answer_layout(model) == "padded"
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    assert error(in_layout(model, "padded"), values_and_gradient(plain, lambda: plain_logps(plain, pairs()))) < 1e-5


def test_what_is_asked_for_that_such_a_model_cannot_do_is_refused_with_its_reason(tmp_path: Any) -> None:
    """Fails when: the attention for packed rows that was asked for is passed over, or its refusal advises --packing."""
    with pytest.raises(Refusal, match=r"--attn-implementation varlen: .*sliding window.*auto") as refused:
        tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model=saved("phimoe", tmp_path), attn_implementation="varlen"), packed=None)
    assert "--packing" not in str(refused.value)
    config = transformers.LlamaConfig(**_BODY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    config.save_pretrained(tmp_path / "dynamic")
    with pytest.raises(Refusal, match=r"--attn-implementation varlen: .*rope_type dynamic.*auto") as refused:
        tk.load_model("AutoModelForCausalLM", tk.ModelConfig(model=str(tmp_path / "dynamic"), attn_implementation="varlen"), packed=None)
    assert "--packing" not in str(refused.value)


def test_a_layout_that_is_asked_for_is_judged_by_itself() -> None:
    """Fails when: another layout is tried before the one that is asked for."""
    model = build("llama")
    model.config.model_type = "newcomer"
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + 0.05 * output.roll(1, dims=1))
    for layout in ("shared", "packed"):
        with pytest.raises(Refusal, match=f"--pair-layout {layout}: .*documents .*see each other"):
            choose_pair_layout(model, layout)
    assert choose_pair_layout(model, "padded") == "padded"
    model.forward = None  # not even asked
    assert choose_pair_layout(model, "padded") == "padded"


def test_a_model_that_ignores_positions_is_found_by_trying(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a type that no test has proven. Fails when: `_shares_exactly` is not asked, or compares a layout with itself."""
    model = build("llama")
    model.config.model_type = "newcomer"
    assert chosen_layout(model, capsys) == ("shared", "")
    inner = model.model.forward

    def counts_through(*args: Any, position_ids: Any = None, **more: Any) -> Any:
        positions = torch.arange(position_ids.shape[1])[None] if "shared_keys" in more else position_ids
        return inner(*args, position_ids=positions, **more)

    model.model.forward = counts_through
    layout, said = chosen_layout(model, capsys)
    assert layout == "packed"
    assert re.fullmatch("pairs are packed: .*'newcomer' .*shared prompt", said)
