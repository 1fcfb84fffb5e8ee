"""Distillation against its formulas on full logits: every divergence, split, kind of head and vocabulary."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from toolkit.data.loading.collate import collate_packed, collate_padded
from toolkit.distillation.teacher import ask_model
from toolkit.distillation.vocabulary import SharedVocabulary
from toolkit.losses import chunked, token_losses
from toolkit.losses.causal_lm import causal_lm_loss, causal_lm_metrics
from toolkit.losses.distillation import distillation_loss, distillation_metrics
from toolkit.losses.divergences import DIVERGENCES, TeacherLogps, divergence_named, divergence_of_tokens

VOCABULARY = 53
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def made(model_class: Any, config: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = model_class(config)
    for parameter in model.parameters():  # far from a fresh start, where all distributions are alike
        parameter.data.normal_(0.0, 0.3)
    return model


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    return made(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **changes}), seed)


def llama_with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=3, target_modules=["q_proj", "lm_head"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(llama(tie_word_embeddings=False), settings)


STUDENTS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(llama, tie_word_embeddings=False),
    "tied": partial(llama, tie_word_embeddings=True),
    "gpt2": lambda: made(GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1,
                                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "adapters on the head": llama_with_adapters,
    "granite scale": lambda: made(GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=0.3)),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl, 2 degrees, a share of the data": {"divergence": "reverse_kl", "temperature": 2.0, "cross_entropy_share": 0.3},
    "jsd .2": {"divergence": "jsd", "beta": 0.2, "temperature": 0.7},
    "jsd .8": {"divergence": "jsd", "beta": 0.8, "cross_entropy_share": 0.5},
    "skewed forward": {"divergence": "skewed_forward_kl", "skew_alpha": 0.1, "temperature": 1.5},
    "skewed reverse": {"divergence": "skewed_reverse_kl", "skew_alpha": 0.3},
}


def documents(count: int = 7) -> list[dict[str, Any]]:
    """Ragged documents of 2 to 12 tokens, about half of them supervised; one without any."""
    random_numbers = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        length = 2 + (i * 7) % 11
        tokens = torch.randint(2, VOCABULARY, (length,), generator=random_numbers)
        hidden = torch.rand(length, generator=random_numbers) < (1.0 if i == 2 else 0.4)
        rows.append({"input_ids": tokens.tolist(), "labels": tokens.masked_fill(hidden, -100).tolist(), "supervised_tokens": 1})
    return rows


def cut(size: int, collate: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    rows = documents()
    return [collate(rows[start : start + size]) for start in range(0, len(rows), size)]


def teacher_of(model: nn.Module) -> Any:
    return ask_model(model.eval(), SharedVocabulary(VOCABULARY))


def ours(model: nn.Module, teacher: Any, micro_batches: list[dict[str, Any]], **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, summed over micro-batches."""
    model.zero_grad()
    totals = {"tokens": float(sum((m["labels"][:, 1:] != -100).sum() for m in micro_batches))}
    found = 0.0
    for micro_batch in micro_batches:
        loss, _ = distillation_loss(model, micro_batch, totals, teacher=teacher, **settings)
        loss.backward()
        found += loss.item()
    return found, gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_divergence(p: torch.Tensor, q: torch.Tensor, divergence: str, beta: float = 0.5, skew_alpha: float = 0.1) -> torch.Tensor:
    """From the papers, in probabilities: p the teacher's, q the student's."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sum(a * torch.log(a / b), dim=-1)

    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, beta * p + (1 - beta) * q) + (1 - beta) * kl(q, beta * p + (1 - beta) * q),
        "skewed_forward_kl": lambda: kl(p, skew_alpha * p + (1 - skew_alpha) * q),
        "skewed_reverse_kl": lambda: kl(q, (1 - skew_alpha) * p + skew_alpha * q),
    }[divergence]()


def plain_loss(student: nn.Module, teacher: nn.Module, temperature: float = 1.0, cross_entropy_share: float = 0.0, **settings: Any) -> Any:
    """Full logits of one document at a time, and one mean at the end."""
    losses = []
    for row in documents():
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        counts = labels[1:] != -100
        own = student(input_ids=ids).logits[0, :-1][counts]
        with torch.no_grad():
            theirs = teacher(input_ids=ids).logits[0, :-1][counts]
        apart = plain_divergence((theirs / temperature).softmax(-1), (own / temperature).softmax(-1), **settings)
        nll = -own.log_softmax(-1)[torch.arange(len(own)), labels[1:][counts]]
        losses.append((1 - cross_entropy_share) * temperature**2 * apart + cross_entropy_share * nll)
    return torch.cat(losses).mean()


@pytest.mark.fast(2)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("settings", SETTINGS)
def test_loss_and_gradient_are_those_of_the_formula_on_full_logits(
    monkeypatch: pytest.MonkeyPatch, settings: str, dtype: torch.dtype, close: float
) -> None:
    """In chunks of four positions, blocks of three. Fails when: temperature^2 is left out, the two sides are exchanged, a chunk
    or a block is skipped, or a gradient in the place of the logits is read as logits."""
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda *_: 4)
    monkeypatch.setattr(token_losses, "_BLOCK_BYTES", 3 * VOCABULARY * dtype.itemsize)
    teacher = llama(seed=1, hidden_size=24, tie_word_embeddings=False).to(dtype).eval()
    for name, make in STUDENTS.items():
        student = make().to(dtype)
        student.zero_grad()
        wanted = plain_loss(student, teacher, **SETTINGS[settings])
        wanted.backward()
        wanted_gradients = gradients(student)
        for micro_batches in (cut(2, collate_padded), cut(7, collate_padded)):
            loss, found = ours(student, teacher_of(teacher), micro_batches, **SETTINGS[settings])
            assert loss == pytest.approx(wanted.item(), rel=close), name
            assert found.keys() == wanted_gradients.keys(), name
            for key, gradient in wanted_gradients.items():
                torch.testing.assert_close(found[key], gradient, rtol=close, atol=close * 10, msg=lambda text, at=(name, key): f"{at}: {text}")


def test_a_teacher_that_changes_its_logits_after_the_head_is_asked_for_those() -> None:
    """A teacher that scales them. Fails when: its head's own output is taken for its logits."""
    teacher = made(GraniteForCausalLM, GraniteConfig(**SHAPE, logits_scaling=0.3), seed=1).double().eval()
    student = llama().double()
    loss, _ = ours(student, teacher_of(teacher), cut(3, collate_padded))
    assert loss == pytest.approx(plain_loss(student, teacher, divergence="forward_kl").item(), rel=1e-10)


