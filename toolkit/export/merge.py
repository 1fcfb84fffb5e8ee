"""An adapter merged into its base: one ordinary model, whose logits are compared before it is kept."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from toolkit.config import Refusal, read_config_file
from toolkit.config.conditions import is_adapter
from toolkit.export.model_directory import no_progress_bar
from toolkit.models.adapter_files import MODEL_CONFIG, base_of, check_adapter, put_adapter, read_adapter_config, read_object
from toolkit.models.load import check_finite
from toolkit.models.quantization import as_trained, keep_gradients
from toolkit.models.shapes import check_config_files
from toolkit.models.trained import CLASSES_BY_TASK, class_of_adapter, settings_of_the_task
from toolkit.system.console import first_line

if TYPE_CHECKING:
    from torch import nn
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

# How far a logit may be from the adapted model's, as a share of the largest, by the type that the weights are written in:
# the order of sums in float32; in the others a rounding of each weight, 2^-11 and 2^-8, through all layers.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROWS, TOKENS = 4, 128


class Merged(NamedTuple):
    """A model without an adapter, its tokenizer, and how far its logits are from the adapted one's (a share of the largest)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    base: str
    difference: float
    dtype: torch.dtype


class NotTheSame(Exception):
    """The merged model computes something else than the adapted one."""

    exit_code = 1


def merge_adapter(adapter: Path, dataset: str | None = None) -> Merged:
    """Load an adapter's base and put the adapter's updates into its weights.

    Everything is computed in float32 and rounded to the type of the published weights at the end. An adapter that was trained
    on weights in 4 bits is put on what these mean, which is the model that it learned to complete. Compared are the
    logits on the first rows of a dataset: of `dataset`, else of the one that config.yaml next to the adapter's directory names,
    else of an embedded text.

    Raises:
        Refusal: no adapter, or its base is not to be had, or is quantized itself.
        NotTheSame: the logits differ by more than TOLERANCES.
    """
    if not is_adapter(str(adapter)):
        raise Refusal(f"{adapter}: is no adapter; its directory holds no adapter_config.json, or a whole model.")
    with _quiet():
        return _merge(adapter, dataset)


def _merge(adapter: Path, dataset: str | None) -> Merged:
    from transformers import AutoTokenizer, BatchEncoding

    base, revision = base_of(adapter)
    check_adapter(adapter)
    if Path(base).is_dir():
        check_config_files(Path(base), f"{adapter}: its base {base}")
    with _explained(adapter, f"neither it nor its base {base} has a tokenizer that can be loaded"):
        own = (adapter / "tokenizer_config.json").exists()  # not in every adapter from elsewhere
        tokenizer = AutoTokenizer.from_pretrained(adapter) if own else AutoTokenizer.from_pretrained(base, revision=revision)
    rows = [
        tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt") for text in _texts(adapter, dataset, tokenizer)
    ]
    if class_of_adapter(read_adapter_config(adapter)) == "AutoModelForMultipleChoice":  # each text is a question's one choice
        rows = [BatchEncoding({name: values[None] for name, values in row.items()}) for row in rows]
    model, dtype = _load_base(adapter, base, revision)
    if len(tokenizer) > cast("nn.Embedding", model.get_input_embeddings()).num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    with _explained(adapter, "can't be put on its base"):
        adapted = put_adapter(model, adapter).eval()
        expected = _logits(adapted, rows)
        if getattr(model, "is_quantized", False):
            adapted = put_adapter(adapted.unload().dequantize(torch.float32), adapter).eval()
    merged = adapted.merge_and_unload().to(dtype)
    difference = max(
        float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())
        for found, wanted in zip(_logits(merged, rows), expected, strict=True)
    )
    if not difference <= TOLERANCES[dtype]:  # NaN too is not the same
        raise NotTheSame(
            f"{adapter}: the merged model's logits are {difference:.1e} of the largest away from the adapted one's; at most "
            f"{TOLERANCES[dtype]:.0e} is allowed for {str(dtype).removeprefix('torch.')}. Nothing was written."
        )
    return Merged(merged, tokenizer, base, difference, dtype)


