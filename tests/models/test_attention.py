"""Packed rows through whole models: gradients are those of each document alone, and nothing quadratic in the row is made."""

import itertools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.config import Refusal
from toolkit.models.attention.interface import DOCUMENTS, FLEX, choose_attention, register_attention

VOCABULARY = 97
LENGTHS = [40, 1, 23, 64, 9]  # most are longer than the sliding windows below, one has nothing to attend to
_BODY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_BODY, "num_key_value_heads": 2}
_LOCAL_AND_GLOBAL = {**_GROUPED, "head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=7),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**_LOCAL_AND_GLOBAL),
    "gemma2": lambda: transformers.Gemma2Config(**_LOCAL_AND_GLOBAL, attn_logit_softcapping=1.0),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=4096, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    ),
    "modernbert": lambda: transformers.ModernBertConfig(**_BODY, local_attention=6, cls_token_id=1, sep_token_id=2),
    "bert": lambda: transformers.BertConfig(**_BODY, **_NO_DROPOUT),
}  # fmt: skip
BIDIRECTIONAL = {"bert", "modernbert"}
CAUSAL = [name for name in CONFIGS if name not in BIDIRECTIONAL]


def build(name, attention, dtype=torch.float32, config=None):
    """A model whose weights are large enough for attention to matter; the same ones for any type and attention."""
    auto = transformers.AutoModelForMaskedLM if name in BIDIRECTIONAL else transformers.AutoModelForCausalLM
    config = config or CONFIGS[name]()
    config.initializer_range = 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.to(dtype).train()


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def packed(row):
    lengths = [len(document) for document in row]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return {
        "input_ids": torch.cat(row)[None], "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def padded(row):
    tokens = torch.nn.utils.rnn.pad_sequence(row, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(document) for document in row], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask}


def gradients(model, *batches):
    """Each parameter's gradient of a fixed random function of the log-probabilities, summed over all real tokens."""
    model.zero_grad()
    weights = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for batch in batches:
        per_token = torch.log_softmax(model(**batch, use_cache=False).logits, dim=-1) @ weights.to(model.device, model.dtype)
        (per_token * batch.get("attention_mask", 1)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def error(found, expected):
    """Relative L2 over all gradients together."""
    assert found.keys() == expected.keys()
    flat = [torch.cat([g[name].double().flatten() for name in expected]) for g in (found, expected)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


def plain_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **_):
    """transformers' eager attention with the softmax in the model's own type; every mask is written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if attention_mask is None else scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


transformers.AttentionInterface.register("plain_reference", plain_attention)
transformers.AttentionMaskInterface.register("plain_reference", transformers.masking_utils.eager_mask)


register_attention()
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def in_full_precision(name, found):
    """Gemma's norms compute in float32 whatever the model's type; their own gradients are compared in float32 alone."""
    return {key: g for key, g in found.items() if g.dtype == torch.float32 or "gemma" not in name or "norm" not in key}


def alone(name, dtype=torch.float32):
    model = build(name, "plain_reference", dtype)
    return in_full_precision(name, gradients(model, *({"input_ids": document[None]} for document in documents())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_row_gives_each_document_its_own_gradient(name, dtype):
    """Fails when `_attend` ignores cu_seq_lens_q, the window, the soft-cap, or treats a bidirectional model as causal."""
    found = gradients(build(name, DOCUMENTS, dtype), packed(documents()))
    assert error(in_full_precision(name, found), alone(name, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_rows_give_the_same_gradient(name, dtype):
    """Fails when the padding mask is dropped, or soft-capping is left out of padded rows."""
    found = gradients(build(name, DOCUMENTS, dtype), padded(documents()))
    assert error(in_full_precision(name, found), alone(name, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CAUSAL)
def test_positions_that_begin_again_are_bounds_enough_for_a_causal_model(name):
    """As TRL sends its packed rows. Fails when `_bounds_of` misses a row's end, or `_document_mask` returns None."""
    rows = [documents([40, 1, 23]), documents([32, 32])]  # two of one length, of which the end of the first is a bound too
    batch = [{key: packed(row)[key] for key in ("input_ids", "position_ids")} for row in rows]
    found = gradients(build(name, DOCUMENTS), {key: torch.cat([row[key] for row in batch]) for key in batch[0]})
    singles = [{"input_ids": document[None]} for row in rows for document in row]
    assert error(found, gradients(build(name, "plain_reference"), *singles)) < 1e-5


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3_text", 2)])
def test_bounds_are_found_once_a_row_for_each_kind_of_layer(name, kinds, monkeypatch):
    """On a GPU each search waits until everything before it is done. Fails when `_bounds_of` is asked again in each layer."""
    config, searches, plain = CONFIGS[name](), [], torch.Tensor.nonzero
    config.num_hidden_layers = 4
    if kinds == 2:
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    model, batch = build(name, DOCUMENTS, config=config), {key: packed(documents())[key] for key in ("input_ids", "position_ids")}
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda *args, **options: searches.append(args) or plain(*args, **options))
    for passes in (1, 2):
        model(**batch, use_cache=False).logits.sum().backward()
        assert len(searches) == kinds * passes


@pytest.mark.parametrize("lengths", [[700, 1000, 348], [2048]], ids=["three documents", "one document"])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_as_large_as_the_square_of_a_packed_row_is_made(name, lengths):
    """Fails when `_document_mask` is sdpa's, or a long document's scores are written out at once (CHUNK = 4096)."""
    model, batch, length = build(name, DOCUMENTS), packed(documents(lengths)), sum(lengths)
    with _LargestTensor() as largest:
        gradients(model, batch)
    assert largest.elements < length**2


