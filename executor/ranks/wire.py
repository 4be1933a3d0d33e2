"""The messages of a worker process and its executor beside the ring, and the socket between them.

Steps go to the workers through the ring. This is the rest: how a worker is started, and everything it answers.
msgspec encodes it, so nothing here can carry code, and a closed socket is how one side learns that the other is gone.
"""

import msgspec

from penstock.executor.protocol import AdapterInfo, ExecutorConfig, ModelInfo, StepResult
from penstock.executor.ring.memory_segment import RingHandle


class MessageKind:
    """The first part of a message to a worker; the other parts depend on the kind. A step is encoded with msgpack."""

    STEP, MASKS, CLOSE, STACKS = b"step", b"masks", b"close", b"stacks"
    LOAD, UNLOAD = b"load", b"unload"  # an adapter: of a folder, by its key; both UTF-8
    # Weights from a path, in two steps: all ranks take what each has prepared, or none does. And the memory: a level, parts.
    PREPARE, TAKE, DROP, SLEEP, WAKE = b"prepare", b"take", b"drop", b"sleep", b"wake"


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """Where the ranks find each other: the first one listens, on a socket that is bound already if there is one."""

    host: str
    port: int
    address: str  # of the interface that this rank's collectives run over
    listen_fd: int | None = None


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """The first message to a worker."""

    config: ExecutorConfig
    rank: int
    world: int
    neighbours: int  # ranks on this machine, this one included: they share its cores
    device_index: int
    rendezvous: Rendezvous
    ring: RingHandle | None  # for a rank on the executor's machine


class RankProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    line: str


class ModelLoaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    info: ModelInfo


class Beat(msgspec.Struct, frozen=True, tag="beat", array_like=True):
    """Once a second from a thread of its own: the process runs, and this is what its main thread is at."""

    doing: str


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """From the first rank for every step; from the others when there is something to report of transfers."""

    rank: int
    result: StepResult


class RankAnswer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """From every rank, to what is asked beside steps."""

    rank: int
    error: str = ""  # it was refused, and nothing has changed
    adapter: AdapterInfo | None = None  # to LOAD
    fingerprint: bytes = b""  # to PREPARE


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The worker's last message."""

    error: str
    traceback: str | None  # None: what the user can mend, and the message says it all
    is_consequence: bool  # the ranks lost each other: another one's failure, or death, is the cause


FromWorker = RankProgress | ModelLoaded | Beat | Done | RankAnswer | Failed
