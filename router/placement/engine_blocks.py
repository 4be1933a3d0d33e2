"""Turns cache events as vLLM and SGLang publish them into the frames that the placement knows.

Such an engine names blocks by hashes of its own, with a function and a seed that we do not know. But an event carries the
blocks' tokens and the hash of the block before them, so each hash stands for a key of ours. This keeps the map from hashes to
keys for as long as the block is cached anywhere. It knows one replica, no sockets and no time.

A batch is a msgpack array (time, events, rank). An event is a map with its name under "type" (vLLM since 2026), or an
array that begins with its name (vLLM before, SGLang until 2026); fields that came later stand at the end, so one list
serves all. SGLang puts a salt into a field of its own, and publishes each token of a model with EAGLE drafts with the next one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.cache.keys import SHORT_KEY_BYTES, KeyChanges, block_keys, namespace_root
from penstock.engine.http.kv_stream import Changes, Frame, Hello, snapshot

Hash = bytes | int

# How events name what holds a block; a name that begins otherwise stands for storage.
MEDIA = {"GPU": "device", "CPU": "host"}
WHOLE = (None, "full_attention", "mla_attention", "chunked_local_attention")  # kinds of layers that need every block


class StoredEvent(msgspec.Struct):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None  # SGLang's, of every block behind it

    @property
    def tokens(self) -> list[int]:
        return [each if isinstance(each, int) else each[0] for each in self.token_ids]


class RemovedEvent(msgspec.Struct):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class ClearedEvent(msgspec.Struct):
    pass


Event = StoredEvent | RemovedEvent | ClearedEvent
EVENTS: dict[str, type[Event]] = {
    "BlockStored": StoredEvent,
    "BlockRemoved": RemovedEvent,
    "AllBlocksCleared": ClearedEvent,
}


class BadEvents(Exception):
    """The bytes are no batch of events; the message says why."""


class OtherBlockSize(Exception):
    """The engine's blocks have another size than was thought."""

    def __init__(self, block_size: int) -> None:
        super().__init__(f"its blocks have {block_size} tokens")
        self.block_size = block_size


