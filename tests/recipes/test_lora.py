"""recipes/lora.py: each way to begin an adapter trains as a plain loop on whole weights does; best weights, tokens, the default."""

import json
import math
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import toolkit as tk
from toolkit.command_line.reading import read_command_line

ROOT = Path(__file__).resolve().parents[2]
INITIALIZATIONS = ["true", "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"]
IN_4_BITS = [["--load-in-4bit"], ["--load-in-4bit", "--bnb-4bit-quant-type", "fp4", "--bnb-4bit-use-double-quant"]]
WAYS = [
    *(["--init-lora-weights", each] for each in INITIALIZATIONS), ["--use-rslora"], ["--use-dora"], ["--loraplus-lr-ratio", "8"],
    *IN_4_BITS,
]  # fmt: skip
ROWS, RATE, CLIP = 20, 3e-2, 0.5
STEPS = [6, 6, 6, 2]  # 20 rows in steps of 2 x 3 and a short last one


class Base(NamedTuple):
    """A model of one layer as someone else published it, rows in a file, and the same as (token ids, labels)."""

    folder: Path
    rows: Path
    documents: list[tuple[list[int], list[int]]]

    @property
    def flags(self) -> list[str]:
        return [
            "--model", str(self.folder), "--dataset", str(self.rows), "--max-length", "64", "--seed", "5", "--no-packing",
            "--per-device-train-batch-size", "2", "--num-train-epochs", "1", "--logging-steps", "1", "--warmup-steps", "0",
            "--lora-r", "4", "--lora-alpha", "6", "--lr-scheduler-type", "constant", "--max-grad-norm", str(CLIP),
            "--lora-trainable-tokens", "[]",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("base")
    rows = [{"prompt": " ".join(["cat dog"] * (1 + i % 5)), "completion": " bird tree house"[: 5 + (i * 7) % 12] + f" {i % 3}"} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tk.train_tokenizer([row["prompt"] + row["completion"] for row in rows], 290)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(2)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, **shape)).save_pretrained(folder / "model")
    documents = []
    for row in rows:
        prompt, answer = (tokenizer(row[part])["input_ids"] for part in ("prompt", "completion"))
        documents.append((prompt + answer + [tokenizer.eos_token_id], [-100] * len(prompt) + answer + [tokenizer.eos_token_id]))
    return Base(folder / "model", folder / "rows.jsonl", documents)


def in_order(base: Base) -> list[list[tuple[list[int], list[int]]]]:
    order = [int(i) for i in tk.epoch_order(ROWS, 5, 0)]
    return [[base.documents[i] for i in order[6 * step : 6 * step + size]] for step, size in enumerate(STEPS)]


def next_token(logits: torch.Tensor, labels: list[int]) -> torch.Tensor:
    """The sum of the supervised losses of one document."""
    wanted = torch.tensor(labels[1:])
    log_p = logits[0, :-1].log_softmax(-1)[wanted != -100]
    return -log_p.gather(1, wanted[wanted != -100][:, None]).sum()


def round_to_4_bits(layers: list[torch.nn.Linear], config: Any) -> None:
    """Their weights as bitsandbytes' functions round them, in float32."""
    for layer in layers:
        rounded = quantize_4bit(layer.weight.data, quant_type=config.bnb_4bit_quant_type, compress_statistics=config.bnb_4bit_use_double_quant)
        layer.weight.data = dequantize_4bit(*rounded).float()


