"""Attention over short documents on a CPU: several of like length in one product of matrices.

Two things are slow one document at a time. torch's flash attention for CPUs (2.13) is, backward in bfloat16: 0.6 ms and more a
call, for a document of 20 tokens as well. Written out, for documents in groups, the backward of 16 answers of 75 tokens to
prompts of 75 takes 18 ms in place of 42 (8 heads of 64, one core with AMX), of a hundred documents of 20 tokens 8 in place of
34; forward is torch's there. And calls are, where documents are tiny: of 256 prompts of 6 tokens with 4 answers of 4 each (4
heads of 32, float32) a layer takes 12 ms forward in place of 34, and 20 backward in place of 93. Gradients are as close to
float64's.

Dropout is slow too: torch's CPU attention is written out then, and draws each weight's fate by `bernoulli_`. A layer of 32
documents of about 120 tokens (12 heads of 32, dropout 0.1, forward and backward, one AVX512-BF16 core) takes 56 ms in bfloat16
in place of 114, and 92 in float32 in place of 124.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.models.compat import softmax_backward
from toolkit.models.dropout import keep_mask, kept_share

LONGEST = 512  # keys; of longer documents the scores would take memory, and flash attention is as fast
SCORES_IN_A_GROUP = 2**20  # of all heads: 4 MiB in float32, about what a core's caches hold
PADDED = 1.5  # times the scores that are needed, at most
TINY = 1024  # scores of a document, all heads: below, a call for each document takes longer than what it computes
UNSEEN = -1e30  # finite: a padded query that sees nothing gets weights that are numbers, and no gradient

Span = tuple[int, int]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Places(NamedTuple):
    """Where the tokens of a group's documents are in the row, of a table `[documents, longest]`, flat."""

    in_row: torch.Tensor  # int64 `[documents * longest]`: of each token its place in the row, of padding any
    padding: torch.Tensor  # int64: the places of the table where there is no token


class Group(NamedTuple):
    """Documents that are computed together: where their queries and keys are, and what they see."""

    queries: Places
    keys: Places
    unseen: torch.Tensor  # float32 [documents, longest queries, longest keys]: 0 where seen, else UNSEEN


class Groups(NamedTuple):
    """All documents of a row, and for each of its queries and keys its place in the tables of all groups, joined."""

    groups: list[Group]
    queries: torch.Tensor
    keys: torch.Tensor


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Groups, scaling: float | None,
    attend: Attend | None = None, dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Attention of each document, `[tokens, heads, head_dim]`; forward is `attend`'s where it is given, without `dropout`.

    Of query `[1, heads, tokens, head_dim]`, key and value with the model's key/value heads.
    """
    with torch.autocast("cpu", enabled=False):
        query, key = query.to(value.dtype), key.to(value.dtype)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output: torch.Tensor = _Grouped.apply(attend, query, key, value, groups, scaling, dropout)
    return output


_groups_of_row: dict[tuple[int, bool, int | None], tuple[weakref.ref[torch.Tensor], Groups | None]] = {}


def groups_of(
    bounds: torch.Tensor, key_bounds: torch.Tensor | None, heads: int, causal: bool, window: int | None
) -> Groups | None:
    """The documents of a row in groups of like length, None where one is too long; made by a row's first layer, and kept."""
    kept = _groups_of_row.get((heads, causal, window))
    if kept is not None and kept[0]() is bounds:
        return kept[1]
    ends, key_ends = bounds.tolist(), (bounds if key_bounds is None else key_bounds).tolist()
    queries, keys = list(itertools.pairwise(ends)), list(itertools.pairwise(key_ends))
    made = None
    if max(end - start for start, end in keys) <= LONGEST:
        members = list(_members(queries, keys, heads))
        spans = [[[each[i] for i in group] for group in members] for each in (queries, keys)]
        groups = [_group(*both, causal, window) for both in zip(spans[0], spans[1], strict=True)]
        made = Groups(groups, _joined(spans[0], ends[-1]), _joined(spans[1], key_ends[-1]))
    _groups_of_row[heads, causal, window] = (weakref.ref(bounds), made)
    return made


def _members(queries: list[Span], keys: list[Span], heads: int) -> Iterator[list[int]]:
    """Numbers of the documents of each group, the longest first."""
    sizes = [(key_end - key_start, end - start) for (start, end), (key_start, key_end) in zip(queries, keys, strict=True)]
    members: list[int] = []
    most_keys = most_queries = needed = 0
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
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


def _group(queries: list[Span], keys: list[Span], causal: bool, window: int | None) -> Group:
    query_counts, key_counts = (torch.tensor([end - start for start, end in spans]) for spans in (queries, keys))
    key_places = torch.arange(int(key_counts.max()))
    places = torch.arange(int(query_counts.max())) + (key_counts - query_counts)[:, None]  # of queries among the keys
    distance = places[:, :, None] - key_places
    seen = (key_places < key_counts[:, None, None]).expand_as(distance)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    return Group(_places(queries), _places(keys), torch.zeros(seen.shape).masked_fill_(~seen, UNSEEN))


