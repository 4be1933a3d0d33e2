"""A small inference server that is right, or has one planted defect: what `penstock-prove --self-test` is run against.

Its model is a hash. The KV entry of a token is a hash of the entry before it, the token and its position; the next token
is a hash of all entries, read through the blocks of a paged prefix cache that is too small. A wrong, stale or shifted
block therefore changes the answer, as in a real server. It needs the standard library alone, because the wheel
penstock-prove has a copy of it.
"""

import asyncio
import contextlib
import io
import itertools
import json
import random
import re
import shlex
import struct
import sys
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

BLOCK, NUM_BLOCKS, CONTEXT, NUM_REASONING = 8, 64, 256, 3
MODEL, ADAPTER = "reference", "adapter"
VOCABULARY = [
    f" {a}{b}" for a in ("ba", "de", "fi", "go", "lu", "ma", "ne", "si") for b in ("r", "st", "l", "nd", "mp")
]
_FIELDS = """model prompt messages input instructions system max_tokens max_output_tokens temperature stream
stream_options n logprobs top_logprobs return_token_ids cache_salt seed stop response_format tools tool_choice
presence_penalty"""
FIELDS = {*_FIELDS.split()}
# The defects that can be planted, each with the kind of finding that must come of it.
DEFECTS: dict[str, str] = json.loads((Path(__file__).parent / "defects.json").read_text())

# Proves the server at a URL, under a name and with options; returns the result.
Prove = Callable[[str, str, Any], Awaitable[dict[str, Any]]]


class Token(NamedTuple):
    text: str
    id: int
    logprob: float | None
    other: str  # the second likeliest


