"""The block pool: reference counts, cached keys and eviction order of KV blocks.

It handles block ids and keys, not requests, tokens or tensors. The scheduler and the tier index call it from one
thread. Every operation costs O(1) per block and allocates nothing: the free list is a ring of links in two flat lists
of ints, and a key is a `bytes`, so the garbage collector tracks nothing per block.

A block is *held* (reference count > 0) or *free*. A free block may still have a key: its content is cached, and a
request with the same prefix can hold it again until the block is allocated for other content.

The free ring, with block 0 (never allocated) as its anchor:

    0 ── allocated next ──────────────────────────────── allocated last ── 0
         blocks without a key,   cached blocks, least recently released first;
         last released first     within a request, the end of the chain before its start
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.cache.keys import KeyChanges


class BlockPool:
    """A pool of `num_blocks` blocks, including block 0, which the executor uses as padding and which is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.num_free = self.num_usable = num_blocks - 1
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}  # key → the one block that carries it
        self._changes: KeyChanges | None = None  # None if no subscriber wants changes
        self.on_evict: Callable[[bytes], None] = lambda _key: None  # called with each key whose block is allocated anew
        # All blocks start free, in order, so that a new pool allocates 1, 2, 3 …
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_cached(self) -> int:
        return len(self._index)

    def find(self, key: bytes) -> int:
        """Return the block with this key, without a reference: `hold` it before allocating. Return 0 if there is none."""
        return self._index.get(key, 0)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count how many of these blocks are free: holding them lowers `num_free` by that number."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks of undefined content, each with one reference. The caller has checked `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        blocks = []
        for _ in range(count):
            block = self._next[0]
            self._unlink(block)
            if (key := self._keys[block]) is not None:
                self._keys[block] = None
                del self._index[key]
                if self._changes is not None:
                    self._changes.note(key, False)
                self.on_evict(key)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a chain, given in chain order.

        The end of the chain is released first and therefore evicted first: without its start, the rest of a chain can
        never be matched again.
        """
        refs = self._refs
        for block in reversed(blocks):
            count = refs[block] - 1
            assert count >= 0, block
            refs[block] = count
            if count == 0:
                # Blocks without a key go to the front: reusing them evicts no cached block.
                self._link(block, after=0 if self._keys[block] is None else self._prev[0])

    def register(self, block: int, key: bytes) -> int:
        """Assign the key of its content to a held block; return the block that the key maps to from now on.

        Identical full blocks are kept once: if another block has the key already, that one is returned with a new
        reference, and the caller releases `block` as soon as no step writes to it any more.
        """
        assert self._refs[block] > 0, block
        holder = self._index.setdefault(key, block)
        if holder == block:
            assert self._keys[block] in (None, key), block
            if self._changes is not None and self._keys[block] is None:
                self._changes.note(key, True)
            self._keys[block] = key
        else:
            self.hold((holder,))
        return holder

    def forget(self) -> bool:
        """Drop all cached content; return False, and drop nothing, while any block is held."""
        if self.num_free != self.num_usable:
            return False
        for key, block in self._index.items():
            if self._changes is not None:
                self._changes.note(key, False)
            self._keys[block] = None
        self._index.clear()
        return True

    def watch(self, is_on: bool) -> None:
        """Start or stop recording changes of the cached keys."""
        self._changes = KeyChanges() if is_on else None

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that were added and removed since the last call, while they are recorded."""
        return ([], []) if self._changes is None else self._changes.take()

    def cached_keys(self) -> list[bytes]:
        return list(self._index)

    def check(self) -> None:
        """Assert every invariant; O(num_blocks), with loops that run in C: tests call it after every step."""
        free = self.free_order()
        assert [self._prev[block] for block in (*free, 0)] == [0, *free], "the free ring differs backwards"
        assert not any(map(self._refs.__getitem__, free)), "a block is free and held"
        assert len(free) == self.num_free, (len(free), self.num_free)
        assert self._refs[0] == 0 and self._keys[0] is None and min(self._refs) == 0
        held = self.num_blocks - self._refs.count(0)
        assert held + len(free) == self.num_usable, (held, len(free))
        assert [self._keys[block] for block in self._index.values()] == [*self._index]
        assert self.num_blocks - self._keys.count(None) == len(self._index)

    def free_order(self) -> list[int]:
        """Return the free blocks in the order of their allocation."""
        order = []
        block = self._next[0]
        while block != 0:
            order.append(block)
            assert len(order) < self.num_blocks, "the free ring has a loop"
            block = self._next[block]
        return order

    def refs(self, block: int) -> int:
        return self._refs[block]

    def check_refs(self, expected: Mapping[int, int]) -> None:
        """Assert that every block has the expected number of references; a block that is not named has none."""
        refs = [expected.get(block, 0) for block in range(self.num_blocks)]
        assert self._refs == refs, f"references {self._refs} differ from those of the owners, {refs}"

    def _link(self, block: int, after: int) -> None:
        before = self._next[after]
        self._next[after] = self._prev[before] = block
        self._prev[block], self._next[block] = after, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
