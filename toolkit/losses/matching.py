"""Distillation of a classifier: the outputs, the layers and the attention of a student are drawn toward its teacher's.

An example's loss, where student layer m is paired with teacher layer g(m):

    (1 - s) * D  +  s * the data's loss  +  w * sum over pairs (hidden states apart + attention apart)

| term | formula | source |
| --- | --- | --- |
| D, one class | T^2 KL(p, q), p and q the softmax of the logits / T | Hinton et al., arXiv:1503.02531, section 2 |
| D, several classes | the same with a sigmoid for each class, mean over classes | |
| D, a number | squared difference | |
| hidden states apart | MSE(H_m W_m, H_g(m)), W_m trained; layer 0: embeddings | TinyBERT, arXiv:1909.10351, equations 8, 9 |
| attention apart | mean over heads and tokens of KL(A_g(m), A_m) | MobileBERT, arXiv:2004.02984, attention transfer |

The means are over the example's own tokens (and the width), never over padding; examples count alike. A are the attention's
probabilities, which transformers' models return; TinyBERT compares the scores before the softmax, which they don't. The squared
error of probabilities would be of the order of 1 / length^2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.losses.classification import Loss

AskClassifier = Callable[[dict[str, Any]], Any]  # a micro-batch -> an output with logits, hidden_states and attentions
LayerPairs = Sequence[tuple[int, int]]  # layers of the student and of the teacher, as `hidden_states` counts them


def pair_layers(how: str, of_student: int, of_teacher: int) -> list[tuple[int, int]]:
    """Which layer of the teacher each of the student's is compared with.

    `uniform`: m with the teacher's m * of_teacher / of_student, rounded down, the embeddings with its embeddings (TinyBERT's,
    and the skip of PKD, arXiv:1908.09355); `last`: the teacher's last layers, one for each (PKD's last); `none`: no pairs.
    """
    if how == "none":
        return []
    if how == "last":
        return [(layer, of_teacher - of_student + layer) for layer in range(1, of_student + 1)]
    return [(layer, layer * of_teacher // of_student) for layer in range(of_student + 1)]


def outputs_apart(student: torch.Tensor, teacher: torch.Tensor, problem_type: str, temperature: float) -> torch.Tensor:
    """D of each example, `[batch]`, from logits `[batch, classes]` of both; D is of the table above."""
    if problem_type == "regression":
        return (student - teacher).square().mean(-1)
    student, teacher = student / temperature, teacher / temperature
    if problem_type == "multi_label":
        logs = [functional.logsigmoid(logits) for logits in (teacher, -teacher, student, -student)]
        apart = (logs[0].exp() * (logs[0] - logs[2]) + logs[1].exp() * (logs[1] - logs[3])).mean(-1)
    else:
        p, q = teacher.log_softmax(-1), student.log_softmax(-1)
        apart = (p.exp() * (p - q)).sum(-1)
    return apart * temperature**2


def hidden_states_apart(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean squared difference of each example, `[batch]`, over its tokens and the width.

    Hidden states of both `[batch, length, width]`, the student's projected; `mask` `[batch, length]`, 1 at an example's tokens.
    """
    errors = (precise(student) - precise(teacher)).square().mean(-1)
    return errors.where(mask.bool(), 0.0).sum(-1) / mask.sum(-1)


def attention_apart(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(teacher, student) in nats of what each of an example's tokens attends to, mean over heads and tokens, `[batch]`.

    Attention probabilities of both `[batch, heads, length, length]`; `mask` as in `hidden_states_apart`.
    """
    p, q = precise(teacher), precise(student)
    least = torch.finfo(q.dtype).tiny  # where a softmax has underflowed; padding has no probability in either
    apart = (p * (p.clamp_min(least).log() - q.clamp_min(least).log())).sum(-1).mean(1)
    return apart.where(mask.bool(), 0.0).sum(-1) / mask.sum(-1)


def classifier_distillation_loss(
    model: nn.Module,
    micro_batch: MicroBatch,
    totals: Mapping[str, float],
    *,
    teacher: AskClassifier,
    data_loss: Callable[..., Loss],
    problem_type: str = "single_label",
    temperature: float = 1.0,
    cross_entropy_share: float = 0.0,
    pairs: LayerPairs = (),
    match_weight: float = 1.0,
    match_attention: bool = False,
) -> Loss:
    """This micro-batch's part of the mean over all examples of the global batch of the loss above.

    Args:
        model: the student; with `pairs` its hidden states are projected (`add_projections`).
        micro_batch: padded rows, with their `attention_mask`.
        teacher: made by `build_classifier_teacher`.
        data_loss: of `classification_task`; its mean is weighted where the rows are, the other terms never are.

    Returns the loss, 0-d, and parts of means: what `data_loss` returns, `divergence` (D), and with pairs `hidden_mse` and
    `attention_kl`, summed over pairs.
    """
    inputs = model_inputs(micro_batch)
    asked = {"output_hidden_states": True} if pairs else {}
    asked |= {"output_attentions": True} if match_attention else {}
    output, of_teacher = model(**inputs, **asked), teacher(micro_batch)
    of_data, metrics = data_loss(lambda **_: output, micro_batch, totals)
    mask = micro_batch["attention_mask"]
    parts = {"divergence": outputs_apart(precise(output.logits), precise(of_teacher.logits), problem_type, temperature)}
    if pairs:
        states, its = output.hidden_states, of_teacher.hidden_states
        parts["hidden_mse"] = _sum(hidden_states_apart(states[own], its[other], mask) for own, other in pairs)
    if match_attention:
        maps, its = output.attentions, of_teacher.attentions
        parts["attention_kl"] = _sum(attention_apart(maps[own - 1], its[other - 1], mask) for own, other in pairs if own)
    means = {name: each.sum() / totals["examples"] for name, each in parts.items()}
    loss = (1 - cross_entropy_share) * means["divergence"] + cross_entropy_share * of_data
    loss = loss + match_weight * sum(mean for name, mean in means.items() if name != "divergence")
    return loss, {**metrics, **{name: mean.detach() for name, mean in means.items()}}


def _sum(values: Any) -> torch.Tensor:
    return torch.stack(list(values)).sum(0)
