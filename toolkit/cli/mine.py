"""toolkit mine: hard negatives for an embedding model or a reranker, found by an embedding model."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.setting_options import Device, read_options, with_settings
from toolkit.config import DataConfig, EmbeddingConfig, ModelConfig, Refusal
from toolkit.config.places import place_to_write
from toolkit.system.console import say
from toolkit.system.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


@dataclass(frozen=True)
class _Config(ModelConfig, DataConfig, EmbeddingConfig):
    """What is read of a recipe's settings."""


@with_settings("max_length per_device_eval_batch_size rename_columns pooling query_prompt document_prompt", _Config)
def mine(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run's output directory, a model directory or a Hub id.")],
    dataset: Annotated[str, typer.Option(metavar="DATASET", help="Rows of anchor or query and positive.")],
    into: Annotated[Path, typer.Option(metavar="FILE", help="The JSONL file that is written.")],
    negatives: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Most for each row.")] = 4,
    margin: Annotated[
        float, typer.Option(metavar="X", min=0.0, max=2.0, help="How much less similar than the positive they are.")
    ] = 0.0,
    skip: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Nearest documents that are passed over.")] = 0,
    split: Annotated[str, typer.Option(metavar="NAME", help="Of the dataset.")] = "train",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of FILE.")] = False,
    device: Device = None,
    *,
    typed: dict[str, Any],
) -> None:
    """Write the rows of a dataset again, each with the documents that the model finds most similar and that are no positives.

    The documents are all positives and negatives of the split. A row keeps its own negatives. What is nearer to an anchor than
    its positive is left out, since it may be an answer too; --margin leaves out more. The file is for recipes/embedding.py and
    recipes/reranker.py.
    """
    into = place_to_write(into, "--into", is_file=True)
    if into.exists() and not overwrite:
        raise typer.BadParameter(f"{into}: is there. Name another, or add --overwrite.", param_hint="--into")

    import numpy as np

    from toolkit.data.hard_negatives import hard_negatives
    from toolkit.data.tokenize.text_groups import negative_columns, texts_of_row
    from toolkit.models.trained import find_model, longest_example

    settings = read_options(_Config, {**typed, "dataset": dataset, "model": find_model(model)})
    longest = longest_example(settings)
    if typed["max_length"] is None and longest is not None and longest < settings.max_length:
        settings = replace(settings, max_length=longest)
    rows, vectors, keys = _embedded(settings, split, device)
    anchor = "anchor" if "anchor" in rows.column_names else "query"
    columns = negative_columns(rows.column_names)
    own = [texts_of_row({name: row[name] for name in columns}) for row in rows]
    texts = {key: text for row, texts, numbers in zip(rows, own, keys, strict=True)
             for key, text in zip(numbers[1:], [row["positive"], *texts], strict=True)}  # fmt: skip
    place = {key: number for number, key in enumerate(texts)}
    vector_of = dict(zip((key for numbers in keys for key in numbers), np.concatenate(vectors), strict=True))
    anchors = list(dict.fromkeys(numbers[0] for numbers in keys))
    number_of = {key: number for number, key in enumerate(anchors)}
    positives = sorted({(number_of[numbers[0]], place[numbers[1]]) for numbers in keys})
    mined = hard_negatives(
        np.stack([vector_of[key] for key in anchors]), np.stack([vector_of[key] for key in texts]), np.array(positives),
        negatives, margin=margin, skip=skip,
    )  # fmt: skip
    documents, lines, found = list(texts), list[str](), 0
    for row, given, numbers in zip(rows, own, keys, strict=True):
        added = [key for key in (documents[number] for number in mined[number_of[numbers[0]]]) if key not in numbers]
        found += len(added)
        kept = {anchor: row[anchor], "positive": row["positive"], "negatives": [*given, *(texts[key] for key in added)]}
        lines.append(json.dumps(kept, ensure_ascii=False) + "\n")
    into.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(into, "".join(lines))
    say(f"{into}: {len(lines):,} rows with {found:,} mined negatives, among {len(documents):,} documents")


def _embedded(settings: _Config, split: str, device: str | None) -> tuple["Dataset", list["np.ndarray"], list[list[int]]]:
    """The rows of the split, and of each one's texts the vectors and the keys."""
    import numpy as np
    from torch import no_grad

    from toolkit.data.loading.collate_groups import collate_text_groups
    from toolkit.data.loading.loaders import EvalLoader
    from toolkit.data.loading.packing import PlainRows
    from toolkit.data.sources.load import load_source, split_named
    from toolkit.data.sources.mixtures import Source
    from toolkit.data.tokenize.tasks import tokenize_for_embedding
    from toolkit.models.pooling import embed_texts
    from toolkit.models.sentence_files import embedding_style
    from toolkit.models.trained import best_device, load_trained
    from toolkit.training.step import to_device

    style = embedding_style(
        settings, pooling=settings.pooling, query_prompt=settings.query_prompt, document_prompt=settings.document_prompt
    )
    splits, target = load_source(Source(settings.dataset), settings), best_device(device)
    rows = split_named(split, splits, settings.dataset)
    if "positive" not in rows.column_names:
        raise Refusal(f"{settings.dataset} has no column positive, next to anchor or query: --rename-columns old=positive")
    model, tokenizer = load_trained("AutoModel", settings, target)
    tokenized = tokenize_for_embedding(
        {"train": rows}, tokenizer, settings, query_prompt=style.query_prompt, document_prompt=style.document_prompt
    )["train"]
    collate = partial(collate_text_groups, pad_token_id=tokenizer.pad_token_id)
    vectors = [np.zeros(0)] * len(tokenized)
    with no_grad():
        for batch in EvalLoader(PlainRows(tokenized), collate, settings.per_device_eval_batch_size):
            micro_batch = to_device(batch.micro_batches[0], target)
            found, examples = embed_texts(model, micro_batch, pooling=style.pooling).cpu(), micro_batch["example"].cpu()
            for number, example in enumerate(batch.indices[0]):
                vectors[example] = found[examples == number].numpy()
    return rows, vectors, tokenized["text_keys"][:]
