"""Random numbers of a sampler, each a pure function of where it is used: no state of a generator exists.

The number that a token of the vocabulary meets at a position of a completion follows from (seed, epoch, prompt, index in the
group), the position and the token's id. So a completion is the same in any batch, on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def completion_key(seed: int, epoch: int, prompt: int, index: int) -> int:
    """The 64-bit key of one completion's random numbers (BLAKE2b)."""
    text = repr((int(seed), int(epoch), int(prompt), int(index)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def exponentials(keys: np.ndarray, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Draws of an exponential distribution of rate 1 for each row and token, float32 `[rows, ids]`, never 0.

    `keys` `[rows]`, uint64, are of `completion_key`; `ids` `[ids]` or `[rows, ids]`, int32, on the device of the result.
    32 random bits each: a splitmix64 step (Steele et al. 2014) of the key and the position, mixed with the token's id twice by
    the integer hash lowbias32.
    """
    first, second = _words(keys, position, ids.device)
    mixed = _mixed(_mixed(ids * -1640531535 + first) ^ second)
    uniform = mixed.to(torch.float32).add_(2147483648.5).mul_(2.0**-32).clamp_(2.0**-33, 1 - 2.0**-24)
    return uniform.log_().neg_()


def _words(keys: np.ndarray, position: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 words `[rows, 1]` of 64 bits that follow from key and position."""
    with np.errstate(over="ignore"):
        z = keys + _GOLDEN * np.uint64(position + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    words = torch.from_numpy(z.view(np.int32).reshape(-1, 2).copy()).to(device)
    return words[:, :1], words[:, 1:]


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 (Wellons 2018) on int32 that wraps around; a shift that copies the sign is masked into a logical one."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
