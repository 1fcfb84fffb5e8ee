"""Functional training for transformer models on Hugging Face Accelerate.

    import toolkit as tk

Every public name is an attribute of this package and loads the room it stands in when first used, so that the import
itself costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "config": (
        "AdapterConfig", "CausalLMConfig", "ClassificationConfig", "DataConfig", "DevicesConfig", "HubConfig", "ModelConfig",
        "OptimConfig", "OutputConfig", "PairsConfig", "PreferenceConfig", "RankedAnswersConfig", "ReferenceConfig", "Refusal",
        "RewardConfig", "RunConfig", "SampleConfig", "SeedConfig", "Settings", "UnpairedConfig", "setting", "trained_model",
    ),
    "cli.recipe": ("run_recipe",),
    "data.sources.load": ("load_splits",),
    "data.tokenising.tasks": (
        "tokenize_for_classification", "tokenize_for_lm", "tokenize_for_preference", "tokenize_for_sft",
        "tokenize_for_unpaired",
    ),
    "data.packing": ("pack_best_fit", "pack_wrapped"),
    "data.texts": (
        "answer_baselines", "class_baselines", "preference_baselines", "text_baselines", "text_size", "texts_of",
        "unpaired_baselines",
    ),
    "data.order": ("epoch_order", "seed_micro_batch"),
    "data.collate": ("collate_packed", "collate_padded"),
    "data.collate_answers": ("collate_answers",),
    "data.collate_pairs": ("collate_pairs",),
    "data.mismatched": ("mismatch_answers",),
    "data.batch": ("Batch",),
    "data.loaders": ("build_dataloaders",),
    "tokenizer": ("is_built_in", "load_tokenizer", "train_tokenizer"),
    "padding": ("pad_apart_from_end",),
    "models": ("load_model",),
    "adapters": ("add_adapter",),
    "accelerator": ("build_accelerator",),
    "engines.memory_table": ("memory_table", "used_memory", "zero_memory_table"),
    "optim": ("build_optimizer", "build_schedule"),
    "pair_layouts": ("choose_answer_layout", "choose_pair_layout"),
    "kl_estimate": ("estimate_kl",),
    "reference": ("Reference", "build_reference", "sync_reference"),
    "losses.answer_logps": ("answer_logps", "mismatched_logps", "pair_logps"),
    "losses.causal_lm": ("causal_lm_loss", "causal_lm_metrics", "causal_lm_metrics_with_bytes"),
    "losses.classification": ("classification_loss", "classification_task", "multi_label_loss", "regression_loss"),
    "losses.pair_logps": ("PairLogps",),
    "losses.preference": ("needs_reference", "preference_loss", "preference_metrics"),
    "losses.reference_free": ("cpo_loss", "orpo_loss", "sft_loss", "simpo_loss"),
    "losses.reward": ("pair_rewards", "reward_loss", "reward_metrics"),
    "losses.unpaired": ("apo_zero_unpaired_loss", "kto_kl", "kto_loss"),
    "losses.unpaired_preference": ("unpaired_loss", "unpaired_metrics"),
    "losses.with_reference": (
        "aot_loss", "aot_unpaired_loss", "apo_down_loss", "apo_zero_loss", "bco_pair_loss", "desensitised_weights",
        "discopop_loss", "exo_pair_loss", "hinge_loss", "ipo_loss", "nca_pair_loss", "robust_loss", "sigmoid_loss",
        "sigmoid_norm_loss", "sppo_hard_loss",
    ),
    "metrics.classification": ("classification_metrics",),
    "data.tokenising.labels": ("label_names", "label_settings"),
    "step": ("to_device", "train_step"),
    "guard": ("Unstable", "report_nonfinite"),
    "memory": ("fit_micro_batch",),
    "evaluation": ("Metrics", "eval_with_gather"),
    "run": ("Run", "open_run"),
    "summary": ("Summary",),
    "run_card": ("end_run_card", "write_run_card"),
    "output": ("append_line", "check_output_dir", "claimed", "write_summary"),
    "signals": ("Interrupted",),
    "best": ("load_best", "stopped_improving"),
    "checkpoint": ("latest_checkpoint", "load_checkpoint", "prune_checkpoints", "save_checkpoint", "verify_checkpoint"),
    "generation": ("sample_prompts", "sample_texts"),
    "report": ("write_report",),
    "hub.model_directory": ("save_model",),
    "hub.uploads": ("save_to_hub",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"toolkit.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
