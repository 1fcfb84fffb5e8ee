"""A reward model as a reward: the numbers of transformers on single rows, those of the loss that trains it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

import toolkit as tk
from tests.rollouts.rollouts_of import rollouts_of
from toolkit.config import Refusal
from toolkit.losses.reward import pair_rewards
from toolkit.rollouts.rewards import Reward, load_rewards
from toolkit.rollouts.rollout import Rollout
from toolkit.rollouts.scoring import score_rollouts

TEXTS = [f"Number {n} is {'even' if n % 2 == 0 else 'odd'}." for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tk.train_tokenizer(TEXTS, vocab_size=300)


def save(folder: Path, tokenizer: Any, auto: str = "AutoModelForSequenceClassification", **head: Any) -> str:
    model = tk.load_model(auto, tk.ModelConfig(hidden_size=32, num_hidden_layers=2), tokenizer, **head)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)  # so that rewards differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rewards_of(directory: str, tokenizer: Any) -> list[Reward]:
    return load_rewards(tk.RewardFunctionsConfig(reward_funcs=[directory]), tokenizer)


def sampled(tokenizer: Any) -> list[Rollout]:
    rollouts = rollouts_of([({"prompt": f"What is {n}?"}, [TEXTS[n], TEXTS[n] * 2, ""][: 1 + n % 3]) for n in range(20)])
    for each in rollouts:
        each.prompt_ids = tokenizer(each.row["prompt"], add_special_tokens=False).input_ids
        each.completion_ids = [*tokenizer(each.completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return rollouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reward_model_is_held_as_it_was_saved_and_computes_as_the_run_does(
    dtype: torch.dtype, tokenizer: Any, tmp_path: Path
) -> None:
    """Next to float32, twice the 8 bits of bfloat16 in each layer.

    Fails when: its weights are read in float32, or it computes without the run's autocast.
    """
    directory = save(tmp_path / "judge", tokenizer, num_labels=1)
    AutoModelForSequenceClassification.from_pretrained(directory, dtype=dtype).save_pretrained(directory)
    rewards, rollouts = rewards_of(directory, tokenizer), sampled(tokenizer)
    model = rewards[0].model
    assert model is not None
    assert {weight.dtype for weight in model.model.parameters()} == {dtype}
    types = set[torch.dtype]()
    first = next(module for module in model.model.modules() if isinstance(module, torch.nn.Linear))
    first.register_forward_hook(lambda module, inputs, output: types.add(output.dtype))
    exact, half = (score_rollouts(rollouts, rewards, accelerator) for accelerator in (None, Accelerator(cpu=True, mixed_precision="bf16")))
    assert types == {dtype, torch.bfloat16}
    assert [each.reward for each in half] == pytest.approx([each.reward for each in exact], abs=0.05)


def test_rewards_are_those_of_transformers_on_each_text_alone(tokenizer: Any, tmp_path: Path) -> None:
    """Within 1e-5, for blocks of ragged lengths. Fails when: the pad token ends texts too, or `order` is not undone."""
    directory, rollouts = save(tmp_path / "judge", tk.pad_apart_from_end(tk.train_tokenizer(TEXTS, vocab_size=300)), num_labels=1), sampled(tokenizer)
    scored = score_rollouts(rollouts, rewards_of(directory, tokenizer))
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    for each in scored:
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([each.prompt_ids + each.completion_ids])).logits.item()
        assert each.rewards == {"judge": pytest.approx(alone, abs=1e-5)}
    assert len({round(each.reward, 4) for each in scored}) == len(scored)
    assert [(each.prompt, each.index) for each in scored] == [(each.prompt, each.index) for each in rollouts]


def test_rewards_are_those_that_its_own_training_computes(tokenizer: Any, tmp_path: Path) -> None:
    """Pairs as recipes/reward.py reads them, and the same answers as rollouts. Fails when: the prompt's tokens are left out."""
    from datasets import Dataset, DatasetDict

    own = tk.pad_apart_from_end(tk.train_tokenizer(TEXTS, vocab_size=300))
    directory = save(tmp_path / "judge", own, num_labels=1)
    rows = {"prompt": ["What is 3?", "And 4?"], "chosen": [TEXTS[3], TEXTS[4]], "rejected": ["No.", "Perhaps not."], "origin": ["a:1", "a:2"]}
    splits = tk.tokenize_for_preference(DatasetDict(train=Dataset.from_dict(rows)), own, tk.DataConfig(max_length=64))
    documents = [splits["train"][n] for n in range(2)]
    reward = rewards_of(directory, tokenizer)
    assert reward[0].model is not None
    pairs = tk.collate_pairs(documents, layout="padded", pad_token_id=own.pad_token_id)
    with torch.no_grad():
        chosen, rejected = pair_rewards(reward[0].model.model, pairs)
    rollouts = rollouts_of([({"prompt": "p"}, ["chosen", "rejected"])] * 2)
    for rollout in rollouts:
        document = documents[rollout.prompt]
        ids, prompt, first = list(document["input_ids"]), document["prompt_tokens"], document["chosen_tokens"]
        rollout.prompt_ids = ids[:prompt]
        rollout.completion_ids = ids[prompt : prompt + first] if rollout.index == 0 else ids[prompt + first :]
    found = [each.reward for each in score_rollouts(rollouts, reward)]
    assert found == pytest.approx(torch.stack([chosen, rejected], dim=1).flatten().tolist(), abs=1e-5)


def test_no_gradient_and_no_dropout(tokenizer: Any, tmp_path: Path) -> None:
    """Fails when: the model is in training mode, or its weights want gradients."""
    directory = save(tmp_path / "judge", tk.pad_apart_from_end(tk.train_tokenizer(TEXTS, vocab_size=300)), num_labels=1)
    rewards = rewards_of(directory, tokenizer)
    model = rewards[0].model
    assert model is not None
    assert not any(weight.requires_grad for weight in model.model.parameters())
    assert not any(module.training for module in model.model.modules())


@pytest.mark.parametrize("case", ["vocabulary", "labels", "language model", "positions", "shape", "no head"])
def test_what_is_no_reward_model_for_this_policy_is_refused(tokenizer: Any, tmp_path: Path, case: str) -> None:
    """Fails when: `check_vocabulary`, the number of labels, the class, or the positions are not looked at."""
    own = tk.pad_apart_from_end(tk.train_tokenizer(["quite another text " * 9] if case == "vocabulary" else TEXTS, vocab_size=300))
    if case == "shape":
        directory, words = "tiny-llama", "neither built in"
    elif case == "language model":
        directory, words = save(tmp_path / "judge", own, "AutoModelForCausalLM"), "CausalLM"
    else:
        directory = save(tmp_path / "judge", own, num_labels=3 if case == "labels" else 1)
        words = {"vocabulary": "vocabulary", "labels": "3 labels", "positions": "positions", "no head": "no trained head"}[case]
    if case == "no head":
        from safetensors.torch import load_file, save_file

        tensors = load_file(tmp_path / "judge/model.safetensors")
        save_file({name: each for name, each in tensors.items() if not name.startswith("score")}, tmp_path / "judge/model.safetensors", {"format": "pt"})
    rollouts = sampled(tokenizer)[:2]
    if case == "positions":
        rollouts[1].completion_ids = [5] * 5000
    with pytest.raises(Refusal, match=words):
        score_rollouts(rollouts, rewards_of(directory, tokenizer))
