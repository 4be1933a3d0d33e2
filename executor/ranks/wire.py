"""Messages between a worker process and its executor, other than the content of the ring.

Steps go to the workers through the ring. These messages start a worker, and carry everything that it reports. They are
encoded by msgspec, so they cannot carry code; each side detects the other's end by the closed socket.
"""

import msgspec

from penstock.executor.protocol import AdapterInfo, ExecutorConfig, ModelInfo, StepResult
from penstock.executor.ring.memory_segment import RingHandle


class MessageKind:
    """The first part of a message to a worker; the other parts depend on the kind. A step is encoded with msgpack."""

    STEP, MASKS, CLOSE, STACKS = b"step", b"masks", b"close", b"stacks"
    LOAD, UNLOAD = b"load", b"unload"  # an adapter, by its folder or its key, in UTF-8
    # Weights from a path: all ranks TAKE what they have prepared, or all DROP it. SLEEP: level; WAKE: parts.
    PREPARE, TAKE, DROP, SLEEP, WAKE = b"prepare", b"take", b"drop", b"sleep", b"wake"


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """The address at which the ranks find each other; the first rank listens there, on a bound socket if it has one."""

    host: str
    port: int
    address: str  # of the interface used for this rank's collectives
    listen_fd: int | None = None


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """The first message to a worker."""

    config: ExecutorConfig
    rank: int
    world: int
    neighbours: int  # ranks on this machine including this one, which share its cores
    device_index: int
    rendezvous: Rendezvous
    ring: RingHandle | None  # for a rank on the executor's machine


class RankProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    line: str


class ModelLoaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    info: ModelInfo


class Beat(msgspec.Struct, frozen=True, tag="beat", array_like=True):
    """Heartbeat, sent once a second by its own thread: the process runs, and its main thread is `doing` this."""

    doing: str


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Sent by the first rank for every step; by other ranks only with transfer results."""

    rank: int
    result: StepResult


class RankAnswer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """The answer of every rank to a request other than a step."""

    rank: int
    error: str = ""  # why the request was refused; then nothing has changed
    value: AdapterInfo | bytes | None = None  # to LOAD: the adapter; to PREPARE: the weights' fingerprint


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The worker's last message."""

    error: str
    traceback: str | None  # None: the user can fix it, and the message says everything
    is_consequence: bool  # the ranks lost each other: the failure or death of another rank is the cause


FromWorker = RankProgress | ModelLoaded | Beat | Done | RankAnswer | Failed
