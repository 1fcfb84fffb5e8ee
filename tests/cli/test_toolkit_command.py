"""The `toolkit` command, in processes of its own where its exit code and its children matter.

Each test names the one-line change under which it fails.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from toolkit import checkpoint as ckpt
from toolkit.cli import main as cli
from toolkit.cli.main import app
from toolkit.cli.verify_resume import _with_defaults
from toolkit.config.no_effect import NO_EFFECT
from toolkit.config.setting import flag_of

pytestmark = pytest.mark.warm
COLD = sys.executable  # for tests of what is imported

ROOT = Path(__file__).resolve().parents[2]
# Shows how it was called, and ends as its --end says.
SHOWS_ITS_CALL = """
import os, sys
os.write(1, f'{os.environ.get("RANK", "-")} {sys.argv[1:]}\\n'.encode())  # at once: lines of two ranks don't mix
end = int(sys.argv[-1]) if "--end" in sys.argv else 0
sys.exit(end)
"""
# Trains three numbers with momentum, and forgets the momentum when it resumes.
FORGETS_ITS_MOMENTUM = """
import json, pathlib, sys, time
import torch
from toolkit import checkpoint as ckpt
words = [word for word in sys.argv[1:] if word != "--resume"]
flags = dict(zip(words[::2], words[1::2]))
output_dir = pathlib.Path(flags["--output-dir"])
output_dir.mkdir(exist_ok=True)
(output_dir / "config.yaml").write_text(f"save_strategy: steps\\nsave_steps: {flags['--save-steps']}\\n")
metrics, root = output_dir / "metrics.jsonl", output_dir / "checkpoints"
weight, momentum, done = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), 0
if "--resume" in sys.argv:
    state = ckpt.load_checkpoint(ckpt.latest_checkpoint(root))
    weight, done = state.model["weight"], state.run["step"]
    metrics.write_text("".join(metrics.read_text().splitlines(True)[:done]))
for step in range(done + 1, int(flags["--max-steps"]) + 1):
    with open(metrics, "a") as file:
        file.write(json.dumps({"step": step, "loss": (weight ** 2).sum().item()}) + "\\n")
    momentum = 0.5 * momentum + weight
    weight = weight - 0.125 * momentum
    if step % int(flags["--save-steps"]) == 0:
        ckpt.save_checkpoint(root, step, ckpt.State({"weight": weight}, {"momentum": momentum}, [["weight"]], {"step": step}))
    time.sleep(0.5 if step == 5 else 0.05)  # it is killed there: with a warm Python a little later than the process that is waited for
"""
SMALL = ["--hidden-size", "32", "--num-hidden-layers", "2", "--max-length", "64", "--vocab-size", "300"]


def toolkit(*words: str, cwd: Path = ROOT, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=environment, check=False)


def in_process(*words: object) -> tuple[int, str]:
    """Exit code and output of a command that needs no process of its own."""
    result = CliRunner().invoke(app, [str(word) for word in words], prog_name="toolkit")
    return result.exit_code, result.output


def test_a_command_without_memory_ends_with_one_message_and_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bug keeps its traceback. Fails when: `main` lets it through, or catches all errors."""
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)
    for error in (MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), RuntimeError("CUDA out of memory. Tried 2 GiB")):
        monkeypatch.setattr(cli, "app", Mock(side_effect=error))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        assert re.fullmatch(r"out of memory: .+\n", capsys.readouterr().err)
    monkeypatch.setattr(cli, "app", Mock(side_effect=OSError(errno.ENOENT, os.strerror(errno.ENOENT))))
    with pytest.raises(FileNotFoundError):
        cli.main()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes/mine.py"
    path.write_text(SHOWS_ITS_CALL)
    return path


