"""Keys and values of groups of completions: a prompt's once for all of its group, completions' in blocks made beforehand.

Two attention functions for one model, both through transformers' attention interface, with no mask and no cache class of its
own: `PromptPass` for prompts one behind the other in one row, `DecodeStep` for one new token of each completion. A row of a
product of matrices has the same bits for any number of rows that is a multiple of `ROWS` on a CPU (found by
`rows_for_equal_bits`, not a rule of any library), and a place of a key the same lane where prompts are padded to multiples of
`KEYS`: so the bits of a completion do not depend on what is decoded next to it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from toolkit.models.attention.masks import band

KEYS = 64
ROOM = 64  # tokens of a completion at first; doubled whenever they are full


class PromptPass:
    """Prompts packed in one row; each sees itself, and leaves keys and values `[prompts, kv heads, longest, head_dim]`."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.longest = -(-max(lengths) // KEYS) * KEYS
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:  # fmt: skip
        """Query `[1, heads, tokens, head_dim]`, key and value `[1, kv heads, tokens, head_dim]`; the result like the query."""
        shape = (len(self.lengths), key.shape[1], self.longest)
        keys = key.new_zeros(*shape, key.shape[3])
        values = value.new_zeros(*shape, value.shape[3])
        outputs, start = [], 0
        for number, length in enumerate(self.lengths):
            own = slice(start, start + length)
            q, k, v = query[:, :, own], key[:, :, own], value[:, :, own]
            keys[number, :, :length], values[number, :, :length] = k[0], v[0]
            if softcap is None and (window is None or length <= window):
                outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
            else:
                seen = band(range(length), range(length), window, True, q.device)
                outputs.append(_attend(q * scaling, k, v, seen, softcap))
            start += length
        self.keys[layer], self.values[layer] = keys, values
        filling = query.shape[2] - start  # tokens behind the last prompt, for the products' rows
        outputs.append(outputs[-1][:, :, -1:].expand(-1, -1, filling, -1))
        return torch.cat(outputs, dim=2)


