"""Where the rows come from: the embedded corpus, the Hub, local files, and weighted mixtures of these; always as splits."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from toolkit.config import DataConfig, Refusal, RunConfig
from toolkit.data.sources.mixtures import (
    Source,
    as_mixture,
    column_names,
    join,
    mix,
    mix_streams,
    shared_columns,
    with_columns_of_chats,
)
from toolkit.system.console import quoted
from toolkit.system.imports import imported_to_stay

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDatasetDict

Rows = Any  # a Dataset or an IterableDataset
Splits = dict[str, Rows]
WRITER = "generated_by"  # the column with the model that wrote a row's answer
_commits_read: dict[str, str] = {}  # of this process, by dataset of the Hub as the settings name it
_writers_read: dict[str, list[str]] = {}  # likewise, by dataset as the settings name it


def load_splits(config: DataConfig | str) -> DatasetDict | IterableDatasetDict:
    """The rows of `config.dataset` as splits train, validation and test.

    `validation` is `--eval-split`, else the source's validation, else its test, else rows held out by content; it is absent
    when there is nothing of it (`--eval-fraction 0`). `test` is there when the source has one that isn't already validation.
    Each row has an `origin`, but those of the Hub. What was read is described in `splits["train"].info.description`.

    Raises:
        Refusal: no such source, split or column; a file that can't be read, with its line; a Hub that can't be reached.
    """
    with imported_to_stay():
        from datasets import DatasetDict, IterableDatasetDict

    config = DataConfig(dataset=config) if isinstance(config, str) else config
    sources = sources_of(config.dataset)
    chosen = [_choose(load_source(source, config), source, config) for source in sources]
    if len(sources) > 1:
        shared_columns([part["train"] for part in chosen], sources)
        if not config.streaming:  # after mixing, a row's number would mean nothing
            pairs = zip(chosen, sources, strict=True)
            chosen = [{name: _with_origin(rows, source) for name, rows in part.items()} for part, source in pairs]
        filled = iter(with_columns_of_chats([rows for part in chosen for rows in part.values()]))
        chosen = [{name: next(filled) for name in part} for part in chosen]
    held_out = _hold_out(chosen, sources, config)
    _check_held_out(chosen, held_out, config)
    if len(sources) == 1:
        splits = chosen[0]
        description = describe_source(config)
    else:
        train, description = (mix_streams if config.streaming else mix)([part["train"] for part in chosen], sources, config)
        splits = {"train": train}
        for name in ("validation", "test"):  # all rows of every source, once: weights are for training
            having = [(part[name], source) for part, source in zip(chosen, sources, strict=True) if name in part]
            if having:
                splits[name] = join([rows for rows, _ in having], [source for _, source in having])
    splits = {
        "train": _first(splits["train"], config.max_train_examples),
        **{name: _first(splits[name], config.max_eval_examples) for name in ("validation", "test") if name in splits},
    }
    if not config.streaming:
        description += "; rows: " + ", ".join(f"{name} {len(rows):,}" for name, rows in splits.items())
    if held_out:
        description += f"; validation is held out by a hash of the content (--eval-fraction {config.eval_fraction:g})"
        if _is_without_evaluation(config):
            description += ", and evaluated by nobody (--eval-strategy no): --eval-fraction 0 trains on it too"
    for rows in splits.values():
        rows.info.description = description
    return IterableDatasetDict(splits) if config.streaming else DatasetDict(splits)


def describe_source(config: DataConfig | str) -> str:
    """One line on what a run reads; for the embedded corpus with the interpreter's version and a digest of the text."""
    dataset = config if isinstance(config, str) else config.dataset
    parts = sources_of(dataset)
    if parts != [Source(dataset)]:
        return "; ".join(f"{part.weight:.3g} of {describe_source(part.dataset)}" for part in parts)
    if (found := _built_in(dataset)) is not None:
        built_in, task = found
        return str(built_in.describe_corpus(task))
    from toolkit.data.sources.find_files import find_files
    from toolkit.data.sources.remote import is_url

    files = find_files(dataset)
    if files is None:
        return f"{dataset} on the Hugging Face Hub"
    where = "remote" if is_url(dataset) else "local"
    return f"{dataset}: {sum(map(len, files.values())):,} {where} file(s)"


def commits_of_sources(config: DataConfig) -> dict[str, str]:
    """The commits at which this process has read the sources that are datasets of the Hub, by the sources' names."""
    names = [source.dataset for source in sources_of(config.dataset)]
    return {name: _commits_read[name] for name in names if name in _commits_read}


