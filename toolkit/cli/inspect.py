"""toolkit inspect: a dataset as training would see it, with every row that it would refuse."""

import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.setting_options import OF_MODEL, TASKS, check_task, read_options, with_settings
from toolkit.config import (
    ClassificationConfig,
    DataConfig,
    DiffusionConfig,
    EmbeddingConfig,
    MaskedLMConfig,
    ModelConfig,
    QuestionAnsweringConfig,
    RankingConfig,
    Refusal,
    Seq2SeqConfig,
    TokenClassificationConfig,
)
from toolkit.config.tasks import PromptConfig
from toolkit.runs.directory import holds_a_run
from toolkit.system.console import as_typed, printable, say, write

if TYPE_CHECKING:
    import numpy as np

    from toolkit.data.inspection import Inspection, Problem
    from toolkit.data.report import DataReport

_TASKS = (*TASKS, "prompts")  # of which no model is evaluated: completions are sampled for them
_BAR = 30  # columns
_MOST_BINS = 12


@dataclass(frozen=True)
class _Config(
    EmbeddingConfig,
    ModelConfig, DataConfig, ClassificationConfig, RankingConfig, QuestionAnsweringConfig, MaskedLMConfig,
    DiffusionConfig, TokenClassificationConfig, Seq2SeqConfig, PromptConfig,
):  # fmt: skip
    """What is read of a recipe's settings."""

    ranking_loss: str = "ranknet"  # as recipes/reranker.py


@with_settings(
    f"model {OF_MODEL} max_length overlong max_prompt_length packing packing_strategy per_device_train_batch_size "
    "completion_only_loss assistant_only_loss problem_type max_target_length source_prefix source_lang target_lang doc_stride "
    "tag_scheme ranking_loss embedding_loss score_scale rename_columns sample_by train_split eval_split eval_fraction "
    "streaming max_train_examples max_eval_examples",
    _Config,
)
def inspect(
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET", help="A file, a folder, a Hub id, stdlib:NAME or a mixture, as --dataset of recipes."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="|".join(_TASKS), help="What to train on it. Default: what the columns are known for.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A recipe's YAML, for its data and its tokenizer.")
    ] = None,
    examples: Annotated[int, typer.Option(metavar="N", min=0, max=10_000, help="How many examples are shown.")] = 2,
    *,
    typed: dict[str, Any],
) -> None:
    """Look at a dataset as training would see it: formats, lengths, what is supervised, and every problem by row.

    Without --model or --tokenizer lengths are those of a small tokenizer trained on the standard library. Most options are
    settings of recipes and mean the same.

    Ends with 0 when training would start, with 1 when there are problems, with 2 when the data can't be read at all.
    """
    settings = read_options(_Config, {"dataset": dataset, **typed}, config)
    if dataset is not None and (Path(dataset) / "model").is_dir() and holds_a_run(Path(dataset)):
        raise Refusal(
            f"{dataset}: is a run, and inspect takes data. The data of that run: "
            f"{as_typed('toolkit', 'inspect', '--config', Path(dataset) / 'config.yaml')}; others as its model reads them: "
            f"{as_typed('toolkit', 'inspect', 'DATASET', '--model', Path(dataset) / 'model')}"
        )
    if dataset is None and config is None:
        raise typer.BadParameter("which? Give a file, a folder, a Hub id or stdlib:NAME.", param_hint="DATASET")
    check_task(task, _TASKS)

    from toolkit.data.inspection import Problem, guess_task, inspect_splits
    from toolkit.data.sources.load import load_splits
    from toolkit.data.tokenize.columns import columns_of
    from toolkit.models.tokenizer import load_tokenizer

    try:
        splits = load_splits(settings)
    except Refusal as refusal:
        lines = _unreadable_lines(settings)
        if lines and str(refusal) not in lines:
            lines.append(str(refusal))
        lines = lines or _odd_rows(settings, str(refusal))
        if not lines:
            raise
        where_and_what = [line.partition(": ")[::2] for line in lines]
        problems = _problems([Problem("", origin, what) for origin, what in where_and_what])
        say("\n".join([f"{settings.dataset}: lines that can't be read", *problems]))
        say("\nThe rest is looked at once these are corrected.")
        raise typer.Exit(1) from refusal
    task = task or guess_task(columns_of(splits["train"], "train"))
    found = inspect_splits(task, splits, load_tokenizer(settings), settings, examples)
    _show(found, task, splits, settings)
    if found.problems:
        raise typer.Exit(1)


def _show(found: "Inspection", task: str, splits: Any, settings: _Config) -> None:
    from toolkit.data.report import example_lines, marks_for, report_lines
    from toolkit.data.sources.find_files import with_given_paths

    marks = marks_for(sys.stdout)
    first, *rest = report_lines(found.report, marks)
    tokenizer = settings.tokenizer or settings.model
    lines = [
        printable(f"{splits['train'].info.description}"),
        printable(f"Task: {task}. Tokens: those of {tokenizer}'s tokenizer."),
        first, *rest, "",
    ]  # fmt: skip
    if len(found.whole["train"]):
        lines += ["Lengths of train, in tokens", *_histogram(found.whole["train"], found.report), ""]
    if task in ("sft", "lm", "masked_lm", "diffusion") and len(found.kept.get("train", ())):
        lines += [_packing(found.kept["train"], settings), ""]
    for origin, pieces in found.examples:
        lines += [*example_lines(pieces, origin, found.report.example_names, marks), ""]
    lines += [printable(with_given_paths(line)) for line in _problems(found.problems)]
    write("\n".join(lines) + "\n", sys.stdout)


