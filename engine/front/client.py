"""The server's side of the engine core: starts the core process, sends it requests and passes each output to its
answer.

One asyncio loop owns everything here. Whatever happens to the core process, every `Answer` ends: with the core's last
output, or with an error that explains what happened.
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
import zmq

from penstock.engine import messages
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.front.adapter_files import read_ahead
from penstock.engine.front.answer import Answer, OpenAnswers
from penstock.engine.front.engine import EngineDead, EngineHealth, QueueFull
from penstock.engine.front.liveness import TICK_S, Liveness
from penstock.engine.front.submit import AnswerOptions, begin_answer
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.process_life import ChildProcess, receive, start_child
from penstock.executor.protocol import AdapterError, AdapterInfo, ModelInfo, WeightsError

log = logging.getLogger("penstock.engine")

STOP_GRACE_S = 5.0  # time for the core to exit after Shutdown, before it is killed


class AsyncEngine:
    """The engine for one server: `start`, then `generate` from any task of the loop; `close` ends the core process.
    `Engine` (engine/front/engine.py) explains the methods that the server calls."""

    info: ModelInfo

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[str], None] = lambda _line: None,
        core: str = "penstock.core_process",
    ) -> None:
        """`core`: the module that runs as the core process; another one may open another executor."""
        self.stats = messages.Stats()
        self.state = messages.EngineState()
        self.config = config
        self.tokenizer = tokenizer  # None: answers are token ids, and end at their length
        self._core_module = core
        self._progress = progress
        self._ids = itertools.count()
        self.answers = OpenAnswers()  # those in flight
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.FromCore)
        self._is_connected = False
        self._heartbeat = messages.Heartbeat(0.0)
        self._liveness = Liveness()
        self._ticking: asyncio.TimerHandle | None = None
        self._death: str | None = None
        self._end_reason = ""  # why `close` was called
        # The replies that control messages wait for, by the number of the message.
        self._pending_replies: dict[int, asyncio.Future[messages.ControlReply]] = {}
        self._ready = asyncio.Event()  # set when the core has loaded the model, or is dead
        self._process: ChildProcess | None = None
        self._gone = asyncio.Event()  # set when the process has ended
        self._ending: asyncio.Future[None] | None = None
        self._directory: Path | None = None
        self.on_step: Callable[[messages.Outputs], None] = lambda _outputs: None  # the server's metrics listen here
        self.on_cache_update: Callable[[messages.CacheUpdate], None] = lambda _update: None  # after `watch_cache`

    async def start(self) -> None:
        """Wait until the core has loaded the model."""
        try:
            if self._process is None:
                self.spawn()
            # Remove the sockets' names once both are connected, so that nothing is left behind however this process ends.
            while self._death is None and not (self._is_connected and self._to_core.poll(0, zmq.POLLOUT)):
                await asyncio.sleep(0.01)
            if self._death is None:
                assert self._directory is not None
                shutil.rmtree(self._directory)
                await self._ready.wait()
            if self._death is not None:
                raise EngineDead(self._death)
        except BaseException:
            await self.close()
            raise

    def spawn(self) -> None:
        """Start the core process without waiting for it, so that the caller can do other work meanwhile."""
        loop = asyncio.get_running_loop()
        # mkdtemp gives mode 0700: only this user can reach the sockets inside.
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._context = zmq.Context()
        try:
            self._to_core = self._bind(zmq.PUSH, "to_core")
            self._from_core = self._bind(zmq.PULL, "from_core")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            shutil.rmtree(self._directory)
            self._directory = None
            raise ConfigError(f"TMPDIR: no sockets can be made in {tempfile.gettempdir()!r}: {error}") from None
        loop.add_reader(self._from_core.fileno(), self._drain)
        start = messages.CoreStart(str(self._directory), self.config)
        self._process = process = start_child(self._core_module, "the engine core", start)
        loop.add_reader(process.channel, self._read_heartbeat, process)
        self._tick()

    def _tick(self) -> None:
        before = self._liveness.verdict
        self._liveness.tick()
        if self._liveness.verdict != before:
            log.warning("%s", self._liveness.reason)
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    async def close(self, reason: str = "the engine is closed") -> None:
        self._end_reason = reason
        if self._ticking is not None:
            self._ticking.cancel()
        process, self._process = self._process, None
        if process is not None:
            if self._ready.is_set() and self.health().alive:  # otherwise it does not read messages
                with contextlib.suppress(EngineDead, TimeoutError):
                    self._send(messages.Shutdown())
                    async with asyncio.timeout(STOP_GRACE_S):
                        await self._gone.wait()
            process.kill()
            await asyncio.to_thread(process.wait, STOP_GRACE_S)
            asyncio.get_running_loop().remove_reader(process.channel)
            if self._ending is not None:  # it reads what the core sent last
                await self._ending
            self._die(reason)
            process.channel.close()
        if self._directory is not None:
            asyncio.get_running_loop().remove_reader(self._from_core.fileno())
            self._context.destroy(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def health(self) -> EngineHealth:
        heartbeat, liveness = self._heartbeat, self._liveness
        if self._death is not None:
            return EngineHealth(False, False, self._death)
        if not self._ready.is_set():
            return EngineHealth(True, False, "the model is loading")
        if liveness.verdict != "heard":
            return EngineHealth(liveness.verdict == "starved", False, liveness.reason)
        if heartbeat.overdue_s > 0:
            late = f"{heartbeat.job} of the engine core is {heartbeat.overdue_s:.0f} s beyond its deadline"
            return EngineHealth(False, False, late)
        if self.state.is_paused:
            return EngineHealth(True, False, "the engine sleeps" if self.state.asleep else "the engine is paused")
        return EngineHealth(True, True, "ok")

    def admit(self, num_sequences: int = 1, num_preparing: int = 0, field: str = "prompt") -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        limit = self.config.scheduler.max_sequences
        if num_sequences > limit:
            limits = f"{limit} at a time (--max-num-seqs and --max-queued-requests)"
            raise InvalidRequest(field, f"{num_sequences} sequences requested; this server allows {limits}")
        if len(self.answers) + num_preparing + num_sequences > limit:
            raise QueueFull(
                f"{len(self.answers) + num_preparing} sequences are in flight and {limit} are the limit; try again later",
                retry_after_s=self._retry_after_s(),
            )

    def generate(
        self, prompt: Sequence[int] | bytes, params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> Answer:
        answer = begin_answer(f"{next(self._ids):x}", prompt, params, self.info, self.tokenizer, self.abort, **options)
        self.admit(params.n)
        self.answers.add(answer)
        for message in answer.messages:
            self._send(message)
        return answer

    def abort(self, request_ids: Iterable[str]) -> None:
        still_open = [request_id for request_id in request_ids if request_id in self.answers]
        if still_open:
            self._send(messages.Abort(still_open))

    def watch_cache(self, is_on: bool, *, with_blocks: bool = False) -> None:
        self._send(messages.WatchCache(is_on, with_blocks))

    async def control(self, operation: str, *, is_withdrawable: bool = False, **fields: Any) -> messages.EngineState:
        number = next(self._ids)
        try:
            answer = await self._ask(number, operation, **fields)
        except asyncio.CancelledError:
            if is_withdrawable:
                self._send(messages.Withdraw(number))
            raise
        if answer.error:
            raise WeightsError(answer.error)
        return answer.state

    async def load_adapter(self, path: str) -> AdapterInfo:
        await read_ahead(path)
        loading = self._ask(next(self._ids), "load_adapter", path=path)
        try:
            answer = await asyncio.shield(loading)
        except asyncio.CancelledError:  # the caller has left, so no request will use the adapter
            loading.add_done_callback(self._unload_again)
            raise
        if answer.adapter is None:
            raise AdapterError(answer.error)
        return answer.adapter

    def _ask(self, number: int, operation: str, **fields: Any) -> asyncio.Future[messages.ControlReply]:
        """Send a control message; return the future of its reply."""
        if self._death is not None:
            raise EngineDead(self._death)
        waiting = self._pending_replies[number] = asyncio.get_running_loop().create_future()
        self._send(messages.Control(number, operation, **fields))  # type: ignore[arg-type]
        return waiting

    def _unload_again(self, loading: asyncio.Future[messages.ControlReply]) -> None:
        if loading.exception() is None and (adapter := loading.result().adapter) is not None:
            self.unload_adapter(adapter.key)

    def unload_adapter(self, key: str) -> None:
        self._send(messages.UnloadAdapter(key))

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(100_000)
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    def _send(self, message: messages.ToCore) -> None:
        """Send a message, unless the core has ended."""
        try:
            if self._death is None:
                self._to_core.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDead("the engine core does not take messages any more") from None

    def _drain(self) -> None:
        """Read all messages: the socket's file descriptor signals a change, not a state."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._receive(self._decoder.decode(self._from_core.recv(zmq.NOBLOCK)))

    def _receive(self, message: messages.FromCore) -> None:
        self._liveness.heard()
        if isinstance(message, messages.Outputs):
            before, self.stats = self.stats, message.stats
            self.stats.tiers = self.stats.tiers or before.tiers  # they do not come with every step
            for output in message.outputs:
                self.answers.deliver(output)
            self.on_step(message)
        elif isinstance(message, messages.CacheUpdate):
            self.on_cache_update(message)
        elif isinstance(message, messages.ControlReply):
            self._take_answer(message)
        elif isinstance(message, messages.Heartbeat):
            if message.overdue_s > 0 and not self._heartbeat.overdue_s and self._process is not None:
                self._process.dump_stacks()
            self._heartbeat = message
        elif isinstance(message, messages.Connected):
            self._is_connected = True
        elif isinstance(message, messages.LoadProgress):
            self._progress(message.line)
        elif isinstance(message, messages.Ready):
            self._liveness.pid = None if self._process is None else self._process.pid  # its heartbeats begin
            self.info = message.info
            self._ready.set()
        elif isinstance(message, messages.Dead):
            self._die(message.error)

    def _take_answer(self, message: messages.ControlReply) -> None:
        """Store the new state, even if the caller has left, and wake the caller."""
        self.state = message.state
        if self.state.fingerprint != self.info.fingerprint:
            self.info = msgspec.structs.replace(self.info, fingerprint=self.state.fingerprint)
        waiting = self._pending_replies.pop(message.number)
        if not waiting.done():
            waiting.set_result(message)

    def _read_heartbeat(self, process: ChildProcess) -> None:
        """Read a heartbeat of the core; end all requests if its process has ended."""
        message = receive(process.channel)
        if message is not None:
            self._receive(msgspec.msgpack.decode(message, type=messages.Heartbeat))
            return
        asyncio.get_running_loop().remove_reader(process.channel)
        self._ending = asyncio.ensure_future(self._end(process))

    async def _end(self, process: ChildProcess) -> None:
        how = await asyncio.to_thread(process.death) or "is gone"  # it may take a while to exit
        self._drain()
        self._die(self._end_reason if self._process is None else f"the engine core {how}")
        self._gone.set()

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
        self._liveness.pid = None
        self._ready.set()
        for waiting in self._pending_replies.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(self._death))
        for request_id in [*self.answers]:
            self.answers.deliver(messages.Output(request_id, [], finish_reason="error", error=self._death))

    def _retry_after_s(self) -> int:
        """Estimate how long a full queue takes to have room, at the mean rate since the start."""
        stats = self.stats
        if stats.generation_tokens == 0:
            return 1
        seconds_per_token = stats.step_s / stats.generation_tokens
        return min(max(1, round(seconds_per_token * len(self.answers))), 60)
