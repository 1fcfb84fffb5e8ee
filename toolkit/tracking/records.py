"""What a run records while it trains: lines of metrics.jsonl and samples.jsonl, on the screen, and in trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.system.console import one_line, own_ends
from toolkit.system.json_lines import LineFile

if TYPE_CHECKING:
    from toolkit.tracking.console import Progress
    from toolkit.tracking.trackers import Trackers

FILES = ("metrics.jsonl", "samples.jsonl")


class Records:
    """The files, the screen and the trackers of a run. Only the main process writes."""

    def __init__(self, output_dir: Path, display: Progress, trackers: Trackers) -> None:
        self.display, self.trackers, self.is_main = display, trackers, display.shown
        self._metrics, self._samples = (LineFile(output_dir / name) for name in FILES)

    def add_metrics(self, where: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write metrics, with `where` (step, epoch, examples, time) before them."""
        if self.is_main:
            self._append(self._metrics, {**where, **metrics})
        self.trackers.log(metrics, where["step"])

    def add_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Write and show generated samples ("prompt", "text", perhaps "reference" or "score")."""
        if self.is_main:
            for sample, prompt in zip(samples, own_ends([sample["prompt"] for sample in samples], 50), strict=True):
                self._append(self._samples, {"step": step, **sample})
                score = f" ┃ {sample['score']}" if "score" in sample else ""
                self.display.say(f"  sample ┃ {prompt} ┃ {one_line(sample['text'], 100)}{score}")
            self.trackers.add_samples(samples, step)

    def _append(self, file: LineFile, record: dict[str, Any]) -> None:
        if error := file.append(record):
            self.display.say(f"WARNING: {file.path}: {error}. Its lines wait until they can be written.")
