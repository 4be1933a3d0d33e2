"""Every message between a front (API server or offline LLM) and the engine core, in both directions.

msgspec encodes them as tagged arrays; nothing here can carry code. A front owns the text, the core owns the
tokens: no string of the conversation crosses.
"""

from typing import Literal

import msgspec

from penstock.engine.config import EngineConfig
from penstock.executor.protocol import (
    AdapterInfo,
    ExpertUpdate,
    ModelInfo,
    Part,
    Pooled,
    Sampling,
    SleepLevel,
    TokenLogprobs,
)

FinishReason = Literal["stop", "length", "abort", "error"]
PauseMode = Literal["abort", "wait", "keep"]  # what becomes of the requests that run: vLLM's words


class CoreStart(msgspec.Struct, frozen=True, array_like=True):
    directory: str  # of the sockets
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Run one sequence. A request with n choices is n of these."""

    request_id: str
    tokens: bytes  # int32 little-endian, inside the vocabulary, not empty, shorter than max_model_len
    sampling: Sampling
    max_tokens: int  # the front has cut it to what the context allows
    priority: int = 0  # smaller runs first
    cache_salt: str | None = None
    adapter: str | None = None  # the key of one that is loaded
    pooling: Pooled | None = None
    grammar: str | None = None  # what the answer must match, as engine/grammar/source.py wrote it
    peer: str | None = None  # the store that has the prompt's blocks …
    peer_wait_s: float = 0.0  # … or will have them so many seconds from now


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    request_ids: list[str]


class WatchCache(msgspec.Struct, frozen=True, tag="watch", array_like=True):
    """From now on, say what is cached: all of it at once, then every change. Or stop saying it."""

    is_on: bool


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """One that was loaded is not asked for any more, by no request that follows; those before it end as ever."""

    key: str


class Control(msgspec.Struct, frozen=True, tag="control", array_like=True):
    """What is done between two steps; answered by a `Controlled` with the same number, when it is done. Pauses and so on
    are in engine/core/rest.py."""

    number: int
    what: Literal["load_adapter", "reset_prefix_cache", "pause", "resume", "update_weights", "sleep", "wake_up"]
    path: str = ""  # of an adapter's folder, or of weights
    mode: PauseMode = "abort"
    level: SleepLevel = 1
    parts: tuple[Part, ...] = ()


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Stop at once. A drain is the front's: it stops submitting and waits."""


ToCore = Submit | Abort | WatchCache | UnloadAdapter | Control | Shutdown


class Output(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What is new of one sequence. The one with a `finish_reason` is its last, and there is always exactly one."""

    request_id: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop id that ended it
    error: str | None = None
    num_cached_tokens: int | None = None  # with the first tokens
    logprobs: list[TokenLogprobs] | None = None  # one per token
    prompt_logprobs: list[TokenLogprobs] | None = None  # for prompt positions 1 …, with the first tokens
    embedding: bytes | None = None
    queued_s: float | None = None  # with the first tokens: from arrival in the core to the first step
    num_preemptions: int = 0
    is_refusal: bool = False  # with an error: the request itself is at fault
    weights_version: int = 0  # that computed `tokens`


class Stats(msgspec.Struct, array_like=True):
    """Gauges as of now and counters since the core started."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0  # held by requests; cached but free blocks do not count
    num_cached_blocks: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_s: float = 0.0  # total time of all steps
    forced_tokens: int = 0  # of the generated ones: what a grammar left no choice about, so they were not sampled
    num_drafts: int = 0  # rows that brought drafts along …
    draft_tokens: int = 0  # … how many in all …
    accepted_tokens: int = 0  # … and how many of them were sampled
    tiers: dict[str, dict[str, float]] = {}  # "host", "disk", …: gauges and counters of each; not with every step
    experts: ExpertUpdate | None = None  # where they move between ranks


class Outputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    outputs: list[Output]
    stats: Stats
    step_tokens: int = 0  # positions computed by the step these come from


class CacheUpdate(msgspec.Struct, frozen=True, tag="cache", array_like=True):
    """What a tier has cached since the last update: the first 8 bytes of keys, run together. No key is in both."""

    tier: str
    stored: bytes
    removed: bytes
    is_snapshot: bool = False  # `stored` is all there is


class Connected(msgspec.Struct, frozen=True, tag="connected", array_like=True):
    """The first message, before anything is loaded: the core has both connections."""


class LoadProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """A line about a stage of the start."""

    line: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    info: ModelInfo


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """Sent once a second by a thread of its own. `overdue_s` > 0: what the core's thread does, a step or the named job,
    is that far beyond its deadline."""

    overdue_s: float
    job: str = "a step"


class Dead(msgspec.Struct, frozen=True, tag="dead", array_like=True):
    """The core cannot start or cannot go on; its last message."""

    error: str


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """What may change while the engine lives."""

    weights_version: int = 0
    fingerprint: bytes = b""  # of these weights
    is_paused: bool = False
    asleep: tuple[Part, ...] = ()  # what it has let go of


class Controlled(msgspec.Struct, frozen=True, tag="controlled", array_like=True):
    number: int
    state: EngineState
    error: str = ""  # it was refused, and nothing has changed
    adapter: AdapterInfo | None = None  # that was loaded


FromCore = Connected | Outputs | CacheUpdate | LoadProgress | Ready | Heartbeat | Dead | Controlled
