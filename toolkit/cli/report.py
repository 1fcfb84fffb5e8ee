"""toolkit report: one HTML page about runs."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.config.places import place_to_write, unwritable


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Output directories of runs.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html in the first directory.")
    ] = None,
) -> None:
    """Write one HTML page about runs: curves, samples, settings.

    It holds all that it shows, and loads nothing. A run may still be going.
    """
    from toolkit.report import write_report
    from toolkit.system.console import say

    target = place_to_write(output, "--output", is_file=True) if output else run_dirs[0] / "report.html"
    try:
        say(write_report(run_dirs, target))
    except OSError as error:  # such as a full disk
        raise unwritable(target, "--output", error) from error
