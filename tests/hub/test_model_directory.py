"""The final model on the disk: durable before the old one goes, whole after a kill, readable as the umask says."""

import copy
import dataclasses
import importlib.util
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import toolkit as tk
from toolkit import checkpoint as ckpt
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.export.merge import merge_adapter
from toolkit.export.model_directory import write_model
from toolkit.hub.queue import Job, add_job, list_jobs

_SPEC = importlib.util.spec_from_file_location("injection", Path(__file__).parents[1] / "faults/injection.py")
assert _SPEC is not None
assert _SPEC.loader is not None
injection = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(injection)


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    vocab_size: int | None = 300
    hidden_size: int | None = 16
    num_hidden_layers: int | None = 1
    num_attention_heads: int | None = 2
    intermediate_size: int | None = 24


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tk.train_tokenizer(["one two three four"] * 9, 300)


def save(folder: Path, tokenizer: Any, seed: int, **settings: Any) -> Path:
    config = Config(output_dir=str(folder), seed=seed, **settings)  # type: ignore[call-arg]
    model = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, tokenizer), config, tokenizer)
    return tk.save_model(None, model, tokenizer, config.output_dir)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def both(tmp_path: Path, tokenizer: Any) -> list[dict[str, bytes]]:
    """The files of an old model and of a new one."""
    return [files_of(save(tmp_path / "elsewhere/run", tokenizer, seed)) for seed in (1, 2)]


def whole_ones(run: Path, both: list[dict[str, bytes]]) -> list[int]:
    """Which of the two is whole in the place of the model, or next to it in that of the old one."""
    there = [files_of(run / name) for name in ("model", ".model.old") if (run / name).is_dir()]
    return [both.index(files) for files in there if files in both]


def test_a_power_loss_at_any_moment_leaves_a_whole_model(tmp_path: Path, tokenizer: Any, both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated by the letter of POSIX, at each fsync and rename of a second save: the old model or the new one is there whole.

    Fails when: the files and folders are not synced before the rename.
    """
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back after the test
    lose_power, number, found = injection.durable_part(root), 0, list[list[int]]()
    save(root / "run", tokenizer, 1)
    synced, renamed, unlinked = os.fsync, os.rename, os.unlink

    def look(*ignored: Any) -> None:
        nonlocal number
        number += 1
        lose_power(tmp_path / f"lost-{number}")
        found.append(whole_ones(tmp_path / f"lost-{number}/run", both))

    for name, act in (("fsync", synced), ("rename", renamed), ("unlink", unlinked)):
        def watched(*given: Any, act: Any = act, **named: Any) -> None:
            look()
            act(*given, **named)

        monkeypatch.setattr(os, name, watched)
    save(root / "run", tokenizer, 2)
    look()
    assert all(found), found
    assert found[0] == [0]
    assert 1 in found[-1]
    assert len(found) > 10
    assert files_of(tmp_path / f"lost-{number}/run/model") == both[1]


def test_a_kill_at_any_operation_leaves_a_whole_model_and_the_next_save_works(tmp_path: Path, tokenizer: Any, both: Any, tally: Any) -> None:
    """Fails when: the old one is removed before the new one is whole, or what a kill left is in the way."""
    line, run = tally("F1", "SIGKILL at each operation on a file while the final model replaces another"), tmp_path / "elsewhere/run"
    for target in range(1, 200, 3):
        save(run, tokenizer, 1)
        child = os.fork()
        if child == 0:
            injection.kill_at_operation(target)
            save(run, tokenizer, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with line.trial(f"operation {target}"):
            assert whole_ones(run, both)
            save(run, tokenizer, 2)
            assert files_of(run / "model") == both[1]
            assert [path.name for path in run.iterdir()] == ["model"]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert target > 10
    line.check()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("adapted", [False, True])
def test_a_template_that_renders_no_plain_chat_keeps_no_model_from_being_written(tmp_path: Path, tokenizer: Any, adapted: bool) -> None:
    """At the end of a run that read the data by it, or none of it. Fails when: `turn_end_ids` refuses what it can't find ends in."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('four turns at least') }}"
    model = save(tmp_path / "run", strict, 0, use_peft=adapted)
    assert (model / "README.md").exists()
    assert transformers.AutoTokenizer.from_pretrained(model).chat_template == strict.chat_template


@pytest.fixture(params=[0o022, 0o027, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("own_cache")
def test_every_file_of_a_model_is_readable_as_the_umask_says(tmp_path: Path, tokenizer: Any, umask: int) -> None:
    """A model, an adapter with its base inside, a merged one, a cache, a checkpoint. Fails when: safetensors' 0600 stays."""
    save(tmp_path / "whole", tokenizer, 1)
    adapter = save(tmp_path / "adapter", tokenizer, 1, use_peft=True, lora_r=2)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "one {n}"}}\n' for n in range(9)))
    merged = merge_adapter(adapter, dataset=str(tmp_path / "rows.jsonl"))
    write_model(tmp_path / "merged", merged.model, whole_state_dict(None, merged.model) or {}, merged.tokenizer, "card", "float32")
    model = torch.nn.Linear(3, 2)
    ckpt.save_checkpoint(tmp_path / "checkpoints", 1, ckpt.capture_state(model, torch.optim.AdamW(model.parameters()), {}))
    paths = [path for path in tmp_path.rglob("*") if path.suffix != ".lock"]
    assert {path.name for path in paths} >= {"model.safetensors", "adapter_model.safetensors", "base", "rows.arrow", "optimizer.safetensors"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_what_waits_for_the_hub_outlives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the files are synced, and the folders that hold their names are not."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(os, "fsync", os.fsync)
    lose_power = injection.durable_part(root)

    def fill(files: Path) -> None:
        (files / "sub").mkdir()
        (files / "sub/tokenizer.json").write_text("t")
        (files / "config.json").write_text("c")

    job = add_job(root / "run/hub_queue", Job("me/it", "a model"), "end", fill)
    lose_power(tmp_path / "lost")
    (found,) = list_jobs(tmp_path / "lost/run/hub_queue")
    assert dataclasses.replace(found, folder=job.folder) == job
    assert files_of(found.folder / "files") == {"config.json": b"c", "sub/tokenizer.json": b"t"}
    shutil.rmtree(tmp_path / "lost")
