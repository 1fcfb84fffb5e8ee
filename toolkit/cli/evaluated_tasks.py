"""What `toolkit evaluate` computes: for each kind of model and each task its rows, its collate function and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.cli.setting_options import TASKS
from toolkit.config import (
    ClassificationConfig,
    DataConfig,
    DiffusionConfig,
    EmbeddingConfig,
    GeneratedTextConfig,
    MaskedLMConfig,
    ModelConfig,
    QuestionAnsweringConfig,
    RankingConfig,
    Refusal,
    RewardConfig,
    Seq2SeqConfig,
    TokenClassificationConfig,
)
from toolkit.config.setting import did_you_mean, nearest
from toolkit.data.loading.collate import collate_padded, collate_seq2seq, collate_windows
from toolkit.data.loading.collate_groups import collate_lists, collate_text_groups
from toolkit.data.loading.collate_pairs import collate_answers, collate_pairs
from toolkit.data.loading.noise import build_noise
from toolkit.data.loading.token_masks import build_masks
from toolkit.data.tokenize.classification import classification_format
from toolkit.data.tokenize.question_answering import reference_answers
from toolkit.data.tokenize.tags import find_tags
from toolkit.data.tokenize.text_groups import text_group_format
from toolkit.data.tokenize.token_tags import token_classification_format
from toolkit.generation.targets import target_metrics
from toolkit.losses.answer_logps import ANSWER_LIKELIHOODS, PAIR_LIKELIHOODS, answer_likelihood_metrics, pair_likelihood_metrics
from toolkit.losses.causal_lm import causal_lm_metrics, causal_lm_metrics_with_bytes
from toolkit.losses.contrastive import embedding_task
from toolkit.losses.diffusion import diffusion_metrics
from toolkit.losses.masked_lm import masked_lm_metrics
from toolkit.losses.ranking import multiple_choice_metrics, ranking_list_metrics
from toolkit.losses.reward import reward_metrics
from toolkit.losses.seq2seq import seq2seq_metrics
from toolkit.metrics.classification import classification_metrics
from toolkit.metrics.question_answering import question_answering_metrics
from toolkit.metrics.spans import tag_metrics
from toolkit.metrics.text import choose_text_metrics
from toolkit.models.encoder_decoder import decoder_start
from toolkit.models.fitted_tokenizer import pad_apart_from_end
from toolkit.models.pooling import embed_texts
from toolkit.models.sentence_files import embedding_style

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.data.loading.loaders import Collate
    from toolkit.data.loading.packing import Augment
    from toolkit.data.tokenize.format import Format
    from toolkit.metrics.metric import Metrics
    from toolkit.metrics.text import TextMetric

OF_LIKELIHOODS = (
    "log-probabilities of whole answers by this model alone, in nats: no reference model enters, so they are not the rewards "
    "that DPO and KTO log"
)
OF_MASKS = "over tokens that the seed hides: the same ones at each evaluation with one seed and one set of masking settings"
OF_BOUNDS = "a bound of the loss, over tokens that the seed hides: the same ones at each evaluation with one seed"
MASKED_DIFFUSION = "masked diffusion"  # of either class of language model
LM_METRICS = ("loss", "perplexity", "token_accuracy", "bits_per_byte")

TextMetrics = dict[str, "TextMetric"]


@dataclass(frozen=True)
class EvaluationConfig(
    EmbeddingConfig,
    ModelConfig, DataConfig, ClassificationConfig, TokenClassificationConfig, RewardConfig, RankingConfig,
    QuestionAnsweringConfig, MaskedLMConfig, DiffusionConfig, Seq2SeqConfig, GeneratedTextConfig,
):  # fmt: skip
    """What is read of a recipe's settings."""


@dataclass(frozen=True)
class Loaded:
    """What metrics may need next to the settings."""

    config: EvaluationConfig
    names: list[str]  # of the requested metrics
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: Dataset
    tokenized: Dataset


@dataclass(frozen=True)
class EvaluatedTask:
    """How a model is evaluated on rows of a task.

    check(names, config): refuses, before the model is loaded, metrics that no model of this task has; returns those of them
        that compare generated texts.
    metrics(loaded): what is computed.
    collate(model, tokenizer): from tokenized rows to a micro-batch.
    form(config, model): how the rows are read; None: those of the task's name.
    augment(model, tokenizer, config): what changes a tokenized row before, such as masks.
    texts(loaded, of_texts, accelerator): how texts are generated for the metrics that compare them; None: as a causal language
        model answers its prompts.
    """

    check: Callable[[list[str], EvaluationConfig], TextMetrics]
    metrics: Callable[[Loaded], Metrics]
    collate: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Collate]
    form: Callable[[EvaluationConfig, PreTrainedModel], Format] | None = None
    augment: Callable[[PreTrainedModel, PreTrainedTokenizerBase, EvaluationConfig], Augment] | None = None
    fit_tokenizer: Callable[[PreTrainedTokenizerBase], PreTrainedTokenizerBase] | None = None
    texts: Callable[[Loaded, TextMetrics, Accelerator], Metrics] | None = None
    keeps_all: bool = False  # the metrics are the requested ones already
    remark: str = ""


