"""Which settings a resume may change without another result."""



# What changes no weight: where and what is written, shown, evaluated, and who reads the data.
FREE = frozenset({
    "output_dir", "overwrite_output_dir", "logging_steps", "eval_steps", "save_steps", "resume", "resume_from", "allow_change",
    "run_name", "report_to", "logging_strategy", "eval_strategy", "eval_on_start", "eval_delay", "save_strategy",
    "save_total_limit", "save_best_limit", "save_error", "async_save", "stop_deadline", "hang_timeout",
    "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "early_stopping_patience", "num_samples", "sample_max_new_tokens",
    "sample_temperature", "per_device_eval_batch_size", "eval_split", "max_eval_examples", "dataloader_num_workers",
    "preprocessing_num_workers", "metrics", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision",
    "zero_stage", "fsdp", "offload", "deepspeed",  # said as the engine of the layout
    "trust_remote_code", "auto_find_batch_size", "nonfinite", "max_nonfinite_steps", "divergence",
})  # fmt: skip


# What changes no weight either, unless the learning rate follows the evaluations.
OF_EVALUATION = frozenset({
    "eval_steps", "eval_strategy", "eval_delay", "eval_split", "max_eval_examples", "metric_for_best_model",
    "greater_is_better",
})  # fmt: skip
