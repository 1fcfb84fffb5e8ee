"""Every public name has an example that needs nothing but what its docstring says, as a notebook would call it.

The examples are the functions below; `@shows` lists the names that one is about. They run in one process, with a model of one layer.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset, DatasetDict

import toolkit as tk
from toolkit.config import BatchConfig, DevicesConfig, HubConfig, LossConfig, SeedConfig, Settings, TeacherConfig
from toolkit.data.tokenize.tags import Tags
from toolkit.distillation.classifier_teacher import ClassifierTeacher
from toolkit.distillation.teacher import Teacher
from toolkit.generation.sampler import Completion
from toolkit.losses.classification import classification_loss
from toolkit.losses.pair_losses import PairLogps
from toolkit.losses.policy import kl_estimate
from toolkit.losses.reward import answer_rewards, pair_rewards
from toolkit.losses.unpaired import apo_zero_unpaired_loss, kto_kl, kto_loss
from toolkit.losses.value import gae, token_rewards, whiten
from toolkit.models.sentence_files import EmbeddingStyle
from toolkit.preference.reference import Reference
from toolkit.report import write_report
from toolkit.rollouts.advantages import reward_table
from toolkit.rollouts.environments import Environments
from toolkit.rollouts.ledger import rollouts_of
from toolkit.rollouts.server_gap import sampler_weights

EXAMPLES: dict[str, Callable[[], None]] = {}


def shows(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(example: Callable[[], None]) -> Callable[[], None]:
        EXAMPLES.update(dict.fromkeys(names, example))
        return example

    return note


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.CausalLMConfig, tk.SampleConfig, tk.RunConfig):
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 1
    max_length: int = 64
    max_train_examples: int | None = 16
    max_eval_examples: int | None = 4
    per_device_train_batch_size: int = 4
    max_steps: int = 2
    max_new_tokens: int = 2
    num_samples: int = 1
    optim: str = "adamw_torch"
    use_cpu: bool = True


TEXTS = [f"Number {n} is {'even' if n % 2 == 0 else 'odd'}." for n in range(20)]


def rows(**columns: list[Any]) -> DatasetDict:
    """Training rows and four validation rows, each with its origin, as load_splits gives them."""
    data = Dataset.from_dict({**columns, "origin": [f"made.jsonl:{n + 1}" for n in range(len(TEXTS))]})
    return DatasetDict(train=data.select(range(16)), validation=data.select(range(16, 20)))


def chats() -> DatasetDict:
    return rows(prompt=[f"What is {n}?" for n in range(20)], completion=TEXTS)


def preferences() -> DatasetDict:
    return rows(prompt=[f"What is {n}?" for n in range(20)], chosen=TEXTS, rejected=["No."] * 20)


def marked() -> DatasetDict:
    return rows(prompt=[f"What is {n}?" for n in range(20)], completion=TEXTS, label=[n % 2 == 0 for n in range(20)])


def classes() -> DatasetDict:
    return rows(text=TEXTS, label=[["even", "odd"][n % 2] for n in range(20)])


@functools.cache
def tokenizer() -> Any:
    return tk.train_tokenizer(TEXTS, vocab_size=300)


@functools.cache
def _made_accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def accelerator() -> Accelerator:
    """One for all examples; another where a test of another file has reset Accelerate's state in between."""
    if not AcceleratorState._shared_state:
        _made_accelerator.cache_clear()
    return _made_accelerator()


def language_model() -> Any:
    return tk.load_model("AutoModelForCausalLM", tk.ModelConfig(hidden_size=32, num_hidden_layers=1), tokenizer())


def classifier(num_labels: int) -> Any:
    config = tk.ModelConfig(hidden_size=32, num_hidden_layers=1)
    return tk.load_model("AutoModelForSequenceClassification", config, tokenizer(), num_labels=num_labels)


def documents(splits: DatasetDict) -> list[dict[str, Any]]:
    return [splits["train"][n] for n in range(3)]


@shows("model_inputs")
def example_of_what_the_model_gets() -> None:
    micro_batch = {**tk.collate_padded([{"input_ids": [5, 6, 7]}]), "own_stars": torch.ones(1)}
    assert set(tk.model_inputs(micro_batch)) == {"input_ids", "attention_mask"}


@shows("__version__")
def version() -> None:
    assert tk.__version__.count(".") == 2


@shows("ModelConfig", "DataConfig", "OptimConfig", "RunConfig", "OutputConfig", "DeviceConfig", "setting", "Refusal")
def settings() -> None:
    @dataclass(frozen=True)
    class Mine(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.RunConfig):
        gamma: float = tk.setting(2.0, "How much less a certain example counts.", least=0.0)

    groups = (SeedConfig, tk.OutputConfig, BatchConfig, tk.DeviceConfig, DevicesConfig, HubConfig, Settings)
    assert all(isinstance(Mine(), group) for group in groups)
    with pytest.raises(tk.Refusal, match="gamma"):
        Mine(gamma=-1.0)


@shows(
    "AdapterConfig", "AnswerConfig", "CausalLMConfig", "ClassificationConfig", "PairsConfig", "PreferenceConfig", "RankedAnswersConfig",
    "RankingConfig", "ReferenceConfig", "RewardConfig", "RewardFunctionsConfig", "SampleConfig", "TokenClassificationConfig", "UnpairedConfig", "MaskedLMConfig",
    "RowsConfig",
)  # fmt: skip
def settings_of_methods() -> None:
    assert tk.AdapterConfig().lora_r > 0
    assert tk.AnswerConfig(metrics=["bleu"]).answer_max_new_tokens == 256
    assert LossConfig().label_smoothing_factor == 0
    assert tk.CausalLMConfig().z_loss == 0
    assert tk.ClassificationConfig(problem_type="regression").problem_type == "regression"
    assert tk.MaskedLMConfig().mlm_probability == 0.15
    assert tk.PairsConfig().pair_layout == "auto"
    assert tk.PreferenceConfig(loss_type=["simpo"]).loss_type == ["simpo"]
    assert tk.RankedAnswersConfig().pairs_per_prompt
    assert tk.RowsConfig().row_layout == "auto"
    assert tk.ReferenceConfig().reference == "auto"
    assert tk.RankingConfig().ranking_loss
    assert tk.RewardConfig()
    assert tk.RewardFunctionsConfig(reward_funcs=["number"]).on_reward_error == "stop"
    assert tk.SampleConfig(num_samples=2).num_samples == 2
    assert tk.TokenClassificationConfig(tag_scheme="iob2").tag_scheme == "iob2"
    assert tk.UnpairedConfig(beta=0.2).beta == 0.2


