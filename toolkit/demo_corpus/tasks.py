"""The tasks of the embedded corpus: from modules and functions of the standard library to rows in the usual columns.

Each task yields rows with a split, made by a hash of the module's name; then held-out rows whose text is (nearly) in the
training rows are dropped, so that a held-out metric measures more than memory.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.demo_corpus.annotations import TOKEN_ROLES, first_sentence, questions_about, token_roles
from toolkit.demo_corpus.near_duplicates import plain, without_leaks
from toolkit.demo_corpus.stdlib import SPLITS, Function, read_functions, read_modules, split_of

if TYPE_CHECKING:
    from datasets import Features

Row = dict[str, Any]
Described = tuple[Function, str]  # a function and the first sentence of its docstring

LIBRARY_FAMILIES = {
    "network": "http urllib email smtplib ftplib imaplib nntplib socket ssl socketserver xmlrpc wsgiref telnetlib poplib cgi "
    "smtpd asynchat asyncore ipaddress netrc webbrowser mimetypes",
    "concurrency": "asyncio multiprocessing threading concurrent queue subprocess selectors sched _threading_local",
    "numbers": "_pydecimal fractions statistics random numbers colorsys bisect heapq datetime _pydatetime calendar zoneinfo "
    "_strptime operator",
    "formats": "xml json csv html configparser plistlib tomllib base64 quopri xdrlib wave aifc sunau chunk pickle pickletools "
    "shelve copyreg",
    "files": "tarfile zipfile shutil os pathlib tempfile gzip bz2 lzma mailbox _pyio glob fileinput posixpath ntpath "
    "genericpath fnmatch filecmp zipapp stat _compression dbm",
    "testing": "unittest doctest pdb bdb trace traceback logging cProfile profile pstats timeit tracemalloc cmd warnings",
    "language": "importlib inspect ast dis types typing tokenize code codeop pydoc symtable enum dataclasses functools "
    "collections _collections_abc abc contextlib re pkgutil runpy modulefinder zipimport weakref opcode argparse optparse "
    "gettext copy",
}

INSTRUCTION = "Say in one sentence what this Python function does.\n\n{code}"
LONGEST_CODE = 1600  # characters, some 450 tokens of a small vocabulary
LONGEST_CONTEXT = 600  # characters of a function that questions are about
CHOICES = 4  # sentences of which one describes what a function does
LONGEST_RANKED, RANKED = 600, 8  # characters of a function that is ranked, and how many are ranked together


def pretrain() -> Iterator[Row]:
    """A document is a whole module."""
    for module, text in read_modules():
        if len(text) >= 200:  # not the empty __init__.py
            yield {"text": text, "origin": f"stdlib:pretrain/{module}", "split": split_of(module)}


def sft() -> Iterator[Row]:
    """From a function's code to the first sentence of its docstring, as a chat of two turns."""
    for function, sentence in _described_functions():
        messages = [*_question(function), *_answer(sentence)]
        yield _row("sft", function, messages=messages, code=function.code, sentence=sentence)


def dpo() -> Iterator[Row]:
    """The same; rejected is the sentence of another module's function, of like length, so that length gives nothing away."""
    for described in _described_by_split(LONGEST_CODE):
        described.sort(key=lambda pair: (len(pair[1]), _hash(pair[0].qualname)))
        for place, (function, sentence) in enumerate(described):
            near = described[max(0, place - 12) : place + 13]
            others = [s for other, s in near if other.module != function.module and plain(s) != plain(sentence)]
            if others:
                other = others[_hash(function.module + function.qualname) % len(others)]
                yield _row(
                    "dpo", function, prompt=_question(function), chosen=_answer(sentence), rejected=_answer(other),
                    code=function.code, sentence=sentence, other=other,
                )  # fmt: skip


def seq2seq() -> Iterator[Row]:
    """The same pair without an instruction, for encoder-decoders."""
    for function, sentence in _described_functions():
        yield _row("seq2seq", function, source=function.code, target=sentence)


def embed() -> Iterator[Row]:
    """The same pair as a question and what answers it: a function is found by the first sentence of its docstring."""
    for function, sentence in _described_functions():
        yield _row("embed", function, query=sentence, positive=function.code)


