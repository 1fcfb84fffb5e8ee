"""A recipe's command line: what is typed becomes the config, what cannot be meant is refused, and how a run ends.

Exit codes, the help page and what it costs go through real processes with a small recipe. Each test names the one-line
change under which it was seen to fail.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.command_line.reading import lossy_text, read_command_line
from toolkit.command_line.recipe import config_class_of, config_class_of_file
from toolkit.config import Refusal, settings_of, write_config_file

RECIPE = '''"""Train a small thing on real text.

    accelerate launch recipes/small.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --packing

Brackets such as [this]
stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import toolkit as tk


class Stopped(Exception):
    exit_code = 75


class StopButton(Stopped, KeyboardInterrupt):
    """What a stop is where no command line was read."""


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    learning_rate: float = 2e-4
    packing: bool = True
    beta: float = tk.setting(0.1, "Weight of the [bold]penalty[/bold] of [Ouyang 2022].", above=0.0)
    end: str = "well"


def main(config: Config) -> tk.Summary:
    print("main ran with", config.learning_rate, flush=True)
    if config.end == "refusal":
        raise tk.Refusal("data.jsonl:17: not JSON.\\n  {'a'\\nWrite {\\"a\\": 1}.")
    if config.end == "stop button":
        raise StopButton("saved at step 4; continue with --resume")
    if config.end == "stopped":
        raise Stopped("saved at step 3; continue with --resume")
    if config.end == "crash":
        raise ZeroDivisionError("a bug")
    if config.end in ("Python", "torch"):
        raise MemoryError if config.end == "Python" else RuntimeError("DefaultCPUAllocator: can't allocate memory: 64 bytes")
    if config.end == "file":
        raise OSError("Memory mapping file failed: Cannot allocate memory")
    if config.end.startswith("library"):
        import resource
        if config.end == "library below a limit":
            resource.setrlimit(resource.RLIMIT_AS, (2**40, resource.RLIM_INFINITY))
        raise ImportError("libarrow.so: failed to map segment from shared object")
    if config.end == "sentence":
        raise SystemExit("plain exit")


if __name__ == "__main__":
    tk.run_recipe(main)
