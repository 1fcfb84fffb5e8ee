"""Sequence classification in plain PyTorch: one process, one device, every line of the loop in sight.

    python recipes/basic.py
    python recipes/basic.py --model answerdotai/ModernBERT-base --learning-rate 5e-5 --dataset reviews.csv

`accelerated.py` is the same job on an Accelerator: the difference between the two files is what it does for you.
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.ClassificationConfig, tk.RowsConfig, tk.DeviceConfig, tk.OutputConfig
):  # fmt: skip
    model: str = "tiny-bert"
    dataset: str = "stdlib:classify"
    max_length: int = 128
    optim: str = "muon"
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 2.0
    group_by_length: bool = True
    output_dir: str = "runs/basic"


def main(config: Config) -> tk.Summary:
    import torch

    from toolkit.runs.directory import check_output_dir, claimed, write_summary
    from toolkit.runs.overview import verdict_of
    from toolkit.runs.run_card import end_run_card, write_run_card
    from toolkit.system.json_lines import append_line
    from toolkit.training.anomalies import Diverged, Divergence, Unstable, report_nonfinite

    check_output_dir(config)
    device = torch.device("cpu" if config.use_cpu or not torch.cuda.is_available() else "cuda")
    tokenizer = tk.pad_apart_from_end(tk.load_tokenizer(config))  # a decoder is read at its last token before padding
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_classification(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    labels = tk.label_settings(raw, config)
    model: Any = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, packed=None, **labels)
    model.to(device)

    layout = tk.choose_row_layout(model, config.row_layout)
    collate = partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id, layout=layout)
    train, evaluation = tk.build_dataloaders(splits, collate, config)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    loss_fn, metrics = tk.classification_task(
        config.problem_type, model.config.num_labels, config.metrics, label_smoothing_factor=config.label_smoothing_factor,
        class_names=list(labels.get("label2id", ())),
    )  # fmt: skip

    def evaluate() -> dict[str, float]:
        observe: Any = metrics.update or metrics.gather
        combine: Any = sum if metrics.update else torch.cat
        model.eval()
        with torch.no_grad():
            parts = [observe(model, tk.to_device(batch.micro_batches[0], device)) for batch in evaluation or ()]
        model.train()
        observed = {name: combine([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
        return {f"eval_{name}": value for name, value in metrics.finalize(observed).items()}

    def show(step: int, values: dict[str, float]) -> None:
        print(f"step {step}/{train.num_steps}  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()), flush=True)

    baselines = tk.class_baselines(raw, config.problem_type)
    if baselines:
        print("to beat, eval_accuracy:", *(f" {name} {value:.4g}" for name, value in baselines.items()), flush=True)
    watch, losses, warnings = Divergence(), list[float](), list[str]()
    summary = tk.Summary({"status": "finished", "warnings": warnings, "baselines": {"figure": "eval_accuracy", **baselines}})
    skipped, started = 0, time.monotonic()

    def warn(found: list[str]) -> None:
        warnings.extend(found)
        for warning in found:
            print(f"WARNING: {warning}", flush=True)
        if config.divergence == "stop" and found:
            summary.metrics["status"] = "diverged"
            write_summary(output_dir, summary)
            raise Diverged(f"stopped after step {step}, because of --divergence stop: {found[0]}")

    with claimed(config) as output_dir:
        write_run_card(output_dir / "run.json", None, config, model, train, optimizer)
        waited, seconds, began = 0.0, 0.0, time.monotonic()  # for batches and in all, since the last logged step
        for step, batch in enumerate(train.batches(), start=1):
            waited += time.monotonic() - began
            for group, rate in zip(optimizer.param_groups, schedule(batch.position / train.examples_to_consume), strict=True):
                group["lr"] = rate
            loss = 0.0
            for micro_batch, seed in zip(batch.micro_batches, batch.seeds, strict=True):
                tk.seed_micro_batch(seed)
                part, _ = loss_fn(model, tk.to_device(micro_batch, device), batch.totals)
                part.backward()
                loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
            skipped = 0 if torch.isfinite(norm) and math.isfinite(loss) else skipped + 1
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
            if skipped:
                report_nonfinite(output_dir, step, batch, train, loss, norm.item())
                if skipped >= (1 if config.nonfinite == "stop" else config.max_nonfinite_steps):
                    raise Unstable(f"{skipped} step(s) in a row with a non-finite loss or gradient, the last of them {step}")
            warn(watch.after_step(loss, norm.item(), applied=not skipped))
            seconds += time.monotonic() - began

            last, end = step == train.num_steps, batch.position + batch.size
            epoch = end / (train.epoch_size or end)
            where = {"step": step, "epoch": epoch, "examples": end, "time": time.monotonic() - started}
            summary.metrics["steps"] = step
            if step % config.logging_steps == 0 or last:
                values = {"loss": loss, "grad_norm": norm.item(), "learning_rate": rate}
                append_line(output_dir / "metrics.jsonl", {**where, **values, "data_wait": waited / seconds})
                waited = seconds = 0.0
                show(step, values)
            if evaluation and (step % config.eval_steps == 0 or last):
                values = evaluate()
                summary.metrics.update(values)
                losses.append(values["eval_loss"])
                append_line(output_dir / "metrics.jsonl", {**where, **values})
                show(step, values)
            if step % config.save_steps == 0:
                tk.save_model(None, model, tokenizer, output_dir, summary, dtype=config.dtype)
            began = time.monotonic()
        warn(watch.after_last_step() + watch.of_metric("eval_loss", losses))
        tk.save_model(None, model, tokenizer, output_dir, summary, dtype=config.dtype)
        write_summary(output_dir, summary)
        end_run_card(output_dir / "run.json", "finished", time.monotonic() - started, summary.metrics, config)
    print(verdict_of("finished", summary.metrics, config) or "finished", flush=True)
    return summary


if __name__ == "__main__":
    tk.run_recipe(main)
