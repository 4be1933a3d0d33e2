"""The server's side of the engine core: starts the core process, sends it requests and hands out their news.

One asyncio loop owns everything here. Each request is a `Generation`; what arrives for it is merged until its
reader asks, so a reader that is slow costs memory for its own answer and nothing else. Whatever happens to the
core process, every generation ends: with the core's last word, or with an error that says what happened.
"""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import zmq

from penstock.engine.config import EngineConfig
from penstock.engine.core.process import CoreStart
from penstock.engine.front.answer import Choice, RequestMetrics, Update, joined
from penstock.engine.front.submit import KvTransfer, Pooling, check_length, check_room, submissions, token_bytes
from penstock.engine.messages import (
    Abort,
    CacheReset,
    CacheUpdate,
    Connected,
    Dead,
    FromCore,
    Heartbeat,
    Output,
    Outputs,
    Progress,
    Ready,
    ResetCache,
    Shutdown,
    Stats,
    ToCore,
    WatchCache,
)
from penstock.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from penstock.engine.text.detokenize import TextStream
from penstock.executor.process_life import HEARTBEAT_S, ChildProcess, receive, start_child
from penstock.executor.protocol import ModelInfo, TokenLogprobs

HEARTBEAT_LIMIT_S = 5 * HEARTBEAT_S
STOP_GRACE_S = 5.0  # for the core to leave after Shutdown, before it is killed


class EngineDead(Exception):
    """The engine core has ended or never started; the message says why."""


