"""Conversations with an environment: what is in a completion, what of it counts, and what its code may do wrong."""

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.generation.distribution import SamplingSettings
from toolkit.models.tokenizer import train_tokenizer
from toolkit.rollouts.environments import Environments

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS = ["12+30=", "7+8+9=", "1+1="]


class Echo:
    """Says how long a turn was; over after three turns. A turn is worth its length."""

    def reset(self, row: dict[str, Any]) -> None:
        self.turns = 0

    def step(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], float, bool]:
        assert messages[0]["content"] in PROMPTS
        self.turns += 1
        said = len(messages[-1]["content"])
        return [{"role": "user", "content": f"[{said}]"}], float(said), self.turns == 3


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(["0123456789 + = [ ] a b c d e f g h"], 300)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return made.eval()


def settings_of(tokenizer: Any, **values: Any) -> SamplingSettings:
    ends = {tokenizer.eos_token_id, *range(40, 70)}  # so that turns are short
    return SamplingSettings(**{"max_new_tokens": 40, "eos_token_ids": tuple(ends), **values})


def batch_of(tokenizer: Any, places: list[int]) -> Batch:
    ids = [tokenizer(PROMPTS[place], add_special_tokens=False)["input_ids"] for place in places]
    rows = [{"prompt": PROMPTS[place]} for place in places]
    return Batch([{"prompt_ids": ids, "rows": rows}], {}, [True], indices=[places], epochs=[[0] * len(places)])


def sampled(model: Any, tokenizer: Any, places: list[int], **values: Any) -> list[tk.Rollout]:
    environment = Environments("Echo", values.pop("make", Echo), tokenizer, **values.pop("environment", {}))
    return tk.sample_rollouts(
        Accelerator(cpu=True), model, tokenizer, batch_of(tokenizer, places), settings_of(tokenizer, **values), num_generations=4,
        seed=3, environment=environment,
    )  # fmt: skip


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}], ids=["all", "top-p"])
def test_log_probabilities_are_of_the_policys_own_tokens_and_others_count_nowhere(model: Any, tokenizer: Any, cut: dict[str, float]) -> None:
    """Those of one plain forward over the whole conversation, to 1e-5; the environment's tokens are masked.

    Fails when: `_add` calls all tokens written, or a turn is sampled without the answers before it.
    """
    rollouts = sampled(model, tokenizer, [0, 1, 2], **cut)
    assert any(each.written.count(False) for each in rollouts if each.written)
    assert any(not each.truncated for each in rollouts)
    collate = tk.collate_rollouts(rollouts, [1.0] * len(rollouts), layout="packed", pad_token_id=0)
    with torch.no_grad():
        table, _ = tk.rollout_logps(model, collate)
    for row, each in enumerate(rollouts):
        written = torch.tensor(each.written)
        assert collate["mask"][row, : len(written)].bool().tolist() == each.written
        found, wanted = torch.tensor(each.logps)[written], table[row, : len(written)][written]
        assert torch.allclose(found, wanted, atol=1e-5)
        texts = [len(message["content"]) for message in each.messages or [] if message["role"] == "assistant"]
        assert len(each.completion_ids) <= 40
        whole = texts[:-1] if len(each.completion_ids) == 40 and each.truncated else texts
        assert each.rewards["environment"] == sum(whole)
        if not each.truncated:
            assert len(texts) == 3


def test_a_conversation_depends_on_no_other(model: Any, tokenizer: Any) -> None:
    """Fails when: the keys of later turns count the conversations that are left."""
    for most in (12, 20, 40):  # so that conversations end early
        together = sampled(model, tokenizer, [0, 1, 2], max_new_tokens=most)
        for place in range(3):
            assert together[4 * place : 4 * place + 4] == sampled(model, tokenizer, [place], max_new_tokens=most)


def test_a_divergence_in_the_reward_is_that_of_the_policys_tokens() -> None:
    """Fails when: `_kl_of` adds up all tokens."""
    rollout = tk.Rollout(0, 0, [1], [2, 3], [-1.0, 0.0], False, {}, "", written=[True, False], reference_logps=[-2.0, -5.0])
    assert tk.shaped_rewards([rollout], beta=0.5).tolist() == [[-0.5]]


