"""The KV pages of one request: its block tables, its recurrent state, and which of them the executor knows.

`Kv` (engine/core/kv.py) claims and releases the pages; the request's rows carry changes to the executor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

Tables = tuple[tuple[int, tuple[int, ...]], ...]  # for each table: its first new entry, and the entries from there on


@dataclass(slots=True, eq=False)
class RequestKv:
    """The pages of one request. Some lists have one entry per attention group."""

    root: bytes  # the root of the block keys
    skips_cache: bool  # the whole prompt must be computed, without cached blocks
    keys: list[bytes] = field(default_factory=list)  # of the full blocks whose tokens are known
    page_keys: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (block, group) → key, for later groups

    tables: list[list[int]] = field(default_factory=list)  # the block table of each attention group
    num_left: list[int] = field(default_factory=list)  # by group: leading entries that left the window
    num_sent: list[int] = field(default_factory=list)  # by group: leading entries that the executor has
    num_registered: int = 0  # leading blocks that are registered in the pool
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    write_from: int = 0  # keys and values of earlier positions are already stored
    covered_end: int = 0  # rows up to here need no further page and release none
    has_news: bool = False  # the executor does not know all table entries and state pages

    state: list[int] = field(default_factory=list)  # pages of the state after the last scheduled position
    is_state_shared: bool = False  # other requests may read `state`, so the next row writes to new pages
    draft_state: list[int] = field(default_factory=list)  # pages that drafts in flight write; their rows read `state`
    sent_state: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # pages that it reads and writes
    new_state: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # changes of `sent_state` for the next row
    branch: int = 0  # blocks of a prefix that other requests share without a checkpoint at its end
    checkpoints: dict[int, list[int]] = field(default_factory=dict)  # number of blocks → pages whose keys are unknown
    kept: list[int] = field(default_factory=list)  # numbers of blocks whose checkpoints are registered

    # Used with tiers only (engine/core/tiered_kv.py):
    was_looked_up: bool = False  # the tiers were searched since it joined the queue
    is_restoring: bool = False  # admitted, but blocks of its prefix are still being copied to the device

    @property
    def blocks(self) -> list[int]:
        """The block table of the first attention group, which is the longest."""
        return self.tables[0] if self.tables else []

    def take_news(self) -> tuple[int, tuple[int, ...], Tables, tuple[int, ...], tuple[int, ...]]:
        """Return the changes for the executor in the order of `Row`'s fields: new entries of the first group, those of
        the other groups, and the state pages to read from and to write to."""
        (first, blocks), *others = [
            (num, tuple(table[num:])) for num, table in zip(self.num_sent, self.tables, strict=True)
        ]
        self.num_sent = [len(table) for table in self.tables]
        reads, writes = self.new_state
        self.new_state = (), ()
        self.has_news = False
        return first, blocks, tuple(others) if any(new for _, new in others) else (), reads, writes

    def resend_from(self, group: int, block: int) -> None:
        """Make the next row send the table again from this entry on."""
        self.num_sent[group] = min(self.num_sent[group], block)
        self.has_news = True

    def clear(self) -> None:
        """Clear all pages; the caller has released them."""
        self.tables, self.num_left, self.num_sent = [], [], []
        self.num_registered = self.covered_end = 0
        self.state, self.draft_state = [], []
        self.sent_state, self.new_state = ([], []), ((), ())
        self.is_state_shared = self.has_news = False
        self.checkpoints.clear()
        self.kept.clear()
        self.page_keys.clear()

    def held(self) -> Iterator[int]:
        """Yield every page as often as the request holds it."""
        return filter(None, chain(*self.tables, self.state, self.draft_state, *self.checkpoints.values()))

    def check(self) -> None:
        """Assert that the counters of a running request agree with its tables."""
        assert self.num_registered <= len(self.blocks) and all(len(table) <= len(self.blocks) for table in self.tables)
        assert len(self.num_sent) == len(self.num_left) == len(self.tables)
        unsent = any(num < len(table) for num, table in zip(self.num_sent, self.tables, strict=True))
        assert self.has_news or not (unsent or any(self.new_state)), "the executor would never learn of these pages"
