"""The teacher of a classifier: checked against the student's classes, layers and attention, and queried in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.config import ClassifierDistillationConfig, Refusal
from toolkit.data.loading.batch import MicroBatch, model_inputs
from toolkit.distillation.trained_teacher import find_teacher
from toolkit.distillation.vocabulary import SharedVocabulary, shared_vocabulary
from toolkit.distributed.ranks import say_once
from toolkit.losses.matching import AskClassifier, LayerPairs, pair_layers
from toolkit.models.added_heads import add_projections
from toolkit.models.attention.interface import ATTENTION_DROPOUTS
from toolkit.models.frozen import place_frozen
from toolkit.system.console import first_of
from toolkit.system.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PLACES = "LABEL_"  # what transformers calls classes that nobody has named


@dataclass(frozen=True)
class ClassifierTeacher:
    """`ask(micro_batch)`: its output, without a gradient, its logits in the order of the student's classes.

    `pairs`: which layers are compared; `made_of`: commit and digests of its files, for `open_run`.
    """

    ask: AskClassifier
    pairs: LayerPairs
    made_of: dict[str, Any]


def build_classifier_teacher(
    accelerator: Accelerator, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    config: ClassifierDistillationConfig, *, teacher: str, max_length: int, seed: int,
) -> ClassifierTeacher:  # fmt: skip
    """The teacher, frozen, in evaluation mode, sharded where the engine shards weights; and the student made ready for it.

    With `config.match_layers` the student gets projections (`add_projections`), so this comes before the optimizer is made;
    with `config.match_attention` both get attention that returns its probabilities.

    Args:
        student: a classifier that is not prepared yet.
        tokenizer: the student's. A teacher that has the same tokens under other numbers is queried in its own.
        teacher: its directory, that of the run that trained it, or its name on the Hub.
        max_length: of the rows.
        seed: of the projections' first weights.

    Raises:
        Refusal: no such model, not a classifier, too short a context, another vocabulary or other classes; fewer layers or
            another number of attention heads than matching needs, or no attention probabilities.
    """
    found = find_teacher(
        teacher, "AutoModelForSequenceClassification", "of a classifier is one too", config, accelerator, max_length=max_length
    )
    rows, own_rows = (int(each.get_text_config().vocab_size) for each in (found.config, student.config))
    shared = shared_vocabulary(found.tokenizer, tokenizer, rows, own_rows, teacher)
    order = _order_of_classes(found.config, student.config, teacher)
    model = found.load()
    found.describe(f"--teacher {teacher}", model, shared)
    # a decoder is read at its last token before padding, which is the student's
    pad = int(tokenizer.pad_token_id)
    model.config.pad_token_id = pad if shared.of_teacher is None else int(shared.of_teacher[pad])
    pairs: LayerPairs = []
    if config.match_layers != "none":
        pairs = _match(student, model, config, teacher)
        add_projections(student, {own for own, _ in pairs}, int(model.config.get_text_config().hidden_size), seed)
    asked = {"output_hidden_states": bool(pairs), "output_attentions": config.match_attention}
    half = found.computed_in(accelerator)
    placed = place_frozen(accelerator, model, half)
    return ClassifierTeacher(ask_classifier(placed, shared, order, asked, half), pairs, found.made_of)


def ask_classifier(
    model: nn.Module, shared: SharedVocabulary, order: torch.Tensor | None, asked: Mapping[str, bool],
    half: torch.dtype | None = None,
) -> AskClassifier:  # fmt: skip
    """A teacher in memory, in its own type, or with autocast to `half`; what it returns is float32 then.

    `order`: the number that it has for each of the student's classes.
    """

    def ask(micro_batch: MicroBatch) -> Any:
        from accelerate.utils import convert_to_fp32

        inputs = model_inputs(micro_batch)
        inputs["input_ids"] = shared.inputs(inputs["input_ids"])
        kind = inputs["input_ids"].device.type
        with torch.no_grad(), torch.autocast(kind, dtype=half, enabled=half is not None):
            output = model(**inputs, **{name: True for name, wanted in asked.items() if wanted})
        if half:
            output = convert_to_fp32(output)
        if order is not None:
            output.logits = output.logits.index_select(-1, order.to(output.logits.device))
        return output

    return ask


def _order_of_classes(teacher: Any, student: Any, name: str) -> torch.Tensor | None:
    """The teacher's number of each of the student's classes; None where they are the same.

    Raises:
        Refusal: they predict different things.
    """
    kind, other = student.problem_type, teacher.problem_type
    if (other is not None and kind != other) or (kind == "regression") != (teacher.num_labels == 1):
        raise Refusal(f"--teacher {name}: was trained for {other or f'{teacher.num_labels} classes'}, and the data are {kind}.")
    if kind == "regression":
        return None
    theirs, ours = list(teacher.id2label.values()), list(student.id2label.values())
    if len(theirs) == len(ours) and all(each.startswith(_PLACES) for each in theirs):
        say_once(f"--teacher {name}: doesn't name its classes, which are taken in the order of the data's: {first_of(ours)}")
        return None
    if sorted(theirs) != sorted(ours):
        raise Refusal(f"--teacher {name}: has the classes {first_of(theirs)}, and the data have {first_of(ours)}.")
    return None if theirs == ours else torch.tensor([theirs.index(label) for label in ours])


def _match(
    student: PreTrainedModel, teacher: PreTrainedModel, config: ClassifierDistillationConfig, name: str
) -> LayerPairs:
    """The layers that are compared, after a forward pass of both that shows what there is to compare."""
    if config.match_attention:
        rate = max(getattr(student.config.get_text_config(), field, None) or 0.0 for field in ATTENTION_DROPOUTS)
        if rate:
            raise Refusal(
                f"--match-attention: the student drops {rate:g} of its attention, so that its probabilities are never those of "
                "the teacher. Add --attention-dropout 0."
            )
        for who, model in (("the student", student), (f"--teacher {name}", teacher)):
            try:
                model.set_attn_implementation("eager")
            except ValueError as error:
                raise Refusal(f"--match-attention: {who} has no attention that returns its probabilities.") from error
    own, its = _forward(student, config.match_attention), _forward(teacher, config.match_attention)
    layers, of_teacher = len(own.hidden_states) - 1, len(its.hidden_states) - 1
    if of_teacher < layers:
        raise Refusal(f"--teacher {name}: has {of_teacher} layers and the student {layers}. Add --match-layers none.")
    if config.match_attention:
        for who, output in (("the student", own), (f"--teacher {name}", its)):
            if not output.attentions or any(each is None for each in output.attentions):
                raise Refusal(f"--match-attention: {who} returns no attention probabilities. Leave it out.")
        heads = own.attentions[0].shape[1], its.attentions[0].shape[1]
        if heads[0] != heads[1]:
            raise Refusal(
                f"--match-attention: the student has {heads[0]} heads and the teacher {heads[1]}, which can't be compared. "
                "Leave it out, or take a student with as many."
            )
    return pair_layers(config.match_layers, layers, of_teacher)


def _forward(model: PreTrainedModel, attention: bool) -> Any:
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    asked = {"output_hidden_states": True, **({"output_attentions": True} if attention else {})}
    with torch.no_grad(), evaluation_mode(model):
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
