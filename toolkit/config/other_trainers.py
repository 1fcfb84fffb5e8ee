"""Keys of Axolotl and LLaMA-Factory: the settings that mean them here, and what there is in place of the rest.

Their files are not read: the same idea often takes another form (a share for a percentage, a recipe for a value). A refusal
names each key's counterpart, so that a file is rewritten in one go.
"""

from __future__ import annotations

# The settings, and the keys that mean just the same; then the settings with what else differs.
_SAME = {
    "per_device_train_batch_size global_batch_size": "batch_size", "num_train_epochs": "epochs num_epochs",
    "weight_decay": "wd", "warmup_steps": "warmup",
    "learning_rate": "lr", "max_steps": "steps", "optim": "optimizer", "lr_scheduler_type": "lr_scheduler",
    "model": "base_model", "tokenizer": "tokenizer_config", "model_revision": "revision_of_model",
    "eval_split": "test_datasets", "eval_fraction": "val_set_size val_size", "use_rslora": "peft_use_rslora",
    "use_dora": "peft_use_dora", "init_lora_weights": "peft_init_lora_weights pissa_init pissa_iter",
    "max_length": "sequence_len cutoff_len", "overlong": "excess_length_strategy", "packing": "sample_packing",
    "report_to": "use_wandb use_mlflow use_tensorboard", "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size", "min_lr_ratio": "cosine_min_lr_ratio",
    "assistant_only_loss": "roles_to_train",
    "attn_implementation": "flash_optimum xformers_attention sdp_attention flex_attention eager_attention",
    "eval_strategy eval_steps": "evals_per_epoch", "save_strategy save_steps": "saves_per_epoch",
    "num_samples": "eval_table_size generate_samples", "sample_max_new_tokens": "eval_max_new_tokens generation_max_length",
    "resume": "auto_resume_from_checkpoints", "beta": "rl_beta dpo_beta pref_beta", "hub_private_repo": "hub_private",
    "denoising_steps": "num_diffusion_steps generation_steps", "sample_temperature": "generation_temperature",
    "temperature": "kd_temperature", "teacher_top_k": "kd_online_topk loss_top_k gkd_logits_topk", "lora_r": "lora_rank",
    "lora_modules_to_save": "additional_target", "max_train_examples max_eval_examples": "max_samples",
    "loss_type": "pref_loss", "label_smoothing": "dpo_label_smoothing", "desirable_weight": "kto_chosen_weight",
    "undesirable_weight": "kto_rejected_weight", "reference": "ref_model_adapters",
    "bnb_4bit_quant_type": "quantization_type", "bnb_4bit_use_double_quant": "double_quantization",
    "hub_model_id": "hub_model_name",
}  # fmt: skip
_NOTED = {
    ("", "leave it out: it changes nothing here."): (
        "base_model_config tokenizer_type tokenizer_use_fast is_llama_derived_model dataset_processes lora_fan_in_fan_out "
        "kd_online_timeout preprocessing_batch_size buffer_size enable_liger_kernel use_reentrant_gc upcast_layernorm"
    ),
    ("", "leave it out: unknown keys are always refused."): "strict",
    ("", "those of the tokenizer's directory (tokenizer_config.json)."): "special_tokens",
    ("lora_trainable_tokens", "a tokenizer's directory that has them."): "tokens",
    ("", "leave it out: tokenized rows are cached under HF_HOME."): "dataset_prepared_path tokenized_path",
    ("", "leave it out: each epoch has another order."): "shuffle_merged_datasets",
    ("dataset", "toolkit train pretrain."): "pretraining_dataset",
    ("", "toolkit train lora; with 4-bit weights load_in_4bit: true."): "adapter",
    ("model", "an adapter's directory as model is trained further."): "lora_model_dir adapter_name_or_path",
    ("lora_target_modules", "all-linear is its default."): "lora_target_linear",
    ("packing", "evaluation packs as training does."): "eval_sample_packing",
    ("", "leave it out: a batch is padded to its longest example."): "pad_to_sequence_len",
    ("", "leave it out: in every tracker the project is called toolkit."): "wandb_project",
    ("", "the environment variable WANDB_ENTITY."): "wandb_entity",
    ("", "there is none: leave it out."): (
        "wandb_watch wandb_log_model s2_attention plugins gptq relora_steps sequence_parallel_degree create_new_adapter "
        "pissa_convert eval_on_each_dataset reward_model shift_attn use_unsloth use_galore use_badam use_apollo "
        "use_adam_mini use_llama_pro freeze_vision_tower ray_run_name"
    ),
    ("run_name", "report_to: wandb."): "wandb_name",
    ("", "leave it out: a resumed run continues in its own."): "wandb_run_id",
    ("lr_decay_ratio", "lr_scheduler_type: warmup_stable_decay."): "cosine_constant_lr_ratio",
    ("completion_only_loss assistant_only_loss", "false for what is true there."): "train_on_inputs train_on_prompt",
    ("", "leave it out: the end of a turn is always learned."): "train_on_eos",
    ("attn_implementation", "auto takes the fastest exact one."): "flash_attention flash_attn",
    ("", "a recipe: toolkit train dpo, kto or reward; of dpo loss_type selects which."): "rl",
    ("", "there is none; add the noise in a copy of the recipe (toolkit copy sft)."): "noisy_embedding_alpha neftune_alpha",
    ("", "freeze the others in a copy of the recipe (toolkit copy sft)."): "unfrozen_parameters freeze_trainable_layers",
    ("", "leave it out: fsdp is FSDP2."): "fsdp_version",
    ("", "toolkit merge RUN/model --into FOLDER."): "merge_lora",
    ("denoising_steps block_length shift_logits", "toolkit train diffusion."): "diffusion",
    ("", "leave it out: the number of hidden tokens is drawn evenly, as in LLaDA."): "noise_schedule",
    ("", "leave it out: from one token to all are hidden."): "min_mask_ratio max_mask_ratio",
    ("", "leave it out: hidden tokens always count as in the bound of the likelihood."): "importance_weighting",
    ("", "leave it out: the tokenizer's own mask token is taken, else <|mask|> is added."): "mask_token_str mask_token_id",
    ("adam_epsilon", "of a diffusion's noise leave it out: at least one token of each row is hidden."): "eps",
    ("eval_steps", "an evaluation writes the samples."): "generation_interval",
    ("", "toolkit train distill."): "kd_trainer",
    ("cross_entropy_share", "kd_ce_alpha / (kd_ce_alpha + kd_alpha)."): "kd_ce_alpha kd_alpha",
    ("", "leave it out: the temperature stays as it is."): "kd_temperature_min",
    ("distillation_loss beta", "jsd lies between both directions of the divergence."): "kd_beta",
    ("", "leave it out: the tokens that are not among the most probable count as one."): "kd_normalize_topk loss_add_tail",
    ("teacher", "the address of a vLLM server."): "kd_online_server_base_url kd_online_server teacher_model_server",
    ("", "give the student the teacher's tokens: --tokenizer THE_TEACHER of one that begins from scratch."): "use_uld_loss",
    ("", "a recipe: toolkit train sft, pretrain (pt), dpo, kto or reward (rm)."): "stage",
    ("", "of full: toolkit train sft or another recipe; of lora: toolkit train lora; with 4-bit weights load_in_4bit: true."): (
        "finetuning_type"
    ),
    ("lora_target_modules", "all-linear for all."): "lora_target",
    ("dataset", "a path."): "dataset_dir",
    ("rename_columns", "see docs/how-to/your-data.md."): "dataset_info",
    ("eval_split", "or train.* and validation.* in one folder as dataset."): "eval_dataset",
    ("chat_template", "a Jinja file; without it the model's own template is taken."): "template",
    ("", "put it into the rows, as a system message."): "default_system",
    ("", "a column chat_template_kwargs in the rows."): "enable_thinking",
    ("dataset", "a mixture, as a:0.7,b:0.3."): "mix_strategy interleave_probs",
    ("", "toolkit report RUN."): "plot_loss",
    ("", "toolkit find-learning-rate RECIPE, with the recipe's flags."): "find_learning_rate auto_lr_find lr_find",
    ("", "give each chat as prompt and completion: the completion alone is learned."): "mask_history",
    ("packing", "documents in a row never see each other."): "neat_packing",
    ("loss_type loss_weights", "as [sigmoid, sft] and [1.0, PREF_FTX]."): "pref_ftx",
    ("reference", "the reference is the model as it was when training began."): "ref_model",
    ("load_in_4bit", "4 bits alone; toolkit train lora."): "quantization_bit",
    ("load_in_4bit", "bitsandbytes alone; toolkit train lora."): "quantization_method",
    ("", "that of the model's config.json."): "rope_scaling",
    ("optim", "muon."): "use_muon",
    ("gradient_checkpointing", "false is its default."): "disable_gradient_checkpointing",
    ("", "leave it out: the loss is computed in float32."): "upcast_lmhead_output",
    ("dtype", "bfloat16."): "pure_bf16",
    ("", "a model's directory whose embedding has the size."): "resize_vocab",
    ("report_to", "wandb, tensorboard, trackio or mlflow."): "use_swanlab",
    ("", "leave it out: eval_token_accuracy is always logged."): "compute_accuracy",
    ("", "leave it out: tokens_per_second is always logged."): "include_effective_tokens_per_second",
}

COUNTERPARTS = {
    key: (tuple(settings.split()), note)
    for (settings, note), keys in [*(((settings, ""), keys) for settings, keys in _SAME.items()), *_NOTED.items()]
    for key in keys.split()
}


def counterpart(key: str, names: frozenset[str]) -> tuple[list[str], str] | None:
    """The settings among `names` that mean a key of another trainer, and what else differs; None for a key of nobody's."""
    if key not in COUNTERPARTS:
        return None
    settings, note = COUNTERPARTS[key]
    found = [name for name in settings if name in names]
    if settings and not found:
        note = f"its counterpart, {settings[0]}, is a setting of other recipes (toolkit recipes lists them)."
    return found, note
