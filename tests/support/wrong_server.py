"""A server of a few lines that answers questions rightly, but for the one fault that it is given.

Its model is a hash: the next token follows from the whole text. What it would have cached is known, so that the
faults can come with reuse, beside others, or after a client has left, as real ones do.
"""

import asyncio
import json
import zlib
from collections.abc import Sequence
from typing import Any

from tests.support.bench_endpoint import Asked, plain, streamed

BLOCK = 4
KNOWN = {"model", "prompt", "max_tokens", "temperature", "stream", "n", "logprobs", "return_token_ids", "cache_salt"}
FAULTS = ("foreign", "stale", "numbers", "salts", "hang", "lost", "error", "blocks", "memory", "descriptors")


class WrongServer:
    """`answer` for an Endpoint. `tie`: under load it takes the other of two tokens that are nearly as likely. `is_lax`:
    any field is taken, salts mean nothing, and `cache_prompt` asks for no reuse."""

    def __init__(self, fault: str = "", *, without: Sequence[str] = (), is_lax: bool = False) -> None:
        self.fault, self._known, self._is_lax = fault, KNOWN - {*without}, is_lax
        self._is_asked_for_reuse = is_lax and "cache_prompt" not in without
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._open: list[list[int]] = []  # prompts in flight
        self._held = self._served = self._num_reused = 0

    async def answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/v1/models":
            writer.write(plain(json.dumps({"data": [{"id": "wrong", "block_size": BLOCK}]}).encode()))
        elif asked.path == "/metrics":
            writer.write(plain(self._metrics().encode()))
        elif asked.path == "/tokenize" and "prompt" in asked.json:
            tokens = [zlib.crc32(word.encode()) % 1000 for word in asked.json["prompt"].split()]
            writer.write(plain(json.dumps({"tokens": tokens}).encode()))
        elif asked.path == "/v1/completions" and (self._is_lax or self._known >= {*asked.json}):
            await self._complete(asked.json, writer)
        else:
            writer.write(plain(b'{"error": "not here"}', "400 Bad Request"))
        await writer.drain()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [len(body["prompt"])]
        salt = "" if self._is_lax else body.get("cache_salt", "")
        name = salt, tuple(prompt[:BLOCK])
        is_reused = len(prompt) > BLOCK and name in self._seen and not salt.startswith("prove-")
        is_reused &= not self._is_asked_for_reuse or body.get("cache_prompt", True)
        self._seen.add(name)
        self._open.append(prompt)
        self._held += 1
        self._served += 1
        self._num_reused += is_reused
        await asyncio.sleep(0.002)
        others = [other for other in self._open if other is not prompt]
        self._open.remove(prompt)
        is_whole = self.fault != "blocks" or self._served % 9
        self._held -= bool(is_whole)
        if is_reused and self.fault == "hang" and self._num_reused % 40 == 39:
            await asyncio.sleep(3600)
        if is_reused and self.fault == "error" and self._num_reused % 20 == 19:
            writer.write(plain(b'{"error": {"message": "out of blocks"}}', "500 Internal Server Error"))
            return
        read = prompt
        if is_reused and self.fault == "foreign" and others:
            read = others[-1]
        if is_reused and self.fault == "stale" and self._served > 150:
            read = prompt[BLOCK:]
        shift = 0.05 if is_reused and self.fault == "numbers" else 0.0
        choices = [self._choice(body, read, index, shift, bool(others)) for index in range(body.get("n", 1))]
        cached = BLOCK if is_reused or (self.fault == "salts" and salt and self._served > 60) else 0
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        if is_reused and self.fault == "lost" and self._num_reused % 20 == 19:
            choices[-1]["finish_reason"] = None
        payload = json.dumps({"choices": choices, "usage": usage}).encode()
        writer.write(streamed(payload, b"[DONE]") if body.get("stream") else plain(payload))

    def _choice(
        self, body: dict[str, Any], prompt: list[int], index: int, shift: float, is_beside: bool
    ) -> dict[str, Any]:
        ids: list[int] = []
        for _ in range(body["max_tokens"]):
            ids.append(zlib.crc32(repr((prompt + ids, body.get("repetition_penalty"))).encode()) % 1000)
            if self.fault == "tie" and is_beside:
                ids[-1] = (ids[-1] + 1) % 1000
        choice = {"index": index, "text": "".join(f" {each}" for each in ids), "finish_reason": "length"}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs"):
            tops = [{f" {each}": -0.5 - shift, f" {(each + 1) % 1000}": -0.5005} for each in ids]
            values = [-0.5 - shift] * len(ids)
            choice["logprobs"] = {
                "tokens": [f" {each}" for each in ids],
                "token_logprobs": values,
                "top_logprobs": tops,
            }
        return choice

    def _metrics(self) -> str:
        resident = 2**28 + (self._served * 2**22 if self.fault == "memory" else 0)
        files = 10 + (self._served if self.fault == "descriptors" else 0)
        lines = [f'penstock:kv_device_blocks{{state="held"}} {self._held}', "vllm:num_requests_running 0"]
        return "\n".join([*lines, f"process_resident_memory_bytes {resident}", f"process_open_fds {files}", ""])
