"""The teacher of a distillation, checked against the student: a second model in memory, or its stored log-probabilities."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from toolkit.config import DistillationConfig, ModelConfig, Refusal
from toolkit.config.conditions import is_built_in, is_on_a_server
from toolkit.data.loading.batch import MicroBatch, model_inputs, precise
from toolkit.data.loading.loaders import EvalLoader, TrainLoader
from toolkit.data.loading.streams import StreamLoader
from toolkit.distillation.fill_store import ask_stored, store_teacher
from toolkit.distillation.on_policy import check_prompts
from toolkit.distillation.own_teacher import Average, ask_without_adapter
from toolkit.distillation.server_teacher import connect_teacher
from toolkit.distillation.trained_teacher import check_teacher_on_disk, find_teacher, named_as_teacher
from toolkit.distillation.vocabulary import SharedVocabulary, shared_vocabulary
from toolkit.distributed.engines import engine_of, unwrapped
from toolkit.distributed.ranks import say_once
from toolkit.losses.causal_lm import supervised
from toolkit.losses.chunked import Logits
from toolkit.losses.distillation import Body, TeacherFn
from toolkit.losses.divergences import TeacherLogps
from toolkit.losses.selective_head import at_positions
from toolkit.models.adapter_files import is_adapted
from toolkit.models.frozen import half_of, place_frozen
from toolkit.models.tokenizer import load_tokenizer
from toolkit.models.trained import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from toolkit.training.run import Run

AnyTrain = TypeVar("AnyTrain", bound=TrainLoader | StreamLoader)


@dataclass(frozen=True)
class Teacher:
    """`teacher(micro_batch, temperature, body)`, as `distillation_loss` calls it, without a gradient.

    `made_of`: commit and digests of the files that it is made of, for `open_run`; None of one that the student itself is.
    `average`: the weights of the one that follows the student.
    """

    ask: TeacherFn
    made_of: dict[str, Any] | None
    average: Average | None = None

    def __call__(self, micro_batch: MicroBatch, temperature: float, body: Body) -> torch.Tensor:
        return self.ask(micro_batch, temperature, body)


def load_student_tokenizer(config: ModelConfig, teacher: str | None) -> PreTrainedTokenizerFast:
    """The student's tokenizer: that of the settings, and of a student that is made from scratch the teacher's.

    A server hands out no tokenizer.

    Raises:
        Refusal: the directory of the teacher has no model.
    """
    if teacher is None or is_on_a_server(teacher):
        return load_tokenizer(config)
    if config.tokenizer is not None or not is_built_in(config.model):
        check_teacher_on_disk(teacher)
        return load_tokenizer(config)
    if config.vocab_size is not None:
        raise Refusal(f"--vocab-size {config.vocab_size} has no effect: the student has the teacher's tokens. Remove it.")
    with named_as_teacher():
        return load_tokenizer(dataclasses.replace(config, tokenizer=find_model(teacher)))


def build_teacher(
    accelerator: Accelerator, student: nn.Module, tokenizer: PreTrainedTokenizerBase, config: DistillationConfig,
    train: AnyTrain, evaluation: EvalLoader | None, *, teacher: str | None, max_length: int, packed: bool,
) -> tuple[Teacher, AnyTrain, EvalLoader | None]:  # fmt: skip
    """The teacher, frozen, in evaluation mode, sharded where the engine shards weights; and the loaders to train it with.

    It computes in its own type. With `config.teacher_top_k` it is queried once for all examples that the run will see, and the
    micro-batches of the loaders that are returned hold its answers; where an earlier run has left them it is not loaded at all.

    Args:
        student: the model that learns, with its adapter; prepared or not.
        tokenizer: the student's. A teacher that has the same tokens under other numbers is queried in its own.
        teacher: its directory, that of the run that trained it, or its name on the Hub; of an adapter its base is found. The
            address of a server, with `config.teacher_top_k`, which is queried in each step where the student writes answers of
            its own, else beforehand too. None with `config.self_distillation`, where it is made of the
            student.
        max_length, packed: of the rows, as the student sees them.

    Raises:
        Refusal: no such model, not a causal language model, too short a context, another vocabulary; no room to store it.
    """
    if config.on_policy_share:
        check_prompts(train)
    if teacher is None:
        return _own_teacher(accelerator, student, tokenizer, config), train, evaluation
    if is_on_a_server(teacher):
        return _on_a_server(accelerator, student, tokenizer, config, train, evaluation, teacher, max_length)
    found = find_teacher(
        teacher, "AutoModelForCausalLM", "predicts next tokens", config, accelerator, max_length=max_length
    )
    sizes = _num_logits(found.config), _num_logits(unwrapped(student).config)
    shared = shared_vocabulary(found.tokenizer, tokenizer, *sizes, teacher)
    found.compare_templates(f"--teacher {teacher}", tokenizer)  # also where an earlier run has queried it
    made_of = found.made_of

    half = found.computed_in(accelerator)

    def load() -> TeacherFn:
        model = found.load(packed=packed)
        found.describe(f"--teacher {teacher}", model, shared)
        held_in = half if config.teacher_top_k is None else None  # queried once, it is not worth a second copy
        return ask_model(place_frozen(accelerator, model, held_in), shared, half)

    if config.teacher_top_k is None:
        return Teacher(load(), made_of), train, evaluation
    if config.teacher_top_k > shared.size:
        raise Refusal(f"--teacher-top-k {config.teacher_top_k}: teacher and student share {shared.size:,} tokens.")
    numbers_depend_on = {
        "files": list(found.digests.values()), "name": None if found.digests else found.settings.model,
        "commit": made_of["commit"], "dtype": config.teacher_dtype, **({"autocast": str(half)} if half else {}),
        "order": None if shared.of_teacher is None else shared.of_teacher.tolist(),
    }  # fmt: skip
    train, evaluation = _stored(accelerator, load, numbers_depend_on, train, evaluation, config, shared.size)
    return Teacher(ask_stored(shared.size), made_of), train, evaluation


def _on_a_server(
    accelerator: Accelerator, student: nn.Module, tokenizer: PreTrainedTokenizerBase, config: DistillationConfig,
    train: AnyTrain, evaluation: EvalLoader | None, url: str, max_length: int,
) -> tuple[Teacher, AnyTrain, EvalLoader | None]:  # fmt: skip
    assert config.teacher_top_k is not None  # refused with the settings
    size = _num_logits(unwrapped(student).config)
    ask, known_by = connect_teacher(
        accelerator, url, tokenizer, top_k=config.teacher_top_k, vocabulary=size, max_length=max_length
    )
    made_of = {"who": "teacher", "setting": "teacher", **known_by}
    if config.on_policy_share:  # the teacher is queried about what the student writes in each step, and so is the rest
        return Teacher(ask, made_of), train, evaluation
    train, evaluation = _stored(accelerator, lambda: ask, known_by, train, evaluation, config, size)
    return Teacher(ask_stored(size), made_of), train, evaluation


def _stored(
    accelerator: Accelerator, load: Callable[[], TeacherFn], numbers_depend_on: Mapping[str, Any], train: AnyTrain,
    evaluation: EvalLoader | None, config: DistillationConfig, vocabulary: int,
) -> tuple[AnyTrain, EvalLoader | None]:  # fmt: skip
    if not isinstance(train, TrainLoader):
        raise Refusal("--teacher-top-k: a teacher can't be queried beforehand for a stream. Remove it, or --streaming.")
    assert config.teacher_top_k is not None
    taught, evaluation = store_teacher(
        accelerator, load, numbers_depend_on, train, evaluation, top_k=config.teacher_top_k, vocabulary=vocabulary,
        temperature=config.temperature,
    )  # fmt: skip
    return cast(AnyTrain, taught), evaluation


def keep_teacher(run: Run, teacher: Teacher) -> None:
    """Put a teacher that follows the student into every checkpoint; after a resume, take it from there. Called once."""
    if teacher.average is not None:
        if "teacher" in run.kept:
            teacher.average.put_back(run.kept["teacher"])
        run.keep("teacher", teacher.average.means)
        run.saver.on_rollback.append(teacher.average.into_model)


def update_teacher(teacher: Teacher, student: nn.Module) -> None:
    """Let a teacher that follows the student take a step; any other stays. Between the student's step and `run.log`."""
    if teacher.average is not None:
        teacher.average.follow(student)


