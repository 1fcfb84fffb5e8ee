"""Supervised fine-tuning of a causal language model through an adapter (LoRA): the model itself stays as it is.

    python recipes/lora.py
    accelerate launch recipes/lora.py --config recipes/configs/qwen3_4b_lora.yaml

What is written is the adapter alone; `toolkit merge` makes a model of it. Without an argument it adapts the model that `make
demo` has pretrained; where that is missing, a random one, whose embedding learns as well. That model has never seen a chat:
the rows of the template's tokens learn too. A model that was trained on chats needs `--lora-trainable-tokens '[]'`.
"""

from dataclasses import dataclass, field
from functools import partial

import toolkit as tk


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.AnswerConfig, tk.SampleConfig,
    tk.RunConfig,
):  # fmt: skip
    model: str = tk.trained_model("runs/demo/pretrain/model", otherwise="tiny-llama")
    dataset: str = "stdlib:sft"
    packing: bool = True
    max_length: int = 512
    use_peft: bool = True
    lora_r: int = 32
    lora_alpha: float = 64.0
    lora_trainable_tokens: list[str] = field(default_factory=lambda: ["template"])
    learning_rate: float = 3e-3
    warmup_steps: float = 0.05
    per_device_train_batch_size: int = 4
    num_train_epochs: float = 2.0
    eval_on_start: bool = True
    output_dir: str = "runs/lora"


def main(config: Config) -> tk.Summary:
    accelerator = tk.build_accelerator(config)
    tokenizer = tk.load_tokenizer(config)
    compared = tk.choose_text_metrics(config.metrics) if config.metrics else {}
    raw = tk.load_splits(config)
    splits = tk.tokenize_for_sft(raw, tokenizer, config)
    tk.print_data_report(splits.report)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=config.packing)
    model = tk.add_adapter(model, config, tokenizer)

    collate = tk.collate_packed if config.packing else tk.collate_padded
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps, config.loraplus_lr_ratio)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = partial(tk.causal_lm_loss, label_smoothing_factor=config.label_smoothing_factor, z_loss=config.z_loss)
    prompts = tk.sample_prompts(raw, tokenizer, config)
    asked = tk.held_out_prompts(raw["validation"], tokenizer) if config.metrics else []
    train = tk.fit_micro_batch(accelerator, model, optimizer, train, loss_fn, config)

    def evaluate() -> None:
        values = tk.eval_with_gather(accelerator, model, evaluation, tk.causal_lm_metrics)
        values |= tk.answer_metrics(accelerator, model, tokenizer, asked, compared, config.answer_max_new_tokens)
        run.log(values)
        run.add_samples(tk.sample_texts(accelerator, model, tokenizer, prompts, config))

    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        run.compare_with("eval_loss", lambda: tk.answer_baselines(splits, len(tokenizer)))
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
