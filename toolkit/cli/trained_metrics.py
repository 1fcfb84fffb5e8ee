"""Metrics of a trained model on a dataset: those that its training would log, exact for any batch size."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.cli.evaluated_tasks import EVALUATED, MASKED_DIFFUSION, EvaluationConfig, Loaded, check_names
from toolkit.config import DataConfig, Refusal

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Evaluated:
    """Metrics by name over the rows of a split, and what was read."""

    task: str
    split: str
    rows: int
    metrics: dict[str, float]
    trained_on: int | None = None  # rows whose input the model was trained on; None where that is not known
    remark: str = ""  # what the metrics are not


def evaluate_model(
    config: EvaluationConfig, metrics: list[str], task: str | None = None, split: str | None = None,
    device: str | None = None, is_length_given: bool = True, show: Callable[[Any], None] | None = None,
    max_new_tokens: int = 256,
    trained: DataConfig | None = None,
) -> Evaluated:  # fmt: skip
    """Evaluate `config.model` on `config.dataset`.

    Args:
        metrics: names; empty: all of a language model's, of a reward model's, and accuracy and F1 of a classifier. Of a
            language model whose rows have answers also those of its answers: bleu, chrf, rouge, exact_match, or a module of
            `evaluate` that compares texts.
        task: one of TASKS. Default: what the model is made for, and of a language model what the columns are known for:
            of marked answers its log-probabilities are compared (`toolkit.losses.answer_logps`).
        split: of the source; "validation" of a source that has none are the rows that training would hold out. Default:
            validation, else test, else all of the only one.
        is_length_given: False: `config.max_length` gives way to the model's positions, where these are fewer.
        max_new_tokens: the longest answer that is generated for a module which compares texts.
        show: gets the report of the rows before the model is loaded.
        trained: the settings of the run that trained the model, whose rows are looked for among those evaluated.

    Raises:
        Refusal: a model, a dataset, a task or metrics that don't go together.
    """
    from accelerate import Accelerator

    from toolkit.data.loading.loaders import EvalLoader
    from toolkit.data.loading.packing import PlainRows
    from toolkit.data.sources.trained_rows import count_trained_on
    from toolkit.data.tokenize.tasks import prepare
    from toolkit.export.model_directory import no_progress_bar
    from toolkit.models.diffusion import of_both_sides
    from toolkit.models.trained import auto_class_of, best_device, load_trained, longest_example
    from toolkit.training.evaluation import eval_with_gather

    auto_class, both_sides = auto_class_of(config), of_both_sides(config)
    name, rows = _rows_of(config, split)
    tasks, present = EVALUATED[MASKED_DIFFUSION if both_sides else auto_class], list(rows.column_names)
    task = task or _task_of(present, list(tasks))
    if task not in tasks:
        kind = f"a language model ({', '.join(tasks)})" if "lm" in tasks else " or ".join(tasks)
        raise Refusal(f"--task {task}: {config.model} is made for {kind}.")
    evaluated = tasks[task]
    of_texts = evaluated.check(metrics, config)
    longest = None if is_length_given else longest_example(config)
    if longest is not None and longest < config.max_length:
        config = replace(config, max_length=longest)
    target = best_device(device)
    with no_progress_bar(), contextlib.redirect_stdout(sys.stderr):  # standard output is for the results
        model, tokenizer = load_trained(auto_class, config, target, **both_sides)
    if evaluated.fit_tokenizer:
        tokenizer = evaluated.fit_tokenizer(tokenizer)
    form = evaluated.form(config, model) if evaluated.form else task
    splits = prepare(form, {"evaluation": rows}, tokenizer, config)
    if show is not None:
        show(splits.report)
    tokenized = splits["evaluation"]
    augment = evaluated.augment(model, tokenizer, config) if evaluated.augment else None
    collate, size = evaluated.collate(model, tokenizer), config.per_device_eval_batch_size
    loader = EvalLoader(PlainRows(tokenized), collate, size, augment=augment, seed=config.seed)
    names = [name for name in dict.fromkeys(metrics) if name not in of_texts]
    loaded, accelerator = Loaded(config, names, model, tokenizer, rows, tokenized), Accelerator(cpu=target.type == "cpu")
    values = eval_with_gather(accelerator, model, loader, evaluated.metrics(loaded), prefix="")
    if metrics and not evaluated.keeps_all:
        check_names(names, tuple(values))
        values = {name: values[name] for name in names}
    if of_texts and evaluated.texts:
        values |= eval_with_gather(accelerator, model, loader, evaluated.texts(loaded, of_texts, accelerator), prefix="")
    elif of_texts:
        from toolkit.generation.held_out_answers import answer_metrics, held_out_prompts

        prompts = held_out_prompts(rows, tokenizer)
        values |= answer_metrics(accelerator, model, tokenizer, prompts, of_texts, max_new_tokens, prefix="")
    seen = None if trained is None else count_trained_on(rows, trained)
    read = min(len(tokenized), len(rows))  # a row may be of several windows, and a list of several rows
    return Evaluated(task, name, read, values, seen, evaluated.remark)


def _rows_of(config: EvaluationConfig, split: str | None) -> tuple[str, Dataset]:
    """The split that is evaluated, with its name."""
    from toolkit.data.sources.load import load_source, load_splits, split_named
    from toolkit.data.sources.mixtures import Source, as_mixture

    if as_mixture(config.dataset):
        raise Refusal(f"--dataset {config.dataset}: a mixture; evaluate on one dataset at a time.")
    if config.streaming:
        raise Refusal("--streaming: exact metrics need the whole split. Remove it.")
    splits = load_source(Source(config.dataset), config)
    name = split or next((name for name in ("validation", "test") if name in splits), next(iter(splits)))
    if name == "validation" and (name not in splits or config.eval_split):
        splits = load_splits(config)
    rows, most = split_named(name, splits, config.dataset), config.max_eval_examples
    return name, rows if most is None else rows.select(range(min(most, len(rows))))


def _task_of(columns: list[str], tasks: list[str]) -> str:
    """What rows with these columns are for, where the model is for one of `tasks`."""
    from toolkit.data.inspection import guess_task

    guessed = guess_task(columns)
    return guessed if guessed in tasks else "lm" if "lm" in tasks and "text" in columns else tasks[0]
