"""What replaces a public function while a recipe is watched: each calls the function, and notes what it saw.

The arguments of each: the watch, the function that it replaces, and what that was called with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.diagnostics import loss_parts
from toolkit.diagnostics.alone import compare_alone
from toolkit.diagnostics.records import Documents, Forward, MadeBatch

if TYPE_CHECKING:
    from toolkit.diagnostics.watch import Watch

# What changes a tensor in place; of many at once compat.WRITES_OF_MANY.
WRITES = (
    "mul_", "div_", "sub_", "add_", "lerp_", "copy_", "addcmul_", "__imul__", "__isub__", "__iadd__", "__itruediv__",
)  # fmt: skip
HELD_OUT = 25  # documents: a last batch is a short one


class Learned(BaseException):
    """A run has shown what it is to show. It is no Exception: a recipe that catches those must not go on."""


def input_embeddings(model: nn.Module) -> list[nn.Module]:
    """The modules that embed tokens: the model's own, and those of an encoder and a decoder with the same weight."""
    find = getattr(model, "get_input_embeddings", None)
    own = find() if find else None
    if own is None:
        return []
    weight = getattr(own, "weight", None)
    return [own, *(m for m in model.modules() if isinstance(m, nn.Embedding) and m is not own and m.weight is weight)]


def remove_dropout(model: nn.Module) -> None:
    """Set every rate of dropout in a model to 0: those of torch's modules, and those that attention layers keep as numbers."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)


def made_model(watch: Watch, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    model = original(*values, **named)
    if original.__name__ == "load_model" and not watch.record.auto_class:
        watch.record.auto_class = values[0] if values else named["auto_class"]
    if original.__name__ == "add_value_head" and watch.without_dropout:  # zeros hide where values go
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            torch.nn.init.normal_(model.value_head.weight, std=0.005)
    watch.add_model(model)
    return model


def loaded_tokenizer(watch: Watch, original: Callable[..., Any], *values: object, **named: object) -> Any:
    watch.record.tokenizer = original(*values, **named)
    return watch.record.tokenizer


def loaded_splits(watch: Watch, original: Callable[..., Any], *values: object, **named: object) -> Any:
    splits = original(*values, **named)
    watch.record.columns = list(getattr(splits.get("train"), "column_names", None) or [])
    return splits


def tokenized(watch: Watch, task: str, original: Callable[..., Any], *values: object, **named: object) -> Any:
    watch.record.task = task
    splits = original(*values, **named)
    held_out = splits.get("validation")
    of_files = task in ("lm", "masked_lm", "diffusion", "sft")  # a file has thousands of them
    if of_files and hasattr(held_out, "__len__") and len(held_out) > HELD_OUT:
        splits["validation"] = held_out.select(range(HELD_OUT))
    return splits


def built_loaders(watch: Watch, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    train, evaluation = original(*values, **named)
    watch.record.splits = dict(values[0] if values else named["splits"])
    watch.record.train = train
    for loader in (train, evaluation):
        if loader is not None:
            loader.collate = functools.partial(collated, watch, loader.collate)
    return train, evaluation


def collated(watch: Watch, collate: Callable[[Documents], dict[str, Any]], documents: Documents) -> dict[str, Any]:
    kept = [dict(document) for document in documents]  # as they are before: it may shorten them in their place
    made = collate(documents)
    watch.record.made_batches[id(made)] = MadeBatch(made, kept, collate, watch.place_of(collate))
    return made


def built_optimizer(watch: Watch, original: Callable[..., Any], *values: object, **named: object) -> Any:
    optimizer, schedule = original(*values, **named)
    record = watch.record
    record.built, record.schedule = optimizer, schedule

    def asked(*values: Any, **named: Any) -> list[float]:
        record.asks_schedule = True
        return schedule(*values, **named)

    return optimizer, asked


def made_optimizer(
    watch: Watch, original: Callable[..., Any], optimizer: torch.optim.Optimizer, *values: object, **named: object
) -> None:
    watch.made_at[optimizer] = watch.place()
    original(optimizer, *values, **named)


def watched_batches(watch: Watch, kind: str, original: Callable[..., Any], *values: object, **named: object) -> Iterator[Any]:
    for batch in original(*values, **named):
        if kind == "train" and watch.until():
            raise Learned
        for tensors in batch.micro_batches:
            if id(tensors) in watch.record.made_batches:
                watch.record.made_batches[id(tensors)].kind = kind
        watch.in_use.append((kind, batch))
        try:
            yield batch
        finally:
            watch.in_use[:] = [each for each in watch.in_use if each[1] is not batch]


def embedded(watch: Watch, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    if watch.kind == "" or not inputs or not isinstance(inputs[0], torch.Tensor):
        return output
    with_gradient = torch.is_grad_enabled()
    where = watch.place()
    forward = Forward(watch.kind, module.training, with_gradient, inputs[0], where, module)
    watch.record.forwards.append(forward)
    if not with_gradient:
        return output
    if watch.kind == "train":
        watch.before_forward()
    output = output if output.requires_grad else output.detach().requires_grad_()

    def see(gradient: torch.Tensor) -> None:
        norms = gradient.detach().float().norm(dim=-1)
        forward.norms = norms if forward.norms is None else forward.norms + norms

    output.register_hook(see)
    return output


def entered(watch: Watch, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    mask = named.get("attention_mask")
    is_masked = mask is not None or named.get("cu_seq_lens_q") is not None
    hidden = named.get("input_ids", inputs[0] if inputs else None)

    def see(*_: Any) -> None:
        for forward in reversed(watch.record.forwards[-2:]):
            if hidden is not None and forward.input_ids is hidden:
                forward.is_masked = is_masked

    handle: list[Any] = []

    def once(*values: Any) -> None:
        see()
        handle[0].remove()

    handle.append(module.register_forward_hook(once))


def train_step(watch: Watch, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    names = ("accelerator", "model", "optimizer", "batch", "loss_fn")
    given = {**dict(zip(names, values, strict=False)), **named}
    if loss_parts.is_first(watch):
        compare_alone(watch, given["model"], given["batch"], given["loss_fn"])
        loss_parts.look_at_loss(watch, given["loss_fn"], given["model"], given["batch"].micro_batches[0], given["batch"].totals)
    result = original(*values, **named)
    loss = result.get("loss")
    if isinstance(loss, torch.Tensor):
        watch.record.loss_types.add(loss.dtype)
    return result


def clipped(watch: Watch, original: Callable[..., Any], *values: object, **named: object) -> Any:
    if watch.kind == "train" and not watch.pending.unclipped:
        watch.pending.unclipped = watch.gradients()
    return original(*values, **named)


def scheduled(watch: Watch, original: Callable[..., Any], *values: object, **named: object) -> Any:
    if watch.kind == "train":
        watch.pending.scheduled += 1
        watch.pending.schedule_where = watch.place()
    return original(*values, **named)


def cross_entropy(watch: Watch, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Called in a training step: whether it is given probabilities. By the recipe itself: how many targets it counts, next to
    how many labels there are."""
    if watch.kind == "train" and _are_probabilities(values[0] if values else named["input"]):
        watch.record.of_probabilities = watch.record.of_probabilities or watch.place()
    if watch.kind == "train" and watch.is_own(sys._getframe(2).f_code.co_filename) and torch.is_grad_enabled():
        target = values[1] if len(values) > 1 else named.get("target")
        current = watch.record.forwards[-1].input_ids if watch.record.forwards else None
        made = next((m for m in watch.record.made_batches.values() if m.tensors.get("input_ids") is current), None)
        if isinstance(target, torch.Tensor) and not target.is_floating_point() and made is not None:
            labels, ignored = made.tensors.get("labels"), named.get("ignore_index", -100)
            if isinstance(labels, torch.Tensor) and labels.shape == made.tensors["input_ids"].shape:
                counted = (int((target != ignored).sum()), int((labels != -100).sum()), watch.place())
                watch.record.counted.append(counted)
    return original(*values, **named)


