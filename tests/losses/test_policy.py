"""Losses of policy gradients against TRL's own code on the same log-probabilities, and against the papers' formulas as plain loops.

TRL's methods run with a stand-in for the model (`trl_policy`). Completions have 0 to 9 tokens; ratios reach from 0.3 to 3.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.losses import trl_policy
from toolkit.losses.policy import LOSS_TYPES, choose_kl, kl_estimate, policy_loss
from toolkit.rollouts.server_gap import MODES, sampler_weights

ROWS, LONGEST, MAX_LENGTH = 12, 9, 16
COUNTS = torch.tensor([3, 9, 1, 5, 4, 0, 2, 6, 8, 2, 9, 7])
MASK = torch.arange(LONGEST) < COUNTS[:, None]
TOTALS = {"completions": float(ROWS), "completion_tokens": float(COUNTS.sum())}
Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def tables(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Log-probabilities of the policy, the one that sampled, a reference and a sampler, and entropies."""
    generator = torch.Generator().manual_seed(3)
    logps = -4 * torch.rand(ROWS, LONGEST, generator=generator, dtype=dtype) - 0.2
    near = {"old_logps": 0.4, "reference_logps": 0.6, "sampler_logps": 0.3}
    moved = {name: logps + far * torch.randn(ROWS, LONGEST, generator=generator, dtype=dtype) for name, far in near.items()}
    return {"logps": logps, "entropies": torch.rand(ROWS, LONGEST, generator=generator, dtype=dtype), **moved}


