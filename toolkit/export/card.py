"""The model card: where a model comes from, its metrics, how it was trained and how it is used; made from the run card."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.conditions import is_built_in
from toolkit.export.card_examples import KINDS, Traits, example, kind_of
from toolkit.runs.copies import copy_in_words
from toolkit.system.console import printable

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Settings by which a model was trained. Nothing else of the run card's settings is shown.
SHOWN = (
    "loss_type", "beta", "self_distillation", "distillation_loss", "skew_alpha", "temperature", "cross_entropy_share",
    "teacher_top_k", "on_policy_share", "match_layers", "match_attention", "attention_annealing", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "label_smoothing_factor", "num_train_epochs",
    "max_steps", "max_length", "packing", "bf16", "fp16", "fp8", "dtype", "use_peft", "lora_r", "lora_alpha", "lora_dropout",
    "load_in_4bit", "seed",
)  # fmt: skip
_NAME_LINE = re.compile(r'^name = ".*"', re.MULTILINE)
_NAME_IN_SHELL = re.compile(r"^name=.*", re.MULTILINE)


def model_card(
    run_card: Mapping[str, Any], metrics: Mapping[str, Any], name: str, architecture: str, *, adapter: str | None = None,
    license: str | None = None, traits: Traits | None = None,
) -> str:  # fmt: skip
    """The text of README.md.

    Args:
        run_card: what run.json holds; keys that are missing are left out.
        name: the model's, which the example loads; the title where the run has no name (`run_name`) of its own.
        metrics: those named eval_... are shown, in the text and in the Hub's model-index form.
        architecture: the model's class.
        adapter: None for a whole model; for an adapter where its base is: "elsewhere", or "inside", in the folder `base`.
        license: the base model's, where it is known.
        traits: what is known of the model itself, for the example.
    """
    import yaml

    from toolkit.models.trained import auto_class_named

    settings, of_model, of_data = (run_card.get(part) or {} for part in ("settings", "model", "data"))
    title = " ".join(str(settings.get("run_name") or name).split())
    begun = str(of_model.get("name") or settings.get("model") or "")
    below = of_model.get("base") or {}  # of an adapter that was trained further
    base, dataset = str(below.get("name") or begun), str(of_data.get("dataset") or "")
    traits = traits or Traits()
    auto = auto_class_named(architecture) or "AutoModel"
    kind = kind_of(auto, settings, traits)
    task = KINDS[kind].task
    if auto == "AutoModelForSeq2SeqLM" and settings.get("target_lang"):
        task = ("translation", "Translation")
    library = "sentence-transformers" if kind == "embedding" else "peft" if adapter else "transformers"
    front: dict[str, Any] = {"library_name": library}
    if is_hub_id(base):
        front |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    if license:
        front |= license_fields(license, base if is_hub_id(base) else None)
    if task:
        front["pipeline_tag"] = task[0]
    hub_dataset = re.split(r"[:@]", dataset)[0]
    if is_hub_id(hub_dataset):
        front["datasets"] = [hub_dataset]
    found = {k.removeprefix("eval_"): v for k, v in metrics.items() if k.startswith("eval_") and _is_number(v)}
    if found and task:
        data_named = {"name": shown_path(dataset), "type": hub_dataset if is_hub_id(hub_dataset) else "custom"}
        results = [{"type": metric, "value": value, "name": f"eval_{metric}"} for metric, value in found.items()]
        of_task = {"task": {"type": task[0], "name": task[1]}, "dataset": data_named, "metrics": results}
        front["model-index"] = [{"name": title, "results": [of_task]}]
    data = f"{_code(shown_path(dataset))}{_fingerprint(of_data)}"
    if writers := of_data.get("written_by"):
        data += f", with answers that were written by {', '.join(map(_code, writers))}"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {_plain(title)}",
        _origin(base, of_model, license, adapter, begun if below else None),
        f"## Evaluation\n\nOn rows that were not trained on.\n\n{_table('metric', found)}" if found else "",
        f"## How to use it\n\n{example(kind, auto, name, adapter, settings, traits)}",
        f"## Training\n\nData: {data}.\n\n{_teacher(run_card)}{_table('setting', _settings(run_card))}" if of_data else "",
        f"## Versions\n\n{_table('library', run_card['versions'])}" if run_card.get("versions") else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def with_name(card: str, name: str) -> str:
    """A card whose example loads the model from `name`; the rest of it, which someone may have edited, as it is."""
    card = _NAME_IN_SHELL.sub(lambda _: f"name={shlex.quote(name)}", card, count=1)
    return _NAME_LINE.sub(lambda _: f"name = {json.dumps(name, ensure_ascii=False)}", card, count=1)


def is_hub_id(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name)) and not is_built_in(name) and not os.path.exists(name)


def base_license(name: str, revision: str | None = None, *, ask: bool = False) -> str | None:
    """The license that a model's card states: of a directory or of the local cache, and of the Hub when it may be queried."""
    from huggingface_hub import HfApi, ModelCardData, try_to_load_from_cache

    if is_built_in(name) or not name:
        return None
    with contextlib.suppress(Exception):  # a license that can't be found keeps no model from being written
        card = Path(name) / "README.md" if os.path.isdir(name) else try_to_load_from_cache(name, "README.md", revision=revision)
        if isinstance(card, str | Path) and Path(card).exists():
            return _license_of(_front_matter(Path(card).read_text(encoding="utf-8")))
        if ask and is_hub_id(name):
            stated = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(name, revision=revision, timeout=5.0).card_data
            return _license_of(stated.to_dict() if isinstance(stated, ModelCardData) else {})
    return None


