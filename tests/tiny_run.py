"""A training of a second or less on the toolkit's public functions: what the fault tests kill, stop, fill and damage.

    python tests/tiny_run.py --max-steps 20 --output-dir /tmp/run

The rows are made on the spot. Everything that a resume must bring back goes into result.json at the end: a digest of the
weights, the examples of each step and a digest of every token the model saw. The variable TINY_RUN (JSON) makes it slow or
ill: `step_seconds` (after `fast_steps`), `eval_seconds`, `evaluation_hangs_on` a rank, `eval_losses`, `prepares` N seconds, until it's continued ("stopped") or a "refusal", on all or some `ranks`, `nonfinite` ("loss", "constant", "gradient",
"gradients", "spike", "row", "hang", "memory" or "refusal") at the steps (or rows) `at`, or another by step in `kinds`, on all or some `ranks`; `out_of_memory_above`
N examples, `long_rows`; and `mistake` plants one of MISTAKES.
"""

import dataclasses
import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, IterableDataset

import toolkit as tk
from toolkit.config import setting
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.training import memory

ROWS, POISON = 30, 63
MISTAKES = ("mean of means", "schedule stepped by every rank", "contaminated packing", "duplicated evaluation rows", "noise of each rank")
ILLNESS: dict[str, Any] = json.loads(os.environ.get("TINY_RUN", "{}"))


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.ClassificationConfig, tk.RunConfig):
    model: str = "tiny-llama"
    dataset: str = "made on the spot"
    vocab_size: int = 260
    hidden_size: int = 32
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    intermediate_size: int = 64
    max_position_embeddings: int = 64
    max_length: int = 24
    learning_rate: float = 1e-2
    per_device_train_batch_size: int = 2
    max_steps: int | None = 20
    logging_steps: int = 1
    eval_strategy: str = "no"
    save_strategy: str = "steps"
    save_steps: int = 4
    use_cpu: bool = True
    output_dir: str = "out"
    augmented: bool = setting(False, "Change each document at random, again in each epoch.")
    pairs: bool = setting(False, "Train on pairs of answers (DPO), not on tokens.")
    source: str = setting("same", "What a stream gives.", choices=("same", "changed", "other_order"))


def make_rows(config: Config) -> list[dict[str, Any]]:
    random_numbers = np.random.default_rng(0)
    rows = []
    for i in range(ROWS):
        ids = random_numbers.integers(1, POISON, size=int(random_numbers.integers(4, 12))).tolist()
        ids = np.resize(ids, ILLNESS.get("long_rows", len(ids))).tolist()
        if ILLNESS.get("nonfinite") == "row" and i in ILLNESS["at"]:
            ids[0] = POISON
        row = {"input_ids": ids, "length": len(ids), "origin": f"rows.jsonl:{i + 1}"}
        if config.pairs:  # the chosen answer and the rejected one, distinguished by their kind
            chosen = 1 + i % (len(ids) - 1)
            row["token_type_ids"] = [0] * chosen + [1] * (len(ids) - chosen)
        rows.append(row | (label(ids, config) if config.model == "tiny-bert" else {"supervised_tokens": len(ids) - 1}))
    return rows


def label(ids: list[int], config: Config) -> dict[str, Any]:
    kinds = {"single_label": ids[0] % 3, "multi_label": [ids[0] % 2, ids[1] % 2, 1], "regression": ids[0] / 10}
    weight = {"weight": config.class_weights[ids[0] % 3]} if config.class_weights else {}
    return {"labels": kinds[config.problem_type], **weight}


def make_splits(config: Config) -> Any:
    rows = make_rows(config)
    if config.streaming:
        if config.source == "changed":
            rows[7]["input_ids"] = rows[7]["input_ids"][::-1]
        if config.source == "other_order":
            np.random.default_rng(os.getpid()).shuffle(rows)
        return {"train": IterableDataset.from_generator(lambda: iter(rows))}
    return DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows[:6]))


