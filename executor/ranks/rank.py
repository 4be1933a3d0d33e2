"""One running rank of an executor: its part of the model on its device, its KV blocks, and the runner of both.

With one rank this is the whole model, and `UniprocExecutor` calls it directly. Otherwise each rank is a process
(executor/ranks/worker.py), and all of them get the same steps. `build_rank` (rank_builder.py) builds a rank;
`WeightsLifecycle` replaces its weights and lets it sleep.
"""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.executor.models.adapters import AdapterStore
from penstock.executor.models.load import LoadedModel
from penstock.executor.protocol import ModelInfo
from penstock.executor.ranks.rank_settings import RankSettings
from penstock.executor.ranks.runner_factory import RunnerFactory
from penstock.executor.step.runner import ModelRunner
from penstock.executor.tiers.open_tiers import RankTiers


@dataclass(eq=False)
class Rank:
    """The weights, the KV blocks and the runner of one rank, of which each can be replaced while the rank lives.

    The owner passes steps to `runner`. There is no runner while the rank sleeps.
    """

    settings: RankSettings
    info: ModelInfo
    loaded: LoadedModel
    kv: torch.Tensor  # [blocks, layers of a block, parts, block size, width]
    tiers: RankTiers
    runner_factory: RunnerFactory
    open_runner: ModelRunner | None  # None while the rank sleeps

    @property
    def runner(self) -> ModelRunner:
        assert self.open_runner is not None, "a step for a rank that sleeps"
        return self.open_runner

    @property
    def adapters(self) -> AdapterStore:
        assert self.loaded.adapters is not None, "adapters are refused before they come here"
        return self.loaded.adapters

    def replace_runner(self) -> None:
        """Open a runner over the current weights and blocks; `RunnerFactory.capture` then captures its graphs."""
        self.close_runner()  # frees its memory before another runner takes as much
        self.open_runner = self.runner_factory.open(self.loaded, self.kv, self.info.max_model_len)

    def close_runner(self) -> None:
        if self.open_runner is not None:
            self.open_runner.close()
            self.open_runner = None

    def allocate_blocks(self) -> None:
        """Allocate the KV blocks again, empty; the runner must be replaced afterwards."""
        self._replace_blocks(self.runner_factory.allocate(self.loaded, self.info.num_blocks))

    def free_blocks(self) -> None:
        self._replace_blocks(self.kv[:0].clone())

    def _replace_blocks(self, kv: torch.Tensor) -> None:
        self.kv = kv
        if self.tiers.transfers is not None:
            self.tiers.transfers.use(block_bytes_of(kv))


def block_bytes_of(kv: torch.Tensor) -> Any:
    """Return the KV blocks as copiers use them: uint8 [blocks, bytes per block], an array if they are on the CPU."""
    blocks = kv.flatten(1).view(torch.uint8)
    return blocks if blocks.is_cuda else blocks.numpy()
