"""What a run's records say it was: the settings it read, its optimizer, the copy it ran; and the lines before and after it.

Each test names the change under which it fails.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import toolkit as tk
from toolkit.config.files import NOT_READ
from toolkit.config.reading import add_reads, forget_reads, settings_read, values_of
from toolkit.config.setting import setting, settings_of
from toolkit.metrics.baselines import compared_with_baselines, in_words
from toolkit.runs.copies import changed_lines, edited_copy, make_copy, recipes_folder
from toolkit.runs.overview import what_the_run_is
from toolkit.runs.run_card import describe_optimizer

pytestmark = pytest.mark.warm

ROOT = Path(__file__).resolve().parents[2]
OWN_OPTIMIZER = (
    "optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)",
    "optimizer, schedule = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.9)), lambda progress: [1e-3]",
)


@dataclasses.dataclass(frozen=True)
class Config(tk.OptimConfig, tk.OutputConfig):
    mine: float = setting(1.0, "A number of the recipe's own.")


def edited(target: Path, *changes: tuple[str, str]) -> Path:
    """A copy of tests/tiny_run.py with other lines in it."""
    text = (ROOT / "tests/tiny_run.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    target.write_text(text)
    return target


def run(script: Path, *flags: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *flags], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_reads_are_noted_and_copies_checks_and_comparisons_are_none() -> None:
    """Fails when: a check, `replace`, a comparison or the toolkit's own `asdict` counts as a read; or a recipe's `asdict` does not."""
    forget_reads(config := Config())
    assert config == dataclasses.replace(config)
    assert repr(config)
    values_of(config)
    tk.config.check_together(config, frozenset({"lr_power"}) - {"lr_power"})
    assert settings_read(config) == set()
    assert config.mine + dataclasses.replace(config, momentum=0.5).momentum == 1.5
    add_reads(config, ["optim"])
    assert settings_read(config) == {"mine", "momentum", "optim"}
    dataclasses.asdict(config)
    assert settings_read(config) == set(settings_of(type(config)))
    forget_reads(config)
    assert settings_read(config) == set()


def test_the_records_of_an_edited_run_list_what_it_read_and_the_optimizer_it_built(tmp_path: Path) -> None:
    """Fails when: run.json keeps the settings of a toolkit's optimizer, config.yaml loses one or doesn't mark it, the optimizer's
    class is that of the settings, or settings that were given and never read go without a line."""
    script = edited(tmp_path / "mine.py", OWN_OPTIMIZER)
    flags = ["--optim", "sgd", "--weight-decay", "0.3", "--max-steps", "6", "--seed", "5"]
    said = run(script, *flags, "--output-dir", str(tmp_path / "run"))
    early, late = re.findall(r"WARNING: given and (?:not read so far|never read).*", said)
    for line in (early, late):
        assert "--optim sgd" in line
        assert "--weight-decay 0.3" in line
        assert "--seed" not in line
    assert said.index(early) < said.index("step 2/6")
    card = json.loads((tmp_path / "run/run.json").read_text())
    assert {"seed", "max_steps", "max_grad_norm"} <= card["settings"].keys()
    assert not {"optim", "weight_decay", "learning_rate", "momentum"} & card["settings"].keys()
    assert card["not_read"]["weight_decay"] == 0.3
    assert card["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert (card["optimizer"]["defaults"]["lr"], card["optimizer"]["defaults"]["betas"]) == (1e-3, [0.8, 0.9])
    text = (tmp_path / "run/config.yaml").read_text()
    assert re.search(rf"^weight_decay: 0.3  # default: 0; {NOT_READ}$", text, re.MULTILINE)
    assert re.search(rf"^momentum: \S+  # {NOT_READ}$", text, re.MULTILINE)
    assert not re.search(rf"^seed: .*{NOT_READ}", text, re.MULTILINE)
    written = yaml.safe_load(text)
    assert (written["optim"], written["weight_decay"], written["seed"]) == ("sgd", 0.3, 5)  # it repeats the run
    run(script, "--config", str(tmp_path / "run/config.yaml"), "--output-dir", str(tmp_path / "again"))
    assert (tmp_path / "again/result.json").read_bytes() == (tmp_path / "run/result.json").read_bytes()


def test_settings_that_a_short_run_does_not_come_to_or_that_are_off_are_not_called_unread(tmp_path: Path) -> None:
    """Fails when: the last step is due before `is_due` reads how often, or `left_off` is left out of what is not read."""
    flags = ["--logging-steps", "1", "--eval-steps", "2", "--eval-delay", "1", "--save-steps", "3", "--max-steps", "1"]
    flags += ["--lr-scheduler-type", "constant", "--warmup-steps", "0", "--divergence", "stop"]
    said = run(ROOT / "tests/tiny_run.py", *flags, "--output-dir", str(tmp_path / "run"))
    assert "WARNING: given" not in said
    card = json.loads((tmp_path / "run/run.json").read_text())
    assert {"logging_steps", "eval_steps", "eval_delay", "save_steps", "divergence"} <= card["settings"].keys()
    assert "warmup_steps" in card["not_read"]


def test_a_recipe_that_takes_the_schedule_alone_is_recorded_with_its_own_optimizer(tmp_path: Path) -> None:
    """Fails when: what build_optimizer reads for an optimizer that the run doesn't have counts as read, what it reads for the
    rates does not, or the model card names the optimizer of the settings."""
    from toolkit.export.card import model_card

    built = "optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)"
    own = "; optimizer = torch.optim.Adamax([{'params': g['params']} for g in optimizer.param_groups], lr=1e-3, betas=(0.8, 0.9))"
    flags = ["--optim", "muon", "--momentum", "0.9", "--learning-rate", "0.002", "--max-steps", "4"]
    said = run(edited(tmp_path / "mine.py", (built, built + own)), *flags, "--output-dir", str(tmp_path / "own"))
    warned = re.search(r"WARNING: given and not read so far: (.*)\.", said)[1]
    assert ("--optim muon" in warned, "--momentum 0.9" in warned, "--learning-rate" in warned) == (True, True, False)
    card = json.loads((tmp_path / "own/run.json").read_text())
    assert (card["optimizer"]["class"], card["optimizer"]["from_settings"]) == ("torch.optim.adamax.Adamax", False)
    assert {"learning_rate", "lr_scheduler_type", "warmup_steps"} <= card["settings"].keys()
    assert {"optim", "momentum", "weight_decay"} <= card["not_read"].keys()
    assert re.search(rf"^optim: muon .*{NOT_READ}$", (tmp_path / "own/config.yaml").read_text(), re.MULTILINE)
    text = model_card(card, {}, "m", "LlamaForCausalLM")
    assert "| optim |" not in text
    row = re.search(r"\| optimizer \| (.*) \|", text)[1]
    assert row.startswith("torch.optim.adamax.Adamax(lr=0.001, betas=\\[0.8, 0.9\\], eps=1e-08")
    assert "were not used" in row
    assert f"| parameters trained | all {card['model']['parameters']:,} |" in text
    card["model"]["trainable"] = 64
    assert f"| parameters trained | 64 of {card['model']['parameters']:,} |" in model_card(card, {}, "m", "LlamaForCausalLM")
    run(ROOT / "tests/tiny_run.py", *flags, "--output-dir", str(tmp_path / "plain"))
    card = json.loads((tmp_path / "plain/run.json").read_text())
    assert card["optimizer"]["from_settings"]
    assert {"optim", "momentum", "weight_decay", "learning_rate"} <= card["settings"].keys()
    assert "| optim | muon |" in model_card(card, {}, "m", "LlamaForCausalLM")


def test_a_resumed_run_lists_what_it_read_before(tmp_path: Path) -> None:
    """Its loop is not entered again: a reader of the loop is not asked. Fails when: a checkpoint doesn't hold what was read."""
    command = [ROOT / "tests/tiny_run.py", "--max-steps", "4", "--max-grad-norm", "0.7", "--output-dir", str(tmp_path / "run")]
    run(*command)
    before = json.loads((tmp_path / "run/run.json").read_text())
    assert "given and n" not in run(*command, "--resume")
    after = json.loads((tmp_path / "run/run.json").read_text())
    assert "max_grad_norm" in after["settings"]
    assert before["settings"].keys() <= after["settings"].keys()