def replace_some(document: dict[str, Any], random_numbers: np.random.Generator, progress: float) -> dict[str, Any]:
    ids = np.array(document["input_ids"])
    ids[random_numbers.random(len(ids)) < 0.3] = random_numbers.integers(1, POISON)
    return {**document, "input_ids": ids}


def ill(loss_fn: Any, current: dict[str, int]) -> Any:
    """The loss function, made ill as TINY_RUN says."""

    def loss(model: Any, micro_batch: dict[str, Any], totals: dict[str, float]) -> Any:
        if len(micro_batch["input_ids"]) > ILLNESS.get("out_of_memory_above", 10**9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        value, metrics = loss_fn(model, micro_batch, totals)
        kind, now = ILLNESS.get("nonfinite"), current["step"] in ILLNESS.get("at", [])
        kind, now = (ILLNESS["kinds"].get(str(current["step"])), True) if "kinds" in ILLNESS else (kind, now)
        if int(os.environ.get("RANK", 0)) not in ILLNESS.get("ranks", range(10**9)):
            return value, metrics
        if kind == "hang" and now:
            time.sleep(3600)
        if kind == "memory" and now:
            raise MemoryError("Unable to allocate 2.00 GiB for an array")
        if kind == "refusal" and now:
            raise tk.Refusal("rows.jsonl:7: not these.")
        if kind == "row" and bool((micro_batch["input_ids"] == POISON).any()):
            value = value * float("inf")
        elif kind == "loss" and now:
            value = value * float("nan")
        elif kind == "constant" and now:
            value = value + float("inf")
        elif kind == "spike" and now:
            value = value * 30
        elif kind == "gradients" and now:
            value = _InfiniteGradients.apply(value)
        elif kind == "gradient" and now:
            weight = next(model.parameters())
            value = value + _InfiniteGradient.apply(weight)
        return value, metrics

    return loss


class _InfiniteGradients(torch.autograd.Function):
    """The same number; whatever it came from gets gradients that are not finite."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


class _InfiniteGradient(torch.autograd.Function):
    """Zero, with one element of its gradient infinite."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        context.shape = weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        result = gradient.new_zeros(context.shape)
        result[0, 0] = float("inf")
        return result


def collate_pairs(documents: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Chosen answers, then rejected ones, `[2 * pairs, longest]`."""
    answers = [np.asarray(each["input_ids"])[np.asarray(each["token_type_ids"]) == kind] for kind in (0, 1) for each in documents]
    return tk.collate_padded([{"input_ids": np.concatenate([[POISON + 1], answer])} for answer in answers])


def pair_loss(model: Any, micro_batch: dict[str, Any], totals: dict[str, float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-log sigmoid(0.1 * (log p(chosen) - log p(rejected) - the reference's)), Rafailov et al. 2023, equation 7; reference: 0."""
    ids, mask = micro_batch["input_ids"], micro_batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    tokens = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    chosen, rejected = (tokens * mask[:, 1:]).sum(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).sum() / totals["examples"], {}


def with_mistake(loss_fn: Any, current: dict[str, Any]) -> Any:
    """The loss as accumulation that averages averages makes it: each micro-batch's own mean, divided by their number."""

    def loss(model: Any, micro_batch: dict[str, Any], totals: dict[str, float]) -> Any:
        value, metrics = loss_fn(model, micro_batch, totals)
        unit = "tokens" if "supervised_positions" in micro_batch else "examples"
        here = len(micro_batch["supervised_positions" if unit == "tokens" else "labels"])
        return value * totals[unit] / here / current["pieces"], metrics

    return loss


def contaminated(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """A packed row whose documents see each other."""
    row = tk.collate_packed(documents)
    length = row["input_ids"].shape[1]
    bounds = torch.tensor([0, length], dtype=torch.int32)
    row["position_ids"] = torch.arange(length)[None]
    return {**row, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": length, "max_length_k": length}


def digest_of(accelerator: Any, model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted((whole_state_dict(accelerator, model) or {}).items()):
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def evaluate(accelerator: Any, model: Any, evaluation: Any, run: Any, config: Config) -> dict[str, float]:
    time.sleep(3600 if int(os.environ.get("RANK", 0)) == ILLNESS.get("evaluation_hangs_on") else ILLNESS.get("eval_seconds", 0.0))
    if "eval_losses" in ILLNESS:  # a made-up curve, for its best
        return {"eval_loss": ILLNESS["eval_losses"][run.step % len(ILLNESS["eval_losses"])]}
    if ILLNESS.get("mistake") == "duplicated evaluation rows":
        evaluation = [dataclasses.replace(batch, real=[True]) for batch in evaluation]
    if config.model == "tiny-bert":
        return tk.eval_with_gather(accelerator, model, evaluation, tk.classification_metrics(["accuracy"], 3, "single_label"))
    return tk.eval_with_gather(accelerator, model, evaluation, tk.causal_lm_metrics)


def main(config: Config) -> None:
    accelerator = tk.build_accelerator(config)
    if accelerator.process_index in ILLNESS.get("ranks", []) and (prepares := ILLNESS.get("prepares")):
        if prepares == "refusal":
            raise tk.Refusal("rows.jsonl:7: not these.")
        os.kill(os.getpid(), signal.SIGSTOP) if prepares == "stopped" else time.sleep(prepares)
    accelerator.wait_for_everyone()
    splits = make_splits(config)
    current, classes = {"step": 0, "pieces": 1}, config.model == "tiny-bert"
    if classes:
        num_labels = 1 if config.problem_type == "regression" else 3
        model = tk.load_model("AutoModelForSequenceClassification", config, num_labels=num_labels)
        loss_fn = ill(tk.classification_task(
            config.problem_type, num_labels, config.metrics, config.label_smoothing_factor
        )[0], current)
    else:
        model = tk.load_model("AutoModelForCausalLM", config, packed=config.packing)
        plain = partial(tk.causal_lm_loss, label_smoothing_factor=config.label_smoothing_factor, z_loss=config.z_loss)
        loss_fn = ill(plain, current)
    if config.pairs:
        loss_fn = ill(pair_loss, current)
    mistake = ILLNESS.get("mistake")
    loss_fn = with_mistake(loss_fn, current) if mistake == "mean of means" else loss_fn
    collate = collate_pairs if config.pairs else tk.collate_packed if config.packing else partial(tk.collate_padded, pad_token_id=0)
    collate = contaminated if mistake == "contaminated packing" else collate
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator, augment=replace_some if config.augmented else None)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    if "out_of_memory_above" in ILLNESS:
        memory.is_free = lambda *_, times=1: times == 1
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        if run.due("eval_on_start"):
            run.log(evaluate(accelerator, model, evaluation, run, config))
        for batch in run:
            current["step"] = run.step
            if run.step > ILLNESS.get("fast_steps", 0):
                time.sleep(ILLNESS.get("step_seconds", 0.0))
            rates = schedule(min(1.0, run.progress * (accelerator.num_processes if mistake == MISTAKES[1] else 1)))
            current["pieces"] = len(batch.micro_batches) * accelerator.num_processes
            metrics = tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm)
            for weight in model.parameters() if mistake == MISTAKES[4] else ():
                weight.data.add_(torch.randn_like(weight), alpha=rates[0])
            seen = hashlib.sha256(run.memory.get("seen", "").encode())
            for micro_batch in batch.micro_batches:
                seen.update(micro_batch["input_ids"].numpy().tobytes())
            run.memory["seen"] = seen.hexdigest()
            run.memory["order"] = [*run.memory.get("order", []), batch.examples]
            run.log(metrics)
            if run.due("eval"):
                run.log(evaluate(accelerator, model, evaluation, run, config))
        last = digest_of(accelerator, run.model)
        tk.load_best(run)
        best = digest_of(accelerator, run.model)
    result = {"weights": last, "best": best, "order": run.memory["order"], "seen": run.memory["seen"]}
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())
    rank = os.environ.get("RANK", "0")
    Path(config.output_dir, "result.json" if rank == "0" else f"result-{rank}.json").write_text(json.dumps({**result, "finite": finite, "applied": run.state.applied}))


if __name__ == "__main__":
    tk.run_recipe(main)
