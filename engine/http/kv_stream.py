"""The frames of `GET /kv_events`, in which an engine tells its routers what it has cached.

Server and router share this page. A frame is a little-endian u32 length and a msgpack array. Keys travel as the
first 8 bytes of block keys, run together; token ids never do. A stream opens with `Hello` and a snapshot, then
`Changes` follow with sequence numbers that rise by one; a reader that sees a gap connects again. One that is too slow
gets a new snapshot in the stream instead of what it missed.
"""

from collections.abc import Mapping

import msgspec

KEY_BYTES = 8
MAX_FRAME_BYTES = 2**22
FRAME_KEYS = 2**13  # keys in one frame of a snapshot: a listener applies a frame between two other things
ALIVE_S = 1.0  # without changes, an `Alive` comes this often


class StreamError(Exception):
    """The bytes are no stream of frames; the message says why."""


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """Says what the keys that follow mean. Another `engine_id` than before means another process, with an empty cache."""

    engine_id: str
    hash: str
    fingerprint: bytes
    block_size: int
    num_blocks: int
    # A key stands for all blocks up to its own, and fewer of them are of no use: what is cached of a prompt ends at the
    # last of its keys that is known. Else a run of keys from the first one on counts.
    hits_at_ends: bool = False


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", array_like=True):
    """A part of all that is cached after change `seq`. The first part replaces everything known before."""

    seq: int
    tier: str
    keys: bytes
    is_first: bool
    is_last: bool


class Changes(msgspec.Struct, frozen=True, tag="changes", array_like=True):
    """Net changes of one tier: no key is in both. `cleared` comes before the rest."""

    seq: int
    tier: str
    stored: bytes
    removed: bytes
    cleared: bool = False


class Alive(msgspec.Struct, frozen=True, tag="alive", array_like=True):
    """Nothing has changed since `seq`."""

    seq: int


Frame = Hello | Snapshot | Changes | Alive


def snapshot(seq: int, runs: Mapping[str, bytes]) -> list[Snapshot]:
    """Return all that is cached, by tier, in parts. For an empty cache one empty part."""
    size = FRAME_KEYS * KEY_BYTES
    parts = [(tier, run[at : at + size]) for tier, run in runs.items() for at in range(0, len(run), size)]
    parts = parts or [("device", b"")]
    last = len(parts) - 1
    return [Snapshot(seq, tier, run, i == 0, i == last) for i, (tier, run) in enumerate(parts)]


def keys_in(run: bytes) -> list[bytes]:
    return [run[at : at + KEY_BYTES] for at in range(0, len(run), KEY_BYTES)]


def pack(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Bytes as they come → whole frames. Keeps at most one frame and a piece."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Frame)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete. After StreamError the stream cannot be read on."""
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
        except msgspec.DecodeError as error:
            raise StreamError(f"frame: {error}") from None
        for keys in _keys_of(frame):
            if len(keys) % KEY_BYTES:
                raise StreamError(f"frame: {len(keys)} bytes are not a whole number of {KEY_BYTES}-byte keys")
        return frame


def _keys_of(frame: Frame) -> tuple[bytes, ...]:
    if isinstance(frame, Snapshot):
        return (frame.keys,)
    return (frame.stored, frame.removed) if isinstance(frame, Changes) else ()
