"""A server as the sampler: it is found and compared at the start, given the weights of each step, and queried for groups.

vLLM loads weights from a directory by `POST /collective_rpc` with the method `reload_weights` and its `weights_path` (a server
in development mode, VLLM_SERVER_DEV_MODE=1), forgets prefixes of the old ones by `/reset_prefix_cache`, and takes an adapter by
`/v1/load_lora_adapter` (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1). Any other server: an address of its own that takes the directory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.config import Refusal
from toolkit.config.rollouts import RolloutServerConfig
from toolkit.distributed.engines import unwrapped
from toolkit.distributed.engines.pieces import whole_state_dict
from toolkit.distributed.ranks import on_main
from toolkit.export.model_directory import write_model
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.sampler import Completion
from toolkit.models.adapter_files import is_adapted
from toolkit.rollouts.server_client import ServerClient, ServerGone, ServerRefused, at_once
from toolkit.system.console import say

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

PROBES = ("3 + 14 = 17, isn't it?\n\n\tYes.", "Grüße aus Zürich – 東京 🙂", "def f(x):\n    return x**2  # squared")
_CARD = "The policy of a run in progress, for the server that samples from it.\n"


@dataclass
class RolloutServer:
    """A server that was found in order, and the weights that it has.

    `served`: the version of the policy that was last handed over; `steps`: how many have been; `said`: what the server returns
    to a probe with these weights.
    """

    client: ServerClient
    directory: Path
    probe: list[int]
    reload: str | None = None
    requests: int = 32
    max_gap: float = 0.1
    served: str = ""
    steps: int = 0
    said: object = None


def connect_server(
    accelerator: Accelerator, config: RolloutServerConfig, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path
) -> RolloutServer | None:
    """The server of `--rollout-server`, None without one. A collective.

    Args:
        output_dir: of the run. The server must be able to read it: weights are handed over in `rollouts/policy` there.

    Raises:
        Refusal: it does not answer, or has another tokenizer or no such model.
    """
    if not config.rollout_server:
        return None
    client = ServerClient(
        config.rollout_server, config.rollout_server_model or "", config.rollout_server_timeout, config.rollout_server_retries
    )

    def find() -> str:
        served = find_served_model(client, config.rollout_server_wait, start="VLLM_SERVER_DEV_MODE=1 vllm serve MODEL")
        client.model = str(served["id"])
        compare_tokenizers(client, tokenizer, "Serve the model that is trained.")
        return client.model

    client.model = on_main(accelerator, find)
    return RolloutServer(
        client, (Path(output_dir) / "rollouts" / "policy").absolute(), list(tokenizer.encode(PROBES[0])),
        config.rollout_server_reload, config.rollout_server_requests, config.rollout_server_max_gap,
    )  # fmt: skip


def find_served_model(client: ServerClient, wait: float, start: str) -> dict[str, Any]:
    """The server's description of its model (`id`, ...), once it answers. `start`: a command that starts such a server.

    Raises:
        Refusal: none answers within `wait` seconds, or it has no model of the name that `client` has.
    """
    end, waits = time.monotonic() + wait, False
    while True:
        try:
            found = client.ask("/v1/models", retries=0)
            break
        except ServerGone as gone:
            if time.monotonic() >= end:
                raise Refusal(
                    f"{client.flag} {client.shown}: no server answers there ({gone.why}). Start it first, for example with: "
                    f"{start}"
                ) from gone
            if not waits:
                say(f"waiting up to {wait:g} s for a server at {client.url} ({gone.why})")
                waits = True
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
    with client.reading("/v1/models"):
        served: dict[str, dict[str, Any]] = {each["id"]: each for each in (found or {}).get("data") or []}
    if not served:
        raise Refusal(f"{client.flag} {client.shown}: /v1/models names no model there. Is it a server of vLLM's API?")
    if client.model and client.model not in served:
        raise Refusal(
            f"{client.flag} {client.shown}: it has no model {client.model}, but {[*served]}. Give one of them as "
            f"{client.flag}-model."
        )
    return served[client.model or next(iter(served))]


def compare_tokenizers(client: ServerClient, tokenizer: PreTrainedTokenizerBase, advice: str) -> None:
    """Refuse a server that reads a text as other tokens; one without `/tokenize` is known by its log-probabilities alone."""
    for text in PROBES:
        try:
            theirs = client.ask("/tokenize", {"model": client.model, "prompt": text, "add_special_tokens": False})
        except ServerRefused as refused:
            if refused.status == 404:
                return
            raise
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        with client.reading("/tokenize"):
            tokens = (theirs or {}).get("tokens")
        if tokens != ours:
            raise Refusal(
                f"{client.flag} {client.shown}: its model {client.model} has another tokenizer. The text {text!r} is "
                f"{tokens} there, and {ours} here. {advice}"
            )


def hand_over(
    accelerator: Accelerator, server: RolloutServer, model: nn.Module, tokenizer: PreTrainedTokenizerBase, version: str
) -> None:
    """Let the server load the weights of the trained model, unless it has this version of them. A collective.

    A sharded model is gathered on the CPU of the main process, as it is for a save.

    Raises:
        Refusal: they can't be written; the server can't load them, or answers a probe in all digits as with other weights.
    """
    if server.served == version:
        return
    plain: Any = unwrapped(model)
    state = whole_state_dict(accelerator, plain)
    adapted = is_adapted(plain)
    name = f"policy-{version}" if adapted else server.client.model

    def load() -> object:
        assert state is not None  # on the main process
        try:
            write_model(server.directory, plain, state, tokenizer, _CARD)
        except OSError as error:
            raise Refusal(
                f"--rollout-server {server.client.url}: the weights for it can't be written to {server.directory} ({error}). "
                "Make room there, or give another --output-dir."
            ) from error
        _load(server, name, version, adapted)
        said = _answer_to_probe(server, name)
        if said is not None and said == server.said:
            raise Refusal(
                f"--rollout-server {server.client.url}: it still has old weights: with those of {version} it answers a probe "
                f"in all digits as with those of {server.served}. It must load {server.directory}, which it may not see: is "
                "it on this machine, or on a disk that both share?"
            )
        return said

    server.said = on_main(accelerator, load)
    server.served, server.steps, server.client.model = version, server.steps + 1, name


def _load(server: RolloutServer, name: str, version: str, adapted: bool) -> None:
    client, path = server.client, str(server.directory)
    if server.reload:
        client.ask(server.reload, {"weights_path": path, "policy_version": version})
    elif adapted:
        with contextlib.suppress(ServerRefused):  # there by this name only where a run was killed with these weights
            client.ask("/v1/unload_lora_adapter", {"lora_name": name})
        client.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if server.steps:
            client.ask("/v1/unload_lora_adapter", {"lora_name": client.model})
    else:
        try:
            client.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        except ServerRefused as refused:
            if refused.status != 404:
                raise
            raise Refusal(
                f"--rollout-server {client.url}: it has no /collective_rpc, by which weights are loaded. Start vLLM with "
                "VLLM_SERVER_DEV_MODE=1, or give the address of another way as --rollout-server-reload."
            ) from refused
        client.ask("/reset_prefix_cache", {})


def _answer_to_probe(server: RolloutServer, name: str) -> object:
    """Greedy tokens, and the log-probabilities of the most probable ones next to them."""
    body = {"model": name, "prompt": server.probe, "max_tokens": 8, "temperature": 0.0, "logprobs": 5}
    answer = server.client.ask("/v1/completions", body)
    with server.client.reading("/v1/completions"):
        choices = (answer or {}).get("choices") or [{}]
        said = choices[0].get("logprobs") or {}
        return [said["token_logprobs"], said["top_logprobs"]] if said.get("top_logprobs") else None
    raise AssertionError("reading() lets nothing pass")


def ask_for_groups(
    server: RolloutServer, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: SamplingSettings, size: int,
    vocabulary: int, names: Sequence[str], on_group: Callable[[int, list[Completion]], None],
) -> None:  # fmt: skip
    """A group of `size` completions for each prompt, given to `on_group` with its number as soon as it is there.

    Raises:
        Refusal: of `ServerClient.complete`. Groups that are there by then have been given.
    """
    calls = [
        partial(server.client.complete, ids, settings, size, seeds[number], vocabulary, names[number])
        for number, ids in enumerate(prompts)
    ]
    for number, group in at_once(calls, server.requests):
        on_group(number, group)
