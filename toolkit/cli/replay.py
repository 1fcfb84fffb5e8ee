"""toolkit replay: run again what a run card describes, and compare the weights."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from toolkit.cli.replay_checks import (
    check_inputs,
    check_place,
    check_weights,
    directory_of,
    read_run,
    say_what_changed,
    script_of,
)
from toolkit.command_line.placement import Placement, placement_of
from toolkit.config import Refusal
from toolkit.config.conditions import is_adapter
from toolkit.config.json_and_yaml import parse_yaml, read_text_file
from toolkit.config.places import place_to_write
from toolkit.distributed.launch import TRY_AGAIN, launch
from toolkit.system.console import say
from toolkit.system.files import temporary_folder

# What a replay must not do once more, and what would make it another run: these keys are left at their defaults.
_NOT_REPEATED = (
    "output_dir", "overwrite_output_dir", "resume", "resume_from", "allow_change", "report_to", "run_name", "push_to_hub",
    "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision",
)  # fmt: skip
_INTERRUPTED = 130  # as shells have it for SIGINT
_OF_A_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "*.py"]


def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output directory of a run that has ended.")],
    into: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the new run is written. Default: DIR-replay.")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="FILE", help="The recipe, if it lies elsewhere than it did.")] = None,
) -> None:
    """Run a recipe again as it was run, from config.yaml and run.json in DIR, and compare losses and weights bit for bit.

    Nothing is pushed and nothing is logged to a tracker. The number of processes and of threads, and the launch file, are those
    of the run, and its relative paths are those of the directory in which it was started. On the same machine with the same
    libraries and toolkit the weights are the same; whatever of these is not the same is printed first. Another recipe, other
    data, another model, and a run that continued with other settings are refused, before the first step.

    Ends with 0 when they are identical, with 1 when they differ, with 130 when it is interrupted, with 2 when it is refused,
    with the recipe's own code when it fails.
    """
    place = Path(os.path.abspath(place_to_write(into, "--into"))) if into else None
    _replay(Path(os.path.abspath(directory)), place, recipe)


def _replay(directory: Path, into: Path | None, recipe: str | None) -> None:
    from toolkit.runs.run_card import REPLAYED_DATA

    card, settings = read_run(directory)
    into = into or directory.with_name(f"{directory.name}-replay")
    check_place(into)
    check_weights(directory / "model")
    recipe = str(Path(recipe).absolute()) if recipe else None
    with contextlib.chdir(directory_of(card)), temporary_folder("replay") as folder:
        script = recipe or script_of(card)
        check_inputs(script, card)
        placement = _placement(card)
        say_what_changed(card, settings.get("use_cpu") or placement.environment.get("ACCELERATE_USE_CPU") == "true")
        environment = {
            **placement.environment, "OMP_NUM_THREADS": str(card["hardware"]["threads"]),
            REPLAYED_DATA: card["data"]["fingerprint"],
        }  # fmt: skip
        config = folder / "config.yaml"
        repeated = {name: value for name, value in settings.items() if name not in _NOT_REPEATED}
        repeated |= _commits(card, settings, folder)
        config.write_text(yaml.safe_dump(repeated), encoding="utf-8")
        command = [sys.executable, script, "--config", str(config), "--output-dir", str(into)]
        code = launch(command, placement.processes, placement.nodes, environment=environment)
    _check_end(code, into)
    differences, losses = _differences(directory, into)
    if differences:
        say("\n  ".join([f"{into} differs from {directory}:", *differences]))
        raise typer.Exit(1)
    say(f"identical: the weights and {losses} of {into} and {directory}, bit for bit")


def _check_end(code: int, into: Path) -> None:
    """Go no further where the recipe failed, was interrupted, or left nothing to compare."""
    if code in (TRY_AGAIN, _INTERRUPTED):
        again = f" It can't be continued: remove {into}, or begin another one with --into DIR." if into.exists() else ""
        say(f"the replay was interrupted, and nothing was compared.{again}", error=True)
        raise typer.Exit(_INTERRUPTED)
    if code:
        raise typer.Exit(code)
    if not (into / "run.json").exists():
        say(f"the recipe ended with code 0 and left no run in {into}: there is nothing to compare", error=True)
        raise typer.Exit(1)


def _commits(card: dict[str, Any], settings: dict[str, Any], folder: Path) -> dict[str, str]:
    """Settings that take from the Hub what the run took, whatever its branches and tags are now.

    Args:
        folder: for a mixture's file with the commits in it.
    """
    pinned: dict[str, str] = {}
    model, dataset = card["model"], settings.get("dataset")
    if model.get("commit") and "model_revision" in settings and not is_adapter(model["name"]):
        pinned["model_revision"] = model["commit"]
    if settings.get("tokenizer") and model.get("tokenizer_commit"):
        pinned["tokenizer"] = _downloaded(settings["tokenizer"], model["tokenizer_commit"])
    commits = card["data"].get("commits", {})
    if isinstance(dataset, str) and commits:
        pinned["dataset"] = _dataset_at(dataset, commits, folder)
    return pinned


def _dataset_at(dataset: str, commits: dict[str, str], folder: Path) -> str:
    """A dataset, or each source of a mixture, at the commit that is known of it."""
    from toolkit.data.sources.mixtures import as_mixture

    def at(name: str) -> str:
        return f"{name.rpartition('@')[0] if '@' in name else name}@{commits[name]}" if name in commits else name

    if as_mixture(dataset) is None:
        return at(dataset)
    if Path(dataset).suffix.lower() in (".yaml", ".yml"):
        entries = parse_yaml(read_text_file(dataset, f"--dataset {dataset}"), f"--dataset {dataset}")
        written = folder / "mixture.yaml"
        written.write_text(yaml.safe_dump([{**entry, "dataset": at(entry["dataset"])} for entry in entries]), encoding="utf-8")
        return str(written)
    parts = [part.strip().rpartition(":") for part in dataset.split(",") if part.strip()]
    return ",".join(f"{at(name)}:{weight}" for name, _, weight in parts)


def _downloaded(tokenizer: str, commit: str) -> str:
    """The directory of a tokenizer at a commit, as no setting names one; its name where the Hub doesn't give it."""
    from huggingface_hub import snapshot_download

    from toolkit.hub.client import reason

    try:
        return snapshot_download(tokenizer, revision=commit, allow_patterns=_OF_A_TOKENIZER)
    except Exception as error:  # whatever the Hub or the network can raise; what is newest may be the same
        say(f"{tokenizer} can't be had at the commit {commit} ({reason(error)}): the newest is taken", error=True)
        return tokenizer


