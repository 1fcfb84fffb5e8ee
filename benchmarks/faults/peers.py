"""The tiny training of tests/tiny_run.py with transformers' Trainer and TRL's SFTTrainer.

Rows and the model's configuration are those of that script, with attention dropout of 0.1. What is run is what a user starts
again and again: it resumes from the newest checkpoint when there is one.
"""

import builtins
import contextlib
import gc
import hashlib
import io
import json
import os
import resource
import runpy
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, IterableDataset
from safetensors.torch import save as safetensors_bytes
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import modeling_utils
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.sft_trainer import SFTTrainer

from toolkit.models.shapes import built_in_config

from .runs import Scenario

FAULT_TESTS = Path(__file__).resolve().parents[2] / "tests/faults"
TINY = runpy.run_path(str(FAULT_TESTS.parent / "tiny_run.py"))
POISON: int = TINY["POISON"]


def prepare() -> None:
    """Do once what a process otherwise does at its first save and at its first collection of garbage."""
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())  # its own is one for all processes: one that is killed would keep it
    with contextlib.suppress(ImportError):
        import trackio  # noqa: F401  TRL asks it for a link at each save
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(built_in_config(TINY["Config"]())).save_pretrained(folder)
    gc.freeze()


def train(peer: str, scenario: Scenario) -> None:
    """Train 20 steps with a checkpoint every 4, or as `scenario` says, in out/; write result.json."""
    config = TINY["Config"]()
    transformers.set_seed(0)
    shape = built_in_config(config)
    shape.attention_dropout = scenario.get("dropout", 0.1)
    model = transformers.LlamaForCausalLM(shape)
    settings = {
        "output_dir": "out", "max_steps": scenario.get("max_steps", 20),
        "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "gradient_accumulation_steps": scenario.get("accumulation", 1), "save_steps": scenario.get("save_steps", 4),
        "save_total_limit": scenario.get("save_total_limit", 1), "enable_jit_checkpoint": scenario.get("jit", False),
        "logging_steps": 1, "save_strategy": scenario.get("save_strategy", "steps"),
        "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    tokenizer, rows = _tokenizer(), _rows(config, scenario)
    if peer == "Trainer":
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(**settings), train_dataset=rows, processing_class=tokenizer,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), callbacks=[_callback(scenario)],
        )  # fmt: skip
    else:
        arguments = trl.SFTConfig(**settings, bf16=False)
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[_callback(scenario)])
    _make_ill(trainer, scenario.get("step_seconds", 0))
    if "kill_at_operation" in scenario or "count_operations" in scenario:
        injection = runpy.run_path(str(FAULT_TESTS / "injection.py"))
        _write_through_open()
        injection["inject"]({name: scenario[name] for name in ("kill_at_operation", "count_operations") if name in scenario})
    if "no_room_for" in scenario:
        _write_through_open()
        _limit_file(scenario["no_room_for"])
    there = os.path.isdir("out") and get_last_checkpoint("out") is not None
    began = time.monotonic()
    os.write(os.open("steps", os.O_WRONLY | os.O_APPEND), b"0\n")  # from here on, a fault hits training
    trainer.train(resume_from_checkpoint=there or None)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    losses = [event["loss"] for event in trainer.state.log_history if "loss" in event]
    result = {
        "weights": digest.hexdigest(), "finite": finite, "losses": losses, "step": trainer.state.global_step,
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    with os.fdopen(os.open("result.json", os.O_WRONLY | os.O_CREAT), "w") as file:  # not an operation that is counted
        file.write(json.dumps(result))


def _rows(config: Any, scenario: Scenario) -> Any:
    rows = [{"input_ids": row["input_ids"]} for row in TINY["make_rows"](config)]
    if "poisoned_row" in scenario:
        rows[scenario["poisoned_row"]]["input_ids"][0] = POISON
    return IterableDataset.from_generator(lambda: iter(rows)) if scenario.get("stream") else Dataset.from_list(rows)


def _tokenizer() -> Any:
    words = {"<pad>": 0, **{str(number): number for number in range(1, 259)}, "<eos>": 259}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _callback(scenario: Scenario) -> Any:
    steps = os.open("steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Steps(transformers.TrainerCallback):
        """Writes down each step that is done; kills the process after one, where `scenario` says so."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            os.write(steps, f"{state.global_step}\n".encode())
            if state.global_step == scenario.get("kill_after_step"):
                os.kill(os.getpid(), signal.SIGKILL)

    return Steps()


def _make_ill(trainer: Any, seconds: float) -> None:
    """Each forward pass takes so much longer, and the loss of a batch with the poisoned row is infinite."""
    plain = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
        time.sleep(seconds)
        factor = float("inf") if bool((inputs["input_ids"] == POISON).any()) else 1.0
        computed = plain(model, inputs, return_outputs=return_outputs, **named)
        return (computed[0] * factor, *computed[1:]) if return_outputs else computed * factor

    trainer.compute_loss = compute_loss


def _write_through_open() -> None:
    """Make torch.save and safetensors write with `open`, as the other files are written: an injection there meets them all."""
    plain = torch.serialization.save

    def save(value: Any, file: Any, *positional: Any, **named: Any) -> None:
        buffer = io.BytesIO()
        plain(value, buffer, *positional, **named)
        with open(file, "wb") as opened:
            opened.write(buffer.getvalue())

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as opened:
            opened.write(safetensors_bytes(tensors, metadata))

    torch.save = save  # type: ignore[assignment]  # called with a path alone
    modeling_utils.safe_save_file = save_file


def _limit_file(path: str) -> None:
    """The file whose path ends so can't be written beyond half its size (RLIMIT_FSIZE)."""
    original, (soft, hard) = builtins.open, resource.getrlimit(resource.RLIMIT_FSIZE)

    class Limited:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, hard))
            return self._file.write(data)

        def __enter__(self) -> "Limited":
            return self

        def __exit__(self, *problem: Any) -> None:
            try:
                self._file.close()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def opened(file: Any, mode: str = "r", *positional: Any, **named: Any) -> Any:
        made = original(file, mode, *positional, **named)
        return Limited(made) if "w" in mode and str(file).endswith(path) else made

    builtins.open = io.open = opened
