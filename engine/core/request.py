"""One sequence inside the engine core: its tokens, its blocks and how far it has come. The scheduler alone changes it."""

from array import array

from penstock.engine.grammar.matcher import Matcher
from penstock.executor.protocol import Sampling, TokenLogprobs, is_penalized


class Request:
    """Token positions move through three marks: `num_scheduled` ≤ `num_ready` and `len(tokens)` ≤ `num_ready`.

    `tokens` is what the host knows. `num_ready` counts also the tokens that steps under way are still
    producing: the executor has them in its own history, so their positions may be scheduled already. Behind
    the token of the last such step there may be `forced` ones: a grammar says what they must be.
    """

    __slots__ = (
        "adapter",
        "arrival_s",
        "blocks",
        "draft_place",
        "draft_trust",
        "drafts",
        "finished",
        "first_scheduled_s",
        "forced",
        "grammar",
        "is_restoring",
        "keys",
        "looked",
        "matcher",
        "max_tokens",
        "may_draft",
        "may_jump",
        "num_cached",
        "num_known",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_scheduled",
        "num_sent_blocks",
        "peer",
        "peer_wait_s",
        "pooling",
        "priority",
        "prompt_logprobs",
        "request_id",
        "root",
        "sampling",
        "sequence",
        "skip_prefix_cache",
        "slot",
        "started_output",
        "stop_ids",
        "tokens",
        "write_from",
    )

    def __init__(
        self,
        request_id: str,
        tokens: array,
        sampling: Sampling,
        max_tokens: int,
        root: bytes,
        *,
        sequence: int,
        arrival_s: float,
        priority: int = 0,
        adapter: str | None = None,
        pooling: str | None = None,
        skip_prefix_cache: bool = False,
        peer: str | None = None,
        peer_wait_s: float = 0.0,
        grammar: str | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence  # order of arrival, unique
        self.arrival_s = arrival_s
        self.priority = priority
        self.sampling = sampling
        self.stop_ids = frozenset(sampling.stop_ids)
        self.max_tokens = max_tokens
        self.adapter = adapter
        self.pooling = pooling
        self.skip_prefix_cache = skip_prefix_cache
        self.peer = peer  # the store that has its prompt's blocks, or will have them within so many seconds of arrival
        self.peer_wait_s = peer_wait_s
        self.grammar = grammar
        self.matcher = matcher  # follows `tokens`; None while the grammar is being compiled, or without one
        self.root = root  # the namespace its block keys start from

        self.tokens = tokens  # array("i")
        self.num_prompt = len(tokens)
        self.keys: list[bytes] = []  # of the full blocks whose tokens are known
        self.blocks: list[int] = []  # the block table
        self.slot = -1  # -1: not running
        self.num_scheduled = 0  # positions handed to the executor since the last admission
        self.num_pending = 0  # tokens that steps under way will sample
        self.forced: list[int] = []  # tokens that follow the pending one
        self.num_known = 0  # positions whose tokens the executor samples itself or was told
        # Nobody samples a forced token: it has no log-probabilities, and no list of tokens can forbid it.
        self.may_jump = sampling.logprobs is None and not (sampling.allowed_ids or sampling.banned_ids)
        # A penalty counts the tokens before, right or wrong; a grammar has its own way to skip ahead.
        self.may_draft = grammar is None and sampling.prompt_logprobs is None and not is_penalized(sampling)
        self.num_registered = 0  # leading blocks that the pool knows by key
        self.num_sent_blocks = 0  # leading table entries that the executor has
        self.write_from = 0
        self.num_cached: int | None = None  # prompt tokens found in the cache at the first admission
        self.num_preemptions = 0
        self.first_scheduled_s: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.started_output = False
        self.finished = False
        # Kept by engine/core/drafts.py:
        self.drafts: tuple[int, ...] = ()  # what may follow; while there are any, no step is planned ahead of a result
        self.draft_place = -1  # in `tokens`, of the token that is expected next
        self.draft_trust = 0
        # Kept by engine/core/tiering.py:
        self.looked = False  # since it joined the queue, the tiers were asked for its blocks
        self.is_restoring = False  # it runs, but blocks of its prefix have yet to be copied to the device

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
