"""Data at scale: from a file of rows to tokenized rows, next to TRL; and streams, mixed and resumed.

    python -m benchmarks.data                        10 M rows of 100 bytes, 1 GB: hours, most of them TRL's
    python -m benchmarks.data --bytes 3e7 --pairs 1  minutes

Rows are made here, words by Zipf's law. Each measurement is a process of its own with an empty cache, sides interleaved; the
same file, tokenizer and length, and `preprocessing_num_workers` = `dataset_num_proc`. TRL's side is `load_dataset` and what
`SFTTrainer` makes of it, with a model of one small layer. Seconds begin after the imports; CPU seconds are those of all its
processes with the imports, memory is the peak of their anonymous pages together (files that are mapped don't count), read four
times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

MAX_LENGTH = 1024
VOCABULARY = 4096
Side = Callable[[Path, Path, int], dict[str, float]]


def make_rows(path: Path, size: float, row_bytes: int) -> int:
    """A file of `size` bytes of text in rows of about `row_bytes`; the number of rows."""
    import numpy as np

    draw = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(draw.choice(letters[: draw.integers(8, 27)], draw.integers(1, 12))) for _ in range(30_000)])
    often = 1 / np.arange(10, 30_010)
    written = rows = 0
    with open(path, "w") as file:
        while written < size:
            lengths = np.maximum(1, draw.exponential(row_bytes / 6.5, 10_000)).astype(int)
            chosen = iter(draw.choice(words, lengths.sum(), p=often / often.sum()).tolist())
            for length in lengths.tolist():
                text = " ".join(islice(chosen, length))
                written += len(text)
                rows += 1
                file.write(f'{{"text": "{text}"}}\n')
    return rows


def ours(file: Path, tokenizer: Path, processes: int) -> dict[str, float]:
    import toolkit as tk

    config = tk.DataConfig(dataset=str(file), max_length=MAX_LENGTH, eval_fraction=0.0, preprocessing_num_workers=processes)
    loaded = tk.load_tokenizer(tk.ModelConfig(model=str(tokenizer)))
    tk.tokenize_for_lm, tk.load_splits  # noqa: B018  # imported before the clock
    import datasets  # noqa: F401

    start = time.monotonic()
    train = tk.tokenize_for_lm(tk.load_splits(config), loaded, config)["train"]
    seconds = time.monotonic() - start
    return {"seconds": seconds, "tokens": float(train.with_format("numpy", columns=["length"])[:]["length"].sum())}


def trl(file: Path, tokenizer: Path, processes: int) -> dict[str, float]:
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=loaded.eos_token_id, pad_token_id=loaded.pad_token_id,
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as output:
        args = SFTConfig(
            output_dir=output, max_length=MAX_LENGTH, dataset_num_proc=processes, use_cpu=True, bf16=False, report_to="none"
        )
        start = time.monotonic()
        rows = load_dataset("json", data_files=str(file), split="train")
        train = SFTTrainer(model, args, train_dataset=rows, processing_class=loaded).train_dataset
        seconds = time.monotonic() - start
    import pyarrow.compute as compute

    lengths = compute.list_value_length(train.with_format("arrow")[:]["input_ids"])
    return {"seconds": seconds, "tokens": float(compute.sum(lengths).as_py())}


def stream(dataset: Path, tokenizer: Path, processes: int) -> dict[str, float]:
    """Rows a second of batches from a mixed stream, and of those after a resume in its middle; `processes` has no say."""
    import toolkit as tk
    from toolkit.data.loading.streams import StreamLoader

    config = tk.DataConfig(dataset=str(dataset), max_length=MAX_LENGTH, streaming=True, eval_fraction=0.0)
    loaded = tk.load_tokenizer(tk.ModelConfig(model=str(tokenizer)))
    count = STREAMED_ROWS

    def loader() -> StreamLoader:
        train = tk.tokenize_for_lm(tk.load_splits(config), loaded, config)["train"]
        return StreamLoader(train, lambda documents: {}, 1, 8, 32, 2 * count, "")

    first, tokens = loader(), 0.0
    start = time.monotonic()
    for batch in first.batches():
        tokens += batch.totals["tokens"]
        if batch.position + batch.size >= count:
            break
    seconds, state = time.monotonic() - start, json.loads(json.dumps(first.state()))
    again = loader()
    start = time.monotonic()
    again.restore(state, count)
    rest = again.batches(count)
    next(rest)
    resumed = time.monotonic() - start
    start = time.monotonic()
    after = sum(batch.size for batch in rest)
    return {
        "rows/s": count / seconds, "tokens/s": tokens / seconds, "first batch after a resume, s": resumed,
        "rows/s after it": after / (time.monotonic() - start),
    }  # fmt: skip


STREAMED_ROWS = 64_000
SIDES: dict[str, Side] = {"ours": ours, "TRL": trl, "stream": stream}


def measured(side: str, dataset: Path, tokenizer: Path, processes: int, cache: Path) -> dict[str, float]:
    """What a side says, in a process of its own, with the CPU seconds and the peak memory of it and its children."""
    command = [sys.executable, "-m", "benchmarks.data", "--side", side, str(dataset), str(tokenizer), str(processes)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL, env=environment)
        peak = 0
        while True:
            found, status, usage = os.wait4(child.pid, os.WNOHANG)
            if found:
                break
            peak = max(peak, sum(map(_anonymous, _family(child.pid))))
            time.sleep(0.25)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {child.returncode}: {output}")
    values: dict[str, float] = json.loads(output.splitlines()[-1])
    return {**values, "cpu": usage.ru_utime + usage.ru_stime, "memory": peak / 1e6}


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _anonymous(pid: int) -> int:
    """Bytes; what processes share is divided among them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def compare(file: Path, tokenizer: Path, folder: Path, processes: list[int], pairs: int, sides: list[str]) -> None:
    print("| processes | side | tokens/s | seconds | CPU s | memory MB | cache MB | second start s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number in processes:
        seconds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(pairs):
            for side, found in seconds.items():
                cache = folder / "cache"
                first = measured(side, file, tokenizer, number, cache)
                first["cache"], first["again"] = _size(cache), measured(side, file, tokenizer, number, cache)["seconds"]
                shutil.rmtree(cache)
                found.append(first)
        for side, found in seconds.items():
            mid: dict[str, Any] = {key: median(each[key] for each in found) for key in found[0]}
            print(
                f"| {number} | {side} | {mid['tokens'] / mid['seconds']:,.0f} | {mid['seconds']:.1f} | {mid['cpu']:.1f} "
                f"| {mid['memory']:,.0f} | {mid['cache']:,.0f} | {mid['again']:.2f} |", flush=True
            )  # fmt: skip
        if len(seconds) == 2:
            ratios = [
                f"{median(b[key] / a[key] for a, b in zip(seconds['ours'], seconds['TRL'], strict=True)):.2f}"
                for key in ("seconds", "cpu", "memory", "cache", "again")
            ]
            print(f"| {number} | TRL / ours | | {' | '.join(ratios)} |", flush=True)


def streams(file: Path, tokenizer: Path, folder: Path) -> None:
    words = [str(file), str(folder / "shards"), "--tokenizer", str(tokenizer), "--eval-fraction", "0"]
    command = [sys.executable, "-m", "toolkit", "prepare", *words]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    print(f"\ntoolkit prepare: {time.monotonic() - start:.1f} s, {_size(folder / 'shards'):,.0f} MB of files")
    for name, dataset in (("text", file), ("prepared files", folder / "shards")):
        found = measured("stream", dataset, tokenizer, 1, folder / "cache")
        print(f"stream of {name}: " + ", ".join(f"{key} {value:,.1f}" for key, value in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=1e9, help="of text")
    parser.add_argument("--row-bytes", type=int, default=100)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["ours", "TRL"], choices=("ours", "TRL"), help="ours alone: many rows")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side, dataset, tokenizer, processes = given.side
        print(json.dumps(SIDES[side](Path(dataset), Path(tokenizer), int(processes))))
        return
    import toolkit as tk

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = make_rows(folder / "rows.jsonl", given.bytes, given.row_bytes)
        with open(folder / "rows.jsonl") as lines:
            texts = [json.loads(line)["text"] for line in islice(lines, 20_000)]
        tk.train_tokenizer(texts, VOCABULARY).save_pretrained(folder / "tokenizer")
        load = os.getloadavg()[0]
        print(f"{given.bytes / 1e6:,.0f} MB, {rows:,} rows, {os.cpu_count()} cores, load {load:.1f}\n", flush=True)
        compare(folder / "rows.jsonl", folder / "tokenizer", folder, given.processes, given.pairs, given.sides)
        streams(folder / "rows.jsonl", folder / "tokenizer", folder)


if __name__ == "__main__":
    main()
