"""Summaries and translations with an encoder-decoder (T5, BART, mBART, NLLB, Pegasus, Marian): from a source to its target.

python recipes/seq2seq.py
accelerate launch recipes/seq2seq.py --model google/flan-t5-base --learning-rate 2e-4 \\
    --dataset EdinburghNLP/xsum --source-prefix "summarize: "
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.Seq2SeqConfig, tk.GeneratedTextConfig, tk.RunConfig
):
    model: str = "tiny-t5"
    dataset: str = "stdlib:seq2seq"
    max_length: int = 256
    max_target_length: int = 48
    optim: str = "muon"
    learning_rate: float = 2e-3
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 2.0
    group_by_length: bool = True
    output_dir: str = "runs/seq2seq"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config, is_fast=False)  # Marian's has no fast version
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_seq2seq(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForSeq2SeqLM", config, tokenizer)
    tk.set_target_language(model, tokenizer)
    first = tk.decoder_start(model)
    model = tk.add_adapter(model, config, tokenizer)

    collate = partial(tk.collate_seq2seq, pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=first)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = partial(tk.seq2seq_loss, label_smoothing_factor=config.label_smoothing_factor)
    texts = tk.target_metrics(accelerator, tokenizer, splits, config, config.max_target_length)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    def evaluate() -> None:
        values = tk.eval_with_gather(accelerator, model, evaluation, tk.seq2seq_metrics)
        if config.predict_with_generate:
            values |= tk.eval_with_gather(accelerator, model, evaluation, texts)
        run.log(values)
        run.add_samples(tk.sample_targets(accelerator, model, tokenizer, evaluation, config, config.max_target_length))

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_rougeL", lambda: tk.copy_baselines(splits, tokenizer, "rougeL", config.source_prefix))
        if run.due("eval_on_start"):
            evaluate()
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, loss_fn, rates, max_grad_norm=config.max_grad_norm))
            if run.due("eval"):
                evaluate()
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
