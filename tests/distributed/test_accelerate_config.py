"""The files of recipes/launch, and others, as Accelerate itself reads them.

Each test names the one-line change under which it fails.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.config import Refusal
from toolkit.distributed.accelerate_config import check_devices, read_accelerate_config

LAUNCH = Path(__file__).resolve().parents[2] / "recipes/launch"
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}  # fmt: skip
ZERO3 = {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}
CPU_OPTIMIZER = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
MEANT = {
    "cpu2": {"ACCELERATE_USE_CPU": "true"},
    "ddp": {},
    "multi_node": {},
    "zero1": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    "zero2": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": ZERO3,
    "zero2_offload": {**DEEPSPEED, **CPU_OPTIMIZER, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3_offload": {**ZERO3, **CPU_OPTIMIZER, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
    "fsdp2": {**FSDP2, "FSDP_OFFLOAD_PARAMS": "false"},
    "fsdp2_offload": {**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"},
}
# The settings of a run decide on these; a rank must not be given something else.
LEFT_TO_THE_SETTINGS = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING", "OMP_NUM_THREADS", "WORLD_SIZE")
# What `accelerate launch` tells its ranks, as one of them sees it.
SHOWS_ITS_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


@pytest.mark.parametrize("name", MEANT)
def test_a_file_tells_the_ranks_what_its_name_says(name: str) -> None:
    """Fails when: a key is misspelled, and Accelerate takes its default; or zero3 can't gather what is to be saved."""
    found = read_accelerate_config(str(LAUNCH / f"{name}.yaml"))
    engines = {key: value for key, value in found.environment.items() if key.startswith("ACCELERATE_USE_")}
    assert engines == {key: value for key, value in MEANT[name].items() if key.startswith("ACCELERATE_USE_")}
    assert MEANT[name].items() <= found.environment.items()
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not set(LEFT_TO_THE_SETTINGS) & found.environment.keys()
    assert (found.processes, found.machines) == (2 if name == "cpu2" else 8, 2 if name == "multi_node" else 1)


def test_every_file_is_read_here_and_says_when_to_choose_it_and_what_to_type() -> None:
    """Fails when: a file is added without its meaning above, or its command names another file."""
    assert {path.stem for path in LAUNCH.iterdir()} == MEANT.keys()
    for name in MEANT:
        comment = (LAUNCH / f"{name}.yaml").read_text().partition("compute_environment")[0]
        assert f"accelerate launch --config_file recipes/launch/{name}.yaml" in comment
        assert name == "cpu2" or "16 bytes a parameter" in comment
        assert name in ("cpu2", "ddp", "multi_node") or f"toolkit train sft --processes 2 --accelerate-config {name}\n" in comment


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3_offload", "fsdp2"])
def test_ranks_are_told_what_accelerate_launch_tells_them(name: str, tmp_path: Path) -> None:
    """Compared with a rank that `accelerate launch` started. Fails when: a variable that it sets is lost, such as FSDP_VERSION."""
    (tmp_path / "rank.py").write_text(SHOWS_ITS_ENVIRONMENT)
    path = str(LAUNCH / f"{name}.yaml")
    starter = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", path, "--num_processes", "1"]
    subprocess.run([*starter, str(tmp_path / "rank.py"), str(tmp_path)], capture_output=True, timeout=120, check=True)
    reported = json.loads((tmp_path / "0").read_text())
    ours = read_accelerate_config(path).environment

    def of_accelerate(environment: dict[str, str]) -> dict[str, str]:
        return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}

    assert of_accelerate(dict(ours)) == of_accelerate(reported)


def test_a_json_file_is_read_like_a_yaml_file(tmp_path: Path) -> None:
    """Fails when: only one of the two is read."""
    file = tmp_path / "mine.json"
    content = {"distributed_type": "FSDP", "num_processes": 6, "num_machines": 3, "machine_rank": 2, "main_process_ip": "10.0.0.7"}
    file.write_text(json.dumps({**content, "main_process_port": 1234, "fsdp_config": {"version": 2}}))
    found = read_accelerate_config(str(file))
    assert found.environment["FSDP_VERSION"] == "2"
    assert (found.processes, found.machines, found.machine_rank, found.main_address, found.main_port) == (2, 3, 2, "10.0.0.7", 1234)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1", "is not YAML"),
        ("just words", "not an Accelerate config file"),
        ("num_processes: 2", "`distributed_type` must be specified"),
        ("distributed_type: FOO\nnum_processes: 2", "FOO"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_proceses: 3", "num_proceses"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_sage: 3}", "zero_sage: .*zero_stage"),
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_versoin: 2}", "fsdp_versoin: .*fsdp_version"),
        ("distributed_type: XLA\nnum_processes: 2", "accelerate launch --config_file"),
        ("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 3", "must be a multiple"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    """Fails when: Accelerate's own exception reaches the user, or a misspelled key of a section counts as nothing."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(Refusal, match=f"(?s){file}.*{said}"):
        read_accelerate_config(str(file))


@pytest.mark.parametrize(
    ("gpus", "extra", "said"),
    [
        (0, "", "no GPU was found: --processes 2 "),
        (2, "", "2 GPUs found: type --processes 2"),
        (4, "", None),
        (8, "gpu_ids: 0,1,5", "3 GPUs found"),
        (0, "use_cpu: true", None),
    ],
)
def test_more_processes_than_gpus_are_refused_unless_the_file_means_the_cpu(
    gpus: int, extra: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: eight processes of a file share a laptop, or cpu2.yaml is refused there."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = tmp_path / "mine.yaml"
    file.write_text(f"distributed_type: MULTI_GPU\nnum_processes: 4\n{extra}\n")
    config = read_accelerate_config(str(file))
    if said is None:
        check_devices(config)
    else:
        with pytest.raises(Refusal, match=said):
            check_devices(config)
