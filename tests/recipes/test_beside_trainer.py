"""One YAML, two trainers: `recipes/sft.py` and transformers' own Trainer, run whole, end with the same losses and weights.

The global batch is the whole dataset, so the order of the examples, which the two draw otherwise, plays no part.
"""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

import toolkit as tk
from toolkit.config import settings_of
from toolkit.config.setting import free_on_resume

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
LENGTHS = [9, 4, 17, 12, 6, 3]
COMMON: dict[str, Any] = {
    "optim": "adamw_torch", "learning_rate": 2e-3, "lr_scheduler_type": "linear", "max_steps": STEPS, "weight_decay": 0.1, "warmup_steps": 0,
    "per_device_train_batch_size": len(LENGTHS), "gradient_accumulation_steps": 1, "logging_steps": 1, "eval_strategy": "no",
    "save_strategy": "no", "report_to": "none", "use_cpu": True, "output_dir": "out",
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_torch": {}, "adamw_torch_fused": {}, "sgd": {"learning_rate": 0.5}, "adafactor": {}, "rmsprop": {}, "adagrad": {"learning_rate": 0.02},
}  # fmt: skip
ON_CUDA = {"adamw_bnb_8bit", "lion_32bit", "lion_8bit"}  # with bitsandbytes: tests/optim/test_optim.py
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {}, "constant_with_warmup": {"warmup_steps": 2}, "linear": {"warmup_ratio": 0.3}, "cosine": {"warmup_steps": 2},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 0.2},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}, "warmup_steps": 1},
    "inverse_sqrt": {"warmup_steps": 2}, "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.2}, "warmup_steps": 2},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 3, "min_lr_ratio": 0.1}, "warmup_steps": 1},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "betas": {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    "clipped": {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 0.5},
    "not clipped": {"max_grad_norm": 0, "optim": "sgd", "learning_rate": 0.5},
    "decay of sgd": {"weight_decay": 0.5, "optim": "sgd", "learning_rate": 0.5},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    "epochs": {"max_steps": -1, "num_train_epochs": 4, "warmup_ratio": 0.25},
    "smoothed": {"label_smoothing_factor": 0.2},
    "recomputed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "floor": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 5e-4}},
}  # fmt: skip
# A rate so high that the held-out loss rises at times: the reductions are what is compared.
PLATEAU: dict[str, Any] = {
    "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0}, "optim": "sgd", "learning_rate": 2.0,
    "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": len(LENGTHS), "metric_for_best_model": "eval_loss", "max_grad_norm": 0,
}  # fmt: skip
IN_BFLOAT16 = {"bf16": True, "max_steps": 2, "optim": "sgd", "learning_rate": 0.5}  # its losses alone: kernels round otherwise
# What both have and no weight on one CPU can tell: devices and their formats, and where a run begins.
OF_DEVICES = {"fp16", "tf32", "full_determinism", "use_cpu", "torch_compile", "torch_compile_backend", "ddp_backend"}
DIFFERENT = {"seed"}  # the order, and dropout; in the how-to

CASES = {
    **{f"optim {name}": {"optim": name, **more} for name, more in OPTIMIZERS.items()},
    **{f"schedule {name}": {"lr_scheduler_type": name, **more} for name, more in SCHEDULES.items()},
    **OTHERS,
    "schedule reduce_lr_on_plateau": PLATEAU,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model directory without dropout, and rows of token ids."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = tk.train_tokenizer(["a few words to learn from, said again and again"] * 50, vocab_size=300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False, initializer_range=0.1,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )  # fmt: skip
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    numbers = np.random.default_rng(0)
    rows = [numbers.integers(4, len(tokenizer), length).tolist() for length in LENGTHS]
    held_out = [numbers.integers(4, len(tokenizer), length).tolist() for length in LENGTHS]
    for name, those in (("rows.jsonl", rows), ("both/train.jsonl", rows), ("both/validation.jsonl", held_out)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in those))
    return folder, rows