@pytest.mark.fast(1)
@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_split_packed_or_padded_has_one_loss_and_one_gradient(size: int, collate: Callable[..., dict[str, Any]]) -> None:
    """Fails when: a sum is divided by the tokens of the micro-batch."""
    models = [llama(seed=seed).double() for seed in (0, 1)]
    settings = SETTINGS["jsd .8"]
    whole, of_whole = ours(models[0], teacher_of(models[1]), cut(7, collate_padded), **settings)
    loss, found = ours(models[0], teacher_of(models[1]), cut(size, collate), **settings)
    assert loss == pytest.approx(whole, rel=1e-10)
    for name, gradient in of_whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)


def test_a_share_of_one_would_be_the_loss_of_the_data_alone() -> None:
    """Fails when: the cross-entropy is taken at the temperature, or over the shared tokens alone."""
    student, teacher = llama().double(), llama(seed=1, hidden_size=24).double()
    micro_batch = cut(7, collate_padded)[0]
    loss, metrics = distillation_loss(
        student, micro_batch, {"tokens": 9.0}, teacher=teacher_of(teacher), temperature=3.0, cross_entropy_share=1.0
    )
    wanted, of_data = causal_lm_loss(student, micro_batch, {"tokens": 9.0})
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert metrics["cross_entropy"].item() == pytest.approx(wanted.item(), rel=1e-12)
    assert metrics["token_accuracy"] == of_data["token_accuracy"]