def _places(spans: list[Span]) -> Places:
    starts, ends = np.array(spans).T
    within = np.arange((ends - starts).max())
    in_row = np.minimum(starts[:, None] + within, ends[:, None] - 1)
    padding = np.flatnonzero(within >= (ends - starts)[:, None])
    return Places(torch.from_numpy(in_row.ravel()), torch.from_numpy(padding))


def _joined(spans: list[list[Span]], tokens: int) -> torch.Tensor:
    sizes = [len(group) * max(end - start for start, end in group) for group in spans]
    places = np.empty(tokens, dtype=np.int64)
    for group, size, end_of_table in zip(spans, sizes, itertools.accumulate(sizes), strict=True):
        for number, (start, end) in enumerate(group):
            first = end_of_table - size + number * (size // len(group))
            places[start:end] = np.arange(first, first + end - start)
    return torch.from_numpy(places)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attend: Attend | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Groups,
        scaling: float, dropout: float,
    ) -> torch.Tensor:  # fmt: skip
        drawn = list[torch.Tensor]()  # with dropout, of each group the weights, and which of them it leaves
        if attend is None:
            outputs = []
            for group in groups.groups:
                scaled, k, v = _tables(query, key, value, group, scaling)
                weights = _weights(scaled, k, group, v.dtype)
                if dropout:
                    drawn += [weights, keep_mask(weights, dropout)]
                    weights = weights * drawn[-1].to(weights.dtype)
                outputs.append(torch.bmm(weights, v).view(query.shape[1], -1, v.shape[-1]))
            output = _row(outputs, groups.queries).transpose(0, 1)
            output = output / kept_share(dropout) if dropout else output
        else:
            output = attend(query, key, value)
        ctx.save_for_backward(query, key, value, *drawn)
        ctx.groups, ctx.scaling, ctx.kept_share = groups, scaling, kept_share(dropout)
        return output

    @staticmethod
    def backward(ctx: Any, *of_output: torch.Tensor) -> Any:
        """Formulas 3 and 4 of FlashAttention-2 (arXiv:2307.08691, section 2.2), with the weights computed again, or kept with
        dropout, which the same random numbers would cost again."""
        query, key, value, *drawn = ctx.saved_tensors
        of_row = of_output[0].transpose(0, 1)[None]
        of_row = of_row / ctx.kept_share if drawn else of_row
        heads, key_heads = query.shape[1], key.shape[1]
        of_query, of_key, of_value = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for number, group in enumerate(ctx.groups.groups):
            scaled, k, v = _tables(query, key, value, group, ctx.scaling)
            weights = drawn[2 * number] if drawn else _weights(scaled, k, group, v.dtype)
            of_answer = _table(of_row, group.queries, group)
            of_weights = torch.bmm(of_answer, v.transpose(1, 2))
            left = drawn[2 * number + 1].to(weights.dtype) if drawn else None
            of_scores = softmax_backward(of_weights if left is None else of_weights.mul_(left), weights)
            weights = weights if left is None else left.mul_(weights)
            for tables, heads_of_table, found in (
                (of_query, heads, torch.bmm(of_scores, k).mul_(ctx.scaling)),
                (of_key, key_heads, torch.bmm(of_scores.transpose(1, 2), scaled.to(v.dtype))),
                (of_value, key_heads, torch.bmm(weights.transpose(1, 2), of_answer)),
            ):
                table = found.view(heads, -1, found.shape[-1])
                if heads_of_table != heads:  # several heads read one: their gradients add up
                    table = table.unflatten(0, (key_heads, -1)).float().sum(1).to(table.dtype)
                tables.append(table)
        places = (ctx.groups.queries, ctx.groups.keys, ctx.groups.keys)
        return None, *(_row(*each)[None] for each in zip((of_query, of_key, of_value), places, strict=True)), None, None, None


def _tables(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a group the queries times the scaling, float32, and its keys and values for all heads."""
    k, v = (_table(row, group.keys, group, query.shape[1] // row.shape[1]) for row in (key, value))
    return _table(query, group.queries, group).float().mul_(scaling), k, v


def _weights(scaled: torch.Tensor, k: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
    """How much of each value a query takes, `[heads * documents, longest queries, longest keys]`."""
    scores = torch.bmm(scaled, k.float().transpose(1, 2)).view(-1, *group.unseen.shape)
    return torch.softmax(scores.add_(group.unseen), dim=-1).to(dtype).flatten(0, 1)


def _table(row: torch.Tensor, places: Places, group: Group, times: int = 1) -> torch.Tensor:
    """`[1, heads, tokens, head_dim]` to `[heads * times * documents, longest, head_dim]`, zeros after a document's end."""
    table = row[0].index_select(1, places.in_row).index_fill_(1, places.padding, 0)
    table = table if times == 1 else table.repeat_interleave(times, dim=0)
    return table.view(len(table) * len(group.unseen), -1, row.shape[3])


def _row(tables: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """The reverse of all groups: `[heads, places of a table, head_dim]` of each to `[heads, tokens, head_dim]`."""
    return torch.cat(tables, dim=1).index_select(1, places)
