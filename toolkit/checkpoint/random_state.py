"""The state of the global random generators, as tensors and JSON.

Training needs none of it: every forward pass is seeded again. It is there for a recipe's own code between the steps, which
may draw from these generators.
"""

import random
from typing import Any

import numpy as np
import torch


def capture_random_state() -> dict[str, Any]:
    """States of `random`, NumPy's and torch's global generators, on all CUDA devices too."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back; CUDA's only where the number of devices is the same."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def wrong_random_state(state: dict[str, Any]) -> str:
    """What keeps this from being a state of the generators, tried with others than the global ones; empty if nothing does."""
    try:
        version, words, gauss = state["python"]
        random.Random().setstate((version, tuple(words.tolist()), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.RandomState().set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.Generator().set_state(state["torch"])
        len(state["cuda"])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        return f"random holds no state of the generators: {type(error).__name__}: {error}"
    return ""
