"""Metrics of tags against seqeval and scikit-learn, for every cut into batches."""

import random
import warnings
from types import SimpleNamespace

import pytest
import sklearn.metrics
import torch
from seqeval import metrics as seqeval, scheme as schemes
from torch import nn

from toolkit.config import Refusal
from toolkit.metrics.spans import IGNORED, tag_metrics

TYPES = ("PER", "LOC", "date-of birth")
PREFIXES = {"iob1": "BI", "iob2": "BI", "iobes": "BIES", "bilou": "BILU"}
SCHEMES = {"iob1": schemes.IOB1, "iob2": schemes.IOB2, "iobes": schemes.IOBES, "bilou": schemes.BILOU}
AVERAGES = ("micro", "macro", "weighted")


class Given(nn.Module):
    """Gives the logits that are put in as input_ids."""

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=input_ids)


def names_of(scheme: str) -> list[str]:
    return ["O", *(f"{prefix}-{kind}" for kind in TYPES for prefix in PREFIXES[scheme])]


def sentences(tags: list[str], number: int, seed: int) -> list[list[tuple[str, str]]]:
    """Tags and predictions at random, so that every tag follows every other; half of the predictions are right."""
    numbers = random.Random(seed)
    drawn = [[numbers.choice(tags) for _ in range(numbers.randrange(1, 12))] for _ in range(number)]
    return [[(tag, tag if numbers.random() < 0.5 else numbers.choice(tags)) for tag in row] for row in drawn]


def measured(
    tags: list[str], rows: list[list[tuple[str, str]]], scheme: str, size: int, names: list[str], strict: bool
) -> dict:
    """The metrics from micro-batches of `size` sentences; between words are tokens without a label, where anything is predicted."""
    metrics, sums = tag_metrics(tags, scheme, names, strict=strict), {}
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        length = 2 * max(map(len, batch)) + 1
        labels, predicted = torch.full((len(batch), length), IGNORED), torch.randint(len(tags), (len(batch), length))
        for i, row in enumerate(batch):
            for j, (tag, guess) in enumerate(row):
                labels[i, 2 * j + 1], predicted[i, 2 * j + 1] = tags.index(tag), tags.index(guess)
        logits = nn.functional.one_hot(predicted, len(tags)).double()
        for name, value in metrics.update(Given(), {"input_ids": logits, "labels": labels}).items():
            sums[name] = sums.get(name, 0) + value
    return metrics.finalize({name: value.numpy() for name, value in sums.items()})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("number", [1, 7, 97])
def test_entities_are_those_of_seqeval_for_every_batch_size(scheme: str, strict: bool, number: int) -> None:
    """On sequences that break their scheme everywhere. Fails when: an entity may go on into the next sentence (`_flat` adds
    nothing), `& is_same` is left out, or IOB1's B- always begins an entity in strict mode."""
    if scheme == "bilou" and not strict:
        pytest.skip("seqeval's default mode does not know L- and U-")
    tags, names = (
        names_of(scheme),
        [f"{name}_{average}" for name in ("precision", "recall", "f1") for average in (*AVERAGES, "per_class")],
    )
    rows = sentences(tags, number, seed=number)
    actual, guessed = [[tag for tag, _ in row] for row in rows], [[guess for _, guess in row] for row in rows]
    options = {"mode": "strict", "scheme": SCHEMES[scheme]} if strict else {}
    wanted = {"accuracy": seqeval.accuracy_score(actual, guessed)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for average in AVERAGES:
            for name in ("precision", "recall", "f1"):
                wanted[f"{name}_{average}"] = getattr(seqeval, f"{name}_score")(actual, guessed, average=average, **options)
        report = seqeval.classification_report(actual, guessed, output_dict=True, **options)
    for kind in TYPES:
        for name, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            wanted[f"{name}_class_{kind.replace(' ', '_')}"] = report[kind][theirs] if kind in report else 0.0
    for size in (1, 3, 8):
        found = measured(tags, rows, "iobes" if scheme == "bilou" else scheme, size, ["accuracy", *names], strict)
        found.pop("loss")
        assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("number", [1, 7, 97])
def test_plain_tags_are_counted_word_by_word_as_in_scikit_learn(number: int) -> None:
    """Fails when: the counts are of all tokens, and not of those with a label."""
    tags = ["O", "NAME", "NUMBER", "CALL"]
    rows = sentences(tags, number, seed=number)
    actual, guessed = ([pair[place] for row in rows for pair in row] for place in (0, 1))
    precision, recall, f1, _ = sklearn.metrics.precision_recall_fscore_support(
        actual, guessed, average="macro", zero_division=0
    )
    per_class = sklearn.metrics.f1_score(actual, guessed, labels=tags, average=None, zero_division=0)
    wanted = {
        "accuracy": sklearn.metrics.accuracy_score(actual, guessed), "precision": precision, "recall": recall, "f1": f1,
        **{f"f1_class_{tag}": value for tag, value in zip(tags, per_class, strict=True)},
    }  # fmt: skip
    for size in (1, 3, 8):
        found = measured(tags, rows, "plain", size, ["accuracy", "precision", "recall", "f1", "f1_per_class"], False)
        found.pop("loss")
        assert found == pytest.approx(wanted, abs=1e-12)


def test_the_loss_is_the_mean_over_labeled_tokens_and_the_counts_are_of_first_sub_words() -> None:
    """Two sub-words of each word have labels; `word_labels` say which is the first. Fails when: the counts take `labels`."""
    tags, generator = ["O", "B-PER", "I-PER"], torch.Generator().manual_seed(0)
    logits = torch.randn(5, 6, 3, generator=generator, dtype=torch.float64)
    words = torch.full((5, 6), IGNORED)
    words[:, ::2] = torch.randint(3, (5, 3), generator=generator)
    labels = words.clone()
    labels[:, 1::2] = words[:, ::2]
    labels[4, 4:] = words[4, 4:] = IGNORED
    metrics = tag_metrics(tags, "iob2")
    sums = metrics.update(Given(), {"input_ids": logits, "labels": labels, "word_labels": words})
    found = metrics.finalize({name: value.numpy() for name, value in sums.items()})
    losses = [-logits[i, j].log_softmax(-1)[labels[i, j]].item() for i in range(5) for j in range(6) if labels[i, j] != IGNORED]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    chosen = logits.argmax(-1)
    rows = [[(tags[words[i, j]], tags[chosen[i, j]]) for j in range(0, 6, 2) if words[i, j] != IGNORED] for i in range(5)]
    actual, guessed = [[tag for tag, _ in row] for row in rows], [[guess for _, guess in row] for row in rows]
    assert found["f1"] == pytest.approx(seqeval.f1_score(actual, guessed), rel=1e-12)
    assert found["accuracy"] == pytest.approx(seqeval.accuracy_score(actual, guessed), rel=1e-12)


def test_an_unknown_metric_is_refused_with_what_was_meant() -> None:
    """Fails when: the names are not compared with those that there are."""
    with pytest.raises(Refusal, match="Did you mean f1_macro"):
        tag_metrics(["O", "B-X"], "iob2", ["f1_makro"])
    with pytest.raises(Refusal, match="--metrics f1_makro"):  # one name alone
        tag_metrics(["O", "B-X"], "iob2", "f1_makro")
