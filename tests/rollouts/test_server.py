"""A server as the sampler, against a real one on the loopback: the same gradient, and what each of its faults and lies costs."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import toolkit as tk
from tests.rollouts.server_double import Double, serving
from toolkit.config import Refusal
from toolkit.config.rollouts import RolloutServerConfig
from toolkit.data.loading.batch import Batch
from toolkit.generation.distribution import SamplingSettings
from toolkit.models.tokenizer import train_tokenizer
from toolkit.rollouts.server_client import ServerClient, ServerGone, at_once
from toolkit.system.interruptions import time_limit

SETTINGS = SamplingSettings(max_new_tokens=6, temperature=0.7, eos_token_ids=(2,))
PROMPTS = ["one and one", "3+4="]
ROWS = [{"prompt": text, "origin": f"rows.jsonl:{number + 1}"} for number, text in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["one two three 1+2=3 Grüße"] * 4, 300)


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # far from a uniform distribution
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture
def double(tokenizer: Any) -> Iterator[Double]:
    with serving(model_of(), tokenizer) as double:
        yield double


def client_of(double: Double) -> ServerClient:
    return ServerClient(double.url, "tiny", timeout=0.7, retries=2, pause=0.01)


def connected(accelerator: Accelerator, double: Double, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    config = RolloutServerConfig(rollout_server=f"{double.url}/v1/", rollout_server_wait=0.0, rollout_server_retries=0, **settings)
    return tk.connect_server(accelerator, config, tokenizer, folder)


def batch_of(tokenizer: Any) -> Batch:
    micro_batch = {"prompt_ids": [tokenizer.encode(text) for text in PROMPTS], "rows": ROWS}
    return Batch([micro_batch], {}, [True], size=2, indices=[[0, 1]], epochs=[[0, 0]])


def sampled(accelerator: Accelerator, model: Any, tokenizer: Any, server: Any, settings: Any = SETTINGS, phase: Any = None) -> Any:
    return tk.sample_rollouts(
        accelerator, model, tokenizer, batch_of(tokenizer), settings, num_generations=3, seed=1, phase=phase, server=server
    )


def with_ours(accelerator: Accelerator, model: Any, rollouts: Any, temperature: float = SETTINGS.temperature) -> Any:
    collate = partial(tk.collate_rollouts, layout="padded")
    logps_of = {"old_logps": lambda model, batch: tk.rollout_logps(model, batch, temperature)[0]}
    return tk.with_logps(accelerator, model, rollouts, collate, micro_batch_size=4, **logps_of)


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, top_k=7, top_p=0.8)], ids=["plain", "top-k"])
def test_an_honest_server_gives_the_gradient_of_the_local_sampler(
    accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path, settings: SamplingSettings
) -> None:
    """The server begins with other weights. Log-probabilities are the trained model's to 1e-5, and with its weights the gradient
    of the loss is that of the same tokens sampled here, to 1e-5 of the largest element.

    Fails when: `hand_over` does nothing, `_request` leaves the temperature out, or `_kept` leaves a token out.
    """
    model = model_of(1)
    server = connected(accelerator, double, tokenizer, tmp_path)
    rollouts = with_ours(accelerator, model, sampled(accelerator, model, tokenizer, server, settings))
    assert [(each.prompt, each.index) for each in rollouts] == [(prompt, index) for prompt in range(2) for index in range(3)]
    assert len({tuple(each.completion_ids) for each in rollouts}) > 3
    local = [replace(each, logps=each.old_logps or []) for each in rollouts]
    corrected, metrics = tk.correct_for_server(server, rollouts)
    assert float(metrics["sampler_logp_gap_max"]) < 1e-5
    assert float(metrics["sampler_ratio"]) == pytest.approx(1, abs=1e-5)
    assert float(metrics["sampler_effective"]) == pytest.approx(1, abs=1e-5)
    assert (rollouts[0].kept is None) == (not settings.cuts)

    def gradient(rollouts: Any) -> torch.Tensor:
        model.zero_grad()
        batch = tk.collate_rollouts(rollouts, [1.0, -1.0, 0.5, 2.0, -0.5, -1.0], layout="padded")
        totals = {"completions": 6.0, "completion_tokens": float(batch["mask"].sum())}
        logps, _ = tk.rollout_logps(model, batch, settings.temperature)
        tk.policy_loss(
            logps, batch.get("old_logps"), batch["advantages"], batch["mask"], totals,
            sampler_weights=batch.get("sampler_weights"),
        )[0].backward()  # fmt: skip
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    ours, theirs = gradient(local), gradient(corrected)
    assert corrected[0].sampler_weights is not None
    assert float((ours - theirs).abs().max()) < 1e-5 * float(ours.abs().max())


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "stall", "garbage"])
def test_what_fails_is_asked_again_and_the_answer_is_the_same(double: Double, fault: str) -> None:
    """Twice, with two tries left; a third time ends it. Fails when: `range(tries)` is one less, or `_once` leaves out the fault."""
    client, ids = client_of(double), [5, 6, 7]
    whole = client.complete(ids, SETTINGS, 2, 9, 320)
    double.faults = [fault] * 2
    assert client.complete(ids, SETTINGS, 2, 9, 320) == whole
    assert len(double.asked) == 4
    double.faults = [fault] * 3
    with pytest.raises(ServerGone, match="3 times"):
        client.complete(ids, SETTINGS, 2, 9, 320)


def test_nobody_waits_for_a_request_that_stalls_when_another_is_refused_or_the_run_is_interrupted() -> None:
    """Fails when: `at_once` is a ThreadPoolExecutor, or its threads are waited for."""
    free = threading.Event()

    def refuse() -> None:
        raise Refusal("no")

    began = time.monotonic()
    with pytest.raises(Refusal):
        list(at_once([partial(free.wait, 20.0), refuse], 2))
    with pytest.raises(TimeoutError), time_limit(0.3):
        list(at_once([partial(free.wait, 20.0)] * 3, 2))
    assert time.monotonic() - began < 10
    free.set()
    assert sorted(at_once([partial(int, each) for each in "3142"], 3)) == [(0, 3), (1, 1), (2, 4), (3, 2)]


@pytest.mark.parametrize(
    ("fault", "lie", "says"),
    [("400", "", "HTTP 400"), ("", "count", "completions 1, requested 2"),
     ("", "length", "7 tokens, requested 6"), ("", "nan", "log-probability nan"), ("", "nologps", "0 log-probabilities of"), ("", "form", "in another form"), ("", "twice", r"numbers \[0, 0\]"),
     ("", "raw", "processed_logprobs")],
)  # fmt: skip
def test_a_wrong_answer_is_refused_at_once(double: Double, fault: str, lie: str, says: str) -> None:
    """With the prompt's place. Fails when: the check of its kind is dropped from `complete` or `_completion`."""
    double.faults, double.lie = [fault] if fault else [], lie
    settings = replace(SETTINGS, top_k=5) if lie == "raw" else replace(SETTINGS, eos_token_ids=())
    with pytest.raises(Refusal, match=says) as refused:
        client_of(double).complete([5, 6], settings, 2, 9, 320, "rows.jsonl:7")
    assert "rows.jsonl:7" in str(refused.value) or fault
    assert "\n" not in str(refused.value)  # fails when: a page of the server is said as it is
    assert len(double.asked) == 1