def with_trainer(folder: Path, rows: list[list[int]], written: dict[str, Any], tmp_path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of each step and the final weights of transformers' Trainer."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        padded = {
            "input_ids": [e["input_ids"] + [0] * (longest - len(e["input_ids"])) for e in examples],
            "attention_mask": [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples],
            "labels": [[-100, *e["input_ids"][1:]] + [-100] * (longest - len(e["input_ids"])) for e in examples],
        }
        return {name: torch.tensor(values) for name, values in padded.items()}

    if "warmup_ratio" in written:  # what transformers 5 calls warmup_steps as well
        written = {**written, "warmup_steps": written["warmup_ratio"]}
        del written["warmup_ratio"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = transformers.TrainingArguments(**{**written, "output_dir": str(tmp_path / "theirs"), "disable_tqdm": True})
    held_out = [json.loads(line) for line in (folder / "both/validation.jsonl").read_text().splitlines()]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": row} for row in rows], eval_dataset=held_out, data_collator=collate
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def with_recipe(run_recipe: Any, folder: Path, written: dict[str, Any], tmp_path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    left_out = {"output_dir", *(["warmup_steps"] if "warmup_ratio" in written else [])}  # one setting here
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({key: value for key, value in written.items() if key not in left_out}))
    data = ["--dataset", str(folder / "rows.jsonl"), "--eval-fraction", "0"]
    if written["eval_strategy"] != "no":
        data = ["--dataset", str(folder / "both"), "--num-samples", "0", "--no-eval-on-start"]
    run = run_recipe("sft", "--config", "theirs.yaml", "--model", str(folder / "model"), *data, "--no-packing", "--no-auto-find-batch-size")
    assert run.code == 0, run.err
    return [event["loss"] for event in run.metrics if "loss" in event], run.weights()


@pytest.mark.fast(2)
@pytest.mark.parametrize("case", CASES)
def test_a_yaml_of_trainer_trains_to_the_weights_that_trainer_comes_to(
    run_recipe: Any, inputs: tuple[Path, list[list[int]]], tmp_path: Path, case: str
) -> None:
    """Losses to 1e-5, and each tensor's whole change to 1e-3 of its size.

    Fails when: adafactor is torch's, sgd's momentum is Muon's, a plateau reduces nothing, the floor of a schedule or any setting does not arrive.
    """
    folder, rows = inputs
    written = {**COMMON, **CASES[case]}
    losses, theirs = with_trainer(folder, rows, written, tmp_path)
    our_losses, ours = with_recipe(run_recipe, folder, written, tmp_path)
    assert our_losses == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > 0.01, "nothing was learned, so nothing is compared"
    start = dict(transformers.AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
    whole = torch.stack([(theirs[name] - start[name]).norm() for name in theirs]).norm()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        moved = (expected - start[name]).norm()
        away = (ours[name] - expected).norm()
        assert away <= 1e-3 * moved + 1e-6 * whole + 1e-7 * expected.norm(), f"{name}: {away:.3g} away, moved by {moved:.3g}"


@pytest.mark.slow
def test_bf16_of_trainer_computes_the_same_losses(run_recipe: Any, inputs: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """To the digits of bfloat16, closer than float32 is. Fails when: autocast is not on."""
    folder, rows = inputs
    losses, _ = with_trainer(folder, rows, {**COMMON, **IN_BFLOAT16}, tmp_path)
    our_losses, _ = with_recipe(run_recipe, folder, {**COMMON, **IN_BFLOAT16}, tmp_path)
    assert our_losses == pytest.approx(losses, rel=2e-3)


def test_every_setting_that_trainer_has_too_is_compared_or_named_here() -> None:
    """Fails when: an optimizer, a schedule or a setting of Trainer's is taken under its name and no whole run compares it."""
    config = runpy.run_path(str(ROOT / "recipes/sft.py"), run_name="read")["Config"]
    settings = settings_of(config)
    ours = {spelling for each in settings.values() for spelling in (each.name, *each.aliases)}
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    compared = {key for case in [COMMON, *CASES.values(), IN_BFLOAT16] for key in case}
    free = free_on_resume(config)
    assert (ours & theirs) - free == (compared & ours & theirs - free) | OF_DEVICES | DIFFERENT
    assert set(settings["optim"].choices) & {name.value for name in OptimizerNames} == set(OPTIMIZERS) | ON_CUDA
    ours_too = set(settings["lr_scheduler_type"].choices) & {name.value for name in SchedulerType}
    assert ours_too == {*SCHEDULES, "reduce_lr_on_plateau"}
