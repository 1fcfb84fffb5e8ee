"""The written-out backward of attention over short documents, against torch's own through the loop over documents."""

import itertools

import pytest
import torch

import toolkit.models.attention.groups as attention_groups
from toolkit.models.attention.groups import UNSEEN, grouped_attention, groups_of
from toolkit.models.attention.kernels import Rules, loop_kernel

OWN = [40, 1, 300, 2, 41, 270]  # tokens of each document; of like length, and not
SHARED = [25, 0, 3, 25, 26, 100]  # keys before them that are elsewhere in the row
HEADS, HEAD_DIM = 4, 16


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def lengths_of_keys(shared):
    return [own + before for own, before in zip(OWN, SHARED, strict=True)] if shared else OWN


def states(key_heads, shared, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, sum(OWN)), (key_heads, sum(lengths_of_keys(shared))), (key_heads, sum(lengths_of_keys(shared)))
    return [torch.randn(1, heads, tokens, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for heads, tokens in sizes]


def gradients(attend, inputs):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(output.dtype)
    return torch.autograd.grad(output, leaves, weights)


def errors(found, expected):
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("scores_in_a_group", [1, 2**17, 2**30], ids=["each alone", "some together", "all that are alike"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 7), (True, 280), (False, None), (False, 30)])
def test_gradients_are_those_of_each_document_alone(monkeypatch, causal, window, shared, key_heads, scores_in_a_group):
    """Fails when padded keys are seen, `places` starts at 0 for all, the window is one off, a group's heads aren't added up, or
    the scaling is forgotten."""
    monkeypatch.setattr(attention_groups, "SCORES_IN_A_GROUP", scores_in_a_group)
    monkeypatch.setattr(attention_groups, "_groups_of_row", {})
    rules = Rules(causal, window, 0.2, softcap=None, dropout=0.0, longest=None)
    of_keys = bounds(lengths_of_keys(shared)) if shared else None

    def through_torch(query, key, value):
        return loop_kernel(query, key, value, bounds(OWN), rules, of_keys)

    groups = groups_of(bounds(OWN), of_keys, HEADS, causal, window)
    assert sum(len(group.unseen) for group in groups.groups) == len(OWN)
    inputs = states(key_heads, shared)
    expected = gradients(through_torch, inputs)
    for forward in (through_torch, None):
        found = gradients(lambda *s, forward=forward: grouped_attention(*s, groups, 0.2, forward), [s.float() for s in inputs])
        assert max(errors(found, expected)) < 1e-6
    assert max(errors([grouped_attention(*inputs, groups, 0.2)], [through_torch(*inputs)])) < 1e-6


