"""Numbers as a person reads them."""

import math

from toolkit.system.sagemaker_container import in_container


def show_number(value: float) -> str:
    """A figure in as few characters as say it; in a SageMaker job without commas, which its metrics would not be read over."""
    comma = "" if in_container() else ","
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):{comma}}"
    if not math.isfinite(value) or 0.001 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:{comma}.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.2e}"
