"""Weighted mixtures of sources. A weight is a source's share of the training rows.

Without `--max-train-examples` a mixture is as large as it takes to show every row once: the source with the most rows for
its weight is read once, the others are drawn again until they have their share. With it, N rows are drawn in all, and
none twice while a source has enough. Which rows, and their order, depend on the seed and nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config import DataConfig, Refusal
from toolkit.config.json_and_yaml import parse_yaml, read_text_file
from toolkit.system.console import quoted

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

MOST_ROWS = 10**9  # drawn by weight: an index of 8 GB
_LAYOUTS = (  # what identifies a kind of training data; the first that a source has
    {"input_ids"}, {"messages"}, {"conversations"}, {"prompt", "chosen", "rejected"}, {"chosen", "rejected"},
    {"prompt", "completion"}, {"question", "context", "answers"}, {"source", "target"}, {"tokens", "tags"},
    {"text", "text_pair", "label"}, {"text", "label"}, {"text"}, {"instruction", "output"},
)  # fmt: skip
_OF_CHATS = ("tools", "chat_template_kwargs")  # what only some chats have


@dataclass(frozen=True)
class Source:
    dataset: str
    weight: float = 1.0
    rename_columns: dict[str, str] = field(default_factory=dict)


def as_mixture(dataset: str) -> list[Source] | None:
    """The sources of `a:0.7,b:0.3` or of a YAML file, weights summing to 1; None when `dataset` is a single source.

    The YAML file holds a list of `{dataset: ..., weight: ..., rename_columns: {old: new}}`.

    Raises:
        Refusal: a weight is missing or not above 0, or the file has something else.
    """
    if Path(dataset).suffix.lower() in (".yaml", ".yml"):
        sources = _read_yaml(dataset)
    elif "," in dataset and not Path(os.path.expanduser(dataset)).exists():
        sources = [_weighted(part.strip(), dataset) for part in dataset.split(",") if part.strip()]
    else:
        return None
    total = math.fsum(source.weight for source in sources)
    return [Source(source.dataset, source.weight / total, source.rename_columns) for source in sources]


def mix(parts: list[Dataset], sources: list[Source], config: DataConfig) -> tuple[Dataset, str]:
    """The training rows of a mixture, and one line on what was drawn.

    Rows are in an order in which each beginning holds the shares too, so that cutting it keeps them.
    """
    from toolkit.data.loading.order import epoch_order

    draws = _draws([len(part) for part in parts], [source.weight for source in sources], config.max_train_examples)
    rows, positions, start = [], [], 0
    for number, (part, drawn) in enumerate(zip(parts, draws, strict=True)):
        passes = math.ceil(drawn / len(part))
        order = [epoch_order(len(part), config.seed + number, each) for each in range(passes)]
        rows.append(start + np.concatenate([*order, np.zeros(0, np.int64)])[:drawn].astype(np.int64))
        positions.append((np.arange(drawn) + 0.5) / max(drawn, 1))
        start += len(part)
    order_of_all = np.argsort(np.concatenate(positions), kind="stable")
    said = "; ".join(
        f"{drawn:,} of {len(part):,} rows of {source.dataset}" if drawn <= len(part)
        else f"{len(part):,} rows of {source.dataset} {drawn / len(part):.3g} times"
        for part, source, drawn in zip(parts, sources, draws, strict=True)
    )  # fmt: skip
    return join(parts, sources).select(np.concatenate(rows)[order_of_all]), f"mixture: {said}"


def mix_streams(parts: list[IterableDataset], sources: list[Source], config: DataConfig) -> tuple[IterableDataset, str]:
    """Streams drawn from by weight; one that ends starts again until all have ended."""
    from datasets import interleave_datasets

    weights = [source.weight for source in sources]
    shared = shared_columns(parts, sources)
    parts = [part.select_columns(shared) for part in parts]
    mixed = interleave_datasets(parts, probabilities=weights, seed=config.seed, stopping_strategy="all_exhausted")
    return mixed, "mixture of streams: " + "; ".join(f"{source.weight:.3g} of {source.dataset}" for source in sources)


def join(parts: Sequence[Any], sources: list[Source]) -> Any:
    """The rows of all parts one after the other, with the columns that all of them have.

    Raises:
        Refusal: a column differs in type.
    """
    from datasets import concatenate_datasets

    shared = shared_columns(parts, sources)
    parts = [part.select_columns(shared) for part in parts]
    if hasattr(parts[0], "__len__"):
        parts = _same_types(parts, sources)
    return concatenate_datasets(list(parts))


def shared_columns(parts: Sequence[Any], sources: list[Source]) -> list[str]:
    """The columns that all parts have.

    Raises:
        Refusal: the parts are not the same kind of training data.
    """
    columns = [column_names(part) for part in parts]
    shared = [name for name in columns[0] if all(name in each for each in columns)]
    layouts = [next((layout for layout in _LAYOUTS if layout <= set(each)), set(each) - {"origin"}) for each in columns]
    for number, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise Refusal(
                f"The sources of a mixture should be the same kind of data, but {sources[0].dataset} has the columns "
                f"{', '.join(sorted(layouts[0]))} and {sources[number].dataset} has {', '.join(sorted(layout))}. Rename the "
                "columns of a source in a YAML mixture: {dataset: ..., weight: ..., rename_columns: {old: new}}"
            )
    return shared


def with_columns_of_chats(parts: Sequence[Any]) -> list[Any]:
    """Empty values where a source has no column of tools and another one does: its chats would lose theirs in silence.

    Of whole tables, before rows are held out: `datasets` writes selected rows to a file of its own, without a digest, to add a
    column to them, and reads that file at the next start.
    """
    filled = list(parts)
    for name in _OF_CHATS:
        having = next((part for part in parts if name in column_names(part)), None)
        if having is None:
            continue
        for number, part in enumerate(filled):
            if name in column_names(part):
                continue
            if hasattr(part, "__len__"):
                filled[number] = part.add_column(name, [None] * len(part), feature=having.features[name])
            else:  # datasets 5.2 takes the keys of an object from the first stream that it joins
                first = next(iter(having)).get(name)
                nothing = dict.fromkeys(first) if isinstance(first, dict) else None
                filled[number] = part.map(_with_value, fn_kwargs={"name": name, "value": nothing})
    return filled


def _with_value(row: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**row, name: value}


def _draws(sizes: list[int], weights: list[float], total: int | None) -> list[int]:
    """Rows to draw of each source: shares of `total`, or of the smallest total that shows every row once."""
    if total is None and max(size / weight for size, weight in zip(sizes, weights, strict=True)) > MOST_ROWS:
        raise Refusal(
            f"To show every row once, a mixture of these weights would draw more than {MOST_ROWS:,} rows: give weights that "
            "differ less, or set how many rows are drawn: --max-train-examples"
        )
    rows = total or max(size / weight for size, weight in zip(sizes, weights, strict=True))
    exact = [rows * weight for weight in weights]
    draws = [math.floor(share + 1e-9) for share in exact]
    missing = round(rows) - sum(draws)  # to those with the largest remainders
    for number in sorted(range(len(draws)), key=lambda each: draws[each] - exact[each])[: max(missing, 0)]:
        draws[number] += 1
    return draws


def _weighted(part: str, dataset: str) -> Source:
    name, colon, weight = part.rpartition(":")
    try:
        share = float(weight) if colon else math.nan
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise Refusal(
            f"--dataset {dataset}: {part!r} should end in a weight above 0. A mixture is written a:0.7,b:0.3 (a file with a "
            "comma in its name: name its folder, or use a YAML file)"
        )
    return Source(name, share)


def _read_yaml(path: str) -> list[Source]:
    example = "A mixture file is a list such as:\n- {dataset: stdlib:sft, weight: 0.7}\n- {dataset: mine.jsonl, weight: 0.3}"
    try:
        entries = parse_yaml(read_text_file(path, f"--dataset {path}"), f"--dataset {path}")
    except Refusal as refusal:
        raise Refusal(f"{refusal} {example}") from None
    if not isinstance(entries, list) or not entries:
        raise Refusal(f"--dataset {path} holds no list of sources. {example}")
    return [_entry(entry, f"{path}: entry {number}", example) for number, entry in enumerate(entries, 1)]


def _entry(entry: Any, place: str, example: str) -> Source:
    allowed = ("dataset", "weight", "rename_columns")
    if not isinstance(entry, dict) or not isinstance(entry.get("dataset"), str):
        raise Refusal(f"{place} names no dataset. {example}")
    unknown = next((str(key) for key in entry if key not in allowed), None)
    if unknown:
        raise Refusal(f"{place} has the key {quoted(unknown)}; it may have {', '.join(allowed)}.")
    weight, renames = entry.get("weight"), entry.get("rename_columns") or {}
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise Refusal(f"{place}: weight is {weight!r}; it should be a number above 0, its share of the training rows.")
    if isinstance(renames, list) and all(isinstance(each, str) and each.count("=") == 1 for each in renames):
        renames = dict(each.split("=") for each in renames)
    if not isinstance(renames, dict):
        raise Refusal(f"{place}: rename_columns should be {{old: new}}.")
    return Source(entry["dataset"], float(weight), {str(old): str(new) for old, new in renames.items()})


def _same_types(parts: list[Dataset], sources: list[Source]) -> list[Dataset]:
    """Columns that differ in what an object may hold, or in the width of a number, get the type that holds both."""
    import pyarrow as pa
    from datasets import ClassLabel, Features

    first = parts[0].features
    if all(part.features == first for part in parts):
        return parts
    for part, source in zip(parts, sources, strict=False):
        for name, kind in part.features.items():
            if kind != first[name] and (isinstance(kind, ClassLabel) or isinstance(first[name], ClassLabel)):
                raise Refusal(_differs(name, first[name], kind, sources[0], source))
    features = dict(first)
    for name in first:
        try:
            schemas = [pa.schema([(name, part.features.arrow_schema.field(name).type)]) for part in parts]
            if any(part.features[name] != first[name] for part in parts):
                features |= Features.from_arrow_schema(pa.unify_schemas(schemas, promote_options="permissive"))
        except pa.ArrowException:
            odd = next(number for number, part in enumerate(parts) if part.features[name] != first[name])
            raise Refusal(_differs(name, first[name], parts[odd].features[name], sources[0], sources[odd])) from None
    # again at each start: what datasets would keep of it has no digest
    return [part.cast(Features(features), load_from_cache_file=False) for part in parts]


def _differs(name: str, kind: Any, other: Any, source: Source, odd: Source) -> str:
    found = f"the column {quoted(name)} is {kind} in {source.dataset}, but {other} in {odd.dataset}"
    return f"The sources of a mixture should agree: {found}."


def column_names(rows: Dataset | IterableDataset) -> list[str]:
    """Columns of a dataset, or of a stream's first row."""
    return list(rows.column_names or next(iter(rows)))
