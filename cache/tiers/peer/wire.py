"""The protocol between two engines that share KV blocks: messages, encryption keys and socket options.

It runs on ZMQ over TCP. With a shared secret, CURVE encrypts and authenticates every byte with keys derived from the
secret. Without a secret, both ends must be on this machine. Messages are msgspec Structs, which cannot carry code; the
bytes of a block follow as a separate frame.
"""

import hashlib
import secrets
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

VERSION = 1  # version of these messages
KEY_BYTES = 32
RUN_KEYS = 8192  # keys in one message at most
LANES = 4  # connections to one peer, each with an I/O thread: CURVE encrypts 0.8 GB/s per core
HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000  # a connection without a heartbeat for so long counts as lost


class PeerHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A request for all keys and then their changes; `fingerprint` identifies what the bytes depend on."""

    version: int
    fingerprint: bytes


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    ticket: int
    key: bytes


ToPeer = PeerHello | Get


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to a hello with the same fingerprint; the keys follow."""


class PeerRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The refusal of a hello, for example because the fingerprints differ; no keys follow."""

    reason: str


class KeyUpdate(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """Added and removed keys, concatenated; the first message of a snapshot replaces all earlier keys."""

    held: bytes
    gone: bytes
    is_first: bool = False


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """A requested block; the next frame is its payload."""

    ticket: int
    key: bytes
    checksum: int  # xxh3, seeded with the fingerprint


class Miss(msgspec.Struct, frozen=True, array_like=True, tag="miss"):
    """The refusal of a `Get`: `gone` if the block is no longer stored, `busy` if all send buffers are in flight."""

    ticket: int
    reason: str


FromPeer = Welcome | PeerRefused | KeyUpdate | Block | Miss
UNDECODABLE = msgspec.DecodeError, UnicodeDecodeError, RecursionError  # what decoding the bytes of anybody may raise


class CurveKeys(NamedTuple):
    """The CURVE keys derived from the shared secret; both ends derive all of them."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def curve_keys(secret: str) -> CurveKeys | None:
    """Derive the keys from the secret; None without one. Slow on purpose, against brute-force guessing."""
    if not secret:
        return None
    seed = hashlib.scrypt(secret.encode(), salt=b"penstock kv peer 1", n=2**14, r=8, p=1, dklen=64)
    server, client = z85.encode(seed[:32]), z85.encode(seed[32:])
    return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


class CurveGuard:
    """A credentials provider for ZMQ's authenticator that accepts exactly one client key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._key)


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return made


def checksum_seed(fingerprint: bytes) -> int:
    """Return the checksum seed of a fingerprint, so that blocks of another fingerprint fail verification."""
    return int.from_bytes(fingerprint[:8], "little")


def split_keys(run: bytes) -> list[bytes]:
    return [run[start : start + KEY_BYTES] for start in range(0, len(run), KEY_BYTES)]
