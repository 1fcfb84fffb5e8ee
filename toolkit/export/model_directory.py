"""The model directory that a run writes, which `from_pretrained` reads: written next to its place, checked, renamed into it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from toolkit.data.tokenize.masks import turn_end_ids
from toolkit.distributed.engines import unwrapped
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.distributed.ranks import on_main
from toolkit.export.card import base_license, model_card, with_name
from toolkit.export.card_examples import Traits
from toolkit.models.adapter_files import base_of_adapter, is_adapted
from toolkit.models.adapter_saving import save_adapter
from toolkit.models.added_heads import is_of_added_head
from toolkit.models.compat import saved_as_they_are
from toolkit.runs.summary import Summary
from toolkit.system.console import as_typed, say
from toolkit.system.files import make_folder, put_in_place, remove, written_next_to
from toolkit.system.json_lines import read_object

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(
    accelerator: Accelerator | None, model: nn.Module, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path,
    summary: Summary | None = None, *, dtype: str = "auto", files: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write the trained model, its tokenizer and a model card to `output_dir/model` and return that directory.

    A sharded model is gathered on the main process, one tensor at a time. The directory is written next to its place, read
    again and checked, and then renamed: a reader sees the old model or the new one, or for an instant, between two renames,
    neither. When this returns it is on the disk.

    Args:
        accelerator: None: the model is taken as it is.
        summary: of the run, for the card; the rest of the card is made from `output_dir/run.json`.
        dtype: the type of the weights, such as "bfloat16"; "auto": the model's.
        files: texts of what else the directory holds, by path in it.

    Raises:
        BadModel: a written tensor is missing, empty, of another shape or not finite; the old model stays.
    """
    directory = Path(output_dir) / "model"
    plain = unwrapped(model)
    state = whole_state_dict(accelerator, plain)

    def write() -> None:
        assert state is not None  # on the main process
        card = card_of_run(plain, tokenizer, output_dir, summary or Summary(), files or ())
        write_model(directory, plain, state, tokenizer, card, dtype, files)

    if accelerator is None:
        write()
    else:
        on_main(accelerator, write, BadModel)
        if accelerator.is_main_process:
            writes_text = type(plain.get_base_model() if is_adapted(plain) else plain).__name__.endswith("ForCausalLM")
            hint = f"; try it: {as_typed('toolkit', 'generate', directory.parent)}" if writes_text else ""
            say(f"Saved {directory}{hint}")
    return directory


def traits_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: Collection[str]) -> Traits:
    """What the card's example depends on, of a model without an adapter; `files` that are written next to it, by path."""
    return Traits(
        model.config.id2label or {}, model.config.problem_type or "", bool(tokenizer.chat_template),
        turn_end_ids(tokenizer) if model.can_generate() else (), "modules.json" in files,
    )  # fmt: skip


def card_of_run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path, summary: Summary,
    files: Collection[str] = (),
) -> str:  # fmt: skip
    """The model card of a run, from its run.json; without one, from the model's own config. `files`: as of `save_model`."""
    output_dir = Path(output_dir)
    adapter = None
    if is_adapted(model):
        adapter = "elsewhere" if model.peft_config["default"].base_model_name_or_path else "inside"
    plain: PreTrainedModel = model.get_base_model() if adapter else model  # type: ignore[operator]
    loaded = plain.config.name_or_path or ""
    run_card = read_object(output_dir / "run.json") or {"model": {"name": loaded, "base": base_of_adapter(loaded)}}
    if summary.settings is not None and "not_read" not in run_card:  # the run is still continuing
        run_card["settings"] = summary.settings
    begun = run_card.get("model") or {}
    base = begun.get("base") or begun  # an adapter that was trained further is of the base of the first one
    push = bool((run_card.get("settings") or {}).get("push_to_hub"))
    license = base_license(str(base.get("name") or ""), base.get("revision"), ask=push)
    architecture = type(plain).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
    name = output_dir.absolute().name
    # Loads from where the run was started; an absolute path would name this machine: from its parent folder.
    place = (Path(name if output_dir.is_absolute() else output_dir) / "model").as_posix()
    traits = traits_of(plain, tokenizer, files)
    card = model_card(run_card, summary.metrics, name, architecture, adapter=adapter, license=license, traits=traits)
    return with_name(card, place)


