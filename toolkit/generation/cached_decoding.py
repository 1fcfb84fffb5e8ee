"""A group decoded with transformers' own cache: for models whose attention is not on its interface, and encoder-decoders.

The prompt is read once for all of its group. One group at a time, so that no padding reaches a model that may not mask it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from toolkit.data.loading.batch import precise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CachedGroup:
    """The completions of one prompt, a row for each that is still written."""

    def __init__(self, model: PreTrainedModel, prompt: list[int], group_size: int) -> None:
        self.model: Any = model
        self.size, self.device = group_size, next(model.parameters()).device
        self.ids = torch.tensor([prompt], device=self.device)
        self.encoded: Any = None
        self.cache: Any = None

    def first(self) -> torch.Tensor:
        """Logits behind the prompt, `[1, V]`; of an encoder-decoder behind the token that its decoder begins with."""
        if self.model.config.is_encoder_decoder:
            self.encoded = self.model.get_encoder()(input_ids=self.ids, attention_mask=torch.ones_like(self.ids))
            start = self.model.generation_config.decoder_start_token_id
            start = self.model.config.decoder_start_token_id if start is None else start
            return self._forward(torch.tensor([[start]], device=self.device))
        return self._forward(self.ids)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits behind one more token of each row, `[rows, V]`."""
        if len(tokens) != self._rows:
            self.cache.batch_repeat_interleave(len(tokens) // self._rows)
            if self.encoded is not None:
                self.encoded.last_hidden_state = self.encoded.last_hidden_state.expand(len(tokens), -1, -1)
            self._rows = len(tokens)
        return self._forward(tokens[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        if self._rows == 1:  # not repeated yet: all rows are the prompt's
            return
        self.cache.batch_select_indices(rows)
        if self.encoded is not None:
            self.encoded.last_hidden_state = self.encoded.last_hidden_state[rows]
        self._rows = len(rows)

    def accompany(self) -> None:
        """A forward pass that nobody needs, for the sake of the ranks that do."""
        inputs = {"decoder_input_ids": self.ids[:, :1]} if self.model.config.is_encoder_decoder else {}
        self.model(input_ids=self.ids[:, :1], use_cache=False, **inputs)

    _rows = 1

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": tokens} if self.encoded is None else {
            "decoder_input_ids": tokens, "encoder_outputs": self.encoded,
            "attention_mask": self.ids.new_ones(self.encoded.last_hidden_state.shape[:2]),
        }  # fmt: skip
        output = self.model(**inputs, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        return precise(output.logits[:, -1])
