"""The executor of several ranks on one machine: a process each, steps through a shared-memory ring.

Every rank gets the same steps and computes its share of each; the first samples, and answers. Steps are sent ahead,
so a rank starts the next one without waiting for anybody. A rank that dies, fails or hangs ends the executor with an
error that says which and why; no rank outlives the executor.
"""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.executor.crew import Crew
from penstock.executor.protocol import ExecutorConfig, ExecutorError, ModelInfo, Step, StepResult, step_deadline_s
from penstock.executor.ring import MessageQueue
from penstock.executor.wire import Done

# A step of 256 decoding requests is 10 KB; a prompt's tokens travel with its admission, 4 bytes each. What is
# larger than a slot goes another way, more slowly (see ring.py).
RING_SLOTS = 8
SLOT_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 1.0


class MultiprocExecutor:
    def __init__(
        self,
        config: ExecutorConfig,
        progress: Callable[[str], None] = lambda line: None,
        deadline_s: Callable[[int], float] = step_deadline_s,
    ) -> None:
        world = config.tensor_parallel_size
        self._deadline_s = deadline_s
        self._encoder = msgspec.msgpack.Encoder()
        self._due: deque[tuple[Step, float]] = deque()  # submitted, and when each must be done
        self._results: deque[StepResult] = deque()
        self._ring = MessageQueue.create(world, slots=RING_SLOTS, slot_bytes=SLOT_BYTES)
        self._crew = Crew()
        try:
            self._crew.start(config, self._ring.handle().pack(), world)
            self.info = _agreed([loaded.info for loaded in self._crew.wait_loaded(progress)])
        except BaseException:
            self._crew.kill()
            self._ring.close()
            raise

    def submit(self, step: Step) -> None:
        assert len(self._due) < self.info.max_in_flight, "too many steps in flight"
        num_tokens = sum(row.count for row in step.rows)
        self._ring.send(("step", self._encoder.encode(step)), timeout_s=self._deadline_s(num_tokens))
        earliest_s = self._due[-1][1] if self._due else time.monotonic()
        self._due.append((step, earliest_s + self._deadline_s(num_tokens)))

    def collect(self) -> StepResult:
        step, due_s = self._due[0]
        while not self._results:
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                self._crew.give_up(self._overdue(step))
            self._hear(min(left_s, 1.0))
        self._due.popleft()
        result = self._results.popleft()
        assert result.step_id == step.step_id, "results out of order"
        return result

    def fileno(self) -> int:
        return self._crew.fileno()

    def check(self) -> None:
        self._hear(0.0)

    def close(self) -> None:
        """End the workers, in peace if they can be told to; nothing is left of them afterwards."""
        try:
            if not self._crew.has_failed:
                self._ring.send(("close",), timeout_s=CLOSE_TIMEOUT_S)
                self._crew.stop()
        finally:
            self._crew.kill()
            self._ring.close()

    def _hear(self, timeout_s: float) -> None:
        self._results += [message.result for message in self._crew.hear(timeout_s) if isinstance(message, Done)]

    def _overdue(self, step: Step) -> str:
        each = "; ".join(f"rank {worker.rank} was last {worker.doing}" for worker in self._crew.workers)
        return f"step {step.step_id} of {len(step.rows)} rows is not done within its deadline: {each}"


def _agreed(infos: list[ModelInfo]) -> ModelInfo:
    """One model over all ranks; bytes are what one rank holds."""
    first = infos[0]
    for rank, info in enumerate(infos):
        if (info.fingerprint, info.num_blocks) != (first.fingerprint, first.num_blocks):
            raise ExecutorError(f"model: rank {rank} has loaded other weights than rank 0; the files changed meanwhile")
    return first
