"""toolkit export: a model directory of a run's checkpoint, also of a run that was interrupted or still goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.setting_options import directory_to_write
from toolkit.config import Refusal
from toolkit.system.console import say

if TYPE_CHECKING:
    from toolkit.checkpoint import State

# Settings left at their defaults: a checkpoint fits any layout, and here it is put into one model on the CPU.
_OF_THE_LAYOUT = (
    "zero_stage", "fsdp", "offload", "deepspeed", "bf16", "fp16", "fp8", "tf32", "attn_implementation", "torch_compile",
    "gradient_checkpointing", "dataloader_num_workers", "report_to", "push_to_hub",
)  # fmt: skip


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's output directory, or one of its checkpoints.")],
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the model is written. Default: RUN/model-step-N, with --best RUN/best_model."),
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="The checkpoint of this step. Default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint of the best evaluation.")] = False,
    recipe: Annotated[str | None, typer.Option(metavar="FILE", help="The recipe, if it is elsewhere than it was.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of what is in DIR.")] = False,
) -> None:
    """Write the model of a checkpoint as a directory for `from_pretrained`, with tokenizer and model card.

    A run writes model/ when it ends. This makes one of a run that was interrupted, or of an earlier step. The recipe makes the
    model as it did for the run, on the CPU and without training, so its data must still be where they were. The run itself is
    left as it is, and may go on meanwhile.
    """
    if run.parent.name == "checkpoints" and run.name.removeprefix("step-").isdecimal():
        if step is not None or best:
            raise typer.BadParameter(f"{run}: is one checkpoint. Leave out --step and --best.", param_hint="RUN")
        run, step = run.parent.parent, int(run.name.removeprefix("step-"))
    checkpoint = _find(run, step, best).absolute()
    run = Path(os.path.abspath(run))
    usual = "best_model" if best else f"model-{checkpoint.name}"
    name = into.as_posix() if into and not into.is_absolute() else (into or Path(usual)).name
    into = directory_to_write(into or run / usual, checkpoint, overwrite)
    into = Path(os.path.abspath(into))
    if checkpoint.parent.resolve() in into.resolve().parents:
        raise Refusal(f"--into {into}: is among the run's checkpoints. Name another.")

    from toolkit.cli.replay_checks import directory_of, script_of
    from toolkit.command_line.recipe import errors_refused, read_recipe
    from toolkit.diagnostics.short_runs import ended_by_signals

    card, recipe = _card_of(run), str(Path(recipe).absolute()) if recipe else None
    saved = _read(checkpoint)  # before the recipe makes the model: meanwhile a run that goes on may prune it
    with contextlib.chdir(directory_of(card)), contextlib.redirect_stdout(io.StringIO()):  # what a run prints
        script = Path(recipe or script_of(card)).absolute()
        main, config = read_recipe(script, ["--config", str(run / "config.yaml")])
        with errors_refused(script), ended_by_signals(), _untrained(run, saved, checkpoint, into, name) as written:
            main(_alone(config, run))
    if not written:
        raise Refusal(f"{script}: calls tk.save_model for no model of its output directory: there is nothing to export.")
    say(f"Saved {into}: the model after step {checkpoint.name.removeprefix('step-')}")


def _find(run: Path, step: int | None, best: bool) -> Path:
    """The checkpoint that is meant.

    Raises:
        Refusal: there is none.
    """
    from toolkit.checkpoint import latest_checkpoint, list_checkpoints, read_pointer

    if not run.is_dir():
        raise typer.BadParameter(f"{run}: there is no such directory.", param_hint="RUN")
    if best and step is not None:
        raise typer.BadParameter("--step names one already. Leave one of the two out.", param_hint="--best")
    root = run / "checkpoints"
    steps = [path.name.removeprefix("step-") for path in list_checkpoints(root)]
    if step is not None:
        found = root / f"step-{step}" if str(step) in steps else None
    else:
        found = read_pointer(root, "best") if best else latest_checkpoint(root)
    if found is None:
        wanted = f"of step {step}" if step is not None else "of a best evaluation" if best else "that is whole"
        there = f" There are those of the steps {', '.join(steps)}." if steps else ""
        raise Refusal(f"{run}: no checkpoint {wanted} is in it.{there}")
    return found


def _read(checkpoint: Path) -> State:
    """The checkpoint without what only training needs.

    Raises:
        Refusal: it is damaged.
    """
    from toolkit.checkpoint import load_checkpoint

    return dataclasses.replace(load_checkpoint(checkpoint), optimizer={}, kept={}, random={})


def _card_of(run: Path) -> dict[str, Any]:
    from toolkit.system.json_lines import read_object

    card = read_object(run / "run.json")
    if not card or not isinstance(card.get("recipe"), dict) or not (run / "config.yaml").is_file():
        raise Refusal(f"{run}: run.json or config.yaml is missing, which every recipe writes when its run begins.")
    return card


def _alone(config: Any, run: Path) -> Any:
    from toolkit.config import DataConfig, ModelConfig, RunConfig, settings_of

    groups = (ModelConfig, DataConfig, RunConfig)
    defaults = {name: each.default for group in groups for name, each in settings_of(group).items() if name in _OF_THE_LAYOUT}
    changes = {name: default for name, default in defaults.items() if name in vars(config)}
    changes |= {"resume": True, "resume_from": None, "overwrite_output_dir": False}  # it is there already
    return dataclasses.replace(config, use_cpu=True, output_dir=str(run), **changes)


class _Nothing:
    """In place of a run, a teacher or a reference: it has no steps, nothing is due, and every call does nothing."""

    step = position = 0

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@contextlib.contextmanager
def _untrained(run: Path, saved: State, checkpoint: Path, into: Path, name: str) -> Iterator[list[Path]]:
    """A block in which recipes take no step, and `tk.save_model` writes the checkpoint's weights to `into`; where it did.

    `saved`: what was read of it. `name`: of the model, in its card.
    """
    from toolkit.diagnostics.replacements import Replacements

    written: list[Path] = []

    def save_model(
        save: Callable[..., Path], accelerator: Any, model: Any, tokenizer: Any, output_dir: Any, *_: Any,
        dtype: str = "auto", files: Any = None,
    ) -> Path:  # fmt: skip
        if Path(output_dir).absolute() == run:  # what a recipe saves elsewhere stays as it is: here it is not trained
            _write(saved, checkpoint, run, into, name, model, tokenizer, dtype, files)
            written.append(into)
        return Path(output_dir) / "model"

    with Replacements() as replace:
        for each in ("open_run", "build_reference", "reference_logps", "connect_server", "load_rewards"):
            replace.public(each, lambda *_, **__: _Nothing())
        for each in ("load_best", "save_to_hub", "keep_teacher", "keep_reference"):
            replace.public(each, lambda *_, **__: None)
        replace.public("build_teacher", lambda build, accelerator, model, tokenizer, config, *given, **__: (_Nothing(), *given))
        replace.public("fit_micro_batch", lambda fit, accelerator, model, optimizer, train, *_: train)
        replace.public("save_model", save_model)
        yield written


def _write(
    saved: State, checkpoint: Path, run: Path, into: Path, name: str, model: Any, tokenizer: Any, dtype: str, files: Any
) -> None:  # fmt: skip
    from toolkit.checkpoint import apply_state
    from toolkit.distributed.engines import unwrapped
    from toolkit.distributed.engines.pieces import whole_state_dict
    from toolkit.export.card import with_name
    from toolkit.export.model_directory import BadModel, card_of_run, write_model
    from toolkit.runs.summary import Summary, evaluations_by_step
    from toolkit.system.json_lines import read_lines

    plain = unwrapped(model)
    apply_state(saved, plain, None)
    step = int(checkpoint.name.removeprefix("step-"))
    try:
        metrics = evaluations_by_step(read_lines(run / "metrics.jsonl")).get(step, {})
    except OSError as error:
        raise Refusal(f"{run / 'metrics.jsonl'}: cannot be read ({error.strerror}); the model card has its metrics.") from error
    card = with_name(card_of_run(plain, tokenizer, run, Summary(metrics), files or ()), name)
    try:
        write_model(into, plain, whole_state_dict(None, plain) or {}, tokenizer, card, dtype, files)
    except BadModel as error:
        raise Refusal(f"{checkpoint}: {error}") from error
