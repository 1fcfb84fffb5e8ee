"""Malformed inputs, drawn from a seed: what a user, a tool or a broken disk may hand to the toolkit, and what is right then.

A case is a recipe or a command with its arguments, and files to put there first. Each declares its outcome: refused, with words
that the message must hold (the file, the row or the setting), or accepted as harmless, with the settings that the run must have.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD_CHATS = [
    {"messages": [{"role": "user", "content": f"How much is {i} and {i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]}
    for i in range(12)
]
PAIRS = [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "No."} for i in range(12)]
IDS = [{"input_ids": [5 + (i + j) % 200 for j in range(9)]} for i in range(12)]
BASE = "base"  # the folder, next to the case's own files, in which a finished run lies


@dataclass(frozen=True)
class Case:
    """One input. `script` is a recipe's name, or toolkit. `words`: what the refusal must name. `settings`: what a run that is
    accepted must have made of them."""

    kind: str
    what: str
    script: str
    arguments: tuple[str, ...]
    words: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None
    codes: tuple[int, ...] = (2,)
    environment: dict[str, str] = field(default_factory=dict)
    first: bool = False  # run it once before, to its end
    prepare: Callable[[Path], None] = lambda folder: None


def order(seed: int) -> list[Callable[[random.Random], Case]]:
    """The kinds, each as often as its weight says: first one of each, so that the short form leaves none out."""
    chance, first = random.Random(seed), list(KINDS)
    more = [kind for kind, weight in KINDS.items() for _ in range(weight - 1)]
    chance.shuffle(first)
    chance.shuffle(more)
    return first + more


def draw(seed: int, count: int) -> Iterator[Case]:
    """So many cases, the kinds in turn; a case depends on the seed and its place alone."""
    kinds = order(seed)
    for place in range(count):
        kind = kinds[place % len(kinds)]
        yield kind(random.Random(f"{seed} {place}"))


def _sft(*arguments: str) -> tuple[str, ...]:
    """A run of one step on the finished run's model."""
    return (
        "--model", f"{BASE}/model", "--max-steps", "1", "--use-cpu", "--max-length", "64", "--eval-fraction", "0",
        "--no-packing", "--num-samples", "0", "--per-device-train-batch-size", "2", "--output-dir", "out", *arguments,
    )  # fmt: skip


def _file(name: str, content: bytes | str) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _word(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=chance.randint(3, 9)))


# -- settings ----------------------------------------------------------------------------------------------------------

_WHOLE = ("seed", "max_steps", "logging_steps", "per_device_train_batch_size", "dataloader_num_workers", "max_length",
          "gradient_accumulation_steps", "save_total_limit", "lr_cycles", "num_samples", "vocab_size", "global_batch_size",
          "eval_steps", "max_train_examples", "sample_max_new_tokens", "num_hidden_layers", "early_stopping_patience")  # fmt: skip
_NUMBERS = ("learning_rate", "num_train_epochs", "weight_decay", "hang_timeout", "stop_deadline", "adam_beta1", "momentum",
            "max_grad_norm", "lr_gamma", "min_lr_ratio", "eval_delay", "z_loss", "sample_temperature", "eval_fraction")  # fmt: skip
_CHOICES = ("optim", "lr_scheduler_type", "dtype", "overlong", "nonfinite", "save_strategy", "attn_implementation", "sample_by")
_SWITCHES = ("packing", "resume", "use_cpu", "streaming", "gradient_checkpointing", "group_by_length", "fsdp", "eval_on_start")
_TEXTS = ("model", "dataset", "run_name", "output_dir", "tokenizer", "train_split", "chat_template", "model_revision", "hub_model_id")


