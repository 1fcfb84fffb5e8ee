"""What an engine would make wrong is refused before anything starts, with the reason."""

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

import toolkit as tk
from toolkit.config import Refusal
from toolkit.distributed.engines.choice import EngineChoice, FsdpChoice, choose_engine
from toolkit.distributed.engines.deepspeed_config import check_known_keys
from toolkit.distributed.engines.start import _UNSHARDED_ONLY, check_engine, settled_apart


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    pass


PLAIN = EngineChoice("plain")
ZERO, FSDP = EngineChoice("zero", zero_stage=3), EngineChoice("fsdp", fsdp=FsdpChoice())


@pytest.mark.parametrize(("optim", "reason"), _UNSHARDED_ONLY.items())
def test_an_optimizer_that_shards_would_make_wrong_is_refused_with_its_reason(optim: str, reason: str) -> None:
    """Fails when: check_engine looks at ZeRO alone, or refuses without an engine that shards."""
    config = Config(optim=optim)
    for choice, name in ((ZERO, "ZeRO-3"), (replace(ZERO, zero_stage=1), "ZeRO-1"), (FSDP, "FSDP2")):
        with pytest.raises(Refusal) as refusal:
            check_engine(choice, config)
        assert str(refusal.value).startswith(f"--optim {optim} with {name}: {reason}. ")
        assert "--optim adamw_torch" in str(refusal.value)
    check_engine(PLAIN, config)


def test_every_optimizer_is_either_refused_or_trains_on_shards() -> None:
    """The others are those of tests/devices/test_optimizers.py. Fails when: an optimizer is added and shards it unproven."""
    proven = {"adamw_torch", "adamw_torch_fused", "sgd", "nadam", "radam", "rmsprop", "muon"}
    assert proven | set(_UNSHARDED_ONLY) == set(tk.OptimConfig.__dataclass_fields__["optim"].metadata["choices"])
    assert proven.isdisjoint(_UNSHARDED_ONLY)


@pytest.mark.parametrize("in_code", [False, True])
def test_a_missing_deepspeed_is_told_with_an_instead_only_where_there_is_one(in_code: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a recipe's own DeepSpeedPlugin --fsdp is refused. Fails when: it is advised there too."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find_spec(name))
    with pytest.raises(Refusal) as refused:
        check_engine(ZERO, Config(), in_code=in_code)
    assert re.match(r"ZeRO-3 .*pip install deepspeed\b", str(refused.value))
    assert ("--fsdp" in str(refused.value)) == (not in_code)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_half_precision_are_refused_by_zero_alone(dtype: str) -> None:
    """DeepSpeed would make float32 weights of them. Fails when: bf16's mixed precision is not let through."""
    config = Config(dtype=dtype)
    with pytest.raises(Refusal, match=f"--dtype {dtype} with ZeRO-3: .*--bf16 .*--dtype float32"):
        check_engine(ZERO, config)
    check_engine(replace(ZERO, mixed_precision="bf16"), config)
    check_engine(FSDP, config)
    check_engine(PLAIN, config)


@pytest.mark.slow
def test_a_refused_run_ends_with_code_2_on_every_rank_before_it_has_a_directory(tiny: Any) -> None:
    """Fails when: build_accelerator does not ask check_engine, or asks it after the engine has started."""
    ranks = tiny.ranks(2, "--optim", "adagrad", "--fsdp")
    assert [rank.code for rank in ranks] == [2, 2], ranks[0].out[-3000:]
    assert "--optim adagrad with FSDP2" in ranks[0].out
    assert "Traceback" not in ranks[0].out
    assert not ranks[0].folder.exists()


@pytest.mark.parametrize(("written", "said"), [
    ({"gradient_cliping": 1.0, "zero_optimization": {"stage": 2}}, r" gradient_cliping .*gradient_clipping\?"),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_sise": 1}}, r" zero_optimization\.reduce_bucket_sise .*reduce_bucket_size\?"),
])  # fmt: skip
def test_a_misspelled_key_of_a_deepspeed_file_is_refused_with_the_nearest(written: dict[str, Any], said: str) -> None:
    """Fails when: `check_known_keys` looks at the top level alone, or at zero_optimization alone."""
    with pytest.raises(Refusal, match=said):
        check_known_keys(written)


def test_every_key_that_the_choice_itself_writes_is_known() -> None:
    """Fails when: a key of `deepspeed_config` is missing from _KNOWN_KEYS."""
    for settings in (tk.RunConfig(zero_stage=2, bf16=True), tk.RunConfig(zero_stage=3, offload="parameters")):
        check_known_keys(choose_engine(settings, {}).deepspeed or {})


def test_a_second_accelerator_of_a_process_reads_the_launcher_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the choice has read is away while Accelerate starts, and back afterwards.

    Fails when: the variables are popped for good.
    """
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with settled_apart():
        assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_USE_CPU" not in os.environ


def accelerator_of(plugin: str, value: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(**{plugin: value}))


@pytest.mark.parametrize(("settings", "label"), [
    ({"zero_stage": 3, "bf16": True}, "ZeRO-3"), ({"zero_stage": 2, "offload": "optimizer"}, "ZeRO-2, optimizer on the CPU"),
    ({"zero_stage": 3, "offload": "parameters"}, "ZeRO-3, parameters on the CPU"),
])  # fmt: skip
def test_an_engine_is_recorded_without_the_precision(settings: dict[str, Any], label: str) -> None:
    """That is a setting of its own, which a resume compares. Fails when: it is in both, or an offload is left out."""
    from toolkit.distributed.engines.zero import ENGINE

    plugin = SimpleNamespace(deepspeed_config=choose_engine(Config(**settings), {}).deepspeed)
    assert ENGINE.label(accelerator_of("deepspeed_plugin", plugin)) == label


def test_a_shard_on_the_cpu_is_recorded_and_weights_are_sharded_by_zero_3_and_fsdp_alone() -> None:
    """Fails when: FSDP2's offload is left out of its label, or stage 2 shards weights."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    from toolkit.distributed.engines import fsdp, plain, zero

    for offload, label in ((CPUOffloadPolicy(), "FSDP2, parameters on the CPU"), (None, "FSDP2")):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
        accelerator = accelerator_of("fsdp_plugin", plugin)
        assert fsdp.ENGINE.label(accelerator) == label
        assert fsdp.ENGINE.shards_weights(accelerator)
    stages = [zero.ENGINE.shards_weights(accelerator_of("deepspeed_plugin", SimpleNamespace(zero_stage=n))) for n in (1, 2, 3)]
    assert stages == [False, False, True]
    assert not plain.ENGINE.shards_weights(accelerator)