@shows("trained_model")
def a_model_trained_before() -> None:
    assert tk.trained_model("no/such/folder", "tiny-llama") == "tiny-llama"


@shows("load_splits")
def splits_of_a_file() -> None:
    Path("rows.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    splits = tk.load_splits(tk.DataConfig(dataset="rows.jsonl", eval_fraction=0.2))
    assert sum(len(split) for split in splits.values()) == 20


@shows("train_tokenizer", "load_tokenizer", "is_built_in", "pad_apart_from_end")
def tokenizers() -> None:
    trained = tk.train_tokenizer(TEXTS, vocab_size=300)
    trained.save_pretrained("tokenizer")
    assert tk.load_tokenizer(tk.ModelConfig(tokenizer="tokenizer"))("odd").input_ids == trained("odd").input_ids
    assert tk.is_built_in("tiny-llama")
    assert tk.pad_apart_from_end(trained).pad_token_id != trained.eos_token_id


@shows("load_model", "add_adapter")
def models() -> None:
    model = tk.load_model("AutoModelForCausalLM", tk.ModelConfig(hidden_size=32, num_hidden_layers=1), tokenizer())
    adapted = tk.add_adapter(model, tk.AdapterConfig(use_peft=True, lora_r=2), tokenizer())
    assert sum(weight.requires_grad for weight in adapted.parameters()) < sum(1 for _ in adapted.parameters())


@shows("tokenize_for_lm", "texts_of", "text_baselines", "collate_packed")
def text() -> None:
    raw = rows(text=TEXTS)
    assert list(tk.texts_of(raw["train"])) == TEXTS[:16]
    splits = tk.tokenize_for_lm(raw, tokenizer(), tk.DataConfig(max_length=64))
    assert tk.text_baselines(splits, tokenizer())
    assert tk.collate_packed(documents(splits))["input_ids"].shape[0] == 1


@shows("tokenize_for_sft", "print_data_report", "answer_baselines", "collate_padded", "build_dataloaders", "Batch", "sample_prompts")
def prompts_and_completions() -> None:
    splits = tk.tokenize_for_sft(chats(), tokenizer(), tk.DataConfig(max_length=64))
    tk.print_data_report(splits.report)
    assert tk.answer_baselines(splits, len(tokenizer()))
    assert tk.collate_padded(documents(splits), tokenizer().pad_token_id)["input_ids"].shape[0] == 3
    train, evaluation = tk.build_dataloaders(splits, tk.collate_padded, tk.DataConfig(per_device_train_batch_size=4, num_train_epochs=1.0))
    batches = list(train.batches())
    assert len(batches) == train.num_steps == 4
    assert isinstance(batches[0], tk.Batch)
    assert evaluation is not None
    assert len(tk.sample_prompts(chats(), tokenizer(), tk.SampleConfig(num_samples=2))) == 2


@shows("epoch_order", "seed_micro_batch")
def order() -> None:
    assert sorted(tk.epoch_order(10, seed=1, epoch=0)) == list(range(10))
    tk.seed_micro_batch(7)
    first = torch.rand(1)
    tk.seed_micro_batch(7)
    assert torch.rand(1) == first


def a_batch() -> tuple[dict[str, Any], dict[str, float]]:
    splits = tk.tokenize_for_lm(rows(text=TEXTS), tokenizer(), tk.DataConfig(max_length=64))
    train, _ = tk.build_dataloaders(splits, tk.collate_padded, tk.DataConfig(per_device_train_batch_size=4, max_steps=2))
    return train, next(iter(train.batches()))


@shows("causal_lm_loss", "causal_lm_metrics", "causal_lm_metrics_with_bytes", "Metrics", "to_device", "eval_with_gather")
def language_modeling() -> None:
    model, splits = language_model(), tk.tokenize_for_lm(rows(text=TEXTS), tokenizer(), tk.DataConfig(max_length=64))
    train, evaluation = tk.build_dataloaders(splits, tk.collate_padded, tk.DataConfig(max_steps=1))
    batch = next(iter(train.batches()))
    loss, metrics = tk.causal_lm_loss(model, tk.to_device(batch.micro_batches[0], torch.device("cpu")), batch.totals)
    assert loss.requires_grad
    assert 0 <= metrics["token_accuracy"] <= 1
    found = tk.eval_with_gather(accelerator(), model, evaluation, tk.causal_lm_metrics)
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    with_bytes = tk.causal_lm_metrics_with_bytes(splits, tokenizer())
    assert tk.eval_with_gather(accelerator(), model, evaluation, with_bytes)["eval_bits_per_byte"] > 0
    tokens = tk.Metrics(lambda model, micro_batch: {"tokens": torch.tensor(micro_batch["input_ids"].numel())}, lambda sums: {"tokens": float(sums["tokens"])})
    assert tk.eval_with_gather(accelerator(), model, evaluation, tokens)["eval_tokens"] > 0


@shows("choose_text_metrics", "held_out_prompts", "answer_metrics")
def generated_answers() -> None:
    prompts = tk.held_out_prompts(chats()["validation"], tokenizer())

    def share_of_lines(answers: Any, references: Any) -> dict[str, float]:
        return {"lines": sum("\n" in answer for answer in answers) / len(answers)}

    metrics = tk.choose_text_metrics(["exact_match", share_of_lines])
    found = tk.answer_metrics(accelerator(), language_model(), tokenizer(), prompts, metrics, max_new_tokens=4)
    assert set(found) == {"eval_exact_match", "eval_lines"}


@dataclass(frozen=True)
class Masked(tk.DataConfig, tk.MaskedLMConfig):
    max_length: int = 64
    max_steps: int = 1


@shows("tokenize_for_masked_lm", "build_masks", "masked_token_baselines", "masked_lm_loss", "masked_lm_metrics")
def filling_gaps() -> None:
    encoder = tk.train_tokenizer(TEXTS, 300, encoder=True)
    splits = tk.tokenize_for_masked_lm(rows(text=TEXTS), encoder, Masked())
    masks, collate = tk.build_masks(encoder, Masked()), functools.partial(tk.collate_padded, aligned=True)
    train, evaluation = tk.build_dataloaders(splits, collate, Masked(), augment=masks, augment_evaluation=masks)
    model = tk.load_model("AutoModelForMaskedLM", tk.ModelConfig(model="tiny-bert", hidden_size=32, num_hidden_layers=1), encoder)
    batch = next(iter(train.batches()))
    loss, metrics = tk.masked_lm_loss(model, batch.micro_batches[0], batch.totals)
    assert loss.requires_grad
    assert 0 <= metrics["masked_accuracy"] <= 1
    found = tk.eval_with_gather(accelerator(), model, evaluation, tk.masked_lm_metrics)
    assert found["eval_pseudo_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert tk.masked_token_baselines(splits, evaluation, encoder)["unigram"] > 0


@dataclass(frozen=True)
class Diffusing(tk.ModelConfig, tk.DataConfig, tk.DiffusionConfig):
    model: str = "tiny-llama"
    hidden_size: int = 32
    num_hidden_layers: int = 1
    max_length: int = 64
    max_steps: int = 1


@shows(
    "DiffusionConfig", "load_diffusion_tokenizer", "tokenize_for_diffusion", "load_diffusion_model", "build_noise", "diffusion_loss",
    "diffusion_metrics",
)  # fmt: skip
def writing_in_any_order() -> None:
    assert tk.DiffusionConfig().block_length == 32
    words = tk.load_diffusion_tokenizer(Diffusing(vocab_size=300))
    assert words.mask_token == "<|mask|>"
    splits = tk.tokenize_for_diffusion(rows(text=TEXTS), words, Diffusing())
    model = tk.load_diffusion_model(Diffusing(), words)
    noise, collate = tk.build_noise(model, Diffusing()), functools.partial(tk.collate_padded, aligned=True)
    train, evaluation = tk.build_dataloaders(splits, collate, Diffusing(), augment=noise, augment_evaluation=noise)
    batch = next(iter(train.batches()))
    loss, _ = tk.diffusion_loss(model, batch.micro_batches[0], batch.totals)
    assert loss.requires_grad
    found = tk.eval_with_gather(accelerator(), model, evaluation, tk.diffusion_metrics)
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))


