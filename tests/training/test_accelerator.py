"""What build_accelerator settles for a process, in processes of their own where it is settled for good."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import toolkit as tk
from toolkit.command_line.reading import read_command_line
from toolkit.config import check_together
from toolkit.diagnostics.heap import find_heap
from toolkit.distributed.engines.engine import Engine
from toolkit.system.allocator import KERNELS, PRIMITIVES
from toolkit.system.devices import planned_for
from toolkit.training.resume import run_layout

pytestmark = pytest.mark.warm

ASKED = """
import json, os, sys, torch, toolkit as tk
tk.build_accelerator(tk.RunConfig(output_dir=sys.argv[1], use_cpu=True, full_determinism=sys.argv[2] == "True"))
names = ("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "FLASH_ATTENTION_DETERMINISTIC")
print(json.dumps([
    torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.cuda.is_initialized(), *map(os.environ.get, names),
]))
"""


@pytest.mark.parametrize("asked", [True, False])
def test_full_determinism_is_what_trainer_means_by_it_and_only_where_it_is_asked_for(asked, tmp_path):
    """Fails when: the setting isn't looked at, algorithms only warn, or CUDA has started before the environment is set."""
    made = subprocess.run([sys.executable, "-c", ASKED, str(tmp_path / "run"), str(asked)], capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stderr
    expected = [True, False, True, False, False, ":16:8", "1", "1"] if asked else [False, False, False, False, False, None, None, None]
    assert json.loads(made.stdout.splitlines()[-1]) == expected


def test_attention_of_padded_rows_is_not_that_which_plans_for_every_length(tmp_path):
    """Fails when: cuDNN's attention is left on."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    tk.build_accelerator(tk.RunConfig(output_dir=str(tmp_path / "run"), use_cpu=True))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(("name", "given", "kept"), [(PRIMITIVES, None, "48"), (PRIMITIVES, "1024", "1024"), (KERNELS, None, "16"), (KERNELS, "1024", "1024")])
def test_few_primitives_are_kept_on_a_cpu_where_the_environment_names_no_number(name, given, kept, tmp_path, monkeypatch):
    """Fails when: oneDNN or ideep keeps its own 1,024, or the user's number is replaced."""
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    tk.build_accelerator(tk.RunConfig(output_dir=str(tmp_path / "run"), use_cpu=True))
    assert os.environ[name] == kept


@pytest.mark.parametrize("gathers", [True, False])
def test_blocks_of_a_layers_size_are_the_systems_own_where_weights_are_gathered(gathers, tmp_path, monkeypatch):
    """Fails when: the engine isn't asked, or what it gathers lies in the heap, among activations."""
    heap = find_heap() or pytest.skip("not glibc")
    monkeypatch.setattr(Engine, "shards_weights", lambda *_: gathers)
    tk.build_accelerator(tk.RunConfig(output_dir=str(tmp_path / "run"), use_cpu=True))
    heap.restart()  # what is free there would be taken first
    before = heap._libc.mallinfo2().mapped
    heap.hold(0, 8 * 2**20)
    assert (heap._libc.mallinfo2().mapped > before) == gathers
    heap.clear()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN multiplies no bfloat16 there")
def test_products_of_ever_new_shapes_hold_no_more_memory(tmp_path):
    """The second five hundred shapes, in a process that begins cold. Fails when: one of the two caches is as it was (95 or 180 MB)."""
    words = f"""
        import ctypes, torch, toolkit as tk
        from toolkit.diagnostics.heap import find_heap
        tk.build_accelerator(tk.RunConfig(output_dir={str(tmp_path / "run")!r}, use_cpu=True))
        heap, sizes = find_heap(), []
        for rows in range(1, 1001):
            torch.mm(torch.zeros(rows, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16))
            sizes.append(heap._libc.mallinfo2().used)
        print((sizes[-1] - sizes[499]) / 2**20)
    """
    with_all_units = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    program = {"input": textwrap.dedent(words), "text": True, "env": with_all_units}
    done = subprocess.run([sys.executable, "-"], **program, capture_output=True, timeout=120, check=True)
    assert float(done.stdout.splitlines()[-1]) < 20


def test_full_determinism_is_refused_once_cuda_was_used_without_it(tmp_path, monkeypatch):
    """In a notebook, say: cuBLAS reads its setting once. That CUDA was started is no use yet: importing bitsandbytes does.

    Fails when: it isn't looked whether CUDA is in use, or whether it was started is asked alone.
    """
    from transformers import trainer_utils

    asked = []
    monkeypatch.setattr(trainer_utils, "enable_full_determinism", asked.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = tk.RunConfig(output_dir=str(tmp_path), use_cpu=True, full_determinism=True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"allocation.all.allocated": 1})
    with pytest.raises(tk.Refusal, match="--full-determinism: CUDA"):
        tk.build_accelerator(config)
    assert not asked
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"allocation.all.allocated": 0})
    tk.build_accelerator(config)
    assert asked == [config.seed]