class QueueFull(Exception):
    """More requests are under way than the engine is set to queue."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Health(msgspec.Struct, frozen=True):
    """`alive`: worth keeping. `ready`: takes requests."""

    alive: bool
    ready: bool
    reason: str


class Generation:
    """The news of one request: an async iterator of lists of updates, at most one per choice at a time."""

    def __init__(self, engine: "AsyncEngine", request_id: str, num_prompt_tokens: int, choices: list[Choice]) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.embedding: bytes | None = None
        self.metrics = RequestMetrics()
        self._engine = engine
        self._choices = choices
        self._num_open = len(choices)
        self._pending: dict[int, list[Update]] = {}
        self._arrived = asyncio.Event()
        self._started_s = time.monotonic()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Update]:
        while not self._pending:
            if self._num_open == 0:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        updates = [joined(self._pending[index]) for index in sorted(self._pending)]
        self._pending = {}
        return updates

    def abort(self) -> None:
        """Stop what still runs. The reader has left: nothing more is delivered."""
        self._engine.abort(f"{self.request_id}.{choice.index}" for choice in self._choices if not choice.finished)

    def _take(self, index: int, output: Output) -> None:
        choice = self._choices[index]
        if choice.finished:  # a stop string ended it; this is the core's answer to the abort
            return
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = max(self.num_cached_tokens or 0, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        now_s = time.monotonic() - self._started_s
        self.metrics.note(output, now_s)
        update = choice.push(output)
        if choice.must_abort:
            self._engine.abort([output.request_id])
        if choice.finished:
            self._num_open -= 1
            self.metrics.finished_s = now_s
        elif not update.token_ids and not update.text:
            return
        self._pending.setdefault(index, []).append(update)
        self._arrived.set()


class AsyncEngine:
    """`start`, then `generate` from any task of the loop; `close` ends the core process."""

    info: ModelInfo

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_ids: Iterable[int] = (),
        text_stream: Callable[[bool, bool, frozenset[int]], TextStream] | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        progress: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.stats = Stats()
        self._config = config
        self._eos_ids = frozenset(eos_ids)
        # (skip_special_tokens, is_continuation, shown_ids) → a stream; None without a tokenizer
        self._text_stream = text_stream
        self._max_logprobs = max_logprobs
        self._progress = progress
        self._ids = itertools.count()
        self._open: dict[str, tuple[Generation, int]] = {}  # sequence → who reads it, as which choice
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._is_connected = False
        self._heartbeat: Heartbeat | None = None
        self._heard_s = time.monotonic()
        self._death: str | None = None
        self._resets: dict[int, asyncio.Future[bool]] = {}
        self._closing = False
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._process: ChildProcess | None = None
        self._gone = asyncio.Event()  # its process has ended
        self._directory: Path | None = None
        self.on_step: Callable[[Outputs], None] | None = None  # the server's metrics listen here
        self.on_cache_news: Callable[[CacheUpdate], None] | None = None  # after `watch_cache`

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the core process and wait until its model is loaded."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        # mkdtemp gives mode 0700: only this user can reach the sockets inside.
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._context = zmq.Context()
        try:
            self._to_core = self._bind(zmq.PUSH, "to_core")
            self._from_core = self._bind(zmq.PULL, "from_core")
            loop.add_reader(self._from_core.fileno(), self._drain)
            start = CoreStart(str(self._directory), self._config)
            self._process = process = start_child("penstock.engine.core.process", "the engine core", start)
            loop.add_reader(process.channel, self._hear, process)
            await self._unlink(self._directory)
            self.info = await self._ready
        except BaseException:
            await self.close()
            raise

    async def _unlink(self, directory: Path) -> None:
        """Remove the sockets' names once both connections stand: nothing is left behind, however we end."""
        while not self._is_connected or not self._to_core.poll(0, zmq.POLLOUT):
            if self._death is not None:
                return
            await asyncio.sleep(0.01)
        shutil.rmtree(directory)

    async def close(self) -> None:
        """End the core at once; what still runs ends with an error."""
        self._closing = True
        process, self._process = self._process, None
        if process is not None:
            if self._is_ready:  # while it loads it does not listen, and has nothing to lose
                with contextlib.suppress(EngineDead, TimeoutError):
                    self._send(Shutdown())
                    await asyncio.wait_for(self._gone.wait(), STOP_GRACE_S)
            await asyncio.to_thread(process.kill)
            self._die("the engine is closed")
            asyncio.get_running_loop().remove_reader(process.channel)
            process.channel.close()
        if self._directory is not None:
            asyncio.get_running_loop().remove_reader(self._from_core.fileno())
            self._context.destroy(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    @property
    def _is_ready(self) -> bool:
        return self._ready is not None and self._ready.done() and not self._ready.cancelled()

    def health(self) -> Health:
        """Judged by the core's heartbeat and its running step, never by whether tokens come."""
        silent_s = time.monotonic() - self._heard_s
        overdue_s = self._heartbeat.overdue_s if self._heartbeat else 0.0
        if self._death is not None:
            return Health(False, False, self._death)
        if not self._is_ready:
            return Health(True, False, "the model is loading")
        if silent_s > HEARTBEAT_LIMIT_S:
            return Health(False, False, f"the engine core has been silent for {silent_s:.0f} s")
        if overdue_s > 0:
            return Health(False, False, f"a step of the engine core is {overdue_s:.0f} s beyond its deadline")
        return Health(True, True, "ok")

    # -- requests ------------------------------------------------------------------------------------------

    def admit(self, num_sequences: int = 1) -> None:
        """Raise at once what `generate` would raise for want of room or of a core: called before tokenizing."""
        if self._death is not None:
            raise EngineDead(self._death)
        limit = self._config.scheduler.max_sequences
        if len(self._open) + num_sequences > limit:
            raise QueueFull(
                f"{len(self._open)} sequences are under way and {limit} are the limit; try again later",
                retry_after_s=self._retry_after_s(),
            )

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: Pooling | None = None,
        skip_prefix_cache: bool = False,
        is_continuation: bool = False,
        grammar: str | None = None,
        kv_transfer: KvTransfer | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Generation:
        """Start a request. Raises InvalidRequest, QueueFull or EngineDead; afterwards errors come as updates.

        `is_continuation`: the text goes on where the prompt's text ended (a completion), it is no answer of its own.
        `grammar`: what GrammarCheck made of `params.structured_outputs`; it may be stricter, never absent.
        `kv_transfer`: the other engine that has the prompt's blocks, or will have them soon.
        `shown_ids`: special tokens that stand in the text whatever the request says.
        """
        params.check(self.info.vocab_size, self._max_logprobs)
        prompt = token_bytes(prompt_ids, self.info.vocab_size)
        check_length(len(prompt_ids), self.info)
        if pooling is None:
            check_room(len(prompt_ids), params.max_tokens, self.info)
        self.admit(params.n)
        request_id = f"{next(self._ids):x}"
        stream = self._text_stream if params.detokenize else None
        choices = [
            Choice(index, params, stream(params.skip_special_tokens, is_continuation, shown_ids) if stream else None)
            for index in range(params.n)
        ]
        generation = Generation(self, request_id, len(prompt_ids), choices)
        messages = submissions(
            request_id,
            prompt,
            params,
            self.info,
            self._eos_ids,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
            skip_prefix_cache=skip_prefix_cache,
            grammar=grammar,
            kv_transfer=kv_transfer,
        )
        for index, message in enumerate(messages):
            self._open[message.request_id] = (generation, index)
            self._send(message)
        return generation

    def abort(self, request_ids: Iterable[str]) -> None:
        still_open = [request_id for request_id in request_ids if request_id in self._open]
        if still_open and self._death is None:
            self._send(Abort(still_open))

    def watch_cache(self, is_on: bool) -> None:
        """Have the core tell `on_cache_news` what is cached, all at once and then the changes; or no more."""
        if self._death is None:
            self._send(WatchCache(is_on))

    async def reset_prefix_cache(self) -> bool:
        """Have the core forget all cached content; False while something uses it."""
        if self._death is not None:
            raise EngineDead(self._death)
        number = next(self._ids)
        self._resets[number] = asyncio.get_running_loop().create_future()
        self._send(ResetCache(number))
        return await self._resets[number]

    @property
    def max_num_batched_tokens(self) -> int:
        return self._config.scheduler.max_num_batched_tokens

    @property
    def num_open(self) -> int:
        """Sequences under way."""
        return len(self._open)

    # -- the link ------------------------------------------------------------------------------------------

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(100_000)
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    def _send(self, message: ToCore) -> None:
        try:
            self._to_core.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDead("the engine core does not take messages any more") from None

    def _drain(self) -> None:
        """Read all there is: the socket's file descriptor signals a change, not a state."""
        try:
            while True:
                self._receive(self._decoder.decode(self._from_core.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass

    def _receive(self, message: FromCore) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, Outputs):
            self.stats = message.stats
            for output in message.outputs:
                self._deliver(output)
            if self.on_step is not None:
                self.on_step(message)
        elif isinstance(message, CacheUpdate):
            if self.on_cache_news is not None:
                self.on_cache_news(message)
        elif isinstance(message, CacheReset):
            waiting = self._resets.pop(message.number)
            if not waiting.done():  # else whoever asked has left
                waiting.set_result(message.ok)
        elif isinstance(message, Heartbeat):
            is_new = not (self._heartbeat and self._heartbeat.overdue_s)
            if message.overdue_s > 0 and is_new and self._process is not None:
                self._process.dump_stacks()
            self._heartbeat = message
        elif isinstance(message, Connected):
            self._is_connected = True
        elif isinstance(message, Progress):
            self._progress(message.line)
        elif isinstance(message, Ready):
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, Dead):
            self._die(message.error)

    def _deliver(self, output: Output) -> None:
        entry = self._open.get(output.request_id)
        if entry is not None:
            if output.finish_reason is not None:
                del self._open[output.request_id]
            generation, index = entry
            generation._take(index, output)

    def _hear(self, process: ChildProcess) -> None:
        """The core's heartbeats. When its process ends, so does every request."""
        message = receive(process.channel)
        if message is not None:
            self._receive(msgspec.msgpack.decode(message, type=Heartbeat))
            return
        asyncio.get_running_loop().remove_reader(process.channel)
        self._drain()
        self._die("the engine is closed" if self._closing else f"the engine core {process.death() or 'is gone'}")
        self._gone.set()

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(EngineDead(self._death))
        for waiting in self._resets.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(self._death))
        for request_id in list(self._open):
            self._deliver(Output(request_id, [], finish_reason="error", error=self._death))

    def _retry_after_s(self) -> int:
        """A full queue empties at the rate of the last steps; asked again too soon, it would refuse again."""
        stats = self.stats
        if stats.num_steps == 0 or stats.generation_tokens == 0:
            return 1
        seconds_per_token = stats.step_s / stats.generation_tokens
        return min(max(1, round(seconds_per_token * len(self._open))), 60)
