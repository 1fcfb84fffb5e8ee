"""What a run shows while it trains: progress on the screen, throughput; and which settings may be sent elsewhere."""

import dataclasses
import itertools
import math
import re
import shutil
import sys
import time
from typing import Any

import torch

from toolkit.config import groups, methods
from toolkit.container import in_container
from toolkit.engines import element_count

# Dense bf16 products without sparsity, in FLOP/s, from the makers' data sheets; longest name first, so that
# "H100 PCIe" is found before "H100".
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12,
    "L4": 121e12, "A10G": 70e12, "A10": 125e12, "4090": 165e12, "3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """The device's peak for bf16 matrix products in FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    by_length = sorted(PEAK_FLOPS, key=len, reverse=True)
    return next((PEAK_FLOPS[part] for part in by_length if re.search(rf"{part}(?![0-9A-Za-z])", name)), None)  # an L40 is no L4


def flops_per_token(model: Any) -> float:
    """Training FLOPs of one token: 6 a parameter in a matrix product (Kaplan et al. 2020, section 2.1), attention left out.

    A tied embedding counts once, since it is used once as a matrix; an untied input embedding is a look-up and counts not.
    """
    parameters = sum(element_count(p) for p in model.parameters())
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embeddings = model.get_input_embeddings().weight
    tied = head is not None and head.weight is embeddings
    return 6.0 * (parameters - (0 if tied else embeddings.numel()))


def peak_memory_gb(device: torch.device) -> float:
    """Most memory in use so far, in GB: allocated on a CUDA device, resident in the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows has no such figure in the standard library
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def public_settings(config: Any) -> dict[str, Any]:
    """The settings that may leave this machine: those of the toolkit's own groups, and of a recipe's own the numbers only.

    A recipe's author may keep a key in a field of text; no field of ours is for one.
    """
    known = [group for group in (*vars(groups).values(), *vars(methods).values()) if dataclasses.is_dataclass(group)]
    ours = {field.name for group in known for field in dataclasses.fields(group)}
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name in ours or isinstance(value, (bool, int, float))}


class Progress:
    """A line for each logging event, and on a terminal a moving one below them; only on the main process."""

    def __init__(self, total_steps: int, first_step: int, shown: bool) -> None:
        self.total_steps, self.first_step, self.shown = total_steps, first_step, shown
        self.live = shown and sys.stderr.isatty()
        self.started = time.monotonic()

    def moved(self, step: int) -> None:
        """A step is done: the moving line shows how far and how long, in one line of the terminal, however narrow it is."""
        if not self.live:
            return
        done = step / self.total_steps
        bar = "━" * round(24 * done) + "─" * (24 - round(24 * done))
        line = f"{bar} {step}/{self.total_steps}  {self._remaining(step)}"
        sys.stderr.write(f"\r\x1b[2K{line[: max(1, shutil.get_terminal_size().columns - 1)]}")
        sys.stderr.flush()

    def logged(self, step: int, figures: dict[str, float]) -> None:
        """A logging event: a line that stays."""
        shown = "  ".join(f"{_SHORT[name]} {_as_shown(name, figures[name])}" for name in _SHORT if name in figures)
        self.say(f"step {step}/{self.total_steps}  {shown}  {self._remaining(step)}".rstrip())

    def say(self, text: str) -> None:
        """A line that stays, above the moving one."""
        if self.shown:
            if self.live:
                sys.stderr.write("\r\x1b[2K")
            print(text, flush=True)  # one write: the log pumps of job runners split several

    def close(self) -> None:
        if self.live:
            sys.stderr.write("\n")

    def _remaining(self, step: int) -> str:
        done = step - self.first_step
        if done < 1:
            return ""
        seconds = (time.monotonic() - self.started) / done * (self.total_steps - step)
        return f"{seconds / 60:.1f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


_SHORT = {
    "loss": "loss", "learning_rate": "lr", "grad_norm": "norm", "tokens_per_second": "tokens/s",
    "examples_per_second": "examples/s", "mfu": "mfu",
}  # fmt: skip


def _as_shown(name: str, value: float) -> str:
    if name.endswith("_per_second") and math.isfinite(value):  # it varies by more than a third digit would say
        return f"{value:.3g}" if abs(value) < 1000 else show_number(round(value))
    return show_number(value)


def show_number(value: float) -> str:
    """A figure in as few characters as say it; in a SageMaker job without commas, which its metrics would not be read over."""
    comma = "" if in_container() else ","
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):{comma}}"
    if not math.isfinite(value) or 0.001 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:{comma}.0f}" if abs(value) >= 1000 else f"{value:.2e}"


def own_ends(prompts: list[str], width: int) -> list[str]:
    """The end of each prompt, which tells it from others, before what all of them end with: a chat template's words."""
    ends = zip(*(reversed(prompt) for prompt in prompts), strict=False) if len(prompts) > 1 else ()
    alike = sum(1 for _ in itertools.takewhile(lambda characters: len(set(characters)) == 1, ends))
    return [one_line((prompt[: len(prompt) - alike] or prompt)[::-1], width)[::-1] for prompt in prompts]


def one_line(text: str, width: int) -> str:
    """A text without line breaks, cut to so many characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
