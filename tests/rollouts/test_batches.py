"""Batches of updates: for any cut into micro-batches and ranks the same completions, totals and gradients."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from toolkit.config import DataConfig, Refusal, RolloutConfig
from toolkit.losses.policy import policy_loss
from toolkit.losses.rollout_logps import rollout_logps
from toolkit.models.attention.interface import DOCUMENTS, register_attention
from toolkit.rollouts.batches import collate_rollouts, policy_batches, with_logps
from toolkit.rollouts.rollout import Rollout
from toolkit.rollouts.settings import in_prompts, sampling_settings
from toolkit.training.step import accumulate_gradients, mean_metrics


def rollouts_of(groups: int = 5, size: int = 4) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for prompt in range(groups):
        asked = torch.randint(3, 90, (3 + 2 * prompt,), generator=generator).tolist()
        for index in range(size):
            tokens = torch.randint(3, 90, (1 + (prompt + 3 * index) % 7,), generator=generator).tolist()
            truncated = index == 1
            made.append(Rollout(prompt, index, asked, tokens, [-1.0] * len(tokens), truncated, {}, "", reward=float(index)))
    return made


def rank(number: int, ranks: int) -> Any:
    return SimpleNamespace(process_index=number, num_processes=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("micro_batch_size", "parts"), [(3, 1), (4, 2), (7, 3), (100, 1)])
def test_each_completion_is_trained_on_once_an_iteration(ranks: int, micro_batch_size: int, parts: int) -> None:
    """Fails when: a padding micro-batch counts, `bounds` leave the last rollout out, or totals are of a rank alone."""
    rollouts = rollouts_of()
    advantages = [float(number) for number in range(len(rollouts))]
    collate = partial(collate_rollouts, layout="packed", mask_truncated_completions=True)
    by_rank = [
        list(policy_batches(rank(n, ranks), rollouts, advantages, collate, micro_batch_size=micro_batch_size,
                            steps_per_generation=parts, num_iterations=2))
        for n in range(ranks)
    ]  # fmt: skip
    assert {len(batches) for batches in by_rank} == {2 * parts}
    for first, second in ((0, parts), (parts, 2 * parts)):
        seen = []
        for batches in zip(*(batches[first:second] for batches in by_rank), strict=True):
            assert len({len(batch.micro_batches) for batch in batches}) == 1
            kept = [(m, s) for b in batches for m, s, real in zip(b.micro_batches, b.seeds, b.real, strict=True) if real]
            here = [value for micro_batch, _ in kept for value in micro_batch["advantages"].tolist()]
            counted = float(sum(micro_batch["mask"].sum() for micro_batch, _ in kept))
            assert len({seed for _, seed in kept}) == len(kept)
            assert all(batch.totals == {"examples": len(here), "completions": len(here), "completion_tokens": counted,
                                        "tokens": counted} for batch in batches)  # fmt: skip
            seen += here
        assert sorted(seen) == advantages


def model_of() -> Any:
    register_attention()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1,
        eos_token_id=2, attn_implementation=DOCUMENTS,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_the_gradient_is_one_for_every_split_and_layout(loss_type: str) -> None:
    """float64 1e-10: one micro-batch of all, groups cut anywhere, padded rows; with log-probabilities of before and a reference.

    Fails when: the totals of a micro-batch stand for those of the batch, or `old_logps` are of other rows.
    """
    accelerator, model, rollouts = Accelerator(cpu=True), model_of(), rollouts_of()
    for number, each in enumerate(rollouts):
        each.old_logps = [-4.4 - 0.1 * ((number + place) % 5) for place in range(len(each.completion_ids))]
        each.reference_logps = [-4.5] * len(each.completion_ids)
    advantages = [float(number % 5 - 2) for number in range(len(rollouts))]

    def loss_fn(model: Any, completions: dict[str, Any], totals: dict[str, float]) -> Any:
        logps, entropies = rollout_logps(model, completions, 0.9, with_entropy_gradient=True)
        return policy_loss(
            logps, completions["old_logps"], completions["advantages"], completions["mask"], totals, loss_type=loss_type,
            epsilon_high=5.0 if loss_type == "cispo" else None, max_completion_length=7, beta=0.1,
            reference_logps=completions["reference_logps"], entropies=entropies, entropy_coef=0.01,
        )  # fmt: skip

    found = []
    for size, layout in ((100, "shared"), (3, "shared"), (7, "packed"), (4, "padded")):
        collate = partial(collate_rollouts, layout=layout, mask_truncated_completions=True)
        (batch,) = policy_batches(accelerator, rollouts, advantages, collate, micro_batch_size=size)
        metrics = accumulate_gradients(accelerator, model, batch, loss_fn)
        found.append((metrics, [parameter.grad.clone() for parameter in model.parameters()]))
        model.zero_grad()
    whole, gradients = found[0]
    assert float(max(gradient.abs().max() for gradient in gradients)) > 1e-3
    for metrics, others in found[1:]:
        for name, value in whole.items():
            assert float(metrics[name]) == pytest.approx(float(value), abs=1e-10), name
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


def test_log_probabilities_of_before_are_those_of_each_completion_alone() -> None:
    """Fails when: `indices` of `_batch` begin at 0 in each micro-batch."""
    accelerator, model, rollouts = Accelerator(cpu=True), model_of(), rollouts_of()
    collate = partial(collate_rollouts, layout="shared")
    found = with_logps(
        accelerator, model, rollouts, collate, micro_batch_size=3, old_logps=lambda model, batch: rollout_logps(model, batch)[0]
    )
    assert [each.reference_logps for each in found] == [None] * len(rollouts)
    for each in found:
        with torch.no_grad():
            logits = model(torch.tensor([each.prompt_ids + each.completion_ids])).logits[0, len(each.prompt_ids) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(each.completion_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(each.old_logps, dtype=torch.float64), wanted, atol=1e-10, rtol=0)


def test_batch_sizes_in_prompts_and_a_step_that_is_no_whole_number_of_groups() -> None:
    """Fails when: `completions` leaves the accumulation out."""
    import toolkit as tk

    config = tk.DataConfig(per_device_train_batch_size=16, gradient_accumulation_steps=3)
    found = in_prompts(config, 8)
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps, found.global_batch_size) == (2, 1, 6)
    with pytest.raises(Refusal, match="--global-batch-size 50"):
        in_prompts(config, 10)


def test_more_updates_than_completions_are_refused_and_a_short_last_batch_has_one_for_each() -> None:
    """Fails when: the check is left out of `in_prompts`, or `min` of `policy_batches`: a batch of nothing has no loss."""

    @dataclass(frozen=True)
    class Config(DataConfig, RolloutConfig):
        pass

    config = Config(per_device_train_batch_size=8, steps_per_generation=9)
    with pytest.raises(Refusal, match=r"--steps-per-generation 9: .*8 completions"):
        in_prompts(config, 4)
    assert in_prompts(replace(config, steps_per_generation=8), 4).global_batch_size == 2
    rollouts, collate = rollouts_of()[:3], partial(collate_rollouts, layout="packed")
    updates = list(policy_batches(rank(0, 1), rollouts, [0.0] * 3, collate, micro_batch_size=2, steps_per_generation=8))
    assert [update.size for update in updates] == [1, 1, 1]


def test_metrics_of_several_updates_are_those_of_one_step() -> None:
    """Fails when: a skipped update is averaged away."""
    steps = [{"loss": torch.tensor(value), "ratio_max": torch.tensor(value), "nonfinite": torch.tensor(float(value > 2)),
              "applied": torch.tensor(float(value < 2))} for value in (1.0, 3.0)]  # fmt: skip
    assert {name: float(value) for name, value in mean_metrics(steps).items()} == {
        "loss": 2.0, "ratio_max": 3.0, "nonfinite": 1.0, "applied": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(("most", "advice"), [(7, "--max-completion-length 6 or --max-prompt-length 9"), (16, "--max-completion-length 6")])
def test_a_prompt_without_room_for_its_completion_is_refused_before_the_run_meets_it(most: int, advice: str) -> None:
    """Fails when: `_check_room` takes the mean length, or `sampling_settings` does not call it."""
    from datasets import Dataset
    from transformers import LlamaConfig

    splits = {"train": Dataset.from_dict({"length": [3, 10]}), "test": Dataset.from_dict({"length": [4]})}
    model: Any = SimpleNamespace(config=LlamaConfig(max_position_embeddings=16))
    tokenizer: Any = SimpleNamespace(eos_token_id=0, chat_template=None)
    with pytest.raises(Refusal, match=rf"prompt .*\b10 tokens .*\b16 positions\. .*{advice}\."):
        sampling_settings(RolloutConfig(max_completion_length=most), model, tokenizer, splits)
