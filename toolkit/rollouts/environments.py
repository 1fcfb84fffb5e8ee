"""Environments: completions of several turns, in which code answers the policy: tools, games, simulated users.

An environment is an object of one conversation:

    class Calculator:
        def reset(self, row):                  # a row of the data; the prompt in place of the row's own, or None
            self.answer = row["answer"]
        def step(self, messages):              # all of the conversation, the policy's turn last
            return [{"role": "user", "content": "..."}], reward, done

Its rewards are added up to the completion's reward `environment`. A completion is the whole conversation behind the prompt; the
tokens that the environment wrote are in it, and no loss counts them. What the policy wrote is never tokenized again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from toolkit.config import Refusal
from toolkit.config.rollouts import RewardFunctionsConfig
from toolkit.data.tokenize.documents import Encoder, build_encoder
from toolkit.data.tokenize.masks import ChatTemplate, read_chat_template
from toolkit.generation.sampler import Completion
from toolkit.rollouts.reward_calls import LARGEST
from toolkit.rollouts.users_code import faults_described, import_object, process_kept
from toolkit.system.console import one_line, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF_OF_A_PAIR = re.compile(r"[\ud800-\udfff]")
Message = dict[str, Any]
Sample = Callable[[int, list[int], list[list[int]], list[int]], list[list[Completion]]]


class Environment(Protocol):
    """One conversation."""

    def reset(self, row: dict[str, Any]) -> list[Message] | str | None:
        """Begin: the prompt in place of the row's own, the same for all completions of a row, or None."""

    def step(self, messages: list[Message]) -> tuple[list[Message], float | None, bool]:
        """The answer to the policy's last turn, what that turn is worth (None: 0), and whether the conversation is over."""


@dataclass
class Conversation:
    """One completion as it comes about; of its tokens those that are `written` are the policy's."""

    messages: list[Message]
    is_chat: bool  # whether the chat template writes its messages
    ids: list[int]  # of the prompt
    environment: Any = None
    completion: Completion = field(default_factory=lambda: Completion(kept=[]))
    written: list[bool] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)  # behind the prompt
    reward: float = 0.0
    done: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Environments:
    """An environment for each completion, made by `make`, and how its messages become tokens."""

    name: str
    make: Callable[[], Environment]
    tokenizer: PreTrainedTokenizerBase
    max_turns: int = 8
    on_error: str = "stop"

    def prompt_of(self, row: Mapping[str, Any], ids: list[int]) -> tuple[dict[str, Any], list[int]]:
        """The row and the tokens of its prompt, with the prompt that the environment begins with.

        Raises:
            Refusal: an environment that can't be reset, where `on_error` is "stop".
        """
        try:
            prompt = self._reset(row)[1]
        except Refusal:
            if self.on_error == "stop":
                raise
            prompt = None  # the row's own: its conversations end with the first turn, without a reward
        return (dict(row), ids) if prompt is None else ({**row, "prompt": prompt}, self._prompt_ids(prompt))

    def converse(
        self, rows: Sequence[Mapping[str, Any]], prompts: Sequence[list[int]], size: int, most: int, sample: Sample,
        together: Callable[[bool], bool],
    ) -> list[list[Conversation]]:  # fmt: skip
        """`size` conversations for each prompt.

        Args:
            most: tokens of a completion, the environment's included.
            sample: of the turn, the numbers of conversations, their tokens so far and how many more each may have: completions
                of each, a group in the first turn and one alone in later ones.
            together: whether any rank has conversations that go on; every turn needs all of them.

        Raises:
            Refusal: an environment failed, and `on_error` is "stop".
        """
        everyone = [self._begin(row, ids) for row, ids in zip(rows, prompts, strict=True) for _ in range(size)]
        for turn in range(self.max_turns):
            numbers = [number for number, each in enumerate(everyone) if not each.done]
            if not together(bool(numbers) or (turn == 0 and bool(everyone))):
                break
            if turn == 0:
                numbers = list(range(len(everyone)))  # also where reset() failed: a completion has tokens
                groups = sample(turn, numbers, [list(ids) for ids in prompts], [most] * len(prompts))
            else:
                so_far = [everyone[number].ids + everyone[number].completion.tokens for number in numbers]
                left = [most - len(everyone[number].written) for number in numbers]
                groups = sample(turn, numbers, so_far, left)
            sampled = [completion for group in groups for completion in group]
            for number, completion in zip(numbers, sampled, strict=True):
                self._take_turn(everyone[number], completion, most, is_last=turn + 1 == self.max_turns)
        failed = next((each for each in everyone if each.problem), None)
        if failed is not None and self.on_error == "stop":
            raise Refusal(
                f"--environment {self.name}: {failed.problem}\nMend it, or go on without the rewards of such conversations: "
                "--on-reward-error skip"
            )
        if failed is not None:
            count = sum(bool(each.problem) for each in everyone)
            say(
                f"WARNING: --environment {self.name}: skipped its reward of {count} of {len(everyone)} conversations; "
                f"the first: {failed.problem}"
            )
        return [everyone[start : start + size] for start in range(0, len(everyone), size)]

    def _begin(self, row: Mapping[str, Any], ids: list[int]) -> Conversation:
        prompt = row.get("prompt", "")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        begun = Conversation(copy.deepcopy(messages), isinstance(prompt, list), ids)
        try:
            begun.environment, own = self._reset(row)
        except Refusal as refusal:
            begun.problem, begun.done = str(refusal), True
        else:
            if own is not None and own != prompt:
                begun.problem, begun.done = "reset() returned another prompt for another completion of one row.", True
        return begun

    def _reset(self, row: Mapping[str, Any]) -> tuple[Environment, list[Message] | str | None]:
        with process_kept(), faults_described() as problems:
            environment = self.make()
            prompt = environment.reset(copy.deepcopy(dict(row)))
            if prompt is not None and not _is_text(prompt) and (not prompt or not _are_messages(prompt)):
                raise TypeError(f"it returned no messages: {one_line(repr(prompt), 200)}")
            return environment, prompt
        raise Refusal(f"--environment {self.name}: reset() of {row.get('origin', 'a row')}: {problems[0]}")

    def _take_turn(self, one: Conversation, turn: Completion, most: int, is_last: bool) -> None:
        """The policy's turn, and the environment's answer to it."""
        self._add(one, turn.tokens, turn.logps, turn.kept)
        text = str(self.tokenizer.decode(turn.tokens, skip_special_tokens=True))
        one.said.append({"role": "assistant", "content": text})
        if one.problem or turn.truncated:  # no token is left: it never was a whole turn
            one.done = True
            return
        with process_kept(), faults_described() as problems:
            answer, reward, over = _answer_in(one.environment.step(copy.deepcopy([*one.messages, *one.said])))
        if problems:
            one.problem, one.done = f"{problems[0]}, after the turn {one_line(text, 200)!r}", True
            return
        one.reward += reward
        one.done, one.completion.truncated = over, not over
        if one.done or is_last:
            one.done = True
            return
        ids = self._ids_of(answer, turn.tokens[-1], one.is_chat)
        if len(one.written) + len(ids) >= most:  # no room for an answer
            one.done = True
            return
        one.said += answer
        self._add(one, ids)

    @staticmethod
    def _add(
        one: Conversation, ids: Sequence[int], logps: Sequence[float] | None = None, kept: list[np.ndarray] | None = None
    ) -> None:
        """Tokens of the policy, or without `logps` of the environment: each was the only one that could come."""
        completion, could_be = one.completion, kept or [np.array([token], dtype=np.int32) for token in ids]
        completion.tokens += ids
        completion.logps += logps or [0.0] * len(ids)
        one.written += [logps is not None] * len(ids)
        assert completion.kept is not None
        completion.kept += could_be

    @cached_property
    def _encoder(self) -> Encoder:
        return build_encoder(self.tokenizer)

    @cached_property
    def _template(self) -> ChatTemplate:
        return read_chat_template(self.tokenizer)

    def _prompt_ids(self, prompt: list[Message] | str) -> list[int]:
        if isinstance(prompt, str):
            return self._encoder.add_start(self._encoded(prompt))
        return self._encoded(self._template.render(prompt, {}, add_generation_prompt=True))

    def _ids_of(self, answer: Sequence[Message], last: int, is_chat: bool) -> list[int]:
        """What the chat template writes from the end of the policy's turn to the beginning of its next one; behind a prompt of
        plain text the texts as they are."""
        if is_chat:
            ids = self._encoded(_rendered(self._template, list(answer)))
        else:
            ids = self._encoded("".join(message["content"] for message in answer))
        return ids[1:] if ids[:1] == [last] else ids  # the end of the turn, which the policy wrote itself

    def _encoded(self, text: str) -> list[int]:
        (encoding,) = self._encoder.encode([text])
        return list(encoding.ids)


