"""What evaluation finds over splits of several sizes, cut in several ways: a run of one process, or of ranks.

    python tests/devices/evaluation_run.py --output-dir /tmp/run

Each rank writes result-RANK.json: kind of metric -> examples -> "batch size, source" -> metrics. A process alone also writes
what a plain loop over single rows finds, under "loop": it knows neither the loaders nor the metrics of the toolkit.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, IterableDataset

import toolkit as tk
from toolkit.losses.causal_lm import metrics_with_bytes

CLASSES, VOCABULARY, NUM_BYTES = 3, 260, 1234
# examples, batch size, source: a rank with nothing but a padding micro-batch; ranks with one batch more; a short batch on one rank
CUTS = [
    (1, 1, "map"), (1, 4, "stream"), (5, 1, "map"), (5, 3, "stream"), (5, 4, "map"), (11, 1, "map"), (11, 3, "map"), (11, 4, "stream"),
]  # fmt: skip
CLASS_METRICS = [
    "accuracy", "balanced_accuracy", "f1", "f1_micro", "f1_weighted", "f1_per_class", "precision", "recall", "matthews_correlation",
]  # fmt: skip


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "tiny-llama"
    dataset: str = "made on the spot"
    vocab_size: int = VOCABULARY
    hidden_size: int = 16
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    intermediate_size: int = 32
    max_position_embeddings: int = 64
    max_length: int = 20
    dropout: float = 0.1
    max_steps: int | None = 1
    use_cpu: bool = True
    output_dir: str = "out"


def make_rows(task: str, examples: int) -> list[dict[str, Any]]:
    """Ragged; of a language model's tokens every third is unsupervised, classes have weights."""
    random_numbers = np.random.default_rng(0)
    rows = []
    for i in range(examples):
        ids = random_numbers.integers(1, VOCABULARY, size=int(random_numbers.integers(2, 7)))
        ids = np.repeat(ids, random_numbers.integers(1, 3, size=len(ids))).tolist()  # a tied model likes to repeat a token
        labels = [token if j % 3 else -100 for j, token in enumerate(ids)]
        row = {"input_ids": ids, "length": len(ids)}
        of_tokens = {"labels": labels, "supervised_tokens": sum(label != -100 for label in labels[1:])}
        rows.append(row | (of_tokens if task == "tokens" else {"labels": (i * 7) % 5 % CLASSES, "weight": 0.5 + i % 3}))
    return rows


def make_model(task: str, config: Config) -> Any:
    """With weights large enough that losses and predictions differ from row to row."""
    if task == "tokens":
        model = tk.load_model("AutoModelForCausalLM", config, packed=True)
    else:
        model = tk.load_model("AutoModelForSequenceClassification", dataclasses.replace(config, model="tiny-bert"), num_labels=CLASSES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # a tied head then prefers the token that it is at, and the rows repeat some
                parameter.normal_(0, {"tokens": 0.1, "classes": 0.5}[task] if "embed_tokens" not in name else 1.0, generator=generator)
    return model


def make_loader(task: str, config: Config, accelerator: Any, examples: int, size: int, source: str) -> Any:
    rows = make_rows(task, examples)
    if source == "stream":
        splits = {name: IterableDataset.from_generator(lambda: iter(rows)) for name in ("train", "validation")}
    else:
        splits = DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows))
    collate = tk.collate_packed if config.packing else partial(tk.collate_padded, pad_token_id=0)
    return tk.build_dataloaders(splits, collate, dataclasses.replace(config, per_device_eval_batch_size=size), accelerator)[1]


# -- metrics ----------------------------------------------------------------------------------------------------------


