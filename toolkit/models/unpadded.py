"""Padded rows without the work on their padding: a model's body computes their tokens in one row, its head sees the rows.

A micro-batch in the layout `packed` or `shared` has padded rows, and next to them the places of the tokens that the body
computes, in which order, and which of these see each other (`without_padding`, `collate_scored_pairs`). Two hooks on the body
do the rest: one takes these tokens out of the rows, the other puts their hidden states back. What the head reads, the first
token, the last one, all of them or a pooler's output, is the model's own business and stays exactly that.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from toolkit.data.loading.batch import model_inputs
from toolkit.data.loading.collate_pairs import collate_scored_pairs
from toolkit.distributed.ranks import say_once
from toolkit.models.adapter_files import without_adapter
from toolkit.models.attention.interface import DOCUMENTS, FLEX, take_attention_of_padded_rows
from toolkit.models.attention.packable import EXPERTS, PROVEN, NotPackable, check_packable, first_exact
from toolkit.models.compat import attention_of, hooks_before
from toolkit.models.layers import uncompiled
from toolkit.models.shapes import highest_dropout
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Model types whose gradients without padding are compared with those of padded rows in tests/models/test_unpadded.py.
_PROVEN = PROVEN | {"distilbert", "roberta"}
_OF_TOKENS = ("input_ids", "token_type_ids")


def choose_row_layout(model: PreTrainedModel, row_layout: str = "auto") -> str:
    """`packed` or `padded`: how `collate_padded` lays out rows for a model, with its adapter, that is not prepared yet.

    The model is made ready for that. `auto` is `packed` where that is exact, and prints why where it is not.

    Raises:
        Refusal: `row_layout` is one that would not be exact.
    """
    return _choose(model, row_layout, ("packed",), "--row-layout")


def choose_scored_pair_layout(model: PreTrainedModel, pair_layout: str = "auto") -> str:
    """`shared`, `packed` or `padded`: the same for `collate_scored_pairs`, and in the same way.

    `shared` computes a prompt once for both answers, which needs a causal model without dropout that is read at the last token.
    """
    return _choose(model, pair_layout, ("shared", "packed"), "--pair-layout")


def _choose(model: PreTrainedModel, asked: str, layouts: tuple[str, ...], flag: str) -> str:
    body = body_of(model)
    if body is not None:
        _prepare(body)
    layout, problems = first_exact(layouts, partial(_check, model, body), asked, flag)
    if layout == "padded" and problems:
        say_once(f"rows are padded: {problems[-1].what}")
        if attention_of(model.config) in (DOCUMENTS, FLEX):
            requested = "flex_attention" if attention_of(model.config) == FLEX else "auto"
            take_attention_of_padded_rows(without_adapter(model), requested, problems[-1])
    return layout


def body_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of a model, with or without an adapter, that turns tokens into hidden states; None where it is not apart."""
    plain = without_adapter(model)
    body = getattr(plain, plain.base_model_prefix, None)
    return body if isinstance(body, nn.Module) and body is not plain else None


def _check(model: PreTrainedModel, body: nn.Module | None, layout: str) -> None:
    """Raise NotPackable, with the reason, where a layout would not be exact."""
    plain, config = without_adapter(model), model.config
    name = f"model type {config.model_type!r}"
    check_packable(config)
    if attention_of(config) not in (DOCUMENTS, FLEX):
        raise NotPackable(name, f"has attention {attention_of(config)!r}, which supports no documents in a row")
    kinds = {parameter.kind for parameter in inspect.signature(type(plain).forward).parameters.values()}
    if body is None or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise NotPackable(name, f"({type(plain).__name__}) doesn't hand the bounds of documents to its body")
    if layout == "shared":
        _check_sharing(plain, name)
    is_real = not next(model.parameters()).is_meta  # in a plan there is nothing to compute with
    if is_real and config.model_type not in _PROVEN:
        _try(model, layout, name)


