"""recipes/reward.py: what it saves scores as it was evaluated, read by transformers and peft alone."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import toolkit as tk

PAIRS = 5
FLAGS = ["--max-train-examples", "40", "--max-eval-examples", str(PAIRS), "--max-steps", "4"]
FLAGS += ["--learning-rate", "0.01", "--center-rewards-coefficient", "0.1", "--save-strategy", "no"]


def metrics(model: Any, tokenizer: Any) -> dict[str, float]:
    """Of the first validation pairs, all in one batch, padded by the tokenizer."""
    pairs = tk.load_splits("stdlib:dpo")["validation"].select(range(PAIRS))
    texts = [
        tokenizer.apply_chat_template(pair["prompt"] + pair[side], tokenize=False).rstrip("\n")
        for side in ("chosen", "rejected")
        for pair in pairs
    ]
    with torch.no_grad():
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        chosen, rejected = model.eval()(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].chunk(2)
    losses = -torch.nn.functional.logsigmoid(chosen - rejected) + 0.1 * (chosen + rejected).square()
    return {"eval_loss": losses.mean().item(), "eval_reward_margin": (chosen - rejected).mean().item()}


def test_a_saved_model_scores_as_it_was_evaluated(run_recipe: Any) -> None:
    """Fails when: pair_rewards returns the two halves the wrong way round."""
    run = run_recipe("reward", *FLAGS, "--hidden-size", "32", "--num-hidden-layers", "2", "--max-length", "1024")
    assert run.code == 0, run.err
    folder = run.output_dir / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    found = metrics(model, AutoTokenizer.from_pretrained(folder))
    assert {name: run.summary[name] for name in found} == pytest.approx(found, rel=1e-4, abs=1e-6)


def test_an_adapter_goes_with_its_head_and_a_pad_token_of_its_own_to_the_same_scores(run_recipe: Any, tmp_path: Any) -> None:
    """On a GPT-2 whose pad token also ends its texts and turns, so that it gets another one, and a head, which go along.

    Fails when: the recipe leaves pad_apart_from_end out.
    """
    base = tmp_path / "base"
    pairs = tk.load_splits("stdlib:dpo")["validation"].select(range(PAIRS))
    tokenizer = tk.train_tokenizer([str(pair) for pair in pairs], 1000)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(base)
    torch.manual_seed(1)
    shape = {"n_positions": 4096, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)).save_pretrained(base)
    run = run_recipe("reward", *FLAGS, "--max-length", "4096", "--use-peft", "--model", str(base))
    assert run.code == 0, run.err
    folder = run.output_dir / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token != "<|im_end|>"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    first = model.score.weight.detach().clone()
    adapted = PeftModel.from_pretrained(model, folder)
    assert not torch.equal(adapted.get_base_model().score.weight, first)
    found = metrics(adapted, tokenizer)
    assert {name: run.summary[name] for name in found} == pytest.approx(found, rel=1e-4, abs=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(adapted.get_input_embeddings().weight, plain.get_input_embeddings().weight)
