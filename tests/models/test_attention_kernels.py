"""Kernels for packed rows against a plain masked softmax over each document, in value and in gradient."""

import itertools
import shutil

import pytest
import torch

from toolkit.config import ModelConfig
from toolkit.models.attention import kernels as attention_kernels, masks as attention_masks
from toolkit.models.attention.kernels import (
    Rules,
    _block_mask,
    fastest_kernel,
    flex_computes,
    flex_kernel,
    lengths_of,
    loop_kernel,
    varlen_computes,
    varlen_kernel,
)
from toolkit.models.attention.masks import band
from toolkit.models.load import load_model
from toolkit.system.devices import planned_for

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
    """Fails when a document's neighbor is seen (bounds [0, total]), the window is one off, or the soft-cap is dropped."""
    inputs = states()
    found = value_and_gradients(lambda *s: loop_kernel(*s, bounds(), rules), inputs)
    assert error(found, value_and_gradients(lambda *s: plain_attention(*s, rules), inputs)) < 1e-12


@pytest.mark.parametrize("window", [None, 3])
def test_documents_of_the_same_lengths_share_their_masks_in_all_layers(monkeypatch, window):
    """Fails when a mask isn't kept, and when one lacks its window, its place among the keys, or its type."""
    made = []
    monkeypatch.setattr(attention_kernels, "TINY", 0)
    monkeypatch.setattr(attention_masks, "band", lambda *given: made.append(given) or band(*given))
    own, seen = [3, 2, 3, 2, 3, 3], [7, 6, 7, 6, 9, 3]  # answers behind prompts; the same lengths at other places
    row, keys, rules = bounds(own), bounds(seen), RULES[0]._replace(window=window)
    for layer in (rules, rules, rules._replace(window=5), rules):
        for dtype in (torch.float64, torch.float32):
            query, (_, key, value) = states(dtype, lengths=own)[0], states(dtype, lengths=seen)
            whole = [query.new_zeros(1, 2, sum(seen), 16), key, value]
            of_queries = torch.cat([torch.arange(end - count, end) for count, end in zip(own, itertools.accumulate(seen), strict=True)])
            whole[0][:, :, of_queries] = query
            expected = plain_attention(*whole, layer, seen)[of_queries]
            assert error([loop_kernel(query, key, value, row, layer, keys)], [expected]) < 1e-6
    assert len(made) == len(attention_masks.masks_of(row)) == 2 * len(set(made))
    assert not attention_masks.masks_of(bounds(own))


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


def asks_once_a_row(make, monkeypatch):
    """How often a tensor is read off its device in `make()`."""
    reads, plain = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or plain(tensor))
    make()
    monkeypatch.undo()
    return len(reads)


def test_lengths_are_read_off_the_device_once_a_row_and_not_once_a_layer(monkeypatch):
    """On a GPU each reading waits until everything before it is done. Fails when lengths_of is asked again in each layer."""
    rules, inputs = RULES[0]._replace(dropout=0.1), states(torch.float64)  # in float32 a CPU's groups read them too

    def layers_of_two_rows():
        for own, seen in ((bounds(), bounds()), (bounds([100, 513]), None)):
            for _ in range(5):
                loop_kernel(*inputs, own, rules, seen)

    assert asks_once_a_row(layers_of_two_rows, monkeypatch) == 3
    assert lengths_of(bounds([7, 5])) == [7, 5]


def flash_operator(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    """A stand-in for torch's operator, which no CPU has: its conditions, and attention as its source says, a document at a time.

    Heads of keys may be fewer; the last query sees up to the last key.
    """
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert not dropout_p
    assert not is_causal or (window_size_left, window_size_right) == (-1, 0)
    documents = []
    for (start, end), (first, last) in zip(itertools.pairwise(cum_seq_q.tolist()), itertools.pairwise(cum_seq_k.tolist()), strict=True):
        assert end - start <= max_q
        assert last - first <= max_k
        groups = query.shape[1] // key.shape[1]
        q, k, v = query[start:end], key[first:last].repeat_interleave(groups, 1), value[first:last].repeat_interleave(groups, 1)
        behind = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(last - first)
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        for side, sign in ((window_size_left, 1), (window_size_right, -1)):
            hidden = hidden | (behind * sign > side) if side >= 0 else hidden
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        documents.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(documents), None, None, None, None


@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (20, 20), (24, 16), (9, 17)])
@pytest.mark.parametrize("rules", [rules for rules in RULES if rules.softcap is None], ids=str)
def test_varlen_asks_flash_attention_for_what_the_rules_say(head_dim, value_dim, rules, monkeypatch):
    """Fails when: a head dimension that is no multiple of 8 goes in as it is; the scale is that of the widened heads; a window is
    a token longer; longest is the caller's though it knows none.
    """
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_operator)
    query, key, value = states(heads=4, head_dim=max(head_dim, value_dim))
    inputs = [query[..., :head_dim], key[..., :head_dim], value[..., :value_dim]]
    for longest in (rules.longest, None):
        found = value_and_gradients(lambda *s: varlen_kernel(*s, bounds(), rules._replace(longest=longest)), inputs)  # noqa: B023
        assert error(found, value_and_gradients(lambda *s: plain_attention(*s, rules), inputs)) < 1e-12


