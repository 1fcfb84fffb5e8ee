"""toolkit export: a model directory of a checkpoint. Every recipe's is made in tests/recipes/test_promises.py."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from toolkit.checkpoint import load_checkpoint, save_checkpoint, write_pointer
from toolkit.system.digests import directory_digest

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--dataset", "rows.csv", "--eval-fraction", "0.3", "--hidden-size", "32", "--num-hidden-layers", "1", "--max-length", "32", "--vocab-size", "300",
    "--max-steps", "6", "--save-steps", "2", "--eval-steps", "2", "--save-total-limit", "none", "--learning-rate", "0.01", "--output-dir", "out",
]  # fmt: skip


def toolkit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "toolkit", *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps in out/, with checkpoints after two, four and six."""
    folder = tmp_path_factory.mktemp("export")
    rows = [f"the {i} {('good', 'bad')[i % 2]} thing,{('up', 'down')[i % 2]}" for i in range(60)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    done = toolkit(folder, "train", "accelerated", *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_newest_is_the_model_that_the_run_wrote_and_the_run_stays_as_it_was(folder: Path) -> None:
    """Fails when: the weights stay those that training began from, the tokenizer is left out, or the run is opened again."""
    before = directory_digest(folder / "out")
    done = toolkit(folder, "export", "out", "--into", "newest")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"Saved {folder / 'newest'}: the model after step 6"]
    assert directory_digest(folder / "out") == before
    written, exported = ({path.name: path for path in (folder / place).iterdir()} for place in ("out/model", "newest"))
    assert written.keys() == exported.keys()
    assert [name for name in written if written[name].read_bytes() != exported[name].read_bytes()] == ["README.md"]
    assert 'name = "newest"' in exported["README.md"].read_text()


@pytest.mark.parametrize("words", [("out", "--step", "2"), ("out/checkpoints/step-2",)])
def test_an_earlier_step_has_the_weights_and_the_metrics_of_its_checkpoint(folder: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Fails when: another checkpoint is taken, or the card has the metrics of the last step."""
    done = toolkit(folder, "export", *words, "--into", str(tmp_path / "second"))
    assert done.returncode == 0, done.stderr
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second")
    assert AutoTokenizer.from_pretrained(tmp_path / "second")("a good thing")["input_ids"]
    saved = load_file(folder / "out/checkpoints/step-2/model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    metrics = (folder / "out/metrics.jsonl").read_text().splitlines()
    losses = [line.split('"eval_loss": ')[1].split(",")[0] for line in metrics if '"eval_loss"' in line]
    card = (tmp_path / "second/README.md").read_text()
    assert [f"{float(loss):.6f}"[:6] in card for loss in losses[-3:]] == [True, False, False]


def test_the_best_is_the_one_that_the_run_points_to(folder: Path) -> None:
    """Fails when: it is the newest, or what is there is overwritten without being asked."""
    write_pointer(folder / "out/checkpoints", "best", folder / "out/checkpoints/step-4")
    done = toolkit(folder, "export", "out", "--best")
    assert done.returncode == 0, done.stderr
    exported = folder / "out/best_model/model.safetensors"
    assert exported.is_file()
    again = toolkit(folder, "export", "out", "--best")
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    exported.write_bytes(b"")
    assert toolkit(folder, "export", "out", "--best", "--overwrite").returncode == 0
    assert exported.stat().st_size
    best = load_file(folder / "out/checkpoints/step-4/model.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in load_file(exported).items())
    shutil.rmtree(folder / "out/best_model")


def test_what_a_recipe_saves_elsewhere_stays(folder: Path) -> None:
    """Fails when: a second model of the recipe is written again, with the weights that training began from."""
    recipe = (ROOT / "recipes/accelerated.py").read_text()
    saves = "        tk.save_model(accelerator, model, tokenizer, config.output_dir"
    (folder / "mine.py").write_text(recipe.replace(saves, f'        tk.save_model(accelerator, model, tokenizer, "elsewhere")\n{saves}'))
    assert toolkit(folder, "train", "mine.py", *FLAGS[:-1], "mine").returncode == 0
    before = directory_digest(folder / "elsewhere")
    done = toolkit(folder, "export", "mine")
    assert done.returncode == 0, done.stderr
    assert directory_digest(folder / "elsewhere") == before
    assert load_file(folder / "mine/model-step-6/model.safetensors").keys() == load_file(folder / "elsewhere/model/model.safetensors").keys()


def test_a_checkpoint_that_the_run_prunes_meanwhile_is_exported(folder: Path) -> None:
    """Fails when: it is read once the recipe has made its model, which takes as long as reading the data."""
    shutil.copytree(folder / "out", folder / "pruned")
    recipe = (ROOT / "recipes/accelerated.py").read_text()
    begins = "    accelerator = tk.build_accelerator(config)\n"
    assert begins in recipe
    prune = '    __import__("shutil").rmtree("pruned/checkpoints/step-6")\n'
    (folder / "pruning.py").write_text(recipe.replace(begins, prune + begins))
    done = toolkit(folder, "export", "pruned", "--recipe", "pruning.py")
    assert done.returncode == 0, done.stderr
    assert (folder / "pruned/model-step-6/model.safetensors").read_bytes() == (folder / "out/model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere"), (("rows.csv",), "rows.csv"), (("out", "--step", "3"), "2, 4, 6"), (("out", "--step", "2", "--best"), "--best"),
        (("out/checkpoints/step-2", "--best"), "one checkpoint"), (("out/checkpoints/step-9",), "step 9"), (("out/model",), "no checkpoint"),
        (("out", "--into", "rows.csv"), "--into"), (("out", "--recipe", "nowhere.py"), "nowhere.py"), (("bare",), "run.json"),
        (("out", "--recipe", str(ROOT / "recipes/token_classification.py")), ""),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_with_one_message(folder: Path, words: tuple[str, ...], said: str) -> None:
    """Fails when: --best of one checkpoint has no effect and no message."""
    if not (folder / "bare").exists():
        shutil.copytree(folder / "out/checkpoints", folder / "bare/checkpoints")
    done = toolkit(folder, "export", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_that_is_damaged_or_holds_no_numbers_leaves_no_model(folder: Path) -> None:
    """Fails when: what is read is not compared with its digests, or the model is not read again once it is written."""
    shutil.copytree(folder / "out", folder / "ill")
    weights = folder / "ill/checkpoints/step-2/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = toolkit(folder, "export", "ill", "--step", "2")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "damaged" in done.stderr
    state = load_checkpoint(folder / "ill/checkpoints/step-4")
    next(tensor for tensor in state.model.values() if tensor.is_floating_point()).fill_(math.nan)
    shutil.rmtree(folder / "ill/checkpoints/step-4")
    save_checkpoint(folder / "ill/checkpoints", 4, state)
    done = toolkit(folder, "export", "ill", "--step", "4")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "finite" in done.stderr
    assert not list((folder / "ill").glob("model-*"))
    shutil.rmtree(folder / "ill")


def test_metrics_that_cannot_be_read_are_named(folder: Path) -> None:
    """Fails when: export catches no OSError of the metrics for its card."""
    shutil.copytree(folder / "out", folder / "unreadable")
    (folder / "unreadable/metrics.jsonl").unlink()
    (folder / "unreadable/metrics.jsonl").mkdir()
    done = toolkit(folder, "export", "unreadable")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "unreadable/metrics.jsonl" in done.stderr
    assert not list((folder / "unreadable").glob("model-*"))


@pytest.mark.parametrize("into", ["out", ".", "out/checkpoints", "out/checkpoints/step-2", "out/checkpoints/step-4", "out/checkpoints/new"])
def test_no_export_takes_the_place_of_the_run(folder: Path, into: str) -> None:
    """Fails when: --overwrite replaces a directory that holds the checkpoint, or another checkpoint."""
    before = directory_digest(folder / "out")
    done = toolkit(folder, "export", "out", "--step", "2", "--into", into, "--overwrite")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "--into" in done.stderr
    assert directory_digest(folder / "out") == before


def test_commands_that_want_a_model_name_it_for_a_checkpoint(folder: Path) -> None:
    """Fails when: the refusal of a model without a tokenizer or weights names another command than export."""
    for words in (("generate", "out/checkpoints/step-2", "--prompt", "a"), ("train", "sft", "--model", "out/checkpoints/step-2", "--output-dir", "other")):
        done = toolkit(folder, *words)
        assert done.returncode == 2
        assert "toolkit export out/checkpoints/step-2" in done.stderr
