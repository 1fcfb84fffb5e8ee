"""Backward of attention over short documents in bfloat16 on a CPU: several of like length in one product of matrices.

torch's flash attention for CPUs (2.13) is slow backward in bfloat16: 0.6 ms and more a call, for a document of 20 tokens as
well. Written out, for documents in groups, the backward of 16 answers of 75 tokens to prompts of 75 takes 18 ms in place of 42
(8 heads of 64, one core with AMX), of a hundred documents of 20 tokens 8 in place of 34. Forward is torch's, and so is what
comes out; the gradients are as close to float64's.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from toolkit.models.compat import softmax_backward

LONGEST = 512  # keys; of longer documents the scores would take memory, and flash attention is as fast
SCORES_IN_A_GROUP = 2**20  # of all heads: 4 MiB in float32, about what a core's caches hold
PADDED = 1.5  # times the scores that are needed, at most
UNSEEN = -1e30  # finite: a padded query that sees nothing gets weights that are numbers, and no gradient

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Group(NamedTuple):
    """Documents that are computed together: where their queries and keys are in the row, and what they see."""

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    unseen: torch.Tensor  # float32 [documents, 1, longest queries, longest keys]: 0 where seen, else UNSEEN


def with_grouped_backward(
    attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: list[Group], scaling: float | None
) -> torch.Tensor:
    """What `attend` makes of query `[1, heads, tokens, head_dim]`, key and value with the model's key/value heads."""
    with torch.autocast("cpu", enabled=False):
        query, key = query.to(value.dtype), key.to(value.dtype)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output: torch.Tensor = _GroupedBackward.apply(attend, query, key, value, groups, scaling)
    return output


_groups_of_row: dict[tuple[int, bool, int | None], tuple[weakref.ref[torch.Tensor], list[Group] | None]] = {}


def groups_of(
    bounds: torch.Tensor, key_bounds: torch.Tensor | None, heads: int, causal: bool, window: int | None
) -> list[Group] | None:
    """The documents of a row in groups of like length, None where one is too long; made by a row's first layer, and kept."""
    kept = _groups_of_row.get((heads, causal, window))
    if kept is not None and kept[0]() is bounds:
        return kept[1]
    ends, key_ends = bounds.tolist(), (bounds if key_bounds is None else key_bounds).tolist()
    queries, keys = list(itertools.pairwise(ends)), list(itertools.pairwise(key_ends))
    made = None
    if max(end - start for start, end in keys) <= LONGEST:
        made = [_group([queries[i] for i in members], [keys[i] for i in members], causal, window)
                for members in _members(queries, keys, heads)]  # fmt: skip
    _groups_of_row[heads, causal, window] = (weakref.ref(bounds), made)
    return made


def _members(queries: list[tuple[int, int]], keys: list[tuple[int, int]], heads: int) -> Iterator[list[int]]:
    """Numbers of the documents of each group, the longest first."""
    sizes = [(key_end - key_start, end - start) for (start, end), (key_start, key_end) in zip(queries, keys, strict=True)]
    members: list[int] = []
    most_keys = most_queries = needed = 0
    for i in sorted((i for i, size in enumerate(sizes) if size[1]), key=lambda i: sizes[i], reverse=True):
        if members:
            scores = (len(members) + 1) * max(most_keys, sizes[i][0]) * max(most_queries, sizes[i][1])
            if scores * heads > SCORES_IN_A_GROUP or scores > PADDED * (needed + sizes[i][0] * sizes[i][1]):
                yield members
                members, most_keys, most_queries, needed = [], 0, 0, 0
        members.append(i)
        most_keys, most_queries = max(most_keys, sizes[i][0]), max(most_queries, sizes[i][1])
        needed += sizes[i][0] * sizes[i][1]
    if members:
        yield members


def _group(queries: list[tuple[int, int]], keys: list[tuple[int, int]], causal: bool, window: int | None) -> Group:
    query_counts, key_counts = (torch.tensor([end - start for start, end in spans]) for spans in (queries, keys))
    key_places = torch.arange(int(key_counts.max()))
    places = torch.arange(int(query_counts.max())) + (key_counts - query_counts)[:, None]  # of queries among the keys
    distance = places[:, :, None] - key_places
    seen = (key_places < key_counts[:, None, None]).expand_as(distance)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return Group(queries, keys, torch.zeros(seen.shape).masked_fill_(~seen, UNSEEN)[:, None])


class _GroupedBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: list[Group],
        scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(query, key, value)
        ctx.groups, ctx.scaling = groups, scaling
        return attend(query, key, value)

    @staticmethod
    def backward(ctx: Any, *of_output: torch.Tensor) -> Any:
        """Formulas 3 and 4 of FlashAttention-2 (arXiv:2307.08691, section 2.2), with the weights computed again."""
        query, key, value = ctx.saved_tensors
        of_row = of_output[0].transpose(0, 1)[None]
        of_query, of_key, of_value = (torch.zeros_like(states) for states in (query, key, value))
        heads, key_heads = query.shape[1], key.shape[1]
        for group in ctx.groups:
            count, _, longest_query, longest_key = group.unseen.shape
            q = _padded(query, group.queries, longest_query)
            k, v = (
                _padded(row, group.keys, longest_key).repeat_interleave(heads // key_heads, dim=1).flatten(0, 1)
                for row in (key, value)
            )  # fmt: skip
            scaled = q.float().mul_(ctx.scaling).flatten(0, 1)
            scores = torch.bmm(scaled, k.float().transpose(1, 2)).view(count, heads, longest_query, longest_key)
            weights = torch.softmax(scores.add_(group.unseen), dim=-1).to(v.dtype).flatten(0, 1)
            of_answer = _padded(of_row, group.queries, longest_query).flatten(0, 1)
            of_weights = torch.bmm(of_answer, v.transpose(1, 2))
            of_scores = softmax_backward(of_weights, weights)
            for row, spans, found in (
                (of_query, group.queries, torch.bmm(of_scores, k) * ctx.scaling),
                (of_key, group.keys, torch.bmm(of_scores.transpose(1, 2), scaled.to(v.dtype))),
                (of_value, group.keys, torch.bmm(weights.transpose(1, 2), of_answer)),
            ):
                each = found.unflatten(0, (count, heads))
                if row.shape[1] != heads:  # several heads read one: their gradients add up
                    each = each.unflatten(1, (key_heads, -1)).float().sum(2)
                _write(row, spans, each)
        return None, of_query, of_key, of_value, None, None


def _padded(row: torch.Tensor, spans: list[tuple[int, int]], longest: int) -> torch.Tensor:
    """`[1, heads, tokens, head_dim]` to `[documents, heads, longest, head_dim]`, zeros after a document's end."""
    padded = row.new_zeros(len(spans), row.shape[1], longest, row.shape[3])
    for document, (start, end) in zip(padded, spans, strict=True):
        document[:, : end - start] = row[0, :, start:end]
    return padded


def _write(row: torch.Tensor, spans: list[tuple[int, int]], padded: torch.Tensor) -> None:
    """The reverse: what belongs to each document, at its place in the row."""
    for document, (start, end) in zip(padded, spans, strict=True):
        row[0, :, start:end] = document[:, : end - start]
