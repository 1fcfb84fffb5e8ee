"""A stored teacher: the numbers of the one in memory, asked once, whole after a kill, and noticed when they are damaged."""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import toolkit as tk
from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.distillation import fill_store, store as stores
from toolkit.distillation.fill_store import ask_stored, store_teacher
from toolkit.distillation.teacher import ask_model
from toolkit.distillation.trained_teacher import TrainedTeacher
from toolkit.distillation.vocabulary import SharedVocabulary
from toolkit.losses.distillation import distillation_loss, distillation_metrics
from toolkit.losses.divergences import DIVERGENCES

VOCABULARY = 53


def llama(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # far from a fresh start, where all distributions are alike
        parameter.data.normal_(0.0, 0.5)
    return model.eval()


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    return llama(0), llama(1)


@pytest.fixture(autouse=True)
def cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_cache.mkdir()
    monkeypatch.setattr(stores, "BLOCK_BYTES", 1000)
    return own_cache


def loaders(packing: str | None, count: int = 24, seed: int = 3, **settings: Any) -> tuple[TrainLoader, EvalLoader]:
    """Documents of 2 to 12 tokens, some of them unsupervised in part; `packing` "bfd", "wrapped" (which cuts them) or None."""
    numbers = random.Random(seed)
    rows = []
    for i in range(count):
        tokens = [numbers.randrange(2, VOCABULARY) for _ in range(2 + i * 7 % 11)]
        labels = [token if numbers.random() < 0.7 else -100 for token in tokens]
        rows.append({"input_ids": tokens, "labels": labels, "length": len(tokens), "supervised_tokens": sum(label != -100 for label in labels[1:])})
    splits = {"train": Dataset.from_list(rows), "validation": Dataset.from_list(rows[:7])}
    values = {"max_length": 16, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "num_train_epochs": 1, **settings}
    config = tk.DataConfig(packing=packing is not None, packing_strategy=packing or "bfd", **values)
    train, evaluation = tk.build_dataloaders(splits, collate_padded if packing is None else collate_packed, config)
    assert isinstance(train, TrainLoader)
    assert evaluation is not None
    return train, evaluation


def stored(teacher: nn.Module, train: TrainLoader, evaluation: EvalLoader, top_k: int, asked: list[int] | None = None, half: Any = None, **settings: Any) -> Any:
    def load() -> Any:
        own = ask_model(teacher, SharedVocabulary(VOCABULARY), half)

        def ask(micro_batch: dict[str, Any], temperature: float, body: Any) -> torch.Tensor:
            if asked is not None:
                asked.append(len(micro_batch["supervised_positions"]))
            return own(micro_batch, temperature, body)

        return ask

    values = {"made_of": {"files": "x"}, "temperature": 1.5, **settings}
    return store_teacher(Accelerator(cpu=True), load, train=train, evaluation=evaluation, top_k=top_k, vocabulary=VOCABULARY, **values)


def loss_and_gradients(student: nn.Module, teacher: Any, train: TrainLoader, divergence: str = "forward_kl") -> tuple[float, list[torch.Tensor]]:
    student.zero_grad()
    total = 0.0
    for batch in train.batches():
        for micro_batch in batch.micro_batches:
            loss, _ = distillation_loss(student, micro_batch, {"tokens": 50.0}, teacher=teacher, divergence=divergence, temperature=1.5)
            loss.backward()
            total += loss.item()
    return total, [parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]


def evaluated(student: nn.Module, teacher: Any, evaluation: EvalLoader) -> dict[str, float]:
    return tk.eval_with_gather(Accelerator(cpu=True), student, evaluation, distillation_metrics(teacher, 1.5))


@pytest.mark.fast(3)
@pytest.mark.parametrize("packing", [None, "bfd", "wrapped"])
def test_all_tokens_stored_are_the_teacher_in_memory(models: tuple[nn.Module, nn.Module], packing: str | None) -> None:
    """Fails when: an example's numbers are another's, or a cut document has those of its beginning."""
    student, teacher = models
    train, evaluation = loaders(packing)
    online = ask_model(teacher, SharedVocabulary(VOCABULARY))
    taught, taught_evaluation = stored(teacher, train, evaluation, VOCABULARY)
    for divergence in DIVERGENCES:
        wanted, of_wanted = loss_and_gradients(student, online, train, divergence)
        found, of_found = loss_and_gradients(student, ask_stored(VOCABULARY), taught, divergence)
        assert found == pytest.approx(wanted, rel=1e-6)
        for ours, theirs in zip(of_found, of_wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    wanted_metrics = evaluated(student, online, evaluation)
    assert evaluated(student, ask_stored(VOCABULARY), taught_evaluation) == pytest.approx(wanted_metrics, rel=1e-6)


@pytest.mark.parametrize("of_student", [True, False])
def test_a_teacher_computes_in_the_half_precision_that_it_is_given(models: tuple[nn.Module, nn.Module], of_student: bool) -> None:
    """Whatever the student is called with, which is as it was then; stored too. Reference: the teacher's own forward pass.

    Fails when: the student's autocast decides, or is lost behind the teacher's.
    """
    _, teacher = models
    train, evaluation = loaders(None)
    ask = ask_model(teacher, SharedVocabulary(VOCABULARY), torch.bfloat16)
    taught, _ = stored(teacher, train, evaluation, VOCABULARY, half=torch.bfloat16, made_of={"files": "x", "autocast": "bfloat16"})
    micro_batch, again = (next(iter(loader.batches())).micro_batches[0] for loader in (train, taught))
    inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = teacher(**inputs).logits.float().flatten(0, 1)
    wanted = (logits[micro_batch["supervised_positions"]] / 1.5).log_softmax(-1)
    full = (teacher(**inputs).logits.flatten(0, 1)[micro_batch["supervised_positions"]] / 1.5).log_softmax(-1)
    seen: list[bool] = []

    def body(of_teacher: Any, _: int) -> torch.Tensor:
        found = of_teacher(slice(None)).logps
        seen.append(torch.is_autocast_enabled("cpu"))
        return found

    with torch.autocast("cpu", torch.bfloat16, enabled=of_student):
        found = ask(micro_batch, 1.5, body)
        kept = ask_stored(VOCABULARY)(again, 1.5, body)
        assert torch.is_autocast_enabled("cpu") == of_student
    assert seen == [of_student] * 2
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept, found, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "of_files", "precision", "half"),
    [
        ("auto", torch.float32, "bf16", torch.bfloat16), ("auto", None, "bf16", torch.bfloat16), ("auto", torch.float32, "no", None),
        ("auto", torch.bfloat16, "bf16", None), ("float32", torch.float32, "bf16", None), ("bfloat16", torch.float32, "bf16", None),
        ("auto", "float32", "fp16", torch.float16),
    ],
)  # fmt: skip
def test_a_teacher_in_float32_computes_as_the_run_does_unless_its_type_is_named(dtype: str, of_files: Any, precision: str, half: Any) -> None:
    """Fails when: one in half precision gets autocast, or --teacher-dtype float32 does not bring float32."""
    found = TrainedTeacher(tk.ModelConfig(dtype=dtype), "", SimpleNamespace(dtype=of_files), None, {})  # type: ignore[arg-type]
    assert found.computed_in(SimpleNamespace(mixed_precision=precision)) == half  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [1, 5, VOCABULARY - 1])