PLAIN = Rules(True, None, None, None, 0.0, None)


@pytest.mark.parametrize(
    ("dims", "dtype", "rules", "varlen", "flex"),
    [
        ((64, 64), torch.bfloat16, PLAIN, True, True), ((256, 256), torch.float16, PLAIN, True, True),
        ((20, 20), torch.bfloat16, PLAIN, True, True), ((192, 128), torch.bfloat16, PLAIN, True, True),
        ((257, 64), torch.bfloat16, PLAIN, False, True), ((64, 264), torch.bfloat16, PLAIN, False, True),
        ((64, 64), torch.float32, PLAIN, False, True), ((64, 64), torch.float64, PLAIN, False, False),
        ((64, 64), torch.bfloat16, PLAIN._replace(softcap=30.0), False, True),
        ((64, 64), torch.bfloat16, PLAIN._replace(dropout=0.1), True, False),
        ((200, 64), torch.bfloat16, PLAIN._replace(dropout=0.1), False, False),
        ((64, 64), torch.float32, PLAIN._replace(dropout=0.1), False, False),
        ((64, 64), torch.bfloat16, PLAIN._replace(window=7), True, True),
    ],
)  # fmt: skip
def test_a_kernel_is_chosen_by_what_it_computes(dims, dtype, rules, varlen, flex):
    """Fails when any of the conditions is left out."""
    assert (varlen_computes(*dims, dtype, rules), flex_computes(dtype, rules)) == (varlen, flex)