def classify() -> Iterator[Row]:
    """From a function's code to the family of its library: seven classes."""
    family_of = {package: family for family, packages in LIBRARY_FAMILIES.items() for package in packages.split()}
    labels = list(LIBRARY_FAMILIES)
    for function in _distinct(read_functions()):
        family = family_of.get(function.module.split(".")[0])
        if family and len(plain(function.code)) >= 60:
            row = _row("classify", function, text=function.code, label=labels.index(family))
            # a whole module on one side would leave a family with two or three modules; methods of a class stay together
            yield {**row, "split": split_of(f"{function.module}:{function.outermost}")}


def tag() -> Iterator[Row]:
    """The role of each token of a function's code: keyword, parameter, call, attribute ..."""
    for function in _distinct(read_functions()):
        tokens, tags = token_roles(function.code) if function.code else ([], [])
        if len(tokens) >= 8:
            yield _row("tag", function, tokens=tokens, tags=tags)


def qa() -> Iterator[Row]:
    """Questions about a function whose answers are spans of its source; offsets count characters."""
    for function in _distinct(read_functions()):
        if function.docstring and len(function.source) <= LONGEST_CONTEXT:
            for number, (question, start, end) in enumerate(questions_about(function)):
                answers = {"text": [function.source[start:end]], "answer_start": [start]}
                row = _row("qa", function, question=question, context=function.source, answers=answers)
                yield {**row, "origin": f"{row['origin']}#{number}"}


def rank() -> Iterator[Row]:
    """A function's sentence as a query, and eight functions' code: its own, and others of its module, of like length.

    Where the module has too few, they are of other modules of the split. None has the same sentence.
    """
    for described in _described_by_split(LONGEST_RANKED):
        nearest = _nearest_by_length(described, [len(function.code) for function, _ in described])
        said = [plain(sentence) for _, sentence in described]
        for place, (function, sentence) in enumerate(described):

            def tie(other: int, name: str = function.qualname, described: list[Described] = described) -> int:
                return _hash(f"{name} {described[other][0].module} {described[other][0].qualname}")

            others = nearest(place, RANKED - 1, tie, lambda other, own=said[place], said=said: said[other] != own)
            candidates = [function, *(described[other][0] for other in others)]
            candidates.sort(key=lambda each: _hash(f"{sentence} {each.code}"))
            yield _row(
                "rank", function, query=sentence, documents=[each.code for each in candidates],
                labels=[int(each is function) for each in candidates], code=function.code,
            )  # fmt: skip


def choose() -> Iterator[Row]:
    """A function's code, and four sentences: that of its docstring, and three of its module's other functions, of like length.

    Where the module has too few, they are of other modules of the split. No two are the same.
    """
    for described in _described_by_split(LONGEST_RANKED):
        nearest = _nearest_by_length(described, [len(sentence) for _, sentence in described])
        for place, (function, sentence) in enumerate(described):

            def tie(other: int, name: str = function.qualname, described: list[Described] = described) -> int:
                return _hash(f"{name} {described[other][1]}")

            near = {plain(text := described[other][1]): text for other in nearest(place, 4 * CHOICES, tie)}
            near.pop(plain(sentence), None)
            choices = sorted([sentence, *list(near.values())[: CHOICES - 1]], key=lambda text: _hash(f"{function.code} {text}"))
            label = choices.index(sentence)
            yield _row("choose", function, question=function.code, choices=choices, label=label, sentence=sentence)


def _row(task: str, function: Function, **columns: Any) -> Row:
    return {**columns, "origin": f"stdlib:{task}/{function.module}:{function.qualname}", "split": split_of(function.module)}


def _described_functions() -> Iterator[Described]:
    for function in _distinct(read_functions()):
        sentence = first_sentence(function.docstring)
        if sentence and 40 <= len(function.code) <= LONGEST_CODE:
            yield function, sentence


def _described_by_split(longest: int) -> Iterable[list[Described]]:
    """Functions of at most `longest` characters with their sentences, those of each split together."""
    by_split: dict[str, list[Described]] = defaultdict(list)
    for function, sentence in _described_functions():
        if len(function.code) <= longest:
            by_split[split_of(function.module)].append((function, sentence))
    return by_split.values()


