"""Completions of prompts in groups: each prompt is read once for its group, and all groups are decoded together.

A completion is a pure function of the weights, its prompt, its key and the settings: not of its neighbors in the batch, of the
number of ranks or of what was drawn before. On a CPU that holds to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.loading.batch import precise
from toolkit.generation.cached_decoding import CachedGroup
from toolkit.generation.distribution import SamplingSettings, draw, penalized
from toolkit.generation.equal_bits import rows_for_equal_bits
from toolkit.generation.group_cache import DecodeStep, PromptPass, attention_of_groups
from toolkit.models.adapter_files import without_adapter
from toolkit.models.attention.packable import PROVEN, NotPackable, check_packable
from toolkit.models.compat import attention_of
from toolkit.models.layers import uncompiled
from toolkit.models.shapes import positions_of
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GROUPS = "toolkit_groups"
FEW = 0.75  # of the rows that are still written: then the others leave the batch
CACHE_ON_CPU = 2**30  # bytes of keys and values at a time

Together = Callable[[bool], bool]
OnGroup = Callable[[int, "list[Completion]"], None]
OnToken = Callable[[int, int], None]


@dataclass
class Completion:
    """What was sampled behind a prompt.

    `tokens` end with the token that ended them. `logps`: their log-probabilities, nats, of the distribution that was drawn
    from. `truncated`: neither an end token nor a stop string came. `kept`: the ids that could be drawn at each token, where
    top-k, top-p or min-p cut some off, else None.
    """

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    truncated: bool = True
    kept: list[np.ndarray] | None = None


def sample_groups(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], keys: np.ndarray, settings: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase | None = None, together: Together | None = None, cache_bytes: int | None = None,
    on_group: OnGroup | None = None, limits: Sequence[int] | None = None, on_token: OnToken | None = None,
) -> list[list[Completion]]:  # fmt: skip
    """Completions of each prompt, `keys` `[prompts, group size]` (uint64, of `completion_key`) of them.

    `model` is unwrapped, with or without an adapter, on any device; it is left as it was. `tokenizer`: for stop strings.
    `together(more)`: whether any rank has more to do, where each forward pass needs all ranks (sharded parameters).
    `cache_bytes`: of keys and values at a time; prompts beyond it wait. `on_group(prompt, completions)` is called for each
    prompt, by its number, as soon as its group is complete; `on_token(prompt, token)` for each token of its first completion
    as soon as it is drawn. `limits`: the longest completion of each prompt, at most `max_new_tokens`. Models that are not on
    transformers' attention interface, and encoder-decoders, decode a group at a time with transformers' own cache
    (`takes_groups`).

    Raises:
        Refusal: a prompt without tokens or one that leaves no room for a completion in the model's positions; stop strings
            without a tokenizer.
    """
    if getattr(model.config, "is_causal", True) is False:
        raise Refusal(
            f"{type(without_adapter(model)).__name__} attends to both sides, and can't write one token behind the other: "
            "what is kept of the tokens before would change with each. A masked-diffusion model writes with toolkit generate."
        )
    keys = np.asarray(keys, dtype=np.uint64)
    if keys.ndim != 2 or len(keys) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need keys [prompts, group size], not {list(keys.shape)}")
    if settings.stop_strings and tokenizer is None:
        raise Refusal("stop_strings need a tokenizer.")
    longest = np.array([settings.max_new_tokens] * len(prompts) if limits is None else limits, dtype=np.int64)
    _check_room(model, prompts, longest.tolist())
    stop = _StopStrings(settings.stop_strings, tokenizer) if settings.stop_strings and tokenizer is not None else None
    completions: list[list[Completion]] = [[] for _ in prompts]
    grouped = takes_groups(model)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))  # of like length: less padding
    with _as_for_sampling(model, grouped):
        size = _prompts_at_a_time(model, prompts, keys.shape[1], settings, cache_bytes) if grouped else 1
        blocks = [order[start : start + size] for start in range(0, len(order), size)]
        while together(bool(blocks)) if together else blocks:
            block = blocks.pop(0) if blocks else []
            ids = [list(prompts[number]) for number in block] or [[0]]
            living = keys[block] if block else keys[:0]
            decoder = _Groups(model, ids, keys.shape[1]) if grouped else CachedGroup(model, ids[0], keys.shape[1])
            show = partial(_show, on_token, block) if on_token else None
            for place, group in _decode(decoder, ids, living, settings, stop, together, longest[block], show):
                completions[block[place]] = group
                if on_group:
                    on_group(block[place], group)
    return completions


def takes_groups(model: PreTrainedModel) -> bool:
    """Whether all groups of a model can be decoded together: its layers take an attention function, which a model type that is
    not known to do so shows on two short prompts. Where parameters are sharded, all ranks must call it."""
    base = without_adapter(model)
    try:
        check_packable(base.config, type(base))
    except NotPackable:
        return False
    text = base.config.get_text_config()
    reads_more = getattr(text, "num_kv_shared_layers", 0) or getattr(text, "add_cross_attention", False)
    if base.config.is_encoder_decoder or reads_more:
        return False
    return base.config.model_type in PROVEN or _groups_are_exact(model)


def _groups_are_exact(model: PreTrainedModel) -> bool:
    """Two short prompts and a token behind each: as groups what each is alone, up to rounding."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (11,), generator=torch.Generator().manual_seed(0)).to(device)
    rows = [tokens[:4], tokens[4:]]
    plain: Any = model
    computed = {dtype}  # in half precision too under autocast, which a prepared model brings along
    head: Any = model.get_output_embeddings()
    seen = head.register_forward_hook(lambda _, __, logits: computed.add(logits.dtype))
    try:
        with torch.no_grad(), _as_for_sampling(model, grouped=False):
            alone = [plain(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        with torch.no_grad(), _as_for_sampling(model, grouped=True):
            groups = _Groups(model, [row[:-1].tolist() for row in rows], 1)
            found = groups.first(), groups.next(torch.stack([row[-1] for row in rows]))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):  # a forward pass that can't be called so
        return False
    finally:
        seen.remove()
    wanted = [torch.stack([logits[place] for logits in alone]) for place in (-2, -1)]
    rounding = 0.1 if computed & {torch.bfloat16, torch.float16} else 1e-4
    return all(bool((a - b).abs().max() <= rounding * b.abs().max()) for a, b in zip(found, wanted, strict=True))


def _decode(
    decoder: Any, prompts: list[list[int]], keys: np.ndarray, settings: SamplingSettings, stop: _StopStrings | None,
    together: Together | None, limits: np.ndarray, on_token: OnToken | None = None,
) -> Iterator[tuple[int, list[Completion]]]:  # fmt: skip
    """The groups of a block, `keys` `[prompts, group size]`, each as it is complete; without keys only keep the other ranks
    company. `limits` `[prompts]`: tokens of their completions. `on_token(place in the block, token)`."""
    size = keys.shape[1]
    open_groups = set(range(len(keys)))
    completions = [Completion(kept=[] if settings.cuts else None) for _ in range(keys.size)]
    row_keys, rows = keys.reshape(-1), np.arange(keys.size)
    logits = decoder.first().repeat_interleave(size, dim=0)[: len(rows)]
    ends = torch.tensor(settings.eos_token_ids, device=logits.device)
    seen = _seen(prompts, size, logits) if settings.repetition_penalty != 1 and len(rows) else None
    for position in range(settings.max_new_tokens):
        if len(rows):
            if seen is not None:
                logits = penalized(logits, seen, settings.repetition_penalty)
            if position < settings.min_new_tokens and len(ends):
                logits = logits.index_fill(-1, ends, -torch.inf)
            tokens, logps, drawn_from = draw(logits, row_keys, position, settings)
            ended = torch.isin(tokens, ends).cpu().numpy()
            written = zip(rows, tokens.tolist(), logps.tolist(), strict=True)
            for place, (row, token, logp) in enumerate(written):
                completion = completions[row]
                if not completion.truncated or position >= limits[row // size]:
                    continue
                completion.tokens.append(token)
                completion.logps.append(logp)
                if on_token and row % size == 0:
                    on_token(row // size, token)
                if completion.kept is not None:
                    completion.kept.append(torch.isfinite(drawn_from[place]).nonzero()[:, 0].int().cpu().numpy())
                if ended[place] or (stop is not None and stop.found(completion.tokens)):
                    completion.truncated = False
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
        more = position + 1 < limits[rows // max(size, 1)]
        living = np.array([completions[row].truncated for row in rows], dtype=bool) & more
        for place in sorted(open_groups - set((rows[living] // max(size, 1)).tolist())):
            open_groups.remove(place)
            yield place, completions[place * size : (place + 1) * size]
        if not (together(bool(living.any())) if together else living.any()):
            break
        if not living.any():
            decoder.accompany()
            continue
        if living.sum() <= FEW * len(living):
            kept = torch.from_numpy(living.nonzero()[0]).to(logits.device)
            decoder.keep(kept)
            rows, row_keys, tokens = rows[living], row_keys[living], tokens[kept]
            seen = seen if seen is None else seen[kept]
        logits = decoder.next(tokens)


def _show(on_token: OnToken, block: list[int], place: int, token: int) -> None:
    on_token(block[place], token)


class _Groups:
    """A block of groups on transformers' attention interface, a row for each completion that is still written."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], group_size: int) -> None:
        self.model, self.prompts, self.size = model, prompts, group_size
        self.device = next(model.parameters()).device
        self.rows = rows_for_equal_bits(model)
        numbers = torch.arange(len(prompts) * group_size, device=self.device)
        self.prompt, self.place = numbers // group_size, numbers % group_size
        self.positions = torch.tensor([len(ids) for ids in prompts], device=self.device).repeat_interleave(group_size)

    def first(self) -> torch.Tensor:
        """Logits behind each prompt, `[prompts, V]`."""
        lengths = [len(ids) for ids in self.prompts]
        tokens = torch.tensor([token for ids in self.prompts for token in ids], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        passed = PromptPass(lengths)
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        logits = self._forward(tokens, positions, passed, self._filled(last))[: len(lengths)]
        self.decoding = DecodeStep(passed, self.size, self.rows)
        return logits

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits behind one more token of each row, `[rows, V]`."""
        logits = self._forward(tokens, self.positions, self.decoding, 0)[: len(tokens)]
        self.positions = self.positions + 1
        self.decoding.moved()
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        self.prompt, self.place = self.decoding.keep(self.prompt[rows], self.place[rows])
        self.positions = self.positions[rows]

    def accompany(self) -> None:
        """A forward pass that nobody needs, for the sake of the ranks that do."""
        nothing = torch.zeros(1, dtype=torch.long, device=self.device)
        self._forward(nothing, nothing, PromptPass([1]), 0)

    def _filled(self, numbers: torch.Tensor) -> torch.Tensor:
        """The last one again, until their number is one at which a row's bits do not depend on it."""
        return torch.cat([numbers, numbers[-1:].expand(-len(numbers) % self.rows)])

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, state: PromptPass | DecodeStep, keep: torch.Tensor | int
    ) -> torch.Tensor:
        output: Any = self.model(
            input_ids=self._filled(tokens)[None], position_ids=self._filled(positions)[None], use_cache=False, groups=state,
            logits_to_keep=keep,
        )  # fmt: skip
        return precise(output.logits[0])


class _StopStrings:
    """Whether a completion just ended with one of some texts: seen in its last tokens, whatever they are cut into."""

    def __init__(self, strings: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings, self.tokenizer = strings, tokenizer
        self.most = 4 + max(len(text.encode()) for text in strings)  # a token is a byte at least

    def found(self, tokens: list[int]) -> bool:
        text = str(self.tokenizer.decode(tokens[-self.most :]))
        before = str(self.tokenizer.decode(tokens[-self.most : -1]))
        return any(each in text and each not in before for each in self.strings)


def _seen(prompts: list[list[int]], size: int, logits: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(len(prompts), logits.shape[-1], dtype=torch.bool, device=logits.device)
    for row, ids in zip(seen, prompts, strict=True):
        row[torch.tensor(ids, device=logits.device)] = True
    return seen.repeat_interleave(size, dim=0)


def _check_room(model: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    if model.config.is_encoder_decoder:
        return
    longest = positions_of(model.config) or 1 << 30
    for number, (prompt, most) in enumerate(zip(prompts, limits, strict=True)):
        if not prompt:
            raise Refusal(f"prompt {number}: has no token. Begin it with the tokenizer's BOS or EOS.")
        if len(prompt) + most > longest:
            raise Refusal(
                f"prompt {number}: {len(prompt):,} tokens and a completion of {most:,} are more than the "
                f"model's {longest:,} positions. Shorten the prompt or the completion."
            )


def cache_bytes_of_group(model: PreTrainedModel, prompt: int, size: int, max_new_tokens: int) -> int:
    """Bytes of the keys and values of `size` completions of one prompt, of `prompt` tokens, at their longest."""
    config, element = model.config.get_text_config(), next(model.parameters()).element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * element * (prompt + size * max_new_tokens))


def _prompts_at_a_time(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], size: int, settings: SamplingSettings, cache_bytes: int | None
) -> int:
    """So many that the keys and values of their groups fit."""
    of_a_group = cache_bytes_of_group(model, max(map(len, prompts), default=0), size, settings.max_new_tokens)
    if cache_bytes is None:
        device = next(model.parameters()).device
        cache_bytes = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CACHE_ON_CPU
    return max(1, cache_bytes // max(1, of_a_group))


@contextmanager
def _as_for_sampling(model: PreTrainedModel, grouped: bool) -> Iterator[None]:
    """In evaluation mode without gradients, uncompiled, with the attention of groups; all restored afterwards."""
    base = without_adapter(model)
    before = attention_of(base.config)
    with evaluation_mode(model), uncompiled(model):
        if not grouped:
            yield
            return
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(GROUPS, attention_of_groups)
        AttentionMaskInterface.register(GROUPS, lambda *_, **__: None)
        base.set_attn_implementation(GROUPS)
        try:
            yield
        finally:
            base.set_attn_implementation(before)
