"""The process of the engine core, started by one API server.

Requests and results go over two ZMQ sockets in a private directory; start, heartbeat and end are those of all child
processes (executor/process_life.py).
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from penstock.engine.core.engine_core import EngineCore, settle_garbage
from penstock.engine.core.grammars import GrammarCompiler
from penstock.engine.messages import (
    Abort,
    Connected,
    Control,
    ControlReply,
    CoreStart,
    Dead,
    FromCore,
    Heartbeat,
    LoadProgress,
    Output,
    Outputs,
    Ready,
    Shutdown,
    Submit,
    ToCore,
    UnloadAdapter,
    WatchCache,
    Withdraw,
)
from penstock.executor.process_life import Reporter, begin, send
from penstock.executor.protocol import (
    STEP_DEADLINE_S,
    AdapterError,
    Executor,
    ExecutorConfig,
    ExecutorError,
    ModelInfo,
    WeightsError,
)

log = logging.getLogger("penstock.engine")

TRANSFER_POLL_S = 0.005  # interval of an idle core's steps while blocks move between the tiers
TIER_STATS_S = 0.25  # interval of sending tier statistics; also after the last step
TURN = "a turn of its loop"
# Jobs that may take longer than a step, such as reading weights from a slow disk. The ranks' own deadlines for them
# (executor/ranks/ranked.py) are not longer.
CONTROL_DEADLINES_S = {"load_adapter": 150.0, "update_weights": 3900.0, "sleep": 1900.0, "wake_up": 1900.0}
IDLE_CHECK_S = 1.0  # idle time after which invariants are checked and grammars warmed up, once


def run(
    open_executor: Callable[[ExecutorConfig, Callable[[str], None]], Executor],
    make_compiler: Callable[[ExecutorConfig, ModelInfo], GrammarCompiler],
) -> int:
    """Run until asked to stop. The exit code is 0 only after a Shutdown."""
    start, channel = begin(CoreStart)
    context, reporter, config, duty = zmq.Context(), Reporter(partial(send, channel)), start.config, Duty()
    link = CoreLink(context, Path(start.directory))
    link.send(Connected())
    try:
        executor = open_executor(config.executor, lambda line: link.send(LoadProgress(line)))
        core = EngineCore(config, executor, make_compiler(config.executor, executor.info))
        link.send(Ready(core.info))
        reporter.beat(lambda: heartbeat(core, duty))
        settle_garbage()
        _serve(core, link, duty)
        core.close()
        return 0
    except ExecutorError as error:  # an error that the user can correct: no traceback
        link.send(Dead(str(error)))
        return 1
    except Exception as error:  # the top of the process: report, then end
        log.exception("the engine core failed")
        link.send(Dead(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        context.destroy(linger=2000)


class CoreLink:
    """The core's two sockets: one for messages from the front, one for messages to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._inbox = context.socket(zmq.PULL)
        self._inbox.connect(f"ipc://{directory}/to_core")
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{directory}/from_core")
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromCore) -> None:
        self._outbox.send(self._encoder.encode(message))

    def wake_for(self, fd: int) -> None:
        """Make `receive` also return when this file descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        """Return all messages that have arrived; wait up to `timeout_s` for the first one (None: for ever)."""
        messages: list[ToCore] = []
        if timeout_s != 0.0:
            self._poller.poll(None if timeout_s is None else int(timeout_s * 1000))
        try:
            while True:
                messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


class Duty:
    """The current job of the core's thread besides steps, for the heartbeat thread.

    A step has a deadline of its own. Every other job gets one here, so that a core that hangs in a file or a lock is
    detected like one that hangs in a step.
    """

    def __init__(self) -> None:
        self.job: tuple[str, float] | None = None  # name and deadline; changed by one assignment

    def begin(self, name: str, deadline_s: float = STEP_DEADLINE_S) -> None:
        self.job = (name, time.monotonic() + deadline_s)

    def end(self) -> None:
        self.job = None


def _serve(core: EngineCore, link: CoreLink, duty: Duty) -> None:
    idle_wait_s = None if (fd := core.executor.fileno()) is None else IDLE_CHECK_S
    if fd is not None:
        link.wake_for(fd)
    checked = False
    tiers_due_s = 0.0
    pausing: list[Control] = []  # pauses and sleeps to finish when running requests have ended
    link.send(Outputs([], core.stats()))  # the sizes of the tiers, before a first step
    while True:
        working = core.has_work()
        patience_s = idle_wait_s if checked else IDLE_CHECK_S
        if not core.is_settled:
            patience_s = TRANSFER_POLL_S
        duty.end()
        messages = link.receive(0.0 if working else patience_s)
        duty.begin(TURN)
        if not working and not messages and core.is_settled:
            core.executor.check()
            if not checked:
                core.scheduler.check()
                core.constraints.warm()
            checked = True
            continue
        checked = False
        outputs: list[Output | None] = []
        done: list[ControlReply] = []
        withdrawn = {message.number for message in messages if isinstance(message, Withdraw)}
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Control) and message.number in withdrawn:
                pausing.append(message)  # until the message that withdraws it
            else:
                outputs += _take(core, message, duty, pausing, done)
        num_tokens = 0
        if core.has_work() or not core.is_settled:
            duty.end()
            outputs += core.step()
            duty.begin(TURN)
            num_tokens = core.last_step_tokens
        outputs += core.pauses.finish_pause()
        outputs += _finish_pausing(core, duty, pausing, done)
        with_tiers = not core.has_work() or time.monotonic() >= tiers_due_s
        if with_tiers:
            tiers_due_s = time.monotonic() + TIER_STATS_S
        link.send(Outputs([*filter(None, outputs)], core.stats(with_tiers), num_tokens))
        for update in core.cache_log.updates():
            link.send(update)
        for answer in done:
            link.send(answer)


def _take(
    core: EngineCore, message: ToCore, duty: Duty, pausing: list[Control], done: list[ControlReply]
) -> list[Output | None]:
    """Execute a message from the front; return the outputs of requests that it ends."""
    if isinstance(message, Submit):
        log.debug("request %s: %d tokens", message.request_id, len(message.tokens) // 4)
        core.submit(message)
    elif isinstance(message, Abort):
        return [*map(core.abort, message.request_ids)]
    elif isinstance(message, WatchCache):
        core.cache_log.watch(message.is_on, message.with_blocks)
    elif isinstance(message, UnloadAdapter):
        core.unload_adapter(message.key)
    elif isinstance(message, Withdraw):
        _withdraw(core, message.number, pausing, done)
    elif isinstance(message, Control):
        duty.end()  # the steps in flight have deadlines of their own
        outputs = core.pauses.drain()
        duty.begin(message.operation, CONTROL_DEADLINES_S.get(message.operation, STEP_DEADLINE_S))
        outputs += _control(core, message, pausing, done)
        duty.begin(TURN)
        return [*outputs]
    return []


def _finish_pausing(
    core: EngineCore, duty: Duty, pausing: list[Control], done: list[ControlReply]
) -> list[Output | None]:
    """Execute the pauses and sleeps again that waited for running requests, once the engine waits no longer."""
    outputs: list[Output | None] = []
    while pausing and not core.pauses.is_pausing:
        message = pausing.pop(0)
        if core.pauses.is_paused:
            outputs += _take(core, message, duty, pausing, done)
        else:
            error = "pause: it was resumed before the last request had ended"
            done.append(ControlReply(message.number, core.pauses.state, error))
    return outputs


def _withdraw(core: EngineCore, number: int, pausing: list[Control], done: list[ControlReply]) -> None:
    """Answer a control message that has not been executed yet. If nothing else waits for the pause, it ends."""
    others = [message for message in pausing if message.number != number]
    if len(others) == len(pausing):
        return
    pausing[:] = others
    if core.pauses.is_pausing and not others:
        core.pauses.resume()
    done.append(ControlReply(number, core.pauses.state, "the caller has left"))


def _control(core: EngineCore, message: Control, pausing: list[Control], done: list[ControlReply]) -> list[Output]:
    """Execute a control message; return the outputs of requests that it ends. A pause or a sleep that waits for running
    requests is added to `pausing` instead of being answered."""
    pauses, error, adapter = core.pauses, "", None
    outputs: list[Output] = []
    try:
        match message.operation:
            case "load_adapter":
                adapter = core.load_adapter(message.path)
            case "reset_prefix_cache":
                if not core.reset_prefix_cache():
                    error = "requests or transfers between the tiers are in flight; try again when they are done"
            case "pause":
                outputs = pauses.pause(message.mode)
            case "resume":
                pauses.resume()
            case "update_weights":
                pauses.update_weights(message.path)
            case "sleep":
                outputs = pauses.sleep(message.level, message.mode)
            case "wake_up":
                pauses.wake(message.parts)
    except (AdapterError, WeightsError) as refused:
        error = str(refused)
    if pauses.is_pausing and message.operation in ("pause", "sleep") and not error:
        pausing.append(message)
    else:
        done.append(ControlReply(message.number, pauses.state, error, adapter))
    return outputs


def heartbeat(core: EngineCore, duty: Duty) -> Heartbeat:
    """Return the heartbeat, with the seconds by which the running step or job exceeds its deadline."""
    now_s, job, ends_s = time.monotonic(), duty.job, core.step_ends_s
    if job is not None and now_s > job[1]:
        return Heartbeat(now_s - job[1], job[0])
    return Heartbeat(0.0 if ends_s is None else max(now_s - ends_s, 0.0))