def write_model(
    directory: Path, model: PreTrainedModel, state: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, card: str,
    dtype: str = "auto", files: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a model directory next to its place, read it again, and rename it into its place.

    Args:
        model: without wrappers; or one of peft.
        state: all its tensors by name, whole; emptied on the way.
        card: the text of README.md.
        dtype, files: as of `save_model`.

    Raises:
        BadModel: as of `save_model`.
    """
    dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    kind = getattr(torch, dtype)
    if model.dtype != kind:  # ZeRO computes with bfloat16 weights next to those that were trained
        for name, tensor in state.items():
            state[name] = tensor.to(kind) if tensor.is_floating_point() else tensor
    temporary, old = (directory.with_name(f".{directory.name}.{end}") for end in ("tmp", "old"))
    if old.exists() and not directory.exists():  # a kill between the two renames below
        os.rename(old, directory)
    for leftover in (temporary, old):
        remove(leftover)
    make_folder(directory.parent)
    for name in [name for name in state if is_of_added_head(name)]:
        del state[name]  # of the training alone
    shapes = {name: tensor.shape for name, tensor in state.items()}  # save_pretrained empties the dictionary
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in state]
    with written_next_to(temporary), _ending_turns(model, tokenizer), saved_as_they_are():
        with no_progress_bar():
            if is_adapted(model):
                save_adapter(cast("PeftModel", model), temporary, state)
            else:
                model.save_pretrained(temporary, state_dict=state)
            tokenizer.save_pretrained(temporary)
        _write_dtype(temporary / "config.json", dtype)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        for path, text in (files or {}).items():
            make_folder((temporary / path).parent)
            (temporary / path).write_text(text, encoding="utf-8")
        check_model_directory(temporary, shapes, trained)
        put_in_place(temporary, directory, aside=old)


def _write_dtype(path: Path, dtype: str) -> None:
    """Of the weights that were written; transformers writes that of the live ones."""
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if written.get("dtype", dtype) != dtype:
        path.write_text(json.dumps({**written, "dtype": dtype}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _ending_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """A block in which the generation config ends a chat turn with its token; a run's samples keep the model's own ends."""
    if not model.can_generate():
        yield
        return
    settings = model.generation_config
    own = settings.eos_token_id
    settings.eos_token_id = turn_end_ids(tokenizer) or own
    try:
        yield
    finally:
        settings.eos_token_id = own


class BadModel(Exception):
    """A model directory that was just written and doesn't hold the model."""

    exit_code = 1


def check_model_directory(directory: Path, shapes: dict[str, torch.Size], trained: Collection[str] = ()) -> None:
    """Read a model directory again, a tensor at a time, and compare it with what was to be written.

    Names may differ: libraries write some models under other names. Of an adapter at least what was `trained` is written.
    """
    from safetensors import safe_open

    elements = 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                written = tensors.get_tensor(name)
                elements += written.numel()
                expected = shapes.get(name)
                if written.numel() == 0 or (expected is not None and written.shape != expected):
                    shape = "" if expected is None else f", not {list(expected)}"
                    raise BadModel(f"{file}: {name} was written with shape {list(written.shape)}{shape}. The old model stays.")
                if written.is_floating_point() and not bool(torch.isfinite(written).all()):
                    raise BadModel(f"{file}: {name} holds numbers that are not finite. The old model stays.")
    of_adapter = (directory / "adapter_config.json").exists()
    wanted = sum(shapes[name].numel() for name in (trained if of_adapter else shapes))
    if elements == 0 or elements < wanted or (elements > wanted and not of_adapter):
        what = "adapter" if of_adapter else "model"
        raise BadModel(f"{directory}: {elements} elements were written, and the {what} has {wanted}. The old model stays.")


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """A block in which transformers shows no bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
