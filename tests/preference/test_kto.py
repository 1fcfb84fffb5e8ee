"""A step of KTO: its reference point over the global batch, its loss and gradient, its metrics, against plain loops and TRL."""

import copy
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from sklearn.metrics import roc_auc_score

import toolkit as tk
from toolkit.data.loading.collate_pairs import mismatched_of
from toolkit.preference import reference_cache
from toolkit.preference.pair_layouts import choose_answer_layout
from toolkit.preference.reference import build_reference

pytestmark = pytest.mark.usefixtures("own_cache")

VOCABULARY = 260


@dataclass(frozen=True)
class Config(
    tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.ReferenceConfig, tk.UnpairedConfig, tk.OptimConfig, tk.RunConfig
):  # fmt: skip
    vocab_size: int | None = VOCABULARY
    hidden_size: int | None = 16
    num_hidden_layers: int | None = 2
    num_attention_heads: int | None = 2
    intermediate_size: int | None = 32
    max_length: int = 20
    per_device_train_batch_size: int = 8
    global_batch_size: int | None = 8
    max_steps: int | None = 1
    reference: str = "model"
    beta: float = 0.3
    desirable_weight: float = 1.4
    undesirable_weight: float = 0.7
    lora_r: int = 2


class Tokens:
    """What load_model asks of a tokenizer."""

    pad_token_id, eos_token_id, bos_token_id = 0, 1, None

    def __len__(self) -> int:
        return VOCABULARY


def splits(config: Config, rows: int = 8, held_out: int = 7) -> DatasetDict:
    """Prompts of 1 to 12 tokens, some of them twice, with answers of 1 to 8."""
    random_numbers = np.random.default_rng(1)
    made: list[dict[str, Any]] = []
    for i in range(rows + held_out):
        prompt = random_numbers.integers(2, VOCABULARY, int(random_numbers.integers(1, 13))).tolist()
        if i % 4 == 1:
            prompt = made[-1]["input_ids"][: made[-1]["prompt_tokens"]]
        answer = random_numbers.integers(2, VOCABULARY, int(random_numbers.integers(1, 9))).tolist()
        made.append({
            "input_ids": prompt + answer, "prompt_tokens": len(prompt), "completion_tokens": len(answer), "desirable": i % 3 != 1,
            "answer": i, "prompt_key": hash(tuple(prompt)), "length": len(prompt + answer), "supervised_tokens": len(answer),
        })  # fmt: skip
    whole = DatasetDict(train=Dataset.from_list(made[:rows]), validation=Dataset.from_list(made[rows:]))
    return tk.mismatch_answers(whole, config.max_length) if config.loss_type == "kto" else whole


def load(config: Config, dtype: torch.dtype = torch.float32) -> Any:
    return tk.add_adapter(tk.load_model("AutoModelForCausalLM", config, Tokens(), packed=None), config).to(dtype)  # type: ignore[arg-type]


