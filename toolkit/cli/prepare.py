"""toolkit prepare: a dataset tokenized once, as files that any training with the same vocabulary reads or streams."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.setting_options import ChatTemplate, Revision, Tokenizer, TrustRemoteCode, check_task, option, read_options
from toolkit.config import DataConfig, ModelConfig, Refusal, settings_of
from toolkit.config.conditions import is_built_in
from toolkit.config.places import place_to_write
from toolkit.system.console import as_typed, say

_RECIPES = {"lm": "pretrain", "sft": "sft"}  # by task


@dataclass(frozen=True)
class _Config(ModelConfig, DataConfig):
    """What is read of a recipe's settings."""


def prepare(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            help="A file, a folder, a URL, a Hub id, stdlib:NAME or a mixture, as --dataset of recipes.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The folder of the files; it must be new or empty.", show_default=False)
    ],
    task: Annotated[
        str | None,
        typer.Option(metavar="lm|sft", help="What to train. Default: what the columns are known for.", show_default=False),
    ] = None,
    num_shards: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=99_999, help="Files of train. Default: one for 50 M tokens.", show_default=False),
    ] = None,
    seed: Annotated[str | None, option(_Config, "seed", help="Of the order in which rows are written.")] = None,
    model: Annotated[str | None, option(_Config, "model", help="The model whose tokenizer is taken.")] = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    model_revision: Revision = None,
    trust_remote_code: TrustRemoteCode = None,
    preprocessing_num_workers: Annotated[str | None, option(_Config, "preprocessing_num_workers")] = None,
    max_length: Annotated[
        str | None, option(_Config, "max_length", help="Cut longer documents, as --overlong says. Default: none is cut.")
    ] = None,
    overlong: Annotated[str | None, option(_Config, "overlong")] = None,
    min_length: Annotated[str | None, option(_Config, "min_length")] = None,
    completion_only_loss: Annotated[bool | None, option(_Config, "completion_only_loss")] = None,
    assistant_only_loss: Annotated[bool | None, option(_Config, "assistant_only_loss")] = None,
    rename_columns: Annotated[str | None, option(_Config, "rename_columns", "OLD=NEW,...")] = None,
    sample_by: Annotated[str | None, option(_Config, "sample_by")] = None,
    train_split: Annotated[str | None, option(_Config, "train_split")] = None,
    eval_split: Annotated[str | None, option(_Config, "eval_split")] = None,
    eval_fraction: Annotated[str | None, option(_Config, "eval_fraction")] = None,
    streaming: Annotated[
        bool | None,
        option(_Config, "streaming", help="Read the source as a stream: no copy of the text on the disk or in memory."),
    ] = None,
    max_train_examples: Annotated[str | None, option(_Config, "max_train_examples")] = None,
    max_eval_examples: Annotated[str | None, option(_Config, "max_eval_examples")] = None,
) -> None:
    """Tokenize a dataset once, and write it as Parquet files that training reads, or streams from a disk or by URL.

    Documents are whole and in a mixed order; rows that a recipe would hold out are a split of their own. The rows name their
    vocabulary: training with another one refuses them. Most options are settings of recipes and mean the same. Killed and
    started again, it ends with the same files.
    """
    typed = {name: value for name, value in locals().items() if name not in ("output", "task", "num_shards")}
    check_task(task, tuple(_RECIPES))
    settings = read_options(_Config, typed)
    if model is None and tokenizer is None:
        raise typer.BadParameter(
            "whose tokens? Name the model that will be trained (--model), or a tokenizer (--tokenizer).", param_hint="--model"
        )
    if max_length is None:
        if overlong is not None:
            raise typer.BadParameter("has no effect without --max-length: no document is cut.", param_hint="--overlong")
        longest = settings_of(_Config)["max_length"].most
        settings = replace(settings, max_length=int(longest or settings.max_length), overlong="refuse")
    if sample_by is None and task != "sft":
        settings = replace(settings, sample_by="document")  # as recipes/pretrain.py
    if settings.streaming and max_eval_examples is None:
        settings = replace(settings, max_eval_examples=10**10)  # all: it is read to its end
    output = place_to_write(output, "OUTPUT")

    from toolkit.data.inspection import guess_task
    from toolkit.data.report import print_data_report
    from toolkit.data.shards import check_output, write_shards
    from toolkit.data.sources.content import content_of_streams
    from toolkit.data.sources.load import load_splits
    from toolkit.data.tokenize.columns import columns_of
    from toolkit.data.tokenize.tasks import prepare as tokenize
    from toolkit.data.tokenize.vocabulary import vocabulary_mark
    from toolkit.models.tokenizer import load_tokenizer

    check_output(output)
    splits = load_splits(settings)
    task = task or guess_task(columns_of(splits["train"], "train"))
    if task not in _RECIPES:
        raise Refusal(f"{dataset}: its columns are those of {task}, and lm and sft are prepared. Name one: --task sft")
    if task == "lm" and tokenizer is None and is_built_in(settings.model):
        raise Refusal(
            f"--model {settings.model}: recipes/pretrain.py makes the tokenizer of a built-in shape from the text, so it has "
            "none yet. Name one, of a run or of the Hub: --tokenizer runs/pretrain/model"
        )
    loaded = load_tokenizer(settings)
    tokenized = tokenize(task, splits, loaded, settings, content_of_streams(settings) if settings.streaming else None)
    print_data_report(tokenized.report)
    mark = vocabulary_mark(loaded)
    written = write_shards(tokenized, output, mark=mark, seed=settings.seed, num_shards=num_shards)
    for split, each in written.items():
        say(f"{split}: {each.rows:,} rows, {each.tokens:,} tokens, {each.shards:,} shard(s), {each.bytes / 1e6:,.1f} MB")
    flags = {"--model": model, "--model-revision": model_revision, "--tokenizer": tokenizer, "--chat-template": chat_template}
    given = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    without = [] if "validation" in written else ["--eval-fraction", "0", "--eval-strategy", "no"]
    streamed = ["--streaming"] if task == "lm" else []  # a stream needs --max-steps, which pretrain has
    command = as_typed("toolkit", "train", _RECIPES[task], "--dataset", output, *given, *without, *streamed)
    say(f"Written to {output} with the tokens of {mark}. Train on it: {command}")
