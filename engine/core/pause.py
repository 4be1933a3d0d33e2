"""Pauses an engine core, puts it to sleep and updates its weights.

    running ──pause, sleep──▶ (pausing: waits for requests to end) ──▶ paused ──sleep──▶ asleep
       ▲───────────────────────resume───────────────────────────────────┘                  │
       └───────────────────────────────────────wake────────────────────────────────────────┘

The core's thread makes all changes between two steps. Steps in flight are collected first, so every step is computed
with one version of the weights. When weights or KV cache are dropped, running requests return to the queue with their
tokens, and their KV cache is recomputed. Block keys start from the fingerprint of the weights, so no block of other
weights can be hit in any tier.
"""

from collections.abc import Callable, Sequence

from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import EngineState, Output, PauseMode
from penstock.executor.protocol import Executor, Part, SleepLevel, WeightsError


class PauseController:
    """The pause state of one engine core. Requests that arrive while a pause waits for others are held."""

    def __init__(self, executor: Executor, scheduler: Scheduler, step: Callable[[], list[Output]]) -> None:
        """`step` collects the oldest step in flight."""
        self._executor, self._scheduler, self._step = executor, scheduler, step
        self.is_paused = False
        self.is_pausing = False  # waits for the requests that came before the pause
        self._stays_paused = False  # a pause was requested for itself, not only by a sleep
        self.asleep: list[Part] = []
        self.version = 0  # the number of weight updates

    @property
    def state(self) -> EngineState:
        return EngineState(self.version, self._executor.info.fingerprint, self.is_paused, (*self.asleep,))

    def pause(self, mode: PauseMode) -> list[Output]:
        """Pause the engine, or with "wait" let `finish_pause` do it after the running requests have ended. Return the
        outputs of aborted requests. A paused engine only stays paused."""
        self._stays_paused = True
        return self._pause(mode)

    def _pause(self, mode: PauseMode) -> list[Output]:
        if self.is_paused:
            return []
        requests = self._scheduler.requests
        if mode == "wait" and requests:
            if not self.is_pausing:
                self.is_pausing = True
                self._scheduler.hold_new(True)
            return []
        outputs = [self._scheduler.abort(request_id) for request_id in [*requests]] if mode == "abort" else []
        return [*filter(None, outputs), *self._stop()]

    def finish_pause(self) -> list[Output]:
        """Pause if the requests that the pause waits for have ended. The core calls this after every step."""
        scheduler = self._scheduler
        if not self.is_pausing or any(each.sequence < scheduler.first_held for each in scheduler.requests.values()):
            return []
        return self._stop()

    def _stop(self) -> list[Output]:
        """Pause now. Requests that arrived while the pause waited are queued, and admitted after the pause."""
        self.is_paused, self.is_pausing = True, False
        self._scheduler.hold_new(False)
        return self.drain()

    def drain(self) -> list[Output]:
        """Collect all steps in flight."""
        outputs: list[Output] = []
        while self._scheduler.in_flight:
            outputs += self._step()
        return outputs

    def resume(self) -> None:
        """End the pause; raise WeightsError while the engine sleeps."""
        if self.asleep:
            raise WeightsError(f"resume: the engine sleeps, without {' and '.join(self.asleep)}; wake_up comes first")
        self.is_paused = self.is_pausing = self._stays_paused = False
        self._scheduler.hold_new(False)

    def update_weights(self, path: str) -> None:
        """Replace the weights, and resume an engine that lacked only these; call `drain` first. After a WeightsError the
        old weights stay in use."""
        self._executor.update_weights(path)
        self.version += 1
        self._scheduler.change_model(self._executor.info, self.version)
        was_asleep, self.asleep = self.asleep, [part for part in self.asleep if part != "weights"]
        if was_asleep and not self.asleep:
            self.resume()

    def sleep(self, level: SleepLevel, mode: PauseMode) -> list[Output]:
        """Pause the engine and free the memory of its cache, with level 2 also that of the weights; call `drain` first.
        Return the outputs of aborted requests.

        With "wait" the engine may only be pausing afterwards. Then call this again when it has paused. A sleep that is
        refused (WeightsError) aborts nothing, and ends the pause unless that was requested for itself.
        """
        if self.asleep:
            raise WeightsError(f"sleep: the engine sleeps already, without {' and '.join(self.asleep)}")
        if mode == "wait":
            self._pause(mode)
            if self.is_pausing:
                return []
        try:
            self._executor.sleep(level)
        except WeightsError:
            if self.is_paused and not self._stays_paused:
                self.resume()
            raise
        self._scheduler.change_model(self._executor.info, self.version)
        self.asleep = ["weights", "kv_cache"]
        return self._pause(mode)

    def wake(self, parts: Sequence[Part]) -> None:
        """Allocate these parts again; resume if the engine has all of them."""
        self._executor.wake(parts)
        self.asleep = [part for part in self.asleep if part not in parts]
        if not self.asleep:
            self.resume()
