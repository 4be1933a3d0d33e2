"""Pauses an engine core, puts it to sleep and updates its weights.

    running ──pause──▶ (pausing: waits for requests to end) ──▶ paused ──sleep──▶ asleep
       ▲───────────────resume───────────────────────────────────┘ ◀────wake────────┘

All changes come from the core's thread between two steps. Steps in flight are collected first, so every step is computed
with one version of the weights. Requests that are kept go back to the queue when weights or cache go: they keep their
tokens, and the KV cache of all of them is computed again. Keys of blocks start from the weights' fingerprint, so no block
of other weights can be hit in any tier.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.engine.messages import EngineState, Output, PauseMode, Submit
from penstock.executor.protocol import Part, SleepLevel, WeightsError

if TYPE_CHECKING:
    from penstock.engine.core.engine_core import EngineCore


class Rest:
    def __init__(self, core: "EngineCore") -> None:
        self._core = core
        self.is_paused = False
        self.asleep: list[Part] = []
        self.version = 0  # the number of weight updates
        self._awaited: set[str] | None = None  # requests that a pause waits for …
        self._late: dict[str, Submit] = {}  # … and those that came meanwhile

    @property
    def state(self) -> EngineState:
        return EngineState(self.version, self._core.info.fingerprint, self.is_paused, (*self.asleep,))

    @property
    def is_pausing(self) -> bool:
        return self._awaited is not None

    def pause(self, mode: PauseMode) -> list[Output]:
        """Pause the engine; with "wait", once `finish_pause` has seen all running requests end. Return the outputs of
        requests that this ends. A paused engine stays as it is."""
        if self.is_paused:
            return []
        requests = self._core.scheduler.requests
        if mode == "wait" and requests:
            self._awaited = {*requests} if self._awaited is None else self._awaited
            return []
        outputs = [self._core.abort(request_id) for request_id in [*requests]] if mode == "abort" else []
        return [*filter(None, outputs), *self._stop()]

    def finish_pause(self) -> list[Output]:
        """Pause if the requests that the pause waits for have ended. The core calls this after every step."""
        if self._awaited is None or not self._awaited.isdisjoint(self._core.scheduler.requests):
            return []
        return self._stop()

    def _stop(self) -> list[Output]:
        """Pause now. Requests that came meanwhile join the queue: they are admitted after the pause."""
        self.is_paused, self._awaited = True, None
        return self.drain() + self._submit_late()

    def drain(self) -> list[Output]:
        """Collect all steps in flight."""
        outputs: list[Output] = []
        while self._core.scheduler.in_flight:
            outputs += self._core.step(plans=False)
        return outputs

    def resume(self) -> list[Output]:
        """Run again; raise WeightsError while the engine sleeps."""
        if self.asleep:
            raise WeightsError(f"resume: the engine sleeps, without {' and '.join(self.asleep)}; wake_up comes first")
        self.is_paused, self._awaited = False, None
        return self._submit_late()

    def _submit_late(self) -> list[Output]:
        late, self._late = self._late, {}
        return [*filter(None, map(self._core.begin, late.values()))]

    @property
    def late_adapters(self) -> set[str | None]:
        return {message.adapter for message in self._late.values()}

    def hold_back(self, message: Submit) -> bool:
        """Queue the request if a pause is waiting for running requests; return whether it was queued."""
        if self._awaited is not None:
            self._late[message.request_id] = message
        return self._awaited is not None

    def abort(self, request_id: str) -> Output | None:
        late = self._late.pop(request_id, None)
        return None if late is None else Output(request_id, [], finish_reason="abort")

    def update_weights(self, path: str) -> None:
        """Load other weights; call `drain` first. If this raises WeightsError, the old weights stay in use."""
        self._core.executor.update_weights(path)
        self.version += 1
        self._core.scheduler.change_model(self._core.info, self.version)
        self.asleep = [part for part in self.asleep if part != "weights"]

    def sleep(self, level: SleepLevel) -> None:
        if not self.is_paused:
            raise WeightsError("sleep: the engine runs; pause comes first")
        if self.asleep:
            raise WeightsError(f"sleep: the engine sleeps already, without {' and '.join(self.asleep)}")
        self._core.executor.sleep(level)
        self._core.scheduler.change_model(self._core.info, self.version)
        self.asleep = ["weights", "kv_cache"]

    def wake(self, parts: Sequence[Part]) -> None:
        self._core.executor.wake(parts)
        self.asleep = [part for part in self.asleep if part not in parts]
