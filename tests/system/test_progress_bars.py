"""Bars of libraries stay out of logs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.system.console import keep_bars_out_of_logs

RECIPE = """
from dataclasses import dataclass
import toolkit as tk

@dataclass(frozen=True)
class Config(tk.OutputConfig):
    pass

def main(config: Config) -> None:
    from datasets import Dataset
    from huggingface_hub.utils import tqdm
    from transformers.utils import logging
    rows = Dataset.from_dict({"a": list(range(3000))})
    rows.select(range(0, 3000, 7)).flatten_indices().map(lambda row: row)
    for bar in (logging.tqdm(range(3), desc="Loading weights"), tqdm(range(2), desc="Fetching 2 files")):
        list(bar)
    try:
        from mlflow.store.artifact.artifact_repo import ArtifactProgressBar
    except ImportError:
        return
    with ArtifactProgressBar.files(desc="Downloading artifacts", total=3) as bar:
        bar.update()

if __name__ == "__main__":
    tk.run_recipe(main)
"""


def test_a_recipe_whose_output_goes_to_a_file_shows_no_librarys_bar(tmp_path: Path) -> None:
    """datasets', transformers', the Hub's and MLflow's. Fails when: run_recipe doesn't ask for it before they are imported."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    done = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "recipe.py: all settings" in done.stdout


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_a_terminal_keeps_them_and_so_does_who_asks_for_them(on_a_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the terminal isn't asked about, or the environment of the user is written over."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: on_a_terminal))
    environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    keep_bars_out_of_logs(environment)
    assert environment["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    assert ("TQDM_DISABLE" in environment) != on_a_terminal
