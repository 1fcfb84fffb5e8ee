"""Preference losses against TRL's own code on the same log-probabilities, and against formulas written out.

TRL's methods run with a stand-in for the model (`trl_losses`); answers have 1 to 9 tokens, and some are of one length.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.losses import trl_losses
from toolkit.config import PreferenceConfig, check_together, settings_of
from toolkit.data.loading.batch import Batch
from toolkit.losses.pair_losses import PairLogps, desensitized_weights, discopop_loss, orpo_loss, score_of, sigmoid_loss
from toolkit.losses.preference import likelihood_weight, needs_reference, pair_losses, preference_loss, preference_metrics
from toolkit.losses.unpaired import apo_zero_unpaired_loss, kto_kl, kto_loss
from toolkit.training.evaluation import eval_with_gather

PAIRS, LONGEST, VOCABULARY = 8, 9, 11
COUNTS = torch.tensor([3, 9, 1, 5, 4, 7, 2, 6, 8, 2, 1, 9, 4, 3, 5, 6])  # chosen answers, then rejected ones


def token_logps(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Log-probabilities of answer tokens, `[2 * PAIRS, LONGEST]`, between -6 and 0."""
    return -6 * torch.rand(2 * PAIRS, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pairs_of(tokens: torch.Tensor, weights: torch.Tensor | None = None, counts: torch.Tensor = COUNTS) -> PairLogps:
    """Sums over each answer's own tokens, weighted where there are weights."""
    own = (torch.arange(tokens.shape[1]) < counts[:, None]).to(tokens.dtype)
    sums = (tokens * own * (1 if weights is None else weights)).sum(-1)
    return PairLogps(*sums.chunk(2), *counts.to(tokens.dtype).chunk(2))


def totals_of(pairs: PairLogps) -> dict[str, float]:
    return {"pairs": float(len(pairs.chosen)), "chosen_tokens": float(pairs.chosen_tokens.sum())}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, relative: float) -> None:
    """Within a share of the largest entry."""
    assert (found - wanted).abs().max().item() <= relative * wanted.abs().max().item()


# -- TRL ---------------------------------------------------------------------------------------------------------------

