"""Adapters: low-rank updates trained on top of a frozen model (LoRA, https://arxiv.org/abs/2106.09685), through peft."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from toolkit.config import AdapterConfig, Refusal
from toolkit.distributed.compat import settled_precision
from toolkit.distributed.engines import settled_kind
from toolkit.distributed.ranks import say_once
from toolkit.models.adapter_files import pass_on_inputs, put_adapter
from toolkit.models.adapter_saving import initial_adapter
from toolkit.models.dropout import take_fast_dropout
from toolkit.models.frozen import HALVES, hold_in_half
from toolkit.models.loaded import loaded, note_loaded
from toolkit.models.trained import CLASSES_BY_TASK, auto_class_named

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ALL_LINEAR, TEMPLATE = "all-linear", "template"
# The heads that peft (0.21.2) trains whole for these tasks, whether their weights are new or not.
_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}


def add_adapter(
    model: PreTrainedModel, config: AdapterConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """peft's model: the same with an adapter to train, everything else frozen; the model itself without `use_peft`.

    Between `load_model` and `accelerator.prepare`. Modules whose weights `load_model` had to make up are trained whole and
    saved with the adapter: a new head, an enlarged embedding, the embedding of a built-in shape. The adapter's first weights
    are a function of the seed that `load_model` had. Where that was given an adapter, it is trained further.

    Args:
        tokenizer: needed for `lora_trainable_tokens` alone.

    Raises:
        Refusal: names, patterns or tokens that nothing in the model matches, or a rank that a module cannot have.
    """
    if not config.use_peft:
        return model
    import peft

    known = loaded(model)
    if config.load_in_4bit:  # recomputation, where wanted, load_model has turned on in its own way
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(known.seed + 1)  # not the numbers that the model's own weights were drawn from
        if known.adapter:
            adapted = put_adapter(model, known.adapter, is_trainable=True)
            note_loaded(adapted, known)
        else:
            adapted = peft.get_peft_model(model, _lora_config(model, config, tokenizer, known.revision))
            pass_on_inputs(adapted)
            note_loaded(adapted, known, initial_adapter=initial_adapter(adapted, config.init_lora_weights))
    take_fast_dropout(adapted)
    if settled_kind() != "DEEPSPEED":  # which gathers a weight when the layer that it belongs to is called
        from toolkit.models.adapted_linear import take_fast_updates

        take_fast_updates(adapted)
    settings = adapted.peft_config["default"]
    half, takes_norms = HALVES.get(settled_precision() or "no"), getattr(settings, "use_dora", False)
    if half and not takes_norms and settled_kind() not in ("DEEPSPEED", "FSDP"):
        hold_in_half(adapted, half)
    base = settings.base_model_name_or_path or ""
    if os.path.isdir(base):  # the adapter is read from another working directory than the one it was trained in
        settings.base_model_name_or_path = str(Path(base).resolve())
    trained, total = adapted.get_nb_trainable_parameters()
    say_once(f"trains {trained:,} of {total:,} parameters ({trained / total:.1%})".replace("%", " %"))
    return cast("PreTrainedModel", adapted)


def target_modules(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Full names of the modules that get an update, after --lora-target-modules and --lora-layers-to-transform.

    all-linear means every linear layer but the head and what is trained whole, as in QLoRA
    (https://arxiv.org/abs/2305.14314, section 4). Resolved here because peft (0.21.2) takes names that match nothing next to
    others that do, and no numbers of layers next to all-linear or a regex. A pooler that `load_encoder` has frozen gets none:
    no embedding passes through it, and DDP ends a run in which a parameter never gets a gradient.
    """
    wanted, flag = config.lora_target_modules, "--lora-target-modules"
    adaptable = {
        name: module for name, module in model.named_modules()
        if _can_be_adapted(module) and not (name.startswith("pooler.") and not module.weight.requires_grad)
    }  # fmt: skip
    whole = modules_to_save(model, config)
    if wanted == [ALL_LINEAR]:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        found = [
            name for name, module in adaptable.items()
            if not isinstance(module, nn.Embedding) and module is not head and not _lies_among(name, whole)
        ]  # fmt: skip
        if not found:
            raise Refusal(f"{flag} {ALL_LINEAR}: {type(model).__name__} has no linear layer to adapt. {_there_are(adaptable)}")
    elif len(wanted) == 1 and not re.fullmatch(r"[\w.]+", wanted[0]):
        try:
            found = [name for name in adaptable if re.fullmatch(wanted[0], name)]
        except re.error as error:
            raise Refusal(f"{flag} {wanted[0]!r}: is neither a name nor a regular expression ({error}).") from error
        if not found:
            raise Refusal(f"{flag} {wanted[0]!r} is a regex over full names and matches none. {_there_are(adaptable)}")
    else:
        for entry in wanted:
            if not any(_is_named(name, entry) for name in adaptable):
                raise Refusal(f"{flag} {entry}: the model has no module of that name to adapt.{_nearest(entry, adaptable)}")
        found = [name for name in adaptable if any(_is_named(name, entry) for entry in wanted)]
    tied = [name for name in found if _is_tied(model, adaptable[name])]
    if tied:
        raise Refusal(
            f"{flag}: {tied[0]} shares its weights between embedding and head, so an update would belong to one of them only. "
            f"Train it whole: --lora-modules-to-save {tied[0].rpartition('.')[2]}"
        )
    both = sorted(set(found).intersection(whole))
    if both:
        raise Refusal(f"{flag}: {both[0]} is trained whole already. Leave it out.")
    return _of_layers(found, config.lora_layers_to_transform)


