"""All messages between a front (API server or offline LLM) and the engine core, in both directions.

msgspec encodes them as tagged arrays, which cannot carry code. The front owns the text and the core owns the tokens, so
no text of a conversation is sent.
"""

from typing import Literal

import msgspec

from penstock.engine.config import EngineConfig
from penstock.executor import protocol

FinishReason = Literal["stop", "length", "abort", "error"]
MissReason = Literal[  # why the first computed token of a prompt was not in the cache; docs/operations.md explains each
    "partial_block", "new_tokens", "evicted", "no_checkpoint", "tier_timeout", "tier_slow", "other_salt", "other_adapter",
    "weights_changed", "cache_disabled",
]  # fmt: skip
PauseMode = Literal["abort", "wait", "keep"]  # what happens to running requests, under vLLM's names


class CoreStart(msgspec.Struct, frozen=True, array_like=True):
    directory: str  # where the sockets are
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Run one sequence. A request with n choices is n of these messages."""

    request_id: str
    tokens: bytes  # int32 little-endian; the front has checked their number, and that the vocabulary has them
    sampling: protocol.Sampling
    max_tokens: int  # already limited to the context by the front
    priority: int = 0  # smaller runs first
    cache_salt: str | None = None
    adapter: str | None = None  # the key of a loaded adapter
    pooling: protocol.Pooled | None = None
    grammar: str | None = None  # the answer must match it; written by engine/grammar
    peer: str | None = None  # the peer store that has the prompt's KV blocks …
    peer_wait_s: float = 0.0  # … or will have them within this many seconds
    client: bytes = b""  # clients take turns in the queue; a digest


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    request_ids: list[str]


class WatchCache(msgspec.Struct, frozen=True, tag="watch", array_like=True):
    """Start or stop reporting the cached blocks: first all of them, then every change. With `with_blocks`, their tokens are
    reported as well."""

    is_on: bool
    with_blocks: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """Unload an adapter. No later request uses it; earlier ones finish normally."""

    key: str


class Control(msgspec.Struct, frozen=True, tag="control", array_like=True):
    """Run a control operation between two steps. The core then answers with a `ControlReply` of the same number.

    Pauses, sleep and weight updates are implemented in engine/core/pause.py.
    """

    number: int
    operation: Literal["load_adapter", "reset_prefix_cache", "pause", "resume", "update_weights", "sleep", "wake_up"]
    path: str = ""  # the adapter folder or the weights to load
    mode: PauseMode = "abort"
    level: protocol.SleepLevel = 1
    parts: tuple[protocol.Part, ...] = ()


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw", array_like=True):
    """The caller of a control operation has left. It is not executed any more if it has not begun or waits for requests."""

    number: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Stop at once. Draining is up to the front, which stops submitting and waits."""


ToCore = Submit | Abort | WatchCache | UnloadAdapter | Control | Withdraw | Shutdown


class Reuse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens that a prompt took from the prefix cache, and why it took no more; clients get it with these names."""

    cached: dict[str, int]  # tokens by tier; the first token that is computed follows them
    reason: MissReason
    differs_at: int | None = None  # for new_tokens: the first token in which the prompt differs from earlier ones
    evicted_from: str | None = None
    evicted_s_ago: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached.values())


class Output(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one sequence. The last output has a `finish_reason`; there is always exactly one."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended the sequence
    error: str | None = None
    reuse: Reuse | None = None  # with the first tokens
    logprobs: list[protocol.TokenLogprobs] | None = None  # one per token
    prompt_logprobs: list[protocol.TokenLogprobs] | None = None  # for prompt positions 1 …, with the first tokens
    embedding: bytes | None = None
    queued_s: float | None = None  # with the first tokens: from arrival in the core to the first step
    num_preemptions: int = 0
    is_refusal: bool = False  # with an error: the request itself is invalid
    weights_version: int = 0  # version of the weights that computed `tokens`
    accepted_drafts: int = 0  # number of `tokens` that were drafts


class Stats(msgspec.Struct, array_like=True):
    """Gauges as of now and counters since the core started."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0  # held by requests; cached but unused blocks do not count
    num_cached_blocks: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_s: float = 0.0  # total time of all steps
    forced_tokens: int = 0  # generated tokens that were not sampled, because a grammar allowed only one
    num_drafts: int = 0  # rows with draft tokens …
    draft_tokens: int = 0  # … draft tokens in all …
    accepted_tokens: int = 0  # … and draft tokens that were accepted
    accepted_at: list[int] = []  # the same by their place among the drafts of a row
    tiers: dict[str, dict[str, float]] = {}  # gauges and counters of "host", "disk", …; not with every step
    experts: protocol.ExpertUpdate | None = None  # set if experts are rebalanced
    adapters: list[list[str]] = []  # keys of those that run, and of those that wait; with LoRA, not with every step


class Outputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    outputs: list[Output]
    stats: Stats
    step_tokens: int = 0  # positions that the step computed


class KeyedBlock(msgspec.Struct, frozen=True, array_like=True):
    """The content of a block. Keys are shortened to 8 bytes. `parent`: key of the previous block, b"" for the first one,
    which alone has a salt."""

    key: bytes
    parent: bytes
    tokens: bytes
    adapter: str | None
    salt: str | None


class CacheUpdate(msgspec.Struct, frozen=True, tag="cache", array_like=True, omit_defaults=True):
    """Changes of a cache tier since the last update: the first 8 bytes of each key, concatenated. No key is in both."""

    tier: str
    stored: bytes
    removed: bytes
    is_snapshot: bool = False  # `stored` is everything that is cached
    blocks: list[KeyedBlock] = []  # those of requests whose keys were computed since the last update, if asked for


class Connected(msgspec.Struct, frozen=True, tag="connected", array_like=True):
    """The first message, before anything is loaded: the core is connected in both directions."""


class LoadProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """A progress line to print during the start."""

    line: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    info: protocol.ModelInfo


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """Sent once a second by a separate thread. If `overdue_s` is positive, the core's current step or named `job` is
    that many seconds past its deadline."""

    overdue_s: float
    job: str = "a step"


class Dead(msgspec.Struct, frozen=True, tag="dead", array_like=True):
    """The last message of a core that cannot start or cannot continue."""

    error: str


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """State that may change while the engine runs."""

    weights_version: int = 0
    fingerprint: bytes = b""  # identifies the current weights
    is_paused: bool = False
    asleep: tuple[protocol.Part, ...] = ()  # the parts whose memory was released


class ControlReply(msgspec.Struct, frozen=True, tag="controlled", array_like=True):
    number: int
    state: EngineState
    error: str = ""  # if not empty, the operation was refused and nothing has changed
    adapter: protocol.AdapterInfo | None = None  # the adapter that was loaded


FromCore = Connected | Outputs | CacheUpdate | LoadProgress | Ready | Heartbeat | Dead | ControlReply