class DecodeStep:
    """One token of each living completion: attention to its prompt's keys and to those of its own tokens so far.

    Completions are places of a rectangle `[prompts, places]`; `place` holds the flat place of each row, None where rows are
    all places in order. All are at the same position, so keys of completions need no mask, and those of prompts one only where
    prompts have unequal lengths.
    """

    def __init__(self, prompts: PromptPass, group_size: int, rows: int) -> None:
        self.keys, self.values, self.rows_multiple = prompts.keys, prompts.values, rows
        device = next(iter(self.keys.values())).device
        self.lengths = torch.tensor(prompts.lengths, device=device)
        self.longest, self.prompts, self.places = prompts.longest, len(prompts.lengths), group_size
        self.step = 0  # tokens of each completion that were read before
        self.place: torch.Tensor | None = None
        self.own_keys = {layer: self._room_for(keys) for layer, keys in self.keys.items()}
        self.own_values = {layer: self._room_for(values) for layer, values in self.values.items()}
        self._masks: dict[int | None, torch.Tensor] = {}

    def _room_for(self, of_prompts: torch.Tensor) -> torch.Tensor:
        prompts, heads, _, width = of_prompts.shape
        return of_prompts.new_zeros(prompts, heads, self.places, ROOM, width)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:  # fmt: skip
        """Query `[1, heads, rows, head_dim]`, key and value `[1, kv heads, rows, head_dim]`; the result like the query.

        Heads of the query that share one of the keys, times the completions of a prompt, are the rows of one product.
        """
        prompt_keys, prompt_values = self.keys[layer], self.values[layer]
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        prompts, places, kv_heads = self.prompts, self.places, key.shape[1]
        living = prompts * places if self.place is None else len(self.place)
        filling = query.shape[2] - living
        q, k, v = (self._placed(states[0].transpose(0, 1)[:living]) for states in (query, key, value))
        own_keys[:, :, :, self.step] = k.view(prompts, places, kv_heads, -1).transpose(1, 2)
        own_values[:, :, :, self.step] = v.view(prompts, places, kv_heads, -1).transpose(1, 2)
        q = (q * scaling).view(prompts, places, kv_heads, -1, query.shape[3]).transpose(1, 2)  # [..., sharing heads, head_dim]
        sharing = q.shape[3]
        first = 0 if window is None else max(0, self.step + 1 - window)
        to_prompt = self._product(q.flatten(2, 3), prompt_keys.transpose(2, 3))
        to_own = torch.matmul(q, own_keys[:, :, :, first : self.step + 1].transpose(3, 4))
        scores = torch.cat([to_prompt.view(prompts, kv_heads, places, sharing, -1), to_own], dim=-1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores[..., : self.longest] += self._mask_of(window, scores.dtype)[:, None, None, None]
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        of_prompt = self._product(weights[..., : self.longest].flatten(2, 3), prompt_values)
        of_own = torch.matmul(weights[..., self.longest :], own_values[:, :, :, first : self.step + 1])
        output = of_prompt.view(prompts, kv_heads, places, sharing, -1) + of_own
        output = output.transpose(1, 2).reshape(prompts * places, query.shape[1], -1)
        output = output if self.place is None else output[self.place]
        return torch.cat([output, output[-1:].expand(filling, -1, -1)]).transpose(0, 1)[None]

    def _placed(self, rows: torch.Tensor) -> torch.Tensor:
        if self.place is None:
            return rows
        return rows.new_zeros(self.prompts * self.places, *rows.shape[1:]).index_copy_(0, self.place, rows)

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        count = left.shape[2]
        return torch.matmul(pad(left, (0, 0, 0, -count % self.rows_multiple)), right)[:, :, :count]

    def _mask_of(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """0 or minus infinity `[prompts, longest prompt]`, made once a step for all layers."""
        if window not in self._masks:
            places = torch.arange(self.longest, device=self.lengths.device)
            unseen = places >= self.lengths[:, None]
            if window is not None:
                unseen |= places <= (self.lengths + self.step - window)[:, None]
            self._masks[window] = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
        return self._masks[window]

    def moved(self) -> None:
        """The step's tokens have been read."""
        self.step += 1
        for own in (self.own_keys, self.own_values):
            for layer, states in own.items():
                if states.shape[3] == self.step:
                    own[layer] = pad(states, (0, 0, 0, self.step))
        self._masks = {window: mask for window, mask in self._masks.items() if window is None}

    def keep(self, prompt: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the completions at (prompt, place), ordered by prompt; returns where they are now."""
        prompts, new_prompt, counts = prompt.unique(return_inverse=True, return_counts=True)
        new_place = torch.arange(len(prompt), device=prompt.device) - (counts.cumsum(0) - counts)[new_prompt]
        self.lengths, places = self.lengths[prompts], int(counts.max())
        self.longest = -(-int(self.lengths.max()) // KEYS) * KEYS
        for of_prompts, own in ((self.keys, self.own_keys), (self.values, self.own_values)):
            for layer in of_prompts:
                of_prompts[layer] = of_prompts[layer][prompts, :, : self.longest]
                kept = own[layer].new_zeros(len(prompts), own[layer].shape[1], places, *own[layer].shape[3:])
                kept[new_prompt, :, new_place] = own[layer][prompt, :, place]
                own[layer] = kept
        self.prompts, self.places = len(prompts), places
        self.place = None if len(prompt) == len(prompts) * places else new_prompt * places + new_place
        self._masks = {}
        return new_prompt, new_place


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Attention written out: query scaled, `seen` `[queries, keys]`."""
    sharing = query.shape[1] // key.shape[1]
    scores = query.unflatten(1, (-1, sharing)) @ key[:, :, None].transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def attention_of_groups(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object,
    *, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    groups: PromptPass | DecodeStep, **kwargs: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What transformers' layers call under the name `toolkit_groups`, with the state that the sampler handed to the model."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = groups.attend(int(module.layer_idx), query, key, value, scaling, sliding_window, softcap)  # type: ignore[arg-type]
    return output.transpose(1, 2).contiguous(), None
