"""Knowledge distillation of a classifier: a small encoder learns a teacher's outputs, its layers and its attention.

    python recipes/distill_classifier.py
    accelerate launch recipes/distill_classifier.py --teacher runs/accelerated --model nano-bert --dataset reviews.csv

The diff to `accelerated.py` is the lesson: a teacher, which that recipe trains, and a loss that compares with it. Without an
argument the teacher is trained here first, twice as wide and twice as deep as the student, on the same data.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.ClassificationConfig, tk.ClassifierDistillationConfig, tk.RunConfig
):
    model: str = "nano-bert"
    dataset: str = "stdlib:classify"
    max_length: int = 128
    optim: str = "muon"
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 1.0
    group_by_length: bool = True
    cross_entropy_share: float = 0.5
    output_dir: str = "runs/distill_classifier"


def train_teacher(accelerator: Any, tokenizer: Any, train: Any, labels: Any, loss_fn: Any, config: Config) -> str:
    """A teacher where none is named: tiny-bert, trained on the data alone for as many steps."""
    directory = Path(f"{config.output_dir}-teacher")
    if (directory / "model").is_dir():
        tk.say_once(f"No --teacher: {directory} is taken, which an earlier run made. Delete it to train another.")
        return str(directory)
    settings = replace(config, model="tiny-bert")
    model = tk.load_model("AutoModelForSequenceClassification", settings, tokenizer, **labels)
    optimizer, schedule = tk.build_optimizer(model, settings, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    tk.say_once(f"No --teacher: {settings.model} is trained for {train.num_steps} steps and kept in {directory}")
    for step, batch in enumerate(train.batches(), start=1):
        rates = schedule(batch.position / train.examples_to_consume)
        done = tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm)
        if step % config.logging_steps == 0:
            tk.say_once(f"teacher: step {step}/{train.num_steps}  loss {done['loss'].item():.4g}")
    tk.save_model(accelerator, model, tokenizer, directory)
    return str(directory)


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.pad_apart_from_end(tk.load_student_tokenizer(config, config.teacher))
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_classification(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    labels = tk.label_settings(raw, config)
    model = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, **labels)

    collate = partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    data_loss, metrics = tk.classification_task(
        config.problem_type, model.config.num_labels, config.metrics, label_smoothing_factor=config.label_smoothing_factor,
        class_names=list(labels.get("label2id", ())),
    )  # fmt: skip
    name = config.teacher or train_teacher(accelerator, tokenizer, train, labels, data_loss, config)
    teacher = tk.build_classifier_teacher(
        accelerator, model, tokenizer, config, teacher=name, max_length=config.max_length, seed=config.seed
    )
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = partial(
        tk.classifier_distillation_loss, teacher=teacher.ask, data_loss=data_loss, problem_type=config.problem_type,
        temperature=config.temperature, cross_entropy_share=config.cross_entropy_share, pairs=teacher.pairs,
        match_weight=config.match_weight, match_attention=config.match_attention,
    )  # fmt: skip
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train, reference_made_of=teacher.made_of) as run:
        run.compare_with("eval_accuracy", lambda: tk.class_baselines(raw, config.problem_type))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
