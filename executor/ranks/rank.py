"""One rank of an executor: its part of the model on its device, its KV blocks, and the runner of both.

With one rank this is the whole model, and `UniprocExecutor` calls it directly. Otherwise each rank is a process
(executor/ranks/worker.py), and all of them get the same steps.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.executor.cache_layout import CacheLayout, plan_layout
from penstock.executor.kernels.select import select_input_ops, select_sampling_ops
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.machine import usable_cores
from penstock.executor.models.adapters import AdapterStore
from penstock.executor.models.load import LoadedModel, load_model, load_update
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import (
    NO_WEIGHTS,
    ExecutorConfig,
    ExecutorError,
    ModelInfo,
    SleepLevel,
    WeightsError,
)
from penstock.executor.sampling.sampler import Sampler
from penstock.executor.step.graphs import CHUNK_BUCKETS, CudaGraphs, StepGraphs, choose_buckets
from penstock.executor.step.inputs import ONE_GROUP, DeviceInputs, HostInputs, Inputs
from penstock.executor.step.memory import (
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    CudaMeter,
    GpuUse,
    KvPlan,
    allocate_kv,
    check_kv_bytes,
    layer_pages,
    naming_options,
    plan_kv,
    wait_for_release,
)
from penstock.executor.step.rebalance import Rebalancer
from penstock.executor.step.runner import ModelRunner
from penstock.executor.step.warmup import KV_BLOCKS, Share, run_step, warm_up, widest_step
from penstock.executor.tiers.cuda_copies import CudaCopier
from penstock.executor.tiers.open_tiers import open_tiers
from penstock.executor.tiers.transfers import Copier, NumpyCopier, RankTransfers

STEP_TOKENS, STEP_TOKENS_ON_GPU = 2048, 8192  # defaults of max_num_batched_tokens


class Rank:
    def __init__(
        self,
        config: ExecutorConfig,
        group: RankGroup,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        config = with_step_size(config, device)
        self._config, self._group, self._device, self._progress = config, group, device, progress
        started_s = time.monotonic()
        if device.type == "cpu":
            # The kernels use as many threads as torch, which ignores the CPU quota of a control group.
            torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        meter = CudaMeter(device) if _is_gpu(device) else None  # a CPU has nothing to compile
        check_kv_bytes(config.kv_cache_bytes, meter)
        with naming_options("the weights", "choose a smaller model or dtype, or raise tensor_parallel_size"):
            checkpoint = open_checkpoint(config.model, config)
            self._loaded = load_model(config, device, group, progress, checkpoint)
        loaded, model = self._loaded, self._loaded.model
        layer_bytes = model.kv_parts * config.block_size * model.kv_width * loaded.kv_dtype.itemsize
        self._source = config.model if config.load_format != "dummy" else ""  # where the weights can be read again
        self._prepared: tuple[LoadedModel, str] | None = None  # the next weights, and their source
        self._layout = layout = plan_layout(model.caches, loaded.num_positions, layer_bytes, model.unit_bytes)
        self._block_bytes = block_bytes = layout.depth * layer_bytes
        self._graph_buckets = buckets = self._buckets()
        use = None if meter is None else self._warm_up(buckets, meter)
        self._graphs_set_aside = 0 if use is None else use.graphs
        plan = self._plan_kv(use)
        self.kv = self._allocate(plan.num_blocks)
        content = loaded.fingerprint  # of a page: the weights and, with several groups, the layout of the layers
        if len(layout.groups) > 1:
            content = hashlib.sha256(content + repr(layout).encode()).digest()
        self._tiers = open_tiers(config, block_bytes, content, self._make_copier, group.rank)
        self._max_model_len, self._rebalancer = plan.max_model_len, self._make_rebalancer()
        self._runner: ModelRunner | None = None  # None while the rank sleeps
        try:
            self._open()
            graph_bytes = self._capture()
        except BaseException:
            self._tiers.close()
            raise
        self.info = ModelInfo(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=device.type,
            vocab_size=loaded.spec.vocab_size,
            hidden_size=loaded.spec.hidden_size,
            max_model_len=plan.max_model_len,
            context_limit=plan.context_limit,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=plan.num_blocks,
            block_bytes=block_bytes,
            fingerprint=loaded.fingerprint,
            max_in_flight=1 if device.type == "cpu" and group.world == 1 else 2,
            memory={
                **loaded.memory,
                "KV cache": plan.num_blocks * block_bytes,
                **({} if use is None else use.table(sum(loaded.memory.values()), graph_bytes)),
                **self._tiers.memory,
            },
            storage=loaded.storage,
            num_host_blocks=self._tiers.num_host_blocks,
            stores=self._tiers.stores,
            serves_peers=self._tiers.serves_peers,
            groups=layout.groups,
            max_loras=config.max_loras if config.enable_lora else 0,
        )
        progress(f"Loaded in {time.monotonic() - started_s:.1f} s")

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "a step for a rank that sleeps"
        return self._runner

    def _open(self) -> None:
        """Open a runner over the model and the blocks; `_capture` then captures its graphs."""
        self._close_runner()  # frees its memory before another runner takes as much
        self._runner = self._open_runner(
            self.kv, self._max_model_len, self._tiers.transfers, self._rebalancer, self._graph_buckets
        )

    def _close_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def prepare_weights(self, source: str) -> bytes:
        """Load new weights beside the current ones; return their fingerprint. Raises WeightsError."""
        self._prepared = None
        self._check_experts_stay()
        try:
            with naming_options("the weights, beside those that compute,", "put the engine to sleep before the update"):
                loaded = load_update(source, self._config, self._loaded, self._device, self._group)
        except OSError as error:
            raise WeightsError(f"{source}: {error.strerror or error}") from None
        except ExecutorError as error:
            raise WeightsError(str(error)) from None
        self._prepared = loaded, source
        return loaded.fingerprint

    def _check_experts_stay(self) -> None:
        if self._config.enable_eplb:
            raise WeightsError("weights cannot be replaced with enable_eplb, which moves experts between ranks")

    def take_weights(self) -> None:
        """Replace the current weights with the prepared ones."""
        assert self._prepared is not None
        (self._loaded, self._source), self._prepared = self._prepared, None
        self.info = msgspec.structs.replace(self.info, fingerprint=self._loaded.fingerprint)
        if self._runner is not None:
            self._open()
            self._capture()

    def drop_weights(self) -> None:
        """Discard the prepared weights."""
        self._prepared = None

    def sleep(self, level: SleepLevel) -> None:
        """Free the KV blocks and, on a GPU or at level 2, the weights. At level 1 they are read again on `wake`."""
        drops_weights = level == 2 or _is_gpu(self._device)
        if drops_weights:
            self._check_experts_stay()
        self._close_runner()
        self._move_blocks(self.kv[:0].clone())
        if level == 2:
            self._source = ""
        if drops_weights:
            self._loaded = self._loaded.without_model()
        if _is_gpu(self._device):
            torch.cuda.empty_cache()

    @contextmanager
    def _agreement(self, what: str) -> Iterator[None]:
        """Raise WeightsError on all ranks if one fails within, because it would be missing in what they do next."""
        error = ""
        try:
            with naming_options(what, "free memory on the device, then wake it up again"):
                yield
        except ExecutorError as failure:
            error = str(failure)
        if error := next(filter(None, self._group.gather_bytes(error.encode())), b"").decode():
            self.drop_weights()
            raise WeightsError(error)

    def wake(self, parts: Sequence[str]) -> None:
        if not self._loaded.has_model and self._source:
            with self._agreement("the weights"):
                if self.prepare_weights(self._source) != self._loaded.fingerprint:
                    raise WeightsError(
                        f"wake_up: {self._source} has other weights than those that slept; use update_weights"
                    )
            self.take_weights()
        if "kv_cache" not in parts or self._runner is not None:
            return
        if not self._loaded.has_model:
            raise WeightsError(NO_WEIGHTS)
        try:
            with self._agreement("the KV cache"):
                self._move_blocks(self._allocate(self.info.num_blocks))
                self._open()
            with self._agreement("CUDA graphs"):
                self._capture()
        except WeightsError as error:
            self._close_runner()
            self._move_blocks(self.kv[:0].clone())
            raise WeightsError(f"wake_up: {error}") from None

    def _move_blocks(self, kv: torch.Tensor) -> None:
        self.kv = kv
        if self._tiers.transfers is not None:
            self._tiers.transfers.use(self._copied())

    def _copied(self) -> Any:
        """Return the blocks in the form that copiers use: [blocks, bytes per block]."""
        blocks = self.kv.flatten(1).view(torch.uint8)
        return blocks if blocks.is_cuda else blocks.numpy()

    @property
    def adapters(self) -> AdapterStore:
        assert self._loaded.adapters is not None, "adapters are refused before they come here"
        return self._loaded.adapters

    def close(self) -> None:
        """Close the tiers in order; called after the last step."""
        self._tiers.close()

    def _buckets(self) -> tuple[int, ...]:
        """Return the numbers of rows to capture graphs for; none if an operation synchronizes with the device, which
        cannot be captured."""
        config = self._config
        if config.enforce_eager or select_sampling_ops(self._device) is None:
            return ()
        if not all(experts.is_fused for experts in self._loaded.model.experts):
            return ()
        return choose_buckets(config.max_num_seqs)

    def _chunk_buckets(self) -> tuple[int, ...]:
        """Return the numbers of tokens to capture prefill steps for; none if a layer plans on the host, with
        batch_invariant, or with enable_eplb, which would count padding as load."""
        model, config = self._loaded.model, self._config
        if model.kv_parts == 1 or model.unit_bytes > 0 or config.batch_invariant or config.enable_eplb:
            return ()
        return tuple(tokens for tokens in CHUNK_BUCKETS if tokens <= config.max_num_batched_tokens)

    def _plan_kv(self, use: GpuUse | None) -> KvPlan:
        longest, groups = self._loaded.num_positions, self._layout.groups
        return plan_kv(self._config, self._block_bytes, longest, self._group, use, groups)

    def _warm_up(self, buckets: Sequence[int], meter: CudaMeter) -> GpuUse:
        """Compile and run everything that steps need, before the cache exists, and measure the memory they take, on a
        runner that equals the real one except for its cache of two blocks.

        The longest request is taken to be what fits if only the weights took memory: the tables of all slots are that
        wide, and the context limit of some models is many times what the memory holds."""
        started_s, config, vocab_size = time.monotonic(), self._config, self._loaded.spec.vocab_size
        allocated, adapters, graphs = meter.allocated(), self._loaded.adapters, 0

        def at_start() -> GpuUse:
            return GpuUse(allocated, 0, 0, 0, CONTEXT_BYTES, *meter.device())

        is_measured = config.kv_cache_bytes is None
        utilization = config.gpu_memory_utilization
        first = wait_for_release(at_start, utilization, self._progress) if is_measured else at_start()
        longest = self._plan_kv(first).max_model_len
        self._progress("Warming up: compiling kernels that this machine has not compiled before")
        adapter = None if adapters is None else adapters.load_zeros()
        what = f"a step of {config.max_num_batched_tokens} tokens"
        with naming_options(what, "lower max_num_batched_tokens or max_num_seqs"):
            runner = self._open_runner(self._allocate(KV_BLOCKS), longest)
            runner.allocate_counts()  # of tokens; the real runner does so for the first request with penalties
            requests = meter.allocated() - allocated
            meter.start_peak()
            warm_up(runner, config, longest, vocab_size, self._progress, adapter)
            activations = max(0, meter.peak() - allocated - requests)
            if buckets:  # graphs have separate memory, as much as their largest step takes
                meter.start_peak()
                rows = min(max(buckets), config.max_num_batched_tokens)
                run_step(runner, widest_step(rows, longest), longest, vocab_size)
                for tokens in self._chunk_buckets()[-1:]:
                    run_step(runner, [Share(min(tokens, longest), longest)], longest, vocab_size)
                graphs = GRAPHS_BYTES + max(0, meter.peak() - allocated - requests)
            del runner
        if adapters is not None and adapter is not None:
            adapters.unload(adapter)
        self._progress(f"Kernels compiled and run in {time.monotonic() - started_s:.1f} s")
        use = GpuUse(allocated, activations, requests, graphs, CONTEXT_BYTES, *meter.device())
        if is_measured and (shortage := use.shortage(utilization)):
            self._progress(f"{shortage}: stop them, or lower gpu_memory_utilization")
        return use

    def _capture(self) -> int:
        """Capture the runner's CUDA graphs, if it has any; return their size in bytes."""
        if not self._graph_buckets:
            return 0
        started_s, meter = time.monotonic(), CudaMeter(self._device)
        before = meter.reserved()
        self.runner.capture_graphs(self._progress)
        taken = meter.reserved() - before
        self._progress(f"Graphs captured in {time.monotonic() - started_s:.1f} s; they take {taken / 2**20:,.0f} MiB")
        if taken > self._graphs_set_aside:
            self._progress(
                f"That is more than the {self._graphs_set_aside / 2**20:,.0f} MiB set aside for them: where memory runs short, "
                "lower gpu_memory_utilization or max_num_seqs"
            )
        return taken

    def _open_runner(
        self,
        kv: torch.Tensor,
        max_model_len: int,
        transfers: RankTransfers | None = None,
        rebalancer: Rebalancer | None = None,
        buckets: Sequence[int] = (),
    ) -> ModelRunner:
        """Open a runner over the blocks `kv` with its own slots and sampler; `buckets`: graphs to capture later."""
        model, config, device, sampler = self._loaded.model, self._config, self._device, None
        ops = select_sampling_ops(device)
        if self._group.is_first:
            sampler = Sampler(self._loaded.spec.vocab_size, config.max_num_seqs, device, ops)
        inputs = open_inputs(config, max_model_len, device, self._layout)
        pages = layer_pages(kv, self._layout)
        graphs, adapters = None, self._loaded.adapters
        if buckets:
            assert ops is not None and isinstance(inputs, DeviceInputs)
            tokens = self._chunk_buckets()
            graphs = StepGraphs(inputs, model, pages, ops, buckets, tokens, CudaGraphs, self._group, adapters)
        return ModelRunner(model, pages, sampler, inputs, device, self._group, transfers, rebalancer, graphs, adapters)

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        model, size, dtype = self._loaded.model, self._config.block_size, self._loaded.kv_dtype
        return allocate_kv(num_blocks, self._layout.depth, model.kv_parts, size, model.kv_width, dtype, self._device)

    def _make_copier(self, arena: np.ndarray) -> Copier:
        return CudaCopier(self._copied(), arena) if self.kv.is_cuda else NumpyCopier(self._copied(), arena)

    def _make_rebalancer(self) -> Rebalancer | None:
        if not self._config.enable_eplb:
            return None
        loaded, group = self._loaded, self._group
        if loaded.placement is None:
            raise ExecutorError("enable_eplb requires enable_expert_parallel and several ranks")
        links = group.twin("experts on the move")
        return Rebalancer(self._config.eplb_config, loaded.placement, loaded.model.experts, group, links)


