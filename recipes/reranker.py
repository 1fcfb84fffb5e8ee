"""A reranker: a cross-encoder that reads a query together with a document and scores how relevant that is.

    python recipes/reranker.py
    accelerate launch recipes/reranker.py --model answerdotai/ModernBERT-base --learning-rate 2e-5 \\
        --dataset judged.jsonl --ranking-loss bce

It orders what a fast search has found. An example is a query with its list of documents: a batch of 16 is 16 lists. The model
directory opens in sentence-transformers: `CrossEncoder("runs/reranker/model")`. The default starts from random weights that
let equal words meet (`toolkit/models/shapes.py`), and ends near BM25 on parts of words.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.RankingConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "tiny-bert-uncased"
    dataset: str = "stdlib:rank"
    max_length: int = 80
    learning_rate: float = 5e-4
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 16
    num_train_epochs: float = 2.5
    ranking_loss: str = "ranknet"
    eval_on_start: bool = True
    metric_for_best_model: str = "eval_ndcg_at_10"
    output_dir: str = "runs/reranker"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.pad_apart_from_end(tk.load_tokenizer(config))  # a decoder is read at its last token before padding
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_ranking(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    # sentence-transformers cuts pairs to this length, and would write them as a chat by a template
    tokenizer.model_max_length, tokenizer.chat_template = config.max_length, None
    model = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, num_labels=1)
    model = tk.add_adapter(model, config, tokenizer)

    collate = partial(tk.collate_lists, pad_token_id=tokenizer.pad_token_id)
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    loss_fn = partial(tk.ranking_loss, ranking_loss=config.ranking_loss, positive_weight=config.positive_weight)
    metrics = tk.ranking_list_metrics(ranking_loss=config.ranking_loss, positive_weight=config.positive_weight)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_ndcg_at_10", lambda: tk.ranking_baselines(raw))
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
