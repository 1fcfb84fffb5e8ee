"""No token leaves its place: not into a file of the run, its trackers' among them, not into what the Hub receives, but for the header that is meant for it."""

import os
import subprocess
from pathlib import Path
from typing import Any

PLANTED = {
    "HF_TOKEN": "hf_write_planted_0f1e2d", "WANDB_API_KEY": "wandb_planted_5c4b3a", "login file": "hf_login_planted_99aa",
    "git": "ghp_git_planted_77bb", "AWS_SECRET_ACCESS_KEY": "aws_planted_33cc", "of a recipe": "sk_planted_11dd",
}  # fmt: skip


def test_no_planted_token_is_in_a_file_of_the_run_or_in_what_the_hub_receives(run_sft: Any, push: Any, hub: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """With checkpoints on the Hub, a Hub that fails in between, and a push. Fails when: a file of the run holds the environment,
    the address of a git remote or the text of an error with its headers, or config.yaml and state.json go up whole."""
    hub.tokens[PLANTED["HF_TOKEN"]] = ("alice", "write")
    home = tmp_path / "home"
    (home / "huggingface").mkdir(parents=True)
    (home / "huggingface/token").write_text(PLANTED["login file"])
    (home / ".gitconfig").write_text(f"[url \"https://u:{PLANTED['git']}@example.com/\"]\n  insteadOf = https://example.com/\n[user]\n  name = {PLANTED['git']}\n")
    git = {**os.environ, "HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (["init", "-q"], ["remote", "add", "origin", f"https://u:{PLANTED['git']}@example.com/r.git"]):
        subprocess.run(["git", *command], cwd=tmp_path, env=git, check=True)
    recipe = Path(__file__).resolve().parents[2] / "recipes/sft.py"
    copied = tmp_path / "mine.py"
    text = recipe.read_text().replace(
        '    output_dir: str = "runs/sft"\n', f'    output_dir: str = "runs/sft"\n    api_key: str = tk.setting("{PLANTED["of a recipe"]}", "Of a service.")\n'
    )
    copied.write_text(text.replace("runs/sft", "runs/mine"))
    secrets = {name: PLANTED[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}
    env = {**secrets, "HOME": str(home), "HF_HOME": str(home / "huggingface"), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    hub.fail("POST", "/commit/", 500, times=1)
    hub.fail("POST", "/preupload/", 403, times=1)
    code, out = run_sft("--push-to-hub", "--hub-model-id", "model", "--hub-strategy", "checkpoint", "--eval-strategy", "epoch", "--report-to", "wandb,tensorboard,trackio,mlflow", env=env, recipe=str(copied.with_suffix("")))
    assert code == 0, out
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, said = push("out")
    assert code == 0, said
    assert hub.files("alice/model")
    config = (tmp_path / "out/config.yaml").read_text()
    assert PLANTED["of a recipe"] in config  # what a recipe's author calls a setting is one, and this file repeats the run
    written = [path for folder in ("out", "trackio") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    files = {str(path): path.read_bytes() for path in written if path != tmp_path / "out/config.yaml"}
    assert len(files) > 15
    assert {"wandb", "mlflow", "toolkit"} <= {path.name for path in (tmp_path / "out/trackers").iterdir()}
    received = {f"{method} {path}": f"{path} {headers}".encode() + body for method, path, headers, body in hub.requests}
    stored = {f"on the Hub: {name}": content for name, content in hub.files("alice/model").items()}
    shown = {"printed": (out + said).replace(f"api_key = {PLANTED['of a recipe']}", "").encode()}
    for where, content in {**files, **received, **stored, **shown}.items():
        for name, secret in PLANTED.items():
            assert secret.encode() not in content, f"{name} in {where}"
