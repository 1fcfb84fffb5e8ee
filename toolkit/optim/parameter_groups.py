"""Parameter groups: which parameter gets which learning rate, weight decay and rule.

It follows from names, shapes and module types alone. Parameters and groups are sorted by name, so the same settings give
the same groups on every machine, and a saved optimizer state fits.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from toolkit.config import OptimConfig, Refusal
from toolkit.config.conditions import is_pattern

Group = dict[str, Any]


def parameter_groups(model: nn.Module, config: OptimConfig, loraplus_lr_ratio: float = 1.0) -> list[Group]:
    """Trainable parameters, grouped by learning rate, weight decay and (for muon) rule.

    Each group is `{"params": [(name, parameter), ...], "name", "lr", "weight_decay"}`, for muon also `"rule"`. Frozen
    parameters are left out; a tied one counts once, under its first name. Matrices decay, those of embeddings too (as in
    transformers' Trainer); norms, biases and every other vector do not.
    """
    trainable = {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}
    if not trainable:
        raise Refusal(
            "The model has no trainable parameter: every one is frozen (requires_grad is False). "
            "Unfreeze some, or add an adapter."
        )
    owners = _owning_modules(model)
    rate_factors = _rate_factors(trainable, owners, config, loraplus_lr_ratio)
    grouped: dict[tuple[str, bool, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in trainable.items():
        matrix = _dimensions(parameter) >= 2
        # Each model in transformers has an RMSNorm class of its own, so the class's name decides. T5's biases of distances are
        # a table, relative_attention_bias.weight.
        decays = matrix and "norm" not in type(owners[name]).__name__.lower() and "bias" not in name
        rule = "adamw"
        if config.optim == "muon" and decays and _is_hidden_matrix(name, parameter, owners[name]):
            rule = "muon"
        grouped.setdefault((rule, decays, rate_factors[name]), []).append((name, parameter))
    if config.optim == "muon" and not any(rule == "muon" for rule, _, _ in grouped):
        raise Refusal(
            "--optim muon is for the matrices inside a model's numbered layers, and this model has none that is trainable: "
            "use --optim adamw_torch."
        )
    groups = []
    for (rule, decays, rate_factor), members in grouped.items():
        words = [rule] if config.optim == "muon" else []
        words += ["decay" if decays else "no decay"] + ([f"rate x {rate_factor:.6g}"] if rate_factor != 1.0 else [])
        group: Group = {
            "params": members,
            "name": ", ".join(words),
            "lr": config.learning_rate * rate_factor,
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        groups.append(group | ({"rule": rule} if config.optim == "muon" else {}))
    return groups


def _owning_modules(model: nn.Module) -> dict[str, nn.Module]:
    owners: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            owners[f"{prefix}.{name}" if prefix else name] = module
    return owners


def _dimensions(parameter: nn.Parameter) -> int:
    # DeepSpeed ZeRO-3 leaves an empty vector where the parameter was, and the true shape next to it.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _layer_number(name: str) -> int | None:
    match = re.search(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.", name)
    return int(match[1]) if match else None


def _is_hidden_matrix(name: str, parameter: nn.Parameter, owner: nn.Module) -> bool:
    """Whether Muon is meant for it: a matrix of a numbered layer. Embeddings, the head and poolers are outside those.

    A table that nothing is multiplied with, such as Mamba's A_log, is no weight by its name.
    """
    is_weight = _dimensions(parameter) == 2 and name.endswith("weight")
    return is_weight and _layer_number(name) is not None and not isinstance(owner, nn.Embedding)


def _rate_factors(
    parameters: dict[str, nn.Parameter], owners: dict[str, nn.Module], config: OptimConfig, loraplus_lr_ratio: float
) -> dict[str, float]:
    """Of layers and patterns, and of LoRA+ (https://arxiv.org/abs/2402.12354): an adapter's matrices B learn faster than A."""
    by_layer = _layer_factors(parameters, owners, config.layer_lr_decay)
    by_pattern = _pattern_factors(parameters, config.lr_patterns)
    of_b = {name: loraplus_lr_ratio if ".lora_B." in name else 1.0 for name in parameters}
    return {name: by_layer[name] * by_pattern[name] * of_b[name] for name in parameters}


def _layer_factors(parameters: dict[str, nn.Parameter], owners: dict[str, nn.Module], decay: float) -> dict[str, float]:
    """decay ** (depth of the top − depth): embeddings, with their norm and projection, 0, layer N at N + 1, all else (head,
    last norm, pooler) at the top.

    The scheme of ELECTRA (https://arxiv.org/abs/2003.10555, appendix A) and BEiT. A head tied to the embeddings is an
    embedding.
    """
    if decay == 1.0:
        return dict.fromkeys(parameters, 1.0)
    numbers = [number for name in owners if (number := _layer_number(name)) is not None]
    if not numbers:
        raise Refusal(
            f"--layer-lr-decay {decay:g} needs layers to count, and no parameter's name holds layers.N, layer.N, block.N "
            "or h.N. Use --lr-patterns regex=factor instead."
        )
    top = max(numbers) + 2

    def depth(name: str) -> int:
        number = _layer_number(name)
        if number is not None:
            return number + 1
        return 0 if isinstance(owners[name], nn.Embedding) or "embedding" in name else top

    return {name: decay ** (top - depth(name)) for name in parameters}


def _pattern_factors(parameters: Iterable[str], patterns: list[str]) -> dict[str, float]:
    """The factor of the first pattern that is found in a name, else 1."""
    factors: dict[str, float] = {}
    for entry in patterns:
        if not is_pattern(entry):
            raise Refusal(f"--lr-patterns {entry!r}: expected regex=factor with a factor of 0 or more, such as 'lm_head=0.1'.")
        pattern, _, factor = entry.rpartition("=")
        found = [name for name in parameters if re.search(pattern, name)]
        if not found:
            some = ", ".join(list(parameters)[:3])
            raise Refusal(f"--lr-patterns {entry!r} matches no trainable parameter. Their names look like {some}.")
        fresh = [name for name in found if name not in factors]
        if not fresh:
            raise Refusal(f"--lr-patterns {entry!r} has no effect: earlier patterns match all of its parameters. Put it first.")
        factors.update(dict.fromkeys(fresh, float(factor)))
    return {name: factors.get(name, 1.0) for name in parameters}