@pytest.mark.fast(2)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_an_adapter_trains_as_a_plain_loop_on_whole_weights_does(
    run_recipe: Any, base: Base, way: list[str]
) -> None:  # fmt: skip
    """SGD on A and B of the model with the weights W + s B A, one document a forward; the toolkit gives the first A and B.

    Fails when: the scale or the rate of B is another, or what is written is an adapter of other weights than the base's; when
    --load-in-4bit rounds nothing, or not as configured.
    """
    sgd = ["--optim", "sgd", "--momentum", "0", "--gradient-accumulation-steps", "3", "--learning-rate", str(RATE)]
    flags = [*base.flags, *sgd, "--eval-fraction", "0", "--save-strategy", "no", *way]
    run = run_recipe("lora", *flags)
    assert run.code == 0, run.out + run.err

    config = read_command_line(runpy.run_path(str(ROOT / "recipes/lora.py"), run_name="read")["Config"], flags, {})
    first = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config), config).get_base_model()
    modules = {name: module for name, module in first.named_modules() if hasattr(module, "lora_A")}
    assert len(modules) == 7
    plain, scale = AutoModelForCausalLM.from_pretrained(base.folder), 6 / (2 if config.use_rslora else 4)
    if way in IN_4_BITS:
        round_to_4_bits([plain.get_submodule(name) for name in modules], config)
    a, b, m, fixed = {}, {}, {}, {}
    for name, module in modules.items():
        a[name], b[name] = (getattr(module, part)["default"].weight.detach().clone().requires_grad_() for part in ("lora_A", "lora_B"))
        published = dict(plain.named_modules())[name].weight.detach()
        fixed[name] = published - scale * (b[name] @ a[name]).detach()
        m[name] = published.norm(dim=1).requires_grad_()

    def weights() -> dict[str, torch.Tensor]:
        whole = {name: fixed[name] + scale * b[name] @ a[name] for name in modules}
        if config.use_dora:
            whole = {name: m[name][:, None] * each / each.detach().norm(dim=1, keepdim=True) for name, each in whole.items()}
        return {f"{name}.weight": each for name, each in whole.items()}

    trained = [*a.values(), *b.values(), *(m.values() if config.use_dora else [])]
    rates = [RATE * (config.loraplus_lr_ratio if any(each is one for one in b.values()) else 1) for each in trained]
    losses = []
    for documents in in_order(base):
        current = weights()
        logits = [functional_call(plain, current, (), {"input_ids": torch.tensor([ids])}).logits for ids, _ in documents]
        loss = torch.stack([next_token(each, labels) for each, (_, labels) in zip(logits, documents, strict=True)]).sum()
        loss = loss / sum(label != -100 for _, labels in documents for label in labels)
        gradients = torch.autograd.grad(loss, trained)
        norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
        with torch.no_grad():
            for each, gradient, rate in zip(trained, gradients, rates, strict=True):
                each -= rate * gradient * min(1.0, CLIP / (norm + 1e-6))
        losses.append(float(loss.detach()))
    assert [event["loss"] for event in run.metrics if "loss" in event] == pytest.approx(losses, rel=1e-5)
    ids = torch.tensor([base.documents[3][0]])
    with torch.no_grad():
        expected, before = functional_call(plain, weights(), (), {"input_ids": ids}).logits, plain(input_ids=ids).logits
        if way in IN_4_BITS:
            found = PeftModel.from_pretrained(plain, run.output_dir / "model").eval()(input_ids=ids).logits
        else:
            found = AutoPeftModelForCausalLM.from_pretrained(run.output_dir / "model").eval()(input_ids=ids).logits
    moved = float((expected - before).norm())
    assert moved > 0
    assert float((found - expected).norm()) < 1e-3 * moved + 1e-6 * float(expected.norm())


def test_the_best_adapter_is_the_one_that_is_written(run_recipe: Any, base: Base) -> None:
    """A rate at which it gets better and then worse. Fails when: load_best leaves the last weights."""
    flags = [*base.flags, "--eval-fraction", "0.3", "--eval-steps", "1", "--max-steps", "6", "--num-samples", "0"]
    flags += ["--learning-rate", "1", "--optim", "sgd", "--load-best-model-at-end"]
    run = run_recipe("lora", *flags)
    assert run.code == 0, run.out + run.err
    losses = {event["step"]: event["eval_loss"] for event in run.metrics if "eval_loss" in event}
    best = min(losses, key=lambda step: losses[step])
    assert run.summary["best"]["step"] == best < 6
    stored = load_file(run.output_dir / f"checkpoints/step-{best}/model.safetensors")
    written = load_file(run.output_dir / "model/adapter_model.safetensors")
    assert {name.replace(".default.", "."): tensor.tolist() for name, tensor in stored.items()} == {
        name: tensor.tolist() for name, tensor in written.items()
    }
    assert json.loads((run.output_dir / "model/adapter_config.json").read_text())["base_model_name_or_path"] == str(base.folder)
