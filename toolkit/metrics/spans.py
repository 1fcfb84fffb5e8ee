"""Metrics of tags on words: entities found, as seqeval counts them, or single words where tags have no B- and I-.

An entity counts as found when its first word, its last word and its type are right. All metrics come from counts `[types, 3]`
of found, predicted and actual ones, so that they are the same for any batch size and number of ranks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.config import Refusal
from toolkit.config.conditions import USUAL_TAG_METRICS
from toolkit.config.setting import did_you_mean
from toolkit.data.loading.batch import MicroBatch
from toolkit.data.tokenize.documents import IGNORED
from toolkit.data.tokenize.tags import BEGIN, END, INSIDE, OUTSIDE, PREFIXES, SINGLE
from toolkit.metrics.classes import CLASS_METRICS, Counts, Metric, named
from toolkit.metrics.classification import example_logits
from toolkit.metrics.metric import Metrics, precise_sum, ratio

_OF_WORDS = {name: metric for name, metric in CLASS_METRICS.items() if not name.endswith("_binary")}
_OF_ENTITIES: dict[str, Metric] = {
    **{name: metric for name, metric in _OF_WORDS.items() if name not in ("balanced_accuracy", "matthews_correlation")},
    **{name: CLASS_METRICS[f"{name}_micro"] for name in ("precision", "recall", "f1")},
}


def tag_metrics(tags: Sequence[str], scheme: str, names: Sequence[str] | str = (), *, strict: bool = False) -> Metrics:
    """Metrics of tagged words by name; "loss", the mean over supervised tokens, is always among them.

    `accuracy` is of the words' tags. `precision`, `recall` and `f1` are of all entities together (micro), as conlleval and
    seqeval print them; of plain tags they are the mean over the tags. `_micro`, `_macro`, `_weighted` and `_per_class` name
    the averages; of plain tags there are `balanced_accuracy` and `matthews_correlation` too. A macro average is over the
    types that occur, a precision or recall of nothing is 0. Without names the usual ones (`USUAL_TAG_METRICS`).

    The micro-batch: `labels` `[batch, length]`, -100 where no tag is predicted; where more sub-words than each word's first
    have labels, those of the first ones again in `word_labels`.

    Args:
        tags: the classes by number, such as O, B-PER, I-PER.
        scheme: iob1, iob2 or iobes (also for BILOU's letters); plain: each word counts by itself.
        strict: only entities that are written by the scheme count (seqeval's strict mode). Else an entity begins
            wherever one can be meant: `O I-PER` is an entity of one word.

    Raises:
        Refusal: an unknown metric.
    """
    known = _OF_WORDS if scheme == "plain" else _OF_ENTITIES
    wanted = [names] if isinstance(names, str) else list(names or USUAL_TAG_METRICS)
    for name in wanted:
        if name not in known:
            raise Refusal(f"--metrics {name}: known are {', '.join(known)}.{did_you_mean(name, known)}")
    prefixes, kinds, types = _parts_of(tags, scheme)

    def update(model: nn.Module, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        labels: torch.Tensor = micro_batch["labels"]
        logits = example_logits(model, micro_batch)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
        of_words, predictions = micro_batch.get("word_labels", labels), logits.argmax(-1)
        is_word = of_words != IGNORED
        if scheme == "plain":
            counts = _counted(predictions[is_word], of_words[is_word], predictions[is_word] == of_words[is_word], len(types))
        else:
            codes, numbers = prefixes.to(labels.device), kinds.to(labels.device)
            counts = _entity_counts(_flat(predictions, is_word, len(tags)), _flat(of_words, is_word, len(tags)), codes, numbers,
                                    len(types), scheme if strict else "")  # fmt: skip
        return {
            "loss": precise_sum(losses), "tokens": (labels != IGNORED).sum(), "words": is_word.sum(),
            "right": ((predictions == of_words) & is_word).sum(), "counts": counts,
        }  # fmt: skip

    def finalize(sums: dict[str, np.ndarray]) -> dict[str, float]:
        found, predicted, actual = np.asarray(sums["counts"]).astype(np.int64).T
        counts = Counts(found, predicted, actual, int(sums["right"]), int(sums["words"]), predicted + actual > 0)
        result = {"loss": ratio(sums["loss"], sums["tokens"])}
        for name in wanted:
            result |= named(name, known[name](counts), types)
        return result

    return Metrics(update=update, finalize=finalize)


def _parts_of(tags: Sequence[str], scheme: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Of each tag, and of one more that is outside of all: its prefix and the number of its type; and the types."""
    if scheme == "plain":
        return torch.zeros(0), torch.zeros(0), list(tags)
    written = [tag.partition("-") for tag in (*tags, "O")]
    types = list(dict.fromkeys(kind or "_" for prefix, _, kind in written if prefix != "O"))
    kinds = [-1 if prefix == "O" else types.index(kind or "_") for prefix, _, kind in written]
    return torch.tensor([PREFIXES[prefix] for prefix, _, _ in written]), torch.tensor(kinds), types


def _flat(tags: torch.Tensor, is_word: torch.Tensor, outside: int) -> torch.Tensor:
    """The tags of the words of all rows, with one outside after each row: no entity goes on into the next."""
    ended = functional.pad(tags, (0, 1), value=outside)
    return ended[functional.pad(is_word, (0, 1), value=True)]


def _entity_counts(
    predicted: torch.Tensor, actual: torch.Tensor, prefixes: torch.Tensor, kinds: torch.Tensor, num_types: int, strict: str
) -> torch.Tensor:
    """Found, predicted and actual entities `[types, 3]` in tags `[words]`; `strict`: the scheme, or empty."""
    begins_there, ends_there = _entities(prefixes[predicted], kinds[predicted], strict)
    begins, ends = _entities(prefixes[actual], kinds[actual], strict)
    is_found = begins & begins_there & (kinds[predicted] == kinds[actual]) & (ends == ends_there)
    return torch.stack([
        _count(kinds[actual], is_found, num_types), _count(kinds[predicted], begins_there, num_types),
        _count(kinds[actual], begins, num_types),
    ], dim=1)  # fmt: skip


def _counted(predicted: torch.Tensor, actual: torch.Tensor, is_found: torch.Tensor, num_types: int) -> torch.Tensor:
    """The same of single words."""
    everywhere = torch.ones_like(is_found)
    return torch.stack([
        _count(actual, is_found, num_types), _count(predicted, everywhere, num_types), _count(actual, everywhere, num_types),
    ], dim=1)  # fmt: skip


def _count(kinds: torch.Tensor, is_counted: torch.Tensor, num_types: int) -> torch.Tensor:
    """How many of each type `[types]`; what is outside has the type -1 and is never counted."""
    counts = torch.zeros(num_types, dtype=torch.int64, device=kinds.device)
    return counts.index_add_(0, kinds.clamp(min=0), is_counted.long())


def _entities(prefix: torch.Tensor, kind: torch.Tensor, strict: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether an entity begins at each word, and if so, the first word after it; the last word is outside.

    A word goes on with the entity of the word before it by the two tags alone, but for IOB1 in strict mode, where a B- that
    divides nothing begins no entity, and an I- after it does.
    """
    before, kind_before = functional.pad(prefix, (1, 0), value=OUTSIDE)[:-1], functional.pad(kind, (1, 0), value=-1)[:-1]
    is_same = kind == kind_before
    was_open = (before == BEGIN) | (before == INSIDE)
    goes_on = was_open & ((prefix == INSIDE) | (prefix == END)) & is_same
    begins = (prefix != OUTSIDE) & ~goes_on
    if strict == "iob1":
        divides = (prefix == BEGIN) & was_open & is_same
        goes_on = goes_on & ((before == INSIDE) | functional.pad(divides, (1, 0), value=False)[:-1])
        begins = divides | ((prefix == INSIDE) & ~goes_on)
    elif strict:
        begins = (prefix == BEGIN) | (prefix == SINGLE)
    places = torch.arange(len(prefix), device=prefix.device)
    breaks = torch.where(goes_on, len(prefix), places).flip(0).cummin(0).values.flip(0)
    ends = functional.pad(breaks, (0, 1), value=len(prefix))[1:]
    if strict == "iobes":
        last = prefix[(ends - 1).clamp(max=len(prefix) - 1)]
        begins = begins & ((last == END) | (last == SINGLE))
    elif strict == "iob1":  # seqeval: a B- ends no entity of another type that is a B- alone
        after = ends.clamp(max=len(prefix) - 1)
        begins = begins & ~((before[after] == BEGIN) & (prefix[after] == BEGIN) & ~is_same[after])
    return begins, ends
