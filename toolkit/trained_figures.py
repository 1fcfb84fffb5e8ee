"""Figures of a trained model on a dataset: those that its training would log, exact for any batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from toolkit.config import ClassificationConfig, DataConfig, ModelConfig, Refusal, RewardConfig
from toolkit.config.setting import nearest

TASKS = ("sft", "lm", "classification", "preference")
LM_FIGURES = ("loss", "perplexity", "token_accuracy", "bits_per_byte")


@dataclass(frozen=True)
class EvaluationConfig(ModelConfig, DataConfig, ClassificationConfig, RewardConfig):
    """What is read of a recipe's settings."""


@dataclass(frozen=True)
class Evaluated:
    """Figures by name over the rows of a split, and what was read."""

    task: str
    split: str
    rows: int
    figures: dict[str, float]


def evaluate_model(
    config: EvaluationConfig, metrics: list[str], task: str | None = None, split: str | None = None,
    device: str | None = None, is_length_given: bool = True, show: Callable[[Any], None] | None = None,
) -> Evaluated:  # fmt: skip
    """Evaluate `config.model` on `config.dataset`.

    Args:
        metrics: names; empty: all of a language model's, of a reward model's, and accuracy and F1 of a classifier.
        task: one of TASKS. Default: what the model is made for, and of a language model what the columns are known for.
        split: of the source; "validation" of a source that has none are the rows that training would hold out. Default:
            validation, else test, else all of the only one.
        is_length_given: False: `config.max_length` gives way to the model's positions, where these are fewer.
        show: gets the preflight of the rows before the model is loaded.

    Raises:
        Refusal: a model, a dataset, a task or metrics that don't go together.
    """
    from accelerate import Accelerator

    from toolkit.data.loaders import EvalLoader
    from toolkit.data.rows import PlainRows
    from toolkit.data.tokenising.inspection import guess_task
    from toolkit.data.tokenising.tasks import prepare
    from toolkit.evaluation import eval_with_gather
    from toolkit.hub.model_directory import no_progress_bar
    from toolkit.padding import pad_apart_from_end
    from toolkit.trained import auto_class_of, best_device, load_trained, longest_example

    auto_class = auto_class_of(config)
    name, rows = _rows_of(config, split)
    guessed = guess_task(rows.column_names)
    if auto_class == "AutoModelForCausalLM":
        task = task or (guessed if guessed in ("sft", "lm") else "lm" if "text" in rows.column_names else "sft")
    else:
        task = task or ("preference" if guessed == "preference" else "classification")
    if (task in ("sft", "lm")) != (auto_class == "AutoModelForCausalLM"):
        kind = "a language model (sft or lm)" if auto_class == "AutoModelForCausalLM" else "classification or preference"
        raise Refusal(f"--task {task}: {config.model} is made for {kind}.")
    _check_before_loading(task, metrics, config)
    longest = None if is_length_given else longest_example(config)
    if longest is not None and longest < config.max_length:
        config = replace(config, max_length=longest)
    target = best_device(device)
    with no_progress_bar():
        model, tokenizer = load_trained(auto_class, config, target)
    if task == "preference":
        tokenizer = pad_apart_from_end(tokenizer)
    prepared = prepare(task, {"evaluation": rows}, tokenizer, config, class_names=_class_names(model, config, task))
    if show is not None:
        show(prepared.preflight)
    tokenised = prepared.splits["evaluation"]
    loader = EvalLoader(PlainRows(tokenised), _collate(task, tokenizer), config.per_device_eval_batch_size)
    accelerator = Accelerator(cpu=target.type == "cpu")
    wanted = _METRICS[task](config, metrics, model, tokenised, tokenizer)
    figures = eval_with_gather(accelerator, model, loader, wanted, prefix="")
    if task == "preference":
        _check(metrics, tuple(figures), "where it gives a reward")
    if task != "classification" and metrics:
        figures = {name: figures[name] for name in dict.fromkeys(metrics)}
    return Evaluated(task, name, len(tokenised), figures)


