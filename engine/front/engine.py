"""The protocol `Engine`, with all that the server uses of an engine; the health of an engine, and its errors.

`AsyncEngine` (engine/front/client.py) implements it with a core process, and the tests of the server without one.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, Unpack

import msgspec

from penstock.engine.config import EngineConfig
from penstock.engine.front.answer import Answer
from penstock.engine.front.submit import AnswerOptions
from penstock.engine.messages import CacheUpdate, EngineState, Outputs, Stats
from penstock.engine.sampling_params import SamplingParams
from penstock.executor.protocol import AdapterInfo, ModelInfo


class EngineDead(Exception):
    """The engine core has ended or never started; the message says why."""


class QueueFull(Exception):
    """Raised for a request if as many are in flight as the engine may queue."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineHealth(msgspec.Struct, frozen=True):
    """`alive`: worth keeping. `ready`: takes requests."""

    alive: bool
    ready: bool
    reason: str


class Engine(Protocol):
    info: ModelInfo  # changes with the weights
    config: EngineConfig
    stats: Stats
    state: EngineState
    on_step: Callable[[Outputs], None]  # called with the outputs of every step
    on_cache_update: Callable[[CacheUpdate], None]  # called after `watch_cache`

    @property
    def answers(self) -> Collection[str]:
        """The request ids of the sequences in flight."""

    def health(self) -> EngineHealth:
        """Return the health, from the core's heartbeat, process and running step, never from the tokens."""

    def admit(self, num_sequences: int = 1, num_preparing: int = 0, field: str = "prompt") -> None:
        """Raise the errors of `generate` for a full queue or a dead core. The server calls this before it tokenizes;
        `num_preparing` is the number of admitted sequences that are being tokenized."""

    def generate(
        self, prompt: Sequence[int] | bytes, params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> Answer:
        """Start a request whose `params` have been checked. Raises InvalidRequest, QueueFull or EngineDead; afterwards errors
        come as updates. `begin_answer` explains the options."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort the sequences with these ids that are still in flight."""

    def watch_cache(self, is_on: bool, *, with_blocks: bool = False) -> None:
        """Start or stop the core's reports to `on_cache_update`: first everything that is cached, then the changes."""

    async def control(self, operation: str, *, is_withdrawable: bool = False, **fields: Any) -> EngineState:
        """Send a control message such as pause, with the fields of `Control`; raise WeightsError if it is refused.
        With `is_withdrawable`, the core does not begin it any more when the caller has left."""

    async def load_adapter(self, path: str) -> AdapterInfo:
        """Make the core load the adapter in this folder; raise AdapterError if it cannot."""

    def unload_adapter(self, key: str) -> None:
        """Unload an adapter after the requests in flight that use it."""

    async def close(self, reason: str = "the engine is closed") -> None:
        """End the core at once; running requests end with an error, for this reason."""
