"""The executor for one device in this process: loads the model, allocates the KV cache, runs steps in order."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import AdapterInfo, ExecutorConfig, ExecutorError, Part, SleepLevel, Step, StepResult
from penstock.executor.ranks.rank_builder import build_rank
from penstock.executor.ranks.rank_settings import choose_device
from penstock.executor.ranks.weights_lifecycle import WeightsLifecycle
from penstock.executor.step.runner import LaunchedStep


class UniprocExecutor:
    """Runs steps on one device. On a CPU `submit` computes; on a GPU it queues the work, and `collect` waits for it.

    For a step with masked rows, `submit` computes the logits and `set_masks` samples."""

    def __init__(self, config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> None:
        if (world := config.tensor_parallel_size) != 1:
            raise ExecutorError(f"tensor_parallel_size: {world} given; executor 'uniproc' runs one rank")
        rank = build_rank(config, RankGroup(), choose_device(config.device), progress)
        self.info, self._rank, self._weights = rank.info, rank, WeightsLifecycle(rank)
        self._in_flight: deque[LaunchedStep] = deque()

    def submit(self, step: Step) -> None:
        assert len(self._in_flight) < self.info.max_in_flight, "too many steps in flight"
        self._in_flight.append(self._rank.runner.launch(step))

    def set_masks(self, step_id: int, rows: np.ndarray, masks: np.ndarray) -> None:
        launched = self._in_flight[-1]
        assert launched.step.step_id == step_id, "masks come before the next step is submitted"
        self._rank.runner.sample_masked(launched, rows, masks)

    def collect(self) -> StepResult:
        return self._rank.runner.finish(self._in_flight.popleft())

    def load_adapter(self, path: str) -> AdapterInfo:
        return self._rank.adapters.load(path)

    def unload_adapter(self, key: str) -> None:
        self._rank.adapters.unload(key)

    def update_weights(self, path: str) -> None:
        self._weights.prepare(path)
        self._weights.take()
        self.info = self._rank.info

    def sleep(self, level: SleepLevel) -> None:
        self._weights.sleep(level)

    def wake(self, parts: Sequence[Part]) -> None:
        self._weights.wake(parts)

    def fileno(self) -> int | None:
        return None

    def check(self) -> None:
        pass

    def close(self) -> None:
        """Drop the model and the cache; their memory is freed with the last reference."""
        self._in_flight.clear()
        self._rank.tiers.close()
        del self._rank, self._weights