@shows("build_optimizer", "build_schedule", "train_step", "accumulate_micro_batch", "accumulate_gradients", "clip_and_update", "sum_over_ranks", "fit_micro_batch")
def a_step() -> None:
    model, (train, batch) = language_model(), a_batch()
    optimizer, schedule = tk.build_optimizer(model, tk.OptimConfig(optim="adamw_torch", learning_rate=1e-2), num_steps=2)
    assert tk.build_schedule(tk.OptimConfig(warmup_steps=0), num_steps=2)(0.0) == 1.0
    model, optimizer = accelerator().prepare(model, optimizer)
    train = tk.fit_micro_batch(accelerator(), model, optimizer, train, tk.causal_lm_loss, tk.DataConfig())
    metrics = tk.train_step(accelerator(), model, optimizer, batch, tk.causal_lm_loss, schedule(0.0))
    assert metrics["loss"] > 0
    metrics = tk.accumulate_gradients(accelerator(), model, batch, tk.causal_lm_loss)
    metrics |= tk.clip_and_update(accelerator(), model, optimizer, metrics["loss"], schedule(0.5), max_grad_norm=1.0)
    assert metrics["grad_norm"] > 0
    part = tk.accumulate_micro_batch(accelerator(), model, batch, 0, tk.causal_lm_loss)
    assert tk.sum_over_ranks(accelerator(), part)["loss"] > 0


@shows(
    "tokenize_for_classification", "label_settings", "class_baselines", "classification_task",     "classification_metrics", "choose_row_layout",
)  # fmt: skip
def classification() -> None:
    assert tk.label_settings(classes(), tk.ClassificationConfig())["num_labels"] == 2
    assert tk.class_baselines(classes())
    splits = tk.tokenize_for_classification(classes(), tokenizer(), Classes())
    micro_batch, model = tk.collate_padded(documents(splits), tokenizer().pad_token_id), classifier(2)
    loss, _ = classification_loss(model, micro_batch, {"examples": 3.0})
    loss_fn, metrics = tk.classification_task("single_label", num_labels=2)
    assert loss_fn(model, micro_batch, {"examples": 3.0})[0] == loss
    _, evaluation = tk.build_dataloaders(splits, tk.collate_padded, tk.DataConfig())
    assert tk.eval_with_gather(accelerator(), model, evaluation, metrics)["eval_loss"] > 0
    assert "eval_f1" in tk.eval_with_gather(accelerator(), model, evaluation, tk.classification_metrics(["f1"], num_labels=2))
    assert tk.choose_row_layout(model) == "padded"  # loaded for padded rows


@shows(
    "find_tags", "tokenize_for_token_classification", "space_before_words", "tag_baselines",
    "tag_metrics", "token_classification_loss",
)  # fmt: skip
def token_classification() -> None:
    raw = rows(tokens=[text.split() for text in TEXTS], tags=[["O", "B-N", "O", "B-P"]] * 20)
    words = tk.space_before_words(tokenizer())
    tags = tk.find_tags(raw, TaggedWords())
    assert tags == Tags(["O", "B-N", "B-P"], "iob2")
    splits = tk.tokenize_for_token_classification(raw, words, TaggedWords())
    model = tk.load_model("AutoModelForTokenClassification", tk.ModelConfig(hidden_size=32, num_hidden_layers=1, model="tiny-bert"), words, **tags.settings)
    micro_batch = tk.collate_padded(documents(splits), words.pad_token_id, aligned=True)
    loss, metrics = tk.token_classification_loss(model, micro_batch, {"tokens": 12.0})
    assert loss > 0
    assert 0 <= metrics["accuracy"] <= 1
    _, evaluation = tk.build_dataloaders(splits, functools.partial(tk.collate_padded, aligned=True), tk.DataConfig())
    found = tk.eval_with_gather(accelerator(), model, evaluation, tk.tag_metrics(tags.names, tags.scheme))
    assert found["eval_loss"] > 0
    assert tk.tag_baselines(raw, tags)["dictionary"] > found["eval_f1"] - 1


@dataclass(frozen=True)
class TaggedWords(tk.DataConfig, tk.TokenClassificationConfig):
    max_length: int = 64


@dataclass(frozen=True)
class Classes(tk.DataConfig, tk.ClassificationConfig):
    max_length: int = 64


def logps() -> tuple[PairLogps, PairLogps]:
    """Of three pairs, by the policy and by the reference."""
    tokens = torch.tensor([4.0, 5.0, 6.0])
    policy = PairLogps(torch.tensor([-3.0, -4.0, -5.0]), torch.tensor([-4.0, -5.0, -6.0]), tokens, tokens)
    return policy, PairLogps(torch.tensor([-3.5, -4.0, -5.5]), torch.tensor([-4.0, -4.5, -6.0]), tokens, tokens)


