"""Loaders: from tokenized splits to the batches of each step, with their global totals.

The position of a run is one integer, the examples consumed. Everything else follows from it and the seed.
"""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from toolkit.config import DataConfig, Refusal
from toolkit.data.compat import fingerprint_of
from toolkit.data.loading.batch import Batch, Document, MicroBatch
from toolkit.data.loading.collate import collate_padded
from toolkit.data.loading.collate_groups import collate_lists, collate_text_groups
from toolkit.data.loading.collate_pairs import collate_answers, collate_pairs, collate_scored_pairs
from toolkit.data.loading.columns import check_splits, column
from toolkit.data.loading.order import Order, StepPlan, batch_of, checked, cut_step, epoch_order, generator_of, plan_steps
from toolkit.data.loading.packing import Augment, PackedRows, Packing, PlainRows, Rows, pack_best_fit, pack_wrapped
from toolkit.data.loading.step_size import check_step
from toolkit.data.loading.streams import StreamLoader
from toolkit.data.sources.load import commits_of_sources
from toolkit.data.worker_processes import open_socket, started
from toolkit.system.files import allow_open_files

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset as MapDataset, IterableDataset

__all__ = ["Batch", "EvalLoader", "StreamLoader", "TrainLoader", "build_dataloaders", "packing_name"]

LONGEST_STOP = 600  # seconds
LEAST_OPEN_FILES, OPEN_FILES = 256, 4096
_UNPACKED = (  # collate functions whose rows --packing is not for
    (collate_padded, " puts documents of several examples into one row, which this recipe's padded rows cannot hold."),
    (collate_pairs, ": pairs are one behind the other without padding as it is (--pair-layout). Remove it."),
    (collate_scored_pairs, ": each answer of a pair is a row of its own (--pair-layout). Remove it."),
    (collate_answers, ": answers are one behind the other without padding as it is. Remove it."),
    (collate_lists, ": each document of a list is a row of its own. Remove it."),
    (collate_text_groups, ": each text is embedded by itself. Remove it."),
)
Collate = Callable[[list[Document]], MicroBatch]


class _StepReader(Dataset):
    """Item of a plan: the batch it describes, so that a worker process makes a whole step.

    `examples_to_consume`: of the run, for an augmentation that changes with its progress; None: of an evaluation.
    """

    def __init__(
        self, rows: Rows, collate: Collate, seed: int, augment: Augment | None = None, examples_to_consume: int | None = None
    ) -> None:
        self.rows, self.collate, self.seed, self.augment = rows, collate, seed, augment
        self.examples_to_consume = examples_to_consume

    def __getitem__(self, plan: StepPlan) -> Batch:
        totals = {unit: float(values[plan.everyone].sum()) for unit, values in self.rows.units.items()}
        if self.augment is None:
            read = [self.rows.documents([example for _, example in piece]) for piece, _ in plan.pieces]
        else:
            augmented = self._augmented(plan, self.augment)
            read = [[document for place in piece for document in augmented[place]] for piece, _ in plan.pieces]
            if "tokens" in totals:  # the index has those of the documents as they were
                everyone = [document for documents in augmented.values() for document in documents]
                totals["tokens"] = float(sum(document["supervised_tokens"] for document in everyone))
        return batch_of(plan, [self.collate(documents) for documents in read], totals, self.seed)

    def _augmented(self, plan: StepPlan, augment: Augment) -> dict[tuple[int, int], list[Document]]:
        """The documents of the global batch by (epoch, example): every rank needs the supervised tokens of all of them."""
        augmented = {}
        for position, example in enumerate(plan.everyone, plan.position):
            epoch, documents = position // len(self.rows), self.rows.documents([example])
            if self.examples_to_consume is None:
                augmented[0, example] = [augment(document, _numbers_of(document, self.seed), 1.0) for document in documents]
            else:
                numbers, progress = generator_of(self.seed, "augment", epoch, example), position / self.examples_to_consume
                augmented[epoch, example] = [augment(document, numbers, progress) for document in documents]
        return augmented


def _numbers_of(document: Document, seed: int) -> np.random.Generator:
    """For an evaluation: a function of the seed and the document alone, however it is packed and in whatever split it is."""
    return generator_of(seed, "augment", np.asarray(document["input_ids"], dtype=np.int64).tobytes())


