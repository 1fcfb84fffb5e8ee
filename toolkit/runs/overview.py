"""A run in a few lines: what it is, before its first step, and whether it beat its baselines, after its last."""

import os
from collections.abc import Mapping
from typing import Any

from toolkit.config import Settings, settings_of
from toolkit.config.conditions import is_built_in
from toolkit.config.reading import settings_read, values_of
from toolkit.config.rules import left_off
from toolkit.config.setting import free_on_resume, given_settings, show_setting
from toolkit.metrics.baselines import compared_with_baselines, in_words
from toolkit.metrics.direction import greater_is_better
from toolkit.runs.copies import copy_in_words
from toolkit.system.console import as_typed
from toolkit.system.numbers import show_decimals

LARGE = 2e7  # parameters; with fewer a model takes the recipes' rates, as those that `make demo` trains do
HIGH_RATE = 2e-4  # above what is usual for any trained model, adapters included


def what_the_run_is(card: Mapping[str, Any]) -> list[str]:
    """Of a run card: processes, device, precision, parameters, examples a step, steps, optimizer; what is not as it seems."""
    layout, model, recipe = card["layout"], card["model"], card["recipe"]
    processes, parameters, trained = layout["processes"], model["parameters"], model["trainable"]
    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(layout["precision"], model["dtype"])
    half = f"{layout['precision']} over " if kind != model["dtype"] else ""
    by_default = " (float32 with --no-bf16)" if layout["precision"] == "bf16" and _is_chosen_by_device(card["settings"]) else ""
    of_them = "all trained" if trained == parameters else f"{trained:,} trained"
    parts = [layout["micro_batch_size"], layout["gradient_accumulation_steps"], processes]
    unit = "packed row" if card["settings"].get("packing") else "example"
    cut = f"micro-batch {parts[0]} x accumulation {parts[1]} x {_count(processes, 'process')}"
    if parts[0] * parts[1] * parts[2] != layout["global_batch_size"]:
        cut += ", the last ones not full"
    lines = [
        f"{_count(processes, 'process')} on {card['hardware']['device']}, {half}{model['dtype']}{by_default}; "
        f"{parameters:,} parameters, {of_them}; {_count(layout['global_batch_size'], unit)} a step ({cut}), "
        f"{_count(layout['steps'], 'step')}"
        + (f"; {card['optimizer']['class'].rpartition('.')[2]}" if card["optimizer"] else "")
        + (", stochastic rounding" if (card["optimizer"] or {}).get("rounding") else "")
    ]
    lines += _what_is_faster(card) + _rate_of_a_small_model(card)
    if recipe.get("copied_from"):
        lines.append(f"{recipe['file']}: {copy_in_words(recipe)}")
    if _is_one_of_several_asked_for(processes):
        lines.append(
            "WARNING: accelerate launch was called with several processes and started this one alone, as it does with --cpu. "
            f"For two on the CPU: {as_typed('toolkit', 'train', recipe['path'] or 'RECIPE', '--processes', 2)}"
        )
    return lines


def _is_chosen_by_device(settings: Mapping[str, Any]) -> bool:
    """Whether nobody has named the precision: a setting, a file of an engine, the launcher, or the run that is continued."""
    elsewhere = any(settings.get(name) for name in ("deepspeed", "resume", "resume_from"))
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no" or "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ
    named = settings.get("bf16", False) is not None or settings.get("fp8", "none") != "none"
    return not named and not elsewhere and not launched


def _what_is_faster(card: Mapping[str, Any]) -> list[str]:
    """What a long run on a GPU repays."""
    # Compiled layers are launched no faster: 32 texts through BERT base, 110 M, took a quarter longer (benchmarks/RESULTS.md).
    is_long = card["layout"]["steps"] >= 200 and card["model"]["parameters"] >= 3e8
    is_on_gpu = card["hardware"]["device"] not in ("cpu", "mps")
    is_useful = is_on_gpu and is_long and card["settings"].get("torch_compile") is False
    return ["Faster on this device: --torch-compile (takes half a minute)"] if is_useful else []


def _rate_of_a_small_model(card: Mapping[str, Any]) -> list[str]:
    """A warning of a recipe's own rate, which is for its small model with random weights, where a trained model takes it."""
    name, rate = str(card["model"].get("name")), card["settings"].get("learning_rate") or 0.0
    is_own = "learning_rate" not in card.get("given", ()) and (card["optimizer"] or {}).get("from_settings")
    if not is_own or is_built_in(name) or card["model"]["parameters"] < LARGE or rate <= HIGH_RATE:
        return []
    return [
        f"WARNING: --learning-rate {rate:g} is the recipe's default, which is for its small built-in model and far too high "
        "for most trained ones. Rates by method: docs/how-to/good-practice.md"
    ]


def given_and_not_read(config: Settings, names: frozenset[str]) -> str:
    """Those of the named settings that nothing has read and that are not off as it is, as typed; empty where there is none."""
    settings, values, read = settings_of(type(config)), values_of(config), settings_read(config) | left_off(config)
    return " ".join(show_setting(settings[name], values[name]) for name in settings if name in names and name not in read)


def unread_after_a_step(config: Settings) -> str | None:
    """A line about settings that were given, that the weights depend on, and that nothing has read by the end of a step."""
    unread = given_and_not_read(config, given_settings(config) - free_on_resume(type(config)))
    said = f"WARNING: given and not read so far: {unread}. Without effect, unless the recipe reads them later"
    return said if unread else None


def verdict_of(status: str, values: Mapping[str, Any], config: Settings) -> str | None:
    """The last line of a run that came to its end: whether it beat its baselines, and its own first evaluation."""
    if status not in ("finished", "stopped early"):
        return None
    settings, baselines = values_of(config), values.get("baselines") or {}
    metric = str(baselines.get("figure"))
    decides = settings.get("metric_for_best_model") in (metric, metric.removeprefix("eval_"))
    compared = compared_with_baselines(baselines, values, settings.get("greater_is_better") if decides else None)
    parts = [in_words(compared, show_decimals)] if compared else []
    name = "eval_" + str(settings.get("metric_for_best_model", "loss")).removeprefix("eval_")
    first, last = values.get(f"first_{name}"), values.get(name)
    if isinstance(first, float) and isinstance(last, float):
        is_better = last > first if greater_is_better(name, settings.get("greater_is_better")) else last < first
        parts += [] if is_better else [f"{name} is no better than at the first evaluation ({show_decimals(first)})"]
    return f"{status}: {'; '.join(parts)}" if parts else None


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{plural * (number != 1)}"


def _is_one_of_several_asked_for(processes: int) -> bool:
    """Accelerate (1.15) with --cpu, or with use_cpu in its config, sets the address for several processes and starts one."""
    given = os.environ
    return processes == 1 and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= given.keys() and "WORLD_SIZE" not in given
