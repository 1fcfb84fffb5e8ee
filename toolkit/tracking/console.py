"""What a run shows while it trains: a line for each logging event, and a progress bar."""

import math
import sys
import time
from collections.abc import Mapping

from toolkit.system.console import say, show_moving_line
from toolkit.system.numbers import show_decimals, show_time


class Progress:
    """A line for each logging event, and on a terminal a moving one below them; only on the main process."""

    def __init__(self, total_steps: int, first_step: int, shown: bool) -> None:
        self.total_steps, self.first_step, self.shown = total_steps, first_step, shown
        self.live = shown and sys.stderr.isatty()
        self.started = time.monotonic()

    def resume(self, total_steps: int, first_step: int) -> None:
        """Count from a later step."""
        self.total_steps, self.first_step, self.started = total_steps, first_step, time.monotonic()

    def moved(self, step: int) -> None:
        """A step is done: the moving line shows how far and how long, in one line of the terminal, however narrow it is."""
        if not self.live:
            return
        done = step / self.total_steps
        bar = "━" * round(24 * done) + "─" * (24 - round(24 * done))
        show_moving_line(f"{bar} {step}/{self.total_steps}  {self._remaining(step)}")

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """A logging event: a line that stays."""
        labels = _labels(metrics).items()
        shown = "  ".join(f"{label} {_as_shown(name, metrics[name])}" for name, label in labels if name in metrics)
        self.say(f"step {step}/{self.total_steps}  {shown}  {self._remaining(step)}".rstrip())

    def say(self, text: str) -> None:
        """A line that stays, above the moving one."""
        if self.shown:
            if self.live:
                show_moving_line()
            say(text)  # one write: the log pumps of job runners split several

    def close(self) -> None:
        if self.live:
            say("", error=True)

    def _remaining(self, step: int) -> str:
        done = step - self.first_step
        if done < 1:
            return ""
        return f"ETA {show_time((time.monotonic() - self.started) / done * (self.total_steps - step))}"


_OF_ROLLOUTS = {
    "groups_without_spread": "without_spread", "completion_length": "length", "entropy": "entropy", "kl": "kl",
    "sampling_seconds": "sampling_s", "learning_seconds": "learning_s",
}  # fmt: skip
_SHORT = {
    "loss": "loss", "learning_rate": "lr", "grad_norm": "norm",
    "tokens_per_second": "supervised_tokens/s",
    "examples_per_second": "examples/s", "mfu": "mfu",
}  # fmt: skip


def show_metrics(metrics: Mapping[str, float]) -> str:
    """Names and values in a line."""
    return "  ".join(f"{name} {show_decimals(value)}" for name, value in metrics.items())


def _labels(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics of a line, in order, and what they are called there; where completions are sampled, those come first."""
    if "reward" not in metrics:
        return _SHORT
    each = [name for name in metrics if name.startswith("reward_") and not name.endswith("_std")]
    return {"reward": "reward", **{name: name for name in each if len(each) > 1}, **_OF_ROLLOUTS, **_SHORT}


def _as_shown(name: str, value: float) -> str:
    if name.endswith("_per_second") and math.isfinite(value):  # it varies by more than a third digit would show
        return f"{value:.3g}" if abs(value) < 1000 else show_decimals(round(value))
    return show_decimals(value)
