"""One sequence in the engine core: its tokens, its pages and its progress.

Only the scheduler changes it.
"""

import enum
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from penstock.engine.config import MAX_LAYER_DRAFTS
from penstock.engine.core.grammars import GrammarState
from penstock.engine.messages import FinishReason, Output, Reuse, Submit
from penstock.executor.protocol import Admission, Row, TokenLogprobs, is_penalized

Tables = tuple[tuple[int, tuple[int, ...]], ...]  # for each table: its first new entry, and the entries from there on
NO_NEWS: tuple[int, tuple[int, ...], Tables, tuple[int, ...], tuple[int, ...]] = (0, (), (), (), ())


@dataclass(slots=True, eq=False)
class RequestKv:
    """The KV pages of one request: its block tables, its recurrent state, and which of them the executor knows. Some lists
    have one entry per attention group.

    `Kv` (engine/core/kv.py) claims and releases the pages; the request's rows carry changes to the executor.
    """

    root: bytes  # the root of the block keys
    skips_cache: bool  # the whole prompt must be computed, without cached blocks
    keys: list[bytes] = field(default_factory=list)  # of the full blocks whose tokens are known
    page_keys: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (block, group) → key, for later groups

    tables: list[list[int]] = field(default_factory=list)  # the block table of each attention group
    num_outside: list[int] = field(default_factory=list)  # by group: leading entries outside the window
    num_sent: list[int] = field(default_factory=list)  # by group: leading entries that the executor has
    num_registered: int = 0  # leading blocks that are registered in the pool
    reuse: Reuse | None = None  # what was found in the cache at the first admission
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

    is_restoring: bool = False  # admitted, but blocks of its prefix are still being copied to the device (tiers.py)

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

    def without_pages(self) -> "RequestKv":
        """Return what stays when all pages have been released."""
        return RequestKv(self.root, self.skips_cache, self.keys, reuse=self.reuse)

    def held(self) -> Iterator[int]:
        """Yield every page as often as the request holds it."""
        return filter(None, chain(*self.tables, self.state, self.draft_state, *self.checkpoints.values()))

    def check(self) -> None:
        """Assert that the counters of a running request agree with its tables."""
        assert self.num_registered <= len(self.blocks) and all(len(table) <= len(self.blocks) for table in self.tables)
        assert len(self.num_sent) == len(self.num_outside) == len(self.tables)
        unsent = any(num < len(table) for num, table in zip(self.num_sent, self.tables, strict=True))
        assert self.has_news or not (unsent or any(self.new_state)), "the executor would never learn of these pages"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Its positions have three limits: `num_scheduled` ≤ `num_ready` and `len(tokens)` ≤ `num_ready`.

    `tokens` are the tokens that the host knows. `num_ready` also counts the tokens that steps in flight will sample:
    the executor stores them in its own history, so their positions may be scheduled already. The token of the last such
    step may be followed by `forced` tokens, which are the only ones that the grammar allows.
    """

    message: Submit
    sequence: int  # order of arrival, unique
    arrival_s: float
    tokens: "array[int]"  # the prompt, then the answer
    max_tokens: int  # as requested, or as many as the context holds
    kv: RequestKv
    matcher: GrammarState | None = None  # follows `tokens`; None while the grammar is being compiled, or without one

    num_prompt: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    may_jump: bool = field(init=False)
    may_draft: bool = field(init=False)

    slot: int = -1  # -1: not running
    num_scheduled: int = 0  # positions handed to the executor since the last admission
    num_pending: int = 0  # tokens that steps in flight will sample
    forced: list[int] = field(default_factory=list)  # tokens that follow the pending one
    num_known: int = 0  # positions whose tokens the executor has or will sample itself
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    turn: int | None = None  # its client's at the first admission (engine/core/fair_queue.py)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    weights_version: int = 0  # version of the weights that compute the next tokens
    has_output: bool = False
    finished: bool = False

    # Used by engine/core/drafts.py:
    drafts: tuple[int, ...] = ()  # draft tokens; with drafts, no step is planned before the last result
    draft_index: int = -1  # index in `tokens` of the token that is expected next
    draft_trust: int = 0  # in repeated text
    has_layer_drafts: bool = False  # `drafts` come from the model's draft layer
    awaits_drafts: bool = False  # of the layer; until they are known, no step is planned
    layer_trust: float = float(MAX_LAYER_DRAFTS)  # mean number of the layer's drafts that were right

    def __post_init__(self) -> None:
        sampling = self.message.sampling
        self.num_prompt = len(self.tokens)
        self.stop_ids = frozenset(sampling.stop_ids)
        # A forced token is not sampled: it has no log-probabilities, and no list of tokens can forbid it.
        self.may_jump = sampling.logprobs is None and not (sampling.allowed_ids or sampling.banned_ids)
        # A penalty would count rejected drafts too; with a grammar, forced tokens take the place of drafts.
        is_free = self.message.grammar is None and sampling.prompt_logprobs is None
        self.may_draft = is_free and not is_penalized(sampling)

    @property
    def num_ready(self) -> int:
        return len(self.tokens) + self.num_pending + len(self.forced)

    @property
    def unknown(self) -> tuple[int, ...]:
        """The tokens from position `num_known` on."""
        if self.num_known < len(self.tokens):
            return tuple(self.tokens[self.num_known :])
        return tuple(self.forced[self.num_known - len(self.tokens) - self.num_pending :]) if self.forced else ()

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def lacks_matcher(self) -> bool:
        """True while the grammar is being compiled."""
        return self.message.grammar is not None and self.matcher is None

    @property
    def wants_more(self) -> bool:
        return self.num_ready - self.num_prompt < self.max_tokens or self.is_prompt_only

    @property
    def is_prompt_only(self) -> bool:
        """True if the request ends when its prompt is computed, and nothing is sampled."""
        return self.max_tokens == 0 or self.message.pooling is not None

    def admission(self) -> Admission:
        """Return the admission that precedes the request's first row in its slot."""
        return Admission(
            slot=self.slot,
            request_id=self.sequence,
            tokens=self.tokens.tobytes(),
            num_prompt=self.num_prompt,
            sampling=self.message.sampling,
            pooling=self.message.pooling,
            adapter=self.message.adapter,
        )

    def row(self, count: int, samples: bool) -> Row:
        """Return a row with the next `count` positions, which then count as scheduled."""
        samples = samples and not self.is_prompt_only
        kv, tokens = self.kv, self.unknown
        first, blocks, groups, reads, writes = kv.take_news() if kv.has_news else NO_NEWS
        row = Row(
            self.slot,
            self.num_scheduled,
            count,
            samples,
            first,
            blocks,
            kv.write_from,
            samples and self.matcher is not None,
            self.num_known if tokens else 0,
            tokens,
            groups,
            reads,
            writes,
        )
        self.num_known += len(tokens) + samples
        self.num_scheduled += count
        if samples:
            self.num_pending += 1
        return row

    def output(
        self,
        tokens: list[int],
        finish_reason: FinishReason | None = None,
        *,
        stop_token: int | None = None,
        error: str | None = None,
        is_refusal: bool = False,
        logprobs: list[TokenLogprobs] | None = None,
        embedding: bytes | None = None,
        accepted_drafts: int = 0,
    ) -> Output:
        """Return the message to the front. The first one also has the prompt's statistics and log-probabilities."""
        is_first, self.has_output = not self.has_output, True
        started_s, reuse = (self.first_scheduled_s, self.kv.reuse) if is_first else (None, None)
        return Output(
            self.message.request_id,
            tokens,
            finish_reason,
            stop_token,
            error,
            reuse,
            logprobs,
            self.prompt_logprobs or None if is_first else None,
            embedding,
            None if started_s is None else started_s - self.arrival_s,
            self.num_preemptions,
            is_refusal,
            self.weights_version,
            accepted_drafts,
        )

    def check(self, block_size: int) -> None:
        """Assert the limits of a running request's positions."""
        self.kv.check()
        assert self.num_scheduled <= min(self.num_ready, len(self.kv.blocks) * block_size)
        assert self.num_known + len(self.unknown) == self.num_ready


class Claim(enum.Enum):
    """The outcome of an attempt to admit a request."""

    ADMITTED = enum.auto()
    NO_ROOM = enum.auto()  # it stays in the queue
    LOADING = enum.auto()  # it leaves the queue until blocks of its prefix have been loaded from a store


def cheapest_to_preempt(running: Collection[Request]) -> Request:
    """Return the running request that is cheapest to preempt: of the lowest priority, with the fewest positions to
    recompute, which count once more for each earlier preemption. The oldest request is spared if there is another, so
    that at least one request finishes."""
    senior = min(running, key=lambda r: (r.message.priority, r.sequence))
    others = [r for r in running if r is not senior] or [senior]
    return min(others, key=lambda r: (-r.message.priority, r.num_scheduled * (1 + r.num_preemptions), -r.sequence))
