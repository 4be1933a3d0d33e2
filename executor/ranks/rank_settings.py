"""The configuration, the group and the device of one rank, which stay the same for as long as it lives."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.step.memory import CudaMeter

STEP_TOKENS, STEP_TOKENS_ON_GPU = 2048, 8192  # defaults of max_num_batched_tokens


@dataclass(frozen=True)
class RankSettings:
    """The configuration of a rank, its group, its device, and the function that reports its progress."""

    config: ExecutorConfig
    group: RankGroup
    device: torch.device
    progress: Callable[[str], None]

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def meter(self) -> CudaMeter | None:
        """The meter of the GPU's memory; None on a CPU, which has nothing to compile or to capture either."""
        return CudaMeter(self.device) if self.is_on_gpu else None

    def with_step_size(self) -> "RankSettings":
        """Return settings with the device's default of `max_num_batched_tokens` if the configuration has none."""
        config = self.config
        if config.max_num_batched_tokens:
            return self
        default = STEP_TOKENS_ON_GPU if self.is_on_gpu else STEP_TOKENS
        config = msgspec.structs.replace(config, max_num_batched_tokens=max(default, config.max_num_seqs))
        return RankSettings(config, self.group, self.device, self.progress)


def choose_device(name: str, index: int = 0) -> torch.device:
    """Return the CPU, or the GPU with this index among those visible to the process."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ExecutorError("device: 'cuda' given; torch sees no GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise ExecutorError(
            f"tensor_parallel_size: rank {index} needs a GPU of its own; this machine has {torch.cuda.device_count()}"
        )
    return torch.device("cuda", index)