def _rows_of(config: EvaluationConfig, split: str | None) -> tuple[str, Any]:
    """The split that is evaluated, with its name."""
    from toolkit.data.sources.load import load_source, load_splits
    from toolkit.data.sources.mixtures import Source, as_mixture

    if as_mixture(config.dataset):
        raise Refusal(f"--dataset {config.dataset}: a mixture; evaluate on one dataset at a time.")
    if config.streaming:
        raise Refusal("--streaming: exact figures need the whole split. Remove it.")
    splits = load_source(Source(config.dataset), config)
    name = split or next((name for name in ("validation", "test") if name in splits), next(iter(splits)))
    if name == "validation" and (name not in splits or config.eval_split):
        splits = load_splits(config)
    if name not in splits:
        raise Refusal(f"--split {name}: {config.dataset} has no such split. It has: {', '.join(splits)}.")
    rows, most = splits[name], config.max_eval_examples
    return name, rows if most is None else rows.select(range(min(most, len(rows))))


def _class_names(model: Any, config: EvaluationConfig, task: str) -> list[str] | None:
    """The classes as the model numbers them; None where it has no names for them."""
    if task != "classification" or config.problem_type == "regression":
        return None
    names = [model.config.id2label[number] for number in sorted(model.config.id2label)]
    return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names


def _collate(task: str, tokenizer: Any) -> Callable[..., dict[str, Any]]:
    from toolkit.data.collate import collate_padded
    from toolkit.data.collate_pairs import collate_pairs

    if task == "preference":
        return partial(collate_pairs, layout="padded", pad_token_id=tokenizer.pad_token_id)
    return partial(collate_padded, pad_token_id=tokenizer.pad_token_id)


def _language_metrics(config: Any, names: list[str], model: Any, tokenised: Any, tokenizer: Any) -> Any:
    from toolkit.data.texts import text_size
    from toolkit.losses.causal_lm import causal_lm_metrics, causal_lm_metrics_with_bytes

    is_masked = "labels" in tokenised.column_names
    _check(names, LM_FIGURES[:-1] if is_masked else LM_FIGURES, "where only answers are supervised" if is_masked else "")
    if is_masked:
        return causal_lm_metrics
    return causal_lm_metrics_with_bytes(**text_size({"validation": tokenised}, tokenizer))


def _class_metrics(config: Any, names: list[str], model: Any, tokenised: Any, tokenizer: Any) -> Any:
    from toolkit.metrics.classification import classification_metrics

    usual = {"single_label": ["accuracy", "f1"], "multi_label": ["accuracy", "f1"], "regression": ["mse", "mae", "r2"]}
    return classification_metrics(names or usual[config.problem_type], model.config.num_labels, config.problem_type)


def _preference_metrics(config: Any, names: list[str], model: Any, tokenised: Any, tokenizer: Any) -> Any:
    from toolkit.losses.reward import reward_metrics

    return reward_metrics(config)


def _check_before_loading(task: str, names: list[str], config: EvaluationConfig) -> None:
    """Refuse what no model of this task has: a mistyped name need not wait for the weights."""
    if task in ("sft", "lm"):
        _check(names, LM_FIGURES)
    elif task == "classification" and names:
        from toolkit.metrics.classification import classification_metrics

        classification_metrics(names, 2, config.problem_type)  # how many classes there are is seen later


def _check(names: list[str], known: tuple[str, ...], when: str = "") -> None:
    for name in names:
        if name not in known:
            near = nearest(name, known)
            meant = f" Did you mean {near}?" if near else ""
            raise Refusal(f"--metrics {name}: a model has {', '.join(known)}{' ' * bool(when)}{when}.{meant}")


_METRICS = {
    "sft": _language_metrics, "lm": _language_metrics, "classification": _class_metrics, "preference": _preference_metrics,
}  # fmt: skip
