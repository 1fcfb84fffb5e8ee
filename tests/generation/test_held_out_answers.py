"""Answers to all held-out prompts: those of each prompt alone, on any number of ranks."""

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

import toolkit as tk
from toolkit.config import Refusal
from toolkit.generation import continued_texts
from toolkit.generation.answers import Sampling, answer
from toolkit.generation.held_out_answers import answer_all, answer_metrics, held_out_prompts

TEXTS = [f"{i}: the {word} thing is {word}" for i, word in enumerate(["red", "green", "blue", "round", "square", "small", "large", "old", "new", "bright"] * 2)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tk.train_tokenizer(TEXTS, 300)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    """Far from a fresh start, whose logits are nearly ties."""
    made = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(hidden_size=32, num_hidden_layers=2), tokenizer)
    torch.manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.5)
    return made


@pytest.mark.parametrize("count", [1, 7, 37])
def test_every_prompt_has_the_answer_that_it_has_alone(model: Any, tokenizer: Any, count: int) -> None:
    """Of unequal lengths, in the order of the prompts; dropout off and the mode restored.

    Fails when: answers come back in the order of their lengths.
    """
    prompts = [(TEXTS[i % 20] + " and ") * (1 + i % 3) for i in range(count)]
    model.train()
    found = answer_all(Accelerator(cpu=True), model, tokenizer, prompts, 12)
    assert model.training
    model.eval()
    alone = [answer(model, tokenizer, prompt, Sampling(12, temperature=0), lambda piece: None) for prompt in prompts]
    assert found == alone
    assert len(set(found)) > min(count, 3) - 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_prompts_and_have_the_answers_of_one(model: Any, tokenizer: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: ranks take blocks of prompts that are next to each other, or the answers stand rank after rank."""
    monkeypatch.setattr(continued_texts, "engine_of", lambda accelerator: SimpleNamespace(shards=False))
    prompts = [TEXTS[i % 20] * (1 + i % 4) for i in range(37)]
    expected = answer_all(Accelerator(cpu=True), model, tokenizer, prompts, 6)
    barrier, pieces = threading.Barrier(ranks), dict[int, list[str]]()
    found: dict[int, list[str]] = {}

    def from_all(accelerator: Any, make: Any) -> list[list[str]]:
        pieces[accelerator.process_index] = make()
        barrier.wait(30)
        return [pieces[rank] for rank in range(ranks)]

    def work(rank: int) -> None:
        accelerator: Any = SimpleNamespace(
            process_index=rank, num_processes=ranks, is_main_process=rank == 0, autocast=lambda: torch.inference_mode()
        )
        found[rank] = answer_all(accelerator, copy.deepcopy(model), tokenizer, prompts, 6)

    monkeypatch.setattr(continued_texts, "from_all", from_all)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(ranks), expected)


def test_metrics_are_of_the_texts_and_a_row_without_an_answer_is_named(model: Any, tokenizer: Any) -> None:
    """Fails when: references are in another order than the answers, or a row without one counts as empty."""
    rows = Dataset.from_list([{"prompt": text, "completion": text[::-1], "origin": f"a.jsonl:{i}"} for i, text in enumerate(TEXTS)])
    prompts = held_out_prompts(rows, tokenizer)
    answers = answer_all(Accelerator(cpu=True), model, tokenizer, TEXTS, 5)
    prompts[3]["reference"], prompts[7]["reference"] = f" {answers[3]}\n", answers[7]
    found = answer_metrics(Accelerator(cpu=True), model, tokenizer, prompts, tk.choose_text_metrics(["exact_match"]), 5)
    assert found == {"eval_exact_match": sum(a.strip() == p["reference"].strip() for a, p in zip(answers, prompts, strict=True)) / 20}
    assert found["eval_exact_match"] >= 0.1
    with pytest.raises(Refusal, match=r"a\.jsonl:1: "):
        held_out_prompts(Dataset.from_list([{"text": "alone", "origin": "a.jsonl:1"}]), tokenizer)
