"""toolkit env: what a bug report needs."""

import json
from typing import Annotated

import typer

from toolkit.system.console import BOLD, say


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what a bug report needs: versions, hardware, settings; without secrets.

    Environment variables and keys of Accelerate's config are shown by an allow-list; tokens in their values are taken out.
    """
    from toolkit.system.environment import environment_report

    report = environment_report()
    if as_json:
        say(json.dumps(report, indent=1, ensure_ascii=False))
        return
    for section, values in report.items():
        say(section, style=BOLD)
        width = max(map(len, values), default=0)
        for name, value in values.items():
            say(f"  {name:<{width}}  {value}")
        if not values:
            say("  none of those that matter")
