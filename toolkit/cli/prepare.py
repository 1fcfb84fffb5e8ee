"""toolkit prepare: a dataset tokenized once, as files that any training with the same vocabulary reads or streams."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.setting_options import OF_MODEL, check_task, read_options, with_settings
from toolkit.config import DataConfig, ModelConfig, Refusal, settings_of
from toolkit.config.conditions import is_built_in
from toolkit.config.places import place_to_write
from toolkit.config.setting import flag_of
from toolkit.system.console import as_typed, say

_RECIPES = {"lm": "pretrain", "sft": "sft"}  # by task


@dataclass(frozen=True)
class _Config(ModelConfig, DataConfig):
    """What is read of a recipe's settings."""


@with_settings(
    f"seed model {OF_MODEL} preprocessing_num_workers max_length overlong min_length completion_only_loss assistant_only_loss "
    "rename_columns sample_by train_split eval_split eval_fraction streaming max_train_examples max_eval_examples",
    _Config,
    seed="Of the order in which rows are written.",
    model="The model whose tokenizer is taken.",
    max_length="Cut longer documents, according to --overlong. Default: none is cut.",
    streaming="Read the source as a stream: no copy of the text on the disk or in memory.",
)
def prepare(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET", help="A file, a folder, a URL, a Hub id, stdlib:NAME or a mixture, as --dataset of recipes."
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The folder of the files; it must be new or empty.")],
    task: Annotated[
        str | None, typer.Option(metavar="lm|sft", help="What to train. Default: what the columns are known for.")
    ] = None,
    num_shards: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=99_999, help="Files of train. Default: one for 50 M tokens.")
    ] = None,
    *,
    typed: dict[str, Any],
) -> None:
    """Tokenize a dataset once, and write it as Parquet files that training reads, or streams from a disk or by URL.

    Documents are whole and in a mixed order; rows that a recipe would hold out are a split of their own. The rows name their
    vocabulary: training with another one refuses them. Most options are settings of recipes and mean the same. Killed and
    started again, it ends with the same files.
    """
    check_task(task, tuple(_RECIPES))
    settings = read_options(_Config, {"dataset": dataset, **typed})
    if typed["model"] is None and typed["tokenizer"] is None:
        raise typer.BadParameter(
            "whose tokens? Name the model that will be trained (--model), or a tokenizer (--tokenizer).", param_hint="--model"
        )
    if typed["max_length"] is None:
        if typed["overlong"] is not None:
            raise typer.BadParameter("has no effect without --max-length: no document is cut.", param_hint="--overlong")
        longest = settings_of(_Config)["max_length"].most
        settings = replace(settings, max_length=int(longest or settings.max_length), overlong="refuse")
    if typed["sample_by"] is None and task != "sft":
        settings = replace(settings, sample_by="document")  # as recipes/pretrain.py
    if settings.streaming and typed["max_eval_examples"] is None:
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
    if task == "lm" and typed["tokenizer"] is None and is_built_in(settings.model):
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
    of_tokens = ("model", "model_revision", "tokenizer", "chat_template")
    given = [word for name in of_tokens if typed[name] is not None for word in (flag_of(name), typed[name])]
    without = [] if "validation" in written else ["--eval-fraction", "0", "--eval-strategy", "no"]
    streamed = ["--streaming"] if task == "lm" else []  # a stream needs --max-steps, which pretrain has
    command = as_typed("toolkit", "train", _RECIPES[task], "--dataset", output, *given, *without, *streamed)
    say(f"Written to {output} with the tokens of {mark}. Train on it: {command}")
