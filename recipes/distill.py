"""Knowledge distillation: a smaller language model learns a teacher's whole distribution of each next token.

    python recipes/distill.py
    accelerate launch recipes/distill.py --teacher Qwen/Qwen3-1.7B --model Qwen/Qwen3-0.6B --learning-rate 1e-5 \\
        --dataset trl-lib/Capybara

The diff to `sft.py` is the lesson: a teacher, and a loss that compares with it. Without an argument the teacher is trained here
first, twice as wide as the student, on the same data.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.DistillationConfig, tk.SampleConfig, tk.RunConfig
):
    model: str = "nano-llama"
    dataset: str = "stdlib:pretrain"
    packing: bool = True
    overlong: str = "split"
    max_length: int = 256
    learning_rate: float = 5e-3
    min_lr_ratio: float = 0.05
    optim: str = "muon"
    warmup_steps: float = 0.02
    per_device_train_batch_size: int = 4
    max_steps: int | None = 400
    eval_strategy: str = "steps"
    eval_steps: int = 300
    logging_steps: int = 20
    output_dir: str = "runs/distill"


def train_teacher(accelerator: Any, tokenizer: Any, splits: Any, config: Config) -> str:
    """A teacher where none is named: tiny-llama, twice as wide as the default student, trained on the data for longer."""
    directory = Path(f"{config.output_dir}-teacher")
    if (directory / "model").is_dir():
        tk.say_once(f"No --teacher: {directory} is taken, which an earlier run made. Delete it to train another.")
        return str(directory)
    settings = replace(
        config, model="tiny-llama", max_steps=config.max_steps and 3 * config.max_steps // 2,
        num_train_epochs=1.5 * config.num_train_epochs,
    )
    model = tk.load_model("AutoModelForCausalLM", settings, tokenizer, packed=config.packing)
    train, _ = tk.build_dataloaders(splits, tk.collate_packed if config.packing else tk.collate_padded, settings, accelerator)
    optimizer, schedule = tk.build_optimizer(model, settings, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    tk.say_once(f"No --teacher: {settings.model} is trained for {train.num_steps} steps and kept in {directory}")
    for step, batch in enumerate(train.batches(), start=1):
        rates = schedule(batch.position / train.examples_to_consume)
        done = tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, rates, max_grad_norm=config.max_grad_norm)
        if step % config.logging_steps == 0:
            tk.say_once(f"teacher: step {step}/{train.num_steps}  loss {done['loss'].item():.4g}")
    tk.save_model(accelerator, model, tokenizer, directory)
    return str(directory)


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_student_tokenizer(config, config.teacher)
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_sft(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    name = config.teacher
    if name is None and config.self_distillation is None:
        name = train_teacher(accelerator, tokenizer, splits, config)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=config.packing)
    model = tk.add_adapter(model, config, tokenizer)

    collate = tk.collate_packed if config.packing else tk.collate_padded
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    teacher, train, evaluation = tk.build_teacher(
        accelerator, model, tokenizer, config, train, evaluation, teacher=name, max_length=config.max_length,
        packed=config.packing,
    )  # fmt: skip

    def loss_fn(model: Any, micro_batch: dict[str, Any], totals: dict[str, float]) -> Any:
        return tk.distillation_loss(
            model, micro_batch, totals, teacher=teacher, divergence=config.distillation_loss, beta=config.beta,
            skew_alpha=config.skew_alpha, temperature=config.temperature, cross_entropy_share=config.cross_entropy_share,
        )  # fmt: skip

    metrics = tk.distillation_metrics(teacher, config.temperature)
    prompts = tk.sample_prompts(raw, tokenizer, config)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train, reference_made_of=teacher.made_of) as run:
        tk.keep_teacher(run, teacher)
        run.compare_with("eval_loss", lambda: tk.answer_baselines(splits, len(tokenizer)))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
            run.add_samples(tk.sample_texts(accelerator, model, tokenizer, prompts, config))
        for batch in run:
            batch = tk.with_own_answers(accelerator, model, tokenizer, train, batch, config)
            rates = schedule(run.progress, run.objective)
            values = tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm)
            tk.update_teacher(teacher, model)
            run.log(values, batch)
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                run.add_samples(tk.sample_texts(accelerator, model, tokenizer, prompts, config))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
