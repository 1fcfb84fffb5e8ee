"""The output head of a language model at supervised positions only, through the model's public forward.

A head of V tokens over N positions makes N x V logits, often more memory than all the rest of the model. Most of them may be
unsupervised, and none is needed once its cross-entropy and gradient are known. So for the length of one forward pass the
head's own `forward` is replaced by a function that picks the supervised ones of the hidden states it is given and goes over
them in chunks. What the head returns, and so the model's `logits`, are two sums, or the log-probability of each supervised
token. Wrappers (DDP, FSDP, ZeRO, adapters, autocast) see an ordinary forward and backward. Why there is no
simpler way: docs/design.md.

A model that changes its logits after the head (soft-capping, scaling) cannot be served so. It is recognized once, by a
head that returns a pattern which the model ought to return untouched, and gets its logits at supervised positions whole.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from toolkit.distributed.compat import is_compiled_whole
from toolkit.distributed.engines import unwrapped
from toolkit.losses.chunked import Logits, Sums, sums_in_chunks
from toolkit.models.adapter_files import without_adapter
from toolkit.models.compat import is_compiled
from toolkit.models.layers import uncompiled
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Compute = Callable[[Logits, Sequence[nn.Parameter], torch.Tensor, int], torch.Tensor]
OfHidden = Callable[[torch.Tensor], torch.Tensor]

_HEAD_COMES_LAST: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # what the trial with two tokens found


def supervised_sums(
    model: nn.Module,
    inputs: dict[str, Any],
    positions: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing_factor: float = 0.0,
    z_loss: float = 0.0,
    weights: torch.Tensor | None = None,
) -> Sums:
    """One forward pass: loss and correct predictions summed over the positions; 0-d.

    `positions` `[P]`: flat indices into `[batch, length]`; `targets` `[P]`: the token to predict at each; `weights` `[P]`: what
    each counts.
    """

    def sums(logits_of: Logits, parameters: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
        there, counts = targets.to(rows.device), None if weights is None else weights.to(rows.device)
        return torch.stack(
            sums_in_chunks(logits_of, parameters, rows, there, vocabulary, label_smoothing_factor, z_loss, counts)
        )

    loss, correct = at_positions(model, inputs, positions, sums)
    return loss, correct.detach()


def at_positions(
    model: nn.Module, inputs: dict[str, Any], positions: torch.Tensor, compute: Compute, of_hidden: OfHidden | None = None
) -> torch.Tensor:
    """One forward pass, and of its logits at some positions what `compute` makes of them.

    `compute(logits_of, parameters, rows, vocabulary)` returns a tensor `[n]` from `rows` `[P, width]`, of which `logits_of`
    makes logits `[P, vocabulary]` with the help of trained `parameters`. `positions` `[P]`: flat indices into
    `[batch, length]`. What `of_hidden` makes of the head's inputs `[P, width]`, `[m]`, follows behind: `[n + m]`.
    """
    base = unwrapped(model)
    if model not in _HEAD_COMES_LAST:
        with _bias_taken_out(base):
            _HEAD_COMES_LAST[model] = head_comes_last(model, base, inputs["input_ids"])
    if "use_cache" in _forward_parameters(base):
        inputs = {**inputs, "use_cache": False}
    if not _HEAD_COMES_LAST[model]:
        logits, found = _logits_at(model, base, inputs, positions, of_hidden)
        return torch.cat([compute(lambda rows: rows, (), logits, logits.shape[-1]), *found])

    head = base.get_output_embeddings()
    original, vocabulary = head.forward, base.config.get_text_config().vocab_size

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        return original(rows) if bias is None else original(rows) + bias.to(rows.device)

    def of_hidden_states(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions.to(hidden.device))
        parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        made = compute(logits_of, parameters, rows, vocabulary)
        made = made if of_hidden is None else torch.cat([made, of_hidden(rows).to(made.dtype)])
        # [1, 1, n] in the place of logits [batch, length, V]; not a view, whose hooks FSDP2 could lose
        return torch.stack([made])[None]

    with _bias_taken_out(base) as bias, _forward_replaced(head, of_hidden_states):
        return model(**inputs).logits.flatten()


@contextmanager
def _bias_taken_out(base: PreTrainedModel) -> Iterator[torch.Tensor | None]:
    """The buffer that BART and its like (transformers 5.23) add to what their head returned, with a zero in its place."""
    inner = without_adapter(base)
    bias = getattr(inner, "final_logits_bias", None)
    if bias is None:
        yield None
        return
    inner.final_logits_bias = bias.new_zeros(1, 1)
    try:
        yield bias
    finally:
        inner.final_logits_bias = bias


def _logits_at(
    model: nn.Module, base: PreTrainedModel, inputs: dict[str, Any], positions: torch.Tensor, of_hidden: OfHidden | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits `[P, V]` at flat positions, as the model itself makes them, and what `of_hidden` makes of the head's inputs."""
    length = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
    if "logits_to_keep" in _forward_parameters(base):
        columns = torch.unique(positions % length) if len(positions) else positions.new_zeros(1)
        inputs = {**inputs, "logits_to_keep": columns}  # for every row of the batch
        positions = positions // length * len(columns) + torch.searchsorted(columns, positions % length)
    found: list[torch.Tensor] = []

    def see(head: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        assert of_hidden is not None
        found.append(of_hidden(arguments[0].reshape(-1, arguments[0].shape[-1])[positions.to(arguments[0].device)]))

    with ExitStack() as stack:
        if of_hidden is not None:
            stack.callback(base.get_output_embeddings().register_forward_pre_hook(see).remove)
        logits = model(**inputs).logits
    return logits.reshape(-1, logits.shape[-1]).index_select(0, positions.to(logits.device)), found


def _forward_parameters(base: PreTrainedModel) -> Mapping[str, Any]:
    return inspect.signature(without_adapter(base).forward).parameters  # an adapter's own forward takes anything


def head_comes_last(model: nn.Module, base: PreTrainedModel, input_ids: torch.Tensor) -> bool:
    """Whether the model returns what its head returns, untouched, and the head works with parameters of its own.

    Tried with two tokens, in evaluation mode. The head returns whole numbers up to 127, which survive a cast to bfloat16
    and which a soft-cap, a factor, a bias or a cut vocabulary changes.
    """
    head = base.get_output_embeddings()
    if head is None:
        return _not_last(base, "has no output head of its own")
    if any(is_compiled_whole(module) or is_compiled(module) for module in (model, base)):
        return _not_last(base, "is compiled as a whole")
    original, tokens = head.forward, input_ids[:1, :2]
    calls: list[tuple[bool, torch.Tensor]] = []

    def pattern(hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            logits = original(hidden.detach().requires_grad_())
        own = hidden.shape[:2] == tokens.shape and _parameters_behind(logits) <= {*head.parameters()}
        marks = torch.arange(logits.numel(), device=logits.device) % 255 - 127
        calls.append((own, marks.view_as(logits).to(logits.dtype)))
        return calls[-1][1]

    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(_forward_replaced(head, pattern))
        stack.enter_context(uncompiled(base))  # not worth compiling for
        decoded = {"decoder_input_ids": tokens} if getattr(base.config, "is_encoder_decoder", False) else {}
        returned = model(input_ids=tokens, **decoded).logits
    if len(calls) == 1 and calls[0][0] and returned.shape == calls[0][1].shape and bool((returned == calls[0][1]).all()):
        return True
    return _not_last(base, "changes its logits after the head")


def _not_last(base: PreTrainedModel, reason: str) -> bool:
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        logger.warning("%s %s: logits at supervised positions are held in memory as a whole.", type(base).__name__, reason)
    return False


def _parameters_behind(tensor: torch.Tensor) -> set[torch.Tensor]:
    """The parameters that a tensor was computed from, found in its graph."""
    found: set[torch.Tensor] = set()
    seen: set[Any] = set()
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [earlier for earlier, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found.add(leaf)
    return found


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """The module with another `forward`. Its hooks run as always: ZeRO-3 gathers the weights in one."""
    before = vars(module).get("forward")  # an instance's own, where a library has put one there
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
