"""Imports without garbage collections: what is left out of later ones, and what is not.

Each test names the one-line change under which it was seen to fail.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from toolkit.system.imports import MODULES_OF_A_LIBRARY, imported_to_stay

ROOT = Path(__file__).resolve().parents[2]
A_RUN = """
import gc, sys
import toolkit as tk
config = tk.RunConfig(use_cpu=True, output_dir=sys.argv[1])
begun = sum(each["collections"] for each in gc.get_stats())
tk.build_accelerator(config)
tk.load_splits(tk.DataConfig(dataset=sys.argv[3], eval_fraction=0.0))
tokenizer = tk.load_tokenizer(tk.ModelConfig(tokenizer=sys.argv[2]))
tk.load_model("AutoModelForCausalLM", tk.ModelConfig(), tokenizer)
print(sum(each["collections"] for each in gc.get_stats()) - begun, gc.get_freeze_count(), gc.isenabled())
tk.load_model("AutoModelForCausalLM", tk.ModelConfig(), tokenizer)
print(gc.get_freeze_count())
"""


@pytest.mark.parametrize(("modules", "stays"), [(MODULES_OF_A_LIBRARY, False), (MODULES_OF_A_LIBRARY + 1, True)])
def test_only_a_large_library_leaves_what_is_alive_out_of_later_collections(
    monkeypatch: pytest.MonkeyPatch, modules: int, stays: bool
) -> None:
    """Fails when: it freezes without a look at the modules, or none is left out."""
    before = gc.get_freeze_count()
    try:
        with imported_to_stay():
            assert not gc.isenabled()
            for number in range(modules):
                monkeypatch.setitem(sys.modules, f"a_library_{number}", ModuleType("part"))
        assert (gc.get_freeze_count() > before) == stays
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_before_after_an_error_too(is_on: bool) -> None:
    """Fails when: it is turned on whatever it was, or not in a `finally`."""
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), imported_to_stay():
            raise KeyError
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_the_start_of_a_run_collects_seldom_and_its_models_can_be_collected(tmp_path: Path) -> None:
    """Without it there are some 1,200 collections.

    Fails when: `build_accelerator`, `load_splits`, `load_tokenizer`, `load_model` or the package's `__getattr__` does without it.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    command = [sys.executable, "-c", A_RUN, *(str(tmp_path / name) for name in ("run", "tokenizer", "rows.jsonl"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    collections, left_out, is_on = first.split()
    assert int(collections) < 100
    assert int(left_out) > 300_000
    assert is_on == "True"
    assert second == left_out
