"""Models that can't be loaded, or not be trained as wanted: each is refused in one message."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config import ModelConfig, Refusal
from toolkit.models.compat import class_for
from toolkit.system.console import as_typed, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OFFLINE = "give a directory, or begin offline with --model tiny-llama"  # what one who wants to train can do


@contextlib.contextmanager
def explained(config: ModelConfig, auto_class: str = "AutoModel") -> Iterator[None]:
    """Turn what the Hub, a file or transformers raises about a model into one message; their own log stays quiet meanwhile."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except Refusal:
        raise
    except Exception as error:  # whatever can be wrong there; the cause stays attached
        reason = hub_problem(error, config.model, config.model_revision)
        reason = reason or f"it can't be loaded: {broken_file(config.model)}{first_line(error)}"
        if "safetensors" in str(error) and "file named" in str(error):
            directory = Path(os.path.expanduser(config.model))
            if directory.is_dir() and not any(directory.glob("*.bin*")):
                missing = f"weights are missing in it: {first_line(error)} Copy it again, or name another."
                raise Refusal(f"--model {config.model}: {missing}") from error
            code = (
                f'import transformers as t; n = {json.dumps(directory_or_name(config))}; '
                f't.{auto_class}.from_pretrained(n).save_pretrained("converted"); '
                't.AutoTokenizer.from_pretrained(n).save_pretrained("converted")'
            )
            reason = (
                "its weights are not in safetensors, and pickled ones are not read. Convert them, and take --model converted: "
                f"{as_typed('python', '-c', code)}"
            )
        raise Refusal(f"--model {config.model}: {reason}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def model_class_of(auto: Any, auto_class: str, model_config: PretrainedConfig, config: ModelConfig) -> type | None:
    """The class that will be made; None when it is the repository's own code, which is not read yet."""
    if auto_class in (getattr(model_config, "auto_map", None) or {}) and config.trust_remote_code:
        return None
    if auto_class == "AutoModelForCausalLM" and model_config.is_encoder_decoder:  # transformers would take its decoder alone
        raise Refusal(
            f"--model {config.model}: an encoder-decoder (model type {model_config.model_type!r}), which writes a target "
            "and does not continue a text. Train it with recipes/seq2seq.py, or name a causal language model such as "
            "tiny-llama."
        )
    try:
        return class_for(auto, model_config)
    except KeyError:
        if auto_class == "AutoModelForSeq2SeqLM":
            raise Refusal(
                f"--model {config.model}: model type {model_config.model_type!r} is no encoder-decoder. recipes/sft.py trains "
                "causal language models; here name a model such as tiny-t5 or google/flan-t5-base."
            ) from None
        raise Refusal(
            f"--model {config.model}: model type {model_config.model_type!r} has no {auto_class} in transformers. "
            "Name a model made for this task."
        ) from None


def check_direction(model: PreTrainedModel, auto_class: str, config: ModelConfig) -> None:
    """Refuse to train next-token prediction in a model that sees the next token."""
    has_other_senses = any(getattr(model.config, f"{kind}_config", None) is not None for kind in ("vision", "audio"))
    if auto_class == "AutoModelForCausalLM" and not has_other_senses:
        for module in model.modules():
            if getattr(module, "is_causal", None) is False:
                raise Refusal(
                    f"--model {config.model}: {type(model).__name__} is bidirectional: each token sees the one it would have "
                    "to predict. Name a causal language model, such as tiny-llama."
                )


def check_ends(tokenizer: PreTrainedTokenizerBase | None, config: ModelConfig) -> None:
    """Encoder-decoders (T5, BART in transformers 5.23) classify by what the decoder makes of the input's end-of-text token."""
    if tokenizer is not None and tokenizer("a")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise Refusal(
            f"--model {config.model}: an encoder-decoder, which gives a text its class or score at its end-of-text token, and "
            "its tokenizer ends no text with one. Name an encoder, such as tiny-bert."
        )


def directory_or_name(config: ModelConfig) -> str:
    directory = Path(os.path.expanduser(config.model))
    return str(directory) if directory.is_dir() else config.model


def hub_problem(error: BaseException, name: str, revision: str | None) -> str | None:
    """The problem and what to do when the Hub did not give what `name` names; None when it was something else."""
    kinds, link = set(), error
    while link is not None:  # transformers wraps the Hub's errors, which have more
        kinds |= {kind.__name__ for kind in type(link).__mro__}
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    if "GatedRepoError" in kinds:
        return f"access is gated. Accept its terms at https://huggingface.co/{name}, then log in: hf auth login"
    if "RevisionNotFoundError" in kinds:
        return f"the Hub has no revision {revision!r} of it. The revisions are at https://huggingface.co/{name}/commits"
    if "RepositoryNotFoundError" in kinds:
        return "the Hub has no such repository, or it is private. Check the name; for a private one: hf auth login"
    if "HFValidationError" in kinds:
        return "this is neither a directory nor a possible name on the Hub, which is owner/name"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", "TimeoutException"}:
        return (
            "there is no such directory, it is not in the local cache, and the Hub can't be reached. Check the network (and "
            f"that HF_HUB_OFFLINE is not set), {OFFLINE}"
        )
    if "trust_remote_code" in str(error):
        return "it needs code from its repository. Read that code, then: --trust-remote-code --model-revision COMMIT"
    return None


def broken_file(directory: str | Path) -> str:
    """The first file of a directory that is no whole JSON or safetensors, "NAME: ", to begin a message; "" where none is.

    Of safetensors the header is read, and no tensor.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(os.path.expanduser(directory)).glob("*.*")):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text("utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
        except (OSError, ValueError, RecursionError, SafetensorError):
            return f"{file.name}: "
    return ""