def look(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """A metric that knows the order: whole numbers, so that it is exact."""
    place = 1 + np.arange(len(references))
    return {"looked": float((place**2 * (1 + predictions + 10 * references)).sum())}


def row_losses(model: Any, micro_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One row an example of a user's own: the sum of its losses, and its first two tokens."""
    ids, labels = micro_batch["input_ids"], micro_batch["labels"]
    logits = model(input_ids=ids, attention_mask=micro_batch["attention_mask"], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
    return {"nll": losses.double().sum(-1), "first": ids[:, :2]}


def metrics_of_rows(rows: dict[str, np.ndarray]) -> dict[str, float]:
    place = 1 + np.arange(len(rows["nll"]))
    return {"loss": float((place * rows["nll"]).sum()), "looked": float((place[:, None] * rows["first"]).sum())}


def with_other_labels(metrics: tk.Metrics, outputs: int, relabel: Any) -> tk.Metrics:
    """The same model and rows as another problem: the first N logits, labels made of the classes."""

    def observed_by(observe: Any) -> Any:
        def of(model: Any, micro_batch: dict[str, Any]) -> dict[str, torch.Tensor]:
            def cut(**inputs: Any) -> SimpleNamespace:
                return SimpleNamespace(logits=model(**inputs).logits[:, :outputs])

            return observe(cut, {**micro_batch, "labels": relabel(micro_batch["labels"])})

        return of if observe else None

    return tk.Metrics(update=observed_by(metrics.update), gather=observed_by(metrics.gather), finalize=metrics.finalize)


def several_of(labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, None] + torch.arange(CLASSES)) // 2 % 2


def number_of(labels: torch.Tensor) -> torch.Tensor:
    return labels * 1.5 - 1.0


def metrics_of(task: str, tokens: int) -> dict[str, tk.Metrics]:
    if task == "tokens":
        return {
            "language model": metrics_with_bytes(NUM_BYTES, tokens, VOCABULARY),
            "rows of a user's own": tk.Metrics(update=None, gather=row_losses, finalize=metrics_of_rows),
        }
    several = tk.classification_metrics(["accuracy", "f1", "f1_micro", "recall_per_class"], CLASSES, "multi_label")
    numbers = tk.classification_metrics(["mse", "rmse", "mae", "r2", "pearson"], 1, "regression")
    return {
        "classes": tk.classification_metrics(CLASS_METRICS, CLASSES),
        "gathered classes": tk.classification_metrics(["f1", look], CLASSES),
        "several classes": with_other_labels(several, CLASSES, several_of),
        "numbers": with_other_labels(numbers, 1, number_of),
    }


def module_of_evaluate() -> dict[str, tk.Metrics]:
    import evaluate

    sys.path.append(str(Path(__file__).parents[2]))
    from tests.metrics.evaluate_modules import Accuracy, MatthewsCorrelation

    return {"a module of evaluate": tk.classification_metrics([evaluate.combine([Accuracy(), MatthewsCorrelation()])], CLASSES)}


# -- a plain loop -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def loop_over_rows(task: str, model: Any) -> Iterator[dict[str, Any]]:
    """Of each row alone, unpadded: summed loss and correct tokens, or loss, prediction and reference of the example."""
    model.eval()
    for row in make_rows(task, 11):
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double()
        if task == "classes":
            loss = -logits.log_softmax(-1)[row["labels"]].item()
            prediction = int(logits.argmax())
            yield {"loss": loss, "prediction": prediction, "reference": row["labels"], "weight": row["weight"]}
            continue
        nll, correct, tokens = 0.0, 0, 0
        for position, label in enumerate(row["labels"][1:]):
            if label != -100:
                nll -= logits[position].log_softmax(-1)[label].item()
                correct += int(logits[position].argmax() == label)
                tokens += 1
        yield {"loss": nll, "correct": correct, "tokens": tokens, "length": row["length"]}
    model.train()


# -- the run ----------------------------------------------------------------------------------------------------------


def main(config: Config) -> None:
    accelerator = tk.build_accelerator(config)
    found: dict[str, Any] = {"loop": {}}
    for task in ("tokens", "classes"):
        model = make_model(task, config)
        if accelerator.num_processes == 1:
            found["loop"][task] = list(loop_over_rows(task, model))
        optimizer, _ = tk.build_optimizer(model, config, 1)
        model, optimizer = accelerator.prepare(model, optimizer)
        everything = metrics_of(task, tokens=0)
        if task == "classes" and not (config.fsdp or config.deepspeed):  # its import takes a second, and no layout changes it
            everything |= module_of_evaluate()
        for examples, size, source in CUTS:
            if task == "tokens":
                everything = metrics_of(task, sum(row["length"] for row in make_rows(task, examples)))
            loader = make_loader(task, config, accelerator, examples, size, source)
            for kind, metrics in everything.items():
                values = tk.eval_with_gather(accelerator, model, loader, metrics, prefix="")
                found.setdefault(kind, {}).setdefault(str(examples), {})[f"{size}, {source}"] = values
            if task == "tokens" and size != 3:  # packed rows are examples then; the tokens are the same
                packed = make_loader(task, dataclasses.replace(config, packing=True), accelerator, examples, size, source)
                values = tk.eval_with_gather(accelerator, model, packed, everything["language model"], prefix="")
                found["language model"][str(examples)][f"{size}, {source}, packed"] = values
    path = Path(config.output_dir, f"result-{os.environ.get('RANK', '0')}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    tk.run_recipe(main)
