"""Seconds, counts and the ticks of an axis as a person reads them on a page."""

import math

from toolkit.system.numbers import is_usable


def show_seconds(seconds: float) -> str:
    """40 ms · 45 s · 2 min 3 s · 5 h 12 min."""
    if not is_usable(seconds):
        return "–"
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.1f}".removesuffix(".0") + " ms"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def show_count(count: float) -> str:
    """1.3 M · 596 M · 8.03 B · 12,345."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], about `about` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{tick * step:.12g}") for tick in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], with 2 and 5 times them where the range is short."""
    factors = (1, 2, 5) if high / low < 2000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]


def finite_number(value: object) -> float | None:
    """A number of a JSON file as a float; None for what is no number, or no usable one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_usable(value):
        return None
    return float(value)