def _placement(card: dict[str, Any]) -> Placement:
    typed = iter(card.get("launch", []))
    options = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(typed, typed, strict=False)}
    if "nodes" in options:
        raise Refusal(f"the run was on {options['nodes']} nodes: replay it there, with toolkit train on each.")
    processes = int(options.get("processes", card["layout"]["processes"]))
    return placement_of({"processes": processes, "accelerate_config": options.get("accelerate_config")})


def _differences(one: Path, other: Path) -> tuple[list[str], str]:
    """What differs, in words; and which losses were compared."""
    from toolkit.runs.differences import logged_losses, losses_of_the_same_steps, weights_difference

    cards = [json.loads((each / "run.json").read_text(encoding="utf-8")) for each in (one, other)]
    found = []
    tokenizers = [card["model"].get("tokenizer_commit") for card in cards]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:  # None the second time: of a directory, at the commit
        found.append(f"the tokenizer of {cards[0]['model']['tokenizer']}: of commit {tokenizers[0]}, then of {tokenizers[1]}")
    models = [card["model"].get("commit") for card in cards]
    if None not in models and models[0] != models[1]:  # of an adapter its base, which no setting pins
        found.append(f"the model on the Hub: of commit {models[0]}, then of {models[1]}")
    for name, before in cards[0]["layout"].items():
        if cards[1]["layout"].get(name) != before:
            found.append(f"{name.replace('_', ' ')}: {before}, then {cards[1]['layout'].get(name)}; start it as it was started")
    shared, logged = losses_of_the_same_steps(one, other), max(len(logged_losses(each)) for each in (one, other))
    loss = next(((step, ours, theirs) for step, ours, theirs in shared if repr(ours) != repr(theirs)), None)
    if loss is not None:
        found.append(f"first loss that differs: step {loss[0]}: {loss[1]!r}, then {loss[2]!r}")
    _, weights = weights_difference(one / "model", other / "model")
    if weights is not None:
        found.append(f"first tensor that differs: {weights}")
    partly = "" if len(shared) == logged else f" ({len(shared)} of {logged}: those logged of the same steps in both)"
    return found, f"the logged losses{partly}"
