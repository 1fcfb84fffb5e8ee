"""The files by which sentence-transformers loads an encoder: modules, pooling, normalization, prompts; read and written."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import ModelConfig, Refusal
from toolkit.config.conditions import is_built_in
from toolkit.config.json_and_yaml import parse_json, read_text_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names that every version since 2.0 reads.
_MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
_NEW_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_READ = ("Transformer", "Pooling", "Normalize")
_WRITTEN = (
    "modules.json", "1_Pooling/config.json", "2_Normalize/config.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
)  # fmt: skip
QUERY, DOCUMENT = ("query", "anchor", "search_query"), ("document", "passage", "positive", "search_document")


@dataclass(frozen=True)
class EmbeddingStyle:
    """How a text becomes an embedding: `pooling` (mean, cls or last), and what is put before queries and documents."""

    pooling: str = "mean"
    query_prompt: str = ""
    document_prompt: str = ""


def embedding_style(
    config: ModelConfig, *, pooling: str = "auto", query_prompt: str | None = None, document_prompt: str | None = None
) -> EmbeddingStyle:
    """What was requested, and where nothing was, what is in the files of the model (`config.model`); else a mean, no prompts.

    Raises:
        Refusal: a model with modules that are not read here (a dense layer), or another pooling.
    """
    own = EmbeddingStyle() if is_built_in(config.model) else _style_of_files(config, pooling)
    return EmbeddingStyle(
        own.pooling if pooling == "auto" else pooling,
        own.query_prompt if query_prompt is None else query_prompt,
        own.document_prompt if document_prompt is None else document_prompt,
    )


def sentence_files(model: PreTrainedModel, style: EmbeddingStyle, max_length: int) -> dict[str, str]:
    """What a model directory holds for sentence-transformers next to the model, by path: embeddings of length 1."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    width = model.config.get_text_config().hidden_size
    pooling = {"word_embedding_dimension": width, **{key: mode == style.pooling for mode, key in _MODES.items()}}
    prompts = {"query": style.query_prompt, "document": style.document_prompt}
    contents: tuple[Any, ...] = (
        modules, pooling | {"include_prompt": True}, {}, {"max_seq_length": max_length, "do_lower_case": False},
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )  # fmt: skip
    return {path: json.dumps(content, indent=2) + "\n" for path, content in zip(_WRITTEN, contents, strict=True)}


def read_sentence_files(directory: Path) -> dict[str, str]:
    """Those files of a directory that `sentence_files` wrote; none where it holds no such model."""
    paths = [directory / path for path in _WRITTEN]
    return {path: each.read_text(encoding="utf-8") for path, each in zip(_WRITTEN, paths, strict=True) if each.exists()}


def _style_of_files(config: ModelConfig, pooling: str) -> EmbeddingStyle:
    modules = _read(config, "modules.json")
    if not isinstance(modules, list):
        return EmbeddingStyle()
    kinds = {str(module.get("type")).rpartition(".")[2]: str(module.get("path")) for module in modules}
    unread = [kind for kind in kinds if kind not in _READ]
    if unread:
        raise Refusal(
            f"--model {config.model}: its modules.json has {', '.join(unread)}, which is not trained here: what can be is a "
            "transformer with pooling and normalization. Name another model."
        )
    found = _read(config, f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else None
    pooled = found if isinstance(found, dict) else {}
    modes = [mode for mode, key in _MODES.items() if pooled.get(key)]
    modes += [_NEW_MODES[pooled["pooling_mode"]]] if pooled.get("pooling_mode") in _NEW_MODES else []
    others = [key for key, value in pooled.items() if key.startswith("pooling_mode_") and value and key not in _MODES.values()]
    if pooling == "auto" and (others or len(modes) != 1):
        named = ", ".join(others) or str(pooled.get("pooling_mode"))
        raise Refusal(f"--model {config.model}: its pooling ({named}) is none of mean, cls and last. Take --pooling mean")
    if pooled.get("include_prompt") is False:
        raise Refusal(f"--model {config.model}: leaves its prompt out of the mean (include_prompt), which is not done here.")
    settings = _read(config, "config_sentence_transformers.json")
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    prompts = prompts if isinstance(prompts, dict) else {}
    query, document = (next((str(prompts[name]) for name in names if prompts.get(name)), "") for names in (QUERY, DOCUMENT))
    return EmbeddingStyle(modes[0] if modes else "mean", query, document)


def _read(config: ModelConfig, name: str) -> Any:
    """A JSON file of the model, in its directory or on the Hub; None where it has none."""
    from transformers.utils import cached_file

    directory = Path(os.path.expanduser(config.model))
    if directory.is_dir():
        path = directory / name
        return parse_json(read_text_file(path, str(path)), str(path), is_file=True) if path.exists() else None
    folder, _, file = name.rpartition("/")
    found = cached_file(
        config.model, file, subfolder=folder, revision=config.model_revision, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    return parse_json(Path(found).read_text(encoding="utf-8"), f"{config.model}: {name}", is_file=True) if found else None
