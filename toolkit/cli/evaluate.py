"""toolkit evaluate: metrics of a trained model on a dataset."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.setting_options import OF_MODEL, TASKS, Device, ModelName, check_task, option, read_options, with_settings
from toolkit.config import (
    ClassificationConfig,
    DataConfig,
    EmbeddingConfig,
    GeneratedTextConfig,
    MaskedLMConfig,
    ModelConfig,
    QuestionAnsweringConfig,
    RankingConfig,
    SeedConfig,
    Seq2SeqConfig,
    Settings,
    TokenClassificationConfig,
    read_config_file,
    settings_of,
)
from toolkit.system.console import say


@with_settings(
    "max_length overlong per_device_eval_batch_size max_eval_examples completion_only_loss assistant_only_loss problem_type "
    "mlm_probability seed max_target_length source_prefix source_lang target_lang num_beams doc_stride max_answer_length "
    f"null_score_diff_threshold ranking_loss score_scale rename_columns sample_by {OF_MODEL} dtype",
    DataConfig, ModelConfig, ClassificationConfig, MaskedLMConfig, SeedConfig, Seq2SeqConfig, GeneratedTextConfig,
    QuestionAnsweringConfig, RankingConfig, EmbeddingConfig,
    per_device_eval_batch_size="Rows in one forward pass on the device. Changes no metric.",
    seed="Seed of the tokens that are hidden.",
)  # fmt: skip
def evaluate(
    model: ModelName,
    dataset: Annotated[str | None, option(DataConfig, "dataset")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Language models: loss, perplexity, token_accuracy, where every token is supervised bits_per_byte, and where "
            "rows have answers metrics of its answers: bleu, chrf, rouge, exact_match, modules of evaluate or a script's path. "
            "Encoder-decoders: loss, perplexity, token_accuracy, bleu, chrf, rouge, exact_match. Of pairs logps_accuracy, of "
            "marked answers logps_auc, and others. Masked language models: loss, pseudo_perplexity, masked_accuracy. Spans: "
            "exact_match, f1 and others. Classifiers: accuracy, f1 and others, or modules of evaluate. Reward models: loss, "
            "reward_accuracy and others. Default: all; of classifiers the usual.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(TASKS), help="Default: what the model is for; of a language model what the columns are known for."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the dataset. Default: validation, else test, else all there is. validation, where there is none: the rows "
            "that training holds out; with --config, and on the data of MODEL's own run, that is the default.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A recipe's YAML, such as a run's config.yaml, for its data.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Longest answer generated for such a module.")
    ] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else on standard output.")] = False,
    device: Device = None,
    *,
    typed: dict[str, Any],
) -> None:
    """Evaluate a model on a dataset: metrics over all rows of a split, exact for any batch size.

    Of a run without --dataset: on the rows that it held out. It prints how many of the rows the run was trained on.

    They are the metrics that training logs, but for class weights, which the loss leaves out; computed in float32 unless
    --dtype is given, and rows are read as training reads them: longer ones are truncated to --max-length, which is 1,024
    or what the model has positions for. Of a run on other data, the task's own settings are the run's: the prefix of
    sources, languages, windows, masks, beams.
    """
    from toolkit.data.sources.trained_rows import config_of_run, dataset_of_run, is_same_dataset

    check_task(task)
    of_run = config_of_run(model)
    if dataset is None and config is None and of_run is None:
        raise typer.BadParameter("which? A file, a folder, a Hub id or stdlib:NAME.", param_hint="--dataset")

    from toolkit.cli.evaluated_tasks import EvaluationConfig
    from toolkit.cli.trained_metrics import evaluate_model
    from toolkit.models.trained import find_model
    from toolkit.system.json_lines import strict_json

    typed["dataset"] = dataset
    trained, file, holds_out = None, config, config is not None
    if of_run is not None:
        trained = read_options(EvaluationConfig, {}, of_run, without=_OF_TRAINING - {"streaming"})
        trained = replace(trained, dataset=dataset_of_run(of_run, trained.dataset))
        if config is None and (dataset is None or is_same_dataset(dataset, trained.dataset)):
            typed["dataset"], file = trained.dataset, of_run
            holds_out = bool(trained.eval_fraction or trained.eval_split)
    unread = _OF_TRAINING
    if file is None and of_run is not None and (names_of_task := _settings_of_task(of_run)):
        file, unread = of_run, frozenset(settings_of(EvaluationConfig)) - names_of_task
    is_length_given = typed["max_length"] is not None or (file is not None and "max_length" not in unread)
    settings = read_options(EvaluationConfig, {**typed, "model": find_model(model)}, file, without=unread)
    split = split or ("validation" if holds_out else None)  # whoever names a run's settings means what that run evaluates on
    names = [name.strip() for name in (metrics or "").split(",") if name.strip()]

    from toolkit.data.report import print_data_report

    found = evaluate_model(
        settings, names, task or _scoring_task(of_run), split, device, is_length_given=is_length_given,
        show=lambda report: print_data_report(report, sys.stderr), trained=trained, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    if as_json:
        record: dict[str, Any] = {"model": settings.model, "dataset": settings.dataset}
        record |= {"split": found.split, "task": found.task, "rows": found.rows}
        record |= {} if found.trained_on is None else {"trained_on": found.trained_on}
        record |= {"remark": found.remark} if found.remark else {}
        say(json.dumps({**record, "metrics": strict_json(found.metrics)}, ensure_ascii=False, allow_nan=False))
        return
    say(f"{settings.model} on {found.rows:,} rows of {settings.dataset} ({found.split}), as {found.task}")
    if found.remark:
        say(f"  {found.remark}")
    if found.trained_on:
        say(f"  {found.trained_on:,} of these rows have a prompt or text that the run was trained on")
    width = max(map(len, found.metrics), default=0)
    for name, value in found.metrics.items():
        say(f"  {name:<{width}}  {_shown(value)}")


# Settings of a run's config.yaml: of the model as it was made, and of the rows it was trained on.
_OF_TRAINING = frozenset({
    "model", "tokenizer", "model_revision", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "max_position_embeddings", "dropout", "attention_dropout", "hidden_act",
    "dtype", "metrics", "class_weights", "gradient_checkpointing", "torch_compile", "torch_compile_backend", "streaming",
    "packing", "packing_strategy", "group_by_length",
})  # fmt: skip


# What belongs to a task and not to one data set. Windows of questions have the length of --max-length.
_TASKS: tuple[tuple[type[Settings], ...], ...] = (
    (Seq2SeqConfig, GeneratedTextConfig), (QuestionAnsweringConfig,), (MaskedLMConfig,), (TokenClassificationConfig,),
    (EmbeddingConfig,), (RankingConfig,),
)  # fmt: skip
_OF_DATA = frozenset({"score_scale", "metrics"})


def _settings_of_task(of_run: Path) -> frozenset[str]:
    """The settings of a run's task that hold for other data too; none where its config.yaml is of no such task."""
    written = set(read_config_file(of_run))
    for groups in _TASKS:
        names = {name for group in groups for name in settings_of(group)}
        if names <= written:
            return frozenset(names | ({"max_length"} if QuestionAnsweringConfig in groups else set())) - _OF_DATA
    return frozenset()


# Runs whose model has one number for a text, which of the model alone could be a classifier's: a setting that they alone have.
_SCORING = {"ranking_loss": "ranking", "center_rewards_coefficient": "preference"}


def _scoring_task(of_run: Path | None) -> str | None:
    """The task of a reranker's or a reward model's run; None of another, where the model and the columns tell."""
    written = read_config_file(of_run) if of_run else {}
    return next((task for name, task in _SCORING.items() if name in written), None)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
