"""Teachers of a plan: models without weights, and answers that nobody gave."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from toolkit.data.loading.batch import Batch
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.data.loading.packing import Rows
from toolkit.diagnostics.ledger import Ledger
from toolkit.diagnostics.replacements import Replacements
from toolkit.distillation import classifier_teacher, on_policy, teacher
from toolkit.distillation.own_teacher import Average
from toolkit.distillation.store import TaughtRows, collate_taught
from toolkit.generation.sampler import Completion

TEACHER = "teacher"


def replace_teachers(replacements: Replacements, ledger: Ledger) -> None:
    """Replace what asks a teacher beforehand, and what the student would write; a teacher in memory is asked as always."""
    replacements.attribute(teacher, "store_teacher", _any_answers)
    replacements.attribute(teacher, "connect_teacher", lambda *_, **__: (None, {}))
    for builder in (teacher, classifier_teacher):
        replacements.attribute(builder, "place_frozen", functools.partial(_placed, ledger))
    replacements.attribute(Average, "__init__", functools.partial(_averaged, ledger))
    replacements.attribute(on_policy, "sample_on_rank", _longest_answers)
    replacements.public("with_own_answers", _with_longer_answers)


def _placed(ledger: Ledger, original: Any, *values: object, **named: object) -> nn.Module:
    model: nn.Module = original(*values, **named)
    _see(ledger, model)
    return model


def _averaged(ledger: Ledger, original: Any, average: Any, *values: Any) -> None:
    original(average, *values)
    _see(ledger, average.model, trained=average.means)
    for mean in average.means.values():
        ledger.see(mean, TEACHER)


def _see(ledger: Ledger, model: nn.Module, trained: Any = None) -> None:
    """Its tensors; of an average the trained ones alone, because it shares the others with the student."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if trained is None or name in trained:
            ledger.see(tensor, TEACHER)


def _any_answers(
    original: Any, accelerator: Any, load: Any, made_of: Any, train: TrainLoader, evaluation: EvalLoader | None, *,
    top_k: int, vocabulary: int, temperature: float,
) -> tuple[TrainLoader, EvalLoader | None]:  # fmt: skip
    def taught(loader: Any) -> Any:
        rows = TaughtRows(loader.rows, _AnyAnswers(loader.rows, top_k, vocabulary))  # type: ignore[arg-type]
        return dataclasses.replace(loader, rows=rows, collate=functools.partial(collate_taught, collate=loader.collate))

    return taught(train), evaluation and taught(evaluation)


@dataclass(frozen=True)
class _AnyAnswers:
    """A store that has the answers to every example, all of them zeros."""

    rows: Rows
    top_k: int
    vocabulary: int

    def read(self, example: int) -> tuple[np.ndarray, np.ndarray | None]:
        tokens, is_whole = int(self.rows.units["tokens"][example]), self.top_k == self.vocabulary
        logps = np.zeros((tokens, self.vocabulary if is_whole else self.top_k + 1), dtype=np.float32)
        return logps, None if is_whole else np.zeros((tokens, self.top_k), dtype=np.int64)


def _longest_answers(original: Any, accelerator: Any, model: Any, prompts: Any, *values: Any, limits: Any) -> Any:
    return [[Completion(tokens=[0] * most, logps=[0.0] * most)] for most in limits]


def _with_longer_answers(
    original: Any, accelerator: Any, model: Any, tokenizer: Any, train: Any, batch: Batch, config: Any
) -> Batch:
    """The batch with all answers the student's own, of the greatest length, where the data's are shorter."""
    if not config.on_policy_share:
        return batch
    own: Batch = original(accelerator, model, tokenizer, train, batch, dataclasses.replace(config, on_policy_share=1.0))
    longer = own.micro_batches[0]["input_ids"].numel() > batch.micro_batches[0]["input_ids"].numel()
    return own if longer else batch
