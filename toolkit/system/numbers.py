"""Numbers as a person reads them: to four decimals in a line of the console, to four digits on a page.

Losses that are logged one below the other are read by their decimals; on a page digits without meaning take up room.
"""

import math

from toolkit.system.sagemaker_container import in_container


def show_decimals(value: float) -> str:
    """86.4400 · 1.6523 · 12,346 · 2.50e-04. No commas in a SageMaker job: its regular expressions for metrics match none."""
    comma = "" if in_container() else ","
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):{comma}}"
    if not math.isfinite(value) or 0.001 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:{comma}.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.2e}"


def show_digits(value: float) -> str:
    """About four significant digits: 12,345 · 86.4 · 1.652 · 0.0123 · 2.5e-4 · 3.14e93."""
    if not is_usable(value):
        return str(float("inf") if value > 0 else -float("inf") if value < 0 else value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if 1000 <= size < 1e15:
        return f"{value:,.0f}"
    if 1e-3 <= size < 1e15:
        digits = max(0, 3 - math.floor(math.log10(size)))
        return f"{value:.{min(digits, 4)}f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def show_time(seconds: float) -> str:
    """Such as 6:05 or 1:06:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def show_bytes(size: float) -> str:
    """12 kB · 5.2 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"


def is_usable(value: float) -> bool:
    """Whether a number from a file is finite, and no whole number of hundreds of digits, which no float is."""
    return abs(value) < 1e300
