"""The keys of a request's pages in the pool and the tiers, and the search for its longest cached prefix.

The blocks of the first attention group have the chain keys of docs/block-keys.md. The keys of later groups and of
recurrent states are derived from these.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.cache.keys import block_keys, page_key
from penstock.engine.core.request import Request
from penstock.executor.protocol import GroupInfo

NEVER = 1 << 62  # a position


class Prefix(NamedTuple):
    """The longest cached prefix of a request, the prefix for which the full groups alone are cached, and the longest
    prefix that could be cached, in blocks."""

    num_blocks: int
    num_seen: int
    most: int


class PageKeys:
    """The keys for all groups, in the order of `ModelInfo.groups`: full attention, windows, and last the states."""

    def __init__(self, groups: Sequence[GroupInfo], block_size: int, makes_keys: bool) -> None:
        """Without `makes_keys`, blocks have no keys, so nothing is found in the cache."""
        self._groups, self.block_size, self._makes_keys = groups, block_size, makes_keys
        self.full = [index for index, group in enumerate(groups) if group.kind == "full"]
        self.windows = [(index, group.window) for index, group in enumerate(groups) if group.kind == "window"]
        self.num_attention = len(self.full) + len(self.windows)
        self.num_pages = groups[-1].pages  # per state
        # Called when keys of a request were computed, with the number of its earlier keys.
        self.on_keys: Callable[[Request, int], None] | None = None

    def find(self, request: Request, find: Callable[[bytes], int], most: int = NEVER) -> Prefix:
        """Return the longest cached prefix of at most `most` blocks. `find` returns the location of a key; 0: not
        cached."""
        num = min(len(request.kv.keys), most)
        if self.num_pages:  # the last token is always computed, from the state before it
            num = min(num, (len(request.tokens) - 1) // self.block_size)
        longest = num
        for group in self.full:
            keys = self._keys(request, group, 0, num)
            num = next((block for block, key in enumerate(keys) if not find(key)), num)
        seen = num
        while num:
            if self.num_pages and not self._has_state(request, num, find):
                num -= 1
            elif (lacking := self._lacking(request, num, find)) >= 0:
                num = lacking
            else:
                break
        return Prefix(num, seen, longest)

    def _has_state(self, request: Request, num: int, find: Callable[[bytes], int]) -> bool:
        # Most positions have no checkpoint; usually the key of the first page shows this.
        is_likely = find(self.key(request, num - 1, self.num_attention))
        return bool(is_likely) and all(map(find, self.state_keys(request, num)))

    def _lacking(self, request: Request, num: int, find: Callable[[bytes], int]) -> int:
        """Return the last of the first `num` blocks that a window needs but that is not cached; -1 if there is none."""
        for group, window in self.windows:
            for block in range(num - 1, self._first_seen(request, num, window) - 1, -1):
                if not find(self.key(request, block, group)):
                    return block
        return -1

    def _first_seen(self, request: Request, num: int, window: int) -> int:
        """Return the first block that a window needs of a cached prefix of `num`, as the last token is always
        computed."""
        return max(0, min(num * self.block_size, len(request.tokens) - 1) + 1 - window) // self.block_size

    def key(self, request: Request, block: int, group: int) -> bytes:
        """Return the key of a group's first page at this block."""
        kv = request.kv
        if group == 0:
            return kv.keys[block]
        place = block, group
        if place not in kv.page_keys:
            kv.page_keys[place] = page_key(kv.keys[block], group)
        return kv.page_keys[place]

    def _keys(self, request: Request, group: int, first: int, end: int) -> list[bytes]:
        if group == 0:
            return request.kv.keys[first:end]
        return [self.key(request, block, group) for block in range(first, end)]

    def state_keys(self, request: Request, num: int) -> list[bytes]:
        """Return the keys of the checkpoint after the first `num` blocks."""
        return [page_key(request.kv.keys[num - 1], self.num_attention, page) for page in range(self.num_pages)]

    def others_at(self, key: bytes) -> Iterator[bytes]:
        """Yield the keys of the later groups' pages that belong to the block with this key."""
        yield from (page_key(key, group) for group in range(1, self.num_attention))
        yield from (page_key(key, self.num_attention, page) for page in range(self.num_pages))

    def needed(self, request: Request, num: int) -> list[list[bytes]]:
        """Return the keys of the pages that a cached prefix of `num` blocks needs, for each attention group and for the
        state."""
        tables = []
        for group, info in enumerate(self._groups[: self.num_attention]):
            first = self._first_seen(request, num, info.window) if info.window else 0
            tables.append(self._keys(request, group, first, num))
        return [*tables, self.state_keys(request, num) if num and self.num_pages else []]

    def used(self, request: Request) -> list[bytes]:
        """Return the keys of a request's pages, starts of chains first."""
        kv = request.kv
        kept, keys = set(kv.kept), list[bytes]()
        for block in range(kv.num_registered):
            keys += [self.key(request, block, group) for group, left in enumerate(kv.num_outside) if block >= left]
            keys += self.state_keys(request, block + 1) if block + 1 in kept else []
        return keys

    def extend(self, request: Request) -> None:
        """Compute the keys of blocks that have become full: all blocks of a prompt in one call, later one at a time."""
        kv = request.kv
        first = len(kv.keys) * self.block_size
        full = len(request.tokens) // self.block_size * self.block_size
        if self._makes_keys and full > first:
            parent = kv.keys[-1] if kv.keys else kv.root
            kv.keys += block_keys(memoryview(request.tokens)[first:full], self.block_size, root=parent)
            if self.on_keys is not None:
                self.on_keys(request, first // self.block_size)

    def change_root(self, request: Request, root: bytes) -> None:
        """Recompute all keys from another root, after a change of the weights. The request holds no pages."""
        request.kv.root, request.kv.keys = root, []
        request.kv.page_keys.clear()
        self.extend(request)