def events_of(payload: bytes) -> list[Event]:
    """Return the events of a batch that are of a known kind."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event for each in events if (event := _event(each)) is not None]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise BadEvents(f"a batch of cache events: {str(error)[:120]}") from None


def _event(raw: Any) -> Event | None:
    if isinstance(raw, dict):
        kind = EVENTS.get(raw["type"])
        return None if kind is None else msgspec.convert(raw, kind)
    kind = EVENTS.get(raw[0])
    return None if kind is None else msgspec.convert(dict(zip(kind.__struct_fields__, raw[1:], strict=False)), kind)


class EngineBlocks:
    """The blocks that one engine has cached, by its hashes ("names") and by our keys."""

    def __init__(self, fingerprint: bytes, block_size: int, engine: str) -> None:
        self.block_size = block_size
        self.counts: Counter[str] = Counter()  # blocks that could not be placed, by why
        self._fingerprint = fingerprint
        self._engine = engine
        self.keys: dict[Hash, bytes] = {}
        # By tier, how many equal blocks there are: an engine keeps a block twice where two requests computed it at once, and
        # publishes both.
        self._held: defaultdict[str, Counter[Hash]] = defaultdict(Counter)
        self._group: int | None = None  # of layers; of several groups one that needs every block stands for all
        self.seq = 0  # of the last frame of changes

    # -- frames --------------------------------------------------------------------------------------------

    def take(self, payload: bytes) -> list[Frame]:
        """Take in a batch and return what it changes. Raises BadEvents, and OtherBlockSize before anything was stored."""
        changes: defaultdict[str, KeyChanges] = defaultdict(KeyChanges)  # by tier
        is_cleared = False
        for event in events_of(payload):
            if isinstance(event, StoredEvent):
                self._store(event, changes[_tier(event.medium)])
            elif isinstance(event, RemovedEvent):
                self._remove(event, changes[_tier(event.medium)])
            else:
                self._clear()
                changes["device"], is_cleared = KeyChanges(), True
        frames: list[Frame] = []
        for tier, changed in changes.items():
            stored, removed = map(b"".join, changed.take())
            if stored or removed or is_cleared:
                self.seq += 1
                frames.append(Changes(self.seq, tier, stored, removed, is_cleared and tier == "device"))
        return frames

    def snapshot(self) -> Iterator[Frame]:
        """Return all that is known to be there, in place of what the placement has."""
        yield Hello(self._engine, "sha256", self._fingerprint, self.block_size, 0)
        runs = {
            tier: b"".join([self.keys[name][:SHORT_KEY_BYTES] for name in held]) for tier, held in self._held.items()
        }
        yield from snapshot(self.seq, runs)

    # -- events --------------------------------------------------------------------------------------------

    def _store(self, event: StoredEvent, changes: KeyChanges) -> None:
        names, size = event.block_hashes, event.block_size
        if event.kv_cache_spec_kind not in WHOLE or not names or not self._is_ours(event):
            return
        self._group = event.group_idx
        if len(event.token_ids) != size * len(names):  # layers that keep a part of a prompt only
            self.counts["partial"] += len(names)
            return
        if size != self.block_size:
            if not self.keys and size > 0:
                raise OtherBlockSize(size)
            self.counts["other_size"] += len(names)
            return
        root = self._root(event)
        if root is None:
            return
        names = names[: _num_text_blocks(event)]
        if len(names) < len(event.block_hashes):
            self.counts["not_text"] += len(event.block_hashes) - len(names)
        held = self._held[_tier(event.medium)]
        try:
            keys = block_keys(event.tokens[: size * len(names)], size, root=root)
        except ValueError as error:  # no token ids
            raise BadEvents(str(error)) from None
        for name, key in zip(names, keys, strict=True):
            held[name] += 1
            if held[name] == 1:
                self.keys[name] = key
                changes.note(key[:SHORT_KEY_BYTES], True)

    def _root(self, event: StoredEvent) -> bytes | None:
        """Return what the first block's key is chained to; None if it stands behind an unknown block."""
        if event.parent_block_hash is not None:
            parent = self.keys.get(event.parent_block_hash)
            if parent is None:
                self.counts["unknown_parent"] += len(event.block_hashes)
            return parent
        words = _extra_keys(event, 0)
        salt = words[0] if len(words) == 1 and isinstance(words[0], str) else event.cache_salt
        return namespace_root(model=self._fingerprint, adapter=event.lora_name, salt=salt)

    def _remove(self, event: RemovedEvent, changes: KeyChanges) -> None:
        held = self._held[_tier(event.medium)]
        for name in event.block_hashes if self._is_ours(event) else ():
            if name not in held:
                continue
            held[name] -= 1
            if held[name]:
                continue
            del held[name]
            changes.note(self.keys[name][:SHORT_KEY_BYTES], False)
            if not any(name in others for others in self._held.values()):
                del self.keys[name]

    def _clear(self) -> None:
        """Forget the device's blocks. Those of deeper tiers stay."""
        self._held.pop("device", None)
        kept: set[Hash] = set().union(*self._held.values())
        self.keys = {name: key for name, key in self.keys.items() if name in kept}

    def _is_ours(self, event: StoredEvent | RemovedEvent) -> bool:
        return event.locality != "REMOTE" and self._group in (None, event.group_idx)

    def check(self) -> None:
        known: set[Hash] = set().union(*self._held.values())
        assert known == self.keys.keys(), "a block is held without a key, or the other way round"
        assert all(count > 0 for held in self._held.values() for count in held.values())


def _tier(medium: str | None) -> str:
    return "device" if not medium else MEDIA.get(medium[:3].upper(), "disk")


def _extra_keys(event: StoredEvent, index: int) -> Sequence[Any]:
    """Return what a block's name depends on besides tokens and adapter: a salt, images."""
    extra = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
    words = list(extra or ())
    if event.lora_name in words:
        words.remove(event.lora_name)
    return words


def _num_text_blocks(event: StoredEvent) -> int:
    """Return how many of its blocks, from the first, depend on tokens, adapter and salt alone."""
    for index in range(len(event.block_hashes)):
        words = _extra_keys(event, index)
        is_salt = index == 0 and event.parent_block_hash is None and len(words) == 1 and isinstance(words[0], str)
        if words and not is_salt:
            return index
    return len(event.block_hashes)
