"""A teacher that was trained: found, checked against the student's rows, and loaded; its refusals name --teacher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import DeviceConfig, ModelConfig, Refusal, TeacherConfig
from toolkit.distributed.ranks import say_once
from toolkit.models.compat import commit_of
from toolkit.models.frozen import half_of
from toolkit.models.shapes import positions_of
from toolkit.models.tokenizer import load_tokenizer
from toolkit.models.trained import auto_class_of, find_model, load_trained, published_config
from toolkit.system.digests import digests_of_directories

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.distillation.vocabulary import SharedVocabulary


# What is advised for any model, of which a teacher has no setting.
_NOT_FOR_A_TEACHER = (
    ", or name another with --tokenizer", ". Read that code, then: --trust-remote-code --model-revision COMMIT",
)  # fmt: skip


@dataclass(frozen=True)
class _TeacherModel(ModelConfig, DeviceConfig):
    """What of a model's settings a teacher has."""


@dataclass(frozen=True)
class TrainedTeacher:
    """A teacher's settings, config and tokenizer, without its weights. `digests`: of its files; empty for one of the Hub."""

    settings: ModelConfig
    auto_class: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    digests: dict[str, Any]

    @property
    def made_of(self) -> dict[str, Any]:
        """Commit and digests of its files, for `open_run`."""
        return {"who": "teacher", "setting": "teacher", "commit": commit_of(self.config), **self.digests}

    def computed_in(self, accelerator: Accelerator) -> torch.dtype | None:
        """The half precision of the run, for a teacher in float32 whose type nobody has named; None: its own type."""
        of_files = str(getattr(self.config, "dtype", None) or torch.float32)
        is_float32 = self.settings.dtype == "auto" and of_files.endswith("float32")
        return half_of(accelerator) if is_float32 else None

    def load(self, *, packed: bool = False) -> PreTrainedModel:
        """Its weights, on the CPU."""
        with named_as_teacher():
            return load_trained(self.auto_class, self.settings, torch.device("cpu"), packed=packed)[0]

    def compare_templates(self, flag: str, student: PreTrainedTokenizerBase) -> None:
        """Print where its chat template is another than the student's."""
        if self.tokenizer.chat_template != student.chat_template:
            how = "and reads rows as the student's template writes them"
            say_once(f"{flag}: has another chat template than the student, {how}")

    def describe(self, flag: str, model: PreTrainedModel, shared: SharedVocabulary) -> None:
        """Print how large it is, and where its tokens are others than the student's."""
        size = sum(parameter.numel() for parameter in model.parameters())
        kind = str(next(model.parameters()).dtype).removeprefix("torch.")
        other = ", whose numbers for them are others" if shared.of_teacher is not None else ""
        say_once(f"{flag}: {size:,} parameters in {kind}, {shared.size:,} tokens shared{other}")


def find_teacher(
    teacher: str, wanted: str, what: str, config: TeacherConfig, accelerator: Accelerator, *, max_length: int
) -> TrainedTeacher:
    """The teacher of a name, as `build_teacher` takes it.

    Args:
        wanted, what: transformers' class that it must have been trained as, and what such a teacher does, for the message.

    Raises:
        Refusal: no such model, one of another class, or with too short a context.
    """
    with named_as_teacher():
        own = _TeacherModel(
            model=find_model(teacher), model_revision=config.teacher_revision, dtype=config.teacher_dtype,
            use_cpu=accelerator.device.type == "cpu",
        )  # fmt: skip
        auto_class = auto_class_of(own)
        if auto_class != wanted:
            raise Refusal(f"{teacher}: is a {auto_class.removeprefix('AutoModelFor')} model, and a teacher {what}.")
        published = published_config(own)
        longest = positions_of(published)
        if longest is not None and longest < max_length:
            raise Refusal(
                f"{teacher}: has {longest} positions, and rows are up to {max_length} tokens long. "
                f"Take --max-length {longest}, or another teacher."
            )
        return TrainedTeacher(own, auto_class, published, load_tokenizer(own), digests_of_directories(own.model))


def check_teacher_on_disk(teacher: str) -> None:
    """Refuse a directory that is no model before the data are tokenized, which takes long."""
    with named_as_teacher():
        own = _TeacherModel(model=find_model(teacher))
        if Path(os.path.expanduser(own.model)).is_dir():  # one of the Hub is read once, in the revision of the settings
            published_config(own)


@contextmanager
def named_as_teacher() -> Iterator[None]:
    """Refusals of the functions that load any model, with the settings that name this one."""
    try:
        yield
    except Refusal as refusal:
        message = str(refusal).removeprefix("--tokenizer ")
        for advice in _NOT_FOR_A_TEACHER:
            message = message.replace(advice, "")
        message = message.replace("--model", "--teacher")
        raise Refusal(message if message.startswith("--") else f"--teacher {message}") from refusal