def test_a_server_that_is_not_there_or_of_another_tokenizer_or_model_is_refused(
    accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path
) -> None:
    """Before anything is loaded. Fails when: `_compare_tokenizers` is not called, or a name that is not served is taken."""
    connected(accelerator, double, tokenizer, tmp_path)
    with pytest.raises(Refusal, match="has no model large"):
        connected(accelerator, double, tokenizer, tmp_path, rollout_server_model="large")
    double.lie = "tokenizer"
    with pytest.raises(Refusal, match="another tokenizer"):
        connected(accelerator, double, tokenizer, tmp_path)
    double.url = "http://127.0.0.1:9"
    with pytest.raises(Refusal, match="no server answers"):
        connected(accelerator, double, tokenizer, tmp_path)


def test_old_weights_and_wrong_log_probabilities_are_found(
    accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path
) -> None:
    """Old weights at once by the probe, on the first step by log-probabilities; an offset of half a nat by these.

    Fails when: `said == server.said` is not asked, or `max_gap` is not compared.
    """
    server, model = connected(accelerator, double, tokenizer, tmp_path), model_of(2)
    assert tk.correct_for_server(server, with_ours(accelerator, model, sampled(accelerator, model, tokenizer, server)))[1]
    double.lie = "logps"
    rollouts = with_ours(accelerator, model, sampled(accelerator, model, tokenizer, server))
    with pytest.raises(Refusal, match=r"0\.5 nats"):
        tk.correct_for_server(server, rollouts)
    double.lie, newer = "old", model_of(3)
    with pytest.raises(Refusal, match="still has old weights"):
        sampled(accelerator, newer, tokenizer, server)
    again = connected(accelerator, double, tokenizer, tmp_path)  # as a run that starts: nothing to compare the probe with
    rollouts = with_ours(accelerator, newer, sampled(accelerator, newer, tokenizer, again))
    with pytest.raises(Refusal, match="another model"):
        tk.correct_for_server(again, rollouts)


