"""What a run shows: throughput against formulas, progress on a terminal and in a file."""

import io
import json
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import toolkit as tk
from toolkit.config.reading import public_settings
from toolkit.tracking import console as tracking
from toolkit.tracking.console import Progress
from toolkit.tracking.step_metrics import PEAK_FLOPS, model_work, peak_flops, training_flops

WIDTH, FEED, LAYERS, VOCABULARY, KEYS = 16, 24, 3, 48, 8


def llama(tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FEED, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_that_torch_counts_in_a_step(tied: bool, frozen: bool) -> None:
    """FlopCounterMode over forward and backward, the head at 5 of 2 x 9 positions; eager attention computes all 2 x 9 x 9 pairs.

    Fails when: frozen weights count like trained ones, the head like a layer, a tied embedding twice or an untied one at all, or
    attention isn't counted.
    """
    model = llama(tied)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("proj" not in name)
    ids = torch.randint(0, VOCABULARY, (2, 9))
    with FlopCounterMode(display=False) as counted:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        model.lm_head(hidden[torch.tensor([0, 3, 4, 10, 17])]).sum().backward()
    assert training_flops(model, 18, 5, 2 * 9 * 9) == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_flops_of_experts_are_those_that_a_token_goes_through() -> None:
    """Fails when: all experts count."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FEED, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    model, ids = MixtralForCausalLM(config).train(), torch.randint(0, VOCABULARY, (2, 9))
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert training_flops(model, 18, 18, 2 * 9 * 9) == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_flops_of_a_decoder_behind_an_encoder_are_of_the_targets_tokens() -> None:
    """4 sources of 30 tokens, targets of 5. Fails when: a decoder's weights are multiplied with the source's tokens, or the keys
    and values of its cross-attention are not."""
    config = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=FEED, num_layers=LAYERS, num_heads=4)
    model = T5ForConditionalGeneration(config).train()
    source, target = torch.randint(3, VOCABULARY, (4, 30)), torch.randint(3, VOCABULARY, (4, 5))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=source, decoder_input_ids=target).logits.sum().backward()
    work = model_work({"input_ids": source, "decoder_input_ids": target, "supervised_positions": torch.arange(20)})
    assert work["pairs"] == 4 * (30 * 30 + 5 * 6 / 2 + 5 * 30)
    every_pair = 4 * (30 * 30 + 5 * 5 + 5 * 30)  # eager attention computes them
    flops = training_flops(model, work["model_tokens"], work["head_positions"], every_pair, work["decoder_tokens"])
    assert flops == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_flops_of_an_encoder_are_of_all_pairs() -> None:
    """Rows of 40 tokens in narrow layers, whose attention is most of the work. Fails when: only the tokens before count as seen."""
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FEED, num_hidden_layers=LAYERS, num_attention_heads=4,
        attn_implementation="eager",
    )  # fmt: skip
    model, ids = BertModel(config, add_pooling_layer=False).train(), torch.randint(0, VOCABULARY, (2, 40))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids).last_hidden_state.sum().backward()
    work = model_work({"input_ids": ids})
    flops = training_flops(model, work["model_tokens"], work["head_positions"], work["pairs"])
    assert flops == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_weights_in_4_bits_count_as_the_numbers_they_stand_for() -> None:
    """Fails when: the bytes that hold them are counted."""
    whole, packed = llama(), llama()
    for model in (whole, packed):
        model.requires_grad_(False)
    for module in packed.modules():
        if isinstance(module, torch.nn.Linear) and module is not packed.lm_head:
            shape = module.weight.shape
            module.weight = torch.nn.Parameter(torch.zeros(shape.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
            module.weight.quant_state = SimpleNamespace(shape=shape)
    assert training_flops(packed, 7, 3, 11) == training_flops(whole, 7, 3, 11)


def test_the_work_of_a_micro_batch_is_counted_document_by_document() -> None:
    """Against a loop over tokens. Fails when: pairs are the row's length squared, or a shared prompt's keys are left out."""
    ids, ends = torch.zeros(1, 12, dtype=torch.long), torch.tensor([0, 7, 12])
    alone = {"input_ids": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "supervised_positions": torch.arange(4)}
    expected = sum(place + 1 for length in (7, 5) for place in range(length))
    assert model_work(alone) == {"model_tokens": 12.0, "head_positions": 4.0, "pairs": expected}
    shared = alone | {"cu_seq_lens_k": torch.tensor([0, 7, 15])}  # the second one's queries are the last 5 of 8
    assert model_work(shared)["pairs"] == sum(range(1, 8)) + sum(range(4, 9))
    assert model_work({"input_ids": ids.view(3, 4)}) == {"model_tokens": 12.0, "head_positions": 12.0, "pairs": 30.0}


def test_padding_that_is_not_computed_is_no_work() -> None:
    """Fails when: a padded row counts whole where the body leaves its padding out, or rows are read in groups of like length."""
    ids, ends = torch.zeros(3, 10, dtype=torch.long), torch.tensor([0, 10, 12, 15])
    alone = model_work({"input_ids": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends})
    assert alone == {"model_tokens": 15.0, "head_positions": 15.0, "pairs": 55.0 + 3.0 + 6.0}
    assert model_work({"input_ids": ids, "groups": [(2, 3), (1, 10)]})["model_tokens"] == 16.0


# The names that drivers give (nvidia-smi -L), and dense bf16 of the makers' data sheets in TFLOP/s
DEVICES = {
    "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989, "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312, "NVIDIA B200": 2250, "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA A10G": 70, "NVIDIA A10": 125,
    "Tesla T4": 65, "Tesla V100-SXM2-16GB": 125, "NVIDIA GeForce RTX 4090": 165, "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce GTX 1080 Ti": None, "NVIDIA L40": None, "NVIDIA A30": None,
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_the_peak_of_a_device_is_that_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Fails when: a short name is found in a longer one (L4 in L40S, A10 in A100), or a device of no known peak gets one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    teraflops = DEVICES[name]
    assert peak_flops(torch.device("cuda")) == (None if teraflops is None else teraflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None


def test_every_known_peak_is_tried_with_a_name_of_a_device() -> None:
    """Fails when: a device is added and no name of it is tried."""
    found = {part for name in DEVICES for part in sorted(PEAK_FLOPS, key=len, reverse=True)[:] if part in name}
    assert found == set(PEAK_FLOPS)


class Terminal(io.StringIO):
    """Standard error that is a terminal, or a file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def shown_lines(stream: str) -> list[str]:
    """What is left on the screen: `\\r` and ESC[2K begin the line again."""
    lines = [""]
    for part in re.split(r"(\r|\x1b\[2K|\n)", stream):
        if part == "\n":
            lines.append("")
        elif part in ("\r", "\x1b[2K"):
            lines[-1] = ""
        else:
            lines[-1] += part
    return lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    return now


def progress_on(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, **given: Any) -> tuple[Progress, Terminal, Terminal]:
    screen, out = Terminal(is_terminal), Terminal(is_terminal)
    monkeypatch.setattr(tracking.sys, "stderr", screen)
    monkeypatch.setattr(tracking.sys, "stdout", out)
    return Progress(**{"total_steps": 12, "first_step": 0, "shown": True, **given}), screen, out


def test_a_terminal_has_one_moving_line_with_the_share_done_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """After 3 of 12 steps in 30 seconds, a quarter of the bar and 90 seconds. Fails when: the line is not taken back before the next
    one, or a logging event leaves nothing above it."""
    progress, screen, out = progress_on(monkeypatch, True)
    clock[0] += 30.0
    progress.logged(3, {"loss": 1.25, "learning_rate": 1e-4, "grad_norm": 2.0, "unknown": 7.0})
    progress.moved(3)
    clock[0] += 10.0
    progress.moved(4)
    assert out.getvalue() == "step 3/12  loss 1.2500  lr 1.00e-04  norm 2  ETA 1:30\n"
    assert shown_lines(screen.getvalue()) == ["━" * 8 + "─" * 16 + " 4/12  ETA 1:20"]
    assert "━" * 6 + "─" * 18 + " 3/12  ETA 1:30" in screen.getvalue()
    progress.say("a line that stays")
    assert shown_lines(screen.getvalue())[-1] == ""
    assert out.getvalue().endswith("ETA 1:30\na line that stays\n")
    progress.moved(12)
    progress.close()
    assert screen.getvalue().endswith("\n")
    assert shown_lines(screen.getvalue())[-2].startswith("━" * 24 + " 12/12")


def test_a_line_of_sampled_completions_begins_with_each_reward_and_what_to_watch(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Fails when: a reward of several is left out, or the only one is shown twice; a loss's own `kl` is as before."""
    progress, _, out = progress_on(monkeypatch, False)
    one = {"entropy": 0.5, "groups_without_spread": 0.25, "loss": 1.25, "reward": 0.5, "reward_a": 0.5, "reward_std": 0.125}
    progress.logged(1, one)
    progress.logged(2, one | {"reward_b": 2.0, "kl": 0.5})
    progress.logged(3, {"loss": 1.25, "kl": 0.5})
    lines = [line.partition("  ETA")[0] for line in out.getvalue().splitlines()]
    assert lines == [
        "step 1/12  reward 0.5000  without_spread 0.2500  entropy 0.5000  loss 1.2500",
        "step 2/12  reward 0.5000  reward_a 0.5000  reward_b 2  without_spread 0.2500  entropy 0.5000  kl 0.5000  loss 1.2500",
        "step 3/12  loss 1.2500",
    ]


def test_the_moving_line_is_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Fails when: it may be longer, and what wraps is left behind by each refresh."""
    monkeypatch.setenv("COLUMNS", "30")
    progress, screen, _ = progress_on(monkeypatch, True, total_steps=12_000)
    clock[0] += 30.0
    progress.moved(3_000)
    assert [len(line) for line in shown_lines(screen.getvalue())] == [29]


def test_a_rate_has_three_digits(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Fails when: 980.1020 tokens a second are shown."""
    progress, _, out = progress_on(monkeypatch, False)
    progress.logged(3, {"tokens_per_second": 980.1020, "examples_per_second": 4.56789})
    assert out.getvalue() == "step 3/12  supervised_tokens/s 980  examples/s 4.57  ETA 0:00\n"


def test_a_resumed_run_reckons_with_its_own_steps_alone(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Steps 9 and 10 took 5 seconds each, two are left. Fails when: the time of this process is divided by all steps."""
    progress, screen, _ = progress_on(monkeypatch, True, first_step=8)
    progress.moved(8)
    assert "ETA" not in screen.getvalue()
    clock[0] += 10.0
    progress.moved(10)
    assert "10/12  ETA 0:10" in screen.getvalue()


def test_a_log_file_has_plain_lines_and_no_control_characters(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Fails when: the moving line is written to a file, or a logging event is not."""
    progress, screen, out = progress_on(monkeypatch, False)
    clock[0] += 6.0
    progress.moved(3)
    progress.logged(3, {"loss": 1.25, "tokens_per_second": 12345.6})
    progress.close()
    assert screen.getvalue() == ""
    assert out.getvalue() == "step 3/12  loss 1.2500  supervised_tokens/s 12,346  ETA 0:18\n"


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Fails when: `shown` is asked in some of the four places only."""
    progress, screen, out = progress_on(monkeypatch, True, shown=False)
    progress.moved(3)
    progress.logged(3, {"loss": 1.0})
    progress.say("hello")
    progress.close()
    assert screen.getvalue() + out.getvalue() == ""


def test_settings_of_the_toolkits_groups_leave_the_machine_and_a_recipes_own_texts_do_not() -> None:
    """Fails when: the groups of single methods are forgotten, or a text of a recipe's own is let through."""

    @dataclass(frozen=True)
    class Config(tk.OptimConfig, tk.AdapterConfig, tk.PreferenceConfig):
        my_key: str = "hf_planted"
        my_number: int = 3

    public = public_settings(Config(loss_type=["sigmoid", "sft"]))
    assert public["loss_type"] == ["sigmoid", "sft"]
    assert public["lora_target_modules"] == ["all-linear"]
    assert public["optim"] == Config().optim
    assert public["my_number"] == 3
    assert "my_key" not in public


def test_every_file_of_a_run_is_strict_json(tmp_path: Any) -> None:
    """However deep a number is that is not finite. Fails when: strict_json looks at the top alone, or write_summary leaves it out."""
    from toolkit.runs.directory import write_summary
    from toolkit.runs.summary import Summary
    from toolkit.system.json_lines import json_line

    metrics = {"loss": math.nan, "best": {"value": math.inf, "steps": [1, -math.inf]}, "text": "NaN", "ok": 1.5}
    write_summary(tmp_path, Summary(metrics))
    strict = {"loss": None, "best": {"value": None, "steps": [1, None]}, "text": "NaN", "ok": 1.5}
    for text in ((tmp_path / "summary.json").read_text(), json_line(metrics)):
        assert json.loads(text, parse_constant=lambda word: pytest.fail(word)) == strict