def moved(model: Any, seed: int = 1) -> Any:
    """The model after it has learned something: every trained number is another. With these seeds z is above 0: 1 in training, 10
    in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype))
    return model


def loss_values(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("loss_type", "beta", "desirable_weight", "undesirable_weight")}


def functions(model: Any, reference: Any, config: Config) -> SimpleNamespace:
    """What recipes/kto.py makes of a reference."""

    def logps(model: Any, answers: dict[str, Any]) -> Any:
        before = reference(model, answers)
        return tk.answer_logps(model, answers), before

    def logps_of_mismatched(model: Any, answers: dict[str, Any]) -> Any:
        return tk.mismatched_logps(model, answers), reference.mismatched(model, answers)

    def loss_fn(model: Any, answers: dict[str, Any], totals: dict[str, float], kl: Any = 0.0) -> Any:
        return tk.unpaired_loss(*logps(model, answers), answers["desirable"], kl, totals, **loss_values(config))

    return SimpleNamespace(logps=logps, mismatched=logps_of_mismatched, loss_fn=loss_fn)


def built(config: Config, dtype: torch.dtype = torch.float32, layout: str = "packed") -> SimpleNamespace:
    accelerator, data = Accelerator(cpu=True), splits(config)
    model = load(config, dtype)
    train, evaluation = tk.build_dataloaders(data, partial(tk.collate_answers, layout=layout), config)
    reference = build_reference(accelerator, model, lambda: load(config, dtype), train, evaluation, config)
    made = functions(model, reference, config)
    return SimpleNamespace(accelerator=accelerator, model=model, reference=reference, train=train, evaluation=evaluation, data=data, **vars(made))


def step(run: SimpleNamespace, config: Config) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of the first step before clipping, and its metrics."""
    optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.0)
    kept: dict[str, torch.Tensor] = {}
    optimizer.step = lambda: kept.update({n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None})  # type: ignore[method-assign]
    batch = next(run.train.batches())
    kl = tk.estimate_kl(run.accelerator, run.model, batch, run.mismatched) if config.loss_type == "kto" else 0.0
    metrics = tk.train_step(run.accelerator, run.model, optimizer, batch, partial(run.loss_fn, kl=kl), [0.0], max_grad_norm=0.0)
    return torch.cat([kept[name].flatten().double() for name in sorted(kept)]), {name: float(value) for name, value in metrics.items()}


def plain_logp(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The definition: one answer behind its prompt, alone, with all logits."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).sum()


def plain_metrics(model: Any, before: Any, rows: list[dict[str, Any]], config: Config) -> dict[str, torch.Tensor]:
    """Equations 7 and 8 of the paper, one answer at a time; z over all of `rows`, which are a whole split."""
    ratios, logps, others = [], [], []
    for row in rows:
        prompt, answer = row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]
        logps.append(plain_logp(model, prompt, answer))
        with torch.no_grad():
            ratios.append(logps[-1] - plain_logp(before, prompt, answer))
            other = rows[row["mismatched_row"]] if "mismatched_row" in row else row
            theirs = other["input_ids"][other["prompt_tokens"] :][: config.max_length - len(prompt)]
            others.append(plain_logp(model, prompt, theirs) - plain_logp(before, prompt, theirs))
        ratios[-1] = logps[-1] - plain_logp(before, prompt, answer).detach()
    z = max(0.0, float(torch.stack(others).mean())) if config.loss_type == "kto" else 0.0
    losses, right = [], []
    for row, ratio in zip(rows, ratios, strict=True):
        good = row["desirable"]
        value = torch.sigmoid(config.beta * (ratio - z) if good else config.beta * (z - ratio))
        losses.append((config.desirable_weight if good else config.undesirable_weight) * (1 - value))
        right.append(bool(ratio > z) if good else bool(ratio < z))
    kinds = {"desirable": [row["desirable"] for row in rows], "undesirable": [not row["desirable"] for row in rows]}
    metrics = {"loss": torch.stack(losses).mean(), "reward_accuracy": torch.tensor(float(np.mean(right)))}
    for kind, of_it in kinds.items():
        metrics[f"rewards_{kind}"] = config.beta * torch.stack([r for r, is_so in zip(ratios, of_it, strict=True) if is_so]).mean().detach()
        metrics[f"logps_{kind}"] = torch.stack([p for p, is_so in zip(logps, of_it, strict=True) if is_so]).mean().detach()
    metrics["reward_margin"] = metrics["rewards_desirable"] - metrics["rewards_undesirable"]
    if config.loss_type == "kto":
        metrics["kl"] = torch.tensor(z, dtype=torch.float64)
    metrics["reward_auc"] = torch.tensor(roc_auc_score(kinds["desirable"], [float(ratio.detach()) for ratio in ratios]))
    return metrics


