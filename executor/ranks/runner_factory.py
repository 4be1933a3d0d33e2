"""Opens the runners of one rank and captures their CUDA graphs: for the warm-up, for requests, and after each change
of the weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.executor.cache_layout import CacheLayout
from penstock.executor.kernels.select import select_input_ops, select_sampling_ops
from penstock.executor.models.load import LoadedModel
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks.rank_settings import RankSettings
from penstock.executor.sampling.sampler import Sampler
from penstock.executor.step.drafting import DraftModel
from penstock.executor.step.graphs import CHUNK_BUCKETS, MOST_ABSORBED, CudaGraphs, StepGraphs, choose_buckets
from penstock.executor.step.inputs import ONE_GROUP, DeviceInputs, HostInputs, Inputs
from penstock.executor.step.memory import allocate_kv, layer_pages
from penstock.executor.step.rebalance import Rebalancer
from penstock.executor.step.runner import ModelRunner
from penstock.executor.tiers.transfers import RankTransfers


@dataclass(frozen=True)
class RunnerFactory:
    """Allocates KV blocks for models of one cache layout, opens runners over them, and captures their graphs. Holds
    neither weights nor blocks, so that both are freed when the rank drops them."""

    settings: RankSettings
    layout: CacheLayout
    # Only the runner that serves requests has these parts; the runner of the warm-up has none of them.
    transfers: RankTransfers | None = None
    rebalancer: Rebalancer | None = None
    graph_rows: Sequence[int] = ()  # the numbers of rows to capture graphs for
    graph_bytes: int = 0  # the memory set aside for the graphs

    def allocate(self, loaded: LoadedModel, num_blocks: int) -> torch.Tensor:
        needs, size, device = loaded.model.cache, self.settings.config.block_size, self.settings.device
        depth = self.layout.depth
        return allocate_kv(num_blocks, depth, needs.kv_parts, size, needs.kv_width, loaded.kv_dtype, device)

    def choose_graph_rows(self, loaded: LoadedModel) -> tuple[int, ...]:
        """Return the numbers of rows to capture graphs for; none if an operation synchronizes with the device, which
        cannot be captured."""
        config = self.settings.config
        if config.enforce_eager or select_sampling_ops(self.settings.device) is None:
            return ()
        if not all(experts.is_fused for experts in loaded.model.experts):
            return ()
        return choose_buckets(config.max_num_seqs)

    def graph_tokens(self, loaded: LoadedModel) -> tuple[int, ...]:
        """Return the numbers of tokens to capture prefill steps for; none with batch_invariant, or with
        enable_eplb, which would count padding as load. Graphs never expand latents."""
        config = self.settings.config
        if config.batch_invariant or config.enable_eplb:
            return ()
        most = MOST_ABSORBED if loaded.model.cache.kv_parts == 1 else config.max_num_batched_tokens
        return tuple(tokens for tokens in CHUNK_BUCKETS if tokens <= min(most, config.max_num_batched_tokens))

    def open(self, loaded: LoadedModel, kv: torch.Tensor, max_model_len: int) -> ModelRunner:
        """Open a runner over the blocks `kv` with its own slots and sampler; `capture` then captures its graphs."""
        config, group, device = self.settings.config, self.settings.group, self.settings.device
        model, adapters, ops = loaded.model, loaded.adapters, select_sampling_ops(device)
        sampler = Sampler(loaded.spec.vocab_size, config.max_num_seqs, device, ops) if group.is_first else None
        inputs = open_inputs(config, max_model_len, device, self.layout)
        pages, graphs = layer_pages(kv, self.layout), None
        drafts = DraftModel(model, pages, config, group) if config.draft_tokens else None
        if rows := self.graph_rows:
            assert ops is not None and isinstance(inputs, DeviceInputs)
            tokens = self.graph_tokens(loaded)
            graphs = StepGraphs(inputs, model, pages, ops, rows, tokens, CudaGraphs, group, adapters, drafts)
        transfers, rebalancer = self.transfers, self.rebalancer
        return ModelRunner(
            model, pages, sampler, inputs, device, group, transfers, rebalancer, graphs, adapters, drafts
        )

    def capture(self, runner: ModelRunner) -> int:
        """Capture the runner's CUDA graphs, if it has any; return their size in bytes."""
        if runner.graphs is None:
            return 0
        started_s, meter, progress = time.monotonic(), self.settings.meter, self.settings.progress
        assert meter is not None
        before = meter.reserved()
        runner.graphs.capture(progress)
        num_bytes = meter.reserved() - before
        progress(f"Graphs captured in {time.monotonic() - started_s:.1f} s; they take {num_bytes / 2**20:,.0f} MiB")
        if num_bytes > self.graph_bytes:
            progress(
                f"That is more than the {self.graph_bytes / 2**20:,.0f} MiB set aside for them: where memory runs short, "
                "lower gpu_memory_utilization or max_num_seqs"
            )
        return num_bytes


def open_inputs(
    config: ExecutorConfig, max_model_len: int, device: torch.device, cache_layout: CacheLayout = ONE_GROUP
) -> Inputs:
    sizes, ops = (config.max_num_seqs, max_model_len, config.block_size), select_input_ops(device)
    if ops is None:
        return HostInputs(*sizes, cache_layout)
    most, drafts = config.max_num_batched_tokens, config.draft_tokens
    return DeviceInputs(*sizes, most, ops, device, cache_layout=cache_layout, draft_tokens=drafts)
