"""toolkit replay, and the run card that it works from."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

import toolkit as tk
from toolkit.cli import replay as command
from toolkit.cli.replay_checks import check_inputs, directory_of, read_run, say_what_changed
from toolkit.runs.provenance import digest_of_source, toolkit_identity

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "40", "--max-eval-examples", "5", "--max-length", "128",
    "--max-steps", "3", "--num-samples", "0", "--logging-steps", "1", "--use-cpu", "--per-device-train-batch-size", "2",
]  # fmt: skip


PLAIN = ["--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "32", "--vocab-size", "300", "--max-steps", "3", "--logging-steps", "1", "--use-cpu"]


def toolkit(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    typed = [sys.executable, "-m", "toolkit", *words]
    return subprocess.run(
        typed, cwd=folder, capture_output=True, text=True, timeout=240, check=False,
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
    assert (card["continued"], card["files"]) == ([], {})
    assert card["toolkit"] == toolkit_identity()
    assert card["toolkit"]["version"] == tk.__version__
    assert {"numpy", "huggingface_hub"} <= card["versions"].keys()
    assert Path(card["started"]["directory"]).expanduser() == run.parent
    assert card["started"]["date"] <= card["end"]["date"]
    assert card["versions"]["torch"] == torch.__version__.partition("+")[0] or card["versions"]["torch"] == torch.__version__
    summary = json.loads((run / "summary.json").read_text())
    assert card["end"]["status"] == "finished"
    assert card["end"]["figures"]["eval_loss"] == summary["eval_loss"]
    assert card["end"]["device_seconds"] == pytest.approx(2 * card["end"]["wall_seconds"], abs=0.01)


def test_a_replay_has_the_same_weights_bit_for_bit(run: Path) -> None:
    """Two processes, dropout on. Fails when: the layout, the threads or a setting of the run is not taken over."""
    done = toolkit(run.parent, "replay", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^identical: .*weights.*losses", done.stdout, re.MULTILINE)
    one, other = (load_file(path / "model/adapter_model.safetensors") for path in (run, run.parent / "run-replay"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_weights_are_named_and_end_with_1(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """In the place of a run one that has ended, with a weight changed, and a loss, and fewer losses logged.

    Fails when: only losses are compared, or what one of the two logged is compared with nothing, or with the mean over other steps."""
    name = "model/adapter_model.safetensors"
    tensors = load_file(run / name)
    first = sorted(tensors)[0]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def compared(into: str, changed: float, steps: tuple[int, ...], loss: float) -> tuple[int, str]:
        def launched(*command: Any, **more: Any) -> int:
            shutil.copytree(run, tmp_path / into)
            weights = {key: tensor.clone() for key, tensor in tensors.items()}
            weights[first].view(-1)[3] += changed
            save_file(weights, tmp_path / into / name, metadata={"format": "pt"})
            logged = [{**event, "loss": event["loss"] + loss} for event in events if "loss" in event and event["step"] in steps]
            (tmp_path / into / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in logged))
            return 0

        monkeypatch.setattr(command, "launch", launched)
        try:
            command.replay(run, tmp_path / into)
        except typer.Exit as ended:
            return ended.exit_code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    code, said = compared("weight", 1e-3, (1, 2, 3), 0.0)
    assert code == 1
    assert f"first tensor that differs: {first}" in said
    assert "first loss" not in said
    code, said = compared("loss", 0.0, (1, 2, 3), 1e-9)
    assert code == 1
    assert "first loss that differs: step 1: " in said
    code, said = compared("seldom", 0.0, (2,), 1.0)  # which would be the mean over the steps 1 and 2
    assert code == 0
    assert re.match(r"identical: .*losses \(0 of 3\b", said)


def _edited(run: Path, folder: Path, **changes: Any) -> Path:
    """The run with another run.json, with its model next to it."""
    (folder / "model").mkdir(parents=True)
    card = json.loads((run / "run.json").read_text()) | changes
    (folder / "run.json").write_text(json.dumps({name: value for name, value in card.items() if value is not None}))
    (folder / "config.yaml").write_text((run / "config.yaml").read_text())
    (folder / "model/adapter_model.safetensors").write_bytes((run / "model/adapter_model.safetensors").read_bytes())
    return folder


def _replayed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `toolkit replay` refuses the directory with; whatever it would train fails the test."""

    def trains(*words: Any, **more: Any) -> int:
        raise AssertionError("it trains")

    monkeypatch.setattr(command, "launch", trains)
    with pytest.raises((tk.Refusal, typer.BadParameter)) as refused:
        command.replay(directory)
    return str(refused.value)


