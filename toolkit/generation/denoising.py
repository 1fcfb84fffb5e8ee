"""Texts of masked-diffusion models: hidden tokens are found out in several forward passes, the surest first.

Which tokens are hidden is up to the caller: an answer behind a prompt, or gaps anywhere in a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from toolkit.generation.random_numbers import exponentials
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toolkit.models.diffusion import Diffusion


_MIXING = np.uint64(0xD1342543DE82EF95)  # an odd multiplier: places of a text get keys far apart


class DenoisingSettings(NamedTuple):
    """How hidden tokens are found out."""

    steps: int | None = None  # forward passes for all hidden tokens of a text; None: one for each
    block_length: int = 32  # hidden tokens that are finished, from left to right, before the next ones are begun
    temperature: float = 0.0  # 0 is greedy decoding
    end_token_ids: tuple[int, ...] = ()  # a text whose finished block has one goes no further


class _Text:
    """A text on its way: its tokens, and for each forward pass to come which places are predicted and how many settled."""

    def __init__(self, ids: Sequence[int], seed: int, mask_token_id: int, settings: DenoisingSettings) -> None:
        self.ids = torch.tensor(ids)
        hidden = (self.ids == mask_token_id).nonzero()[:, 0]
        steps = min(settings.steps or len(hidden), len(hidden))
        self.passes = list[tuple[torch.Tensor, int]]()
        for block in hidden.split(settings.block_length):
            count = max(1, round(steps * len(block) / len(hidden)))
            self.passes += [(block, len(part)) for part in torch.arange(len(block)).tensor_split(min(count, len(block)))]
        self.seed = seed


@torch.no_grad()
def denoise(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], seeds: Sequence[int], diffusion: Diffusion,
    settings: DenoisingSettings,
) -> list[list[int]]:  # fmt: skip
    """Each text with its hidden tokens found out. One that has ended keeps mask tokens behind its end.

    The sampling of LLaDA (arXiv:2502.09992, section 2.4 and appendix B.4): in each forward pass every hidden token of the block
    is predicted, and those of the highest probability are kept; the others are hidden again (low-confidence remasking). With a
    temperature T the prediction is drawn from softmax(logits / T); the probability that it is judged by
    is that at temperature 1.

    Args:
        texts: token ids; `diffusion.mask_token_id` where one is hidden.
        seeds: keys of the random numbers of each text (`completion_key`). What one draws does not depend on its neighbors.
    """
    rows = [_Text(ids, seed, diffusion.mask_token_id, settings) for ids, seed in zip(texts, seeds, strict=True)]
    device = next(model.parameters()).device
    ends = torch.tensor(settings.end_token_ids)
    with evaluation_mode(model):
        while going := [number for number, row in enumerate(rows) if row.passes]:
            logits = _logits(model, [rows[number].ids for number in going], device)
            for of_row, number in zip(logits, going, strict=True):
                row = rows[number]
                block, count = row.passes.pop(0)
                places = block[row.ids[block] == diffusion.mask_token_id]
                keys = np.uint64(row.seed) ^ places.numpy().astype(np.uint64) * _MIXING
                asked = of_row[places.to(device) - int(diffusion.shift_logits)]
                predicted, sureness = _predict(asked, diffusion.mask_token_id, settings.temperature, keys, len(row.passes))
                surest = sureness.argsort(descending=True, stable=True)[:count]
                row.ids[places[surest.cpu()]] = predicted[surest].cpu()
                is_finished = not bool((row.ids[block] == diffusion.mask_token_id).any())
                if is_finished and bool(torch.isin(row.ids[block], ends).any()):
                    row.passes.clear()
    return [row.ids.tolist() for row in rows]


def _logits(model: PreTrainedModel, texts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Logits `[texts, longest, V]` of all texts in one forward pass, padded on the right."""
    lengths = torch.tensor([len(ids) for ids in texts])
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long().to(device)
    logits: torch.Tensor = model(input_ids=padded, attention_mask=mask, use_cache=False).logits
    return logits


def _predict(
    logits: torch.Tensor, mask_token_id: int, temperature: float, keys: np.ndarray, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row of logits `[P, V]`, never the mask, and its probability, both `[P]`; `number`: the forward pass."""
    logits = logits.float()
    logits[:, mask_token_id] = -torch.inf
    scores = logits
    if temperature > 0:
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        scores = logits / temperature - exponentials(keys, number, ids).log_()
    predicted = scores.argmax(-1)
    return predicted, logits.softmax(-1).gather(1, predicted[:, None])[:, 0]
