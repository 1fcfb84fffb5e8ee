"""toolkit compare: where two runs differ first, in settings, environment, data, metrics and tensors."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.table import table
from toolkit.config.places import place_to_write, unwritable
from toolkit.system.console import BOLD, DIM, one_line, say
from toolkit.system.json_lines import strict_json

if TYPE_CHECKING:
    from toolkit.report.compare import Comparison

_MOST_ROWS = 6  # of a stage
_WIDEST = 44  # of a value


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Output directories of two or more runs.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="A page with it, and the curves in one frame.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all differences.")] = False,
) -> None:
    """Show where runs differ first: setting, environment, data, step, loss, tensor; and what is the likely cause.

    Each run is compared with the first. Nothing is trained and no model is loaded. Settings that only name places are left out.

    Ends with 0 when all are equal to the bit, with 1 when they differ or one lacks what another has, with 2 when they can't be
    compared.
    """
    if len(run_dirs) < 2:
        raise typer.BadParameter("needs two runs or more.", param_hint="RUN")
    target = place_to_write(output, "--output", is_file=True) if output else None
    from toolkit.report.compare import compare_runs
    from toolkit.report.verdict import is_equal

    found = compare_runs(run_dirs)
    if as_json:
        shown = {"runs": [str(path) for path in run_dirs], "comparisons": [_as_json(each) for each in found]}
        say(json.dumps(strict_json(shown), indent=1, allow_nan=False))
    else:
        for number, each in enumerate(found):
            say("\n" * (number > 0), end="")
            _show(each, ("A", chr(ord("B") + number)) if number < 25 else ("A", f"run {number + 2}"))
    if target is not None:
        from toolkit.report.page import write_comparison

        try:
            write_comparison(found, target)
        except OSError as error:
            raise unwritable(target, "--output", error) from error
        say(target, error=as_json)
    if not all(map(is_equal, found)):
        raise typer.Exit(1)


def _show(comparison: "Comparison", names: tuple[str, str]) -> None:
    from toolkit.report.compare import STAGES
    from toolkit.report.verdict import verdict

    for name, run in zip(names, comparison.runs, strict=True):
        status = f"  {run.summary['status']}" if isinstance(run.summary.get("status"), str) else ""
        say(f"{name}  {run.directory}{status}", style=BOLD)
    rows, more, same = [["", "what", *names, "difference"]], [], []
    for stage in STAGES:
        found = _rows(comparison, stage)
        rows += found[:_MOST_ROWS]
        more += [f"{len(found) - _MOST_ROWS} more of {stage}"] if len(found) > _MOST_ROWS else []
        same += [] if found or stage in (*comparison.absent, *comparison.lacking) else [stage]
    say("")
    for number, line in enumerate(table(rows, shrinks=(1, 2, 3, 4)) if len(rows) > 1 else []):
        say(line, style="" if number else DIM)
    if more:
        say(f"({', '.join(more)}; --json has all)", style=DIM)
    if same:
        say(f"no difference found: {', '.join(same)}", style=DIM)
    for what, stages in (("in neither run", comparison.absent), ("not compared, or not all of it", comparison.lacking)):
        if stages:
            say(f"{what}: {', '.join(stages)}", style=DIM)
    for note in comparison.notes:
        say(f"note: {note}")
    say(f"\n{verdict(comparison, names)}", style=BOLD)


def _rows(comparison: "Comparison", stage: str) -> list[list[str]]:
    from toolkit.report.verdict import by_how_much, show_value

    rows = []
    for each in comparison.differences:
        if each.stage == stage:
            shown = ["" if each.about and value is None else one_line(show_value(value), _WIDEST) for value in each.values]
            about = by_how_much(each) or ("" if each.has_effect else "changes no weight")
            where = f"{stage} {each.step}" if stage == "step" else stage if each.step is None else f"{stage}, step {each.step}"
            rows.append([where, each.name, *shown, about])
    return rows


def _as_json(comparison: "Comparison") -> dict[str, Any]:
    from toolkit.report.verdict import by_how_much, is_equal, verdict

    differences = [
        {"stage": each.stage, "name": each.name, "step": each.step, "values": each.values,
         "difference": by_how_much(each) or None, "has_effect": each.has_effect}
        for each in comparison.differences
    ]  # fmt: skip
    return {
        "runs": [str(run.directory) for run in comparison.runs], "equal": is_equal(comparison), "steps": comparison.steps,
        "tensors": comparison.tensors, "differences": differences, "absent": comparison.absent,
        "lacking": comparison.lacking, "notes": comparison.notes, "verdict": verdict(comparison),
    }  # fmt: skip