def _histogram(lengths: "np.ndarray", report: "DataReport") -> list[str]:
    """A bar for each stretch of lengths; all beyond the 99th percentile in the last one."""
    import numpy as np

    usual = int(np.percentile(lengths, 99, method="inverted_cdf"))
    step = next(size for size in _steps() if usual / size < _MOST_BINS - 1)
    edges = [*range(int(lengths.min()) // step * step, usual + 1, step), usual // step * step + step]
    bins = [(low + (low == 0), high - 1, int(((lengths >= low) & (lengths < high)).sum())) for low, high in pairwise(edges)]
    beyond = int((lengths >= edges[-1]).sum())
    rows = [(f"{low:,} - {high:,}", count) for low, high, count in bins]
    rows += [(f"{edges[-1]:,} - {lengths.max():,}", beyond)] if beyond else []
    sign = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    width, most = max(len(name) for name, _ in rows), max(count for _, count in rows)
    lines = [
        f"  {name:>{width}}  {sign * max(round(_BAR * count / most), count > 0):<{_BAR}}  {count:>{len(f'{most:,}')},}"
        for name, count in rows
    ]
    over = int((lengths > report.max_length).sum())
    share = f"{over:,} of {len(lengths):,} ({over / len(lengths):.1%})"
    return [*lines, f"  longer than {report.length_flag} {report.max_length:,}: {share if over else 'none'}"]


def _steps() -> Any:
    """1, 2, 5, 10, 20, 50, 100 ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _packing(lengths: "np.ndarray", settings: _Config) -> str:
    from toolkit.data.inspection import packed, padded_fill

    packing, size = packed(lengths, settings), settings.per_device_train_batch_size
    return (
        f"With --packing ({settings.packing_strategy}): {_number(len(packing), 'row')} of {settings.max_length:,} tokens, "
        f"{packing.fill:.1%} full. Without: {_number(len(lengths), 'example')}, in micro-batches of {size} "
        f"{padded_fill(lengths, size):.1%} full."
    )


def _problems(problems: list["Problem"]) -> list[str]:
    """Each kind of problem once, with all its rows."""
    if not problems:
        return ["No problems: training would start."]
    rows, kinds = dict[str, list[str]](), dict[str, list[str]]()
    for problem in problems:
        what = problem.what if problem.origin else f"{problem.split}: {problem.what}"
        kind = re.sub(r"\d[\d,]*", "0", what)  # 81 tokens are too many in the same way as 85
        rows.setdefault(kind, []).append(problem.origin)
        kinds.setdefault(kind, []).append(what)
    number = sum(1 for problem in problems if problem.origin)
    lines = [f"{_number(len(rows), 'problem')}" + (f", in {_number(number, 'row')}:" if number else ":")]
    for kind, origins in rows.items():
        likewise = " (the first row's numbers)" if len(set(kinds[kind])) > 1 else ""
        places = _places([origin for origin in origins if origin])
        lines += [f"  {kinds[kind][0]}{likewise}", *(f"    {place}" for place in places)]
    return lines


def _places(origins: list[str]) -> list[str]:
    """Rows as `file:3, 17, 25-30`, a line for each file."""
    numbers, others = dict[str, list[int]](), list[str]()
    for origin in origins:
        found = re.fullmatch(r"(.*:)(\d+)", origin)
        if found:
            numbers.setdefault(found[1], []).append(int(found[2]))
        else:
            others.append(origin)
    return [file + ", ".join(_ranges(sorted(rows))) for file, rows in numbers.items()] + others


def _ranges(numbers: list[int]) -> list[str]:
    runs = list[list[int]]()
    for number in numbers:
        if runs and number <= runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in runs]


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _unreadable_lines(settings: _Config) -> list[str]:
    """All lines of the files of JSON lines that can't be read."""
    from toolkit.data.sources.readers import unreadable_lines

    try:
        return [line for split in _line_files(settings) for file in split for line in unreadable_lines(file.path)]
    except Refusal:
        return []


def _odd_rows(settings: _Config, refusal: str) -> list[str]:
    """All rows of these files that don't fit the others, where the refusal names one of them."""
    from toolkit.data.sources.files import odd_rows
    from toolkit.data.sources.find_files import with_given_paths

    for split in _line_files(settings):
        try:
            lines = list(odd_rows(split))
        except Refusal:
            continue
        if any(refusal.startswith(line) for line in lines):
            return list(map(with_given_paths, lines))
    return []


def _line_files(settings: _Config) -> list[list[Any]]:
    from toolkit.data.sources.find_files import find_files

    try:
        files = find_files(settings.dataset) or {}
    except Refusal:
        return []
    return [[file for file in split if file.ending in (".jsonl", ".ndjson")] for split in files.values()]
