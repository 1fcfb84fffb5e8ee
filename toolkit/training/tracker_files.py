"""What a tracker that keeps files gets at the end of a run: its card and a report."""

from pathlib import Path
from typing import Any


def files_of_a_run(run: Any) -> list[Path]:
    """The run card and a report, for trackers that keep files."""
    from toolkit.report import write_report

    report = run.output_dir / "trackers" / "report.html"
    report.parent.mkdir(exist_ok=True)
    try:
        write_report([run.output_dir], report)
    except Exception as error:  # a report is not worth a run
        run.say(f"WARNING: no report for the trackers: {type(error).__name__}: {error}")
    return [run.output_dir / "run.json", report]