def questions() -> DatasetDict:
    """Whether each number is even: an answer of the fourth word of its text."""
    answers = [{"text": [text.split()[-1].strip(".")], "answer_start": [text.index(text.split()[-1])]} for text in TEXTS]
    return rows(question=[f"What is {n}?" for n in range(20)], context=TEXTS, answers=answers)


@dataclass(frozen=True)
class QuestionConfig(tk.ModelConfig, tk.DataConfig, tk.QuestionAnsweringConfig, tk.OptimConfig, tk.RunConfig):
    model: str = "tiny-bert"
    hidden_size: int | None = 32
    num_hidden_layers: int | None = 1
    max_length: int = 64
    doc_stride: int = 8
    max_steps: int = 2
    use_cpu: bool = True


@shows(
    "QuestionAnsweringConfig", "tokenize_for_question_answering", "collate_windows", "question_answering_loss", "reference_answers",
    "question_answering_metrics", "question_baselines", "sample_questions", "sample_answers", "answer_questions",
)  # fmt: skip
def answers_from_a_text() -> None:
    config, raw = QuestionConfig(), questions()
    assert isinstance(config, tk.QuestionAnsweringConfig)
    tokenizer = tk.load_tokenizer(config)
    splits = tk.tokenize_for_question_answering(raw, tokenizer, config)
    model = tk.load_model("AutoModelForQuestionAnswering", config, tokenizer)
    windows = tk.collate_windows([splits["train"][i] for i in range(3)], pad_token_id=tokenizer.pad_token_id)
    loss, _ = tk.question_answering_loss(model, windows, {"examples": 3.0})
    assert loss > 0
    accelerator = Accelerator(cpu=True)
    _, evaluation = tk.build_dataloaders(splits, tk.collate_windows, config, accelerator)
    metrics = tk.question_answering_metrics(tk.reference_answers(raw))
    assert 0 <= tk.eval_with_gather(accelerator, model, evaluation, metrics)["eval_f1"] <= 1
    assert 0 < tk.question_baselines(raw)["first sentence"] < 1
    asked = tk.sample_questions(raw, 1)
    assert tk.sample_answers(accelerator, model, tokenizer, asked, config)[0]["reference"] in ("even", "odd")
    assert tk.answer_questions(model, tokenizer, asked.rows, max_length=64, doc_stride=8)[0][0].text in asked.rows[0]["context"]


@shows("unpaired_loss")
def losses_of_single_answers() -> None:
    policy, reference, desirable = torch.tensor([-3.0, -4.0]), torch.tensor([-3.5, -3.5]), torch.tensor([True, False])
    kl = kto_kl(policy, reference)
    assert kl >= 0
    assert torch.isfinite(kto_loss(policy, reference, desirable, kl, beta=0.1)).all()
    assert torch.isfinite(apo_zero_unpaired_loss(policy, reference, desirable, beta=0.1)).all()
    totals = {"examples": 2.0, "desirable": 1.0, "undesirable": 1.0}
    loss, _ = tk.unpaired_loss(policy, reference, desirable, kl, totals, beta=0.2)
    assert torch.isfinite(loss)


@shows(
    "advantages", "choose_advantages", "groups_with_spread", "prompts_to_add",     "PolicyConfig", "PPOConfig",
)  # fmt: skip
def advantages_of_rewards() -> None:
    config = tk.PolicyConfig(loss_type="rloo")
    estimator, scale = tk.choose_advantages(config.loss_type, config.advantage_estimator, config.scale_rewards)
    scored = [tk.Rollout(i // 2, i % 2, [1], [2], [-1.0], False, {}, "", {}, reward) for i, reward in enumerate([1.0, 0.0, 0.5, 0.5])]
    rewards = reward_table(scored)
    assert tk.advantages(rewards, estimator=estimator, scale_rewards=scale).tolist() == [[1.0, -1.0], [0.0, 0.0]]
    assert tk.prompts_to_add(scored, 2, most=6) == 2
    assert tk.groups_with_spread(scored, 1) == scored[:2]
    assert tk.PPOConfig().lam == 0.95


@shows("load_environment")
def environments() -> None:
    config = tk.RewardFunctionsConfig(environment="tests.rollouts.test_environments:Echo", max_turns=2)
    environment = tk.load_environment(config, tokenizer())
    assert isinstance(environment, Environments)
    assert environment.prompt_of({"prompt": "1+1="}, [1, 2]) == ({"prompt": "1+1="}, [1, 2])
    assert tk.load_environment(tk.RewardFunctionsConfig(), tokenizer()) is None


@shows("policy_loss", "choose_kl")
def losses_of_policies() -> None:
    logps, mask = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True), torch.tensor([[1, 1], [1, 0]])
    totals = {"completions": 2.0, "completion_tokens": 3.0}
    weights, _ = sampler_weights(logps, logps.detach() - 0.1, mask, totals)
    assert tk.choose_kl("grpo") == ("loss", "k3")
    assert (kl_estimate(logps, logps - 1, "k1") == 1).all()
    for loss_type in ("dapo", "grpo", "gspo", "rloo"):
        loss, metrics = tk.policy_loss(logps, None, torch.tensor([1.0, -1.0]), mask, totals, loss_type=loss_type, sampler_weights=weights)
        assert torch.isfinite(loss)
        assert metrics["ratio"] == 1


@shows("value_loss")
def advantages_of_tokens() -> None:
    logps, values, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.5, 0.75]]), torch.ones(1, 2)
    rewards = token_rewards(torch.tensor([1.0]), logps, logps, mask, beta=0.05)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert returns.tolist() == [[1.0, 1.0]]
    assert whiten(advantages, mask).sum() == pytest.approx(0, abs=1e-6)
    loss, _ = tk.value_loss(values, values, returns, mask, {"completion_tokens": 2.0})
    assert loss == pytest.approx((0.25 + 0.0625) / 4)


@shows("tokenize_for_preference", "preference_baselines", "collate_pairs", "choose_pair_layout", "pair_logps", "preference_loss", "preference_metrics")
def pairs() -> None:
    splits, model = tk.tokenize_for_preference(preferences(), tokenizer(), tk.DataConfig(max_length=64)), language_model()
    assert tk.preference_baselines(splits)
    collate = functools.partial(tk.collate_pairs, layout=tk.choose_pair_layout(model, "auto"), pad_token_id=tokenizer().pad_token_id)
    policy = tk.pair_logps(model, collate(documents(splits)))
    loss, _ = tk.preference_loss(policy, policy, {"pairs": 3.0}, beta=0.1)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)
    _, evaluation = tk.build_dataloaders(splits, collate, tk.DataConfig())
    metrics = tk.preference_metrics(lambda model, micro_batch: (tk.pair_logps(model, micro_batch),) * 2)
    assert tk.eval_with_gather(accelerator(), model, evaluation, metrics)["eval_reward_margin"] == 0


