"""Which way the first update goes: what the rows' own labels, or rewards, ask for must be more likely after it than before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import logsigmoid

from toolkit.config import Settings
from toolkit.config.reading import values_of
from toolkit.data.loading.collate_groups import collate_lists
from toolkit.data.loading.collate_pairs import collate_answers, collate_pairs
from toolkit.diagnostics.alone import gradient_of
from toolkit.diagnostics.checks_of_steps import loss_place
from toolkit.diagnostics.findings import Finding, Outcome, found, skipped
from toolkit.losses.answer_logps import answer_logps, pair_logps
from toolkit.losses.ranking import score_lists
from toolkit.losses.reward import pair_rewards
from toolkit.losses.rollout_logps import rollout_logps
from toolkit.rollouts.batches import collate_rollouts
from toolkit.rollouts.rollout import Rollout, groups_of

if TYPE_CHECKING:
    from toolkit.data.loading.batch import Document
    from toolkit.diagnostics.records import Gradients, Record

AGAINST = -0.3  # cosine; that of recipes is .6 to 1, of a loss that is mostly of something else about 0
SAMPLED = 0.02  # nats between a token's log-probability in the loss and in sampling, of the same weights; rounding is 1e-5


def of_pairs(model: Any, padding: int, documents: Sequence[Document]) -> torch.Tensor:
    """By how much chosen answers are likelier than rejected ones; of scores, how likely these prefer them."""
    pairs = collate_pairs(list(documents), layout="padded", pad_token_id=padding)
    if model.config.num_labels == 1:  # a random model's scores differ: pairs do not count alike from the first update on
        chosen, rejected = pair_rewards(model, pairs)
        return logsigmoid(chosen - rejected).sum()
    chosen, rejected = pair_logps(model, pairs)[:2]
    return (chosen - rejected).sum()


def of_answers(model: Any, padding: int, documents: Sequence[Document]) -> torch.Tensor:
    """By how much desirable answers are likelier than undesirable ones."""
    answers = collate_answers(list(documents), layout="padded", pad_token_id=padding)
    return (answer_logps(model, answers) * torch.where(answers["desirable"], 1.0, -1.0)).sum()


def of_lists(model: Any, padding: int, documents: Sequence[Document], middle: float | None = None) -> torch.Tensor:
    """By how much documents score higher whose label is above this, or above the mean of their list."""
    scores, labels, is_document = score_lists(model, collate_lists(list(documents), pad_token_id=padding))
    means = labels.sum(1, keepdim=True) / is_document.sum(1, keepdim=True)
    return (scores * (labels - (means if middle is None else middle)) * is_document).sum()


def of_rollouts(model: Any, padding: int, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """By how much completions are likelier whose reward is above the mean of their group."""
    means = [sum(rollouts[place].reward for place in places) / len(places) for places in groups_of(rollouts) for _ in places]
    advantages = [rollout.reward - mean for rollout, mean in zip(rollouts, means, strict=True)]
    completions = collate_rollouts(rollouts, advantages, layout="padded", pad_token_id=padding)
    logps = rollout_logps(model, completions)[0] * completions["mask"]
    return (logps.sum(1) * completions["advantages"]).sum()


_Agreement = Callable[[Any, int, Any], torch.Tensor]
_BY_TASK: dict[str, tuple[list[_Agreement], str, str]] = {
    "preference": ([of_pairs], "rejected answers", "chosen ones"),
    "unpaired": ([of_answers], "undesirable answers", "desirable ones"),
    "ranking": ([of_lists, partial(of_lists, middle=0.5)], "documents of a low label", "those of a high one"),
    "prompts": ([of_rollouts], "completions of a low reward", "those of a high one"),
}


def direction_of(record: Record, examples: Sequence[Any], gradients: Gradients) -> float | None:
    """The cosine of a step against these gradients with one after which the model agrees better with the examples.

    The one furthest from 0, where there are several such directions. None where none is known, or nothing has a gradient.
    """
    model, padding = record.model, getattr(record.tokenizer, "pad_token_id", None)
    if record.task not in _BY_TASK or model is None or padding is None or not examples:
        return None
    named = {name: p for name, p in model.named_parameters() if name in gradients}
    made = torch.cat([gradients[name].flatten().double() for name in named])
    seen, cosines = len(record.forwards), list[float]()
    for agreement in _BY_TASK[record.task][0]:
        try:
            asked = gradient_of(partial(agreement, model, padding), [examples], list(named.values()))
        except Exception:  # examples of the recipe's own making: nothing is known of them then, and the run goes on
            continue
        if lengths := float(asked.norm() * made.norm()):
            cosines.append(-float(asked @ made) / lengths)
    del record.forwards[seen:]
    return max(cosines, key=abs, default=None)


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
    off, where = max(record.off_sampled, default=(0.0, ""))
    if off > SAMPLED:
        what = f"Before the first update log-probabilities are up to {off:.2g} nats away from those of sampling, per token."
        change = "Take them at --temperature: tk.rollout_logps(model, completions, config.temperature)."
        findings.append(Finding("direction", what, change, where))
    if record.direction is None and not record.off_sampled:
        return skipped("rows that prefer nothing, or no gradient was seen")
    notes = [] if record.direction is None else [f"cosine {record.direction:.2f}"]
    notes += [f"log-probabilities {off:.1g} nats from those of sampling"] if record.off_sampled else []
    return found(", ".join(notes), *findings)