def advantages(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([1.0, -1.5, 0.5, 0.0, -0.3, 2.0, 1.2, -2.0, 0.7, -0.1, 0.0, -0.8], dtype=dtype)


def with_gradient(logps: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and its gradient by the log-probabilities, 0 at masked tokens."""
    leaf = logps.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad * MASK


def assert_alike(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], tolerance: float = 1e-5) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=tolerance, atol=tolerance)


# -- TRL -------------------------------------------------------------------------------------------------------------------

LIKE_TRL: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"beta": 0.3}),
    ("grpo", {"beta": 0.3, "use_bias_correction_kl": False}),
    ("dr_grpo", {"max_completion_length": MAX_LENGTH}),
    ("dapo", {"epsilon_high": 0.28}),
    ("dapo", {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5, "beta": 0.1}),
    ("dapo", {"entropy_coef": 0.05}),
    ("dapo", {"importance_sampling_level": "sequence", "beta": 0.1}),
    ("bnpo", {}),
    ("grpo", {"importance_sampling_level": "sequence"}),
    ("cispo", {"epsilon_high": 1.4, "beta": 0.1}),
]


@pytest.mark.parametrize(("loss_type", "settings"), LIKE_TRL, ids=lambda value: str(value))
def test_loss_gradient_and_metrics_are_those_of_trl(loss_type: str, settings: dict[str, Any]) -> None:
    """Of a whole batch in one micro-batch; the gradient's largest difference is 1e-8. Fails when: the clip is at 1 - epsilon_high, the
    bias correction is a constant, delta bounds the clipped side, dr_grpo divides by tokens, the entropy is added."""
    given = tables()
    reference = {"reference_logps": given["reference_logps"]} if "beta" in settings else {}
    metrics: dict[str, Any] = {}

    def ours(logps: torch.Tensor) -> torch.Tensor:
        loss, found = policy_loss(
            logps, given["old_logps"], advantages(), MASK, TOTALS, loss_type=loss_type, entropies=given["entropies"], **settings, **reference
        )
        metrics.update(found)
        return loss

    def trl(logps: torch.Tensor) -> torch.Tensor:
        loss, metrics["trl"] = trl_policy.grpo({**given, "logps": logps}, MASK, advantages(), loss_type=loss_type, **settings)
        return loss

    assert_alike(with_gradient(given["logps"], ours), with_gradient(given["logps"], trl))
    theirs = metrics["trl"]
    names = {"kl": "kl", "entropy": "entropy", "clip_ratio/low_mean": "clip_ratio_low", "clip_ratio/high_mean": "clip_ratio_high",
             "cispo_clip_ratio": "clip_ratio_high"}  # fmt: skip
    of_sequences = settings.get("importance_sampling_level") == "sequence"
    for name in theirs.keys() & names.keys():
        if of_sequences and name.startswith("clip"):  # theirs counts the completion without a token, too
            continue
        assert float(metrics[names[name]]) == pytest.approx(theirs[name], abs=1e-6), name


def test_gspo_is_trls_grpo_with_ratios_of_completions() -> None:
    """Fails when: gspo takes the sum of log-ratios, or ratios of tokens."""
    given = tables()
    ours = with_gradient(given["logps"], lambda logps: policy_loss(logps, given["old_logps"], advantages(), MASK, TOTALS, loss_type="gspo",
                                                                  epsilon=0.1)[0])  # fmt: skip
    theirs = with_gradient(given["logps"], lambda logps: trl_policy.grpo(
        {**given, "logps": logps}, MASK, advantages(), loss_type="grpo", importance_sampling_level="sequence", epsilon=0.1)[0])  # fmt: skip
    assert_alike(ours, theirs)


@pytest.mark.parametrize("epsilon_high", [None, 0.5])
def test_rloo_is_that_of_trl(epsilon_high: float | None) -> None:
    """The completion without tokens is a constant of TRL's loss, minus its advantage over the count. Fails when: the ratio is that of
    gspo, or the mean is over tokens."""
    given = tables()
    ours = with_gradient(given["logps"], lambda logps: policy_loss(
        logps, given["old_logps"], advantages(), MASK, TOTALS, loss_type="rloo", epsilon_high=epsilon_high)[0])  # fmt: skip
    loss, gradient = with_gradient(given["logps"], lambda logps: trl_policy.rloo(
        logps, given["old_logps"], MASK, advantages(), epsilon_high=epsilon_high)[0])  # fmt: skip
    assert_alike(ours, (loss + advantages()[5] / ROWS, gradient))


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_another_sampler_are_those_of_trl(mode: str) -> None:
    """TRL's formula, which is inside of its sampling method, in a loop; the loss that is weighted so is TRL's own. Fails when: the weight
    is the inverse ratio, weights are truncated per token in a sequence mode, or they weigh the divergence too."""
    given, clip = tables(), {"clip_max": 1.2, "clip_min": 0.8}
    sampler = given["sampler_logps"].clone()
    sampler[1, 3] = float("nan")  # the server said nothing
    expected = torch.ones(ROWS, LONGEST)
    for row in range(ROWS):
        gaps = [float(given["old_logps"][row, t] - sampler[row, t]) for t in range(int(COUNTS[row]))]
        ratios = [math.exp(0.0 if math.isnan(gap) else gap) for gap in gaps]
        ratios = [math.prod(ratios)] * len(ratios) if mode.startswith("sequence") else ratios
        for t, ratio in enumerate(ratios):
            inside = 0.8 <= ratio <= 1.2
            expected[row, t] = ratio if inside else 0.0 if mode.endswith("mask") else min(max(ratio, 0.8), 1.2)
    weights, metrics = sampler_weights(given["old_logps"], sampler, MASK, TOTALS, mode=mode, **clip)
    torch.testing.assert_close((weights * MASK).expand_as(MASK), expected * MASK, rtol=1e-5, atol=1e-6)
    assert float(metrics["sampler_weight"]) == pytest.approx(float(expected[MASK].mean()), rel=1e-5)

    both = {"loss_type": "dapo", "beta": 0.2}
    ours = with_gradient(given["logps"], lambda logps: policy_loss(
        logps, given["old_logps"], advantages(), MASK, TOTALS, reference_logps=given["reference_logps"], sampler_weights=weights, **both)[0])  # fmt: skip
    theirs = with_gradient(given["logps"], lambda logps: trl_policy.grpo(
        {**given, "logps": logps}, MASK, advantages(), sampler_ratio=weights, **both)[0])  # fmt: skip
    assert_alike(ours, theirs)


def test_an_update_is_the_mean_over_its_own_tokens_where_trl_takes_those_of_all_updates() -> None:
    """DAPO's formula, over the tokens of the update, in a loop: ours agrees with it to 1e-6. TRL 1.16 divides by the tokens of all
    updates of a sampling phase over their number (its issue 5619 was a factor more): with 31 and 25 tokens it is 10 % and more off.
    Fails when: totals are those of all rollouts."""
    given, halves = tables(), (slice(0, 6), slice(6, 12))
    for half in halves:
        rows = {name: table[half] for name, table in given.items()}
        mask, worth, tokens = MASK[half], advantages()[half], float(COUNTS[half].sum())
        paper = sum(
            -min(r * a, min(max(r, 0.8), 1.2) * a)
            for row, a in enumerate(worth.tolist()) for t in range(int(mask[row].sum()))
            for r in [math.exp(float(rows["logps"][row, t] - rows["old_logps"][row, t]))]
        ) / tokens  # fmt: skip
        ours, _ = policy_loss(rows["logps"], rows["old_logps"], worth, mask, {"completions": 6.0, "completion_tokens": tokens})
        theirs, _ = trl_policy.grpo(rows, mask, worth, loss_type="dapo", steps_per_generation=2, num_items_in_batch=TOTALS["completion_tokens"])
        assert float(ours) == pytest.approx(paper, abs=1e-6)
        assert float(theirs) == pytest.approx(paper * tokens / (TOTALS["completion_tokens"] / 2), abs=1e-6)
        assert abs(float(theirs) / paper - 1) > 0.09


# -- the papers' formulas --------------------------------------------------------------------------------------------------


def loop(loss_type: str, logps: torch.Tensor, old: torch.Tensor, worth: torch.Tensor, epsilon: float = 0.2, high: float = 0.2) -> float:
    """The loss as its paper writes it, over completions i and tokens t."""
    total = 0.0
    for i in range(ROWS):
        a, n = float(worth[i]), int(COUNTS[i])
        ratios = [math.exp(float(logps[i, t] - old[i, t])) for t in range(n)]
        if loss_type == "gspo" and n:
            ratios = [math.prod(ratios) ** (1 / n)] * n
        for t, r in enumerate(ratios):
            term = min(r * a, min(max(r, 1 - epsilon), 1 + high) * a)
            if loss_type == "cispo":
                term = min(r, high) * a * float(logps[i, t])
            elif loss_type == "reinforce":
                term = a * float(logps[i, t])
            if loss_type in ("grpo", "gspo"):
                total -= term / n / ROWS
            elif loss_type == "dr_grpo":
                total -= term / ROWS / MAX_LENGTH
            elif loss_type == "reinforce":
                total -= term / ROWS
            else:
                total -= term / float(COUNTS.sum())
    return total


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "rloo"])
def test_each_loss_is_its_papers_formula(loss_type: str) -> None:
    """A loop over completions and tokens, float64, 1e-12. Fails when: any two of the table's rows are exchanged."""
    given, worth = tables(torch.float64), advantages(torch.float64)
    high = 1.4 if loss_type == "cispo" else 0.28
    settings = {"epsilon_high": high, "max_completion_length": MAX_LENGTH}
    loss, _ = policy_loss(given["logps"], given["old_logps"], worth, MASK, TOTALS, loss_type=loss_type, **settings)
    assert float(loss) == pytest.approx(loop(loss_type, given["logps"], given["old_logps"], worth, high=high), abs=1e-12)


def test_rloo_and_reinforce_have_one_gradient_on_the_policy_that_sampled() -> None:
    """Advantage times gradient of the log-probability of the completion, as their paper has it; 1e-15. Later rloo is clipped, as TRL's.
    Fails when: rloo's ratio is not of the whole completion."""
    logps, worth = tables(torch.float64)["logps"], advantages(torch.float64)
    found = [with_gradient(logps, lambda leaf, kind=kind: policy_loss(leaf, logps, worth, MASK, TOTALS, loss_type=kind)[0])[1]
             for kind in ("rloo", "reinforce")]  # fmt: skip
    expected = -worth[:, None] * MASK / ROWS
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_is_that_of_finite_differences(loss_type: str, estimator: str) -> None:
    """Of the loss with divergence and entropy, by log-probabilities and entropies, float64, 1e-6. cispo's weight is a constant by
    definition, so its old ratio is held. Fails when: the ratio is detached, or the clip's side is taken by the sign of the ratio."""
    given, worth = tables(torch.float64), advantages(torch.float64)
    settings: dict[str, Any] = {"epsilon_high": 1.4 if loss_type == "cispo" else None, "max_completion_length": MAX_LENGTH, "beta": 0.3,
                                "kl_estimator": estimator, "entropy_coef": 0.1}  # fmt: skip

    def loss_of(logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        held = given["old_logps"]
        if loss_type == "cispo":
            ratio = (given["logps"] - given["old_logps"]).exp().clamp(max=1.4)
            loss, _ = policy_loss(logps, held, 0 * worth, MASK, TOTALS, loss_type=loss_type, reference_logps=given["reference_logps"],
                                  entropies=entropies, **settings)  # fmt: skip
            return loss - (ratio * worth[:, None] * logps * MASK).sum() / TOTALS["completion_tokens"]
        return policy_loss(logps, held, worth, MASK, TOTALS, loss_type=loss_type, reference_logps=given["reference_logps"],
                           entropies=entropies, **settings)[0]  # fmt: skip

    leaves = given["logps"].clone().requires_grad_(), given["entropies"].clone().requires_grad_()
    loss, _ = policy_loss(leaves[0], given["old_logps"], worth, MASK, TOTALS, loss_type=loss_type, reference_logps=given["reference_logps"],
                          entropies=leaves[1], **settings)  # fmt: skip
    loss.backward()
    step = 1e-6
    for which, leaf in enumerate(leaves):
        assert leaf.grad is not None
        for row, t in [(0, 0), (1, 8), (3, 4), (4, 1), (7, 5), (8, 0), (11, 6), (5, 0), (2, 3)]:
            ends = []
            for sign in (1, -1):
                moved = [given["logps"].clone(), given["entropies"].clone()]
                moved[which][row, t] += sign * step
                ends.append(float(loss_of(*moved)))
            assert float(leaf.grad[row, t]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6), (which, row, t)


# -- parts of the whole ----------------------------------------------------------------------------------------------------

SPLITS = [[12], [1] * 12, [5, 4, 3], [11, 1], [6, 6]]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_split_over_micro_batches_has_one_loss_gradient_and_metrics(loss_type: str) -> None:
    """Each cut to its own longest completion; float64, 1e-12. Fails when: a mean is over the micro-batch, or totals are counted in it."""
    given, worth = tables(torch.float64), advantages(torch.float64)
    found = []
    for split in SPLITS:
        leaf, sums = given["logps"].clone().requires_grad_(), {}
        for part in torch.arange(ROWS).split(split):
            longest = max(int(COUNTS[part].max()), 1)
            rows = {name: table[part, :longest] for name, table in {**given, "logps": leaf}.items()}
            weights, more = sampler_weights(rows["old_logps"], rows["sampler_logps"], MASK[part, :longest], TOTALS)
            loss, metrics = policy_loss(
                rows["logps"], rows["old_logps"], worth[part], MASK[part, :longest], TOTALS, loss_type=loss_type,
                epsilon_high=1.4 if loss_type == "cispo" else None, max_completion_length=MAX_LENGTH, beta=0.2,
                reference_logps=rows["reference_logps"], entropies=rows["entropies"], entropy_coef=0.1, sampler_weights=weights,
            )  # fmt: skip
            loss.backward()
            for name, value in {"loss": loss.detach(), **metrics, **more}.items():
                sums[name] = max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value
        assert leaf.grad is not None
        found.append((leaf.grad, sums))
    for gradient, sums in found[1:]:
        torch.testing.assert_close(gradient, found[0][0], rtol=0, atol=1e-12)
        assert sums.keys() == found[0][1].keys()
        for name, value in sums.items():
            assert float(value) == pytest.approx(float(found[0][1][name]), abs=1e-12), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_is_masked_is_not_read(loss_type: str) -> None:
    """Tables whose masked tokens are not numbers, and a masked token inside of a completion, give the same bits and a gradient of 0 there.
    Fails when: a table is multiplied by the mask."""
    given, worth, mask = tables(), advantages(), MASK.clone()
    mask[1, 4] = False  # a tool wrote it
    totals = {"completions": float(ROWS), "completion_tokens": float(mask.sum())}
    found = []
    for rubbish in (0.0, float("nan"), float("inf")):
        leaf, rows = given["logps"].where(mask, rubbish).requires_grad_(), {name: t.where(mask, rubbish) for name, t in given.items()}
        weights, _ = sampler_weights(rows["old_logps"], rows["sampler_logps"], mask, totals)
        loss, metrics = policy_loss(
            leaf, rows["old_logps"], worth, mask, totals, loss_type=loss_type, epsilon_high=1.4, max_completion_length=MAX_LENGTH, beta=0.2,
            reference_logps=rows["reference_logps"], entropies=rows["entropies"], entropy_coef=0.1, sampler_weights=weights,
        )  # fmt: skip
        loss.backward()
        assert leaf.grad is not None
        assert (leaf.grad[~mask] == 0).all()
        found.append((loss.detach(), leaf.grad, metrics))
    for loss, gradient, metrics in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(gradient, found[0][1])
        assert metrics == found[0][2]


def test_a_ratio_beyond_all_bounds_is_a_number() -> None:
    """A completion a thousand times likelier at each token, with an advantage of 0 and of -1. Fails when: the exponent is not cut."""
    logps, old, mask = torch.full((2, 40), -0.1), torch.full((2, 40), -7.0), torch.ones(2, 40)
    for loss_type in LOSS_TYPES:
        loss, metrics = policy_loss(
            logps, old, torch.tensor([0.0, -1.0]), mask, {"completions": 2.0, "completion_tokens": 80.0}, loss_type=loss_type,
            epsilon_high=5.0, max_completion_length=40,
        )  # fmt: skip
        assert torch.isfinite(loss), loss_type
        assert all(torch.isfinite(value) for value in metrics.values()), loss_type


def test_without_old_log_probabilities_the_ratio_is_one() -> None:
    """The gradient is that of given, equal ones. Fails when: the policy's own are not detached."""
    logps = tables()["logps"]
    for loss_type in LOSS_TYPES:
        both = [with_gradient(logps, lambda leaf, old=old, kind=loss_type: policy_loss(
            leaf, old, advantages(), MASK, TOTALS, loss_type=kind, epsilon_high=5.0, max_completion_length=9)[0]) for old in (None, logps)]  # fmt: skip
        assert torch.equal(both[0][1], both[1][1])


def test_metrics_are_means_over_the_tokens_that_count() -> None:
    """A loop. Fails when: approx_kl is of the policy's samples, a share is of clipped ratios whose advantage has the other sign."""
    given, worth = tables(), advantages()
    _, metrics = policy_loss(given["logps"], given["old_logps"], worth, MASK, TOTALS, epsilon_high=0.3)
    pairs = [(math.exp(float(given["logps"][i, t] - given["old_logps"][i, t])), float(worth[i])) for i in range(ROWS) for t in range(int(COUNTS[i]))]
    expected = {
        "ratio": [r for r, _ in pairs], "approx_kl": [r - 1 - math.log(r) for r, _ in pairs],
        "clip_ratio_low": [r < 0.8 and a < 0 for r, a in pairs], "clip_ratio_high": [r > 1.3 and a > 0 for r, a in pairs],
    }  # fmt: skip
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {name: sum(values) / len(pairs) for name, values in expected.items()} | {"ratio_max": max(expected["ratio"])}, abs=1e-6
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence_have_its_mean_and_with_the_ratio_its_gradient(estimator: str) -> None:
    """Of two distributions over 5 tokens, exactly: the expectation over the policy is the KL (k2: within its bias), and the gradient of
    the expectation of ratio times estimate over the old policy is that of the KL, 1e-12 (k2: without the ratio). Fails when: k3 has the
    other sign, or d is reference minus policy."""
    generator = torch.Generator().manual_seed(4)
    logits, reference = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits = (reference + 0.1 * logits).requires_grad_()
    reference = reference.log_softmax(0)
    logps = logits.log_softmax(0)
    kl = (logps.exp() * (logps - reference)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    mean = (logps.exp() * kl_estimate(logps, reference, estimator)).sum()
    assert float(mean.detach()) == pytest.approx(float(kl.detach()), abs=1e-3 if estimator == "k2" else 1e-12)
    old = logps.detach()
    ratio = 1.0 if estimator == "k2" else (logps - old).exp()
    (found,) = torch.autograd.grad((old.exp() * ratio * kl_estimate(logps, reference, estimator)).sum(), logits)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_the_divergence_counts_where_its_loss_has_it_unless_told() -> None:
    """Fails when: rloo's is in the loss by itself, or a choice is overruled."""
    assert choose_kl("grpo") == ("loss", "k3")
    assert choose_kl("rloo") == ("reward", "k1")
    assert choose_kl("rloo", "loss", "k2") == ("loss", "k2")
    assert choose_kl("dapo", "reward") == ("reward", "k1")
