"""Keys of transformers' Trainer and TRL that are no settings here, as values that mean what happens anyway, or what to do.

Their YAML files hold many keys that only say a default, also keys of former versions and of the example scripts (run_clm,
run_glue). `SAME` lists the values that mean what every recipe does: such a key is taken and changes nothing. `PASSED_OVER` are
keys on which no result depends: any value is taken, and what happens in its place is logged. `foreign_values.TRANSLATED` turns
keys into settings. Any other value is refused with what to do instead.
"""

from __future__ import annotations

from typing import Any

# The name, the values that mean what happens here anyway (a null always does), and what to do about any other value.
SAME: dict[str, tuple[tuple[Any, ...], str]] = {
    # Precision and speed
    "neftune_noise_alpha": ((0,), "leave it out, or add the noise in a copy of the recipe (toolkit copy sft)."),
    "optim_args": (("",), "leave it out: adam_beta1, adam_beta2, adam_epsilon and momentum are settings."),
    "optim_target_modules": ((), "leave it out, or take lr_patterns, factors on the rate by parameter name."),
    "average_tokens_across_devices": ((True,), "leave it out: a mean is always over the tokens of all devices."),
    "router_aux_loss_coef": ((0,), "leave it out: the loss of a router is not added here."),
    # Data
    "dataset_kwargs": (({}, {"skip_prepare_dataset": False}), "leave it out: rows of input_ids are taken as they are."),
    "shuffle_dataset": ((True, False), "leave it out: each epoch has an order of its own, drawn from the seed."),
    "eos_token": ((), "leave it out: a turn ends as the chat template ends it, which generation knows too, and a text "
                      "with its tokenizer's end. For another, tokenizer: a directory whose tokenizer_config.json says it."),
    "dataloader_drop_last": ((False,), "leave it out: every example is trained on, those of a short last batch too."),
    "test_split_size": ((), "take eval_fraction, the share of the training rows that is held out."),
    # Evaluation, devices
    "fsdp_config": (({},), "leave it out, and give toolkit train --accelerate-config FILE (see toolkit copy fsdp2)."),
    "parallelism_config": ((), "leave it out: tensor and context parallelism are not supported."),
    "activation_checkpointing": ((False,), "take gradient_checkpointing."),
    "accelerate_config": ((), "leave it out, and give it to the launcher: toolkit train RECIPE --accelerate-config FILE."),
    "num_processes": ((), "leave it out, and give it to the launcher: toolkit train RECIPE --processes NUMBER."),
    # Model and adapter
    "lora_target_parameters": (([],), "leave it out: modules alone are adapted, see lora_target_modules."),
    "load_in_8bit": ((False,), "take load_in_4bit."),
    # Preferences
    "label_smoothing_factor": ((0, 0.0), "it is for the labels of tokens and classes; of pairs, label_smoothing."),
    "ignore_bias_buffers": ((False,), "leave it out."),
    "use_weighting": ((False,), "leave it out: WPO is not among the losses."),
    "reference_free": ((False,), "take loss_type simpo, cpo, orpo or sft, which have no reference."),
    "max_prompt_length": ((), "leave it out: a prompt loses its beginning where a pair is longer than max_length."),
    "max_completion_length": ((), "leave it out: both answers are cut at one place where a pair is longer than max_length."),
    "label_pad_token_id": ((-100,), "leave it out."),
    "is_encoder_decoder": ((False,), "leave it out: models that only decode are trained."),
    "force_use_ref_model": ((False,), "take reference: model."),
    "ref_model_name_or_path": ((), "leave it out: the reference is the model as it was when training began."),
    # Of former versions and of the example scripts
    "torchdynamo": ((), "take torch_compile."),
    "sharded_ddp": (("", []), "take zero_stage or fsdp."),
    "model_parallel": ((False,), "take zero_stage or fsdp."),
    "push_to_hub_organization": ((), "write hub_model_id: ORGANIZATION/NAME."),
    "mlm": ((False,), "leave it out: language models here predict the next token."),
    "config_overrides": ((), "leave it out: hidden_size, num_hidden_layers and others shape a built-in model."),
    "model_type": ((), "leave it out: the recipe says it. For one from scratch take a built-in shape as model: tiny-llama."),
    "data_dir": ((), "write the folder as dataset."),
    "source_prefix": (("",), "put it into the prompts."),
    "rpo_alpha": ((), "write loss_type: [sigmoid, sft] and loss_weights: [1.0, RPO_ALPHA]."),
    "tools": (([],), "give each row its tools, in a column of that name."),
    "ref_model_init_kwargs": (({},), "leave it out: the reference is the model as it was when training began."),
    "model_adapter_name": (("default",), "leave it out: there is one adapter."),
    "ref_adapter_name": (("reference",), "leave it out: the reference is the model without its adapter."),
}  # fmt: skip