def test_an_edited_copy_is_told_with_the_number_of_its_changed_lines(tmp_path: Path) -> None:
    """Fails when: a replaced line counts twice, the line that `toolkit copy` writes counts, or a plain copy goes unseen."""
    original, copy, plain = recipes_folder() / "sft.py", tmp_path / "mine.py", tmp_path / "sft.py"
    make_copy(original, copy)
    assert edited_copy(copy) == ("sft.py", 0)
    lines = copy.read_text().splitlines()
    lines[20] = "    # replaced"
    lines[30:32] = ["    # two", "    # by", "    # three"]
    copy.write_text("\n".join([*lines, "# one more", ""]))
    assert edited_copy(copy) == ("sft.py", 1 + 3 + 1)
    plain.write_text(original.read_text().replace("import toolkit as tk", "import toolkit as kit"))
    assert edited_copy(plain) == ("sft.py", 1)
    assert edited_copy(original) is None
    (tmp_path / "other.py").write_text("print()\n")
    assert edited_copy(tmp_path / "other.py") is None
    assert changed_lines(["--- a", "+++ b", "@@", " same", "-old", "+new", "+newer", " same", "-gone"]) == 3


def test_an_optimizer_is_described_as_it_is_inside_its_wrapper() -> None:
    """Fails when: the wrapper's class is written, or values that are off."""

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5, momentum=0.25)
    expected = {"class": "torch.optim.sgd.SGD", "defaults": {"lr": 0.5, "momentum": 0.25, "dampening": 0, "weight_decay": 0}}
    assert describe_optimizer(plain) == describe_optimizer(Wrapper(plain)) == expected
    assert describe_optimizer(None) is None