def _load_base(adapter: Path, base: str, revision: str | None) -> tuple[PreTrainedModel, torch.dtype]:
    """The base in float32, or in the 4 bits that the adapter was trained on, and the type in which it was published."""
    import transformers

    written = read_adapter_config(adapter)
    auto_class = class_of_adapter(written)
    with _explained(adapter, f"its base {base} can't be loaded"):
        settings = transformers.AutoConfig.from_pretrained(base, revision=revision)
        published = settings.dtype
        if getattr(settings, "quantization_config", None) is not None:
            raise Refusal(
                f"{adapter}: its base {base} is quantized, and nothing can be merged into rounded weights. Write the name "
                "of the model that it was made from into base_model_name_or_path of adapter_config.json."
            )
        if auto_class is None:
            known = ", ".join(CLASSES_BY_TASK)
            raise Refusal(f"{adapter}: task_type {written.get('task_type')} of adapter_config.json is none of {known}.")
        for name, value in settings_of_the_task(adapter).items():
            setattr(settings, name, value)
        auto, rounding = getattr(transformers, auto_class), _rounding(adapter)
        model = auto.from_pretrained(
            base, config=settings, revision=revision, dtype=torch.float32, use_safetensors=True, **rounding
        )
        keep_gradients(model)
    check_finite(model, f"{adapter}: its base {base}")
    return model, published if published in TOLERANCES else torch.float32


def _rounding(adapter: Path) -> dict[str, Any]:
    """How the base's weights were rounded while the adapter was trained, for `from_pretrained`; nothing where they were not."""
    path = adapter / MODEL_CONFIG
    settings = read_object(path).get("quantization_config") if path.exists() else None
    return as_trained(settings) if settings and settings.get("load_in_4bit") else {}


def _texts(adapter: Path, dataset: str | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    from toolkit.data.sources.load import load_splits

    settings = adapter.resolve().parent / "config.yaml"
    if dataset is None and settings.exists():
        dataset = read_config_file(settings).get("dataset")
    split = next(iter(load_splits(dataset or "stdlib:pretrain").values()))
    return [_text(row, tokenizer) for row, _ in zip(split, range(ROWS), strict=False)]


def _text(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    parts = [row.get(name) for name in ("messages", "prompt", "chosen", "completion")]
    chat = [message for part in parts if isinstance(part, list) for message in part if isinstance(message, dict)]
    if chat and tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    return "\n".join(str(value) for name, value in row.items() if name != "origin" and value)


@torch.no_grad()
def _logits(model: nn.Module, rows: list[BatchEncoding]) -> list[torch.Tensor]:
    """What the model computes for each row: logits, those of both ends of a span, or the states of a model without a head."""
    decoded = {"decoder_input_ids": "input_ids"} if cast(Any, model).config.is_encoder_decoder else {}
    read = {"input_ids": "input_ids", "attention_mask": "attention_mask", **decoded}
    outputs = [model.eval()(**{name: row[column] for name, column in read.items()}) for row in rows]
    heads = (("start_logits", "end_logits"), ("logits",), ("last_hidden_state",))
    named = [next(names for names in heads if names[0] in output) for output in outputs]
    return [torch.stack([output[name] for name in names]) for names, output in zip(named, outputs, strict=True)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without bars, DeepSpeed's word that there is no GPU, and peft 0.21.2's of a property that transformers has renamed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # a merge is computed there
    with no_progress_bar(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield


@contextlib.contextmanager
def _explained(adapter: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Refusal:
        raise
    except Exception as error:  # whatever a file, the Hub or peft can raise; the cause stays attached
        raise Refusal(f"{adapter}: {what}: {first_line(error)}") from error