def _nearest_by_length(described: list[Described], lengths: list[int]) -> Callable[..., list[int]]:
    """`nearest(place, number, tie)`: the places that are nearest to `place`, itself included.

    Those of its module are nearest, then those of like length by its ratio, then those with the least `tie(place)`. `allowed`
    returns which places may be taken. There are few different lengths: looking at all pairs takes half a minute for the corpus.
    """
    everywhere: dict[int, list[int]] = defaultdict(list)
    in_module: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, ((function, _), length) in enumerate(zip(described, lengths, strict=True)):
        everywhere[length].append(place)
        in_module[function.module][length].append(place)

    def nearest(
        place: int, number: int, tie: Callable[[int], int], allowed: Callable[[int], bool] = lambda other: True
    ) -> list[int]:
        module, found = described[place][0].module, list[int]()
        for own, places in ((True, in_module[module]), (False, everywhere)):
            of_ratio: dict[float, list[int]] = defaultdict(list)
            for length in places:
                of_ratio[abs(math.log(length / lengths[place]))].append(length)
            for ratio in sorted(of_ratio):
                if len(found) >= number:
                    return found[:number]
                others = sorted(other for length in of_ratio[ratio] for other in places[length])
                fitting = [other for other in others if allowed(other) and (described[other][0].module == module) is own]
                found += sorted(fitting, key=tie)
        return found[:number]

    return nearest


def _question(function: Function) -> list[Row]:
    return [{"role": "user", "content": INSTRUCTION.format(code=function.code)}]


def _answer(sentence: str) -> list[Row]:
    return [{"role": "assistant", "content": sentence}]


def _distinct(functions: Iterable[Function]) -> Iterator[Function]:
    """Each code once, whatever its white space."""
    seen: set[str] = set()
    for function in functions:
        key = plain(function.code or function.source)
        if key not in seen:
            seen.add(key)
            yield function


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Task:
    rows: Callable[[], Iterator[Row]]
    unleaked: tuple[str, ...]  # the fields whose text must not be in train (a field that is no column isn't written)


TASKS = {
    "pretrain": Task(pretrain, ("text",)),
    "sft": Task(sft, ("code", "sentence")),
    "dpo": Task(dpo, ("code", "sentence", "other")),
    "classify": Task(classify, ("text",)),
    "tag": Task(tag, ("tokens",)),
    "qa": Task(qa, ("context",)),
    "seq2seq": Task(seq2seq, ("source", "target")),
    "embed": Task(embed, ("query", "positive")),
    "rank": Task(rank, ("query", "code")),
    "choose": Task(choose, ("question", "sentence")),
}


def task_features(task: str) -> Features:
    from datasets import ClassLabel, Features, List, Sequence, Value

    text = Value("string")
    answers = {"text": Sequence(text), "answer_start": Sequence(Value("int32"))}
    chat = List({"role": text, "content": text})
    columns: dict[str, dict[str, Any]] = {
        "pretrain": {"text": text},
        "sft": {"messages": chat},
        "dpo": {"prompt": chat, "chosen": chat, "rejected": chat},
        "classify": {"text": text, "label": ClassLabel(names=list(LIBRARY_FAMILIES))},
        "tag": {"tokens": Sequence(text), "tags": Sequence(ClassLabel(names=list(TOKEN_ROLES)))},
        "qa": {"question": text, "context": text, "answers": answers},
        "seq2seq": {"source": text, "target": text},
        "embed": {"query": text, "positive": text},
        "rank": {"query": text, "documents": List(text), "labels": List(Value("int32"))},
        "choose": {"question": text, "choices": List(text), "label": Value("int32")},
    }
    return Features({**columns[task], "origin": text})


def write_task(task: str, folder: Path) -> None:
    """One Arrow file for each split of the task."""
    import pyarrow as pa

    from toolkit.cache.arrow import write_tables

    schema = task_features(task).arrow_schema
    rows = without_leaks(list(TASKS[task].rows()), TASKS[task].unleaked)
    for split in SPLITS:
        table = pa.Table.from_pylist([row for row in rows if row["split"] == split], schema)
        write_tables(folder / f"{split}.arrow", schema, [table])
