"""How much memory training takes on each rank: what ZeRO's formula says for a model, and what a rank really holds.

Bytes of the *model states*: weights, gradients, float32 masters, the optimizer's moments. Activations and the buffers of
communication come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import OptimConfig
from toolkit.config.conditions import momentum_of
from toolkit.distributed.engines import element_count, engine_of, unwrapped
from toolkit.distributed.engines.engine import local_part
from toolkit.optim.parameter_groups import parameter_groups

if TYPE_CHECKING:
    from accelerate import Accelerator

# State of the optimizers that can be sharded: float32 values for an element.
_MOMENTS = {"adamw_torch": 2, "adamw_torch_fused": 2, "nadam": 2, "radam": 2, "sgd": 0, "rmsprop": 1}
_WITH_MOMENTUM = ("sgd", "rmsprop")  # one more with --momentum

# DeepSpeed's stage3_param_persistence_threshold: parameters of this many elements or fewer stay whole on every rank.
_STAYS_WHOLE = 100_000


@dataclass(frozen=True)
class Elements:
    """What there is to keep of a model, counted in elements.

    `kept_whole`: of the parameters, those too small for ZeRO-3 to shard. `moments`: of the optimizer's state.
    """

    parameters: int
    trained: int
    moments: int
    kept_whole: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `masters`: the float32 weights that the optimizer updates, where they are not the weights themselves.

    `on_cpu`: how many of all of them wait in the CPU's memory while a GPU computes. `gathered`: how many of the weights are
    layers that ZeRO-3 has brought together and not let go yet.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    on_cpu: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def zero_memory_table(
    model: nn.Module, config: OptimConfig, world_size: int, *, mixed_precision: str = "no", offload: str = "none"
) -> dict[int, Memory]:
    """What a rank would hold of this model, prepared or not, by ZeRO stage; stage 0 is plain data parallelism.

    Args:
        model: frozen parameters count as weights alone.
        config: its `optim` must be one that can be sharded.
        world_size: number of ranks.
        mixed_precision: "no" or "bf16".
        offload: "none", "optimizer" or "parameters", for the stages that can.
    """
    elements = count_elements(model, config)
    return {stage: memory_of_stage(stage, elements, world_size, mixed_precision, offload) for stage in range(4)}


def memory_of_stage(
    stage: int, elements: Elements, world_size: int, mixed_precision: str = "no", offload: str = "none"
) -> Memory:
    """ZeRO's formula (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3 and figure 1).

    Moments are divided by the number of ranks from stage 1 on, gradients from 2, weights from 3. A weight takes 4 bytes, a
    gradient 4, a moment 4. With bf16 the weights of ZeRO take 2, next to masters of 4; plain data parallelism computes in
    bfloat16 under autocast, from float32 weights. Not as in the paper:

    - DeepSpeed (0.19, single_partition_of_fp32_groups and fp32_partitioned_groups_flat) keeps masters in float32 training as
      well, a divided copy of the weights.
    - With bf16 the gradients take 2 bytes in stage 1, as there, and 4 in stages 2 and 3, where micro-batches are added up.
    - Stage 3 keeps small parameters whole, next to their shards.
    """
    half = 2 if stage and mixed_precision == "bf16" else 4
    moved = offload if stage >= (3 if offload == "parameters" else 1) else "none"
    share = [1 / world_size if stage >= first else 1.0 for first in (3, 2, 1)]
    weights = half * elements.parameters * share[0]
    gradients = (half if stage == 1 else 4) * elements.trained * share[1]
    masters, moments = (4 * count * share[2] for count in (elements.trained if stage else 0, elements.moments))
    on_cpu = 0.0
    if moved != "none":
        # Shards of the gradients go to the CPU as they come, to be float32 there; stage 3 keeps them as they came as well.
        sent = 4 * elements.trained * share[2] + (gradients if stage == 3 else 0)
        gradients = sent + (gradients if stage == 1 else 0)
        on_cpu = sent + masters + moments + (weights if moved == "parameters" else 0)
    weights += half * elements.kept_whole if stage == 3 else 0
    return Memory(round(weights), round(gradients), round(masters), round(moments), round(on_cpu))


def count_elements(model: nn.Module, config: OptimConfig) -> Elements:
    """Of a model, also of one that an engine has sharded."""
    parameters = [element_count(parameter) for parameter in model.parameters()]
    trained = moments = 0
    for group in parameter_groups(model, config):
        size = sum(element_count(parameter) for _, parameter in group["params"])
        rule = "adamw_torch" if group.get("rule") == "adamw" else config.optim
        more = rule in _WITH_MOMENTUM and momentum_of(config) > 0
        trained += size
        moments += size * (1 if rule == "muon" else _MOMENTS[rule] + more)
    return Elements(sum(parameters), trained, moments, sum(count for count in parameters if count <= _STAYS_WHOLE))


def used_memory(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> Memory:
    """What this rank holds now, by the storage of the live tensors; one that several share counts once.

    Between two steps the gradients have been freed: what counts as such then is memory that the engine keeps for them.
    """
    inner, engine = unwrapped(model), engine_of(accelerator)
    pieces = engine.pieces(accelerator, inner, optimizer) if engine.pieces else []
    owners = [piece.owner for piece in pieces]
    zero = _deepspeed_engine(accelerator)
    parameters = list(inner.parameters())
    gradients = [each.grad for each in chain(parameters, owners)]
    gradients.append(getattr(zero.optimizer, "grad_partitions_flat_buffer", None) if zero else None)
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    seen: dict[int, torch.UntypedStorage] = {}
    weights = chain(parameters, (p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")))
    held = [_new_bytes(tensors, seen) for tensors in (weights, gradients, owners, (value for value in state if value.dim()))]
    on_cpu = sum(each.nbytes() for each in seen.values() if each.device.type != accelerator.device.type)
    gathered = [parameter.data for parameter in parameters if not getattr(parameter, "ds_persist", True)]
    return Memory(held[0], held[1], held[2], held[3], on_cpu, _new_bytes(gathered, {}))


def _deepspeed_engine(accelerator: Accelerator) -> Any:
    """DeepSpeed's engine of a prepared model, or None: an Accelerator has the attribute only under DeepSpeed."""
    return getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def _new_bytes(tensors: Iterable[torch.Tensor | None], seen: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the storages that are not among those seen, which they join."""
    fresh = {storage.data_ptr(): storage for storage in _storages(tensors) if storage.data_ptr() not in seen}
    seen.update(fresh)
    return sum(storage.nbytes() for storage in fresh.values())


def _storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if tensor is not None and (local := local_part(tensor)).numel():
            yield local.untyped_storage()


def memory_table(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, config: OptimConfig) -> str:
    """Both side by side, for people: the table of the stages, and what this rank holds."""
    engine = _deepspeed_engine(accelerator)
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"] if engine else {}
    offload = "parameters" if "offload_param" in zero else "optimizer" if "offload_optimizer" in zero else "none"
    half = accelerator.mixed_precision == "bf16"
    whole, ranks = unwrapped(model), accelerator.num_processes
    table = zero_memory_table(whole, config, ranks, mixed_precision=accelerator.mixed_precision, offload=offload)
    used = used_memory(accelerator, model, optimizer)
    unit, name = (1e9, "GB") if table[0].total >= 1e9 else (1e6, "MB")
    names = ["weights", "gradients", "masters", "moments", "total", *(["on CPU"] if offload != "none" else [])]
    here = _name(engine.zero_optimization_stage() if engine else 0)
    held = _cells(used, unit, len(names))
    held[1] = held[1] if used.gradients else "freed"
    lines = [
        f"memory of a rank in {name}: {count_elements(whole, config).parameters:,} parameters, --optim {config.optim}, "
        f"{'bf16' if half else 'float32'}, ranks: {ranks}",
        _row("", names),
        *(_row(_name(stage), _cells(memory, unit, len(names))) for stage, memory in table.items()),
        _row(f"held ({here})", held),
    ]
    if used.gathered:
        lines.append(f"  of the weights held {used.gathered / unit:.2f} are layers that are gathered now, not shards")
    if engine:
        buffers = zero["reduce_bucket_size"] * (2 if half else 4) / unit
        lines.append(f"  on top of it come activations, and up to {buffers:.2f} of DeepSpeed's buffers")
    if accelerator.device.type == "cuda":
        lines.append(f"  highest so far on the GPU, with all of these: {torch.cuda.max_memory_allocated() / unit:.2f}")
    return "\n".join(lines)


def _name(stage: int) -> str:
    return f"ZeRO-{stage}" if stage else "plain"


def _cells(memory: Memory, unit: float, count: int) -> list[str]:
    sizes = [memory.weights, memory.gradients, memory.masters, memory.moments, memory.total, memory.on_cpu]
    return [f"{size / unit:.2f}" if size else "-" for size in sizes[:count]]


def _row(label: str, cells: list[str]) -> str:
    return f"  {label:<14}" + "".join(f"{cell:>11}" for cell in cells)
