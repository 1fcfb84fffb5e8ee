"""The settings groups that a recipe's `Config` inherits: model, data, batches, optimizer.

A group is one help panel of the command line. A field is declared once, with its help text next to it; a recipe
redeclares a field only to change its default.
"""

# ruff: noqa: RUF009 - setting() makes a dataclass field; ruff takes it for a default that all instances share

from __future__ import annotations

import os
from dataclasses import dataclass

from toolkit.config.setting import Settings, setting


def trained_model(directory: str, otherwise: str) -> str:
    """A model that was trained here, as `make demo` does, where it is there: the default of recipes that need a trained one."""
    return directory if os.path.isdir(directory) else otherwise


@dataclass(frozen=True)
class SeedConfig(Settings):
    """Reproducibility"""

    seed: int = setting(
        42, "Seed of everything random: initial weights, order of examples, dropout.", least=0, most=2**32 - 1,
        on_resume="fixed",
    )


@dataclass(frozen=True)
class IncidentConfig(Settings):
    """When training goes wrong"""

    nonfinite: str = setting(
        "skip", "A step with a non-finite loss or gradient: skip it, or stop the run.", choices=("skip", "stop"),
        on_resume="free",
    )
    max_nonfinite_steps: int = setting(3, "Stop after N such steps in a row.", least=1, most=10**9, on_resume="free")
    divergence: str = setting(
        "warn",
        "When training goes wrong without an error (no gradient, a loss far above the first, most steps skipped, a final "
        "metric worse than the first): warn, or stop.",
        choices=("warn", "stop"), on_resume="free",
    )


@dataclass(frozen=True)
class ModelConfig(SeedConfig):
    """Model"""

    model: str = setting(
        "tiny-llama",
        "Hub id, local directory, or a built-in shape made from scratch: nano-llama (64 wide, 4 layers), tiny-llama (128, 4), "
        "small-llama (256, 4), medium-llama (768, 12), large-llama (1024, 24), the same of qwen3 and gemma3, nano-bert "
        "(64, 2), tiny-bert (128, 4), tiny-t5, and tiny-bert-uncased, small-bert-uncased (384, 1), whose words are in lower "
        "case, identifiers cut.",
        aliases=("model_name_or_path",), on_resume="fixed",
    )
    model_revision: str | None = setting(None, "Branch, tag or commit of the model on the Hub.", on_resume="fixed")
    tokenizer: str | None = setting(
        None, "Hub id or directory of the tokenizer. Default: the model's own; for a built-in shape one trained here.",
        on_resume="fixed",
    )
    trust_remote_code: bool = setting(
        False, "Run code from the model's repository. Needs a pinned --model-revision.", on_resume="free"
    )
    dtype: str = setting(
        "float32", "Type of the weights in memory.", choices=("auto", "float32", "bfloat16", "float16"),
        aliases=("torch_dtype",), on_resume="fixed",
    )
    attn_implementation: str = setting(
        "auto", "Attention backend. auto: the fastest exact one for the device and the layout of the rows.",
        choices=("auto", "sdpa", "eager", "varlen", "flex_attention", "flash_attention_2"), on_resume="rounding",
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations in backward: less memory, about a third more time.", on_resume="rounding"
    )
    torch_compile: bool = setting(False, "Compile each layer with torch.compile.", on_resume="dropout")
    torch_compile_backend: str = setting(
        "inductor", "What compiles. aot_eager, eager: to find a fault.", choices=("inductor", "aot_eager", "eager"),
        on_resume="dropout",
    )
    chat_template: str | None = setting(
        None, "File with a Jinja chat template, in place of the tokenizer's own.", on_resume="fixed"
    )
    vocab_size: int | None = setting(
        None, "Built-in shapes: vocabulary of the tokenizer trained here. Default: 4096.", least=260, most=2**20,
        on_resume="fixed",
    )
    hidden_size: int | None = setting(None, "Built-in shapes: width.", least=8, most=2**17, on_resume="fixed")
    num_hidden_layers: int | None = setting(None, "Built-in shapes: layers.", least=1, most=2**10, on_resume="fixed")
    num_attention_heads: int | None = setting(None, "Built-in shapes: attention heads.", least=1, most=2**10, on_resume="fixed")
    num_key_value_heads: int | None = setting(
        None, "Built-in shapes: key and value heads.", least=1, most=2**10, on_resume="fixed"
    )
    intermediate_size: int | None = setting(
        None, "Built-in shapes: width of the feed-forward layer.", least=8, most=2**20, on_resume="fixed"
    )
    max_position_embeddings: int | None = setting(
        None, "Built-in shapes: longest context in tokens.", least=8, most=2**24, on_resume="fixed"
    )
    dropout: float | None = setting(
        None, "Dropout, where the architecture has it. Default: the model's own.", least=0.0, below=1.0, on_resume="fixed"
    )
    attention_dropout: float | None = setting(
        None, "Dropout of attention weights alone. Default: as --dropout, else the model's own.", least=0.0, below=1.0,
        on_resume="fixed",
    )
    hidden_act: str | None = setting(None, "Built-in shapes: activation function, by transformers' names.", on_resume="fixed")