def test_what_the_ledger_has_is_not_asked_for_again(
    accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path
) -> None:
    """A phase that fails after its first group goes on with the second; with both the server hears nothing.

    Fails when: `ask_for_groups` gives groups only when all are there, or weights are handed over without need.
    """
    model = model_of(4)
    server = connected(accelerator, double, tokenizer, tmp_path, rollout_server_requests=1)
    double.faults = ["", "500"]
    phase = tk.open_phase(accelerator, model, tmp_path, 1, SETTINGS, seed=1)
    with pytest.raises(ServerGone, match="--resume"):
        sampled(accelerator, model, tokenizer, server, phase=phase)
    phase.close()
    before = len(double.asked)
    phase = tk.open_phase(accelerator, model, tmp_path, 1, SETTINGS, seed=1)
    assert len(phase.known) == 1
    rollouts = sampled(accelerator, model, tokenizer, server, phase=phase)
    assert [path for path, _ in double.asked[before:]] == ["/v1/completions"]
    tk.save_rollouts(accelerator, phase, rollouts)
    double.asked.clear()
    again = tk.open_phase(accelerator, model, tmp_path, 1, SETTINGS, seed=1)
    fresh = connected(accelerator, double, tokenizer, tmp_path)
    double.asked.clear()
    assert [each.completion_ids for each in sampled(accelerator, model, tokenizer, fresh, phase=again)] == [
        each.completion_ids for each in rollouts
    ]
    assert double.asked == []


def test_weights_that_cannot_be_written_end_with_one_message(accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path) -> None:
    """Fails when: `hand_over` leaves the error of the disk to the run, which ends it with a traceback."""
    server = connected(accelerator, double, tokenizer, tmp_path / "run")
    server.directory.parent.parent.mkdir(parents=True, exist_ok=True)
    server.directory.parent.write_text("a file in the way")
    with pytest.raises(Refusal, match=rf"can't be written to {server.directory}"):
        sampled(accelerator, model_of(1), tokenizer, server)


def test_another_address_is_given_the_directory_and_the_version(
    accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path
) -> None:
    """Fails when: `_load` sends the policy's version under another name."""
    model = model_of(5)
    server = connected(accelerator, double, tokenizer, tmp_path, rollout_server_reload=f"{double.url}/load")
    sampled(accelerator, model, tokenizer, server)
    loads = [body for path, body in double.asked if path == "/load"]
    assert loads == [{"weights_path": str(server.directory), "policy_version": server.served}]


def test_an_adapter_is_loaded_by_a_name_of_its_own_and_the_one_before_it_goes(
    accelerator: Accelerator, tokenizer: Any, double: Double, tmp_path: Path
) -> None:
    """The base model there stays. Log-probabilities are the adapted model's to 1e-5 with its first and its second weights.

    Fails when: `name` is the base model's, or the former adapter, or one of this name, is not unloaded.
    """
    from peft import LoraConfig, get_peft_model

    double.model = model_of(6)
    model = get_peft_model(model_of(6), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    server = connected(accelerator, double, tokenizer, tmp_path)
    for seed in range(2):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        rollouts = with_ours(accelerator, model.eval(), sampled(accelerator, model, tokenizer, server))
        _, metrics = tk.correct_for_server(server, rollouts)
        assert float(metrics["sampler_logp_gap_max"]) < 1e-5
        assert list(double.adapters) == [f"policy-{server.served}"]
    sampled(accelerator, model, tokenizer, connected(accelerator, double, tokenizer, tmp_path))  # a run that was killed then


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the key goes to the header as it is."""
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    with pytest.raises(Refusal, match="VLLM_API_KEY") as refused:
        ServerClient("http://127.0.0.1:1", timeout=1, retries=0).ask("/v1/models")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://" + "a" * 70])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """Fails when: a ValueError of urllib goes through."""
    with pytest.raises(Refusal, match="no request can be sent"):
        ServerClient(url, timeout=1, retries=0).ask("/v1/models")