SWEEP = """
import hashlib, json, sys
from dataclasses import replace
from pathlib import Path
import toolkit as tk
sys.path.insert(0, sys.argv[1])
import sft

base = sft.Config(
    use_cpu=True, hidden_size=32, num_hidden_layers=1, max_steps=3, max_train_examples=32, max_length=128,
    num_samples=0, eval_strategy="no", overwrite_output_dir=True,
)
for number, names in enumerate(sys.argv[2:]):
    try:
        sft.main(replace(base, output_dir=f"run{number}", **{name: True for name in names.split(",") if name}))
        print("RESULT", hashlib.sha256(Path(f"run{number}/model/model.safetensors").read_bytes()).hexdigest())
    except tk.Refusal as refusal:
        print("RESULT", refusal)
"""


def _results(root, folder, *runs):
    folder.mkdir()
    made = subprocess.run(
        [sys.executable, "-c", SWEEP, str(root / "recipes"), *runs], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert made.returncode == 0, made.stderr
    return [line.removeprefix("RESULT ") for line in made.stdout.splitlines() if line.startswith("RESULT ")]


def test_runs_of_other_precisions_in_one_process_are_those_of_processes_of_their_own(root, tmp_path):
    """Bit for bit, back to the first precision too. Fails when: Accelerate's state isn't reset between them (its ValueError)."""
    alone = [_results(root, tmp_path / "float32", "")[0], _results(root, tmp_path / "bf16", "bf16")[0]]
    assert alone[0] != alone[1]
    assert _results(root, tmp_path / "sweep", "", "bf16", "") == [*alone, alone[0]]


def test_a_run_after_a_sharded_one_is_refused_with_what_to_do(root, tmp_path):
    """Fails when: it isn't looked for, so that variables left by Accelerate are taken for a launcher's."""
    sharded, *later = _results(root, tmp_path / "sweep", "fsdp", "", "fsdp")
    assert len(sharded) == 64, sharded
    assert all("sharded by FSDP2" in each and "process of its own" in each for each in later)


def test_the_state_of_several_ranks_is_not_reset(monkeypatch):
    """Nor that of a run which needs the same. Fails when: another precision resets a process group's state, or the same one does."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from toolkit.distributed.engines.choice import EngineChoice
    from toolkit.distributed.engines.start import make_way

    process = {"device": torch.device("cpu"), "distributed_type": DistributedType.MULTI_CPU}
    monkeypatch.setattr(PartialState, "_shared_state", process)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {**process, "_mixed_precision": "no"})
    make_way(EngineChoice("plain"), on_cpu=True)
    assert AcceleratorState._shared_state
    with pytest.raises(tk.Refusal, match="another precision"):
        make_way(EngineChoice("plain", mixed_precision="bf16"), on_cpu=True)
    with pytest.raises(tk.Refusal, match="another device and another engine"):
        make_way(EngineChoice("fsdp"), on_cpu=False)
    assert AcceleratorState._shared_state
    PartialState._shared_state["distributed_type"] = DistributedType.NO
    make_way(EngineChoice("plain", mixed_precision="bf16"), on_cpu=True)
    assert not AcceleratorState._shared_state
    assert not PartialState._shared_state


@dataclass(frozen=True)
class Recipe(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    """A recipe's settings, with a default of its own that only another setting gives an effect."""

    adam_beta2: float = 0.95
    use_cpu: bool = True


@dataclass(frozen=True)
class Adapted(Recipe, tk.AdapterConfig):
    """Those of one with an adapter."""


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"bf16": True, "fp16": True}, "--bf16 and --fp16 are two precisions"),
        ({"optim": "sgd", "adam_beta1": 0.5}, "--adam-beta1 0.5 has no effect with --optim sgd"),
        ({"lr_cycles": 3}, "--lr-cycles 3 has no effect with --lr-scheduler-type cosine"),
        ({"warmup_steps": 1.5}, "--warmup-steps 1.5: must be a whole number"),
    ],
)
def test_settings_made_in_code_are_checked_by_the_rules_of_the_command_line(named, message, tmp_path, monkeypatch):
    """With the same message, where a run starts and not where the settings are made. Fails when: build_accelerator leaves
    check_together out, or gives it no names."""
    config = Recipe(output_dir=str(tmp_path / "run"), **named)
    with pytest.raises(tk.Refusal) as in_code:
        tk.build_accelerator(config)
    assert message in str(in_code.value)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in named.items()]
    typed = read_command_line(Recipe, ["--output-dir", str(tmp_path / "run"), *flags], {})
    with pytest.raises(tk.Refusal) as by_flags:
        check_together(typed)
    assert str(by_flags.value) == str(in_code.value)
    assert not (tmp_path / "run").exists()