@dataclass(frozen=True)
class BatchConfig(Settings):
    """Steps and batches"""

    num_train_epochs: float = setting(1.0, "Passes over the training data.", above=0.0, most=1e6, on_resume="fixed")
    max_steps: int | None = setting(None, "Stop after N steps; overrides the epochs.", least=1, most=10**9, on_resume="fixed")
    per_device_train_batch_size: int = setting(
        8, "Examples (rows, when packing) in a micro-batch.", least=1, most=2**16, on_resume="dropout"
    )
    per_device_eval_batch_size: int = setting(
        8, "The same for evaluation. Changes no metric.", least=1, most=2**16, on_resume="free"
    )
    gradient_accumulation_steps: int = setting(
        1, "Micro-batches in a step on each device.", least=1, most=2**16, on_resume="batches"
    )
    global_batch_size: int | None = setting(
        None, "Examples in a step over all devices; derives the accumulation.", least=1, most=2**24, on_resume="batches"
    )
    auto_find_batch_size: bool = setting(
        True, "Try the longest micro-batch before the first step, unless far more memory is free; while it doesn't fit, "
        "halve it and double the accumulation.",
        on_resume="free",
    )


@dataclass(frozen=True)
class DataConfig(BatchConfig, SeedConfig):
    """Data"""

    dataset: str = setting(
        "stdlib:sft",
        "stdlib:NAME, synthetic:NAME, a Hub id (name:config@revision), a file or folder (or a URL), or a mixture a:0.7,b:0.3.",
        aliases=("dataset_name",), on_resume="fixed",
    )
    train_split: str = setting("train", "Split to train on.", aliases=("dataset_train_split",), on_resume="fixed")
    eval_split: str | None = setting(
        None, "Split to evaluate on. Default: validation, else test, else rows held out by content hash.",
        aliases=("dataset_test_split",), on_resume="evaluation",
    )
    eval_fraction: float = setting(
        0.05, "Share of rows held out when the source has no evaluation split.", least=0.0, below=1.0, on_resume="fixed"
    )
    rename_columns: list[str] = setting([], "Columns to rename before anything else, as old=new.", on_resume="fixed")
    sample_by: str = setting(
        "line", "What a row of a .txt file is; blank lines separate paragraphs.", choices=("line", "paragraph", "document"),
        on_resume="fixed",
    )
    streaming: bool = setting(False, "Read the source as a stream. Needs --max-steps.", on_resume="fixed")
    max_train_examples: int | None = setting(None, "Use at most N training rows.", least=1, most=10**10, on_resume="fixed")
    max_eval_examples: int | None = setting(
        None, "Use at most N evaluation rows.", least=1, most=10**10, on_resume="evaluation"
    )
    max_length: int = setting(
        1024, "Longest example, and the length of a packed row, in tokens.", least=2, most=2**24, aliases=("max_seq_length",),
        on_resume="fixed",
    )
    min_length: int | None = setting(
        None, "Leave out examples with fewer tokens; each is counted. Default: none is left out.", least=1, most=2**24,
        on_resume="fixed",
    )
    overlong: str = setting(
        "truncate", "What to do with longer examples; each is counted.", choices=("truncate", "drop", "split", "refuse"),
        on_resume="fixed",
    )
    packing: bool = setting(False, "Pack whole documents into rows of max_length.", on_resume="fixed")
    packing_strategy: str = setting(
        "bfd", "bfd: best fit, whole documents. wrapped: cut documents to fill rows.", choices=("bfd", "wrapped"),
        on_resume="fixed",
    )
    group_by_length: bool = setting(
        False, "Put examples of like length into one batch (within fixed windows of the order).", on_resume="fixed"
    )
    completion_only_loss: bool | None = setting(
        None, "Prompt/completion data: train on the completion only. Default: yes where there is one.", on_resume="fixed"
    )
    assistant_only_loss: bool | None = setting(
        None, "Chat data: train on assistant turns only. Default: yes.", on_resume="fixed"
    )
    preprocessing_num_workers: int | None = setting(
        None, "Processes that tokenize, which is done once and cached. Changes no result. Default: 1.", least=1, most=1024,
        aliases=("dataset_num_proc",), on_resume="free",
    )
    dataloader_num_workers: int = setting(0, "Processes that make batches ahead.", least=0, most=2**10, on_resume="free")


