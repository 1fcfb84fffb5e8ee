"""Progress bars of libraries: on a terminal only. In a log a bar is a line for each of its moves."""

import os
import sys
from collections.abc import MutableMapping

# Read when the library is imported. transformers follows huggingface_hub; the last one is tqdm's own, for all others.
_SWITCHES = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "TQDM_DISABLE": "1",
}


def keep_bars_out_of_logs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Turn off the bars of libraries that are imported from here on, where standard error is no terminal.

    What the environment says already is left as it is.
    """
    if not sys.stderr.isatty():
        for name, value in _SWITCHES.items():
            environment.setdefault(name, value)