def test_what_a_device_has_is_found_out_while_a_layer_is_compiled(monkeypatch):
    """It is a constant of the graph, which goes through in one piece.

    Fails when: assume_constant_result is taken away from `_is_ampere`.
    """
    monkeypatch.setattr(attention_kernels, "is_ampere", torch.compiler.disable(lambda device: True))  # no part of a graph
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def layer(query):
        assert attention_kernels._is_ampere(query.device)
        return 2 * query

    assert torch.equal(layer(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_a_packed_layer_on_cuda_is_compiled_as_one_graph(name, monkeypatch):
    """Each break in it is an arithmetic apart from the next, and as much again of the processor's time for a launch.

    Fails when: `chosen_type` asks a ContextVar, or the kernel that is chosen for a GPU looks at what a tensor holds.
    """
    monkeypatch.setattr(attention_kernels, "flash_attention", lambda query, *_: query)
    model = load_model("AutoModelForCausalLM", ModelConfig(model=name), packed=True)
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend="eager", fullgraph=True)
    tokens = torch.arange(300)[None]
    with planned_for("cuda"), torch.autocast("cpu", torch.bfloat16):
        for row in (bounds([100, 200]), bounds([1, 9, 40, 250])):  # of another number of documents
            packed = {"cu_seq_lens_q": row, "cu_seq_lens_k": row, "max_length_q": 250, "max_length_k": 250}
            assert torch.isfinite(model(tokens, position_ids=tokens, use_cache=False, **packed).logits).all()


@pytest.mark.parametrize(
    "lengths",
    [(LENGTHS, LENGTHS), ([128, 256, 128], [128, 256, 128]), ([129, 300], [129, 300]), ([12, 3, 2, 90, 300], [12, 208, 10, 90, 310])],
)
@pytest.mark.parametrize("window", [None, 7, 280])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_flex_attention_are_those_that_torch_finds_in_the_whole_mask(causal, window, lengths):
    """Against create_block_mask, which looks at every pair: the same pairs are seen, the same blocks are whole, and none with a
    seen pair is missing. Without windows, which can leave gaps, the others are the same too.

    Fails when: a block of keys counts from its second key on; a block that is whole for its first token only counts as whole.
    """
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    own, seen = (bounds(each) for each in lengths)
    total, total_keys = sum(lengths[0]), sum(lengths[1])
    document, place, document_of_key, place_of_key = [], [], [], []
    for number, (queries, keys) in enumerate(zip(*lengths, strict=True)):
        document += [number] * queries
        place += range(keys - queries, keys)
        document_of_key += [number] * keys
        place_of_key += range(keys)
    document, place, document_of_key, place_of_key = map(torch.tensor, (document, place, document_of_key, place_of_key))

    def sees(batch, head, q, k):
        behind = place[q] - place_of_key[k]
        visible = (document[q] == document_of_key[k]) & (behind.abs() < (window or 10**6))
        return visible & (behind >= 0) if causal else visible

    found = _block_mask(own, seen, total, total_keys, causal, window)
    expected = create_block_mask(sees, None, None, total, total_keys, device="cpu")
    assert torch.equal(*(create_mask(mask, 1, 1, total, total_keys, device="cpu") for mask in (found.mask_mod, sees)))
    assert found.shape == expected.shape
    whole, some = [], []
    for each in (found, expected):
        whole.append(as_dense(each.full_kv_num_blocks, each.full_kv_indices))
        some.append(as_dense(each.kv_num_blocks, each.kv_indices) | whole[-1])
        assert torch.equal(as_dense(each.full_q_num_blocks, each.full_q_indices), whole[-1].mT)
    assert torch.equal(*whole)
    assert bool((some[0] >= some[1]).all())
    if window is None:
        assert torch.equal(*some)


def as_dense(counts, indices):
    dense = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, (count, places) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        dense[row, places[:count]] = True
    return dense


def test_flex_attention_is_compiled_once_for_rows_of_any_length_and_for_every_window(monkeypatch):
    """Dynamo gives a function up after eight variants. Fails when: `sees` looks at the rules, or its two ends differ in type."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(attention_kernels._flex_attention(False), dynamic=True, backend=counter)
    monkeypatch.setattr(attention_kernels, "_flex_attention", lambda _: compiled)
    frames = []
    with torch.no_grad():
        for lengths in ([300, 1, 270], [100, 513, 20, 77], [500], [1200, 3], [129, 127, 40, 9, 9]):
            for window in (None, 50):
                flex_kernel(*states(torch.float32, lengths=lengths), bounds(lengths), PLAIN._replace(window=window, longest=max(lengths)))
                frames.append(counter.frame_count)
    assert frames == frames[:1] * 10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_heads_too_small_for_flex_on_cuda_are_widened_and_cut_again():
    """Fails when: the scale is that of the widened heads, or the zeros come out."""
    inputs = states(torch.float32, head_dim=9)
    with torch.no_grad():
        found = flex_kernel(*inputs, bounds(), RULES[0])
        assert found.shape[-1] == 9
        assert error([found], [plain_attention(*(s.double() for s in inputs), RULES[0])]) < 1e-5


def test_bfloat16_is_as_exact_as_its_type():
    """Fails when: the scale of the grouped backward is 1 / head_dim."""
    inputs = states(torch.bfloat16)
    found = value_and_gradients(lambda *s: loop_kernel(*s, bounds(), RULES[0]), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, RULES[0]), [tensor.double() for tensor in inputs])
    assert error(found, expected) < 1e-2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rules", [rules for rules in RULES if rules.softcap is None], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 2, 16), (8, 2, 20), (4, 4, 96)], ids=str)
def test_varlen_gives_each_document_its_own_attention_and_gradients(rules, dtype, shape):
    """Fails when (by reading it, not run): a window is a token longer (`before` is `rules.window`)."""
    heads, groups, head_dim = shape
    inputs = states(dtype, "cuda", heads=heads, groups=groups, head_dim=head_dim)
    found = value_and_gradients(lambda *s: varlen_kernel(*s, bounds(device="cuda"), rules), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, rules), [tensor.double() for tensor in inputs])
    assert error(found, expected) < 1e-2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_drops_attention_and_its_gradient_knows_which(causal):
    """What was dropped is read off the output where the values are the unit vectors; then the same is dropped by plain attention.

    Fails when (by reading it, not run): backward gets no dropout, or another seed; what is kept is not scaled up.
    """
    lengths, rate = [60, 33, 64], 0.25
    rules = Rules(causal, None, None, None, rate, 64)
    query, key, value = states(torch.bfloat16, "cuda", lengths=lengths, groups=1, head_dim=64)
    unit = torch.cat([torch.eye(64)[:length] for length in lengths]).to("cuda", torch.bfloat16).repeat(1, 2, 1, 1)

    def attend(*inputs):
        torch.cuda.manual_seed(3)
        return varlen_kernel(*inputs, bounds(lengths, "cuda"), rules)

    kept = (attend(query, key, unit) > 0).transpose(0, 1)  # [heads, tokens, places of a document]

    def plain(query, key, value):
        documents, start = [], 0
        for length in lengths:
            q, k, v = (each[0, :, start : start + length] for each in (query, key, value))
            hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1) if causal else None
            scores = q @ k.transpose(1, 2) / 8
            weights = (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1)
            documents.append(weights * kept[:, start : start + length, :length] / (1 - rate) @ v)
            start += length
        return torch.cat(documents, dim=1).transpose(0, 1)

    seen = torch.cat([torch.ones(n, n, device="cuda").tril().flatten() if causal else torch.ones(n * n, device="cuda") for n in lengths])
    among = torch.cat([kept[0, sum(lengths[:i]) : sum(lengths[:i]) + n, :n].flatten() for i, n in enumerate(lengths)])
    assert abs(float(among[seen > 0].float().mean()) - (1 - rate)) < 4 * (rate * (1 - rate) / float(seen.sum())) ** 0.5
    expected = value_and_gradients(plain, [tensor.double() for tensor in (query, key, value)])
    assert error(value_and_gradients(attend, [query, key, value]), expected) < 1e-2


class Capped(torch.nn.Module):
    def __init__(self, softcap):
        super().__init__()
        self.softcap = softcap

    def forward(self, *inputs):
        return flex_kernel(*inputs, bounds(), PLAIN._replace(softcap=self.softcap, longest=300))


@pytest.mark.parametrize("where", ["alone", "in a compiled layer"])
def test_compiled_flex_caps_the_scores_of_each_model_by_its_own_number(where, monkeypatch):
    """Without inductor, which has no flex attention for a CPU with these masks; forward alone. Fails when: all share one cap."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=True, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(attention_kernels, "_flex_attention", lambda _: compiled)
    inputs = [3 * tensor.float() for tensor in states()]
    with torch.no_grad():
        for softcap in (2.0, None, 0.5):
            layer = Capped(softcap)
            if where != "alone":
                layer.compile(dynamic=True, backend="aot_eager")
            wanted = plain_attention(*inputs, PLAIN._replace(softcap=softcap))
            assert error([layer(*inputs)], [wanted]) < 1e-5, softcap


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__ or shutil.which("g++") is None, reason="needs g++, and torch in a folder without a space in its name")
def test_inductor_takes_the_number_that_caps_the_scores():
    """Fails when: the number is enclosed or a default value; torch.compile makes a variable of it, which inductor doesn't take."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=True)
    query, key, value = (torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    for softcap in (2.0, 3.5, 0.5):
        scores = softcap * torch.tanh(query @ key.transpose(2, 3) / 4 / softcap)
        found = compiled(query, key, value, score_mod=attention_kernels._capped(softcap), scale=0.25)
        assert error([found], [scores.softmax(-1) @ value]) < 1e-5, softcap


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 20])
def test_flex_on_cuda_gives_each_document_its_own_attention_and_gradients(rules, head_dim):
    """Fails when (by reading it, not run): scores are not capped (`score_mod=None`)."""
    torch.compiler.reset()  # a process compiles a function for eight kinds of rules at most
    inputs = states(torch.float32, "cuda", head_dim=head_dim)
    found = value_and_gradients(lambda *s: flex_kernel(*s, bounds(device="cuda"), rules), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, rules), [tensor.double() for tensor in inputs])
    assert error(found, expected) < 1e-5


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_type_has_a_kernel_on_cuda(dtype, dropout):
    """With dropout only the shape is compared: what is dropped differs.

    Fails when (by reading it, not run): `flex_computes` does not look at the dropout, which flex attention refuses.
    """
    rules, inputs = RULES[0]._replace(dropout=dropout), states(dtype, "cuda")
    found = value_and_gradients(lambda *s: fastest_kernel(*s, bounds(device="cuda"), rules), inputs)
    expected = value_and_gradients(lambda *s: plain_attention(*s, rules), [tensor.double() for tensor in inputs])
    assert [f.shape for f in found] == [e.shape for e in expected]
    if not dropout:
        assert error(found, expected) < {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