def test_bfloat16_on_a_cpu_is_as_close_to_float64_as_torchs_own_backward(monkeypatch):
    """Fails when the scores are rounded to bfloat16 before the softmax, and when documents are never grouped."""
    rules = Rules(True, None, None, softcap=None, dropout=0.0, longest=None)
    of_keys = bounds(lengths_of_keys(shared=True))
    calls = []

    def attend(query, key, value):
        return loop_kernel(query, key, value, bounds(OWN), rules, of_keys)

    halves = [2 * s.bfloat16() for s in states(2, shared=True)]
    expected = gradients(attend, [s.double() for s in halves])
    grouped = errors(gradients(attend, halves), expected)
    monkeypatch.setattr("toolkit.models.attention.kernels.groups_of", lambda *_: calls.append(1))
    torchs = errors(gradients(attend, halves), expected)
    assert calls
    assert grouped != torchs  # two different ways indeed
    assert all(ours < 1.2 * theirs for ours, theirs in zip(grouped, torchs, strict=True)), (grouped, torchs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_takes_single_weights_and_the_gradient_is_that_of_those_left(dtype, key_heads, causal):
    """Against the formula in float64 with the weights that were dropped, which values of one per key show. Fails when: what is
    left is not scaled up, another share is taken, or backward has other weights than forward."""
    rules = Rules(causal, None, 0.2, softcap=None, dropout=0.3, longest=None)
    inputs = [each.to(dtype) for each in states(key_heads, shared=False)]
    places = torch.cat([torch.arange(each) for each in OWN])
    shown = torch.nn.functional.one_hot(places, max(OWN)).to(dtype).expand(1, key_heads, -1, -1)

    def attend(query, key, value):
        torch.manual_seed(0)
        return loop_kernel(query, key, value, bounds(OWN), rules)

    left = attend(inputs[0], inputs[1], shown).transpose(0, 1) != 0  # [heads, tokens, longest]
    lengths = torch.tensor(OWN).repeat_interleave(torch.tensor(OWN))
    seen = torch.arange(max(OWN)) < (places + 1 if causal else lengths)[:, None]
    assert left[:, seen].float().mean().item() == pytest.approx(0.7, abs=0.005)

    def plain(query, key, value):
        key, value = (each.repeat_interleave(HEADS // key_heads, dim=1) for each in (key, value))
        outputs = []
        for start, length in zip(bounds(OWN).tolist(), OWN, strict=False):
            here = slice(start, start + length)
            scores = 0.2 * query[0, :, here] @ key[0, :, here].transpose(1, 2)
            weights = scores.masked_fill(~seen[here, :length], -torch.inf).softmax(-1)
            outputs.append((weights * left[:, here, :length] / 0.7) @ value[0, :, here])
        return torch.cat(outputs, dim=1).transpose(0, 1)

    most = 1e-5 if dtype == torch.float32 else 2e-2  # the share is cut to 16 bits: 0.3 to 0.300003
    exact = [each.double() for each in inputs]
    assert max(errors([attend(*inputs)], [plain(*exact)])) < most
    assert max(errors(gradients(attend, inputs), gradients(plain, exact))) < most


TINY_OWN, TINY_SEEN = [3, 2, 3, 4, 1], [7, 6, 7, 4, 9]  # answers to prompts, and a prompt


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_documents_are_computed_in_groups(monkeypatch, dtype, trains):
    """Fails when a token's place in the tables is one off, and when documents that are not tiny go this way without a gradient,
    or in float64."""
    taken = []
    grouped = lambda *given: taken.append(given[5]) or grouped_attention(*given)  # noqa: E731
    monkeypatch.setattr("toolkit.models.attention.kernels.grouped_attention", grouped)
    rules = Rules(True, None, None, softcap=None, dropout=0.0, longest=None)
    generator = torch.Generator().manual_seed(0)
    sizes = (4, sum(TINY_OWN)), (2, sum(TINY_SEEN)), (2, sum(TINY_SEEN))
    inputs = [torch.randn(1, heads, tokens, HEAD_DIM, generator=generator).to(dtype) for heads, tokens in sizes]

    def attend(*states):
        return loop_kernel(*states, bounds(TINY_OWN), rules, bounds(TINY_SEEN))

    def made(states):
        return [*([attend(*states)] if not trains else gradients(attend, states))]

    with torch.set_grad_enabled(trains):
        expected, found = made([each.double() for each in inputs]), made(inputs)
        assert taken == [None]
        assert max(errors(found, expected)) < (1e-6 if dtype == torch.float32 else 2e-2)
        monkeypatch.setattr("toolkit.models.attention.kernels.TINY", 8)
        made(inputs)
    assert [each is None for each in taken] == [True, *([False] if trains and dtype == torch.bfloat16 else [])]


def test_a_neighbor_of_huge_numbers_changes_no_gradient():
    """Fails when a document's keys are padded with its neighbor's."""
    rules = Rules(True, None, None, softcap=None, dropout=0.0, longest=None)
    inputs = [s.bfloat16() for s in states(4, shared=False)]
    others = [s.clone() for s in inputs]
    start = sum(OWN[:4])
    for changed in others:
        changed[:, :, start : start + OWN[4]] *= 1e4
    one, other = (gradients(lambda *s: loop_kernel(*s, bounds(OWN), rules), each) for each in (inputs, others))
    for before, after in zip(one, other, strict=True):
        assert torch.equal(before[:, :, :start], after[:, :, :start])
        assert torch.equal(before[:, :, start + OWN[4] :], after[:, :, start + OWN[4] :])


def test_a_row_with_a_long_document_is_left_to_torch():
    """Fails when LONGEST isn't looked at: scores would need the square of its length."""
    assert groups_of(bounds([20, attention_groups.LONGEST + 1]), None, HEADS, True, None) is None
    assert groups_of(bounds([20, attention_groups.LONGEST]), None, HEADS, True, None) is not None


def test_groups_of_another_row_are_made_anew():
    """Fails when the kept groups aren't bound to the bounds they were made of."""
    first, second = bounds([3, 4]), bounds([4, 3])
    of_first = groups_of(first, None, HEADS, True, None)
    assert groups_of(first, None, HEADS, True, None) is of_first
    of_second = groups_of(second, None, HEADS, True, None)
    assert of_second.queries.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert float(of_second.groups[0].unseen.min()) == pytest.approx(UNSEEN)