def test_the_divergence_of_all_tokens_lies_between_the_stored_one_and_its_bound(models: tuple[nn.Module, nn.Module], top_k: int) -> None:
    """Fails when: the bound takes the tail's mean in place of its least likely token, or the rest is left out."""
    student, teacher = models
    train, evaluation = loaders(None)
    whole = evaluated(student, ask_model(teacher, SharedVocabulary(VOCABULARY)), evaluation)["eval_kl"]
    _, taught = stored(teacher, train, evaluation, top_k)
    found = evaluated(student, ask_stored(VOCABULARY), taught)
    assert found["eval_kl"] <= whole * (1 + 1e-6)
    assert whole <= found["eval_kl_at_most"] * (1 + 1e-6)
    if top_k == VOCABULARY - 1:  # a tail of one token: nothing is lost
        assert found["eval_kl"] == pytest.approx(whole, rel=1e-6)
        assert found["eval_kl_at_most"] == pytest.approx(whole, rel=1e-5)


def test_what_is_stored_is_not_asked_again_and_only_what_a_run_sees_is_asked(models: tuple[nn.Module, nn.Module], capsys: Any) -> None:
    """Fails when: the teacher is loaded for a full store, or another k, temperature or data reads it."""
    _, teacher = models
    few, evaluation = loaders(None, max_steps=3)
    asked: list[int] = []
    stored(teacher, few, evaluation, 4, asked)
    first = sum(asked)
    train, evaluation = loaders(None)
    taught, _ = stored(teacher, train, evaluation, 4, asked)
    supervised = int(train.rows.units["tokens"].sum() + evaluation.rows.units["tokens"].sum())
    assert first < sum(asked) == supervised
    stored(teacher, *loaders(None), 4, asked)
    assert sum(asked) == supervised
    assert "log-probabilities read from" in capsys.readouterr().out
    for changed in ({"temperature": 1.0}, {"made_of": {"files": "y"}}):
        before = sum(asked)
        stored(teacher, *loaders(None), 4, asked, **changed)
        assert sum(asked) == before + supervised
    before = sum(asked)
    stored(teacher, *loaders(None, seed=4), 4, asked)
    assert sum(asked) > before
    assert len(list(taught.batches())) == train.num_steps


