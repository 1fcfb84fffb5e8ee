"""The loss of a reward model against TRL's trainer on the same model and pairs, and against each pair alone.

The model is a small Llama with a head of one label; pairs have prompts of 1 to 6 tokens and answers of 1 to 9.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.data.loading.collate_pairs import collate_pairs
from toolkit.losses.reward import pair_rewards, reward_loss, reward_metrics
from toolkit.models.fitted_tokenizer import pad_apart_from_end
from toolkit.training.evaluation import eval_with_gather

PAIRS = 8
SETTINGS: list[dict[str, float]] = [
    {},
    {"center_rewards_coefficient": 0.1},
    {"margin_coefficient": 1.0},
    {"center_rewards_coefficient": 0.01, "margin_coefficient": 1.0},
]


def tokenizer_with(template: str | None = None, others: tuple[str, ...] = (), **special: str) -> Any:
    """Of 256 bytes and the special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = list(dict.fromkeys([*special.values(), *others]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*names, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    named = {f"{name}_token": token for name, token in special.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=list(others), **named)
    tokenizer.chat_template = template
    return tokenizer


def plain_tokenizer() -> Any:
    return tokenizer_with(eos="<end>", pad="<pad>")


def scorer(tokenizer: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model with rewards of about 1. Its attention is not transformers' (5.23) eager one, whose softmax is float32 in float64."""
    config = tk.ModelConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, attn_implementation="sdpa")
    model = tk.load_model("AutoModelForSequenceClassification", config, tokenizer, num_labels=1)
    model.score.weight.data *= 20
    return model.to(dtype)


def documents(end: int, margins: bool = True) -> list[dict[str, Any]]:
    """Tokenized pairs whose answers end with the token `end`."""
    random = torch.Generator().manual_seed(3)
    found = []
    for pair in range(PAIRS):
        prompt, chosen, rejected = (int(torch.randint(1, most, (1,), generator=random)) for most in (7, 10, 10))
        tokens = torch.randint(6, 250, (prompt + chosen + rejected,), generator=random)
        tokens[prompt + chosen - 1] = tokens[-1] = end
        parts = {"prompt_tokens": prompt, "chosen_tokens": chosen, "rejected_tokens": rejected, "pair": pair}
        found.append({"input_ids": tokens.numpy(), **parts, **({"margin": pair / 4 - 0.5} if margins else {})})
    return found


def both_sides(document: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt with the chosen answer, and with the rejected one."""
    tokens, prompt, chosen = document["input_ids"].tolist(), document["prompt_tokens"], document["chosen_tokens"]
    return tokens[: prompt + chosen], tokens[:prompt] + tokens[prompt + chosen :]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradients_are_those_of_trl(settings: dict[str, float], tmp_path: Path) -> None:
    """TRL's trainer computes the loss on its own batch of the same pairs; its metrics as well. Half of the margins are below 0.

    Fails when: the margin is added, the square is that of the difference of the rewards, or the halves of the rows are swapped.
    """
    from datasets import Dataset
    from trl import RewardConfig as TrlConfig, RewardTrainer

    tokenizer = plain_tokenizer()
    ours = scorer(tokenizer)
    theirs, pairs = copy.deepcopy(ours), documents(tokenizer.eos_token_id, margins="margin_coefficient" in settings)
    rows = [
        {"chosen_ids": chosen, "rejected_ids": rejected, **({"margin": pair["margin"]} if "margin" in pair else {})}
        for pair in pairs
        for chosen, rejected in [both_sides(pair)]
    ]
    center = settings.get("center_rewards_coefficient")
    args = TrlConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True, center_rewards_coefficient=center)
    trainer = RewardTrainer(model=theirs, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    wanted = trainer.compute_loss(theirs, trainer.data_collator(rows))
    wanted.backward()

    micro_batch = collate_pairs(pairs, layout="padded", pad_token_id=tokenizer.pad_token_id)
    loss, metrics = reward_loss(ours, micro_batch, {"pairs": PAIRS}, **settings)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max().item() <= 1e-4 * expected[name].abs().max().item(), name
    measured = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert 0 < measured["accuracy"] < 1
    assert metrics["reward_accuracy"].item() == pytest.approx(measured["accuracy"])
    assert metrics["reward_margin"].item() == pytest.approx(measured["margin"], rel=1e-4)
    mean = (metrics["rewards_chosen"] + metrics["rewards_rejected"]).item() / 2
    assert mean == pytest.approx(measured["mean_reward"], rel=1e-4)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_parts_of_micro_batches_add_up_to_the_mean_of_the_global_batch(settings: dict[str, float], size: int) -> None:
    """Loss, gradients and metrics of 8 pairs in float64, in one piece and in several, which are padded to other lengths.

    Fails when: a micro-batch is divided by its own pairs.
    """
    tokenizer = plain_tokenizer()
    pairs = documents(tokenizer.eos_token_id)
    found = []
    for cut in (PAIRS, size):
        model = scorer(tokenizer, torch.float64)
        pieces = [collate_pairs(pairs[at : at + cut], layout="padded", pad_token_id=1) for at in range(0, PAIRS, cut)]
        parts = [reward_loss(model, piece, {"pairs": PAIRS}, **settings) for piece in pieces]
        loss = torch.stack([loss for loss, _ in parts]).sum()
        loss.backward()
        metrics = torch.stack([torch.stack(list(metrics.values())) for _, metrics in parts]).sum(0)
        of_all = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
        found.append(torch.cat([loss.detach()[None], of_all, metrics]))
    assert found[0].abs().max().item() > 0.1
    assert (found[0] - found[1]).abs().max().item() < 1e-10


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_metrics_are_those_of_one_pair_at_a_time(settings: dict[str, float]) -> None:
    """By eval_with_gather, in batches of 3, 3 and 2 pairs with a padding micro-batch last. Fails when: the padding micro-batch counts."""
    tokenizer = plain_tokenizer()
    model, pairs = scorer(tokenizer, torch.float64), documents(tokenizer.eos_token_id)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return collate_pairs(rows, layout="padded", pad_token_id=tokenizer.pad_token_id)

    cuts = [(slice(0, 3), True), (slice(3, 6), True), (slice(6, 8), True), (slice(0, 3), False)]
    batches = [Batch([collate(pairs[cut])], {}, [real]) for cut, real in cuts]
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, reduce=lambda x, reduction: x)
    found = eval_with_gather(accelerator, model, batches, reward_metrics(**settings))
    wanted: dict[str, float] = {}
    for pair in pairs:
        loss, metrics = reward_loss(model, collate([pair]), {"pairs": PAIRS}, **settings)
        for name, value in {"loss": loss, **metrics}.items():
            wanted[f"eval_{name}"] = wanted.get(f"eval_{name}", 0.0) + value.item()
    assert found == pytest.approx(wanted, rel=1e-10)


CHAT = "{%- for message in messages %}{{ message.content + '<turn>' }}{%- endfor %}"
# The tokenizer's special tokens, the one that answers end with, and the one to pad with.
TOKENIZERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a pad token of its own": ({"eos": "<end>", "pad": "<pad>"}, "<end>", "<pad>"),
    "padding is the end, and texts begin with a token": ({"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "</s>"}, "</s>", "<s>"),
    "one special token for everything": ({"unk": "<end>", "bos": "<end>", "eos": "<end>", "pad": "<end>"}, "<end>", "<|pad|>"),
    "padding ends turns": ({"eos": "<end>", "pad": "<turn>", "others": ("<user>",), "template": CHAT}, "<turn>", "<user>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_reward_is_the_score_at_the_last_token(kind: str) -> None:
    """Of each sequence alone, unpadded: the head on the body's last hidden state, which is that of the end.

    With a pad token that ends texts, transformers takes the token before. Fails when: pad_apart_from_end returns at once.
    """
    settings, end, padding = TOKENIZERS[kind]
    tokenizer = tokenizer_with(**settings)
    was = tokenizer.pad_token_id
    tokenizer = pad_apart_from_end(tokenizer)
    assert tokenizer.pad_token == padding
    model, pairs = scorer(tokenizer), documents(tokenizer.convert_tokens_to_ids(end))

    def rewards(pad_token_id: int) -> torch.Tensor:
        return torch.cat(pair_rewards(model, collate_pairs(pairs, layout="padded", pad_token_id=pad_token_id)))

    with torch.no_grad():
        found = rewards(tokenizer.pad_token_id)
        sides = [side for column in zip(*map(both_sides, pairs), strict=True) for side in column]
        wanted = torch.stack([model.score(model.model(torch.tensor([side])).last_hidden_state[0, -1])[0] for side in sides])
        assert (found - wanted).abs().max().item() < 1e-5
        model.config.pad_token_id = was
        assert torch.allclose(rewards(was), wanted, atol=1e-5) == (padding == "<pad>")


def test_a_margin_that_no_row_has_is_refused() -> None:
    """Fails when: it is taken to be 0."""
    tokenizer = plain_tokenizer()
    micro_batch = collate_pairs(documents(tokenizer.eos_token_id, margins=False), layout="padded", pad_token_id=1)
    with pytest.raises(Refusal, match="--margin-coefficient 2"):
        reward_loss(scorer(tokenizer), micro_batch, {"pairs": PAIRS}, margin_coefficient=2.0)
