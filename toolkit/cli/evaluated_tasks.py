"""What `toolkit evaluate` computes: for each kind of model and each task its rows, its collate function and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from toolkit.config import (
    ClassificationConfig,
    DataConfig,
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
from toolkit.config.setting import nearest

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
LM_METRICS = ("loss", "perplexity", "token_accuracy", "bits_per_byte")

TextMetrics = dict[str, "TextMetric"]


@dataclass(frozen=True)
class EvaluationConfig(
    EmbeddingConfig,
    ModelConfig, DataConfig, ClassificationConfig, TokenClassificationConfig, RewardConfig, RankingConfig,
    QuestionAnsweringConfig, MaskedLMConfig, Seq2SeqConfig, GeneratedTextConfig,
):  # fmt: skip
    """What is read of a recipe's settings."""


@dataclass(frozen=True)
class Loaded:
    """What metrics may need next to the settings."""

    config: EvaluationConfig
    names: list[str]  # of the metrics that were asked for
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
    form(config, model): how the rows are read; None: as the task's name says.
    collate(tokenizer): from tokenized rows to a micro-batch.
    augment(tokenizer, config): what changes a tokenized row before, such as masks.
    collate_for(model, tokenizer): the same where the model decides on it, in place of `collate`.
    texts(loaded, of_texts, accelerator): how texts are generated for the metrics that compare them; None: as a causal language
        model answers its prompts.
    """

    check: Callable[[list[str], EvaluationConfig], TextMetrics]
    metrics: Callable[[Loaded], Metrics]
    collate: Callable[[PreTrainedTokenizerBase], Collate]
    form: Callable[[EvaluationConfig, PreTrainedModel], Format] | None = None
    augment: Callable[[PreTrainedTokenizerBase, EvaluationConfig], Augment] | None = None
    fit_tokenizer: Callable[[PreTrainedTokenizerBase], PreTrainedTokenizerBase] | None = None
    collate_for: Callable[[PreTrainedModel, PreTrainedTokenizerBase], Collate] | None = None
    texts: Callable[[Loaded, TextMetrics, Accelerator], Metrics] | None = None
    keeps_all: bool = False  # the metrics are those that were asked for already
    remark: str = ""


def check_names(names: list[str], known: tuple[str, ...], when: str = "") -> None:
    """Refuse a metric that a model does not have."""
    for name in names:
        if name not in known:
            near = nearest(name, known)
            meant = f" Did you mean {near}?" if near else ""
            raise Refusal(f"--metrics {name}: a model has {', '.join(known)}{' ' * bool(when)}{when}.{meant}")


def _padded(tokenizer: PreTrainedTokenizerBase) -> Collate:
    from toolkit.data.loading.collate import collate_padded

    return partial(collate_padded, pad_token_id=tokenizer.pad_token_id)


def _check_language(names: list[str], config: EvaluationConfig, task: str) -> TextMetrics:
    from toolkit.metrics.text import choose_text_metrics

    others = [name for name in names if name not in LM_METRICS]
    check_names([name for name in others if nearest(name, LM_METRICS)], LM_METRICS)
    check_names(others if task == "lm" else [], LM_METRICS, "where rows have no answers")
    return {name: metric for name in others for metric in choose_text_metrics([name]).values()}


def _language_metrics(loaded: Loaded) -> Metrics:
    from toolkit.data.texts import text_size
    from toolkit.losses.causal_lm import causal_lm_metrics, causal_lm_metrics_with_bytes

    is_masked = "labels" in loaded.tokenized.column_names
    known = LM_METRICS[:-1] if is_masked else LM_METRICS
    check_names(loaded.names, known, "where only answers are supervised" if is_masked else "")
    if is_masked:
        return causal_lm_metrics
    return causal_lm_metrics_with_bytes(**text_size({"validation": loaded.tokenized}, loaded.tokenizer))


def _language(task: str) -> EvaluatedTask:
    return EvaluatedTask(partial(_check_language, task=task), _language_metrics, _padded)


def _pair_likelihoods() -> EvaluatedTask:
    def check(names: list[str], config: EvaluationConfig) -> TextMetrics:
        from toolkit.losses.answer_logps import PAIR_LIKELIHOODS

        check_names(names, PAIR_LIKELIHOODS, "where answers are marked")
        return {}

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.answer_logps import pair_likelihood_metrics

        return pair_likelihood_metrics

    return EvaluatedTask(check, metrics, _pairs, remark=OF_LIKELIHOODS)


def _answer_likelihoods() -> EvaluatedTask:
    def check(names: list[str], config: EvaluationConfig) -> TextMetrics:
        from toolkit.losses.answer_logps import ANSWER_LIKELIHOODS

        check_names(names, ANSWER_LIKELIHOODS, "where answers are marked")
        return {}

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.answer_logps import answer_likelihood_metrics

        return answer_likelihood_metrics

    def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate_answers import collate_answers

        return partial(collate_answers, layout="padded", pad_token_id=tokenizer.pad_token_id)

    return EvaluatedTask(check, metrics, collate, remark=OF_LIKELIHOODS)


def _pairs(tokenizer: PreTrainedTokenizerBase) -> Collate:
    from toolkit.data.loading.collate_pairs import collate_pairs

    return partial(collate_pairs, layout="padded", pad_token_id=tokenizer.pad_token_id)


def _classes() -> EvaluatedTask:
    def check(names: list[str], config: EvaluationConfig) -> TextMetrics:
        from toolkit.metrics.classification import classification_metrics

        if names:
            classification_metrics(names, 2, config.problem_type)  # how many classes there are is seen later
        return {}

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.metrics.classification import classification_metrics

        return classification_metrics(loaded.names, loaded.model.config.num_labels, loaded.config.problem_type)

    def form(config: EvaluationConfig, model: PreTrainedModel) -> Format:
        from toolkit.data.tokenize.classification import classification_format

        return classification_format(config, None if config.problem_type == "regression" else class_names(model))

    return EvaluatedTask(check, metrics, _padded, form, keeps_all=True)


def _masked() -> EvaluatedTask:
    def check(names: list[str], config: EvaluationConfig) -> TextMetrics:
        check_names(names, ("loss", "pseudo_perplexity", "masked_accuracy"))
        return {}

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.masked_lm import masked_lm_metrics

        return masked_lm_metrics

    def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate import collate_padded

        return partial(collate_padded, pad_token_id=tokenizer.pad_token_id, aligned=True)

    def augment(tokenizer: PreTrainedTokenizerBase, config: EvaluationConfig) -> Augment:
        from toolkit.data.loading.token_masks import build_masks

        return build_masks(tokenizer, config)

    return EvaluatedTask(check, metrics, collate, augment=augment, remark=OF_MASKS)


def class_names(model: PreTrainedModel) -> list[str] | None:
    """The classes as the model numbers them; None where it has no names for them."""
    labels: dict[int, str] = model.config.id2label  # type: ignore[assignment]  # of a classifier
    names = [labels[number] for number in sorted(labels)]
    return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names


def _tags() -> EvaluatedTask:
    def check(names: list[str], config: EvaluationConfig) -> TextMetrics:
        from toolkit.metrics.spans import tag_metrics

        tag_metrics(["O", "B-X", "I-X"], "plain" if config.tag_scheme == "plain" else "iob2", names)
        return {}

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.data.tokenize.token_tags import find_tags
        from toolkit.metrics.spans import tag_metrics

        found = find_tags({"evaluation": loaded.rows}, loaded.config, class_names(loaded.model))
        return tag_metrics(found.names, found.scheme, loaded.names, strict=loaded.config.strict_entities)

    def form(config: EvaluationConfig, model: PreTrainedModel) -> Format:
        from toolkit.data.tokenize.token_tags import token_classification_format

        return token_classification_format(config, class_names(model))

    def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate import collate_padded

        return partial(collate_padded, pad_token_id=tokenizer.pad_token_id, aligned=True)

    return EvaluatedTask(check, metrics, collate, form, keeps_all=True)


def _rewards() -> EvaluatedTask:
    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.reward import reward_metrics

        return reward_metrics(
            center_rewards_coefficient=loaded.config.center_rewards_coefficient,
            margin_coefficient=loaded.config.margin_coefficient,
        )

    return EvaluatedTask(lambda names, config: {}, metrics, _pairs, fit_tokenizer=_pads_apart)


def _rankings() -> EvaluatedTask:
    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.ranking import ranking_list_metrics

        if loaded.model.config.num_labels != 1:
            raise Refusal(
                f"{loaded.config.model} has {loaded.model.config.num_labels} labels, and a score is one number: it is no "
                "cross-encoder. Name the model directory of recipes/reranker.py."
            )
        config = loaded.config
        return ranking_list_metrics(ranking_loss=config.ranking_loss, positive_weight=config.positive_weight)

    def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate_lists import collate_lists

        return partial(collate_lists, pad_token_id=tokenizer.pad_token_id)

    return EvaluatedTask(lambda names, config: {}, metrics, collate, fit_tokenizer=_pads_apart)


def _pads_apart(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    from toolkit.models.padding import pad_apart_from_end

    return pad_apart_from_end(tokenizer)


def _spans() -> EvaluatedTask:
    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.data.tokenize.question_answering import reference_answers
        from toolkit.metrics.question_answering import question_answering_metrics

        config = loaded.config
        return question_answering_metrics(
            reference_answers({"validation": loaded.rows}), n_best_size=config.n_best_size,
            max_answer_length=config.max_answer_length, null_score_diff_threshold=config.null_score_diff_threshold,
        )  # fmt: skip

    def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate_windows import collate_windows

        return partial(collate_windows, pad_token_id=tokenizer.pad_token_id)

    return EvaluatedTask(lambda names, config: {}, metrics, collate)


def _embeddings() -> EvaluatedTask:
    def form(config: EvaluationConfig, model: PreTrainedModel) -> Format:
        from toolkit.data.tokenize.text_groups import text_group_format
        from toolkit.models.sentence_files import embedding_style

        style = embedding_style(config, query_prompt=config.query_prompt, document_prompt=config.document_prompt)
        return text_group_format(style.query_prompt, style.document_prompt, config.score_scale)

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.contrastive import embedding_task
        from toolkit.models.pooling import embed_texts
        from toolkit.models.sentence_files import embedding_style

        config = loaded.config
        style = embedding_style(config, pooling=config.pooling)
        accumulated = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return embedding_task(
            {"validation": loaded.tokenized}, partial(embed_texts, pooling=style.pooling),
            config.global_batch_size or accumulated, loss_type=config.embedding_loss, temperature=config.temperature,
            two_way=config.two_way, false_negative_margin=config.false_negative_margin,
            matryoshka_dims=config.matryoshka_dims,
        )[1]  # fmt: skip

    def collate(tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate_texts import collate_text_groups

        return partial(collate_text_groups, pad_token_id=tokenizer.pad_token_id)

    return EvaluatedTask(lambda names, config: {}, metrics, collate, form)


def _seq2seq() -> EvaluatedTask:
    known = LM_METRICS[:-1]

    def check(names: list[str], config: EvaluationConfig) -> TextMetrics:
        from toolkit.metrics.text import choose_text_metrics

        others = [name for name in names if name not in known]
        check_names([name for name in others if nearest(name, known)], known)
        return choose_text_metrics(others) if others or not names else {}

    def metrics(loaded: Loaded) -> Metrics:
        from toolkit.losses.seq2seq import seq2seq_metrics

        return seq2seq_metrics

    def collate_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Collate:
        from toolkit.data.loading.collate_seq2seq import collate_seq2seq
        from toolkit.models.encoder_decoder import decoder_start

        return partial(collate_seq2seq, pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=decoder_start(model))

    def texts(loaded: Loaded, of_texts: TextMetrics, accelerator: Accelerator) -> Metrics:
        from toolkit.generation.targets import target_metrics

        return target_metrics(
            accelerator, loaded.tokenizer, list(loaded.tokenized["target"]), loaded.config, loaded.config.max_target_length,
            of_texts,
        )  # fmt: skip

    return EvaluatedTask(check, metrics, _padded, collate_for=collate_for, texts=texts)


# By transformers' class of the model; the first task of each is what is meant where the columns do not say.
EVALUATED: dict[str, dict[str, EvaluatedTask]] = {
    "AutoModelForCausalLM": {
        "sft": _language("sft"), "lm": _language("lm"), "preference": _pair_likelihoods(), "unpaired": _answer_likelihoods(),
    },
    "AutoModel": {"embedding": _embeddings()},
    "AutoModelForSeq2SeqLM": {"seq2seq": _seq2seq()},
    "AutoModelForSequenceClassification": {"classification": _classes(), "preference": _rewards(), "ranking": _rankings()},
    "AutoModelForQuestionAnswering": {"question_answering": _spans()},
    "AutoModelForMaskedLM": {"masked_lm": _masked()},
    "AutoModelForTokenClassification": {"token_classification": _tags()},
}  # fmt: skip
TASKS = tuple(dict.fromkeys(task for tasks in EVALUATED.values() for task in tasks))