@shows("reward_loss", "reward_metrics", "collate_scored_pairs", "choose_scored_pair_layout")
def rewards() -> None:
    splits, model = tk.tokenize_for_preference(preferences(), tokenizer(), tk.DataConfig(max_length=64)), classifier(1)
    layout = tk.choose_scored_pair_layout(model)
    collate = functools.partial(tk.collate_scored_pairs, layout=layout, pad_token_id=tokenizer().pad_token_id)
    chosen, rejected = pair_rewards(model, collate(documents(splits)))
    assert chosen.shape == rejected.shape == (3,)
    loss, _ = tk.reward_loss(model, collate(documents(splits)), {"pairs": 3.0}, margin_coefficient=0.0)
    assert loss > 0
    _, evaluation = tk.build_dataloaders(splits, collate, tk.DataConfig())
    assert "eval_reward_accuracy" in tk.eval_with_gather(accelerator(), model, evaluation, tk.reward_metrics())
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    assert answer_rewards(model, inputs).shape == (1,)


@shows("Rollout", "Reward", "load_rewards", "rewards_made_of", "score_rollouts")
def rewards_of_completions() -> None:
    row = {"prompt": "What is 2 + 2?", "answer": "4"}
    rollouts = [tk.Rollout(0, index, [5, 6], [7], [-0.1], False, row, text) for index, text in enumerate(["It is 4.", "5"])]
    config = tk.RewardFunctionsConfig(reward_funcs=["number"], reward_weights=[2.0])
    loaded = tk.load_rewards(config)
    assert tk.rewards_made_of(config)["files"] == {}  # of what is built in the toolkit's version is known
    mine = tk.Reward("short", lambda completions, **columns: [-len(text) / 10 for text in completions])
    scored = tk.score_rollouts(rollouts, [*loaded, mine], accelerator())
    assert [each.rewards for each in scored] == [{"number": 1.0, "short": -0.8}, {"number": 0.0, "short": -0.1}]
    assert [each.reward for each in scored] == [1.2, -0.1]


@shows("tokenize_for_ranking", "collate_lists", "ranking_loss", "ranking_list_metrics", "ranking_baselines")
def rankings() -> None:
    rows = [{"query": f"red {i}", "documents": ["one red", "two blue"], "labels": [1, 0]} for i in range(3)]
    raw = DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows))
    splits, model = tk.tokenize_for_ranking(raw, tokenizer(), tk.DataConfig(max_length=64)), classifier(1)
    collate = functools.partial(tk.collate_lists, pad_token_id=tokenizer().pad_token_id)
    loss, shown = tk.ranking_loss(model, collate(documents(splits)), {"examples": 3.0, "comparisons": 3.0})
    assert loss > 0
    assert "precision_at_1" in shown
    _, evaluation = tk.build_dataloaders(splits, collate, tk.DataConfig())
    assert "eval_ndcg_at_10" in tk.eval_with_gather(accelerator(), model, evaluation, tk.ranking_list_metrics())
    assert tk.ranking_baselines(raw)["BM25 on words"] == 1.0


@shows("tokenize_for_multiple_choice", "multiple_choice_loss", "multiple_choice_metrics", "choice_baselines")
def choices() -> None:
    from transformers import BertConfig, BertForMultipleChoice

    rows = [{"question": f"red {i}", "choices": ["one red", "two blue", "a"], "label": 0} for i in range(3)]
    raw = DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows))
    splits = tk.tokenize_for_multiple_choice(raw, tokenizer(), tk.DataConfig(max_length=64))
    model = BertForMultipleChoice(BertConfig(
        vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ))  # fmt: skip
    collate = functools.partial(tk.collate_lists, pad_token_id=tokenizer().pad_token_id)
    loss, shown = tk.multiple_choice_loss(model, collate(documents(splits)), {"examples": 3.0})
    assert loss > 0
    assert "accuracy" in shown
    _, evaluation = tk.build_dataloaders(splits, collate, tk.DataConfig())
    assert "eval_accuracy" in tk.eval_with_gather(accelerator(), model, evaluation, tk.multiple_choice_metrics)
    assert tk.choice_baselines(raw)["BM25 on words"] == 1.0


@shows(
    "tokenize_for_unpaired", "unpaired_baselines", "mismatch_answers", "collate_answers", "choose_answer_layout", "answer_logps",
    "mismatched_logps", "estimate_kl", "unpaired_metrics",
)  # fmt: skip
def single_answers() -> None:
    splits, model = tk.tokenize_for_unpaired(marked(), tokenizer(), tk.DataConfig(max_length=64)), language_model()
    assert tk.unpaired_baselines(splits)
    splits.update(tk.mismatch_answers(splits, max_length=64))
    collate = functools.partial(tk.collate_answers, layout=tk.choose_answer_layout(model), pad_token_id=tokenizer().pad_token_id)
    assert tk.answer_logps(model, collate(documents(splits))).shape == (3,)

    def logps(model: Any, answers: dict[str, Any]) -> Any:
        return (tk.answer_logps(model, answers),) * 2

    def logps_of_mismatched(model: Any, answers: dict[str, Any]) -> Any:
        return (tk.mismatched_logps(model, answers),) * 2

    train, evaluation = tk.build_dataloaders(splits, collate, tk.DataConfig(max_steps=1))
    assert tk.estimate_kl(accelerator(), model, next(iter(train.batches())), logps_of_mismatched) == 0
    metrics = tk.unpaired_metrics(logps, logps_of_mismatched)
    assert tk.eval_with_gather(accelerator(), model, evaluation, metrics)["eval_kl"] == 0


@shows("PromptConfig", "tokenize_for_prompts", "collate_prompts")
def prompts_with_answers() -> None:
    @dataclass(frozen=True)
    class Config(tk.DataConfig, tk.PromptConfig):
        max_steps: int | None = 1

    raw = rows(prompt=[f"What is {n}?" for n in range(20)], answer=TEXTS)
    splits = tk.tokenize_for_prompts(raw, tokenizer(), Config())
    train, _ = tk.build_dataloaders(splits, tk.collate_prompts, Config())
    batch = next(iter(train.batches())).micro_batches[0]
    asked = tokenizer().batch_decode(batch["prompt_ids"])
    assert asked == [row["prompt"] for row in batch["rows"]] == [f"What is {number}?" for number in batch["prompt"]]
    assert [row["answer"] for row in batch["rows"]] == [TEXTS[number] for number in batch["prompt"]]


