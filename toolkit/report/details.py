"""Below the curves: samples, settings, environment, files. Everything that comes from a run is escaped."""

import os
import re
import urllib.parse
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from toolkit.report.reading import RunRecord, SettingLine
from toolkit.system.numbers import show_bytes, show_digits

FILES = (
    ("summary.json", "final metrics"), ("metrics.jsonl", "every logged metric"), ("samples.jsonl", "every sample"),
    ("config.yaml", "settings, to repeat the run"), ("run.json", "environment"), ("model", "the trained model"),
    ("checkpoints", "to continue the run"),
)


def show_samples(run: RunRecord) -> str:
    """For each prompt its first and its last text and the answer in the data, side by side; the steps between folded away."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in run.samples:
        by_prompt.setdefault(str(sample.get("prompt", "")), []).append(sample)
    cards = []
    for prompt, samples in by_prompt.items():
        first, last = samples[0], samples[-1]
        columns = [_sample_text(_when(first), first.get("text"), "")] if len(samples) > 1 else []
        columns.append(_sample_text(_when(last), last.get("text"), "newest"))
        if last.get("reference") is not None:
            columns.append(_sample_text("In the data", last["reference"], "reference"))
        between = "".join(_sample_text(_when(s), s.get("text"), "") for s in samples[1:-1])
        more = "1 more step" if len(samples) == 3 else f"{len(samples) - 2} more steps"
        folded = f"<details><summary>{more}</summary>{between}</details>" if between else ""
        cards.append(
            f'<div class="sample"><div class="prompt"><h5>Prompt</h5><pre>{escape(prompt) or "<em>(empty)</em>"}</pre></div>'
            f'<div class="columns">{"".join(columns)}</div>{folded}</div>'
        )
    return f'<section><h3>Samples</h3>{"".join(cards)}</section>' if cards else ""


def _when(sample: dict[str, Any]) -> str:
    score = sample.get("score")
    return f"Step {sample.get('step', '?')}" + (f", {score}" if score is not None else "")


def _sample_text(title: str, text: Any, kind: str) -> str:
    shown = escape("" if text is None else str(text)).strip("\n")
    return f'<div class="text {kind}"><h5>{escape(title)}</h5><pre>{shown or "<em>(nothing)</em>"}</pre></div>'


def show_settings(run: RunRecord) -> str:
    if not run.settings:
        return ""
    changed = [line for line in run.settings if line.default is not None]
    parts = []
    if changed:
        head = "<tr><th>Changed</th><th>Value</th><th>Default</th></tr>"
        parts.append(f'<div class="scroll"><table class="settings">{head}{_setting_rows(changed, True)}</table></div>')
    panels: dict[str, list[SettingLine]] = {}
    for line in run.settings:
        panels.setdefault(line.panel, []).append(line)
    tables = "".join(
        f"<div>{f'<h5>{escape(panel)}</h5>' if panel else ''}<table class=settings>{_setting_rows(lines, False)}</table></div>"
        for panel, lines in panels.items()
    )
    words = f"All {len(run.settings)} settings"
    parts.append(f'<details{"" if changed else " open"}><summary>{words}</summary><div class="panels">{tables}</div></details>')
    return f"<section><h3>Settings</h3>{''.join(parts)}</section>"


def _setting_rows(lines: Iterable[SettingLine], with_default: bool) -> str:
    rows = ""
    for line in lines:
        default = f'<td class="faint">{escape(line.default or "")}</td>' if with_default else ""
        unread = "" if line.is_read else ' <span class="faint">not read</span>'
        rows += f"<tr><th><code>{escape(line.name)}</code></th><td>{escape(line.value)}{unread}</td>{default}</tr>"
    return rows


def show_environment(run: RunRecord) -> str:
    """run.json without its copy of the settings: what matters most in a line, one table a group below it."""
    groups = {name: value for name, value in run.card.items() if name not in ("settings", "not_read")}
    loose = {name: value for name, value in groups.items() if not isinstance(value, dict)}
    tables = [(name.replace("_", " "), value) for name, value in groups.items() if isinstance(value, dict) and value]
    tables += [("run", loose)] if loose else []
    if not tables:
        return ""
    cells = "".join(
        f"<div><h5>{escape(name.capitalize())}</h5><table>{''.join(map(_environment_row, group.items()))}</table></div>"
        for name, group in tables
    )
    known = dict(tables)
    hardware, versions = known.get("hardware", {}), known.get("versions", {})
    words = [str(hardware["device"])] if hardware.get("device") else []
    words += [f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "accelerate") if name in versions]
    line = escape(" · ".join(words)) or "What this run was made of"
    return (
        f'<section><h3>Environment</h3><details{"" if words else " open"}><summary>{line}</summary>'
        f'<div class="panels">{cells}</div></details></section>'
    )


def _environment_row(item: tuple[str, Any]) -> str:
    name, value = item
    if isinstance(value, (dict, list)):
        value = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else ", ".join(map(str, value))
    shown = show_digits(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
    if re.fullmatch(r"[0-9a-f]{32,}", shown):  # a digest: its start is enough to recognize it
        shown = shown[:12] + "…"
    return f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape('–' if value is None else shown)}</td></tr>"


def show_files(run: RunRecord, folder: Path) -> str:
    links = []
    for name, meaning in FILES:
        file = run.directory / name
        if file.exists():
            place = urllib.parse.quote(Path(os.path.relpath(file, folder)).as_posix()) + ("/" if file.is_dir() else "")
            about = meaning if file.is_dir() else f"{meaning}, {show_bytes(file.stat().st_size)}"
            links.append(f'<li><a href="{escape(place)}">{escape(name)}</a> <span class="faint">{escape(about)}</span></li>')
    return f'<section><h3>Files</h3><ul class="files">{"".join(links)}</ul></section>' if links else ""
