"""The frames of `GET /kv_events`, with which an engine reports its cached blocks to routers.

Server and router share this file. A frame is a little-endian u32 length and a msgpack array. Keys are sent as the
first 8 bytes of block keys, concatenated; token ids are never sent. A stream starts with `Hello` and a snapshot;
`Changes` follow with consecutive sequence numbers, and a reader that detects a gap reconnects. A reader that is too slow
gets a new snapshot in the stream instead of the changes it missed.
"""

from collections.abc import Mapping

import msgspec

from penstock.cache.keys import SHORT_KEY_BYTES

MAX_FRAME_BYTES = 2**22
FRAME_KEYS = 2**13  # keys per frame of a snapshot: a reader applies a frame without interruption
ALIVE_S = 1.0  # interval of `Alive` frames while nothing changes


class StreamError(Exception):
    """The error for bytes that are not a valid stream of frames."""


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The first frame, which defines the keys. A different `engine_id` means a new process with an empty cache."""

    engine_id: str
    hash: str
    fingerprint: bytes
    block_size: int
    num_blocks: int
    # If true, a key implies all blocks up to its own: the cached prefix of a prompt ends at its last known key. Otherwise,
    # it ends before the first unknown key.
    hits_at_ends: bool = False


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", array_like=True):
    """A part of the snapshot of all cached blocks after change `seq`. The first part replaces all earlier knowledge."""

    seq: int
    tier: str
    keys: bytes
    is_first: bool
    is_last: bool


class Changes(msgspec.Struct, frozen=True, tag="changes", array_like=True):
    """Net changes of one tier: no key is both stored and removed. `cleared` applies before them."""

    seq: int
    tier: str
    stored: bytes
    removed: bytes
    cleared: bool = False


class Alive(msgspec.Struct, frozen=True, tag="alive", array_like=True):
    """A heartbeat: nothing has changed since `seq`."""

    seq: int


Frame = Hello | Snapshot | Changes | Alive


def snapshot(seq: int, runs: Mapping[str, bytes]) -> list[Snapshot]:
    """Return the parts of a snapshot of all tiers; one empty part for an empty cache."""
    size = FRAME_KEYS * SHORT_KEY_BYTES
    parts = [(tier, run[at : at + size]) for tier, run in runs.items() for at in range(0, len(run), size)]
    parts = parts or [("device", b"")]
    last = len(parts) - 1
    return [Snapshot(seq, tier, run, i == 0, i == last) for i, (tier, run) in enumerate(parts)]


def keys_in(run: bytes) -> list[bytes]:
    return [run[at : at + SHORT_KEY_BYTES] for at in range(0, len(run), SHORT_KEY_BYTES)]


def pack(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """A decoder of received bytes into frames. It buffers at most one frame and the last piece."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Frame)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the completed frames. After a StreamError the stream cannot be continued."""
        self._buffer += data
        frames: list[Frame] = []
        at = 0
        while len(self._buffer) - at >= 4:
            size = int.from_bytes(self._buffer[at : at + 4], "little")
            if size > MAX_FRAME_BYTES:
                raise StreamError(f"frame: {size} bytes announced, the limit is {MAX_FRAME_BYTES}")
            if len(self._buffer) - at - 4 < size:
                break
            frames.append(self._decode(bytes(self._buffer[at + 4 : at + 4 + size])))
            at += 4 + size
        del self._buffer[:at]
        return frames

    def _decode(self, body: bytes) -> Frame:
        try:
            frame: Frame = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StreamError(f"frame: {error}") from None
        runs = (frame.keys,) if isinstance(frame, Snapshot) else ()
        for keys in (frame.stored, frame.removed) if isinstance(frame, Changes) else runs:
            if len(keys) % SHORT_KEY_BYTES:
                raise StreamError(f"frame: {len(keys)} bytes are not a whole number of {SHORT_KEY_BYTES}-byte keys")
        return frame