def shown_path(text: str) -> str:
    """A name as it may be shown to others: of a path on this machine its last part."""
    return re.sub(r"(?<![\w.:/-])(?:~[\w.-]*|\.{1,2})?/(?:[^/,:]+/)*([^/,:]+)", r"\1", text)


def shown_model(path: str) -> str:
    """A model's directory as others may see it; of a run's `model` with the run's own directory, by which it is known."""
    run = Path(path).parent
    return f"{run.name}/{Path(path).name}" if os.path.isabs(path) and (run / "run.json").is_file() else shown_path(path)


def _origin(base: str, of_model: Mapping[str, Any], license: str | None, adapter: str | None, begun: str | None) -> str:
    """Where it comes from; `begun` is the adapter that was trained further."""
    what = "An adapter" if adapter else "A model"
    revision = of_model.get("commit") or (of_model.get("base") or of_model).get("revision")
    at = f" at {_code(revision)}" if revision else ""
    stated = f", whose license is {_code(license)}" if license else ""
    if not base:
        return f"{what} trained with the toolkit."
    if is_built_in(base):
        return f"{what} of the built-in shape {_code(base)}, trained from random weights."
    linked = f"[{base}](https://huggingface.co/{base})" if is_hub_id(base) else _code(shown_model(base))
    if begun:
        of_base = "" if adapter == "inside" else f" of {linked}{at}{stated}"
        return f"{what}{of_base}, trained further from {_code(shown_path(begun))}."
    return f"{what} trained from {linked}{at}{stated}."


def _teacher(run_card: Mapping[str, Any]) -> str:
    """The model that it was distilled from, as a paragraph; a directory here as others may see it."""
    reference = run_card.get("reference") or {}
    if reference.get("who") != "teacher":
        return ""
    directories = [name for name in reference if name not in ("who", "setting", "commit", "server_model", "root")]
    named = (run_card.get("settings") or {}).get("teacher")
    name = str(reference.get("server_model") or next(iter(directories), None) or named or "")
    shown = f"[{name}](https://huggingface.co/{name})" if is_hub_id(name) else _code(shown_model(name))
    at = f" at {_code(reference['commit'])}" if reference.get("commit") else ""
    return f"Distilled from {shown}{at}.\n\n"


def _settings(run_card: Mapping[str, Any]) -> dict[str, Any]:
    settings, layout = run_card.get("settings") or {}, run_card.get("layout") or {}
    with_value = {name: settings[name] for name in SHOWN if settings.get(name) not in (None, False, [], (), "none")}
    if "max_steps" in with_value:
        with_value.pop("num_train_epochs", None)  # which that overrides
    divergence = str(with_value.get("distillation_loss", ""))
    for name, of in (("beta", "jsd"), ("skew_alpha", "skewed")):
        if divergence and not divergence.startswith(of):
            with_value.pop(name, None)
    optimizer, recipe = run_card.get("optimizer"), run_card.get("recipe") or {}
    if optimizer and not optimizer.get("from_settings", "optim" in settings):
        with_value.pop("optim", None)
        given = ", ".join(f"{name}={value}" for name, value in optimizer["defaults"].items())
        with_value["optimizer"] = f"{optimizer['class']}({given}), built by the recipe: optim and its settings were not used"
    of_model = run_card.get("model") or {}
    if {"parameters", "trainable"} <= of_model.keys():
        trained, parameters = of_model["trainable"], of_model["parameters"]
        with_value["parameters trained"] = f"all {trained:,}" if trained == parameters else f"{trained:,} of {parameters:,}"
    if recipe.get("lines_changed"):
        with_value["recipe"] = copy_in_words(recipe)
    of_layout = ("global_batch_size", "processes", "engine", "precision", "steps")
    return with_value | {name: layout[name] for name in of_layout if name in layout}


def _fingerprint(of_data: Mapping[str, Any]) -> str:
    said = [f"{name} {_code(of_data[name])}" for name in ("revision", "fingerprint") if of_data.get(name)]
    return f" ({', '.join(said)})" if said else ""


def _table(left: str, rows: Mapping[str, Any]) -> str:
    lines = (f"| {name} | {_shown(value)} |" for name, value in rows.items())
    return "\n".join([f"| {left} | |", "| --- | --- |", *lines])


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return _plain(shown_path(str(value)))


def _code(text: Any) -> str:
    """Text as inline code, whatever it holds (CommonMark, section 6.1): between more backticks than it has in a row."""
    flat = " ".join(printable(str(text)).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    return f"{fence} {flat} {fence}" if "`" in flat else f"`{flat}`"


def _plain(text: str) -> str:
    """Text in one line without what Markdown or HTML would read in it."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(printable(text).split()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")


def _front_matter(text: str) -> dict[str, Any]:
    import yaml

    found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    loaded = yaml.safe_load(found[1]) if found else None
    return loaded if isinstance(loaded, dict) else {}


def _license_of(front: Mapping[str, Any]) -> str | None:
    stated = front.get("license_name") if front.get("license") == "other" else front.get("license")
    return stated if isinstance(stated, str) else None


# https://huggingface.co/docs/hub/repositories-licenses; a newer one becomes `other` with its name, which the Hub takes as well.
_TEXT = """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
    cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
    cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
    creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gemma gfdl gpl gpl-2.0
    gpl-3.0 h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense wtfpl
    zlib
"""
IDENTIFIERS = frozenset(_TEXT.split())


def license_fields(license: str, base: str | None = None) -> dict[str, str]:
    """The fields of a card's front matter for a license; `base` is the repository that states it, for its link."""
    if license in IDENTIFIERS:
        return {"license": license}
    named = {"license": "other", "license_name": re.sub(r"[^a-z0-9.-]+", "-", license.lower()).strip("-") or "unnamed"}
    return named | ({"license_link": f"https://huggingface.co/{base}"} if base else {})
