"""A server on the loopback that samples from a tiny model with vLLM's requests and answers, and fails, stalls and lies as told."""

import contextlib
import copy
import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import torch

from tests.loopback import LoopbackServer
from toolkit.generation.distribution import SamplingSettings
from toolkit.generation.random_numbers import completion_key
from toolkit.generation.sampler import sample_groups


@dataclass
class Double:
    """`faults`: what the next answers are, one each: "500", "429", "400", "drop", "stall", "garbage". `lie`: what all of them are,
    until it is taken back: "old", "tokenizer", "logps", "count", "length", "nan", "nologps", "raw", "few", "form", "negative", "twice".
    `asked`: paths and bodies. `longest`, `max_logprobs`: what it was started with.
    """

    model: Any
    tokenizer: Any
    faults: list[str] = field(default_factory=list)
    lie: str = ""
    longest: int = 1024
    max_logprobs: int = 1000
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": self.longest}]}
        if path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": ids[::-1] if self.lie == "tokenizer" else ids}
        if path in ("/collective_rpc", "/load"):
            where = body["kwargs"]["weights_path"] if path == "/collective_rpc" else body["weights_path"]
            if self.lie != "old":
                from transformers import AutoModelForCausalLM

                self.model = AutoModelForCausalLM.from_pretrained(where).eval()
            return {"results": [None]}
        if path == "/v1/load_lora_adapter":
            from peft import PeftModel

            if body["lora_name"] in self.adapters:
                raise LookupError("loaded already")
            self.adapters[body["lora_name"]] = PeftModel.from_pretrained(copy.deepcopy(self.model), body["lora_path"]).eval()
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if path == "/v1/completions" and "prompt_logprobs" in body:
            with self.lock, torch.no_grad():
                return {"choices": [self.of_prompt(body)]}
        if path == "/v1/completions":
            with self.lock, torch.no_grad():
                return {"choices": self.complete(body)}
        return None

    def of_prompt(self, body: dict[str, Any]) -> dict[str, Any]:
        """As vLLM: a table for each token of the prompt but the first, in no order, with the token itself."""
        ids, wanted = body["prompt"], body["prompt_logprobs"]
        if wanted > self.max_logprobs:
            raise LookupError("Requested prompt logprobs of more than max logprobs")
        tables: list[Any] = [None]
        for row, token in zip(self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1), ids[1:], strict=True):
            named = {token, *row.topk(wanted - (self.lie == "few")).indices.tolist()}
            ranks = row.argsort(descending=True).tolist()
            tables.append({str(each): {"logprob": float(row[each]), "rank": ranks.index(each) + 1, "decoded_token": "?"} for each in sorted(named)})
        if self.lie == "nan":
            tables[-1] = {token: {**said, "logprob": math.nan} for token, said in tables[-1].items()}
        if self.lie == "negative":
            tables[1:] = [{**said, "-7": {"logprob": -1e-6}} for said in tables[1:]]
        if self.lie == "form":
            tables[1:] = [["x", -1.0]] * (len(tables) - 1)
        return {"index": 0, "text": "", "finish_reason": "length", **({} if self.lie == "nologps" else {"prompt_logprobs": tables})}

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        size, wanted = body.get("n", 1), body.get("logprobs")
        settings = SamplingSettings(
            max_new_tokens=body["max_tokens"] + (self.lie == "length"), temperature=body["temperature"],
            top_k=max(0, body.get("top_k", 0)), top_p=body.get("top_p", 1.0), eos_token_ids=tuple(body.get("stop_token_ids", ())),
        )  # fmt: skip
        keys = np.array([[completion_key(body.get("seed", 0), 0, 0, index) for index in range(size)]], dtype=np.uint64)
        ids = body["prompt"]
        model = self.adapters.get(body["model"], self.model)
        ((group),) = sample_groups(model, [ids], keys, settings, self.tokenizer)
        choices = []
        for index, each in enumerate(group[: size - (self.lie == "count")]):
            logits = model(torch.tensor([ids + each.tokens])).logits[0, len(ids) - 1 : -1].double()
            logits = logits / (body["temperature"] or 1.0)
            if each.kept is not None and self.lie != "raw":
                masked = torch.full_like(logits, -math.inf)
                for row, kept in enumerate(each.kept):
                    masked[row, kept] = logits[row, kept]
                logits = masked
            every = logits.log_softmax(-1).clamp(min=-9999.0)
            logps = [float(row[token]) for row, token in zip(every, each.tokens, strict=True)]
            logps = [logp - 0.5 for logp in logps] if self.lie == "logps" else logps
            logps[0] = math.nan if self.lie == "nan" else logps[0]
            top = [{f"token_id:{token}": float(row[token]) for token in {*row.topk(wanted or 1).indices.tolist(), drawn}}
                   for row, drawn in zip(every, each.tokens, strict=True)]  # fmt: skip
            said = {"token_logprobs": logps, "top_logprobs": top, "tokens": [f"token_id:{token}" for token in each.tokens]}
            choices.append({
                "index": 0 if self.lie == "twice" else index, "text": "", "token_ids": 5 if self.lie == "form" else each.tokens, "prompt_token_ids": ids, "stop_reason": None,
                "finish_reason": "length" if each.truncated else "stop", "logprobs": None if self.lie == "nologps" else said,
            })  # fmt: skip
        return choices


def handler_of(double: Double) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            double.asked.append((self.path, body))
            fault = double.faults.pop(0) if double.faults and self.path == "/v1/completions" and {"n", "prompt_logprobs"} & set(body) else ""
            if fault == "drop":
                self.connection.close()
                return
            if fault == "stall":
                time.sleep(1.5)
                return
            try:
                answer = double.answer(self.path, body) if not fault else None
            except LookupError:  # what vLLM refuses
                answer, fault = None, "400"
            content = b"<html>\n<p>" if fault in ("garbage", "400") else json.dumps(answer).encode() if answer is not None else b""
            self.send_response(int(fault) if fault.isdigit() else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving(model: Any, tokenizer: Any) -> Iterator[Double]:
    """A block in which the server answers on a free port of the loopback."""
    double = Double(model, tokenizer)
    server = LoopbackServer(("127.0.0.1", 0), handler_of(double))
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