'''


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.ClassificationConfig, tk.RunConfig):
    learning_rate: float = 2e-4
    packing: bool = True


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    return path


def run(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "SM_HPS", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, cwd=path.parent, check=False,
        env=clean | {"COLUMNS": "80"} | environment,
    )  # fmt: skip


def read(*arguments: str, hyperparameters: dict[str, Any] | None = None) -> tuple[Config, frozenset[str]]:
    environment = {} if hyperparameters is None else {"SM_HPS": json.dumps(hyperparameters)}
    config = read_command_line(Config, arguments, environment)
    assert config.given is not None
    return config, frozenset(config.given)


# -- what is typed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        ("--learning-rate 1e-3", "--learning_rate=0.001"),
        ("--no-packing", "--packing=false"),
        ("--no-packing", "--packing False --seed 42"),
        ("--no_packing --packing --seed 1", "--packing true --seed 1"),
        ("--bf16 --seed 3", "--bf16 yes --seed=3"),
        ("--no-tf32", "--tf32 off"),
        ("--save-total-limit none", "--save_total_limit null"),
        ("--report-to wandb --report-to tensorboard", "--report_to wandb,tensorboard"),
        ("--report-to wandb,tensorboard", '--report-to ["wandb","tensorboard"]'),
        ("--model-name-or-path gpt2", "--model gpt2"),
        ("--warmup_ratio 0.1", "--warmup-steps 0.1"),
        ("--seed 1 --seed 2", "--seed 2"),
        ("--rename-columns question=prompt", '--rename-columns=["question=prompt"]'),
    ],
)
def test_spellings_of_one_setting_give_the_same_config(typed: str, same: str) -> None:
    """Fails when read_flags keeps the dashes of a name, always takes a switch's next word, or drops `=false`."""
    assert read(*typed.split())[0] == read(*same.split())[0] != Config()


def test_switch_set_to_none_overrides_the_config_file(tmp_path: Path) -> None:
    """Fails when the words after a switch are only true and false: none would belong to no flag."""
    (tmp_path / "c.yaml").write_text("tf32: true\n")
    assert read("--config", str(tmp_path / "c.yaml"))[0].tf32 is True
    assert read("--config", str(tmp_path / "c.yaml"), "--tf32", "none")[0].tf32 is None


def test_later_sources_win_and_only_what_someone_chose_counts_as_given(tmp_path: Path) -> None:
    """Fails when two of the three sources change places in read_command_line, or every key of the file counts as given."""
    (tmp_path / "c.yaml").write_text("seed: 1\nmax_steps: 10\nlearning_rate: 2e-4\nlr_power: 1.0\nmomentum: 0.5\n")
    config, given = read(
        "--config", str(tmp_path / "c.yaml"), "--seed", "3", hyperparameters={"seed": 2, "max_steps": 20, "optim": "sgd"}
    )
    assert (config.seed, config.max_steps, config.momentum, config.learning_rate) == (3, 20, 0.5, 2e-4)
    assert given == {"seed", "max_steps", "momentum", "optim"}  # not learning_rate and lr_power: they say the default


def test_written_config_fed_back_repeats_the_run_and_refuses_nothing(tmp_path: Path) -> None:
    """Fails when every key of the file counts as given: lr_power, eval_steps ... would be refused."""
    from toolkit.config import check_together

    config, given = read("--optim", "sgd", "--momentum", "0.5", "--eval-strategy", "no", "--report-to", "wandb")
    check_together(config, given)
    write_config_file(config, tmp_path / "config.yaml")
    again, given_again = read("--config", str(tmp_path / "config.yaml"))
    check_together(again, given_again)
    assert again == config
    assert given_again == given


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--lerning-rate 1", "unknown setting --lerning-rate. Did you mean --learning-rate?"),
        ("--seeed 1 --packin --seed 1", "unknown settings\n  - --seeed. Did you mean --seed?\n  - --packin. Did you mean"),
        ("--learning 1", "Did you mean --learning-rate?"),
        ("--no-optim", "unknown setting --no-optim. Did you mean --optim?"),
        ("--zzz 1", "unknown setting --zzz. --help lists them all."),
        ("--output-dir --resume", "--output-dir: needs a value, such as --output-dir runs/run."),
        ("--max-steps", "--max-steps: needs a value, such as --max-steps 8."),
        ("--config", "--config: needs a value"),
        ("--fp8", "--fp8: needs a value, such as --fp8 tensorwise."),
        ("--packing maybe", "maybe: belongs to no flag. --packing "),
        ("--report-to wandb tensorboard", "--report-to a,b."),
        ("conf.yaml", "conf.yaml: belongs to no flag. Did you mean --config conf.yaml?"),
        ("learning_rate=1", "Did you mean --learning-rate 1?"),
        ("-seed 1", "-seed: belongs to no flag. Did you mean --seed?"),
        ("—seed 1", "Did you mean --seed?"),
        ("--warmup-ratio .1 --warmup-steps 2", "--warmup-ratio and --warmup-steps"),
        ("--max-steps -5", "--max-steps -5: must be at least 1."),
        ("--config nowhere.yaml", "--config nowhere.yaml: no such file."),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_type(typed: str, message: str) -> None:
    """Fails when read_flags skips unknown flags, or takes a flag for a value."""
    with pytest.raises(Refusal) as refusal:
        read(*typed.split())
    assert message in str(refusal.value)


# -- SageMaker -------------------------------------------------------------------------------------------------------

JOB: dict[str, Any] = {
    "learning_rate": 1e-05,
    "max_steps": 20,
    "packing": False,
    "tf32": True,
    "model_revision": None,
    "save_total_limit": None,
    "report_to": ["wandb", "tensorboard"],
    "class_weights": [1, 2.5],
    "run_name": 'say "no, it\'s 5e-1"',
    "lr_patterns": ["[qk]_proj,(x)=0.5"],
    "rename_columns": {"question": "prompt"},
    "eval-delay": -0.0,
}
LIKE_TYPING = [
    "--learning-rate", "1e-5", "--max-steps", "20", "--no-packing", "--tf32", "true", "--model-revision", "none",
    "--save-total-limit", "none", "--report-to", "wandb,tensorboard", "--class-weights", "1,2.5",
    "--run-name", 'say "no, it\'s 5e-1"', "--lr-patterns", '["[qk]_proj,(x)=0.5"]', "--rename-columns", "question=prompt",
    "--eval-delay", "0",
]  # fmt: skip


def container_arguments(hyperparameters: dict[str, Any]) -> list[str]:
    """argv as sagemaker-training 5.1 makes it (mapping.to_cmd_args): sorted keys, str() of the values."""

    def text(value: Any) -> str:
        if value is None:
            return ""
        return ",".join(f"{k}={v}" for k, v in sorted(value.items())) if hasattr(value, "items") else str(value)

    return [word for key in sorted(hyperparameters) for word in (f"--{key}", text(hyperparameters[key]))]


def test_job_gives_the_config_that_typing_its_settings_gives() -> None:
    """Fails when an argument that repeats SM_HPS is read again: '' for None and a list's Python repr lose their type."""
    config, given = read(*container_arguments(JOB), hyperparameters=JOB)
    assert (config, given) == read(*LIKE_TYPING)
    assert config.report_to == ["wandb", "tensorboard"]
    assert config.model_revision is None


@pytest.mark.parametrize("name", JOB)
def test_each_setting_of_a_job_is_read_from_its_typed_form(name: str) -> None:
    """Fails when: repeats are compared by key alone (max_steps): the user's own value after it would be dropped too."""
    one = {name: JOB[name]}
    assert lossy_text(JOB[name]) == container_arguments(one)[1]
    assert read(*container_arguments(one), hyperparameters=one) == read(hyperparameters=one)
    own = read(*container_arguments(one), "--max-steps", "3", hyperparameters=one)[0]
    assert own.max_steps == 3


def test_containers_own_keys_are_dropped_and_unknown_ones_refused() -> None:
    """Fails when without_container_keys keeps what begins with sagemaker_, or read_command_line drops unknown keys."""
    own = {"sagemaker_region": "eu-west-1", "sagemaker_distributed_dataparallel_enabled": True, "_tuning_objective_metric": "m"}
    assert read(*container_arguments(own), hyperparameters=own) == (Config(), frozenset())
    with pytest.raises(Refusal, match=r"SM_HPS: .*learning_rat\. .*learning_rate\?"):
        read(hyperparameters={"learning_rat": 1})


def test_job_may_name_a_config_file(tmp_path: Path) -> None:
    """Fails when read_command_line takes --config from the flags alone."""
    (tmp_path / "c.yaml").write_text("seed: 7\n")
    job = {"config": str(tmp_path / "c.yaml")}
    assert read(*container_arguments(job), hyperparameters=job)[0].seed == 7


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_broken_job_settings_are_refused(text: str) -> None:
    """Fails when read_hyperparameters is json.loads alone."""
    with pytest.raises(Refusal, match="SM_HPS: "):
        read_command_line(Config, [], {"SM_HPS": text})


# -- as a process ----------------------------------------------------------------------------------------------------


def test_run_prints_what_differs_from_the_defaults_and_ends_with_zero(recipe: Path) -> None:
    """Fails when run_recipe prints before it knows the config's class defaults, or on every rank."""
    done = run(recipe, "--learning_rate", "1e-3", "--no-packing")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first.startswith(f"{recipe} (model tiny-llama): ")
    assert lines == [
        "  packing       = false  (default true)",
        "  learning_rate = 0.001  (default 0.0002)",
        "main ran with 0.001",
    ]
    assert run(recipe, "--learning_rate", "1e-3", RANK="1").stdout == "main ran with 0.001\n"


def test_refused_settings_end_with_two_and_one_message_from_the_first_rank(recipe: Path) -> None:
    """Fails when run_recipe leaves check_together out, prints on every rank, or exits with another code."""
    first, other = (run(recipe, "--lr-power", "2", RANK=rank) for rank in "01")
    assert (first.returncode, other.returncode) == (2, 2)
    assert first.stdout == other.stdout == other.stderr == ""
    assert re.fullmatch(r"refused: --lr-power 2 .*--lr-scheduler-type cosine: .*polynomial\.\n", first.stderr)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("refusal", 2, "refused: data.jsonl:17: not JSON.\n  {'a'\nWrite {\"a\": 1}.\n"),
        ("stopped", 75, "saved at step 3; continue with --resume\n"),
        ("stop button", 75, "saved at step 4; continue with --resume\n"),
        ("sentence", 1, "plain exit\n"),
    ],
)
def test_expected_ends_have_their_exit_code_and_message_without_traceback(recipe: Path, end: str, code: int, said: str) -> None:
    """Fails when run_recipe lets Refusal or an exception with an exit_code pass, or takes one that is a KeyboardInterrupt too for Ctrl-C."""
    done = run(recipe, "--end", end)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("end", "raised", "said"),
    [
        ("Python", "raise MemoryError", "MemoryError"), ("torch", "raise MemoryError", "64 bytes"), ("file", "raise OSError", "mapping file"),
        ("library below a limit", "raise ImportError", "libarrow"),
    ],
)  # fmt: skip
def test_memory_that_runs_out_before_a_run_is_one_message_with_the_line(recipe: Path, end: str, raised: str, said: str) -> None:
    """As while a library or a model is loaded or rows are tokenized. Fails when: it is a traceback, or of some of these alone."""
    done = run(recipe, "--end", end)
    line = next(number for number, text in enumerate(RECIPE.splitlines(), 1) if raised in text)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert re.search(rf"out of memory at {re.escape(str(recipe))}:{line}: .*{said}", done.stderr), done.stderr


def test_a_library_that_cannot_be_mapped_is_no_lack_of_memory_without_a_limit(recipe: Path) -> None:
    """As on a disk that nothing is executed from. Fails when: the limit is not asked for."""
    done = run(recipe, "--end", "library")
    assert (done.returncode, "Traceback" in done.stderr, "out of memory" in done.stderr) == (1, True, False)


def test_bug_keeps_its_traceback(recipe: Path) -> None:
    """Fails when run_recipe catches every Exception."""
    done = run(recipe, "--end", "crash")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: a bug\n")


def test_an_interrupt_while_settings_are_read_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when the interrupt is left to Python: a traceback, and code 1."""
    from toolkit.command_line import recipe

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "read_command_line", interrupted)
    monkeypatch.setattr(sys, "argv", ["small.py"])

    def main(config: Config) -> None:
        raise AssertionError("the recipe ran")

    with pytest.raises(SystemExit) as end:
        tk.run_recipe(main)
    assert end.value.code == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_page_has_a_panel_for_each_group_and_every_setting_with_its_default(recipe: Path) -> None:
    """Fails when the panels go by the class that redeclares a field, or the brackets are read as Rich markup."""
    done = run(recipe, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    page = done.stdout
    assert re.findall(r"╭─ (.*?) ─", page) == [
        "Recipe", "Model", "Data", "Steps and batches", "Optimizer", "Run", "Output", "Devices", "Hub", "When training goes wrong",
        "Reproducibility", "Command line",
    ]  # fmt: skip
    flat = " ".join(page.replace("│", " ").split())
    assert "Train a small thing on real text." in flat
    assert "Brackets such as [this] stay." in flat
    assert "--beta Weight of the [bold]penalty[/bold] of [Ouyang 2022]. [default: 0.1]" in flat
    settings = settings_of(Config)
    for each in settings.values():
        if each.panel not in ("Classification", "Loss"):
            assert f"{each.flag} {each.help}" in flat
            assert all(choice in flat for choice in each.choices)
    for name, default in (("learning_rate", "0.0002"), ("packing", "true")):
        assert f"{settings[name].help} [default: {default}]" in flat


def test_help_page_fits_eighty_columns_and_keeps_commands_whole(recipe: Path) -> None:
    """Fails when _panel counts a column too many, a default is broken over two lines (no _NO_BREAK), or
    the description is wrapped whole."""
    lines = run(recipe, "--help").stdout.splitlines()
    command = "    accelerate launch recipes/small.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --packing"
    assert command in lines
    assert max(len(line) for line in lines if "accelerate launch" not in line and "Usage" not in line) == 80
    assert all(line.endswith(("│", "╮", "╯")) for line in lines if line.startswith(("│", "╭", "╰")))
    assert not [line for line in lines if line.count("[default") > line.count("]")]
    assert not [line for line in lines if "\x1b" in line]


def test_help_page_is_readable_without_unicode(recipe: Path) -> None:
    """Fails when the page is not translated: the process would end with a UnicodeEncodeError."""
    done = run(recipe, "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "+- Optimizer ---" in done.stdout


def test_help_page_costs_no_heavy_import(recipe: Path) -> None:
    """Fails when config_class_of resolves the annotation of what main returns (tk.Summary loads torch)."""
    profile = run(recipe, "-h", PYTHONPROFILEIMPORTTIME="1").stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in profile.splitlines()}
    assert "toolkit" in loaded
    assert not loaded & {"typer", "torch", "numpy", "transformers", "datasets", "accelerate", "yaml", "rich"}


def test_config_class_is_found_behind_both_kinds_of_annotation() -> None:
    """Fails when config_class_of takes a text for a class."""

    def plain(config: Config) -> None: ...

    def postponed(config: "Config") -> "no.such.Name": ...  # type: ignore[name-defined]  # noqa: F821

    def dotted(config: "tk.OptimConfig") -> None: ...

    def misspelled(config: "Confi") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def bare(config) -> None: ...  # type: ignore[no-untyped-def]

    assert config_class_of(plain) is config_class_of(postponed) is Config
    assert config_class_of(dotted) is tk.OptimConfig
    for wrong in (bare, misspelled):
        with pytest.raises(Refusal, match="main takes one config"):
            config_class_of(wrong)


def test_mistakes_of_flags_and_file_and_what_does_not_go_together_come_in_one_message(tmp_path: Path) -> None:
    """A rule that reads a setting which was mistyped isn't asked. Fails when: read_flags, read_config_file or read_values
    raises by itself in read_command_line, or rules wait for a second attempt."""
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 3\nseed: -1\nbf16: true\n")
    flags = ["--fp16", "--no-such-flag", "3", "--lr-power", "2", "--max-length", "many", "--optim", "sdg", "--adam-beta1", "0.5", "--run-name"]
    with pytest.raises(Refusal) as caught:
        read_command_line(Config, ["--config", str(file), *flags], {})
    message = str(caught.value)
    for part in (
        "--no-such-flag", "--run-name: needs a value", "learning_rat. Did you mean learning_rate", f"--seed -1 ({file})",
        "--max-length many", "--optim sdg: must be one of", "--bf16 and --fp16 are two precisions", "--lr-power 2 has no effect",
    ):  # fmt: skip
        assert message.count(part) == 1, (part, message)
    assert "--adam-beta1" not in message  # whether it has an effect depends on what --optim was meant to be
    assert len([line for line in message.splitlines() if line.startswith("  - ")]) == 8


def test_a_file_that_cannot_be_read_is_named_with_the_wrong_flags(tmp_path: Path) -> None:
    """Nothing is said of what goes together: the file may have held the other half. Fails when: the file's refusal ends the reading."""
    with pytest.raises(Refusal) as caught:
        read_command_line(Config, ["--config", str(tmp_path / "none.yaml"), "--seed", "x", "--lr-power", "2", "stray", "words"], {})
    message = str(caught.value)
    assert all(part in message for part in ("none.yaml: no such file", "--seed x", "stray: belongs to no flag"))
    assert "no effect" not in message
    assert "words" not in message.replace("stray words", "")


def test_a_recipe_that_a_command_imports_finds_the_modules_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script does. Fails when: import_recipe leaves sys.path as it is."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "next_to_the_recipe.py").write_text("RATE = 0.25\n")
    text = RECIPE.replace("import toolkit as tk\n", "import toolkit as tk\nfrom next_to_the_recipe import RATE\n")
    (tmp_path / "small_with_a_module.py").write_text(text)
    assert "learning_rate" in settings_of(config_class_of_file(tmp_path / "small_with_a_module.py"))
