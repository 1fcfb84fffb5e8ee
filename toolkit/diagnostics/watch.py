"""A watch over a recipe while it runs, unchanged.

Public functions of the toolkit that it may call are wrapped, and torch is watched through its own hooks: a loop that was
written by hand is seen as well as `tk.train_step`.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import toolkit as tk
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.data.loading.streams import StreamLoader
from toolkit.diagnostics import wrappers
from toolkit.diagnostics.compat import WRITES_OF_MANY
from toolkit.diagnostics.direction import direction_of
from toolkit.diagnostics.loss_parts import reference_logps
from toolkit.diagnostics.records import Documents, Gradients, Record, Update
from toolkit.diagnostics.replacements import Replacements
from toolkit.preference.reference import Reference

_PACKAGE = os.path.dirname(os.path.abspath(tk.__file__)) + os.sep


class Watch:
    """Wraps what a recipe calls; `record` is of the run in progress. A context manager: left, everything is as it was."""

    def __init__(self, script: str) -> None:
        self.script, self.record = script, Record()
        self._folder = os.path.dirname(script) + os.sep
        self.without_dropout = self.compares_gradients = False
        self.until: Callable[[], bool] = bool  # asked before each batch whether the run may end
        self._undo = Replacements()
        self.leaves: dict[bool, list[list[torch.Tensor]]] | None = None  # made-up log-probabilities, of a policy or not
        self.in_use: list[tuple[str, Any]] = []
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.made_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
        self._inside, self._fresh, self.pending, self._before = 0, True, Update([], {}, {}, None, 0, ""), Gradients()
        self._left = Gradients()  # the weights as the last update left them
        self._stepped: torch.optim.Optimizer | None = None  # last, since a forward pass of a training step

    def __enter__(self) -> Watch:
        for name, wrapper in wrappers.WRAPPERS.items():
            self._undo.public(name, functools.partial(wrapper, self))
        for name in dir(tk):
            if name.endswith("_baselines"):
                self._undo.public(name, lambda original, *values, **named: {})
            elif name.startswith("tokenize_for_"):
                self._undo.public(name, functools.partial(wrappers.tokenized, self, name.removeprefix("tokenize_for_")))
        for owner, name, kind in ((TrainLoader, "batches", "train"), (StreamLoader, "batches", "train"),
                                  (EvalLoader, "__iter__", "eval")):  # fmt: skip
            self._undo.attribute(owner, name, functools.partial(wrappers.watched_batches, self, kind))
        self._undo.attribute(Reference, "__call__", functools.partial(reference_logps, self))
        self._undo.attribute(torch.optim.Optimizer, "__init__", functools.partial(wrappers.made_optimizer, self))
        self._undo.attribute(torch.nn.utils, "clip_grad_norm_", functools.partial(wrappers.clipped, self))
        self._undo.attribute(torch.nn.functional, "cross_entropy", functools.partial(wrappers.cross_entropy, self))
        self._undo.attribute(
            torch.nn.functional, "binary_cross_entropy_with_logits", functools.partial(wrappers.binary_cross_entropy, self)
        )
        for name in wrappers.WRITES:
            self._undo.attribute(torch.Tensor, name, functools.partial(wrappers.written, self))
        for name in WRITES_OF_MANY:
            self._undo.attribute(torch, name, functools.partial(wrappers.written, self))
        self._undo.attribute(torch.optim.lr_scheduler.LRScheduler, "step", functools.partial(wrappers.scheduled, self))
        self._undo.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_update).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        """A copy of a model, such as a recipe's own reference, has its hooks: it is watched by the same watch."""
        return self

    def start(self, *, without_dropout: bool, compares_gradients: bool) -> Record:
        """Begin the record of another run."""
        self.record, self.in_use, self._inside = Record(), [], 0
        self.without_dropout, self.compares_gradients = without_dropout, compares_gradients
        self._before, self._fresh, self.pending, self._stepped = {}, True, Update([], {}, {}, None, 0, ""), None
        self._left = {}
        self.until = bool
        return self.record

    def is_own(self, file: str) -> bool:
        """Whether a file is the user's: the recipe, or a module next to it or below."""
        return file == self.script or (
            file.startswith(self._folder) and not file.startswith(_PACKAGE) and "site-packages" not in file
        )

    def place(self) -> str:
        """FILE:LINE of the user's code that is being executed; empty where none is."""
        frame = sys._getframe(1)
        while frame is not None:
            if self.is_own(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def place_of(self, function: object) -> str:
        """FILE:LINE at which the user defines a function; empty where it is not the user's."""
        while isinstance(function, functools.partial):
            function = function.func
        code = getattr(function, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and self.is_own(code.co_filename) else ""

    def add_model(self, model: nn.Module) -> None:
        """A model that the recipe has made: its embeddings are watched from now on."""
        record = self.record
        record.models.append(model)
        if self.without_dropout:
            wrappers.remove_dropout(model)
        model.register_forward_hook(functools.partial(wrappers.saw_spans, self))
        for embeddings in wrappers.input_embeddings(model):
            if embeddings not in self._hooked:
                self._hooked.add(embeddings)
                embeddings.register_forward_hook(functools.partial(wrappers.embedded, self))
        body = getattr(model, "base_model", None)
        if isinstance(body, nn.Module) and not hasattr(model, "peft_config") and body not in self._hooked:
            self._hooked.add(body)
            body.register_forward_pre_hook(functools.partial(wrappers.entered, self), with_kwargs=True)

    @property
    def kind(self) -> str:
        """Of the loader whose batch is in use."""
        return self.in_use[-1][0] if self.in_use else ""

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._inside += 1
        if self._inside > 1 or self.kind != "train":  # an optimizer inside of another one
            return
        record, pending = self.record, self.pending
        if record.optimizer is None:
            record.optimizer = optimizer
            record.optimizer_where = self.made_at.get(optimizer, "") or self.place()
            if record.model is not None:
                record.frozen_before = {
                    n: p.detach().clone() for n, p in record.model.named_parameters() if not p.requires_grad
                }
        pending.where, pending.rates = self.place(), [group["lr"] for group in optimizer.param_groups]
        pending.gradients = self.gradients()
        pending.unclipped = pending.unclipped or pending.gradients
        divisor = getattr(optimizer, "grad_scale", None)  # a fused kernel clips on its own
        if divisor is not None:
            pending.gradients = {name: gradient / divisor for name, gradient in pending.gradients.items()}
        pending.shrunk = {n: by for n, p in self._named() if n in self._left and 0.9 < (by := scale(self._left[n], p)) < 1}
        pending.is_repeated, self._stepped = self._stepped is optimizer, optimizer
        batch, loader = self.in_use[-1][1], record.train
        if loader is not None:
            pending.progress = batch.position / loader.examples_to_consume
            pending.micro_batches = len(batch.micro_batches)
        self._before = {n: p.detach().clone() for n, p in self._named() if p.grad is not None}
        record.updates.append(pending)
        if self.compares_gradients and len(record.updates) == 1:
            record.direction = direction_of(record, record.rollouts or self._documents(batch), pending.unclipped)

    def _after_update(self, *_: Any) -> None:
        self._inside -= 1
        if self._inside or self.kind != "train" or not self.record.updates:
            return
        named = dict(self._named())
        changed = touched = 0
        for name, before in self._before.items():
            gradient = self.record.updates[-1].gradients[name] != 0
            touched += int(gradient.sum())
            changed += int(((named[name].detach() != before) & gradient).sum())
        self.record.updates[-1].unchanged = 1 - changed / touched if touched else 0.0
        self._before, self._fresh, self.pending = {}, True, Update([], {}, {}, None, 0, "")
        self._left = {name: p.detach().clone() for name, p in named.items() if p.requires_grad}

    def _documents(self, batch: Any) -> Documents:
        made = self.record.made_batches
        return [each for tensors in batch.micro_batches if id(tensors) in made for each in made[id(tensors)].documents]

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter of the trained model, or a view of one."""
        place = tensor.untyped_storage().data_ptr()
        return any(p.untyped_storage().data_ptr() == place for _, p in self._named())

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        model = self.record.model
        return list(model.named_parameters()) if model is not None else []

    def gradients(self) -> Gradients:
        """Copies of the gradients of the trained model, by name."""
        return {name: p.grad.detach().clone() for name, p in self._named() if p.grad is not None}

    def before_forward(self) -> None:
        """The first forward pass since the last update: nothing may be left of that one's gradient."""
        self._stepped = None
        if not self._fresh or self.record.optimizer is None:
            return
        self._fresh = False
        held = {id(p) for group in self.record.optimizer.param_groups for p in group["params"]}
        self.pending.left_over = [
            name for name, p in self._named() if p.grad is not None and id(p) in held and bool((p.grad != 0).any())
        ]


def scale(before: torch.Tensor, after: torch.Tensor) -> float:
    """By what a tensor was multiplied; 1 where it was not changed, or in another way; of one number nobody can say which."""
    one, other = before.double(), after.detach().double()
    if one.numel() < 2 or torch.equal(one, other) or not (squares := one.square().sum()):
        return 1.0
    by = (one * other).sum() / squares
    return float(by) if (other - by * one).norm() < 0.3 * (other - one).norm() else 1.0  # what is left is rounding
