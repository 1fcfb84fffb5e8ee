"""What comes out of a run: a model directory that `from_pretrained` reads."""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.config.reading import settings_read, values_of
from toolkit.config.shown import public_settings
from toolkit.data.tokenize.masks import turn_end_ids
from toolkit.distributed.engines import unwrapped
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.distributed.ranks import on_main
from toolkit.export.card import base_license, model_card, read_json, with_name
from toolkit.models.adapter_files import base_of_adapter, is_adapted, save_adapter
from toolkit.system.console import as_typed, say
from toolkit.system.files import make_folder, put_in_place, remove, written_beside


def save_model(accelerator: Any, model: Any, tokenizer: Any, config: Any, summary: Any = None) -> Path:
    """Write the trained model, its tokenizer and a model card to `output_dir/model` and return that directory.

    A sharded model comes together on the main process, a tensor at a time. It is written beside, read again and checked, and
    then takes its place whole: a reader sees the old model or the new one, or for an instant, between two renames, neither.
    When this returns it is on the disk; until then the old one is.
    Without an accelerator (None) the model is taken as it is.

    Raises:
        BadModel: a tensor that was written is missing, empty, of another shape or not finite; the old model stays.
    """
    directory = Path(config.output_dir) / "model"
    plain = unwrapped(model)
    state = whole_state_dict(accelerator, plain)

    def write() -> None:
        assert state is not None  # on the main process it is there
        write_model(directory, plain, state, tokenizer, config, summary.figures if summary else {})

    if accelerator is None:
        write()
    else:
        on_main(accelerator, write, BadModel)
        if accelerator.is_main_process:
            writes_text = type(plain.get_base_model() if is_adapted(plain) else plain).__name__.endswith("ForCausalLM")
            tried = as_typed("toolkit", "generate", directory.parent)
            say(f"saved: {directory}" + (f"; try it: {tried}" if writes_text else ""))
    return directory


def write_model(
    directory: Path, model: Any, state: dict[str, torch.Tensor], tokenizer: Any, config: Any, figures: Mapping[str, Any]
) -> None:
    """Write a model directory with its card, in the type of weights that the settings name.

    Args:
        model: without wrappers.
        state: all its tensors by name, whole; emptied on the way.
        figures: of its evaluation.
    """
    dtype = getattr(torch, config.dtype if config.dtype != "auto" else str(model.dtype).removeprefix("torch."))
    if model.dtype != dtype:  # ZeRO computes with bfloat16 weights beside those that were trained
        for name, tensor in state.items():
            state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    card = card_of_run(model, config, figures)
    write_model_directory(directory, model, state, tokenizer, card, str(dtype).removeprefix("torch."))


def card_of_run(model: Any, config: Any, figures: Mapping[str, Any]) -> str:
    """The model card of a run: from its run.json where it has one, else from its settings."""
    output_dir, values = Path(config.output_dir), values_of(config)
    run_card = read_json(output_dir / "run.json") or {
        "settings": public_settings(config), "data": {"dataset": values.get("dataset")},
        "model": {"name": values["model"], "base": base_of_adapter(values["model"])},
    }  # fmt: skip
    read = settings_read(config)
    if read and "not_read" not in run_card:  # the run still goes on
        run_card["settings"] = {name: value for name, value in run_card["settings"].items() if name in read}
    adapter = None
    if is_adapted(model):
        adapter = "elsewhere" if model.peft_config["default"].base_model_name_or_path else "inside"
    plain = model.get_base_model() if adapter else model
    # An adapter that was trained further is of the base that it stands on.
    begun = {"name": values["model"], "revision": values.get("model_revision")}
    base = (run_card.get("model") or {}).get("base") or begun
    license = base_license(base["name"], base["revision"], ask=getattr(config, "push_to_hub", False))
    architecture = type(plain).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
    name = output_dir.absolute().name
    # What loads it from where the run was started; an absolute path would name this machine: from its parent folder.
    place = (Path(name if output_dir.is_absolute() else output_dir) / "model").as_posix()
    return with_name(model_card(run_card, figures, name, architecture, adapter=adapter, license=license), place)


def _say_dtype(path: Path, dtype: str) -> None:
    """Of the weights that were written; transformers says that of the live ones."""
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if written.get("dtype", dtype) != dtype:
        path.write_text(json.dumps({**written, "dtype": dtype}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model_directory(
    directory: Path, model: Any, state: dict[str, torch.Tensor], tokenizer: Any, card: str, dtype: str
) -> None:
    """Write a model beside its place, read it again, and put it there whole.

    Args:
        state: all tensors by name, whole; emptied on the way.
        card: the text of README.md.
        dtype: the type of those tensors, for config.json.

    Raises:
        BadModel: as `save_model` says.
    """
    temporary, old = (directory.with_name(f".{directory.name}.{end}") for end in ("tmp", "old"))
    if old.exists() and not directory.exists():  # a kill between the two renames below
        os.rename(old, directory)
    for leftover in (temporary, old):
        remove(leftover)
    make_folder(directory.parent)
    shapes = {name: tensor.shape for name, tensor in state.items()}  # save_pretrained empties the dictionary
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with written_beside(temporary), _ending_turns(model, tokenizer):
        with no_progress_bar():
            if is_adapted(model):
                save_adapter(model, temporary, state)
            else:
                model.save_pretrained(temporary, state_dict=state)
            tokenizer.save_pretrained(temporary)
        _say_dtype(temporary / "config.json", dtype)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        check_model_directory(temporary, shapes, trained)
        put_in_place(temporary, directory, aside=old)


@contextlib.contextmanager
def _ending_turns(model: Any, tokenizer: Any) -> Iterator[None]:
    """A block in which generate knows that a chat ends its turn with a token of its own; samples of a run that goes on are
    made with the model's own ends, as they would be without a save.
    """
    settings = model.generation_config if model.can_generate() else None
    own = settings and settings.eos_token_id
    if settings is not None:
        settings.eos_token_id = turn_end_ids(tokenizer) or own
    try:
        yield
    finally:
        if settings is not None:
            settings.eos_token_id = own


class BadModel(Exception):
    """A model directory that was just written and doesn't hold the model."""

    exit_code = 1


def check_model_directory(directory: Path, shapes: dict[str, torch.Size], trained: Collection[str] = ()) -> None:
    """Read a model directory again, a tensor at a time, and compare it with what was to be written.

    Names may differ, as libraries write some models otherwise than they hold them; of an adapter only itself is written:
    at least what was `trained`.
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
        raise BadModel(f"{directory}: {elements} numbers were written, and the {what} has {wanted}. The old model stays.")


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
