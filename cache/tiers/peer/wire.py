"""What two engines say to each other about their blocks, and how the connection between them is made.

ZMQ over TCP. With a shared secret every byte is CURVE's, with keys that follow from the secret: who does not know
it can neither connect nor answer. Without one both ends have to be on this machine. Messages are msgspec; a block's
bytes travel as a frame of their own behind the message that names them. Nothing here can carry code.
"""

import hashlib
import secrets
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

VERSION = 1  # of these messages
KEY_BYTES = 32
RUN_KEYS = 8192  # keys in one message at most
LANES = 4  # connections to one peer: CURVE takes a core for 0.8 GB/s, and each has its own I/O thread
BEAT_MS = 1_000
SILENCE_MS = 5_000  # without a sign of life for so long, the connection counts as lost


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Tell me what you have, all of it and then the changes; `fingerprint` is what gives our bytes their meaning."""

    version: int
    fingerprint: bytes


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    ticket: int
    key: bytes


ToPeer = Hello | Get


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The fingerprint is ours too; what we have follows."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """We are not alike; nothing follows."""

    reason: str


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """Keys run together; the first message of a snapshot makes those before it void."""

    held: bytes
    gone: bytes
    is_first: bool = False


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """The frame behind this one is the payload."""

    ticket: int
    key: bytes
    checksum: int  # xxh3, seeded with the fingerprint


class Miss(msgspec.Struct, frozen=True, array_like=True, tag="miss"):
    """`gone`: it is not here any more; `busy`: as many bytes are on their way as may be."""

    ticket: int
    reason: str


FromPeer = Welcome | Refused | Keys | Block | Miss


class Lock(NamedTuple):
    """The keys that follow from a secret; both ends work out all of them."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def lock_of(secret: str) -> Lock | None:
    """None without a secret. Slow on purpose, so that a weak one cannot be guessed by trying many."""
    if not secret:
        return None
    seed = hashlib.scrypt(secret.encode(), salt=b"penstock kv peer 1", n=2**14, r=8, p=1, dklen=64)
    server, client = z85.encode(seed[:32]), z85.encode(seed[32:])
    return Lock(zmq.curve_public(server), server, zmq.curve_public(client), client)


class CurveGuard:
    """What an authenticator of ZMQ's asks: is this the one client key that may connect?"""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._key)


def make_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    return made


def seed_of(fingerprint: bytes) -> int:
    """For the checksums: bytes of another meaning never pass, whoever sends them."""
    return int.from_bytes(fingerprint[:8], "little")


def split(run: bytes) -> list[bytes]:
    return [run[start : start + KEY_BYTES] for start in range(0, len(run), KEY_BYTES)]
