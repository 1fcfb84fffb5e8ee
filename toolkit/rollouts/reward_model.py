"""A reward model as a reward: the directory that `recipes/reward.py` writes, read by the function that trains and evaluates it.

It reads the tokens that the policy read and wrote, so both must have one vocabulary. Completions are scored in blocks of like
length, cut from all rollouts of a step: another number of ranks changes no block, and so no bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from toolkit.config import ModelConfig, Refusal
from toolkit.data.loading.collate import collate_padded
from toolkit.losses.reward import answer_rewards
from toolkit.models.fitted_tokenizer import NEW_PAD, pad_apart_from_end
from toolkit.models.trained import auto_class_of, find_model, load_trained, longest_example
from toolkit.rollouts.reward_calls import Outcome
from toolkit.rollouts.rollout import Rollout

BLOCK = 16  # completions in a forward pass; a setting would change rewards by rounding


class RewardModel:
    """A frozen model with one number for a text, and what is known of its inputs."""

    def __init__(self, written: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the model into the CPU's memory, in the type of its files.

        Args:
            written: its directory, or that of the run that trained it.
            tokenizer: the policy's.

        Raises:
            Refusal: no reward model, or one with another vocabulary.
        """
        flag = f"--reward-funcs {written}"
        config = ModelConfig(model=find_model(written), dtype="auto")
        auto_class = auto_class_of(config)
        if auto_class != "AutoModelForSequenceClassification":
            kind = auto_class.removeprefix("AutoModelFor")
            raise Refusal(f"{flag}: is a {kind} model, which gives no reward. {_TO_MAKE_ONE}")
        self.written, self.longest = written, longest_example(config)
        self.model: nn.Module
        self.model, own = load_trained(auto_class, config, torch.device("cpu"))
        labels = self.model.config.num_labels
        if labels != 1:
            raise Refusal(f"{flag}: has {labels} labels, and a reward is one number. {_TO_MAKE_ONE}")
        check_vocabulary(own, tokenizer, flag)
        self.pad_token_id: int = pad_apart_from_end(own).pad_token_id
        self.model.requires_grad_(False)

    def score(self, rollouts: list[Rollout], device: torch.device) -> Outcome:
        """The rewards of some rollouts, in one forward pass on `device`, without gradient, under the caller's autocast."""
        documents = [{"input_ids": rollout.prompt_ids + rollout.completion_ids} for rollout in rollouts]
        for rollout, document in zip(rollouts, documents, strict=True):
            if self.longest is not None and len(document["input_ids"]) > self.longest:
                raise Refusal(
                    f"--reward-funcs {self.written}: has {self.longest} positions, and prompt and completion of "
                    f"{rollout.row.get('origin', f'prompt {rollout.prompt}')} have {len(document['input_ids'])} tokens. "
                    "Shorten --max-completion-length or the prompts."
                )
        padded = collate_padded(documents, self.pad_token_id)
        self.model.to(device)
        with torch.no_grad():
            inputs = {name: padded[name].to(device) for name in ("input_ids", "attention_mask")}
            values: list[float] = answer_rewards(self.model, inputs).tolist()
        problems = {place: f"gave {value}" for place, value in enumerate(values) if not np.isfinite(value)}
        return Outcome([None if place in problems else value for place, value in enumerate(values)], problems)


_TO_MAKE_ONE = "recipes/reward.py makes a reward model."


def blocks_of(rollouts: list[Rollout]) -> list[list[int]]:
    """All rollouts in blocks of like length: their places."""
    order = np.argsort([len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts], kind="stable").tolist()
    return [order[start : start + BLOCK] for start in range(0, len(order), BLOCK)]


def check_vocabulary(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, flag: str) -> None:
    """Refuse a reward model that would read other tokens than the policy writes; a pad token, which no text has, may differ."""
    theirs, ours = ({word: number for word, number in each.get_vocab().items() if word != NEW_PAD} for each in (own, policy))
    if theirs == ours:
        return
    number, token = min((number, token) for token, number in theirs.items() ^ ours.items())
    raise Refusal(
        f"{flag}: has another vocabulary than the policy ({len(theirs):,} and {len(ours):,} tokens; the first that differs is "
        f"number {number}, {token!r}), so it would read other texts than were written. Train one with the policy's tokenizer: "
        "recipes/reward.py --model THE_POLICY"
    )