def _is_gpu(device: torch.device) -> bool:
    return device.type != "cpu"


def with_step_size(config: ExecutorConfig, device: torch.device) -> ExecutorConfig:
    """Return the configuration with the device's default of `max_num_batched_tokens` if it has none."""
    if config.max_num_batched_tokens:
        return config
    default = STEP_TOKENS_ON_GPU if _is_gpu(device) else STEP_TOKENS
    return msgspec.structs.replace(config, max_num_batched_tokens=max(default, config.max_num_seqs))


def open_inputs(
    config: ExecutorConfig, max_model_len: int, device: torch.device, cache_layout: CacheLayout = ONE_GROUP
) -> Inputs:
    sizes, ops = (config.max_num_seqs, max_model_len, config.block_size), select_input_ops(device)
    if ops is None:
        return HostInputs(*sizes, cache_layout)
    return DeviceInputs(*sizes, config.max_num_batched_tokens, ops, device, cache_layout=cache_layout)


def choose_device(asked: str, index: int = 0) -> torch.device:
    """Return the CPU, or the GPU with this index among those visible to the process."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ExecutorError("device: 'cuda' given; torch sees no GPU")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise ExecutorError(
            f"tensor_parallel_size: rank {index} needs a GPU of its own; this machine has {torch.cuda.device_count()}"
        )
    return torch.device("cuda", index)
