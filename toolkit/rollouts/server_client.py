"""A client of vLLM's completions API: requests that are sent again when they fail, and answers that are checked.

What is relied on is in vLLM's OpenAI-compatible server (documentation of 0.28, source of the current main branch):
`/v1/models`; `/tokenize`; `/v1/completions` with a prompt of token ids, `n`, `seed`, `return_token_ids` and
`return_tokens_as_token_ids`, `logprobs` of the sampled token and the most probable ones.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from toolkit.config import Refusal
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.sampler import Completion
from toolkit.system.console import one_line, without_passwords

LONGEST_PAUSE = 30.0  # seconds between two tries
_NOTHING = -9000.0  # nats: vLLM returns -9999 for a token that could not be drawn
_TOKEN = "token_id:"
_PROXY_FREE = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Result = TypeVar("Result")


class ServerGone(Refusal):
    """The server could not be reached, or failed, as often as a request is sent; `why`, the last time."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class ServerRefused(Refusal):
    """The server takes no such request: its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class ServerClient:
    """Where the server is, and how patient to be. `model`: by the name that it has there.

    `flag`: the setting that names it, for messages; `advice`: what to do when it is gone.
    """

    url: str
    model: str = ""
    timeout: float = 600.0
    retries: int = 5
    pause: float = 0.5  # seconds before the second try; doubled before each further one
    flag: str = "--rollout-server"
    advice: str = "Start the server again, and the same command with --resume: what was sampled is kept."

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise Refusal(f"{self.flag} {self.url}: an address begins with http:// or https://.")

    def ask(self, path: str, body: Mapping[str, Any] | None = None, retries: int | None = None) -> Any:
        """The answer to a POST of a body, or to a GET without one, as JSON gives it; None where it is empty.

        Sent again, after a pause that doubles, where the connection fails or stalls, the server fails (5xx) or is busy (429),
        or the answer is no JSON: one without a length may have ended in the middle.

        Raises:
            ServerGone: it failed every time.
            Refusal: the server refuses the request.
        """
        tries = 1 + (self.retries if retries is None else retries)
        for number in range(tries):
            try:
                return self._once(path, body)
            except _Again as again:
                last = again
                if number + 1 < tries:
                    time.sleep(min(LONGEST_PAUSE, max(last.pause, self.pause * 2**number)))
        often = f" {tries} times, the last time" if tries > 1 else ""
        raise ServerGone(
            f"{self.flag} {self.shown}: {path} failed{often} with: {last}. {self.advice}", str(last)
        )

    def _once(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            if not key.isascii() or not key.isprintable():
                raise Refusal("VLLM_API_KEY: has a sign that no header may have, such as a line break. Set it again.")
            headers["Authorization"] = f"Bearer {key}"
        url = path if path.startswith("http") else self.url + path
        data = None if body is None else json.dumps(body).encode()
        end = time.monotonic() + self.timeout
        try:
            with _PROXY_FREE.open(urllib.request.Request(url, data, headers), timeout=self.timeout) as answer:
                pieces = []
                while piece := answer.read1(1 << 16):  # a server that sends a byte now and then is stalled too
                    pieces.append(piece)
                    if time.monotonic() > end:
                        raise _Again(f"no whole answer in {self.timeout:g} seconds")
                if answer.length:
                    raise _Again(f"the answer was cut {answer.length:,} bytes before its end")
        except urllib.error.HTTPError as error:
            try:
                said = one_line(error.read(2000).decode(errors="replace"), 300)
            except (OSError, http.client.HTTPException):  # it stalls or closes within its own message
                said = ""
            what = f"HTTP {error.code} {error.reason}{': ' + said if said else ''}"
            if error.code >= 500 or error.code == 429:
                wait = error.headers.get("Retry-After", "")
                raise _Again(what, float(wait) if wait.isdigit() else 0.0) from error
            raise ServerRefused(f"{self.flag} {self.shown}: {path} was refused with {what}.", error.code) from error
        except TimeoutError as error:
            raise _Again(f"no answer in {self.timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise _Again(str(getattr(error, "reason", "") or error) or type(error).__name__) from error
        except (ValueError, OverflowError) as error:  # a port above 65535, a name that is none
            what = f"no request can be sent: {error}. An address is like http://localhost:8000"
            raise Refusal(f"{self.flag} {self.shown}: {what}.") from error
        text = b"".join(pieces)
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise _Again(f"an answer that is no JSON: {text[:200]!r}") from error

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """A block that reads an answer of `path`, and refuses one of another form."""
        try:
            yield
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            what = f"{path} answered in another form than vLLM's ({type(error).__name__}: {error})"
            raise Refusal(f"{self.flag} {self.shown}: {what}.") from error

    @property
    def shown(self) -> str:
        return without_passwords(self.url)

    def complete(
        self, prompt: Sequence[int], settings: SamplingSettings, size: int, seed: int, vocabulary: int, where: str = ""
    ) -> list[Completion]:
        """A group of `size` completions of a prompt.

        Args:
            vocabulary: number of token ids.
            where: what the prompt is called in a message.

        Raises:
            Refusal: they are not what was requested, so that training on them would be training on something else.
        """
        answer = self.ask("/v1/completions", _request(self.model, prompt, settings, size, seed))
        named = where or list(prompt)[:8]
        try:
            with self.reading(f"/v1/completions, for the prompt {named},"):
                found = (answer or {}).get("choices") or []
                numbers = [each.get("index", place) for place, each in enumerate(found)]
                if len(found) != size:
                    raise _Wrong(f"number of completions {len(found)}, requested {size}")
                if sorted(numbers) != list(range(size)):
                    raise _Wrong(f"completions with the numbers {sorted(numbers)}, requested one each of 0 to {size - 1}")
                choices = dict(zip(numbers, found, strict=True))
                completions = [_completion(choices[number], prompt, settings, vocabulary) for number in range(size)]
        except _Wrong as wrong:
            raise Refusal(f"{self.flag} {self.shown}: of the prompt {named} it answered: {wrong}.") from wrong
        return completions


def at_once(calls: Sequence[Callable[[], Result]], threads: int) -> Iterator[tuple[int, Result]]:
    """The number of each call and what it returned, as soon as it is there; what one raises ends it.

    Nobody waits for calls that are running then, or when Ctrl-C or the deadline of a run interrupts the caller: a
    ThreadPoolExecutor would, for as long as a server stalls.
    """
    waiting, done = deque(enumerate(calls)), SimpleQueue[tuple[int, Any, BaseException | None]]()

    def work() -> None:
        while waiting:
            try:
                number, call = waiting.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                done.put((number, call(), None))
            except BaseException as error:
                done.put((number, None, error))

    for _ in range(min(threads, len(calls))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in calls:
            number, result, error = done.get()
            if error is not None:
                raise error
            yield number, result
    finally:
        waiting.clear()


class _Again(Exception):
    def __init__(self, what: str, pause: float = 0.0) -> None:
        super().__init__(what)
        self.pause = pause


class _Wrong(Exception):
    pass


def _request(model: str, prompt: Sequence[int], settings: SamplingSettings, size: int, seed: int) -> dict[str, Any]:
    return {
        "model": model, "prompt": list(prompt), "n": size, "seed": seed, "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k or -1, "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": list(settings.stop_strings), "include_stop_str_in_output": True, "min_tokens": settings.min_new_tokens,
        "stop_token_ids": list(settings.eos_token_ids), "logprobs": settings.top_k if settings.cuts else 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
    }  # fmt: skip


def _completion(choice: Mapping[str, Any], prompt: Sequence[int], settings: SamplingSettings, vocabulary: int) -> Completion:
    said = choice.get("logprobs") or {}
    tokens = choice.get("token_ids")
    if tokens is None:
        tokens = [int(each.removeprefix(_TOKEN)) for each in said.get("tokens") or () if each.startswith(_TOKEN)]
    logps, reason = said.get("token_logprobs") or [], choice.get("finish_reason")
    ends = bool(tokens) and (tokens[-1] in settings.eos_token_ids or bool(settings.stop_strings))
    bad = [logp for logp in logps if not isinstance(logp, int | float) or not math.isfinite(logp) or not _NOTHING < logp < 1e-3]
    if choice.get("prompt_token_ids") not in (None, list(prompt)):
        raise _Wrong("it read other tokens of the prompt than it was sent")
    if not tokens:
        raise _Wrong("no token ids (return_token_ids, and return_tokens_as_token_ids with logprobs, were requested)")
    if len(tokens) > settings.max_new_tokens:
        raise _Wrong(f"{len(tokens)} tokens, requested {settings.max_new_tokens} at most")
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise _Wrong(f"token ids that are none of the vocabulary of {vocabulary:,}")
    if len(logps) != len(tokens):
        raise _Wrong(f"{len(logps)} log-probabilities of {len(tokens)} sampled tokens")
    if bad:
        raise _Wrong(f"the log-probability {bad[0]} of a token that was sampled")
    if reason != "length" and not ends:
        raise _Wrong(f"finish_reason {reason} behind the token {tokens[-1]}, which is no end of the trained model")
    kept = _kept(said, tokens, vocabulary) if settings.cuts else None
    return Completion(list(tokens), [min(0.0, float(logp)) for logp in logps], reason == "length", kept)


def _kept(said: Mapping[str, Any], tokens: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    """The ids that could be drawn at each token: those whose log-probability was returned, which add up to 1."""
    tables = said.get("top_logprobs") or []
    if len(tables) != len(tokens):
        raise _Wrong("no top_logprobs, from which tokens follow that could be drawn (logprobs was requested)")
    kept = []
    for table, token in zip(tables, tokens, strict=True):
        drawn = {int(name.removeprefix(_TOKEN)): logp for name, logp in table.items() if logp > _NOTHING}
        mass = sum(math.exp(logp) for logp in drawn.values())
        if token not in drawn or abs(mass - 1) > 0.01:
            raise _Wrong(
                f"probabilities of the tokens that could be drawn that add up to {mass:.3f}, so they are not of the "
                "distribution that was drawn from: start vLLM with --logprobs-mode processed_logprobs and --max-logprobs "
                "of --top-k or more"
            )
        if not all(0 <= each < vocabulary for each in drawn):
            raise _Wrong(f"token ids in top_logprobs that are none of the vocabulary of {vocabulary:,}")
        kept.append(np.array(sorted(drawn), dtype=np.int64))
    return kept