def test_settings_at_their_defaults_are_not_given_and_a_group_works_alone(tmp_path):
    """A recipe's own default may be without effect, and so may one that is named. Fails when: every keyword counts as given, or a
    group is checked when it is made."""
    tk.OptimConfig(optim="sgd", adam_beta1=0.5, lr_cycles=3, warmup_steps=1.5)
    tk.build_accelerator(Recipe(output_dir=str(tmp_path / "run"), optim="sgd", adam_beta2=0.95, lr_cycles=1))


def test_settings_that_a_command_line_has_checked_are_not_checked_again(tmp_path):
    """What it didn't get is a default, of a container say. Fails when: build_accelerator checks what was `given` already."""
    config = Recipe(output_dir=str(tmp_path / "run"), lr_cycles=3)
    config = replace(config, given=())
    tk.build_accelerator(config)


def test_a_default_that_a_given_setting_would_overrule_on_a_command_line_is_refused_in_code(tmp_path):
    """Epochs next to a recipe's own number of steps. Fails when: what is implied isn't looked at: the epochs would be passed over."""

    @dataclass(frozen=True)
    class InSteps(Recipe):
        max_steps: int | None = 800

    with pytest.raises(tk.Refusal, match=r"num_train_epochs=2.0 .*max_steps=800.*max_steps=None"):
        tk.build_accelerator(InSteps(output_dir=str(tmp_path / "run"), num_train_epochs=2.0))
    tk.build_accelerator(InSteps(output_dir=str(tmp_path / "run"), num_train_epochs=2.0, max_steps=None))
    tk.build_accelerator(InSteps(output_dir=str(tmp_path / "run"), num_train_epochs=2.0, max_steps=10))


@pytest.mark.parametrize(
    ("named", "units", "precision"),
    [
        ({}, True, "bf16"), ({}, False, "no"), ({"bf16": False}, True, "no"), ({"bf16": True}, False, "bf16"),
        ({"dtype": "bfloat16"}, True, "no"), ({"dtype": "auto"}, True, "no"),
    ],
)  # fmt: skip
def test_where_nobody_names_a_precision_the_device_decides(named, units, precision, tmp_path, monkeypatch):
    """Over weights in float32 alone. Fails when: --no-bf16 is taken for nothing named, or weights in half precision are forgotten."""
    monkeypatch.setattr("toolkit.system.devices.multiplies_bf16", lambda device_type: units and device_type == "cpu")
    assert tk.build_accelerator(Recipe(output_dir=str(tmp_path / "run"), **named)).mixed_precision == precision


@pytest.mark.parametrize(("kind", "ampere", "precision"), [("cuda", True, "bf16"), ("cuda", False, "no"), ("mps", True, "no"), ("cpu", True, "no")])
def test_a_plan_computes_as_the_planned_device_would(kind, ampere, precision, tmp_path):
    """Fails when: the device that the plan is made on is asked."""
    with planned_for(kind, ampere):
        assert tk.build_accelerator(Recipe(output_dir=str(tmp_path / "run"))).mixed_precision == precision


@pytest.mark.parametrize(("named", "precision"), [({}, "no"), ({"bf16": True}, "bf16")])
def test_a_resumed_run_keeps_the_precision_that_it_has(named, precision, root, tmp_path, monkeypatch):
    """Of a checkpoint of 0.1.0, whose settings have what is in the layout today. Fails when: the device is asked first."""
    monkeypatch.setattr("toolkit.system.devices.multiplies_bf16", lambda _: True)
    checkpoint = root / "tests/faults/fixtures/schema-1-run"
    config = Recipe(output_dir=str(tmp_path / "run"), resume_from=str(checkpoint), **named)
    assert tk.build_accelerator(config).mixed_precision == precision


