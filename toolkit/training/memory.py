"""The micro-batch that fits: tried before the first step, halved until it does. The mathematics stays as it was."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import DataConfig, PreferenceConfig, Refusal
from toolkit.config.conditions import couples_a_micro_batch
from toolkit.data.loading.order import seed_micro_batch
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import largest
from toolkit.optim.muon import workspace
from toolkit.optim.rounding import StochasticRounding
from toolkit.system.allocator import keep_freed_memory
from toolkit.system.console import say
from toolkit.system.free_memory import free_memory, is_out_of_memory, memory_held
from toolkit.training.step import LossFn, loss_and_metrics, to_device

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from toolkit.data.loading.batch import MicroBatch
    from toolkit.data.loading.loaders import StreamLoader, TrainLoader

WHAT_HELPS = "Lower --max-length, take --gradient-checkpointing, --bf16, another --optim, or a smaller model."

_INNER = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner")  # of feed-forward layers
_UNITS = ("examples", "tokens", "weight", "pairs", "chosen_tokens", "desirable", "undesirable", "documents", "comparisons")


def fit_micro_batch(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, train: TrainLoader | StreamLoader,
    loss_fn: LossFn, config: DataConfig,
) -> TrainLoader | StreamLoader:  # fmt: skip
    """The training loader with a micro-batch that fits into memory: as given, or halved as often as need be.

    The longest micro-batch goes forward and backward once, next to memory for the optimizer's moments, and then what Muon's
    step needs for a while is allocated next to the gradients, without a collective and without a trace: gradients are cleared
    and random numbers are seeded again in each step anyway. When it does not fit,
    the micro-batch is halved and accumulation doubled: the global batch, the order and so the mean gradient stay the same.
    All ranks take the smallest that one of them needs. Nothing is tried where four times a generous estimate, and of all that
    this process holds now, are free. On a CPU where not even once as much is, steps spare memory and take longer.

    Streams, whose longest example is unknown, are left as they are. So are models that the engine shards, which a rank can't
    try alone.

    Raises:
        Refusal: not even one example fits; or a smaller micro-batch would be another loss (aot), which nobody requested.
    """
    longest = train.longest_micro_batch() if config.auto_find_batch_size else None
    if longest is None:
        return train
    asked, size = train.micro_batch_size, train.micro_batch_size
    plain, totals = unwrapped(model), dict.fromkeys(_UNITS, 1.0)
    needed, device, engine = most_needed(plain, longest), accelerator.device, engine_of(accelerator)
    spares = engine.shards_weights(accelerator)  # from the start
    if device.type == "cpu" and not spares and needed is not None and not is_free(needed, device):
        keep_freed_memory(sparing=True)
        if accelerator.is_main_process:
            say("little memory is free: steps spare it and may take half as long again. A smaller micro-batch needs less.")
    if engine.shards:
        return train
    is_tried = needed is None or not is_free(needed, device, times=4)
    while is_tried and size:
        if _fits(accelerator, plain, optimizer, dataclasses.replace(train, micro_batch_size=size), loss_fn, totals):
            break
        size = -(-size // 2) if size > 1 else 0
    size = -largest(accelerator, -size)
    if not size:
        raise Refusal(f"out of memory: not even one example of the longest fits. {WHAT_HELPS}")
    if size == asked:
        return train
    if isinstance(config, PreferenceConfig) and couples_a_micro_batch(config):
        raise Refusal(
            f"out of memory with {asked} examples in a micro-batch, and --loss-type {','.join(config.loss_type)} compares the "
            f"pairs of a micro-batch with each other: a smaller one is another loss. {size} would fit: take "
            f"--per-device-train-batch-size {size} --global-batch-size {train.global_batch_size}. Or keep it: {WHAT_HELPS}"
        )
    if accelerator.is_main_process:
        say(
            f"out of memory with {asked} examples in a micro-batch: continuing with {size}, and "
            f"{-(-train.global_batch_size // (size * accelerator.num_processes))} micro-batches a step. The global batch of "
            f"{train.global_batch_size} examples stays, and so does the result, but for dropout masks."
        )
    return dataclasses.replace(train, micro_batch_size=size)


def most_needed(model: nn.Module, micro_batch: MicroBatch) -> int | None:
    """Bytes of a forward and backward pass and of an optimizer's moments, rather two times too many than too few.

    In float32, for each token: in each layer 24 numbers of the model's width, six of the feed-forward layer's, and of each head
    four for each token that may be seen; three times the logits. None of a model or a micro-batch of another kind.
    """
    shape: Any = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    read = ("input_ids", "labels") if getattr(shape, "is_encoder_decoder", False) else ("input_ids",)
    texts = [value for name, value in micro_batch.items() if name.endswith(read)]
    layers, width, heads = (getattr(shape, name, None) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if not (texts and layers and width and heads):
        return None
    lengths = [[bounds.diff() for name, bounds in micro_batch.items() if name.endswith(f"cu_seq_lens_{side}")] for side in "qk"]
    if len(lengths[0]) == len(lengths[1]) == len(texts):  # packed: a token sees its own document
        seen = sum(int((queries.long() * keys).sum()) for queries, keys in zip(*lengths, strict=True))
    else:
        seen = sum(text.numel() for text in texts) * max(text.shape[-1] for text in texts)
    inner = max(getattr(shape, name, None) or 0 for name in _INNER) or 4 * width
    inner *= getattr(shape, "num_experts_per_tok", None) or 1
    layers += getattr(shape, "num_decoder_layers", None) or 0
    of_token = layers * (24 * width + 6 * inner) + 3 * max(shape.vocab_size, width)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return 4 * (sum(text.numel() for text in texts) * of_token + 4 * layers * heads * seen) + 12 * trained


def is_free(needed: int, device: torch.device, *, times: int = 1) -> bool:
    """Whether so many times what is needed is free. What is held counts too: next to a large teacher a micro-batch is tried."""
    free = free_memory(device)
    return free is not None and times * (needed + memory_held(device)) < free


def _fits(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, train: TrainLoader | StreamLoader,
    loss_fn: LossFn, totals: dict[str, float],
) -> bool:  # fmt: skip
    reserved: list[torch.Tensor] = []
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    matrices = [p for group in plain.param_groups if group.get("rule") == "muon" for p in group["params"]]
    with_one = {id(matrix) for matrix in matrices}
    try:
        if not plain.state:  # it makes its moments in its first step; Muon has one, Adam two
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            wider = 2 if isinstance(plain, StochasticRounding) else 1  # moments in float32 of weights in bfloat16
            reserved = [torch.empty_like(p) for p in trained for _ in range(wider * (1 if id(p) in with_one else 2))]
        seed_micro_batch(0)
        with accelerator.autocast():
            longest = to_device(train.longest_micro_batch() or {}, accelerator.device)
            loss, _ = loss_and_metrics(loss_fn, model, longest, totals)
        loss.backward()
        del loss  # its graph, and with it the activations
        reserved.append(torch.empty(workspace(matrices), dtype=torch.uint8, device=accelerator.device))
        return True
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        del reserved
        model.zero_grad(set_to_none=True)
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
