"""The executor of one device in this process: loads the model, allocates the KV cache, runs steps in order."""

import time
from collections import deque
from collections.abc import Callable

import torch

from penstock.executor.loading.load import load_model
from penstock.executor.loading.weights import Shard
from penstock.executor.memory import allocate_kv, plan_kv
from penstock.executor.protocol import ExecutorConfig, ExecutorError, ModelInfo, Step, StepResult
from penstock.executor.runner import Launched, ModelRunner
from penstock.executor.sampler import Sampler
from penstock.executor.slots import Slots


class UniprocExecutor:
    """On the CPU `submit` computes at once. On a GPU it returns when the work is queued, and `collect` waits."""

    def __init__(self, config: ExecutorConfig, progress: Callable[[str], None] = lambda line: None) -> None:
        if config.tensor_parallel_size != 1:
            raise ExecutorError(
                f"tensor_parallel_size: {config.tensor_parallel_size} given; executor 'uniproc' runs one rank"
            )
        started_s = time.monotonic()
        device = choose_device(config.device)
        loaded = load_model(config, device, Shard(), progress)
        model, spec = loaded.model, loaded.spec
        block_bytes = model.num_layers * 2 * config.block_size * model.kv_width * loaded.dtype.itemsize
        plan = plan_kv(config, block_bytes, loaded.num_positions, device)
        kv = allocate_kv(plan.num_blocks, model.num_layers, config.block_size, model.kv_width, loaded.dtype, device)
        sampler = Sampler(spec.vocab_size, config.max_num_seqs, device)
        slots = Slots(config.max_num_seqs, plan.max_model_len, config.block_size, device)
        pages = [(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(model.num_layers)]
        self._kv = kv
        self._runner = ModelRunner(model, pages, sampler, slots, device)
        self._in_flight: deque[Launched] = deque()
        self.info = ModelInfo(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=device.type,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_model_len=plan.max_model_len,
            block_size=config.block_size,
            num_blocks=plan.num_blocks,
            block_bytes=plan.block_bytes,
            fingerprint=loaded.fingerprint,
            max_in_flight=1 if device.type == "cpu" else 2,
            memory={"weights": loaded.weight_bytes, "KV cache": plan.num_blocks * plan.block_bytes},
        )
        progress(f"Loaded and {plan.num_blocks} KV blocks allocated in {time.monotonic() - started_s:.1f} s")

    def submit(self, step: Step) -> None:
        assert len(self._in_flight) < self.info.max_in_flight, "too many steps in flight"
        self._in_flight.append(self._runner.launch(step))

    def collect(self) -> StepResult:
        return self._runner.finish(self._in_flight.popleft())

    def close(self) -> None:
        """Forget the model and the cache; their memory goes with the last reference."""
        self._in_flight.clear()
        del self._runner, self._kv


def choose_device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise ExecutorError("device: 'cuda' given; this torch sees no GPU")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(asked)
