"""Text embeddings: a bi-encoder trained on pairs, triplets with hard negatives, or pairs with a score.

    python recipes/embedding.py
    accelerate launch recipes/embedding.py --model BAAI/bge-base-en-v1.5 --learning-rate 1e-5 \\
        --dataset sentence-transformers/natural-questions --rename-columns answer=positive

The negatives of an anchor are the documents of the whole global batch, over all micro-batches and ranks. So a step has two
passes: `cache_gradients` embeds the global batch without a graph and finds the gradient of each embedding, `train_step` hands
it on. sentence-transformers opens the model that is saved, and a model of sentence-transformers can be trained on.
"""

from dataclasses import dataclass
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.EmbeddingConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "small-bert-uncased"
    dataset: str = "stdlib:embed"
    max_length: int = 64
    learning_rate: float = 1e-3
    warmup_steps: float = 0.1
    per_device_train_batch_size: int = 32
    gradient_accumulation_steps: int = 4
    per_device_eval_batch_size: int = 32
    num_train_epochs: float = 4.0
    temperature: float = 0.1
    output_dir: str = "runs/embedding"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    style = tk.embedding_style(
        config, pooling=config.pooling, query_prompt=config.query_prompt, document_prompt=config.document_prompt
    )
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_embedding(
        raw, tokenizer, config, query_prompt=style.query_prompt, document_prompt=style.document_prompt,
        score_scale=config.score_scale,
    )  # fmt: skip
    tk.print_data_report(splits.report)
    model = tk.add_adapter(tk.load_encoder(config, tokenizer), config, tokenizer)

    collate = partial(tk.collate_text_groups, pad_token_id=tokenizer.pad_token_id, layout=tk.choose_text_layout(model))
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    embed = partial(tk.embed_texts, pooling=style.pooling)
    width = model.config.get_text_config().hidden_size
    loss, metrics = tk.embedding_task(
        splits, embed, train.global_batch_size, width, train.examples_to_consume, loss_type=config.embedding_loss,
        temperature=config.temperature, two_way=config.two_way, false_negative_margin=config.false_negative_margin,
        matryoshka_dims=config.matryoshka_dims,
    )  # fmt: skip
    files = tk.sentence_files(model, style, config.max_length)
    model, optimizer = accelerator.prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, tk.trial_loss(embed), config)
    step_loss = tk.cached_gradient_loss(embed)

    with tk.open_run(accelerator, config, model, optimizer, train, files=files) as run:
        run.compare_with("eval_recall_at_10", lambda: tk.retrieval_baselines(raw))
        if run.due("eval_on_start"):
            run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
        for batch in run:
            batch, rates = tk.cache_gradients(accelerator, model, batch, embed, loss), schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, step_loss, rates, max_grad_norm=config.max_grad_norm))
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, metrics))
                history = run.history(config.metric_for_best_model)
                if tk.stopped_improving(history, config.early_stopping_patience, run.greater_is_better):
                    break
        tk.load_best(run)
        tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype, files=files)
        tk.save_to_hub(run)

    return run.summary


if __name__ == "__main__":
    tk.run_recipe(main)