@shows("SamplingSettings", "sample_groups", "completion_key")
def completions_of_groups() -> None:
    keys = np.array([[tk.completion_key(0, 0, prompt, index) for index in range(2)] for prompt in range(3)], dtype=np.uint64)
    prompts = [tokenizer()(text)["input_ids"] for text in TEXTS[:3]]
    groups = tk.sample_groups(language_model(), prompts, keys, tk.SamplingSettings(max_new_tokens=4))
    assert all(len(each.tokens) == len(each.logps) == 4 and each.truncated for group in groups for each in group)
    assert isinstance(groups[0][0], Completion)


@shows("open_phase", "save_rollouts", "sample_rollouts", "Rollout", "policy_batches", "collate_rollouts", "rollout_logps")
def rollouts_and_the_batches_of_their_updates() -> None:
    @dataclass(frozen=True)
    class Config(tk.DataConfig, tk.PromptConfig):
        max_steps: int | None = 1

    splits = tk.tokenize_for_prompts(rows(prompt=TEXTS), tokenizer(), Config())
    train, _ = tk.build_dataloaders(splits, tk.collate_prompts, Config())
    model, settings = language_model(), tk.SamplingSettings(max_new_tokens=4, temperature=0.9)
    batch = next(iter(train.batches()))
    phase = tk.open_phase(accelerator(), model, "run", 1, settings)
    rollouts = tk.sample_rollouts(accelerator(), model, tokenizer(), batch, settings, num_generations=2, phase=phase)
    tk.save_rollouts(accelerator(), phase, rollouts)
    assert rollouts_of("run", 1) == rollouts
    assert [rollout.index for rollout in rollouts] == [0, 1] * batch.size
    assert isinstance(rollouts[0], tk.Rollout)
    collate = functools.partial(tk.collate_rollouts, layout="padded", pad_token_id=0)
    (update,) = tk.policy_batches(accelerator(), rollouts, [1.0, -1.0] * batch.size, collate, micro_batch_size=64)
    with torch.no_grad():
        logps, entropies = tk.rollout_logps(model, update.micro_batches[0], settings.temperature)
    assert torch.allclose(logps, update.micro_batches[0]["sampled_logps"], atol=1e-4)
    assert bool((entropies > 0).all())


@shows(
    "RolloutConfig", "in_prompts", "sampling_settings", "sampled_reward_metrics", "with_logps", "reference_logps", "shaped_rewards",
    "rollout_metrics", "best_and_worst", "mean_metrics", "connect_server", "correct_for_server",
)
def a_step_of_reinforcement_learning() -> None:
    @dataclass(frozen=True)
    class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.PromptConfig, tk.RolloutConfig):
        hidden_size: int | None = 32
        num_hidden_layers: int | None = 1
        max_steps: int | None = 1
        max_completion_length: int = 3
        num_generations: int = 2
        per_device_train_batch_size: int = 8

    config, model = Config(), language_model()
    raw = rows(prompt=TEXTS, answer=["7"] * len(TEXTS))
    splits = tk.tokenize_for_prompts(raw, tokenizer(), config)
    prompts = tk.in_prompts(config, config.num_generations, accelerator())
    train, evaluation = tk.build_dataloaders(splits, tk.collate_prompts, prompts, accelerator())
    rewards = tk.load_rewards(tk.RewardFunctionsConfig(reward_funcs=["exact_match"], reward_processes=0))
    drawn = tk.sampling_settings(config, model, tokenizer())
    batch = next(iter(train.batches()))
    assert (batch.size, drawn.max_new_tokens) == (4, 3)
    server = tk.connect_server(accelerator(), config, tokenizer(), "runs/server")
    rollouts = tk.sample_rollouts(accelerator(), model, tokenizer(), batch, drawn, num_generations=2, server=server)
    assert tk.correct_for_server(server, rollouts) == (rollouts, {})
    rollouts = tk.score_rollouts(rollouts, rewards)
    collate = functools.partial(tk.collate_rollouts, layout="padded", pad_token_id=0)

    def logps_of(model: Any, completions: dict[str, Any]) -> Any:
        return tk.rollout_logps(model, completions)[0]

    reference = tk.reference_logps(accelerator(), language_model, config, logps_of, model=config.model)
    rollouts = tk.with_logps(accelerator(), model, rollouts, collate, micro_batch_size=8, reference_logps=reference)
    assert tk.shaped_rewards(rollouts, beta=0.1).shape == (4, 2)
    assert float(tk.rollout_metrics(rollouts)["reward"]) == 0
    assert len(tk.best_and_worst(rollouts, 1)) == 2
    steps = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    assert float(tk.mean_metrics(steps)["loss"]) == 1.5
    metrics = tk.sampled_reward_metrics(accelerator(), tokenizer(), rewards, tk.sampling_settings(config, model, tokenizer(), evaluates=True))
    assert tk.eval_with_gather(accelerator(), model, evaluation, metrics)["eval_reward"] == 0


@shows("add_value_head", "logps_and_values", "token_advantages")
def a_step_of_ppo() -> None:
    model = tk.add_value_head(language_model())
    rollouts = [tk.Rollout(i, 0, [5, 6], [7, 8, 9][: 3 - i], [-1.0] * (3 - i), False, {}, "", reward=float(i)) for i in range(2)]
    collate = functools.partial(tk.collate_rollouts, layout="padded", mask_unscored_completions=True)

    def before(model: Any, completions: dict[str, Any]) -> Any:
        logps, _, values = tk.logps_and_values(model, completions)
        return {"old_logps": logps, "old_values": values}

    rollouts = tk.with_logps(accelerator(), model, rollouts, collate, micro_batch_size=2, old=before)
    assert rollouts[0].old_values == [0.0, 0.0, 0.0]  # the head begins at 0
    rollouts, advantages, metrics = tk.token_advantages(rollouts, lam=1.0)
    assert rollouts[1].returns == [1.0, 1.0]
    assert advantages.shape == (2, 3)
    assert float(metrics["explained_variance"]) == 0


@dataclass(frozen=True)
class Preferring(tk.ModelConfig, tk.DataConfig, tk.OptimConfig, tk.PreferenceConfig, tk.ReferenceConfig, tk.AdapterConfig, tk.RunConfig):
    reference: str = "model"
    max_length: int = 64
    max_steps: int = 1
    use_cpu: bool = True


