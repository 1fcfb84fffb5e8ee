"""A reference's log-probabilities on disk: each pair's or answer's computed once, under a key of all that they depend on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from toolkit.config import AdapterConfig, ModelConfig, settings_of
from toolkit.config.conditions import is_adapter, is_built_in
from toolkit.data.loading.batch import Batch, MicroBatch
from toolkit.data.loading.columns import column
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.data.loading.packing import PlainRows
from toolkit.data.loading.some_rows import SomeRows, digest_of_columns, seen_in_training
from toolkit.distributed.engines import unwrapped
from toolkit.distributed.ranks import largest, on_main, say_once
from toolkit.losses.answer_logps import answer_logps, mismatched_logps, pair_logps
from toolkit.models.adapter_files import base_of
from toolkit.models.compat import commit_of
from toolkit.system.digests import read_sealed, seal, sha256_of
from toolkit.system.evaluation_mode import evaluation_mode
from toolkit.system.files import make_folder, remove, write_atomically
from toolkit.training.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel

FORMAT_VERSION = 1
SECONDS_BETWEEN_WRITES = 60.0
# What of the settings of a model changes no log-probability, or only their rounding in ways that exact layouts share.
_NOT_OF_THE_NUMBERS = {
    "gradient_checkpointing", "torch_compile", "torch_compile_backend", "attn_implementation", "dropout", "attention_dropout",
    "lora_dropout",
}  # fmt: skip

_DIGESTED = ("input_ids", "prompt_tokens", "chosen_tokens", "pair", "answer", "mismatched_row", "mismatched_tokens")


class ReferenceSettings(Protocol):
    """What is read of a recipe's settings, next to those of ModelConfig and AdapterConfig, which are all in the cache's key."""

    @property
    def reference(self) -> str: ...
    @property
    def sync_ref_model(self) -> bool: ...
    @property
    def loss_type(self) -> Sequence[str]: ...
    @property
    def model(self) -> str: ...
    @property
    def use_peft(self) -> bool: ...
    @property
    def init_lora_weights(self) -> str: ...
    @property
    def fp8(self) -> str: ...
    @property
    def tf32(self) -> bool | None: ...
    @property
    def eval_strategy(self) -> str: ...
    @property
    def per_device_eval_batch_size(self) -> int: ...


def reference_table(
    accelerator: Accelerator,
    model: nn.Module,
    train: TrainLoader,
    evaluation: EvalLoader | None,
    config: ReferenceSettings,
    ld_alpha: float | None = None,
) -> torch.Tensor:
    """Log-probabilities on the device: `[pairs, 2]` of the chosen and rejected answers, by the number of the pair.

    Or `[answers, 1]` of single answers by their number, with KTO `[answers, 2]`: of the mismatched ones too. Only those that
    the run is going to see are computed, in evaluation mode, and only those that no earlier run with the same model, data and
    precision has left on disk. What is done is written every minute, so that a killed run loses no more. Others are NaN. A
    collective: each rank computes its share.
    """
    datasets = [_dataset(loader) for loader in (train, evaluation) if loader is not None]
    kind, has_mismatched = "pair" if is_of_pairs(train) else "answer", "mismatched_row" in datasets[0].column_names
    pairs = 1 + max(int(column(dataset, kind).max()) for dataset in datasets)
    path = on_main(accelerator, lambda: _path_of(model, accelerator.mixed_precision, datasets, config, ld_alpha))
    known = on_main(accelerator, lambda: _read(path, (pairs, 2 if kind == "pair" or has_mismatched else 1)))
    missing = [SomeRows(train.rows, _unknown(datasets[0], kind, seen_in_training(train), known))]
    if evaluation is not None and config.eval_strategy != "no":
        missing.append(SomeRows(evaluation.rows, _unknown(datasets[1], kind, np.arange(len(evaluation.rows)), known)))
    count = sum(map(len, missing))
    if not count:
        say_once(f"reference: log-probabilities read from {path}")
    else:
        say_once(f"reference: log-probabilities of {count:,} {kind}s, computed once and kept in {path}")
        began = time.monotonic()
        work = _Work(accelerator, path, known, kind)
        with evaluation_mode(model):
            for some in missing:
                loader = EvalLoader(
                    some, train.collate, config.per_device_eval_batch_size, accelerator.process_index, accelerator.num_processes
                )
                for batch in loader if len(some) else ():
                    on_device = to_device(batch.micro_batches[0], accelerator.device)
                    work.add(batch, _answers_of(model, on_device, kind, has_mismatched, ld_alpha))
        known = work.finished()
        say_once(f"reference: done in {time.monotonic() - began:.0f} s")
    return torch.from_numpy(known).to(accelerator.device)


def is_of_pairs(train: TrainLoader) -> bool:
    """Whether the rows are pairs; else they are single answers. The column that numbers them is "pair" or "answer"."""
    return "pair" in _dataset(train).column_names


def _dataset(loader: TrainLoader | EvalLoader) -> Dataset:
    return cast(PlainRows, loader.rows).dataset


def _answers_of(
    model: nn.Module, micro_batch: MicroBatch, kind: str, has_mismatched: bool, ld_alpha: float | None
) -> torch.Tensor:
    """Log-probabilities of a micro-batch, in the columns of the table."""
    if kind == "pair":
        logps = pair_logps(model, micro_batch, ld_alpha)
        return torch.stack([logps.chosen, logps.rejected], dim=1)
    own = [answer_logps(model, micro_batch)]
    return torch.stack([*own, mismatched_logps(model, micro_batch)] if has_mismatched else own, dim=1)


class _Work:
    """Log-probabilities of all ranks, brought together and written now and then."""

    def __init__(self, accelerator: Accelerator, path: Path, known: np.ndarray, kind: str) -> None:
        self.accelerator, self.path, self.known, self.kind = accelerator, path, known, kind
        self.new = torch.zeros(len(known), known.shape[1] + 1)  # the answers, and 1 where this rank has computed them
        self.batches, self.written = 0, time.monotonic()

    def add(self, batch: Batch, logps: torch.Tensor) -> None:
        if batch.real[0]:
            values = torch.cat([logps, torch.ones_like(logps[:, :1])], dim=1)
            self.new[batch.micro_batches[0][self.kind]] = values.float().cpu()
        self.batches += 1
        # the ranks agree seldom, and after the same batches
        if self.batches % 16 == 0 and largest(self.accelerator, int(time.monotonic() - self.written > SECONDS_BETWEEN_WRITES)):
            self.finished()
            say_once(f"reference: {int((~np.isnan(self.known[:, 0])).sum()):,} {self.kind}s done")

    def finished(self) -> np.ndarray:
        """All that is known now, written and on every rank."""
        total = self.new.clone()
        if self.accelerator.num_processes > 1:
            on_device = total.to(self.accelerator.device)
            torch.distributed.all_reduce(on_device)
            total = on_device.cpu()
        done = total[:, -1].numpy() > 0
        self.known[done] = (total[:, :-1] / total[:, -1:].clamp(min=1)).numpy()[done]
        on_main(self.accelerator, lambda: _write(self.path, self.known))
        self.written = time.monotonic()
        return self.known


def _unknown(dataset: Dataset, kind: str, examples: np.ndarray, known: np.ndarray) -> np.ndarray:
    pairs = column(dataset, kind)[examples]
    return examples[np.isnan(known[pairs, 0])]


def _path_of(
    model: nn.Module, precision: str, datasets: Sequence[Dataset], config: ReferenceSettings, ld_alpha: float | None
) -> Path:
    from datasets import config as datasets_config

    groups = [ModelConfig, *([AdapterConfig] if config.use_peft else [])]
    names = {name for group in groups for name in settings_of(group)} - _NOT_OF_THE_NUMBERS
    content = {
        "version": FORMAT_VERSION,
        "settings": {name: getattr(config, name) for name in sorted(names)},
        "precision": [precision == "bf16", precision == "fp16", config.tf32, *([config.fp8] if config.fp8 != "none" else [])],
        "ld_alpha": ld_alpha,
        "weights": _weights(unwrapped(model), config.model),
        "pairs": [digest_of_columns(dataset, _DIGESTED) for dataset in datasets],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return Path(datasets_config.HF_DATASETS_CACHE) / f"reference-{key}.npy"


def _weights(model: PreTrainedModel, name: str) -> Any:
    """What distinguishes weights: of a directory its files, of a Hub model its commit; a built-in one's follow from settings.

    Of the directory of an adapter its own files, and what distinguishes the model under it.
    """
    directory = Path(os.path.expanduser(name))
    if directory.is_dir():
        kinds = ("*.safetensors", "*.json", "*.py")  # the last of a model that brings its own code
        files = sorted(path for kind in kinds for path in directory.glob(kind))
        own = {path.name: sha256_of(path) for path in files}
        return {"adapter": own, "base": _weights(model, base_of(directory)[0])} if is_adapter(name) else own
    return None if is_built_in(name) else commit_of(model.config)


def _read(path: Path, shape: tuple[int, int]) -> np.ndarray:
    try:
        known = np.load(io.BytesIO(read_sealed(path)), allow_pickle=False)
        if known.shape == shape:
            return known
        damage = f"{known.shape} in place of {shape}"
    except FileNotFoundError:
        damage = ""
    except OSError as error:
        damage = error.strerror or str(error)
    except ValueError as error:
        damage = str(error)
    if damage:
        say_once(f"{path} is damaged ({damage}): its log-probabilities are computed anew")
    return np.full(shape, np.nan, dtype=np.float32)


def _write(path: Path, known: np.ndarray) -> None:
    """A .npy file with its digest behind it: a flipped bit would be another reference, and train to other weights."""
    make_folder(path.parent)
    if path.is_dir():
        remove(path)
    content = io.BytesIO()
    np.save(content, known)
    own = path.with_name(f".{path.name}.{os.getpid()}")  # two runs on the same data may write at the same time
    write_atomically(path, seal(content.getvalue()), own)