def writers_of_sources(dataset: str | None) -> list[str]:
    """The models that wrote answers of the rows which this process has read from a data set, by `WRITER`."""
    found = [name for source in sources_of(dataset) for name in _writers_read.get(source.dataset, ())] if dataset else []
    return sorted(set(found))


def sources_of(dataset: str) -> list[Source]:
    """The weighted sources of a mixture, or the one that is named."""
    may_be_mixed = "," in dataset or dataset.lower().endswith((".yaml", ".yml"))
    return (as_mixture(dataset) if may_be_mixed else None) or [Source(dataset)]


def load_source(source: Source, config: DataConfig) -> Splits:
    """All splits of one source under its own names, columns renamed."""
    splits = _load(source.dataset, config)
    for split, rows in splits.items():
        if not config.streaming and len(rows) == 0:
            raise Refusal(f"--dataset {source.dataset}: the split {quoted(split)} has no rows.")
        if not config.streaming and WRITER in rows.column_names:
            written = {str(name) for name in rows.unique(WRITER) if name}
            _writers_read[source.dataset] = sorted(written.union(_writers_read.get(source.dataset, ())))
    renames = source.rename_columns or _renames(config.rename_columns)
    return {split: _renamed(rows, renames, source.dataset) for split, rows in splits.items()} if renames else splits


def split_named(name: str, splits: Mapping[str, Rows], dataset: str, flag: str = "--split") -> Rows:
    """A split of a dataset by its name, which `flag` gives; refused where there is none."""
    if name not in splits:
        raise Refusal(f"{flag} {name}: {dataset} has no such split. It has: {', '.join(splits)}.")
    return splits[name]


def _load(dataset: str, config: DataConfig) -> Splits:
    streaming = config.streaming
    if (found := _built_in(dataset)) is not None:
        built_in, task = found
        splits = built_in.load_corpus(task)
        return {name: rows.to_iterable_dataset() if streaming else rows for name, rows in splits.items()}
    from toolkit.data.sources.find_files import find_files

    files = find_files(dataset)
    if files is None:
        from toolkit.data.sources.hub_datasets import load_from_hub

        from_hub, commit = load_from_hub(dataset, streaming)
        if commit is not None:
            _commits_read[dataset] = commit
        return from_hub
    from toolkit.data.sources.files import read_files
    from toolkit.data.sources.remote import download, is_url

    files = {split: [dataclasses.replace(file, sample_by=config.sample_by) for file in files[split]] for split in files}
    if streaming:
        from datasets import IterableDataset

        from toolkit.data.sources.file_streams import FileRows

        return {split: IterableDataset(FileRows(files[split])) for split in files}
    if is_url(dataset):
        files = {split: [dataclasses.replace(file, path=str(download(file.path))) for file in files[split]] for split in files}
    return {split: read_files(files[split]) for split in files}


def is_built_in(dataset: str) -> bool:
    return _built_in(dataset) is not None


def _built_in(dataset: str) -> tuple[ModuleType, str] | None:
    """The module that makes the rows of a built-in source, and which of its tasks is meant; None for other sources."""
    prefix, colon, task = dataset.partition(":")
    if not colon or prefix not in ("stdlib", "synthetic"):
        return None
    from toolkit.demo_corpus import stdlib, synthetic

    return (stdlib if prefix == "stdlib" else synthetic), task


def _choose(splits: Splits, source: Source, config: DataConfig) -> Splits:
    """Of the source's splits, those to train, to evaluate and to test on, under our names."""

    chosen = {"train": split_named(config.train_split, splits, source.dataset, "--train-split")}
    others = [name for name in ("validation", "test") if name in splits and name != config.train_split]
    if config.eval_split and config.eval_split == config.train_split:
        raise Refusal(f"--eval-split {config.eval_split} is the split to train on too: the evaluation would measure memory.")
    evaluation = config.eval_split or (others[0] if others else None)
    if evaluation:
        chosen["validation"] = split_named(evaluation, splits, source.dataset, "--eval-split")
    if "test" in others and evaluation != "test":
        chosen["test"] = splits["test"]
    return chosen


