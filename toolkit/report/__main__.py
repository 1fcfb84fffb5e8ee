"""python -m toolkit.report RUN_DIR... --output PATH"""

import argparse
import sys
from pathlib import Path

from toolkit.config import Refusal
from toolkit.config.places import place_to_write, unwritable
from toolkit.report import write_report
from toolkit.system.console import say


def main(arguments: list[str] | None = None) -> int:
    """Write the page and say where it lies; 2 when a directory holds no run."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.report", description="Write one HTML page about training runs.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="Output directory of a run.")
    parser.add_argument("--output", type=Path, help="The page. Default: report.html in the first directory.")
    given = parser.parse_args(arguments)
    path = given.run_dirs[0] / "report.html"
    try:
        path = place_to_write(given.output, "--output", is_file=True) if given.output else path
        write_report(given.run_dirs, path)
    except OSError as error:  # such as a full disk
        say(unwritable(path, "--output", error), error=True)
        return 2
    except Refusal as refusal:
        say(refusal, error=True)
        return 2
    say(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
