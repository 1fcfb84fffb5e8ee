"""Settings that change nothing with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.config.conditions import (
    OF_THE_ADAPTER,
    WITH_ADAM,
    WITH_BETAS,
    WITH_DIVERGENCE,
    WITH_MOMENTUM,
    WITH_SMOOTHING,
    WITHOUT_DIVERGENCE,
    NoEffect,
    is_adapter,
    is_built_in,
    is_on_a_server,
    is_on_the_hub,
    needs,
)
from toolkit.config.policy_rules import POLICY_NO_EFFECT


def _of_reward(setting: str, *rewards: str) -> NoEffect:
    """A setting of built-in rewards."""
    return NoEffect(
        (setting,), lambda reward_funcs: not set(rewards).intersection(reward_funcs),
        f"without the reward {' or '.join(rewards)}: leave it out.",
    )


_ROWS: tuple[NoEffect | tuple[tuple[str, ...], Callable[..., Any], str], ...] = (
    # Schedule
    (("warmup_steps",), lambda lr_scheduler_type: lr_scheduler_type == "constant",
     "with {lr_scheduler_type}: leave it out, or take constant_with_warmup."),
    (("warmup_type",), lambda warmup_steps, warmup_type: warmup_type != "linear" and warmup_steps == 0,
     "without a warm-up: leave it out, or add --warmup-steps 0.03."),
    (("min_lr_ratio", "min_lr"), lambda lr_scheduler_type: lr_scheduler_type in ("constant", "constant_with_warmup"),
     "with {lr_scheduler_type}, which never falls: leave it out, or take cosine or linear."),
    needs("lr_power", "lr_scheduler_type", "polynomial"),
    needs("lr_cycles", "lr_scheduler_type", "cosine_with_restarts", "step"),
    needs("lr_gamma", "lr_scheduler_type", "step", "exponential", "reduce_lr_on_plateau"),
    needs(("lr_patience", "lr_threshold"), "lr_scheduler_type", "reduce_lr_on_plateau"),
    needs(("lr_decay_ratio", "lr_decay_type"), "lr_scheduler_type", "warmup_stable_decay"),
    # Optimizer
    needs(("adam_beta1", "adam_beta2"), "optim", *WITH_BETAS),
    needs("adam_epsilon", "optim", *WITH_ADAM),
    needs("momentum", "optim", *WITH_MOMENTUM),
    needs("stochastic_rounding", "dtype", "bfloat16", "auto"),
    (("max_nonfinite_steps",), lambda nonfinite: nonfinite == "stop",
     "with {nonfinite}, which stops at the first one: leave it out."),
    (("class_weights", "label_smoothing_factor"), lambda problem_type: problem_type == "regression",
     "with {problem_type}, where there are no classes: leave it out."),
    needs("positive_weight", "ranking_loss", "bce"),
    # Preferences
    (("beta",), lambda loss_type: set(loss_type) <= {"sft"},
     "with {loss_type}, which compares with nothing: leave it out, or add sigmoid."),
    needs("label_smoothing", "loss_type", *WITH_SMOOTHING),
    (("f_divergence_type",),
     lambda loss_type, f_divergence_type:
         f_divergence_type != "reverse_kl" and not set(loss_type) & set(WITH_DIVERGENCE + WITHOUT_DIVERGENCE),
     "with {loss_type}, which compares with no reference model: leave it out, or add sigmoid."),
    needs("f_alpha_divergence_coef", "f_divergence_type", "alpha_divergence"),
    needs("discopop_tau", "loss_type", "discopop"),
    needs("simpo_gamma", "loss_type", "simpo"),
    needs("cpo_alpha", "loss_type", "cpo"),
    # Distillation
    needs("beta", "distillation_loss", "jsd"),
    needs("skew_alpha", "distillation_loss", "skewed_forward_kl", "skewed_reverse_kl"),
    (("max_new_tokens",), lambda on_policy_share: on_policy_share == 0,
     "without --on-policy-share, where the student writes nothing: leave it out."),
    needs("ema_decay", "self_distillation", "ema"),
    (("match_attention", "match_weight"), lambda match_layers: match_layers == "none",
     "with {match_layers}: leave it out, or take uniform."),
    (("teacher_revision", "teacher_dtype"), lambda teacher: teacher is None,
     "without --teacher: leave it out, or name a teacher."),
    (("teacher_revision", "teacher_dtype"), lambda teacher: is_on_a_server(teacher),
     "with a teacher on a server, which was started with its own: leave it out."),
    # Embeddings
    (("two_way", "false_negative_margin"), lambda embedding_loss: embedding_loss in ("cosent", "cosine"),
     "with {embedding_loss}, which looks at each pair alone: leave it out, or take info_nce."),
    needs("temperature", "embedding_loss", "auto", "info_nce", "cosent"),
    (("score_scale",), lambda embedding_loss: embedding_loss == "info_nce",
     "with {embedding_loss}, which reads no scores: leave it out, or take cosent or cosine."),
    # Generated texts
    needs(("temperature", "top_p"), "do_sample"),
    (("length_penalty",), lambda num_beams: num_beams == 1, "with one beam: leave it out, or take --num-beams 4."),
    (("metrics",), lambda predict_with_generate: not predict_with_generate,
     "with --no-predict-with-generate, where no text is compared: leave one of the two out."),
    # Model
    (("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
     "max_position_embeddings", "hidden_act"), lambda model: not is_built_in(model),
     "with {model}, whose shape is fixed: leave it out, or take a built-in shape such as --model tiny-llama."),
    (("vocab_size",), lambda model, tokenizer: is_built_in(model) and tokenizer is not None,
     "next to {tokenizer}, which has its own vocabulary: leave one of the two out."),
    (("model_revision",), lambda model: not is_on_the_hub(model),
     "with {model}, which does not come from the Hub: leave it out."),
    (("trust_remote_code",), is_built_in, "with {model}, which is built in: leave it out."),
    needs("torch_compile_backend", "torch_compile"),
    # Adapter
    needs((*OF_THE_ADAPTER, "loraplus_lr_ratio"), "use_peft"),
    (OF_THE_ADAPTER, is_adapter,
     "with {model}, an adapter that has its shape already: leave it out, or name the model it belongs on."),
    needs(("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"), "load_in_4bit"),
    # Reference
    (("reference", "sync_ref_model"), lambda loss_type: set(loss_type) <= {"simpo", "cpo", "orpo", "sft"},
     "with {loss_type}, which has no reference model: leave it out."),
    needs(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model"),
    needs("max_pairs_per_prompt", "pairs_per_prompt", "best_others", "all"),
    # Data
    needs("packing_strategy", "packing"),
    (("group_by_length",), lambda packing: packing,
     "with --packing, whose rows are all of one length: leave it out, or take --no-packing."),
    (("group_by_length", "dataloader_num_workers"), lambda streaming: streaming,
     "with --streaming, which is read in order by one process: leave it out."),
    (("eval_fraction",), lambda eval_split: eval_split is not None,
     "next to {eval_split}: nothing needs to be held out. Leave one of the two out."),
    (("gradient_accumulation_steps",), lambda global_batch_size: global_batch_size is not None,
     "next to {global_batch_size}, which derives it: leave one of the two out (--global-batch-size none undoes a default)."),
    # Evaluation
    (("eval_on_start", "eval_delay", "eval_split", "max_eval_examples", "per_device_eval_batch_size", "num_samples",
     "sample_max_new_tokens", "sample_temperature"), lambda eval_strategy: eval_strategy == "no",
     "with --eval-strategy no: leave it out, or take epoch or steps."),
    (("metrics",), lambda eval_strategy, answer_max_new_tokens: eval_strategy == "no",
     "with --eval-strategy no: leave it out, or take epoch or steps."),
    (("answer_max_new_tokens",), lambda metrics: not metrics,
     "without metrics of answers: leave it out, or add --metrics bleu."),
    (("sample_max_new_tokens", "sample_temperature"), lambda num_samples: num_samples == 0,
     "with --num-samples 0: leave it out."),
    (("save_best_limit",), lambda load_best_model_at_end, save_best_limit: save_best_limit > 1 and not load_best_model_at_end,
     "without --load-best-model-at-end, which saves the best ones: leave it out, or add it."),
    (("greater_is_better",),
     lambda load_best_model_at_end, early_stopping_patience, lr_scheduler_type:
         not (load_best_model_at_end or early_stopping_patience) and lr_scheduler_type != "reduce_lr_on_plateau",
     "when nothing is decided by a metric: leave it out, or add --load-best-model-at-end or --early-stopping-patience 3."),
    # Hub
    needs(("hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision"), "push_to_hub"),
    (("hub_strategy",),
     lambda push_to_hub, hub_strategy, save_strategy, load_best_model_at_end:
         push_to_hub and save_strategy == "no" and not load_best_model_at_end and hub_strategy in ("every_save", "checkpoint"),
     "with {save_strategy}: nothing is saved while it trains. Leave it out, or take --save-strategy epoch or steps."),
    # Runs
    needs("eval_steps", "eval_strategy", "steps"),
    needs("save_steps", "save_strategy", "steps"),
    needs("logging_steps", "logging_strategy", "steps"),
    (("save_total_limit",), lambda save_strategy, load_best_model_at_end: save_strategy == "no" and not load_best_model_at_end,
     "with {save_strategy}: leave it out, or take --save-strategy epoch or steps."),
    # Rewards
    _of_reward("answer_column", "exact_match", "number"),
    _of_reward("reward_pattern", "regex"),
    _of_reward("reward_schema", "json_schema"),
    _of_reward("reward_length", "length"),
    _of_reward("reward_memory", "python"),
    (("tf32",), lambda use_cpu: use_cpu, "with --use-cpu: leave it out."),
)  # fmt: skip
NO_EFFECT = (*(NoEffect(*row) for row in _ROWS), *POLICY_NO_EFFECT)