def of_setting(chance: random.Random) -> Case:
    """A value that its setting cannot have, as a flag."""
    group = chance.choice((_WHOLE, _NUMBERS, _CHOICES, _SWITCHES, _TEXTS))
    name = chance.choice(group)
    if group is _WHOLE:
        text = chance.choice([
            str(2 ** chance.randint(63, 200)), "9" * chance.randint(30, 6000), str(-chance.randint(2, 2**40)), "1e400", "nan",
            "inf", f"{chance.randint(1, 9)}.5", "0x10", _word(chance), "1,2", "[1]", "{}", "²", "1e19",
        ])  # fmt: skip
    elif group is _NUMBERS:
        text = chance.choice(["nan", "inf", "-inf", "1e300", "-1e300", "1e999", "9" * 400, _word(chance), "1,5", "1..2", "[0.1]", "--"])
        text = "-7" if text == "--" else text
    elif group is _CHOICES:
        text = chance.choice([_word(chance), "true", "7", "[]", "adamw_torch\x1b[31m", "É" * 50])
    elif group is _SWITCHES:
        return Case("settings", f"--{name}=word", "sft", _sft(f"--{name.replace('_', '-')}={_word(chance)}x"), (_flag(name),))
    else:
        text = chance.choice(["", "https://me:hunter2@host/x", f"https://{_word(chance)}hunter2@host/y", "   "])
    return Case("settings", f"--{name}={text[:20]}", "sft", _sft(f"{_flag(name)}={text}"), (_flag(name),))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def of_words(chance: random.Random) -> Case:
    """A command line that cannot be meant."""
    word = _word(chance)
    wrong, words = chance.choice([
        ((f"--{word}x", "1"), (f"--{word}x",)), ((f"{word}.yaml",), (f"{word}.yaml", "--config")), (("--config=",), ("--config",)),
        (("--seed", "1", "--seed-", "2"), ()), (("--max-steps",), ("--max-steps",)), (("--warmup-ratio", "0.1", "--warmup-steps", "3"), ("--warmup",)),
        (("--config", "/dev/zero"), ("/dev/zero", "device")), (("--config", "."), ("folder",)), (("--config", word * 60), ("--config",)),
        (("--config", f"{word}.yaml"), ("no such file",)), (("--output-dir", f"~{word}/x"), ("--output-dir", word)),
        (("--learning-rate", "1", "--lr", "2"), ("--lr",)), ((f"-{word}",), (word,)), (("=",), ("=",)), (("--=3",), ()), (("--",), ()),
        (("--model", f"{word}-{word}-{word}/{word}"), (word,)), (("--train-split", word), (word,)), (("--eval-split", word), (word,)),
        (("--dataset", f"stdlib:{word}"), (word,)), (("--rename-columns", word), ("--rename-columns",)),
        (("--rename-columns", f"{word}={word}2"), (word,)), (("--dataset", f"{word}:0.5,{word}2:nan"), ("weight",)),
    ])  # fmt: skip
    return Case("settings", " ".join(wrong)[:40], "sft", _sft(*wrong), words)


# -- files of settings -------------------------------------------------------------------------------------------------

_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)


def of_yaml(chance: random.Random) -> Case:
    """A file of settings: malformed, or read as its writer meant it."""
    word, depth = _word(chance), chance.randint(70, 3000)
    name = chance.choice(("seed", "optim", "model", "learning_rate", "report_to"))
    refused: list[tuple[str | bytes, tuple[str, ...]]] = [
        (f"{name}: {'[' * depth}{']' * depth}\n", ()), (f"{name}: &a [*a]\n", ()), (f"{name}: &a {{b: *a}}\n", ()), (_BOMB, ("alias",)),
        (f"{name}: !!int {word}\n", ()), (f"{name}: !!timestamp 2026-01-01\n", ()), (f"{name}: !!binary aGk=\n", ()),
        (f"{name}: !!python/object/apply:os.system [true]\n", ()), (f"{name}: 1\n{name}: 2\n", (name,)), (f"{name}: [1\n", ()),
        (f"{word}: 3\n", (word,)), (f"- {word}\n", ()), (word, ()), (b"\xff\xfe\x00", ()), (f"{name}: caf\xe9\n".encode("latin-1"), ("UTF-8",)),
        ("seed: " + "9" * chance.randint(40, 6000) + "\n", ("c.yaml",)), (f"seed: [{word}]\n", ("--seed",)), ("model: [a, b]\n", ("--model",)),
        (f"model: {{{word}: 1}}\n", ("--model",)), ("optim: [adamw_torch]\n", ("--optim",)), ("output_dir: [x]\n", ("--output-dir",)),
        ("hang_timeout: 12:30\n", ("--hang-timeout", "12:30")), ("max_steps: 2026-01-31\n", ("--max-steps", "2026-01-31")),
        ("rename_columns: {a: {b: c}}\n", ("--rename-columns",)), ("fsdp: [[x]]\n", ("--fsdp",)), ('run_name: "a\\0b"\n', ("--run-name", "NUL")),
        ('output_dir: "x\\ud800"\n', ()), ("dataset: https://me:hunter2@host/x\n", ("--dataset",)), ("dataset_text_field: [a]\n", ("dataset_text_field",)),
        ("model_init_kwargs: {1: 2}\n", ("model_init_kwargs",)), ("? [a]\n: b\n", ()), ("? {a: b}\n: c\n", ()), ("\tseed: 1\n", ()),
        (f"seed: 1\n---\nseed: {chance.randint(2, 9)}\n", ()), ("seed: *nothing\n", ()), ("%YAML 9.9\n---\nseed: 1\n", ()), ("seed: !!null\n", ("--seed",)),
        ("tokenizer: !!float .nan\n", ("--tokenizer",)), ("seed: {\n", ()), ("a" * 5000 + ": 1\n", ("c.yaml:1",)), ("chat_template: 7\n", ("--chat-template",)),
        ("<<: [1]\nseed: 2\n", ()), ("lr_scheduler_kwargs: [[]]\n", ("lr_scheduler_kwargs",)), ("datasets: [{path: [x]}]\n", ("datasets",)),
        ("warmup_ratio: [1]\n", ("--warmup",)), ("report_to: [[wandb]]\n", ("--report-to",)), ("metric_for_best_model: {a: 1}\n", ("--metric",)),
    ]  # fmt: skip
    number = chance.randint(8, 99)
    accepted: list[tuple[str, dict[str, Any]]] = [
        (f"seed: 0{number}\n", {"seed": number}), ("seed: 1_000\n", {"seed": 1000}),
        ("learning_rate: 2e-4\n", {"learning_rate": 2e-4}), ("", {"seed": 42}),
        ('{"seed": 7, "learning_rate": 1e-5}', {"seed": 7, "learning_rate": 1e-5}), ("seed: &s 5\nlogging_steps: *s\n", {"seed": 5, "logging_steps": 5}),
        ("\ufeffseed: 9\n", {"seed": 9}), ("weight_decay: .5\r\n", {"weight_decay": 0.5}), ("packing: off\n", {"packing": False}),
    ]  # fmt: skip
    if chance.random() < 0.12:
        text, settings = chance.choice(accepted)
        arguments = tuple(each for each in _sft("--config", "c.yaml") if each != "--no-packing" or "packing" not in settings)
        return Case("settings files", text[:40], "sft", (*arguments, *GOOD), settings=settings, prepare=_with_good(_file("c.yaml", text)))
    content, words = chance.choice(refused)
    return Case("settings files", repr(content[:40]), "sft", _sft("--config", "c.yaml"), words or ("c.yaml",), prepare=_file("c.yaml", content))


