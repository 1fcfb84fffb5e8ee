"""toolkit profile: planted delays are found where they are, and named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.diagnostics.advice import first_change
from toolkit.diagnostics.profile import PHASES, Profile

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--max-eval-examples", "16", "--use-cpu"]


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "toolkit", "profile", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


DELAYS = {
    "data": ("    collate = partial(", "    collate = late(tk.collate_padded,"),
    "forward": ("loss_fn, rates", "late(loss_fn), rates"),
    "other": ("            rates = schedule", "            time.sleep(0.3)\n            rates = schedule"),
}
LATE = '''
import time

def late(function, *_, **settings):
    def delayed(*values):
        time.sleep(0.3)
        return function(*values, **settings)
    return delayed

@dataclass'''


@pytest.mark.slow
@pytest.mark.parametrize("phase", DELAYS)
def test_a_planted_delay_is_in_its_phase(phase: str, tmp_path: Path) -> None:
    """0.3 seconds in the collate function, in the loss or in the loop, of a recipe whose steps are much shorter.

    Fails when: the time between two batches goes to the data, or the parts do not add up to the step.
    """
    text = (ROOT / "recipes" / "accelerated.py").read_text()
    before, after = DELAYS[phase]
    assert before in text
    after = after if phase != "data" else "    collate = late(tk.collate_padded, "
    text = text.replace(before, after).replace("collate_padded, tk.collate_padded, ", "collate_padded, ").replace("\n@dataclass", LATE, 1)
    (tmp_path / "mine.py").write_text(text)
    found = run("mine.py", *SMALL, "--steps", "3", "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    profile = json.loads(found.stdout)
    assert profile["seconds"][phase] > 0.29
    assert max(profile["seconds"], key=profile["seconds"].get) == phase
    assert sum(profile["seconds"].values()) == pytest.approx(profile["step"])
    assert profile["operations"]
    if phase == "data":
        assert "--dataloader-num-workers 2" in profile["first"]
    assert not (tmp_path / "runs").exists()


def made(padding: float = 0.0, device: str = "mps", **shares: float) -> Profile:
    seconds = {phase: shares.get(phase, 0.0) for phase in PHASES}
    seconds["forward"] += 1 - sum(seconds.values())
    return Profile(device, seconds, 1.0, [], padding)


@pytest.mark.parametrize(
    ("profile", "settings", "said"),
    [
        (made(data=0.2), {"dataloader_num_workers": 0}, "--dataloader-num-workers 2"),
        (made(data=0.2), {"dataloader_num_workers": 4}, "--dataloader-num-workers 8"),
        (made(padding=0.4), {"packing": False}, "--packing"),
        (made(padding=0.4), {"packing": True}, "--group-by-length"),
        (made(optimizer=0.4), {}, "--global-batch-size"),
        (made(), {"gradient_checkpointing": True}, "--gradient-checkpointing"),
        (made(other=0.5), {}, "your loop"),
        (made(device="cuda"), {"bf16": True, "torch_compile": False}, "--torch-compile"),
        (made(), {}, "nothing stands out"),
    ],
)
def test_the_first_change_is_that_of_the_largest_loss(profile: Profile, settings: dict[str, object], said: str) -> None:
    """Fails when: a rule asks for a flag that is set, or is passed over."""
    assert said in first_change(profile, settings)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["accelerated", "--memory", "x.pickle"], "--memory"),
        (["accelerated", "--trace", "nowhere/x.json"], "nowhere"),
        (["accelerated", "--steps", "1"], "--steps"),
        (["nowhere"], "nowhere"),
        (["distill"], "--teacher"),
        (["accelerated", *SMALL, "--max-steps", "4", "--max-train-examples", "40"], "16 steps"),
    ],
)
def test_what_cannot_be_profiled_is_one_message(words: list[str], said: str) -> None:
    """Fails when: one of them shows a traceback."""
    found = run(*words)
    assert (found.returncode, said in found.stderr, "Traceback" in found.stderr) == (2, True, False), found.stderr
