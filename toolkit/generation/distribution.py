"""The distribution that a token is drawn from: a model's logits, the settings of sampling, and the draw itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.generation.random_numbers import exponentials


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn and where a completion ends; the names are those of transformers' generation_config.

    `temperature` 0 is greedy decoding. `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing. The order is that of transformers:
    repetition penalty, temperature, top-k, top-p, min-p. A completion ends with one of `eos_token_ids`, behind one of
    `stop_strings`, or with `max_new_tokens` tokens; before `min_new_tokens` it can't end by a token.

    Raises:
        Refusal: a value outside its range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"), "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"), "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"), "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
        }  # fmt: skip
        for name, (is_right, right) in ranges.items():
            if not is_right:
                raise Refusal(f"{name} {getattr(self, name):g}: must be {right}.")

    @property
    def cuts(self) -> bool:
        """Whether some tokens can't be drawn, so that which could has to be kept with a completion."""
        return bool(self.temperature and (self.top_k or self.top_p < 1 or self.min_p))


class Draw(NamedTuple):
    """The tokens drawn `[rows]`, their log-probabilities `[rows]` in nats, and the logits that they were drawn from."""

    tokens: torch.Tensor
    logps: torch.Tensor
    logits: torch.Tensor


def draw(logits: torch.Tensor, keys: np.ndarray, position: int, settings: SamplingSettings) -> Draw:
    """One token a row, drawn from `shaped_logits` (not shaped yet: `[rows, V]`, float32 or wider).

    The race of exponentials: argmax p / E, whose winner has probability p. Rounding turns it about once in 2 million tokens,
    an inverse cumulative distribution once in 7,000. `logps` are of the distribution drawn from; greedy decoding's are of the
    model's own.
    """
    if not settings.temperature:
        tokens = logits.argmax(-1)
        return Draw(tokens, logps_of(logits, tokens), logits)
    shaped = shaped_logits(logits, settings)
    ids = torch.arange(shaped.shape[-1], dtype=torch.int32, device=shaped.device)
    weights = (shaped - shaped.amax(-1, keepdim=True)).exp()
    tokens = (weights / exponentials(keys, position, ids)).argmax(-1)
    return Draw(tokens, logps_of(shaped, tokens), shaped)


def logps_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[rows]` of one token a row, nats."""
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def shaped_logits(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Logits `[rows, V]` at the temperature, minus infinity where a token is cut off by top-k, top-p or min-p.

    What is kept is decided by value, so tokens of equal probability stay together and no order of a sort matters.
    """
    if settings.temperature != 1:
        logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        least = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if settings.top_p < 1:
        logits = logits.masked_fill(logits < _least_of_top_p(logits, settings.top_p), -torch.inf)
    if settings.min_p:
        least = logits.amax(-1, keepdim=True) + float(np.log(settings.min_p))
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def _least_of_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest logit `[rows, 1]` of the smallest set of most probable tokens whose probabilities add up to `top_p`."""
    if logits.device.type == "cpu":  # numpy sorts in a thirtieth of torch's time
        ordered = torch.from_numpy(-np.sort(-logits.numpy(), axis=-1))
    else:
        ordered = logits.sort(-1, descending=True).values
    reached = ordered.double().softmax(-1).cumsum(-1)
    kept = 1 + (reached[:, :-1] < top_p).sum(-1, keepdim=True)  # the token that reaches it is the last of them
    return ordered.gather(-1, kept - 1)


def penalized(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits `[rows, V]` with those of tokens that are `seen` (bool, same shape) divided by the penalty, or multiplied below 0.

    CTRL, arXiv:1909.05858, section 4.1, in the signed form of transformers.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
