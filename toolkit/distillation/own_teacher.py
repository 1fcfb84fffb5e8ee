"""A student that is its own teacher: the average of its past weights (EMA), or the model below its adapter.

Mean teacher (Tarvainen and Valpola 2017, arXiv:1703.01780): after each step, average = decay * average + (1 - decay) * student.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.distributed.compat import as_before_prepare
from toolkit.distributed.engines import unwrapped
from toolkit.losses.causal_lm import supervised
from toolkit.losses.chunked import Logits
from toolkit.losses.distillation import Body, TeacherFn
from toolkit.losses.divergences import TeacherLogps
from toolkit.losses.selective_head import at_positions
from toolkit.models.frozen import put_into
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from collections.abc import Sequence


class Average:
    """The average of a student's weights: a model in evaluation mode, which shares what the student doesn't train.

    `means`: the averages of the trained parameters, by name, in float32 at least: at a decay of 0.999 a step is less than what
    bfloat16 can add. They are the model's own parameters where these have that type.
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        inner = unwrapped(student)
        frozen = {id(each): each for each in inner.parameters() if not each.requires_grad}
        self.decay, self.model = decay, copy.deepcopy(inner, frozen).eval()
        as_before_prepare(self.model)
        self.means = {
            name: precise(parameter.detach())
            for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }  # fmt: skip
        self.model.requires_grad_(False)

    @torch.no_grad()
    def put_back(self, means: Mapping[str, torch.Tensor]) -> None:
        """Take the averages that a checkpoint has kept."""
        for name, mean in self.means.items():
            mean.copy_(means[name])
        self.into_model()

    @torch.no_grad()
    def follow(self, student: nn.Module) -> None:
        """Move toward the student, once a step."""
        weights = dict(unwrapped(student).named_parameters())
        for name, mean in self.means.items():
            mean.lerp_(weights[name].to(mean.dtype), 1 - self.decay)
        self.into_model()

    def into_model(self) -> None:
        """Give the model the averages, where it has another type."""
        put_into(self.model, self.means)


def ask_without_adapter(student: nn.Module, vocabulary: int) -> TeacherFn:
    """A teacher that is the student with its adapter off, of which the first `vocabulary` tokens count: no second model.

    One model can't be called within its own forward pass, so the teacher's hidden states at supervised positions are made
    first; its logits are made for a chunk at a time, as of any other teacher. Needs whole weights on each device.
    """
    base = unwrapped(student)

    def ask(micro_batch: MicroBatch, temperature: float, body: Body) -> torch.Tensor:
        positions, _ = supervised(micro_batch)
        inputs = model_inputs(micro_batch)
        found: list[tuple[Logits, torch.Tensor]] = []

        def keep(logits_of: Logits, _: Sequence[nn.Parameter], rows: torch.Tensor, __: int) -> torch.Tensor:
            found.append((logits_of, rows))
            return rows.new_zeros(1)

        with torch.no_grad(), evaluation_mode(base), base.disable_adapter():
            at_positions(base, inputs, positions, keep)
        ((logits_of, rows),) = found

        def of_teacher(piece: slice) -> TeacherLogps:
            with torch.no_grad(), base.disable_adapter():
                logits = precise(logits_of(rows[piece])[:, :vocabulary])
            return TeacherLogps((logits if temperature == 1.0 else logits / temperature).log_softmax(-1))

        return body(of_teacher, vocabulary)

    return ask