def card(**changes: object) -> dict:
    layout = {"processes": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 3, "global_batch_size": 24, "steps": 50,
              "precision": "bf16", **changes}  # fmt: skip
    return {
        "layout": layout, "model": {"parameters": 1_000_000, "trainable": 4_096, "dtype": "float32"},
        "hardware": {"device": "cpu"}, "optimizer": {"class": "torch.optim.adamw.AdamW", "defaults": {}},
        "recipe": {"file": "mine.py", "path": "mine.py", "copied_from": "sft.py", "lines_changed": 1}, "settings": {},
    }  # fmt: skip


def test_a_line_says_what_a_run_is_before_it_begins() -> None:
    """Fails when: one of these is left out, packed rows are called examples, which the data's table counts, or the cut of the global batch doesn't multiply to it without a word."""
    said, copied = what_the_run_is(card())
    for part in ("2 processes on cpu", "bf16 over float32", "1,000,000 parameters, 4,096 trained", "24 examples a step",
                 "(micro-batch 4 x accumulation 3 x 2 processes)", "50 steps", "AdamW"):  # fmt: skip
        assert part in said
    assert re.match(r"mine\.py: .*sft\.py, 1 line ", copied)
    assert "the last ones not full" in what_the_run_is(card(global_batch_size=22))[0]
    assert "--no-bf16" not in said
    assert "AdamW, stochastic rounding" in what_the_run_is({**card(), "optimizer": {**card()["optimizer"], "rounding": "stochastic"}})[0]
    assert "24 packed rows a step" in what_the_run_is({**card(), "settings": {"packing": True}})[0]