LOSSES = [{}, {"loss_type": "apo_zero_unpaired"}]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_a_step_has_the_gradient_of_the_formula_however_its_batch_is_cut(dtype: torch.dtype, tolerance: float, loss: dict[str, str]) -> None:
    """1 x 8, 2 x 4, 3 x 3 and 8 x 1, packed and padded, where z is above 0.

    Fails when: z is the mean of a micro-batch, or the loss is divided by what is in it; a weight is left out.
    """
    config = Config(**loss)
    run = built(config, dtype)
    rows, frozen = run.data["train"].to_list(), copy.deepcopy(run.model)
    moved(run.model)
    plain = plain_metrics(run.model, frozen, rows, config)
    plain["loss"].backward()
    expected = torch.cat([p.grad.flatten().double() for _, p in sorted(run.model.named_parameters())])
    assert "kl" not in plain or plain["kl"] > 0.05
    for micro, layout in ((1, "packed"), (3, "packed"), (4, "padded"), (8, "packed")):
        cut = replace(config, per_device_train_batch_size=micro)
        other = built(cut, dtype, layout)
        moved(other.model)
        gradient, metrics = step(other, cut)
        assert ((gradient - expected).norm() / expected.norm()).item() < tolerance, (micro, layout)
        for name, value in plain.items():
            if name != "reward_auc":
                assert metrics[name] == pytest.approx(value.item(), rel=10 * tolerance, abs=tolerance), (micro, name)


def test_the_reference_point_is_never_below_0_and_has_no_dropout_in_it() -> None:
    """Fails when: the clamp is left out, or comes before the mean; the forward pass is one of training."""
    config = Config(dropout=0.5)
    run = built(config)
    batch = next(run.train.batches())
    found = {float(tk.estimate_kl(run.accelerator, run.model, batch, run.mismatched)) for _ in range(3)}
    assert found == {0.0}  # still its own reference
    assert run.model.training
    policy = torch.tensor([1.0, -4.0, 0.5, -2.0, 0.1, 0.2, 3.0, -9.0])
    logps = lambda sign: lambda model, answers: (sign * policy, torch.zeros(8))  # noqa: E731
    assert float(tk.estimate_kl(run.accelerator, run.model, batch, logps(1))) == 0.0
    assert float(tk.estimate_kl(run.accelerator, run.model, batch, logps(-1))) == pytest.approx(float(-policy.mean()))


def test_a_filler_adds_nothing_to_the_reference_point() -> None:
    """Three micro-batches over two ranks, of which the second computes one for nothing. Fails when: `real` is not asked."""
    whole = Config(per_device_train_batch_size=3)
    run = built(whole)
    moved(run.model)
    expected = float(tk.estimate_kl(run.accelerator, run.model, next(run.train.batches()), run.mismatched))
    found = 0.0
    for rank in range(2):
        batch = next(replace(run.train, data_rank=rank, num_data_ranks=2).batches())
        unclamped = tk.estimate_kl(run.accelerator, run.model, batch, run.mismatched)
        found += float(unclamped)  # every rank's part is above 0 here
    assert not all(batch.real)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("way", "flags"), [
    ("cache", {}), ("model", {}), ("cache", {"use_peft": True}), ("adapter", {"use_peft": True}), ("model", {"use_peft": True}),
    ("cache", {"loss_type": "apo_zero_unpaired"}), ("cache", {"dropout": 0.3}),
], ids=str)  # fmt: skip
def test_every_reference_gives_the_logps_of_both_answers_of_the_model_as_training_starts(way: str, flags: dict[str, Any]) -> None:
    """Asked after the model has changed, for both splits. Fails when: the table's columns are swapped, or dropout is on."""
    config = Config(reference=way, **flags)
    run = built(config)
    assert run.reference.way == way
    batches = [batch.micro_batches[0] for loader in (run.train.batches(), iter(run.evaluation)) for batch in loader]
    run.model.eval()
    with torch.no_grad():
        expected = [tk.answer_logps(run.model, batch) for batch in batches]
        others = [tk.mismatched_logps(run.model, batch) for batch in batches] if config.loss_type == "kto" else []
        moved(run.model)
    run.model.train()
    for batch, wanted in zip(batches, expected, strict=True):
        found = run.reference(run.model, batch)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert not found.requires_grad
    for batch, wanted in zip(batches, others, strict=False):
        assert torch.allclose(run.reference.mismatched(run.model, batch), wanted, rtol=1e-5, atol=1e-5)
    assert run.model.training


