"""Fills stores: a teacher is queried once for all that a run will see, its most probable tokens at each supervised position."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.loading.batch import MicroBatch
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.data.loading.packing import Rows
from toolkit.data.loading.some_rows import digest_of_rows, seen_in_training
from toolkit.distillation.store import Store, TaughtRows, blocks_of, collate_taught, store_path
from toolkit.distributed.ranks import from_all, largest, on_main, say_once
from toolkit.losses.causal_lm import supervised
from toolkit.losses.chunked import rows_in_a_chunk
from toolkit.losses.distillation import OfTeacher, TeacherFn
from toolkit.losses.divergences import TeacherLogps
from toolkit.system.numbers import show_bytes
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT_VERSION = 2
SECONDS_BETWEEN_LINES = 60.0
AnyLoader = TypeVar("AnyLoader", TrainLoader, EvalLoader)


@dataclass
class _Split:
    """A split that a run will see: its loader, its store and the examples that are wanted of it."""

    loader: TrainLoader | EvalLoader
    store: Store
    wanted: np.ndarray

    def missing(self) -> list[tuple[int, list[int]]]:
        unknown = np.array([example for example in self.wanted.tolist() if example not in self.store.known], dtype=np.int64)
        return blocks_of(self.loader.rows, unknown, self.store.bytes_per_token)


Block = tuple[_Split, int, list[int]]  # of a split its number and its examples


def store_teacher(
    accelerator: Accelerator, load: Callable[[], TeacherFn], made_of: Mapping[str, Any], train: TrainLoader,
    evaluation: EvalLoader | None, *, top_k: int, vocabulary: int, temperature: float,
) -> tuple[TrainLoader, EvalLoader | None]:  # fmt: skip
    """Loaders whose micro-batches hold the teacher's log-probabilities (`collate_taught`); what no store has is computed.

    The teacher is queried only for examples that the run is going to see and that no earlier run has left on disk; without such
    ones it is not loaded. A collective: each rank writes blocks of its own, to a disk that every rank sees.

    Args:
        load: loads the teacher.
        made_of: what distinguishes the teacher's numbers from those of another one.
        top_k: how many of the `vocabulary` shared tokens are kept.

    Raises:
        Refusal: no room on the disk, or a disk that other ranks don't see.
    """
    splits = []
    for loader in (train, evaluation):
        if loader is not None:
            path = on_main(accelerator, partial(_path_of, loader.rows, made_of, top_k, vocabulary, temperature))
            store = Store(path, top_k, vocabulary)
            on_main(accelerator, store.open)
            splits.append(_Split(loader, store, _wanted(loader)))
    missing = on_main(accelerator, lambda: [split.missing() for split in splits])
    work = [(split, *block) for split, blocks in zip(splits, missing, strict=True) for block in blocks]
    if work:
        on_main(accelerator, partial(_announce, work))
        size = (evaluation or train).micro_batch_size
        _compute(accelerator, load(), work, size, temperature)
    else:
        say_once(f"teacher: log-probabilities read from {splits[0].store.folder}")
    from_all(accelerator, partial(_open_whole, splits, is_open=not work and accelerator.is_main_process))
    return _taught(train, splits[0].store), None if evaluation is None else _taught(evaluation, splits[1].store)


def _wanted(loader: TrainLoader | EvalLoader) -> np.ndarray:
    if isinstance(loader, EvalLoader):
        return np.arange(len(loader.rows))
    return np.union1d(seen_in_training(loader), loader.longest_examples())  # the latter to see that a step fits memory


def _taught(loader: AnyLoader, store: Store) -> AnyLoader:
    return replace(loader, rows=TaughtRows(loader.rows, store), collate=partial(collate_taught, collate=loader.collate))


def ask_stored(vocabulary: int) -> TeacherFn:
    """A teacher whose log-probabilities are in the micro-batch."""

    def ask(micro_batch: MicroBatch, temperature: float, body: Callable[[OfTeacher, int], torch.Tensor]) -> torch.Tensor:
        if "teacher_logps" not in micro_batch:
            raise ValueError("The micro-batch has no teacher_logps: take it from the loaders that build_teacher returned.")
        return body(partial(_stored, micro_batch), vocabulary)

    return ask


def _stored(micro_batch: MicroBatch, piece: slice) -> TeacherLogps:
    ids = micro_batch.get("teacher_ids")
    return TeacherLogps(micro_batch["teacher_logps"][piece], None if ids is None else ids[piece])


def _path_of(rows: Rows, made_of: Mapping[str, Any], top_k: int, vocabulary: int, temperature: float) -> Path:
    content = {
        "version": FORMAT_VERSION, "teacher": made_of, "top_k": top_k, "vocabulary": vocabulary, "temperature": temperature,
        "rows": digest_of_rows(rows, ("input_ids", "labels")),
    }  # fmt: skip
    return store_path(content)


def _announce(work: Sequence[Block]) -> None:
    """Print how much is going to be computed and written.

    Raises:
        Refusal: more than there is room for.
    """
    store = work[0][0].store
    tokens = sum(float(split.loader.rows.units["tokens"][examples].sum()) for split, _, examples in work)
    size = tokens * store.bytes_per_token
    folder = next(parent for parent in store.folder.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if size > 0.98 * free:
        raise Refusal(
            f"--teacher-top-k {store.top_k}: log-probabilities of {tokens:,.0f} tokens are {show_bytes(size)}, and {folder} "
            f"has {show_bytes(free)} left. Take fewer, or another disk: export HF_DATASETS_CACHE=/a/folder/with/space"
        )
    what = "all tokens" if store.top_k == store.vocabulary else f"the {store.top_k} most probable tokens"
    say_once(
        f"teacher: log-probabilities of {what} at {tokens:,.0f} positions, {show_bytes(size)}, computed once and kept in "
        f"{folder}"
    )


def _compute(
    accelerator: Accelerator, ask: TeacherFn, work: Sequence[Block], micro_batch_size: int, temperature: float
) -> None:
    """Fill the blocks, each rank every n-th one. All ranks query the teacher equally often: its weights may be sharded."""
    mine = work[accelerator.process_index :: accelerator.num_processes]
    batches = [(block, batch) for block in mine for batch in _cut(block[2], micro_batch_size)]
    filling = (work[0], _cut(work[0][2], micro_batch_size)[0])
    said = began = time.monotonic()
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    tails, problem = list[torch.Tensor](), None
    for step in range(largest(accelerator, len(batches))):
        (split, number, examples), batch = batches[step] if step < len(batches) else filling
        micro_batch = to_device(split.loader.collate(split.loader.rows.documents(batch)), accelerator.device)
        logps, ids = _likeliest(ask, micro_batch, temperature, split.store)
        if step >= len(batches):
            continue
        found.append((logps, ids))
        if ids is not None:
            tails.append(logps[:, -1].exp())
        if batch[-1] == examples[-1]:
            try:
                _write(split, number, examples, found)
            except OSError as error:  # the others go on, and get it at the end
                problem = problem or error
            found = []
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            say_once(f"teacher: {step + 1:,} of {len(batches):,} micro-batches done")
    masses = from_all(accelerator, partial(_sums_of, tails, problem))
    total, count, most = sum(each[0] for each in masses), sum(each[1] for each in masses), max(each[2] for each in masses)
    rest = f"; the other tokens have {total / count:.2%} of the probability on average, at most {most:.2%}" if count else ""
    say_once(f"teacher: done in {time.monotonic() - began:.0f} s{rest}")


def _cut(examples: list[int], size: int) -> list[list[int]]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def _likeliest(
    ask: TeacherFn, micro_batch: MicroBatch, temperature: float, store: Store
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities `[positions, top_k + 1]` and ids `[positions, top_k]`, or of all tokens, on the CPU."""
    positions = len(supervised(micro_batch)[0])
    size = rows_in_a_chunk(store.vocabulary, micro_batch["input_ids"].device)
    logps, ids = list[torch.Tensor](), list[torch.Tensor]()

    def body(of_teacher: OfTeacher, vocabulary: int) -> torch.Tensor:
        for start in range(0, max(positions, 1), size):
            said = of_teacher(slice(start, start + size))
            if said.ids is not None:  # a server returns the most probable alone
                logps.append(said.logps.cpu())
                ids.append(said.ids.cpu())
                continue
            every = said.logps
            if store.top_k == vocabulary:
                logps.append(every.cpu())
                continue
            most_probable = every.topk(store.top_k, dim=-1)
            rest = every.scatter(1, most_probable.indices, -torch.inf).logsumexp(-1, keepdim=True)
            logps.append(torch.cat([most_probable.values, rest], dim=1).cpu())
            ids.append(most_probable.indices.cpu())
        return torch.zeros(1)

    with torch.no_grad():
        ask(micro_batch, temperature, body)
    return torch.cat(logps), torch.cat(ids) if ids else None


def _write(split: _Split, number: int, examples: list[int], found: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    tokens = split.loader.rows.units["tokens"][examples].astype(np.int64).tolist()
    logps = torch.cat([each for each, _ in found]).numpy()
    ids = torch.cat([each for _, each in found if each is not None]).numpy() if found[0][1] is not None else None
    split.store.write(number, examples, tokens, logps, ids)


def _sums_of(tails: list[torch.Tensor], problem: OSError | None) -> tuple[float, int, float]:
    if problem is not None:
        raise Refusal(f"The teacher's log-probabilities can't be written: {problem.strerror or problem}. What is done is kept.")
    masses = torch.cat([torch.zeros(0), *tails]).double()
    return float(masses.sum()), len(masses), float(masses.max()) if len(masses) else 0.0


def _open_whole(splits: Sequence[_Split], is_open: bool) -> None:
    """Every rank reads what all have written, and makes sure that all of it is there."""
    for split in splits:
        if not is_open:
            split.store.open()
        if split.missing():
            raise Refusal(
                f"{split.store.folder}: lacks examples that another rank has written. Ranks on several machines need one "
                "folder that all of them see: export HF_DATASETS_CACHE=/a/shared/folder"
            )
