"""A teacher on a server, on the loopback: the numbers of the one in memory, and refused when it can't say them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import toolkit as tk
from tests.distillation.test_store import loaders, loss_and_gradients
from tests.rollouts.server_double import Double, serving
from toolkit.config import Refusal
from toolkit.distillation.fill_store import ask_stored, store_teacher
from toolkit.distillation.server_teacher import connect_teacher
from toolkit.distillation.teacher import ask_model
from toolkit.distillation.vocabulary import SharedVocabulary


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tk.train_tokenizer(["3 + 14 = 17, isn't it? Count from one"] * 20, 270)


def llama(vocabulary: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
        max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=False,
    ))  # fmt: skip
    for parameter in model.parameters():  # far from a fresh start, where all distributions are alike
        parameter.data.normal_(0.0, 0.5)
    return model.eval()


@pytest.fixture
def double(tokenizer: PreTrainedTokenizerFast, own_cache: Path) -> Iterator[Double]:
    own_cache.mkdir()
    with serving(llama(len(tokenizer), 1), tokenizer) as double:
        yield double


def connected(double: Double, tokenizer: PreTrainedTokenizerFast, top_k: int = 5, max_length: int = 16, vocabulary: int = 0) -> Any:
    return connect_teacher(
        Accelerator(cpu=True), f"{double.url}/v1", tokenizer, top_k=top_k, vocabulary=vocabulary or len(tokenizer), max_length=max_length
    )


@pytest.mark.parametrize("packing", [None, "bfd", "wrapped"])
@pytest.mark.parametrize("top_k", [3, 200])
def test_a_store_that_a_server_fills_is_that_of_the_same_model_here(
    double: Double, tokenizer: PreTrainedTokenizerFast, packing: str | None, top_k: int
) -> None:
    """Loss, gradients and evaluation of a student to 1e-5, through a dropped connection and a server that fails once. Texts in
    which nothing is supervised are not sent.

    Fails when: a position is that of the next token, or the token that is there is stored though it is none of the k."""
    train, evaluation = loaders(packing)
    student = llama(len(tokenizer), 0)
    ask, made_of = connected(double, tokenizer, top_k)
    double.faults = ["drop", "", "500"]
    found = []
    for load, known_by in ((lambda: ask, made_of), (lambda: ask_model(double.model, SharedVocabulary(len(tokenizer))), {"files": "x"})):
        settings: dict[str, Any] = {"top_k": top_k, "vocabulary": len(tokenizer), "temperature": 1.0}
        taught, taught_evaluation = store_teacher(Accelerator(cpu=True), load, known_by, train, evaluation, **settings)
        loss, gradients = loss_and_gradients(student, ask_stored(len(tokenizer)), taught, "reverse_kl")
        metrics = tk.eval_with_gather(Accelerator(cpu=True), student, taught_evaluation, tk.distillation_metrics(ask_stored(len(tokenizer))))
        found.append((loss, gradients, metrics))
    (loss, gradients, metrics), (wanted, of_wanted, wanted_metrics) = found
    assert loss == pytest.approx(wanted, rel=1e-5)
    for ours, theirs in zip(gradients, of_wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-5)
    sent = [body for path, body in double.asked if path == "/v1/completions"]
    assert all(len(body["prompt"]) > 1 for body in sent)


def test_a_server_is_asked_in_each_step_where_the_student_writes_answers(double: Double, tokenizer: PreTrainedTokenizerFast) -> None:
    """With the loss that its stored answers have. Fails when: it is asked beforehand, of texts that nobody has written yet."""
    train, evaluation = loaders("bfd")
    student, found = llama(len(tokenizer), 0), []
    for share in (0.5, 0.0):
        config = tk.DistillationConfig(teacher_top_k=3, on_policy_share=share)
        teacher, loader, _ = tk.build_teacher(
            Accelerator(cpu=True), student, tokenizer, config, train, evaluation, teacher=f"{double.url}/v1", max_length=16, packed=True
        )
        assert (loader is train) == bool(share)
        found.append(loss_and_gradients(student, teacher, loader, "reverse_kl")[0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_what_a_server_lacks_is_refused_before_the_first_step(double: Double, tokenizer: PreTrainedTokenizerFast) -> None:
    """Fails when: the probe is left out, so that each text finds it out anew; `reading` catches nothing."""
    for lie, message in (("tokenizer", "another tokenizer"), ("nologps", "without prompt_logprobs"), ("few", "4 log-probabilities, requested 5"), ("nan", "nan"), ("form", "in another form"), ("negative", "token -7 is likely")):
        double.lie = lie
        with pytest.raises(Refusal, match=message):
            connected(double, tokenizer)
    double.lie, double.max_logprobs = "", 4
    with pytest.raises(Refusal, match="--max-logprobs 5 or more"):
        connected(double, tokenizer)
    double.max_logprobs = 1000
    for settings, message in (({"max_length": 1024}, "--max-length 1023"), ({"top_k": 270}, "--teacher-top-k 270"), ({"vocabulary": 20}, "another vocabulary")):
        with pytest.raises(Refusal, match=message):
            connected(double, tokenizer, **settings)
    connected(double, tokenizer)


def test_a_server_that_is_not_there_is_refused_with_the_command_that_starts_one(tokenizer: PreTrainedTokenizerFast) -> None:
    """Fails when: the refusal names the setting of another server."""
    with pytest.raises(Refusal, match=r"--teacher http://127.0.0.1:9: .*--max-logprobs 5"):
        connect_teacher(Accelerator(cpu=True), "http://127.0.0.1:9/v1", tokenizer, top_k=5, vocabulary=270, max_length=16)
