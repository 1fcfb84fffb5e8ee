"""What a run sends to the Hub, through a recipe and in processes of their own: strategies, kills, a Hub that is away."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

import toolkit as tk

PUSH = ["--push-to-hub", "--hub-model-id", "model"]
OF_A_MODEL = {
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip
NAME = "alice/model"
FOR_EVER = 10**9


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.RunConfig):
    pass


def contents(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {prefix + path.name: path.read_bytes() for path in folder.iterdir()}


def same_weights(content: bytes, checkpoint: Path) -> bool:
    found, expected = load(content), load((checkpoint / "model.safetensors").read_bytes())
    return found.keys() == expected.keys() and all(bool((found[name] == expected[name]).all()) for name in expected)


def weights_of_commits(hub: Any) -> list[bytes]:
    """Oldest first."""
    return [commit.files["model.safetensors"].content for commit in reversed(hub.repositories[NAME].history()) if commit.files]


def test_end_sends_the_final_model_once_and_nothing_else(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """Also what a user has put next to it stays here. Fails when: the strategy isn't looked at, or all files are sent."""
    code, out = run_sft(*PUSH, "--hub-strategy", "end", "--hub-private-repo", "--hub-revision", "trial")
    assert code == 0, out
    assert hub.repositories[NAME].private
    assert hub.titles(NAME, "trial") == ["End of training, step 4"]
    written = contents(tmp_path / "out/model")
    sent = hub.files(NAME, "trial")
    assert sent.keys() == OF_A_MODEL
    assert {**sent, "README.md": b""} == {**written, "README.md": b""}
    assert sent["README.md"] == written["README.md"].replace(b'name = "out/model"', b'name = "alice/model"')
    assert not (tmp_path / "out/hub_queue").exists()
    assert f"on the Hub: {hub.url}/{NAME}" in out