@dataclass(frozen=True)
class OptimConfig(IncidentConfig):
    """Optimizer"""

    optim: str = setting(
        "adamw_torch", "Optimizer. muon: Muon for matrices, AdamW for the rest.",
        choices=("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "nadam", "radam", "rmsprop", "adagrad", "muon",
                 "adamw_bnb_8bit", "lion_32bit", "lion_8bit"), on_resume="fixed",
    )
    stochastic_rounding: bool = setting(
        False, "Round updated weights in bfloat16 (--dtype) at random, so that small updates are kept on average.",
        on_resume="fixed",
    )
    learning_rate: float = setting(5e-5, "Highest learning rate.", above=0.0, on_resume="fixed")
    lr_scheduler_type: str = setting(
        "cosine", "How the rate falls, as a function of progress.",
        choices=("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
                 "cosine_with_restarts", "polynomial", "inverse_sqrt", "exponential", "step", "warmup_stable_decay",
                 "reduce_lr_on_plateau"), on_resume="fixed",
    )
    warmup_steps: float = setting(
        0.0, "Steps of warm-up; a fraction of the run when below 1. The first step has rate 0, as in Trainer.",
        least=0.0, most=1e9, aliases=("warmup_ratio",), on_resume="fixed",
    )
    warmup_type: str = setting(
        "linear", "How the rate rises in warm-up.", choices=("linear", "cosine", "1-sqrt"), on_resume="fixed"
    )
    min_lr_ratio: float = setting(
        0.0, "Floor of the schedule, as a share of learning_rate.", least=0.0, most=1.0, aliases=("min_lr_rate",),
        on_resume="fixed",
    )
    min_lr: float | None = setting(None, "The same floor as a rate.", least=0.0, on_resume="fixed")
    lr_cycles: int = setting(1, "cosine_with_restarts: cycles. step: drops.", least=1, most=10**6, on_resume="fixed")
    lr_power: float = setting(1.0, "polynomial: the power.", above=0.0, on_resume="fixed")
    lr_gamma: float = setting(
        0.1, "step, reduce_lr_on_plateau: factor of each drop. exponential: share left at the end.", above=0.0, most=1.0,
        on_resume="fixed",
    )
    lr_decay_ratio: float = setting(
        0.2, "warmup_stable_decay: share of the run that decays.", above=0.0, most=1.0, on_resume="fixed"
    )
    lr_decay_type: str = setting(
        "cosine", "warmup_stable_decay: how the rate falls.", choices=("cosine", "linear", "1-sqrt"), on_resume="fixed"
    )
    lr_patience: int = setting(
        10, "reduce_lr_on_plateau: evaluations in a row without improvement before the rate is reduced at the next.",
        least=0, most=10**6, on_resume="fixed",
    )
    lr_threshold: float = setting(
        1e-4, "reduce_lr_on_plateau: what counts as improvement, as a share of the best value.", least=0.0, below=1.0,
        on_resume="fixed",
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay; never on norms and biases.", least=0.0, on_resume="fixed")
    adam_beta1: float = setting(0.9, "Adam family: decay of the first moment.", least=0.0, below=1.0, on_resume="fixed")
    adam_beta2: float = setting(0.999, "Adam family: decay of the second moment.", least=0.0, below=1.0, on_resume="fixed")
    adam_epsilon: float = setting(1e-8, "Adam family: added to the denominator.", above=0.0, on_resume="fixed")
    momentum: float | None = setting(
        None, "sgd, rmsprop and muon: momentum. Default: 0, as in Trainer; of muon 0.95.", least=0.0, below=1.0,
        on_resume="fixed",
    )
    max_grad_norm: float = setting(1.0, "Clip the global gradient norm here; 0 turns it off.", least=0.0, on_resume="fixed")
    layer_lr_decay: float = setting(
        1.0, "Factor on the rate for each layer below the top one.", above=0.0, most=1.0, on_resume="fixed"
    )
    lr_patterns: list[str] = setting(
        [], "Factors on the rate by parameter name, as regex=factor; the first match counts.", on_resume="fixed"
    )