@pytest.mark.parametrize(
    ("named", "package"),
    [({"fp8": "rowwise"}, "torchao"), ({"optim": "lion_8bit"}, "bitsandbytes"), ({"load_in_4bit": True}, "bitsandbytes")],
)
def test_a_setting_whose_package_is_missing_is_refused_before_the_data_are_read(named, package, tmp_path, monkeypatch):
    """Fails when: its line of `packages_of_settings` is left out."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = read_command_line(Adapted, ["--output-dir", str(tmp_path / "run")], {})
    with pytest.raises(tk.Refusal, match=f"--{next(iter(named)).replace('_', '-')} .*pip install {package}"):
        tk.build_accelerator(replace(config, **named))


@pytest.mark.parametrize("named", ["", "checkpoints", "model"])
def test_a_run_in_the_place_of_its_checkpoint_is_refused_with_the_newest(named, root, tmp_path):
    """Before the data are read. Fails when: one of the folders is left out, or the first checkpoint is taken."""
    for step in (9, 10):
        shutil.copytree(root / "tests/faults/fixtures/schema-1-run", tmp_path / f"old/checkpoints/step-{step}")
    (tmp_path / "old/model").mkdir()
    config = Recipe(output_dir=str(tmp_path / "run"), resume_from=str(tmp_path / "old" / named))
    with pytest.raises(tk.Refusal, match=r"--resume-from .*old/checkpoints/step-10\?"):
        tk.build_accelerator(config)


@pytest.mark.parametrize("named", ["", "checkpoints", "missing"])
def test_a_folder_without_checkpoints_is_called_that(named, tmp_path):
    """Before the data are read. Fails when: it is left to be read, and is a damaged checkpoint."""
    (tmp_path / "old/checkpoints").mkdir(parents=True)
    config = Recipe(output_dir=str(tmp_path / "run"), resume_from=str(tmp_path / "old" / named))
    with pytest.raises(tk.Refusal, match=r"--resume-from .*/old.*: there is no checkpoint"):
        tk.build_accelerator(config)


def test_a_run_in_float16_is_continued_without_it_where_no_gpu_is(root, tmp_path, monkeypatch):
    """As its checkpoint says, and not refused as a flag that nobody gave. Fails when: it is handed on to the engine."""
    monkeypatch.setattr("toolkit.training.resume._precision_of", lambda _: "fp16")
    config = Recipe(output_dir=str(tmp_path / "run"), resume_from=str(root / "tests/faults/fixtures/schema-1-run"))
    assert tk.build_accelerator(config).mixed_precision == "no"


def test_a_run_in_bfloat16_is_resumed_in_it_bit_for_bit_and_another_precision_is_said(tiny):
    """Here nothing but the checkpoint says bfloat16. Fails when: `precision_to_resume` isn't asked, or the layout lacks the precision."""
    flags = ["--max-steps", "8"]
    whole = tiny(*flags, "--bf16", output_dir="whole")
    begun = tiny(*flags, "--bf16", "--stop-at-step", "4")
    shutil.copytree(begun.folder, begun.folder.parent / "other")
    resumed = tiny(*flags, "--resume")
    assert resumed.result["weights"] == whole.result["weights"]
    assert "rounding" not in resumed.out
    other = tiny(*flags, "--resume", "--no-bf16", output_dir="other")
    assert re.search(r"precision .*\bbf16 .*\bno\b", other.out)


@pytest.mark.parametrize(("bf16", "units", "noted"), [(True, True, {True}), (True, False, {False}), (False, True, set())])
def test_a_checkpoint_of_a_run_in_bfloat16_says_whether_its_device_has_units_for_it(bf16, units, noted, tmp_path, monkeypatch):
    """By which another CPU's rounding is said at a resume. Fails when: it is left out, or said of a run in float32."""
    accelerator = tk.build_accelerator(Recipe(output_dir=str(tmp_path / "run"), bf16=bf16))
    monkeypatch.setattr("toolkit.training.resume.has_bf16_units", lambda _: units)
    layout = run_layout(accelerator, SimpleNamespace(micro_batch_size=1, global_batch_size=1))
    assert {layout[name] for name in layout if name == "bf16_units"} == noted


def test_ranks_whose_devices_differ_in_this_are_refused(tmp_path, monkeypatch):
    """Fails when: each rank decides for itself. The other rank, which has no units, is made up."""
    monkeypatch.setattr("toolkit.system.devices.multiplies_bf16", lambda _: True)
    monkeypatch.setattr("toolkit.distributed.ranks.largest", lambda _, number: max(number, 0))
    with pytest.raises(tk.Refusal, match="--bf16 or --no-bf16"):
        tk.build_accelerator(Recipe(output_dir=str(tmp_path / "run")))