def _check_sharing(plain: Any, name: str) -> None:
    directions = {module.is_causal for module in plain.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    if directions != {True} or not hasattr(plain, "score"):
        raise NotPackable(name, "is not read at the last token of a causal model, as a shared prompt would need")
    rate = highest_dropout(plain)
    if rate:
        raise NotPackable(name, f"has a dropout of {rate:g}: a prompt has another mask for each of its answers")


def _try(model: PreTrainedModel, layout: str, name: str) -> None:
    """Two small pairs through the model: equal to padded ones up to rounding, and blind to each other bit for bit.

    Rows next to others may differ by rounding where experts get other batches then.
    """
    text_config: Any = model.config.get_text_config()
    parameter = next(model.parameters())
    sizes = [(3, 4, 5), (6, 2, 1)]
    tokens = np.random.default_rng(0).integers(0, text_config.vocab_size, size=(3, 12))
    padding = text_config.pad_token_id or 0
    tokens[tokens == padding] = (padding + 1) % text_config.vocab_size  # heads look for padding by its id

    def scores(rows: tuple[int, int], layout: str) -> torch.Tensor:
        pairs = [
            {"input_ids": tokens[row][: sum(size)], "pair": 0,
             **dict(zip(("prompt_tokens", "chosen_tokens", "rejected_tokens"), size, strict=True))}
            for row, size in zip(rows, sizes, strict=True)
        ]  # fmt: skip
        batch = collate_scored_pairs(pairs, layout=layout, pad_token_id=padding)
        inputs = model_inputs(batch)
        inputs = {key: value.to(parameter.device) if torch.is_tensor(value) else value for key, value in inputs.items()}
        logits: torch.Tensor = model(**inputs)[0]  # of question answering those of the start
        is_token = batch["attention_mask"].to(logits)
        if logits.shape[:2] == is_token.shape:  # of a head that reads all tokens: on padding it has no result
            logits = logits * is_token.view(*is_token.shape, *[1] * (logits.dim() - 2))
        return logits

    with evaluation_mode(model), uncompiled(model):
        try:
            expected, found, others = scores((0, 1), "padded"), scores((0, 1), layout), scores((0, 2), layout)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # whatever a forward raises for unknown inputs
            raise NotPackable(name, f"can't compute rows without padding ({type(error).__name__}: {error})") from error
    if found.shape != expected.shape:
        raise NotPackable(name, "has a head that doesn't read its rows from the last hidden states")
    rounding = (0.1 if parameter.dtype in (torch.bfloat16, torch.float16) else 1e-4) * expected.abs().max()
    mixed = any(getattr(text_config, field, None) for field in EXPERTS)
    if (found[::2] - others[::2]).abs().max() > (rounding if mixed else 0):
        raise NotPackable(name, "lets documents of one row see each other")
    if (found - expected).abs().max() > rounding:
        raise NotPackable(name, "gives a document another result in a row than alone")


def _prepare(body: nn.Module) -> None:
    """Let a body take micro-batches of every layout, once; and keep no keys and values, which nobody would continue."""
    if any(isinstance(getattr(hook, "__self__", None), _WithoutPadding) for hook in hooks_before(body)):
        return
    hooks = _WithoutPadding()
    body.register_forward_pre_hook(hooks.take_tokens, with_kwargs=True)
    body.register_forward_hook(hooks.put_back)


class _WithoutPadding:
    """The two hooks of a body. Between them it is known where the tokens come from: `token_places`, and the rows' shape."""

    def __init__(self) -> None:
        self.places: torch.Tensor | None = None
        self.shape = torch.Size()

    def take_tokens(self, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:  # at most one, which is first in every forward
            kwargs["input_ids"] = args[0]
        if getattr(body.config, "use_cache", None) is not None and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = kwargs.get("use_cache") or False
        self.places = kwargs.pop("token_places", None)
        if self.places is None:
            return (), kwargs
        ids = kwargs["input_ids"]
        self.shape = ids.shape
        numbering = getattr(getattr(body, "embeddings", None), "create_position_ids_from_input_ids", None)
        if numbering is not None:  # positions that begin behind the padding index, as RoBERTa's
            positions = numbering(ids, body.embeddings.padding_idx)
            kwargs["position_ids"] = positions.flatten().index_select(0, self.places)[None]
        for name in _OF_TOKENS:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].flatten().index_select(0, self.places)[None]
        return (), {**kwargs, "attention_mask": None}

    def put_back(self, body: Any, args: tuple[Any, ...], output: Any) -> Any:
        places, self.places = self.places, None
        if places is None:
            return output
        states = output.last_hidden_state[0]
        rows = states.new_zeros(self.shape.numel(), states.shape[-1]).index_copy(0, places, states)
        output.last_hidden_state = rows.view(*self.shape, -1)
        if output.get("pooler_output") is not None:  # that of the whole row's first token
            output.pooler_output = body.pooler(output.last_hidden_state)
        return output
