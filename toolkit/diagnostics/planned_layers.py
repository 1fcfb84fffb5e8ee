"""Compiled layers of a plan: what inductor would keep of them for backward, without compiling.

torch.compile (2.13) gives up, silently, under a dispatch mode, which a plan's ledger is. So AOTAutograd traces the layer on its
fake tensors, the partitioner that inductor takes says what is kept and what is computed again, and the two graphs run as they
are. Operations that inductor would fuse then have results of their own for a moment, within one layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from toolkit.diagnostics.compat import FakeTensor, as_compiled, tree_flatten, tree_unflatten, with_tensors
from toolkit.diagnostics.ledger import Ledger
from toolkit.diagnostics.replacements import Replacements
from toolkit.models.attention import kernels

logger = logging.getLogger(__name__)


class NotTraced(Exception):
    """What a trace can't go through."""


class PlannedLayers:
    """Layers that share a graph, as those of a model do; `given_up` where one can't be traced and runs as it is written.

    `has_whole_weights`: not where each rank has a part of them, which an engine's hooks gather around the modules in a layer.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.given_up, self._is_tracing, self._ledger = False, False, ledger
        self.has_whole_weights = True
        self._graphs: dict[Any, Callable[..., Any] | None] = {}

    def replace(self, replace: Replacements) -> None:
        """Take the place of the compiler, for modules and for functions whose first argument is one."""
        replace.attribute(torch, "compile", self._compiled)
        replace.attribute(nn.Module, "compile", self._compile)
        replace.attribute(kernels, "loop_kernel", self._loop)

    def _compiled(self, original: Callable[..., Any], forward: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        original(forward, **settings)  # compiles nothing yet, but imports the compiler, which takes 60 MB of a process
        return functools.partial(self._run, forward)

    def _compile(self, _: Any, layer: nn.Module, **settings: Any) -> None:
        layer.forward = functools.partial(self._run, type(layer).forward, layer)

    def _loop(self, original: Callable[..., Any], *values: Any) -> Any:
        """It reads how long documents are, which a trace doesn't know, and is no part of a compiled graph either."""
        if self._is_tracing:
            raise NotTraced("a loop over documents")
        return original(*values)

    def _run(self, forward: Callable[..., Any], layer: nn.Module, *values: Any, **named: Any) -> Any:
        leaves, form = tree_flatten((values, named))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor)]
        if not (torch.is_grad_enabled() and places):
            return forward(layer, *values, **named)
        names, weights = zip(*layer.named_parameters(), strict=True)

        def computed(weights: Any, tensors: Any) -> Any:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            values, named = tree_unflatten(given, form)
            with with_tensors(layer, dict(zip(names, weights, strict=True))):
                return forward(layer, *values, **named)

        tensors = [leaves[place] for place in places]
        key = (forward, layer.training, *((each.shape, each.dtype, each.requires_grad) for each in (*weights, *tensors)))
        if key not in self._graphs:
            self._graphs[key] = self._traced(computed, list(weights), tensors)
        graph = self._graphs[key]
        return forward(layer, *values, **named) if graph is None else graph(list(weights), tensors)

    def _traced(self, computed: Callable[..., Any], weights: list[Any], tensors: list[Any]) -> Callable[..., Any] | None:
        graph, self._is_tracing = as_compiled(computed), True
        try:
            if not self.has_whole_weights:
                raise NotTraced("sharded weights")
            # Not seen by a checkpoint around the layer, which counts what is saved.
            with self._ledger.pausing(), saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                graph(weights, tensors)
        except Exception as error:  # whatever a layer does that a trace can't follow
            logger.debug("not traced: %s", error)
            self.given_up = True
            return None
        finally:
            self._is_tracing = False
        return graph
