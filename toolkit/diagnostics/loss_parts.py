"""What goes into a loss: a reference, a KL, advantages, values, masks, embeddings; and what must hold of each in any loss.

Each function replaces a public one while a recipe is watched (wrappers.py), looks at what that is given before the first
update, and notes a finding where an identity is broken that no loss of its kind breaks by right.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity

from toolkit.data.loading.batch import MISMATCHED
from toolkit.diagnostics.findings import Finding
from toolkit.losses.answer_logps import answer_logps, mismatched_logps
from toolkit.losses.pair_losses import PairLogps
from toolkit.models.pooling import embed_texts
from toolkit.rollouts.batches import counted_tokens
from toolkit.rollouts.rollout import groups_of
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from toolkit.diagnostics.watch import Watch

_SAME = 1e-3  # of numbers or gradients that are to be equal; rounding in float32 is about 1e-6
_APART = 0.5  # nats between a policy and its reference, in which a KL is tried
_ANSWERS = ("chosen", "rejected")
_gradients = functools.partial(torch.autograd.grad, create_graph=True, allow_unused=True, materialize_grads=True)
Original = Callable[..., Any]


def is_first(watch: Watch) -> bool:
    """Whether the run is one whose first update is looked at, and comes to it."""
    return watch.compares_gradients and not watch.record.updates


@contextmanager
def aside(watch: Watch) -> Iterator[None]:
    """A trial that leaves no trace in the record or in random numbers. The recipe's own code may refuse what it is given."""
    record, seen, sampled = watch.record, len(watch.record.forwards), len(watch.record.off_sampled)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        except Exception:  # nothing is known then, and the run goes on
            pass
        finally:
            watch.leaves = None
            del record.forwards[seen:], record.off_sampled[sampled:]


def look_at_loss(watch: Watch, loss_fn: Original, model: Any, tensors: dict[str, Any], totals: Any) -> None:
    """Try the loss function of the first step on log-probabilities that are made up, and without advantages."""
    place = watch.place_of(loss_fn)
    with aside(watch):
        watch.leaves = {True: [], False: []}
        leaves, loss = watch.leaves, loss_fn(model, dict(tensors), totals)[0]
        if len(leaves[True]) == len(leaves[False]) == 1:
            _look_at_reference(watch, loss, leaves[True][0], leaves[False][0], place)
    with aside(watch), torch.no_grad():
        if {"advantages", "mask", "reference_logps"} <= tensors.keys():
            plain, before = {**tensors, "advantages": torch.zeros_like(tensors["advantages"])}, tensors["reference_logps"]
            shifted = [before + apart * tensors["mask"] for apart in (-_APART, 0.0, _APART)]
            below, same, above = (float(loss_fn(model, {**plain, "reference_logps": each}, totals)[0]) for each in shifted)
            if below + above - 2 * same < -1e-5:  # a KL is greater when the two are apart, whichever is above
                _note_rewarded_kl(watch, place)


def _look_at_reference(watch: Watch, loss: torch.Tensor, policy: Any, reference: Any, place: str) -> None:
    """What an answer has gained is its log-probability less the reference's."""
    gradients = _gradients(loss, [*policy, *reference])
    own, theirs = gradients[: len(policy)], gradients[len(policy) :]
    if all(cosine_similarity(a, b, dim=0) > 0.999 for a, b in zip(own, theirs, strict=True)):
        what = "The reference's log-probabilities count in the loss as the policy's do: they are added, not subtracted."
        _note(watch, what, "Compare policy - reference, of each answer.", place)
    for left_out, other in ((0, 1), (1, 0)) if len(policy) == 2 else ():
        differs = own[other].any() and (own[other] + theirs[other]).norm() < _SAME * own[other].norm()
        if differs and own[left_out].any() and not theirs[left_out].any():
            (together,) = _gradients(own[left_out].sum(), [reference[other]])
            if together.any():  # else the two answers have losses of their own
                what = f"The reference's log-probability is subtracted of {_ANSWERS[other]} answers, and not of the others."
                _note(watch, what, "Subtract it of both answers.", place)