GOOD = ("--dataset", "good.jsonl")


def _with_good(prepare: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        (folder / "good.jsonl").write_text(_lines(GOOD_CHATS))
        prepare(folder)

    return both


def of_job(chance: random.Random) -> Case:
    """The hyperparameters of a SageMaker job."""
    depth, word = chance.randint(70, 100_000), _word(chance)
    text, words = chance.choice([
        ("{", ("SM_HPS",)), ("[1]", ("SM_HPS",)), ("[" * depth, ("SM_HPS",)), ('{"a":' * depth + "1" + "}" * depth, ("SM_HPS",)),
        ('{"seed": 1, "seed": 2}', ("SM_HPS", "seed")), ('{"model": ["a"]}', ("--model",)), ('{"config": ["a"]}', ("--config",)),
        ('{"config": ""}', ("--config",)), ('{"seed": ' + "9" * 6000 + "}", ("SM_HPS",)), ('{"seed": NaN}', ("--seed",)),
        ('{"run_name": "\\ud800"}', ("SM_HPS",)), (f'{{"{word}x": 1}}', (word,)), ('{"learning_rate": "1e999"}', ("--learning-rate",)),
        ('{"output_dir": "a\\u0000b"}', ("--output-dir",)), ("nonsense", ("SM_HPS",)), ('{"config": {"a": 1}}', ("--config",)),
    ])  # fmt: skip
    return Case("settings files", f"SM_HPS {text[:30]}", "sft", _sft(), words, environment={"SM_HPS": text})


def of_deepspeed(chance: random.Random) -> Case:
    """A DeepSpeed configuration, an Accelerate config file, a mixture."""
    depth = chance.randint(70, 5000)
    bad = chance.choice(["{", "[" * depth, '{"bf16": {"enabled": true, "enabled": false}}', "[]", '{"zero_optimization": 3}', "\0", "7", '{"a": 1'])
    if chance.random() < 0.5:
        return Case("settings files", f"ds.json {bad[:20]}", "sft", _sft("--deepspeed", "ds.json"), ("ds.json",), prepare=_file("ds.json", bad))
    mixture = chance.choice([
        "&a [*a]", "- {dataset: [x], weight: 1}", "- {dataset: a, weight: yes}", "- {dataset: a, weight: .inf}", "- {dataset: a, weight: 1, wieght: 2}",
        "- {dataset: a, weight: 1, rename_columns: [x]}", "7", "- [1]", "- {dataset: a, dataset: b, weight: 1}", "[" * depth, "- {dataset: a, weight: 010}",
    ])  # fmt: skip
    return Case("settings files", f"mix.yaml {mixture[:30]}", "sft", _sft("--dataset", "mix.yaml"), ("mix.yaml",), prepare=_file("mix.yaml", mixture))


# -- data --------------------------------------------------------------------------------------------------------------


def of_rows(chance: random.Random) -> Case:
    """A good file of chats with one row that is none."""
    depth, word = chance.randint(70, 4000), _word(chance)
    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    line = chance.choice([
        '{"messages": ' + "[" * depth + "]" * depth + "}", '{"messages": ' + "[" * depth, '{"messages": [], "messages": []}', "[]", "7", '"text"', "null",
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}', "{", '{"messages": ' + "9" * 5000 + "}",
        *(json.dumps({"messages": value}) for value in (
            None, [], word, 7, [None], [[user]], [{"role": ["user"], "content": "x"}, said], [{"role": word, "content": "x"}, said],
            [user], [user, {"role": "assistant", "content": ""}], [user, {"role": "assistant", "content": 7}], [{"content": "x"}, said],
            [user, {"role": "assistant", "content": {"a": 1}}], [user, {"role": "assistant", "content": [1, 2]}], [{"role": None, "content": "x"}, said],
            [{"from": ["human"], "value": "x"}, said], [user, {"role": "gpt", "content": "x"}], [{"role": "user"}, said], {"role": "user"},
        )),
        json.dumps({"messages": [user, said], "tools": "[{]"}), json.dumps({"messages": [user, said], "tools": "7"}),
        json.dumps({"messages": [user, said], "tools": "[" * depth}), json.dumps({word: 1}),
        *(json.dumps({"messages": [user, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": text}}]}]})
          for name, text in ((word, "[" * (depth * 25)), (word, '{"a":' * depth + "1" + "}" * depth), (word, '{"a": "\\ud800"}'), (word, '{"a": 1, "a": 2}'),
                             (word, '{"a": NaN}'), (word, '{"a": -Infinity}'), (word, '{"a": ' + "9" * 5000 + "}"), (word, "{"), (word, "[7]"), (word, 7), ("", "{}"), (None, "{}"))),
    ])  # fmt: skip
    place = chance.randrange(1, len(GOOD_CHATS))
    rows = [json.dumps(row) for row in GOOD_CHATS]
    rows.insert(place, line)
    words = ("rows.jsonl",) if '{"' + word in line else (f"rows.jsonl:{place + 1}",)
    return Case("rows", line[:60], "sft", _sft("--dataset", "rows.jsonl"), words, prepare=_file("rows.jsonl", "\n".join(rows) + "\n"))


def of_ids(chance: random.Random) -> Case:
    """Rows of token ids, of pairs, of a text: values that no model takes."""
    place = chance.randrange(len(IDS))
    if chance.random() < 0.5:
        wrong = chance.choice([2**40, -1, 2**31, 2**63, 10**30, 1.5, "x", None, True, [1], 300_000])
        ids = [dict(row) for row in IDS]
        ids[place]["input_ids"] = chance.choice([[5, wrong, 6], [wrong], wrong, [[5, 6]], []])
        if ids[place]["input_ids"] in ([True], [5, True, 6], True):
            ids[place]["input_ids"] = []
        return Case("rows", f"ids {ids[place]}"[:60], "sft", _sft("--dataset", "ids.jsonl"), ("ids.jsonl",), prepare=_file("ids.jsonl", _lines(ids)))
    pairs: list[dict[str, Any]] = [dict(row) for row in PAIRS]
    pairs[place] |= chance.choice([
        {"chosen": None}, {"rejected": 7}, {"chosen": ""}, {"prompt": ["x"]}, {"chosen": [{"role": ["assistant"], "content": "x"}]},
        {"chosen": pairs[place]["rejected"]}, {"rejected": {"a": 1}}, {"prompt": None}, {"chosen": "  "}, {"chosen": [1]},
    ])  # fmt: skip
    return Case("rows", f"pair {pairs[place]}"[:60], "dpo", _dpo("--dataset", "pairs.jsonl"), ("pairs.jsonl",), prepare=_file("pairs.jsonl", _lines(pairs)))


def _dpo(*arguments: str) -> tuple[str, ...]:
    return tuple(each for each in _sft(*arguments) if each not in ("--no-packing",))


def of_labels(chance: random.Random) -> Case:
    """Labels of a classifier."""
    rows: list[dict[str, Any]] = [{"text": f"Row {i} is here", "label": "ab"[i % 2]} for i in range(12)]
    place, settings = chance.randrange(2, 12), ()
    rows[place]["label"] = chance.choice(["a ", " b", "a\u00a0", "e\u0301", None, "", 1.5, [1], {"a": 1}, "  ", "a\x1b[31m "])
    if rows[place]["label"] == "e\u0301":
        rows[place - 1]["label"] = "\u00e9"
    if rows[place]["label"] == "a\x1b[31m ":
        rows[place - 1]["label"] = "a\x1b[31m"
    return Case(
        "rows", f"label {rows[place]['label']!r}", "basic", ("--model", "tiny-bert", *_tiny_basic(), "--dataset", "labels.jsonl", *settings),
        ("labels.jsonl",), prepare=_file("labels.jsonl", _lines(rows)),
    )  # fmt: skip


def _tiny_basic() -> tuple[str, ...]:
    return ("--hidden-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--max-steps", "1", "--use-cpu", "--output-dir", "out")


def of_data_file(chance: random.Random) -> Case:
    """A file or a folder of rows that is not what its name says."""
    good, word = _lines(GOOD_CHATS).encode(), _word(chance)
    cut = chance.randint(2, len(good) - 20)
    name, content = chance.choice([
        ("d.jsonl", gzip.compress(good)), ("d.jsonl", bz2.compress(good)), ("d.jsonl", lzma.compress(good)), ("d.jsonl", b""), ("d.jsonl", b"\n \n"),
        ("d.jsonl.gz", gzip.compress(good)[: cut % 60 + 5]), ("d.jsonl.gz", good), ("d.jsonl.xz", good), ("d.jsonl", good.decode().encode("utf-16")),
        ("d.jsonl", b"PK\x03\x04" + good), ("d.jsonl", b"PAR1" + good), ("d.jsonl", good[:cut]), ("d.jsonl", good[:cut] + b"\xff" + good[cut:]),
        ("d.json", good[:1] + b"["), ("d.json", b"{}"), ("d.json", b'{"rows": []}'), ("d.json", b"[" * 9000), ("d.json", b"[7]"), ("d.json", b"[]"),
        ("d.csv", b"a,a\n1,2\n"), ("d.csv", b'text\n"open\n'), ("d.csv", b"text,b\n1\n"), ("d.csv", b"text\n"), ("d.csv", b""), ("d.csv", b"\x1b[31m,b\n1,2\n"),
        ("d.txt", b"\xff\xfea"), ("d.txt", b""), ("d.parquet", b"PAR1" + good), ("d.parquet", b""), ("d.arrow", b"ARROW1\0\0" + good[:200]), ("d.arrow", b""),
        ("d.arrow", b"\xff\xff\xff\xff\x10\0\0\0" + good[:90]), ("d.xlsx", b"PK\x03\x04"), ("d.jsonl", b"\0" * 50), (f"d.{word}", good), ("d.jsonl", good + good[:cut - 5]),
    ])  # fmt: skip
    if name == "d.jsonl" and content.startswith(good) and content.endswith(b"\n"):
        content += b"{"
    return Case("data files", f"{name} {content[:20]!r}", "sft", _sft("--dataset", name), ("d.",), prepare=_file(name, content))


def of_place(chance: random.Random) -> Case:
    """Where data are looked for or a run is written: no file, no folder."""
    word = _word(chance)

    def pipe(folder: Path) -> None:
        os.mkfifo(folder / f"{word}.jsonl")

    def link(folder: Path) -> None:
        (folder / f"{word}.jsonl").symlink_to("nowhere.jsonl")

    def folder_of(names: dict[str, bytes]) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            (folder / word).mkdir()
            for name, content in names.items():
                (folder / word / name).write_bytes(content)

        return make

    def cut_arrow(folder: Path) -> None:
        import pyarrow as pa

        table = pa.table({"text": ["a long line of text"] * 4000})
        with pa.OSFile(str(folder / f"{word}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=500)
        size = (folder / f"{word}.arrow").stat().st_size
        os.truncate(folder / f"{word}.arrow", chance.randint(size // 4, size - 30))

    good = _lines(GOOD_CHATS).encode()
    dataset: list[tuple[str, tuple[str, ...], Callable[[Path], None]]] = [
        (f"{word}.jsonl", ("pipe",), pipe), (f"{word}.jsonl", ("link", "nowhere"), link), (word, ("no data files",), folder_of({})),
        (word, (word,), folder_of({"dataset_dict.json": b"{"})), (word, (word,), folder_of({"dataset_dict.json": b'{"splits": 7}'})),
        (word, (word,), folder_of({"state.json": b"{}", "dataset_info.json": b"{}"})), (word, ("several formats",), folder_of({"a.jsonl": good, "b.csv": b"text\na\n"})),
        (word, (word,), folder_of({"state.json": b'{"_data_files": [{"filename": "../x"}]}', "dataset_info.json": b"{}"})), ("*.nothing", ("pattern",), lambda f: None),
        (f"{word}/{word}.jsonl", (word,), lambda f: None), ("/dev/zero", ("device",), lambda f: None), (f"{word}.arrow", (f"{word}.arrow",), cut_arrow),
        (f"{word * 60}.jsonl", ("--dataset",), lambda f: None), (f"https://host/{word}.jsonl", ("--dataset",), lambda f: None),
    ]  # fmt: skip
    if chance.random() < 0.6:
        name, words, prepare = chance.choice(dataset)
        return Case("data files", f"--dataset {name[:40]} {words}", "sft", _sft("--dataset", name), words, prepare=prepare)

    def occupied(folder: Path) -> None:
        (folder / word).write_text("a file")

    def dangling(folder: Path) -> None:
        (folder / word).symlink_to(folder / "nowhere")

    out, prepare = chance.choice([
        (word * 90, lambda f: None), (f"/proc/{word}", lambda f: None), (word, occupied), (word, dangling), (f"{word}/x", occupied), (f"{word}/x", dangling),
        ("/dev/null", lambda f: None), ("/".join([word * 20] * 60), lambda f: None), ("/proc/self/fd/x", lambda f: None),
    ])  # fmt: skip
    return Case("data files", f"--output-dir {out[:30]}", "sft", (*_sft(*GOOD), "--output-dir", out), ("--output-dir",), prepare=_with_good(prepare))


# -- templates ---------------------------------------------------------------------------------------------------------

_LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def of_template(chance: random.Random) -> Case:
    """A chat template that is none, says nothing, or never ends."""
    depth, word = chance.randint(200, 3000), _word(chance)
    content: str | bytes = chance.choice([
        "", "Hello", "{% for m in messages %}", "{{ messages", "{% for m in messages %}{{ m.role }}{% endfor %}", b"messages \xff",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}<eos>{% endfor %}", "{{ messages." + word + "." + word + " }}",
        "{{ messages[0]['role'] }}", "{% for m in messages %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ messages | length * 'x' * 10**9 }}", "{{ raise_exception('" + word + "') }}{{ messages }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{{ messages }}",
        "{% include '" + word + "' %}{{ messages }}", "{% if messages %}" * depth, "{{ " + "(" * depth + "messages" + ")" * depth + " }}", "{{ ''.__class__.__mro__ }}{{ messages }}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}", "{% generation %}{{ messages }}", "{{ messages | " + word + " }}", "messages",
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "{% set x = messages %}" + "{{ x " * 3, "{{ 1 // 0 }}{{ messages }}",
    ])  # fmt: skip
    words = ("chat template",) if isinstance(content, str) else ("--chat-template",)
    return Case(
        "templates", repr(content[:50]), "sft", _sft(*GOOD, "--chat-template", "t.jinja"), ("template",) if words else (),
        prepare=_with_good(_file("t.jinja", content)),
    )  # fmt: skip


def of_template_file(chance: random.Random) -> Case:
    def link(folder: Path) -> None:
        (folder / "t.jinja").symlink_to("nowhere")

    def pipe(folder: Path) -> None:
        os.mkfifo(folder / "t.jinja")

    def large(folder: Path) -> None:
        with open(folder / "t.jinja", "wb") as file:
            file.write(_LOOP.encode())
            file.truncate(1 << 33)

    prepare = chance.choice([link, pipe, large, lambda folder: (folder / "t.jinja").mkdir()])
    return Case("templates", "file", "sft", _sft(*GOOD, "--chat-template", "t.jinja"), ("--chat-template t.jinja",), prepare=_with_good(prepare))


# -- a finished run: its model, its checkpoints, its files -------------------------------------------------------------


def of_model(chance: random.Random) -> Case:
    """A model's directory of which one file is damaged."""
    name = chance.choice(["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json"])
    deep = "[" * chance.randint(100, 100_000)
    texts: list[Any] = ["", "[]", "7", deep, "null", b"\xff", "half"]
    if name == "model.safetensors":
        texts = ["", "half", b"\xff" * 30, (2**63).to_bytes(8, "little"), b"\x08" + b"\0" * 7 + b"{" * 40, b"\0" * 5000]
    elif name == "config.json":
        odd: list[Any] = ["x", -1, 0, [1], {}, 2**70, 1.5]
        keys = ["hidden_size", "vocab_size", "num_hidden_layers", "model_type", "num_attention_heads", "hidden_act"]
        texts += [{}, {"model_type": "nonesuch"}, *({chance.choice(keys): chance.choice(odd)} for _ in range(12))]
    elif name == "tokenizer.json":
        texts += ["{}", {"model": {}}, {"model": 7}]
    wrong = chance.choice(texts)

    def damage(folder: Path) -> None:
        path = folder / BASE / "model" / name
        whole = path.read_bytes()
        content = json.dumps({**json.loads(whole), **wrong} if wrong else {}) if isinstance(wrong, dict) else wrong
        content = whole[: len(whole) // 2] if content == "half" else content
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return Case("models", f"{name}: {str(wrong)[:40]}", "sft", _sft(*GOOD), (BASE,), prepare=_with_good(damage))


def of_adapter(chance: random.Random) -> Case:
    """An adapter of the finished run's model, with a file that is damaged or something else."""
    name = chance.choice(["adapter_config.json", "adapter_config.json", "adapter_model.safetensors"])
    word = _word(chance)
    texts: list[Any] = ["", "[]", "7", "null", "half", b"\xff", "[" * chance.randint(100, 100_000)]
    if name == "adapter_config.json":
        texts += [{"base_model_name_or_path": word + "/x/y"}, {"peft_type": word}, {"r": -1}, {"r": "x"}, {"base_model_name_or_path": 7}, {"r": 2**60}]
    else:
        texts = ["", "half", b"\0" * 3000, (2**62).to_bytes(8, "little"), b"\xff" * 90]
    wrong = chance.choice(texts)

    def make(folder: Path) -> None:
        from safetensors.torch import save_file
        from torch import zeros

        (folder / "adapter").mkdir()
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder / BASE / "model"), "r": 2, "lora_alpha": 4,
            "target_modules": ["q_proj"], "lora_dropout": 0.0, "bias": "none",
        }  # fmt: skip
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
        save_file({f"{prefix}.lora_A.weight": zeros(2, 16), f"{prefix}.lora_B.weight": zeros(16, 2)}, folder / "adapter/adapter_model.safetensors")
        path = folder / "adapter" / name
        whole = path.read_bytes()
        content = json.dumps({**config, **wrong}) if isinstance(wrong, dict) else wrong
        content = whole[: len(whole) // 2] if content == "half" else content
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    arguments = tuple("adapter" if word == f"{BASE}/model" else word for word in _sft(*GOOD))
    script, arguments = chance.choice([("lora", arguments), ("toolkit", ("generate", "adapter", "--prompt", "a")), ("toolkit", ("merge", "adapter", "--into", "m"))])
    return Case("adapters", f"{name}: {str(wrong)[:40]}", script, arguments, ("adapter",), prepare=_with_good(make))


def of_cache(chance: random.Random) -> Case:
    """A cache of this case alone, of which a file is damaged after a first run has filled it: rebuilt, and said so."""
    kind = chance.choice(["cut", "flipped", "empty", "removed"])

    def damage(folder: Path) -> None:
        files = sorted(path for path in (folder / BASE).parent.glob("cache/datasets/*/*") if path.is_file() and path.suffix in (".arrow", ".json"))
        path = chance.choice([path for path in files if path.stat().st_size > 200])
        content = bytearray(path.read_bytes())
        if kind == "removed":
            path.unlink()
            return
        if kind == "flipped":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(b"" if kind == "empty" else content if kind == "flipped" else content[: len(content) // 2])

    return Case(
        "caches", kind, "sft", _sft(*GOOD), ("built anew",), settings={"max_steps": 1}, prepare=damage, first=True,
        environment={"HF_DATASETS_CACHE": "cache/datasets"},
    )  # fmt: skip


NO_NUMBERS: list[Any] = [None, "x", [7], -1, 10**30, 0.5]
WRONG_IN_RUN: dict[str, list[Any]] = {
    "step": NO_NUMBERS, "position": NO_NUMBERS, "tokens": [None, "x", [7]], "source": [None, "x", [7]], "fingerprint": [None, 7, []],
    "settings": [None, "x", [7], 3], "layout": [None, "x", [7]], "objective": ["x", [None], {}, ["x"]], "ranked": [7, [[]], [[1]], [["x", 1]]],
    "divergence": ["x", [7], {"x": 1}, {"steps": "x"}], "window": [7, [7], [{"x": 1}]], "best": [7, {"x": 1}], "warnings": [7, [7]],
}  # fmt: skip
WRONG_IN_STATE: dict[str, list[Any]] = {
    "run": [None, "x", [7], {}, {"x": 1}], "optimizer": [None, "x", [7], {}, {"x": 1}, {"$list": []}, {"$dict": []}], "scaler": [None, "x", [7]],
    "parameter_names": [None, "x", [7], {"x": 1}], "random": [None, "x", {}, {"$dict": []}], "base": [None, "x", [7], {"x": 1}],
}  # fmt: skip


def _with_a_wrong_part(state: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A checkpoint's record with one part, or one field of its run, that can't be meant, or is left out."""
    place, wrong = (state["run"], WRONG_IN_RUN) if chance.random() < 0.6 else (state, WRONG_IN_STATE)
    name = chance.choice(list(wrong))
    place[name] = chance.choice(wrong[name])
    if chance.random() < 0.1:
        del place[name]
        state["run"].pop("position", None)
    return state


def of_checkpoint(chance: random.Random) -> Case:
    """A checkpoint whose manifest vouches for something else, or whose files are damaged."""
    kind = chance.choice(["no files", "wrong size", "no digest", "path outside", "newer", "fields", "state", "part", "cut", "flipped", "list", "step"])

    def damage(folder: Path) -> None:
        shutil.copytree(folder / BASE, folder / "out")
        newest = max((folder / "out/checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
        path = newest / "MANIFEST.json"
        manifest = json.loads(path.read_text())
        manifest.pop("sha256")
        if kind == "cut":
            (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:100])
            return
        if kind == "flipped":
            content = bytearray((newest / "optimizer.safetensors").read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            (newest / "optimizer.safetensors").write_bytes(content)
            return
        if kind == "state":
            text = chance.choice(["{}", "[]", "7", "[" * 5000, '{"run": 1}'])
        if kind == "part":  # of another type, or left out
            text = json.dumps(_with_a_wrong_part(json.loads((newest / "state.json").read_text()), chance))
        if kind in ("state", "part"):
            (newest / "state.json").write_text(text)
            manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        first = next(iter(manifest["files"]))
        changes: dict[str, Callable[[], Any]] = {
            "no files": lambda: manifest.update(files={}), "wrong size": lambda: manifest["files"][first].update(size="x"),
            "no digest": lambda: manifest["files"][first].pop("sha256"), "list": lambda: manifest.update(files=[first]),
            "path outside": lambda: manifest["files"].update({"../../x": {"size": 1, "sha256": "0"}}), "newer": lambda: manifest.update(schema=99),
            "fields": lambda: manifest.update(files={first: chance.choice([None, 7, [], "x"])}), "step": lambda: manifest.update(step=chance.choice([10**9, "x", None])),
        }  # fmt: skip
        changes.get(kind, lambda: None)()
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**manifest, "sha256": digest}))

    arguments = ("--config", f"{BASE}/config.yaml", "--output-dir", "out", "--resume-from", "out/checkpoints/step-2", "--max-steps", "3")
    arguments += ("--allow-change", "max_steps,dataset")
    return Case("checkpoints", kind, "sft", arguments, ("step-2",), prepare=damage)


def of_command(chance: random.Random) -> Case:
    """A command of `toolkit` that cannot do what it is asked for."""
    word, depth = _word(chance), chance.randint(70, 100_000)

    def put(name: str, content: str | bytes) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _file(name, content)(folder)

        return write

    def hub_job(content: str) -> Callable[[Path], None]:
        return put(f"{BASE}/hub_queue/000001-x/job.json", content)

    nothing: Callable[[Path], None] = lambda folder: None  # noqa: E731
    model = f"{BASE}/model"
    broken = chance.choice(["{", "[" * depth, "7", "[]", "a: &a [*a]", '{"end": 3}', "\0"])
    choices: list[tuple[tuple[str, ...], tuple[str, ...], Callable[[Path], None]]] = [
        (("replay", BASE), ("config.yaml",), put(f"{BASE}/config.yaml", broken)), (("replay", BASE), ("run.json",), put(f"{BASE}/run.json", broken)),
        (("replay", BASE), ("config.yaml",), put(f"{BASE}/config.yaml", chance.choice(["", "seed: 1\n"]))),
        (("replay", word), (word,), nothing), (("replay", BASE, "--into", BASE), (BASE,), nothing), (("replay", "rows.jsonl"), ("rows.jsonl",), put("rows.jsonl", "x")),
        (("push", word), (word,), nothing), (("push", "empty"), ("empty",), put("empty/x", "")), (("merge", model, "--into", word), (model,), nothing), (("merge", word, "--into", "to"), (word,), nothing),
        (("generate", word * 3 + "/x/y", "--prompt", "a"), (word,), nothing), (("generate", model, "--prompt", "a", "--temperature", "nan"), ("temperature",), nothing),
        (("generate", model, "--prompt", "a", "--seed", str(2**80)), ("seed",), nothing), (("generate", model, "--prompt", "a", "--max-new-tokens", "9" * 30), ("max-new-tokens",), nothing),
        (("generate", model, "--prompt", "a", "--top-p", "nan"), ("top-p",), nothing), (("generate", model, "--prompt", "a", "--device", word), (word,), nothing),
        (("generate", model, "--file", word), (word,), nothing), (("generate", model, "--file", "/dev/zero"), ("/dev/zero",), nothing),
        (("generate", model, "--file", "p.jsonl"), ("p.jsonl:1",), put("p.jsonl", chance.choice(["{", "[" * depth, "7", "{}", '{"prompt": 7}', '{"messages": [{"role": ["x"]}]}']) + "\n")),
        (("evaluate", model, "--dataset", word + ".jsonl"), (word,), nothing), (("evaluate", model, "--dataset", "d.jsonl"), ("d.jsonl",), put("d.jsonl", "{")),
        (("evaluate", model, "--dataset", "d.jsonl", "--metrics", word), (word,), put("d.jsonl", _lines(GOOD_CHATS))), (("evaluate", model, "--config", "c.yaml"), ("c.yaml",), put("c.yaml", broken)),
        (("evaluate", model, "--dataset", "d.jsonl", "--max-length", "1e30"), ("--max-length",), nothing), (("evaluate", model, "--task", word), ("task",), nothing),
        (("inspect", word + ".jsonl"), (word,), nothing), (("inspect", "--config", "c.yaml"), ("c.yaml",), put("c.yaml", broken)), (("inspect", "d.bin"), ("d.bin",), put("d.bin", b"\0")),
        (("inspect", "d.jsonl", "--examples", "9" * 40), (), put("d.jsonl", _lines(GOOD_CHATS))), (("inspect", "d.jsonl", "--task", word), ("task",), put("d.jsonl", _lines(GOOD_CHATS))),
        (("checkpoints", word), (word,), nothing), (("report", word), (), nothing), (("train", word), (word,), nothing), (("train", "c.yaml"), ("c.yaml",), put("c.yaml", "seed: 1\n")),
        (("train", "sft", "--processes", "9" * 25), ("processes",), nothing), (("train", "sft", "--processes", "-1"), ("processes",), nothing), (("train", "sft", "--accelerate-config", "c.yaml"), ("c.yaml",), put("c.yaml", broken)),
        (("train", "x.py"), ("x.py",), nothing), (("copy", word), (word,), nothing), (("copy", "../sft"), (), nothing), (("diff", "x.py"), ("x.py",), put("x.py", b"\xff\xfe")), (("diff", word), (word,), nothing),
        ((word,), (word,), nothing), (("sagemaker", word), (word,), nothing), (("sagemaker", "simulate", word), (word,), nothing), (("verify-resume", word), (word,), nothing),
        (("chat", word + "/x/y"), (word,), nothing), (("generate",), (), nothing), (("push", BASE), ("job.json",), hub_job(chance.choice(["{", "7", "[]", '{"a": 1}', "[" * depth, '{"repo_id": 7}']))),
    ]  # fmt: skip
    arguments, words, prepare = chance.choice(choices)
    return Case("commands", " ".join(arguments)[:60], "toolkit", arguments, words, codes=(2, 1) if arguments[0] in ("inspect", "push", "train") else (2,), prepare=prepare)


KINDS: dict[Callable[[random.Random], Case], int] = {
    of_setting: 5, of_words: 3, of_yaml: 6, of_job: 2, of_deepspeed: 2, of_rows: 5, of_ids: 3, of_labels: 2, of_data_file: 5, of_place: 4,
    of_template: 4, of_template_file: 1, of_model: 5, of_adapter: 3, of_cache: 2, of_checkpoint: 3, of_command: 10,
}  # fmt: skip
