"""Pauses an engine core, puts it to sleep and updates its weights.

    running ──pause──▶ (pausing: waits for requests to end) ──▶ paused ──sleep──▶ asleep
       ▲───────────────resume───────────────────────────────────┘ ◀────wake────────┘

The core's thread makes all changes between two steps. Steps in flight are collected first, so every step is computed
with one version of the weights. When weights or KV cache are dropped, running requests return to the queue with their
tokens, and their KV cache is recomputed. Block keys start from the fingerprint of the weights, so no block of other
weights can be hit in any tier.
"""

from collections.abc import Callable, Sequence

from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import EngineState, Output, PauseMode, Submit
from penstock.executor.protocol import Executor, Part, SleepLevel, WeightsError


class PauseController:
    """The pause state of one engine core, and the requests that arrive while a pause waits."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        step: Callable[[], list[Output]],
        begin: Callable[[Submit], Output | None],
    ) -> None:
        """`step` collects the oldest step in flight; `begin` queues a request that was held back."""
        self._executor, self._scheduler = executor, scheduler
        self._step, self._begin = step, begin
        self.is_paused = False
        self.asleep: list[Part] = []
        self.version = 0  # the number of weight updates
        self._awaited: set[str] | None = None  # ids of the requests that a pause waits for …
        self._held: dict[str, Submit] = {}  # … and requests that arrived meanwhile, by id

    @property
    def state(self) -> EngineState:
        return EngineState(self.version, self._executor.info.fingerprint, self.is_paused, (*self.asleep,))

    @property
    def is_pausing(self) -> bool:
        return self._awaited is not None

    def pause(self, mode: PauseMode) -> list[Output]:
        """Pause the engine, or with "wait" let `finish_pause` do it after the running requests have ended. Return the
        outputs of aborted requests. Does nothing if the engine is paused."""
        if self.is_paused:
            return []
        requests = self._scheduler.requests
        if mode == "wait" and requests:
            self._awaited = {*requests} if self._awaited is None else self._awaited
            return []
        outputs = [self._scheduler.abort(request_id) for request_id in [*requests]] if mode == "abort" else []
        return [*filter(None, outputs), *self._stop()]

    def finish_pause(self) -> list[Output]:
        """Pause if the requests that the pause waits for have ended. The core calls this after every step."""
        if self._awaited is None or not self._awaited.isdisjoint(self._scheduler.requests):
            return []
        return self._stop()

    def _stop(self) -> list[Output]:
        """Pause now. Requests that arrived while the pause waited are queued, and admitted after the pause."""
        self.is_paused, self._awaited = True, None
        return self.drain() + self._submit_held()

    def drain(self) -> list[Output]:
        """Collect all steps in flight."""
        outputs: list[Output] = []
        while self._scheduler.in_flight:
            outputs += self._step()
        return outputs

    def resume(self) -> list[Output]:
        """End the pause; raise WeightsError while the engine sleeps."""
        if self.asleep:
            raise WeightsError(f"resume: the engine sleeps, without {' and '.join(self.asleep)}; wake_up comes first")
        self.is_paused, self._awaited = False, None
        return self._submit_held()

    def _submit_held(self) -> list[Output]:
        held, self._held = self._held, {}
        return [*filter(None, map(self._begin, held.values()))]

    @property
    def held_adapters(self) -> set[str | None]:
        return {message.adapter for message in self._held.values()}

    def hold_back(self, message: Submit) -> bool:
        """Queue the request if a pause is waiting for running requests; return whether it was queued."""
        if self._awaited is not None:
            self._held[message.request_id] = message
        return self._awaited is not None

    def abort(self, request_id: str) -> Output | None:
        held = self._held.pop(request_id, None)
        return None if held is None else Output(request_id, [], finish_reason="abort")

    def update_weights(self, path: str) -> None:
        """Replace the weights; call `drain` first. After a WeightsError the old weights stay in use."""
        self._executor.update_weights(path)
        self.version += 1
        self._scheduler.change_model(self._executor.info, self.version)
        self.asleep = [part for part in self.asleep if part != "weights"]

    def sleep(self, level: SleepLevel) -> None:
        if not self.is_paused:
            raise WeightsError("sleep: the engine runs; pause comes first")
        if self.asleep:
            raise WeightsError(f"sleep: the engine sleeps already, without {' and '.join(self.asleep)}")
        self._executor.sleep(level)
        self._scheduler.change_model(self._executor.info, self.version)
        self.asleep = ["weights", "kv_cache"]

    def wake(self, parts: Sequence[Part]) -> None:
        self._executor.wake(parts)
        self.asleep = [part for part in self.asleep if part not in parts]
