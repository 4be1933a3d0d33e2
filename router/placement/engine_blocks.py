"""Cache events as vLLM and SGLang publish them, turned into the frames that the placement knows.

Such an engine names blocks by hashes of its own, whose function and seed are its affair. But an event carries the
blocks' tokens and the hash of the block before them: so each of its hashes stands for a key of ours, and the map from
one to the other is kept here for as long as the block is cached anywhere. It knows one replica, no sockets and no time.

A batch is a msgpack array (time, events, rank). An event is a map with its name under "type" (vLLM since 2026), or an
array that begins with its name (vLLM before, SGLang until 2026); fields that came later stand at the end, so one list
serves all. SGLang names a salt in a field of its own, and of models with EAGLE drafts says each token with the next.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import KEY_BYTES, Changes, Frame, Hello, snapshot

Hash = bytes | int

# How events name what holds a block; a name that begins otherwise stands for storage.
MEDIA = {"GPU": "device", "CPU": "host"}
WHOLE = (None, "full_attention", "mla_attention", "chunked_local_attention")  # kinds of layers that need every block


class Stored(msgspec.Struct):
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


class Removed(msgspec.Struct):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct):
    pass


EVENTS: dict[str, type[Stored | Removed | Cleared]] = {
    "BlockStored": Stored,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
}


class BadEvents(Exception):
    """The bytes are no batch of events; the message says why."""


class OtherBlockSize(Exception):
    """The engine's blocks have another size than was thought."""

    def __init__(self, block_size: int) -> None:
        super().__init__(f"its blocks have {block_size} tokens")
        self.block_size = block_size


