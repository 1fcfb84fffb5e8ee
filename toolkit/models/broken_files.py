"""Which file of a model directory is broken, for messages of libraries that don't name it."""

import json
import os
from pathlib import Path


def broken_file(directory: str | Path) -> str:
    """The first file of a directory that is no whole JSON or safetensors, "NAME: ", to begin a message; "" where none is.

    Of safetensors the header is read, and no tensor.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(os.path.expanduser(directory)).glob("*.*")):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text("utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
        except (OSError, ValueError, RecursionError, SafetensorError):
            return f"{file.name}: "
    return ""