def policy_logps(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    """Before the first update, with dropout off: how far they are from what sampling noted of the same weights."""
    made = original(*values, **named)
    completions = watch.record.completions = values[1] if len(values) > 1 else named["micro_batch"]
    if is_first(watch) and {"sampled_logps", "mask"} <= completions.keys():
        away = (made[0].detach() - completions["sampled_logps"]) * completions["mask"]
        watch.record.off_sampled.append((float(away.abs().max()), watch.place()))
    return made


def known_loss(watch: Watch, original: Original, *values: object, **named: object) -> Any:
    """A loss of pairs, of which it is known what an even guess costs."""
    watch.record.has_known_loss = True
    return original(*values, **named)


def answers_logps(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    """Of a policy, or, without a gradient, of a reference of the recipe's own."""
    return _made_up(watch, original(*values, **named), torch.is_grad_enabled())


def reference_logps(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    leaves, watch.leaves = watch.leaves, None  # it may call those of answers
    made, watch.leaves = original(*values, **named), leaves
    return _made_up(watch, made, False)


def _made_up(watch: Watch, logps: Any, of_policy: bool) -> Any:
    """As many log-probabilities from -3 to -1 nats, with a gradient, while a loss is tried on such."""
    if watch.leaves is None or logps is None:
        return logps
    is_of_pairs = isinstance(logps, PairLogps)
    made = [(-1 - 2 * torch.rand_like(each)).requires_grad_() for each in (logps[:2] if is_of_pairs else [logps])]
    watch.leaves[of_policy].append(made)
    return PairLogps(*made, *logps[2:]) if is_of_pairs else made[0]


def shaped_rewards(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    if _given(original, values, named).get("beta", 0.0) < 0:
        _note_rewarded_kl(watch, watch.place())
    return original(*values, **named)


def _note_rewarded_kl(watch: Watch, place: str) -> None:
    what = "The policy is rewarded for going away from its reference: the KL has the wrong sign."
    _note(watch, what, "Add beta * KL to the loss, or subtract it from the rewards, with a beta above 0.", place)


def policy_batches(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    """The completions of a prompt have no order: advantages are not centered over those of one number in their groups."""
    given = _given(original, values, named)
    advantages, groups = torch.as_tensor(given["advantages"]).double(), groups_of(given["rollouts"])
    if watch.compares_gradients and advantages.dim() == 1 and len(groups) > 1 and len({len(group) for group in groups}) == 1:
        table = advantages.view(len(groups), -1)
        of_numbers, of_prompts = (float(table.sum(axis).abs().max() / table.abs().sum()) for axis in (0, 1))
        watch.record.off_axis += of_numbers < 1e-6 and of_prompts > _SAME
        if watch.record.off_axis > 1:  # once may be by chance
            what = "Advantages add up to 0 over the first completions of all prompts, the second ones ..., and not by prompt."
            change = "Take means and standard deviations over axis 1 of a table [prompts, completions]; flatten it as it is."
            _note(watch, what, change, watch.place())
    return original(**{**given, "collate": functools.partial(_collated, watch, given["collate"])})


def _collated(watch: Watch, collate: Original, rollouts: Any, advantages: Any) -> dict[str, Any]:
    made: dict[str, Any] = collate(rollouts, advantages)
    _note_uncounted(watch, (made["mask"] != 0).sum() - sum(map(sum, counted_tokens(rollouts))), watch.place_of(collate))
    return made


def policy_loss(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    mask, of = _given(original, values, named)["mask"].bool(), watch.record.completions
    if "answer_slots" in of and mask.shape == (of["answers"], of["longest_answer"]):
        _note_uncounted(watch, mask.sum() - mask.flatten()[of["answer_slots"]].sum(), watch.place())
    return original(*values, **named)


def _note_uncounted(watch: Watch, tokens: Any, place: str) -> None:
    what = f"{int(tokens):,} tokens in the mask of a micro-batch are padding, of prompts or of an environment."
    if tokens > 0:
        _note(watch, what, "Take the mask of tk.collate_rollouts: 1 at the tokens that the policy wrote.", place, "masks")


def value_loss(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    """Before the first update values are the old ones; they learn returns; and they are to be right, not wrong."""
    made, given, completions = original(*values, **named), _given(original, values, named), watch.record.completions
    loss, place = made[0], watch.place()
    if is_first(watch) and loss.requires_grad:
        old, counts = given["old_values"], given["mask"].bool()
        away = (given["values"].detach() - old).abs().where(counts, 0.0).max()
        is_read = given.get("cliprange_value", 0.2) is not None
        if is_read and away > 0.05 * old.abs().where(counts, 0.0).max():
            what = f"Before the first update values are up to {float(away):.2g} away from the old ones of the same tokens."
            change = "Take both from tk.logps_and_values, whose values are of the states before their tokens: shift neither."
            _note(watch, what, change, place)
        if "returns" in completions and given["returns"].data_ptr() == completions["advantages"].data_ptr():
            _note(watch, "Values learn the advantages.", 'Give tk.value_loss the returns: completions["returns"].', place)
        signed = (watch, "The loss of the values is subtracted: they learn to be wrong.", "Add it to the policy's.", place)
        loss.register_hook(lambda share: _note(*signed) if share < 0 else None)
    return made


def estimated_kl(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    """KTO's z is of answers that belong to other prompts, where there are such."""
    given = _given(original, values, named)
    model, tensors, place = given["model"], given["batch"].micro_batches[0], watch.place()
    if is_first(watch) and any(name.startswith(MISMATCHED) for name in tensors):
        with aside(watch), evaluation_mode(model):
            taken = given["logps_of_mismatched"](model, tensors)[0]
            own, others = answer_logps(model, tensors), mismatched_logps(model, tensors)
            if torch.allclose(taken, own, atol=_SAME) and not torch.allclose(taken, others, atol=_SAME):
                what = "KTO's z is estimated on answers of the prompts themselves, and the rows have mismatched ones for it."
                _note(watch, what, "Give tk.estimate_kl those of tk.mismatched_logps(model, answers).", place)
    return original(*values, **named)


def sentence_files(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    watch.record.pooling = _given(original, values, named)["style"].pooling
    return original(*values, **named)


def cached_gradient_loss(watch: Watch, original: Original, embed: Original) -> Any:
    watch.record.embeds.append(embed)
    return original(embed)


def cached_gradients(watch: Watch, original: Original, *values: Any, **named: Any) -> Any:
    """Embeddings of both passes are those that the files of the model directory say, up to their lengths."""
    given, record = _given(original, values, named), watch.record
    model, tensors = given["model"], given["batch"].micro_batches[0]
    for embed in [given["embed"], *record.embeds] if record.pooling and not record.updates else ():
        with aside(watch), evaluation_mode(model):
            made, wanted = embed(model, tensors), embed_texts(model, tensors, pooling=record.pooling)
            if made.shape == wanted.shape and cosine_similarity(made, wanted).min() < 1 - _SAME:
                what = f"Embeddings are not pooled in training as the files of the model directory say: by {record.pooling}."
                change = "Give tk.embed_texts and tk.sentence_files one pooling: style.pooling."
                _note(watch, what, change, watch.place_of(embed), "saved")
    return original(*values, **named)


def _given(original: Original, values: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names."""
    return {**dict(zip(inspect.signature(original).parameters, values, strict=False)), **named}


def _note(watch: Watch, what: str, change: str, place: str, check: str = "direction") -> None:
    if all((each.check, each.where, each.change) != (check, place, change) for each in watch.record.noted):
        watch.record.noted.append(Finding(check, what, change, place))


WRAPPERS: dict[str, Original] = {
    "rollout_logps": policy_logps, "logps_and_values": policy_logps, "preference_loss": known_loss, "reward_loss": known_loss,
    "pair_logps": answers_logps, "answer_logps": answers_logps, "shaped_rewards": shaped_rewards,
    "token_advantages": shaped_rewards, "policy_batches": policy_batches, "policy_loss": policy_loss, "value_loss": value_loss,
    "estimate_kl": estimated_kl, "sentence_files": sentence_files, "cached_gradient_loss": cached_gradient_loss,
    "cache_gradients": cached_gradients,
}  # fmt: skip