def binary_cross_entropy(watch: Watch, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Called in a training step: whether what it is given ever was below 0 or above 1, as logits of what is learned are."""
    if watch.kind == "train" and torch.is_grad_enabled():
        logits = (values[0] if values else named["input"]).detach()
        place = watch.place()
        within = bool(((logits >= 0) & (logits <= 1)).all())
        watch.record.within_0_and_1[place] = within and watch.record.within_0_and_1.get(place, True)
    return original(*values, **named)


def _are_probabilities(logits: torch.Tensor) -> bool:
    """Whether the classes' numbers add up to 1 everywhere, and none is negative."""
    if logits.dim() < 2 or logits.numel() == 0:
        return False
    values = logits.detach().float()
    return bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() < 0.01).all())


def written(watch: Watch, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Called by the recipe itself, on a parameter of the trained model: where that is."""
    if watch.record.optimizer is not None and watch.is_own(sys._getframe(2).f_code.co_filename):
        tensors = values[0] if isinstance(values[0], Sequence) else values[:1]
        if any(isinstance(tensor, torch.Tensor) and watch.is_parameter(tensor) for tensor in tensors):
            watch.record.written_at = watch.place()
    return original(*values, **named)


def saw_spans(watch: Watch, module: nn.Module, inputs: Any, output: Any) -> None:
    """The gradients of the logits of answers, once there was a backward pass."""
    forwards = watch.record.forwards
    for name in ("start", "end"):
        logits = getattr(output, f"{name}_logits", None)
        if watch.kind == "train" and forwards and isinstance(logits, torch.Tensor) and logits.requires_grad:
            logits.register_hook(functools.partial(forwards[-1].span_gradients.__setitem__, name))


def scored(watch: Watch, original: Callable[..., Any], *values: object, **named: object) -> Any:
    """Random models all get one reward; for a gradient each completion gets a number that is made of its tokens.

    Nor do they end: completions are cut to unequal lengths, which a loss must be right for.
    """
    rollouts = original(*values, **named)
    watch.record.samples_policy = True
    for rollout in rollouts:
        if rollout.messages is None:
            size = max(1, len(rollout.completion_ids) - (rollout.prompt + rollout.index) % 3)
            for name in ("completion_ids", "logps", "kept", "written"):
                if (of_tokens := getattr(rollout, name)) is not None:
                    setattr(rollout, name, of_tokens[:size])
        rollout.reward = (sum((i + 1) * token for i, token in enumerate(rollout.completion_ids)) % 7) / 7
        rollout.rewards = dict.fromkeys(rollout.rewards, rollout.reward)
    if not watch.record.updates:
        watch.record.rollouts += rollouts
    return rollouts


def plain_accelerator(watch: Watch, original: Callable[..., Any], config: object, *_: object, **__: object) -> Any:
    """One process on the CPU: how ranks share the work is not the recipe's."""
    return original(config)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "load_tokenizer": loaded_tokenizer, "train_tokenizer": loaded_tokenizer, "load_splits": loaded_splits,
    "load_model": made_model, "load_encoder": made_model, "add_adapter": made_model, "add_value_head": made_model,
    "build_dataloaders": built_loaders, "build_optimizer": built_optimizer, "build_accelerator": plain_accelerator,
    "train_step": train_step, "score_rollouts": scored,
    **loss_parts.WRAPPERS,
}  # fmt: skip
