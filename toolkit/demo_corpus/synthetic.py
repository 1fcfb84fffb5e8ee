"""Embedded tasks with checkable answers, made here: sums of whole numbers, as hard as in their name.

`synthetic:arithmetic` has problems and answers for reinforcement learning, `synthetic:arithmetic_solved` the same problems with
the answers to write, for the fine-tuning before it. `synthetic:arithmetic/digits=3/terms=4` makes them harder. A problem is
in one split alone, in whatever order its terms are: the split is a hash of the terms.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Refusal

if TYPE_CHECKING:
    from datasets import DatasetDict

TASKS = ("arithmetic", "arithmetic_solved")
SIZES = {"train": 4096, "validation": 512, "test": 512}  # problems of a split, where there are as many
_VERSION = 1  # raise it when a name gives other rows
_MOST_DRAWS = 400_000  # until a small space of problems counts as exhausted
_DRAWS_OF_EACH = 100  # likewise: one that is left out by this many draws of each has a chance of e^-100


@dataclass(frozen=True)
class Difficulty:
    """How hard the problems are: `terms` numbers of up to `digits` digits; `seed` draws others of the same kind."""

    digits: int = 2
    terms: int = 2
    seed: int = 0


_RANGES = {"digits": (1, 9), "terms": (2, 9), "seed": (0, 2**31 - 1)}


def load_corpus(task: str) -> DatasetDict:
    """The task's rows in train, validation and test; made on the first call and read from a cache after it.

    Columns: `prompt` ("48-7+15="), `answer` ("56") and `origin`; of the solved ones also `completion`, which adds up term by
    term and ends with the answer ("41+15=56").

    Raises:
        Refusal: an unknown task, or a difficulty that there is none of.
    """
    from toolkit.cache.arrow import cached_splits

    name, difficulty = read_task(task)
    chosen = "-".join(f"{field.name}{getattr(difficulty, field.name)}" for field in fields(difficulty))
    splits = cached_splits(f"synthetic-{name}-{chosen}-{_VERSION}", lambda folder: _write(name, difficulty, folder))
    for rows in splits.values():
        rows.info.description = describe_corpus(task)
    return splits


def describe_corpus(task: str) -> str:
    """One line about which problems a run on `synthetic:<task>` reads."""
    _, difficulty = read_task(task)
    numbers = f"{difficulty.terms} numbers of up to {difficulty.digits} digits"
    return f"synthetic:{task}: sums and differences of {numbers}, seed {difficulty.seed}, version {_VERSION}"


def read_task(task: str) -> tuple[str, Difficulty]:
    """The task and its difficulty from `arithmetic/digits=3/terms=2`."""
    name, *settings = task.split("/")
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"Did you mean synthetic:{close[0]}?" if close else f"There are: {', '.join(TASKS)}."
        raise Refusal(f"synthetic:{task}: no embedded task is called {name!r}. {hint}")
    difficulty = Difficulty()
    for setting in settings:
        key, _, value = setting.partition("=")
        least, most = _RANGES.get(key, (0, -1))
        if not (value.isascii() and value.isdecimal() and len(value) < 11 and least <= int(value) <= most):
            known = ", ".join(f"{each}={low} to {high:,}" for each, (low, high) in _RANGES.items())
            raise Refusal(
                f"synthetic:{task}: {setting!r} is no difficulty. There are: {known}. For instance: "
                f"synthetic:{name}/digits=3/terms=2"
            )
        difficulty = replace(difficulty, **{key: int(value)})
    return name, difficulty


def draw_problems(difficulty: Difficulty) -> Iterator[tuple[int, ...]]:
    """Problems as their signed terms, the first one above or at zero; a pure function of the difficulty, with repetitions."""
    different = 2 ** (difficulty.terms - 1) * 10 ** (difficulty.digits * difficulty.terms)
    for number in range(min(_MOST_DRAWS, _DRAWS_OF_EACH * different)):
        digest = hashlib.blake2b(f"{difficulty} {number}".encode(), digest_size=4 + 8 * difficulty.terms).digest()
        values = [int.from_bytes(digest[i : i + 8], "big") % 10**difficulty.digits for i in range(4, len(digest), 8)]
        signs = [1, *(-1 if digest[place // 8] >> place % 8 & 1 else 1 for place in range(difficulty.terms - 1))]
        yield tuple(sign * value for sign, value in zip(signs, values, strict=True))


def split_of(terms: tuple[int, ...]) -> str:
    """The split of a problem: a pure function of its terms, in whatever order. Train has eight in ten of all."""
    canonical = " ".join(map(str, sorted(terms)))
    place = int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8).digest(), "big") % 10
    return {0: "validation", 1: "test"}.get(place, "train")


def solve(terms: tuple[int, ...]) -> tuple[str, str, str]:
    """The prompt, the worked completion and the answer of a problem."""
    sums = list(accumulate(terms))
    steps = [f"{sums[done]}{''.join(f'{term:+d}' for term in terms[done + 1 :])}" for done in range(1, len(terms))]
    return f"{terms[0]}{''.join(f'{term:+d}' for term in terms[1:])}=", "=".join(steps), str(sums[-1])


def _write(name: str, difficulty: Difficulty, folder: Path) -> None:
    """One Arrow file for each split that has problems."""
    import pyarrow as pa

    from toolkit.cache.arrow import write_tables

    found: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {split: {} for split in SIZES}
    for terms in draw_problems(difficulty):
        split = split_of(terms)
        if len(found[split]) < SIZES[split]:
            found[split].setdefault(tuple(sorted(terms)), terms)
        elif all(len(found[each]) == size for each, size in SIZES.items()):
            break
    names = ("prompt", "completion", "answer", "origin") if name == "arithmetic_solved" else ("prompt", "answer", "origin")
    schema = pa.schema([(column, pa.string()) for column in names])
    for split, problems in found.items():
        rows = []
        for number, terms in enumerate(problems.values(), 1):
            prompt, completion, answer = solve(terms)
            origin = f"synthetic:{name} ({split}):{number}"
            rows.append({"prompt": prompt, "completion": completion, "answer": answer, "origin": origin})
        if rows:
            write_tables(folder / f"{split}.arrow", schema, [pa.Table.from_pylist(rows, schema)])