class _LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        made = (tensor.numel() for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor))
        self.elements = max(self.elements, *made, 0)
        return output


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation_gives_the_greedy_tokens_of_eager_attention(name, cache):
    """From prompts padded on the left, past the sliding window. Fails when a cache's mask is dropped in `_document_mask`."""
    prompts = torch.stack(documents([20, 20, 20]))
    mask = torch.ones_like(prompts)
    mask[0, :6], mask[1, :1] = 0, 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "cache_implementation": cache}
    options |= {} if cache == "static" else {"cache_implementation": None}
    texts = [build(name, kind).eval().generate(prompts, attention_mask=mask, **options) for kind in (DOCUMENTS, "eager")]
    assert torch.equal(*texts)


@pytest.mark.parametrize("given", ["position_bias", "s_aux"])
def test_what_the_kernels_do_not_know_is_refused_by_name(given):
    """Fails when an unknown keyword argument is passed over."""
    attend = transformers.AttentionInterface()[DOCUMENTS]
    states = torch.randn(1, 2, 5, 8)
    what = "position_bias" if given == "position_bias" else "attention sinks"
    with pytest.raises(Refusal, match=what):
        attend(torch.nn.Identity(), states, states, states, None, cu_seq_lens_q=torch.tensor([0, 5]), **{given: states})


def test_a_window_in_the_mask_that_is_not_in_the_call_is_refused():
    """Such a model would train with full attention, silently. Fails when the numbers' type is not looked at."""
    model = build("mistral", DOCUMENTS)
    attend = transformers.AttentionInterface()[DOCUMENTS]
    transformers.AttentionInterface.register(DOCUMENTS, lambda *args, sliding_window=None, **kwargs: attend(*args, **kwargs))
    try:
        with pytest.raises(Refusal, match="disagree about its sliding window"):
            gradients(model, packed(documents()))
    finally:
        register_attention()


@pytest.mark.parametrize(
    ("name", "requested", "packing", "device", "chosen"),
    [
        ("llama", "auto", True, "cpu", DOCUMENTS), ("llama", "auto", True, "cuda", DOCUMENTS),
        ("llama", "varlen", True, "cpu", DOCUMENTS), ("llama", "flex_attention", True, "cuda", FLEX),
        ("llama", "auto", False, "cpu", None), ("llama", "eager", False, "cpu", "eager"),
        ("llama", "sdpa", False, "cuda", "sdpa"), ("llama", "flex_attention", False, "cuda", "flex_attention"),
        ("gemma2", "auto", False, "cpu", DOCUMENTS), ("gemma2", "eager", False, "cpu", "eager"),
    ],
)  # fmt: skip
def test_the_backend_follows_from_setting_rows_and_device(name, requested, packing, device, chosen):
    """Fails when: a model with soft-capping is left to sdpa, which has none."""
    assert choose_attention(CONFIGS[name](), requested, packing, device) == chosen


@pytest.mark.parametrize(
    ("name", "requested", "packing", "device", "reason"),
    [
        ("llama", "sdpa", True, "cpu", "row's length squared"), ("llama", "eager", True, "cuda", "row's length squared"),
        ("llama", "varlen", False, "cpu", "padded"), ("gemma2", "sdpa", False, "cpu", "soft-capping"),
        ("llama", "flash_attention_2", True, "cpu", "CUDA"), ("llama", "flex_attention", False, "cpu", "no backward"),
    ],
)  # fmt: skip
def test_a_backend_that_would_not_be_exact_or_is_not_there_is_refused(name, requested, packing, device, reason):
    """Fails when: eager is let through for packed rows."""
    with pytest.raises(Refusal, match=f"--attn-implementation {requested}: .*{reason}"):
        choose_attention(CONFIGS[name](), requested, packing, device)


def test_flex_attention_is_refused_for_a_model_with_attention_dropout():
    """Fails when: BERT's name for it is not among ATTENTION_DROPOUTS."""
    config = CONFIGS["bert"]()
    config.attention_probs_dropout_prob = 0.1
    with pytest.raises(Refusal, match="no attention dropout"):
        choose_attention(config, "flex_attention", False, "cuda")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("attention", [DOCUMENTS, FLEX])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_row_on_cuda_gives_each_document_its_own_gradient(name, dtype, attention):
    """bfloat16 is compared with the reference's own rounding of the same weights: it must not be much worse.

    Fails when (by reading it, not run): a kernel takes the row for one document (`bounds[[0, -1]]`).
    """
    torch.compiler.reset()  # a process compiles flex attention for eight models at most
    on_cuda = [{key: v.cuda() if torch.is_tensor(v) else v for key, v in packed(documents()).items()}]
    singles = [{"input_ids": document[None].cuda()} for document in documents()]
    exact = gradients(build(name, "plain_reference", torch.float32).cuda(), *singles)
    found = gradients(build(name, attention, dtype).cuda(), *on_cuda)
    if dtype == torch.float32:
        assert error(found, exact) < 1e-5
    else:
        rounded = gradients(build(name, "plain_reference", dtype).cuda(), *singles)
        assert error(found, exact) < 2 * error(rounded, exact)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", sorted(BIDIRECTIONAL | {"qwen3", "llama"}))
def test_packed_row_under_autocast_gives_each_document_its_own_gradient(name):
    """float32 weights, bfloat16 compute: where q and k come out of their norms in float32. Fails when they are not cast."""
    model = build(name, DOCUMENTS).cuda()
    on_cuda = {key: v.cuda() if torch.is_tensor(v) else v for key, v in packed(documents()).items()}
    exact = gradients(model, *({"input_ids": document[None].cuda()} for document in documents()))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = gradients(model, on_cuda)
    assert error(found, exact) < 0.05