WITH_REFERENCE: list[dict[str, Any]] = [
    {"loss_type": ["sigmoid"]},
    {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    {"loss_type": ["hinge"]},
    {"loss_type": ["ipo"]},
    {"loss_type": ["robust"], "label_smoothing": 0.2},
    {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    {"loss_type": ["discopop"]},
    {"loss_type": ["nca_pair"]},
    {"loss_type": ["bco_pair"]},
    {"loss_type": ["sppo_hard"]},
    {"loss_type": ["apo_zero"]},
    {"loss_type": ["apo_down"]},
    {"loss_type": ["aot"]},
    {"loss_type": ["aot"], "label_smoothing": 0.1},
    {"loss_type": ["aot_unpaired"]},
    {"loss_type": ["aot_unpaired"], "label_smoothing": 0.1},
    {"loss_type": ["sft"]},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.0},
    *[{"loss_type": [loss], "f_divergence_type": kind, "label_smoothing": 0.1 if loss in ("robust", "exo_pair") else 0.0}
      for loss in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop")
      for kind in ("forward_kl", "js_divergence", "alpha_divergence")],
    *[{"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": c} for c in (0.0, 0.2, 0.9, 1.0)],
    *[{"loss_type": [loss], "ld_alpha": 0.3} for loss in ("sigmoid", "ipo", "apo_zero", "aot")],
    {"loss_type": ["sigmoid"], "ld_alpha": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("settings", WITH_REFERENCE, ids=str)
def test_losses_with_a_reference_are_those_of_trl(settings: dict[str, Any]) -> None:
    """Loss and gradient of every answer token's log-probability, float32, of 8 pairs; TRL's metrics as well.

    The policy is about 1 nat per token from the reference. Fails when: the sign of a margin is turned, ipo forgets its
    tokens, aot doesn't sort, discopop swaps its two losses, LD-DPO weighs the policy alone, or sft is divided by the pairs.
    """
    reference = token_logps(1)
    ours, theirs = (reference + torch.randn(reference.shape, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    ours.requires_grad_()
    theirs.requires_grad_()
    check_together(PreferenceConfig(**settings), frozenset(settings))
    values = {name: value for name, value in settings.items() if name != "ld_alpha"}
    weights = None
    if "ld_alpha" in settings:
        weights = desensitized_weights(*COUNTS.chunk(2), LONGEST, settings["ld_alpha"]).repeat(2, 1)
    policy = pairs_of(ours, weights)
    loss, metrics = preference_loss(policy, pairs_of(reference, weights), totals_of(policy), **values)
    wanted, wanted_metrics = trl_losses.dpo(theirs, reference, COUNTS, **settings)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    wanted.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.abs().max() > 0
    assert_close(ours.grad, theirs.grad, 1e-4)
    for name, trl_name in METRICS.items():
        assert metrics[name].item() == pytest.approx(wanted_metrics[trl_name], rel=1e-5, abs=1e-6), name


METRICS = {
    "rewards_chosen": "rewards/chosen", "rewards_rejected": "rewards/rejected", "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins", "logps_chosen": "logps/chosen", "logps_rejected": "logps/rejected",
}  # fmt: skip

WITHOUT_REFERENCE: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("orpo", 1, {"loss_type": ["orpo"]}, {}),
    ("orpo", 1, {"loss_type": ["orpo"], "beta": 0.5}, {"beta": 0.5}),
    ("cpo", 3, {"loss_type": ["cpo"]}, {"loss_type": "sigmoid"}),
    ("cpo", 3, {"loss_type": ["cpo"], "label_smoothing": 0.2, "cpo_alpha": 0.3, "beta": 0.3},
     {"loss_type": "sigmoid", "label_smoothing": 0.2, "cpo_alpha": 0.3, "beta": 0.3}),
    ("cpo", 3, {"loss_type": ["simpo"], "beta": 2.0}, {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0}),
    ("cpo", 3, {"loss_type": ["simpo", "sft"], "loss_weights": [1.0, 0.7], "beta": 2.0, "simpo_gamma": 1.2, "label_smoothing": 0.1},
     {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "cpo_alpha": 0.7, "label_smoothing": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "prompt", "settings", "trl_settings"), WITHOUT_REFERENCE, ids=str)
def test_losses_without_a_reference_are_those_of_trl(
    trainer: str, prompt: int, settings: dict[str, Any], trl_settings: dict[str, Any]
) -> None:
    """From logits: loss and their gradient, float32, of 8 pairs; TRL's metrics as well.

    TRL's logps are sums with cpo's sigmoid and means with the others. Fails when: simpo divides gamma by beta, orpo takes
    sums, cpo forgets its likelihood, or the rewards of simpo and orpo are of sums.
    """
    ours, tokens = logits_and_tokens(prompt)
    theirs = ours.detach().clone().requires_grad_()
    assert not needs_reference(settings["loss_type"])
    policy = pairs_of(answer_logps(ours, tokens, prompt))
    loss, metrics = preference_loss(policy, None, totals_of(policy), **settings)
    wanted, wanted_metrics = trl_losses.without_reference(trainer, theirs, tokens, COUNTS, prompt, **trl_settings)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    wanted.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, theirs.grad, 1e-4)
    names = list(METRICS.items())[: 6 if settings["loss_type"] == ["cpo"] else 4]
    for name, trl_name in names:
        assert metrics[name].item() == pytest.approx(wanted_metrics[trl_name], rel=1e-5, abs=1e-6), name
    assert "logps_drop" not in metrics


def test_the_likelihood_of_orpo_is_that_of_answers_where_trl_takes_the_prompt_too() -> None:
    """Equation 6 of arXiv:2403.07691 has L_SFT of the chosen answer given its prompt; TRL's mean counts the prompt's tokens.

    Behind prompts of 4 tokens the two differ by just that. Fails when: prompts of 1 token, none of which is predicted.
    """
    logits, tokens = logits_and_tokens(4)
    policy = pairs_of(answer_logps(logits, tokens, 4))
    ours, _ = preference_loss(policy, None, totals_of(policy), loss_type=["orpo"])
    theirs, metrics = trl_losses.without_reference("orpo", logits, tokens, COUNTS, 4)
    log_p = logits.log_softmax(-1)
    prompts = sum(-log_p[i, t, tokens[i, t + 1]].item() for i in range(PAIRS) for t in range(3))
    answers, counted = -policy.chosen.sum().item(), policy.chosen_tokens.sum().item()
    assert metrics["nll_loss"] == pytest.approx((prompts + answers) / (counted + 3 * PAIRS), rel=1e-5)
    assert ours.item() - theirs.item() == pytest.approx(answers / counted - metrics["nll_loss"], rel=1e-3)
    assert abs(ours.item() - theirs.item()) > 0.05


def logits_and_tokens(prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2 * PAIRS, prompt + LONGEST, VOCABULARY, generator=generator)
    return logits.requires_grad_(), torch.randint(1, VOCABULARY, (2 * PAIRS, prompt + LONGEST), generator=generator)


def answer_logps(logits: torch.Tensor, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Log-probability of each answer token from the position before it, `[2 * PAIRS, LONGEST]`."""
    log_p = logits.log_softmax(-1)[:, prompt - 1 : -1]
    return log_p.gather(-1, tokens[:, prompt:, None])[..., 0]


KTO: list[dict[str, Any]] = [
    {},
    {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.6},
    {"loss_type": "apo_zero_unpaired", "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.6},
]


@pytest.mark.parametrize("settings", KTO, ids=str)
@pytest.mark.parametrize("offset", [1.5, -1.5], ids=["kl above 0", "kl cut at 0"])
def test_kto_is_that_of_trl(settings: dict[str, Any], offset: float) -> None:
    """Loss, divergence and gradients of 9 examples, 4 of them desirable.

    Fails when: the divergence isn't cut at 0 or has a gradient, or the two weights are swapped.
    """
    generator = torch.Generator().manual_seed(7)
    policy, reference, kl_policy, kl_reference = (-20 * torch.rand(9, generator=generator) for _ in range(4))
    kl_policy = (kl_reference + offset).requires_grad_()
    desirable = torch.tensor([1, 0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
    ours, theirs = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    kl = kto_kl(kl_policy, kl_reference)
    chosen = {name: value for name, value in settings.items() if name != "loss_type"} | {"beta": settings.get("beta", 0.1)}
    if "loss_type" in settings:
        losses = apo_zero_unpaired_loss(ours, reference, desirable, **chosen)
    else:
        losses = kto_loss(ours, reference, desirable, kl, **chosen)
    wanted, wanted_kl = trl_losses.kto(theirs, reference, kl_policy, kl_reference, desirable, **settings)
    assert losses.mean().item() == pytest.approx(wanted.item(), rel=1e-5)
    losses.mean().backward()
    wanted.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, theirs.grad, 1e-4)
    assert kl_policy.grad is None
    if "loss_type" not in settings:
        assert kl.item() == pytest.approx(wanted_kl, rel=1e-5)
        assert kl.item() == pytest.approx(max(offset, 0.0), abs=1e-5)


# -- where TRL has none, or errs ---------------------------------------------------------------------------------------


def test_label_smoothing_of_sigmoid_is_conservative_dpo_which_trl_drops() -> None:
    """TRL 1.16 takes label_smoothing next to sigmoid and computes plain DPO; its aot of one pair is the smoothed formula.

    Fails when: sigmoid_loss ignores its label_smoothing.
    """
    policy, reference = token_logps(1), token_logps(2)
    plain, _ = trl_losses.dpo(policy, reference, COUNTS, loss_type=["sigmoid"], label_smoothing=0.0)
    dropped, _ = trl_losses.dpo(policy, reference, COUNTS, loss_type=["sigmoid"], label_smoothing=0.2)
    assert dropped.item() == plain.item()
    found = sigmoid_loss(pairs_of(policy), pairs_of(reference), 0.1, label_smoothing=0.2)
    for pair in range(PAIRS):
        rows = [pair, pair + PAIRS]
        wanted, _ = trl_losses.dpo(policy[rows], reference[rows], COUNTS[rows], loss_type=["aot"], label_smoothing=0.2)
        assert found[pair].item() == pytest.approx(wanted.item(), rel=1e-5)
    assert abs(found.mean().item() - plain.item()) > 0.01


def test_discopop_stays_finite_where_trl_s_does_not() -> None:
    """A margin of -1000 nats: exp(100) is infinite in float32, and σ(-2000) of it is not a number.

    Fails when: the exponential and its weight are multiplied.
    """
    policy = torch.full((2, LONGEST), -1.0)
    policy[0] = -1000.0 / LONGEST - 1
    reference, counts = torch.full((2, LONGEST), -1.0), torch.tensor([LONGEST, LONGEST])
    theirs, _ = trl_losses.dpo(policy, reference, counts, loss_type=["discopop"])
    assert math.isnan(theirs.item())
    pairs = pairs_of(policy.requires_grad_(), counts=counts)
    ours = discopop_loss(pairs, pairs_of(reference, counts=counts), 0.1)
    assert ours.item() == pytest.approx(100.0, rel=1e-5)
    ours.sum().backward()
    assert policy.grad is not None
    assert policy.grad[0, 0].item() == pytest.approx(-0.1, rel=1e-4)


def test_orpo_of_an_answer_known_by_heart_has_a_gradient_where_trl_s_has_none() -> None:
    """log p = 0 in float32. The rejected answer's gradient is not lost with the chosen one's.

    Fails when: _log_odds drops its clamp.
    """
    from trl.experimental.orpo.orpo_trainer import log1mexp

    known = torch.tensor([-1e-9], requires_grad=True)
    log1mexp(known).backward()
    assert known.grad is not None
    assert math.isnan(known.grad.item())
    ours = PairLogps(*(torch.tensor([x], requires_grad=True) for x in (-3.0, 0.0)), torch.ones(1), torch.ones(1))
    orpo_loss(ours, 1.0).backward()
    assert ours.chosen.grad is not None
    assert ours.rejected.grad is not None
    assert ours.chosen.grad.item() == pytest.approx(-1 / (1 - math.exp(-3.0)), rel=1e-4)
    assert math.isfinite(ours.rejected.grad.item())


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
def test_score_is_the_derivative_of_the_divergence(kind: str) -> None:
    """f written out by autograd, in float64: f'(u) of its generator, and 0 at u = 1.

    Fails when: js_divergence drops its log 2, or the power of the alpha divergence is turned.
    """
    generators: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "reverse_kl": lambda u: u * u.log() - u,
        "forward_kl": lambda u: u - u.log(),
        "js_divergence": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
        "alpha_divergence": lambda u: (u**0.3 / 0.3 - u) / (0.3 - 1),
    }
    u = torch.logspace(-3, 3, 13, dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad(generators[kind](u).sum(), u)
    found = score_of(kind, 0.3)(u.detach().log())
    assert_close(found, wanted, 1e-12)
    assert found[6].item() == pytest.approx(0.0, abs=1e-12)


def test_scores_stay_finite_far_from_the_reference_where_trl_s_do_not() -> None:
    """Both answers 100 nats less likely than the reference has them: TRL's forward KL is infinite minus infinite.

    Fails when: alpha_divergence drops its clamp.
    """
    policy, reference, counts = torch.full((2, LONGEST), -100.0), torch.full((2, LONGEST), -1.0), torch.full((2,), LONGEST)
    settings: dict[str, Any] = {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"}
    theirs, _ = trl_losses.dpo(policy, reference, counts, **settings)
    assert math.isnan(theirs.item())
    ours = pair_losses(pairs_of(policy, counts=counts), pairs_of(reference, counts=counts), **settings)
    assert ours.item() == pytest.approx(math.log(2))


def test_a_loss_that_needs_a_reference_says_so() -> None:
    """Fails when: pair_losses continues without one."""
    policy = pairs_of(token_logps(1))
    with pytest.raises(ValueError, match="loss_type sft, sigmoid needs"):
        preference_loss(policy, None, totals_of(policy), loss_type=["sft", "sigmoid"])


# -- exact means -------------------------------------------------------------------------------------------------------

ALL = settings_of(PreferenceConfig)["loss_type"].choices


def values_for(*loss_types: str) -> dict[str, Any]:
    return {"loss_type": loss_types, "label_smoothing": 0.1 if {"exo_pair", "robust"} & set(loss_types) else 0.0}


def cut(pairs: PairLogps, sizes: list[int]) -> list[PairLogps]:
    return [PairLogps(*parts) for parts in zip(*(values.split(sizes) for values in pairs), strict=True)]


@pytest.mark.parametrize("sizes", [[4, 4], [2] * 4, [1] * 8, [3, 3, 2]], ids=str)
@pytest.mark.parametrize("names", [*[[name] for name in ALL if not name.startswith("aot")], ["sigmoid", "sft", "cpo"]], ids=str)
def test_parts_of_micro_batches_add_up_to_the_mean_of_the_global_batch(names: list[str], sizes: list[int]) -> None:
    """Loss, gradients and metrics of 8 pairs in float64, in one piece and in several; answers have 1 to 9 tokens.

    Fails when: a micro-batch is divided by its own pairs or its own tokens.
    """
    reference, values = pairs_of(token_logps(1, torch.float64)), values_for(*names)
    found = []
    for pieces in ([8], sizes):
        tokens = token_logps(2, torch.float64).requires_grad_()
        policy = pairs_of(tokens)
        parts = [
            preference_loss(p, r, totals_of(policy), **values)
            for p, r in zip(cut(policy, pieces), cut(reference, pieces), strict=True)
        ]
        loss = torch.stack([loss for loss, _ in parts]).sum()
        loss.backward()
        assert tokens.grad is not None
        metrics = torch.stack([torch.stack(list(metrics.values())) for _, metrics in parts]).sum(0)
        found.append(torch.cat([loss.detach()[None], tokens.grad.flatten(), metrics]))
    assert (found[0] - found[1]).abs().max().item() < 1e-10


def test_aot_is_exact_for_the_micro_batch_and_no_other() -> None:
    """What its docstring says. Fails when: aot doesn't sort, so that the cut makes no difference."""
    policy, reference = pairs_of(token_logps(1)), pairs_of(token_logps(2))
    whole = pair_losses(policy, reference, **values_for("aot")).sum().item()
    halves = [pair_losses(p, r, **values_for("aot")).sum().item() for p, r in zip(cut(policy, [4, 4]), cut(reference, [4, 4]), strict=True)]
    assert abs(whole - sum(halves)) > 1e-3


@pytest.mark.parametrize("names", [[name] for name in ALL] + [["sigmoid", "sft"], ["aot", "orpo"]], ids=str)
@pytest.mark.parametrize("sizes", [[8], [3, 3, 2]], ids=str)
def test_metrics_are_those_of_one_pair_at_a_time(names: list[str], sizes: list[int]) -> None:
    """By eval_with_gather, with a padding micro-batch last. The likelihood's mean is over tokens, all others over pairs.

    Fails when: aot is evaluated on the micro-batch, or the padding micro-batch counts.
    """
    values = values_for(*names)
    policy, reference = pairs_of(token_logps(1, torch.float64)), pairs_of(token_logps(2, torch.float64))
    given = reference if needs_reference(names) else None
    rows = {f"{side}_{name}": values for side, pairs in (("p", policy), ("r", reference)) for name, values in pairs._asdict().items()}

    def logps_of(model: Any, micro_batch: dict[str, Any]) -> tuple[PairLogps, PairLogps | None]:
        sides = [PairLogps(**{name: micro_batch[f"{side}_{name}"] for name in PairLogps._fields}) for side in "pr"]
        return sides[0], sides[1] if given is not None else None

    pieces = [{name: values.split(sizes)[i] for name, values in rows.items()} for i in range(len(sizes))]
    batches = [Batch([piece], {}, [real]) for piece, real in [*[(piece, True) for piece in pieces], (pieces[0], False)]]
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, reduce=lambda x, reduction: x)
    found = eval_with_gather(accelerator, torch.nn.Identity(), batches, preference_metrics(logps_of, **values))

    wanted: dict[str, float] = {}
    for i in range(PAIRS):
        pair, other = cut(policy, [1] * 8)[i], cut(reference, [1] * 8)[i] if given is not None else None
        # over infinitely many tokens the likelihood is 0: it has a mean of its own
        loss, metrics = preference_loss(pair, other, {"pairs": 1.0, "chosen_tokens": math.inf}, **values)
        for name, value in {"loss": loss, **metrics}.items():
            wanted[f"eval_{name}"] = wanted.get(f"eval_{name}", 0.0) + value.item() / PAIRS
    wanted["eval_loss"] -= likelihood_weight(names) * (policy.chosen.sum() / policy.chosen_tokens.sum()).item()
    assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def test_one_loss_may_be_given_without_a_list() -> None:
    """Fails when: the letters of its name are looked up."""
    policy, reference = pairs_of(token_logps(1, torch.float64)), pairs_of(token_logps(2, torch.float64))
    totals = {"pairs": float(PAIRS)}
    one, of_list = (preference_loss(policy, reference, totals, loss_type=each)[0] for each in ("ipo", ["ipo"]))
    assert torch.equal(one, of_list)
    sums = [preference_metrics(lambda *_: (policy, reference), loss_type=each).update(None, {}) for each in ("ipo", ["ipo"])]
    assert torch.equal(sums[0]["pair_loss"], sums[1]["pair_loss"])


def test_the_drop_of_log_probabilities_is_the_mean_of_both_answers_and_a_tie_is_no_success() -> None:
    """By hand; below 0 where the answers became likelier, so it isn't called a KL. Fails when: logps_drop has the other sign or isn't
    halved, or a tie counts."""
    policy = PairLogps(*(torch.tensor(x) for x in ([-4.0, -5.0], [-6.0, -7.0], [2.0, 2.0], [3.0, 3.0])))
    reference = PairLogps(*(torch.tensor(x) for x in ([-3.0, -5.0], [-2.0, -7.0], [2.0, 2.0], [3.0, 3.0])))
    _, metrics = preference_loss(policy, reference, {"pairs": 2.0})
    assert metrics["logps_drop"].item() == pytest.approx((1.0 + 4.0) / 2 / 2)
    assert preference_loss(reference, policy, {"pairs": 2.0})[1]["logps_drop"].item() == pytest.approx(-1.25)
    assert "kl" not in metrics
    assert metrics["reward_accuracy"].item() == 0.5


def test_desensitized_weights_stop_at_the_shorter_answer() -> None:
    """By hand. Fails when: < becomes <=."""
    found = desensitized_weights(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]), 4, 0.25)
    assert found.tolist() == [[1.0, 0.25, 0.25, 0.25], [1.0, 1.0, 0.25, 0.25]]
