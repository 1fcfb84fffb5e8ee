"""Metrics of a trained model on a dataset: those that its training would log, exact for any batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.config import ClassificationConfig, DataConfig, ModelConfig, Refusal, RewardConfig
from toolkit.config.setting import nearest

if TYPE_CHECKING:
    from toolkit.metrics.metric import Metrics

TASKS = ("sft", "lm", "classification", "preference", "unpaired")
_OF_LANGUAGE = ("sft", "lm", "preference", "unpaired")
_OF_CLASSIFIERS = ("classification", "preference")
LM_METRICS = ("loss", "perplexity", "token_accuracy", "bits_per_byte")
OF_LIKELIHOODS = (
    "log-probabilities of whole answers by this model alone, in nats: no reference model enters, so they are not the rewards "
    "that DPO and KTO log"
)
# Two answers and what the data say, on which a module of evaluate is tried before the model is loaded.
_TRIAL = (["one two three four five", "six"], ["one two three four five", "seven"])


@dataclass(frozen=True)
class EvaluationConfig(ModelConfig, DataConfig, ClassificationConfig, RewardConfig):
    """What is read of a recipe's settings."""


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
            language model whose rows have answers also modules of `evaluate` that compare texts, such as exact_match or bleu.
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

    from toolkit.data.inspection import guess_task
    from toolkit.data.loading.loaders import EvalLoader
    from toolkit.data.loading.packing import PlainRows
    from toolkit.data.sources.trained_rows import count_trained_on
    from toolkit.data.tokenize.tasks import prepare
    from toolkit.export.model_directory import no_progress_bar
    from toolkit.models.padding import pad_apart_from_end
    from toolkit.models.trained import auto_class_of, best_device, load_trained, longest_example
    from toolkit.training.evaluation import eval_with_gather

    auto_class = auto_class_of(config)
    name, rows = _rows_of(config, split)
    guessed = guess_task(rows.column_names)
    if auto_class == "AutoModelForCausalLM":
        task = task or (guessed if guessed in _OF_LANGUAGE else "lm" if "text" in rows.column_names else "sft")
    else:
        task = task or ("preference" if guessed == "preference" else "classification")
    is_language = auto_class == "AutoModelForCausalLM"
    if task not in (_OF_LANGUAGE if is_language else _OF_CLASSIFIERS):
        kind = f"a language model ({', '.join(_OF_LANGUAGE)})" if is_language else " or ".join(_OF_CLASSIFIERS)
        raise Refusal(f"--task {task}: {config.model} is made for {kind}.")
    likelihoods = _likelihood_metrics(task) if is_language else None
    of_texts = _check_before_loading(task, metrics, config, likelihoods)
    longest = None if is_length_given else longest_example(config)
    if longest is not None and longest < config.max_length:
        config = replace(config, max_length=longest)
    target = best_device(device)
    with no_progress_bar():
        model, tokenizer = load_trained(auto_class, config, target)
    if task == "preference" and not is_language:
        tokenizer = pad_apart_from_end(tokenizer)
    splits = prepare(task, {"evaluation": rows}, tokenizer, config, class_names=_class_names(model, config, task))
    if show is not None:
        show(splits.report)
    tokenized = splits["evaluation"]
    loader = EvalLoader(PlainRows(tokenized), _collate(task, tokenizer), config.per_device_eval_batch_size)
    accelerator = Accelerator(cpu=target.type == "cpu")
    wanted = likelihoods[0] if likelihoods else _METRICS[task](
        config, [name for name in metrics if name not in of_texts], model, tokenized, tokenizer
    )
    values = eval_with_gather(accelerator, model, loader, wanted, prefix="")
    if task == "preference" and not is_language:
        _check(metrics, tuple(values), "where it gives a reward")
    if task != "classification" and metrics:
        values = {name: values[name] for name in dict.fromkeys(metrics) if name not in of_texts}
    if of_texts:
        values |= _text_metrics(of_texts, rows, model, tokenizer, max_new_tokens)
    seen = None if trained is None else count_trained_on(rows, trained)
    return Evaluated(task, name, len(tokenized), values, seen, OF_LIKELIHOODS if likelihoods else "")


def _rows_of(config: EvaluationConfig, split: str | None) -> tuple[str, Any]:
    """The split that is evaluated, with its name."""
    from toolkit.data.sources.load import load_source, load_splits
    from toolkit.data.sources.mixtures import Source, as_mixture

    if as_mixture(config.dataset):
        raise Refusal(f"--dataset {config.dataset}: a mixture; evaluate on one dataset at a time.")
    if config.streaming:
        raise Refusal("--streaming: exact metrics need the whole split. Remove it.")
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
    from toolkit.data.loading.collate import collate_padded
    from toolkit.data.loading.collate_answers import collate_answers
    from toolkit.data.loading.collate_pairs import collate_pairs

    if task == "preference":
        return partial(collate_pairs, layout="padded", pad_token_id=tokenizer.pad_token_id)
    if task == "unpaired":
        return partial(collate_answers, layout="padded", pad_token_id=tokenizer.pad_token_id)
    return partial(collate_padded, pad_token_id=tokenizer.pad_token_id)


