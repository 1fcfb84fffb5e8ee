"""Recipes started by the launchers people use, as two processes on the CPU."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.command_line.placement import Placement, what_is_started

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "60", "--max-eval-examples", "12", "--max-length", "32",
    "--max-steps", "3", "--logging-steps", "1", "--global-batch-size", "4", "--per-device-train-batch-size", "2", "--dropout", "0",
]  # fmt: skip
BIN = Path(sys.executable).parent
SHOWN_BY_TRAIN = what_is_started(Placement(processes=2), "recipe.py", []).partition("as would: ")[2]
LAUNCHERS = {
    "accelerate": [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "recipes/launch/cpu2.yaml")],
    "as toolkit train shows": [str(BIN / word) if word == "accelerate" else word for word in shlex.split(SHOWN_BY_TRAIN)[:-1]],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
    # adds --local-rank=N to each rank's arguments
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "-np", "2", sys.executable],
}
# Open MPI refuses root, and more ranks than cores, by default.
AS_IN_A_CONTAINER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_train_as_one_does(run_recipe, tmp_path: Path, launcher: str) -> None:
    """Losses and evaluation of one process, whoever starts two. Fails when: build_accelerator leaves Accelerate alone without a GPU,
    toolkit train shows a line with --cpu (one process), a rank of mpirun isn't given that it is one (two runs of one
    process), or `--local-rank 1` is refused."""
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip(f"{launcher} is not installed here; on Debian and Ubuntu: apt-get install openmpi-bin")
    one = run_recipe("accelerated", *SMALL)
    assert one.code == 0, one.err
    command = [*LAUNCHERS[launcher], str(ROOT / "recipes/accelerated.py"), *SMALL, "--output-dir", "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_LOG_LEVEL": "error"}
    environment |= AS_IN_A_CONTAINER
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "two/run.json").read_text())["layout"]["processes"] == 2
    two = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("eval_loss", 1e-5)):
        found, expected = ([event[name] for event in events if name in event] for events in (two, one.metrics))
        assert len(expected) > 0
        assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.py")))
def test_the_help_page_of_a_recipe_waits_for_no_heavy_import(recipe: str) -> None:
    """Fails when: the room of a name in the annotation of main imports torch at its top."""
    command = [sys.executable, "-X", "importtime", str(ROOT / f"recipes/{recipe}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "--learning-rate" in done.stdout
    assert loaded.isdisjoint({"torch", "transformers", "accelerate", "datasets", "numpy"})