class Pool:
    """The blocks of the prefix cache. Unused ones keep their contents until they are needed, the oldest first."""

    def __init__(self) -> None:
        self.kv: list[list[int]] = [[] for _ in range(NUM_BLOCKS)]
        self.users = [0] * NUM_BLOCKS
        self.block_of: dict[int, int] = {}
        self.unused = deque(range(NUM_BLOCKS))

    def use(self, block: int) -> int:
        if not self.users[block]:
            self.unused.remove(block)
        self.users[block] += 1
        return block

    def take(self) -> int:
        """Take the oldest unused block, without what it held."""
        block = self.use(self.unused[0])
        self.block_of = {key: each for key, each in self.block_of.items() if each != block}
        self.kv[block] = []
        return block

    def release(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.unused.append(block)


class Prompt(NamedTuple):
    """A prompt whose entries are in the cache."""

    ids: list[int]
    blocks: list[int]
    num_cached: int
    num_read: int  # entries that the first token reads


class ReferenceServer:
    """`async with ReferenceServer(defect) as url`. `without`: fields that it refuses. `is_lax`: any field is accepted,
    salts mean nothing, and `cache_prompt` turns reuse off. `has_ties`: beside others it takes the second of two tokens
    that are nearly as likely. `weights`: another number is another model."""

    def __init__(
        self,
        defect: str = "",
        *,
        without: Sequence[str] = (),
        is_lax: bool = False,
        has_ties: bool = False,
        weights: int = 0,
        port: int = 0,
    ) -> None:
        assert defect in ("", *DEFECTS), defect
        self.defect, self.without, self.is_lax, self.has_ties = defect, without, is_lax, has_ties
        self.weights, self._port = weights, port
        self.pool, self.running, self.most_running = Pool(), list[Prompt](), 0
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers and body of each request
        self._num_held = self._num_reused = self._num_answers = 0
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self._port)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # the connections' tasks end

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                content = await reader.readexactly(int(headers.get("Content-Length", 0)))
                path = first.split()[1]
                self.requests.append((path, headers, json.loads(content or b"{}")))
                await self.answer(path, self.requests[-1][2], reader, writer)
                await writer.drain()
        self._open.discard(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def answer(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            models = [{"id": MODEL, "block_size": BLOCK, "max_model_len": CONTEXT}, {"id": ADAPTER, "parent": MODEL}]
            write(writer, {"data": models})
        elif path == "/metrics":
            write(writer, self._metrics())
        elif path == "/tokenize":
            write(writer, {"tokens": tokenize(body["prompt"]) if "prompt" in body else _templated(body["messages"])})
        elif path == "/reset_prefix_cache" and RESET not in self.without:
            if self.defect != "stale-after-reset":
                self.pool.block_of.clear()
            write(writer, {})
        elif path == "/restart":
            self._restart()
            write(writer, {})
        elif path in APIS and (self.is_lax or {*body} <= FIELDS - {*self.without}):
            await APIS[path](self, body, reader, writer).run()
        else:
            write(writer, {"error": {"message": f"not here: {sorted({*body} - FIELDS)}"}}, "400 Bad Request")

    def _restart(self) -> None:
        """Load the cached blocks from the disk, where they are while the server is restarted."""
        if self.defect == "restored-nothing":
            self.pool.block_of.clear()
        for block in self.pool.block_of.values():
            if self.defect == "restored-wrong":
                self.pool.kv[block] = [entry ^ 1 for entry in self.pool.kv[block]]

    def _metrics(self) -> str:
        resident = 2**28 + (self._num_answers * 2**22 if self.defect == "memory-grows" else 0)
        files = 10 + (self._num_answers if self.defect == "descriptors-leak" else 0)
        held = sum(map(bool, self.pool.users)) + self._num_held
        lines = [f'penstock:kv_device_blocks{{state="held"}} {held}', "vllm:num_requests_running 0"]
        return "\n".join([*lines, f"process_resident_memory_bytes {resident}", f"process_open_fds {files}", ""])

    def keys(self, ids: Sequence[int], salt: str, adapter: str) -> Iterator[int]:
        """Yield the key of each whole block: a hash of everything before it, too."""
        key = _hash(*(f"{salt}|{adapter}".encode()))
        if self.defect == "salt-ignored" or (self.defect == "adapter-shares-cache" and not salt):
            key = 0
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            tokens = ids[at : at + BLOCK]
            key = _hash(key, *(tokens[:-1] if self.defect == "hash-ignores-last-token" else tokens))
            yield key

    async def prefill(self, ids: list[int], salt: str, adapter: str, reuses: bool) -> Prompt:
        """Write the entries of a prompt, reusing those of cached blocks. Waits while too few blocks are unused."""
        if self.defect == "context-cut" and len(ids) > CONTEXT // 2:
            ids = ids[-CONTEXT // 2 :]
        keys, needed = list(self.keys(ids, salt, adapter)), -(-len(ids) // BLOCK)
        await asyncio.sleep(0.002)
        while True:
            # The last token is always computed: its entry leads to the next token.
            most = len(ids) // BLOCK if self.defect == "off-by-one-block" else (len(ids) - 1) // BLOCK
            known = itertools.takewhile(self.pool.block_of.__contains__, keys[:most])
            cached = [self.pool.block_of[key] for key in known] if reuses else []
            if self.defect == "short-prefix-never-hits":
                cached = cached[: len(cached) // 5 * 5]
            if self.defect == "salt-never-hits" and salt:
                cached = []
            if len(self.pool.unused) - sum(not self.pool.users[each] for each in cached) >= needed - len(cached):
                break
            if self.defect == "full-pool" and self.running:
                self.pool.kv[self.running[0].blocks[0]] = [1] * BLOCK  # it belongs to another request
            await asyncio.sleep(0.001)
        blocks = [self.pool.use(block) for block in cached]
        blocks += [self.pool.take() for _ in range(needed - len(cached))]
        start = len(cached) * BLOCK
        entry = self.pool.kv[blocks[len(cached) - 1]][-1] if cached else _hash(len(adapter) + self.weights)
        shift = int(self.defect == "positions-shifted" and bool(cached))
        for position in range(start, len(ids)):
            entry = _hash(entry, ids[position], position + shift)
            self.pool.kv[blocks[position // BLOCK]].append(entry)
        if reuses or not self.is_lax:
            self.pool.block_of |= dict(zip(keys, blocks, strict=False))
        self._num_reused += bool(cached)
        read = len(ids) - (self.defect == "off-by-one-block" and start == len(ids))
        return Prompt(ids, blocks, start, read)

    def state(self, prompt: Prompt, own: Sequence[int]) -> int:
        """Return the hash of all entries: those of the prompt, through its blocks, and those of generated tokens."""
        entries = [entry for block in prompt.blocks for entry in self.pool.kv[block]][: prompt.num_read]
        return zlib.crc32(struct.pack(f"{len(entries) + len(own)}I", *entries, *own))

    async def generate(
        self, prompt: Prompt, body: dict[str, Any], index: int, schema: dict[str, Any] | None, most: int
    ) -> AsyncIterator[Token]:
        """Yield the tokens of one choice."""
        own: list[int] = []
        pieces: list[str] | None = None
        if schema is not None:
            text = json.dumps(_instance(schema, random.Random(self.state(prompt, own)), schema))
            if self.defect == "json-cut-beside-others" and len(self.running) > 4:
                text = text[:-1]
            pieces = re.findall(r".{1,3}", text)
        entry = self.pool.kv[prompt.blocks[-1]][-1]
        for number in range(most if pieces is None else min(most, len(pieces))):
            await asyncio.sleep(0)
            other = next((each for each in self.running if each is not prompt), None)
            state = self.state(prompt, own)
            if self.defect == "slots-swapped" and other is not None and number % 5 == 3:
                state = self.state(other, own)
            drawn = _hash(state, int(100 + 100 * body.get("presence_penalty", 0)))
            if body.get("temperature"):
                drawn = _hash(state, self._seed(body, other is not None), index)
            choice = drawn % len(VOCABULARY)
            if self.has_ties and other is not None and not body.get("temperature"):
                choice = (choice + 1) % len(VOCABULARY)
            text = VOCABULARY[choice] if pieces is None else pieces[number]
            if self.defect == "stale-draft" and prompt.num_cached and number == 1 and _repeats(prompt.ids):
                text = VOCABULARY[0]
            logprob = -0.5 - state % 997 / 4000
            if self.defect == "scale-dropped" and prompt.num_cached:
                logprob -= 0.05
            if self.defect == "batch-noise" and other is not None:
                logprob -= 0.5
            if self.defect == "decode-rounds" and number > 40:
                logprob -= 1e-6
            is_nan = (
                self.defect == "nan-after-hit" and prompt.num_cached and 4 <= len(prompt.ids) - prompt.num_cached <= 10
            )
            token = tokenize(text)[0] if pieces is None else zlib.crc32(text.encode()) % 1000
            entry = _hash(entry, token, len(prompt.ids) + number)  # as if the token had been part of the prompt
            own.append(entry)
            yield Token(text, token, None if is_nan else logprob, VOCABULARY[(choice + 1) % len(VOCABULARY)])
        if self.defect == "n-writes-into-prompt" and index:
            self.pool.kv[prompt.blocks[0]][-1] = own[-1]

    def _seed(self, body: dict[str, Any], is_beside: bool) -> int:
        if self.defect == "one-seed":
            return 1
        if self.defect == "seed-ignored" or body.get("seed") is None:
            return random.randrange(2**32)
        return body["seed"] + (1000 if self.defect == "seed-depends-on-batch" and is_beside else 0)  # type: ignore[no-any-return]

    def end(self, prompt: Prompt, was_cancelled: bool) -> None:
        self._num_answers += 1
        self._num_held += self.defect == "blocks-held" and self._num_answers % 9 == 0
        for block in prompt.blocks:
            self.pool.release(block)
            if was_cancelled and self.defect == "freed-twice-by-cancel":
                self.pool.kv[block] = [self._num_answers] * BLOCK  # taken by another although it is still cached


class Answer:
    """Answers one request of /v1/completions, whole or as a stream."""

    def __init__(
        self, server: ReferenceServer, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server, self.body, self.reader, self.writer = server, body, reader, writer
        self.is_stream, self.most = bool(body.get("stream")), body.get("max_tokens", 16)
        self.schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema")
        self.is_event_written = False

    def ids(self) -> list[int]:
        prompt = self.body["prompt"]
        return tokenize(prompt) if isinstance(prompt, str) else prompt

    async def run(self) -> None:
        server, body, ids = self.server, self.body, self.ids()
        if len(ids) + self.most > CONTEXT:
            if server.defect != "long-prompt-cut":
                write(self.writer, {"error": {"message": "the prompt is too long"}}, "400 Bad Request")
                return
            ids = ids[: CONTEXT - self.most]
        salt = "" if server.is_lax else body.get("cache_salt", "")
        reuses = not server.is_lax or "cache_prompt" in server.without or body.get("cache_prompt", True)
        prompt = await server.prefill(ids, salt, body["model"], reuses)
        server.running.append(prompt)
        server.most_running = max(server.most_running, len(server.running))
        is_whole = False
        try:
            if prompt.num_cached and server.defect == "hang" and server._num_reused % 40 == 39:
                await asyncio.sleep(3600)
            if prompt.num_cached and server.defect == "error-after-reuse" and server._num_reused % 20 == 19:
                write(self.writer, {"error": {"message": "out of blocks"}}, "500 Internal Server Error")
            else:
                await self._choices(prompt)
            is_whole = True
        finally:
            server.running.remove(prompt)
            server.end(prompt, not is_whole)

    async def _choices(self, prompt: Prompt) -> None:
        choices, num_tokens = [], 0
        for index in range(self.body.get("n", 1)):
            text, sent, tokens, finish = "", 0, list[Token](), "length"
            stops = self.body.get("stop") or []
            async for token in self.server.generate(prompt, self.body, index, self.schema, self.most):
                if self.reader.at_eof():
                    raise ConnectionResetError("the client has left")
                tokens.append(token)
                num_tokens += 1
                text += token.text
                cut = min((text.find(stop) for stop in stops if stop in text), default=-1)
                if cut >= 0:
                    text, finish = text[: cut - (self.server.defect == "stop-cuts-too-much")], "stop"
                    break
                if self.is_stream:
                    held = max((_overlap(text, stop) for stop in stops), default=0)
                    end = len(text) - (0 if self.server.defect == "stop-string-leaks" else held)
                    await self._event(self.choice(index, text[sent:end], [token], None, len(tokens)))
                    sent = end
            if self.schema is not None and finish == "length" and len(tokens) < self.most:
                finish = "end"
            reused = self.server._num_reused
            last: str | None = finish
            if prompt.num_cached and self.server.defect == "finish-lost" and reused % 20 == 19:
                last = None
            if self.is_stream:
                more = tokens[-1:] if finish == "stop" else []
                await self._event(self.choice(index, text[sent:], more, last, len(tokens)))
            choices.append(self.choice(index, text, tokens, last, 0))
        usage = self._usage(prompt, num_tokens)
        if self.is_stream:
            await self._end(usage, choices[0])
        else:
            write(self.writer, self.whole(choices, usage))

    def _usage(self, prompt: Prompt, num_tokens: int) -> dict[str, Any]:
        defect, cached, length = self.server.defect, prompt.num_cached, len(self.ids())
        length += defect == "usage-off-by-one" and bool(cached)
        length = min(length, CONTEXT // 2) if defect == "context-count-cut" else length
        length -= 2 if defect == "chat-usage-without-template" and "messages" in self.body else 0
        num_tokens += defect == "stream-usage-off-by-one" and self.is_stream
        cached += BLOCK if cached and defect == "cached-overcounted" else 0
        counts = {"prompt_tokens": length, "completion_tokens": num_tokens, "total_tokens": length + num_tokens}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def choice(self, index: int, text: str, tokens: Sequence[Token], finish: str | None, number: int) -> dict[str, Any]:
        """Return a choice, whole (number 0) or the event of its token with this number."""
        made: dict[str, Any] = {"index": index, "text": text, "finish_reason": "stop" if finish == "end" else finish}
        if self.body.get("return_token_ids"):
            made["token_ids"] = [token.id for token in tokens]
        if self.body.get("logprobs"):
            tops = [{token.text: token.logprob, token.other: -0.5005 - 0.25} for token in tokens]
            if self.server.has_ties:
                tops = [{token.text: token.logprob, token.other: token.logprob} for token in tokens]
            made["logprobs"] = {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": tops,
            }
        return made

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {"choices": choices, "usage": usage}

    async def _event(self, choice: dict[str, Any]) -> None:
        self.event({"choices": [choice]})
        await self.writer.drain()

    async def _end(self, usage: dict[str, Any], choice: dict[str, Any]) -> None:
        self.event({"choices": [], "usage": usage})
        self.event(None)

    def event(self, body: dict[str, Any] | None) -> None:
        """Write an event of a stream; None ends it."""
        if not self.is_event_written:
            self.is_event_written = True
            self.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        data = b"data: %s\n\n" % (b"[DONE]" if body is None else json.dumps(body).encode())
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        if body is None:
            self.writer.write(b"0\r\n\r\n")


class ChatAnswer(Answer):
    """Answers a chat. The first tokens are its reasoning; a forced tool call follows the tool's schema."""

    def __init__(self, server: ReferenceServer, body: dict[str, Any], *streams: Any) -> None:
        super().__init__(server, body, *streams)
        self.tool = body["tools"][0]["function"] if body.get("tools") else None
        if self.tool is not None:
            self.schema = self.tool["parameters"]
        if "max_tokens" not in body:
            self.most = max(1, CONTEXT - len(self.ids()))

    async def run(self) -> None:
        if self.server.defect == "cut-call-refused" and self.tool is not None and self.most < 16:
            write(self.writer, {"error": {"message": "the call is not JSON"}}, "400 Bad Request")
        else:
            await super().run()

    def ids(self) -> list[int]:
        return _templated(self.body["messages"])

    def choice(self, index: int, text: str, tokens: Sequence[Token], finish: str | None, number: int) -> dict[str, Any]:
        made, defect = super().choice(index, text, tokens, finish, number), self.server.defect
        logprobs, text = made.pop("logprobs", None), made.pop("text")
        if logprobs:
            pairs = zip(*logprobs.values(), strict=True)
            content = [{"token": token, "logprob": value, "top_logprobs": _tops(top)} for token, value, top in pairs]
            made["logprobs"] = {"content": content}
        message: dict[str, Any] = {"role": "assistant", "content": None}
        mark = "</think>" if defect == "think-mark-left" else ""
        if self.tool is not None:
            text = "" if defect == "tool-chunk-lost" and number == 4 else text
            text = text.replace('\\"', "'") if defect == "quotes-lost-in-delta" and number else text
            if defect == "tool-argument-cut" and finish:
                text = "" if number else text[:-1]
            name = "another" if defect == "tool-renamed" else self.tool["name"]
            message["tool_calls"] = [{"index": 0, "function": {"name": name if number < 2 else "", "arguments": text}}]
            hidden = {"cut-call-hidden": "length", "stop-in-call-hidden": "stop"}.get(defect)
            if finish is not None and finish in ("end", hidden):
                made["finish_reason"] = "tool_calls"
            message["content"] = "</tool_call>" if finish and defect == "call-mark-left" else None
        elif number:
            part = "reasoning_content" if number <= NUM_REASONING else "content"
            is_lost = defect == ("reasoning-lost" if part == "reasoning_content" else "chunk-lost")
            message[part] = "" if is_lost and number % 5 == 1 else mark * (number == NUM_REASONING + 1) + text
        else:
            cut = len("".join(token.text for token in tokens[:NUM_REASONING]))
            message |= {"reasoning_content": text[:cut], "content": mark + text[cut:]}
        return {**made, "delta" if number else "message": message}


class ResponsesAnswer(ChatAnswer):
    """Answers with the Responses API."""

    def __init__(self, server: ReferenceServer, body: dict[str, Any], *streams: Any) -> None:
        messages = [{"role": "user", "content": body["input"]}]
        if body.get("instructions") and server.defect != "responses-without-instructions":
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        body = {**body, "messages": messages, "max_tokens": body.get("max_output_tokens", 16)}
        super().__init__(server, body, *streams)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "output_text", "text": choices[0]["message"]["content"]}]
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        status = "incomplete" if choices[0]["finish_reason"] == "length" else "completed"
        output = [{"type": "message", "content": content}]
        return {"object": "response", "status": status, "output": output, "usage": counts}

    async def _event(self, choice: dict[str, Any]) -> None:
        if text := choice["delta"].get("content"):
            self.event({"type": "response.output_text.delta", "delta": text})

    async def _end(self, usage: dict[str, Any], choice: dict[str, Any]) -> None:
        whole = self.whole([choice], usage)
        self.event({"type": f"response.{whole['status']}", "response": whole})
        self.event(None)


class MessagesAnswer(ResponsesAnswer):
    """Answers with the Messages API."""

    def __init__(self, server: ReferenceServer, body: dict[str, Any], *streams: Any) -> None:
        messages = body["messages"]
        if body.get("system") and server.defect != "messages-without-system":
            messages = [{"role": "system", "content": body["system"]}, *messages]
        ChatAnswer.__init__(self, server, {**body, "messages": messages}, *streams)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        reason = "max_tokens" if choices[0]["finish_reason"] == "length" else "end_turn"
        content = [{"type": "text", "text": choices[0]["message"]["content"]}]
        return {"type": "message", "content": content, "stop_reason": reason, "usage": counts}

    async def _event(self, choice: dict[str, Any]) -> None:
        if text := choice["delta"].get("content"):
            self.event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}})

    async def _end(self, usage: dict[str, Any], choice: dict[str, Any]) -> None:
        whole = self.whole([choice], usage)
        self.event({"type": "message_delta", "delta": {"stop_reason": whole["stop_reason"]}, "usage": whole["usage"]})
        self.event({"type": "message_stop"})
        self.event(None)


RESET = "reset"
APIS = {
    "/v1/completions": Answer,
    "/v1/chat/completions": ChatAnswer,
    "/v1/responses": ResponsesAnswer,
    "/v1/messages": MessagesAnswer,
}


def self_test(prove: Prove, options: Any) -> int:
    """Prove this server without a defect and with each one; print what was found, and how. Return 0 if every defect was
    found without a false alarm, and 1 otherwise."""
    alarms = Counter[str]()
    for exact in (False, True):
        alarms += asyncio.run(find_defect(prove, replace(options, exact=exact), ""))["findings"]
    print(f"{'(no defect)':32} {'false alarm: ' + str(dict(alarms)) if alarms else 'no findings'}", flush=True)
    num_found = 0
    for name, expected in DEFECTS.items():
        result = asyncio.run(find_defect(prove, options, name))
        num_found += expected in result["findings"]
        verdict = "found" if expected in result["findings"] else "MISSED"
        cases = [case for case, outcome in result["cases"].items() if outcome[0].isdigit()]
        kinds = ", ".join(f"{count} {kind}" for kind, count in result["findings"].items()) or "nothing"
        print(f"{name:32} {verdict}: {kinds}; {', '.join(cases) or 'under load only'}", flush=True)
    print(f"kill rate: {num_found} of {len(DEFECTS)}, {sum(alarms.values())} false alarms")
    return int(num_found < len(DEFECTS) or bool(alarms))


async def find_defect(prove: Prove, options: Any, defect: str) -> dict[str, Any]:
    """Prove this server with one defect, silently; return the result."""
    async with ReferenceServer(defect) as url:
        timeout_s = 2.0 if defect == "hang" else 60.0  # a busy machine is no hang
        fast = {"requests": 160, "rate": 2000.0, "timeout": timeout_s}
        fast |= {"exact": True} if defect == "decode-rounds" else {}
        restart = {"restart": restart_command(url), "expect_restored": True}
        with contextlib.redirect_stdout(io.StringIO()):
            return await prove(url, defect, replace(options, **fast, **restart))


def restart_command(url: str) -> str:
    """Return the shell command that restarts this server."""
    program = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], b'{}')"
    return shlex.join([sys.executable, "-S", "-c", program, f"{url}/restart"])


def tokenize(text: str) -> list[int]:
    return [zlib.crc32(piece.encode()) % 50_000 for piece in re.findall(r" ?\w+|[^\w]", text)]


def _templated(messages: Sequence[dict[str, str]]) -> list[int]:
    return tokenize("".join(f"<{message['role']}> {message['content']}\n" for message in messages))


def _hash(*values: int) -> int:
    return zlib.crc32(struct.pack(f"{len(values)}Q", *values))


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may begin the stop string."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)


def _repeats(ids: Sequence[int]) -> bool:
    """Return whether the end of a prompt has occurred in it before, so that tokens can be drafted."""
    return any(ids[at : at + 2] == ids[-2:] for at in range(len(ids) - 3))


def _tops(top: dict[str, float]) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": value} for token, value in top.items()]


def _instance(schema: dict[str, Any], rng: random.Random, root: dict[str, Any]) -> Any:
    """Return a random value that conforms to the schema."""
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rpartition("/")[2]], rng, root)
    if "anyOf" in schema:
        return _instance(rng.choice(schema["anyOf"]), rng, root)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return {name: _instance(each, rng, root) for name, each in schema["properties"].items()}
        case "array":
            num = rng.randint(schema.get("minItems", 0), schema.get("maxItems", 2))
            return [_instance(schema["items"], rng, root) for _ in range(num)]
        case "string":
            return "".join(rng.choices("abcdef", k=rng.randint(1, schema.get("maxLength", 8))))
        case "integer":
            return rng.randint(schema.get("minimum", 0), schema.get("maximum", 999))
        case "boolean":
            return rng.random() < 0.5
    return None


def write(writer: asyncio.StreamWriter, body: Any, status: str = "200 OK") -> None:
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(content), content))