@shows("build_reference", "keep_reference", "sync_reference")
def a_reference() -> None:
    config = Preferring(output_dir="runs/dpo")
    splits = tk.tokenize_for_preference(preferences(), tokenizer(), config)
    train, evaluation = tk.build_dataloaders(splits, tk.collate_pairs, config, accelerator())
    model = language_model()
    reference = tk.build_reference(accelerator(), model, language_model, train, evaluation, config)
    assert isinstance(reference, Reference)
    optimizer, _ = tk.build_optimizer(model, tk.OptimConfig(optim="adamw_torch"), num_steps=1)
    model, optimizer = accelerator().prepare(model, optimizer)
    with tk.open_run(accelerator(), config, model, optimizer, train) as run:
        tk.keep_reference(run, reference, config)
        for batch in run:
            tk.sync_reference(run, reference, model, config)
            assert reference(model, batch.micro_batches[0]).chosen.shape == (len(batch.examples),)
            break


@dataclass(frozen=True)
class Distilling(Config, tk.DistillationConfig):
    teacher: str | None = "teacher"


@shows(
    "TeacherLogps", "build_teacher", "load_student_tokenizer", "distillation_loss", "distillation_metrics",
    "DistillationConfig", "say_once", "with_own_answers", "keep_teacher", "update_teacher",
)  # fmt: skip
def a_teacher() -> None:
    assert tk.DistillationConfig().distillation_loss == "forward_kl"
    config, splits, student = Distilling(), tk.tokenize_for_sft(chats(), tokenizer(), tk.DataConfig(max_length=64)), language_model()
    tk.save_model(None, language_model(), tokenizer(), "teacher")
    assert tk.load_student_tokenizer(tk.ModelConfig(), config.teacher).get_vocab() == tokenizer().get_vocab()
    loaders = tk.build_dataloaders(splits, tk.collate_padded, config)
    teacher, train, evaluation = tk.build_teacher(
        accelerator(), student, tokenizer(), config, *loaders, teacher="teacher", max_length=64, packed=False
    )
    assert isinstance(teacher, Teacher)
    for batch in train.batches():
        own_half = replace(config, on_policy_share=0.5, max_new_tokens=4)
        own = tk.with_own_answers(accelerator(), student, tokenizer(), train, batch, own_half)
        assert own.examples == batch.examples
        break
    loss, metrics = tk.distillation_loss(student, tk.collate_padded(documents(splits)), {"tokens": 9.0}, teacher=teacher)
    assert loss.item() == pytest.approx(0, abs=1e-6)  # they are the same model
    assert metrics["divergence"] == loss
    assert tk.eval_with_gather(accelerator(), student, evaluation, tk.distillation_metrics(teacher))["eval_kl"] < 1e-6
    ema = replace(config, self_distillation="ema", ema_decay=0.0)
    itself, _, _ = tk.build_teacher(accelerator(), student, tokenizer(), ema, *loaders, teacher=None, max_length=64, packed=False)
    kept: dict[str, Any] = {}
    tk.keep_teacher(SimpleNamespace(kept={}, keep=kept.__setitem__, saver=SimpleNamespace(on_rollback=[])), itself)
    student.model.norm.weight.data.add_(1.0)
    tk.update_teacher(itself, student)
    assert torch.equal(kept["teacher"]["model.norm.weight"], student.model.norm.weight)
    assert tk.TeacherLogps(torch.tensor([[0.5, 0.5]]).log()).logps.shape == (1, 2)
    tk.say_once("a line of the first rank")


@shows(
    "build_classifier_teacher", "classifier_distillation_loss",
    "ClassifierDistillationConfig", )
def a_teacher_of_classes() -> None:
    assert TeacherConfig().temperature == 1.0
    tk.save_model(None, classifier(2), tokenizer(), "teacher")
    student = classifier(2)
    teacher = tk.build_classifier_teacher(
        accelerator(), student, tokenizer(), tk.ClassifierDistillationConfig(), teacher="teacher", max_length=64, seed=0
    )
    assert isinstance(teacher, ClassifierTeacher)
    batch = tk.collate_padded([{"input_ids": [5, 6, 7], "labels": 1}], pad_token_id=tokenizer().pad_token_id)
    data_loss, _ = tk.classification_task("single_label", 2)
    student.eval()
    _, metrics = tk.classifier_distillation_loss(
        student, batch, {"examples": 1.0}, teacher=teacher.ask, data_loss=data_loss, pairs=teacher.pairs
    )
    assert metrics["divergence"].item() == pytest.approx(0, abs=1e-6)  # they are the same model


@shows("build_accelerator", "open_run", "Run", "load_best", "stopped_improving", "sample_texts", "save_model", "save_to_hub", "Summary")
def a_run() -> None:
    config = Config(output_dir="runs/tiny")
    accelerator = tk.build_accelerator(config)
    splits, model = tk.tokenize_for_sft(chats(), tokenizer(), config), language_model()
    train, evaluation = tk.build_dataloaders(splits, tk.collate_padded, config, accelerator)
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    prompts = tk.sample_prompts(chats(), tokenizer(), config)
    with tk.open_run(accelerator, config, model, optimizer, train) as run:
        assert isinstance(run, tk.Run)
        for batch in run:
            rates = schedule(run.progress, run.objective)
            run.log(tk.train_step(accelerator, model, optimizer, batch, tk.causal_lm_loss, rates))
            if run.due("eval"):
                run.log(tk.eval_with_gather(accelerator, model, evaluation, tk.causal_lm_metrics))
                run.add_samples(tk.sample_texts(accelerator, model, tokenizer(), prompts, config))
                assert not tk.stopped_improving(run.history("eval_loss"), patience=2)
        tk.load_best(run)
        assert tk.save_model(accelerator, model, tokenizer(), config.output_dir, run.summary).name == "model"
        tk.save_to_hub(run)  # nothing without --push-to-hub
    assert isinstance(run.summary, tk.Summary)
    assert write_report(["runs/tiny"], "report.html").exists()


@shows("run_recipe")
def a_recipe() -> None:
    seen = []

    def main(config: Config) -> None:
        seen.append(config.learning_rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["recipe.py", "--learning-rate", "0.5"])
        tk.run_recipe(main)
    assert seen == [0.5]


@shows("Interrupted")
def ends_of_a_run() -> None:
    assert not issubclass(tk.Interrupted, Exception)