def _hold_out(chosen: list[Splits], sources: list[Source], config: DataConfig) -> bool:
    """Give each source without an evaluation split one, and return whether any was.

    Over all of them a content is either trained on or held out.
    """
    from toolkit.data.sources import held_out as content

    without = [(part, source) for part, source in zip(chosen, sources, strict=True) if "validation" not in part]
    if not without or config.eval_fraction == 0:
        return False
    if config.streaming and config.max_eval_examples is None:
        raise Refusal(
            "--streaming: the evaluation rows are held out of the stream itself, and to find them all would read it to its "
            "end. Set how many are enough: --max-eval-examples 500. Or name an --eval-split, or turn it off: --eval-fraction 0"
        )
    always = frozenset(content.first_key(part["train"], source.dataset) for part, source in without)
    for part, source in without:
        if config.streaming:
            part["train"], part["validation"] = content.stream_by_content(
                part["train"], config.eval_fraction, always, source.dataset
            )
        else:
            part["train"], evaluation = content.split_by_content(
                part["train"], config.eval_fraction, always, source.dataset, is_needed=not _is_without_evaluation(config)
            )
            part |= {"validation": evaluation} if len(evaluation) else {}
    return any("validation" in part for part, _ in without)


def _is_without_evaluation(config: DataConfig) -> bool:
    return isinstance(config, RunConfig) and config.eval_strategy == "no"


def _check_held_out(chosen: list[Splits], held_out: bool, config: DataConfig) -> None:
    """Refuse an evaluation without rows, and a share of held-out rows where none are held out."""
    usual = next(field.default for field in dataclasses.fields(DataConfig) if field.name == "eval_fraction")
    has_validation = any("validation" in part for part in chosen)
    if has_validation and not held_out and config.eval_fraction not in (0.0, usual):
        raise Refusal(
            f"--eval-fraction {config.eval_fraction:g} has no effect: {config.dataset} has an evaluation split of its own. "
            "Remove it."
        )
    if not has_validation and isinstance(config, RunConfig) and config.eval_strategy != "no":
        raise Refusal(
            "There are no rows to evaluate on: no evaluation split, and --eval-fraction 0 holds none out. Name an "
            "--eval-split, or go without evaluation: --eval-strategy no"
        )


def _with_origin(rows: Dataset, source: Source) -> Dataset:
    if "origin" in rows.column_names:
        return rows
    name = source.dataset.partition("@")[0]  # the same rows are the same data, whichever revision names them
    return rows.add_column("origin", [f"{name} ({rows.split}):{number}" for number in range(1, len(rows) + 1)])


def _first(rows: Rows, most: int | None) -> Rows:
    if most is None:
        return rows
    return rows.take(most) if not hasattr(rows, "__len__") else rows.select(range(min(most, len(rows))))


def _renames(entries: Sequence[str]) -> dict[str, str]:
    pairs = [_rename(entry) for entry in entries]
    if twice := [old for old, count in Counter(old for old, _ in pairs).items() if count > 1]:
        raise Refusal(f"--rename-columns {','.join(entries)}: {quoted(twice[0])} is there twice: keep one.")
    return dict(pairs)


def _rename(entry: str) -> tuple[str, str]:
    found = re.fullmatch(r"\s*([^=]+?)\s*=\s*([^=]+?)\s*", entry)
    if not found:
        raise Refusal(f"--rename-columns {entry}: should be old=new, for instance --rename-columns question=prompt")
    return found[1], found[2]


def _renamed(rows: Rows, renames: dict[str, str], dataset: str) -> Rows:
    columns = column_names(rows)
    written = {name.strip(): name for name in columns}  # a list of settings has lost the blanks around its entries
    renames = {old if old in columns else written.get(old, old): new for old, new in renames.items()}
    if twice := [new for new, count in Counter(renames.values()).items() if count > 1]:
        written_so = ",".join(f"{old}={new}" for old, new in renames.items())
        raise Refusal(f"--rename-columns {written_so}: two columns can't both be called {quoted(twice[0])}.")
    for old, new in renames.items():
        if old not in columns:
            there = ", ".join(name for name in columns if name != "origin")
            raise Refusal(f"--rename-columns {old}={new}: {dataset} has no column {quoted(old)}. It has: {there}.")
        if new in columns and new not in renames:
            raise Refusal(f"--rename-columns {old}={new}: {dataset} has a column {quoted(new)} already.")
    if hasattr(rows, "__len__") or not set(renames) & set(renames.values()):
        return rows.rename_columns(renames)
    return rows.map(_exchanged, fn_kwargs={"renames": renames}, remove_columns=list(renames))  # datasets renames no stream so


def _exchanged(row: dict[str, Any], renames: dict[str, str]) -> dict[str, Any]:
    return {new: row[old] for old, new in renames.items()}