def test_what_cannot_be_replayed_is_refused_before_anything_is_trained(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Fails when: an edited recipe passes for the run's own, a run that continues is replayed, or weights and places are looked at
    in the end."""
    here = {"started": {"directory": str(tmp_path)}}
    (tmp_path / "mine.py").write_text("# another text\n")
    _edited(run, tmp_path / "edited", **here)
    _edited(run, tmp_path / "going", end={"status": "interrupted"})
    _edited(run, tmp_path / "killed", end=None)
    _edited(run, tmp_path / "other", continued=["step 2: max_steps was 2 and is 3: allowed by --allow-change", "step 3: more"])
    (tmp_path / "empty").mkdir()
    for folder, change in (("longer", lambda whole: whole + b"x"), ("cut", lambda whole: whole[:-1]), ("nothing", lambda whole: b"")):
        weights = _edited(run, tmp_path / folder) / "model/adapter_model.safetensors"
        weights.write_bytes(change(weights.read_bytes()))
    (_edited(run, tmp_path / "bare") / "model/adapter_model.safetensors").unlink()
    index = {"weight_map": {"a": "model-2-of-2.safetensors"}}
    (_edited(run, tmp_path / "shard") / "model/model.safetensors.index.json").write_text(json.dumps(index))
    (_edited(run, tmp_path / "again").with_name("again-replay") / "checkpoints").mkdir(parents=True)
    (_edited(run, tmp_path / "onfile").with_name("onfile-replay")).write_text("")
    cases = {
        "edited": "is not the recipe", "going": "Continue it with --resume", "killed": "the run has not ended",
        "other": "--allow-change, and 1 more)",
        "empty": "run.json: is missing", "absent": "there is no such directory",
        "longer": "adapter_model.safetensors: is damaged", "cut": "adapter_model.safetensors: is damaged",
        "nothing": "adapter_model.safetensors: is damaged", "bare": "bare/model: *.safetensors is missing",
        "shard": "shard/model: model-2-of-2.safetensors is missing", "onfile": "onfile-replay: is a file",
        "again": "again-replay: a run is already there",
    }  # fmt: skip
    for folder, words in cases.items():
        said = _replayed(tmp_path / folder, monkeypatch)
        assert words in said, folder
        assert "--output-dir" not in said
        assert "--overwrite" not in said


def test_a_refusal_is_one_message_with_code_2(run: Path, tmp_path: Path) -> None:
    """Fails when: it is an exception that main doesn't know."""
    _edited(run, tmp_path / "going", end={"status": "interrupted"})
    done = toolkit(tmp_path, "replay", "going")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("refused: ")
    assert "Traceback" not in done.stderr


def test_other_training_data_are_refused_before_the_first_step(run: Path, tmp_path: Path) -> None:
    """What only the tokenized rows tell: two processes, whose fingerprint the card has otherwise. Fails when: the run of the
    replay is not given which data it must have."""
    card = json.loads((run / "run.json").read_text())
    other = _edited(run, tmp_path / "other", data=card["data"] | {"fingerprint": "another"})
    done = toolkit(tmp_path, "replay", str(other))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("training data are not those") == 1
    assert "Traceback" not in done.stderr
    assert "step " not in done.stdout
    assert not (tmp_path / "other-replay").exists()


@pytest.mark.slow
def test_a_run_of_one_plain_process_is_replayed_from_elsewhere_and_changes_are_said_first(tmp_path: Path) -> None:
    """recipes/basic.py, which has no Accelerator, with paths relative to where it was started; another toolkit since.

    Fails when: it writes no card, or one that says nothing of its end; paths are taken from where the replay is typed; the
    digest of the code is not compared, or after the run."""
    (tmp_path / "begun").mkdir()
    (tmp_path / "elsewhere").mkdir()
    rows = tmp_path / "begun/rows.csv"
    rows.write_text("\n".join(["text,label", *(f"the {i} {('good', 'bad')[i % 2]} thing,{('up', 'down')[i % 2]}" for i in range(60))]) + "\n")
    done = toolkit(tmp_path / "begun", "train", "basic", *PLAIN, "--dataset", "rows.csv", "--output-dir", "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "begun/plain/run.json"
    card = json.loads(path.read_text())
    assert (card["layout"]["processes"], card["layout"]["precision"], card["end"]["status"]) == (1, "no", "finished")
    assert card["end"]["figures"]["eval_accuracy"] == json.loads((tmp_path / "begun/plain/summary.json").read_text())["eval_accuracy"]
    assert card["files"] == {"rows.csv": digest_of_source(str(rows))}
    card["toolkit"] |= {"sha256": "0" * 64, "commit": "abc-dirty"}
    path.write_text(json.dumps(card))
    code = f"import sys; sys.stderr = sys.stdout; sys.argv = ['toolkit', 'replay', {str(path.parent)!r}]; from toolkit.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("0.1.0 (sha256 000000000000, commit abc-dirty)", "step 1/3", "identical")
    assert -1 < done.stdout.find(words[0]) < done.stdout.find(words[1]) < done.stdout.find(words[2])


def test_a_changed_row_is_refused_at_once(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """And a file that is gone, and one that another setting names. Fails when: files are not compared before the run."""
    names = ["rows.jsonl", "folder", "chat.jinja"]
    (tmp_path / "folder").mkdir()
    for name in ("rows.jsonl", "folder/train.csv", "chat.jinja"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    monkeypatch.chdir(tmp_path)
    files = {name: digest_of_source(name) for name in names}
    (tmp_path / "mine.py").write_bytes((run.parent / "mine.py").read_bytes())
    _edited(run, tmp_path / "kept", started={"directory": str(tmp_path)}, files=files)
    card = read_run(tmp_path / "kept")[0]
    check_inputs("mine.py", card)
    for changed, name in (("rows.jsonl", "rows.jsonl"), ("folder/train.csv", "folder"), ("chat.jinja", "chat.jinja")):
        (tmp_path / changed).write_text("a,b\n1,3\n")
        assert f"{name}: has changed since that run" in _replayed(tmp_path / "kept", monkeypatch)
        (tmp_path / changed).write_text("a,b\n1,2\n")
    (tmp_path / "rows.jsonl").unlink()
    assert "rows.jsonl: " in _replayed(tmp_path / "kept", monkeypatch)


def test_what_is_not_as_it_was_here_is_said(run: Path, capsys: Any) -> None:
    """And nothing where all is as it was. Fails when: one of them is not compared, or a card of an older toolkit passes."""
    card = json.loads((run / "run.json").read_text()) | {"toolkit": toolkit_identity()}
    say_what_changed(card, on_cpu=True)
    assert capsys.readouterr().err == ""
    card["versions"]["numpy"] = "0.1"
    card["hardware"] |= {"device": "NVIDIA H100", "processor": "a faster one"}
    card.pop("toolkit")
    say_what_changed(card, on_cpu=True)
    said = capsys.readouterr().err
    for words in ("toolkit did not write down", "numpy was 0.1 and is", "device was NVIDIA H100 and is cpu", "processor was a faster one and is"):
        assert words in said
    card["started"]["directory"] = "/nowhere/at/all"
    assert directory_of(card) == Path.cwd()
    assert "/nowhere/at/all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "leaves", "ends_with", "words"),
    [
        (130, False, 130, "interrupted"), (75, True, 130, "It can't be continued: remove"), (0, False, 1, "left no run in"), (3, True, 3, ""),
    ],
    ids=["before it began", "after a checkpoint", "nothing done", "failed"],
)  # fmt: skip
def test_a_run_that_leaves_nothing_to_compare_ends_with_one_message(
    run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, code: int, leaves: bool, ends_with: int, words: str
) -> None:
    """Fails when: the comparison begins without its files."""

    def launched(*command: Any, **more: Any) -> int:
        if leaves:
            (tmp_path / "new").mkdir()
        return code

    monkeypatch.setattr(command, "launch", launched)
    with pytest.raises(typer.Exit) as ended:
        command.replay(run, tmp_path / "new")
    assert ended.value.exit_code == ends_with
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_replay_with_130_and_no_traceback(run: Path, tmp_path: Path) -> None:
    """Sent to the command while its run begins. Fails when: what a run that was stopped has left is compared."""
    (tmp_path / "mine.py").write_bytes((run.parent / "mine.py").read_bytes())
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "replay", str(_edited(run, tmp_path / "one")), "--into", str(tmp_path / "stopped")],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        said = ""
        while "2 processes on cpu" not in said:  # the second rank is there too: Python alone would end with a traceback
            line = process.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        said += process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.count("the replay was interrupted") == 1
    assert "identical" not in said


def test_a_run_whose_models_files_are_others_now_is_not_replayed(run: Path, tmp_path: Path) -> None:
    """Fails when: the digest that the run card has is not compared. What is as it was goes on to the next check."""
    from toolkit.system.digests import digests_of_directories

    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    card = json.loads((run / "run.json").read_text())
    assert card["model"]["directories"] == {}
    card["model"]["directories"] = digests_of_directories(str(base))
    recipe = str(run.parent / "mine.py")
    check_inputs(recipe, card)
    (base / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(tk.Refusal, match=f"^{base}: .*files.*changed"):
        check_inputs(recipe, card)


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
