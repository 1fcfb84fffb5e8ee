"""Each value of a setting trains through a recipe's command line as a plain loop of torch does.

The loop knows no packing, no padding, no micro-batches and none of the toolkit's losses, optimizers or schedules: every
document goes through the model alone, its logits are kept whole, the losses of a global batch are summed and divided
once. Of the toolkit it takes the initial weights (`load_model`) and the order of the examples (`epoch_order`).
"""

import importlib.util
import itertools
import json
import math
import re
import runpy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import get_scheduler
from transformers.optimization import Adafactor

import toolkit as tk
from toolkit.command_line.reading import read_command_line
from toolkit.config import settings_of

ROOT = Path(__file__).resolve().parents[2]
ROWS, RATE, CLIP, DECAY = 20, 3e-3, 0.5, 0.1
# 20 rows in steps of 2 x 3: 6, 6, 6 and a last one of 2
STEPS_OF_AN_EPOCH = [6, 6, 6, 2]
WORDS = [
    "the", "of", "a", "cat", "dog", "bird", "house", "river", "tree", "sings",
    "runs", "sleeps", "under", "over", "blue", "green", "quickly", "never", "two", "three",
]


def words(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + i * i * 3 + number * i) % len(WORDS)] for i in range(count))


@dataclass
class Data:
    """Rows in files and the same rows tokenized by hand: (token ids, labels as the loss wants them)."""

    folder: Path
    documents: dict[str, list[tuple[list[int], Any]]] = field(default_factory=dict)

    def tiny(self, kind: str) -> list[str]:
        """A model of one layer, without dropout, on these rows."""
        tokenizer = self.folder / ("decoder" if kind == "chat" else "encoder")
        return [
            "--dataset", str(self.folder / f"{kind}.jsonl"), "--tokenizer", str(tokenizer), "--hidden-size", "32", "--num-hidden-layers", "1",
            "--num-attention-heads", "2", "--intermediate-size", "48", "--max-length", "64", "--dropout", "0", "--seed", "5",
            "--per-device-train-batch-size", "2", "--num-train-epochs", "1", "--learning-rate", str(RATE), "--warmup-steps", "0",
            "--max-grad-norm", str(CLIP),
        ]  # fmt: skip

    def flags(self, kind: str) -> list[str]:
        """The same, every step logged, nothing evaluated and no checkpoint."""
        return [*self.tiny(kind), "--eval-fraction", "0", "--save-strategy", "no", "--logging-steps", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    data = Data(tmp_path_factory.mktemp("data"))
    texts = [words(i, 2 + (i * 5) % 11) for i in range(ROWS)]
    answers = [words(i + 50, 1 + (i * 3) % 8) for i in range(ROWS)]
    rows = {
        "chat": [{"prompt": t, "completion": a} for t, a in zip(texts, answers, strict=True)],
        "single": [{"text": t, "label": "abc"[(i * i + i // 4) % 3]} for i, t in enumerate(texts)],
        "multi": [{"text": t, "label": [c for j, c in enumerate("abc") if (i + j) % 3 or i % 4 == j]} for i, t in enumerate(texts)],
        "number": [{"text": t, "label": round(math.sin(i), 3)} for i, t in enumerate(texts)],
    }
    for name, lines in rows.items():
        (data.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (data.folder / "split").mkdir()
    for name in ("train", "validation"):
        (data.folder / f"split/{name}.jsonl").write_text((data.folder / "chat.jsonl").read_text().replace("the", name))
    for name, is_encoder in (("decoder", False), ("encoder", True)):
        tk.train_tokenizer(texts + answers, 300, encoder=is_encoder).save_pretrained(data.folder / name)
    from transformers import AutoTokenizer

    decoder, encoder = (AutoTokenizer.from_pretrained(data.folder / name) for name in ("decoder", "encoder"))
    for row in rows["chat"]:
        prompt = decoder(row["prompt"])["input_ids"]
        answer = [*decoder(row["completion"])["input_ids"], decoder.eos_token_id]
        data.documents.setdefault("chat", []).append((prompt + answer, [-100] * len(prompt) + answer))
    read: dict[str, Callable[[Any], Any]] = {
        "single": "abc".index, "multi": lambda label: [float(c in label) for c in "abc"], "number": float,
    }  # fmt: skip
    for name, label_of in read.items():
        data.documents[name] = [(encoder(row["text"])["input_ids"], label_of(row["label"])) for row in rows[name]]
    return data


@dataclass
class Reference:
    """The plain loop: its losses, gradient norms before clipping, rates, and final weights."""

    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


Loss = Callable[[Any, list[int], Any], tuple[torch.Tensor, float]]  # model, token ids, labels -> sum, what to divide by
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def next_token(model: Any, ids: list[int], labels: list[int], smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[torch.Tensor, float]:
    """Cross-entropy written out: log-softmax of whole logits, each label at the position before it."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    wanted = torch.tensor(labels[1:])
    counts = wanted != -100
    log_p = logits[counts].log_softmax(-1)
    losses = -(1 - smoothing) * log_p.gather(1, wanted[counts][:, None])[:, 0] - smoothing * log_p.mean(-1)
    return (losses + z_loss * logits[counts].logsumexp(-1) ** 2).sum(), float(counts.sum())


def one_class(model: Any, ids: list[int], label: int, smoothing: float = 0.0, weights: Sequence[float] = (1, 1, 1)) -> tuple[torch.Tensor, float]:
    log_p = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return weights[label] * (-(1 - smoothing) * log_p[label] - smoothing * log_p.mean()), weights[label]


def several_classes(model: Any, ids: list[int], label: list[float], smoothing: float = 0.0) -> tuple[torch.Tensor, float]:
    logits, wanted = model(input_ids=torch.tensor([ids])).logits[0], torch.tensor(label) * (1 - smoothing) + smoothing / 2
    return -(wanted * functional.logsigmoid(logits) + (1 - wanted) * functional.logsigmoid(-logits)).mean(), 1.0


def a_number(model: Any, ids: list[int], label: float) -> tuple[torch.Tensor, float]:
    return (model(input_ids=torch.tensor([ids])).logits[0, 0] - label) ** 2, 1.0


def in_order(documents: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """The documents of each step, from the endless order of epochs."""
    epochs = -(-sum(sizes) // len(documents))
    order = [int(i) for epoch in range(epochs) for i in tk.epoch_order(len(documents), 5, epoch)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [[documents[i] for i in order[end - size : end]] for end, size in zip(ends, sizes, strict=True)]


def plain_training(
    model: Any, steps: list[list[Any]], loss_of: Loss, make: MakeOptimizer, rates: Sequence[float] | None = None,
    skipped: Sequence[int] = (),
) -> Reference:  # fmt: skip
    """Train on the documents of each step, one document a forward. Groups may hold a `factor` on the rate."""
    optimizer, reference = make(model), Reference({n: p.detach().clone() for n, p in model.named_parameters()})
    for number, documents in enumerate(steps):
        rate = RATE if rates is None else rates[number]
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
        parts = [loss_of(model, ids, labels) for ids, labels in documents]
        loss = torch.stack([part for part, _ in parts]).sum() / sum(units for _, units in parts)
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if number + 1 not in skipped:
            optimizer.step()
        reference.losses.append(loss.item())
        reference.norms.append(norm.item())
        reference.rates.append(max(group["lr"] for group in optimizer.param_groups))
    reference.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return reference


def load_reference_model(recipe: str, flags: list[str], **head: Any) -> Any:
    """The recipe's initial weights, with its settings as its command line reads them."""
    config_class = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="read")["Config"]
    config = read_command_line(config_class, flags, {})
    kind = "AutoModelForCausalLM" if recipe == "sft" else "AutoModelForSequenceClassification"
    return tk.load_model(kind, config, tk.load_tokenizer(config), **head)


def by_decay(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Every matrix decays; vectors (norms and biases, in these models) do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def assert_same_training(run: Any, reference: Reference, error: float = 1e-4) -> None:
    """Losses within 1e-5 of the reference, norms within 1e-3, and each tensor's whole change within `error` of its size."""
    assert run.code == 0, run.out + run.err
    steps = [event for event in run.metrics if "loss" in event]
    assert [event["loss"] for event in steps] == pytest.approx(reference.losses, rel=1e-5)
    assert [event["grad_norm"] for event in steps] == pytest.approx(reference.norms, rel=1e-3)
    assert [event["learning_rate"] for event in steps] == pytest.approx(reference.rates, rel=1e-9)
    assert_same_weights(run.weights(), reference, error)


def assert_same_weights(trained: dict[str, torch.Tensor], reference: Reference, error: float) -> None:
    """A float32 holds a weight to 1e-7, and a gradient that is zero by the mathematics is a rounding of the others' sizes."""
    assert trained.keys() <= reference.weights.keys()
    moved = {name: (reference.weights[name] - reference.start[name]).norm().item() for name in reference.start}
    whole = math.hypot(*moved.values())
    for name, ours in trained.items():
        away = (ours - reference.weights[name]).norm().item()
        allowed = error * moved[name] + 1e-7 * reference.weights[name].norm().item() + 1e-6 * whole
        assert away <= allowed, f"{name}: {away:.3g} away, where it moved by {moved[name]:.3g} and the whole model by {whole:.3g}"


SGD = ["--optim", "sgd", "--momentum", "0", "--weight-decay", "0", "--lr-scheduler-type", "constant", "--gradient-accumulation-steps", "3"]
SGD_OF_A_STEP = SGD[: SGD.index("--gradient-accumulation-steps")]
UNPACKED = ["--no-packing"]


def choices(recipe: str, name: str) -> tuple[str, ...]:
    config_class = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="read")["Config"]
    return settings_of(config_class)[name].choices


def sft_reference(data: Data, flags: list[str], make: MakeOptimizer = plain_sgd, loss_of: Loss = next_token, **more: Any) -> Reference:
    steps = in_order(data.documents["chat"], STEPS_OF_AN_EPOCH)
    return plain_training(load_reference_model("sft", flags), steps, loss_of, make, **more)


# Optimizers -------------------------------------------------------------------------------------------------------------------

ADAM = {"betas": (0.8, 0.95), "eps": 1e-6}
ADAM_FLAGS = ["--adam-beta1", "0.8", "--adam-beta2", "0.95", "--adam-epsilon", "1e-6"]


class PublishedMuon(torch.optim.Optimizer):
    """Muon's published step in float64, one matrix at a time, for matrices of layers; AdamW's for the rest.

    Nesterov momentum, five Newton-Schulz iterations (https://kellerjordan.github.io/posts/muon/), times 0.2 sqrt(longer side)
    (https://arxiv.org/abs/2502.16982, section 2.2), decoupled decay.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        self.matrices = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
        taken = {id(p) for p in self.matrices}
        groups = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in by_decay(model)]
        self.rest = torch.optim.AdamW(groups, lr=RATE, foreach=False, **ADAM)
        self.buffers = [torch.zeros_like(p, dtype=torch.float64) for p in self.matrices]
        super().__init__(self.rest.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = self.rest.param_groups[0]["lr"] = self.rest.param_groups[1]["lr"] = self.param_groups[0]["lr"]
        self.rest.step()
        for i, matrix in enumerate(self.matrices):
            assert matrix.grad is not None
            gradient = matrix.grad.double()
            self.buffers[i] = 0.9 * self.buffers[i] + 0.1 * gradient
            x = 0.1 * gradient + 0.9 * self.buffers[i]
            x = x / x.norm()
            for _ in range(5):
                product = x @ x.T
                x = 3.4445 * x - 4.775 * product @ x + 2.0315 * product @ product @ x
            new = matrix.double() * (1 - rate * DECAY) - rate * 0.2 * math.sqrt(max(matrix.shape)) * x
            matrix.copy_(new)


# value: (its own flags, torch's optimizer built by hand, how far a tensor's change may be from the reference's)
OPTIMIZERS: dict[str, tuple[list[str], MakeOptimizer, float]] = {
    "adamw_torch": (ADAM_FLAGS, lambda m: torch.optim.AdamW(by_decay(m), foreach=False, **ADAM), 1e-3),
    "adamw_torch_fused": (ADAM_FLAGS, lambda m: torch.optim.AdamW(by_decay(m), foreach=False, **ADAM), 1e-3),
    "sgd": (["--momentum", "0.7"], lambda m: torch.optim.SGD(by_decay(m), lr=RATE, momentum=0.7), 1e-4),
    "adafactor": ([], lambda m: Adafactor(by_decay(m), lr=RATE, scale_parameter=False, relative_step=False), 1e-3),
    "nadam": (ADAM_FLAGS, lambda m: torch.optim.NAdam(by_decay(m), decoupled_weight_decay=True, foreach=False, **ADAM), 1e-3),
    "radam": (ADAM_FLAGS, lambda m: torch.optim.RAdam(by_decay(m), decoupled_weight_decay=True, foreach=False, **ADAM), 1e-3),
    "rmsprop": (["--momentum", "0.7"], lambda m: torch.optim.RMSprop(by_decay(m), momentum=0.7, foreach=False), 1e-3),
    "adagrad": ([], lambda m: torch.optim.Adagrad(by_decay(m), foreach=False), 1e-3),
    "muon": ([*ADAM_FLAGS, "--momentum", "0.9"], PublishedMuon, 1e-3),
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize("optim", choices("sft", "optim"))
def test_an_optimizer_takes_the_steps_of_its_plain_form(run_recipe: Any, data: Data, optim: str) -> None:
    """With weight decay on matrices only, clipping, and accumulation. Fails when: a beta, the momentum or the decay of a group
    does not reach the optimizer, the loss is averaged over micro-batches, or the norm is clipped before the last of them."""
    if optim not in OPTIMIZERS:
        if importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available():
            pytest.skip(f"{optim} needs bitsandbytes and a CUDA device (that its absence is refused: tests/optim/test_optim.py)")
        pytest.skip(f"{optim}: compared with bitsandbytes' own in tests/optim/test_optim.py; its kernels need the model on the device")
    own_flags, make, error = OPTIMIZERS[optim]
    flags = [
        *data.flags("chat"), *UNPACKED, "--optim", optim, *own_flags, "--weight-decay", str(DECAY), "--lr-scheduler-type", "constant",
        "--gradient-accumulation-steps", "3",
    ]  # fmt: skip
    assert_same_training(run_recipe("sft", *flags), sft_reference(data, flags, make), error)


# Schedules --------------------------------------------------------------------------------------------------------------------


def peer(name: str, warmup: int = 0, **arguments: Any) -> Callable[[int], list[float]]:
    """transformers' schedule, stepped after each update."""

    def rates(steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=arguments)
        seen = []
        for _ in range(steps):
            seen.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return seen

    return rates


SCHEDULES: dict[str, tuple[list[str], Callable[[int], list[float]]]] = {
    "constant": ([], peer("constant")),
    "constant_with_warmup": (["--warmup-steps", "3"], peer("constant_with_warmup", 3)),
    "linear": (["--warmup-steps", "2"], peer("linear", 2)),
    "cosine": (["--warmup-steps", "0.25", "--min-lr-ratio", "0.1"], peer("cosine_with_min_lr", 2, min_lr_rate=0.1)),
    "cosine_with_min_lr": (["--warmup-steps", "2", "--min-lr", str(0.3 * RATE)], peer("cosine_with_min_lr", 2, min_lr=0.3 * RATE)),
    "cosine_warmup_with_min_lr": (
        ["--warmup-steps", "2", "--min-lr-rate", "0.1"], peer("cosine_warmup_with_min_lr", 2, min_lr_rate=0.1),
    ),
    "cosine_with_restarts": (["--lr-cycles", "2"], peer("cosine_with_restarts", num_cycles=2)),
    "polynomial": (["--lr-power", "2", "--min-lr-ratio", "0.2"], peer("polynomial", power=2, lr_end=0.2 * RATE)),
    "inverse_sqrt": (["--warmup-steps", "2"], peer("inverse_sqrt", 2)),
    "exponential": (["--lr-gamma", "0.01"], lambda steps: [RATE * 0.01 ** (k / steps) for k in range(steps)]),
    "step": (["--lr-gamma", "0.5", "--lr-cycles", "3"], lambda steps: [RATE * 0.5 ** (k // (steps // 4)) for k in range(steps)]),
    "warmup_stable_decay": (
        ["--warmup-steps", "2", "--lr-decay-ratio", "0.5", "--warmup-type", "cosine", "--lr-decay-type", "1-sqrt"],
        peer("warmup_stable_decay", 2, num_decay_steps=4, warmup_type="cosine", decay_type="1-sqrt"),
    ),
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", choices("sft", "lr_scheduler_type"))
def test_a_schedule_gives_each_step_the_rate_of_its_plain_form(run_recipe: Any, data: Data, name: str) -> None:
    """Fails when: the rate of a step is that of the step after it, or warm-up is counted in micro-batches."""
    if name == "reduce_lr_on_plateau":
        pytest.skip("goes by evaluations: the next test")
    own_flags, rates_of = SCHEDULES[name]
    flags = _with([*data.flags("chat"), *UNPACKED, *SGD, "--max-steps", "8", *own_flags], "--per-device-train-batch-size", "1")
    flags = _with(flags, "--lr-scheduler-type", name)
    reference = plain_training(
        load_reference_model("sft", flags), in_order(data.documents["chat"], [3] * 8), next_token, plain_sgd, rates_of(8)
    )
    assert_same_training(run_recipe("sft", *flags), reference, 1e-3)


# The evaluation gets worse from step 2 on, as it is on other rows: the rate falls four times in eight steps.
PLATEAU = ["--eval-strategy", "steps", "--eval-steps", "1", "--num-samples", "0", "--lr-patience", "1", "--lr-gamma", "0.5",
           "--lr-threshold", "0.9", "--min-lr-ratio", "0.1"]  # fmt: skip


def plateau_flags(data: Data, *more: str) -> list[str]:
    flags = _with([*data.tiny("chat"), *UNPACKED, *SGD, "--max-steps", "8", *more], "--per-device-train-batch-size", "1")
    flags = _with(_with(flags, "--lr-scheduler-type", "reduce_lr_on_plateau"), "--dataset", str(data.folder / "split"))
    return [*flags, "--logging-steps", "1", *PLATEAU]


def test_the_rate_falls_after_evaluations_that_bring_nothing_and_a_resume_changes_nothing(
    run_recipe: Any, data: Data, tmp_path: Path
) -> None:
    """Each step's rate is that of torch's ReduceLROnPlateau, stepped with the logged evaluations after the first step; a run that goes
    on from step 3 in another folder, which has seen none of its evaluations, ends with the same bits.

    Fails when: the evaluation before training counts, the objective is not in the checkpoint, or `--eval-steps` may change.
    """
    flags = plateau_flags(data, "--eval-on-start", "--save-strategy", "steps", "--save-steps", "3", "--save-total-limit", "none")
    run = run_recipe("sft", *flags)
    assert run.code == 0, run.out + run.err
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    peer = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.9, min_lr=0.1 * RATE)
    expected: dict[int, float] = {}
    for event in run.metrics:
        if "loss" in event:
            expected[event["step"]] = optimizer.param_groups[0]["lr"]
        elif event["step"] > 0:
            peer.step(event["eval_loss"])
    assert {event["step"]: event["learning_rate"] for event in run.metrics if "loss" in event} == pytest.approx(expected)
    assert len(set(expected.values())) == 4
    again = run_recipe("sft", *flags, "--resume-from", str(run.output_dir / "checkpoints/step-3"), output_dir="again")
    assert again.code == 0, again.out + again.err
    rates = {event["step"]: event["learning_rate"] for event in again.metrics if "loss" in event}
    assert rates == pytest.approx({step: expected[step] for step in range(4, 9)})
    assert all(torch.equal(tensor, again.weights()[name]) for name, tensor in run.weights().items())
    other = run_recipe("sft", *_with(flags, "--eval-steps", "2"), "--resume-from", str(run.output_dir / "checkpoints/step-3"), output_dir="other")
    assert other.code == 2, other.out + other.err
    assert "eval_steps was 1 and is 2" in other.err


def test_progress_counts_examples_where_the_last_batch_is_short(run_recipe: Any, data: Data) -> None:
    """20 examples in steps of 6: the rates fall by 6/20, the last step too. Fails when: progress counts steps."""
    flags = _with([*data.flags("chat"), *UNPACKED, *SGD], "--lr-scheduler-type", "linear")
    rates = [RATE * (1 - position / ROWS) for position in (0, 6, 12, 18)]
    assert_same_training(run_recipe("sft", *flags), sft_reference(data, flags, rates=rates))


# Losses -----------------------------------------------------------------------------------------------------------------------

LABELS: dict[str, tuple[str, Loss, dict[str, Any], list[str]]] = {
    "single_label": ("single", one_class, {"num_labels": 3}, []),
    "multi_label": ("multi", several_classes, {"num_labels": 3}, []),
    "regression": ("number", a_number, {"num_labels": 1}, ["--metrics", "mse"]),
}


def classify(data: Data, problem_type: str, *more: str) -> list[str]:
    kind, _, _, own_flags = LABELS[problem_type]
    return [*data.flags(kind), *SGD, "--problem-type", problem_type, *own_flags, *more]


def classification_reference(
    data: Data, flags: list[str], problem_type: str, make: MakeOptimizer = plain_sgd, loss_of: Loss | None = None
) -> Reference:
    kind, plain_loss, head, _ = LABELS[problem_type]
    steps = in_order(data.documents[kind], STEPS_OF_AN_EPOCH)
    return plain_training(load_reference_model("accelerated", flags, **head), steps, loss_of or plain_loss, make)


@pytest.mark.parametrize("problem_type", choices("accelerated", "problem_type"))
def test_a_problem_type_has_its_plain_loss(run_recipe: Any, data: Data, problem_type: str) -> None:
    """Rows of one length window, so that grouping by length is a sort: it is turned off. Fails when: the binary cross-entropy
    is summed over classes, the squared error is halved, or a label's number is not its place in the sorted names."""
    flags = classify(data, problem_type, "--no-group-by-length")
    assert_same_training(run_recipe("accelerated", *flags), classification_reference(data, flags, problem_type))


@pytest.mark.parametrize("problem_type", ["single_label", "multi_label"])
def test_label_smoothing_of_classes_is_its_formula(run_recipe: Any, data: Data, problem_type: str) -> None:
    """Fails when: the setting does not reach the loss, or the smoothed part leaves out the right class."""
    flags = classify(data, problem_type, "--no-group-by-length", "--label-smoothing-factor", "0.2")
    plain = {"single_label": one_class, "multi_label": several_classes}[problem_type]
    reference = classification_reference(data, flags, problem_type, loss_of=lambda *of: plain(*of, 0.2))
    assert_same_training(run_recipe("accelerated", *flags), reference)


def test_class_weights_make_a_weighted_mean_over_the_global_batch(run_recipe: Any, data: Data) -> None:
    """Fails when: the sum is divided by the examples, or the weights are given in another order than the labels'."""
    flags = classify(data, "single_label", "--no-group-by-length", "--class-weights", "0.5,2,3")
    reference = classification_reference(
        data, flags, "single_label", loss_of=lambda *of: one_class(*of, weights=(0.5, 2.0, 3.0))
    )
    assert_same_training(run_recipe("accelerated", *flags), reference)


@pytest.mark.parametrize(("flag", "argument"), [("--label-smoothing-factor", "smoothing"), ("--z-loss", "z_loss")])
def test_a_term_of_the_token_loss_is_its_formula(run_recipe: Any, data: Data, flag: str, argument: str) -> None:
    """Fails when: the term is left out, or (log Z)^2 is a mean over the micro-batch."""
    flags = [*data.flags("chat"), *SGD, *UNPACKED, flag, "0.1"]
    reference = sft_reference(data, flags, loss_of=lambda *of: next_token(*of, **{argument: 0.1}))
    assert_same_training(run_recipe("sft", *flags), reference)


# Rates and decay of groups ----------------------------------------------------------------------------------------------------


def grouped(factor_of: Callable[[str], float]) -> MakeOptimizer:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [p], "factor": factor_of(name), "weight_decay": 0.0} for name, p in model.named_parameters()]
        return torch.optim.SGD(groups, lr=RATE)

    return make


def test_layer_lr_decay_falls_from_the_head_to_the_embeddings(run_recipe: Any, data: Data) -> None:
    """Two layers: 1 for pooler and head, 0.5, 0.25, and 0.125 for all embeddings. Fails when: layers count from the bottom."""
    flags = classify(data, "single_label", "--no-group-by-length", "--layer-lr-decay", "0.5", "--num-hidden-layers", "2")

    def factor_of(name: str) -> float:
        layer = re.search(r"layer\.(\d)\.", name)
        return 0.125 if "embeddings" in name else 0.25 * 2 ** int(layer[1]) if layer else 1.0

    assert_same_training(run_recipe("accelerated", *flags), classification_reference(data, flags, "single_label", grouped(factor_of)))


def test_lr_patterns_set_the_rate_of_the_parameters_they_find(run_recipe: Any, data: Data) -> None:
    """Fails when: the last match counts, or the logged rate is that of the first group."""
    flags = [*data.flags("chat"), *SGD, *UNPACKED, "--lr-patterns", "q_proj=4", "--lr-patterns", "_proj=0", "--lr-patterns", "norm=0.5"]

    def factor_of(name: str) -> float:
        return 4.0 if "q_proj" in name else 0.0 if "_proj" in name else 0.5 if "norm" in name else 1.0

    run = run_recipe("sft", *flags)
    assert_same_training(run, sft_reference(data, flags, grouped(factor_of)))


def test_weight_decay_shrinks_matrices_and_no_vector(run_recipe: Any, data: Data) -> None:
    """AdamW's formula by hand, in float64, with a decay so large that it is most of the change. Fails when: the decay is not
    decoupled, or norms and biases decay."""
    flags = classify(data, "single_label", "--no-group-by-length", "--weight-decay", "40", *ADAM_FLAGS)
    flags = _with(_without(flags, "--momentum"), "--optim", "adamw_torch")

    class Written(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(list(model.parameters()), {"lr": RATE})
            self.moments = [[torch.zeros_like(p, dtype=torch.float64) for _ in range(2)] for p in model.parameters()]
            self.steps = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.steps += 1
            rate = self.param_groups[0]["lr"]
            for p, moments in zip(self.param_groups[0]["params"], self.moments, strict=True):
                gradient = p.grad.double()
                moments[0] = 0.8 * moments[0] + 0.2 * gradient
                moments[1] = 0.95 * moments[1] + 0.05 * gradient**2
                update = moments[0] / (1 - 0.8**self.steps) / ((moments[1] / (1 - 0.95**self.steps)).sqrt() + 1e-6)
                p.copy_(p.double() - rate * (40 * p.double() if p.ndim >= 2 else 0) - rate * update)

    reference = classification_reference(data, flags, "single_label", Written)
    assert_same_training(run_recipe("accelerated", *flags), reference, 1e-3)


def _with(flags: list[str], name: str, value: str) -> list[str]:
    place = flags.index(name)
    return [*flags[: place + 1], value, *flags[place + 2 :]]


def _without(flags: list[str], name: str) -> list[str]:
    place = flags.index(name)
    return [*flags[:place], *flags[place + 2 :]]


# Data: every step is one whole epoch, so that no order matters ----------------------------------------------------------------

LONGEST = 12


def pieces_of(documents: list[Any], length: int) -> list[Any]:
    """Each document cut every N tokens; nobody predicts the first token of a piece."""
    pieces = [(ids[at : at + length], labels[at : at + length]) for ids, labels in documents for at in range(0, len(ids), length)]
    return [piece for piece in pieces if any(label != -100 for label in piece[1][1:])]


def whole_epochs(data: Data, run_recipe: Any, documents: list[Any], rows: int, *own_flags: str) -> None:
    """Three epochs, each one step over all rows, against the plain loop over these documents."""
    flags = [*data.flags("chat"), *SGD_OF_A_STEP, "--global-batch-size", str(rows)]
    reference = plain_training(load_reference_model("sft", flags), [documents] * 3, next_token, plain_sgd)
    run = run_recipe("sft", *_with(flags, "--num-train-epochs", "3"), *own_flags)
    assert_same_training(run, reference)
    assert json.loads((run.output_dir / "run.json").read_text())["data"]["epoch_size"] == rows


@pytest.mark.parametrize("overlong", choices("sft", "overlong"))
def test_overlong_documents_are_treated_as_the_setting_says(run_recipe: Any, data: Data, overlong: str) -> None:
    """Fails when: a document is cut from the left, a piece without supervised tokens counts as an example, or the first token of
    a piece is predicted."""
    documents = data.documents["chat"]
    assert sum(len(ids) > LONGEST for ids, _ in documents) > 3
    if overlong == "refuse":
        run = run_recipe("sft", *_with([*data.flags("chat"), *UNPACKED], "--max-length", str(LONGEST)), "--overlong", "refuse")
        worst = max(range(ROWS), key=lambda i: len(documents[i][0]))
        assert run.code == 2, run.out + run.err
        assert f"chat.jsonl:{worst + 1}" in run.err
        assert f"{len(documents[worst][0])} tokens" in run.err
        return
    kept = {
        "truncate": pieces_of([(ids[:LONGEST], labels[:LONGEST]) for ids, labels in documents], LONGEST),
        "drop": [document for document in documents if len(document[0]) <= LONGEST],
        "split": pieces_of(documents, LONGEST),
    }[overlong]
    whole_epochs(data, run_recipe, kept, len(kept), *UNPACKED, "--overlong", overlong, "--max-length", str(LONGEST))


def rows_by_best_fit(lengths: list[int], capacity: int) -> int:
    """How many rows the plain algorithm opens: longest first, each into the fullest row that has room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


def packed_whole(documents: list[Any], length: int = 30) -> tuple[list[Any], int, str]:
    """The documents that fit a row whole, the rows they make, and its length as a flag has it."""
    kept = [document for document in documents if len(document[0]) <= length]
    rows = rows_by_best_fit([len(ids) for ids, _ in kept], length)
    assert rows < len(kept) < len(documents)
    return kept, rows, str(length)


@pytest.mark.parametrize("strategy", choices("sft", "packing_strategy"))
def test_a_packing_strategy_trains_on_its_documents_each_alone(run_recipe: Any, data: Data, strategy: str) -> None:
    """bfd: whole documents (long ones dropped). wrapped: the text of all, cut every 12 tokens. Fails when: a document sees its
    neighbor, positions continue over the row, or the first token after a cut is predicted."""
    documents = data.documents["chat"]
    own = ["--packing", "--packing-strategy", strategy]
    if strategy == "bfd":
        kept, rows, length = packed_whole(documents)
        own += ["--max-length", length]
        whole_epochs(data, run_recipe, kept, rows, *own, "--overlong", "drop")
        return
    pieces, at = [], 0
    for ids, labels in documents:
        cuts = [0, *range(-at % LONGEST or LONGEST, len(ids), LONGEST), len(ids)]
        pieces += [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(cuts)]
        at += len(ids)
    assert len(pieces) > ROWS
    pieces = [piece for piece in pieces if len(piece[0]) > 1]  # a lone token predicts nothing
    whole_epochs(data, run_recipe, pieces, -(-at // LONGEST), *own, "--overlong", "split", "--max-length", str(LONGEST))


# Arithmetic -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", choices("sft", "attn_implementation"))
def test_every_attention_backend_computes_the_same_training(run_recipe: Any, data: Data, attention: str) -> None:
    """Against one document at a time without any mask. Fails when: padding is attended to, or a packed row's bounds are lost."""
    if attention in ("flex_attention", "flash_attention_2"):
        pytest.skip(f"{attention} needs a CUDA device (that the CPU refuses it: tests/models/test_attention.py)")
    if attention in ("auto", "varlen"):  # packed: one row holds all, so that a global batch is the documents of an epoch
        whole, rows, length = packed_whole(data.documents["chat"])
        own = ["--packing", "--attn-implementation", attention, "--overlong", "drop", "--max-length", length]
        whole_epochs(data, run_recipe, whole, rows, *own)
        return
    flags = [*data.flags("chat"), *SGD, *UNPACKED, "--attn-implementation", attention]
    reference = sft_reference(data, flags[:-2])  # the reference has the model's default
    assert_same_training(run_recipe("sft", *flags), reference)


WAYS_TO_COMPUTE = ["--gradient-checkpointing", *(f"--torch-compile {name}" for name in choices("sft", "torch_compile_backend"))]


@pytest.mark.fast(1)
@pytest.mark.parametrize("flag", WAYS_TO_COMPUTE)
def test_a_way_to_compute_changes_no_metric(run_recipe: Any, data: Data, flag: str) -> None:
    """Fails when: recomputation draws other numbers, or the compiled layer is another function."""
    if flag.endswith("inductor") and (" " in torch.__file__ or shutil.which("g++") is None):
        pytest.skip("needs g++, and torch in a folder without a space in its name (inductor of 2.13 can't link in one)")
    flags = [*data.flags("chat"), *SGD, *UNPACKED]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(data.folder / "inductor")}
    own = flag.split() if " " not in flag else ["--torch-compile", "--torch-compile-backend", flag.split()[1]]
    assert_same_training(run_recipe("sft", *flags, *own, env=cache, timeout=400), sft_reference(data, flags))


PRECISIONS = [["--bf16"], *(["--dtype", name] for name in choices("sft", "dtype"))]


@pytest.mark.parametrize("flags", PRECISIONS, ids=" ".join)
def test_a_precision_starts_from_the_same_loss_within_its_rounding(run_recipe: Any, data: Data, flags: list[str]) -> None:
    """bfloat16 keeps 8 bits of a number, float16 11: the loss of the first step is within 2^-8 and 2^-11 of the plain one (a mean
    of many roundings), and the weights are saved in the type they were trained in. Fails when: the setting reaches nothing, or
    the cross-entropy is taken in the type of the logits."""
    run = run_recipe("sft", *data.flags("chat"), *SGD, *UNPACKED, *flags)
    assert run.code == 0, run.out + run.err
    plain = sft_reference(data, [*data.flags("chat"), *UNPACKED])
    first = next(event for event in run.metrics if "loss" in event)
    precision = flags[-1].removeprefix("--")
    bound = {"bf16": 2**-8, "bfloat16": 2**-8, "float16": 2**-11, "auto": 1e-6, "float32": 1e-6}[precision]
    away = abs(first["loss"] - plain.losses[0]) / plain.losses[0]
    assert away <= bound
    if precision in ("bf16", "bfloat16", "float16"):
        assert away > 0  # it was computed otherwise
    kept = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
    assert {tensor.dtype for tensor in run.weights().values()} == {kept}


def test_fp16_is_refused_where_there_is_no_gpu(run_recipe: Any, data: Data) -> None:
    """Fails when: the precision is taken in silence, and ignored."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: fp16 is proved with it, in tests/training/test_step.py")
    run = run_recipe("sft", *data.flags("chat"), "--fp16")
    assert run.code == 2, run.out + run.err
    assert "--fp16 needs a GPU" in run.err


# Steps that are not finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonfinite", choices("sft", "nonfinite"))
def test_a_step_that_is_not_finite_is_skipped_or_stops_the_run(run_recipe: Any, data: Data, tmp_path: Path, nonfinite: str) -> None:
    """The loss of step 2 is made NaN by a line of the recipe's copy. Skipped: the other three steps are the plain loop's.

    Fails when: the skipped step moves a momentum, or "stop" continues.
    """
    source = (ROOT / "recipes/sft.py").read_text()
    line = "        for batch in run:\n"
    sick = "            loss_fn = partial(sick, well, run.step)\n"
    assert source.count(line) == 1
    source = source.replace(line, f"        well = loss_fn\n{line}{sick}")
    source = source.replace(
        "def main(", "def sick(well, step, *of):\n    loss, metrics = well(*of)\n"
        "    return (loss * float('nan') if step == 2 else loss), metrics\n\n\ndef main(",
    )  # fmt: skip
    (tmp_path / "sick.py").write_text(source)
    flags = _with([*data.flags("chat"), *SGD, *UNPACKED, "--nonfinite", nonfinite], "--momentum", "0.5")
    run = run_recipe(str(tmp_path / "sick.py"), *flags, env={"PYTHONPATH": str(ROOT)})
    rows = [json.loads(text) for text in (run.output_dir / "incidents/nonfinite.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2]
    if nonfinite == "stop":
        assert run.code == 1, run.out + run.err
        assert run.summary["status"] == "failed"
        assert (run.summary["steps"], run.summary["applied_steps"]) == (2, 1)
        return
    reference = sft_reference(data, flags, lambda m: torch.optim.SGD(m.parameters(), lr=RATE, momentum=0.5), skipped=[2])
    assert run.code == 0, run.out + run.err
    events = {event["step"]: event for event in run.metrics}
    assert {step: events[step]["loss"] for step in (1, 3, 4)} == pytest.approx(
        {step: reference.losses[step - 1] for step in (1, 3, 4)}, rel=1e-5
    )
    assert events[2]["nonfinite_steps"] == 1
    assert_same_weights(run.weights(), reference, 1e-4)


# When things happen -----------------------------------------------------------------------------------------------------------

# 20 rows in steps of 6 over 2 epochs: seven steps; the first epoch ends within step 4 (examples 18 to 24), the second with step 7
EVENTS = {
    "logging_strategy": {"no": [7], "steps": [2, 4, 6, 7], "epoch": [4, 7]},
    "eval_strategy": {"no": [], "steps": [2, 4, 6, 7], "epoch": [4, 7]},
    "save_strategy": {"no": [], "steps": [2, 4, 6, 7], "epoch": [4, 7]},
}


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_logging_evaluation_and_checkpoints_come_when_their_strategy_says(run_recipe: Any, data: Data, strategy: str) -> None:
    """Without logging the last step alone is written. Fails when: an epoch is taken to end with the step before, or the end of the
    run is left out."""
    for name in EVENTS:
        assert choices("sft", name) == ("no", "steps", "epoch")
    flags = _with([*data.tiny("chat"), *SGD, *UNPACKED], "--num-train-epochs", "2")
    flags += ["--eval-fraction", "0"] if strategy == "no" else ["--no-eval-on-start", "--num-samples", "0"]
    flags = flags if strategy == "no" else _with(flags, "--dataset", str(data.folder / "split"))
    flags += [word for name in EVENTS for word in (f"--{name.replace('_', '-')}", strategy)]
    if strategy == "steps":
        flags += ["--logging-steps", "2", "--eval-steps", "2", "--save-steps", "2"]
    flags += [] if strategy == "no" else ["--save-total-limit", "none"]
    run = run_recipe("sft", *flags)
    assert run.code == 0, run.out + run.err
    saved = sorted(int(path.name[5:]) for path in (run.output_dir / "checkpoints").glob("step-*"))
    assert [event["step"] for event in run.metrics if "loss" in event] == EVENTS["logging_strategy"][strategy]
    assert [event["step"] for event in run.metrics if "eval_loss" in event] == EVENTS["eval_strategy"][strategy]
    assert saved == EVENTS["save_strategy"][strategy]