_DEVICE = "the device is found by itself; use_cpu stays on the CPU."

# The name, the values that mean just that, and what happens whatever its value.
PASSED_OVER: dict[str, tuple[tuple[Any, ...], str]] = {
    # Speed and memory
    "use_liger_kernel": ((False,), "the head works at supervised tokens only; torch_compile fuses layers."),
    "liger_kernel_config": ((), "the head works at supervised tokens only; torch_compile fuses layers."),
    "activation_offloading": ((False,), "activations stay on the device; gradient_checkpointing saves more."),
    "bf16_full_eval": ((False,), "evaluation computes as training does."),
    "fp16_full_eval": ((False,), "evaluation computes as training does."),
    "torch_compile_mode": (("default",), "layers are compiled in the default mode."),
    "torch_empty_cache_steps": ((), "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment."),
    "use_cache": ((True, False), "training keeps no cache, generation does."),
    "pad_to_multiple_of": (("auto",), "batches are padded to their longest example; packing has no padding."),
    "pad_token": ((), "padding is masked, whatever it is made of."),
    "half_precision_backend": (("auto",), "fp16 and bf16 are torch's autocast."),
    "bnb_4bit_quant_storage": (("uint8",), "4-bit weights are stored as uint8."),
    # Data
    "remove_unused_columns": ((True,), "the model is given only what it was tokenized for."),
    "length_column_name": (("length",), "lengths are counted."),
    "ignore_data_skip": ((False,), "a resumed run continues at the very next example."),
    "label_names": ((["labels"],), "the label column is `label`; see rename_columns."),
    # Logging, evaluation and saving
    "generate_during_eval": ((False,), "num_samples says how many texts are written at each evaluation."),
    "do_train": ((True,), "a recipe trains. To evaluate alone: toolkit evaluate MODEL."),  # false is the default there
    "do_predict": ((False,), "run toolkit evaluate MODEL --split test afterwards."),
    "accelerator_config": (({},), "batches are cut the same way on any number of devices."),
    "lora_task_type": (("CAUSAL_LM",), "the recipe says it."),
    "disable_tqdm": ((True, False), "there is no bar: a line at each logging."),
    "log_on_each_node": ((True, False), "the main process alone prints."),
    "logging_nan_inf_filter": ((True, False), "nonfinite says what happens at such a step."),
    "include_num_input_tokens_seen": (("no", False), "supervised tokens are logged always."),
    "include_tokens_per_second": ((True, False), "tokens_per_second is logged always."),
    "project": (("huggingface",), "in every tracker the project is called toolkit; a run has its run_name."),
    "trackio_space_id": ((), "trackio writes on this machine."),
    "trackio_bucket_id": ((), "trackio writes on this machine."),
    "trackio_static_space_id": ((), "trackio writes on this machine."),
    **dict.fromkeys(("prediction_loss_only", "eval_use_gather_object", "batch_eval_metrics"),
                    ((False,), "evaluation keeps sums, and no predictions.")),
    "eval_do_concat_batches": ((True,), "evaluation keeps sums, and no predictions."),
    "include_for_metrics": (([],), "evaluation keeps sums, and no predictions."),
    "debug": (("", []), "nothing is debugged by a setting."),
    "skip_memory_metrics": ((True,), "memory is not measured."),
    "save_only_model": ((False,), "a checkpoint holds all that a resume needs; save_strategy: no writes the model alone."),
    "save_on_each_node": ((False,), "output_dir is one that all nodes see."),
    "save_safetensors": ((True,), "nothing is saved as a pickle."),
    "enable_jit_checkpoint": ((True, False), "a signal is always answered with a checkpoint."),
    "restore_callback_states_from_checkpoint": ((False, True), "there are no callbacks; what run.keep was given is restored."),
    "hub_always_push": ((False,), "what could not be sent waits on disk for toolkit push."),
    "dataloader_persistent_workers": ((True, False), "workers live as long as the run."),
    "dataloader_in_order": ((True,), "the order is exact."),
    "ddp_timeout": ((1800,), "hang_timeout says after how many seconds of silence a rank counts as hanging."),
    "ddp_find_unused_parameters": ((False,), "parameters without a gradient are frozen in a copy of the recipe."),
    "ddp_broadcast_buffers": ((), "buffers are those of each rank."),
    "ddp_static_graph": ((False,), "the graph may change."),
    "log_level": (("passive",), "messages have no levels."),
    "log_level_replica": (("warning",), "the main process alone prints."),
    "dataloader_pin_memory": ((True,), "memory is pinned where the device is a GPU."),
    "dataloader_prefetch_factor": ((2,), "each worker is two batches ahead."),
    "dataloader_multiprocessing_context": ((), "workers start as they do by default on this system."),
    "eval_accumulation_steps": ((), "evaluation keeps sums, and no predictions."),
    "ddp_bucket_cap_mb": ((25,), "gradients go in buckets of torch's own size."),
    "precompute_ref_batch_size": ((), "the reference is computed in micro-batches of the training's size."),
    # Of former versions and of the example scripts
    # Precision, devices and speed, now found by themselves or gone
    "fp16_opt_level": (("O1",), "Apex is not used: fp16 and bf16 are torch's autocast."),
    "fp16_backend": (("auto",), "fp16 is torch's autocast."),
    "use_mps_device": ((False,), _DEVICE),
    "tpu_num_cores": ((), _DEVICE),
    "tpu_metrics_debug": ((False,), _DEVICE),
    "xpu_backend": ((), _DEVICE),
    "use_ipex": ((False,), _DEVICE),
    "n_gpu": ((), "the launcher says how many processes there are."),
    "jit_mode_eval": ((False,), "evaluation runs the model as it is."),
    "mp_parameters": (("",), "SageMaker's model parallelism is not used: see zero_stage and fsdp."),
    "past_index": ((-1,), "no model keeps its past between steps."),
    "fsdp_min_num_params": ((0,), "fsdp shards layer by layer."),
    "fsdp_transformer_layer_cls_to_wrap": ((), "fsdp shards layer by layer."),
    "dispatch_batches": ((False,), "each rank reads its own part of a batch."),
    "split_batches": ((False,), "batches are cut the same way on any number of devices."),
    "ray_scope": (("last",), "there is no search by Ray."),
    "low_cpu_mem_usage": ((True, False), "weights are read one by one."),
    "use_fast_tokenizer": ((True,), "tokenizers are the fast ones."),
    "gradient_checkpointing_use_reentrant": ((False,), "recomputation is torch's with use_reentrant: false."),
    "use_liger": ((False,), "the head works at supervised tokens only; torch_compile fuses layers."),
    "use_logits_to_keep": ((True,), "the head works at supervised tokens only."),
    "use_num_logits_to_keep": ((True,), "the head works at supervised tokens only."),
    # Data
    "cache_dir": ((), "downloads go where HF_HOME says."),
    "overwrite_cache": ((False,), "what is cached is known by its content, and made again when that changes."),
    "pad_to_max_length": ((False,), "a batch is padded to its longest example."),
    "padding_value": ((), "padding is masked, whatever it is made of."),
    "sortish_sampler": ((False,), "group_by_length puts examples of like length together."),
    "ignore_pad_token_for_loss": ((True,), "padding is never learned."),
    "max_predict_samples": ((), "a recipe trains and evaluates; toolkit evaluate MODEL is for other rows."),
    "test_file": ((), "a recipe trains and evaluates; run toolkit evaluate MODEL --dataset FILE afterwards."),
    "max_test_samples": ((), "a recipe trains and evaluates; toolkit evaluate MODEL is for other rows."),
    "dataset_batch_size": ((1000,), "rows are tokenized in batches of this library's size."),
    "num_of_sequences": ((1024,), "rows are packed over the whole dataset."),
    "chars_per_token": ((3.6,), "rows are packed by their tokens."),
    "sanity_check": ((False,), "max_train_examples takes the first rows alone."),
    "base_model_attribute_name": (("model",), "the model's parts are found by themselves."),
    "predict_with_generate": ((False,), "num_samples says how many texts are written at each evaluation."),
    # Logging
    "logging_dir": ((), "the files of a run, those of TensorBoard too, are in output_dir."),
    "logging_first_step": ((False,), "logging_steps says which steps are logged; 1 logs all."),
    "tracker_project_name": ((), "in every tracker the project is called toolkit; a run has its run_name."),
    "use_legacy_prediction_loop": ((False,), "evaluation keeps sums, and no predictions."),
    "include_inputs_for_metrics": ((False,), "evaluation keeps sums, and no predictions."),
}
