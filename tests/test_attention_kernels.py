"""Kernels for packed rows against a plain masked softmax over each document, in value and in gradient."""

import itertools

import pytest
import torch

from toolkit.attention_kernels import Rules, fastest_kernel, flex_kernel, loop_kernel, varlen_kernel

LENGTHS = [300, 1, 270, 2, 40]  # shorter and longer than a chunk of queries, and than the windows below
RULES = [
    Rules(causal, window, scaling=None if causal else 0.3, softcap=softcap, dropout=0.0, longest=max(LENGTHS))
    for causal, window, softcap in itertools.product([True, False], [None, 7, 280], [None, 2.0])
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def plain_attention(query, key, value, rules, lengths=LENGTHS):
    """The definition, one document, one head and one score matrix at a time."""
    groups = query.shape[1] // key.shape[1]
    documents = []
    for q, k, v in zip(*(states[0].split(lengths, dim=1) for states in (query, key, value)), strict=True):
        heads = []
        for head in range(q.shape[0]):
            scores = q[head] @ k[head // groups].T * (q.shape[-1] ** -0.5 if rules.scaling is None else rules.scaling)
            if rules.softcap is not None:
                scores = torch.tanh(scores / rules.softcap) * rules.softcap
            position = torch.arange(len(scores), device=scores.device)
            behind = position[:, None] - position
            hidden = behind < 0 if rules.causal else torch.zeros_like(behind, dtype=torch.bool)
            hidden = hidden if rules.window is None else hidden | (behind.abs() >= rules.window)
            scores = scores.masked_fill(hidden, float("-inf"))
            heads.append(scores.softmax(-1) @ v[head // groups])
        documents.append(torch.stack(heads, dim=1))
    return torch.cat(documents)


def states(dtype=torch.float64, device="cpu", lengths=LENGTHS, heads=2, groups=2, head_dim=16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, sum(lengths), head_dim, generator=generator, dtype=torch.float64).to(device, dtype)
        for count in (heads, heads // groups, heads // groups)
    ]


def bounds(lengths=LENGTHS, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def value_and_gradients(attention, inputs):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = attention(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * weights.to(output.device, output.dtype)).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def error(found, expected):
    """Relative L2, the largest of output and gradients."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_loop_gives_each_document_its_own_attention_and_gradients(rules):
    """Fails when a document's neighbour is seen (bounds [0, total]), the window is one off, or the soft-cap is dropped."""
    inputs = states()
    found = value_and_gradients(lambda *s: loop_kernel(*s, bounds(), rules), inputs)
    assert error(found, value_and_gradients(lambda *s: plain_attention(*s, rules), inputs)) < 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_flex_gives_each_document_its_own_attention(rules):
    """Forward only: torch has no backward for it on a CPU. Fails when `sees` forgets the document, causality or the window."""
    inputs = states(torch.float32)
    with torch.no_grad():
        found = flex_kernel(*inputs, bounds(), rules)
        assert error([found], [plain_attention(*(s.double() for s in inputs), rules)]) < 1e-5


def test_flex_does_not_take_the_block_mask_of_another_row():
    """Fails when the kept mask is not compared with the row's own bounds."""
    rules, inputs = RULES[0], states(torch.float32)
    with torch.no_grad():
        for lengths in (LENGTHS, [100, 513]):
            found = flex_kernel(*inputs, bounds(lengths), rules)
            assert error([found], [plain_attention(*(s.double() for s in inputs), rules, lengths)]) < 1e-5


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_dropout_is_applied_to_the_weights(softcap):
    """A document of one token has one weight, 1: dropped it leaves 0, kept 1 / 0.7. Fails when dropout is not passed on."""
    torch.manual_seed(0)
    ones = torch.ones(1, 1, 1500, 4)
    rules = Rules(True, None, None, softcap, dropout=0.3, longest=1)
    output = loop_kernel(ones, ones, ones, torch.arange(1501, dtype=torch.int32), rules)[:, 0, 0]
    dropped = output == 0
    assert torch.allclose(output[~dropped], torch.tensor(1 / 0.7))
    assert 0.25 < dropped.float().mean() < 0.35


def test_bfloat16_is_as_exact_as_its_type():
    inputs = states(torch.bfloat16)
    found = value_and_gradients(lambda *s: loop_kernel(*s, bounds(), RULES[0]), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, RULES[0]), [tensor.double() for tensor in inputs])
    assert error(found, expected) < 1e-2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rules", [rules for rules in RULES if rules.softcap is None], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_gives_each_document_its_own_attention_and_gradients(rules, dtype):
    inputs = states(dtype, "cuda")
    found = value_and_gradients(lambda *s: varlen_kernel(*s, bounds(device="cuda"), rules), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, rules), [tensor.double() for tensor in inputs])
    assert error(found, expected) < 1e-2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_flex_on_cuda_gives_each_document_its_own_attention_and_gradients(rules):
    inputs = states(torch.float32, "cuda")
    found = value_and_gradients(lambda *s: flex_kernel(*s, bounds(device="cuda"), rules), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, rules), [tensor.double() for tensor in inputs])
    assert error(found, expected) < 1e-5


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_type_has_a_kernel_on_cuda(dtype, dropout):
    """With dropout only the shape is compared: what is dropped differs."""
    rules, inputs = RULES[0]._replace(dropout=dropout), states(dtype, "cuda")
    found = value_and_gradients(lambda *s: fastest_kernel(*s, bounds(device="cuda"), rules), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, rules), [tensor.double() for tensor in inputs])
    assert [f.shape for f in found] == [e.shape for e in expected]
    if not dropout:
        assert error(found, expected) < {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
