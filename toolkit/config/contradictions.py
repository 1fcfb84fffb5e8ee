"""Values of settings that cannot all be meant, whoever set them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.config.conditions import (
    FROM_DATA,
    INITIALIZATION,
    OF_BITSANDBYTES,
    REFUSED_INITIALIZATIONS,
    REPOSITORY,
    STARTS_ON_THE_BASE,
    USUAL_METRICS,
    WITH_DIVERGENCE,
    WITH_LIKELIHOOD,
    WITHOUT_DIVERGENCE,
    Contradiction,
    are_patterns,
    is_built_in,
    is_on_a_server,
    is_on_the_hub,
    is_pattern,
    lies_in,
    never_measured,
)
from toolkit.config.policy_rules import POLICY_CONTRADICTIONS

_ROWS: tuple[tuple[Callable[..., Any], str], ...] = (
    # Generated texts
    (lambda do_sample, num_beams: do_sample and (num_beams or 1) > 1,
     "--do-sample draws one text, {num_beams} searches among several: choose one."),
    # Precision
    (lambda bf16, fp16: bf16 and fp16, "--bf16 and --fp16 are two precisions for one computation: choose one."),
    (lambda fp8, bf16, fp16: fp8 != "none" and (fp16 or bf16 is False),
     "{fp8} is for runs in bfloat16: leave --no-bf16 and --fp16 out."),
    (lambda fp8, load_in_4bit: fp8 != "none" and load_in_4bit,
     "{fp8} and --load-in-4bit are two ways to round one matrix: choose one."),
    (lambda fp16, dtype: fp16 and dtype == "float16",
     "--fp16 scales the loss for weights in float32, and {dtype} leaves none: take --dtype float32, or --bf16."),
    (lambda stochastic_rounding, optim: stochastic_rounding and optim in OF_BITSANDBYTES,
     "--stochastic-rounding is not in the kernels of {optim}: take --optim adamw_torch, or adafactor for less memory."),
    # Runs
    (lambda loss_spike, save_strategy: loss_spike == "rollback" and save_strategy == "no",
     "{loss_spike} goes back to a checkpoint, and {save_strategy} writes none: take --save-strategy steps."),
    (lambda resume, resume_from: resume and resume_from,
     "--resume takes the newest checkpoint of --output-dir and {resume_from} names another: give one of the two."),
    (lambda resume, overwrite_output_dir: resume and overwrite_output_dir,
     "--overwrite-output-dir would throw away the run that --resume continues: give one of the two."),
    (lambda resume_from, overwrite_output_dir, output_dir:
         overwrite_output_dir and resume_from and lies_in(resume_from, output_dir),
     "--overwrite-output-dir would throw away {resume_from}: take another --output-dir."),
    (lambda report_to: "none" in report_to and len(report_to) > 1, "{report_to} names trackers and none: leave none out."),
    # Masks
    (lambda mask_replace_prob, random_replace_prob: mask_replace_prob + random_replace_prob > 1,
     "{mask_replace_prob} and {random_replace_prob}: are shares of the same tokens, at most 1 together. Lower one."),
    # Data
    (lambda streaming, max_steps: streaming and max_steps is None, "--streaming has no end: set --max-steps."),
    (lambda rename_columns: any(not all(pair.partition("=")[::2]) for pair in rename_columns),
     "{rename_columns}: must be old=new, as in --rename-columns question=prompt."),
    (lambda min_length, max_length: min_length is not None and min_length > max_length,
     "{min_length} is above {max_length}, so that every example left is cut: take a smaller one."),
    # Model
    (lambda trust_remote_code, model, model_revision: trust_remote_code and is_on_the_hub(model) and not model_revision,
     "--trust-remote-code runs whatever the repository of {model} holds on the day: pin the code you have read, with "
     "--model-revision and a commit."),
    (lambda max_position_embeddings, max_length: max_position_embeddings and max_position_embeddings < max_length,
     "{max_position_embeddings} is shorter than an example may be: {max_length} needs a context as long."),
    # Adapter
    (lambda load_in_4bit, use_peft: load_in_4bit and not use_peft,
     "--load-in-4bit freezes the model, and without --use-peft nothing is left to train: add --use-peft."),
    (lambda load_in_4bit, model: load_in_4bit and is_built_in(model),
     "--load-in-4bit is for weights that are read from files, and {model} is made here: name another model."),
    (lambda load_in_4bit, zero_stage, fsdp, deepspeed: load_in_4bit and (zero_stage == 3 or fsdp or deepspeed),
     "--load-in-4bit needs the whole frozen model on each device, and here it would be sharded: take --zero-stage 2."),
    (lambda load_in_4bit, init_lora_weights:
         load_in_4bit and init_lora_weights not in (*STARTS_ON_THE_BASE, *REFUSED_INITIALIZATIONS),
     "{init_lora_weights} changes the frozen weights, which --load-in-4bit has rounded: take --init-lora-weights gaussian."),
    # in another type B A is no longer zero, and peft (0.21.2) would write A and B in that of the 4-bit codes
    (lambda init_lora_weights, dtype, load_in_4bit: init_lora_weights == "orthogonal" and (dtype != "float32" or load_in_4bit),
     "{init_lora_weights} starts as the model only where A and B are not rounded: take --dtype float32 without "
     "--load-in-4bit, or --init-lora-weights gaussian."),
    (lambda init_lora_weights: init_lora_weights in FROM_DATA,
     "{init_lora_weights} needs a pass over data before the adapter is made, which no recipe has: take pissa or olora, "
     "which go by the weights alone."),
    (lambda init_lora_weights: init_lora_weights == "loftq",
     "{init_lora_weights} puts rounded weights in the place of the model's, which its published files don't hold: take "
     "pissa, or --load-in-4bit with gaussian."),
    (lambda init_lora_weights: init_lora_weights == "mica",
     "{init_lora_weights} freezes the matrices B, and checkpoints hold what is trained: take pissa or olora."),
    (lambda init_lora_weights:
         not INITIALIZATION.fullmatch(init_lora_weights) and init_lora_weights not in REFUSED_INITIALIZATIONS,
     "{init_lora_weights}: must be one of true, gaussian, orthogonal, pissa, pissa_niter_16 (or another number), olora."),
    (lambda lora_rank_pattern: not are_patterns(lora_rank_pattern, whole=True),
     "{lora_rank_pattern}: must be regex=rank, as in --lora-rank-pattern 'down_proj=32'."),
    (lambda lora_alpha_pattern: not are_patterns(lora_alpha_pattern, whole=False),
     "{lora_alpha_pattern}: must be regex=alpha, as in --lora-alpha-pattern 'down_proj=64'."),
    # Reference
    (lambda sync_ref_model, reference: sync_ref_model and reference not in ("auto", "model"),
     "--sync-ref-model moves a second model, and {reference} has none: take --reference model."),
    (lambda sync_ref_model, use_peft: sync_ref_model and use_peft,
     "--sync-ref-model mixes whole models, and --use-peft trains an adapter: leave one of the two out."),
    (lambda sync_ref_model, zero_stage, fsdp, deepspeed: sync_ref_model and (zero_stage == 3 or fsdp or deepspeed),
     "--sync-ref-model needs whole models on each device, and here they would be sharded: take --zero-stage 2, or DDP."),
    # Optimizer
    (lambda warmup_steps: warmup_steps > 1 and warmup_steps != int(warmup_steps),
     "{warmup_steps}: must be a whole number of steps, or a fraction of the run below 1."),
    (lambda min_lr, min_lr_ratio: min_lr is not None and min_lr_ratio > 0,
     "{min_lr} and {min_lr_ratio} are two floors for one schedule: give one of the two."),
    (lambda min_lr, learning_rate: min_lr is not None and min_lr > learning_rate,
     "{min_lr} is above {learning_rate}, the highest rate: take a smaller one."),
    (lambda lr_scheduler_type, min_lr, min_lr_ratio:
         lr_scheduler_type in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and min_lr is None and min_lr_ratio == 0,
     "{lr_scheduler_type} needs a floor: add --min-lr-ratio 0.1, a share of the learning rate, or --min-lr, a rate."),
    (lambda lr_scheduler_type, eval_strategy: lr_scheduler_type == "reduce_lr_on_plateau" and eval_strategy == "no",
     "{lr_scheduler_type} goes by evaluations, and with --eval-strategy no there are none: take epoch or steps."),
    (lambda lr_patterns: not all(is_pattern(text) for text in lr_patterns),
     "{lr_patterns}: must be regex=factor, as in --lr-patterns 'embed=0.1'. One with a comma in it goes into JSON: "
     """--lr-patterns '["layers.(1,2)=0.5"]'."""),
    # Distillation
    (lambda distillation_loss, beta: distillation_loss == "jsd" and beta in (0.0, 1.0),
     "{beta} makes jsd 0 whatever the student predicts: take a value between, or --distillation-loss forward_kl (what "
     "TRL does for 0) or reverse_kl (for 1)."),
    (lambda on_policy_share, teacher_top_k, teacher:
         on_policy_share > 0 and teacher_top_k is not None and not is_on_a_server(teacher),
     "{on_policy_share} queries the teacher about texts that the student has just written, and {teacher_top_k} queries it "
     "once about the data: leave one of them out."),
    (lambda on_policy_share, cross_entropy_share: on_policy_share > 0 and cross_entropy_share > 0,
     "{cross_entropy_share} would train on what the student has written as if it were data: leave it or "
     "--on-policy-share out."),
    (lambda streaming, teacher_top_k: streaming and teacher_top_k is not None,
     "{teacher_top_k}: a teacher can't be queried beforehand for a stream. Leave it or --streaming out."),
    (lambda streaming, on_policy_share: streaming and on_policy_share > 0,
     "{on_policy_share}: reads the rows of a step again, which a stream doesn't keep. Leave it or --streaming out."),
    (lambda teacher, teacher_top_k: is_on_a_server(teacher) and teacher_top_k is None,
     "{teacher} is a server, which is queried for its most probable tokens: add --teacher-top-k 20."),
    (lambda teacher, teacher_top_k, temperature: is_on_a_server(teacher) and temperature != 1.0,
     "{temperature}: the server {teacher} returns its log-probabilities at 1. Leave it out, or name a teacher that is loaded "
     "here."),
    (lambda teacher, match_layers: is_on_a_server(teacher),
     "{teacher} is a server, which has no classes and no layers to compare with: name a classifier that is loaded here."),
    (lambda self_distillation, teacher: self_distillation is not None and teacher is not None,
     "{self_distillation} and {teacher} are two teachers: leave one of them out."),
    (lambda self_distillation, use_peft: self_distillation == "base" and not use_peft,
     "{self_distillation} turns the adapter off, and there is none: add --use-peft, or take --self-distillation ema."),
    (lambda self_distillation, cross_entropy_share: self_distillation is not None and cross_entropy_share == 0,
     "{self_distillation}: student and teacher begin as one model, and without a share of the data's cross-entropy they "
     "stay that: add --cross-entropy-share 0.5."),
    (lambda self_distillation, teacher_top_k: self_distillation is not None and teacher_top_k is not None,
     "{teacher_top_k}: a teacher that is the student can't be queried beforehand. Leave it out, or name the base with "
     "--teacher."),
    (lambda self_distillation, zero_stage, fsdp, deepspeed:
         self_distillation is not None and (zero_stage == 3 or fsdp or deepspeed),
     "{self_distillation} needs whole models on each device, and here they would be sharded: take --zero-stage 2, or DDP."),
    (lambda teacher, self_distillation, zero_stage, fsdp, deepspeed:
         teacher is None and self_distillation is None and (zero_stage or fsdp or deepspeed),
     "Without --teacher one is trained here first, which a sharded run does not do: name one, as with --teacher runs/teacher."),
    (lambda teacher, match_layers, zero_stage, fsdp, deepspeed: teacher is None and (zero_stage or fsdp or deepspeed),
     "Without --teacher one is trained here first, which a sharded run does not do: name one, as with "
     "--teacher runs/accelerated."),
    (lambda match_attention, attn_implementation: match_attention and attn_implementation not in ("auto", "eager"),
     "{match_attention} needs probabilities, which {attn_implementation} doesn't return: leave one of them out."),
    # Preferences
    (lambda loss_type: not loss_type, "--loss-type is empty: name one loss or several, such as sigmoid."),
    (lambda loss_type, loss_weights: loss_weights and len(loss_weights) != len(loss_type),
     "{loss_weights} next to {loss_type}: must be one weight for each loss."),
    (lambda loss_type, label_smoothing: "exo_pair" in loss_type and label_smoothing == 0,
     "exo_pair divides by {label_smoothing}: must be above 0, as in --label-smoothing 0.001."),
    (lambda loss_type, f_divergence_type: f_divergence_type != "reverse_kl" and set(WITHOUT_DIVERGENCE) & set(loss_type),
     f"{{f_divergence_type}} is defined for differences of rewards, as in {', '.join(WITH_DIVERGENCE)}; {{loss_type}} "
     "takes rewards one by one."),
    (lambda loss_type, ld_alpha: ld_alpha is not None and set(WITH_LIKELIHOOD) & set(loss_type),
     f"{{ld_alpha}} weighs down the tokens whose whole likelihood {', '.join(WITH_LIKELIHOOD)} train on: leave it out of "
     "{loss_type}."),
    # Hub
    (lambda hub_model_id: hub_model_id is not None and not REPOSITORY.fullmatch(hub_model_id),
     "{hub_model_id}: must be user/name or name, of letters, digits and . _ - inside."),
    (lambda push_to_hub, hub_strategy, load_best_model_at_end:
         push_to_hub and hub_strategy == "best" and not load_best_model_at_end,
     "{hub_strategy} sends what --load-best-model-at-end saves: add it, or take --hub-strategy every_save."),
    # Evaluation
    (lambda load_best_model_at_end, eval_strategy: load_best_model_at_end and eval_strategy == "no",
     "--load-best-model-at-end has nothing to compare with --eval-strategy no: take epoch or steps."),
    (lambda early_stopping_patience, eval_strategy: early_stopping_patience and eval_strategy == "no",
     "{early_stopping_patience} counts evaluations, and with --eval-strategy no there are none: take epoch or steps."),
    (lambda metric_for_best_model, metrics: metrics and never_measured(metric_for_best_model, metrics),
     "{metric_for_best_model} is never measured with {metrics}: take eval_loss, or a metric that is in the list."),
    (lambda metric_for_best_model, metrics, problem_type:
         not metrics and never_measured(metric_for_best_model, USUAL_METRICS[problem_type]),
     "{metric_for_best_model} is not among what is measured with {problem_type} by default: name it in --metrics too."),
)  # fmt: skip
CONTRADICTIONS = (*(Contradiction(*row) for row in _ROWS), *POLICY_CONTRADICTIONS)
