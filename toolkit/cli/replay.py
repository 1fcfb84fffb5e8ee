"""toolkit replay: run again what a run card describes, and compare the weights."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from toolkit.cli.placement import Placement, placement_of
from toolkit.cli.recipe_file import find_recipe
from toolkit.config import Refusal
from toolkit.config.conditions import is_adapter
from toolkit.launch import launch

# What a replay must not do once more, and what would make it another run: these keys are left at their defaults.
_NOT_REPEATED = (
    "output_dir", "overwrite_output_dir", "resume", "resume_from", "allow_change", "report_to", "run_name", "push_to_hub",
    "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision",
)  # fmt: skip
_OF_A_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "*.py"]


def replay(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The output directory of a run that has ended.", show_default=False)
    ],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Where the new run is written. Default: DIR-replay.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="FILE", help="The recipe, if it lies elsewhere than it did.")
    ] = None,
) -> None:
    """Run a recipe again as it was run, from config.yaml and run.json in DIR, and compare losses and weights bit for bit.

    Nothing is pushed and no tracker is told. The number of processes and of threads, and the launch file, are those of the
    run. On the same machine with the same libraries the weights are the same; what is not the same there is said first.

    Ends with 0 when they are identical, with 1 when they differ, with the recipe's own code when it fails.
    """
    directory = directory.absolute()
    card, settings = _read(directory)
    script = recipe or _script(card)
    _check_recipe(script, card)
    _check_directories(card)
    _say_what_changed(card)
    into = into or directory.with_name(f"{directory.name}-replay")
    placement = _placement(card)
    environment = {**placement.environment, "OMP_NUM_THREADS": str(card["hardware"]["threads"])}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        repeated = {name: value for name, value in settings.items() if name not in _NOT_REPEATED}
        repeated |= _commits(card, settings, Path(folder))
        config.write_text(yaml.safe_dump(repeated), encoding="utf-8")
        command = [sys.executable, script, "--config", str(config), "--output-dir", str(into)]
        code = launch(command, placement.processes, placement.nodes, environment=environment)
    if code:
        raise typer.Exit(code)
    differences = _differences(directory, into)
    if differences:
        typer.echo("\n  ".join([f"{into} differs from {directory}:", *differences]))
        raise typer.Exit(1)
    typer.echo(f"identical: the weights and the logged losses of {into} and {directory}, bit for bit")


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory}: there is no such directory.", param_hint="DIR")
    files = [directory / "run.json", directory / "config.yaml"]
    for path in files:
        if not path.exists():
            raise Refusal(f"{path}: is not there. Every recipe writes it when its run begins.")
    try:
        card, settings = json.loads(files[0].read_text(encoding="utf-8")), yaml.safe_load(files[1].read_text(encoding="utf-8"))
        if card["end"]["status"] not in ("finished", "stopped early"):
            raise Refusal(f"{directory}: the run is {card['end']['status']}. Continue it with --resume, then replay it.")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{directory}: the run has not ended, or its run.json is of another version ({error!r}).") from error
    for name in ("resume_from", "allow_change"):
        if settings.get(name):
            raise Refusal(f"{directory}: {name} is given: the run began elsewhere, or as another one. It can't be replayed.")
    return card, settings


def _script(card: dict[str, Any]) -> str:
    written = card["recipe"]["path"]
    if written and Path(written).is_file():
        return written
    return find_recipe(Path(card["recipe"]["file"]).stem)


def _check_recipe(script: str, card: dict[str, Any]) -> None:
    from toolkit.run_card import sha256_of

    if not Path(script).is_file():
        raise typer.BadParameter(f"{script}: there is no such file.", param_hint="--recipe")
    if sha256_of(Path(script)) != card["recipe"]["sha256"]:
        commit = card["recipe"]["commit"]
        at = f" It stood at the commit {commit}." if commit else ""
        raise Refusal(f"{script}: is not the recipe of that run, whose text was another.{at} Name that one: --recipe FILE")


def _check_directories(card: dict[str, Any]) -> None:
    from toolkit.directory_digest import directory_digest

    for name, digest in card["model"].get("directories", {}).items():
        if Path(name).expanduser().is_dir() and directory_digest(name) != digest:
            raise Refusal(
                f"{name}: the model's files have changed since that run, which began from others. Put those back to replay it."
            )


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
        entries = yaml.safe_load(Path(dataset).expanduser().read_text(encoding="utf-8"))
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
    except Exception as error:  # whatever the Hub or the network can say; what is newest may be the same
        typer.echo(f"{tokenizer} can't be had at the commit {commit} ({reason(error)}): the newest is taken", err=True)
        return tokenizer


def _say_what_changed(card: dict[str, Any]) -> None:
    import platform

    from toolkit.run_card import library_versions

    hardware = card["hardware"]
    now = {"python": platform.python_version(), **library_versions()}
    for name, before in card["versions"].items():
        if now.get(name) != before:
            typer.echo(f"{name} was {before} and is {now.get(name, 'not there')}: the weights may differ", err=True)
    if (os.cpu_count(), platform.processor() or platform.machine()) != (hardware["cores"], hardware["processor"]):
        typer.echo("this is another machine than the run's: the weights may differ", err=True)


def _placement(card: dict[str, Any]) -> Placement:
    typed = iter(card.get("launch", []))
    options = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(typed, typed, strict=False)}
    if "nodes" in options:
        raise Refusal(f"the run was on {options['nodes']} nodes: replay it there, with toolkit train on each.")
    processes = int(options.get("processes", card["layout"]["processes"]))
    return placement_of({"processes": processes, "accelerate_config": options.get("accelerate_config")})


def _differences(one: Path, other: Path) -> list[str]:
    from toolkit.run_differences import first_loss_difference, first_model_difference

    cards = [json.loads((each / "run.json").read_text(encoding="utf-8")) for each in (one, other)]
    data = [card["data"]["fingerprint"] for card in cards]
    found = [] if data[0] == data[1] else ["the data are not the same: another fingerprint"]
    tokenizers = [card["model"].get("tokenizer_commit") for card in cards]
    if None not in tokenizers and tokenizers[0] != tokenizers[1]:  # None the second time: of a directory, at the commit
        found.append(f"the tokenizer of {cards[0]['model']['tokenizer']}: of commit {tokenizers[0]}, then of {tokenizers[1]}")
    models = [card["model"].get("commit") for card in cards]
    if None not in models and models[0] != models[1]:  # of an adapter its base, which no setting pins
        found.append(f"the model on the Hub: of commit {models[0]}, then of {models[1]}")
    for name, before in cards[0]["layout"].items():
        if cards[1]["layout"].get(name) != before:
            found.append(f"{name.replace('_', ' ')}: {before}, then {cards[1]['layout'].get(name)}; start it as it was started")
    loss = first_loss_difference(one, other)
    if loss is not None:
        found.append(f"first loss that differs: step {loss.step}: {loss.losses[0]!r}, then {loss.losses[1]!r}")
    weights = first_model_difference(one / "model", other / "model")
    return [*found, f"first tensor that differs: {weights}"] if weights else found
