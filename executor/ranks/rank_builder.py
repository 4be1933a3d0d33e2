"""Builds a rank: loads its part of the model, warms up, plans the memory, opens the tiers and captures the graphs."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from penstock.executor.cache_layout import plan_pages
from penstock.executor.kernels.select import select_input_ops
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.machine import usable_cores
from penstock.executor.models.load import LoadedModel, load_model
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError, ModelInfo
from penstock.executor.ranks.rank import Rank, block_bytes_of
from penstock.executor.ranks.rank_settings import RankSettings
from penstock.executor.ranks.runner_factory import RunnerFactory
from penstock.executor.step import memory
from penstock.executor.step.rebalance import Rebalancer
from penstock.executor.step.runner import ModelRunner
from penstock.executor.step.warmup import KV_BLOCKS, Share, run_step, warm_up, widest_step
from penstock.executor.tiers.cuda_copies import CudaCopier
from penstock.executor.tiers.open_tiers import RankTiers, open_tiers
from penstock.executor.tiers.transfers import Copier, NumpyCopier


def build_rank(config: ExecutorConfig, group: RankGroup, device: torch.device, progress: Callable[[str], None]) -> Rank:
    """Load the model and return a rank that is ready for steps; raise ExecutorError if the memory does not suffice."""
    started_s = time.monotonic()
    settings = RankSettings(config, group, device, progress).with_step_size()
    config = settings.config
    if device.type == "cpu":
        # The kernels use as many threads as torch, which ignores the CPU quota of a control group.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    memory.check_kv_bytes(config.kv_cache_bytes, settings.meter)
    with memory.naming_options("the weights", "choose a smaller model or dtype, or raise tensor_parallel_size"):
        checkpoint = open_checkpoint(config.model, config)
        loaded = load_model(config, device, group, progress, checkpoint)
    rank = RankBuilder(settings, loaded).build()
    progress(f"Loaded in {time.monotonic() - started_s:.1f} s")
    return rank


class RankBuilder:
    """Divides the memory beside the loaded weights: a warm-up on a GPU measures what steps take, KV blocks get the
    rest. The tiers, the runner and its graphs follow, because they need the blocks."""

    def __init__(self, settings: RankSettings, loaded: LoadedModel) -> None:
        self._settings, self._loaded = settings, loaded
        sizes = loaded.num_positions, settings.config.block_size, loaded.kv_dtype.itemsize
        self._layout, self._block_bytes = plan_pages(loaded.model.cache, *sizes)
        self._runners = RunnerFactory(settings, self._layout)

    def build(self) -> Rank:
        settings, loaded, meter = self._settings, self._loaded, self._settings.meter
        graph_rows = self._runners.choose_graph_rows(loaded)
        gpu_use = None if meter is None else self._warm_up(graph_rows, meter)
        kv_plan = self._plan_kv(gpu_use)
        kv = self._runners.allocate(loaded, kv_plan.num_blocks)
        content = self._fingerprint_pages()
        tiers = open_tiers(settings.config, self._block_bytes, content, partial(_open_copier, kv), settings.group.rank)
        try:
            runners = replace(
                self._runners,
                transfers=tiers.transfers,
                rebalancer=self._open_rebalancer(),
                graph_rows=graph_rows,
                graph_bytes=0 if gpu_use is None else gpu_use.graphs,
            )
            runner = runners.open(loaded, kv, kv_plan.max_model_len)
            graph_bytes = runners.capture(runner)
        except BaseException:
            tiers.close()
            raise
        info = self._describe(kv_plan, tiers, gpu_use, graph_bytes)
        return Rank(settings, info, loaded, kv, tiers, runners, runner)

    def _plan_kv(self, gpu_use: memory.GpuUse | None) -> memory.KvPlan:
        settings, longest, groups = self._settings, self._loaded.num_positions, self._layout.groups
        return memory.plan_kv(settings.config, self._block_bytes, longest, settings.group, gpu_use, groups)

    def _fingerprint_pages(self) -> bytes:
        """Return the fingerprint of what a page holds: the weights and, with several groups, the layout of the layers."""
        weights = self._loaded.fingerprint
        if len(self._layout.groups) == 1:
            return weights
        return hashlib.sha256(weights + repr(self._layout).encode()).digest()

    def _open_rebalancer(self) -> Rebalancer | None:
        config, group, loaded = self._settings.config, self._settings.group, self._loaded
        if not config.enable_eplb:
            return None
        if loaded.placement is None:
            raise ExecutorError("enable_eplb requires enable_expert_parallel and several ranks")
        links = group.twin("experts on the move")
        return Rebalancer(config.eplb_config, loaded.placement, loaded.model.experts, group, links)

    def _warm_up(self, graph_rows: Sequence[int], meter: memory.CudaMeter) -> memory.GpuUse:
        """Compile and run everything that steps need, before the cache exists, and measure the memory they take, on a
        runner that equals the real one except for its cache of two blocks.

        The longest request is taken to be what fits if only the weights took memory: the tables of all slots are that
        wide, and the context limit of some models is many times what the memory holds."""
        config, progress, loaded = self._settings.config, self._settings.progress, self._loaded
        started_s, allocated, graphs = time.monotonic(), meter.allocated(), 0

        def measure(activations: int = 0, requests: int = 0, graphs: int = 0) -> memory.GpuUse:
            return memory.GpuUse(allocated, activations, requests, graphs, memory.CONTEXT_BYTES, *meter.device())

        is_measured, utilization = config.kv_cache_bytes is None, config.gpu_memory_utilization
        before = memory.wait_for_release(measure, utilization, progress) if is_measured else measure()
        longest = self._plan_kv(before).max_model_len
        progress("Warming up: compiling kernels that this machine has not compiled before")
        adapter = None if loaded.adapters is None else loaded.adapters.load_zeros()
        purpose = f"a step of {config.max_num_batched_tokens} tokens"
        with memory.naming_options(purpose, "lower max_num_batched_tokens or max_num_seqs"):
            runner = self._runners.open(loaded, self._runners.allocate(loaded, KV_BLOCKS), longest)
            runner.allocate_counts()  # of tokens; the real runner does so for the first request with penalties
            requests = meter.allocated() - allocated
            meter.start_peak()
            warm_up(runner, config, longest, loaded.spec.vocab_size, progress, adapter)
            activations = max(0, meter.peak() - allocated - requests)
            if graph_rows:  # graphs have separate memory, as much as their largest step takes
                meter.start_peak()
                self._run_largest_graph_steps(runner, max(graph_rows), longest)
                graphs = memory.GRAPHS_BYTES + max(0, meter.peak() - allocated - requests)
            del runner
        if loaded.adapters is not None and adapter is not None:
            loaded.adapters.unload(adapter)
        progress(f"Kernels compiled and run in {time.monotonic() - started_s:.1f} s")
        gpu_use = measure(activations, requests, graphs)
        if is_measured and (shortage := gpu_use.shortage(utilization)):
            progress(f"{shortage}: stop them, or lower gpu_memory_utilization")
        return gpu_use

    def _run_largest_graph_steps(self, runner: ModelRunner, max_rows: int, longest: int) -> None:
        config, vocab_size = self._settings.config, self._loaded.spec.vocab_size
        rows = min(max_rows, config.max_num_batched_tokens)
        run_step(runner, widest_step(rows, longest), longest, vocab_size)
        for tokens in self._runners.graph_tokens(self._loaded)[-1:]:
            run_step(runner, [Share(min(tokens, longest), longest)], longest, vocab_size)

    def _describe(
        self, kv_plan: memory.KvPlan, tiers: RankTiers, gpu_use: memory.GpuUse | None, graph_bytes: int
    ) -> ModelInfo:
        config, device, loaded = self._settings.config, self._settings.device, self._loaded
        return ModelInfo(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=device.type,
            vocab_size=loaded.spec.vocab_size,
            hidden_size=loaded.spec.hidden_size,
            max_model_len=kv_plan.max_model_len,
            context_limit=kv_plan.context_limit,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=kv_plan.num_blocks,
            block_bytes=self._block_bytes,
            fingerprint=loaded.fingerprint,
            max_in_flight=1 if device.type == "cpu" and self._settings.group.world == 1 else 2,
            memory={
                **loaded.memory,
                "KV cache": kv_plan.num_blocks * self._block_bytes,
                **({} if gpu_use is None else gpu_use.table(sum(loaded.memory.values()), graph_bytes)),
                **tiers.memory,
            },
            storage=loaded.storage,
            num_host_blocks=tiers.num_host_blocks,
            stores=tiers.stores,
            serves_peers=tiers.serves_peers,
            groups=self._layout.groups,
            max_loras=config.max_loras if config.enable_lora else 0,
        )


def _open_copier(kv: torch.Tensor, arena: np.ndarray) -> Copier:
    ops, blocks = select_input_ops(kv.device), block_bytes_of(kv)
    return NumpyCopier(blocks, arena) if ops is None else CudaCopier(blocks, arena, ops)