def test_a_kill_while_it_is_stored_changes_no_bit(models: tuple[nn.Module, nn.Module], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before every write, and in the middle of it. Fails when: the blocks of the next run are cut elsewhere."""
    _, teacher = models

    def contents() -> dict[str, bytes]:
        return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*.block"))}

    stored(teacher, *loaders("bfd"), 4)
    whole = contents()
    assert len(whole) == 4
    original = stores.write_atomically
    for kill in range(len(whole)):
        for path in list(cache.rglob("*.block")):
            path.unlink()
        written: list[Path] = []

        def dies(path: Path, content: bytes, own: Path, kill: int = kill, written: list[Path] = written) -> None:
            if len(written) == kill:
                own.write_bytes(content[: len(content) // 2])
                raise KeyboardInterrupt
            written.append(path)
            original(path, content, own)

        monkeypatch.setattr(stores, "write_atomically", dies)
        with pytest.raises(KeyboardInterrupt):
            stored(teacher, *loaders("bfd"), 4)
        monkeypatch.setattr(stores, "write_atomically", original)
        assert len(contents()) == kill
        stored(teacher, *loaders("bfd"), 4)
        assert contents() == whole


def test_what_a_killed_process_was_writing_is_removed_when_nobody_writes_it_any_more(
    models: tuple[nn.Module, nn.Module], cache: Path
) -> None:
    """Fails when: another process's block goes that is being written, or a dead one's stays for ever."""
    _, teacher = models
    stored(teacher, *loaders(None), 4)
    folder = next(cache.rglob("*.block")).parent
    now, long_ago = (folder / f".000000-12345678.block.{number}" for number in (1, 2))
    for path in (now, long_ago):
        path.write_bytes(b"half")
    os.utime(long_ago, (0, 0))
    stored(teacher, *loaders(None), 4)
    assert (now.exists(), long_ago.exists()) == (True, False)


@pytest.mark.fast(1)
def test_a_damaged_block_is_asked_anew_with_a_line_that_names_it(models: tuple[nn.Module, nn.Module], cache: Path, capsys: Any) -> None:
    """A flipped bit, a cut, an empty file. Fails when: a block is used without its digest."""
    _, teacher = models
    stored(teacher, *loaders(None), 4)
    numbers = random.Random(0)
    for damage in ("bit", "cut", "empty"):
        path = numbers.choice(sorted(cache.rglob("*.block")))
        whole = path.read_bytes()
        broken = bytearray(whole)
        broken[numbers.randrange(len(whole))] ^= 1 << numbers.randrange(8)
        path.write_bytes({"bit": bytes(broken), "cut": whole[: numbers.randrange(1, len(whole))], "empty": b""}[damage])
        stored(teacher, *loaders(None), 4)
        assert f"{path} is damaged" in capsys.readouterr().out
        assert path.read_bytes() == whole


def test_a_block_that_was_copied_from_another_store_is_asked_anew(models: tuple[nn.Module, nn.Module], cache: Path, capsys: Any) -> None:
    """Of the same examples, at another temperature. Fails when: a block's store is not compared with the folder that it is in."""
    _, teacher = models
    stored(teacher, *loaders(None), 4)
    whole = {path: path.read_bytes() for path in cache.rglob("*.block")}
    stored(teacher, *loaders(None), 4, temperature=3.0)
    others = {path.name: path for path in set(cache.rglob("*.block")) - set(whole)}
    for path in whole:
        path.write_bytes(others[path.name].read_bytes())
    stored(teacher, *loaders(None), 4)
    assert capsys.readouterr().out.count("was written for another store") == len(whole)
    assert {path: path.read_bytes() for path in whole} == whole


def test_a_file_that_is_cut_during_the_run_and_a_full_disk_are_one_message(
    models: tuple[nn.Module, nn.Module], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: half an example's numbers are taken for those of the next one."""
    _, teacher = models
    taught, _ = stored(teacher, *loaders(None), 4)
    for path in cache.rglob("*.block"):
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(tk.Refusal, match="was cut"):
        list(taught.batches())
    usage = fill_store.shutil.disk_usage(cache)
    monkeypatch.setattr(fill_store.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(tk.Refusal, match=r"--teacher-top-k 5: .*\d+ tokens .* 100 B"):
        stored(teacher, *loaders(None), 5)

    def full(path: Path, content: bytes, own: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(stores, "write_atomically", full)
    with pytest.raises(tk.Refusal, match="No space left on device"):
        stored(teacher, *loaders(None), 6)
    assert not list(cache.rglob(".*.block.*"))


def test_blocks_are_those_of_the_split_whatever_is_wanted_of_it() -> None:
    """Fails when: blocks are cut by what is missing, so that a killed run's next one cuts others."""
    train, _ = loaders(None)
    every = dict(stores.blocks_of(train.rows, np.arange(24), 100))
    some = dict(stores.blocks_of(train.rows, np.array([0, 5, 6, 23]), 100))
    assert [example for examples in every.values() for example in examples] == list(range(24))
    assert all(set(examples) <= set(every[number]) for number, examples in some.items())
    assert stores.blocks_of(train.rows, np.array([], dtype=np.int64), 100) == []


def test_a_micro_batch_of_other_loaders_is_refused(models: tuple[nn.Module, nn.Module]) -> None:
    """Fails when: the student is compared with nothing."""
    train, _ = loaders(None)
    micro_batch = next(iter(train.batches())).micro_batches[0]
    with pytest.raises(ValueError, match="loaders that build_teacher returned"):
        distillation_loss(models[0], micro_batch, {"tokens": 1.0}, teacher=ask_stored(VOCABULARY))