def test_answers_are_written_by_the_chat_template_and_the_policys_tokens_stay(model: Any, tokenizer: Any) -> None:
    """A completion of whole turns is what the template makes of its messages, but for tokens that the policy chose otherwise.

    Fails when: the end of the policy's turn is written twice, or the next turn is not begun.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    environment = Environments("Echo", Echo, tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    wanted = "\n<|im_start|>user\n[3]<|im_end|>\n<|im_start|>assistant\n"
    message = [{"role": "user", "content": "[3]"}]
    assert tokenizer.decode(environment._ids_of(message, end, True)) == wanted
    assert tokenizer.decode(environment._ids_of(message, 9, True)) == "<|im_end|>" + wanted  # a stop string ended its turn
    assert tokenizer.decode(environment._ids_of(message, 9, False)) == "[3]"
    row, ids = environment.prompt_of({"prompt": "x"}, [1, 2])
    assert (row["prompt"], ids) == ("x", [1, 2])


class Begins(Echo):
    def reset(self, row: dict[str, Any]) -> Any:
        super().reset(row)
        return "7+8+9="


class Fails(Echo):
    def step(self, messages: Any) -> Any:
        raise KeyError("no tool of this name")


class Absent(Echo):
    def reset(self, row: dict[str, Any]) -> Any:
        raise ConnectionError("no game server")


class Nan(Echo):
    def step(self, messages: Any) -> Any:
        return [], float("nan"), True


class Leaves(Echo):
    def step(self, messages: Any) -> Any:
        raise SystemExit(3)


class Unsure(Echo):
    def step(self, messages: Any) -> Any:
        return [], 1.0, "no"


class Silent(Echo):
    def step(self, messages: Any) -> Any:
        return None, 1.0, False


class Short(Echo):
    def step(self, messages: Any) -> Any:
        return 3


class Half(Echo):
    def step(self, messages: Any) -> Any:
        return [{"role": "user", "content": "half of a pair: \ud83d"}], 1.0, False


class Forks(Echo):
    children: ClassVar[list[int]] = []
    process = os.getpid()

    def forks(self) -> None:
        if os.getpid() != self.process:
            os._exit(1)  # a child that went on: it must not have children
        self.children.append(os.fork())

    def reset(self, row: Any) -> Any:
        self.forks()
        return super().reset(row)

    def step(self, messages: Any) -> Any:
        self.forks()
        return super().step(messages)


def test_a_process_that_an_environment_forks_does_not_go_on(model: Any, tokenizer: Any) -> None:
    """It would train as well. Fails when: `end_fork` does nothing."""
    Forks.process = os.getpid()
    try:
        forked = sampled(model, tokenizer, [0], make=Forks)
    finally:
        if os.getpid() != Forks.process:
            os._exit(1)
    assert {os.waitpid(child, 0)[1] for child in Forks.children} == {0}
    assert [each.completion_ids for each in forked] == [each.completion_ids for each in sampled(model, tokenizer, [0])]


def test_an_environment_may_begin_with_a_prompt_of_its_own(model: Any, tokenizer: Any) -> None:
    """Fails when: `sample_rollouts` samples behind the row's prompt."""
    rollouts = sampled(model, tokenizer, [0], make=Begins)
    assert tokenizer.decode(rollouts[0].prompt_ids, skip_special_tokens=True) == "7+8+9="
    assert rollouts[0].row["prompt"] == "7+8+9="


@pytest.mark.parametrize(("make", "match"), [(Fails, "no tool of this name"), (Nan, "the reward nan"), (Silent, "no messages"), (Half, "no messages"), (Short, "returned 3; messages, a reward"), (Leaves, "SystemExit: 3"), (Absent, r"reset\(\) of a row: ConnectionError: no game server"), (Unsure, "True or False")])
def test_what_an_environment_does_wrong_is_named_or_skipped(model: Any, tokenizer: Any, capsys: Any, make: Any, match: str) -> None:
    """Fails when: an exception ends the process, or a conversation without a reward counts as one of 0."""
    with pytest.raises(Refusal, match=f"(?s)--environment Echo: .*{match}"):
        sampled(model, tokenizer, [0, 1], make=make)
    skipped = sampled(model, tokenizer, [0, 1], make=make, environment={"on_error": "skip"})
    without = sum(each.rewards["environment"] is None for each in skipped)
    assert without > 0
    assert f"skipped its reward of {without} of 8 conversations; the first: " in capsys.readouterr().out
    scored = tk.score_rollouts(skipped, [])
    assert all((each.reward != each.reward) == (each.rewards["environment"] is None) for each in scored)


def test_what_cannot_be_an_environment_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    """Fails when: `load_environment` does not make one."""
    (tmp_path / "mine.py").write_text("class Half:\n    def reset(self, row): ...\ndef raises():\n    raise ValueError('no key')\n")
    for written, match in (("Half", "no step"), ("raises", "no key"), ("Other", "--environment .*Other")):
        config = tk.RewardFunctionsConfig(environment=f"{tmp_path}/mine.py:{written}")
        with pytest.raises(Refusal, match=match):
            tk.load_environment(config, tokenizer)
    assert tk.load_environment(tk.RewardFunctionsConfig(), tokenizer) is None