@shows(
    "EmbeddingConfig", "embedding_style", "load_encoder", "choose_text_layout", "sentence_files", "tokenize_for_embedding",
    "collate_text_groups", "embed_texts", "embedding_task", "cache_gradients", "cached_gradient_loss", "trial_loss",
    "retrieval_baselines",
)  # fmt: skip
def embeddings() -> None:
    @dataclass(frozen=True)
    class Mine(Config, tk.EmbeddingConfig):
        model: str = "tiny-bert"

    config = Mine()
    encoder_tokenizer = tk.train_tokenizer(TEXTS, vocab_size=300, encoder=True)
    style = tk.embedding_style(config, pooling=config.pooling)
    assert style == EmbeddingStyle("mean", "", "")
    raw = rows(query=[f"What is {n}?" for n in range(20)], positive=TEXTS)
    splits = tk.tokenize_for_embedding(raw, encoder_tokenizer, config, query_prompt=style.query_prompt)
    model = tk.load_encoder(config, encoder_tokenizer)
    assert "modules.json" in tk.sentence_files(model, style, config.max_length)
    collate = functools.partial(tk.collate_text_groups, pad_token_id=encoder_tokenizer.pad_token_id, layout=tk.choose_text_layout(model))
    train, evaluation = tk.build_dataloaders(splits, collate, config, accelerator())
    embed = functools.partial(tk.embed_texts, pooling=style.pooling)
    loss, metrics = tk.embedding_task(splits, embed, train.global_batch_size, model.config.hidden_size, train.examples_to_consume, two_way=True)
    batch = next(iter(train.batches()))
    assert tk.trial_loss(embed)(model, batch.micro_batches[0], batch.totals)[0].requires_grad
    batch = tk.cache_gradients(accelerator(), model, batch, embed, loss)
    assert tk.accumulate_gradients(accelerator(), model, batch, tk.cached_gradient_loss(embed))["loss"] > 0
    assert tk.eval_with_gather(accelerator(), model, evaluation, metrics)["eval_recall_at_10"] == 1.0
    assert tk.retrieval_baselines(raw).keys() == {"chance", "TF-IDF on words", "TF-IDF on parts of words"}


@shows("memory_table")
def memory() -> None:
    model = language_model()
    optimizer, _ = tk.build_optimizer(model, tk.OptimConfig(optim="adamw_torch"), num_steps=1)
    assert "ZeRO-3" in tk.memory_table(accelerator(), model, optimizer, tk.OptimConfig(optim="adamw_torch"))


@shows(
    "Seq2SeqConfig", "GeneratedTextConfig", "tokenize_for_seq2seq", "collate_seq2seq", "decoder_start", "set_target_language",
    "seq2seq_loss", "seq2seq_metrics", "target_metrics", "sample_targets", "copy_baselines",
)  # fmt: skip
def sources_and_targets() -> None:
    @dataclass(frozen=True)
    class Config(tk.ModelConfig, tk.DataConfig, tk.Seq2SeqConfig, tk.GeneratedTextConfig):
        model: str = "tiny-t5"
        hidden_size: int | None = 32
        num_hidden_layers: int | None = 1
        max_length: int = 64
        max_target_length: int = 8
        max_steps: int | None = 1

    config = Config(num_samples=1)
    assert issubclass(Config, tk.Seq2SeqConfig)
    assert issubclass(Config, tk.GeneratedTextConfig)
    splits = tk.tokenize_for_seq2seq(rows(source=TEXTS, target=[text[-5:] for text in TEXTS]), tokenizer(), config)
    assert tk.copy_baselines(splits, tokenizer(), "exact_match")["copy of the source"] == 0
    model = tk.load_model("AutoModelForSeq2SeqLM", config, tokenizer())
    tk.set_target_language(model, tokenizer())
    first = tk.decoder_start(model)
    assert first == tokenizer().pad_token_id
    collate = functools.partial(tk.collate_seq2seq, pad_token_id=tokenizer().pad_token_id, decoder_start_token_id=first)
    _, evaluation = tk.build_dataloaders(splits, collate, config)
    micro_batch = collate(documents(splits))
    loss, _ = tk.seq2seq_loss(model, micro_batch, {"tokens": len(micro_batch["supervised_positions"])})
    assert loss > 0
    assert tk.eval_with_gather(accelerator(), model, evaluation, tk.seq2seq_metrics)["eval_loss"] > 0
    texts = tk.target_metrics(accelerator(), tokenizer(), splits, config, config.max_target_length)
    assert tk.eval_with_gather(accelerator(), model, evaluation, texts)["eval_exact_match"] == 0
    shown = tk.sample_targets(accelerator(), model, tokenizer(), evaluation, config, config.max_target_length)
    assert [sample["prompt"] for sample in shown] == [TEXTS[18]]


@shows("sweep", "FunctionTrial", "Pruned")
def sweeping() -> None:
    def loss(settings: dict[str, float], trial: tk.FunctionTrial) -> float:
        trial.report(1, settings["rate"])
        if settings["rate"] > 0.9:
            raise tk.Pruned
        return abs(settings["rate"] - 0.3)

    trials = tk.sweep(loss, {"rate": "float:0..1"}, trials=6)
    found = [abs(float(trial.settings["rate"]) - 0.3) for trial in trials]
    assert found[0] == min(found)


def test_a_public_name_is_used_by_a_recipe_a_benchmark_or_a_page() -> None:
    """Fails when: `from .losses.pair_losses import ipo_loss as ipo_loss` is put into toolkit/__init__.pyi."""
    root = Path(__file__).resolve().parents[1]
    folders = [path for folder in ("recipes", "benchmarks", "docs") for path in (root / folder).rglob("*.[pm][yd]")]
    texts = [path.read_text(encoding="utf-8") for path in [*folders, root / "README.md", root / "CONTRIBUTING.md"]]
    written = {name for text in texts for name in re.findall(r"\btk\.(\w+)", text)}
    assert set(tk.__all__) - written == set()


def test_every_public_name_has_an_example_that_uses_it() -> None:
    """Fails when: a line is added to toolkit/__init__.pyi, or an example no longer uses what it is said to show."""
    assert sorted(EXAMPLES) == sorted({*tk.__all__, "__version__"})
    assert [name for name, example in EXAMPLES.items() if f"tk.{name}" not in inspect.getsource(example)] == []


@pytest.mark.parametrize("example", dict.fromkeys(EXAMPLES.values()), ids=lambda example: example.__name__)
def test_an_example_runs(example: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a public function needs more than its docstring says, such as a field of a whole recipe's config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    example()