def _own_teacher(
    accelerator: Accelerator, student: nn.Module, tokenizer: PreTrainedTokenizerBase, config: DistillationConfig
) -> Teacher:
    flag, size = f"--self-distillation {config.self_distillation}", _num_logits(unwrapped(student).config)
    if engine_of(accelerator).shards_weights(accelerator):
        raise Refusal(f"{flag}: needs whole models on each device, and here they are sharded. Take --zero-stage 2, or DDP.")
    shared = shared_vocabulary(tokenizer, tokenizer, size, size, "itself")
    if config.self_distillation == "ema":
        average = Average(student, config.ema_decay)
        own = sum(mean.numel() for mean in average.means.values())
        say_once(f"{flag}: the teacher is the average of the {own:,} trained parameters")
        return Teacher(ask_model(average.model, shared, half_of(accelerator)), None, average)
    if not is_adapted(unwrapped(student)):
        raise Refusal(f"{flag}: the student has no adapter to turn off. Add --use-peft.")
    say_once(f"{flag}: the teacher is the model with its adapter off")
    return Teacher(ask_without_adapter(student, shared.size), None)


def ask_model(model: nn.Module, shared: SharedVocabulary, half: torch.dtype | None = None) -> TeacherFn:
    """A teacher in memory: its hidden states at supervised positions, and its logits for a chunk of them at a time.

    It computes in its own type, or with autocast to `half`, whatever the student is called with.
    """

    def ask(micro_batch: MicroBatch, temperature: float, body: Body) -> torch.Tensor:
        positions, _ = supervised(micro_batch)
        inputs = model_inputs(micro_batch)
        inputs["input_ids"] = shared.inputs(inputs["input_ids"])
        kind, found = inputs["input_ids"].device.type, []
        with_gradient, dtype = torch.is_grad_enabled(), torch.get_autocast_dtype(kind)
        autocast = torch.is_autocast_enabled(kind)
        of_teachers = partial(torch.autocast, kind, dtype=half, enabled=half is not None)

        def compute(logits_of: Logits, _: Sequence[nn.Parameter], rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
            def of_teacher(piece: slice) -> TeacherLogps:
                with torch.no_grad(), of_teachers():
                    logits = precise(shared.logits(logits_of(rows[piece])))
                    return TeacherLogps((logits if temperature == 1.0 else logits / temperature).log_softmax(-1))

            with torch.set_grad_enabled(with_gradient), torch.autocast(kind, dtype=dtype, enabled=autocast):
                found.append(body(of_teacher, shared.size))
            return rows.new_zeros(1)

        with torch.no_grad(), of_teachers():
            at_positions(model, inputs, positions, compute)
        return found[0]

    return ask


def _num_logits(config: PretrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)