def test_a_cache_is_computed_once_and_anew_where_answers_meet_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another --max-length cuts mismatched answers elsewhere. Fails when: what is mismatched is left out of the key."""
    seen: list[int] = []
    plain = reference_cache.answer_logps
    monkeypatch.setattr(reference_cache, "answer_logps", lambda model, batch: seen.extend(batch["answer"].tolist()) or plain(model, batch))
    config = Config(reference="cache")
    built(config)
    assert sorted(seen) == list(range(15))
    seen.clear()
    built(config)
    assert seen == []
    built(replace(config, max_length=15))
    assert sorted(seen) == list(range(15))
    seen.clear()
    built(replace(config, loss_type="apo_zero_unpaired"))
    assert sorted(seen) == list(range(15))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_evaluation_has_one_reference_point_for_the_split_whatever_the_batch_size(size: int, loss: dict[str, str]) -> None:
    """Fails when: z is that of a batch; couples with equal rewards count for the desirable answer."""
    config = Config(per_device_eval_batch_size=size, **loss)
    run = built(config)
    frozen = copy.deepcopy(run.model)
    moved(run.model, seed=10)
    with torch.no_grad():
        plain = plain_metrics(run.model, frozen, run.data["validation"].to_list(), config)
    metrics = tk.unpaired_metrics(run.logps, run.mismatched, **loss_values(config))
    found = tk.eval_with_gather(run.accelerator, run.model, run.evaluation, metrics, prefix="")
    assert found.keys() == plain.keys()
    assert "kl" not in plain or plain["kl"] > 0.05
    for name, value in plain.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name


def test_rewards_of_a_kind_that_a_step_has_none_of_are_no_number_and_enter_no_mean() -> None:
    """Fails when: they count as 0."""
    from toolkit.data.loading.batch import Batch
    from toolkit.tracking.step_metrics import Window

    window = Window()
    for number, desirable in enumerate(([True, True], [True, False])):
        mask = torch.tensor(desirable)
        totals = {"examples": 2.0, "desirable": float(mask.sum()), "undesirable": float((~mask).sum())}
        _, metrics = tk.unpaired_loss(torch.tensor([1.0, 3.0]), torch.zeros(2), mask, 0.0, totals)
        assert torch.isnan(metrics["rewards_undesirable"]).item() is (number == 0)
        of_step = {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(1.0)}
        window.add(number, Batch([], totals, []), metrics | of_step)
    window.read()
    window.seconds = 1.0
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    event = window.event(optimizer, None, SimpleNamespace(device=torch.device("cpu")))
    assert event["rewards_undesirable"] == pytest.approx(3.0 * 0.1)
    assert event["rewards_desirable"] == pytest.approx((2.0 + 1.0) / 2 * 0.1)


def test_answers_stand_in_packed_rows_where_that_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: a model without attention for documents is given packed rows."""
    assert choose_answer_layout(load(Config())) == "packed"
    assert capsys.readouterr().out == ""
    assert choose_answer_layout(tk.load_model("AutoModelForCausalLM", Config(), Tokens(), packed=False)) in ("packed", "padded")  # type: ignore[arg-type]
    model = load(Config())
    model.config._attn_implementation = "eager"
    assert choose_answer_layout(model) == "padded"
    assert "answers are padded: attention 'eager'" in capsys.readouterr().out


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_step_is_that_of_trl_on_the_same_batch(loss: dict[str, str]) -> None:
    """KTOTrainer's own loss with its collator and its fused head, on the same mismatched answers in one micro-batch of eight: loss and
    metrics to 1e-5, the gradient to 1e-4. (Left to itself it mismatches by shifting the answers of a micro-batch.)

    Fails when: the loss is a mean over the answers of each kind, or the prompt's last token is not what predicts an answer's first.
    """
    from trl import KTOConfig, KTOTrainer
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
    from trl.trainer.utils import add_fused_lm_head

    config = Config(**loss)
    run = built(config)
    moved(run.model)
    policy, before = load(replace(config, attn_implementation="sdpa")), load(replace(config, attn_implementation="sdpa"))
    policy.load_state_dict(run.model.state_dict())
    gradient, metrics = step(run, config)
    in_float64 = built(config, torch.float64)
    in_float64.model.load_state_dict({name: value.double() for name, value in run.model.state_dict().items()})
    _, exact = step(in_float64, config)

    args = KTOConfig(
        output_dir="unused", report_to="none", bf16=False, per_device_train_batch_size=8, beta=config.beta, loss_type=config.loss_type,
        desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight,
    )  # fmt: skip
    trainer: Any = object.__new__(KTOTrainer)
    trainer.args, trainer.aux_loss_enabled = args, False
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, unwrap_model=lambda x: x)
    trainer.loss_type, trainer.beta, trainer.precompute_ref_logps = args.loss_type, args.beta, False
    trainer.desirable_weight, trainer.undesirable_weight = args.desirable_weight, args.undesirable_weight
    trainer.calculate_KL, trainer._tp_size, trainer._total_train_tokens = args.loss_type == "kto", 1, 0
    trainer._metrics = {"train": defaultdict(list)}
    add_fused_lm_head(policy, outputs=("log_probs", "entropy", "mean_logits"))
    add_fused_lm_head(before)
    trainer.model, trainer.ref_model = policy.train(), before.eval()
    examples = []
    for document in run.train.rows.documents(next(run.train.batches()).examples):
        ids, prompt = document["input_ids"].tolist(), int(document["prompt_tokens"])
        other = {"KL_completion_ids": document["mismatched"].tolist()} if config.loss_type == "kto" else {}
        examples.append({"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:], "label": bool(document["desirable"]), **other})
    wanted = trainer._compute_loss(policy, DataCollatorForUnpairedPreference(pad_token_id=0)(examples), return_outputs=False)
    wanted.backward()
    theirs = torch.cat([p.grad.flatten().double() for _, p in sorted(policy.named_parameters())])
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert ((gradient - theirs).norm() / theirs.norm()).item() < 1e-4
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    names = {"rewards_desirable": "rewards/chosen", "rewards_undesirable": "rewards/rejected", "reward_margin": "rewards/margins",
             "logps_desirable": "logps/chosen", "logps_undesirable": "logps/rejected", "kl": "kl"}  # fmt: skip
    for ours, its in names.items():
        # a margin of rewards is a difference that rounds in float32 on both sides: each is held against float64
        for side in (metrics.get(ours, 0.0), logged[its]):
            assert side == pytest.approx(exact.get(ours, 0.0), rel=1e-5, abs=1e-6), ours
    assert config.loss_type != "kto" or logged["kl"] > 0.05


def test_a_micro_batch_has_its_own_prompts_before_the_mismatched_answers() -> None:
    """Fails when: the names of the two are mixed up on the way to the model."""
    run = built(Config())
    batch = next(run.train.batches())
    documents, micro_batch = run.train.rows.documents(batch.indices[0]), batch.micro_batches[0]
    for part, key in ((micro_batch, None), (mismatched_of(micro_batch), "mismatched")):
        expected = [
            document["input_ids"].tolist() if key is None else [*document["input_ids"][: document["prompt_tokens"]], *document[key]]
            for document in documents
        ]
        assert part["input_ids"][0].tolist() == [int(token) for row in expected for token in row]
        assert part["cu_seq_lens_q"].tolist() == np.cumsum([0, *map(len, expected)]).tolist()
