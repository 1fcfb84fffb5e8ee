"""Self-distillation: the average of a student's weights, and the model below its adapter, against plain copies of both."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.data.loading.collate import collate_padded
from toolkit.distillation.own_teacher import Average, ask_without_adapter
from toolkit.distillation.teacher import ask_model
from toolkit.distillation.vocabulary import SharedVocabulary
from toolkit.losses import chunked
from toolkit.losses.distillation import distillation_loss, distillation_metrics

VOCABULARY = 53


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=False, attention_dropout=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


def adapted(dropout: float = 0.0, whole: list[str] | None = None) -> Any:
    targets = ["q_proj", "v_proj"] if whole else ["q_proj", "lm_head"]
    torch.manual_seed(1)
    model = get_peft_model(llama(), LoraConfig(r=3, target_modules=targets, lora_dropout=dropout, modules_to_save=whole, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora" not in name:
            parameter.data.add_(0.3)
    return model.double()


def micro_batches(size: int) -> list[dict[str, Any]]:
    rows = [{"input_ids": [2 + (i * 13 + j * 7) % 50 for j in range(3 + i)], "supervised_tokens": 2 + i} for i in range(6)]
    return [collate_padded(rows[start : start + size]) for start in range(0, 6, size)]


def gradients(model: nn.Module, ask: Any, size: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for micro_batch in micro_batches(size):
        distillation_loss(model, micro_batch, {"tokens": 27.0}, teacher=ask, divergence="jsd", cross_entropy_share=0.4)[0].backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("whole", [None, ["lm_head"]])
def test_the_model_without_its_adapter_teaches_what_a_second_model_would(monkeypatch: pytest.MonkeyPatch, whole: list[str] | None) -> None:
    """An adapter on the head, and a head that is trained whole; in chunks, for three splits. Fails when: the head's adapter is on
    for the teacher, or off for the student."""
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda *_: 4)
    student = adapted(whole=whole).eval()
    wanted = gradients(student, ask_model(llama().eval(), SharedVocabulary(VOCABULARY)), 6)
    assert wanted
    for size in (1, 2, 6):
        found = gradients(student, ask_without_adapter(student, VOCABULARY), size)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
    of_metrics = distillation_metrics(ask_without_adapter(student, VOCABULARY)).update
    assert of_metrics is not None
    with torch.no_grad():
        assert of_metrics(student, micro_batches(6)[0])["kl"] > 0.1


def test_asking_it_draws_nothing_and_leaves_the_student_as_it_was() -> None:
    """Fails when: the teacher is asked in training mode, with its dropout."""
    student = adapted(dropout=0.5).train()
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    ask, micro_batch = ask_without_adapter(student, VOCABULARY), micro_batches(6)[0]
    found = []
    for _ in range(2):
        before = torch.get_rng_state()
        ask(micro_batch, 1.0, lambda of_teacher, shared: found.append(of_teacher(slice(0, 30)).logps) or torch.zeros(1))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found[0], found[1])
    assert student.training
    assert {name for name, parameter in student.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_its_formula_and_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    """Fails when: it is kept in bfloat16, in which no step of it is seen, or `put_back` leaves the model as it was."""
    student = llama().to(dtype)
    average = Average(student, 0.999)
    wanted = {name: parameter.detach().double() for name, parameter in student.named_parameters()}
    start = {name: mean.clone() for name, mean in average.means.items()}
    for step in range(5):
        for parameter in student.parameters():
            parameter.data.add_(0.01 * (step + 1))
        average.follow(student)
        wanted = {name: 0.999 * wanted[name] + 0.001 * parameter.detach().double() for name, parameter in student.named_parameters()}
    for name, mean in average.means.items():
        torch.testing.assert_close(mean.double(), wanted[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(mean, start[name])
    again = Average(student, 0.999)
    again.put_back({name: mean.clone() for name, mean in average.means.items()})
    for one, other in zip(average.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad


def test_the_average_of_an_adapter_shares_the_frozen_weights() -> None:
    """Fails when: the whole model is copied."""
    student = adapted()
    average = Average(student, 0.9)
    own = dict(average.model.named_parameters())
    for name, parameter in student.named_parameters():
        assert (own[name].data_ptr() == parameter.data_ptr()) == (not parameter.requires_grad), name
    ask = ask_model(average.model, SharedVocabulary(VOCABULARY))
    at_start = gradients(student.eval(), ask, 6)
    alone = gradients(student, ask_model(adapted().eval(), SharedVocabulary(VOCABULARY)), 6)
    for name, gradient in alone.items():
        torch.testing.assert_close(at_start[name], gradient, rtol=1e-10, atol=1e-13)