def apart_and_gradient(teacher: torch.Tensor, logits: torch.Tensor, divergence: str, ids: Any = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = logits.clone()  # in the place of the logits
    values = divergence_of_tokens(TeacherLogps(teacher, ids), gradient, divergence_named(divergence, 0.3, 0.2), gradient=gradient, **more)
    return values, gradient


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_of_a_divergence_are_its_finite_differences(divergence: str, with_ids: bool) -> None:
    """Of the student's logits, at a temperature. Fails when: a part of the formula is left out of the derivative."""
    generator = torch.Generator().manual_seed(0)
    of_teacher, logits = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
    teacher, ids = of_teacher.log_softmax(-1), None
    if with_ids:
        top, ids = teacher.exp().topk(2)
        teacher = torch.cat([top, 1 - top.sum(-1, keepdim=True)], dim=1).log()
    values, gradient = apart_and_gradient(teacher, logits, divergence, ids, temperature=1.7, weight=0.6)
    for i in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[i] = 1e-5
        above, below = (apart_and_gradient(teacher, logits + each, divergence, ids, temperature=1.7)[0] for each in (step, -step))
        torch.testing.assert_close(gradient[:, i], 0.6 * (above - below) / 2e-5, rtol=1e-7, atol=1e-10)
    if not with_ids:
        wanted = plain_divergence(teacher.exp(), (logits / 1.7).softmax(-1), divergence, 0.3, 0.2)
        torch.testing.assert_close(values, wanted, rtol=1e-12, atol=0)
        same, none = apart_and_gradient(teacher, teacher, divergence)
        assert (same.abs() < 1e-15).all()
        assert (none.abs() < 1e-15).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_kernel_on_a_gpu_has_the_values_and_gradients_of_torch(divergence: str, dtype: torch.dtype, tolerance: float) -> None:
    """Of two parts of a row, tokens that are ruled out and, but for reverse_kl, tokens that the teacher rules out.

    Fails when: a part is left out, or a term of the derivative."""
    pytest.importorskip("toolkit.losses.divergences_gpu")
    generator = torch.Generator().manual_seed(0)
    of_teacher, logits = torch.randn(2, 9, 5000, generator=generator).mul(3)
    (logits if divergence == "reverse_kl" else of_teacher)[:2, 100:] = -math.inf
    teacher, logits = of_teacher.log_softmax(-1), logits.to(dtype)
    wanted, of_wanted = apart_and_gradient(teacher.double(), logits.double(), divergence, temperature=1.7, weight=0.6)
    found, gradient = apart_and_gradient(teacher.cuda(), logits.cuda(), divergence, temperature=1.7, weight=0.6)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=2e-6, atol=0)
    torch.testing.assert_close(gradient.cpu().double(), of_wanted, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(("beta", "settings"), [
    (0.0, {"divergence": "forward_kl"}), (0.1, {"divergence": "jsd", "beta": 0.1}), (0.5, {"divergence": "jsd", "beta": 0.5}),
    (0.9, {"divergence": "jsd", "beta": 0.9}), (1.0, {"divergence": "reverse_kl"}),
])  # fmt: skip
def test_it_is_trls_gkd_loss_where_that_is_right(beta: float, settings: dict[str, Any]) -> None:
    """Loss and gradient of TRL 1.16.0's GKDTrainer. Without the number of tokens of the global batch it divides by those of the
    micro-batch, and at a temperature T it has no T^2: there it is another loss, by just these factors.

    Fails when: the teacher's and the student's share of the mixture are exchanged."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = llama().double(), llama(seed=1, hidden_size=24).double().eval()

    def theirs(micro_batch: dict[str, Any], **more: Any) -> torch.Tensor:
        inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            of_teacher = teacher(**inputs).logits[:, :-1]
        return GKDTrainer.generalized_jsd_loss(student(**inputs).logits[:, :-1], of_teacher, micro_batch["labels"][:, 1:], beta=beta, **more)

    whole, (first, *others) = cut(7, collate_padded)[0], cut(2, collate_padded)
    tokens = len(whole["supervised_positions"])
    student.zero_grad()
    wanted = theirs(whole, num_items_in_batch=tokens)
    wanted.backward()
    of_wanted = gradients(student)
    loss, found = ours(student, teacher_of(teacher), [whole], **settings)
    assert loss == pytest.approx(wanted.item(), rel=1e-10)
    for name, gradient in of_wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    at_two, _ = ours(student, teacher_of(teacher), [whole], temperature=2.0, **settings)
    assert at_two == pytest.approx(4 * theirs(whole, num_items_in_batch=tokens, temperature=2.0).item(), rel=1e-10)
    of_means = torch.stack([theirs(micro_batch) for micro_batch in (first, *others)]).mean()
    split, _ = ours(student, teacher_of(teacher), [first, *others], **settings)
    assert split == pytest.approx(loss, rel=1e-10)
    assert abs(of_means.item() / loss - 1) > 0.01


@pytest.mark.slow
def test_where_trls_gkd_trainer_is_another_loss(tmp_path: Path) -> None:
    """Two steps of its 1.16.0, of answers of 12 tokens and of the student's own of 3. Its temperature is that of sampling alone:
    the loss is taken at 1. And the sum over own answers is divided by the tokens of the answers that they replace, here 4 times
    as many. Ours is the mean over the tokens that are there.

    Fails when: the teacher's and the student's share of the mixture are exchanged."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    seen: list[tuple[dict[str, Any], float]] = []

    class Watched(GKDTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            seen.append(({name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")}, loss.item()))
            return loss

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (2, 16), generator=generator).tolist()
    rows = Dataset.from_dict({"input_ids": tokens, "completion_mask": [[0] * 4 + [1] * 12] * 2, "prompt": ["", ""]})
    student, teacher = llama(), llama(seed=1, hidden_size=24).eval()
    for share in (0.0, 1.0):
        arguments = GKDConfig(
            str(tmp_path), lmbda=share, beta=0.2, temperature=2.0, max_new_tokens=3, max_steps=1, per_device_train_batch_size=2, learning_rate=0.0,
            use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Watched(student, teacher, arguments, train_dataset=rows, processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")).train()
    for (inputs, theirs), supervised_tokens in zip(seen, (24, 6), strict=True):
        loss, _ = ours(student, teacher_of(teacher), [inputs], divergence="jsd", beta=0.2)
        assert theirs == pytest.approx(loss * supervised_tokens / 24, rel=1e-5)


def test_a_token_that_the_teacher_excludes_counts_as_its_limit() -> None:
    """0 log 0 is 0. Fails when: -inf times zero reaches the sum."""
    teacher = torch.tensor([[math.log(0.5), math.log(0.5), -math.inf]], dtype=torch.float64)
    student = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    for divergence in ("forward_kl", "jsd", "skewed_forward_kl"):
        found, gradient = apart_and_gradient(teacher, student, divergence)
        assert torch.isfinite(found).all()
        assert torch.isfinite(gradient).all()
    assert apart_and_gradient(teacher, student, "forward_kl")[0].item() == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_token_that_both_exclude_counts_nothing(divergence: str) -> None:
    """And where all tokens are known, the rest. Fails when: -inf less -inf reaches a value or a gradient."""
    both = [torch.tensor([[a, 1 - a]], dtype=torch.float64).log() for a in (0.5, 0.25)]
    value, gradient = apart_and_gradient(*both, divergence)
    excluded, of_excluded = apart_and_gradient(*[nn.functional.pad(each, (0, 1), value=-math.inf) for each in both], divergence)
    assert value.item() == excluded.item()
    assert torch.equal(of_excluded, nn.functional.pad(gradient, (0, 1)))
    for more in (0, 1):  # a third token that isn't among the known ones, which the student excludes
        student = nn.functional.pad(both[1], (0, more), value=-math.inf)
        known, of_known = apart_and_gradient(nn.functional.pad(both[0], (0, 1), value=-math.inf), student, divergence, torch.tensor([[0, 1]]))
        assert value.item() == known.item()
        assert torch.equal(of_known, nn.functional.pad(gradient, (0, more)))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_most_probable_tokens_and_all_others_as_one(divergence: str) -> None:
    """Fails when: the others' probability is that of one of them, or is left out."""
    student, generator = llama().double(), torch.Generator().manual_seed(1)
    micro_batch = cut(7, collate_padded)[0]
    positions = micro_batch["supervised_positions"]
    p = torch.randn(len(positions), VOCABULARY, dtype=torch.float64, generator=generator).softmax(-1)
    top, ids = p.topk(5)
    grouped = torch.cat([top, 1 - top.sum(-1, keepdim=True)], dim=1)
    inputs = {name: value for name, value in micro_batch.items() if name in ("input_ids", "attention_mask")}

    def ask(micro_batch: dict[str, Any], temperature: float, body: Any) -> torch.Tensor:
        return body(lambda piece: TeacherLogps(grouped.log()[piece], ids[piece]), VOCABULARY)

    loss, _ = distillation_loss(student, micro_batch, {"tokens": 7.0}, teacher=ask, divergence=divergence)
    q = student(**inputs).logits.reshape(-1, VOCABULARY)[positions].softmax(-1)
    own = q.gather(1, ids)
    own = torch.cat([own, 1 - own.sum(-1, keepdim=True)], dim=1)
    assert loss.item() == pytest.approx((plain_divergence(grouped, own, divergence).sum() / 7).item(), rel=1e-9)
    found = torch.autograd.grad(loss, student.lm_head.weight, retain_graph=False)[0]
    wanted = torch.autograd.grad(plain_divergence(grouped, own, divergence).sum() / 7, student.lm_head.weight)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


def test_rows_that_only_one_model_has_are_cut_off_and_other_numbers_are_mapped() -> None:
    """A teacher padded to 60 rows; the same teacher with its tokens in another order. Fails when: the index is inverted, or the
    teacher reads the student's numbers."""
    student = llama(vocab_size=57, tie_word_embeddings=False).double()
    padded = llama(seed=1, vocab_size=60, tie_word_embeddings=False).double().eval()
    micro_batch, totals = cut(7, collate_padded)[0], {"tokens": 20.0}
    loss, _ = distillation_loss(student, micro_batch, totals, teacher=ask_model(padded, SharedVocabulary(VOCABULARY)))
    inputs = {name: value for name, value in micro_batch.items() if name in ("input_ids", "attention_mask")}
    q, p = (model(**inputs).logits[..., :VOCABULARY].reshape(-1, VOCABULARY).softmax(-1) for model in (student, padded))
    wanted = plain_divergence(p, q, "forward_kl")[micro_batch["supervised_positions"]].sum() / 20
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)

    of_teacher = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
    other = llama(seed=1, vocab_size=60, tie_word_embeddings=False).double().eval()
    with torch.no_grad():
        for moved, kept in ((other.model.embed_tokens, padded.model.embed_tokens), (other.lm_head, padded.lm_head)):
            moved.weight[of_teacher] = kept.weight[:VOCABULARY]
    mapped, _ = distillation_loss(student, micro_batch, totals, teacher=ask_model(other, SharedVocabulary(VOCABULARY, of_teacher)))
    assert mapped.item() == pytest.approx(wanted.item(), rel=1e-10)


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation has made at once."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return made


def test_logits_of_all_positions_are_never_in_memory_of_either_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the teacher's log-probabilities are made for all positions before the student's chunks."""
    monkeypatch.setattr(chunked, "rows_in_a_chunk", lambda *_: 8)
    sizes = {"hidden_size": 16, "vocab_size": 499, "tie_word_embeddings": False}
    student, teacher = llama(**sizes), llama(seed=1, **sizes).eval()
    row = {"input_ids": list(range(2, 42)), "supervised_tokens": 39}
    micro_batch = collate_padded([row, row])
    ask = ask_model(teacher, SharedVocabulary(499))
    distillation_loss(student, micro_batch, {"tokens": 78.0}, teacher=ask)  # with the trials of two tokens
    with LargestTensor() as largest:
        loss, _ = distillation_loss(student, micro_batch, {"tokens": 78.0}, teacher=ask, divergence="jsd", cross_entropy_share=0.5)
        loss.backward()
    assert largest.most == 16 * 499  # the gradient of the head; 8 positions have half as many logits, all 78 five times


def test_the_teacher_draws_no_random_numbers_and_has_no_gradient() -> None:
    """A teacher with dropout, in evaluation mode. Fails when: `ask_model` leaves out no_grad, or the teacher trains."""
    teacher = llama(seed=1, attention_dropout=0.5)
    student, micro_batch = llama(), cut(7, collate_padded)[0]
    ask = teacher_of(teacher)
    distillation_loss(student, micro_batch, {"tokens": 9.0}, teacher=ask)
    before = torch.get_rng_state()
    loss, _ = distillation_loss(student, micro_batch, {"tokens": 9.0}, teacher=ask)
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_metrics_are_those_of_the_language_model_and_the_divergence_from_the_teacher() -> None:
    """Fails when: the sums are of the loss that is trained on."""
    student, teacher = llama().double().eval(), llama(seed=1).double().eval()
    metrics = distillation_metrics(teacher_of(teacher), temperature=2.0)
    assert metrics.update is not None
    assert causal_lm_metrics.update is not None
    sums: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    with torch.no_grad():
        for micro_batch in cut(3, collate_padded):
            for total, of in ((sums, metrics), (plain, causal_lm_metrics)):
                for name, value in of.update(student, micro_batch).items():
                    total[name] = total.get(name, 0) + value.numpy()
        wanted = plain_loss(student, teacher, temperature=2.0, divergence="forward_kl") / 4
    found = metrics.finalize(sums)
    assert found["kl"] == pytest.approx(wanted.item(), rel=1e-10)
    assert {**found, "kl": 0} == pytest.approx({**causal_lm_metrics.finalize(plain), "kl": 0}, rel=1e-12)