def check_names(names: list[str], known: tuple[str, ...], when: str = "") -> None:
    """Refuse a metric that a model does not have."""
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise Refusal(f"--metrics {name}: a model has {', '.join(known)}{' ' * bool(when)}{when}.{meant}")


def class_names(model: PreTrainedModel) -> list[str] | None:
    """The classes as the model numbers them; None where it has no names for them."""
    labels: dict[int, str] = model.config.id2label  # type: ignore[assignment]  # of a classifier
    names = [labels[number] for number in sorted(labels)]
    return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names


def _collate(function: Callable[..., Any], **settings: Any) -> Callable[[PreTrainedModel, PreTrainedTokenizerBase], Collate]:
    return lambda model, tokenizer: partial(function, pad_token_id=tokenizer.pad_token_id, **settings)


def _known(*names: str, when: str = "") -> Callable[[list[str], EvaluationConfig], TextMetrics]:
    """A check of metrics that have these names."""

    def check(asked: list[str], config: EvaluationConfig) -> TextMetrics:
        check_names(asked, names, when)
        return {}

    return check


def _seen_later(names: list[str], config: EvaluationConfig) -> TextMetrics:
    """What a model logs is known once it was evaluated."""
    return {}


def _check_language(names: list[str], config: EvaluationConfig, task: str) -> TextMetrics:
    others = [name for name in names if name not in LM_METRICS]
    check_names([name for name in others if nearest(name, LM_METRICS)], LM_METRICS)
    check_names(others if task == "lm" else [], LM_METRICS, "where rows have no answers")
    return {name: metric for name in others for metric in choose_text_metrics([name]).values()}


def _language_metrics(loaded: Loaded) -> Metrics:
    is_masked = "labels" in loaded.tokenized.column_names
    known = LM_METRICS[:-1] if is_masked else LM_METRICS
    check_names(loaded.names, known, "where only answers are supervised" if is_masked else "")
    if is_masked:
        return causal_lm_metrics
    return causal_lm_metrics_with_bytes({"validation": loaded.tokenized}, loaded.tokenizer)


def _language(task: str) -> EvaluatedTask:
    return EvaluatedTask(partial(_check_language, task=task), _language_metrics, _collate(collate_padded))


def _check_classes(names: list[str], config: EvaluationConfig) -> TextMetrics:
    if names:
        classification_metrics(names, 2, config.problem_type)  # how many classes there are is seen later
    return {}


def _classes_metrics(loaded: Loaded) -> Metrics:
    names = class_names(loaded.model) or ()
    return classification_metrics(loaded.names, loaded.model.config.num_labels, loaded.config.problem_type, names)


def _classes_form(config: EvaluationConfig, model: PreTrainedModel) -> Format:
    return classification_format(config, None if config.problem_type == "regression" else class_names(model))


def _check_tags(names: list[str], config: EvaluationConfig) -> TextMetrics:
    tag_metrics(["O", "B-X", "I-X"], "plain" if config.tag_scheme == "plain" else "iob2", names)
    return {}


def _tags_metrics(loaded: Loaded) -> Metrics:
    found = find_tags({"evaluation": loaded.rows}, loaded.config, class_names(loaded.model))
    return tag_metrics(found.names, found.scheme, loaded.names, strict=loaded.config.strict_entities)


def _rewards_metrics(loaded: Loaded) -> Metrics:
    config = loaded.config
    return reward_metrics(
        center_rewards_coefficient=config.center_rewards_coefficient, margin_coefficient=config.margin_coefficient
    )


def _rankings_metrics(loaded: Loaded) -> Metrics:
    config, num_labels = loaded.config, loaded.model.config.num_labels
    if num_labels != 1:
        raise Refusal(
            f"{config.model} has {num_labels} labels, and a score is one number: it is no cross-encoder. Name the model "
            "directory of recipes/reranker.py."
        )
    return ranking_list_metrics(ranking_loss=config.ranking_loss, positive_weight=config.positive_weight)


def _spans_metrics(loaded: Loaded) -> Metrics:
    config = loaded.config
    return question_answering_metrics(
        reference_answers({"validation": loaded.rows}), n_best_size=config.n_best_size,
        max_answer_length=config.max_answer_length, null_score_diff_threshold=config.null_score_diff_threshold,
    )  # fmt: skip