def modules_to_save(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Full names of the modules trained whole: heads, those that the settings name, and those with weights of load_model's."""
    names = [name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None]
    found = list(loaded(model).new_modules)
    scores_choices = type(model).__name__.endswith("ForMultipleChoice")  # for which peft has no name
    heads = _HEADS["SEQ_CLS"] if scores_choices else _HEADS.get(_task_of(model) or "", ())
    found += [name for name in names if name in heads and name not in found]
    for entry in config.lora_modules_to_save:
        matching = [name for name in names if _is_named(name, entry)]
        if not matching:
            raise Refusal(f"--lora-modules-to-save {entry}: the model has no module of that name.{_nearest(entry, names)}")
        found += [name for name in matching if name not in found]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        shared = [name for name in found if getattr(model.get_submodule(name), "weight", None) is embedding]
        if shared:
            raise Refusal(
                f"--use-peft: {shared[0]} would be trained whole, and {type(model).__name__} shares it between encoder and "
                "decoder, which peft (0.21.2) can't keep. That of a built-in shape is random: name a trained model, --model "
                "NAME. Else leave it out of --lora-modules-to-save."
            )
    return found


def _task_of(model: nn.Module) -> str | None:
    """peft's name of the task that a model's class is for."""
    auto_class = auto_class_named(type(model).__name__)
    return next((task for task, each in CLASSES_BY_TASK.items() if each == auto_class), None)


def trainable_tokens(
    model: PreTrainedModel, config: AdapterConfig, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, list[int]]:
    """Ids of the tokens that learn a row of their own, by the full name of the module: the embedding, and a head next to it.

    Empty where the embedding is trained whole, or where there is no chat template to take them from.
    """
    wanted, flag = config.lora_trainable_tokens, "--lora-trainable-tokens"
    if tokenizer is None:
        if set(wanted) - {TEMPLATE}:
            raise TypeError("lora_trainable_tokens need the tokenizer: add_adapter(model, config, tokenizer)")
        return {}
    ids = {number for word in wanted if word == TEMPLATE for number in template_tokens(tokenizer)}
    for token in (word for word in wanted if word != TEMPLATE):
        if token not in tokenizer.get_vocab():
            near = get_close_matches(token, tokenizer.get_added_vocab(), n=3, cutoff=0.4)
            meant = f" Nearest: {', '.join(near)}." if near else ""
            raise Refusal(f"{flag} {token}: the tokenizer has no such token.{meant}")
        ids.add(tokenizer.get_vocab()[token])
    if not ids:
        return {}
    if settled_kind() == "FSDP":  # peft 0.21.2 gives embedding and tied head one parameter, which fully_shard splits twice
        if set(wanted) != {TEMPLATE}:
            raise Refusal(f"{flag} {', '.join(wanted)}: not under FSDP2. Leave it out, or take --zero-stage 3.")
        say_once("single tokens of the embedding are not trained under FSDP2")
        return {}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    whole = modules_to_save(model, config)
    tied = ends[1] is None or ends[1].weight is ends[0].weight
    found = [names[id(end)] for end in (ends[:1] if tied else ends)]
    if set(found).intersection(whole):
        if set(wanted) != {TEMPLATE}:
            raise Refusal(f"{flag} {', '.join(wanted)}: the embedding is trained whole, with all tokens. Leave it out.")
        return {}
    return {name: sorted(ids) for name in found}


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the special tokens that the chat template writes around a question and an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    from jinja2 import TemplateError

    chat = [{"role": role, "content": "x"} for role in ("user", "assistant")]
    try:
        written: Any = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]  # type: ignore[call-overload,index]
    except TemplateError as error:
        say_once(f"the chat template's tokens are not trained: it can't render a question and an answer ({error})")
        return []
    return sorted(set(written).intersection(tokenizer.get_added_vocab().values()))


