"""A teacher on a server: its most probable tokens at each supervised position, by vLLM's completions API.

What is relied on, next to what `ServerClient` names: `max_model_len` in `/v1/models`, and `prompt_logprobs` in
`/v1/completions`, whose answer has for each token of the prompt but the first {token id: {"logprob": ...}}: of the k most
probable tokens there, and of the token itself where it is none of them. They are taken at temperature 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.config import Refusal
from toolkit.data.loading.batch import MicroBatch
from toolkit.distributed.ranks import on_main
from toolkit.losses.causal_lm import supervised
from toolkit.losses.distillation import Body, TeacherFn
from toolkit.losses.divergences import TeacherLogps
from toolkit.rollouts.server import PROBES, compare_tokenizers, find_served_model
from toolkit.rollouts.server_client import ServerClient, ServerRefused, at_once

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

REQUESTS = 16  # texts that each process sends at a time
LEAST_REST = 2.0**-24  # of the probability: what float32 can't distinguish from none, whose logarithm would be infinite


def connect_teacher(
    accelerator: Accelerator, url: str, tokenizer: PreTrainedTokenizerBase, *, top_k: int, vocabulary: int, max_length: int
) -> tuple[TeacherFn, dict[str, Any]]:
    """The teacher, and what it is known by: the name of its model there, and where the server has that from. A collective.

    Args:
        tokenizer, vocabulary: of the student, and the number of its logits.
        top_k: how many tokens are requested of the server.
        max_length: of the rows.

    Raises:
        Refusal: no server, another tokenizer, too short a context, no log-probabilities of a given text or too few.
    """
    if top_k >= vocabulary:
        raise Refusal(f"--teacher-top-k {top_k}: the student has {vocabulary:,} tokens, of which a server returns only some.")
    advice = "Start it again, and the same command with --resume: what is stored is kept."
    client = ServerClient(url, flag="--teacher", advice=advice)

    def find() -> dict[str, Any]:
        served = find_served_model(client, 0.0, start=f"vllm serve MODEL --max-logprobs {top_k}")
        client.model = str(served["id"])
        other = "Serve a teacher of the student's family, or give a student that begins from scratch --tokenizer THE_TEACHER."
        compare_tokenizers(client, tokenizer, other)
        longest = served.get("max_model_len")
        if isinstance(longest, int) and longest <= max_length:  # the server writes a token behind the text
            raise Refusal(
                f"--teacher {client.shown}: takes {longest - 1:,} tokens, and rows are up to {max_length:,} long. Take "
                f"--max-length {longest - 1}, or start it with --max-model-len {max_length + 1}."
            )
        probe = list(tokenizer.encode(PROBES[0], add_special_tokens=False))[:max_length]
        try:
            _likeliest(client, top_k, vocabulary, (probe, np.arange(len(probe) - 1)))
        except ServerRefused as refused:
            raise Refusal(
                f"{refused} Start vLLM with --max-logprobs {top_k} or more, or take a smaller --teacher-top-k."
            ) from refused
        return {"server_model": served["id"], "root": served.get("root")}

    made_of = on_main(accelerator, find)
    client.model = made_of["server_model"]
    return ask_server(client, top_k, vocabulary), made_of


def ask_server(client: ServerClient, top_k: int, vocabulary: int) -> TeacherFn:
    """A teacher that returns its `top_k` most probable tokens at temperature 1, the only one that can be requested."""

    def ask(micro_batch: MicroBatch, temperature: float, body: Body) -> torch.Tensor:
        device = micro_batch["input_ids"].device
        calls = [partial(_likeliest, client, top_k, vocabulary, text) for text in _texts(micro_batch)]
        found = [answer for _, answer in sorted(at_once(calls, REQUESTS), key=itemgetter(0))]
        found = found or [(np.zeros((0, top_k + 1), np.float32), np.zeros((0, top_k), np.int64))]
        logps, ids = (torch.from_numpy(np.concatenate(each)).to(device) for each in zip(*found, strict=True))
        return body(lambda piece: TeacherLogps(logps[piece], ids[piece]), vocabulary)

    return ask


Text = tuple[list[int], np.ndarray]  # token ids, and the positions whose next token is supervised


def _texts(micro_batch: Mapping[str, Any]) -> Iterator[Text]:
    """The documents of a micro-batch in which something is supervised, each up to the last token that is."""
    ids, positions = micro_batch["input_ids"], supervised(dict(micro_batch))[0].cpu().numpy()
    rows = range(0, ids.numel() + 1, ids.shape[1])
    bounds = micro_batch["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in micro_batch else rows
    tokens = ids.reshape(-1).tolist()
    for start, end in itertools.pairwise(bounds):
        own = positions[(positions >= start) & (positions < end)] - start
        if len(own):
            yield tokens[start : start + int(own[-1]) + 2], own


def _likeliest(client: ServerClient, top_k: int, vocabulary: int, text: Text) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities `[positions, top_k + 1]`, the last of all other tokens, and ids `[positions, top_k]`, in order of them.

    Raises:
        Refusal: the server's response is not what was requested.
    """
    tokens, positions = text
    body = {"model": client.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
    answer = client.ask("/v1/completions", body)
    with client.reading("/v1/completions"):
        return _read(client, answer, tokens, positions, top_k, vocabulary)


def _read(
    client: ServerClient, answer: Any, tokens: list[int], positions: np.ndarray, top_k: int, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    tables = ((answer or {}).get("choices") or [{}])[0].get("prompt_logprobs")
    if tables is None:
        raise Refusal(
            f"--teacher {client.shown}: answers without prompt_logprobs, the log-probabilities of a text that it is given. "
            "vLLM's server returns them; take that, or a teacher that is loaded here."
        )
    if len(tables) != len(tokens):
        raise Refusal(f"--teacher {client.shown}: returned {len(tables)} log-probabilities, and was sent {len(tokens)} tokens.")
    logps, ids = np.empty((len(positions), top_k + 1), np.float32), np.empty((len(positions), top_k), np.int64)
    for row, position in enumerate(positions.tolist()):
        said = _ranked(tables[position + 1] or {})
        problem = _problem(said, tokens[position + 1], top_k, vocabulary)
        if problem:
            raise Refusal(f"--teacher {client.shown}: for the token after {tokens[: position + 1][-8:]} it returned {problem}.")
        ids[row] = [token for _, token in said[:top_k]]
        logps[row, :top_k] = [logp for logp, _ in said[:top_k]]
        logps[row, top_k] = math.log(max(1.0 - sum(math.exp(logp) for logp, _ in said[:top_k]), LEAST_REST))
    return logps, ids


def _ranked(table: Mapping[str, Any]) -> list[tuple[float, int]]:
    """The most probable first, of equal ones the smallest number."""
    found = [(float(said["logprob"]), int(token)) for token, said in table.items()]
    return sorted(found, key=lambda each: (-each[0], each[1]))


def _problem(said: Sequence[tuple[float, int]], token: int, top_k: int, vocabulary: int) -> str:
    if len(said) < top_k:
        return f"{len(said)} log-probabilities, requested {top_k}"
    if not all(math.isfinite(logp) and logp < 1e-3 for logp, _ in said):
        return f"log-probabilities such as {next(logp for logp, _ in said if not (math.isfinite(logp) and logp < 1e-3))}"
    if token not in [each for _, each in said]:
        return f"nothing of token {token}, which is there"
    if others := [each for _, each in said[:top_k] if not 0 <= each < vocabulary]:
        return f"token {others[0]} is likely, and the student has {vocabulary:,}: it has another vocabulary"
    mass = sum(math.exp(logp) for logp, _ in said[:top_k])
    return f"probabilities that add up to {mass:.4f}" if mass > 1.001 else ""