def load_environment(config: RewardFunctionsConfig, tokenizer: PreTrainedTokenizerBase) -> Environments | None:
    """The environment of `config.environment`, imported and called; None without one.

    Raises:
        Refusal: it can't be imported, or what it makes has no `reset` or no `step`.
    """
    written = config.environment
    if not written:
        return None
    make: Any = import_object(written, "--environment")
    made = None
    with process_kept(), faults_described() as problems:
        made = make()
    if problems:
        raise Refusal(f"--environment {written}: can't be made without arguments: {problems[0]}")
    missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if missing:
        raise Refusal(f"--environment {written}: what it makes has no {' and no '.join(f'{name}()' for name in missing)}.")
    return Environments(written, make, tokenizer, config.max_turns, config.on_reward_error)


def _answer_in(returned: Any) -> tuple[list[Message], float, bool]:
    """What `step` returned: messages, which the environment may go on changing, a finite number, and a truth value."""
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        found = one_line(repr(returned), 200)
        raise TypeError(f"step() returned {found}; messages, a reward and whether it is over would be right")
    answer, reward, over = copy.deepcopy(returned[0]), returned[1], returned[2]
    if not _are_messages(answer):
        raise TypeError(f"step() returned no messages: {one_line(repr(answer), 200)}")
    if reward is not None and not abs(reward) <= LARGEST:
        raise ValueError(f"step() returned the reward {reward}")
    if not isinstance(over, bool | np.bool_):
        raise TypeError(f"step() returned {over!r} for whether the conversation is over; it must be True or False")
    return answer, float(reward or 0.0), bool(over)


def _rendered(template: ChatTemplate, answer: list[Message]) -> str:
    head: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    before, after = template.render(head, {}), template.render([*head, *answer], {}, add_generation_prompt=True)
    stem = before.removesuffix(template.closing)
    if not after.startswith(stem):
        raise Refusal("--environment: the chat template writes a turn in another way once the chat goes on. Give another one.")
    return after[len(stem) :]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, dict) and _is_text(each.get("role")) and _is_text(each.get("content")) for each in value
    )


def _is_text(value: Any) -> bool:
    """Text that a tokenizer takes and a file holds: half of a surrogate pair is none."""
    return isinstance(value, str) and not _HALF_OF_A_PAIR.search(value)