def _lora_config(
    model: PreTrainedModel, config: AdapterConfig, tokenizer: PreTrainedTokenizerBase | None, revision: str | None
) -> LoraConfig:
    from peft import LoraConfig

    targets, whole = target_modules(model, config), modules_to_save(model, config)
    tokens = trainable_tokens(model, config, tokenizer)
    if tokens and tokenizer:
        written = tokenizer.convert_ids_to_tokens(next(iter(tokens.values())))
        say_once(f"trains the embedding of {', '.join(written)} as well")
    ranks = _by_pattern(config.lora_rank_pattern, "--lora-rank-pattern", targets)
    alphas = _by_pattern(config.lora_alpha_pattern, "--lora-alpha-pattern", targets)
    modules: dict[str, Any] = dict(model.named_modules())
    if config.init_lora_weights not in ("true", "gaussian"):
        _check_ranks(config, targets, modules, ranks)
    init: Any = True if config.init_lora_weights == "true" else config.init_lora_weights
    return LoraConfig(
        r=config.lora_r, lora_alpha=_plain(config.lora_alpha), lora_dropout=config.lora_dropout, target_modules=targets,
        rank_pattern={pattern: int(rank) for pattern, rank in ranks.items()},
        alpha_pattern={pattern: _plain(alpha) for pattern, alpha in alphas.items()},
        modules_to_save=whole or None, use_rslora=config.use_rslora, use_dora=config.use_dora,
        init_lora_weights=init,
        fan_in_fan_out=any(type(modules[name]).__name__ == "Conv1D" for name in targets), task_type=_task_of(model),
        ensure_weight_tying=any(_is_tied(model, modules[name]) for name in whole), revision=revision,
        trainable_token_indices=tokens or None,
    )  # fmt: skip


def _check_ranks(config: AdapterConfig, targets: list[str], modules: dict[str, Any], ranks: dict[str, float]) -> None:
    """A decomposition has no more directions than the smaller side of its matrix; orthogonal halves have an even rank."""
    flag, halves = f"--init-lora-weights {config.init_lora_weights}", config.init_lora_weights == "orthogonal"
    for name in targets:
        if isinstance(modules[name], nn.Embedding):
            raise Refusal(f"{flag} is for the weights of linear layers, and {name} is an embedding: leave it out.")
        rank = next((int(rank) for pattern, rank in ranks.items() if _fits(pattern, name)), config.lora_r)
        if halves and rank % 2:
            raise Refusal(f"{flag}: A and B take half of the rank each, and that of {name} is {rank}. Take an even one.")
        smaller = min(modules[name].weight.shape)
        if rank > smaller and not halves:
            raise Refusal(
                f"{flag}: {name} has {smaller} directions at most, fewer than the rank {rank}. Take --lora-r {smaller}."
            )


def _by_pattern(entries: list[str], flag: str, targets: list[str]) -> dict[str, float]:
    """Numbers by pattern, in the form that peft reads: a pattern fits a full name, or the end of one after a dot."""
    numbers = {}
    for entry in entries:
        pattern, _, number = entry.rpartition("=")
        if not any(_fits(pattern, name) for name in targets):
            raise Refusal(f"{flag} {entry!r}: fits none of the modules that are adapted.{_nearest(pattern, targets)}")
        numbers[pattern] = float(number)
    return numbers


def _fits(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _of_layers(names: list[str], layers: list[int]) -> list[str]:
    if not layers:
        return names
    numbers = {name: int(match[1]) for name in names if (match := re.search(r"\.(\d+)\.", name))}
    missing = sorted(set(layers).difference(numbers.values()))
    if missing:
        there = sorted(set(numbers.values()))
        which = f"their layers are {there[0]} to {there[-1]}" if there else "none of them is in a numbered layer"
        raise Refusal(f"--lora-layers-to-transform {missing[0]}: no adapted module is in that layer; {which}.")
    return [name for name in names if numbers.get(name) in layers]


def _can_be_adapted(module: nn.Module) -> bool:
    # GPT-2's linear layers are transformers' own class, with a transposed weight.
    return isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if embedding is None or head is None or embedding.weight is not head.weight:
        return False
    return module is embedding or module is head


def _is_named(name: str, entry: str) -> bool:
    return name == entry or name.endswith(f".{entry}")


def _lies_among(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _plain(number: float) -> Any:
    """16, not 16.0: readers of adapter_config.json expect whole alphas, though peft computes with any."""
    return int(number) if number == int(number) else number


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({part for name in names if not (part := name.rpartition(".")[2]).isdigit()})


def _nearest(entry: str, names: Iterable[str]) -> str:
    parts = _last_parts(names)
    near = get_close_matches(entry.rpartition(".")[2], parts, n=3, cutoff=0.5) or parts[:8]
    return f" Nearest: {', '.join(near)}." if near else ""


def _there_are(names: Iterable[str]) -> str:
    first = next(iter(names), None)
    return f"There are {', '.join(_last_parts(names))}, such as {first}." if first else "It has none at all."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """peft 0.21.2 reads a property that transformers 5.23 has renamed, and warns that it could not write what we do write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using Rank-Stabilized LoRA with rank_pattern")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield
