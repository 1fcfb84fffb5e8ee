"""What the run card says of inputs from the Hub, and a replay that takes the same ones. The real client, recipe and commands.

Each test names the one-line change under which it fails.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.warm

FLAGS = [
    "--model", "alice/base", "--tokenizer", "alice/tokens", "--dataset", "alice/rows:0.7,more.jsonl:0.3", "--max-steps", "2", "--max-length", "64",
    "--num-samples", "0", "--eval-strategy", "no", "--per-device-train-batch-size", "2", "--logging-steps", "1", "--use-cpu",
    "--save-strategy", "no", "--output-dir", "run",
]  # fmt: skip


@pytest.fixture
def inputs(hub: Any, tmp_path: Path) -> None:
    """A model, a tokenizer and a dataset on the Hub."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["say it, number 1 it is"] * 9, 262)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "made/base")
    tokenizer.save_pretrained(tmp_path / "made/tokens")
    for name in ("base", "tokens"):
        hub.make(f"alice/{name}", files={path.name: path.read_bytes() for path in (tmp_path / "made" / name).iterdir()})
    hub.make("datasets/alice/rows", files={"train.jsonl": _rows("number {} it is")})


def _rows(answer: str) -> bytes:
    return "".join(json.dumps({"prompt": f"say {i}", "completion": answer.format(i)}) + "\n" for i in range(60)).encode()


def _add(hub: Any, name: str, file: str, content: bytes) -> None:
    """A commit in which one file is another."""
    repository = hub.repositories[name]
    files = repository.at("main").files
    repository.add({**files, file: type(files[file])(content, files[file].is_large)}, "another", "", "main")


def _python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_the_card_names_commits_and_a_replay_takes_them(hub: Any, inputs: None, tmp_path: Path) -> None:
    """Meanwhile model, tokenizer and a mixture's part on the Hub are others. Fails when: one of them is taken as it is now."""
    names = {"model": "alice/base", "tokenizer": "alice/tokens", "dataset": "datasets/alice/rows"}
    commits = {name: hub.repositories[repository].at("main").sha for name, repository in names.items()}
    (tmp_path / "more.jsonl").write_bytes(_rows("it is {}"))
    done = _python(tmp_path, "-m", "toolkit", "train", "sft", *FLAGS)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "run/run.json").read_text())
    assert card["data"]["commits"] == {"alice/rows": commits["dataset"]}
    assert (card["model"]["commit"], card["model"]["tokenizer_commit"]) == (commits["model"], commits["tokenizer"])
    assert card["model"]["directories"] == {}
    assert card["files"].keys() == {"more.jsonl"}
    _add(hub, "datasets/alice/rows", "train.jsonl", _rows("{} and no more"))
    weights = bytearray(hub.files("alice/base")["model.safetensors"])
    weights[-4:] = b"\0\0\0\0"
    _add(hub, "alice/base", "model.safetensors", bytes(weights))
    tokens = json.loads(hub.files("alice/tokens")["tokenizer.json"])
    tokens["normalizer"] = {"type": "Lowercase"}
    tokens["model"]["merges"] = tokens["model"]["merges"][:0]
    _add(hub, "alice/tokens", "tokenizer.json", json.dumps(tokens).encode())
    done = _python(tmp_path, "-m", "toolkit", "replay", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^identical: .*weights.*losses", done.stdout, re.MULTILINE)


def test_a_stream_has_its_commit_too(hub: Any, inputs: None, tmp_path: Path) -> None:
    """Also under a revision's name, and none without the Hub's answer. Fails when: only what was downloaded is looked at."""
    script = """
import sys
from toolkit.config import DataConfig
from toolkit.data.sources.load import commits_of_sources, load_splits
config = DataConfig(dataset=sys.argv[1], streaming=True, max_eval_examples=2)
load_splits(config)
print("COMMITS", commits_of_sources(config))
"""
    sha = hub.repositories["datasets/alice/rows"].at("main").sha
    done = _python(tmp_path, "-c", script, "alice/rows@main")
    assert f"COMMITS {{'alice/rows@main': '{sha}'}}" in done.stdout, done.stderr
