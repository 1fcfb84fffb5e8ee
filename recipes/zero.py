"""Sequence classification with DeepSpeed ZeRO: optimizer state, gradients and parameters sharded over the ranks.

    accelerate launch --num_processes 8 recipes/zero.py --zero-stage 3 --offload parameters

`accelerated.py` is the same job: the difference is a DeepSpeedPlugin made in code, for what no flag has, and what it saves.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.ClassificationConfig, tk.RowsConfig, tk.RunConfig):
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
    output_dir: str = "runs/zero"


def main(config: Config) -> tk.Summary:
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        zero_stage=config.zero_stage,  # None: the stage of accelerate launch, else 2
        offload_optimizer_device=None if config.offload == "none" else "cpu",
        offload_param_device="cpu" if config.offload == "parameters" else None,
    )
    plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = 6_250_000  # no flag has it: 25 MB at a time, as in DDP
    accelerator = tk.build_accelerator(config, deepspeed_plugin=plugin)
    tokenizer = tk.pad_apart_from_end(tk.load_tokenizer(config))  # a decoder is read at its last token before padding
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_classification(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    labels = tk.label_settings(raw, config)
    model = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, packed=None, **labels)

    layout = tk.choose_row_layout(model, config.row_layout)
    collate = partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id, layout=layout)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    loss_fn, metrics = tk.classification_task(
        config.problem_type, model.config.num_labels, config.metrics, label_smoothing_factor=config.label_smoothing_factor,
        class_names=list(labels.get("label2id", ())),
    )  # fmt: skip
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
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
        run.say(tk.memory_table(accelerator, model, optimizer, config))
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