def test_help_loads_no_heavy_library() -> None:
    """Fails when: a command imports torch, or draws its help with Rich, before it is called."""
    listing = "import sys, toolkit.cli.main; print(*{'torch', 'rich', 'accelerate', 'transformers', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([COLD, "-c", listing], capture_output=True, text=True, cwd=ROOT, timeout=30, check=True)
    assert loaded.stdout.split() == []
    shown = toolkit("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("train", "checkpoints", "verify-resume"))


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        (["mine"], []),
        (["recipes/mine.py", "--end", "75"], ["--end", "75"]),
        (["mine", "--report-to", "a,b", "--x=1 2", "-y", "--", "--no_packing", "--end", "3"], None),
    ],
)
def test_train_gives_the_recipe_its_flags_unchanged_and_hands_its_code_on(recipe: Path, words: list[str], passed_on: list[str] | None) -> None:
    """Fails when: Typer reads the recipe's flags, or the code of the child is lost."""
    expected = words[1:] if passed_on is None else passed_on
    ran = toolkit("train", *words, cwd=recipe.parents[1])
    assert ran.returncode == (int(expected[-1]) if expected else 0)
    assert ran.stdout == f"- {expected}\n"
    assert ran.stderr.startswith("starting: python recipes/mine.py")


@pytest.mark.parametrize("words", [["--processes", "2", "mine", "--a", "1"], ["mine", "--a", "--processes=2", "1"], ["mine", "--a", "1", "--processes", "2"]])
def test_the_number_of_processes_may_stand_before_or_among_the_recipes_flags(recipe: Path, words: list[str]) -> None:
    """Fails when: --processes is read only before the recipe's name, and reaches the recipe as an unknown flag."""
    ran = toolkit("train", *words, cwd=recipe.parents[1])
    assert ran.returncode == 0
    assert sorted(ran.stdout.splitlines()) == ["0 ['--a', '1']", "1 ['--a', '1']"]
    line = "starting 2 processes, as would: accelerate launch --multi_gpu --mixed_precision no --dynamo_backend no --num_processes 2"
    assert ran.stderr.startswith(f"{line} --num_machines 1 recipes/mine.py --a 1\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "stf"], "Did you mean sft?"),
        (["train", "recipes/stf.py"], "recipes/sft.py"),
        (["train", "qqq"], "pretrain"),
        (["train", "sft", "--processes", "none"], "--processes"),
        (["train", "sft", "--processes", "0"], "--processes"),
        (["train", "sft", "--processes"], "a value must follow"),
        (["train", "sft", "--accelerate-config", "zreo2"], "Did you mean zero2?"),
        (["train", "sft", "--accelerate-config", "qqq"], "fsdp2"),
        (["train", "sft", "--accelerate-config", "launch/zero3.yml"], "recipes/launch/zero3.yaml"),
        (["train", "--procesess", "2", "sft"], "No such option"),
        (["verify-resume", "stf"], "Did you mean sft?"),
        (["verify-resume", "sft", "--output-dir", "here"], "temporary directories"),
        (["checkpoints", "toolkit"], "no checkpoint"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_code_2(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: an unknown recipe is handed to Python, whose code for a file that is missing says nothing."""
    monkeypatch.chdir(ROOT)
    code, output = in_process(*words)
    assert code == 2
    assert said in " ".join(output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train chats.jsonl", "Did you mean `toolkit train sft --dataset chats.jsonl`?"),
        ("train texts.csv --max-steps 3", "Did you mean `toolkit train sft --dataset texts.csv`?"),
        ("train qwen_dpo.yaml", "Did you mean `toolkit train dpo --config qwen_dpo.yaml`?"),
        ("train named.yml", "Did you mean `toolkit train kto --config named.yml`?"),
        ("train settings.yaml", "Did you mean `toolkit train RECIPE --config settings.yaml`?"),
        ("train notes", "notes: is not a Python file."),
        ("verify-resume chats.jsonl", "Did you mean `toolkit verify-resume sft --dataset chats.jsonl`?"),
        ("sagemaker simulate chats.jsonl", "chats.jsonl: is not a Python file."),
        ("sft", "No such command 'sft'. Did you mean `toolkit train sft`?"),
        ("trian", "Did you mean 'train'?"),
    ],
)
def test_what_was_forgotten_is_suggested_and_nothing_is_run(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: any file is taken for a recipe, or a word that is no command is compared with commands only."""
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "texts.csv", "qwen_dpo.yaml", "settings.yaml", "notes"):
        (tmp_path / name).write_text("open('ran', 'w')\n")
    (tmp_path / "named.yml").write_text("# toolkit train recipes/kto.py --config named.yml\nseed: 1\n")
    code, output = in_process(*words.split())
    assert (code, (tmp_path / "ran").exists()) == (2, False)
    assert said in " ".join(output.split())


@pytest.mark.parametrize(
    ("end", "word", "meant"),
    [(2, "--proceses", "--processes"), (2, "--acelerate_config=zero2", "--accelerate-config"), (2, "--max-steps", ""), (0, "--proceses", "")],
)
def test_a_mistyped_option_of_train_is_told_once_the_recipe_has_refused_it(recipe: Path, end: int, word: str, meant: str) -> None:
    """Fails when: nobody looks for it among the recipe's flags, or whether the recipe knew it doesn't matter."""
    ran = toolkit("train", "mine", word, "2", "--end", str(end), cwd=recipe.parents[1])
    assert ran.returncode == end
    offered = [re.findall(r"--\w[\w-]+|`.*?`", line) for line in ran.stderr.splitlines()[1:]]
    assert offered == ([[word.partition("=")[0], meant, "`toolkit train`"]] if meant else [])


def test_help_after_a_recipe_is_the_recipes_own_and_names_the_options_of_train() -> None:
    """Fails when: Typer takes --help wherever it is, or the last lines are left out."""
    shown = toolkit("train", "sft", "--help")
    assert shown.returncode == 0
    assert {"--processes", "--accelerate-config", "--nodes", "--node-rank", "--learning-rate"} <= set(re.findall(r"--[\w-]+", shown.stdout))
    assert shown.stderr == ""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An output directory with checkpoints 2, 4 and 10; 4 is the best, 10 the last."""
    root = tmp_path / "run/checkpoints"
    for step in (2, 4, 10):
        state = ckpt.State({"weight": torch.full((1000,), float(step))}, {}, [["weight"]], {"step": step})
        ckpt.save_checkpoint(root, step, state)
    ckpt.write_pointer(root, "best", root / "step-4")
    ckpt.write_pointer(root, "last", root / "step-10")
    return tmp_path / "run"


def rows(output: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [re.split("  +", line.strip()) for line in output.splitlines()]
    return [cells for cells in lines if cells[0].isdecimal()]


@pytest.mark.parametrize("folder", [".", "checkpoints"])
def test_checkpoints_are_listed_in_order_with_the_best_and_the_last(saved: Path, folder: str) -> None:
    """Fails when: they are sorted as texts (10 before 2), or only one of the two directories is understood."""
    code, output = in_process("checkpoints", saved / folder)
    assert code == 0
    assert [(step, *marks) for step, _, *marks in rows(output)] == [("2", "whole"), ("4", "whole", "best"), ("10", "whole", "last")]


def test_checkpoints_are_listed_and_verified_without_the_heavy_libraries(saved: Path) -> None:
    """Listing takes the time of a help page. Fails when: a file of toolkit/checkpoint that it needs imports torch."""
    script = "import sys\nfrom toolkit.cli.main import main\ntry:\n    main()\nexcept SystemExit as end:\n    print(end.code or 0, sorted({'torch', 'numpy', 'safetensors', 'rich'} & sys.modules.keys()))"
    command = [COLD, "-c", script, "checkpoints", str(saved), "--verify"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert len(rows(ran.stdout)) == 3
    assert ran.stdout.splitlines()[-1] == "0 []"


def test_damage_is_named_and_ends_with_1(saved: Path) -> None:
    """A changed byte is seen with --verify only, a short file always. Fails when: the code does not say what the table says."""
    file = saved / "checkpoints/step-4/model.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    assert in_process("checkpoints", saved)[0] == 0
    code, output = in_process("checkpoints", saved, "--verify")
    assert code == 1
    assert [row[2].partition(":")[0] for row in rows(output)] == ["whole", "model.safetensors", "whole"]
    assert "SHA-256" in rows(output)[1][2]
    file.write_bytes(contents[:-1])
    code, output = in_process("checkpoints", saved)
    assert code == 1
    assert rows(output)[1][2].startswith("model.safetensors: ")


def test_verify_resume_finds_the_first_step_and_the_tensor_of_a_recipe_that_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is that of a plain loop with and without its momentum. Fails when: only the weights at the end of the
    first life are compared, or the run is not killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "toy.py").write_text(FORGETS_ITS_MOMENTUM)

    def loss_at(last: int, forgets_after: int | None) -> float:
        weight, momentum = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
        for step in range(1, last):
            momentum = 0.5 * momentum * (forgets_after != step - 1) + weight
            weight = weight - 0.125 * momentum
        return (weight**2).sum().item()

    code, output = in_process("verify-resume", tmp_path / "toy.py")
    assert code == 1, output
    start = int(re.search(r"resumed from step (\d)", output)[1])
    said = re.search(r"loss differs first at step (\d): (\S+) uninterrupted, (\S+) resumed", output)
    step = int(said[1])
    assert start in (2, 4, 6)
    assert step == start + 2, output  # the weights were right, the first update after them was not
    assert [float(said[2]), float(said[3])] == [loss_at(step, None), loss_at(step, start)]
    assert re.search(r"tensor that differs: weight: .*\b3 of 3\b", output)
    kept = Path(re.search(r"kept in (\S+)", output)[1])
    assert (kept / "resumed/checkpoints/step-8").is_dir()


@pytest.mark.slow
def test_verify_resume_finds_an_average_of_weights_that_no_checkpoint_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average in a variable, copied into the model at the end: losses and checkpoints are the same bits, the model is not.

    With `run.keep` it is. Fails when: model directories are not compared, or not the metrics next to the loss, or not the summary; or the kept logs name the folder as it was.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TINY_RUN", json.dumps({"step_seconds": 0.1}))  # killed, the warm Python's run lives on for a moment
    text = (ROOT / "tests/tiny_run.py").read_text()
    averaged = text.replace(
        "            run.log(metrics)\n",
        "            weight = dict(run.model.named_parameters())['model.embed_tokens.weight'].detach()\n"
        "            average = run.kept.get('average', average)\n"
        "            average = weight.clone() if average is None else average.lerp(weight, 0.1)\n"
        "            metrics['distance'] = (weight - average).norm()\n"
        "            run.log(metrics)\n",
    ).replace(
        "        last = digest_of(",
        "        dict(run.model.named_parameters())['model.embed_tokens.weight'].data.copy_(average)\n"
        "        run.model.save_pretrained(run.output_dir / 'model')\n"
        "        last = digest_of(",
    ).replace("    with tk.open_run(", "    average = None\n    with tk.open_run(")  # fmt: skip
    (tmp_path / "forgets.py").write_text(averaged)
    code, output = in_process("verify-resume", tmp_path / "forgets.py", "--seed", "3")
    assert code == 1, output
    assert ": loss differs" not in output
    assert "first tensor that differs" not in output
    assert re.search(r"model/: model\.embed_tokens\.weight: .*\b\d+ of \d+\b", output), output
    start = int(re.search(r"resumed from step (\d)", output)[1])
    found = re.search(r"distance differs first at step (\d+): \S+ uninterrupted, 0.0 resumed", output)  # the first behind the checkpoint
    assert found, output
    folder = re.search(r"kept in (\S+)", output)[1]
    log = Path(folder, "resumed.txt").read_text()
    assert int(found[1]) == int(re.search(rf"Resumed from {folder}/.* at step (\d+)", log)[1]) + 1 > start  # what the run itself says
    kept = averaged.replace("            metrics['distance']", "            run.keep('average', average)\n            metrics['distance']")
    (tmp_path / "keeps.py").write_text(kept)
    code, output = in_process("verify-resume", tmp_path / "keeps.py", "--seed", "3")
    assert code == 0, output
    assert re.search(r"identical\n  step-8: .*\n  model/: .*model.safetensors.*\n  metrics.jsonl: .*distance.*, of 8 steps", output), output


def test_verify_resume_evaluates_where_a_setting_is_about_evaluations(tmp_path: Path) -> None:
    """As the flags and the file of a run that the user has anyway.

    Fails when: a setting that is refused without evaluations is left out, or the file of --config isn't read.
    """
    refused = {name for none in NO_EFFECT if "--eval-strategy no" in none.why for name in none.settings}
    assert {"max_eval_examples", "eval_on_start"} <= refused
    for name in {*refused, "load_best_model_at_end", "early_stopping_patience"}:
        assert "--eval-strategy" not in _with_defaults([flag_of(name), "8"]), name
    assert _with_defaults(["--max-steps", "3"])[-2:] == ["--eval-strategy", "no"]
    for settings, evaluates in (("eval_steps: 20\nmax_steps: 900", True), ("eval-steps: 2", True), ("dataset_test_split: test", True), ("learning_rate: 1", False)):
        (tmp_path / "run.yaml").write_text(settings)
        for typed in (["--config", str(tmp_path / "run.yaml")], [f"--config={tmp_path / 'run.yaml'}"]):
            found = _with_defaults(typed)
            assert ("--eval-strategy" not in found, "--max-steps" in found) == (evaluates, True)
    (tmp_path / "run.yaml").write_text("push_to_hub: true")
    for pushes in (["--config", str(tmp_path / "run.yaml")], ["--push-to-hub"]):
        with pytest.raises(typer.BadParameter, match="Hub"):
            _with_defaults(pushes)


@pytest.mark.slow
def test_verify_resume_finds_a_recipe_identical_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the two runs do not have the same settings, or their directories are compared with themselves."""
    temporary, data = tmp_path / "temporary", tmp_path / "sums.jsonl"
    temporary.mkdir()
    lines = [{"prompt": f"How many are {number} and {number + 1}?", "completion": f"{2 * number + 1}."} for number in range(60)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, output = in_process("verify-resume", "sft", "--dataset", data, *SMALL)
    assert code == 0, output
    assert "killed after step 5" in output
    compared = dict(line.strip().split(": ", 1) for line in output.partition("identical\n")[2].splitlines())
    assert re.search("model.*optimizer", compared["step-8"])
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(compared["model/"].split(", "))
    assert {"loss", "grad_norm", "token_accuracy"} <= set(compared["metrics.jsonl"].split(", "))
    assert re.search(r"\b8 steps; no evaluation", compared["metrics.jsonl"])
    assert "train_loss" in compared["summary.json"].split(", ")
    assert "seconds" not in compared["summary.json"].split(", ")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "stop", "name"),
    [
        (["plan"], signal.SIGTERM, "SIGTERM"), (["doctor", "--only", "types"], signal.SIGINT, "Ctrl-C"),
        (["profile", "--processes", "2"], signal.SIGTERM, "SIGTERM"), (["find-learning-rate"], signal.SIGINT, "Ctrl-C"),
    ],
)  # fmt: skip
def test_a_command_that_a_signal_ends_says_so_and_removes_its_folder(
    words: list[str], stop: signal.Signals, name: str, tmp_path: Path
) -> None:
    """In the middle of it; plan while it imports the recipe. Fails when: Typer's silent 130 is left, SIGTERM kills (a temporary
    folder stays), or each rank speaks."""
    (tmp_path / "temporary").mkdir()
    text = (ROOT / "recipes" / "accelerated.py").read_text()
    waits = "import os, time; open(f'{os.environ[\"TMPDIR\"]}/{os.getpid()}.begun', 'w').close(); time.sleep(60)\n"
    indent, place = ("", "@dataclass") if words == ["plan"] else ("    ", "    tk.print_data_report(")
    (tmp_path / "slow.py").write_text(text.replace(place, indent + waits + place, 1))
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [COLD, "-m", "toolkit", *words, str(tmp_path / "slow.py")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("temporary/*.begun"))) < 1 + words.count("2") and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr
            time.sleep(0.1)
        process.send_signal(stop)
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    lines = [line for line in errors.splitlines() if "interrupted" in line or "Traceback" in line]
    assert (process.returncode, lines) == (128 + stop, [f"interrupted by {name}; nothing was left behind"]), errors
    assert not list(tmp_path.glob("temporary/*-*/"))  # torch keeps a folder of its own there
