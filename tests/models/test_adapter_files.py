"""Adapters and models as input: what is broken is refused by name, before step 1, wherever it is loaded; nothing is unpickled."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit as tk
from toolkit.config import Refusal
from toolkit.export.merge import merge_adapter
from toolkit.models.load import check_finite
from toolkit.models.trained import load_trained

pytestmark = pytest.mark.warm

CAUSAL = "AutoModelForCausalLM"
ROWS = "".join(f'{{"text": "one two {number}"}}\n' for number in range(9))
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    use_peft: bool = True
    lora_r: int = 4
    vocab_size: int | None = 300
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 2
    intermediate_size: int | None = 48


def of_directory(folder: Path, **settings: Any) -> Config:
    return Config(model=str(folder), **dict.fromkeys(SHAPE), **settings)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, a small model, and `adapter`, one trained on it."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = tk.train_tokenizer(["one two three four"] * 9, 300)
    model = tk.load_model(CAUSAL, dataclasses.replace(Config(), use_peft=False), tokenizer)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    config = of_directory(folder / "base", output_dir=str(folder / "run"))
    adapted = tk.add_adapter(tk.load_model(CAUSAL, config, tokenizer), config, tokenizer)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    tk.save_model(None, adapted, tokenizer, config.output_dir)
    shutil.copytree(folder / "run/model", folder / "adapter")
    return folder


@pytest.fixture
def adapter(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


def settings(**changes: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return act


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")

    return act


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def spoiled(tensors: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    tensors[sorted(tensors)[3]][1, 2] = value
    return tensors


class Trap:
    """Unpickling this would leave a file."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "settings cut off": (lambda f: (f / "adapter_config.json").write_text('{"peft_type": "LO'), ["adapter_config.json"]),
    "settings are a list": (lambda f: (f / "adapter_config.json").write_text("[]"), ["adapter_config.json", "no JSON object"]),
    "settings nested too deep": (lambda f: (f / "adapter_config.json").write_text("[" * 100_000), ["adapter_config.json"]),
    "a setting twice": (
        lambda f: (f / "adapter_config.json").write_text((f / "adapter_config.json").read_text().replace("{", '{"r": 3, ', 1)),
        ["adapter_config.json", "r is twice"],
    ),
    "an unknown kind": (settings(peft_type="WAT"), ["adapter_config.json", "WAT"]),
    "no kind": (settings(peft_type=None), ["adapter_config.json"]),
    "a rank that is no number": (settings(r="eight"), ["adapter"]),
    "another rank": (settings(r=3), ["size mismatch", "lora_A"]),
    "a module to import": (settings(megatron_config={"a": 1}), ["megatron_config"]),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), ["no adapter_model.safetensors"]),
    "pickled weights": (pickle_weights, ["adapter_model.bin: is pickled", "python -c"]),
    "a trap": (lambda f: (pickle_weights(f), torch.save(Trap(), f / "adapter_model.bin")), ["adapter_model.bin: is pickled"]),
    "empty weights": (lambda f: (f / "adapter_model.safetensors").write_bytes(b""), ["adapter_model.safetensors: is damaged"]),
    "weights cut off": (lambda f: os.truncate(f / "adapter_model.safetensors", 900), ["adapter_model.safetensors: is damaged"]),
    "no tensor": (tensors(lambda t: {}), ["holds no tensor"]),
    "a folder of weights": (
        lambda f: ((f / "adapter_model.safetensors").unlink(), (f / "adapter_model.safetensors").mkdir()), ["no adapter_model.safetensors"],
    ),
    "a tensor missing": (tensors(lambda t: dict(sorted(t.items())[1:])), ["lora_A", "1 missing, 0 unused"]),
    "of another base": (tensors(lambda t: {name.replace("layers.1.", "layers.7."): x for name, x in t.items()}), ["missing", "layers.1"]),
    "a layer more": (tensors(lambda t: t | {n.replace("layers.1.", "layers.2."): x.clone() for n, x in t.items()}), ["0 missing", "layers.2"]),
    "NaN": (tensors(lambda t: spoiled(t, math.nan)), ["adapter_model.safetensors", "holds NaN at [1, 2]", "lora_B"]),
    "infinity": (tensors(lambda t: spoiled(t, -math.inf)), ["adapter_model.safetensors", "holds infinity at [1, 2]", "lora_B"]),
}  # fmt: skip


