"""toolkit env: what a bug report needs is there, and nothing that is secret.

Each test names the one-line change under which it was seen to fail.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.system.environment import without_secrets

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "Qx7" * 11


def test_a_report_names_versions_hardware_and_settings_and_no_secret(tmp_path: Path) -> None:
    """Tokens are planted in the environment, in a variable that is shown, in Accelerate's config and in the login file.

    Fails when: all variables are shown, all keys of the config are, or values are shown as they are.
    """
    home = tmp_path / "home"
    cache = home / TOKEN / "huggingface"
    (cache / "accelerate").mkdir(parents=True)
    (cache / "token").write_text(TOKEN)
    (cache / "accelerate/default_config.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\nnum_processes: 2\nmain_process_ip: 10.9.8.7\nwandb_key: {TOKEN}\n"
        f"deepspeed_config: {{hub: 'https://me:{TOKEN}@hub', zero_stage: 2}}\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "HF_HOME": str(cache), "HF_TOKEN": TOKEN, "WANDB_API_KEY": TOKEN,
        "MY_PASSWORD": "swordfish", "OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    }  # fmt: skip
    done = [
        subprocess.run(
            [sys.executable, "-m", "toolkit", "env", *words], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120,
            check=True,
        ).stdout
        for words in ([], ["--json"])
    ]  # fmt: skip
    for output in done:
        for secret in (TOKEN, "swordfish", "10.9.8.7", "wJalrXUtnFEMI", str(home)):
            assert secret not in output
    report = json.loads(done[1])
    assert report["torch"]["version"] == torch.__version__
    assert report["packages"]["accelerate"] == importlib.metadata.version("accelerate")
    assert report["environment"]["OMP_NUM_THREADS"] == "1"
    assert report["environment"]["HF_HOME"] == "~/[removed]/huggingface"
    assert report["accelerate config"]["num_processes"] == "2"
    assert "'zero_stage': 2" in report["accelerate config"]["deepspeed_config"]
    assert {name for section in report.values() for name in section} <= {line.strip().split("  ")[0] for line in done[0].splitlines()}


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "a1" * 17, "sk-" + "b2" * 20, "ghp_" + "c3" * 18, "AKIA" + "ABCDEFGH12345678", "d" * 40, "github_pat_" + "e4" * 20],
    ids=["hub", "openai", "github", "aws", "wandb", "github-fine"],
)
def test_what_looks_like_a_token_is_taken_out_wherever_it_stands(secret: str) -> None:
    """Fails when: its kind is not in the pattern."""
    for text in (secret, f"https://user:{secret}@host/x", f"a {secret}, b", f"key={secret}"):
        assert secret not in without_secrets(text)
    assert without_secrets("cuda:0,1 expandable_segments:True") == "cuda:0,1 expandable_segments:True"


@pytest.mark.parametrize("own", [None, "300000"])
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(own: str | None) -> None:
    """Set before torch is loaded, which reads it once. Fails when: the import sets nothing, takes the user's value away, or loads torch."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | ({"GOMP_SPINCOUNT": own} if own else {})
    program = "import os, sys, toolkit; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert done.stdout.split() == [own or "10000", "False"]
