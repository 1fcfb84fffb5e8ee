"""What the Hub says of a model card's front matter: as far as its documents and the client's own reader tell.

https://huggingface.co/docs/hub/model-cards and the messages of its validator; a few of its licenses and tasks.
"""

import math
import re
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import HFValidationError, validate_repo_id

LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "gemma", "llama3.2", "other"}
TASKS = {"text-generation", "text-classification", "token-classification", "fill-mask", "question-answering", "feature-extraction",
         "text-ranking", "multiple-choice", "sentence-similarity", "translation"}  # fmt: skip
RELATIONS = {"finetune", "adapter", "quantized", "merge"}


def problems_of_card(text: str) -> list[str]:
    """Why the Hub would refuse a README.md; a card without front matter is taken, with a warning."""
    found = REGEX_YAML_BLOCK.search(text)
    if found is None:
        return []
    try:
        front = yaml.safe_load(found[2])
    except yaml.YAMLError as error:
        return [f"YAML is invalid: {error}"]
    if not isinstance(front, dict):
        return ["metadata is no mapping"]
    problems = [f'"{name}" must be text' for name in ("license", "library_name", "pipeline_tag") if not isinstance(front.get(name, ""), str)]
    problems += [f'"{name}" must be one of the Hub\'s' for name, known in (("license", LICENSES), ("pipeline_tag", TASKS), ("base_model_relation", RELATIONS))
                 if name in front and front[name] not in known]  # fmt: skip
    if front.get("license") == "other" and not re.fullmatch(r"[a-z0-9.-]+", str(front.get("license_name", "other"))):
        problems.append('"license_name" may have small letters, digits, points and dashes')
    if not re.fullmatch(r"[a-zA-Z0-9._-]+", str(front.get("library_name", "none"))):
        problems.append('"library_name" is not valid')
    for name in ("base_model", "datasets"):
        problems += [f'"{name}" with value "{each}" is not valid' for each in _listed(front.get(name, [])) if not _is_repository(each)]
    if any(not isinstance(tag, str) for tag in _listed(front.get("tags", []))):
        problems.append('"tags" must be texts')
    return problems + _problems_of_results(front)


def _problems_of_results(front: dict[str, Any]) -> list[str]:
    try:
        read = ModelCardData(**front, ignore_metadata_errors=False)
    except (ValueError, KeyError, TypeError) as error:
        return [f'"model-index" is not valid: {error!r}']
    values = [each.metric_value for each in read.eval_results or []]
    return [f"a metric has the value {value!r}" for value in values if not isinstance(value, int | float) or not math.isfinite(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_repository(name: Any) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
