"""toolkit replay, and the run card that it works from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "40", "--max-eval-examples", "5", "--max-length", "128",
    "--max-steps", "3", "--num-samples", "0", "--logging-steps", "1", "--use-cpu", "--per-device-train-batch-size", "2",
]  # fmt: skip


def toolkit(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", "toolkit", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copied recipe with dropout that has run as two processes, in run/."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "mine.py").write_text((ROOT / "recipes/lora.py").read_text().replace('lora_r: int = 32', 'lora_r: int = 2'))
    flags = [*SMALL, "--lora-dropout", "0.1", "--model", "tiny-llama", "--output-dir", "run"]
    done = toolkit(folder, "train", "mine.py", "--processes", "2", *flags, HF_TOKEN="hf_" + "planted" * 5)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_the_card_says_what_the_run_was_made_of_and_how_it_ended(run: Path) -> None:
    """Fails when: a default counts as given, the end is not written, or the environment gets into it."""
    text = (run / "run.json").read_text()
    card = json.loads(text)
    assert "planted" not in text
    assert {"lora_dropout", "max_steps", "hidden_size", "model"} <= set(card["given"])
    assert "learning_rate" not in card["given"]
    assert card["settings"]["learning_rate"] == 3e-3
    assert card["recipe"]["path"] == "mine.py"
    assert card["launch"] == ["--processes", "2"]
    assert card["layout"]["processes"] == 2
    assert card["seeds"] == {"seed": 42}
    of_model = {"name": "tiny-llama", "commit": None, "architecture": "LlamaForCausalLM", "dtype": "float32", "attention": "toolkit_documents"}
    assert of_model.items() <= card["model"].items()
    weights = load_file(run / "model/adapter_model.safetensors")
    assert 0 < card["model"]["trainable"] <= sum(tensor.numel() for tensor in weights.values())
    assert card["hardware"]["threads"] == 1
    assert card["versions"]["torch"] == torch.__version__.partition("+")[0] or card["versions"]["torch"] == torch.__version__
    summary = json.loads((run / "summary.json").read_text())
    assert card["end"]["status"] == "finished"
    assert card["end"]["figures"]["eval_loss"] == summary["eval_loss"]
    assert card["end"]["device_seconds"] == pytest.approx(2 * card["end"]["wall_seconds"], abs=0.01)


def test_a_replay_has_the_same_weights_bit_for_bit(run: Path) -> None:
    """Two processes, dropout on. Fails when: the layout, the threads or a setting of the run is not taken over."""
    done = toolkit(run.parent, "replay", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: the weights and the logged losses" in done.stdout
    one, other = (load_file(path / "model/adapter_model.safetensors") for path in (run, run.parent / "run-replay"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_weights_are_named_and_end_with_1(run: Path) -> None:
    """Fails when: only losses are compared."""
    path = run / "model/adapter_model.safetensors"
    kept = path.read_bytes()
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[3] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    try:
        done = toolkit(run.parent, "replay", "run", "--into", "again")
    finally:
        path.write_bytes(kept)
    assert done.returncode == 1
    assert f"first tensor that differs: {name}" in done.stdout
    assert "first loss" not in done.stdout


def _edited(run: Path, folder: Path, **changes: Any) -> None:
    folder.mkdir()
    card = json.loads((run / "run.json").read_text()) | changes
    (folder / "run.json").write_text(json.dumps(card))
    (folder / "config.yaml").write_text((run / "config.yaml").read_text())


def test_what_cannot_be_replayed_is_refused(run: Path, tmp_path: Path) -> None:
    """Each with one message and code 2. Fails when: an edited recipe passes for the run's own, or a run that goes on is replayed."""
    (tmp_path / "mine.py").write_text("# another text\n")
    _edited(run, tmp_path / "edited")
    _edited(run, tmp_path / "going", end={"status": "interrupted"})
    card = json.loads((run / "run.json").read_text())
    card.pop("end")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/run.json").write_text(json.dumps(card))
    (tmp_path / "killed/config.yaml").write_text("")
    (tmp_path / "empty").mkdir()
    cases = {
        "edited": "is not the recipe of that run", "going": "Continue it with --resume", "killed": "the run has not ended",
        "empty": "run.json: is not there", "absent": "there is no such directory",
    }  # fmt: skip
    for folder, words in cases.items():
        done = toolkit(tmp_path, "replay", folder)
        assert done.returncode == 2, (folder, done.stderr)
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_of_one_plain_process_is_replayed_too(tmp_path: Path) -> None:
    """recipes/basic.py, which has no Accelerator. Fails when: it writes no card, or one that says nothing of its end."""
    small = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "40", "--max-steps", "3", "--logging-steps", "1", "--use-cpu"]
    done = toolkit(tmp_path, "train", "basic", *small, "--output-dir", "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((tmp_path / "plain/run.json").read_text())
    assert (card["layout"]["processes"], card["layout"]["precision"], card["end"]["status"]) == (1, "no", "finished")
    assert card["end"]["figures"]["eval_accuracy"] == json.loads((tmp_path / "plain/summary.json").read_text())["eval_accuracy"]
    done = toolkit(tmp_path, "replay", "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout


def test_a_run_whose_models_files_are_others_now_is_not_replayed(run: Path, tmp_path: Path) -> None:
    """Fails when: the digest that the run card has is not compared. What is as it was goes on to the next check."""
    from toolkit.cli.replay import _check_directories
    from toolkit.directory_digest import digests_of_directories

    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    card = json.loads((run / "run.json").read_text())
    assert card["model"]["directories"] == {}
    card["model"]["directories"] = digests_of_directories(str(base))
    _check_directories(card)
    (base / "model.safetensors").write_bytes(b"Weights")
    (tmp_path / "mine.py").write_bytes((run.parent / "mine.py").read_bytes())
    _edited(run, tmp_path / "begun", model=card["model"])
    done = toolkit(tmp_path, "replay", "begun")
    assert done.returncode == 2
    assert f"{base}: the model's files have changed since that run" in done.stderr


@pytest.mark.parametrize(
    ("dataset", "pinned"),
    [
        ("org/a:small@v1", "org/a:small@111"),
        ("org/a:small@v1:0.7,org/b:0.2,rows.jsonl:0.1", "org/a:small@111:0.7,org/b@222:0.2,rows.jsonl:0.1"),
        ("rows.jsonl", "rows.jsonl"),
    ],
    ids=["one", "mixture", "file"],
)
def test_datasets_of_the_hub_are_taken_at_their_commits(dataset: str, pinned: str, tmp_path: Path) -> None:
    """Also in a mixture's file. Fails when: a mixture is looked up as a whole, or a weight is taken for a part of a name."""
    import yaml

    from toolkit.cli.replay import _dataset_at
    from toolkit.data.sources.mixtures import as_mixture

    commits = {"org/a:small@v1": "111", "org/b": "222"}
    assert _dataset_at(dataset, commits, tmp_path) == pinned
    if sources := as_mixture(dataset):
        mixture = tmp_path / "mine.yml"
        entries = [{"dataset": each.dataset, "weight": each.weight, "rename_columns": {"q": "text"}} for each in sources]
        mixture.write_text(yaml.safe_dump(entries))
        expected = [{**entry, "dataset": each.dataset} for entry, each in zip(entries, as_mixture(pinned) or [], strict=True)]
        assert yaml.safe_load(Path(_dataset_at(str(mixture), commits, tmp_path)).read_text()) == expected
