"""Model directories of sharded runs: whole, what was trained, and brought together without a second copy anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.export.model_directory import BadModel, check_model_directory

RUN = str(Path(__file__).with_name("adapter_run.py"))
SHAPE = [
    "--vocab-size", "260", "--hidden-size", "32", "--num-hidden-layers", "2", "--num-attention-heads", "2",
    "--intermediate-size", "128", "--max-position-embeddings", "64",
]  # fmt: skip
LAYOUTS = {
    "ddp": [],
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ["--deepspeed", "ds_config.json"],  # every parameter sharded, also the small ones
    "fsdp2": ["--fsdp"],
}


def train(tiny: Any, layout: str, *flags: str, output_dir: str = "out", ranks: int = 2, code: int = 0) -> Any:
    """The main process of a finished run."""
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    (tiny.folder / "ds_config.json").write_text(json.dumps(config))
    more = {"output_dir": output_dir, "script": RUN}
    finished = tiny.ranks(ranks, *LAYOUTS[layout], *flags, **more) if ranks > 1 else [tiny(*flags, **more)]
    assert finished[0].code == code, "\n".join(each.out[-3000:] for each in finished)
    return finished[0]


def untied_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(settings).save_pretrained(folder)
    return folder


def assert_is_the_trained_model(finished: Any, tied: bool) -> None:
    """What from_pretrained reads is the checkpoint, bit for bit, and computes what the live model computed."""
    from transformers import AutoModelForCausalLM

    folder = finished.folder / "model"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    written, checkpoint = load_file(folder / "model.safetensors"), load_file(finished.folder / "checkpoints/step-4/model.safetensors")
    assert written.keys() == checkpoint.keys()
    assert ("lm_head.weight" in written) is not tied
    live = model.state_dict()
    for name, tensor in written.items():
        assert torch.equal(tensor.view(torch.int32), checkpoint[name].view(torch.int32)), name
        assert torch.equal(tensor, live[name]), name
        assert bool(torch.isfinite(tensor).all()), name
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(24).reshape(2, 12) * 7 % 260
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    expected = load_file(finished.folder / "live.safetensors")["logits"]
    assert torch.allclose(logits, expected, rtol=0, atol=1e-6)


def assert_held_once(finished: Any) -> None:
    """Beyond their shards: one full copy and the gathered tensors on the main process, those alone on the other.

    Two are alive while one follows the other. What else the process frees meanwhile is counted too: a few kilobytes.
    """
    sizes = [tensor.numel() * 4 for tensor in load_file(finished.folder / "model/model.safetensors").values()]
    main, other = (json.loads((finished.folder / f"memory-{rank}.json").read_text()) for rank in (0, 1))
    assert len(main) == len(other) == len(sizes) + 1
    assert 0.9 * (sum(sizes) - max(sizes)) <= max(main) <= sum(sizes) + 2 * max(sizes)
    assert max(other) <= 2 * max(sizes) < sum(sizes) / 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_directory_is_what_was_trained(tiny: Any, layout: str) -> None:
    """Two ranks, four steps; the tied head is stored once.

    Fails when: shards are written in the place of wholes; every rank keeps the whole; a tied weight is written twice.
    """
    finished = train(tiny, layout, *SHAPE)
    assert_is_the_trained_model(finished, tied=True)
    if layout in ("zero3", "fsdp2"):
        assert_held_once(finished)


@pytest.mark.slow
def test_an_untied_head_is_written_too_and_a_spoiled_save_leaves_the_old_model(tiny: Any) -> None:
    """A model of a directory. Then the run is continued at its end, and what it saves is spoiled: code 1, and why.

    Fails when: the head is taken for a tied one; what was written takes its place before it is read again.
    """
    base = untied_model(tiny.folder / "base")
    finished = train(tiny, "zero3", "--model", str(base))
    assert_is_the_trained_model(finished, tied=False)
    before = {path.name: path.read_bytes() for path in (finished.folder / "model").iterdir()}

    again = train(tiny, "zero3", "--model", str(base), "--resume", "--spoiled", "--allow-change", "spoiled", code=1)
    assert "not finite" in again.out
    assert "Traceback" not in again.out
    assert {path.name: path.read_bytes() for path in (finished.folder / "model").iterdir()} == before


def test_a_directory_that_does_not_hold_the_model_is_told(tmp_path: Path) -> None:
    """Fails when: one of the comparisons of check_model_directory is left out."""
    good = {"embedding": torch.ones(6, 4), "norm": torch.ones(4)}
    shapes = {name: tensor.shape for name, tensor in good.items()}

    def check(tensors: dict[str, torch.Tensor], trained: Any = ()) -> None:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        check_model_directory(tmp_path, shapes, trained)

    check(good)
    check({"renamed": good["embedding"], "norm": good["norm"]})  # libraries write some models under other names
    bad = {
        "norm .*\\[0\\], not \\[4\\]": {**good, "norm": torch.ones(0)},
        "renamed .*\\[0\\]\\.": {**good, "renamed": torch.ones(0)},
        "embedding .*\\[4, 6\\], not \\[6, 4\\]": {**good, "embedding": torch.ones(4, 6)},
        "embedding .*not finite": {**good, "embedding": torch.full((6, 4), torch.nan)},
        "norm .*not finite": {**good, "norm": torch.tensor([1, 2, torch.inf, 4])},
        "24 elements .*28": {"embedding": good["embedding"]},
        "52 elements .*28": {**good, "twice": good["embedding"]},
    }
    for message, tensors in bad.items():
        with pytest.raises(BadModel, match=message):
            check(tensors)

    (tmp_path / "adapter_config.json").write_text("{}")
    check({"norm": good["norm"]}, trained=["norm"])
    with pytest.raises(BadModel, match=r"4 elements .*24"):
        check({"norm": good["norm"]}, trained=["embedding"])


@pytest.mark.slow
def test_an_adapter_under_zero3_is_that_of_one_process_and_resumes_anywhere(tiny: Any) -> None:
    """LoRA: losses and tensors to 1e-5; the checkpoint holds what was trained and whose it is; resumed under ZeRO-3 bit for bit.

    Fails when: the identity of the frozen parameters, a collective, is worked out by one rank alone; frozen parameters are
    stored.
    """
    one, zero = train(tiny, "ddp", *SHAPE, "--lora", ranks=1, output_dir="one"), train(tiny, "zero3", *SHAPE, "--lora")
    assert len(zero.curve) == 4
    for metrics, expected in zip(zero.curve, one.curve, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)
    assert one.curve[0][1] != one.curve[3][1]

    written, expected = (load_file(each.folder / "model/adapter_model.safetensors") for each in (zero, one))
    assert (zero.folder / "model/adapter_config.json").read_bytes() == (one.folder / "model/adapter_config.json").read_bytes()
    assert_same_tensors(written, expected, 1e-5)
    assert {tuple(tensor.shape) for tensor in written.values()} == {(4, 32), (32, 4), (4, 128)}

    stored = load_file(zero.folder / "checkpoints/step-4/model.safetensors")
    assert {name.replace(".default.", ".") for name in stored} == written.keys()
    bases = [json.loads((each.folder / "checkpoints/step-4/state.json").read_text())["base"] for each in (zero, one)]
    assert bases[0] == bases[1]
    assert len(bases[0]["sha256"]) == 64

    half = ["--resume-from", str(zero.folder / "checkpoints/step-2")]
    resumed = train(tiny, "zero3", *SHAPE, "--lora", *half, output_dir="resumed")
    for name in ("model", "optimizer"):
        paths = [each.folder / f"checkpoints/step-4/{name}.safetensors" for each in (resumed, zero)]
        assert_same_tensors(load_file(paths[0]), load_file(paths[1]), 0.0)
    elsewhere = train(tiny, "ddp", *SHAPE, "--lora", *half, ranks=1, output_dir="elsewhere")
    assert_same_tensors(load_file(elsewhere.folder / "model/adapter_model.safetensors"), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_bf16_rounds_neither_the_model_that_is_saved_nor_an_adapter_out_of_its_place(tiny: Any, stage: str) -> None:
    """ZeRO computes with bfloat16 weights: float32 ones are written, and an adapter's checkpoint continues in one process.

    Fails when: the model directory has the live weights, or their dtype in its config.json; the base is recognized by float32 bits.
    """
    whole = train(tiny, stage, *SHAPE, "--bf16")
    written = load_file(whole.folder / "model/model.safetensors")
    assert json.loads((whole.folder / "model/config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert_same_tensors(written, load_file(whole.folder / "checkpoints/step-4/model.safetensors"), 0.0)

    adapter = train(tiny, stage, *SHAPE, "--bf16", "--lora", output_dir="adapter")
    half = ["--resume-from", str(adapter.folder / "checkpoints/step-2")]
    one = train(tiny, "ddp", *SHAPE, "--bf16", "--lora", *half, ranks=1, output_dir="one")
    found, expected = (load_file(each.folder / "model/adapter_model.safetensors") for each in (one, adapter))
    assert_same_tensors(found, expected, 1e-2)  # four AdamW steps of 1e-2 made them


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape
        assert torch.allclose(tensor, expected[name], rtol=0, atol=tolerance), name