@dataclass
class TrainLoader:
    """Batches of a map-style dataset from any position on."""

    rows: Rows
    collate: Collate
    seed: int
    micro_batch_size: int
    global_batch_size: int
    examples_to_consume: int
    fingerprint: str
    data_rank: int = 0
    num_data_ranks: int = 1
    workers: int = 0
    order: Order = epoch_order
    augment: Augment | None = None
    pin_memory: bool = False
    commits: dict[str, str] = field(default_factory=dict)  # of datasets of the Hub

    @property
    def epoch_size(self) -> int:
        """Examples in an epoch: rows of the data, or packed rows."""
        return len(self.rows)

    @property
    def num_steps(self) -> int:
        return math.ceil(self.examples_to_consume / self.global_batch_size)

    def __len__(self) -> int:
        """Steps of the whole run, all epochs: what iterating gives."""
        return self.num_steps

    def __repr__(self) -> str:
        return f"TrainLoader({len(self):,} steps of {self.global_batch_size:,} of {self.epoch_size:,} examples)"

    def state(self) -> dict[str, Any]:
        """What a resume needs next to the position: nothing."""
        return {}

    def restore(self, state: dict[str, Any], position: int, examples_to_consume: int | None = None) -> None:
        """The position is enough. `examples_to_consume`: of the run that is continued; None: as this loader was built."""
        self.examples_to_consume = examples_to_consume or self.examples_to_consume

    def longest_micro_batch(self) -> dict[str, Any]:
        """The micro-batch of the longest examples: the most that any step may need memory for."""
        longest = self.longest_examples()
        plan = StepPlan(0, len(longest), [([(0, example) for example in longest], True)], longest)
        return self._reader()[plan].micro_batches[0]

    def longest_examples(self) -> list[int]:
        """The numbers of the examples in that micro-batch, which this run may never train on."""
        return list(map(int, np.argsort(-self.rows.lengths, kind="stable")[: self.micro_batch_size]))

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the whole run, all epochs; a `Run` begins at its own position."""
        return self.batches()

    def batches(self, position: int = 0) -> Iterator[Batch]:
        """Yield the batch of each step from `position` (examples consumed) to the end of the run."""
        plans = self._plans(position, self.global_batch_size)
        yield from _load(self._reader(), plans, self.workers, self.pin_memory)

    def further(self, position: int, count: int) -> Batch | None:
        """A batch of the next `count` examples from `position` on, of fewer before the end of the run; None at its end."""
        plan = next(self._plans(position, count), None)
        return None if plan is None else self._reader()[plan]

    def _plans(self, position: int, size: int) -> Iterator[StepPlan]:
        return plan_steps(
            self.epoch_size, self.examples_to_consume, self.seed, position, size, self.micro_batch_size, self.data_rank,
            self.num_data_ranks, self.order,
        )  # fmt: skip

    def _reader(self) -> _StepReader:
        return _StepReader(self.rows, self.collate, self.seed, self.augment, self.examples_to_consume)


@dataclass
class EvalLoader:
    """Every example of a split once, dealt to the ranks; the same number of batches, of one micro-batch each, on all.

    The longest examples come first, which saves padding and shows at once whether the largest batch fits.
    """

    rows: Rows
    collate: Collate
    micro_batch_size: int
    data_rank: int = 0
    num_data_ranks: int = 1
    workers: int = 0
    pin_memory: bool = False
    augment: Augment | None = None
    seed: int = 0  # of the augmentation

    def __repr__(self) -> str:
        return f"EvalLoader({len(self):,} micro-batches of {self.micro_batch_size:,} of {len(self.rows):,} examples)"

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.rows) / self.micro_batch_size) / self.num_data_ranks)

    def __iter__(self) -> Iterator[Batch]:
        longest_first = np.argsort(-self.rows.lengths, kind="stable")
        whole = cut_step([(0, int(i)) for i in longest_first], 0, self.micro_batch_size, self.data_rank, self.num_data_ranks)
        plans = (StepPlan(0, len(piece), [(piece, real)], [i for _, i in piece]) for piece, real in whole.pieces)
        return _load(_StepReader(self.rows, self.collate, self.seed, self.augment), plans, self.workers, self.pin_memory)


def _load(reader: _StepReader, plans: Iterator[StepPlan], workers: int, pin_memory: bool) -> Iterator[Batch]:
    """A DataLoader with a generator of its own: making its iterator must not move the global random state."""
    loader: DataLoader[Batch] = DataLoader(
        reader, sampler=plans, batch_size=None, num_workers=workers, pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(0), prefetch_factor=2 if workers else None, worker_init_fn=_begin_worker,
    )  # fmt: skip
    return started(loader, "--dataloader-num-workers")


def _begin_worker(worker: int) -> None:
    _outlive_a_stop(worker)
    open_socket()


def _outlive_a_stop(worker: int) -> None:
    """A signal that stops a whole job, as Slurm's, is for the run, which a worker's death would end; it ends its workers."""

    def note(number: int, frame: Any) -> None:
        signal.alarm(LONGEST_STOP)  # one that is left behind ends by itself

    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name) and hasattr(signal, "alarm"):
            signal.signal(getattr(signal, name), note)


def build_dataloaders(
    splits: Mapping[str, MapDataset | IterableDataset], collate: Collate, config: DataConfig,
    accelerator: Accelerator | None = None, *, augment: Augment | None = None, augment_evaluation: Augment | None = None,
    order: Order | None = None,
) -> tuple[TrainLoader | StreamLoader, EvalLoader | None]:  # fmt: skip
    """The training loader and the evaluation loader (None without a validation split) of tokenized splits.

    `augment(document, random_numbers, progress)` changes a training document; its generator is a pure function of (seed, epoch,
    example), and `progress`, 0 to 1, is how far the run is at the example. One that changes which tokens are supervised gives
    how many there are in `supervised_tokens`. `augment_evaluation` likewise changes a document of the validation split, at
    progress 1; its generator is a pure function of (seed, tokens of the document), so each evaluation sees the same. Without
    an accelerator the loaders are those of one process.

    `order(num_examples, seed, epoch)` returns an epoch's examples, int `[num_examples]`, for a curriculum or to visit
    some more often than others, in place of `epoch_order`. A resume calls it again: it depends on nothing else. With another
    order of the first two epochs the training data count as others. Where completions are sampled it names each prompt once:
    they depend on (seed, epoch, prompt).

    Raises:
        Refusal: no splits, or not tokenized ones; settings that contradict the collate function or the order.
    """
    check_splits(splits, "length")
    # loader processes send each tensor as a file; with too few they fail somewhere in the middle, in endless tracebacks
    if config.dataloader_num_workers and (most := allow_open_files(OPEN_FILES)) < LEAST_OPEN_FILES:
        raise Refusal(
            f"--dataloader-num-workers: this process may open {most} files, too few for loader processes. Type ulimit -n "
            f"{OPEN_FILES} before, or take --dataloader-num-workers 0."
        )
    data_rank, num_data_ranks = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    pin_memory = accelerator is not None and accelerator.device.type == "cuda"
    for function, why in _UNPACKED:
        if config.packing and getattr(collate, "func", collate) is function:
            raise Refusal(f"--packing{why}")
    train_split, pack, pack_held_out = splits["train"], _packer(config), _packer(config, overlap=True)
    global_batch_size = config.global_batch_size or (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * num_data_ranks
    )
    common: dict[str, Any] = {
        "collate": collate, "seed": config.seed, "micro_batch_size": config.per_device_train_batch_size,
        "global_batch_size": global_batch_size, "data_rank": data_rank, "num_data_ranks": num_data_ranks,
        "fingerprint": f"content-{fingerprint_of(train_split)}-{packing_name(config)}",
        "commits": commits_of_sources(config),
    }  # fmt: skip
    is_stream = not hasattr(train_split, "__len__")
    if order is not None and (other := [
        flag for flag, given in (
            ("--packing", config.packing), ("--group-by-length", config.group_by_length), ("--streaming", is_stream),
        ) if given
    ]):  # fmt: skip
        raise Refusal(f"{other[0]} decides on the order of examples, and so does the recipe's own order: leave one out.")
    evaluation = None
    if "validation" in splits:
        held_out = _map_style(splits["validation"])
        evaluation = EvalLoader(
            PackedRows(held_out, pack_held_out(column(held_out, "length"))) if pack_held_out else PlainRows(held_out),
            collate, config.per_device_eval_batch_size, data_rank, num_data_ranks, config.dataloader_num_workers, pin_memory,
            augment_evaluation, config.seed,
        )  # fmt: skip
    if is_stream:
        if config.max_steps is None:
            raise Refusal("--streaming has no end of its own: give --max-steps.")
        consume = config.max_steps * global_batch_size
        train_stream = StreamLoader(
            train_split, examples_to_consume=consume, pack=pack, augment=augment, pin_memory=pin_memory, **common
        )
        return train_stream, evaluation
    rows = PackedRows(train_split, pack(column(train_split, "length"))) if pack else PlainRows(train_split)
    if order is not None:
        order = checked(order)
        visited = np.concatenate([order(len(rows), config.seed, epoch) for epoch in (0, 1)])
        common["fingerprint"] += f"-{hashlib.sha256(visited.tobytes()).hexdigest()[:16]}"
    elif config.group_by_length:
        order = partial(epoch_order, lengths=rows.lengths)
    consume = config.max_steps * global_batch_size if config.max_steps else math.ceil(config.num_train_epochs * len(rows))
    mean_length = float(np.mean(rows.lengths)) if len(rows) else 0.0
    unit = "packed rows" if pack else "examples"
    check_step(min(global_batch_size, consume), len(rows), mean_length, data_rank, num_data_ranks, unit)
    train = TrainLoader(
        rows, examples_to_consume=consume, workers=config.dataloader_num_workers, pin_memory=pin_memory, augment=augment,
        order=order or epoch_order, **common,
    )  # fmt: skip
    return train, evaluation


def _map_style(split: Any) -> Any:
    """A streamed evaluation split is read whole: it is evaluated again and again."""
    if hasattr(split, "__len__"):
        return split
    from datasets import Dataset as MapDataset

    return MapDataset.from_list(list(split))


def packing_name(config: DataConfig) -> str:
    """How rows are made of documents, as part of what identifies the training data."""
    return f"{config.packing_strategy}-{config.max_length}" if config.packing else "rows"


def _packer(config: DataConfig, overlap: bool = False) -> Callable[[np.ndarray], Packing] | None:
    if not config.packing:
        return None
    strategies: dict[str, Callable[[np.ndarray, int], Packing]] = {
        "bfd": pack_best_fit, "wrapped": partial(pack_wrapped, overlap=overlap),
    }  # fmt: skip
    return lambda lengths: strategies[config.packing_strategy](lengths, config.max_length)
