"""Extractive question answering: where in a context the answer begins and ends, as in SQuAD 1.1 and 2.0.

    python recipes/question_answering.py
    accelerate launch recipes/question_answering.py --config recipes/configs/modernbert_base_squad.yaml

Long contexts are read in overlapping windows, and a question is answered from all of its windows: exact match and F1 are those
of whole questions. Where some have no answer, the evaluation also finds the threshold above which none is predicted.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.QuestionAnsweringConfig, tk.RowsConfig, tk.OptimConfig, tk.RunConfig,
):  # fmt: skip
    model: str = "tiny-bert"
    dataset: str = "stdlib:qa"
    max_length: int = 128
    doc_stride: int = 32
    overlong: str = "split"
    optim: str = "muon"
    learning_rate: float = 2e-3
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 1.2
    group_by_length: bool = True
    metric_for_best_model: str = "eval_f1"
    output_dir: str = "runs/question_answering"
    num_samples: int = tk.setting(
        3, "Held-out questions whose best answers are written at each evaluation.", least=0, most=10**4, on_resume="free"
    )


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_question_answering(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForQuestionAnswering", config, tokenizer, packed=None, num_labels=2)  # a start and an end
    model = tk.add_adapter(model, config, tokenizer)

    layout = tk.choose_row_layout(model, config.row_layout)
    collate = partial(tk.collate_windows, pad_token_id=tokenizer.pad_token_id, layout=layout)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    loss_fn = tk.question_answering_loss
    metrics = tk.question_answering_metrics(
        tk.reference_answers(raw), n_best_size=config.n_best_size, max_answer_length=config.max_answer_length,
        null_score_diff_threshold=config.null_score_diff_threshold,
    )  # fmt: skip
    questions = tk.sample_questions(raw, config.num_samples)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_f1", lambda: tk.question_baselines(raw))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
            run.add_samples(tk.sample_answers(accelerator, model, tokenizer, questions, config))
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                run.add_samples(tk.sample_answers(accelerator, model, tokenizer, questions, config))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