def events_of(payload: bytes) -> list[Stored | Removed | Cleared]:
    """Of a batch, those of a kind that is known."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event for each in events if (event := _event(each)) is not None]
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise BadEvents(f"a batch of cache events: {str(error)[:120]}") from None


def _event(said: Any) -> Stored | Removed | Cleared | None:
    if isinstance(said, dict):
        kind = EVENTS.get(said["type"])
        return None if kind is None else msgspec.convert(said, kind)
    kind = EVENTS.get(said[0])
    return None if kind is None else msgspec.convert(dict(zip(kind.__struct_fields__, said[1:], strict=False)), kind)


class EngineBlocks:
    """What one engine has cached, by its names and by ours."""

    def __init__(self, fingerprint: bytes, block_size: int, engine: str) -> None:
        self.block_size = block_size
        self.counts: Counter[str] = Counter()  # blocks that could not be placed, by why
        self._fingerprint = fingerprint
        self._engine = engine
        self._keys: dict[Hash, bytes] = {}
        self._held: dict[str, set[Hash]] = {}  # by tier
        # Engines keep equal blocks twice where two requests computed them at once, and say so of each.
        self._again: Counter[tuple[str, Hash]] = Counter()
        self._group: int | None = None  # of layers; where there are several, one that needs every block speaks for all
        self.seq = 0  # of the last frame of changes

    # -- frames --------------------------------------------------------------------------------------------

    def take(self, payload: bytes) -> list[Frame]:
        """Raises BadEvents, and OtherBlockSize before anything was stored."""
        changes: dict[str, dict[bytes, bool]] = {}  # tier → our key → whether it is there now
        cleared: set[str] = set()
        for event in events_of(payload):
            if isinstance(event, Stored):
                self._store(event, changes)
            elif isinstance(event, Removed):
                self._remove(event, changes)
            else:
                self._clear(changes)
                cleared.add("device")
        return [self._changes(tier, changes.get(tier, {}), tier in cleared) for tier in changes.keys() | cleared]

    def snapshot(self) -> Iterator[Frame]:
        """All that is known to be there, in place of what the placement has."""
        yield Hello(self._engine, "sha256", self._fingerprint, self.block_size, 0)
        runs = {tier: b"".join([self._keys[name][:KEY_BYTES] for name in held]) for tier, held in self._held.items()}
        yield from snapshot(self.seq, runs)

    @property
    def num_blocks(self) -> int:
        return len(self._keys)

    def _changes(self, tier: str, changes: dict[bytes, bool], is_cleared: bool) -> Changes:
        self.seq += 1
        stored = b"".join([key for key, is_there in changes.items() if is_there])
        removed = b"".join([key for key, is_there in changes.items() if not is_there])
        return Changes(self.seq, tier, stored, removed, is_cleared)

    # -- events --------------------------------------------------------------------------------------------

    def _store(self, event: Stored, changes: dict[str, dict[bytes, bool]]) -> None:
        names, size = event.block_hashes, event.block_size
        if event.kv_cache_spec_kind not in WHOLE or not names or not self._is_ours(event):
            return
        self._group = event.group_idx
        if len(event.token_ids) != size * len(names):  # layers that keep a part of a prompt only
            self.counts["partial"] += len(names)
            return
        if size != self.block_size:
            if not self._keys and size > 0:
                raise OtherBlockSize(size)
            self.counts["other_size"] += len(names)
            return
        root = self._root(event)
        if root is None:
            return
        names = names[: _num_plain(event)]
        if len(names) < len(event.block_hashes):
            self.counts["not_text"] += len(event.block_hashes) - len(names)
        tier = _tier(event.medium)
        held, changed = self._held.setdefault(tier, set()), changes.setdefault(tier, {})
        try:
            keys = block_keys(event.tokens[: size * len(names)], size, root=root)
        except ValueError as error:  # no token ids
            raise BadEvents(str(error)) from None
        for name, key in zip(names, keys, strict=True):
            if name in held:
                self._again[tier, name] += 1
            else:
                held.add(name)
                self._keys[name] = key
                changed[key[:KEY_BYTES]] = True

    def _root(self, event: Stored) -> bytes | None:
        """What the first block's key is chained to; None: it stands behind a block that we do not know."""
        if event.parent_block_hash is not None:
            parent = self._keys.get(event.parent_block_hash)
            if parent is None:
                self.counts["unknown_parent"] += len(event.block_hashes)
            return parent
        words = _beside_adapter(event, 0)
        salt = words[0] if len(words) == 1 and isinstance(words[0], str) else event.cache_salt
        return namespace_root(model=self._fingerprint, adapter=event.lora_name, salt=salt)

    def _remove(self, event: Removed, changes: dict[str, dict[bytes, bool]]) -> None:
        if not self._is_ours(event):
            return
        tier = _tier(event.medium)
        held, changed = self._held.setdefault(tier, set()), changes.setdefault(tier, {})
        for name in event.block_hashes:
            if name not in held:
                continue
            if self._again[tier, name] > 0:
                self._again[tier, name] -= 1
                continue
            del self._again[tier, name]
            held.remove(name)
            changed[self._keys[name][:KEY_BYTES]] = False
            if not any(name in others for others in self._held.values()):
                del self._keys[name]

    def _clear(self, changes: dict[str, dict[bytes, bool]]) -> None:
        """The device has nothing any more; what lies deeper stays."""
        changes.pop("device", None)
        self._held.pop("device", None)
        self._again.clear()
        kept: set[Hash] = set().union(*self._held.values())
        self._keys = {name: key for name, key in self._keys.items() if name in kept}

    def _is_ours(self, event: Stored | Removed) -> bool:
        return event.locality != "REMOTE" and self._group in (None, event.group_idx)

    def check(self) -> None:
        known: set[Hash] = set().union(*self._held.values())
        assert known == self._keys.keys(), "a block is held without a key, or the other way round"
        assert all(count >= 0 and name in self._held[tier] for (tier, name), count in self._again.items() if count)


def _tier(medium: str | None) -> str:
    return "device" if not medium else MEDIA.get(medium[:3].upper(), "disk")


def _beside_adapter(event: Stored, index: int) -> Sequence[Any]:
    """What beside tokens and adapter a block's name stands for: a salt, images."""
    extra = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
    words = list(extra or ())
    if event.lora_name in words:
        words.remove(event.lora_name)
    return words


def _num_plain(event: Stored) -> int:
    """How many of its blocks, from the first, are named by tokens, adapter and salt alone."""
    for index in range(len(event.block_hashes)):
        words = _beside_adapter(event, index)
        is_salt = index == 0 and event.parent_block_hash is None and len(words) == 1 and isinstance(words[0], str)
        if words and not is_salt:
            return index
    return len(event.block_hashes)