@pytest.mark.slow
def test_every_save_sends_the_model_of_each_checkpoint(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """Fails when: what is written is the live model and not that of the checkpoint, or the final one, which is the same as the
    last, makes a commit of its own."""
    code, out = run_sft(*PUSH, "--async-save")
    assert code == 0, out
    assert hub.titles(NAME) == ["Training in progress, step 2", "Training in progress, step 4"]
    assert hub.files(NAME).keys() == OF_A_MODEL
    for step, content in zip((2, 4), weights_of_commits(hub), strict=True):
        assert same_weights(content, tmp_path / f"out/checkpoints/step-{step}")


@pytest.mark.slow
def test_an_embedding_model_has_its_pooling_while_it_trains(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """In every commit. Fails when: the recipe's files aren't given to `open_run`, or those to the queue."""
    small = ["--model", "tiny-bert-uncased", "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "64"]
    steps = ["--max-steps", "4", "--save-steps", "2", "--eval-strategy", "no", "--per-device-train-batch-size", "2"]
    code, out = run_sft(*PUSH, *steps, recipe="embedding", small=small)
    assert code == 0, out
    sent = [commit.files for commit in hub.repositories[NAME].history() if commit.files]
    assert len(sent) >= 2
    for files in sent:
        assert {"modules.json", "1_Pooling/config.json", "README.md"} <= files.keys()
        assert b"SentenceTransformer" in files["README.md"].content


def test_weights_that_are_a_checkpoints_file_are_not_written_again(tmp_path: Path) -> None:
    """From the second checkpoint on; of tied weights too. What is sent is what a model directory of that step holds, file by file.

    Fails when: every model is written and read again while training waits, or the first one's weights are sent each time.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit import checkpoint as ckpt
    from toolkit.distributed.engines.pieces import whole_state_dict
    from toolkit.hub import uploads
    from toolkit.models.loaded import Loaded, loaded, note_loaded
    from toolkit.models.tokenizer import train_tokenizer
    from toolkit.runs.summary import Summary, read_settings

    for tied in (False, True):
        folder = tmp_path / f"tied-{tied}"
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=tied, **shape))
        note_loaded(model, Loaded(tokenizer=train_tokenizer(["a few words"] * 9, 270)))
        config = Config(output_dir=str(folder), dtype="auto", model="tiny-llama", dataset="stdlib:sft")
        assert config.dtype == "auto"  # read, as loading a model does: the card shows settings that were read
        folder.mkdir()
        more = {"modules.json": "[]"}
        (folder / "run.json").write_text(json.dumps({"model": {"name": "tiny-llama"}, "data": {"dataset": "stdlib:sft"}}))
        sent = uploads.Uploads("alice/model", config, model, shards=False, files=more, say=print)
        for step in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * step)
            optimizer = torch.optim.SGD(model.parameters())
            checkpoint = ckpt.save_checkpoint(folder, step, ckpt.capture_state(model, optimizer, {"step": step}, None, {}, {}))
            files, directory = folder / f"{step}/files", folder / f"{step}/reference"
            files.mkdir(parents=True)
            sent._add_model(checkpoint, step, files, [])
            card = uploads.card_of_run(model, loaded(model).tokenizer, folder, Summary({}, read_settings(config)), more)
            uploads.write_model(directory, model, whole_state_dict(None, model), loaded(model).tokenizer, card, files=more)
            assert contents(files)["README.md"].decode().splitlines() == contents(directory)["README.md"].decode().splitlines()
            assert contents(files) == contents(directory)
            assert ((files / "model.safetensors").stat().st_ino == (checkpoint / "model.safetensors").stat().st_ino) == (step > 1)


@pytest.mark.slow
def test_best_sends_better_models_only_and_ends_with_the_best(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """A rate at which it gets better and then worse. Fails when: a model that isn't better is sent, or the last one at the end."""
    flags = ["--eval-strategy", "steps", "--eval-steps", "1", "--load-best-model-at-end", "--hub-strategy", "best", "--optim", "sgd"]
    code, out = run_sft(*PUSH, *flags, "--learning-rate", "20", "--max-steps", "6", "--warmup-steps", "0", "--no-eval-on-start", "--lr-scheduler-type", "constant")
    assert code == 0, out
    events = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    better, least = [], float("inf")
    for event in events:
        if event.get("eval_loss", float("inf")) < least:
            better, least = [*better, event["step"]], event["eval_loss"]
    assert 0 < better[-1] < 6, events
    titles = hub.titles(NAME)
    assert titles[: len(better)] == [f"Training in progress, step {step}" for step in better]
    assert titles[len(better) :] in ([], ["End of training, step 6"])  # the card has the last metrics
    assert same_weights(hub.files(NAME)["model.safetensors"], tmp_path / f"out/checkpoints/step-{better[-1]}")


def test_a_run_goes_on_to_the_same_bits_from_the_checkpoint_on_the_hub(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """Fails when: a file of the checkpoint isn't sent, or not that of the newest."""
    code, out = run_sft(*PUSH, "--hub-strategy", "checkpoint", "--max-steps", "2")
    assert code == 0, out
    sent = hub.files(NAME)
    assert {k: v for k, v in sent.items() if "/" in k} == contents(tmp_path / "out/checkpoints/step-2", "last-checkpoint/")
    assert {k for k in sent if "/" not in k} == OF_A_MODEL
    for name, content in sent.items():
        (tmp_path / "fetched" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fetched" / name).write_bytes(content)
    more = ["--lr-scheduler-type", "constant", "--warmup-steps", "0", "--allow-change", "max_steps,lr_scheduler_type,warmup_steps"]
    results = []
    for start, where in ((tmp_path / "fetched/last-checkpoint", "a"), (tmp_path / "out/checkpoints/step-2", "b")):
        code, out = run_sft("--resume-from", str(start), *more, output_dir=where)
        assert code == 0, out
        results.append((tmp_path / where / "model/model.safetensors").read_bytes())
    assert results[0] == results[1] != sent["model.safetensors"]


@pytest.mark.slow
def test_a_recipe_may_send_its_model_after_its_run_is_closed(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """Fails when: what is added to the queue after the end is sent by nobody."""
    recipe = (Path(__file__).resolve().parents[2] / "recipes/sft.py").read_text()
    last = "        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)\n        tk.save_to_hub(run)\n"
    assert last in recipe
    (tmp_path / "mine.py").write_text(recipe.replace(last, last.replace("        ", "    ")))
    code, out = run_sft(*PUSH, "--hub-strategy", "end", recipe=str(tmp_path / "mine"))
    assert code == 0, out
    assert hub.titles(NAME) == ["End of training, step 4"]
    assert hub.files(NAME).keys() == OF_A_MODEL
    assert senders(tmp_path) == []


def test_an_adapter_goes_up_as_an_adapter(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """With its base, which nobody else has. Fails when: a folder of the model directory is left out, or what is frozen."""
    code, out = run_sft(*PUSH, recipe="lora")
    assert code == 0, out
    assert hub.titles(NAME) == ["Training in progress, step 2", "Training in progress, step 4"]
    sent, model = hub.files(NAME), tmp_path / "out/model"
    assert sent.keys() == {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base/config.json", "base/model.safetensors"} <= sent.keys()
    first = hub.repositories[NAME].history()[1].files["adapter_model.safetensors"].content
    trained, adapter = load((tmp_path / "out/checkpoints/step-2/model.safetensors").read_bytes()), load(first)
    assert {name.replace(".default.", "."): tensor.tolist() for name, tensor in trained.items() if ".lora_" in name} == {
        name: tensor.tolist() for name, tensor in adapter.items() if ".lora_" in name
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero3"])
def test_ranks_send_what_one_process_sends(run_sft: Any, hub: Any, tmp_path: Path, layout: str) -> None:
    """Fails when: a rank next to the main one sends too, or of a sharded model what one rank has is written."""
    if layout == "zero3":
        pytest.importorskip("deepspeed")
    flags = {"ddp": [], "fsdp2": ["--fsdp"], "zero3": ["--zero-stage", "3"]}[layout]
    code, out = run_sft(*PUSH, *flags, "--use-cpu", ranks=2)
    assert code == 0, out
    assert hub.titles(NAME) == ["Training in progress, step 2", "Training in progress, step 4"]
    for step, content in zip((2, 4), weights_of_commits(hub), strict=True):
        assert same_weights(content, tmp_path / f"out/checkpoints/step-{step}")


def test_without_write_access_no_step_is_taken(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """Fails when: access is looked at when something is sent."""
    code, out = run_sft(*PUSH, env={"HF_TOKEN": "hf_read"})
    assert code == 2, out
    assert "may only read" in out
    assert "Traceback" not in out
    assert not (tmp_path / "out").exists()


def test_a_hub_that_is_away_costs_a_warning_and_a_push_later(run_sft: Any, push: Any, hub: Any, tmp_path: Path) -> None:
    """Fails when: an error of the Hub reaches the loop, the end waits for ever, or the push sends twice what had arrived."""
    hub.make(NAME)
    hub.fail("POST", "/commit/", 503, times=FOR_EVER)
    code, out = run_sft(*PUSH)
    assert code == 0, out
    assert out.count("toolkit push out") == 1
    assert "503" in out
    assert hub.titles(NAME) == []
    assert (tmp_path / "out/summary.json").exists()
    hub.faults.clear()
    hub.fail("POST", "/commit/", -2)  # arrives, but its answer doesn't
    code, said = push("out")
    assert code == 0, said
    assert hub.titles(NAME) == ["Training in progress, step 2", "Training in progress, step 4"]
    assert same_weights(hub.files(NAME)["model.safetensors"], tmp_path / "out/checkpoints/step-4")
    assert push("out") == (0, said.splitlines()[-1] + "\n") or hub.titles(NAME) == ["Training in progress, step 2", "Training in progress, step 4"]


@pytest.mark.slow
def test_a_hub_that_cannot_even_be_asked_costs_a_warning(run_sft: Any, push: Any, hub: Any) -> None:
    """The name has no user yet. Fails when: training needs the Hub to begin."""
    hub.fail("*", ".*", 503, times=FOR_EVER)
    code, out = run_sft(*PUSH, "--hub-strategy", "end")
    assert code == 0, out
    assert "can't be queried" in out
    assert NAME not in hub.repositories
    hub.faults.clear()
    code, said = push("out")
    assert code == 0, said
    assert hub.titles(NAME) == ["End of training, step 4"]


def test_what_a_killed_run_had_not_sent_is_sent_by_push(run_sft: Any, push: Any, hub: Any, tmp_path: Path) -> None:
    """SIGKILL while the first commit hangs. Fails when: the queue is in memory, or its process lives on."""
    hub.make(NAME)
    hub.fail("PUT", "/_large/", 200, times=FOR_EVER, delay=30.0)

    def kill(pid: int) -> None:
        deadline = time.monotonic() + 120
        while not hub.count("PUT", "/_large/") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    code, out = run_sft(*PUSH, "--max-steps", "4000", while_running=kill)
    assert code == -signal.SIGKILL, out
    deadline = time.monotonic() + 10
    while senders(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert senders(tmp_path) == []
    waiting = [json.loads(path.read_text())["message"] for path in sorted((tmp_path / "out/hub_queue").glob("0*/job.json"))]
    assert waiting
    hub.faults.clear()
    code, said = push("out")
    assert code == 0, said
    assert hub.titles(NAME) == waiting


@pytest.mark.slow
def test_a_stop_waits_for_no_upload(run_sft: Any, hub: Any, tmp_path: Path) -> None:
    """SIGTERM while a connection hangs; the newest checkpoint is in the queue. Fails when: the end waits for the sender, or a
    stop writes a model."""
    hub.make(NAME)
    hub.fail("PUT", "/_large/", 200, times=FOR_EVER, delay=60.0)
    ended: list[float] = []

    def stop(pid: int) -> None:
        deadline = time.monotonic() + 120
        while not hub.count("PUT", "/_large/") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)
        ended.append(time.monotonic())

    code, out = run_sft(*PUSH, "--hub-strategy", "checkpoint", "--max-steps", "4000", "--save-steps", "50", while_running=stop)
    seconds = time.monotonic() - ended[0]
    assert code == 75, out
    assert seconds < 20
    assert "toolkit push out" in out
    assert senders(tmp_path) == []
    jobs = sorted((tmp_path / "out/hub_queue").glob("0*"))
    stopped = json.loads((tmp_path / "out/checkpoints/last.json").read_text())["checkpoint"]
    assert json.loads((jobs[-1] / "job.json").read_text())["message"] == f"Checkpoint, {stopped.replace('-', ' ')}"
    assert {path.name for path in (jobs[-1] / "files").iterdir()} == {"last-checkpoint"}


def senders(folder: Path) -> list[int]:
    """Processes that send what is in a queue under this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if "toolkit.hub.sender" in command and str(folder) in command:
            found.append(int(entry.name))
    return found