def _language_metrics(config: Any, names: list[str], model: Any, tokenized: Any, tokenizer: Any) -> Any:
    from toolkit.data.texts import text_size
    from toolkit.losses.causal_lm import causal_lm_metrics, causal_lm_metrics_with_bytes

    is_masked = "labels" in tokenized.column_names
    _check(names, LM_METRICS[:-1] if is_masked else LM_METRICS, "where only answers are supervised" if is_masked else "")
    if is_masked:
        return causal_lm_metrics
    return causal_lm_metrics_with_bytes(**text_size({"validation": tokenized}, tokenizer))


def _text_metrics(
    of_texts: dict[str, Callable[..., Any]], rows: Any, model: Any, tokenizer: Any, max_new_tokens: int
) -> dict[str, float]:
    """What modules of `evaluate` make of the model's answers and those of the data, both without the white space around them.

    Each prompt is answered by greedy decoding, by itself: in a batch, padding could round another token to the top.
    """
    from tqdm.auto import tqdm

    from toolkit.generation.answers import Sampling, answer
    from toolkit.generation.samples import prompt_of
    from toolkit.metrics.external import flat_metrics

    answers, references = list[str](), list[str]()
    for number, row in enumerate(tqdm(rows, desc="Answering", unit=" prompts", disable=None, leave=False)):
        asked = prompt_of({key: value for key, value in row.items() if key not in ("text", "input_ids")}, tokenizer)
        if asked is None or "reference" not in asked:
            raise Refusal(
                f"{row.get('origin') or f'row {number}'}: holds no prompt with an answer to compare with, which --metrics "
                f"{', '.join(of_texts)} needs. Take rows of prompt and completion, or messages."
            )
        text = answer(model, tokenizer, asked["prompt"], Sampling(max_new_tokens, temperature=0), lambda piece: None)
        answers.append(text.strip())
        references.append(asked["reference"].strip())
    metrics: dict[str, float] = {}
    for name, compute in of_texts.items():
        metrics |= flat_metrics(name, compute(answers, references), taken=metrics)
    return metrics


def _class_metrics(config: Any, names: list[str], model: Any, tokenized: Any, tokenizer: Any) -> Any:
    from toolkit.metrics.classification import classification_metrics

    return classification_metrics(names, model.config.num_labels, config.problem_type)


def _preference_metrics(config: Any, names: list[str], model: Any, tokenized: Any, tokenizer: Any) -> Any:
    from toolkit.losses.reward import reward_metrics

    return reward_metrics(
        center_rewards_coefficient=config.center_rewards_coefficient, margin_coefficient=config.margin_coefficient
    )


def _likelihood_metrics(task: str) -> tuple[Metrics, tuple[str, ...]] | None:
    """What a language model's log-probabilities say of marked answers, and the names of these metrics; None: no such task."""
    from toolkit.losses import answer_logps as found

    of_answers = {
        "preference": (found.pair_likelihood_metrics, found.PAIR_LIKELIHOODS),
        "unpaired": (found.answer_likelihood_metrics, found.ANSWER_LIKELIHOODS),
    }
    return of_answers.get(task)


def _check_before_loading(
    task: str, names: list[str], config: EvaluationConfig, likelihoods: tuple[Metrics, tuple[str, ...]] | None
) -> dict[str, Callable[..., Any]]:
    """Refuse what no model of this task has: a mistyped name need not wait for the weights. Returns the modules for texts."""
    from toolkit.metrics.external import load_metric

    if task in ("sft", "lm"):
        others = [name for name in names if name not in LM_METRICS]
        _check([name for name in others if nearest(name, LM_METRICS)], LM_METRICS)
        _check(others if task == "lm" else [], LM_METRICS, "where rows have no answers")
        return {name: load_metric(name, LM_METRICS, _TRIAL) for name in others}
    elif likelihoods:
        _check(names, likelihoods[1], "where answers are marked")
    elif task == "classification" and names:
        from toolkit.metrics.classification import classification_metrics

        classification_metrics(names, 2, config.problem_type)  # how many classes there are is seen later
    return {}


def _check(names: list[str], known: tuple[str, ...], when: str = "") -> None:
    for name in names:
        if name not in known:
            near = nearest(name, known)
            meant = f" Did you mean {near}?" if near else ""
            raise Refusal(f"--metrics {name}: a model has {', '.join(known)}{' ' * bool(when)}{when}.{meant}")


_METRICS = {
    "sft": _language_metrics, "lm": _language_metrics, "classification": _class_metrics, "preference": _preference_metrics,
}  # fmt: skip
