"""Caches damaged at rest, cut under a live process, and after a power loss: never read damaged, rebuilt with one line."""

import errno
import importlib.util
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import toolkit as tk
from toolkit.cache import arrow
from toolkit.config import Refusal
from toolkit.data.loading.packing import PlainRows
from toolkit.data.tokenize.documents import tokenizer_digest
from toolkit.demo_corpus import stdlib as corpus
from toolkit.system.digests import damage_in

_SPEC = importlib.util.spec_from_file_location("injection", Path(__file__).with_name("injection.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
injection = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(injection)

MODULE = '''
def {name}(values):
    """Return the {name} of some values, counted from {number}."""
    total = {number}
    for value in values:
        total = total * {number} + len(str(value)) + {number}
    return total


class {name}_reader:
    """Reads what {name} makes."""

    def read(self, path):
        """Read the path number {number}, line by line."""
        with open(path) as file:
            return [line.strip() + "{name}" for line in file if len(line) > {number}]
'''


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, a small library for the embedded corpus, and a small file of rows."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "root/cache")
    library = tmp_path / "library"
    library.mkdir()
    for number in range(120):
        (library / f"module_{number}.py").write_text(MODULE.format(name=f"name_{number}", number=number))
    monkeypatch.setattr(corpus, "stdlib_root", lambda: library)
    lines = [f'{{"text": "row {number} of the file, with some words to cut"}}\n' for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path)
    for cached in (corpus.corpus_facts, corpus._cache_key):
        cached.cache_clear()
    yield tmp_path / "root/cache"
    for cached in (corpus.corpus_facts, corpus._cache_key):
        cached.cache_clear()


def rows_of(splits: Any) -> dict[str, list[Any]]:
    return {name: list(rows.with_format(None)) for name, rows in splits.items()}


def tokenized() -> Any:
    tokenizer = tk.load_tokenizer(tk.ModelConfig(model="tiny-llama", vocab_size=300))
    return rows_of(tk.tokenize_for_lm(tk.load_splits("rows.jsonl"), tokenizer, tk.DataConfig(dataset="rows.jsonl", max_length=16)))


# How each kind of cache is read, by the beginning of its folder's name.
READERS: dict[str, Callable[[], Any]] = {
    "files": lambda: rows_of(tk.load_splits("rows.jsonl")),
    "stdlib-pretrain": lambda: rows_of(tk.load_splits("stdlib:pretrain")),
    "stdlib-functions": lambda: corpus.read_functions(),
    "tokenizer": lambda: tokenizer_digest(tk.load_tokenizer(tk.ModelConfig(model="tiny-llama", vocab_size=300))),
    "tokenized": tokenized,
}


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    bit = chance.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def zero(path: Path, chance: random.Random) -> None:
    """A page that never reached the disk."""
    content = path.read_bytes()
    at = chance.randrange(len(content))
    path.write_bytes(content[:at] + b"\0" * len(content[at : at + 512]) + content[at + 512 :])


def replace_by_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_nowhere(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = {
    "a bit flipped": flip,
    "another bit flipped": flip,
    "a page of zeros": zero,
    "cut": lambda path, chance: os.truncate(path, chance.randrange(path.stat().st_size)),
    "longer": lambda path, chance: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path, chance: path.write_bytes(b""),
    "missing": lambda path, chance: path.unlink(),
    "a folder in its place": replace_by_folder,
    "a pipe in its place": replace_by_pipe,
    "a dangling link": link_to_nowhere,
}


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_cache_is_built_anew_with_one_line_that_names_its_folder(cache: Path, tally: Any, capfd: Any, kind: str) -> None:
    """Every file of every cache, under each damage at a seeded place: some 170 trials over all kinds.

    Fails when: `cache_folder` returns a folder for having its name; a file is left out of the digests; sizes alone are compared.
    """
    line, chance = tally("F5", f"a cache damaged at rest ({kind}): rebuilt, with one line"), random.Random(kind)
    expected = READERS[kind]()
    (folder,) = (path for path in cache.iterdir() if path.is_dir() and path.name.startswith(f"{kind}-"))
    capfd.readouterr()
    for file in sorted(path.name for path in folder.iterdir()):
        for damage, act in DAMAGES.items():
            if damage == "a page of zeros" and (folder / file).stat().st_size < 512:
                continue
            act(folder / file, chance)
            with line.trial(f"{file}: {damage}"):
                assert READERS[kind]() == expected
                said = [text for text in capfd.readouterr().err.splitlines() if "damaged" in text]
                assert len(said) == 1, said
                assert str(folder) in said[0]
                assert file in said[0]
                assert damage_in(folder) is None
            if damage_in(folder) is not None:  # the next damages are done to a whole one
                shutil.rmtree(folder, ignore_errors=True)
                READERS[kind]()
    assert READERS[kind]() == expected
    assert "damaged" not in capfd.readouterr().err
    line.check()
    assert line.tried >= 18


@pytest.mark.parametrize("damage", ["emptied", "a file in its place", "of an earlier version"])
def test_a_folder_that_is_no_cache_any_more_is_built_anew(cache: Path, capfd: Any, damage: str) -> None:
    """Fails when: only folders are taken for caches, or one without digests is believed."""
    expected = READERS["files"]()
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    if damage == "of an earlier version":
        (folder / "digests.json").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir() if damage == "emptied" else folder.write_text("x")
    assert READERS["files"]() == expected
    assert str(folder) in capfd.readouterr().err
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_no_byte_in_the_cache_changes_the_rows_of_a_mixture_in_silence(cache: Path, tmp_path: Path, capfd: Any) -> None:
    """Each file that two starts leave there, with other bytes in it: the same rows, or a line.

    Fails when: a column is added to rows that were selected from a table, which datasets then keeps without a digest.
    """
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    for name, more in (("a", {}), ("b", {"tools": tools, "weight": 0.5}), ("c", {"weight": 2})):
        turns = [[{"role": "user", "content": f"{name} asks {number} zebras"}, {"role": "assistant", "content": "No."}] for number in range(80)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": each, **more}) + "\n" for each in turns))
    mixtures = [",".join(f"{tmp_path / name}.jsonl:0.5" for name in names) for names in ("ab", "bc")]

    def read() -> list[list[dict[str, Any]]]:
        return [list(rows) for dataset in mixtures for rows in tk.load_splits(tk.DataConfig(dataset=dataset, eval_fraction=0.1)).values()]

    expected = read()
    assert read() == expected
    files = sorted(path for path in cache.rglob("*") if path.is_file() and b"zebras" in path.read_bytes())
    assert files
    for path in files:
        capfd.readouterr()
        kept = path.read_bytes()
        path.unlink()  # a new file: the old one is mapped by this process
        path.write_bytes(kept.replace(b"zebras", b"snakes"))
        assert read() == expected, path
        assert "damaged" in capfd.readouterr().err or path.name.startswith("cache-"), path


def test_a_damaged_cache_that_cannot_be_written_is_refused_by_its_damage(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared one that others may only read. Fails when: the refusal says nothing of the damage."""
    READERS["files"]()
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    os.truncate(folder / "rows.arrow", 10)

    def read_only(path: Path, *more: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(Refusal, match=r"damaged: rows\.arrow: 10 bytes.*HF_DATASETS_CACHE="):
        READERS["files"]()


def test_a_power_loss_leaves_no_cache_that_a_start_cannot_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated by the letter of POSIX: a file has the bytes of its last fsync, a directory the names of its own last one.

    Fails when: a file, the folder or the cache above it is not synced before a folder has its name.
    """
    root = tmp_path / "root"
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back after the test
    lose_power = injection.durable_part(root)
    expected = READERS["tokenized"]()
    lose_power(tmp_path / "lost")
    made = {path.name for path in cache.iterdir() if path.is_dir()}
    assert len(made) == 4  # the corpus, the tokenizer, the file's rows, their tokens
    for name in made:
        assert damage_in(tmp_path / "lost/cache" / name) is None
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "lost/cache")
    assert READERS["tokenized"]() == expected


def test_a_kill_at_any_operation_leaves_a_cache_that_the_next_start_reads(cache: Path, tally: Any) -> None:
    """While a damaged folder is replaced. Fails when: what a killed process has left next to it is not cleared."""
    line = tally("F1", "SIGKILL at each operation on a file while a damaged cache is built anew")

    def build(folder: Path) -> None:
        (folder / "part").write_text("whole")

    for target in range(1, 100):
        folder = arrow.cache_folder("key", build)
        (folder / "part").write_text("who")
        child = os.fork()
        if child == 0:
            injection.kill_at_operation(target)
            arrow.cache_folder("key", build)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with line.trial(f"operation {target}"):
            assert (arrow.cache_folder("key", build) / "part").read_text() == "whole"
            # what was to be removed last may stay until the folder is built again
            assert {path.name for path in cache.iterdir()} - {"key.incomplete-damaged"} == {"key", "key.lock"}
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert target > 10
    line.check()


def test_a_file_cut_under_a_live_process_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one whose disk is gone. Fails when: the rows are read without asking for the file's size: SIGBUS ends the process; or
    an OSError is let through."""
    rows = Dataset.from_dict({"input_ids": [[number] * 500 for number in range(2000)], "length": [500] * 2000})

    def build(folder: Path) -> None:
        arrow.write_tables(folder / "train.arrow", rows.data.table.schema, [rows.data.table])

    examples = PlainRows(arrow.cached_splits("rows", build)["train"])
    file = Path(arrow.cache_folder("rows", build) / "train.arrow")
    assert examples.documents([1999])[0]["input_ids"][0] == 1999
    os.truncate(file, file.stat().st_size // 4)
    with pytest.raises(arrow.CutFile, match=str(file)):
        examples.documents([1999])
    file.unlink()  # a mapping outlives the name
    assert examples.documents([3])[0]["input_ids"][0] == 3

    def disconnected(*args: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as patched:
        patched.setattr(arrow.os, "stat", disconnected)
        with pytest.raises(arrow.CutFile, match=str(file)):
            examples.documents([3])


RECIPE = [
    "--dataset", "rows.jsonl", "--vocab-size", "300", "--hidden-size", "16", "--num-hidden-layers", "1", "--max-length", "32", "--use-cpu",
    "--num-samples", "0", "--eval-strategy", "no", "--eval-fraction", "0", "--max-steps", "30", "--save-steps", "10", "--logging-steps", "1",
]  # fmt: skip


@pytest.mark.slow
def test_a_recipe_goes_on_after_a_power_loss_and_after_its_cache_was_cut_while_it_ran(tiny: Any, root: Path, tally: Any) -> None:
    """recipes/pretrain.py with a cold cache, whose disk loses power as a save returns; and whose tokens are cut under it.

    Fails when: caches get their names before they are on the disk and are believed for their names; or rows are read unasked.
    """
    line, script = tally("F8", "caches with a power loss as a save returns, or cut under the run: recipes/pretrain.py"), str(root / "recipes/pretrain.py")
    disk, copies = tiny.folder / "disk", tiny.folder / "copies"
    disk.mkdir()
    copies.mkdir()
    (tiny.folder / "rows.jsonl").write_text(Path("rows.jsonl").read_text())

    def run(folder: Path, *more: str, plan: dict[str, Any] | None = None, **while_running: Any) -> Any:
        return tiny(*RECIPE, *more, script=script, output_dir=folder / "out", plan={**(plan or {}), "use_cache": str(folder / "cache")}, **while_running)

    whole = run(disk, plan={"keep_durable": {"root": str(disk), "copies": str(copies)}})
    assert whole.code == 0, whole.out
    expected = (disk / "out/model/model.safetensors").read_bytes(), whole.curve
    with line.trial("power loss"):
        resumed = run(copies / "20", "--resume")
        assert resumed.code == 0, resumed.out
        assert "damaged" not in resumed.out
        assert ((copies / "20/out/model/model.safetensors").read_bytes(), resumed.curve) == expected
    with line.trial("cut"):
        (tokens,) = (disk / "cache").glob("tokenized-*/train.arrow")
        shutil.rmtree(disk / "out")

        def cut(pid: int) -> None:
            metrics = disk / "out/metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count("\n") >= 10):
                time.sleep(0.001)
            time.sleep(0.5)  # in the save: while rows are being read nothing can be done about SIGBUS
            os.truncate(tokens, tokens.stat().st_size // 5)

        ended = run(disk, plan={"slow_save": 1.5}, while_running=cut)
        assert ended.code == 1, ended.out[-2000:]
        assert str(tokens) in ended.out.splitlines()[-1]
        resumed = run(disk, "--resume")
        assert resumed.code == 0, resumed.out
        assert f"{tokens.parent} is damaged (train.arrow" in resumed.out
        assert "step 10 of 30" in resumed.out
        assert ((disk / "out/model/model.safetensors").read_bytes(), resumed.curve) == expected
    line.check()
