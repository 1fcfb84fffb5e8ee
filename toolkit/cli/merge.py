"""toolkit merge: an ordinary model of an adapter and its base."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.setting_options import directory_to_write
from toolkit.config.conditions import is_adapter
from toolkit.system.console import say


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A run's output directory, or an adapter's.")],
    into: Annotated[Path, typer.Option(metavar="DIR", help="Where the model is written.")],
    dataset: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose first rows are compared. Default: the run's own.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of what is in DIR.")] = False,
) -> None:
    """Put an adapter's updates into the weights of its base model, and write the model that comes out.

    On a few rows its logits are compared with those of the base with the adapter on it: at most 1e-5 of the largest away in
    float32, 1e-2 in float16, 5e-2 in bfloat16. Ends with 1 when they are further away; then nothing is written.
    """
    if not adapter.is_dir():
        raise typer.BadParameter(f"{adapter}: there is no such directory.", param_hint="ADAPTER")
    if not is_adapter(str(adapter)) and is_adapter(str(adapter / "model")):
        adapter = adapter / "model"
    into = directory_to_write(into, adapter, overwrite)

    from toolkit.distributed.engines.pieces import whole_state_dict
    from toolkit.export.merge import NotTheSame, merge_adapter
    from toolkit.export.model_directory import BadModel, write_model
    from toolkit.models.sentence_files import read_sentence_files

    try:
        merged = merge_adapter(adapter, dataset)
        into = into.absolute()
        dtype = str(merged.dtype).removeprefix("torch.")
        state = whole_state_dict(None, merged.model) or {}
        files = read_sentence_files(adapter)
        write_model(into, merged.model, state, merged.tokenizer, _card(adapter, merged, into.name, files), dtype, files)
    except (NotTheSame, BadModel) as error:
        say(str(error), error=True)
        raise typer.Exit(1) from error
    say(f"{into}: a model in {dtype}; what it computes is {merged.difference:.1e} of the largest away from the adapted one's")


def _card(adapter: Path, merged: Any, name: str, files: Collection[str]) -> str:
    """A model card, from the run card next to the adapter where there is one."""
    from toolkit.export.card import base_license, model_card
    from toolkit.export.model_directory import traits_of
    from toolkit.system.json_lines import read_object

    path = adapter.resolve().parent / "run.json"
    run_card = read_object(path)
    run_card["model"] = {**run_card.get("model", {}), "name": merged.base}
    metrics = run_card.get("end", {}).get("figures", {})
    architecture, traits = type(merged.model).__name__, traits_of(merged.model, merged.tokenizer, files)
    text = model_card(run_card, metrics, name, architecture, license=base_license(merged.base), traits=traits)
    return f"{text.rstrip()}\n\nThe adapter that was trained is merged into the weights.\n"