def train_further(adapter: Path) -> Any:
    config = of_directory(adapter)
    return tk.add_adapter(tk.load_model(CAUSAL, config, tk.load_tokenizer(config)), config)


DOORS: dict[str, Callable[[Path], Any]] = {
    "train": train_further,
    "generate": lambda adapter: load_trained(CAUSAL, tk.ModelConfig(model=str(adapter)), torch.device("cpu")),
    "merge": lambda adapter: merge_adapter(adapter, dataset="rows.jsonl"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_adapter_is_one_refusal_that_names_it(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, what: str, door: str
) -> None:
    """Trained further, asked for text, merged. Fails when: `check_adapter` or the comparison of names after it is left out, or
    peft is left to look for the weights."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)
    act, words = BROKEN[what]
    act(adapter)
    with pytest.raises(Refusal) as refused:
        DOORS[door](adapter)
    message = str(refused.value)
    assert all(word in message for word in [str(adapter), *words]), message
    assert "\n" not in message
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("door", DOORS)
def test_a_whole_adapter_passes(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    """Fails when: a name that peft writes counts as unused."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)
    DOORS[door](adapter)


def test_the_conversion_that_is_named_makes_the_same_adapter(adapter: Path) -> None:
    """Fails when: the command does not run as it is typed."""
    before = load_file(adapter / "adapter_model.safetensors")
    pickle_weights(adapter)
    with pytest.raises(Refusal) as refused:
        train_further(adapter)
    command = str(refused.value).partition("Convert it: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, timeout=120)
    after = load_file(adapter / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train_further(adapter)


@pytest.mark.parametrize("weights", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_next_to_a_whole_model_is_refused(published: Path, tmp_path: Path, weights: str) -> None:
    """transformers would put it on the model unasked, and read it through torch.load. Fails when: it is left to."""
    shutil.copytree(published / "base", tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(published / "adapter" / name, tmp_path / "both" / name)
    if weights.endswith(".bin"):
        pickle_weights(tmp_path / "both")
    with pytest.raises(Refusal, match="a whole model and an adapter"):
        tk.load_model(CAUSAL, of_directory(tmp_path / "both", use_peft=False))


@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (math.inf, "infinity")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_with_a_number_that_is_not_finite_is_refused_by_tensor(published: Path, tmp_path: Path, value: float, said: str, dtype: str) -> None:
    """Trained, asked, and as the base that an adapter is merged into. Fails when: the weights are not looked at before step 1."""
    shutil.copytree(published / "base", tmp_path / "base")
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(tmp_path / "base/model.safetensors").items()}
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][5, 7] = value
    save_file(weights, tmp_path / "base/model.safetensors", {"format": "pt"})
    words = rf"{name} holds {said} at \[5, 7\]; of its 1,536 numbers 1 are not finite"
    with pytest.raises(Refusal, match=words):
        tk.load_model(CAUSAL, of_directory(tmp_path / "base", use_peft=False))
    with pytest.raises(Refusal, match=words):
        load_trained(CAUSAL, tk.ModelConfig(model=str(tmp_path / "base")), torch.device("cpu"))
    shutil.copytree(published / "adapter", tmp_path / "adapter")
    settings(base_model_name_or_path=str(tmp_path / "base"))(tmp_path / "adapter")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    with pytest.raises(Refusal, match=words):
        merge_adapter(tmp_path / "adapter", dataset=str(tmp_path / "rows.jsonl"))


def test_infinity_in_a_mask_is_meant_and_sums_that_overflow_are_finite() -> None:
    """Fails when: a tensor is refused for its sum, or a buffer for its infinity; or NaN in a buffer passes."""
    model = torch.nn.Linear(4, 3)
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    with torch.no_grad():
        model.weight.fill_(3e38)
    check_finite(model, "it")
    model.register_buffer("statistics", torch.tensor([1.0, math.nan]))
    with pytest.raises(Refusal, match=r"^it: .*buffer statistics .*NaN"):
        check_finite(model, "it")