@pytest.mark.parametrize(
    ("precision", "dtype", "settings", "launched", "line"),
    [
        ("bf16", "float32", {"bf16": None}, "no", "bf16 over float32 (float32 with --no-bf16);"), ("bf16", "float32", {"bf16": True}, "no", "bf16 over float32;"),
        ("no", "float32", {"bf16": None}, "no", "cpu, float32;"), ("bf16", "bfloat16", {"bf16": None}, "no", "cpu, bfloat16 (float32 with --no-bf16);"),
        ("no", "bfloat16", {"bf16": None}, "no", "cpu, bfloat16;"),
        ("bf16", "float32", {"bf16": None, "resume": True}, "no", "bf16 over float32;"), ("bf16", "float32", {"bf16": None}, "bf16", "bf16 over float32;"),
        ("bf16", "float32", {"bf16": None, "fp8": "rowwise"}, "no", "bf16 over float32;"),
    ],
)  # fmt: skip
def test_a_precision_that_the_device_has_chosen_is_shown_with_the_way_back(
    precision: str, dtype: str, settings: dict[str, object], launched: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: nothing says that --no-bf16 computes in float32, or it is said where that would be refused or change a run."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    known = card(precision=precision)
    assert line in what_the_run_is({**known, "model": {**known["model"], "dtype": dtype}, "settings": settings})[0]


@pytest.mark.parametrize(
    ("device", "parameters", "steps", "flags"),
    [
        ("cpu", 10**9, 500, []), ("NVIDIA H100", 10**9, 50, []), ("NVIDIA H100", 10**9, 500, ["--torch-compile"]), ("NVIDIA H100", 10**8, 500, []),
    ],
)
def test_a_line_says_what_would_be_faster_on_this_device(device: str, parameters: int, steps: int, flags: list[str]) -> None:
    """Fails when: it is said of a CPU, of a few steps or of a small model."""
    known = card(steps=steps)
    known |= {"model": {**known["model"], "parameters": parameters}, "hardware": {"device": device}, "settings": {"torch_compile": False}}
    said = [line for line in what_the_run_is(known) if line.startswith("Faster")]
    assert re.findall(r"--[a-z0-9-]+", " ".join(said)) == flags
    assert "Faster" not in " ".join(what_the_run_is(known | {"settings": {}}))  # a recipe without the settings


@pytest.mark.parametrize(
    ("name", "parameters", "given", "rate", "from_settings", "warned"),
    [
        ("Qwen/Qwen3-0.6B", 6 * 10**8, [], 1e-3, True, True), ("Qwen/Qwen3-0.6B", 6 * 10**8, ["learning_rate"], 1e-3, True, False),
        ("runs/demo/model", 10**6, [], 1e-3, True, False), ("medium-llama", 10**8, [], 1e-3, True, False),
        ("Qwen/Qwen3-0.6B", 6 * 10**8, [], 2e-5, True, False), ("Qwen/Qwen3-0.6B", 6 * 10**8, [], 1e-3, False, False),
    ],
)  # fmt: skip
def test_a_recipes_own_rate_is_warned_of_where_a_trained_model_takes_it(
    name: str, parameters: int, given: list[str], rate: float, from_settings: bool, warned: bool
) -> None:
    """Fails when: nothing is said, or where the rate was given or edited, the model is small or built in, or the optimizer another."""
    known = card()
    known |= {"model": {**known["model"], "name": name, "parameters": parameters}, "settings": {"learning_rate": rate}, "given": given}
    known["optimizer"] |= {"from_settings": from_settings}
    assert [line for line in what_the_run_is(known) if "--learning-rate 0.001" in line and line.startswith("WARNING")] == what_the_run_is(known)[1:2] * warned


def test_the_run_says_so_itself_before_its_first_step_and_with_accelerate_launch_that_it_is_alone(tmp_path: Path) -> None:
    """The variables are those that accelerate launch --num_processes 2 --cpu leaves to the one process that it starts.

    Fails when: the line comes after the first step, isn't printed, or the single process is passed over.
    """
    flags = ["--max-steps", "2", "--gradient-accumulation-steps", "3", "--save-strategy", "no"]
    said = run(ROOT / "tests/tiny_run.py", *flags, "--output-dir", str(tmp_path / "run"))
    line = r"1 process on cpu, float32; [\d,]+ parameters, all trained; 6 examples a step \(micro-batch 2 x accumulation 3 x 1 process\), 2 steps"
    assert re.search(line, said).start() < said.index("step 1/2")
    assert "accelerate launch" not in said
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    alone = run(ROOT / "tests/tiny_run.py", *flags, "--output-dir", str(tmp_path / "alone"), **launched)
    assert re.search(r"WARNING: accelerate launch .*--processes 2", alone)


@pytest.mark.parametrize(
    ("baselines", "value", "given", "beaten"),
    [
        ({"figure": "eval_loss", "unigram": 6.0, "bigram": 4.5}, 4.0, None, True),
        ({"figure": "eval_loss", "unigram": 6.0, "bigram": 4.5}, 5.0, None, False),
        ({"figure": "eval_accuracy", "words": 0.7}, 0.8, None, True),
        ({"figure": "eval_accuracy", "words": 0.7}, 0.7, None, False),  # no better is not beaten
        ({"figure": "eval_delay", "before": 3.0}, 2.0, False, True),
        ({"figure": "eval_loss", "unigram": 6.0}, float("nan"), None, False),
        ({"figure": "eval_answer_rate", "before": 0.1}, 0.2, None, True),  # no "wer"
        ({"figure": "eval_wer", "before": 0.1}, 0.2, None, False),
    ],
)
def test_the_verdict_knows_which_way_is_better(baselines: dict, value: float, given: bool | None, beaten: bool) -> None:
    """Fails when: the direction is not that of the metric, or as good as a baseline counts as better."""
    compared = compared_with_baselines(baselines, {baselines["figure"]: value}, given)
    assert (not compared.unbeaten) == beaten
    verb = " beats " if beaten else " only equals " if value in compared.unbeaten.values() else " does NOT beat "
    assert verb in in_words(compared, str)
    assert compared_with_baselines({}, {"eval_loss": 1.0}) is None
    assert compared_with_baselines(baselines, {}) is None