def _embeddings_form(config: EvaluationConfig, model: PreTrainedModel) -> Format:
    style = embedding_style(config, query_prompt=config.query_prompt, document_prompt=config.document_prompt)
    return text_group_format(style.query_prompt, style.document_prompt, config.score_scale)


def _embeddings_metrics(loaded: Loaded) -> Metrics:
    config = loaded.config
    style = embedding_style(config, pooling=config.pooling)
    accumulated = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return embedding_task(
        {"validation": loaded.tokenized}, partial(embed_texts, pooling=style.pooling),
        config.global_batch_size or accumulated, loaded.model.config.get_text_config().hidden_size,
        loss_type=config.embedding_loss, temperature=config.temperature, two_way=config.two_way,
        false_negative_margin=config.false_negative_margin, matryoshka_dims=config.matryoshka_dims,
    )[1]  # fmt: skip


def _check_seq2seq(names: list[str], config: EvaluationConfig) -> TextMetrics:
    known = LM_METRICS[:-1]
    others = [name for name in names if name not in known]
    check_names([name for name in others if nearest(name, known)], known)
    return choose_text_metrics(others) if others or not names else {}


def _seq2seq_collate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Collate:
    return partial(collate_seq2seq, pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=decoder_start(model))


def _seq2seq_texts(loaded: Loaded, of_texts: TextMetrics, accelerator: Accelerator) -> Metrics:
    splits, config = {"validation": loaded.tokenized}, loaded.config
    return target_metrics(accelerator, loaded.tokenizer, splits, config, config.max_target_length, of_texts)


# By transformers' class of the model; the first task of each is what is meant where the columns leave it open.
EVALUATED: dict[str, dict[str, EvaluatedTask]] = {
    "AutoModelForCausalLM": {
        "sft": _language("sft"),
        "lm": _language("lm"),
        "preference": EvaluatedTask(
            _known(*PAIR_LIKELIHOODS, when="where answers are marked"), lambda loaded: pair_likelihood_metrics,
            _collate(collate_pairs, layout="padded"), remark=OF_LIKELIHOODS,
        ),
        "unpaired": EvaluatedTask(
            _known(*ANSWER_LIKELIHOODS, when="where answers are marked"), lambda loaded: answer_likelihood_metrics,
            _collate(collate_answers, layout="padded"), remark=OF_LIKELIHOODS,
        ),
    },
    "AutoModel": {
        "embedding": EvaluatedTask(_seen_later, _embeddings_metrics, _collate(collate_text_groups), _embeddings_form),
    },
    "AutoModelForSeq2SeqLM": {
        "seq2seq": EvaluatedTask(
            _check_seq2seq, lambda loaded: seq2seq_metrics, _seq2seq_collate, texts=_seq2seq_texts
        ),
    },
    "AutoModelForSequenceClassification": {
        "classification": EvaluatedTask(
            _check_classes, _classes_metrics, _collate(collate_padded), _classes_form, keeps_all=True
        ),
        "preference": EvaluatedTask(
            _seen_later, _rewards_metrics, _collate(collate_pairs, layout="padded"), fit_tokenizer=pad_apart_from_end
        ),
        "ranking": EvaluatedTask(
            _seen_later, _rankings_metrics, _collate(collate_lists), fit_tokenizer=pad_apart_from_end
        ),
    },
    "AutoModelForQuestionAnswering": {
        "question_answering": EvaluatedTask(_seen_later, _spans_metrics, _collate(collate_windows)),
    },
    "AutoModelForMultipleChoice": {
        "multiple_choice": EvaluatedTask(
            _known("loss", "accuracy"), lambda loaded: multiple_choice_metrics, _collate(collate_lists)
        ),
    },
    "AutoModelForMaskedLM": {
        "masked_lm": EvaluatedTask(
            _known("loss", "pseudo_perplexity", "masked_accuracy"), lambda loaded: masked_lm_metrics,
            _collate(collate_padded, aligned=True), augment=lambda model, tokenizer, config: build_masks(tokenizer, config),
            remark=OF_MASKS,
        ),
    },
    MASKED_DIFFUSION: {
        "diffusion": EvaluatedTask(
            _known("loss", "loss_stderr", "perplexity", "masked_accuracy"), lambda loaded: diffusion_metrics,
            _collate(collate_padded, aligned=True), augment=lambda model, tokenizer, config: build_noise(model, config),
            remark=OF_BOUNDS,
        ),
    },
    "AutoModelForTokenClassification": {
        "token_classification": EvaluatedTask(
            _check_tags, _tags_metrics, _collate(collate_padded, aligned=True),
            lambda config, model: token_classification_format(config, class_names(model)), keeps_all=True,
        ),
    },
}  # fmt: skip
assert {task for tasks in EVALUATED.values() for task in tasks} == set(TASKS)
