"""Which way the first update goes: what the rows' own labels, or rewards, ask for must be more likely after it than before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity, logsigmoid, normalize

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.data.loading.collate_groups import collate_lists, collate_text_groups
from toolkit.data.loading.collate_pairs import collate_answers, collate_pairs
from toolkit.diagnostics.alone import gradient_of
from toolkit.diagnostics.checks_of_gradients import loss_place
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.losses.answer_logps import answer_logps, pair_logps
from toolkit.losses.ranking import one_choice_a_row, score_lists
from toolkit.losses.reward import pair_rewards
from toolkit.losses.rollout_logps import rollout_logps
from toolkit.models.pooling import embed_texts
from toolkit.rollouts.batches import collate_rollouts
from toolkit.rollouts.rollout import Rollout, groups_of

if TYPE_CHECKING:
    from toolkit.data.loading.batch import Document
    from toolkit.diagnostics.records import Gradients, Record

AGAINST = -0.3  # cosine; that of recipes is .6 to 1, of a loss that is mostly of something else about 0
SAMPLED = 0.02  # nats between a token's log-probability in the loss and in sampling, of the same weights; rounding is 1e-5
_LEFT = 1e-3  # of a gradient; less is rounding
_Agreement = tuple[torch.Tensor, torch.Tensor]  # by how much what is preferred is above the rest, and all of it together


def of_pairs(model: Any, padding: int, documents: Sequence[Document]) -> _Agreement:
    """Chosen answers are likelier than rejected ones; of scores, these prefer them."""
    pairs = collate_pairs(list(documents), layout="padded", pad_token_id=padding)
    if model.config.num_labels == 1:  # a random model's scores differ: pairs do not count alike from the first update on
        chosen, rejected = pair_rewards(model, pairs)
        return logsigmoid(chosen - rejected).sum(), (chosen + rejected).sum()
    chosen, rejected = pair_logps(model, pairs)[:2]
    return (chosen - rejected).sum(), (chosen + rejected).sum()


def of_answers(model: Any, padding: int, documents: Sequence[Document]) -> _Agreement:
    """Desirable answers are likelier than undesirable ones."""
    answers = collate_answers(list(documents), layout="padded", pad_token_id=padding)
    logps = answer_logps(model, answers)
    return (logps * torch.where(answers["desirable"], 1.0, -1.0)).sum(), logps.sum()


def of_lists(model: Any, padding: int, documents: Sequence[Document]) -> _Agreement:
    """Documents score higher whose label is above the mean of their list."""
    scores, labels, is_document = score_lists(model, collate_lists(list(documents), pad_token_id=padding))
    means = labels.sum(1, keepdim=True) / is_document.sum(1, keepdim=True)
    return (scores * (labels - means) * is_document).sum(), scores.sum()


def of_choices(model: Any, padding: int, questions: Sequence[Document]) -> _Agreement:
    """Right choices score higher than the others of their question."""
    return of_lists(one_choice_a_row(model), padding, questions)


def of_texts(model: Any, padding: int, documents: Sequence[Document]) -> _Agreement:
    """Texts of one example are closer than those of two; where examples have scores, those with a high one are."""
    texts = collate_text_groups(list(documents), pad_token_id=padding)
    vectors = normalize(embed_texts(model, texts), dim=-1)
    cosines = vectors[texts["role"] == 0] @ vectors[texts["role"] == 1].T
    if "score" in documents[0]:
        own, scores = cosines.diagonal(), texts["score"][texts["role"] == 0]
        return (own * (scores - scores.mean())).sum(), own.sum()
    return cosines.diagonal().sum() - cosines.sum() / len(cosines), cosines.sum()


def of_rollouts(model: Any, padding: int, rollouts: Sequence[Rollout]) -> _Agreement:
    """Completions are likelier whose reward is above the mean of their group."""
    means = [sum(rollouts[place].reward for place in places) / len(places) for places in groups_of(rollouts) for _ in places]
    advantages = [rollout.reward - mean for rollout, mean in zip(rollouts, means, strict=True)]
    completions = collate_rollouts(rollouts, advantages, layout="padded", pad_token_id=padding)
    logps = (rollout_logps(model, completions)[0] * completions["mask"]).sum(1)
    return (logps * completions["advantages"]).sum(), logps.sum()


_BY_TASK: dict[str, tuple[Callable[[Any, int, Any], _Agreement], str, str]] = {
    "preference": (of_pairs, "rejected answers", "chosen ones"),
    "unpaired": (of_answers, "undesirable answers", "desirable ones"),
    "ranking": (of_lists, "documents of a low label", "those of a high one"),
    "multiple_choice": (of_choices, "wrong choices", "right ones"),
    "embedding": (of_texts, "pairs of texts that are unlike", "those that are alike"),
    "prompts": (of_rollouts, "completions of a low reward", "those of a high one"),
}


def direction_of(record: Record, examples: Sequence[Any], gradients: Gradients) -> float | None:
    """The cosine of a step against these gradients with one after which the model agrees better with the examples.

    Of both without what changes all of the examples alike: a loss may begin with that by right (squared errors, weights of
    unequal numbers, a likelihood). None where no direction is known, or nothing else is left of it; 0 where nothing else is
    left of the step.
    """
    model, padding = record.model, getattr(record.tokenizer, "pad_token_id", None)
    if record.task not in _BY_TASK or model is None or padding is None or not examples or not gradients:
        return None
    named = {name: p for name, p in model.named_parameters() if name in gradients}
    made = torch.cat([gradients[name].flatten().double() for name in named])
    agreement, seen = _BY_TASK[record.task][0], len(record.forwards)

    def gradient(which: int) -> torch.Tensor:
        return gradient_of(lambda rows: agreement(model, padding, rows)[which], [examples], list(named.values()))

    try:
        asked, alike = gradient(0), gradient(1)
    except Exception:  # examples of the recipe's own making: nothing is known of them then, and the run goes on
        return None
    finally:
        del record.forwards[seen:]
    wanted, taken = (each - (each @ alike) / (alike @ alike).clamp_min(1e-30) * alike for each in (asked, made))
    if wanted.norm() <= _LEFT * asked.norm() or not made.norm():
        return None
    if taken.norm() <= _LEFT * made.norm():
        return 0.0
    return -float(cosine_similarity(wanted, taken, dim=0))


def check_direction(record: Record, config: Settings) -> Outcome:
    """The first update makes likelier what the rows' labels, or rewards, prefer; a policy's log-probabilities are those of
    sampling."""
    if "discopop" in (values_of(config).get("loss_type") or ()):
        return skipped("discopop prefers rejected answers where both are about as likely, as at the first update")
    findings = list[Finding | None]()
    if record.direction is not None and record.direction < AGAINST:
        _, worse, better = _BY_TASK[record.task]
        what = f"The first update prefers {worse} to {better}: its cosine with the opposite is {-record.direction:.2f}."
        change = "Look at the sign of the loss, and at which of the two it is given first."
        findings.append(Finding("direction", what, change, loss_place(record)))
    if record.direction == 0.0:
        _, worse, better = _BY_TASK[record.task]
        what = f"The first update changes {worse} and {better} alike: nothing that is preferred is in the loss."
        change = "Give both kinds the sign of their own in the loss."
        findings.append(Finding("direction", what, change, loss_place(record)))
    off, where = max(record.off_sampled, default=(0.0, ""))
    if off > SAMPLED and not values_of(config).get("rollout_server"):  # whose arithmetic is another one
        what = f"Before the first update log-probabilities are up to {off:.2g} nats away from those of sampling, per token."
        change = "Take them at --temperature: tk.rollout_logps(model, completions, config.temperature)."
        findings.append(Finding("direction", what, change, where))
    findings += [each for each in record.noted if each.check == "direction"]
    if record.direction is None and not record.off_sampled and not findings:
        return skipped("rows that prefer nothing, or no gradient was seen")
    notes = [] if record.direction is None else [f"cosine {record.direction:.2f}"]
    notes += [f"log-probabilities {off:.1g} nats from those of sampling"] if record.off_sampled else []
    return found(", ".join(notes), *findings)
